"""`TritonMuonAdamW`: Muon for the matrices and AdamW for the rest of a model, in one optimizer and one step.

Groups carry ``kind="muon"`` or ``kind="adamw"``, as nanochat's and `optim_utils.param_groups` write them, or Keller
Jordan's ``use_muon``. A Muon group without further options follows nanochat's current Muon (variant
``"nanochat-2026-07"``); an AdamW group is torch's AdamW with nanochat's defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor
from torch.nn.parameter import is_lazy

from optim_kernels._dtensors import gradients_of
from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._impl import Impl, check_impl
from optim_kernels._optimizers.adamw_base import AdamWOptimizer
from optim_kernels._optimizers.adamw_options import (
    check_adamw_ranges,
    check_adamw_scalars,
    check_adamw_step,
    check_decay,
)
from optim_kernels._optimizers.adamw_parts import Group
from optim_kernels._optimizers.adamw_paths import NOT_YET_THERE, why_not_kernels
from optim_kernels._optimizers.adamw_state import MOMENTS, NEEDED
from optim_kernels._optimizers.adamw_step import PreparedStep
from optim_kernels._optimizers.adamw_torch import reference_step
from optim_kernels._optimizers.explaining import launches_line, text_table
from optim_kernels._optimizers.fitting import refuse, what_is_missing, why_unfit
from optim_kernels._optimizers.group_clipping import check_clipping, clipping_of_step, norm_and_factor
from optim_kernels._optimizers.kinds import completed_group
from optim_kernels._optimizers.muon_base import MuonOptimizer
from optim_kernels._optimizers.muon_explain import HEADER, explain_row, tiles_of
from optim_kernels._optimizers.muon_options import check_muon_group
from optim_kernels._optimizers.nanochat_checkpoints import stack_state, unstack_state
from optim_kernels._optimizers.private_state import of_its_own
from optim_kernels._optimizers.stepping import begin_step, hooked_step
from optim_kernels._optimizers.storage import check_dtype
from optim_kernels._options import check_switches
from optim_utils.compiling import not_compiled

__all__ = ["TritonMuonAdamW"]

# Options of AdamW that groups of kind "adamw" do not have.
_NOT_HERE = ("amsgrad", "differentiable", "master_weights", "state_dtype", "stochastic_rounding")
# What stands for them, and for torch's choices of an implementation: nothing asked for.
_AS_TORCH: dict[str, Any] = dict.fromkeys((*_NOT_HERE, "foreach", "fused"))
# The optimizer's own options, which hold for groups of both kinds that leave them out.
_SHARED: dict[str, Any] = {"max_norm": None, "seed": 0, "capturable": False, "impl": "auto"}


class TritonMuonAdamW(AdamWOptimizer, MuonOptimizer):
    """One optimizer for a whole model: the updates of ``optim_kernels.reference.muon`` and ``.adamw``.

    Args:
        param_groups: dicts with ``params``, a ``kind`` (or ``use_muon``) and options: for Muon any option of
            `TritonMuon`, for AdamW lr (3e-4 by default), betas ((0.9, 0.95)), eps (1e-10), weight_decay (0) and
            maximize; unknown keys are kept and ignored.
        max_norm: clip by the global norm of all gradients inside the step; ``grad_norm`` then holds the unclipped norm.
        seed: of stochastic rounding, for groups without their own.
        capturable: the step may be captured into a CUDA graph.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``, for groups without their own.
        ns_workspace_mb: as in `TritonMuon`, for all Muon groups together.

    Raises:
        ValueError: a group without a kind, an option out of its range, or a parameter that its kind cannot update.
        TypeError: something else in place of a number.
    """

    @not_compiled
    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        max_norm: float | None = None,
        seed: int = 0,
        capturable: bool = False,
        impl: Impl = "auto",
        ns_workspace_mb: float | None = None,
    ) -> None:
        check_impl(impl)
        self._norms = GradientNorms(impl)
        self._make_planner(ns_workspace_mb)
        super().__init__(param_groups, {"max_norm": max_norm, "seed": seed, "capturable": capturable, "impl": impl})

    def _is_muon(self, group: dict[str, Any]) -> bool:
        return group["kind"] == "muon"

    def _shared_options(self) -> dict[str, Any]:
        """What groups take from the optimizer: its ``defaults``, or the first group where a program has replaced them.

        Keller Jordan's and nanochat's optimizers have none, and programs give them some: an lr for their schedules.
        """
        first = self.param_groups[0] if self.param_groups else {}
        return {key: self.defaults.get(key, first.get(key, value)) for key, value in _SHARED.items()}

    @not_compiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its ``kind`` decides which options it is completed with."""
        group = completed_group(param_group, **self._shared_options())
        super().add_param_group(group)
        self._prepared = None
        try:
            check_clipping(self, self.param_groups[-1])
            check = check_muon_group if self._is_muon(group) else _check_adamw_group
            check(self.param_groups[-1], self._parameter_names())
            if not self._is_muon(group):
                check_decay(group, f"param_groups[{len(self.param_groups) - 1}]")
        except Exception:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        shared = self._shared_options()
        self._prepared, self._norms = None, GradientNorms(shared["impl"])
        names = self._parameter_names()
        for group in self.param_groups:
            group.setdefault("max_norm", shared["max_norm"])
            check_clipping(self, group)
            if not self._is_muon(group):
                _check_adamw_group(group, names, loaded=True)
                if "decoupled_weight_decay" in group:
                    group["decoupled_weight_decay"] = True  # as torch's AdamW makes of Adam's groups

    @hooked_step
    def step(self, closure: Callable[[], Any] | None = None, *, clip_factor: Tensor | None = None) -> Any:
        """Update every parameter with a gradient, and Muon's others as ``missing_grad`` says; gradients are only read.

        Args:
            closure: recomputes the loss, which is returned.
            clip_factor: 0-d tensor that multiplies the gradients, instead of clipping by ``max_norm`` here.
        """
        loss, clip_factor = begin_step(self, closure, clip_factor)
        grad_scale, found_inf = self._loss_scaling()
        clip_factor = self._clip(grad_scale) if clip_factor is None else clip_factor
        scaling = {"clip_factor": clip_factor, "grad_scale": grad_scale, "found_inf": found_inf}
        adamw_groups = [group for group in self.param_groups if not self._is_muon(group)]
        # all that AdamW may refuse comes before Muon changes anything
        for group in adamw_groups:
            check_adamw_step(group)
        params = [p for group in adamw_groups for p in group["params"]]
        grads = gradients_of(params)
        adamw, seen = self._prepared_for(adamw_groups, params, grads)
        if adamw.kernels is not None:
            adamw.kernels.get_ready(
                adamw_groups, seen, grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor
            )
        self._step_muon([group for group in self.param_groups if self._is_muon(group)], **scaling)
        if adamw.kernels is not None:
            adamw.kernels.launch()
        for step in adamw.with_torch.steps(grads):
            reference_step(step, **scaling)
        return loss

    def _clip(self, grad_scale: Tensor | None) -> Tensor | None:
        """The clip factor for ``max_norm``; ``None`` without a ``max_norm``."""
        clipped = [group for group in self.param_groups if group["max_norm"] is not None]
        grads = [grad for group in clipped for p in group["params"] if (grad := p.grad) is not None]
        max_norm, norm_type = clipping_of_step(self, grads)
        if max_norm is None:
            return None
        self.grad_norm, factor = norm_and_factor(self._norms, grads, max_norm, norm_type, grad_scale)
        return factor

    @staticmethod
    def _planned_options(group: Group) -> list[Any]:
        return [group["impl"], *map(group.get, _NOT_HERE)]

    def _prepare(self, groups: list[Group], params: list[Tensor], grads: list[Tensor | None]) -> PreparedStep:
        self._planner.let_go()
        for group in groups:
            _check_choices(group)
        return super()._prepare(groups, params, grads)

    def _make_ready(self, param: Tensor, grad: Tensor, group: Group, name: str) -> str | None:
        # checked here too: when its group was added, it may have been frozen, or not in it
        _check_adamw_param(param, name)
        state = self._own_state.get(param, {})
        # one without moments is Muon's, of a parameter that was in one of its groups
        if {*MOMENTS} & state.keys():
            refuse(what_is_missing(state, NEEDED), name)
        refuse(why_unfit(param, grad, state, NEEDED), name)
        reason = _why_not_kernels(param, group)
        if reason is not None and group["impl"] == "triton":
            raise RuntimeError(f"impl='triton' cannot update {name}: {reason}; use impl='auto' or 'torch'")
        self._ensure_state(param, _AS_TORCH, name, step_device=param.device, for_kernels=reason is None)
        return reason

    def state_dict(self, *, layout: Literal["separate", "nanochat"] = "separate") -> dict[str, Any]:
        """State per parameter, or as nanochat stacks it on a Muon group's first parameter."""
        if layout not in ("separate", "nanochat"):
            raise ValueError(f"layout must be 'separate' or 'nanochat', got {layout!r}")
        return self._state_dict(stack_state) if layout == "nanochat" else self._state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or nanochat's."""
        with self.register_load_state_dict_pre_hook(unstack_state):
            super().load_state_dict(state_dict)

    @of_its_own
    def explain(self) -> str:
        """A table of the parameters: what updates them, and how; tiles and launches are those of the latest step."""
        names, tiles = self._parameter_names(), tiles_of(self.plans())
        rows = []
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if self._is_muon(group):
                    rows.append(["muon", *explain_row(names[p], place, group, self._own_state, tiles)])
                elif is_lazy(p):
                    rows.append(["adamw", names[p], "", "", "", "", NOT_YET_THERE, "", ""])
                else:
                    reason = _why_not_kernels(p, group)
                    path = "torch" if reason else "triton"
                    rows.append(["adamw", names[p], tuple(p.shape), "", "", path, reason or "", "", ""])
        return text_table(("kind", *HEADER), rows, footer=self._explain_launches())

    def _explain_launches(self) -> list[str]:
        if self._prepared is None:
            return []
        count = sum(plan.launches for plan in self.plans()) + self._count_launches()
        return [launches_line(count)] if count else []


