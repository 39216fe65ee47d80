"""Which parts of an optimizer go into a checkpoint's files, and how they come back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optim_dist._checkpoint.codes import in_files, join_codes, whole_shape
from optim_dist._checkpoint.common import without_numpy_scalars
from optim_dist._checkpoint.faults import Problems
from optim_dist._checkpoint.manifest import SavedParameter, SavedState
from optim_dist._checkpoint.reshard import VALUE
from optim_dist._checkpoint.rows import Part, row_pieces, to_rows
from optim_dist._checkpoint.staging import ToHost
from optim_dist._optimizers.layouts import local
from optim_dist._optimizers.live import LiveOptimizer
from optim_dist._optimizers.loaded_state import SECOND_MOMENT, misfit_of_moment
from optim_dist._optimizers.shards import Shard
from optim_dist._optimizers.states import dense_stride, in_memory_order, packed_groups, stamped, without_hooks
from optim_dist.plan import ParameterSpec, Piece, dtype_name
from optim_dist.planning import contiguous_stride
from optim_kernels.states import ELEMENTWISE_KEYS, make_groups_plain, with_dtypes
from optim_redist import Layout

SCALARS = ("step",)


def named_specs(optimizer: LiveOptimizer, model: nn.Module | None) -> list[ParameterSpec]:
    """The plan's parameters with the model's names, and the strides that files have: contiguous for DTensors."""
    names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    specs = [
        replace(
            spec,
            name=names.get(id(entry.parameter), spec.name),
            stride=contiguous_stride(spec.shape) if spec.sharding else dense_stride(entry.parameter),
            dtype=entry.parameter.dtype,  # where no bucket keeps it, the model may have been converted since
        )
        for spec, entry in zip(optimizer.plan.parameters, optimizer.entries)
    ]
    for name, count in Counter(spec.name for spec in specs).items():
        if count > 1:
            raise ValueError(
                f"two parameters would be called {name}: one by the model and one, which that does not have, by the "
                "optimizer; give a model that has all of them, or none (one that the model no longer has goes if you "
                "freeze it and call rebuild_plan())"
            )
    return specs


def pieces_of(optimizer: LiveOptimizer, index: int) -> list[Piece]:
    """The pieces of a parameter: which rank writes which elements, and at load is the first to get them."""
    spec = optimizer.plan.parameters[index]
    if spec.sharding:
        return row_pieces(index, spec.shape, optimizer.communicator.ranks)
    return optimizer.plan.ranges(index)


def own_parts(
    optimizer: LiveOptimizer, specs: list[ParameterSpec], to_host: ToHost
) -> tuple[dict[str, dict[str, Tensor]], list[Part]]:
    """``{parameter: {"value" or state key: flat part}}`` of this rank, on the CPU, and what ``add_rows`` will add."""
    parts: dict[str, dict[str, Tensor]] = {}
    cut: list[Part] = []
    for shard in optimizer.shards():
        spec, state = specs[shard.index], optimizer.kept_state(shard)
        if VALUE in state:
            raise ValueError(f"the state of {spec.name} has {VALUE!r}, as checkpoints call the parameter; rename it")
        tensors = {VALUE: shard.value, **{key: value for key, value, *_ in in_files(state) if key not in SCALARS}}
        if not spec.sharding:
            parts[spec.name] = {key: to_host(flat_part(value, shard)) for key, value in tensors.items()}
            continue
        for key, value in sorted(tensors.items()):  # in one order on all ranks
            if key in (VALUE, *ELEMENTWISE_KEYS):
                cut.append(Part(spec.name, key, local(value).detach(), spec.shape))
            elif isinstance(value, DTensor):
                raise ValueError(
                    f"the state of {spec.name} has {key}, a DTensor, but checkpoints cut only moments and masters as "
                    "parameters; delete it, or keep it in the model, as a buffer"
                )
            elif pieces_of(optimizer, shard.index)[0].rank == optimizer.communicator.rank:
                parts.setdefault(spec.name, {})[key] = to_host(in_memory_order(local(value).detach()))
    return parts, cut


def add_rows(
    parts: dict[str, dict[str, Tensor]],
    cut: Sequence[Part],
    optimizer: LiveOptimizer,
    specs: list[ParameterSpec],
    to_host: ToHost,
) -> Problems:
    """Add this rank's rows of DTensors to ``parts``; collective if there are any.

    Returns what has failed on this rank beside the exchange, in which it has taken part to the end all the same.
    """
    problems = Problems(optimizer.communicator.rank)
    for part in to_rows(cut, layouts_by_name(optimizer, specs), optimizer.communicator):
        with problems.noted():
            parts.setdefault(part.name, {})[part.key] = to_host(part.local.reshape(-1))
    return problems


def describe_state(
    optimizer: LiveOptimizer, specs: list[ParameterSpec], pieces_of_each: Sequence[Sequence[Piece]]
) -> dict[str, Any]:
    """State keys and scalars of the parameters that this rank describes, by their names, as JSON takes them."""
    described = {}
    for shard in optimizer.shards():
        if _describer(shard.index, pieces_of_each) != optimizer.communicator.rank:
            continue
        state = optimizer.kept_state(shard)
        if state:
            keys = {
                key: [dtype_name(value.dtype), list(value.shape), *storage]
                for key, value, *storage in in_files(state)
                if key not in SCALARS
            }
            scalars = {key: float(value) for key, value in state.items() if key in SCALARS}
            described[specs[shard.index].name] = [keys, scalars]
    return described


def _describer(index: int, pieces_of_each: Sequence[Sequence[Piece]]) -> int:
    """The rank that describes a parameter's state to all: of those that have a part of it each in turn.

    All of them could, but every rank gets what every rank says.
    """
    pieces = pieces_of_each[index]
    return pieces[index % len(pieces)].rank


def saved_parameters(
    specs: Sequence[ParameterSpec], pieces_of_each: Sequence[Sequence[Piece]], described: Sequence[dict[str, Any]]
) -> list[SavedParameter]:
    """The manifest's entries, from every rank's ``describe_state``."""
    saved = []
    for index, (spec, pieces) in enumerate(zip(specs, pieces_of_each, strict=True)):
        keys, scalars = described[_describer(index, pieces_of_each)].get(spec.name, ({}, {}))
        state = {}
        for key, (dtype, shape, block, fmt) in keys.items():
            in_pieces = key in ELEMENTWISE_KEYS or block > 1
            state[key] = SavedState(
                dtype, whole_shape(spec.shape, block) if in_pieces else shape, in_pieces, block, fmt
            )
        ranges = [[piece.rank, piece.start, piece.stop] for piece in pieces]
        description = (spec.name, list(spec.shape), list(spec.stride), dtype_name(spec.dtype), spec.route)
        saved.append(SavedParameter(*description, ranges, state, scalars))
    return saved


def layouts_by_name(optimizer: LiveOptimizer, specs: Sequence[ParameterSpec]) -> dict[str, Layout]:
    """The layout of each DTensor on several ranks, keyed by name."""
    return {specs[index].name: layout for index, layout in optimizer.layouts.items()}


def group_options(optimizer: LiveOptimizer) -> list[dict[str, Any]]:
    """Every group's hyperparameters, as plain values and tensors, and how many parameters it has."""
    content = {"param_groups": packed_groups(optimizer)}
    make_groups_plain(content)
    # a schedule written with NumPy puts a float64 into lr
    return [without_numpy_scalars(group) for group in content["param_groups"]]


