"""Random training with several captured steps: graphs and eager steps in any order, beside an optimizer without graphs.

A graph replays its step with the hyperparameters of its capture (a tensor's: those of now) and with what its gradients
hold by now, whatever eager steps and other captures have done since. On a CPU a graph is a stand-in that takes such a
step, which tests the test.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from random_tensors import DEVICE, assert_same_bits
from torch import Tensor, nn

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW

# plain torch refuses it on a CPU
CAPTURABLE = DEVICE == "cuda"
SHAPES = [(96, 64), (64, 96), (40, 40), (128, 32), (64, 64)]
MAKERS: dict[str, Callable[[list[list[nn.Parameter]]], torch.optim.Optimizer]] = {
    "AdamW": lambda lists: TritonAdamW([{"params": params} for params in lists], lr=0.1, capturable=CAPTURABLE),
    "AdamW of one": lambda lists: TritonAdamW([{"params": lists[0][:1]}], lr=0.1, capturable=CAPTURABLE),
    "AdamW, max_norm": lambda lists: TritonAdamW(
        [{"params": params} for params in lists], lr=0.1, capturable=CAPTURABLE, max_norm=1.0
    ),
    "AdamW, codes": lambda lists: TritonAdamW(
        [{"params": params} for params in lists], lr=0.1, capturable=CAPTURABLE, state_dtype="int8"
    ),
    "Muon": lambda lists: TritonMuon([{"params": params} for params in lists], lr=0.1, capturable=CAPTURABLE),
    "NorMuon": lambda lists: TritonMuon(
        [{"params": params, "variant": "nanochat-2026-07", "missing_grad": "skip"} for params in lists],
        lr=0.1,
        capturable=CAPTURABLE,
    ),
    "MuonAdamW": lambda lists: TritonMuonAdamW(
        [{"params": lists[0], "kind": "muon"}, {"params": lists[1], "kind": "adamw"}],
        capturable=CAPTURABLE,
        max_norm=1.0,
    ),
}


class Run:
    """An optimizer under test and its twin, which takes the same steps eagerly."""

    def __init__(self, name: str, seed: int) -> None:
        self.draw = Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        dtype = self.draw.choice([torch.float32, torch.float32, torch.bfloat16])
        starts = [self.random(shape, dtype) for shape in SHAPES]
        cut = self.draw.randint(1, len(SHAPES) - 1)
        made = []
        for _ in range(2):
            params = [nn.Parameter(start.clone()) for start in starts]
            made.append(MAKERS[name]([params[:cut], params[cut:]]))
        self.optimizer, self.twin = made
        self.params, self.others = ([p for g in each.param_groups for p in g["params"]] for each in made)
        # which parameters had a gradient in the latest eager step
        self.warmed_up: list[bool] = []
        # what each graph was captured with: gradients, and hyperparameters by group
        self.graphs: list[tuple[Callable[[], Any], list[Tensor | None], list[dict[str, Any]]]] = []

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE, dtype)

    def hyper(self) -> list[dict[str, Any]]:
        keys = ("lr", "weight_decay", "betas", "momentum")
        return [{key: group[key] for key in keys if key in group} for group in self.optimizer.param_groups]

    def step_twin(self, grads: list[Tensor | None], hyper: list[dict[str, Any]]) -> None:
        for group, values in zip(self.twin.param_groups, hyper, strict=True):
            group.update({key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()})
        for q, grad in zip(self.others, grads, strict=True):
            q.grad = None if grad is None else grad.clone()
        self.twin.step()

    def eager(self) -> None:
        self.warmed_up = self.given()
        self.step_twin([p.grad for p in self.params], self.hyper())
        self.optimizer.step()

    def given(self) -> list[bool]:
        return [p.grad is not None for p in self.params]

    def capture(self) -> None:
        # tables of other parameters are made eagerly
        if self.warmed_up != self.given():
            self.eager()
        grads, hyper = [p.grad for p in self.params], self.hyper()
        if DEVICE == "cpu":
            self.graphs.append((lambda: self.step_as(grads, hyper), grads, hyper))
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.optimizer.step()
        self.graphs.append((graph.replay, grads, hyper))

    def step_as(self, grads: list[Tensor | None], hyper: list[dict[str, Any]]) -> None:
        kept, now = [p.grad for p in self.params], self.hyper()
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        for group, values in zip(self.optimizer.param_groups, hyper, strict=True):
            group.update(values)
        self.optimizer.step()
        for p, grad in zip(self.params, kept, strict=True):
            p.grad = grad
        for group, values in zip(self.optimizer.param_groups, now, strict=True):
            group.update(values)

    def replay(self) -> None:
        if self.graphs:
            replay, grads, hyper = self.draw.choice(self.graphs)
            self.step_twin(grads, hyper)
            replay()

    def new_gradients(self) -> None:
        for p in self.params:
            p.grad = self.random(tuple(p.shape), p.dtype)

    def other_values(self) -> None:
        for p in self.params:
            if p.grad is not None:
                p.grad.copy_(self.random(tuple(p.shape), p.dtype))

    def no_gradient(self) -> None:
        self.draw.choice(self.params).grad = None

    def new_lr(self) -> None:
        for group in self.optimizer.param_groups:
            lr = self.draw.choice([0.05, 0.1, 0.2])
            group["lr"] = torch.tensor(lr, device=DEVICE) if self.draw.random() < 0.3 else lr

    def other_lr(self) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(self.draw.choice([0.05, 0.1, 0.2]))

    def other_hyperparameters(self) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = self.draw.choice([0.0, 0.1, 0.3])
            if "betas" in group:
                group["betas"] = self.draw.choice([(0.9, 0.99), (0.8, 0.95)])
            if "momentum" in group:
                group["momentum"] = self.draw.choice([0.9, 0.95])

    def check(self) -> None:
        assert_same_bits(self.params, self.others)


def drive(name: str, seed: int, num_moves: int) -> None:
    run = Run(name, seed)
    # states are made eagerly
    run.new_gradients()
    run.eager()
    moves = [run.eager, run.eager, run.capture, run.replay, run.replay, run.new_gradients, run.other_values]
    moves += [run.new_lr, run.other_lr, run.other_hyperparameters]
    for _ in range(num_moves):
        rare = run.no_gradient if run.draw.random() < 0.05 else None
        (rare or run.draw.choice(moves))()
        run.check()


@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
# a step without any gradient launches nothing
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_steps_by_graphs_are_eager_steps(name: str) -> None:
    for seed in range(3 if DEVICE == "cuda" else 1):
        drive(name, seed, num_moves=40 if DEVICE == "cuda" else 12)


@pytest.mark.gpu
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*capturable=True.*:UserWarning")
# a step without any gradient launches nothing
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_many_steps_by_graphs_are_eager_steps(name: str) -> None:
    for seed in range(100, 140):
        drive(name, seed, num_moves=60)
