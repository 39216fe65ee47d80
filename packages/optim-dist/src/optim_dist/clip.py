"""Clipping by the global norm over ranks and optimizers, without a pass that scales the gradients.

    factor = min(1, max_norm / (norm + 1e-6))

stays on the device and is read by the next ``step()``; ``.grad`` in memory is not scaled. Of several factors before one
step the smallest counts; each call returns the norm of unscaled gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from optim_dist._listing import listed
from optim_dist._optimizers.live import LiveOptimizer, live_optimizers
from optim_dist._optimizers.norm import combine_norms
from optim_kernels.clip import clip_factor


@torch.no_grad()
def clip_grad_norm_(
    optimizer_or_parameters: LiveOptimizer | Iterable[LiveOptimizer] | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """The norm of all gradients together; the next ``step()`` of their optimizers scales them to ``max_norm``.

    Args:
        optimizer_or_parameters: optimizers of this package, or all parameters of one or more optimizers, which are then
            looked up; frozen parameters that have no gradient may be left out.
        error_if_nonfinite: raise if the norm is NaN or infinite; this waits for the device.
        foreach: torch's argument; it has no effect.

    Raises:
        TypeError: for anything but optimizers of this package and tensors.
        ValueError: for a ``max_norm`` that is no number of at least 0, for a negative ``norm_type``, for parameters
            that no live optimizer has, for only some of an optimizer's, or for optimizers of different ranks.
    """
    # a negative one would turn every gradient around
    if not isinstance(max_norm, Tensor) and not (isinstance(max_norm, Real) and max_norm >= 0):
        raise ValueError(f"max_norm must be a number of at least 0, or inf, got {max_norm!r}")
    if not float(norm_type) >= 0:
        raise ValueError(f"norm_type must be at least 0, or inf, got {norm_type}")
    optimizers = _optimizers(optimizer_or_parameters)
    _check_ranks(optimizers)
    norm = combine_norms([optimizer.measure_norm(norm_type) for optimizer in optimizers], float(norm_type))
    norm = norm.to(reduce(torch.promote_types, [optimizer.plan.scalar_dtype for optimizer in optimizers]))
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"the total norm of order {norm_type} is {norm.item()}, so gradients cannot be clipped; "
            "pass error_if_nonfinite=False to scale them all the same"
        )
    for optimizer in optimizers:
        optimizer.clip_with(clip_factor(norm, max_norm), norm)
    return norm


def _check_ranks(optimizers: Sequence[LiveOptimizer]) -> None:
    """Refuse optimizers of different ranks: a norm that is not the same on all ranks of one would scale parts of it."""
    first, *others = [sorted(optimizer.communicator.ranks) for optimizer in optimizers]
    for ranks in others:
        if ranks != first:
            raise ValueError(
                f"optimizers that work on different ranks, {first} and {ranks}, have no joint norm that all ranks "
                "know; clip each by itself, or get norms by clip_grad_norm_(optimizer, math.inf), combine them over "
                "all ranks and give every step() the same clip_factor="
            )


def _with_gradients(optimizer: LiveOptimizer) -> set[int]:
    """``id`` of every parameter that has a gradient, or may get one: not of those that were frozen since."""
    trained = (entry.parameter for entry in optimizer.entries)
    return {id(parameter) for parameter in trained if parameter.requires_grad or parameter.grad is not None}


def _optimizers(given: Any) -> list[LiveOptimizer]:
    is_listed = isinstance(given, Iterable) and not isinstance(given, LiveOptimizer | Tensor)
    items: list[Any] = list(given) if is_listed else [given]
    if not items:
        raise ValueError(
            "clip_grad_norm_ got no parameters; give it those of an optimizer of optim_dist, or the optimizer (a "
            "generator such as model.parameters() lists its parameters once)"
        )
    for item in items:
        if not isinstance(item, LiveOptimizer | Tensor):
            raise TypeError(
                f"clip_grad_norm_ takes optimizers of optim_dist, or parameters (model.parameters()), got a "
                f"{type(item).__name__}"
            )
    optimizers = [item for item in items if isinstance(item, LiveOptimizer)]
    if optimizers and len(optimizers) == len(items):
        return list(dict.fromkeys(optimizers))  # each counts once
    if optimizers:
        raise TypeError("clip_grad_norm_ takes optimizers, or the parameters of optimizers, and got both in one list")
    wanted = {id(item) for item in items}
    found: list[LiveOptimizer] = []
    covered: set[int] = set()
    # newest first: an older optimizer over the same parameters may not have been garbage-collected yet
    for optimizer in reversed(live_optimizers()):
        trained = optimizer.trained_ids()
        if not (trained & wanted) - covered:
            continue
        if not _with_gradients(optimizer) <= wanted:
            raise ValueError(
                f"only some of the parameters of a {type(optimizer).__name__} were given; gradients are clipped "
                "by one norm: pass all of them, or the optimizer"
            )
        if trained & covered:
            raise ValueError(
                f"some of the parameters of a {type(optimizer).__name__} have got a newer optimizer, others have not; "
                "close() the one that is not used any more, or pass the optimizers"
            )
        found.insert(0, optimizer)
        covered |= trained
    foreign = [item for item in items if id(item) not in covered and (item.requires_grad or not found)]
    if foreign:
        shapes = listed([str(tuple(item.shape)) for item in foreign], 4)
        raise ValueError(
            f"{len(foreign)} of {len(items)} parameters ({shapes}) belong to no optimizer of optim_dist; "
            "clip those by torch.nn.utils.clip_grad_norm_"
        )
    return found
