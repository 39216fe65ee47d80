"""One AdamW step on lists of tensors: the kernels where they run, the reference elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optim_kernels import reference
from optim_kernels._dtensors import whole
from optim_kernels._impl import Impl, check_impl
from optim_kernels._options import (
    are_numbers,
    check_betas,
    check_python_numbers,
    check_scalar_tensors,
    check_scalars,
    check_seed,
    check_switches,
    check_values,
)
from optim_kernels.functional._lists import (
    check_computable,
    check_counts,
    check_dense,
    check_flags,
    check_floating,
    check_lengths,
    check_list,
    check_masters,
    check_normal,
    check_shapes,
    check_spread,
    check_tensors,
    check_tensors_or_none,
    check_whole,
    check_writable,
)
from optim_kernels.functional.adamw_plan import AdamWPlan
from optim_kernels.reference.adamw import Betas, Scalar, scalars_of, steps_of


@torch.no_grad()
def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    steps: Tensor | Sequence[Tensor],
    lr: Scalar | Sequence[Scalar],
    betas: Betas | Sequence[Betas],
    eps: float | Sequence[float],
    weight_decay: float | Sequence[float],
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    masters: Sequence[Tensor | None] | None = None,
    maximize: bool | Sequence[bool] = False,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    clip_factor: Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    indices: Sequence[int] | None = None,
    starts: Sequence[int] | None = None,
    present: Sequence[Tensor | None] | None = None,
    names: Sequence[str] | None = None,
    plan: AdamWPlan | None = None,
    impl: Impl = "auto",
) -> None:
    """One AdamW step on every tensor, in place (formula: ``optim_kernels.reference.adamw``).

    Tensors may be views into flat buffers at any offset: a shard made of pieces of several parameters is a list of
    views. Hyperparameters are shared or one a tensor.

    Args:
        params: of a real floating dtype; the kernels take fp32, fp16 and bf16.
        exp_avgs, exp_avg_sqs: first and second moments, of their parameters' shapes and any floating dtype; for the
            kernels also 8-bit codes (``optim_utils.CUBIC8`` and ``QUINTIC8_UNSIGNED``).
        max_exp_avg_sqs: the running maxima of AMSGrad; ``None`` leaves AMSGrad out.
        grads: of any floating dtype; one with a dimension more than its parameter is a stack of slices (one a rank,
            say), summed in order in fp32 before anything else.
        steps: 0-d tensors that count the steps taken so far, one a tensor or shared; each is advanced once. The
            kernels want them in fp32 on the parameters' device.
        masters: per tensor ``None``, its fp32 master, or the int16 low half that completes a bf16 parameter.
        grad_scale: what gradients are divided by; as the next two a 0-d tensor, also a DTensor.
        found_inf: if nonzero, nothing is changed, step counts included.
        clip_factor: what gradients are multiplied by.
        stochastic_rounding: whether bf16 parameters and moments are rounded at random, by the packed stream of
            ``optim_utils.rounding`` with key ``(seed, indices[i])`` from element ``starts[i]`` on.
        present: per tensor ``None`` or a 0-d tensor; 0 leaves tensor, state and step count alone.
        names: what errors call the parameters that the kernels refuse, in place of ``params[i]``.
        plan: an ``AdamWPlan()`` of the caller's, which keeps what stays the same from call to call. It is worth having
            wherever the same tensor objects come again; without one every call builds its tables anew.
        impl: ``"auto"`` takes the kernels for tensors on CUDA, ``"torch"`` the reference, ``"triton"`` the kernels or
            an error.

    Raises:
        ValueError: lists of other lengths, tensors of other shapes, or what the kernels cannot take; by name, before
            anything is written.
        TypeError: something else in place of a number, a tensor or a plan, likewise; DTensors for the kernels, or some
            among other tensors. Their local parts can be stepped.
        RuntimeError: ``impl="triton"`` where the kernels cannot run.
    """
    check_list("params", params)
    if not params:
        check_lengths(0, "params", grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
        return
    check_impl(impl)
    check_switches(stochastic_rounding=stochastic_rounding)
    check_scalar_tensors(grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor)
    if plan is not None and not isinstance(plan, AdamWPlan):
        raise TypeError(f"plan must be an AdamWPlan or None, got {plan!r}")
    # the kernels can update whatever a plan was made for
    planned = plan is not None and impl != "torch" and plan.is_for(params)
    # an empty list stands for none, as in torch's own functions
    more_state: dict[str, Any] = {
        "max_exp_avg_sqs": _filled("max_exp_avg_sqs", max_exp_avg_sqs),
        "masters": _filled("masters", masters),
    }
    hyper: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    scaling: dict[str, Any] = {
        "grad_scale": whole(grad_scale),
        "found_inf": whole(found_inf),
        "clip_factor": whole(clip_factor),
    }
    places: dict[str, Any] = {
        "indices": indices,
        "starts": _filled("starts", starts),
        "present": _filled("present", present),
    }
    rounding: dict[str, Any] = {"stochastic_rounding": stochastic_rounding, "seed": seed}

    lists: dict[str, Any] = {"grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, **more_state}

    def check() -> None:
        _check_arguments(params, steps=steps, hyper=hyper, seed=seed, names=names, **lists, **places)

    if not planned:
        check()
        plan = _plan_for(params, plan, impl)
    check_values(params, **scaling)
    if plan is None:
        _check_for_torch(params, grads, exp_avgs, exp_avg_sqs, steps=steps, **more_state)
        reference.adamw_(
            params, grads, exp_avgs, exp_avg_sqs, steps=steps, **more_state, **hyper, **scaling, **places, **rounding
        )
        return
    try:
        seen = plan.look_at(grads)
        plan.prepare(
            params,
            seen,
            exp_avgs,
            exp_avg_sqs,
            steps=steps,
            groups=range(len(params)),  # each tensor has hyperparameters of its own
            names=names,
            **more_state,
            **places,
            **rounding,
        )
        plan.step(seen, scalars_of(len(params), **hyper), **scaling)
    except Exception:
        # without the checks that are spared where all is well, the error need not name what is wrong
        if planned:
            check()
        check_dense(names, **lists)
        raise
    # tell autograd, which then refuses to differentiate through the overwritten values
    torch.autograd.graph.increment_version(params)


def _filled(name: str, each: Sequence[Any] | None) -> Any:
    """The list, or ``None`` if it is empty."""
    if each is None:
        return None
    check_list(name, each)
    return each or None


def _check_arguments(
    params: Sequence[Tensor], *, hyper: Mapping[str, Any], steps: Any, seed: object, **lists: Sequence[Any] | None
) -> None:
    """Raise, naming it, for an argument of another kind, or a list of another length, than `adamw_` takes."""
    check_seed(seed)
    check_tensors(params=params)
    _check_hyperparameters(params, **hyper)
    check_counts(steps)
    counts = None if isinstance(steps, Tensor) else steps
    check_lengths(len(params), "params", steps=counts, **_lists_among(hyper), **lists)
    check_tensors(**{name: lists[name] for name in ("grads", "exp_avgs", "exp_avg_sqs")})
    check_tensors_or_none(**{name: lists[name] for name in ("max_exp_avg_sqs", "masters")})
    check_whole(**{name: lists[name] for name in ("indices", "starts")})
    check_flags(present=lists["present"])


def _check_for_torch(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    steps: Tensor | Sequence[Tensor],
    max_exp_avg_sqs: Sequence[Tensor] | None,
    masters: Sequence[Tensor | None] | None,
) -> None:
    """Raise for tensors that the reference would broadcast, or find when others have been written."""
    moments = {"exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs, "max_exp_avg_sqs": max_exp_avg_sqs}
    check_tensors(**moments)
    check_floating(params=params, grads=grads, **moments)
    check_computable(params=params)
    check_spread(params, "params", grads=grads, **moments, masters=masters)
    _check_grads(params, grads)
    check_masters(params, masters)
    check_shapes(params, "params", **moments, masters=masters)
    check_writable(params=params, **moments, masters=masters)
    counts = steps_of(steps, len(params))
    check_normal(range(len(params)), params=params, **moments, masters=masters, steps=counts)


def _plan_for(params: Sequence[Tensor], plan: AdamWPlan | None, impl: Impl) -> AdamWPlan | None:
    """The caller's plan, or a new one, where the kernels update all parameters; ``None`` where plain torch does."""
    on_cuda = [p.is_cuda for p in params]
    if impl == "auto" and any(on_cuda) and not all(on_cuda):
        raise ValueError("params are on CUDA and elsewhere; call adamw_ once for each device")
    # found without a plan, which imports the compiler (`not_compiled`)
    if impl == "torch" or (impl == "auto" and not any(on_cuda)):
        return None
    plan = plan or AdamWPlan()
    return plan if plan.can_take(params, impl) else None


