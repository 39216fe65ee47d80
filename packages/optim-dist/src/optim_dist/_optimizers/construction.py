"""Turn what the user passes into what the plan needs: groups without duplicates, names, order, descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optim_dist._listing import listed
from optim_dist._optimizers.entries import Entry
from optim_dist.plan import ParameterSpec, RouteName
from optim_utils.param_groups import MatrixView


def without_duplicates(params: Iterable[Any] | Mapping[str, Any]) -> list[Any]:
    """``params`` as a list in which each group has a tied parameter once; torch warns if one is listed twice.

    Raises:
        TypeError: for a model, a single parameter without a list, a group whose ``params`` are no list, or a set.
        ValueError: for a group without ``params``.
    """
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be a list of parameters, pairs with names or groups (model.named_parameters(), say), got a "
            f"{type(params).__name__}"
        )
    _check_order(params)
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


def device_of(given: object) -> torch.device | None:
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
    first_group: int,
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
        raise ValueError(f"order must list every parameter that is trained; it lacks {listed(missing, 8)}")
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


def check_not_clipped(group: Mapping[str, Any]) -> None:
    """Refuse a group that asks to be clipped, as optimizers for one device do for their groups."""
    if group.get("max_norm") is not None:
        raise ValueError(
            f"a group has max_norm={group['max_norm']}, but gradients are clipped by the norm of all groups: give "
            "max_norm to the optimizer, or call clip_grad_norm_ before step()"
        )


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


def _sharding(parameter: Tensor) -> str:
    """The layout of a DTensor of several ranks, as text; empty if a parameter is in a bucket or on one rank."""
    if not isinstance(parameter, DTensor) or parameter.device_mesh.size() == 1:
        return ""
    return f"{' '.join(map(str, parameter.placements))} over {'x'.join(map(str, parameter.device_mesh.shape))} ranks"


def _check_order(params: Iterable[Any]) -> None:
    """Refuse sets: every rank goes through one in an order of its own, and would mix up parameters of one shape."""
    if isinstance(params, set | frozenset):
        kind = type(params).__name__
        raise TypeError(f"params must come in the same order on every rank, which a {kind} has not; give a list")


def _distinct(params: object) -> Any:
    if isinstance(params, Tensor):
        return params
    if not isinstance(params, Iterable):
        raise TypeError(f"params of a group must be a list of parameters, got {params!r}")
    _check_order(params)
    seen: set[int] = set()
    kept = []
    for item in params:
        parameter = item[1] if isinstance(item, tuple) else item
        if id(parameter) not in seen:
            seen.add(id(parameter))
            kept.append(item)
    return kept
