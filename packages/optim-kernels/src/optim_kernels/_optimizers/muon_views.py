"""How Muon parameters are read as matrices: by a view of their own, or by their group's ``nd`` and ``split_rows``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from optim_kernels._dtensors import is_wrapper
from optim_utils.param_groups import MatrixView


def view_of(param: Tensor, group: Mapping[str, Any], index: int, name: str) -> MatrixView:
    """How parameter ``index`` of the group is read as matrices."""
    view = group["views"][index] if group["views"] is not None else None
    if view is not None:
        if not isinstance(view, MatrixView):
            raise TypeError(f"the view of {name} must be a MatrixView or None, got {view!r}")
        if group["split_rows"] is not None:
            raise ValueError(f"{name} has both a view and split_rows={group['split_rows']}; the view can say it all")
        if tuple(view.shape) != tuple(param.shape):
            raise ValueError(f"the view of {name} is of shape {view.shape}, the parameter is {tuple(param.shape)}")
        return _checked_view(view, param, name)
    shape, nd = tuple(param.shape), group["nd"]
    if len(shape) < 2:
        raise ValueError(f"Muon takes matrices, got {name} of shape {shape}; give it to AdamW")
    if len(shape) > 3 and nd is None:
        raise ValueError(
            f"Muon only supports 2D parameters and batches of them, whereas {name} has size {shape}; choose "
            "nd='flatten' (out, the rest) or nd='batch' (the last two dimensions)"
        )
    least = {"flatten": 3, "convolution": 4}.get(nd or "", len(shape) + 1)
    matrix_shape = (shape[0], math.prod(shape[1:])) if len(shape) >= least else ()
    return _checked_view(_split_view(shape, matrix_shape, group["split_rows"], name), param, name)


def _checked_view(view: MatrixView, param: Tensor, name: str) -> MatrixView:
    """The view, if the parameter's strides allow it; all strides allow a view without ``matrix_shape``."""
    if view.matrix_shape and not is_wrapper(param):
        try:
            view.views(param.detach())
        except ValueError as error:
            raise ValueError(
                f"{name} cannot be read as matrices: {error}, or a view of its memory order, which "
                "optim_utils.param_groups.route_parameters makes"
            ) from error
    return view


def _split_view(shape: tuple[int, ...], matrix_shape: tuple[int, ...], split_rows: object, name: str) -> MatrixView:
    rows = (matrix_shape or shape)[-2]
    if split_rows is None:
        return _view(shape, matrix_shape)
    # arrays and tensors have no numbers of Python's, and without dimensions cannot be gone through
    blocks = tuple(split_rows) if isinstance(split_rows, Sequence) else (split_rows,)
    # True is an int: every row would be a matrix of its own
    if any(isinstance(block, bool) or not isinstance(block, int) for block in blocks):
        raise ValueError(
            f"split_rows must be None, a number of rows or a sequence of such, got {split_rows!r} for {name}"
        )
    if isinstance(split_rows, int):
        if split_rows < 1 or rows % split_rows:
            raise ValueError(f"the {rows} rows of {name} do not divide into blocks of split_rows={split_rows}")
        # without rows there are no blocks, but one empty matrix
        return _view(shape, matrix_shape, num_heads=(rows // split_rows,) if rows else ())
    if sum(blocks) != rows or min(blocks, default=1) < 1:
        raise ValueError(f"split_rows={blocks} must be positive numbers that add up to the {rows} rows of {name}")
    return _view(shape, matrix_shape, split=blocks)


@lru_cache(maxsize=1024)
def _view(
    shape: tuple[int, ...],
    matrix_shape: tuple[int, ...],
    *,
    split: tuple[int, ...] = (),
    num_heads: tuple[int, ...] = (),
) -> MatrixView:
    return MatrixView(shape=shape, matrix_shape=matrix_shape, split=split, num_heads=num_heads)
