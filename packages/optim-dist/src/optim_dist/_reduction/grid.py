"""Ranks in a grid (replicate x shard): each collective as two, one per dimension, as one has the faster links.

    rank (i, j) of R x S owns chunk  j R + i : the i-th of the R chunks of super-chunk j

    reduce_scatter_   over shard: super-chunk j of (i, j) becomes the sum of row i
                      over replicate: chunk i of that becomes the sum of all rows
    all_gather_       over replicate: super-chunk j becomes complete;  over shard: all super-chunks do

The replicate dimension (between nodes, say) sends only (R-1)/R of 1/S of the bytes; both together send (W-1)/W of them,
as one collective over all ranks does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from optim_dist._reduction.collectives import Communicator, Recorded, Waitable
from optim_dist._reduction.groups import new_group


class GridCommunicator(Communicator):
    """A two-dimensional mesh (replicate, shard) seen by an optimizer."""

    def __init__(
        self,
        mesh: DeviceMesh,
        device: torch.device,
        timeout: float | None,
        duplicate_of: Communicator | None,
    ) -> None:
        self._all_ranks = Communicator(_group_of(mesh, device), device, timeout, duplicate_of)
        super().__init__(self._all_ranks.group, device)
        self._replicate = Communicator(mesh.get_group(0), device, timeout, duplicate_of)
        self._shard = Communicator(mesh.get_group(1), device, timeout, duplicate_of)
        self._parts = (self._all_ranks, self._replicate, self._shard)
        self.traffic = self._replicate.traffic = self._shard.traffic = self._all_ranks.traffic
        places = self._all_ranks.gather_json([self._replicate.rank, self._shard.rank])
        _check_order(mesh.mesh.tolist(), dict(zip(self._all_ranks.ranks, map(tuple, places))))
        self.rank = self._shard.rank * self._replicate.world_size + self._replicate.rank
        # the chunk of every rank, in the order of global ranks
        self._chunks: list[int] = [shard * self._replicate.world_size + replicate for replicate, shard in places]
        self.ranks = [self._all_ranks.ranks[self._chunks.index(chunk)] for chunk in range(self.world_size)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.waits_on_host = self._stream is None

    @property
    def is_usable(self) -> bool:
        return super().is_usable and all(part.is_usable for part in self._parts)

    def abandon(self) -> None:
        super().abandon()
        for part in self._parts:
            part.abandon()

    def give_back(self) -> None:
        for part in self._parts:
            part.give_back()

    def keep_group(self) -> None:
        for part in self._parts:
            part.keep_group()

    def chunk_of(self, member: int) -> int:
        return self._chunks[member]

    def reduce_scatter_(self, flat: Tensor) -> Waitable:
        return self._in_turn(
            lambda: self._shard.reduce_scatter_(flat), lambda: self._replicate.reduce_scatter_(self._super_chunk(flat))
        )

    def all_gather_(self, flat: Tensor) -> Waitable:
        return self._in_turn(
            lambda: self._replicate.all_gather_(self._super_chunk(flat)), lambda: self._shard.all_gather_(flat)
        )

    def exchange(self, out: Tensor, flat: Tensor) -> Waitable:
        """Over all ranks at once: contributions must stay apart until they are added in order."""
        chunks = flat.view(self.world_size, -1)
        if self._chunks != sorted(self._chunks):
            chunks = chunks[self._chunks]
        return self._all_ranks.exchange(out, chunks.view(-1))

    def _super_chunk(self, flat: Tensor) -> Tensor:
        size = flat.numel() // self._shard.world_size
        return flat[self._shard.rank * size : (self._shard.rank + 1) * size]

    def _in_turn(self, first: Callable[[], Waitable], second: Callable[[], Waitable]) -> Waitable:
        """Run ``second`` after ``first``, in a stream of their own; without streams the host waits for ``first``."""
        if self._stream is None:
            first().wait()
            return second()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            works = [first()]
            works[0].wait()
            works.append(second())
            works[1].wait()
            return Recorded(self._stream.record_event(), self.device, works)


def _check_order(rows: list[list[int]], places: dict[int, tuple[int, int]]) -> None:
    """Refuse a mesh whose rows, or columns, are in different orders.

    Backends number a group's ranks from the lowest up, whatever their order in the mesh. So the number of a rank in its
    row and in its column is its place in the grid only if rows are ordered alike, and columns.

    Args:
        rows: the mesh.
        places: of each rank, its number in the groups of the first and of the second dimension.
    """
    columns = [list(column) for column in zip(*rows)]
    in_rows = all(len({places[rank][0] for rank in row}) == 1 for row in rows)
    in_columns = all(len({places[rank][1] for rank in column}) == 1 for column in columns)
    if not (in_rows and in_columns):
        raise ValueError(
            f"mesh={rows}: backends number the ranks of each row and column from the lowest up, which must be the same "
            "order in every row and in every column; give a mesh such as "
            f"{torch.tensor(rows).flatten().sort().values.view(len(rows), -1).tolist()}"
        )


def _group_of(mesh: DeviceMesh, device: torch.device) -> dist.ProcessGroup | None:
    """A group of the mesh's ranks; None, for the default group, if the mesh has all ranks."""
    if mesh.size() == dist.get_world_size():
        return None
    return new_group(
        sorted(mesh.mesh.flatten().tolist()), [Communicator(mesh.get_group(dim), device) for dim in range(mesh.ndim)]
    )
