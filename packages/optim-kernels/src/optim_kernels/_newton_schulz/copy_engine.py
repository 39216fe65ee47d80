"""Which matrices the bulk copy engine can read, and how others become readable."""

from __future__ import annotations

from math import prod

from torch import Tensor

from optim_kernels._newton_schulz.tiles import cdiv

# The copy engine needs addresses and strides that are multiples of this many bytes.
ALIGNMENT = 16


def empty_matrices(batch: int, rows: int, columns: int, *, like: Tensor) -> Tensor:
    """Uninitialised ``[batch, rows, columns]`` whose rows start at multiples of 16 bytes."""
    step = ALIGNMENT // like.element_size()
    return like.new_empty(batch, rows, cdiv(columns, step) * step)[..., :columns]


def is_readable(x: Tensor) -> bool:
    """Whether the copy engine can read ``x [batch, M, N]`` where it is."""
    step = ALIGNMENT // x.element_size()
    batch_stride, row_stride, column_stride = x.stride()
    # the stride of a dimension of size 1 means nothing, yet the copy engine checks it
    return (
        column_stride == 1
        and row_stride > 0
        and batch_stride > 0
        and row_stride % step == 0
        and batch_stride % step == 0
        and x.data_ptr() % ALIGNMENT == 0
        and not x.is_neg()
    )


def as_batch(x: Tensor) -> Tensor:
    """``x [..., M, N]`` as ``[batch, M, N]`` that the copy engine can read: a view where strides allow, else a copy."""
    if x.ndim == 2:
        flat = x[None]
    else:
        flat = x if x.ndim == 3 else x.reshape(prod(x.shape[:-2]), *x.shape[-2:])
    if is_readable(flat):
        return flat
    return empty_matrices(*flat.shape, like=x).copy_(flat)
