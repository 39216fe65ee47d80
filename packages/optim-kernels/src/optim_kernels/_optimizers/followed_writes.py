"""fp32 masters that follow what others write to their parameters between two steps.

With an fp32 master a step writes the parameter and never reads it, so it would undo what others have written to the
parameter since the last step (the model's own checkpoint, averaged weights, a fresh initialisation). Therefore, before
the step

    master  <-  master      where the parameter is the master rounded, as the last step has left it
                parameter   elsewhere

so a value that is put back as it was, after an average stood in its place, say, keeps all bits of its master. autograd
counts writes to a tensor, so two numbers, count and address, tell whether there were any; writes past autograd, by
``param.data.copy_(...)``, are not counted. A ``"split16"`` master needs none of this: its upper half is the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, is_

import torch
from torch import Tensor

from optim_kernels._dtensors import is_dtensor, is_wrapper, local

_version = attrgetter("_version")


class FollowedWrites:
    """Write counts and addresses that parameters had when their masters were last known to match them.

    The lists of parameters that are given are kept, not copied.
    """

    def __init__(self) -> None:
        # the parameters noted last, which mostly are the next to be followed; all others are keyed by id, which is
        # safe because callers hold them
        self._latest: Sequence[Tensor] = ()
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._others: dict[int, tuple[int, int]] = {}
        # both together, once somebody has asked: some ask for parameters one by one
        self._all: dict[int, tuple[int, int]] | None = None

    def note(self, params: Sequence[Tensor]) -> None:
        """Follow what is written to these parameters from now on."""
        self._set_latest(params, _versions(params), _addresses(params))

    def follow(self, params: Sequence[Tensor], values: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Update the masters of those parameters that were written to, or have moved, since they were noted.

        Args:
            values: what the masters belong to: the parameters, or a part of each.
        """
        versions, addresses = _versions(params), _addresses(params)
        if self._are_latest(params) and versions == self._versions and addresses == self._addresses:
            return
        noted = self._noted()
        for param, mark, value, master in zip(params, zip(versions, addresses), values, masters, strict=True):
            if noted.get(id(param), mark) != mark:
                _follow(value, master)
        self._set_latest(params, versions, addresses)

    def written(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Those of the parameters that were written to, or have moved, since they were noted."""
        noted, marks = self._noted(), zip(_versions(params), _addresses(params))
        return [param for param, mark in zip(params, marks) if noted.get(id(param), mark) != mark]

    def note_written(self, params: Sequence[Tensor]) -> None:
        """Note that these parameters have been written to, so that their masters follow next time."""
        self._set_latest(params, [-1] * len(params), [0] * len(params))

    def note_step(self, params: Sequence[Tensor]) -> None:
        """Note that a step has written to these parameters and their masters alike."""
        if self._are_latest(params):
            self._versions, self._all = _versions(params), None
        else:
            self.note(params)

    def _set_latest(self, params: Sequence[Tensor], versions: list[int], addresses: list[int]) -> None:
        self._others.update(self._of_latest())
        self._latest, self._versions, self._addresses, self._all = params, versions, addresses, None

    def _are_latest(self, params: Sequence[Tensor]) -> bool:
        latest = self._latest
        return params is latest or (len(params) == len(latest) and all(map(is_, params, latest)))

    def _noted(self) -> dict[int, tuple[int, int]]:
        if self._all is None:
            self._all = self._others | self._of_latest()
        return self._all

    def _of_latest(self) -> dict[int, tuple[int, int]]:
        return dict(zip(map(id, self._latest), zip(self._versions, self._addresses)))


def can_be_followed(param: Tensor) -> bool:
    """Whether autograd counts writes to the parameter, and the parameter has an address."""
    return not param.is_inference() and (is_dtensor(param) or not is_wrapper(param))


def _versions(params: Sequence[Tensor]) -> list[int]:
    return list(map(_version, params))


def _addresses(params: Sequence[Tensor]) -> list[int]:
    # a write may also put another tensor in the parameter's place: param.data = other
    return list(map(Tensor.data_ptr, params))


@torch.no_grad()
def followed(value: Tensor, master: Tensor) -> Tensor:
    """What the master of a value that was written to is by now, in local parts; no tensor is changed."""
    value, master = local(value.detach()), local(master)
    # a mismatch is left for the step to refuse
    if value.device != master.device or value.shape != master.shape:
        return master
    return torch.where(master.to(value.dtype) == value, master, value.to(master.dtype))


@torch.no_grad()
def _follow(value: Tensor, master: Tensor) -> None:
    local(master).copy_(followed(value, master))
