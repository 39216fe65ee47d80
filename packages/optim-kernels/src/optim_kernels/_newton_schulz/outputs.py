"""The tensors that a caller gives for results: checked before anything is written to them."""

from __future__ import annotations

from torch import Tensor

from optim_kernels._memory import has_overlaps


def checked_out(out: object, result: Tensor, *, of: str) -> Tensor:
    """``out``, if it can take ``result``.

    Args:
        of: what has a result, as errors name it.

    Raises:
        TypeError: for anything but a tensor.
        ValueError: for another shape, a dtype without fractions, or memory that several elements share.
    """
    if not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor for each {of}, got {type(out).__name__}")
    if out.shape != result.shape:
        raise ValueError(f"out has shape {tuple(out.shape)} for {of} of shape {tuple(result.shape)}")
    if not out.is_floating_point():
        raise ValueError(f"out must be of a floating dtype, got {out.dtype}")
    if has_overlaps(out):
        raise ValueError(f"out has several elements at one place, strides {out.stride()} for shape {tuple(out.shape)}")
    return out
