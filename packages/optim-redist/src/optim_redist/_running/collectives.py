"""The only place where moving a tensor calls ``torch.distributed``: teams of ranks, exchanges, comparison of plans.

Some functions have other names in other versions of torch; the ones of the installed version are chosen here.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from optim_redist._tools.lazy import lazy
from optim_redist.errors import PlanMismatchError, UnsupportedError

# keeps this package's messages on the world's group apart from those of other code
_TAG = 0x0ED15
_groups: dict[tuple[int, ...], tuple[object, ProcessGroup]] = {}
_nothing: dict[tuple[torch.device, torch.dtype], Tensor] = {}
# by group, the members and digests of texts that were compared. Ranks evict programs and plans at different times, and
# a rank that compared again alone would wait for ever, so nothing is forgotten while the group lives
_compared: weakref.WeakKeyDictionary[ProcessGroup, set[tuple[tuple[int, ...], bytes]]] = weakref.WeakKeyDictionary()


def is_initialized() -> bool:
    """Whether there is a process group to exchange with."""
    return dist.is_available() and dist.is_initialized()


def my_rank() -> int:
    """This process' global rank, 0 without a process group."""
    return dist.get_rank() if is_initialized() else 0


def world() -> object:
    """The default process group, None without one; programs compiled for one default group are void for the next."""
    return dist.group.WORLD if is_initialized() else None


