"""In words, how the products of a Muon plan are cut into tiles."""

from __future__ import annotations

from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.product_launches import choose_tile
from optim_kernels._newton_schulz.tiles import PING_PONG, Tile, general_tile, symmetric_tile
from optim_kernels.functional._muon_tables import Batch, Family


def tiles_of(family: Family, batch: Batch, ns: NSConfig) -> str:
    """The tiles of X Xᵀ, of m×m products and of those with X, for the matrices of a batch."""
    count, m, n = batch.shape
    # m×m products take all matrices of a family at once
    members = sum(len(each.x) for each in family)
    of = batch.x.dtype, batch.x.device
    tiles = (
        choose_tile(*of, lambda sms, hopper: symmetric_tile(m, n, count, sms, True, hopper)),
        choose_tile(*of, lambda sms, hopper: symmetric_tile(m, m, members, sms, False, hopper)),
        choose_tile(*of, lambda sms, hopper: general_tile(m, n, m, count, sms, hopper)),
    )
    return " / ".join(map(_words, tiles))


def tiles_in_chain() -> str:
    """Those of matrices that are orthogonalised in one launch."""
    return f"{_words(PING_PONG)}, all in one launch"


def _words(tile: Tile) -> str:
    kinds = {
        "in turns": tile.ping_pong,
        "by two": tile.cooperative,
        "alone": tile.lone,
        "diagonal quartered": tile.quartered,
        "diagonal in pairs": tile.joined,
    }
    return " ".join([f"{tile.rows}×{tile.columns}", *(word for word, applies in kinds.items() if applies)])
