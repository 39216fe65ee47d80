"""The order in which all tiles of a chain run, two by two.

Tiles of all jobs and matrices make one list, in which no tile waits for a later one. All matrices, also those of
different shapes, advance at the same relative pace: a job's place in the list is the share of its matrix's work that
comes before it. So what a tile waits for was drawn long before it, and at the end the last products of all matrices
fill the chip.

Two programs draw two entries at a time, 2i and 2i + 1, and neither waits for the other's tile (`_hopper.pairs`). Where
possible both are tiles of one row, which read the same blocks of A; tiles left over go with tiles of other matrices,
and an entry may have no tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from optim_kernels._newton_schulz.chain_jobs import TILE_END, MatrixGroup

# Numbers of an entry: job, matrix (NO_TILE in an entry without tile), row, column.
ENTRY_FIELDS = 4
NO_TILE = -1

Corner = tuple[int, int]


class _Unit(NamedTuple):
    """The tiles of one job and matrix: how much of all work is done before them, and their entries.

    Args:
        has_single: whether a tile has no partner.
        entries: for a start at an even number of the list, and at an odd one, then with a tile without partner first.
    """

    progress: float
    matrix: int
    has_single: bool
    entries: tuple[Tensor, Tensor]


def tile_list(groups: Sequence[MatrixGroup], m: int) -> Tensor:
    """Every tile in order: int32 [entries, ENTRY_FIELDS], an even number of them.

    Jobs are numbered over all groups.
    """
    parts: list[Tensor] = []
    count, last = 0, NO_TILE
    for unit in sorted(_units(groups, m), key=lambda unit: unit[:2]):
        # an empty entry: this unit may wait for the tile before it, or has no single tile to put beside that
        if count % 2 and (unit.matrix == last or not unit.has_single):
            parts.append(_without_tile(parts[-1]))
            count += 1
        entries = unit.entries[count % 2].clone()
        entries[:, 1] = unit.matrix
        parts.append(entries)
        count, last = count + len(entries), unit.matrix
    if count % 2:
        parts.append(_without_tile(parts[-1]))
    return torch.cat(parts)


def _units(groups: Sequence[MatrixGroup], m: int) -> list[_Unit]:
    units: list[_Unit] = []
    first_job = 0
    for group in groups:
        tiles = [job.tiles(m, group.n) for job in group.jobs]
        work = [len(each) * (job.length(m, group.n) + TILE_END) for job, each in zip(group.jobs, tiles, strict=True)]
        for number, (corners, before) in enumerate(zip(tiles, accumulate(work, initial=0))):
            pairs, singles = _in_pairs(corners)
            job = first_job + number
            entries = _entries(job, pairs + singles), _entries(job, singles[:1] + pairs + singles[1:])
            for index, matrix in enumerate(group.numbers):
                # the matrices of a job one after another
                progress = (before + work[number] * index / group.count) / sum(work)
                units.append(_Unit(progress, matrix, bool(singles), entries))
        first_job += len(group.jobs)
    return units


def _in_pairs(corners: Sequence[Corner]) -> tuple[list[Corner], list[Corner]]:
    """Pairs of neighbouring tiles of a row; and the tiles that are left over."""
    pairs: list[Corner] = []
    singles: list[Corner] = []
    for row, columns in _runs(corners):
        while len(columns) > 1:
            pairs += [(row, columns.pop(0)), (row, columns.pop(0))]
        singles += [(row, column) for column in columns]
    return pairs, singles


def _runs(corners: Sequence[Corner]) -> list[tuple[int, list[int]]]:
    """Columns of each row: all of a triangle's; of a rectangle's two at a time, the same two for each row in turn."""
    rows: dict[int, list[int]] = {}
    for row, column in corners:
        rows.setdefault(row, []).append(column)
    lengths = {len(columns) for columns in rows.values()}
    if len(lengths) > 1:
        return list(rows.items())
    return [(row, columns[at : at + 2]) for at in range(0, max(lengths), 2) for row, columns in rows.items()]


def _entries(job: int, corners: Sequence[Corner]) -> Tensor:
    rows, columns = torch.tensor(corners, dtype=torch.int32, device="cpu").unbind(1)
    return torch.stack([torch.full_like(rows, job), rows, rows, columns], 1)


def _without_tile(before: Tensor) -> Tensor:
    """An entry without tile, to follow the entries ``before``."""
    entry = before[-1:].clone()
    entry[:, 1] = NO_TILE
    return entry
