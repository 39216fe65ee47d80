"""The owner's work on whole matrices: Newton–Schulz, in the grouped launches of the unsharded optimizer.

    O = direction of U        formula: ``optim_kernels.reference.muon``

A Muon step computes O if it starts from zero parameters, with U as gradient and momentum:

    p = 0,  B = g = U,  mu = 0,  lr = -1,  no decay, no scale      =>      p <- O

So all matrices that a rank owns in a batch go through the same planner, and on GPUs through the same few launches, as
matrices that are not cut. U and O keep their memory from step to step, so that plans and recorded launches stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from optim_dist._muon.plain_torch import scales, takes_part
from optim_dist._optimizers.shards import Item
from optim_dist.plan import MATRIX_ALIGNMENT
from optim_kernels.muon_groups import MuonEntry, MuonPlanner
from optim_utils.param_groups import MatrixView

# the group options with which a Muon step writes the direction alone
_DIRECTION_ONLY: dict[str, Any] = {
    "lr": -1.0,
    "momentum": 0.0,
    "nesterov": False,
    "maximize": False,
    "weight_decay": 0.0,
    "cautious": False,
    "adjust_lr_fn": "none",
    "stochastic_rounding": False,
}


@dataclass(frozen=True)
class WholeMatrix:
    """A matrix at its owner: how its parameter is read as matrices, and the dtype in which it travels."""

    view: MatrixView
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes, rounded up so that the next matrix is aligned."""
        return -(-prod(self.view.shape) * self.dtype.itemsize // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT

    def in_memory(self, memory: Tensor) -> Tensor:
        """``memory``, bytes, in the parameter's shape, with dimensions in the memory order that the view wants."""
        shape, order = self.view.shape, self.view.order or tuple(range(len(self.view.shape)))
        flat = memory[: prod(shape) * self.dtype.itemsize].view(self.dtype)
        return flat.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def room_for(matrices: Sequence[WholeMatrix]) -> int:
    """Bytes of U and O of all the matrices."""
    return 2 * sum(matrix.nbytes for matrix in matrices)


class Owner:
    """The matrices that this rank owns of one batch.

    Args:
        memory: ``room_for(matrices)`` bytes or more; batches may share it: each is done with it before the next begins.
        planner: steps the matrices.

    Attributes:
        us, os: U and O of every matrix, in that memory.
    """

    def __init__(self, matrices: Sequence[WholeMatrix], memory: Tensor, planner: MuonPlanner) -> None:
        self._matrices = matrices
        self.us: list[Tensor] = []
        self.os: list[Tensor] = []
        half = room_for(matrices) // 2
        self._zeroed, begin = memory[half : 2 * half], 0
        for matrix in matrices:
            self.us.append(matrix.in_memory(memory[begin:]))
            self.os.append(matrix.in_memory(memory[half + begin :]))
            begin += matrix.nbytes
        self._planner = planner

    def compute(self, items: Sequence[Item]) -> None:
        """Compute O of every U, zeros for a matrix that is left alone, and update second moments."""
        self._zeroed.zero_()
        taking_part = [place for place, item in enumerate(items) if takes_part(item)]
        if not taking_part:
            return
        groups: dict[int, tuple[Mapping[str, Any], list[MuonEntry]]] = {}
        for place in taking_part:
            item, u, o = items[place], self.us[place], self.os[place]
            state = {"momentum_buffer": u}
            if item.group["beta2"] is not None:
                state["second_momentum_buffer"] = item.state["second_momentum_buffer"]
            _, entries = groups.setdefault(item.shard.group, ({**item.group, **_DIRECTION_ONLY}, []))
            entries.append(MuonEntry(o, u, state, self._matrices[place].view, item.shard.number))
        self._planner.step(list(groups.values()))
        for place in taking_part:
            _scale_relative_to_first(items[place], self._matrices[place].view, self.os[place])


def _scale_relative_to_first(item: Item, view: MatrixView, o: Tensor) -> None:
    """Multiply each matrix of ``o`` by its scale over the first one's, by which all shards will be multiplied."""
    each = scales(item, view)
    if any(scale != each[0] for scale in each):
        for part, scale in zip(view.views(o), each, strict=True):
            part *= scale / each[0]
