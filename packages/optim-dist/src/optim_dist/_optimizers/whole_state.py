"""The state of all ranks in torch's one-process form: put together piece by piece, and cut into parts again."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optim_dist._optimizers.agreement import check_same_entries, refused_together
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.layouts import layout_of, local
from optim_dist._optimizers.live import LiveOptimizer
from optim_dist._optimizers.loaded_state import unusable
from optim_dist._optimizers.shards import Shard
from optim_dist._optimizers.states import (
    as_numbers,
    in_memory_order,
    packed_groups,
    stamped,
)
from optim_dist._plain_names import plain_names
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import ParameterSpec, dtype_name
from optim_kernels.states import ELEMENTWISE_KEYS, make_groups_plain
from optim_redist import Layout, Mesh, redistribute_local
from optim_redist.index_sets import intervals


def full_state_dict(optimizer: LiveOptimizer, what: str, to_chunk: int = 0) -> dict[str, Any]:
    """The one-process state on the CPU of the owner of ``to_chunk``; ``{}`` elsewhere. Owners send each piece once.

    Collective; ``what`` is what errors call it.
    """
    communicator = optimizer.communicator
    with refused_together(f"{what} gathered nothing", communicator):
        optimizer.check_listed()
        mine = {shard.index: optimizer.kept_state(shard) for shard in optimizer.shards()}
        # groups are copied with their tensors: schedulers change an lr in place
        groups = copy.deepcopy(packed_groups(optimizer))
    specs = optimizer.plan.parameters
    cut_entries = {specs[index].name: sorted(state) for index, state in mine.items() if specs[index].sharding}
    check_same_entries(cut_entries, f"{what} gathered nothing", communicator)
    with optimizer.begun_together(what):
        full = {"state": _whole_states(optimizer, mine, to_chunk), "param_groups": groups}
        make_groups_plain(full)
    return full if communicator.rank == to_chunk else {}


def _whole_states(
    optimizer: LiveOptimizer, mine: Mapping[int, dict[str, Any]], to_chunk: int
) -> dict[int, dict[str, Tensor | None]]:
    """Whole states keyed by number in torch's form; ``mine`` is what this rank has, by plan index. Collective."""
    plan, communicator = optimizer.plan, optimizer.communicator
    plain = {str(index): _described(state) for index, state in mine.items() if not plan.parameters[index].sharding}
    described = communicator.gather_json(plain)
    states: dict[int, dict[str, Tensor | None]] = {}
    for index, (spec, entry) in enumerate(zip(plan.parameters, optimizer.entries)):
        if spec.sharding:
            layout = optimizer.layouts[index]
            # in one order on all ranks
            entries = sorted(mine[index].items())
            whole = {key: on_one_rank(value, layout, communicator, to_chunk) for key, value in entries}
        else:
            whole = {}
            for key, form in described[plan.ranges(index)[0].rank].get(str(index), {}).items():
                whole[key] = _gathered(key, form, mine.get(index, {}).get(key), optimizer, index, to_chunk)
        if whole and communicator.rank == to_chunk:
            states[entry.number] = whole
    return states


