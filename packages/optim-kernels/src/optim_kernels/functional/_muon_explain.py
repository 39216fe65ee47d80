"""In words, how the products of a Muon plan are cut into tiles."""

from __future__ import annotations

from optim_kernels._tiles import PING_PONG, Tile, general_tile, symmetric_tile
from optim_kernels.functional._muon_chains import is_chained
from optim_kernels.functional._muon_tables import Batch, Family
from optim_kernels.muon_kernels import _tile_for
from optim_kernels.orthogonalization import NSConfig


def tiles_of(family: Family, batch: Batch, ns: NSConfig) -> str:
    """The tiles of X Xᵀ, of m×m products and of those with X, for the matrices of a batch."""
    if is_chained(batch, ns):
        return f"{_words(PING_PONG)}, all in one launch"
    count, m, n = batch.x.shape
    # m×m products take all matrices of a family at once
    members = sum(len(each.x) for each in family)
    tiles = (
        _tile_for(batch.x, lambda sms, hopper: symmetric_tile(m, n, count, sms, True, hopper)),
        _tile_for(batch.x, lambda sms, hopper: symmetric_tile(m, m, members, sms, False, hopper)),
        _tile_for(batch.x, lambda sms, hopper: general_tile(m, n, m, count, sms, hopper)),
    )
    return " / ".join(map(_words, tiles))


def _words(tile: Tile) -> str:
    kinds = {"in turns": tile.ping_pong, "by two": tile.cooperative, "diagonal quartered": tile.quartered}
    return " ".join([f"{tile.rows}×{tile.columns}", *(word for word, applies in kinds.items() if applies)])
