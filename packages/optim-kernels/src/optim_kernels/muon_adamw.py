"""`TritonMuonAdamW`: Muon for the matrices and AdamW for the rest of a model, in one optimizer and one step.

Groups carry ``kind="muon"`` or ``kind="adamw"``, as nanochat's and `optim_utils.param_groups` write them, or Keller
Jordan's ``use_muon``. A Muon group without further options follows nanochat's current Muon (variant
``"nanochat-2026-07"``); an AdamW group is torch's AdamW with nanochat's defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from optim_kernels import _nanochat_checkpoints as nanochat
from optim_kernels._impl import Impl, check_impl
from optim_kernels._muon_groups import variant_options
from optim_kernels._muon_planner import MuonPlanner
from optim_kernels._optimizer import check_capture, run_closure, text_table
from optim_kernels.clip import clip_factor as factor_of
from optim_kernels.clip import get_total_norm
from optim_kernels.functional import adamw_
from optim_kernels.muon import MUON_HEADER, MuonGroups, explain_row

__all__ = ["TritonMuonAdamW"]

ADAMW_DEFAULTS: dict[str, Any] = {
    "lr": 3e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-10,
    "weight_decay": 0.0,
    "maximize": False,
}


class TritonMuonAdamW(MuonGroups):
    """One optimizer for a whole model.

    Args:
        param_groups: dicts with ``params``, a ``kind`` (or ``use_muon``) and any option of `TritonMuon` or AdamW;
            unknown keys are kept and ignored.
        max_norm: clip by the global norm of all gradients inside the step; ``grad_norm`` then holds the unclipped norm.
        seed: of stochastic rounding, for groups without their own.
        capturable: the step may be captured into a CUDA graph.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``, for groups without their own.
    """

    grad_norm: Tensor | None = None

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        max_norm: float | None = None,
        seed: int = 0,
        capturable: bool = False,
        impl: Impl = "auto",
    ) -> None:
        check_impl(impl)
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be None or above 0, got {max_norm}")
        self._views, self._planner = {}, MuonPlanner()
        super().__init__(param_groups, {"max_norm": max_norm, "seed": seed, "capturable": capturable, "impl": impl})

    def _is_muon(self, group: dict[str, Any]) -> bool:
        return group["kind"] == "muon"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``kind`` decides which options it is completed with."""
        group = {**_kind_of(param_group), **param_group}
        mine = {key: self.defaults[key] for key in ("seed", "capturable", "impl")}
        if group["kind"] == "muon":
            published = "keller" if "use_muon" in group else "nanochat-2026-07"
            options = variant_options(group.get("variant", published))
            group = {**options, "missing_grad": "skip" if published != "keller" else "zero", **mine, **group}
        else:
            group = {**ADAMW_DEFAULTS, **mine, **group}
        super().add_param_group(group)
        try:
            if self._is_muon(group):
                self._add_views(self.param_groups[-1])
            else:
                _check_adamw_group(group)
        except (ValueError, RuntimeError):
            self._withdraw_last_group()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip_factor: Tensor | None = None) -> Any:
        """Update every parameter that has a gradient; gradients are only read.

        Args:
            closure: recomputes the loss, which is returned.
            clip_factor: 0-d tensor that gradients are multiplied with, instead of clipping by ``max_norm`` here.
        """
        loss = run_closure(closure)
        check_capture(self)
        grad_scale, found_inf = self._loss_scaling()
        if clip_factor is None:
            clip_factor = self._clip(grad_scale)
        names = self._parameter_names()
        scaling = {"clip_factor": clip_factor, "grad_scale": grad_scale, "found_inf": found_inf}
        self._step_muon([group for group in self.param_groups if self._is_muon(group)], **scaling)
        for group in self.param_groups:
            if not self._is_muon(group):
                self._step_adamw(group, names, scaling)
        return loss

    def _clip(self, grad_scale: Tensor | None) -> Tensor | None:
        """The factor that ``max_norm`` asks for; the norm is that of the unscaled gradients."""
        max_norm = self.defaults["max_norm"]
        if max_norm is None:
            return None
        grads = [p.grad for _, p in self._parameters() if p.grad is not None]
        norm = get_total_norm(grads)
        self.grad_norm = norm if grad_scale is None else norm / grad_scale.to(norm.device)
        return factor_of(self.grad_norm, max_norm)

    def _step_adamw(self, group: dict[str, Any], names: dict[Tensor, str], options: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if p.grad is not None and p.grad.is_sparse:
                raise RuntimeError(f"AdamW does not support sparse gradients, got one for {names[p]}; densify it")
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device if p.is_cuda else None)
                state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        states = [self.state[p] for p in params]
        adamw_(
            params,
            [p.grad for p in params if p.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            steps=[state["step"] for state in states],
            lr=group["lr"],
            betas=tuple(group["betas"]),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            **options,
        )

    def state_dict(self, *, layout: Literal["separate", "nanochat"] = "separate") -> dict[str, Any]:
        """State per parameter, or as nanochat stacks it on a Muon group's first parameter."""
        if layout not in ("separate", "nanochat"):
            raise ValueError(f"layout must be 'separate' or 'nanochat', got {layout!r}")
        state_dict = super().state_dict()
        return nanochat.stack_state(state_dict) if layout == "nanochat" else state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state of this class, or nanochat's."""
        super().load_state_dict(nanochat.unstack_state(state_dict, self.param_groups))

    def explain(self) -> str:
        """A table of the parameters: who updates them, and how."""
        names = self._parameter_names()
        rows = []
        for group in self.param_groups:
            for p in group["params"]:
                if self._is_muon(group):
                    rows.append(["muon", *explain_row(names[p], p, self._views[p], group)])
                else:
                    rows.append(["adamw", names[p], tuple(p.shape), "", "", "functional.adamw_", "", ""])
        return text_table(("kind", *MUON_HEADER), rows)


def _kind_of(group: dict[str, Any]) -> dict[str, str]:
    """``{"kind": …}`` of a group, from its ``kind`` or Keller Jordan's ``use_muon``."""
    kind = group.get("kind", {True: "muon", False: "adamw"}.get(group.get("use_muon", ...)))
    if kind not in ("muon", "adamw"):
        raise ValueError(f"each group needs kind='muon' or 'adamw' (or use_muon), got kind={kind!r}")
    return {"kind": kind}


def _check_adamw_group(group: dict[str, Any]) -> None:
    """torch.optim.AdamW's conditions, in its words."""
    if not float(group["lr"]) >= 0.0:
        raise ValueError(f"Invalid learning rate: {group['lr']}")
    if not group["eps"] >= 0.0:
        raise ValueError(f"Invalid epsilon value: {group['eps']}")
    for i, beta in enumerate(group["betas"]):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not group["weight_decay"] >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {group['weight_decay']}")
