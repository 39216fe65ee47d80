"""Muon on matrices that are cut over ranks: shards of U travel to one owner per matrix, updates travel back.

    every rank   B <- mu B + (1 - mu) G,   U         on its shards (formula: ``optim_kernels.reference.muon``)
    collect      the shards of every U to its owner
    the owner    O = direction of the whole U        Newton–Schulz, and what the group's options add to it
    spread       O as the parameter is cut, to all its replicas; the second moment, a vector, to every rank
    every rank   p <- p updated by O                 on its shards

Owners are chosen by the cost of the iteration, among all ranks, replicas included, so that nothing is computed twice.
Matrices travel in the parameter's dtype: (W - 1)/W of their bytes to the owners and as much back. They are exchanged in
batches: one is in flight while the one before is orthogonalized. No collective depends on which gradients exist: a
matrix without one travels as zeros and is left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from optim_dist._muon.launches import Momenta, Updates
from optim_dist._muon.owner import Owner, WholeMatrix, room_for
from optim_dist._optimizers.shards import Item, StepContext
from optim_dist._reduction.collectives import Communicator, Waitable
from optim_dist.planning import DEFAULT_BUCKET_MB
from optim_kernels.muon_groups import MuonPlanner
from optim_redist import Layout, Mesh, RepeatedExchange, plan
from optim_utils.balance import partition
from optim_utils.param_groups import MatrixView


@dataclass(frozen=True)
class ShardedMatrix:
    """A parameter of the Muon route: how it is cut, and the cost of its iteration."""

    index: int  # in the plan
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    view: MatrixView
    cost: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def whole(self) -> WholeMatrix:
        """The matrix as its owner sees it."""
        return WholeMatrix(self.view, self.dtype)


class Move(NamedTuple):
    """A tensor of ``shape`` that goes from one layout to another."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Layout
    target: Layout


class Exchange:
    """Many moves as one all-to-all, planned once, with memory that is lent for the time of one exchange.

    Attributes:
        bytes_sent: what this rank sends in one.
    """

    def __init__(
        self,
        moves: Sequence[Move],
        communicator: Communicator,
        *,
        sources: Sequence[Tensor | None] | None = None,
        targets: Sequence[Tensor | None] | None = None,
    ) -> None:
        plans = [plan(m.shape, m.dtype, m.source, m.target, planners=("direct",)) for m in moves]
        self._communicator = communicator
        rank = communicator.ranks[communicator.rank]
        self.bytes_sent = sum(
            phase.sent().get(rank, 0) * made.itemsize for made in plans for _, phases in made.phases for phase in phases
        )
        self._repeated = RepeatedExchange(
            plans, communicator.device, group=communicator.group, sources=sources, targets=targets
        )

    def lend(self) -> Sequence[Tensor | None]:
        """The tensors to fill before ``start`` sends them, None where this rank has nothing to send."""
        return self._repeated.lend_sources()

    def start(self) -> Waitable:
        """Send; ``wait()`` gives this rank's targets, None where it has none."""
        self._communicator.traffic.add(self.bytes_sent)
        return self._communicator.named(self._repeated.start(), "exchange of matrices")

    def release(self) -> None:
        """Let go of the targets."""
        self._repeated.release()


class Batch:
    """Matrices that travel together; this rank works on those that it owns in ``memory``, by ``planner``."""

    def __init__(
        self,
        matrices: Sequence[ShardedMatrix],
        owners: Mapping[int, int],
        moments: Mapping[int, Tensor],
        *,
        world: Communicator,
        memory: Tensor,
        planner: MuonPlanner,
    ) -> None:
        self.matrices = matrices
        # matrices whose second moment every rank gets back
        self.with_moment = [matrix for matrix in matrices if matrix.index in moments]
        everybody = Mesh(world.world_size, ranks=world.ranks)
        at_owner = {m.index: Mesh(1, ranks=[owners[m.index]]) for m in matrices}
        self.mine = owned_by(world.ranks[world.rank], matrices, owners)
        self._momenta, self._updates = Momenta(), Updates()
        self._owner = Owner([matrix.whole for matrix in self.mine], memory, planner)
        there = [Move(m.shape, m.dtype, m.layout, _whole(at_owner[m.index], m.shape)) for m in matrices]
        back = [Move(m.shape, m.dtype, _whole(at_owner[m.index], m.shape), m.layout) for m in matrices]
        for matrix in self.with_moment:
            shape, dtype = tuple(moments[matrix.index].shape), moments[matrix.index].dtype
            back.append(Move(shape, dtype, _whole(at_owner[matrix.index], shape), _whole(everybody, shape)))
        mine = [matrix.index for matrix in self.mine]
        us, os = dict(zip(mine, self._owner.us, strict=True)), dict(zip(mine, self._owner.os, strict=True))
        self._moments = {m.index: torch.empty_like(moments[m.index]) for m in self.with_moment if m.index in us}
        self._collect = Exchange(there, world, targets=[us.get(m.index) for m in matrices])
        leaving = [*(os.get(m.index) for m in matrices), *(self._moments.get(m.index) for m in self.with_moment)]
        self._spread = Exchange(back, world, sources=leaving)

    def collect(self, items: Mapping[int, Item], context: StepContext) -> Waitable:
        """Update the momentum of every local shard, and send U to the owners."""
        self._momenta.run([items[m.index] for m in self.matrices], context, _all_there(self._collect.lend()))
        return self._collect.start()

    def spread(self, items: Mapping[int, Item]) -> Waitable:
        """Orthogonalize the matrices that this rank owns, and send the results back."""
        self._owner.compute([items[matrix.index] for matrix in self.mine])
        _copy([*self._moments.values()], [items[index].state["second_momentum_buffer"] for index in self._moments])
        return self._spread.start()

    def finish(self, items: Mapping[int, Item], arrived: Sequence[Tensor | None]) -> None:
        """Update the local shards."""
        here = _all_there(arrived)
        updates, moments = here[: len(self.matrices)], here[len(self.matrices) :]
        self._updates.run([items[m.index] for m in self.matrices], [m.view for m in self.matrices], updates)
        _copy([items[m.index].state["second_momentum_buffer"] for m in self.with_moment], moments)
        self._spread.release()

    @property
    def bytes_sent(self) -> int:
        """What this rank sends in a step."""
        return self._collect.bytes_sent + self._spread.bytes_sent

    @property
    def plain_torch_reasons(self) -> dict[int, str]:
        """Why the momentum or update of local shards used plain torch in the last step; keyed by index in the plan."""
        return self._updates.sorter.reasons | self._momenta.sorter.reasons