def _lists_among(hyper: Mapping[str, Any]) -> dict[str, Sequence[Any] | None]:
    """The hyperparameters that are listed, with one entry a tensor; ``None`` for those that all tensors share."""
    lists = {name: _listed(value) for name, value in hyper.items()}
    # a single pair is a sequence, too
    return lists | {"betas": hyper["betas"] if isinstance(hyper["betas"][0], Sequence) else None}


def _listed(value: object) -> Sequence[Any] | None:
    """A hyperparameter that is listed, with one entry a tensor; ``None`` for one that all tensors share."""
    return value if isinstance(value, Sequence) and not isinstance(value, str) else None


def _check_hyperparameters(
    params: Sequence[Tensor], lr: Any, betas: Any, eps: Any, weight_decay: Any, maximize: Any
) -> None:
    """Raise for a hyperparameter of the wrong kind or without a value, whether tensors share it or each has its own."""
    for check, name, value in (
        (check_scalars, "lr", lr),
        (check_scalars, "eps", eps),
        (check_scalars, "weight_decay", weight_decay),
        (check_switches, "maximize", maximize),
    ):
        values = _listed(value) or [value]
        if are_numbers(values):
            check_python_numbers([name] * len(values), values)
            continue
        for each in values:
            check(**{name: each})
            check_values(params, **{name: each})
    for pair in betas if _listed(betas) and _listed(betas[0]) else [betas]:
        if _listed(pair) is None or len(pair) != 2:
            raise ValueError(f"betas must be a pair, or one for each of the params, got {betas!r}")
        numbers = {"betas[0]": pair[0], "betas[1]": pair[1]}
        check_scalars(**numbers)
        check_values(params, **numbers)
        check_betas(pair)


def _check_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` for a gradient that the reference would broadcast, or a stack without a slice."""
    for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
        if grad.shape != p.shape and (grad.shape[1:] != p.shape or not len(grad)):
            raise ValueError(
                f"grads[{i}] must have its parameter's shape {tuple(p.shape)}, or be a stack of such, got "
                f"{tuple(grad.shape)}"
            )
        if grad.device != p.device:
            raise ValueError(f"grads[{i}] must be where params[{i}] is, on {p.device}, got {grad.device}")
