"""Models and parameters that cannot be distributed are refused, with all findings of all ranks in one error."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.layouts import joint_layout, layout_of
from optim_dist._optimizers.multipliers import multiplier_faults
from optim_dist._optimizers.options import Options
from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.groups import device_types
from optim_dist.plan import DTYPES
from optim_dist.sharded import flat_start
from optim_kernels.multi_tensor import is_dense
from optim_redist.errors import RedistError

try:
    from torch.distributed._composable_state import _module_state_mapping as _states  # of modules, by weak references
except ImportError:  # not public; then FSDP2's stand-ins for parameters are not told from others
    _states = None  # type: ignore[assignment, unused-ignore]

# for every entry the ranks of each of its meshes
Meshes = Sequence[Sequence[Sequence[int]]]

# where the bits of random rounding would depend on how a parameter is cut
ROUNDING = (
    "stochastic_rounding numbers elements row by row, but {} is cut otherwise; shard it along its first dimension or "
    "leave stochastic_rounding out"
)


def check_model(model: nn.Module | None) -> None:
    """Refuse wrappers that reduce gradients themselves."""
    for module in () if model is None else model.modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise ValueError(
                f"the model contains {type(module).__name__}, so that gradients would be reduced twice; "
                "pass the plain model: the optimizer reduces"
            )


def check_parameters(
    found: Sequence[Entry], communicator: Communicator, options: Options, rounded: Container[int]
) -> Meshes:
    """Refuse what cannot be distributed: all findings of all ranks in one error on every rank.

    Args:
        rounded: groups with stochastic rounding.

    Returns for every entry the ranks of each of its meshes: no mesh for a plain parameter; several meshes where FSDP
    has cut it along one dimension of a grid of ranks and tensor parallelism has left it whole along the other.
    """
    mine: dict[tuple[int, ...], int] = {}  # each mesh once, as every rank gets those of all: their places
    places = [mine.setdefault(_ranks_of_mesh(entry.parameter), len(mine)) for entry in found]
    gathered = communicator.gather_json([_findings(found, communicator, options), [*mine], places])
    findings = dict.fromkeys(finding for each, _, _ in gathered for finding in each)
    numbers: dict[tuple[int, ...], int] = {}  # of the meshes of all ranks
    of_rank = [[numbers.setdefault(tuple(mesh), len(numbers)) for mesh in meshes] for _, meshes, _ in gathered]
    every = [*numbers]
    by_entry = [
        [list(every[number]) for number in dict.fromkeys(of[place] for of, place in zip(of_rank, each))]
        for each in zip(*(places for *_, places in gathered))
    ]
    is_cut = [[bool(every[of[place]]) for place in each] for of, (*_, each) in zip(of_rank, gathered)]
    if not findings:
        findings = dict.fromkeys(_kind_findings(found, is_cut, communicator.ranks))
    if not findings and any(map(any, is_cut)):
        # what a rank finds by its own meshes and placements, which need not be those of others
        mine_alone = _mesh_findings(found, by_entry, communicator.ranks) or [
            ROUNDING.format(entry.name)
            for entry, meshes in zip(found, by_entry)
            if entry.group in rounded and isinstance(entry.parameter, DTensor) and not _lies_in_rows(entry, meshes)
        ]
        findings = dict.fromkeys(finding for each in communicator.gather_json(mine_alone) for finding in each)
    if findings:
        raise ValueError("parameters that cannot be distributed:\n  " + "\n  ".join(findings))
    return by_entry


def _ranks_of_mesh(parameter: Tensor) -> tuple[int, ...]:
    """The ranks of a DTensor's mesh; none of a plain parameter."""
    return tuple(parameter.device_mesh.mesh.flatten().tolist()) if isinstance(parameter, DTensor) else ()


