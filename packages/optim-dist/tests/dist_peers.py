"""Memory that ranks share without GPUs: files that all of them map, in the place of torch's symmetric memory.

The host copies, once all ranks have come: what a rank launches waits for the others. Or, see ``hold_copies``, copies
wait until somebody waits for them, as they may where a device makes them.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from typing import ClassVar

import torch
import torch.distributed as dist

from optim_dist._reduction import peers
from optim_dist._reduction.collectives import Communicator, _Done
from optim_dist._reduction.groups import new_group
from optim_dist.buckets import Bucket


class _File:
    """What torch calls a handle."""

    def __init__(self, folder, number, numel, dtype):
        self._folder, self._number = folder, number
        self._nbytes = self.buffer_size = numel * dtype.itemsize

    def get_buffer(self, rank, shape, dtype, offset):
        path = os.path.join(self._folder, f"{self._number}-{rank}")
        mapped = torch.from_file(path, shared=True, size=self._nbytes, dtype=torch.uint8)
        begin, (numel,) = offset * dtype.itemsize, shape
        return mapped[begin : begin + numel * dtype.itemsize].view(dtype)


class _Held:
    """Copies that are made when somebody waits for them, or for later ones, of whatever optimizer."""

    queue: ClassVar[deque[_Held]] = deque()

    def __init__(self, copy):
        self._copy = copy
        self.queue.append(self)

    def wait(self):
        while self in self.queue:
            self.queue.popleft()._copy()


class HostMemory(peers.PeerMemory):
    def __init__(self, communicator: Communicator) -> None:
        self._device, self._rank, self._world_size = communicator.device, communicator.rank, communicator.world_size
        self._regions, self._board, self._number = {}, None, 0
        self._folder = communicator.gather_json(tempfile.mkdtemp() if communicator.rank == 0 else None)[0]
        self._group = new_group(communicator.ranks, [communicator])
        self.are_held = False

    def _allocate(self, numel, dtype):
        self._number += 1
        path = os.path.join(self._folder, f"{self._number}-{self._rank}")
        flat = torch.from_file(path, shared=True, size=numel, dtype=dtype)
        dist.barrier(self._group)  # every rank's file is there
        return flat, _File(self._folder, self._number, numel, dtype)

    def _begin_to_meet(self, board):
        pass

    def _meet(self, number):
        """Ranks that meet for something else, which would wait for ever on GPUs, are told so."""
        mine = torch.tensor([number])
        found = [torch.empty_like(mine) for _ in range(self._world_size)]
        dist.all_gather(found, mine, self._group)
        if any(each != mine for each in found):
            raise RuntimeError(f"rank {self._rank} meets for {number}, others for {[int(each) for each in found]}")

    def keep(self, tensor):
        pass

    def mark(self):
        return _Done()

    def run(self, copies, number, behind=None, full=None):
        def copy():
            if full is not None:
                full.put_back()
            self._meet(number)
            for target, source in copies:
                target.copy_(source)
            self._meet(number)

        work = _Held(copy)
        if not self.are_held:
            work.wait()
        return work


class _Full:
    """In the place of an event: gradients as they were when their bucket was full, which copies may find."""

    def __init__(self, gradients):
        self._gradients, self._then = gradients, gradients.clone()

    def put_back(self):
        self._gradients.copy_(self._then)


_note_full = Bucket.note_full


def _note_with_gradients(bucket):
    _note_full(bucket)
    bucket.full = _Full(bucket.gradients)


def hold_copies(optimizer, patch):
    """Let it be seen what reads or writes too early or too late.

    Gradients are copied as they were when their bucket was full, unless that is known to be over, and nothing comes or
    goes until somebody waits for it. On GPUs nothing is held.

    Returns for every reduction, as they are launched, whether it runs beside backward.
    """
    communicator, beside = optimizer.communicator, []
    collect = communicator.collect

    def collect_noted(flat, room, behind, full=None):
        beside.append(full is not None)
        return collect(flat, room, behind, full)

    patch.setattr(communicator, "collect", collect_noted)
    if isinstance(communicator._memory, HostMemory):
        patch.setattr(Bucket, "note_full", _note_with_gradients)
        communicator._memory.are_held = True
    return beside


def share_host_memory() -> None:
    """Let ranks of this process be those of one host, with memory that they share, if they have no GPUs."""
    if "nccl" not in dist.get_backend():
        peers.PeerMemory, peers.missing_operations = HostMemory, lambda: None