@dataclass(frozen=True)
class Team:
    """The ranks that exchange with each other, and the group they use.

    Attributes:
        group: may have more members than the team; only the team's ranks call.
        members: global ranks of the team, in group order.
    """

    group: ProcessGroup
    members: tuple[int, ...]

    @classmethod
    def of(cls, ranks: Iterable[int], group: ProcessGroup | None = None) -> Team:
        """The team of all members of ``group``; without one, of exactly these ranks.

        A team smaller than the world sends and receives pair by pair on the world's group. NCCL needs a communicator of
        all ranks for that, which only a world bound to devices has from its start. Else the team gets a group of its
        own, which its members alone make. torch names such a group by the number of groups that a member is in.
        """
        needed = tuple(sorted(ranks))
        if not is_initialized():
            raise UnsupportedError(
                f"ranks {list(needed)} have to exchange data; call torch.distributed.init_process_group first"
            )
        if group is not None:
            members = _members(group)
            if not set(needed) <= set(members):
                missing = sorted(set(needed) - set(members))
                raise UnsupportedError(f"the group lacks ranks {missing} of the layouts; give one that has them")
            return cls(group, members)
        everyone = dist.group.WORLD
        assert everyone is not None, "the default group is initialised"
        if needed and needed[-1] >= dist.get_world_size():
            raise UnsupportedError(f"the layouts name rank {needed[-1]}, the world has {dist.get_world_size()} ranks")
        bound = getattr(everyone, "bound_device_id", None) is not None
        if len(needed) == dist.get_world_size() or bound or not _has_nccl(everyone):
            return cls(everyone, needed)
        known = _groups.get(needed)
        if known is None or known[0] is not everyone:
            made = dist.new_group(list(needed), use_local_synchronization=True)
            _groups[needed] = known = (everyone, made)
        return cls(known[1], needed)

    @lazy
    def is_nccl(self) -> bool:
        """Whether exchanges run on CUDA streams."""
        return _has_nccl(self.group)

    @property
    def takes_lists(self) -> bool:
        """Whether every message may have a buffer of its own; gloo's all-to-all wants all messages in one."""
        return self.is_nccl or not self.is_whole or self.members != tuple(sorted(self.members))

    @lazy
    def is_whole(self) -> bool:
        """Whether the team is its whole group, so that collectives can be used."""
        return len(self.members) == dist.get_world_size(self.group)

    def exchange(
        self,
        received: Tensor,
        sent: Tensor,
        received_sizes: Mapping[int, int],
        sent_sizes: Mapping[int, int],
        *,
        async_op: bool = False,
    ) -> Waitable | None:
        """One all-to-all of flat byte buffers, laid out in the order of members; sizes are by global rank."""
        if not self.is_whole:
            incoming, outgoing = (
                dict(zip(sizes, buffer.split(list(sizes.values()))))
                for sizes, buffer in ((_in_order(received_sizes, self), received), (_in_order(sent_sizes, self), sent))
            )
            return self.exchange_lists(incoming, outgoing, received.device, async_op=async_op)
        splits = ([sizes.get(rank, 0) for rank in self.members] for sizes in (received_sizes, sent_sizes))
        return self.all_to_all(received, sent, *splits, async_op=async_op)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        received_splits: list[int],
        sent_splits: list[int],
        *,
        async_op: bool,
    ) -> Waitable | None:
        """One all-to-all of a whole team's dense buffers; how many rows of them are of each member, in group order."""
        return dist.all_to_all_single(received, sent, received_splits, sent_splits, group=self.group, async_op=async_op)

    @lazy
    def mixes_exchanges(self) -> bool:
        """Whether some ranks may exchange one buffer and others lists of them: both are NCCL's grouped sends.

        With TORCH_DISTRIBUTED_DEBUG=DETAIL torch refuses calls of different names.
        """
        is_sorted = self.members == tuple(sorted(self.members))
        return self.is_whole and self.is_nccl and is_sorted and dist.get_debug_level() != dist.DebugLevel.DETAIL

    def exchange_lists(
        self,
        incoming: Mapping[int, Tensor],
        outgoing: Mapping[int, Tensor],
        device: torch.device,
        *,
        async_op: bool,
    ) -> Waitable | None:
        """One all-to-all with a buffer for each peer, anywhere in memory; peers not named exchange nothing.

        A rank may be its own peer if the team is whole and uses NCCL.
        """
        # a group with NCCL uses gloo for CPU tensors, and gloo has no all-to-all of lists
        if self.is_whole and self.is_nccl and device.type != "cpu":
            some = next(iter(outgoing.values() or incoming.values()), None)
            nothing = self._nothing(device, torch.uint8 if some is None else some.dtype)
            return dist.all_to_all(
                [incoming.get(rank, nothing) for rank in self.members],
                [outgoing.get(rank, nothing) for rank in self.members],
                group=self.group,
                async_op=async_op,
            )
        ends = [
            dist.P2POp(call, buffer, peer, self.group, _TAG)
            for call, buffers in ((dist.isend, outgoing), (dist.irecv, incoming))
            for peer, buffer in sorted(buffers.items())
        ]
        works = dist.batch_isend_irecv(ends) if ends else []
        if async_op:
            return _Works(works)
        for work in works:
            work.wait()
        return None

    def _nothing(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """What is exchanged with a rank with which nothing is."""
        if (device, dtype) not in _nothing:
            # made in inference mode, it could not be used outside of it
            with torch.inference_mode(False):
                _nothing[device, dtype] = torch.empty(0, dtype=dtype, device=device)
        return _nothing[device, dtype]

    def all_gather(self, target: Tensor, part: Tensor, *, async_op: bool) -> Waitable | None:
        """Every member gets all members' parts, one after the other."""
        return all_gather(target, part, self.group, async_op=async_op)

    def all_reduce(self, tensor: Tensor, op: str, *, async_op: bool) -> Waitable | None:
        """Combine the members' tensors in place."""
        return dist.all_reduce(tensor, _reduce_op(op), group=self.group, async_op=async_op)

    def reduce_scatter(self, target: Tensor, parts: Tensor, op: str, *, async_op: bool) -> Waitable | None:
        """Combine the members' dense buffers; every member gets its part of the result."""
        return reduce_scatter(target, parts, op, self.group, async_op=async_op)

    def compare(self, text: str) -> None:
        """Raise on every member unless all of them bring the same text; a text that was compared is not compared again.

        Digests travel first; texts only if they differ, so that the error can say where.

        Raises:
            PlanMismatchError: names the first rank that differs and the first difference.
        """
        encoded = text.encode()
        mine = hashlib.sha256(encoded).digest()
        known = _compared.setdefault(self.group, set())
        if (self.members, mine) in known:
            return
        digests = self._gathered_bytes(mine, [len(mine)] * len(self.members))
        if all(digest == digests[0] for digest in digests):
            known.add((self.members, mine))
            return
        lengths = self._gathered_bytes(len(encoded).to_bytes(8, "little"), [8] * len(self.members))
        texts = self._gathered_bytes(encoded, [int.from_bytes(length, "little") for length in lengths])
        other = next(k for k, digest in enumerate(digests) if digest != digests[0])
        raise PlanMismatchError(
            f"rank {self.members[other]} holds another plan than rank {self.members[0]}: "
            f"{_first_difference(texts[0].decode(), texts[other].decode())}; "
            "every rank has to call with the same shape, dtype, layouts and options, in the same order"
        )

    def _gathered_bytes(self, mine: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Every member's bytes, of sizes that all members know."""
        device = device_of(self)
        me = self.members.index(dist.get_rank())
        sent = torch.frombuffer(bytearray(mine) * (len(self.members) - 1) or bytearray(1), dtype=torch.uint8).to(device)
        peers = [k for k in range(len(self.members)) if k != me]
        received = torch.empty(sum(sizes[k] for k in peers), dtype=torch.uint8, device=device)
        self.exchange(
            received,
            sent[: len(mine) * len(peers)],
            {self.members[k]: sizes[k] for k in peers},
            {self.members[k]: len(mine) for k in peers},
        )
        parts = received.cpu().split([sizes[k] for k in peers])
        found = {k: bytes(part.tolist()) for k, part in zip(peers, parts)}
        return [mine if k == me else found[k] for k in range(len(self.members))]


def all_gather(target: Tensor, part: Tensor, group: ProcessGroup, *, async_op: bool = False) -> Waitable | None:
    """Every rank of the group gets all ranks' flat parts, one after the other."""
    gather: Callable[..., Work | None] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(target, part, group=group, async_op=async_op)


def reduce_scatter(
    target: Tensor, parts: Tensor, op: str, group: ProcessGroup, *, async_op: bool = False
) -> Waitable | None:
    """Every rank of the group gets its part of the ranks' flat buffers, combined."""
    scatter: Callable[..., Work | None] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(target, parts, op=_reduce_op(op), group=group, async_op=async_op)


def _reduce_op(op: str) -> Any:
    return {
        "sum": dist.ReduceOp.SUM,
        "min": dist.ReduceOp.MIN,
        "max": dist.ReduceOp.MAX,
        "product": dist.ReduceOp.PRODUCT,
    }[op]


class Waitable(Protocol):
    """What an asynchronous exchange returns."""

    def wait(self) -> Any:
        """Return when the exchange's buffers may be used."""


class _Works:
    """Several works waited for as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> bool:
        for work in self._works:
            work.wait()
        return True


def _in_order(sizes: Mapping[int, int], team: Team) -> dict[int, int]:
    return {rank: sizes[rank] for rank in team.members if sizes.get(rank)}


def device_of(where: Team | ProcessGroup | None) -> torch.device:
    """Where the tensors of a team or group live: the current CUDA device for NCCL, else the CPU."""
    group = where.group if isinstance(where, Team) else where
    if group is not None and _has_nccl(group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _members(group: ProcessGroup) -> tuple[int, ...]:
    # what new_group returns on other ranks is no ProcessGroup, but torch finds ranks of it
    if cast(object, group) == dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError(f"rank {dist.get_rank()} is not in the group that was given; only its ranks call")
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        raise UnsupportedError(
            f"group is a process group of torch.distributed that has not been destroyed, got {group!r}; a "
            "DeviceMesh gives that of an axis by get_group()"
        ) from None


def uses_nccl(group: ProcessGroup | None) -> bool:
    """Whether exchanges of the group, by default the world, run on NCCL."""
    if not is_initialized():
        return False
    if group is not None:
        _members(group)
    return _has_nccl(group if group is not None else dist.group.WORLD)


def _has_nccl(group: ProcessGroup | None) -> bool:
    # if init_process_group chose the backend, its name is "undefined", and only its configuration tells
    return "nccl" in dist.get_backend_config(group)


def _first_difference(a: str, b: str) -> str:
    """The first line in which two texts differ; one of them may end before it."""
    x, y = next((x, y) for x, y in zip_longest(a.split("\n"), b.split("\n")) if x != y)
    return " against ".join("nothing" if line is None else repr(line) for line in (x, y))
