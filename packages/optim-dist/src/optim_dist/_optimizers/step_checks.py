"""Checks before ranks begin a step together, and comparisons over ranks in debug mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from optim_dist._listing import listed
from optim_dist._optimizers.agreement import compare_options, describe_groups, digest
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.kept_items import are_same
from optim_dist._optimizers.layouts import local
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import ParameterSpec
from optim_redist import Layout


def check_factor(clip_factor: object) -> None:
    """Refuse a ``clip_factor`` that gradients cannot be multiplied by, before any rank has begun the step."""
    if clip_factor is None:
        return
    if not isinstance(clip_factor, Tensor):
        raise TypeError(f"clip_factor must be a 0-d tensor, got {clip_factor!r}; give torch.tensor({clip_factor!r})")
    if clip_factor.numel() != 1:
        raise ValueError(
            f"clip_factor must be a 0-d tensor, one number for all gradients, got shape {tuple(clip_factor.shape)}"
        )


def check_listed(groups: Sequence[dict[str, Any]], planned: Sequence[Sequence[Tensor]]) -> None:
    """Refuse groups that list other parameters than when the plan was made: new ones would never be updated."""
    listed = [group["params"] for group in groups]
    if len(listed) == len(planned) and all(map(are_same, listed, planned)):
        return
    for index, (now, then) in enumerate(zip_longest(listed, planned, fillvalue=())):
        if not are_same(now, then):
            kept = len({id(parameter) for parameter in now} & {id(parameter) for parameter in then})
            raise RuntimeError(
                f"param_groups[{index}] was exchanged after the optimizer was built: of {len(then)} parameters {kept} "
                f"are among the {len(now)} that it has now; use add_param_group, or build a new optimizer"
            )


def check_left_out(left_out: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse gradients of parameters that were frozen when the plan was made."""
    for name, parameter in left_out:
        if parameter.grad is not None:
            raise RuntimeError(
                f"{name} of shape {tuple(parameter.shape)} has a gradient but did not need one when the optimizer "
                "was planned; after unfreezing parameters call rebuild_plan(), on all ranks, before the next backward "
                "pass (now: zero_grad() first)"
            )


def check_no_gradients(names: Mapping[int, str], groups: Iterable[dict[str, Any]]) -> None:
    """Refuse gradients: they belong to the plan under which they arrived. ``names`` is keyed by ``id``."""
    found = [names[id(parameter)] for group in groups for parameter in group["params"] if parameter.grad is not None]
    if found:
        raise RuntimeError(
            f"{listed(found, 4)} have gradients, which would be lost; call rebuild_plan() after zero_grad()"
        )


def check_missing(
    groups: Sequence[dict[str, Any]],
    specs: Sequence[ParameterSpec],
    entries: Sequence[Entry],
    counts: Tensor | None,
    has_gradient: Callable[[int], bool],
) -> None:
    """Raise, on all ranks and before anything changes, if a group with ``missing_grad="raise"`` lacks a gradient.

    Reads a counter on the host, which waits for the device, but only if this rank itself has no gradient.

    Args:
        counts: for each of ``entries``, on how many ranks it has a gradient.
        has_gradient: whether the entry of an index has a gradient on this rank.
    """
    if all(group.get("missing_grad") != "raise" for group in groups):
        return
    for index, (spec, entry) in enumerate(zip(specs, entries)):
        # missing_grad is an option of Muon; an AdamW group may have it, as any unknown option, without effect
        wants_one = spec.route == "muon" and groups[entry.group].get("missing_grad") == "raise"
        if not wants_one or not entry.parameter.requires_grad or has_gradient(index):
            continue
        # if this rank has no gradient of a DTensor, no rank has
        if spec.sharding or counts is None or not counts[index].item():
            raise RuntimeError(f"{entry.name} has no gradient on any rank; pass missing_grad='skip' or 'zero'")


def check_unscaled(optimizer: Optimizer, collects_under_backward: bool) -> None:
    """Refuse a ``GradScaler`` that has unscaled ``.grad`` after backward had brought gradients into buckets."""
    is_unscaled = getattr(optimizer, "found_inf", None) is not None and getattr(optimizer, "grad_scale", None) is None
    if is_unscaled and collects_under_backward:
        raise RuntimeError(
            "scaler.unscale_() comes too late: with accumulation_steps= or no_sync() backward has reduced gradients "
            "already, or copied them to be reduced; leave it out and clip by max_norm= of the optimizer, or build that "
            "with overlap=False"
        )


def check_scales(scales: Sequence[float], ranks: Sequence[int]) -> None:
    """Refuse ``GradScaler`` scales that differ between ranks; 0 if gradients were unscaled before the sum."""
    for rank, scale in zip(ranks, scales):
        if scale != scales[0]:
            raise RuntimeError(
                f"gradients were scaled by {scales[0]} on rank {ranks[0]}, by {scale} on rank {rank}, so that their "
                "sum is of no use: the scaler of one rank has seen an infinity alone. Take the maximum of its "
                "found_inf over ranks before every scaler.update(), as torch's ShardedGradScaler does in "
                "scaler.unscale_(), and start all ranks again from the newest checkpoint"
            )


def compare_scalars(
    groups: Sequence[dict[str, Any]], entries: Sequence[Entry], factor: Tensor | None, communicator: Communicator
) -> None:
    """Refuse clip factors or current hyperparameters that differ between ranks. Collective."""
    described = describe_groups(groups, entries)
    if factor is not None:
        described["the factor of clip_grad_norm_"] = str(factor.item())
    compare_options(described, communicator)


def compare_gradients(entries: Iterable[Entry], communicator: Communicator) -> None:
    """Refuse DTensors with a gradient on only some ranks: these alone would step their part, or their replica."""
    cut = [entry for entry in entries if isinstance(entry.parameter, DTensor)]
    found = communicator.gather_json([entry.parameter.grad is not None for entry in cut])
    first = communicator.ranks[0]
    for rank, theirs in zip(communicator.ranks, found):
        for entry, here, there in zip(cut, found[0], theirs, strict=True):
            if here != there:
                raise RuntimeError(
                    f"{entry.name} is a DTensor that has a gradient on rank {first if here else rank} and none on rank "
                    f"{rank if here else first}; give it one on all ranks (zeros, say) or on none"
                )


def compare_replicas(supposed: Iterable[tuple[Entry, Layout]], communicator: Communicator) -> None:
    """Refuse DTensors of which ranks hold replicas, as their layouts say, that differ."""
    listed = list(supposed)
    digests = communicator.gather_json([digest(local(entry.parameter)) for entry, _ in listed])
    by_rank = dict(zip(communicator.ranks, digests))
    for place, (entry, layout) in enumerate(listed):
        firsts: dict[tuple[int, ...], int] = {}
        for rank in layout.mesh.ranks:
            coordinates = enumerate(layout.mesh.coordinates[rank])
            part = tuple(number for axis, number in coordinates if axis not in layout.replicated_axes)
            first = firsts.setdefault(part, rank)
            if by_rank[rank][place] != by_rank[first][place]:
                raise RuntimeError(
                    f"{entry.name} is a DTensor of which ranks {first} and {rank} hold replicas, but they have other "
                    "numbers there; begin with the same on both (by the same seed, or load a checkpoint). What is not "
                    "meant to be the same, as experts are not, needs an optimizer for each mesh, with its process_group"
                )
