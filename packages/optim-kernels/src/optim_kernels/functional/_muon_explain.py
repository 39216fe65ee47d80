"""How the products of a Muon plan are cut into tiles, in words."""

from __future__ import annotations

from collections.abc import Sequence

from optim_kernels._newton_schulz.config import NSConfig, Tiles
from optim_kernels._newton_schulz.int8_start import starts_in_int8
from optim_kernels._newton_schulz.tile_choice import choose_tile, tile_of_factors
from optim_kernels._newton_schulz.tiles import PING_PONG, Tile, general_tile, splitting_tile, symmetric_tile
from optim_kernels.functional._muon_families import Batch, ChainedBatches, Family


def tile_words(families: Sequence[Family], chains: Sequence[ChainedBatches], ns: NSConfig, tiles: Tiles) -> list[str]:
    """For each matrix of a plan, in order, how its products are cut into tiles."""
    words = [(batch, _tiles_of(family, batch, ns, tiles)) for family in families for batch in family]
    words += [(batch, f"{_words(PING_PONG)}, all in one launch") for chain in chains for batch in chain.batches]
    words.sort(key=lambda entry: entry[0].first)
    return [word for batch, word in words for _ in range(batch.shape[0])]


def _tiles_of(family: Family, batch: Batch, ns: NSConfig, tiles: Tiles) -> str:
    """The tiles of X Xᵀ, of m×m products and of those with X, for the matrices of a batch."""
    count, (_, m, n) = batch.chosen_for, batch.shape
    # m×m products take all matrices of a family at once
    members = 1 if tiles == "shape" else sum(len(each.x) for each in family)
    kind = batch.x.dtype, batch.x.device
    square = choose_tile(*kind, lambda sms, hopper: symmetric_tile(m, m, members, sms, False, hopper))
    if batch.in_factors:
        # X is multiplied once
        taken = tile_of_factors(batch.x, splitting_tile), square, batch.last_tile
    else:
        gram = choose_tile(*kind, lambda sms, hopper: symmetric_tile(m, n, count, sms, True, hopper))
        taken = gram, square, choose_tile(*kind, lambda sms, hopper: general_tile(m, n, m, count, sms, hopper))
    start = ", first step in int8" if starts_in_int8(m, n, ns, batch.x.device) else ""
    return " / ".join(map(_words, taken)) + start


def _words(tile: Tile) -> str:
    kinds = {
        "in turns": tile.ping_pong,
        "by two": tile.cooperative,
        "alone": tile.lone,
        "diagonal quartered": tile.quartered,
        "diagonal in pairs": tile.joined,
    }
    return " ".join([f"{tile.rows}×{tile.columns}", *(word for word, applies in kinds.items() if applies)])
