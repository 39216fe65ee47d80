"""What type checkers see of the public functions: checked by the session ``typecheck``, not run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_type

import torch
from torch import Tensor, nn

from optim_utils import (
    MOMENT8,
    AbstractDataclass,
    LowBitTensor,
    get_all_non_abstract_subclasses,
    quantize,
    route_parameters,
)
from optim_utils.testing import run_ranks


def sums(rank: int, world: int) -> float:
    return rank / world


def ranks() -> None:
    assert_type(run_ranks(sums, 2), list[float])


def low_bit(x: Tensor) -> None:
    codes = quantize(x, MOMENT8)
    assert_type(codes, LowBitTensor)
    assert_type(codes.dequantize(), Tensor)
    assert_type(codes.dequantize(torch.bfloat16), Tensor)


def routes(model: nn.Module) -> None:
    for route in route_parameters(model):
        assert_type(route.name, str)


@dataclass(init=False)
class Abstract(AbstractDataclass):
    pass


@dataclass
class Concrete(Abstract):
    lr: float = 1.0


def subclasses() -> None:
    assert_type(get_all_non_abstract_subclasses(Abstract), list[type[Abstract]])
    assert_type(get_all_non_abstract_subclasses(Concrete)[0](lr=2.0), Concrete)