def _why_not_kernels(p: Tensor, group: dict[str, Any]) -> str | None:
    """What keeps the kernels from updating an AdamW parameter; ``None`` where they do."""
    return why_not_kernels(p, {**_AS_TORCH, "impl": group["impl"]})


def _check_choices(group: dict[str, Any]) -> None:
    """`_check_adamw_group` without the ranges of numbers, which for tensors on the device cost a synchronisation."""
    check_impl(group["impl"])
    check_switches(capturable=group["capturable"], maximize=group["maximize"])
    check_adamw_scalars(group, in_step=False)
    for option in _NOT_HERE:
        if group.get(option):
            raise ValueError(
                f"{option}={group[option]!r} in a group with kind='adamw': TritonMuonAdamW has no such option; give "
                "these parameters to a TritonAdamW of their own"
            )


def _check_adamw_param(p: Tensor, name: str) -> None:
    if p.is_complex():
        raise ValueError(f"kind='adamw' is for real parameters, and {name} is {p.dtype}; give it to TritonAdamW")
    check_dtype(p, name)


def _check_adamw_group(group: dict[str, Any], names: dict[Tensor, str], *, loaded: bool = False) -> None:
    """Check torch.optim.AdamW's conditions, in its words, and refuse options that only `TritonAdamW` has.

    ``loaded``: as in `check_adamw_ranges`.
    """
    _check_choices(group)
    for p in group["params"]:
        _check_adamw_param(p, names[p])
    check_adamw_ranges(group, loaded=loaded)
