"""The Muon step over lists of tensors: grouped launches with a plan, else one tensor after another.

The formulas are those of `optim_kernels.reference.muon`; parameters are read as matrices through `MatrixView`s.
Tensors may be views into flat buffers. One after another they are stepped in plain torch around `newton_schulz`, which
has kernels of its own; a `MuonPlan` has the whole step of many matrices in a few launches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from optim_kernels._dtensors import whole
from optim_kernels._impl import Impl
from optim_kernels._options import (
    check_scalar_tensors,
    check_scalars,
    check_seed,
    check_switches,
    check_values,
    without_dims,
)
from optim_kernels.functional._device_scalars import brought_to
from optim_kernels.functional._lists import (
    check_computable,
    check_floating,
    check_lengths,
    check_list,
    check_masters,
    check_normal,
    check_shapes,
    check_spread,
    check_strided,
    check_tensors,
    check_whole,
    check_writable,
)
from optim_kernels.functional._muon_checks import (
    Views,
    check_layouts,
    check_random_bits,
    check_step,
    check_update,
    num_second_moments,
    views_of,
)
from optim_kernels.functional.muon_plan import MuonPlan
from optim_kernels.orthogonalization import NSConfig, newton_schulz_with
from optim_kernels.reference.muon import (
    MuonRule,
    Scalar,
    ScaleRule,
    check_scale,
    direction_,
    lr_scale,
    momentum_,
    second_moment_shape,
    updated,
    wide_dtype,
)
from optim_kernels.reference.storage import Rounding, gradient_scale, read_param, write_param
from optim_utils.param_groups import MatrixView

__all__ = ["apply_muon_update_", "muon_", "muon_update", "new_second_moment"]


@torch.no_grad()
def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    lr: Scalar,
    weight_decay: Scalar = 0.0,
    momentum: Scalar = 0.95,
    nesterov: bool = True,
    ns: NSConfig | None = None,
    scale: ScaleRule = "original",
    second_moments: Sequence[Tensor] | None = None,
    beta2: Scalar = 0.0,
    row_equilibrate: bool = False,
    renormalize: bool = False,
    cautious: bool = False,
    maximize: bool = False,
    views: Views | None = None,
    masters: Sequence[Tensor | None] | None = None,
    clip_factor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    stochastic_rounding: bool = False,
    seed: int = 0,
    steps: Sequence[int] | None = None,
    indices: Sequence[int] | None = None,
    plan: MuonPlan | None = None,
    impl: Impl = "auto",
) -> None:
    """One Muon step on every parameter, in place; gradients are only read.

    Args:
        params, grads, momentum_buffers: matrices, or batches of them, ``[..., r, c]``, unless ``views`` say more; three
            tensors of one shape each.
        lr, weight_decay, momentum, beta2: floats or 0-d tensors.
        ns: the orthogonalization; ``None`` is ``NSConfig()``.
        scale: what lr is multiplied by (`reference.muon.MuonRule`).
        second_moments: NorMuon's V (`new_second_moment`), moved with ``beta2``; ``None`` leaves NorMuon out.
        views: how each parameter is read as matrices; ``None``: the last two dimensions, as stored.
        masters: fp32 masters, or int16 low halves (split16), of 16-bit parameters.
        clip_factor, grad_scale: 0-d tensors: gradients are multiplied by the former and divided by the latter.
        found_inf: if nonzero, nothing is changed. The host reads it, unless a plan steps all parameters.
        stochastic_rounding: round bf16 parameters at random; the bits follow from ``seed``, ``steps`` and ``indices``.
        steps: for each parameter the number of this step, from 1; needed with ``stochastic_rounding``, because the same
            bits in every step would lose the same small updates again and again.
        indices: for each parameter its number in the model; by default its place in the list.
        plan: a ``MuonPlan()`` of the caller's. Where the kernels run, it steps all matrices together in a few launches,
            and keeps their tables and the recorded launches from call to call; U is then computed from B as it is
            stored. Without a plan, parameters are stepped one after another.
        impl: what runs Newton–Schulz, and with a plan the whole step: ``"auto"`` takes the kernels for tensors on CUDA,
            ``"torch"`` plain torch, ``"triton"`` the kernels or an error.

    Raises:
        ValueError: lists of other lengths, tensors of other shapes or dtypes, or a bad option; by name, before anything
            is written. With a plan also what its kernels cannot take: second moments that are not contiguous fp32, and
            parameters that share memory.
        TypeError: something else in place of a number, a view, a plan or an `NSConfig`, likewise; and DTensors in the
            lists, of whose matrices a rank may have parts.
        RuntimeError: ``impl="triton"`` where the kernels cannot run; a step that a CUDA graph captures with
            ``stochastic_rounding``, or with a plan that has not run it before.
    """
    check_list("params", params)
    check_switches(stochastic_rounding=stochastic_rounding)
    check_seed(seed)
    if stochastic_rounding and steps is None:
        raise ValueError("stochastic_rounding=True needs steps, for each parameter the number of this step, from 1")
    check_scalar_tensors(grad_scale=grad_scale, found_inf=found_inf, clip_factor=clip_factor)
    check_scalars(lr=lr, weight_decay=weight_decay, momentum=momentum, beta2=beta2)
    if plan is not None and not isinstance(plan, MuonPlan):
        raise TypeError(f"plan must be a MuonPlan or None, got {plan!r}")
    choices: dict[str, Any] = {
        "nesterov": nesterov,
        "scale": scale,
        "row_equilibrate": row_equilibrate,
        "renormalize": renormalize,
        "cautious": cautious,
        "maximize": maximize,
    }
    rule = MuonRule(**choices)
    shared: dict[str, Any] = {"ns": ns, "second_moments": second_moments, "views": views, "masters": masters}
    shared |= {"indices": indices, "impl": impl}
    alone: Collection[int] = range(len(params))
    if plan is None or impl == "torch":
        plan = None
        all_views = check_step(params, grads, momentum_buffers, steps=steps, **shared)
    else:
        check_lengths(len(params), "params", steps=steps)
        check_whole(steps=steps)
        rounding: dict[str, Any] = {"stochastic_rounding": stochastic_rounding, "seed": seed}
        plan.prepare(params, grads, momentum_buffers, **choices, **shared, **rounding)
        plan.check_run(steps if stochastic_rounding else None)
        all_views, alone = plan.views, plan.others
    check_normal(
        alone, params=params, momentum_buffers=momentum_buffers, second_moments=second_moments, masters=masters
    )
    check_values(params, lr=lr, weight_decay=weight_decay, momentum=momentum, beta2=beta2)
    check_values(params, clip_factor=clip_factor, grad_scale=grad_scale, found_inf=found_inf)
    if stochastic_rounding:
        check_random_bits(params, masters)
    factor, found_inf = gradient_scale(whole(clip_factor), whole(grad_scale)), whole(found_inf)
    if alone and not (found_inf is not None and bool(found_inf.item())):
        bits: list[Rounding] | None = None
        if stochastic_rounding:
            numbers = indices if indices is not None else range(len(params))
            bits = [Rounding(seed, numbers[i], 0, (steps or ())[i]) for i in alone]
        own_views = [all_views[i] for i in alone]
        updates = _updates(
            [grads[i] for i in alone],
            [momentum_buffers[i] for i in alone],
            momentum=momentum,
            rule=rule,
            ns=ns or NSConfig(),
            second_moments=None if second_moments is None else [second_moments[i] for i in alone],
            beta2=beta2,
            views=own_views,
            clip_factor=factor,
            impl=impl,
        )
        _apply(
            [params[i] for i in alone],
            updates,
            lr=lr,
            weight_decay=weight_decay,
            scale=scale,
            cautious=cautious,
            views=own_views,
            masters=None if masters is None else [masters[i] for i in alone],
            bits=bits,
        )
    if plan is not None:
        plan.run(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            beta2=beta2,
            factor=factor,
            found_inf=found_inf,
            steps=steps if stochastic_rounding else None,
        )


def muon_update(
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    momentum: Scalar = 0.95,
    rule: MuonRule | None = None,
    ns: NSConfig | None = None,
    second_moments: Sequence[Tensor] | None = None,
    beta2: Scalar = 0.0,
    views: Views | None = None,
    clip_factor: Tensor | None = None,
    impl: Impl = "auto",
) -> list[Tensor]:
    """The update direction O of every gradient, each in its gradient's shape, fp32 (fp64 for fp64); updates buffers.

    The first half of `muon_`, for callers that do something with O before `apply_muon_update_`, the second.

    Raises: as `muon_`.
    """
    check_scalar_tensors(clip_factor=clip_factor)
    check_scalars(momentum=momentum, beta2=beta2)
    if not isinstance(rule, MuonRule | None):
        raise TypeError(f"rule must be a MuonRule or None, got {rule!r}; give MuonRule(nesterov=...)")
    all_views = check_update(grads, momentum_buffers, ns=ns, second_moments=second_moments, views=views, impl=impl)
    check_normal(range(len(grads)), momentum_buffers=momentum_buffers, second_moments=second_moments)
    check_values(grads, momentum=momentum, beta2=beta2, clip_factor=clip_factor)
    return _updates(
        grads,
        momentum_buffers,
        momentum=momentum,
        rule=rule or MuonRule(),
        ns=ns or NSConfig(),
        second_moments=second_moments,
        beta2=beta2,
        views=all_views,
        clip_factor=whole(clip_factor),
        impl=impl,
    )


def _updates(
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    momentum: Scalar,
    rule: MuonRule,
    ns: NSConfig,
    second_moments: Sequence[Tensor] | None,
    beta2: Scalar,
    views: Sequence[MatrixView],
    clip_factor: Tensor | None,
    impl: Impl,
) -> list[Tensor]:
    """`muon_update` of what was checked."""
    momentum, beta2 = without_dims(momentum), without_dims(beta2)
    updates = []
    for i, (grad, buffer) in enumerate(zip(grads, momentum_buffers, strict=True)):
        momentum, beta2 = brought_to(grad.device, momentum), brought_to(grad.device, beta2)
        u = momentum_(grad, buffer, momentum=momentum, rule=rule, clip_factor=clip_factor)
        if u.stride() != buffer.stride():
            # views need the strides of parameter and state, whatever the gradient's are
            u = torch.empty_like(buffer, dtype=u.dtype).copy_(u)
        o = torch.empty_like(u)
        view = views[i]
        parts = _second_moment_parts(second_moments, i, view)
        for source, target, v in zip(view.views(u), view.views(o), parts, strict=True):
            target.copy_(direction_(source, lambda x: newton_schulz_with(x, ns, impl), rule, v, beta2))
        updates.append(o)
    return updates


@torch.no_grad()
def apply_muon_update_(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: Scalar,
    weight_decay: Scalar = 0.0,
    scale: ScaleRule = "original",
    cautious: bool = False,
    views: Views | None = None,
    masters: Sequence[Tensor | None] | None = None,
    bits: Sequence[Rounding] | None = None,
) -> None:
    """Decay every parameter and subtract ``lr · scale`` times its update, in place.

    Raises: as `muon_`; of DTensors only those among other tensors are refused.
    """
    check_scale(scale)
    check_switches(cautious=cautious)
    check_scalars(lr=lr, weight_decay=weight_decay)
    check_list("params", params)
    check_lengths(len(params), "params", updates=updates, views=views, masters=masters, bits=bits)
    check_tensors(params=params, updates=updates)
    check_spread(params, "params", updates=updates, masters=masters)
    check_masters(params, masters)
    check_shapes(params, "params", updates=updates, masters=masters)
    check_floating(params=params, updates=updates)
    check_computable(params=params, updates=updates)
    check_strided(updates=updates)
    check_writable(params=params, masters=masters)
    all_views = views_of(views, params, "params")
    check_layouts(all_views, params=params, updates=updates, masters=masters)
    for i, each in enumerate(bits or ()):
        if not isinstance(each, Rounding | None):
            raise TypeError(f"bits[{i}] must be a Rounding or None, got {each!r}")
    check_normal(range(len(params)), params=params, masters=masters)
    check_values(params, lr=lr, weight_decay=weight_decay)
    _apply(
        params,
        updates,
        lr=lr,
        weight_decay=weight_decay,
        scale=scale,
        cautious=cautious,
        views=all_views,
        masters=masters,
        bits=bits,
    )


def _apply(
    params: Sequence[Tensor],
    updates: Sequence[Tensor],
    *,
    lr: Scalar,
    weight_decay: Scalar,
    scale: ScaleRule,
    cautious: bool,
    views: Sequence[MatrixView],
    masters: Sequence[Tensor | None] | None,
    bits: Sequence[Rounding] | None,
) -> None:
    """`apply_muon_update_` of what was checked."""
    lr, weight_decay = without_dims(lr), without_dims(weight_decay)
    for i, (p, o) in enumerate(zip(params, updates, strict=True)):
        lr, weight_decay = brought_to(p.device, lr), brought_to(p.device, weight_decay)
        master = None if masters is None else masters[i]
        old = read_param(p, master).to(wide_dtype(p, o))
        new = torch.empty_like(old)
        view = views[i]
        for old_part, new_part, o_part in zip(view.views(old), view.views(new), view.views(o), strict=True):
            factor = lr_scale(scale, o_part.shape, p.shape)
            new_part.copy_(updated(old_part, o_part, lr=lr, scale=factor, weight_decay=weight_decay, cautious=cautious))
        write_param(p, master, new, None if bits is None else bits[i])


def new_second_moment(param: Tensor, view: MatrixView | None = None) -> Tensor:
    """A zero second moment for ``param``, fp32 (fp64 for fp64): a value a row of matrices with r ≥ c, else a column.

    For one matrix, or batch, the shape is ``(..., r, 1)`` or ``(..., 1, c)``; several views share a flat tensor, in the
    order of the views.
    """
    view = view or MatrixView.identity(param.shape)
    shapes = [second_moment_shape(shape) for shape in view.shapes]
    shape = shapes[0] if len(shapes) == 1 else (num_second_moments(view),)
    return torch.zeros(shape, dtype=wide_dtype(param), device=param.device)


def _second_moment_parts(moments: Sequence[Tensor] | None, i: int, view: MatrixView) -> list[Tensor] | list[None]:
    """Parameter i's second moment, split and shaped for each of its views."""
    if moments is None:
        return [None] * len(view.shapes)
    shapes = [second_moment_shape(shape) for shape in view.shapes]
    moment = moments[i]
    if len(shapes) == 1 and moment.shape == shapes[0]:
        return [moment]
    # views, because they are written to
    parts = (moment if moment.ndim == 1 else moment.view(-1)).split([prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
