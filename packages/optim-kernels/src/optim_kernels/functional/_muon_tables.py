"""What a Muon plan keeps on the device: tables of its matrices, their tiles and strips, and room for sums."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._kernels import muon_table as fields
from optim_kernels._newton_schulz.tiles import Tile, cdiv
from optim_kernels.functional._muon_families import PANEL, ROW_STEP, Batch, ChainedBatches, Family
from optim_kernels.functional._muon_matrices import TILE, Matrix, MuonTensors, address_of

STRIP: int = fields.STRIP.value


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
    ) -> None:
        rows: list[list[int]] = []
        tile_map: list[tuple[int, int, int]] = []
        strips: list[tuple[int, int, int]] = []
        num_lines, num_parts = 0, 0
        batches = sorted(chain(*families, *(each.batches for each in chains)), key=lambda batch: batch.first)
        all_buffers = [buffers for batch in batches for buffers in _x_buffers(batch)]
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


def _x_buffers(batch: Batch) -> list[XBuffers]:
    """The buffers of each matrix of a batch."""
    last = batch.other if batch.num_moves % 2 else batch.x
    count = batch.shape[0]
    pairs = (x.unflatten(0, (count, -1)) for x in (batch.x, last)) if batch.in_panels else (batch.x, last)
    return [XBuffers(x, o, batch.last_tile) for x, o in zip(*pairs, strict=True)]
