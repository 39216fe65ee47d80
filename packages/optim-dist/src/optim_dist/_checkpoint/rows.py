"""DTensors in a checkpoint: as whole rows, shared out evenly over the ranks, however they were cut.

A checkpoint's pieces are intervals of elements. DTensors that FSDP2 has cut over the same ranks already lie in rows;
other layouts are redistributed to rows before they are written, and from rows when they are read, a few tensors at a
time. So the files say nothing about meshes and placements: any layout loads any other, plain parameters included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import Shard as Cut

from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import Piece
from optim_redist import Item, Layout, Mesh, redistribute_many

BATCH_BYTES = 256 * 2**20  # of whole tensors that are redistributed together


class Part(NamedTuple):
    """This rank's part of a tensor of ``shape``."""

    name: str  # of the parameter
    key: str
    local: Tensor
    shape: tuple[int, ...]


def rows_of(shape: Sequence[int], ranks: Sequence[int]) -> Layout:
    """The layout that cuts the first dimension over all ranks; a tensor without dimensions is on the first rank."""
    if not shape:
        return Layout(Mesh(1, ranks=list(ranks[:1])), [])
    return Layout.from_placements(Mesh(len(ranks), ranks=list(ranks)), (Cut(0),), shape)


def row_pieces(index: int, shape: Sequence[int], ranks: Sequence[int]) -> list[Piece]:
    """The pieces of a DTensor in a checkpoint, in element order; of an empty one, an empty piece of the first rank.

    Each rank's is what it has in ``rows_of``, which for many ranks takes much longer to ask about.
    """
    numel = prod(shape)
    # whole rows, as many for each rank as ``torch.chunk`` gives it
    step = -(-shape[0] // len(ranks)) * prod(shape[1:]) if shape else 1
    starts = range(0, numel, step) if numel else [0]
    return [Piece(index, start, min(start + step, numel), 0, place) for place, start in enumerate(starts)]


def as_rows(flat: Tensor, shape: Sequence[int], communicator: Communicator) -> Tensor:
    """The elements of this rank's piece (see ``row_pieces``) in the shape of its rows."""
    layout, rank = rows_of(shape, communicator.ranks), communicator.ranks[communicator.rank]
    return flat.view(layout.local_shape(shape, rank)) if rank in layout.mesh.ranks else flat


def to_rows(parts: Iterable[Part], layouts: Mapping[str, Layout], communicator: Communicator) -> Iterator[Part]:
    """The same tensors as rows; collective, with the same names and shapes on every rank."""
    return _moved(parts, lambda part: (layouts[part.name], rows_of(part.shape, communicator.ranks)), communicator)


def from_rows(parts: Iterable[Part], layouts: Mapping[str, Layout], communicator: Communicator) -> Iterator[Part]:
    """Rows as tensors in ``layouts``; collective, with the same names and shapes on every rank."""
    return _moved(parts, lambda part: (rows_of(part.shape, communicator.ranks), layouts[part.name]), communicator)


def _moved(
    parts: Iterable[Part], layouts: Callable[[Part], tuple[Layout, Layout]], communicator: Communicator
) -> Iterator[Part]:
    """``parts`` from the first of their ``layouts`` to the second."""
    rank = communicator.ranks[communicator.rank]
    for batch in _batches(parts):
        items = []
        for part in batch:
            before, after = layouts(part)
            here = part.local if rank in before.mesh.ranks else None
            items.append(Item(here, part.shape, before, after, part.local.dtype))
        arrived = redistribute_many(items, group=communicator.group)
        for part, found in zip(batch, arrived, strict=True):
            yield part._replace(local=part.local.new_empty(0) if found is None else found)


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    batch: list[Part] = []
    size = 0
    for part in parts:
        nbytes = prod(part.shape) * part.local.element_size()
        if batch and size + nbytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += nbytes
    if batch:
        yield batch
