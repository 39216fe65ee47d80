"""Parameters in no bucket: DTensors (FSDP2, HSDP, tensor parallel) and, unless ``order="tree"``, all of one rank.

They are updated where they lie. Gradients of DTensors arrive reduced and sharded as the parameters are. An elementwise
update works on the local shard, whatever its size, without any collective; replicas compute the same. Muon needs whole
matrices, so it exchanges those that are cut over ranks (``_muon.sharded``).

A DTensor's gradient exists on all ranks of its mesh or on none: that is how FSDP2 and tensor parallelism give it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from optim_dist._muon.sharded import ShardedMatrix, ShardedMuon
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.layouts import joint_layout, local
from optim_dist._optimizers.options import Options
from optim_dist._optimizers.pending_sums import LocalGradients, check_gradient
from optim_dist._optimizers.shards import Item, Shard, StepContext, make_shard, takes_zeros
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import ParameterSpec, RouteName
from optim_redist import Layout
from optim_redist.index_sets import IndexSet, size
from optim_utils.param_groups import MatrixView


@dataclass(frozen=True)
class Unbucketed:
    """A parameter outside buckets: how it is cut, and whether this rank has its first replica, which norms count."""

    index: int  # in the plan
    entry: Entry
    spec: ParameterSpec
    layout: Layout | None = None  # of a DTensor over several ranks
    start: int | None = 0  # see ``flat_start``
    is_counted: bool = True


class UnbucketedParameters:
    """The parameters of one optimizer that are in no bucket."""

    def __init__(self, communicator: Communicator, options: Options) -> None:
        self._communicator = communicator
        self._options = options
        self._members: list[Unbucketed] = []
        # DTensors whose replicas are compared at the first step: not at once, as they may get their numbers when the
        # optimizer has been built
        self.supposed_replicas: list[tuple[Entry, Layout]] = []
        self._muon: ShardedMuon | None = None
        self._gradients = LocalGradients()
        # parameters with the gradients that the last clipping took a norm of, as long as these exist
        self._clipped: list[tuple[Tensor, weakref.ref[Tensor]]] = []

    def extend(
        self, specs: Sequence[ParameterSpec], entries: Sequence[Entry], meshes: Sequence[Sequence[Sequence[int]]]
    ) -> None:
        """Add those of the last ``len(meshes)`` entries that go into no bucket, and plan Muon's exchange anew."""
        rank, first = self._communicator.ranks[self._communicator.rank], len(entries) - len(meshes)
        for index in range(first, len(entries)):
            entry, spec = entries[index], specs[index]
            if isinstance(entry.parameter, DTensor) and spec.sharding:
                layout = joint_layout(entry.parameter, meshes[index - first])
                start = flat_start(layout, spec.shape, rank)
                self._members.append(Unbucketed(index, entry, spec, layout, start, _is_first(layout, rank)))
                # several meshes need not be of replicas
                if len(meshes[index - first]) > 1 or (layout.replicated_axes and self._options.compares_replicas):
                    self.supposed_replicas.append((entry, layout))
            elif self._communicator.world_size == 1 and not self._options.is_tree:
                self._members.append(Unbucketed(index, entry, spec))
        matrices = [
            ShardedMatrix(m.index, m.spec.shape, m.spec.dtype, m.layout, _view(m), m.spec.cost)
            for m in self._members
            if m.spec.route == "muon" and m.layout is not None
        ]
        self._muon = ShardedMuon(matrices, self._communicator, self._options.bucket_mb) if matrices else None

    def __len__(self) -> int:
        return len(self._members)

    def shards(self) -> list[Shard]:
        """The local part of every parameter, without gradients."""
        return [self._shard(member) for member in self._members]

    def check(self) -> None:
        """Refuse gradients that cannot be read in their parameters' layout, before any rank is told of them."""
        for member in self._members:
            check_gradient(member.entry)

    def gradients(self) -> list[Tensor]:
        """Local gradients, every element on one rank only: of replicas the first has them."""
        found = zip(self._members, self._gradients.of([member.entry for member in self._members]), strict=True)
        return [gradient for member, gradient in found if gradient is not None and member.is_counted]

    @property
    def has_gradients(self) -> bool:
        return any(member.entry.parameter.grad is not None for member in self._members)

    def note_clipped(self) -> None:
        """Remember which gradients exist."""
        parameters = [member.entry.parameter for member in self._members]
        self._clipped = [(p, weakref.ref(gradient)) for p in parameters if (gradient := p.grad) is not None]

    @property
    def were_dropped(self) -> bool:
        """Whether all gradients that existed at the last clipping are gone, as after ``model.zero_grad()``."""
        return bool(self._clipped) and all(p.grad is None or p.grad is not gradient() for p, gradient in self._clipped)

    def restart(self) -> None:
        """Forget this step's gradients."""
        self._gradients.forget()
        self._clipped = []

    def update(
        self,
        context: StepContext,
        groups: Sequence[dict[str, Any]],
        item_of: Callable[[Shard], Item],
        update: Callable[[RouteName, list[Item]], None],
    ) -> None:
        """Update parameters that have a gradient, or whose group takes a missing one for zeros."""
        # Muon first, which may refuse more
        whole: dict[RouteName, list[Item]] = {"muon": [], "adamw": []}
        exchanged = []
        gradients = self._gradients.of([member.entry for member in self._members])
        for member, gradient in zip(self._members, gradients, strict=True):
            shard = self._shard(member)
            shard.gradient = gradient
            if member.layout is not None and member.spec.route == "muon":
                exchanged.append(item_of(shard))
            elif gradient is not None or (member.spec.route == "muon" and takes_zeros(shard, groups[shard.group])):
                whole[member.spec.route].append(item_of(shard))
        for route, items in whole.items():
            if items:
                update(route, items)
        if self._muon is not None:
            self._muon.step(exchanged, context)

    @property
    def layouts(self) -> dict[int, Layout]:
        """The layout of each DTensor of several ranks, by plan index."""
        return {member.index: member.layout for member in self._members if member.layout is not None}

    @property
    def owners(self) -> dict[int, int]:
        """Which rank orthogonalizes each matrix, by plan index."""
        return {} if self._muon is None else self._muon.owners

    @property
    def bytes_exchanged(self) -> int | None:
        """What this rank sends in a step; None before the first one that exchanges matrices."""
        return 0 if self._muon is None else self._muon.bytes_sent

    @property
    def plain_torch_reasons(self) -> dict[int, str]:
        """Why the momentum or update of a sharded matrix was in plain torch in the last step, by plan index."""
        return {} if self._muon is None else self._muon.plain_torch_reasons

    def _shard(self, member: Unbucketed) -> Shard:
        # the same tensor object every step where possible, so that what was planned for it still holds
        value, start = local(member.entry.parameter), member.start or 0
        shard = make_shard(member.entry, member.index, start, start + value.numel(), value)
        shard.is_consecutive = member.start is not None
        return shard


def flat_start(layout: Layout, shape: Sequence[int], rank: int) -> int | None:
    """Where a rank's elements begin in row-major order; None if those of some rank are not consecutive."""
    sets = layout.index_sets(shape)  # of all ranks, so asked for once
    starts = {
        each: _start([of_dim[layout.coordinate(each, dim)] for dim, of_dim in enumerate(sets)], shape)
        for each in layout.mesh.ranks
    }
    return None if None in starts.values() else starts[rank]


def _start(held: Sequence[IndexSet], shape: Sequence[int]) -> int | None:
    """Where elements begin that are ``held`` dimension by dimension; None if they are not consecutive."""
    if not held or prod(map(size, held)) == 0:
        return 0
    if any(len(runs) != 1 or runs[0].repeats != 1 for runs in held):
        return None
    if any(runs[0].length != whole for runs, whole in zip(held[1:], shape[1:])):
        return None
    return held[0][0].start * prod(shape[1:])


def _view(member: Unbucketed) -> MatrixView:
    return member.entry.view or MatrixView.identity(member.spec.shape)


def _is_first(layout: Layout, rank: int) -> bool:
    return not any(layout.mesh.coordinates[rank][axis] for axis in layout.replicated_axes)
