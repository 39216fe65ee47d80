"""How a parameter is read as matrices: zero-copy, the same for the parameter, its gradient and its momentum.

Muon orthogonalizes matrices, while models store fused, stacked, transposed and convolutional weights. A `MatrixView`
names the steps from the stored tensor t to its matrices, in this order, none of which copies:

    1. permute   t.permute(order)                      columns of a channels_last convolution in memory order
    2. view      .view(matrix_shape)                   (out, in, k, k) -> (out, in k k), or (g, out/g, in/g k k)
    3. split     .split(split, split_dim)              fused Q, K, V; gate and up
    4. transpose .mT of every part                     weights stored (in, out)
    5. heads     rows cut into (num_heads, head_dim)   one matrix per head

The result is a tuple with one (..., m, n) view per part; the dimensions before m and n count independent matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from math import prod
from operator import index
from typing import Any

import torch
from torch import Tensor

__all__ = ["MatrixView"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MatrixView:
    """The matrices inside tensors of one shape; without options, those of the tensor's last two dimensions.

    Args:
        shape: the stored tensor's shape.
        order: a permutation of the stored dimensions, applied first; ``()`` keeps them.
        matrix_shape: the shape viewed after that; ``()`` keeps it.
        split: sizes of the parts along ``split_dim``; ``()`` for one part.
        split_dim: -2 (rows) or -1 (columns) of the stored matrix, before any transposition.
        transposed: whether the matrices are stored as (in, out) and meant as (out, in).
        num_heads: the number of heads into which each part's rows are cut; ``()`` leaves parts whole.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...] = ()
    matrix_shape: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    split_dim: int = -2
    transposed: bool = False
    num_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("shape", "order", "matrix_shape", "split", "num_heads"):
            object.__setattr__(self, name, _ints(name, getattr(self, name)))
        if self.order and sorted(self.order) != list(range(len(self.shape))):
            raise ValueError(f"order={self.order} is no permutation of the dimensions of {self.shape}")
        stored = self.stored_matrix
        if prod(stored) != prod(self.shape):
            raise ValueError(f"shape {self.shape} does not hold the elements of matrix_shape={self.matrix_shape}")
        if len(stored) < 2:
            raise ValueError(f"a matrix view needs at least two dimensions, got {stored}")
        if self.split_dim not in (-2, -1):
            raise ValueError(f"split_dim must be -2 (rows) or -1 (columns), got {self.split_dim}")
        if self.split and (min(self.split) < 1 or sum(self.split) != stored[self.split_dim]):
            raise ValueError(
                f"split={self.split} has to be positive sizes that add up to {stored[self.split_dim]}, "
                f"dimension {self.split_dim} of {stored}"
            )
        if not self.split:
            # without parts split_dim means nothing; with one fixed value, views that do the same compare equal
            object.__setattr__(self, "split_dim", -2)
        if self.num_heads:
            self._check_heads()

    @classmethod
    def identity(cls, shape: Sequence[int]) -> MatrixView:
        """The view of a tensor that is a matrix, or a batch of matrices, as it is stored."""
        return _identity(_ints("shape", shape))

    @property
    def is_identity(self) -> bool:
        """Whether ``views(t)`` is ``(t,)``: nothing is permuted, reshaped, split or transposed."""
        return self == MatrixView(shape=self.shape)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape (..., m, n) of each view, in order."""
        shapes: list[tuple[int, ...]] = []
        for part in self._parts:
            rows = part[-2]
            heads = self.num_heads[len(shapes)] if self.num_heads else 0
            shapes.append((*part[:-2], heads, rows // heads, part[-1]) if heads else part)
        return tuple(shapes)

    @property
    def num_matrices(self) -> int:
        """How many matrices are orthogonalized, over all views."""
        return sum(prod(shape[:-2]) for shape in self.shapes)

    def views(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The (..., m, n) views of ``tensor`` (parameter, gradient or momentum); writing to them writes to it.

        Raises:
            TypeError: for what is no tensor, such as the gradient of a parameter that has none.
            ValueError: if the tensor has another shape, or strides that allow no view.
        """
        if not isinstance(tensor, Tensor):
            raise TypeError(f"this view is of tensors of shape {self.shape}, got a {type(tensor).__name__}")
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"this view is of tensors of shape {self.shape}, got {tuple(tensor.shape)}")
        if self.order:
            tensor = tensor.permute(self.order)
        if self.matrix_shape:
            try:
                tensor = tensor.view(self.matrix_shape)
            except RuntimeError as error:
                raise ValueError(
                    f"a tensor of shape {self.shape} with strides {tuple(tensor.stride())} cannot be viewed as "
                    f"{self.matrix_shape} without a copy; give it the memory format that the parameter had when "
                    "it was routed"
                ) from error
        parts = tensor.split(self.split, self.split_dim) if self.split else (tensor,)
        if self.transposed:
            parts = tuple(part.mT for part in parts)
        if self.num_heads:
            parts = tuple(part.unflatten(-2, (heads, -1)) for part, heads in zip(parts, self.num_heads, strict=True))
        return tuple(parts)

    def __repr__(self) -> str:
        return f"MatrixView({', '.join(f'{name}={value!r}' for name, value in self.to_plain().items())})"

    def describe(self) -> str:
        """The matrices as ``count × m×n``, equal sizes added up: ``1 × 4096×4096 + 2 × 1024×4096``."""
        counts: Counter[tuple[int, ...]] = Counter()
        for shape in self.shapes:
            counts[shape[-2:]] += prod(shape[:-2])
        return " + ".join(f"{count} × {m}×{n}" for (m, n), count in counts.items())

    def to_plain(self) -> dict[str, Any]:
        """The arguments that differ from their defaults, as builtins: the dict loads with ``weights_only=True``."""
        values = {field.name: (getattr(self, field.name), field.default) for field in fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> MatrixView:
        """The view that ``to_plain`` described; lists in place of tuples are accepted (JSON)."""
        try:
            return cls(**plain)
        except TypeError as error:
            raise ValueError(f"not the plain form of a MatrixView: {plain!r}") from error

    @property
    def stored_matrix(self) -> tuple[int, ...]:
        """The (..., m, n) shape as stored: before split, transpose and heads."""
        return self.matrix_shape or tuple(self.shape[dim] for dim in self.order) or self.shape

    @property
    def _parts(self) -> list[tuple[int, ...]]:
        """The shape of each part after split and transpose."""
        *batch, rows, columns = self.stored_matrix
        cut_rows = self.split_dim == -2
        sizes = [(size, columns) if cut_rows else (rows, size) for size in self.split] or [(rows, columns)]
        return [(*batch, n, m) if self.transposed else (*batch, m, n) for m, n in sizes]

    def _check_heads(self) -> None:
        parts = self._parts
        if len(self.num_heads) != len(parts):
            raise ValueError(f"num_heads={self.num_heads} must name the heads of each of the {len(parts)} parts")
        for heads, part in zip(self.num_heads, parts, strict=True):
            if heads < 1 or part[-2] % heads:
                raise ValueError(f"the {part[-2]} rows of a part of shape {part} do not divide into {heads} heads")


# param groups hold views, and so does an optimizer's state_dict, which has to load with `weights_only=True`
torch.serialization.add_safe_globals([MatrixView])


def _ints(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """``values`` as ints of Python's own; what is no sequence of integers is refused by name."""
    try:
        return tuple([index(value) for value in values])
    except TypeError:
        raise TypeError(f"{name} of a MatrixView must hold integers, got {values!r}") from None


@lru_cache(maxsize=1024)
def _identity(shape: tuple[int, ...]) -> MatrixView:
    return MatrixView(shape=shape)
