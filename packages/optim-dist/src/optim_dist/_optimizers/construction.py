"""Turn what the user passes into what the plan needs: names, order, layouts; refuse what cannot be distributed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.multipliers import multiplier_faults
from optim_dist._optimizers.options import Options
from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.groups import device_types
from optim_dist.plan import DTYPES, ParameterSpec, RouteName
from optim_kernels.multi_tensor import is_dense
from optim_redist import Layout, Mesh
from optim_redist.errors import RedistError
from optim_utils.param_groups import MatrixView


def without_duplicates(params: Iterable[Any] | Mapping[str, Any]) -> list[Any]:
    """``params`` as a list in which each group has a tied parameter once; torch warns if one is listed twice.

    Raises:
        TypeError: for a model, a single parameter without a list, or a group whose ``params`` are no list.
        ValueError: for a group without ``params``.
    """
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be a list of parameters, pairs with names or groups (model.named_parameters(), say), got a "
            f"{type(params).__name__}"
        )
    items: list[Any] = list(params.items()) if isinstance(params, Mapping) else list(params)
    if items and isinstance(items[0], dict):
        for group in items:
            if isinstance(group, dict) and "params" not in group:
                raise ValueError(f"a group must have 'params', got one with {', '.join(map(repr, group)) or 'nothing'}")
        return [
            {**group, "params": _distinct(group["params"])}
            if isinstance(group, dict) and "views" not in group
            else group
            for group in items
        ]
    return _distinct(items)


def device_of(given: Any) -> torch.device | None:
    """The device of the first parameter in a list, pairs with names, groups or a model; None if there is none."""
    if isinstance(given, Tensor):
        return given.device
    if isinstance(given, nn.Module):
        return device_of(list(given.parameters()))
    within = given.get("params", ()) if isinstance(given, dict) else given if isinstance(given, list | tuple) else ()
    return next((device for device in map(device_of, within) if device is not None), None)


def find_entries(
    groups: Sequence[dict[str, Any]],
    routes: Sequence[RouteName],
    views: Sequence[Sequence[MatrixView | None]],
    model: nn.Module | None,
    first_group: int = 0,
) -> list[Entry]:
    """The parameters of ``groups[first_group:]`` that need a gradient, in the order of the model, else as listed."""
    names = names_of(groups, model)
    position = {} if model is None else {id(parameter): place for place, parameter in enumerate(model.parameters())}
    found = []
    number = 0
    for index, group in enumerate(groups):
        for place, parameter in enumerate(group["params"]):
            if index >= first_group and parameter.requires_grad:
                name = names[id(parameter)]
                found.append(Entry(name, parameter, index, number, routes[index], views[index][place]))
            number += 1
    return sorted(found, key=lambda entry: position.get(id(entry.parameter), len(position)))


def in_forward_order(found: Sequence[Entry], order: Sequence[str | Tensor] | None) -> list[Entry]:
    """``found`` in the order in which ``order`` lists names or parameters; unchanged if it is None.

    Raises:
        TypeError: if ``order`` lists anything else.
        ValueError: naming entries that ``order`` leaves out. It may list others, which are ignored.
    """
    if order is None:
        return list(found)
    if isinstance(order, str | Tensor) or not isinstance(order, Iterable):
        raise TypeError(f"order must be a list of names or parameters, got {order!r}")
    places: dict[str | int, int] = {}
    for place, item in enumerate(order):
        if not isinstance(item, str | Tensor):
            raise TypeError(f"order must list names or parameters, got {item!r} at place {place}")
        # a tied parameter is needed where it is used first
        places.setdefault(item if isinstance(item, str) else id(item), place)
    keyed = [(places.get(entry.name, places.get(id(entry.parameter))), entry) for entry in found]
    missing = [entry.name for place, entry in keyed if place is None]
    if missing:
        raise ValueError(f"order must list every parameter that is trained; it lacks {', '.join(missing[:8])}")
    return [entry for _, entry in sorted(keyed, key=lambda pair: pair[0] or 0)]


def names_of(groups: Sequence[dict[str, Any]], model: nn.Module | None) -> dict[int, str]:
    """A name for each parameter, keyed by its ``id``: the model's, else the one it was given with, else its place."""
    found = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    for index, group in enumerate(groups):
        names = group.get("param_names")
        for place, parameter in enumerate(group["params"]):
            found.setdefault(id(parameter), names[place] if names else f"{index}.{place}")
    return found


def name_in_group(group: Mapping[str, Any], place: int) -> str:
    """The name of a parameter of one group, for errors: the one that it was given with, or its place there."""
    name: str = group["param_names"][place] if "param_names" in group else f"params[{place}]"
    return name


def specify(found: Sequence[Entry], blocks: Sequence[int]) -> list[ParameterSpec]:
    """The plan's description of each entry; ``blocks`` says how many elements of each must stay together."""
    return [
        ParameterSpec(
            entry.name,
            tuple(entry.parameter.shape),
            tuple(entry.parameter.stride()),
            entry.parameter.dtype,
            entry.route,
            entry.group,
            entry.parameter.device.type,
            entry.view.shapes if entry.view is not None and not entry.view.is_identity else (),
            _sharding(entry.parameter),
            block,
        )
        for entry, block in zip(found, blocks, strict=True)
    ]


