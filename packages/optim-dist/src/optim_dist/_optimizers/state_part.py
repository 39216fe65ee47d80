"""A rank's part of a state tensor, as ``torch.distributed.checkpoint`` wants to see it: boxes of the whole tensor.

Chunk borders cut elementwise state anywhere. The elements [a, b) of a row-major tensor are a few boxes: the end of one
row, whole rows, and the beginning of another row. The two partial rows are divided in the same way, which makes at most
2 ndim - 1 boxes:

    (7, 11), [5, 30)  ->  row 0, columns 5-10;   row 1;   row 2, columns 0-7

For a tensor that is not row-major (transposed, channels_last) boxes follow the order of its memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements ``[start, stop)`` of a row-major tensor as boxes, in order; none if there are none."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    inner = tuple(shape[1:])
    row = prod(inner)
    (first, begin), (last, end) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from _in_row(first, inner, begin, end)
        return
    if begin:
        yield from _in_row(first, inner, begin, row)
        first += 1
    if first < last:
        yield (first, *(0 for _ in inner)), (last - first, *inner)
    yield from _in_row(last, inner, 0, end)


def _in_row(row: int, inner: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in boxes(inner, start, stop):
        yield (row, *offsets), (1, *sizes)


class StatePart(Tensor):
    """A tensor of the whole tensor's shape that holds one rank's part; it can only be saved, loaded, copied and moved.

    Args:
        local: the part, a dense tensor of any shape whose elements in memory order are those from ``start`` on; empty
            on a rank that has none.
        shape, stride: of the whole tensor.
        start: where the part begins, in the whole tensor's memory order.
    """

    local: Tensor
    start: int

    @staticmethod
    def __new__(cls, local: Tensor, shape: Sequence[int], stride: Sequence[int], start: int) -> StatePart:
        part: StatePart = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides=tuple(stride), dtype=local.dtype, device=local.device
        )
        part.local, part.start = local, start
        return part

    def chunks(self) -> list[tuple[Box, Tensor]]:
        """Every box of the part with its elements, views of ``local`` in the box's shape."""
        flat = self.local.as_strided((self.local.numel(),), (1,))
        # dimensions in memory order, the slowest first
        strides = self.stride()
        order = sorted(range(self.ndim), key=lambda dim: (-strides[dim], dim))
        inverse = [order.index(dim) for dim in range(self.ndim)]
        if self.numel() == 0:
            empty = (0,) * self.ndim, tuple(self.shape)
            return [(empty, flat.view(self.shape))]
        found, position = [], 0
        for offsets, sizes in boxes([self.shape[dim] for dim in order], self.start, self.start + flat.numel()):
            piece = flat[position : position + prod(sizes)].view(sizes).permute(inverse)
            box = tuple(offsets[place] for place in inverse), tuple(sizes[place] for place in inverse)
            found.append((box, piece))
            position += prod(sizes)
        return found

    def like(self, local: Tensor) -> StatePart:
        """The same part with another tensor in it."""
        return StatePart(local, self.shape, self.stride(), self.start)

    # torch.distributed.checkpoint calls these, and writes only once what several ranks have

    def __create_write_items__(self, fqn: str, tensor: Tensor) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)),
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.size(),
                ),
            )
            for (offsets, sizes), _ in self.chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in self.chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for (offsets, _), piece in self.chunks():
            if index.offset is None or tuple(index.offset) == offsets:
                return piece
        raise ValueError(f"{index.fqn}: this rank has no part at {index.offset}")

    # torch.save writes the part alone, which loads with weights_only=True

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.local.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> StatePart:
        return self.like(copy.deepcopy(self.local, memo))

    def __repr__(self) -> str:  # type: ignore[override]
        stop = self.start + self.local.numel()
        return f"StatePart(shape={tuple(self.shape)}, dtype={self.dtype}, elements {self.start}-{stop})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        operation: Callable[..., Any] = func
        if func.overloadpacket in _ALLOWED and isinstance(args[0], StatePart):
            return args[0].like(operation(args[0].local, *args[1:], **(kwargs or {})))
        if func is torch.ops.aten.new_empty.default and tuple(args[1]) == tuple(args[0].shape):
            # what torch's async_save makes, to fill it with a copy of the part
            local = args[0].local
            return args[0].like(operation(local, local.shape, **(kwargs or {})))
        raise RuntimeError(
            f"{func} on {args[0]!r}: this is one rank's part of a state tensor and cannot be computed with; "
            "the optimizer's full_state_dict() gives whole tensors"
        )


_ALLOWED = {torch.ops.aten.detach, torch.ops.aten.alias, torch.ops.aten.clone, torch.ops.aten._to_copy}
