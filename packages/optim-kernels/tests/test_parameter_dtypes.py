"""Parameters in dtypes that are not computed in: frozen ones are left alone, others refused before anything moves."""

from typing import Any

import pytest
import torch
from torch import nn

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW

FP8 = torch.float8_e4m3fn


def beside(cls: type[torch.optim.Optimizer], *named: tuple[str, nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of a matrix, by Muon where it has that, and of the given ones."""
    torch.manual_seed(0)
    matrix = nn.Parameter(torch.randn(4, 6))
    matrix.grad = torch.randn(4, 6)
    if cls is TritonMuonAdamW:
        groups: list[Any] = [{"kind": "muon", "params": [("matrix", matrix)]}, {"kind": "adamw", "params": [*named]}]
        return TritonMuonAdamW(groups)
    return cls([("matrix", matrix), *named])


CLASSES = pytest.mark.parametrize("cls", [TritonAdamW, TritonMuon, TritonMuonAdamW])


@CLASSES
@pytest.mark.parametrize("dtype", [torch.uint8, FP8], ids=str)
def test_frozen_quantised_weights_are_left_alone(cls: Any, dtype: torch.dtype) -> None:
    """torch's optimizers take them too: all parameters of a model with adapters."""
    quantised = nn.Parameter(torch.ones(8, 1).to(dtype), requires_grad=False)
    optimizer = beside(cls, ("quantised", quantised))
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert torch.equal(quantised.float(), torch.ones(8, 1))
    assert len(optimizer.state) == 1
    assert "quantised" in optimizer.explain()


@CLASSES
def test_one_that_is_unfrozen_is_refused_before_anything_moves(cls: Any) -> None:
    eighths = nn.Parameter(torch.ones(4, 6).to(FP8), requires_grad=False)
    optimizer = beside(cls, ("eighths", eighths))
    matrix = optimizer.param_groups[0]["params"][0]
    optimizer.step()
    before = matrix.detach().clone(), {key: torch.clone(value) for key, value in optimizer.state[matrix].items()}
    eighths.requires_grad_(True).grad = torch.ones(4, 6).to(FP8)
    with pytest.raises(ValueError, match=r"eighths is torch\.float8_e4m3fn; freeze it"):
        optimizer.step()
    assert torch.equal(matrix, before[0])
    for key, value in before[1].items():
        assert torch.equal(optimizer.state[matrix][key], value)


@pytest.mark.parametrize("cls", [TritonMuon, TritonMuonAdamW])
def test_what_is_to_be_trained_is_refused_at_construction(cls: Any) -> None:
    with pytest.raises(ValueError, match=r"eighths is torch\.float8_e4m3fn; freeze it"):
        beside(cls, ("eighths", nn.Parameter(torch.ones(4, 6).to(FP8))))
