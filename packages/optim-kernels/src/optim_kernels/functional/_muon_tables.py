"""What a Muon plan keeps on the device: tables of its matrices and tiles, X buffers, room for sums.

Matrices of one shape are a batch, and batches that share a short side and an iteration are a family; both are numbered
consecutively. Batches of one short side that are orthogonalized in one launch are a chain instead, whatever their
iterations, and their X is cut into panels (`_hopper.chain_kernel`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._kernels import muon_table as fields
from optim_kernels._newton_schulz.chain import needs_step_chain, takes_step_chain
from optim_kernels._newton_schulz.config import NSConfig, Tiles
from optim_kernels._newton_schulz.tile_choice import choose_tile
from optim_kernels._newton_schulz.tiles import PING_PONG, Tile, cdiv, general_tile
from optim_kernels.functional._muon_matrices import TILE, Matrix, MuonTensors, address_of
from optim_kernels.functional._muon_workspace import Memory

# Elements to which rows of X are padded: 16 bytes in 16-bit dtypes.
ROW_STEP = 8
# Allocates X buffers of a shape, in the dtype and on the device of a plan.
Room = Callable[..., Tensor]
STRIP: int = fields.STRIP.value
PANEL: int = fields.PANEL.value
# Tiles of the last product: one whose epilogue hides behind another program's main loop, and a smaller one where there
# would be too few of the former.
LAST_TILE, SMALL_LAST_TILE = Tile(128, 128, 64, 4, 3), Tile(64, 128, 64, 4, 3)


@dataclass(frozen=True)
class Batch:
    """The matrices of one shape, numbered from ``first`` on.

    Args:
        shape: (count, m, n).
        x, other: two buffers between which X goes back and forth: ``[count, m, n]``, or the batch's panels of the
            chain's buffers. They are the same buffer if X stays where it is.
        last_tile: the tile of the last product.
        chosen_for: for how many matrices tiles are chosen.
    """

    first: int
    shape: tuple[int, int, int]
    x: Tensor
    other: Tensor
    last_tile: Tile
    chosen_for: int
    in_panels: bool = False

    @property
    def numbers(self) -> slice:
        return slice(self.first, self.first + self.shape[0])

    @property
    def takes_ping_pong(self) -> bool:
        """Whether the last product that makes X runs on the schedule of `_hopper.ping_pong_kernels`."""
        if not self.x.is_cuda:
            return False
        (_, m, n), count = self.shape, self.chosen_for
        tile = choose_tile(self.x.dtype, self.x.device, lambda sms, hopper: general_tile(m, n, m, count, sms, hopper))
        return tile.ping_pong or tile.cooperative


Family = list[Batch]


@dataclass(frozen=True)
class ChainedBatches:
    """All batches of one short side, with their two buffers ``[panels, m, PANEL]``.

    A panel has the same place in both, so ``other`` ends with the last batch that needs it.
    """

    batches: list[Batch]
    x: Tensor
    other: Tensor


def in_order(matrices: Sequence[Matrix], ns: NSConfig) -> list[Matrix]:
    """The matrices by short side, then by family, then by length: last those whose X need not move."""
    return sorted(matrices, key=lambda matrix: _family_key(matrix, ns))


def families_of(
    matrices: Sequence[Matrix],
    ns: NSConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    stores_last: bool,
    tiles: Tiles,
    memory: Memory = torch.zeros,
) -> tuple[list[Family], list[ChainedBatches]]:
    """The families of ordered matrices, and those batches that make chains, with their buffers.

    Args:
        stores_last: the last product is stored as any other, so that X moves once more.
        tiles: with ``"shape"`` a chain has only batches that need one, which are the longest of a short side.
        memory: allocates room for X.
    """
    families: list[Family] = []
    chains: list[ChainedBatches] = []
    room: Room = partial(memory, dtype=dtype, device=device)
    first = 0
    for m, members in groupby(matrices, key=lambda matrix: matrix.shape[0]):
        of_families = [
            [(n, len(list(each))) for n, each in groupby(family, key=lambda matrix: matrix.shape[1])]
            for _, family in groupby(members, key=lambda matrix: _family_key(matrix, ns)[1])
        ]
        shapes = [shape for family in of_families for shape in family]
        chained = shapes if takes_step_chain(shapes, m, ns, dtype, device) else []
        if tiles == "shape":
            chained = [(n, count) for n, count in shapes if needs_step_chain(m, n, ns, dtype, device)]
        unchained = [[shape for shape in family if shape not in chained] for family in of_families]
        families += _unchained([family for family in unchained if family], first, m, tiles, room)
        first += sum(count for family in unchained for _, count in family)
        if chained:
            moves = [moves_in_chain(m, n, ns, stores_last=stores_last) for n, _ in chained]
            chains.append(_chained(chained, moves, first, m, room))
        first += sum(count for _, count in chained)
    return families, chains


def _unchained(
    of_families: Sequence[Sequence[tuple[int, int]]], first: int, m: int, tiles: Tiles, room: Room
) -> list[Family]:
    """Families of batches (n, count) of short side m, numbered from ``first`` on, in buffers of their own."""
    families: list[Family] = []
    for shapes in of_families:
        families.append([])
        for n, count in shapes:
            padded = cdiv(n, ROW_STEP) * ROW_STEP
            x, other = (room(count, m, padded)[..., :n] for _ in range(2))
            chosen_for = 1 if tiles == "shape" else count
            families[-1].append(Batch(first, (count, m, n), x, other, _last_tile(x, chosen_for), chosen_for))
            first += count
    return families


def _chained(
    shapes: Sequence[tuple[int, int]], moves: Sequence[bool], first: int, m: int, room: Room
) -> ChainedBatches:
    """Batches (n, count) of short side m, numbered from ``first`` on, in buffers of panels; ``moves``: which X move."""
    panels = [count * cdiv(n, PANEL) for n, count in shapes]
    x = room(sum(panels), m, PANEL)
    num_moved = sum(panels[: max((place for place, does in enumerate(moves, start=1) if does), default=0)])
    other = room(num_moved, m, PANEL) if num_moved else x
    batches, start = [], 0
    for (n, count), does_move, size in zip(shapes, moves, panels, strict=True):
        its_x, its_other = (each[start : start + size] for each in (x, other if does_move else x))
        batches.append(Batch(first, (count, m, n), its_x, its_other, PING_PONG, count, in_panels=True))
        first, start = first + count, start + size
    return ChainedBatches(batches, x, other)


def moves_in_chain(m: int, n: int, ns: NSConfig, *, stores_last: bool) -> bool:
    """Whether a chain stores X in its other buffer."""
    return num_rectangular((m, n), ns, in_chain=True) - (not stores_last) > 0


def num_rectangular(shape: Sequence[int], ns: NSConfig, *, in_chain: bool = False) -> int:
    """How often the iteration multiplies X, and so moves it to the other buffer."""
    if in_chain and ns.restarts_in_factors(*shape[-2:]):
        return 1
    return len(ns.blocks) if ns.method_for(*shape[-2:]) == "gram" else ns.steps


def _last_tile(x: Tensor, chosen_for: int) -> Tile:
    _, m, n = x.shape
    tiles = chosen_for * cdiv(m, LAST_TILE.rows) * cdiv(n, LAST_TILE.columns)
    return choose_tile(x.dtype, x.device, lambda sms, _: LAST_TILE if tiles > 2 * sms else SMALL_LAST_TILE)


def _family_key(matrix: Matrix, ns: NSConfig) -> tuple[int, bool, int]:
    """(short side, whether it takes the Gram iteration, which moves X less often, length)"""
    m, n = matrix.shape
    return m, ns.method_for(m, n) == "gram", n


class XBuffers(NamedTuple):
    """Where the iteration keeps a matrix: its first and last X, ``[m, n]`` or ``[panels, m, PANEL]``."""

    x: Tensor
    o: Tensor
    last_tile: Tile  # of the product that makes the last X

    def num_columns(self, n: int) -> int:
        """How many columns may be written, zeros beyond the matrix's n."""
        # products that sum over X's columns read to the end of a step
        step = TILE if self.x.ndim == 3 else ROW_STEP
        return cdiv(n, step) * step


