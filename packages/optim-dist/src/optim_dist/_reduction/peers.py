"""Ranks of one host that reach into each other's memory, for ``transport="symm"``.

Letters as in ``collectives``. The copies run in a stream of their own, on copy engines that need no multiprocessor:

    collect       all ranks have come | room[s] <- flat[r] of rank s, for s != r | all have copied
    all_gather_   all ranks have come | flat[r] of rank s <- flat[r], for s != r | all have copied

So overlapped compute loses nothing but memory bandwidth, while NCCL's kernels would take multiprocessors from it.
Copies run one after the other, because two at once take longer. Ranks meet on the device, by flags in each other's
memory; no host waits. That stream runs no kernels, since a kernel that waits slows down all others (``meetings``): sums
are computed in the current stream. Tensors that other ranks cannot see go through the process group.

A copy that waits for a rank holds up other copies of the same engine, and everything that waits for those. So ranks
must launch copies in the same order, with nothing of the user's in between. This holds inside a step, so copies are
launched only there. Copies of a bucket whose gradients were complete earlier wait for these gradients alone, and so
overlap with what the device has left of backward.

Source: torch's symmetric memory, ``torch.distributed._symmetric_memory``. Nothing here uses NVLink's multicast, but
torch sets it up for that memory, unless the environment has TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
"""

from __future__ import annotations

import ctypes
import socket
import weakref
from binascii import crc_hqx
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from optim_dist._reduction.collectives import Communicator, Recorded, Waitable
from optim_dist._reduction.meetings import FLAG_BYTES, Meeting, Watch, missing_operations

try:
    import torch.distributed._symmetric_memory as symmetric_memory
except ImportError:  # torch may be built without it
    symmetric_memory = None  # type: ignore[assignment, unused-ignore]

Copies = Iterable[tuple[Tensor, Tensor]]  # (to, from)

MESSAGE_BYTES = 2**16  # the longest message of a rank that goes through shared memory


@dataclass(frozen=True)
class Chunk:
    """This rank's chunk of a flat tensor: its place at the next rank, the one after that, ..., and last at this one."""

    places: list[Tensor]
    number: int  # below 2^16, a hash that stands for the flat tensor, the same on all ranks


@dataclass(frozen=True)
class _Region:
    """Memory that ``zeros`` has made; the entry goes when its storage does."""

    storage: weakref.ref[torch.UntypedStorage]
    handle: Any
    number: int  # the same on all ranks
    chunks: dict[tuple[int, int, torch.dtype], Chunk] = field(default_factory=dict)


