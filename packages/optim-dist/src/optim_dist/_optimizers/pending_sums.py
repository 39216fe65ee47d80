"""Gradients of DTensors in their parameters' placements; pending sums over ranks are done many per collective.

Tensor parallelism leaves the gradients of parameters that it does not cut (norms, biases) as small pending sums:

    Partial -> Replicate     the local parts concatenated, one all-reduce for all of a mesh and dtype
    otherwise                (a pending sum that ends cut, a different cut)  torch's redistribution, one by one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.layouts import local
from optim_dist._reduction.joined import Joined, alike
from optim_dist._reduction.storage import check_kind


class _Sum(NamedTuple):
    """What a gradient has been summed to, and the versions that it had then."""

    gradient: DTensor
    versions: tuple[int, int]
    local: Tensor


class LocalGradients:
    """Every entry's local gradient, cut as its parameter is; summed once a step, however often it is asked for."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}  # keyed by id of the parameter

    def of(self, entries: Sequence[Entry]) -> list[Tensor | None]:
        """The local gradient of each entry, None where there is none.

        Collective: every rank asks for the same entries, which have passed ``check_gradient``. The current stream waits
        for sums that are in flight.
        """
        pending = [entry for entry in entries if _is_pending(entry) and not self._is_known(entry)]
        alone = [entry for entry in pending if _kind_of_sum(entry) is None]
        together = [entry for entry in pending if _kind_of_sum(entry) is not None]
        for some in alike(together, _kind_of_sum, lambda entry: local(_gradient(entry)).numel()):
            self._sum(some)
        for entry in alone:
            gradient = _gradient(entry)
            self._remember(entry, gradient.redistribute(placements=_parameter(entry).placements).to_local())
        return [self._found(entry) for entry in entries]

    def forget(self) -> None:
        """Drop all sums at the end of a step."""
        self._sums.clear()

    def _sum(self, entries: Sequence[Entry]) -> None:
        gradients, parameter = [_gradient(entry) for entry in entries], _parameter(entries[0])
        joined = Joined([local(gradient) for gradient in gradients])
        # mesh dimensions that cut the parameter cut the gradient alike: only pending sums need communication
        pairs = zip(gradients[0].placements, parameter.placements, strict=True)
        placements = [Replicate() if have == wanted else have for have, wanted in pairs]
        flat = DTensor.from_local(joined.flat, parameter.device_mesh, placements, run_check=False)
        whole = flat.redistribute(placements=[Replicate()] * len(placements)).to_local()
        for entry, part in zip(entries, joined.split(whole), strict=True):
            self._remember(entry, part)

    def _remember(self, entry: Entry, found: Tensor) -> None:
        gradient = _gradient(entry)
        self._sums[id(entry.parameter)] = _Sum(gradient, _versions(gradient), found)

    def _is_known(self, entry: Entry) -> bool:
        known = self._sums.get(id(entry.parameter))
        return (
            known is not None and known.gradient is entry.parameter.grad and known.versions == _versions(known.gradient)
        )

    def _found(self, entry: Entry) -> Tensor | None:
        gradient = entry.parameter.grad
        if gradient is None:
            return None
        return _arrived(self._sums[id(entry.parameter)].local if _is_pending(entry) else local(gradient))


def _arrived(tensor: Tensor) -> Tensor:
    """``tensor``, or the finished tensor behind the result of a functional collective: kernels read its memory."""
    wait: Callable[[], Tensor] | None = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


def check_gradient(entry: Entry) -> None:
    """Refuse a gradient that is not dense, or that cannot be brought to its parameter's placements."""
    parameter, gradient = entry.parameter, entry.parameter.grad
    if gradient is None:
        return
    check_kind(entry.name, gradient, of_dtensor=isinstance(parameter, DTensor))
    if not isinstance(parameter, DTensor):
        return
    if not isinstance(gradient, DTensor) or gradient.device_mesh != parameter.device_mesh:
        raise RuntimeError(
            f"the gradient of {entry.name} is no DTensor on the mesh of its parameter; "
            "leave .grad to autograd, or assign a DTensor with the parameter's mesh and placements"
        )


def _versions(gradient: DTensor) -> tuple[int, int]:
    return gradient._version, local(gradient)._version


def _is_pending(entry: Entry) -> bool:
    has_sum = isinstance(entry.parameter, DTensor) and entry.parameter.grad is not None
    return has_sum and _gradient(entry).placements != _parameter(entry).placements


def _kind_of_sum(entry: Entry) -> tuple[object, ...] | None:
    """The key shared by gradients that one all-reduce can sum; None for a gradient that needs redistribution."""
    parameter, gradient = _parameter(entry), _gradient(entry)
    for have, wanted in zip(gradient.placements, parameter.placements, strict=True):
        if have != wanted and not (have.is_partial() and wanted.is_replicate()):
            return None
    return parameter.device_mesh, gradient.placements, parameter.placements, gradient.dtype


def _parameter(entry: Entry) -> DTensor:
    assert isinstance(entry.parameter, DTensor), "only DTensors have pending sums"
    return entry.parameter


def _gradient(entry: Entry) -> DTensor:
    gradient = entry.parameter.grad
    assert isinstance(gradient, DTensor), "only DTensors have pending sums"
    return gradient