class MuonTables:
    """Device tensors of a plan over ordered ``matrices``; see `_kernels.muon_table` for the columns."""

    def __init__(
        self,
        tensors: Sequence[MuonTensors],
        matrices: Sequence[Matrix],
        families: Sequence[Family],
        chains: Sequence[ChainedBatches],
        ns: NSConfig,
    ) -> None:
        rows: list[list[int]] = []
        tile_map: list[tuple[int, int, int]] = []
        strips: list[tuple[int, int, int]] = []
        num_lines, num_parts = 0, 0
        batches = sorted(chain(*families, *(each.batches for each in chains)), key=lambda batch: batch.first)
        all_buffers = [buffers for batch in batches for buffers in _x_buffers(batch, ns)]
        for number, (matrix, buffers) in enumerate(zip(matrices, all_buffers, strict=True)):
            parts, n = _parts_of_a_line(matrix, buffers), matrix.shape[1]
            row = _row(tensors[matrix.parameter], matrix, buffers)
            row[fields.FIRST_TILE] = len(tile_map)
            row[fields.FIRST_LINE] = num_lines
            row[fields.FIRST_PART] = num_parts
            row[fields.NUM_PARTS] = parts
            rows.append(row)
            tile_map += [(number, i * TILE, j * TILE) for i, j in product(*map(range, matrix.tiles))]
            strips += _strips(number, matrix, buffers)
            num_lines += n
            num_parts += n * parts
        device = tensors[0].param.device

        def on_device(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def room(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.matrices = on_device(rows, torch.int64)
        self.tile_map = on_device(tile_map, torch.int32)
        # long rows first, so that short ones fill the end
        self.strip_map = on_device([(number, first) for _, number, first in sorted(strips)], torch.int32)
        self.lr_scales = on_device([matrix.scale for matrix in matrices], torch.float32)
        steps = {t.step.data_ptr() for t in tensors if t.step is not None}
        self.steps = on_device(sorted(steps), torch.int64)
        # for each matrix: υ, the power of two that X is first written with; σ, the factor missing to norm 1; and σ²
        self.units, self.scales, self.squared_scales = (room(len(rows), dtype=torch.float32) for _ in range(3))
        # for each matrix how many tiles are done, and for each chain the number of the next tile
        self.progress = room(len(rows) + len(chains), dtype=torch.int32)
        # Σ U² of each tile, or of each row; Σ O² of each part of a line; the factor of each line
        self.sums = room(len(tile_map), dtype=torch.float64)
        self.row_squares = room(num_lines, dtype=torch.float64)
        self.parts = room(num_parts, dtype=torch.float32)
        self.factors = room(num_lines, dtype=torch.float32)


def _row(t: MuonTensors, matrix: Matrix, buffers: XBuffers) -> list[int]:
    """A matrix's row of the table, except where its tiles, lines and parts begin among those of all matrices."""
    x, n = buffers.x, matrix.shape[1]
    outer_tiles, inner_tiles = matrix.tiles
    row = [0] * fields.NUM_FIELDS.value
    for column, value in (
        (fields.P, address_of(t.param, matrix.offset)),
        (fields.B, address_of(t.momentum_buffer, matrix.offset)),
        (fields.V, address_of(t.second_moment, matrix.moment_offset)),
        (fields.MASTER, address_of(t.master, matrix.offset)),
        (fields.X, x.data_ptr()),
        (fields.O, buffers.o.data_ptr()),
        (fields.STEP, address_of(t.step, 0)),
        (fields.STRIDE, matrix.stride),
        (fields.X_STRIDE, x.stride(-2)),
        (fields.X_PANEL, x.stride(0) if x.ndim == 3 else PANEL),
        (fields.X_COLUMNS, buffers.num_columns(n)),
        (fields.OUTER, matrix.outer),
        (fields.INNER, matrix.inner),
        (fields.OUTER_TILES, outer_tiles),
        (fields.INNER_TILES, inner_tiles),
        (fields.ROWS_ARE_INNER, int(matrix.rows_are_inner)),
        (fields.GROUP, t.group),
        (fields.PLACE, t.place),
        (fields.START, matrix.offset),
        (fields.SEED, t.seed & 0xFFFFFFFF),
    ):
        row[column] = value
    return row


def _parts_of_a_line(matrix: Matrix, buffers: XBuffers) -> int:
    """Into how many tiles of the last product a line falls; each tile leaves a sum."""
    m, n = matrix.shape
    return cdiv(m, buffers.last_tile.rows) if matrix.lines_are_columns else cdiv(n, buffers.last_tile.columns)


def _strips(number: int, matrix: Matrix, buffers: XBuffers) -> list[tuple[int, int, int]]:
    """(−length of the rows, number of the matrix, first row) of each strip of rows."""
    num_rows, num_columns = matrix.rows_and_columns
    n = matrix.shape[1]
    # where the rows are X's columns, strips cover the zeros beyond them too
    last_row = buffers.num_columns(n) if num_rows == n else num_rows
    return [(-num_columns, number, row) for row in range(0, last_row, STRIP)]


def _x_buffers(batch: Batch, ns: NSConfig) -> list[XBuffers]:
    """The buffers of each matrix of a batch."""
    last = batch.other if num_rectangular(batch.shape, ns, in_chain=batch.in_panels) % 2 else batch.x
    count = batch.shape[0]
    pairs = (x.unflatten(0, (count, -1)) for x in (batch.x, last)) if batch.in_panels else (batch.x, last)
    return [XBuffers(x, o, batch.last_tile) for x, o in zip(*pairs, strict=True)]
