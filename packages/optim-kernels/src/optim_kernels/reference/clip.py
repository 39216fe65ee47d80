"""Norms of gradients and the clipping factor in plain torch, accumulated in fp64: what the kernels compute.

norm_p  = (Σ |g|^p)^(1/p)        over all elements of all tensors; inf: the largest |g|
factor  = min(1, max_norm / (norm + 1e-6))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optim_kernels._options import without_dims


def sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Σ g² over all tensors, as a 0-d fp64 tensor on the first one's device."""
    device = tensors[0].device if tensors else None
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total = total + _magnitude(tensor).square().sum().to(total.device)
    return total


def total_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of the tensors' norms: 0-d fp32, or fp64 if any tensor is.

    Unless p is 0 it is the norm of all elements as one vector.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float32)
    if norm_type == 2:
        norm = sum_of_squares(tensors).sqrt()
    else:
        # an empty tensor has no largest element, nor a smallest; it adds nothing to any norm
        filled = [tensor for tensor in tensors if tensor.numel()] or [tensors[0].new_zeros(())]
        norms = [torch.linalg.vector_norm(_magnitude(tensor).to_dense(), norm_type) for tensor in filled]
        norm = torch.linalg.vector_norm(torch.stack([n.to(tensors[0].device) for n in norms]), norm_type)
    return norm.to(result_dtype(tensors))


def clip_factor(total_norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (total_norm + 1e-6))``; a NaN norm gives NaN, as torch's clipping does."""
    return torch.clamp(without_dims(max_norm) / (total_norm + 1e-6), max=1.0)


def result_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """fp64 if any tensor is fp64 or complex128, else fp32."""
    wide = any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)
    return torch.float64 if wide else torch.float32


def _magnitude(tensor: Tensor) -> Tensor:
    values = tensor.detach()
    return (values.abs() if values.is_complex() else values).to(torch.float64)
