"""How a Muon plan sorts its matrices, and the buffers between which Newton–Schulz moves their X.

Matrices of one shape are a batch, and batches that share a short side and an iteration are a family; both are numbered
consecutively. Batches of one short side that are orthogonalized in one launch are a chain instead, whatever their
iterations, and their X is cut into panels (`_hopper.chain_kernel`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from optim_kernels._kernels import muon_table as fields
from optim_kernels._newton_schulz.chain import steps_in_factors, takes_step_chain
from optim_kernels._newton_schulz.chain_jobs import Ending
from optim_kernels._newton_schulz.config import NSConfig, Tiles
from optim_kernels._newton_schulz.int8_start import starts_in_int8
from optim_kernels._newton_schulz.tile_choice import choose_tile
from optim_kernels._newton_schulz.tiles import PING_PONG, Tile, cdiv, general_tile
from optim_kernels.functional._muon_matrices import Matrix
from optim_kernels.functional._muon_workspace import Memory

# Elements to which rows of X are padded: 16 bytes in 16-bit dtypes.
ROW_STEP = 8
# Allocates X buffers of a shape, in the dtype and on the device of a plan.
Room = Callable[..., Tensor]
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
        num_moves: how often the iteration multiplies X, and so moves it to the other buffer.
        in_factors: a restart takes m×m products alone (`chain_jobs`), launch by launch.
    """

    first: int
    shape: tuple[int, int, int]
    x: Tensor
    other: Tensor
    last_tile: Tile
    chosen_for: int
    num_moves: int
    in_factors: bool = False
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
    ending: Ending,
    tiles: Tiles,
    memory: Memory = torch.zeros,
) -> tuple[list[Family], list[ChainedBatches]]:
    """The families of ordered matrices, and those batches that make chains, with their buffers.

    Args:
        ending: what follows the last product; all but an update in it store it, so that X moves once more.
        tiles: with ``"shape"`` a chain has only batches that restart in factors, which are the longest of a short side.
        memory: allocates room for X.
    """
    families: list[Family] = []
    chains: list[ChainedBatches] = []
    room: Room = partial(memory, dtype=dtype, device=device)
    first = 0
    for m, members in groupby(matrices, key=lambda matrix: matrix.shape[0]):
        shapes = [(n, len(list(each))) for n, each in groupby(members, key=lambda matrix: matrix.shape[1])]
        in_factors = {n for n, _ in shapes if steps_in_factors(m, n, ns, dtype, device)}
        if tiles == "shape":
            chained = [shape for shape in shapes if shape[0] in in_factors]
        else:
            may_launch = ending is not Ending.STORE
            chained = shapes if takes_step_chain(shapes, m, ns, dtype, device, may_launch=may_launch) else []
        unchained = [
            ((ns.method_for(m, n), n in in_factors, starts_in_int8(m, n, ns, device)), n, count)
            for n, count in shapes
            if (n, count) not in chained
        ]
        for (_, is_long, _), family in groupby(unchained, key=itemgetter(0)):
            families.append([])
            for _, n, count in family:
                families[-1].append(_batch(first, (count, m, n), ns, ending, tiles, room, in_factors=is_long))
                first += count
        if chained:
            moves = [does_move(m, n, ns, ending, in_factors=True) for n, _ in chained]
            chains.append(_chained(chained, moves, first, m, ns, room))
        first += sum(count for _, count in chained)
    return families, chains


def _batch(
    first: int,
    shape: tuple[int, int, int],
    ns: NSConfig,
    ending: Ending,
    tiles: Tiles,
    room: Room,
    *,
    in_factors: bool,
) -> Batch:
    """A batch in buffers of its own."""
    count, m, n = shape
    padded = cdiv(n, ROW_STEP) * ROW_STEP
    x = room(count, m, padded)[..., :n]
    other = room(count, m, padded)[..., :n] if does_move(m, n, ns, ending, in_factors=in_factors) else x
    chosen_for = 1 if tiles == "shape" else count
    last_tile, moves = _last_tile(x, chosen_for), num_moves(m, n, ns, in_factors=in_factors)
    return Batch(first, shape, x, other, last_tile, chosen_for, moves, in_factors=in_factors)


def _chained(
    shapes: Sequence[tuple[int, int]], moves: Sequence[bool], first: int, m: int, ns: NSConfig, room: Room
) -> ChainedBatches:
    """Batches (n, count) of short side m, numbered from ``first`` on, in buffers of panels; ``moves``: which X move."""
    panels = [count * cdiv(n, PANEL) for n, count in shapes]
    x = room(sum(panels), m, PANEL)
    num_moved = sum(panels[: max((place for place, does in enumerate(moves, start=1) if does), default=0)])
    other = room(num_moved, m, PANEL) if num_moved else x
    batches, start = [], 0
    for (n, count), moving, size in zip(shapes, moves, panels, strict=True):
        its_x, its_other = (each[start : start + size] for each in (x, other if moving else x))
        of_shape = num_moves(m, n, ns, in_factors=True)
        batches.append(Batch(first, (count, m, n), its_x, its_other, PING_PONG, count, of_shape, in_panels=True))
        first, start = first + count, start + size
    return ChainedBatches(batches, x, other)


def does_move(m: int, n: int, ns: NSConfig, ending: Ending, *, in_factors: bool) -> bool:
    """Whether X is stored in its other buffer; ``in_factors``: restarts are, where that is shorter."""
    return num_moves(m, n, ns, in_factors=in_factors) > (ending is Ending.UPDATE)


def num_moves(m: int, n: int, ns: NSConfig, *, in_factors: bool) -> int:
    """How often the iteration multiplies X."""
    if in_factors and ns.restarts_in_factors(m, n):
        return 1
    return len(ns.blocks) if ns.method_for(m, n) == "gram" else ns.steps


def _last_tile(x: Tensor, chosen_for: int) -> Tile:
    _, m, n = x.shape
    tiles = chosen_for * cdiv(m, LAST_TILE.rows) * cdiv(n, LAST_TILE.columns)
    return choose_tile(x.dtype, x.device, lambda sms, _: LAST_TILE if tiles > 2 * sms else SMALL_LAST_TILE)


def _family_key(matrix: Matrix, ns: NSConfig) -> tuple[int, bool, int]:
    """(short side, whether it takes the Gram iteration, which moves X less often, length)"""
    m, n = matrix.shape
    return m, ns.method_for(m, n) == "gram", n
