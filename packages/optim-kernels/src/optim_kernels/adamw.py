"""``TritonAdamW``: torch's AdamW, in one launch a step where the kernels run, with further storage formats."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from operator import itemgetter
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import AdamW as TorchAdamW
from torch.optim.optimizer import ParamsT

from optim_kernels._dtensors import gradients_of
from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._graphs import is_capturing_here
from optim_kernels._impl import Impl, check_impl
from optim_kernels._optimizers.adamw_base import AdamWOptimizer
from optim_kernels._optimizers.adamw_checkpoints import as_saved, as_torchs
from optim_kernels._optimizers.adamw_options import (
    StateDtype,
    check_adamw_ranges,
    check_adamw_scalars,
    check_adamw_step,
    check_decay,
    check_formats,
    check_storage,
    check_update,
)
from optim_kernels._optimizers.adamw_parts import Group
from optim_kernels._optimizers.adamw_paths import EXPLAIN_HEADER, explain_row, step_device, why_not_kernels
from optim_kernels._optimizers.adamw_state import converted_state, why_unfit_state
from optim_kernels._optimizers.adamw_steady import SteadyStep
from optim_kernels._optimizers.adamw_step import PreparedStep
from optim_kernels._optimizers.adamw_torch import check_step, step_with_torch
from optim_kernels._optimizers.explaining import launches_line, text_table
from optim_kernels._optimizers.fitting import refuse
from optim_kernels._optimizers.group_clipping import (
    check_clipping,
    check_limit,
    clipping_of_step,
    norm_and_factor,
)
from optim_kernels._optimizers.private_state import of_its_own
from optim_kernels._optimizers.stepping import begin_step, hooked_step
from optim_kernels._optimizers.storage import MasterWeights, check_dtype
from optim_kernels._options import are_numbers, check_scalars
from optim_utils.compiling import not_compiled

__all__ = ["TritonAdamW"]

_group_params = itemgetter("params")


class TritonAdamW(AdamWOptimizer, TorchAdamW):
    """AdamW with torch's arguments, state and results, in one launch a step, and with further storage formats.

    The update is that of ``optim_kernels.reference.adamw``; ``explain()`` says what updates each parameter.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable: as in torch.
        fused: ``None`` takes the kernels where they run, ``True`` demands them, ``False`` asks for plain torch.
        state_dtype: dtype of the moments: ``None`` (the parameter's), one dtype, a pair (first, second), or ``"int8"``
            for 8-bit codes (parameters under 4096 elements, or not in row-major order, then have fp32 moments, in a
            launch of their own).
        master_weights: for 16-bit parameters: ``"fp32"`` keeps an fp32 copy, ``"split16"`` (bf16) the missing 16 bits.
            The fp32 copy follows what others write to the parameter between steps (but not by way of ``param.data``,
            nor between replays of a CUDA graph).
        stochastic_rounding: round bf16 parameters and moments at random, so that small steps count on average.
        seed: key of the random bits; the parameter's place is the other half of the key.
        max_norm: clip all gradients by their global norm within the step; ``grad_norm`` then holds the norm before it.
        norm_type: the order of that norm.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``; the last raises where the kernels cannot run.

    Raises:
        ValueError: an option out of its range, or a storage format that a parameter cannot have.
        TypeError: something else in place of a number.
        RuntimeError: ``fused=True`` or ``impl="triton"`` for a parameter that the kernels cannot update.
    """

    # Not taken from a checkpoint: formats are converted, and what computed its steps (torch's fused kernel, say) may be
    # missing on this machine.
    _own_options = ("state_dtype", "master_weights", "impl", "foreach", "fused")
    # the other options are read anew by every step, or when a state is made
    _planned_options = itemgetter(
        "amsgrad",
        "capturable",
        "differentiable",
        "foreach",
        "fused",
        "impl",
        "master_weights",
        "seed",
        "stochastic_rounding",
    )

    @not_compiled
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        state_dtype: StateDtype = None,
        master_weights: MasterWeights = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        impl: Impl = "auto",
    ) -> None:
        check_impl(impl)
        # torch compares them with numbers, in an error that does not name them
        check_adamw_scalars({"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, in_step=False)
        # before float(), which accepts strings
        check_scalars(norm_type=norm_type)
        # Held until ``super().__init__`` adds the first group, which moves them into the defaults.
        self._new_defaults = {
            "state_dtype": state_dtype,
            "master_weights": master_weights,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "max_norm": max_norm,
            "norm_type": float(norm_type),
            "impl": impl,
        }
        self._forget()
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

    @not_compiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; any option of the constructor may be the group's own, except the clipping."""
        self.defaults.update(self.__dict__.pop("_new_defaults", {}))
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            check_clipping(self, group)
            self._check_paths(len(self.param_groups) - 1, self._parameter_names())
        except Exception:
            self.param_groups.pop()
            raise
        self._forget()

    def _check_paths(self, number: int, names: dict[Tensor, str]) -> None:
        """Raise where parameters cannot be stored, or updated, as the group of this number asks for."""
        group = self.param_groups[number]
        check_impl(group["impl"])
        check_update(group)
        check_formats(group["state_dtype"], group["master_weights"])
        check_decay(group, f"param_groups[{number}]")
        for param in group["params"]:
            if is_lazy(param):
                # its shape is not known yet; the first step in which it has a gradient checks it
                continue
            check_storage(param, names[param], group["state_dtype"], group["master_weights"])
            reason = why_not_kernels(param, group)
            if reason is not None and (group["fused"] or group["impl"] == "triton"):
                asked, instead = ("fused=True", "fused=None") if group["fused"] else ("impl='triton'", "impl='auto'")
                raise RuntimeError(
                    f"{asked} asks for the kernels, but {names[param]} cannot have them: {reason}; give it to a group "
                    f"with {instead}"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._forget()

    def _forget(self) -> None:
        """Drop what was prepared, because parameters, states or options have changed."""
        impls = {group["impl"] for group in self.__dict__.get("param_groups", [])}
        self._norms = GradientNorms(impls.pop() if len(impls) == 1 else "auto")
        self._prepared = None
        self._steady: SteadyStep | None = None

    @hooked_step
    def step(self, closure: Callable[[], Any] | None = None, *, clip_factor: Tensor | None = None) -> Any:
        """Take one step and return the loss of ``closure``, if there is one.

        Args:
            clip_factor: 0-d tensor that multiplies all gradients as they are read; not allowed beside ``max_norm``.
        """
        if closure is None and clip_factor is None and self._repeat():
            return None
        loss, clip_factor = begin_step(self, closure, clip_factor)
        self._update(clip_factor)
        return loss

    def _repeat(self) -> bool:
        """Take the step as the one before, if it is like that; else nothing is done."""
        steady, (grad_scale, found_inf) = self._steady, self._loss_scaling()
        if steady is None or grad_scale is not None or found_inf is not None or is_capturing_here():
            return False
        try:
            return steady.take(self.param_groups, self._state_to_check())
        finally:
            if steady.norm is not None:
                self.grad_norm = steady.norm

    def _update(self, clip_factor: Tensor | None) -> None:
        self._steady = None
        params = list(chain.from_iterable(map(_group_params, self.param_groups)))
        # With gradients enabled each `to_local` of a DTensor makes a new view. Differentiable steps enable them again.
        grads = gradients_of(params)
        # all of this may raise, so it comes before the kernels, or another group, change anything
        prepared, seen = self._prepared_for(self.param_groups, params, grads)
        with_torch = prepared.with_torch.steps(grads)
        for step in with_torch:
            check_adamw_step(step.group)
            check_step(step, self._parameter_names)
        grad_scale, found_inf = self._loss_scaling()
        max_norm, norm_type = clipping_of_step(self, grads)
        if max_norm is not None:
            if clip_factor is not None:
                raise ValueError("this optimizer clips by max_norm itself; pass clip_factor to one without max_norm")
            all_grads = [grad for grad in grads if grad is not None] if prepared.with_torch else seen
            self.grad_norm, clip_factor = norm_and_factor(
                self._norms,
                all_grads,
                max_norm,
                norm_type,
                grad_scale,
                differentiable=any(step.group["differentiable"] for step in with_torch),
            )
        if prepared.followed:
            self._writes.follow(prepared.followed, prepared.followed, prepared.masters)
        scaling = {"grad_scale": grad_scale, "found_inf": found_inf, "clip_factor": clip_factor}
        if prepared.kernels is not None:
            prepared.kernels.run(self.param_groups, seen, **scaling)
        for step in with_torch:
            step_with_torch(step, **scaling)
        if prepared.followed:
            self._writes.note_step(prepared.followed)
        kernels, is_scaled = prepared.kernels, grad_scale is not None or found_inf is not None
        if kernels is None or kernels.has_dtensors or prepared.with_torch or is_scaled or is_capturing_here():
            return
        # a limit that is a tensor may change in place, to one that is refused
        is_fixed = clip_factor is None if max_norm is None else are_numbers((max_norm, norm_type))
        if is_fixed:
            self._steady = SteadyStep(
                self.param_groups, prepared, seen, norms=self._norms, writes=self._writes, factor=clip_factor
            )

    def _prepare(self, groups: list[Group], params: list[Tensor], grads: list[Tensor | None]) -> PreparedStep:
        names = self._parameter_names()
        for number in range(len(groups)):
            self._check_paths(number, names)
        return super()._prepare(groups, params, grads)

    def _make_ready(self, param: Tensor, grad: Tensor, group: Group, name: str) -> str | None:
        if not param.is_complex():
            check_dtype(param, name)
        reason, state = why_not_kernels(param, group), self._own_state[param]
        if state:
            refuse(why_unfit_state(param, grad, group, state), name)
        device = step_device(param, group)
        self._ensure_state(param, group, name, step_device=device, for_kernels=reason is None)
        return reason

    def _merged_group(self, index: int, mine: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        merged = super()._merged_group(index, mine, saved)
        check_update(merged)
        check_adamw_scalars(merged, in_step=False)
        check_adamw_ranges(merged, of_tensors=False, loaded=True)
        return merged

    def _check_complete(self, loaded: dict[str, Any]) -> None:
        super()._check_complete(loaded)
        groups = loaded["param_groups"]
        for group in groups:
            check_limit(group, groups[0])

    def _place_state(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        return converted_state(param, group, saved, step_device=step_device(param, group))

    def state_dict(self) -> dict[str, Any]:
        """A state dict as torch's: step counts are on the CPU, unless the group is ``capturable`` or ``fused``."""
        return self._state_dict(as_saved)

    @of_its_own
    def to_torch_state_dict(self) -> dict[str, Any]:
        """A state dict that ``torch.optim.AdamW`` loads, whatever the formats here: floats, and torch's keys."""
        return self._state_dict(as_torchs)

    @of_its_own
    def explain(self) -> str:
        """A table: what updates each parameter and why, the dtypes, the bytes moved for an element, the launches.

        The bytes are those of the update; clipping by ``max_norm`` reads every gradient once more.
        """
        names = self._parameter_names()
        rows = [explain_row(names[p], p, group, self._own_state.get(p) or {}) for group, p in self._parameters()]
        return text_table(EXPLAIN_HEADER, rows, footer=self._explain_launches())

    def _explain_launches(self) -> list[str]:
        if self._prepared is None:
            return ["not planned before the next step"]
        kernels = self._prepared.kernels
        num_copied = 0 if kernels is None else kernels.plan.num_copied
        footer = [launches_line(self._count_launches())]
        return footer + [f"{num_copied} gradients are copied to their parameter's layout"] * bool(num_copied)