def group_members(specs: list[ParameterSpec]) -> dict[str, int]:
    """Which group each trained parameter is in."""
    return {spec.name: spec.group for spec in specs}


def compare_groups(
    saved: list[dict[str, Any]], members: Mapping[str, int], optimizer: LiveOptimizer, specs: list[ParameterSpec]
) -> list[str]:
    """How the saved groups differ from this optimizer's in number, size, members, kind and views."""
    found, mine = ([len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups))
    if found != mine:
        return [f"param_groups: sizes {found}, this optimizer has {mine}"]
    problems = [
        f"{spec.name}: in group {members[spec.name]}, this optimizer has it in group {spec.group}; "
        "list groups in the order in which they were saved"
        for spec in specs
        if members.get(spec.name, spec.group) != spec.group
    ]
    faults = [optimizer.group_fault(number, theirs) for number, theirs in enumerate(map(with_dtypes, saved))]
    return problems + [f"group {number} {fault}" for number, fault in enumerate(faults) if fault]


def compare_moments(saved: Sequence[SavedParameter], optimizer: LiveOptimizer, specs: list[ParameterSpec]) -> list[str]:
    """Which saved second moments of Muon are not those of this optimizer's matrices."""
    moments = {entry.name: entry.state[SECOND_MOMENT] for entry in saved if SECOND_MOMENT in entry.state}
    pairs = [(spec, entry) for spec, entry in zip(specs, optimizer.entries) if entry.route == "muon"]
    faults = [misfit_of_moment(moments[spec.name].shape, entry) for spec, entry in pairs if spec.name in moments]
    return [f"{fault}; build the optimizer with those" for fault in faults if fault]


def load_groups(optimizer: LiveOptimizer, saved: list[dict[str, Any]]) -> None:
    """Take over saved hyperparameters; names that parameters have stay, and the state is empty afterwards."""
    stamp = stamped({}, optimizer.plan, optimizer.communicator.rank)
    named = [
        {**theirs, "param_names": mine["param_names"]} if "param_names" in mine else theirs
        for theirs, mine in zip(saved, optimizer.param_groups, strict=True)
    ]
    with without_hooks(optimizer):
        optimizer.load_state_dict({"state": {}, "param_groups": named, **stamp})


def flat_part(value: Tensor, shard: Shard) -> Tensor:
    """The elements of ``value``, flat, in the memory order of the parameter."""
    value, stride = local(value), dense_stride(shard.value)
    if value.shape == shard.value.shape and value.stride() != stride:
        value = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)
    return in_memory_order(value.detach())


def state_of_part(part: Tensor | None, description: SavedState, shard: Shard) -> Tensor:
    """A flat part (None if it is empty) as the state tensor of a shard."""
    like, dtype = shard.value, getattr(torch, description.dtype)
    if description.block > 1:
        state = torch.empty(whole_shape(like.shape, description.block), dtype=dtype, device=like.device)
    elif description.in_pieces or tuple(description.shape) == tuple(like.shape):
        state = torch.empty_strided(like.shape, dense_stride(like), dtype=dtype, device=like.device)
    else:
        state = torch.empty(description.shape, dtype=dtype, device=like.device)
    if part is not None:
        in_memory_order(state).copy_(part)
    return state


def put_read_state(optimizer: LiveOptimizer, shard: Shard, state: dict[str, Any], saved: SavedParameter) -> None:
    """Give ``optimizer`` a shard's state whose tensors have been read: with 8-bit moments and numbers as ``saved``."""
    join_codes(state, saved)
    for key, value in saved.scalars.items():
        state[key] = torch.full((), value, dtype=torch.float32, device=shard.value.device)
    optimizer.put_state(shard, state)
