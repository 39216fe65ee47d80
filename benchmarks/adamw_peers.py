"""The AdamW steps that ours is compared with: torch's, compiled ones, and those of packages that are installed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as adamw_of_lists

Params = list[torch.nn.Parameter]
Step = Callable[[], object]
MakeStep = Callable[[Params], Step]

HYPERPARAMETERS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

PEERS = ("none", "fused", "torch", "all")


def peers(choice: str, max_norm: float | None) -> dict[str, MakeStep]:
    """Steps by name: torch's fused one, all of torch's, or those of other packages too; each after torch's clipping."""
    on_gpu = torch.cuda.is_available()
    chosen: dict[str, MakeStep] = {}
    if choice != "none":
        chosen["torch fused"] = of_class(torch.optim.AdamW, fused=True, capturable=on_gpu)
    if choice in ("torch", "all"):
        chosen["torch foreach"] = of_class(torch.optim.AdamW, foreach=True, capturable=on_gpu)
        chosen["torch for-loop"] = of_class(torch.optim.AdamW, foreach=False, capturable=on_gpu)
    if choice in ("torch", "all") and on_gpu:
        chosen["torch compiled"] = compiled_lists
        chosen["compiled, a tensor at a time"] = compiled_tensors
    if choice == "all" and on_gpu:
        chosen |= importable()
    if max_norm is None:
        return chosen
    return {f"torch clip + {name}": _clipped(make_step, max_norm) for name, make_step in chosen.items()}


def of_class(optimizer_class: type[torch.optim.Optimizer], **options: object) -> MakeStep:
    """The step of an optimizer class with the common hyperparameters and these options."""
    return lambda params: optimizer_class(params, **HYPERPARAMETERS, **options).step  # type: ignore[call-arg]


def importable() -> dict[str, MakeStep]:
    """AdamW of other packages, those that are installed."""
    found: dict[str, MakeStep] = {}
    for name, module, attribute in (
        ("apex FusedAdam", "apex.optimizers", "FusedAdam"),
        ("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit"),
        ("torchao AdamW8bit", "torchao.optim", "AdamW8bit"),
        ("heavyball AdamW", "heavyball", "ForeachAdamW"),
        ("triton_muon_adamw", "triton_muon_adamw", "TritonAdamW"),
        ("flashoptim", "flashoptim", "FlashAdamW"),
    ):
        try:
            found[name] = of_class(getattr(import_module(module), attribute))
        except (ImportError, AttributeError):
            continue
    return found


def _clipped(make_step: MakeStep, max_norm: float) -> MakeStep:
    def make(params: Params) -> Step:
        step = make_step(params)
        return lambda: (torch.nn.utils.clip_grad_norm_(params, max_norm, foreach=True), step())

    return make


class _Lists:
    """Parameters, gradients and states as lists, for functions that take them so."""

    def __init__(self, params: Params) -> None:
        self.params: list[Tensor] = [p.detach() for p in params]
        self.grads: list[Tensor] = [p.grad for p in params if p.grad is not None]
        self.exp_avgs, self.exp_avg_sqs = ([torch.zeros_like(p) for p in self.params] for _ in range(2))
        self.steps = [torch.zeros((), device=p.device) for p in params]


def compiled_lists(params: Params) -> Step:
    """torch's foreach step under ``torch.compile``: one compilation for all lists of these shapes."""
    lists, compiled = _Lists(params), _compiled_lists()
    lr = torch.tensor(HYPERPARAMETERS["lr"], device=params[0].device)
    return lambda: compiled(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, lists.steps, lr)


@cache
def _compiled_lists() -> Callable[..., None]:
    beta1, beta2 = HYPERPARAMETERS["betas"]

    @torch.no_grad()
    def step(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        lr: Tensor,
    ) -> None:
        adamw_of_lists(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            foreach=True,
            capturable=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=HYPERPARAMETERS["weight_decay"],
            eps=HYPERPARAMETERS["eps"],
            maximize=False,
        )

    return torch.compile(step, fullgraph=True, dynamic=False)


def compiled_tensors(params: Params) -> Step:
    """An elementwise step under ``torch.compile``, called for each tensor, as nanochat does it for its embeddings.

    Hyperparameters are 0-d CPU tensors, so that changing them compiles nothing.
    """
    lists, compiled = _Lists(params), _compiled_tensor()
    numbers = [
        HYPERPARAMETERS["lr"],
        *HYPERPARAMETERS["betas"],
        HYPERPARAMETERS["eps"],
        HYPERPARAMETERS["weight_decay"],
    ]
    scalars = [torch.tensor(number) for number in numbers]
    count = torch.zeros(())

    @torch.no_grad()
    def step() -> None:
        count.add_(1)
        for p, g, m, v in zip(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs):
            compiled(p, g, m, v, count, *scalars)

    return step


@cache
def _compiled_tensor() -> Callable[..., None]:
    def update(
        p: Tensor,
        g: Tensor,
        m: Tensor,
        v: Tensor,
        step: Tensor,
        lr: Tensor,
        beta1: Tensor,
        beta2: Tensor,
        eps: Tensor,
        weight_decay: Tensor,
    ) -> None:
        p.mul_(1 - lr * weight_decay)
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g.square())
        denominator = (v / (1 - beta2**step)).sqrt() + eps
        p.sub_(lr / (1 - beta1**step) * m / denominator)

    # one compilation a shape, of which GPT-2 has nine
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(update, fullgraph=True, dynamic=False)
