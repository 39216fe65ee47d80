"""Writes the parts of a checkpoint to where they belong; beside the state itself, only parts in flight take memory.

as read   parameters and state that lie in memory as their pieces do: written into, part by part
rows      of DTensors: collected until a tensor is complete, then redistributed to its layout, and freed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optim_dist._checkpoint.contents import layouts_by_name, pieces_of, put_read_state, state_of_part
from optim_dist._checkpoint.manifest import SavedParameter
from optim_dist._checkpoint.reshard import VALUE, Arrival, Stream
from optim_dist._checkpoint.rows import Part, as_rows, from_rows
from optim_dist._optimizers.live import LiveOptimizer
from optim_dist._optimizers.shards import Shard
from optim_dist._optimizers.states import dense_stride, in_memory_order
from optim_dist._optimizers.whole_state import as_parameter_lies
from optim_dist.plan import ParameterSpec
from optim_kernels.multi_tensor import is_dense


class Restoring:
    """Writes values and state of this rank's shards; every rank goes through the same batches.

    Args:
        saved: the parameters of the checkpoint, by name.
    """

    def __init__(
        self, optimizer: LiveOptimizer, specs: Sequence[ParameterSpec], saved: Mapping[str, SavedParameter]
    ) -> None:
        self._optimizer, self._saved = optimizer, saved
        self._layouts = layouts_by_name(optimizer, specs)
        self._cut = {spec.name for spec in specs if spec.sharding}
        self._shards = {specs[shard.index].name: shard for shard in optimizer.shards()}
        self._states: dict[str, dict[str, Any]] = {}
        # flat tensors to write parts into, keyed by name and key
        self._homes: dict[tuple[str, str], Tensor] = {}
        for name, shard in self._shards.items():
            self._prepare(name, shard)

    def _prepare(self, name: str, shard: Shard) -> None:
        """Provide the memory for parts that will arrive, except rows."""
        entry, is_cut = self._saved[name], name in self._cut
        if not is_cut and is_dense(shard.value):
            self._homes[name, VALUE] = in_memory_order(shard.value)
        # state that the checkpoint lacks, or has in another format, is made by the next step, from what is here then
        if not entry.state and not entry.scalars:
            return
        state = self._states[name] = {}
        for key, description in entry.state.items():
            if not (is_cut and description.in_pieces):
                state[key] = state_of_part(None, description, shard)
                self._homes[name, key] = in_memory_order(state[key])

    def put(self, arrived: Iterable[Arrival]) -> None:
        """Write parts, in any order."""
        for name, key, start, part in arrived:
            home = self._homes.get((name, key))
            if home is None:
                home = self._homes[name, key] = self._new_home(name, part)
            home[start : start + part.numel()].copy_(part)

    def _new_home(self, name: str, part: Tensor) -> Tensor:
        """Memory for this rank's whole piece of a tensor that parts cannot be written into directly."""
        rank = self._optimizer.communicator.rank
        pieces = pieces_of(self._optimizer, self._shards[name].index)
        return part.new_empty(sum(piece.stop - piece.start for piece in pieces if piece.rank == rank))

    def end_batch(self, batch: Iterable[Stream]) -> None:
        """Bring tensors that ``batch`` has completed to their places; collective if there are DTensors."""
        rows: list[Part] = []
        for stream in batch:
            for name in (extent.name for extent in stream.extents if extent.is_last):
                if self._is_in_rows(name, stream.key):
                    rows.append(self._rows(name, stream))
                elif stream.key == VALUE and name in self._shards and not is_dense(self._shards[name].value):
                    value = self._shards[name].value
                    flat = self._homes.pop((name, VALUE))
                    value.copy_(flat.as_strided(value.shape, dense_stride(value)))
        for part in from_rows(rows, self._layouts, self._optimizer.communicator):
            shard = self._shards[part.name]
            assert isinstance(shard.parameter, DTensor), "only DTensors lie in rows"
            if part.key == VALUE:
                shard.value.copy_(part.local)
            else:
                self._states[part.name][part.key] = as_parameter_lies(part.local, shard.parameter)

    def _is_in_rows(self, name: str, key: str) -> bool:
        return name in self._cut and (key == VALUE or self._saved[name].state[key].in_pieces)

    def _rows(self, name: str, stream: Stream) -> Part:
        """This rank's rows of a DTensor."""
        shape, communicator = self._saved[name].shape, self._optimizer.communicator
        flat = self._homes.pop((name, stream.key), None)
        if flat is None:
            flat = torch.empty(0, dtype=stream.dtype, device=self._shards[name].value.device)
        return Part(name, stream.key, as_rows(flat, shape, communicator), tuple(shape))

    def finish(self) -> None:
        """Give the optimizer its state, and gather the parameters; collective."""
        optimizer = self._optimizer
        for name, state in self._states.items():
            shard, entry = self._shards[name], self._saved[name]
            for key, description in entry.state.items():
                if name in self._cut and not description.in_pieces:
                    # all ranks keep this state, but only the rank of the first rows has received it
                    optimizer.communicator.broadcast_(state[key], pieces_of(optimizer, shard.index)[0].rank)
                elif name not in self._cut and description.in_pieces and isinstance(shard.parameter, DTensor):
                    # a single rank cuts nothing, but the state of its DTensors consists of DTensors, too
                    state[key] = as_parameter_lies(state[key], shard.parameter)
            put_read_state(optimizer, shard, state, entry)
        optimizer.gather_parameters()
        optimizer.note_masters()
