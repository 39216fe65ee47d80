"""Random tensors and parameters for tests, where the tests run, and other ways to lay tensors out in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor, nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# of numbers that are not finite, in Triton's interpreter
NUMPY_MAY_WARN = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


def random(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32).to(DEVICE, dtype)


def random_parameters(
    *shapes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0, scale: float = 1.0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter((scale * torch.randn(s, generator=generator)).to(DEVICE, dtype)) for s in map(tuple, shapes)]


def give_gradients(*params: Tensor, seed: int = 0, scale: float = 1.0) -> None:
    """New gradients, in the parameters' dtypes."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p)


def assert_same_bits(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def relative_error(x: Tensor, expected: Tensor) -> float:
    return float((x.double() - expected).norm() / expected.norm())


def laid_out(tensor: Tensor, how: str) -> Tensor:
    """The same numbers, otherwise in memory; "expanded": the first line's, for all."""
    if how == "transposed" and tensor.ndim == 2:
        return tensor.t().contiguous().t()
    if how == "transposed" and tensor.ndim == 4:
        return tensor.to(memory_format=torch.channels_last)
    if how == "gaps" and tensor.ndim > 0:
        return torch.stack((tensor, tensor), -1)[..., 0]
    if how == "expanded" and tensor.ndim > 0 and tensor.shape[0]:
        return tensor[:1].expand(tensor.shape)
    return tensor