def _described(state: dict[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """The dtype and shape of each tensor, as JSON values."""
    return {key: (dtype_name(value.dtype), list(value.shape)) for key, value in state.items()}


def _gathered(
    key: str, form: tuple[str, list[int]], mine: Tensor | None, optimizer: LiveOptimizer, index: int, to_chunk: int
) -> Tensor | None:
    """A whole state tensor on the CPU of the owner of ``to_chunk``, each piece from its owner; None elsewhere.

    Args:
        form: the first owner's dtype and shape, which is that of its piece, or of the whole.
        mine: this rank's piece.
        index: of the parameter in the plan.
    """
    plan, communicator = optimizer.plan, optimizer.communicator
    spec, pieces = plan.parameters[index], plan.ranges(index)
    dtype, shape = getattr(torch, form[0]), form[1]
    in_pieces = spec.route == "adamw" and bool(shape) and plan.world_size > 1
    parts = []
    for piece in pieces if in_pieces else pieces[:1]:
        numel = piece.stop - piece.start if in_pieces else prod(shape)
        part = torch.empty(numel, dtype=dtype, device=communicator.device)
        if piece.rank == communicator.rank:
            assert mine is not None, "owners have what they described"
            # parts are in their parameter's memory order, whole tensors have the strides they were made or loaded with
            found = as_numbers(local(mine))
            part.copy_(in_memory_order(found) if in_pieces else found.reshape(-1))
        communicator.broadcast_(part, piece.rank)
        if communicator.rank == to_chunk:
            parts.append(part.cpu())
    if communicator.rank != to_chunk:
        return None
    value = torch.cat(parts)
    if in_pieces:
        return value.as_strided(spec.shape, spec.stride)
    value = value.view(shape)
    return value.new_empty_strided(spec.shape, spec.stride).copy_(value) if key in ELEMENTWISE_KEYS else value


def on_one_rank(value: Tensor, layout: Layout, communicator: Communicator, to_chunk: int = 0) -> Tensor | None:
    """``value`` as a whole tensor on the CPU of the owner of ``to_chunk``, None elsewhere; only DTensors move.

    If a DTensor's mesh has only some of the ranks, as others hold replicas, the ranks of that mesh have to call.
    """
    target, ranks = communicator.ranks[to_chunk], layout.mesh.ranks
    here: Tensor | None = value
    if isinstance(value, DTensor):
        is_everywhere = len(ranks) == communicator.world_size
        there = Layout(Mesh(1, ranks=[target if target in ranks else ranks[0]]), [None] * value.ndim)
        group = communicator.group if is_everywhere else None
        here = redistribute_local(local(value), value.shape, layout, there, group=group)
    if communicator.rank != to_chunk:
        return None
    assert here is not None, "its owner has it whole"
    # a copy also where it is on the CPU already: the next step changes it
    return here.to("cpu", copy=True)


def cut_full_state_dict(optimizer: LiveOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A one-process state, the same on every rank, in the form of this rank's ``state_dict()``: cut to its parts."""
    _check_groups(optimizer, state_dict["param_groups"])
    saved_ids = [*chain.from_iterable(group["params"] for group in state_dict["param_groups"])]
    # check all parameters, so that every rank refuses what one refuses
    states = [state_dict["state"].get(saved_ids[entry.number], {}) for entry in optimizer.entries]
    problems = [*chain.from_iterable(map(_faults, states, optimizer.entries, optimizer.plan.parameters))]
    if problems:
        raise ValueError("a state that does not fit:\n  " + "\n  ".join(problems))
    parts: dict[int | str, dict[str, Any]] = {}
    for shard in optimizer.shards():
        spec = optimizer.plan.parameters[shard.index]
        for key, value in states[shard.index].items():
            part = cut(value, spec, shard) if key in ELEMENTWISE_KEYS else value
            parts.setdefault(saved_ids[shard.number], {})[key] = part
    stamp = stamped({}, optimizer.plan, optimizer.communicator.rank)
    return {"state": parts, "param_groups": state_dict["param_groups"], **stamp}


def _check_groups(optimizer: LiveOptimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse groups of other sizes, and the same names in another order: places alone tell parameters apart."""
    sizes, mine = ([len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups))
    if sizes != mine:
        raise ValueError(
            f"the state to load is of groups of {', '.join(map(str, sizes))} parameters, this optimizer of "
            f"{', '.join(map(str, mine))} (those that are frozen included); build it with the groups that were saved"
        )
    names = [*chain.from_iterable(group.get("param_names", group["params"]) for group in saved)]
    if not all(isinstance(name, str) for name in names):
        return
    theirs = _without_wrappers([names[entry.number] for entry in optimizer.entries])
    ours = _without_wrappers([entry.name for entry in optimizer.entries])
    if sorted(theirs) == sorted(ours):  # else they have been renamed
        for entry, its, own in zip(optimizer.entries, theirs, ours):
            if its != own:
                raise ValueError(
                    f"the state to load has {names[entry.number]} at place {entry.number}, where this optimizer has "
                    f"{entry.name}: list parameters in the order in which they were saved"
                )


def _without_wrappers(names: Sequence[str]) -> list[str]:
    """Names without the modules that torch puts around a model or its blocks, DDP included."""
    plain = plain_names(names)
    is_wrapped = all(name.startswith("module.") for name in plain.values())
    return [plain[name].removeprefix("module.") if is_wrapped else plain[name] for name in names]


def _faults(state: Mapping[str, Any], entry: Entry, spec: ParameterSpec) -> list[str]:
    """What keeps a parameter's whole state from being taken over."""
    if fault := unusable(state, entry):
        return [fault]
    return [
        f"{entry.name}.{key}: shape {tuple(value.shape)}, expected {spec.shape}"
        for key, value in state.items()
        if key in ELEMENTWISE_KEYS and tuple(value.shape) != spec.shape
    ]


def cut(value: Tensor, spec: ParameterSpec, shard: Shard) -> Tensor:
    """The part of a whole state tensor that belongs to a shard."""
    if isinstance(shard.parameter, DTensor):
        return cut_like(value, shard.parameter)
    if tuple(shard.value.shape) == spec.shape:
        return value
    strided = torch.empty_strided(spec.shape, spec.stride, dtype=value.dtype, device=value.device).copy_(value)
    return in_memory_order(strided)[shard.start : shard.stop].clone()


def cut_like(value: Tensor, parameter: DTensor) -> DTensor:
    """A whole tensor, the same on every rank, as a DTensor that lies as ``parameter`` does."""
    mesh = parameter.device_mesh
    part = value
    for dim, held in enumerate(layout_of(parameter).indices(parameter.shape, mesh.get_rank())):
        pieces = [part.narrow(dim, start, stop - start) for start, stop in intervals(held)]
        part = torch.cat(pieces, dim) if pieces else part.narrow(dim, 0, 0)
    return as_parameter_lies(part.to(parameter.device).contiguous(), parameter)


def as_parameter_lies(part: Tensor, parameter: DTensor) -> DTensor:
    """A rank's part as a DTensor that lies as ``parameter`` does."""
    mesh, shape, stride = parameter.device_mesh, parameter.shape, parameter.stride()
    return DTensor.from_local(part, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)
