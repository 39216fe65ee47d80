"""Ranks of one host that reach into each other's memory, for ``transport="symm"``.

Letters as in ``collectives``. GPUs copy, on a stream of their own, by engines that need no multiprocessor, and add up
on another, beside the next copies:

    collect       all ranks have come | room[s] <- flat[r] of rank s, for s != r | all have copied | add up
    all_gather_   all ranks have come | flat[r] of rank s <- flat[r], for s != r | all have copied

So compute that runs meanwhile loses nothing but memory bandwidth, where kernels of NCCL take multiprocessors from it.
One copy after the other, as two at once take longer. Ranks meet on the device, by flags in each other's memory; no host
waits. What other ranks cannot see (messages, say) goes by the process group.

A copy that waits for a rank holds up others of the same engine, and whoever waits for those: ranks must come in the
same order, with nothing of the user's between. In a step they do, so that copies are launched there and nowhere else;
those of gradients that were complete before wait for these alone, and run beside what is left of backward.

Source: torch's symmetric memory, ``torch.distributed._symmetric_memory``. Nothing here travels by NVLink's multicast,
which torch sets up for that memory all the same, unless the environment has TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
"""

from __future__ import annotations

import ctypes
import socket
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from optim_dist._reduction.collectives import Communicator, Recorded, Waitable

try:
    import torch.distributed._symmetric_memory as symmetric_memory
except ImportError:  # of a torch that is built without it
    symmetric_memory = None  # type: ignore[assignment, unused-ignore]

Copies = Iterable[tuple[Tensor, Tensor]]  # (to, from)


@dataclass(eq=False)
class Chunk:
    """This rank's chunk of what all have.

    Attributes:
        everywhere: as it lies at the next rank, at the one behind that, ..., and at last here.
        meet: lets the current stream go on once all ranks have come.
    """

    everywhere: list[Tensor]
    meet: Callable[[], None]


class PeerMemory:
    """Memory of this rank that others reach, and theirs that it does. Made by all ranks of a communicator together.

    Raises:
        RuntimeError: on every rank, where ranks are not on one host, or torch has no such memory.
        ValueError: for a device other than CUDA.
    """

    # by ``zeros`` of this process, whatever the group, as the numbers count by which torch's ranks find each other
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
        self._timeout_ms = max(1, round(1000 * group._get_backend(device).options._timeout.total_seconds()))
        # ahead of what computes: ranks that meet take a multiprocessor for a moment
        self._copying, self._adding = (torch.cuda.Stream(device, priority=-1) for _ in range(2))
        self._ready = torch.cuda.Event()
        # by the storage, as long as that is there
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._handles: dict[int, Any] = {}
        self._chunks: dict[int, dict[tuple[int, int, torch.dtype], Chunk]] = {}

    @property
    def nbytes(self) -> int:
        """What there is of it now."""
        return sum(handle.buffer_size for handle in list(self._handles.values()))  # garbage may go meanwhile

    def zeros(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros that other ranks reach, too. Collective, with the same arguments."""
        PeerMemory.num_made += 1
        flat, handle = self._allocate(max(numel, 1), dtype)
        storage = flat.untyped_storage()
        self._storages[id(storage)] = weakref.ref(storage)
        self._handles[id(storage)], self._chunks[id(storage)] = handle, {}
        weakref.finalize(storage, self._forget, id(storage)).atexit = False
        handle.barrier(0, self._timeout_ms)  # now, since to load a kernel may wait for the device
        return flat.zero_()[:numel]

    def _allocate(self, numel: int, dtype: torch.dtype) -> tuple[Tensor, Any]:
        """Memory, and what knows that of the other ranks."""
        # newer torch's ``empty`` takes it from a pool, out of which ranks that have freed something at other times get
        # memory that does not belong together
        flat = symmetric_memory._SymmetricMemory.empty_strided_p2p((numel,), (1,), dtype, self._device)
        return flat, symmetric_memory.rendezvous(flat, self._group)

    def chunk_of(self, flat: Tensor) -> Chunk | None:
        """This rank's chunk of ``flat``; None if other ranks do not see that."""
        storage = id(flat.untyped_storage())
        if storage not in self._handles:
            return None
        key, known = (int(flat.storage_offset()), flat.numel(), flat.dtype), self._chunks[storage]
        if key not in known:
            known[key] = self._new_chunk(self._handles[storage], *key)
        return known[key]

    def _new_chunk(self, handle: Any, offset: int, numel: int, dtype: torch.dtype) -> Chunk:
        size = numel // self._world_size
        place = (size,), dtype, offset + self._rank * size
        # each begins with another, so that no GPU is read by all at once; this rank's own, too, as others see it, since
        # a view of ``flat`` would keep its storage
        order = [(self._rank + distance) % self._world_size for distance in range(1, self._world_size + 1)]
        return Chunk(
            [handle.get_buffer(rank, *place) for rank in order],
            partial(handle.barrier, 0, self._timeout_ms),
        )

    def run(
        self,
        chunk: Chunk,
        copies: Copies,
        then: Callable[[], object] | None = None,
        behind: Waitable | None = None,
        full: torch.cuda.Event | None = None,
    ) -> Waitable:
        """Copy once all ranks have come, and go on ``then``, once all have.

        Behind what the current stream does, or ``full`` alone, and ``behind`` what was returned for others that need
        the same memory.
        """
        current, stream = torch.cuda.current_stream(self._device), self._copying
        if full is None:
            self._ready.record(current)
        stream.wait_event(self._ready if full is None else full)
        # as the context of torch.cuda.stream, which takes twice as long; to set a stream sets the device, too
        with torch.cuda.device(self._device):
            torch.cuda.set_stream(stream)
            try:
                if behind is not None:
                    behind.wait()
                chunk.meet()
                for target, source in copies:
                    target.copy_(source)
                chunk.meet()
                if then is not None:
                    copied, stream = stream.record_event(), self._adding
                    stream.wait_event(copied)
                    torch.cuda.set_stream(stream)
                    then()
            finally:
                torch.cuda.set_stream(current)
        return Recorded(stream.record_event(), self._device)

    def keep(self, tensor: Tensor) -> None:
        """Let what ``collect`` uses be nobody else's until it has, even if nobody waits for it any more."""
        tensor.record_stream(self._copying)
        tensor.record_stream(self._adding)

    def _forget(self, storage: int) -> None:
        del self._storages[storage], self._handles[storage], self._chunks[storage]

    def leave(self) -> None:
        """Never free what there is: torch would wait for the device, on which copies may wait for ranks for ever."""
        for storage in list(self._storages.values()):  # garbage may go meanwhile
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(storage()))


