"""The tensors that a caller gives for results: checked before anything is written to them."""

from __future__ import annotations

import torch
from torch import Tensor

from optim_kernels._memory import has_overlaps
from optim_kernels._options import check_layout


def checked_out(out: object, result: Tensor, *, of: str) -> Tensor:
    """``out``, if it can take ``result``.

    Args:
        of: what has a result, as errors name it.

    Raises:
        TypeError: for anything but a tensor.
        ValueError: for another layout or shape, a dtype without fractions, memory that several elements share, or none.
        RuntimeError: for a parameter, unless autograd is off.
    """
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor for each {of}, got {type(out).__name__}")
    check_layout("out", out)
    if out.is_meta and not result.is_meta:
        raise ValueError(f"out is on meta, and would have no values; give one on {result.device}")
    if out.requires_grad and out.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(
            "out is a leaf that requires a gradient, which cannot be written to; give its detach(), or call this "
            "within torch.no_grad()"
        )
    if out.shape != result.shape:
        raise ValueError(f"out has shape {tuple(out.shape)} for {of} of shape {tuple(result.shape)}")
    if not out.is_floating_point():
        raise ValueError(f"out must be of a floating dtype, got {out.dtype}")
    if has_overlaps(out):
        raise ValueError(f"out has several elements at one place, strides {out.stride()} for shape {tuple(out.shape)}")
    return out
