"""``TritonAdamW``: torch's AdamW, in one launch a step where the kernels run, with further storage formats."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from optim_kernels import reference
from optim_kernels._adamw_state import (
    MasterWeights,
    StateDtype,
    bytes_per_element,
    check_storage,
    moment_dtypes,
    new_state,
    placed_state,
    plain_state,
    stored_dtypes,
    torch_state,
)
from optim_kernels._adamw_torch import step_with_torch
from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._impl import KERNEL_DTYPES, Impl, check_impl, why_not_triton
from optim_kernels._optimizer import StatefulOptimizer, check_capture, log_fallback, run_closure, text_table
from optim_kernels.functional.adamw_plan import AdamWPlan
from optim_kernels.multi_tensor import is_dense
from optim_kernels.reference.adamw import AdamWScalars

__all__ = ["TritonAdamW"]

# What belongs to this instance rather than to a checkpoint: a loaded state is converted to it.
_OWN_OPTIONS = ("state_dtype", "master_weights", "impl")


class TritonAdamW(StatefulOptimizer, torch.optim.AdamW):
    """AdamW with torch's arguments, state and results, in one launch a step, and with further storage formats.

    The update is that of ``optim_kernels.reference.adamw``; ``explain()`` says what updates each parameter.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable: as in torch.
        fused: ``None`` takes the kernels where they run, ``True`` demands them, ``False`` asks for plain torch.
        state_dtype: dtype of the moments: ``None`` (the parameter's), one dtype, a pair (first, second), or ``"int8"``
            for 8-bit codes, which plain torch updates (the kernels do not know them yet).
        master_weights: for 16-bit parameters: ``"fp32"`` keeps an fp32 copy, ``"split16"`` (bf16) the missing 16 bits.
        stochastic_rounding: round bf16 parameters and moments at random, so that small steps count on average.
        seed: key of the random bits; the parameter's place is the other half of the key.
        max_norm: clip all gradients by their global norm within the step; ``grad_norm`` then holds the norm.
        norm_type: the order of that norm.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``; the last raises where the kernels cannot run.
    """

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
        # Held until the first group is added, inside the next call; from then on they are among the defaults.
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as in torch; any option of the constructor may be the group's own, except the clipping."""
        self.defaults.update(self.__dict__.pop("_new_defaults", {}))
        super().add_param_group(param_group)
        self._forget()
        try:
            self._check_group(self.param_groups[-1])
        except (ValueError, RuntimeError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        check_impl(group["impl"])
        first = self.param_groups[0]
        if (group["max_norm"], group["norm_type"]) != (first["max_norm"], first["norm_type"]):
            raise ValueError(
                f"all groups are clipped together: max_norm and norm_type are {first['max_norm']}, "
                f"{first['norm_type']} in the first group, but {group['max_norm']}, {group['norm_type']} in another"
            )
        if group["max_norm"] is not None and not group["max_norm"] > 0:
            raise ValueError(f"max_norm must be positive or None, got {group['max_norm']}")
        names = self._parameter_names()
        for param in group["params"]:
            check_storage(param, names[param], group["state_dtype"], group["master_weights"])
            reason = why_not_kernels(param, group)
            if reason is not None and (group["fused"] or group["impl"] == "triton"):
                asked = "fused=True" if group["fused"] else "impl='triton'"
                raise RuntimeError(f"{asked} asks for the kernels, but {names[param]} cannot have them: {reason}")
            if group["max_norm"] is not None and _is_dtensor(param):
                raise ValueError(
                    f"max_norm needs the gradients of all ranks, and {names[param]} is a DTensor; clip with "
                    "optim_dist, whose optimizers reduce the norm"
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # while a state dict is loaded: what this instance was constructed with, group by group
        own = self.__dict__.get("_own_options", [{}] * len(self.param_groups))
        for group, options in zip(self.param_groups, own):
            group.update(options)
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._forget()

    def _forget(self) -> None:
        """Drop what was planned: the parameters, states or options are not what they were."""
        self._plan = AdamWPlan()
        self._norms = GradientNorms(self.param_groups[0]["impl"] if self.__dict__.get("param_groups") else "auto")
        self._prepared: _Prepared | None = None
        self._logged_fallback = False
        self.grad_norm: Tensor | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None, *, clip_factor: Tensor | None = None) -> Any:
        """One step; the loss of ``closure``, if there is one.

        Args:
            clip_factor: 0-d tensor that all gradients are multiplied with, as they are read.
        """
        check_capture(self)
        loss = run_closure(closure)
        grads = [param.grad for _, param in self._parameters()]
        prepared = self._prepared
        key = [None if grad is None else grad.dtype for grad in grads]
        if prepared is None or prepared.key != key or prepared.is_stale():
            prepared = self._prepared = self._prepare(key, grads)
        grad_scale, found_inf = self._loss_scaling()
        factor = self._clipped([grad for grad in grads if grad is not None], grad_scale, clip_factor)
        if prepared.places:
            own = [_local(grads[place]) for place in prepared.places]
            self._step_kernels(own, grad_scale, found_inf, factor)
            torch.autograd.graph.increment_version(prepared.params)
        for group, places, params in prepared.with_torch:
            states = [self.state[param] for param in params]
            step_with_torch(group, params, states, places, grad_scale, found_inf, factor)
        return loss

    def _prepare(self, key: list[torch.dtype | None], grads: list[Tensor | None]) -> _Prepared:
        """Sort the parameters that have gradients by what updates them, make their states, and plan the launch."""
        names = self._parameter_names()
        places: list[int] = []
        with_torch: dict[int, tuple[dict[str, Any], list[int], list[Tensor]]] = {}
        reasons: list[str] = []
        parameters = list(self._parameters())
        for place, ((group, param), grad) in enumerate(zip(parameters, grads)):
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"TritonAdamW takes dense gradients, but that of {names[param]} is {grad.layout}; make it dense "
                    "(sparse=False in nn.Embedding) or give the parameter to torch.optim.SparseAdam"
                )
            self._ensure_state(param, group)
            reason = why_not_kernels(param, group)
            if reason is None:
                places.append(place)
            else:
                reasons.append(reason)
                _, own_places, own = with_torch.setdefault(id(group), (group, [], []))
                own_places.append(place)
                own.append(param)
        if reasons and not self._logged_fallback:
            self._logged_fallback = True
            log_fallback(self, reasons)
        params = [parameters[place][1] for place in places]
        if places:
            self._plan_kernels(places, [parameters[place] for place in places], grads)
        return _Prepared(key, places, params, [self.state[param] for param in params], list(with_torch.values()))

    def _ensure_state(self, param: Tensor, group: dict[str, Any]) -> None:
        """Make the state of a parameter that gets its first gradient; put its step count where it is advanced."""
        device = step_device(param, group)
        if not self.state[param]:
            self.state[param] = new_state(param, group, step_device=device)
        step = self.state[param]["step"]
        if step.device != device:
            self.state[param]["step"] = step.to(device)

    def _plan_kernels(
        self, places: list[int], chosen: list[tuple[dict[str, Any], Tensor]], grads: list[Tensor | None]
    ) -> None:
        """Plan the launch over all parameters that the kernels update, whatever their group."""
        states = [self.state[param] for _, param in chosen]
        group_ids = [id(group) for group in self.param_groups]
        self._plan.prepare(
            [_local(param).detach() for _, param in chosen],
            [_local(grads[place]) for place in places],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            steps=[state["step"] for state in states],
            max_exp_avg_sqs=[
                _local(state["max_exp_avg_sq"]) if group["amsgrad"] else None
                for (group, _), state in zip(chosen, states)
            ],
            masters=[_local(state.get("master", state.get("master_low"))) for state in states],
            groups=[group_ids.index(id(group)) for group, _ in chosen],
            stochastic_rounding=[group["stochastic_rounding"] for group, _ in chosen],
            seed=[group["seed"] for group, _ in chosen],
            indices=places,
        )

    def _clipped(self, grads: list[Tensor], grad_scale: Tensor | None, clip_factor: Tensor | None) -> Tensor | None:
        """What gradients are to be multiplied with: the given factor, or the one that ``max_norm`` asks for."""
        max_norm, norm_type = self.param_groups[0]["max_norm"], self.param_groups[0]["norm_type"]
        if max_norm is None:
            return clip_factor
        if clip_factor is not None:
            raise ValueError("this optimizer clips by max_norm itself; pass clip_factor to one without max_norm")
        norm, factor = self._norms.norm_and_factor(grads, norm_type, max_norm)
        if grad_scale is not None:
            norm = norm / grad_scale.to(norm)
            factor = reference.clip_factor(norm, max_norm)
        self.grad_norm = norm
        return factor

    def _step_kernels(
        self, grads: list[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None, factor: Tensor | None
    ) -> None:
        scalars = [
            AdamWScalars(
                group["lr"],
                group["betas"][0],
                group["betas"][1],
                group["eps"],
                group["weight_decay"],
                group["maximize"],
            )
            for group in self.param_groups
        ]
        self._plan.step(grads, scalars, grad_scale=grad_scale, found_inf=found_inf, clip_factor=factor)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class or of ``torch.optim.AdamW``, converted to this instance's formats."""
        own = [{name: group[name] for name in _OWN_OPTIONS} for group in self.param_groups]
        self._own_options = own
        try:
            super().load_state_dict(state_dict)
        finally:
            del self._own_options

    def _place_state(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        return placed_state(param, group, saved, step_device=step_device(param, group))

    def state_dict(self) -> dict[str, Any]:
        """As torch's: step counts on the CPU, unless the group is ``capturable`` or ``fused``."""
        content = super().state_dict()
        content["state"] = {key: plain_state(state) for key, state in content["state"].items()}
        for group in content["param_groups"]:
            if group["capturable"] or group["fused"]:
                continue
            for key in group["params"]:
                if key in content["state"]:
                    state = content["state"][key]
                    content["state"][key] = {**state, "step": state["step"].cpu()}
        return content

    def to_torch_state_dict(self) -> dict[str, Any]:
        """A state dict that ``torch.optim.AdamW`` loads whatever this instance's formats: floats, and torch's keys."""
        content = super().state_dict()
        params = [param for _, param in self._parameters()]
        state = {key: torch_state(params[key], value) for key, value in content["state"].items()}
        own = self.defaults.keys() - torch.optim.AdamW([torch.zeros(1)]).defaults.keys()
        groups = [{name: value for name, value in g.items() if name not in own} for g in content["param_groups"]]
        return {**content, "state": state, "param_groups": groups}

    def explain(self) -> str:
        """A table: what updates each parameter and why, the dtypes, the bytes moved for an element, the launches."""
        names = self._parameter_names()
        rows = []
        for group, param in self._parameters():
            reason = why_not_kernels(param, group)
            state = self.state.get(param) or {}
            dtypes = stored_dtypes(param, group, state)
            path = "triton" if reason is None else "torch"
            notes = [reason] if reason is not None else []
            if dtypes["exp_avg_sq"] == torch.float16:
                notes.append("fp16 second moment: zero where |g| < 2e-4")
            if dtypes["exp_avg_sq"] == torch.bfloat16 and not group["stochastic_rounding"]:
                notes.append("bf16 second moment rounded to nearest: cannot fall at beta2 > 0.996")
            rows.append(
                (
                    names[param],
                    tuple(param.shape),
                    path,
                    "; ".join(notes),
                    *(_short(dtypes[key]) for key in ("param", "grad", "exp_avg", "exp_avg_sq", "master")),
                    f"{bytes_per_element(dtypes, amsgrad=group['amsgrad']):g}",
                )
            )
        header = ("parameter", "shape", "path", "notes", "p", "g", "m", "v", "master", "B/elt")
        launches = self._plan.num_launches + (1 if self.param_groups[0]["max_norm"] is not None else 0)
        planned = (
            f"{launches} launch{'es' * (launches != 1)} a step"
            if self._prepared is not None
            else "not planned before the first step"
        )
        copied = self._plan.num_copied
        footer = [planned] + ([f"{copied} gradients are copied to their parameter's layout"] if copied else [])
        return text_table(header, rows, footer=footer)


class _Prepared:
    """What a step needs that depends on which parameters have gradients, of what dtype, and on their states."""

    def __init__(
        self,
        key: list[torch.dtype | None],
        places: list[int],
        params: list[Tensor],
        states: list[dict[str, Any]],
        with_torch: list[tuple[dict[str, Any], list[int], list[Tensor]]],
    ) -> None:
        self.key = key
        self.places = places
        self.params = params
        self.with_torch = with_torch
        self._states = states
        self._seen = self._look()

    def is_stale(self) -> bool:
        """Whether a parameter was moved, or a state tensor replaced, since this was made."""
        return self._look() != self._seen

    def _look(self) -> list[int]:
        moments = map(itemgetter("exp_avg"), self._states)
        if any(map(_is_dtensor, self.params[:1])):
            return [*map(id, moments)]
        return [*map(Tensor.data_ptr, self.params), *map(id, moments)]


def why_not_kernels(param: Tensor, group: dict[str, Any]) -> str | None:
    """What keeps the kernels from updating ``param``, in a few words; ``None`` if they do."""
    if group["impl"] == "torch":
        return "impl='torch'"
    if group["differentiable"]:
        return "differentiable=True"
    if group["fused"] is False:
        return "fused=False"
    if group["foreach"]:
        return "foreach=True"
    local = _local(param)
    if group["impl"] == "auto" and not group["fused"] and not local.is_cuda:
        return f"it is on {local.device.type}"
    reason = why_not_triton(local)
    if reason is not None:
        return reason
    if any(dtype not in KERNEL_DTYPES for dtype in moment_dtypes(param, group["state_dtype"])):
        return "the kernels take moments in fp32, fp16 and bf16"
    return None if is_dense(local) else "its elements are not dense in memory"


def step_device(param: Tensor, group: dict[str, Any]) -> torch.device:
    """Where the step count of ``param`` lives: with it where a kernel or a graph reads it, else on the CPU."""
    on_device = group["capturable"] or group["fused"] or why_not_kernels(param, group) is None
    return param.device if on_device else torch.device("cpu")


def _is_dtensor(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def _local(tensor: Any) -> Any:
    """The part of a DTensor that is here; any other tensor (or ``None``) itself."""
    return tensor.to_local() if tensor is not None and _is_dtensor(tensor) else tensor


def _short(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
