"""What the contract's checks share: an optimizer under test, a small model, equality to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optim_utils._state.walk import rebuild
from optim_utils.optimizer_modules import OptimizerModule

__all__ = ["OptimizerCase", "Shapes", "TinyModel", "assert_same", "snapshot", "train", "with_tensors"]

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer that goes through the contract, and how it is built.

    Args:
        name: the optimizer's name in failures.
        make: ``make(params, **options)`` gives the optimizer: its class, or a function at the top of a module. The
            ``params`` are a list of tensors, of (name, tensor) pairs or of group dicts.
        options: keyword arguments of every ``make``; a check may add or replace ``lr`` and ``maximize``.
        shapes: parameter shapes that the optimizer takes; matrices only for Muon. At least two.
        group_options: what every group dict needs besides ``params``, such as ``kind``.
        device: where the parameters live.
        world_size: the number of gloo (on cuda: nccl) ranks it needs; None if it runs without a process group.
        skip: names of checks that do not apply, each with the reason.
    """

    name: str
    make: Callable[..., Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: Shapes = ((8, 6), (6,), (4, 8))
    group_options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    world_size: int | None = None
    skip: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def build(self, params: Iterable[Any], **overrides: object) -> Optimizer:
        """The optimizer of ``params``, with the case's options and ``overrides``."""
        return self.make(list(params), **{**self.options, **overrides})

    def group(self, params: Sequence[Any], **options: object) -> dict[str, Any]:
        """A group dict that the optimizer takes."""
        return {**self.group_options, "params": list(params), **options}

    def model(self, dtype: torch.dtype = torch.float32) -> TinyModel:
        """The model to train; two calls give equal ones."""
        return TinyModel(self.shapes).to(device=self.device, dtype=dtype)

    def pair(self, dtype: torch.dtype = torch.float32, **overrides: object) -> tuple[TinyModel, Optimizer]:
        """A fresh model and its optimizer."""
        model = self.model(dtype)
        return model, self.build(model.parameters(), **overrides)

    def trained(
        self, steps: Iterable[int], dtype: torch.dtype = torch.float32, **overrides: object
    ) -> tuple[TinyModel, Optimizer]:
        """A model and its optimizer after ``steps``."""
        model, optimizer = self.pair(dtype, **overrides)
        train(model, optimizer, steps)
        return model, optimizer


class TinyModel(nn.Module):
    """Parameters w0, w1, … and the loss Σ ⟨wᵢ, gᵢ(step)⟩: gradients are exactly the gᵢ, set by the step alone."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"w{i}", nn.Parameter(_normal(shape, seed=1000 + i)))

    def forward(self, step: int, *, used: Sequence[str] | None = None, sign: float = 1.0) -> Tensor:
        """The loss of ``step``; parameters that ``used`` leaves out get no gradient."""
        terms = [
            (param * _normal(param.shape, seed=100 * step + i, scale=sign).to(param)).sum()
            for i, (name, param) in enumerate(self.named_parameters())
            if used is None or name in used
        ]
        return torch.stack(terms).sum()


def _normal(shape: Sequence[int], *, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, optimizer: Optimizer, steps: Iterable[int], **options: object) -> None:
    """Steps of zero_grad, backward, step; ``options`` go to the model."""
    for step in steps:
        optimizer.zero_grad()
        model(step, **options).backward()
        optimizer.step()


def snapshot(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Copies of all parameters and all state, by parameter name; an `OptimizerModule` becomes its state."""
    return {
        name: with_tensors([param, optimizer.state.get(param, {})], lambda tensor: tensor.detach().clone())
        for name, param in model.named_parameters()
    }


def with_tensors(value: object, change: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with ``change`` applied to every tensor inside; containers are rebuilt, objects are their states."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, OptimizerModule):
        value = value.state_dict()
    if isinstance(value, Mapping):
        return {key: with_tensors(entry, change) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return rebuild(value, [with_tensors(entry, change) for entry in value])
    return value


def assert_same(actual: Any, expected: Any, what: str) -> None:
    """Assert equal structure, dtypes and bits; ``what`` is the path that an error names."""
    if isinstance(expected, Tensor):
        _assert_same_tensor(actual, expected, what)
    elif isinstance(expected, OptimizerModule):
        assert type(actual) is type(expected), f"{what} is a {type(actual).__name__}, not a {type(expected).__name__}"
        assert_same(actual.state_dict(), expected.state_dict(), what)
    elif isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), f"{what} is a {type(actual).__name__}, expected a mapping"
        found, keys = sorted(map(str, actual)), sorted(map(str, expected))
        assert found == keys, f"{what} has keys {found}, expected {keys}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{what}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{what} has {len(actual)} entries, expected {len(expected)}"
        for i, entry in enumerate(expected):
            assert_same(actual[i], entry, f"{what}[{i}]")
    else:
        assert type(actual) is type(expected), f"{what} became a {type(actual).__name__}: {actual!r}, not {expected!r}"
        assert actual == expected, f"{what} is {actual!r}, expected {expected!r}"


def _assert_same_tensor(actual: object, expected: Tensor, what: str) -> None:
    assert isinstance(actual, Tensor), f"{what} is a {type(actual).__name__}, expected a tensor"
    assert actual.dtype == expected.dtype, f"{what} has dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{what} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    if hasattr(expected, "__tensor_flatten__"):
        assert type(actual) is type(expected), f"{what} is a {type(actual).__name__}, not {type(expected).__name__}"
        for inner in expected.__tensor_flatten__()[0]:
            assert_same(getattr(actual, inner), getattr(expected, inner), f"{what}.{inner}")
        return
    left, right = (tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in (actual, expected))
    if not torch.equal(left, right):
        difference = (actual.detach().cpu().double() - expected.detach().cpu().double()).abs().max()
        raise AssertionError(f"{what} differs by up to {difference.item():.3g}")
