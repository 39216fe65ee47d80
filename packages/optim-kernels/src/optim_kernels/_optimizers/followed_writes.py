"""fp32 masters that follow what others write to their parameters between two steps.

Beside an fp32 master a step writes the parameter and never reads it. What anybody else has written there since the last
step (the model's own checkpoint, an average of its weights, a fresh initialisation) it would undo, so before the step

    master  <-  master      where the parameter is the master rounded, as the last step has left it
                parameter   elsewhere

and what is put back as it was, averages that were in its place included, keeps all its bits. autograd counts writes to
a tensor, so this is asked of two numbers; what is written past autograd, by ``param.data.copy_(...)``, is not counted.
A ``"split16"`` master needs none of it: its upper half is the parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from optim_kernels._dtensors import is_dtensor, is_wrapper, local

_version = attrgetter("_version")


class FollowedWrites:
    """How often parameters had been written to, and where they lay, when their masters were last known to fit."""

    def __init__(self) -> None:
        # by id: whoever asks holds the parameters
        self._noted: dict[int, tuple[int, int]] = {}

    def note(self, params: Sequence[Tensor]) -> None:
        """From now on, what is written to these parameters is followed."""
        self._noted.update(zip(map(id, params), _marks(params)))

    @torch.no_grad()
    def follow(self, params: Sequence[Tensor], values: Sequence[Tensor], masters: Sequence[Tensor]) -> None:
        """Bring masters up to date of those parameters that were written to, or have moved, since they were noted.

        Args:
            values: what the masters belong to: the parameters, or a part of each.
        """
        marks, noted = _marks(params), list(map(self._noted.get, map(id, params)))
        if marks == noted:
            return
        for mark, before, value, master in zip(marks, noted, values, masters, strict=True):
            if before is not None and mark != before:
                _follow(local(value), local(master))


def can_be_followed(param: Tensor) -> bool:
    """Whether autograd counts what is written to the parameter, and it can be asked where it lies."""
    return not param.is_inference() and (is_dtensor(param) or not is_wrapper(param))


def _marks(params: Sequence[Tensor]) -> list[tuple[int, int]]:
    # a write may also be another tensor in the parameter's place: param.data = other
    return list(zip(map(_version, params), map(Tensor.data_ptr, params)))


def _follow(value: Tensor, master: Tensor) -> None:
    # what does not fit together is for the step to refuse
    if value.device == master.device and value.shape == master.shape:
        value = value.detach()
        master.copy_(torch.where(master.to(value.dtype) == value, master, value.to(master.dtype)))
