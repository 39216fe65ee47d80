"""Memory that ranks share without GPUs: files that all of them map, in the place of torch's symmetric memory.

The host copies, once all ranks have come: what a rank launches waits for the others.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist

from optim_dist._reduction import peers
from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.groups import new_group


class _File:
    """What torch calls a handle."""

    def __init__(self, folder, number, numel, dtype, group):
        self._folder, self._number, self._group = folder, number, group
        self._nbytes = self.buffer_size = numel * dtype.itemsize

    def get_buffer(self, rank, shape, dtype, offset):
        path = os.path.join(self._folder, f"{self._number}-{rank}")
        mapped = torch.from_file(path, shared=True, size=self._nbytes, dtype=torch.uint8)
        begin, (numel,) = offset * dtype.itemsize, shape
        return mapped[begin : begin + numel * dtype.itemsize].view(dtype)

    def barrier(self, channel, timeout_ms):
        dist.barrier(self._group)


class _Here:
    def wait(self):
        pass


class HostMemory(peers.PeerMemory):
    def __init__(self, communicator: Communicator) -> None:
        self._device, self._rank, self._world_size = communicator.device, communicator.rank, communicator.world_size
        self._timeout_ms, self._storages, self._handles, self._chunks, self._number = 0, {}, {}, {}, 0
        self._folder = communicator.gather_json(tempfile.mkdtemp() if communicator.rank == 0 else None)[0]
        self._group = new_group(communicator.ranks, [communicator])

    def _allocate(self, numel, dtype):
        self._number += 1
        path = os.path.join(self._folder, f"{self._number}-{self._rank}")
        flat = torch.from_file(path, shared=True, size=numel, dtype=dtype)
        dist.barrier(self._group)  # every rank's file is there
        return flat, _File(self._folder, self._number, numel, dtype, self._group)

    def keep(self, tensor):
        pass

    def run(self, chunk, copies, then=None, behind=None, full=None):
        chunk.meet()
        for target, source in copies:
            target.copy_(source)
        chunk.meet()
        if then is not None:
            then()
        return _Here()


def share_host_memory() -> None:
    """Let ranks of this process be those of one host, with memory that they share, if they have no GPUs."""
    if "nccl" not in dist.get_backend():
        peers.PeerMemory = HostMemory