def _findings(found: Sequence[Entry], communicator: Communicator, options: Options) -> list[str]:
    findings = []
    types = [each for each in map(device_types, options.groups) if each]
    in_memory: list[tuple[str, Tensor]] = []
    names: set[str] = set()
    stand_ins = set(map(id, _stand_ins_of_fsdp()))
    for entry in found:
        name, parameter = entry.name, entry.parameter
        if name in names:
            findings.append(
                f"{name}: two parameters have this name; give each one of its own, and freeze one that the model no "
                "longer has"
            )
        names.add(name)
        findings += multiplier_faults(name, parameter)
        if getattr(parameter, "_is_flat_param", False) or getattr(parameter, "_fsdp_flattened", False):
            findings.append(
                f"{name}: a parameter of FullyShardedDataParallel, which reduces and cuts gradients itself; pass the "
                "plain model, or use fully_shard"
            )
        if id(parameter) in stand_ins:
            findings.append(
                f"{name}: a parameter that FSDP2 has put in place of the one that is trained, to which its gradient "
                "goes, as after an evaluation; call reshard() of the modules given to fully_shard before you list "
                "parameters"
            )
            continue
        faults = _tensor_findings(name, parameter, communicator, options, types)
        if not faults and not isinstance(parameter, DTensor):
            in_memory.append((name, parameter))
        findings += faults
    return findings + _overlap_findings(in_memory)


def _stand_ins_of_fsdp() -> Iterator[Tensor]:
    """What FSDP2 has in place of its cut parameters, of all models of this process: whole, or cut over fewer ranks."""
    for reference in [] if _states is None else list(_states.values()):
        state = reference()
        # newer torch may have several
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for cut in (cut for group in groups for cut in getattr(group, "fsdp_params", ())):
            for name in ("_unsharded_param", "_sharded_post_forward_param"):
                if (stand_in := getattr(cut, name, None)) is not None:
                    yield stand_in


def _tensor_findings(
    name: str, parameter: Tensor, communicator: Communicator, options: Options, types: Sequence[Sequence[str]]
) -> list[str]:
    """What is wrong with a parameter as a tensor: its layout, its dtype, how it is distributed, where it is.

    ``types`` are those of ``_device_fault``.
    """
    if is_lazy(parameter):
        return [f"{name}: its shape is not known yet; run its lazy module first"]
    if parameter.layout is not torch.strided or parameter.dtype.is_complex:
        return [f"{name}: {parameter.layout} {parameter.dtype}; only dense real parameters are supported"]
    if parameter.dtype not in DTYPES:
        return [
            f"{name}: {parameter.dtype}, but parameters are updated in one of {DTYPES}; freeze it "
            "(requires_grad=False) or leave it out"
        ]
    if isinstance(parameter, DTensor):
        return [*_placement_findings(name, parameter), *_sums_findings(name, options)]
    is_in_bucket = communicator.world_size > 1 or options.is_tree
    if is_in_bucket and (hasattr(parameter, "__tensor_flatten__") or hasattr(parameter, "fake_mode")):
        return [
            f"{name}: a {type(parameter).__name__}, which has no memory of its own that could lie in a bucket; cut it "
            "by fully_shard, or make it a plain tensor"
        ]
    if is_in_bucket and not is_dense(parameter):
        return [
            f"{name}: strides {parameter.stride()} of shape {tuple(parameter.shape)} leave gaps or overlap; "
            "make it contiguous"
        ]
    fault = _device_fault(parameter, communicator, options, types)
    return [f"{name}: on {parameter.device}, {fault}"] if fault else []


def _sums_findings(name: str, options: Options) -> list[str]:
    """Which options ask for sums of a DTensor's gradients that this package does not form."""
    findings = []
    if options.is_tree:
        findings.append(
            f"{name}: a DTensor, whose gradients FSDP or tensor parallelism adds up, and not in the order of "
            "order='tree'; give DTensors an optimizer without it"
        )
    if options.grad_dtype is not None:
        findings.append(
            f"{name}: a DTensor, whose gradients come as FSDP or tensor parallelism makes them, so that "
            f"grad_dtype={options.grad_dtype} cannot be had; give DTensors an optimizer without it (FSDP adds "
            "up in the reduce_dtype of its MixedPrecisionPolicy)"
        )
    return findings


