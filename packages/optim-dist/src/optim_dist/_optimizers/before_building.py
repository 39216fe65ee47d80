"""What ranks tell each other before an optimizer is built, so that what one of them refuses is an error on all.

This works whatever else the ranks were given: it needs the process group alone, and runs on a device for which that has
collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from optim_dist._optimizers.agreement import check_options, raise_refusals
from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.groups import device_types, gathered

_BUILDS = "what the building of an optimizer begins with"
_OTHERWISE = "does not build an optimizer as this one does; call the same methods in the same order on every rank"


def compare_before_building(
    groups: Sequence[dist.ProcessGroup | None],
    device: torch.device | None,
    described: Mapping[str, str],
    refused: Exception | None = None,
) -> torch.device:
    """Compare options over ranks; return the device for collectives, that of the parameters. Collective.

    Args:
        groups: the result of ``groups_of``.
        device: of the parameters, if there are any.
        described: options that have to be the same on all ranks, as text.
        refused: why this rank does not build the optimizer; None if it does.

    Raises:
        Exception: ``refused`` or, if it is None, an error for what other ranks refuse, or for differences.
    """
    types = [device_types(group) for group in groups]
    devices = [_common_device(each, device) for each in types]
    if refused is None and device is not None and any(each and device.type not in each for each in types):
        how = ", by to_empty(), and give it numbers" if device.type == "meta" else ""
        refused = ValueError(
            f"the process group has no collectives for parameters on {device.type}; move the model to "
            f"{devices[0].type}{how} before the optimizer is built, or initialize the group with a backend for both"
        )
    if device is not None:
        described = {"the device of parameters": device.type, **described}
    problem = None if refused is None else f"{type(refused).__name__}: {refused}"
    said = _said_by_all([problem, dict(described)], list(map(Communicator, groups, devices)))
    raise_refusals(refused, "the optimizer was not built", {rank: text for rank, (text, _) in said.items()})
    check_options({rank: theirs for rank, (_, theirs) in said.items()})
    return device or devices[0]


def _common_device(types: Sequence[str], device: torch.device | None) -> torch.device:
    """A device on which ranks can communicate, whatever device their parameters are on."""
    chosen = "cpu" if "cpu" in types or not types else types[0]
    if device is not None and device.type == chosen:
        return device
    if chosen == "cpu":
        return torch.device("cpu")
    return torch.device(chosen, torch.get_device_module(chosen).current_device())


def _said_by_all(value: Any, along: Sequence[Communicator]) -> dict[int, Any]:
    """Every rank's value, keyed by global rank, ascending; each of ``along`` connects ranks of one mesh dimension."""
    said = [[dist.get_rank() if along[0].world_size > 1 else 0, value]]
    for communicator in along:
        said = [each for its in gathered(communicator, _BUILDS, said, _OTHERWISE) for each in its]
    return dict(sorted(said))
