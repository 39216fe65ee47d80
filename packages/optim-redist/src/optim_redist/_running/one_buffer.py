"""What one collective reads, or writes, as one buffer: memory of a tensor itself, or a buffer of our own.

Made for tensors of one form, so that a call takes as few operations as can be: each of them costs the host as much as
some hundred kilobytes cost the wire. So a buffer is no flatter than it has to be, and a collective divides its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from optim_redist._running.buffers import Buffers
from optim_redist._running.copies import Copies
from optim_redist._running.views import FLAT, Form, is_dense
from optim_redist.moves import Which

# dtypes that NCCL moves, adds and compares by name. It has no 16-bit integers, and torch gives it no 8-bit floats to
# reduce; what others hold travels as bytes.
CARRIED = {
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


class _OneBuffer:
    """What both directions have in common.

    Attributes:
        splits: how many rows of the buffer each message takes.
    """

    def __init__(
        self,
        buffers: Buffers,
        own_shape: Sequence[int],
        forms: Mapping[Which, Form],
        dtype: torch.dtype,
        sizes: Sequence[int],
    ) -> None:
        """``own_shape``: of a buffer of our own; ``forms``: shape and strides of the tensors in which it may lie;
        ``sizes``: elements of each message, which fill the buffer in this order."""
        self._which, self._start, self._size = buffers.run
        self._is_own = self._which is None
        self._dtype = dtype
        self._wire = dtype if dtype in CARRIED else torch.uint8
        self._ratio = dtype.itemsize // self._wire.itemsize
        shape, strides = FLAT if self._which is None else forms[self._which]
        self._is_whole = self._start == 0 and prod(shape) == self._size and bool(shape) and strides[-1] == 1
        self._is_whole = self._is_whole and is_dense(shape, strides)
        shape = tuple(own_shape) if self._is_own else shape if self._is_whole else (self._size,)
        # the only dimension of a flat buffer changes with the type of its elements
        divided = _divided(sizes, self._size, shape[0]) if len(shape) > 1 else None
        self._flattens = divided is None and len(shape) > 1
        self.splits = divided or [size * self._ratio for size in sizes]

    def _memory_of(self, tensor: Tensor) -> Tensor:
        if self._is_whole:
            return tensor
        return tensor.as_strided((self._size,), (1,), tensor.storage_offset() + self._start)

    def _on_wire(self, buffer: Tensor) -> Tensor:
        if self._flattens:
            buffer = buffer.view(-1)
        return buffer if buffer.dtype == self._wire else buffer.view(self._wire)


class Outgoing(_OneBuffer):
    """The buffer that a collective reads: in a source or target, or packed out of them by one copy or several."""

    def __init__(
        self, buffers: Buffers, packs: Copies, forms: Mapping[Which, Form], dtype: torch.dtype, sizes: Sequence[int]
    ) -> None:
        self._packs = packs
        self._at_once = packs.fills(buffers.num_elements)
        own_shape = packs.pairs[0].write[0] if self._at_once else (buffers.num_elements,)
        super().__init__(buffers, own_shape, forms, dtype, sizes)

    def of(self, tensors: Mapping[Which, Tensor]) -> Tensor:
        """The buffer, dense, for a resolved source, and a target where it is read from."""
        if self._which is not None:
            return self._on_wire(self._memory_of(tensors[self._which]))
        if self._at_once:
            return self._on_wire(self._packs.packed(tensors))
        buffer = torch.empty(self._size, dtype=self._dtype, device=tensors["src"].device)
        self._packs.run(tensors, buffer)
        return self._on_wire(buffer)


class Incoming(_OneBuffer):
    """The buffer that a collective writes: in a target, or one of our own that is unpacked into it."""

    def __init__(self, buffers: Buffers, unpacks: Copies, form: Form, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        super().__init__(buffers, (buffers.num_elements,), {"dst": form}, dtype, sizes)
        self._unpacks = unpacks

    def room_for(self, target: Tensor) -> Tensor:
        """The buffer, dense, to be written."""
        if self._is_own:
            return torch.empty(self._size * self._ratio, dtype=self._wire, device=target.device)
        return self._on_wire(self._memory_of(target))

    def unpack(self, buffer: Tensor, target: Tensor) -> None:
        """Bring what has arrived to its place."""
        if self._is_own:
            self._unpacks.run({"src": self.values(buffer)}, target)

    def values(self, buffer: Tensor) -> Tensor:
        """A buffer of our own, in the tensors' type."""
        return buffer if buffer.dtype == self._dtype else buffer.view(self._dtype)


def _divided(sizes: Sequence[int], total: int, rows: int) -> list[int] | None:
    """How many of so many rows each message takes; None if they are not whole rows."""
    each = total // rows if rows else 0
    return [size // each for size in sizes] if each and all(size % each == 0 for size in sizes) else None