def _overlap_findings(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Which plain parameters share memory."""
    spans = []
    for name, parameter in named:
        if parameter.numel():
            begin = parameter.data_ptr()
            spans.append((str(parameter.device), begin, begin + parameter.numel() * parameter.element_size(), name))
    spans.sort()
    return [
        f"{name} and {next_name} overlap in memory; tie parameters by using one object twice"
        for (device, _, end, name), (next_device, begin, _, next_name) in pairwise(spans)
        if device == next_device and begin < end
    ]


def _device_fault(
    parameter: Tensor, communicator: Communicator, options: Options, types: Sequence[Sequence[str]]
) -> str:
    """Why a plain parameter cannot be where it is; empty if it can.

    ``types`` lists, for each process group of several ranks, the types of devices for which it has collectives.
    """
    home, device = communicator.device, parameter.device
    if parameter.is_meta:
        return "and what gives it numbers makes another parameter of it; build the optimizer after that"
    if any(device.type not in each for each in types):
        return (
            f"for which the process group has no collectives; move it to {home}, or initialize the group with a "
            "backend for both"
        )
    if device == home or (communicator.world_size == 1 and not options.is_tree):
        return ""
    if options.transport == "symm":
        return f"where others are on {home}; transport='symm' is for parameters on one device a rank"
    # its bucket would move it to the bucket's device
    if device.type == home.type:
        return f"where others are on {home}; move them to one device, or give each its own optimizer"
    return ""


def _placement_findings(name: str, parameter: DTensor) -> list[str]:
    if any(placement.is_partial() for placement in parameter.placements):
        return [f"{name}: a DTensor with pending sums, {parameter.placements}; redistribute it to Shard or Replicate"]
    mesh = parameter.device_mesh
    for axis, (placement, place) in enumerate(zip(parameter.placements, mesh.get_coordinate() or ())):
        # backends number a group's ranks from the lowest up, whatever their order in the mesh
        if not placement.is_replicate() and place != mesh.get_group(axis).rank():
            return [
                f"{name}: a DTensor over the mesh {mesh.mesh.tolist()}, whose ranks do not ascend along an axis that "
                "cuts it: collectives take its parts in the order of ranks, but checkpoints, torch's too, in that of "
                "the mesh; list ranks in ascending order"
            ]
    try:
        layout_of(parameter)
    except RedistError as error:
        return [f"{name}: a DTensor whose placements cannot be read: {error}"]
    return []


def _kind_findings(found: Sequence[Entry], is_cut: Sequence[Sequence[bool]], ranks: Sequence[int]) -> Iterator[str]:
    """Which parameters are DTensors on some ranks alone; ``is_cut`` says of each rank's entries whether they are."""
    for entry, kinds in zip(found, zip(*is_cut)):
        if len(set(kinds)) > 1:
            yield (
                f"{entry.name}: a DTensor on rank {ranks[kinds.index(True)]}, a plain tensor on rank "
                f"{ranks[kinds.index(False)]}; call fully_shard or parallelize_module on all ranks, and list the same "
                "parameters in the same order"
            )


def _mesh_findings(found: Sequence[Entry], by_entry: Meshes, ranks: Sequence[int]) -> list[str]:
    """What is wrong with meshes: those of a parameter have to cover the optimizer's ranks.

    Several meshes of one parameter count as replicas of each other, which only a grid of ranks makes: there another
    parameter has a single mesh of all ranks, of more than one dimension.
    """
    is_grid = any(
        isinstance(entry.parameter, DTensor)
        and entry.parameter.device_mesh.ndim > 1
        and len(meshes) == 1
        and sorted(meshes[0]) == sorted(ranks)
        for entry, meshes in zip(found, by_entry)
    )
    findings = []
    for entry, meshes in zip(found, by_entry):
        covered = sorted(rank for mesh in meshes for rank in mesh)
        if isinstance(entry.parameter, DTensor) and (covered != sorted(ranks) or (len(meshes) > 1 and not is_grid)):
            findings.append(
                f"{entry.name}: a DTensor over ranks {meshes[0]}, but the optimizer works on ranks {list(ranks)}, over "
                "which nobody would sum its gradient; use a mesh of all of them, or an optimizer of its own with the "
                "mesh's process_group"
            )
    return findings


def _lies_in_rows(entry: Entry, meshes: Sequence[Sequence[int]]) -> bool:
    """Whether each rank's elements of a DTensor are consecutive in row-major order."""
    assert isinstance(entry.parameter, DTensor), "others are in one piece"
    shape, layout = tuple(entry.parameter.shape), joint_layout(entry.parameter, meshes)
    return flat_start(layout, shape, layout.mesh.ranks[0]) is not None