class ShardedMuon:
    """The owners of all matrices, and their batches."""

    def __init__(self, matrices: Sequence[ShardedMatrix], communicator: Communicator, bucket_mb: float | None) -> None:
        self._communicator = communicator
        chosen = partition([float(matrix.cost) for matrix in matrices], communicator.world_size).owner
        self.owners = {matrix.index: communicator.ranks[owner] for matrix, owner in zip(matrices, chosen)}
        self._parts = _cut(matrices, self.owners, (bucket_mb or DEFAULT_BUCKET_MB) * 2**20)
        self._batches: list[Batch] = []
        self._moments: tuple[int, ...] | None = None  # matrices with a second moment, when batches were planned

    def step(self, items: Sequence[Item], context: StepContext) -> None:
        """One step of all matrices, those without a gradient included: every rank passes every item.

        ``found_inf``, the same on every rank, is read on the host: with a ``GradScaler`` a step waits for the device.
        """
        if context.found_inf is not None and bool(context.found_inf.item()):
            return
        by_index = {item.shard.index: item for item in items}
        batches = self._planned(by_index, context.new_planner)
        arriving = batches[0].collect(by_index, context)
        leaving: Waitable | None = None
        for number, batch in enumerate(batches):
            following = batches[number + 1].collect(by_index, context) if number + 1 < len(batches) else None
            arriving.wait()
            sent = batch.spread(by_index)
            if leaving is not None:
                batches[number - 1].finish(by_index, leaving.wait())
            leaving = sent
            if following is not None:
                arriving = following
        assert leaving is not None, "there is at least one batch"
        batches[-1].finish(by_index, leaving.wait())

    @property
    def bytes_sent(self) -> int | None:
        """What this rank sends in a step; None before the first."""
        return sum(batch.bytes_sent for batch in self._batches) if self._batches else None

    @property
    def plain_torch_reasons(self) -> dict[int, str]:
        """``Batch.plain_torch_reasons`` of all batches."""
        return {index: reason for batch in self._batches for index, reason in batch.plain_torch_reasons.items()}

    def _planned(self, items: Mapping[int, Item], new_planner: Callable[[], MuonPlanner]) -> list[Batch]:
        """The batches, planned anew if a group has begun or ceased to keep second moments."""
        moments = {
            index: item.state["second_momentum_buffer"]
            for index, item in items.items()
            if item.group["beta2"] is not None
        }
        if self._moments != tuple(moments):
            world = self._communicator
            owned = [owned_by(world.ranks[world.rank], part, self.owners) for part in self._parts]
            # batches share it: one's results are packed for sending before the next begins
            room = max(room_for([matrix.whole for matrix in mine]) for mine in owned)
            memory = torch.empty(room, dtype=torch.uint8, device=world.device)
            self._batches = [
                Batch(part, self.owners, moments, world=world, memory=memory, planner=new_planner())
                for part in self._parts
            ]
            self._moments = tuple(moments)
        return self._batches


def owned_by(rank: int, matrices: Sequence[ShardedMatrix], owners: Mapping[int, int]) -> list[ShardedMatrix]:
    """The matrices that ``rank`` orthogonalizes."""
    return [matrix for matrix in matrices if owners[matrix.index] == rank]


def _cut(matrices: Sequence[ShardedMatrix], owners: Mapping[int, int], max_bytes: float) -> list[list[ShardedMatrix]]:
    """Batches of about ``max_bytes``, with an equal share of every owner's matrices in each."""
    lists: dict[int, list[ShardedMatrix]] = {}
    for matrix in matrices:
        lists.setdefault(owners[matrix.index], []).append(matrix)
    total = sum(matrix.nbytes for matrix in matrices)
    longest = max(len(mine) for mine in lists.values())
    count = max(1, min(longest, -(-total // int(max(1, max_bytes)))))
    parts: list[list[ShardedMatrix]] = [[] for _ in range(count)]
    for mine in lists.values():
        for place, matrix in enumerate(mine):
            parts[place * count // len(mine)].append(matrix)
    return [sorted(part, key=lambda matrix: matrix.index) for part in parts if part]


def _all_there(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """``tensors``, none of which is None: every rank has a part of each matrix, perhaps empty, and every moment."""
    return [tensor for tensor in tensors if tensor is not None]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _whole(mesh: Mesh, shape: Sequence[int]) -> Layout:
    """The layout in which every rank of the mesh holds everything."""
    return Layout(mesh, [None] * len(shape))
