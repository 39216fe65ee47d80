"""AdamW over ranks: each updates the element ranges that it owns (formula: ``optim_kernels.reference.adamw``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

from torch import Tensor
from torch.optim.optimizer import ParamsT

from optim_dist._optimizers.base import DistOptimizer
from optim_dist._optimizers.construction import name_in_group
from optim_dist._optimizers.options import CommonOptions
from optim_dist._optimizers.repeated_adamw import RepeatedAdamW, UpdateOptions
from optim_dist._optimizers.shards import Item, Route, Shard, StepContext
from optim_dist.plan import RouteName
from optim_dist.planning import code_block
from optim_kernels.adamw_groups import StateDtype, check_adamw_ranges, check_group, check_state, init_state
from optim_kernels.functional import AdamWPlan, adamw_
from optim_kernels.states import MASTER_KEYS, MasterWeights


class AdamWRoute:
    """The elementwise update: any range of any parameter, all groups in one call."""

    def check_group(self, group: dict[str, Any], *, stepped: bool) -> None:
        names = [name_in_group(group, place) for place in range(len(group["params"]))]
        check_group(group, names, loaded=stepped)
        if not stepped:
            # torch tells AdamW's groups from Adam's, whose decay is part of the gradient, by this option
            if not group.get("decoupled_weight_decay", True):
                raise ValueError(
                    "a group has decoupled_weight_decay=False, as those of torch.optim.Adam, and its parameters "
                    "would be decayed as AdamW's; leave the option out, or give the group to torch.optim.Adam"
                )
            check_adamw_ranges(group)  # of tensors too, which may wait for a device

    def views(self, group: dict[str, Any]) -> Sequence[None]:
        return [None] * len(group["params"])

    def block(self, parameter: Tensor, group: Mapping[str, Any]) -> int:
        return code_block(group, parameter)

    def complete_state(self, shard: Shard, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Create missing moments in ``state_dtype``, a step count on the parameter's device, and master weights."""
        init_state(shard.like.detach(), _storage(group), state, whole=shard.parameter)

    def check_state(self, shard: Shard, group: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        check_state(shard.like, _storage(group), state, shard.name)
        if not isinstance(state["step"], Tensor):
            raise ValueError(f"{shard.name} cannot be updated: its step must be a 0-d tensor, got {state['step']!r}")

    def encode_state(self, shard: Shard, group: dict[str, Any], state: dict[str, Any]) -> None:
        # masters wait for the next step, as the parameter they are made of may be loaded later
        moments = {key: value for key, value in state.items() if key not in MASTER_KEYS}
        self.complete_state(shard, {**group, "master_weights": None}, moments)
        state.update(moments)

    def update(self, items: Sequence[Item], context: StepContext, cache: dict[Any, Any]) -> None:
        if "repeated" in cache and not cache["repeated"].is_for(items):
            del cache["repeated"]  # it holds states that may have been replaced
        if context.may_repeat:
            # a list that has come twice will come again
            if "repeated" not in cache and cache.get("latest") is items:
                cache["repeated"] = RepeatedAdamW(items)
            if "repeated" in cache:
                cache["repeated"].run(context)
                return
        # a call takes one kind of rounding, and AMSGrad needs one more tensor
        calls: dict[UpdateOptions, list[Item]] = {}
        for item in items:
            calls.setdefault(UpdateOptions.of(item.group), []).append(item)
        former = cache.get("plans", {})
        plans = cache["plans"] = {options: former.get(options) or AdamWPlan() for options in calls}
        for options, chosen in calls.items():
            self._update(chosen, context, options, plans[options])
        # plain torch makes no launches that could be repeated
        has_launches = all(plan.num_launches for plan in plans.values())
        cache["latest"] = items if context.are_kept and has_launches else None

    def forget(self, cache: dict[Any, Any]) -> None:
        cache.clear()

    def _update(self, items: Sequence[Item], context: StepContext, options: UpdateOptions, plan: AdamWPlan) -> None:
        masters = [item.master for item in items]
        adamw_(
            [item.shard.value for item in items],
            [item.shard.grad for item in items],
            [item.state["exp_avg"] for item in items],
            [item.state["exp_avg_sq"] for item in items],
            steps=[item.state["step"] for item in items],
            lr=[item.group["lr"] for item in items],
            betas=[tuple(item.group["betas"]) for item in items],
            eps=[item.group["eps"] for item in items],
            weight_decay=[item.group["weight_decay"] for item in items],
            maximize=[bool(item.group.get("maximize")) for item in items],
            max_exp_avg_sqs=[item.state["max_exp_avg_sq"] for item in items] if options.amsgrad else None,
            masters=masters if any(master is not None for master in masters) else None,
            stochastic_rounding=options.stochastic_rounding,
            seed=options.seed,
            grad_scale=context.grad_scale,
            found_inf=context.found_inf,
            clip_factor=context.factor,
            indices=[item.shard.number for item in items],
            starts=[item.shard.start for item in items],
            present=[context.count(item.shard) for item in items],
            names=[item.shard.name for item in items],
            plan=plan,
        )


def _storage(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say what a state holds; groups lack those that were left at their defaults."""
    return {key: group.get(key) for key in ("amsgrad", "state_dtype", "master_weights")}


class TritonDistAdamW(DistOptimizer):
    """``torch.optim.AdamW`` whose gradients, states and update are shared out over ranks, element by element.

    Args:
        params: parameters, ``(name, parameter)`` pairs or group dicts.
        state_dtype: dtype of the moments: None (the parameter's), one dtype, a pair (first, second), or ``"int8"`` for
            8-bit codes, which DTensors cannot have. With ``"int8"``, parameters under 4096 elements, or not in
            row-major order, have fp32 moments. Choose it when the optimizer is built, as it cuts such parameters
            between blocks of 256 elements.
        master_weights: for 16-bit parameters: ``"fp32"`` keeps an fp32 copy, ``"split16"`` (bf16) the missing 16 bits,
            on the rank that updates the parameter. The copy follows what others write to the parameter between steps,
            except through ``param.data``.
        stochastic_rounding: round bf16 parameters and moments at random; bits depend on ``seed``, step, parameter and
            element, so that results are the same on any number of ranks.
        options: what every optimizer of this package accepts; see ``optim_dist.Options``.
    """

    _routes: ClassVar[Mapping[RouteName, Route]] = {"adamw": AdamWRoute()}

    def __init__(
        self,
        params: ParamsT | Mapping[str, Tensor],
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        state_dtype: StateDtype = None,
        master_weights: MasterWeights = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        **options: Unpack[CommonOptions],
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        # without options that are None: groups then have the keys of torch's AdamW, whose checkpoints load into them
        storage: dict[str, Any] = {"state_dtype": state_dtype, "master_weights": master_weights}
        if stochastic_rounding:
            storage |= {"stochastic_rounding": stochastic_rounding, "seed": seed}
        defaults |= {key: value for key, value in storage.items() if value is not None}
        super().__init__(params, defaults, options)