class PeerCommunicator(Communicator):
    """Ranks of one host, whose buckets travel without a process group; arguments as of ``Communicator``."""

    def __init__(
        self,
        group: torch.distributed.ProcessGroup | None,
        device: torch.device,
        timeout: float | None = None,
        beside: Communicator | None = None,
    ) -> None:
        super().__init__(group, device, timeout, beside)
        self._memory: PeerMemory | None = None  # while ranks ask each other whether there can be such
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
        """Refuse, on all ranks, a wait for ever: they find each other by how often they have done so, in any group."""
        numbers = self.gather_json(PeerMemory.num_made)
        if len(set(numbers)) > 1:
            raise RuntimeError(
                f"ranks {self.ranks} have shared memory {', '.join(map(str, numbers))} times by now, for optimizers of "
                "other ranks, too, and torch lets only those share more that have done so as often; leave "
                "transport='symm' out for optimizers of fewer ranks"
            )

    def keep(self, tensor: Tensor) -> None:
        """Have memory of this rank, that ``collect`` uses, outlive its tensor as long as that takes."""
        if self._memory is not None:
            self._memory.keep(tensor)

    def collect(
        self,
        flat: Tensor,
        room: Tensor,
        add: Callable[[Sequence[Tensor]], object],
        behind: Waitable | None,
        full: torch.cuda.Event | None = None,
    ) -> Waitable:
        """Let ``add`` have every rank's contribution to this rank's chunk of ``flat [W * C]``, in the order of ranks.

        Args:
            flat: memory that ``zeros`` has made.
            room: ``[W - 1, C]``, for those of other ranks.
            behind: what was returned for the last that had this room.
            full: behind which this rank's contributions are what they are now; None: what the current stream does.
        """
        chunk = None if self._memory is None else self._memory.chunk_of(flat)
        if self._memory is None or chunk is None:
            raise AssertionError("gradients lie in memory that other ranks see")
        self._count(flat)
        others = room.unbind()
        # the next rank's comes first
        copies = zip(others[self.rank :] + others[: self.rank], chunk.everywhere)
        contributions = (*others[: self.rank], self._own(flat), *others[self.rank :])
        return self._memory.run(chunk, copies, partial(add, contributions), behind, full)

    def all_gather_(self, flat: Tensor) -> Waitable:
        chunk = None if self._memory is None else self._memory.chunk_of(flat)
        if self._memory is None or chunk is None:
            return super().all_gather_(flat)
        self._count(flat)
        *others, own = chunk.everywhere
        return self._memory.run(chunk, ((other, own) for other in others))

    def rehearse(self, collective: Callable[[], Waitable]) -> None:
        """Nothing: ranks have met in the memory that they share when it was made."""
        if self._memory is None:
            super().rehearse(collective)


def _check_host(communicator: Communicator) -> None:
    """Refuse, on all ranks, those that cannot reach each other."""
    problems = []
    hosts = communicator.gather_json(socket.gethostname())
    if len(set(hosts)) > 1:
        problems.append(
            f"transport='symm' is for ranks of one host, got {', '.join(sorted(set(hosts)))}; leave it out, or give "
            "the ranks of one host as process_group="
        )
    if not hasattr(symmetric_memory, "rendezvous"):
        problems.append(f"torch {torch.__version__} on rank {communicator.rank} has no symmetric memory")
    communicator.raise_together(problems, "ranks cannot reach each other's memory")