class PeerMemory:
    """Memory of this rank that other ranks access, and their memory that it accesses. Construction is collective.

    Raises:
        RuntimeError: on every rank, if ranks are not on one host, or torch or CUDA's driver lack what is needed.
        ValueError: for a device other than CUDA.
    """

    # regions of this process, whatever the group: torch's ranks find each other by a number that counts in the same way
    num_made: ClassVar[int] = 0

    def __init__(self, communicator: Communicator) -> None:
        device = communicator.device
        if device.type != "cuda":
            raise ValueError(
                f"transport='symm' is for ranks on GPUs of one host, but parameters are on {device}; leave it out"
            )
        _check_host(communicator)
        group = communicator.group or torch.distributed.group.WORLD
        assert group is not None, "torch.distributed is initialized"
        self._device, self._group = device, group
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self._timeout = group._get_backend(device).options._timeout.total_seconds()
        self._ranks = communicator.ranks
        self._copying = torch.cuda.Stream(device, priority=-1)
        self._ready = torch.cuda.Event()
        self._regions: dict[int, _Region] = {}  # keyed by the storage's id
        self._board: Tensor | None = None  # messages, and behind them the flags by which ranks meet

    @property
    def nbytes(self) -> int:
        """Bytes of all regions that exist now."""
        return sum(region.handle.buffer_size for region in list(self._regions.values()))  # GC may drop some meanwhile

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros that other ranks can access, too. Collective, with the same arguments."""
        if self._board is None:
            self._board = self._shared(self._world_size * (MESSAGE_BYTES + FLAG_BYTES), torch.uint8)
            self._begin_to_meet(self._board)
        return self._shared(numel, dtype)

    def _shared(self, numel: int, dtype: torch.dtype) -> Tensor:
        PeerMemory.num_made += 1
        flat, handle = self._allocate(max(numel, 1), dtype)
        storage = flat.untyped_storage()
        self._regions[id(storage)] = _Region(weakref.ref(storage), handle, PeerMemory.num_made)
        # a reference to the dict alone: one to this object would keep its own storage, the board, alive
        weakref.finalize(storage, self._regions.pop, id(storage), None).atexit = False
        return flat.zero_()[:numel]

    def _begin_to_meet(self, board: Tensor) -> None:
        handle, flags = self._regions[id(board.untyped_storage())].handle, self._world_size * MESSAGE_BYTES
        ours, *theirs = [
            handle.get_buffer(rank, (self._world_size * FLAG_BYTES,), torch.uint8, flags).data_ptr()
            for rank in (self._rank, *self._others)
        ]
        self._meeting = Meeting(
            [address + FLAG_BYTES * self._rank for address in theirs],
            [ours + FLAG_BYTES * rank for rank in self._others],
        )
        progress = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        here = f"rank {self._ranks[self._rank]} of {self._ranks}"
        self._watch = Watch(progress, self._timeout, f"a copy between ranks' memories on {here}")
        weakref.finalize(self, self._watch.leave).atexit = False
        handle.barrier(0, max(1, round(1000 * self._timeout)))  # before it another rank's flags may not be 0
        self.run([], 0)
        self._copying.synchronize()
        if not self._watch.is_over:  # such a watch would end a healthy process
            raise RuntimeError(f"CUDA's stream memory operations do not reach the host's memory on {here}")

    @property
    def _others(self) -> list[int]:
        """The other ranks, the next one first, so that they do not all copy to or from one GPU at once."""
        return [(self._rank + distance) % self._world_size for distance in range(1, self._world_size)]

    def place_for(self, message: Tensor) -> Tensor | None:
        """``flat [W * K]`` for all ranks' messages of this size, valid until the next; None if they are too long."""
        size = self._world_size * message.nbytes
        if self._board is None or not 0 < message.nbytes <= MESSAGE_BYTES:
            return None
        return self._board[:size].view(message.dtype)

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Memory, and a handle to that of the other ranks."""
        # not by ``empty``, which in newer torch takes it from a pool: ranks that have freed something at different
        # times would get memory that does not belong together
        flat = symmetric_memory._SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, self._device)
        return flat, symmetric_memory.rendezvous(flat, self._group)

    def chunk_of(self, flat: Tensor) -> Chunk | None:
        """This rank's chunk of ``flat``; None if other ranks cannot see ``flat``."""
        region = self._regions.get(id(flat.untyped_storage()))
        if region is None:
            return None
        key = int(flat.storage_offset()), flat.numel(), flat.dtype
        if key not in region.chunks:
            region.chunks[key] = self._new_chunk(region, *key)
        return region.chunks[key]

    def _new_chunk(self, region: _Region, offset: int, numel: int, dtype: torch.dtype) -> Chunk:
        size = numel // self._world_size
        place = (size,), dtype, offset + self._rank * size
        # this rank's place also comes from the handle: a view of ``flat`` would keep its storage alive
        places = [region.handle.get_buffer(rank, *place) for rank in (*self._others, self._rank)]
        return Chunk(places, crc_hqx(repr((region.number, offset, numel, dtype)).encode(), 0))

    def run(
        self, copies: Copies, number: int, behind: Waitable | None = None, full: torch.cuda.Event | None = None
    ) -> Waitable:
        """Copy in the copy stream, after all ranks have met for ``number``; done once all ranks have copied.

        The copies wait for ``full``, or without it for all that the current stream does, and for ``behind``: earlier
        work that uses the same memory.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "copies between ranks' memories cannot be captured: a graph that is replayed would not count how often "
                "ranks meet; leave transport='symm' out, or capture no step"
            )
        current, stream = torch.cuda.current_stream(self._device), self._copying
        if full is None:
            self._ready.record(current)
        stream.wait_event(self._ready if full is None else full)
        # what the context of torch.cuda.stream does, in half the time; set_stream sets the device, too
        with torch.cuda.device(self._device):
            torch.cuda.set_stream(stream)
            try:
                if behind is not None:
                    behind.wait()
                self._watch.write(stream)
                self._meet(number)
                for target, source in copies:
                    target.copy_(source)
                self._meet(number)
                self._watch.write(stream)
            finally:
                torch.cuda.set_stream(current)
        return Recorded(stream.record_event(), self._device)

    def _meet(self, number: int) -> None:
        self._meeting.hold(self._copying, number)

    def mark(self) -> Waitable:
        """A ``Waitable`` for all that the current stream has been given so far."""
        return Recorded(torch.cuda.current_stream(self._device).record_event(), self._device)

    def keep(self, tensor: Tensor) -> None:
        """Keep the memory of ``tensor`` from reuse until ``collect`` is done with it, even if nobody waits for that."""
        tensor.record_stream(self._copying)

    def leave(self) -> None:
        """Never free the regions: torch would wait for the device, where copies may wait for other ranks for ever."""
        for region in list(self._regions.values()):  # GC may drop some meanwhile
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(region.storage()))


class PeerCommunicator(Communicator):
    """Ranks of one host that move buckets without the process group; arguments as of ``Communicator``."""

    def __init__(
        self, group: torch.distributed.ProcessGroup | None, device: torch.device, timeout: float | None
    ) -> None:
        super().__init__(group, device, timeout)
        self._memory: PeerMemory | None = None  # None while ranks check whether they can share memory
        if self.world_size > 1:
            self._memory = PeerMemory(self)

    def leave_memory(self) -> None:
        if self._memory is not None:
            self._memory.leave()

    @property
    def bytes_shared(self) -> int:
        return 0 if self._memory is None else self._memory.nbytes

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._memory is None:
            return super().zeros(numel, dtype, device)
        assert device == self.device, "parameters are checked"
        self._check_numbers()
        return self._memory.zeros(numel, dtype)

    def _check_numbers(self) -> None:
        """Refuse, on all ranks, ``num_made`` that differ: torch finds other ranks by it, and would wait for ever."""
        numbers = self.gather_json(PeerMemory.num_made)
        if len(set(numbers)) > 1:
            raise RuntimeError(
                f"ranks {self.ranks} have shared memory {', '.join(map(str, numbers))} times by now, for optimizers of "
                "other ranks, too, and torch lets only those share more that have done so as often; leave "
                "transport='symm' out for optimizers of fewer ranks"
            )

    def keep(self, tensor: Tensor) -> None:
        """Keep memory that ``collect`` uses from reuse until it is done with it, even if the tensor is gone by then."""
        if self._memory is not None:
            self._memory.keep(tensor)

    def collect(
        self, flat: Tensor, room: Tensor, behind: Waitable | None, full: torch.cuda.Event | None = None
    ) -> Waitable:
        """Fill ``room [W - 1, C]`` with the other ranks' contributions to this rank's chunk, in the order of ranks.

        Args:
            flat: ``[W * C]``, this rank's contributions, in memory that ``zeros`` has made.
            behind: the latest work that uses ``room``.
            full: an event after the last write to ``flat``; None: wait for all that the current stream does.
        """
        assert self._memory is not None, "there are other ranks"
        chunk = self._memory.chunk_of(flat)
        assert chunk is not None, "gradients lie in memory that other ranks see"
        self._count(flat)
        others = room.unbind()
        # the next rank's comes first, as in ``places``
        copies = zip(others[self.rank :] + others[: self.rank], chunk.places)
        return self._memory.run(copies, chunk.number, behind, full)

    def contributions(self, flat: Tensor, room: Tensor) -> list[Tensor]:
        """Every rank's contribution to this rank's chunk, in rank order, once ``collect`` has been waited for."""
        return [*room[: self.rank], self._own(flat), *room[self.rank :]]

    def mark(self) -> Waitable:
        """All that the current stream has been given so far, as ``behind`` of a later ``collect``."""
        assert self._memory is not None, "there are other ranks"
        return self._memory.mark()

    def all_gather_(self, flat: Tensor) -> Waitable:
        chunk = None if self._memory is None else self._memory.chunk_of(flat)
        if self._memory is None or chunk is None:
            return super().all_gather_(flat)
        self._count(flat)
        *others, own = chunk.places
        return self._memory.run(((other, own) for other in others), chunk.number)

    def gather_numbers(self, message: Tensor) -> Tensor:
        flat = None if self._memory is None else self._memory.place_for(message)
        if flat is None:
            return super().gather_numbers(message)
        self._own(flat).copy_(message)
        self.all_gather_(flat).wait()
        return flat.view(self.world_size, -1).clone()  # the next messages use the same place

    def rehearse(self, collective: Callable[[], Waitable]) -> None:
        """Do nothing if ranks share memory: they have met when it was made."""
        if self._memory is None:
            super().rehearse(collective)


def _check_host(communicator: Communicator) -> None:
    """Refuse, on all ranks, ranks that cannot reach each other's memory."""
    problems = []
    hosts = communicator.gather_json(socket.gethostname())
    if len(set(hosts)) > 1:
        problems.append(
            f"transport='symm' is for ranks of one host, got {', '.join(sorted(set(hosts)))}; leave it out, or give "
            "the ranks of one host as process_group="
        )
    if (missing := missing_operations()) is not None:
        problems.append(f"{missing} on rank {communicator.rank}")
    if not hasattr(symmetric_memory, "rendezvous"):
        problems.append(f"torch {torch.__version__} on rank {communicator.rank} has no symmetric memory")
    communicator.raise_together(problems, "ranks cannot reach each other's memory")
