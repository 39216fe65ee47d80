"""The ranks that share one optimizer's work: the only module here that calls ``torch.distributed`` collectives.

Letters: W = ranks, C = elements of a chunk, ``flat`` = W consecutive chunks, of which rank r owns chunk r.

    reduce_scatter_   flat[r] on rank r becomes the sum over ranks of flat[r]        sends (W-1)/W of flat
    all_gather_       flat[s] on every rank becomes rank s's flat[s]                 sends (W-1)/W of flat
    exchange          out[s] on rank r becomes rank s's flat[r]                      sends (W-1)/W of flat

The first two work in place. All are asynchronous: the caller keeps the tensors and the returned handle alive until it
has waited. ``traffic`` counts what this rank put on the wire, by the formulas above. If the backend gives up (gloo
raises in ``wait()``; NCCL ends the process), the error names the operation that was given up, and possible reasons.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from optim_dist._reduction import groups

# torch 2.13 renamed the flat collectives and warns about the old names
_reduce_scatter_flat = (
    dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
)
_all_gather_flat = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class Waitable(Protocol):
    """An operation in flight; ``wait()`` makes the current stream, or without streams the host, wait for it."""

    def wait(self) -> Any: ...


@dataclass
class Traffic:
    """What a rank has put on the wire, and in how many collectives."""

    bytes_sent: int = 0
    num_calls: int = 0

    def add(self, nbytes: int) -> None:
        """Count a collective in which this rank sends ``nbytes``."""
        self.bytes_sent += nbytes
        self.num_calls += 1


class Communicator:
    """One process group seen by an optimizer; with one rank no collective ever runs.

    Args:
        timeout: seconds that a collective may take; None: as many as the group allows.
        duplicate_of: another communicator of the same ranks. This one gets a group of its own, in which nobody else's
            collectives run, and adds to the other's traffic. Collective.

    Attributes:
        rank: which chunk this process owns.
        ranks: the global rank of every chunk's owner.
        traffic: what this rank has sent.
        is_lost: whether a collective was given up; any further one would be given up, too, only later.
        waits_on_host: whether starting a reduce-scatter or an all-gather blocks the host until other ranks start it.
    """

    waits_on_host = False

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        timeout: float | None = None,
        duplicate_of: Communicator | None = None,
    ) -> None:
        self._world, self._process = _world(), os.getpid()
        self._kind: groups.Kind | None = None  # only if the group was made for this communicator
        if self._world is None:
            if group is not None:
                raise RuntimeError("process_group was given, but torch.distributed is not initialized")
            _refuse_lone_ranks()
            self.rank, self.world_size, self.ranks = 0, 1, [0]
        else:
            self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise ValueError("this rank is not a member of the optimizer's process group")
            if (timeout is not None or duplicate_of is not None) and self.world_size > 1:
                group, self._kind = groups.own_group(group, Communicator(group, device), device, timeout)
            self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self.group = group
        self.device = device
        self.traffic: Traffic = Traffic() if duplicate_of is None else duplicate_of.traffic
        self.is_lost = False

    @property
    def is_usable(self) -> bool:
        """Whether other ranks may still take part, as far as this one knows."""
        return not self.is_lost and _world() is self._world and os.getpid() == self._process

    def abandon(self) -> None:
        """Never wait again for what is in flight, not even when this process ends.

        At the interpreter's exit gloo's destructor of the group would wait, while other ranks wait for this one to end.
        """
        self.is_lost = True
        if self.device.type == "cpu":
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))

    def give_back(self) -> None:
        """Offer a group that was made for this communicator for reuse by the next; nothing may be in flight in it."""
        if self._kind is not None and self.is_usable:
            assert self.group is not None, "it was made"
            groups.give_back(self._kind, self.group)
        self._kind = None

    def keep_group(self) -> None:
        """Never offer the group for reuse: ranks may end with different collectives in flight."""
        self._kind = None

    def has_same_world_as(self, other: Communicator) -> bool:
        """Whether both were made in one default process group."""
        return self._world is other._world

    def check_ranks(self) -> None:
        """Refuse a forked process, and a default process group that was made, or remade, after the optimizer."""
        if self.world_size > 1 and os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked from a rank and has no connections to the others; step in the rank itself"
            )
        world = _world()
        if world is self._world or (self.world_size == 1 and (world is None or dist.get_world_size() == 1)):
            return
        if self._world is None:
            raise RuntimeError(
                f"this optimizer was built for one rank, before the process group of {dist.get_world_size()}; build it "
                "after torch.distributed.init_process_group()"
            )
        raise RuntimeError(
            "the process group in which this optimizer was built is gone; build the optimizer anew after "
            "torch.distributed.init_process_group()"
        )

    def chunk_of(self, member: int) -> int:
        """The chunk that a member of the process group owns; ``member`` is its rank in that group."""
        return member

    @property
    def bytes_shared(self) -> int:
        """Bytes of this rank's memory that other ranks see; torch's allocator does not count them."""
        return 0

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros in memory that collectives send repeatedly. Collective in some transports, with the same arguments."""
        return torch.zeros(numel, dtype=dtype, device=device)

    def leave_memory(self) -> None:
        """Never free memory of ``zeros`` if freeing it would wait for other ranks, which may never come."""

    def reduce_scatter_(self, flat: Tensor) -> Waitable:
        """Sum chunk r of every rank's ``flat [W * C]`` into chunk r on rank r; the other chunks are left undefined."""
        if self.world_size == 1:
            return _Done()
        self._count(flat)
        work = _reduce_scatter_flat(self._own(flat), flat, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
        return self._started(work, "reduce-scatter", flat)

    def all_gather_(self, flat: Tensor) -> Waitable:
        """Fill every chunk of ``flat [W * C]`` with its owner's."""
        if self.world_size == 1:
            return _Done()
        self._count(flat)
        work = _all_gather_flat(flat, self._own(flat), group=self.group, async_op=True)
        return self._started(work, "all-gather", flat)

    def exchange(self, out: Tensor, flat: Tensor) -> Waitable:
        """Fill ``out [W * C]`` with every rank's contribution to this rank's chunk, in the order of global ranks."""
        if self.world_size == 1:
            out.copy_(flat)
            return _Done()
        self._count(flat)
        work = dist.all_to_all_single(out, flat, group=self.group, async_op=True)
        return self._started(work, "all-to-all", flat)

    def rehearse(self, collective: Callable[[], Waitable]) -> None:
        """Run a collective only for the setup that a backend does at its first one; the traffic is not counted."""
        before = replace(self.traffic)
        collective().wait()
        self.traffic.bytes_sent, self.traffic.num_calls = before.bytes_sent, before.num_calls

    def gather_message(self, message: Tensor) -> Tensor:
        """``message [K]`` of every rank as ``[W, K]``, on every rank."""
        if self.world_size == 1:
            return message.unsqueeze(0)
        gathered = message.new_empty(self.world_size * message.numel())
        self._own(gathered).copy_(message)
        self.all_gather_(gathered).wait()
        return gathered.view(self.world_size, -1)

    def gather_numbers(self, message: Tensor) -> Tensor:
        """As ``gather_message``, for a step's numbers on the device: without a kernel if ranks share memory."""
        return self.gather_message(message)

    def broadcast_(self, flat: Tensor, source: int = 0) -> None:
        """Overwrite ``flat [N]`` by that of the owner of chunk ``source``."""
        if self.world_size > 1 and flat.numel():
            # as bytes: gloo does not know int16
            work = dist.broadcast(flat.view(torch.uint8), src=self.ranks[source], group=self.group, async_op=True)
            self._started(work, "broadcast", flat).wait()

    def send(self, flat: Tensor, to: int) -> Waitable:
        """Send ``flat [N]`` to a global rank, which receives as many elements."""
        self.traffic.add(flat.nbytes)
        return self._started_to(dist.isend, to, f"sending to rank {to}", flat)

    def receive(self, flat: Tensor, source: int) -> Waitable:
        """Overwrite ``flat [N]`` by what a global rank sends."""
        return self._started_to(dist.irecv, source, f"receiving from rank {source}", flat)

    def gather_json(self, value: object) -> list[Any]:
        """``value`` of every rank, in rank order; JSON, so that nothing is unpickled."""
        if self.world_size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([payload.numel()], dtype=torch.int64, device=self.device)
        sizes = self.gather_message(size).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: payload.numel()] = payload.to(self.device)
        rows = self.gather_message(padded).cpu()
        return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes)]

    def raise_together(self, problems: Sequence[str], what: str) -> None:
        """Raise on every rank if any rank has problems, with all of them."""
        gathered = self.gather_json(list(problems))
        if any(gathered):
            every = dict.fromkeys(problem for found in gathered for problem in found)
            raise RuntimeError(f"{what}:\n  " + "\n  ".join(every))

    def named(self, work: Waitable, what: str, flat: Tensor | None = None) -> Waitable:
        """``work`` of these ranks, with an error that names the operation."""
        return _Named(work, self, what, flat)

    def _started(self, work: dist.Work | None, what: str, flat: Tensor) -> Waitable:
        assert work is not None, "an asynchronous collective returns its Work on every member of the group"
        return self.named(work, what, flat)

    def _started_to(self, start: Callable[..., dist.Work | None], rank: int, what: str, flat: Tensor) -> Waitable:
        try:
            work = start(flat, rank, group=self.group)
        except RuntimeError as error:  # gloo has already noticed that the other rank has ended
            raise self.given_up(what, flat, error) from error
        return self._started(work, what, flat)

    def given_up(self, what: str, flat: Tensor | None, error: RuntimeError) -> RuntimeError:
        """The exception to raise for ``error`` of the backend; other ranks count as lost from now on."""
        self.is_lost = True
        size = "" if flat is None else f" ({flat.numel()} {flat.dtype})"
        return RuntimeError(
            f"rank {self.ranks[self.rank]} gave up the {what} over {self.world_size} ranks{size}: another "
            "rank has ended or raised an error, which says why, is late by more than the timeout, or does "
            f"something else; start all ranks again from the newest checkpoint (the backend: {error})"
        )

    def _own(self, flat: Tensor) -> Tensor:
        chunk = flat.numel() // self.world_size
        return flat[self.rank * chunk : (self.rank + 1) * chunk]

    def _count(self, flat: Tensor) -> None:
        self.traffic.add(flat.numel() // self.world_size * (self.world_size - 1) * flat.element_size())


def _world() -> dist.ProcessGroup | None:
    """The default process group, if there is one."""
    return dist.group.WORLD if dist.is_initialized() else None


class _Done:
    """A ``Waitable`` with nothing to wait for."""

    def wait(self) -> None: ...


class Recorded:
    """Work in a stream of ``device`` that ends with ``event``; ``held`` is kept alive because the work reads it."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, held: object = None) -> None:
        self._event, self._device, self._held = event, device, held

    def wait(self) -> None:
        # the collectives' device need not be the current one
        torch.cuda.current_stream(self._device).wait_event(self._event)


class _Named:
    """A ``Waitable`` with the text of the error to raise if it fails."""

    def __init__(self, work: Waitable, communicator: Communicator, what: str, flat: Tensor | None) -> None:
        self._work, self._communicator, self._what, self._flat = work, communicator, what, flat

    def wait(self) -> Any:
        try:
            return self._work.wait()
        except RuntimeError as error:
            raise self._communicator.given_up(self._what, self._flat, error) from error


def _refuse_lone_ranks() -> None:
    """Refuse ranks of torchrun without a process group: each would train a model of its own."""
    if dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise RuntimeError(
            f"torchrun started {os.environ['WORLD_SIZE']} ranks, but there is no process group; call "
            "torch.distributed.init_process_group() before building the optimizer"
        )
