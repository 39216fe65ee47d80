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

import torch
from torch import Tensor

from optim_kernels._kernels import muon_table as fields
from optim_kernels._newton_schulz.chain import needs_step_chain, takes_step_chain
from optim_kernels._newton_schulz.config import NSConfig, Tiles
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
