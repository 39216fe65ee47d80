"""Symmetric matrices stored as their upper triangle: n(n+1)/2 numbers instead of n²."""

import math

import torch
from torch import Tensor


def pack_upper_triangular(m: Tensor, *, check: bool = False) -> Tensor:
    """The upper triangles of the matrices ``m``, row by row.

        m [..., n, n] -> [..., n(n+1)/2]

    Args:
        m: symmetric matrices of any dtype; what is below the diagonal is not read.
        check: refuse matrices that are not symmetric to the bit (of NaNs and signs of zeros, too), for which the packed
            form would lose the lower half.
    """
    _check_tensor(m, "pack_upper_triangular")
    if m.ndim < 2 or m.shape[-1] != m.shape[-2]:
        raise ValueError(f"pack_upper_triangular takes square matrices, got shape {tuple(m.shape)}")
    if check and m.is_meta:
        raise ValueError(f"check=True compares numbers, and a meta tensor of shape {tuple(m.shape)} has none")
    if check and not _is_symmetric(m):
        raise ValueError(f"a matrix of shape {tuple(m.shape)} is not symmetric: packing would lose its lower triangle")
    rows, columns = torch.triu_indices(m.shape[-1], m.shape[-1], device=m.device)
    return _in_dtype(_indexable(m)[..., rows, columns], m.dtype)


def unpack_upper_triangular(p: Tensor) -> Tensor:
    """The symmetric matrices whose upper triangles are ``p``, the inverse of `pack_upper_triangular`.

    p [..., n(n+1)/2] -> [..., n, n]
    """
    _check_tensor(p, "unpack_upper_triangular")
    length = p.shape[-1] if p.ndim else -1
    n = (math.isqrt(8 * length + 1) - 1) // 2 if length >= 0 else -1
    if n * (n + 1) // 2 != length or length < 0:
        raise ValueError(f"the last dimension must be n(n+1)/2 for some n, got shape {tuple(p.shape)}")
    # element (i, j) above the diagonal is number i·n - i(i-1)/2 + (j-i); below it is that of (j, i)
    line = torch.arange(n, device=p.device)
    i, j = torch.minimum(line[:, None], line), torch.maximum(line[:, None], line)
    return _in_dtype(_indexable(p)[..., i * n - i * (i - 1) // 2 + (j - i)], p.dtype)


def _check_tensor(t: object, function: str) -> None:
    if not isinstance(t, Tensor) or t.layout != torch.strided:
        kind = t.layout if isinstance(t, Tensor) else type(t).__name__
        raise TypeError(f"{function} takes a dense tensor, got a {kind}")


def _indexable(t: Tensor) -> Tensor:
    """The same bits in a dtype that can be indexed by tensors.

    On the CPU torch 2.9 lacks that for wide unsigned integers and 8-bit floats: drop with torch>=2.10.
    """
    signed = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
    return _in_dtype(t, signed.get(t.dtype, torch.uint8 if t.dtype.itemsize == 1 else t.dtype))


def _in_dtype(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bits in a dtype of the same size; in its own dtype the tensor itself, with its gradients."""
    return t if t.dtype == dtype else t.view(dtype)


def _is_symmetric(m: Tensor) -> bool:
    """Whether each matrix ``[..., n, n]`` has the same bits as its transpose."""
    m = m.detach().resolve_conj().resolve_neg()
    if m.is_complex():
        return all(_is_symmetric(part) for part in torch.view_as_real(m).unbind(-1))
    bits = m.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[m.dtype.itemsize])
    return torch.equal(bits, bits.mT)