def local(tensor: Tensor) -> Tensor:
    """A DTensor's local part, anything else as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def layout_of(parameter: DTensor) -> Layout:
    """Which rank holds which elements; raises ``RedistError`` if the placements do not say so.

    Where FSDP has cut a dimension that was cut before, torch's strided placement encodes the order of the two cuts.
    """
    is_strided = any(type(placement).__name__ == "_StridedShard" for placement in parameter.placements)
    return Layout.from_dtensor(parameter, strided="ordered" if is_strided else "replay")


def joint_layout(parameter: DTensor, meshes: Sequence[Sequence[int]]) -> Layout:
    """``layout_of`` over all of a parameter's meshes, which hold replicas of each other."""
    if len(meshes) == 1:
        return layout_of(parameter)
    mesh = Mesh((len(meshes), *parameter.device_mesh.shape), ranks=[rank for ranks in meshes for rank in ranks])
    return Layout.from_placements(mesh, (Replicate(), *parameter.placements), parameter.shape)


def _sharding(parameter: Tensor) -> str:
    """The layout of a DTensor of several ranks, as text; empty if a parameter is in a bucket or on one rank."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return ""
    return f"{' '.join(map(str, parameter.placements))} over {'x'.join(map(str, parameter.device_mesh.shape))} ranks"


def check_model(model: nn.Module | None) -> None:
    """Refuse wrappers that reduce gradients themselves."""
    for module in () if model is None else model.modules():
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel):
            raise ValueError(
                f"the model contains {type(module).__name__}, so that gradients would be reduced twice; "
                "pass the plain model: the optimizer reduces"
            )


def check_parameters(found: Sequence[Entry], communicator: Communicator, options: Options) -> list[list[list[int]]]:
    """Refuse what cannot be distributed: all findings of all ranks in one error on every rank.

    Returns for every entry the ranks of each of its meshes: no mesh for a plain parameter; several meshes where FSDP
    has cut it along one dimension of a grid of ranks and tensor parallelism has left it whole along the other.
    """
    mine = [e.parameter.device_mesh.mesh.flatten().tolist() if isinstance(e.parameter, DTensor) else [] for e in found]
    gathered = communicator.gather_json([_findings(found, communicator, options), mine])
    findings = dict.fromkeys(finding for each, _ in gathered for finding in each)
    by_entry = [list(map(list, dict.fromkeys(map(tuple, each)))) for each in zip(*(meshes for _, meshes in gathered))]
    if not findings:
        findings = dict.fromkeys(_mesh_findings(found, by_entry, communicator.ranks))
    if findings:
        raise ValueError("parameters that cannot be distributed:\n  " + "\n  ".join(findings))
    return by_entry


def _findings(found: Sequence[Entry], communicator: Communicator, options: Options) -> list[str]:
    findings = []
    in_buckets = communicator.world_size > 1 or options.is_tree
    types = [each for each in map(device_types, options.groups) if each]
    owners: list[tuple[str, int, int, str]] = []
    names: set[str] = set()
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
        if is_lazy(parameter):
            findings.append(f"{name}: its shape is not known yet; run its lazy module first")
        elif parameter.layout is not torch.strided or parameter.dtype.is_complex:
            findings.append(f"{name}: {parameter.layout} {parameter.dtype}; only dense real parameters are supported")
        elif parameter.dtype not in DTYPES:
            findings.append(
                f"{name}: {parameter.dtype}, but parameters are updated in one of {DTYPES}; freeze it "
                "(requires_grad=False) or leave it out"
            )
        elif isinstance(parameter, DTensor):
            findings += _placement_findings(name, parameter)
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
        elif in_buckets and not is_dense(parameter):
            findings.append(
                f"{name}: strides {parameter.stride()} of shape {tuple(parameter.shape)} leave gaps or overlap; "
                "make it contiguous"
            )
        elif fault := _device_fault(parameter, communicator, options, types):
            findings.append(f"{name}: on {parameter.device}, {fault}")
        elif parameter.numel():
            begin = parameter.data_ptr()
            owners.append((str(parameter.device), begin, begin + parameter.numel() * parameter.element_size(), name))
    owners.sort()
    for (device, _, end, name), (next_device, begin, _, next_name) in pairwise(owners):
        if device == next_device and begin < end:
            findings.append(f"{name} and {next_name} overlap in memory; tie parameters by using one object twice")
    return findings


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


def _mesh_findings(found: Sequence[Entry], by_entry: Sequence[list[list[int]]], ranks: Sequence[int]) -> list[str]:
    """What is wrong with meshes: those of a parameter have to cover the optimizer's ranks.

    Several meshes of one parameter count as replicas of each other, which only a grid of ranks makes: there another
    parameter has a single mesh of all ranks.
    """
    is_grid = any(len(meshes) == 1 and sorted(meshes[0]) == sorted(ranks) for meshes in by_entry)
    findings = []
    for entry, meshes in zip(found, by_entry):
        covered = sorted(rank for mesh in meshes for rank in mesh)
        if isinstance(entry.parameter, DTensor) and (covered != sorted(ranks) or (len(meshes) > 1 and not is_grid)):
            findings.append(
                f"{entry.name}: a DTensor over ranks {meshes[0]}, but the optimizer works on ranks {list(ranks)}, over "
                "which nobody would sum its gradient; use a mesh of all of them, or give the mesh's process_group"
            )
    return findings


def _distinct(params: Any) -> Any:
    if isinstance(params, Tensor):
        return params
    if not isinstance(params, Iterable):
        raise TypeError(f"params of a group must be a list of parameters, got {params!r}")
    seen: set[int] = set()
    kept = []
    for item in params:
        parameter = item[1] if isinstance(item, tuple) else item
        if id(parameter) not in seen:
            seen.add(id(parameter))
            kept.append(item)
    return kept
