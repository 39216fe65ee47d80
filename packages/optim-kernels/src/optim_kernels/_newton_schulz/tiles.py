"""Which tile a product takes: a function of its shape and the chip, without run-time tuning.

A product of many tiles runs in rounds of as many as the chip holds at once, and a last round that is nearly empty costs
as much as a full one. Small tiles waste less of it, large ones run faster. The choice is the tile with the least
predicted time

    launch + ⌈tiles / multiprocessors⌉ · (slope · K + end)

with K the length of the sums. The constants were fitted to one H200 (fp16; `benchmarks/NOTES.md` has the measurements);
they only rank tiles. A symmetric product may compute three quarters of each diagonal tile instead of the tile, or for A
Aᵀ two such tiles in one program: that wins where it saves a round. On Hopper (Triton 3.6 or newer) products of more
than one round may run on the ping-pong schedule of `_hopper.ping_pong_kernels` or in the tiles of
`_hopper.wide_kernel`, and products of one round in those of `_hopper.lone_kernel`; all others run in `_kernels.product`
and `_kernels.symmetric`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Tile(NamedTuple):
    """A block of the result, the depth of one step along K, and how it is run."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    # persistent, with a producer and two consumers that take turns (`_hopper.ping_pong_kernels`)
    ping_pong: bool = False
    # the same with both consumers on one tile (`_hopper.wide_kernel`)
    cooperative: bool = False
    # symmetric products: tiles on the diagonal are computed by quarters, without the upper right one; lone tiles, four
    # on the diagonal by three programs
    quartered: bool = False
    # A Aᵀ: tiles on the diagonal are computed in pairs
    joined: bool = False
    # one tile per program, which has its multiprocessor to itself (`_hopper.lone_kernel`)
    lone: bool = False
    # fp32 operands are multiplied and summed in fp64
    in_fp64: bool = False

    @property
    def on_hopper(self) -> bool:
        """Whether the tile takes a kernel that exists for Hopper only."""
        return self.ping_pong or self.cooperative or self.lone

    @property
    def fills_multiprocessor(self) -> bool:
        """Whether the pipeline's stages, of 16-bit operands, leave no room for another program beside this one."""
        return self.num_stages * self.bytes_of_stage > SHARED_BYTES // 2

    @property
    def bytes_of_stage(self) -> int:
        """Shared memory of a stage's blocks, of 16-bit operands."""
        return 2 * (self.rows + self.columns) * self.depth

    @property
    def side(self) -> int:
        """Side of the square blocks that make up a triangle."""
        return self.columns


# Rows of tiles that share a column's operand while it is in the L2 cache.
TILE_GROUP = 8
# Shared memory of a Hopper multiprocessor, and what a program may need beside its stages.
SHARED_BYTES, BESIDE_STAGES = 228 << 10, 1 << 10


class Cost(NamedTuple):
    """Microseconds that a tile takes of its multiprocessor: per 1024 of K, at its end, and once per launch."""

    slope: float
    end: float
    launch: float


# Interpreted kernels cost about a millisecond a step whatever the tile, and their tests are small.
INTERPRETED = Tile(32, 32, 32, 4, 2)
# fp32 operands are multiplied in two parts each (`_triton.dot`). Deeper steps are less exact.
FULL_PRECISION = Tile(64, 64, 32, 4, 3)
# The same on the fp64 tensor cores, 1.3 to 1.4 times as long: of seven tiles the fastest everywhere; 128 registers.
IN_FP64 = Tile(64, 64, 16, 4, 3, in_fp64=True)

SYMMETRIC: Sequence[tuple[Tile, Cost]] = (
    (Tile(128, 128, 64, 4, 3), Cost(5.8, 0.2, 1.8)),
    (Tile(128, 128, 64, 4, 3, quartered=True), Cost(5.55, 0.1, 1.2)),
    (Tile(64, 64, 128, 4, 3), Cost(2.85, 0.1, 0.9)),
    (Tile(64, 64, 128, 4, 3, quartered=True), Cost(2.85, 0.1, 0.9)),
)
# The time of a tile's three quarters in tiles, as measured, beyond one round: each reads half of what a tile reads.
THREE_QUARTERS = 1.75
# Two tiles on the diagonal read what one below it reads, and that is what small tiles wait for.
JOINED = (Tile(64, 64, 128, 4, 3, joined=True), Cost(2.85, 0.1, 0.9))
# Keyed by its side: the stages of a symmetric tile in a launch of at most one program per multiprocessor, and the K
# from which it takes them. With fewer stages two programs fit on one, and the last to start would join the first while
# other multiprocessors stay free.
STAGES_ALONE = {64: (5, 0), 128: (6, 4096)}
GENERAL: Sequence[tuple[Tile, Cost]] = (
    (Tile(128, 256, 64, 8, 3), Cost(12.0, 4.3, 1.3)),
    (Tile(128, 128, 64, 4, 3), Cost(6.6, 0.7, 0.0)),
    (Tile(64, 128, 64, 4, 4), Cost(4.0, 3.4, 1.8)),
)
# The last of these where no multiprocessor has two, with more stages.
GENERAL_ALONE = (Tile(64, 128, 64, 4, 6), Cost(3.4, 0.8, 1.3))
# Tiles of products that take one round, on Hopper.
LONE = (Tile(128, 128, 64, 12, 5, lone=True), Cost(5.5, 0.6, 1.4))
LONE_SMALL = (Tile(64, 64, 128, 8, 6, lone=True), Cost(2.85, 0.1, 0.8))
LONE_HALF = (Tile(64, 128, 128, 8, 4, lone=True), Cost(3.3, 0.2, 0.8))
LONE_SYMMETRIC = (LONE, LONE_HALF, LONE_SMALL)
# n/m from which lone matrices restart the Gram iteration in factors: below, its square products take as long as X's.
LONE_FACTORS_ASPECT = 4
# A launch has its matrices in the second dimension of its grid.
MOST_LONE_MATRICES = 2**16 - 1
LONE_GENERAL = (
    (Tile(128, 256, 64, 12, 3, lone=True), Cost(10.6, 2.6, 0.6)),
    (Tile(192, 128, 64, 16, 5, lone=True), Cost(7.6, 2.6, 0.6)),
    (Tile(128, 128, 64, 12, 6, lone=True), Cost(6.0, 0.5, 0.4)),
    (Tile(64, 128, 128, 8, 4, lone=True), Cost(3.4, 0.8, 1.2)),
)
PING_PONG = Tile(128, 128, 64, 12, 5, ping_pong=True)
# The same bytes of operands in int8.
PING_PONG_INT8 = PING_PONG._replace(depth=128)
WIDE = Tile(128, 256, 64, 12, 3, cooperative=True)
# What persistent tiles take in products of more than one round. Nearly all of a tile's end is behind other products,
# and the last one's counts once. Wide tiles need sums of this length: the end of one waits for 512 of the next one's.
PING_PONG_COST, WIDE_COST = Cost(4.95, 0.0, 3.7), Cost(9.4, 0.0, 3.75)
GENERAL_PING_PONG_COST, GENERAL_WIDE_COST = Cost(6.1, 0.0, 2.4), Cost(10.8, 0.0, 4.2)
WIDE_LENGTH = 576


def cdiv(a: int, b: int) -> int:
    """⌈a / b⌉."""
    return -(-a // b)


def fitted(tile: Tile, shared: int) -> Tile:
    """The tile with as many of its stages as ``shared`` bytes of a program have room for.

    GPUs of compute capability 12.0 have 99 KiB where Hopper has 227.
    """
    room = (shared - BESIDE_STAGES) // tile.bytes_of_stage
    return tile._replace(num_stages=max(1, min(tile.num_stages, room)))


def symmetric_tiles(m: int, tile: Tile) -> int:
    """Tiles that compute one triangle of an m×m matrix, diagonal included."""
    side = cdiv(m, tile.columns)
    return side * (side + 1) // 2 * (tile.columns // tile.rows)


def symmetric_programs(m: int, tile: Tile) -> int:
    """Programs that compute these tiles; not for tiles whose quarters are programs of their own."""
    side = cdiv(m, tile.columns)
    if tile.joined:
        return symmetric_tiles(m, tile) - side // 2
    return symmetric_tiles(m, tile) - (cdiv(side, 4) if tile.lone and tile.quartered else 0)


def may_find_norm(m: int, tile: Tile) -> bool:
    """Whether a symmetric product of m×m matrices in such tiles may find the norm by which it divides.

    Triton 3.6 compiles no such lone kernel for a single tile.
    """
    return tile.lone and symmetric_programs(m, tile) > 1


def may_split(tile: Tile) -> bool:
    """Whether a symmetric product in such tiles may give its rounding errors beside the result: of two consumers."""
    return tile.lone and tile.rows == LONE[0].rows


@lru_cache(maxsize=4096)
def splitting_tile(m: int, batch: int, num_sms: int) -> Tile | None:
    """The tile in which ``batch`` products X Xᵀ, m×m, give their rounding errors; ``None`` if there are too many."""
    tiles = (tile for tile, _ in _lone_symmetric(m, batch, num_sms, same=True, shifted=True))
    return next(filter(may_split, tiles), None)


@lru_cache(maxsize=4096)
def full_tile(m: int, batch: int, num_sms: int) -> Tile | None:
    """The tile in which ``batch`` m×m products give theirs, or their diagonals; ``None`` if there are too many."""
    lone = [each for each in LONE_GENERAL if batch * cdiv(m, each[0].rows) * cdiv(m, each[0].columns) <= num_sms]
    return min(lone, key=lambda each: _time(each[1], 1, m, num_sms))[0] if lone else None


@lru_cache(maxsize=4096)
def symmetric_tile(
    m: int, k: int, batch: int, num_sms: int, same: bool, hopper: bool = False, shifted: bool = False
) -> Tile:
    """The tile of a symmetric m×m product over k.

    ``same``: of a matrix with its own transpose; ``shifted``: the result plus a multiple of I is wanted as well.
    """

    def time(each: tuple[Tile, Cost]) -> float:
        tile, cost = each
        blocks = cdiv(m, tile.side)
        load = batch * blocks * (blocks + 0.5) / 2
        if tile.lone or not tile.quartered:
            return _time(cost, batch * symmetric_programs(m, tile), k, num_sms)
        if load > num_sms:
            load = batch * blocks * ((blocks - 1) / 2 + THREE_QUARTERS)
        # quarters run beside whole tiles: the number of rounds need not be whole
        return cost.launch + (max(1.0, load / num_sms) + 0.25) * (cost.slope * k / 1024 + cost.end)

    choice = [*SYMMETRIC, *([JOINED] if same else [])]
    if hopper:
        choice += _lone_symmetric(m, batch, num_sms, same, shifted)
        if batch * symmetric_tiles(m, PING_PONG) > num_sms:
            choice.append((PING_PONG, PING_PONG_COST))
        if same and not shifted and k >= WIDE_LENGTH and batch * symmetric_tiles(m, WIDE) > num_sms:
            choice.append((WIDE, WIDE_COST))
    tile = min(choice, key=time)[0]
    if tile.lone:
        return tile
    stages, least = STAGES_ALONE.get(tile.columns, (0, 0))
    is_alone = not tile.quartered and batch * symmetric_programs(m, tile) <= num_sms
    return tile._replace(num_stages=stages) if stages and is_alone and k >= least else tile


@lru_cache(maxsize=4096)
def general_tile(m: int, n: int, k: int, batch: int, num_sms: int, hopper: bool = False) -> Tile:
    """The tile of a general m×n product over k."""

    def programs(tile: Tile) -> int:
        return batch * cdiv(m, tile.rows) * cdiv(n, tile.columns)

    choice = list(GENERAL)
    if programs(GENERAL_ALONE[0]) <= num_sms:
        choice[-1] = GENERAL_ALONE
    if hopper:
        choice += [each for each in LONE_GENERAL if programs(each[0]) <= num_sms]
        if programs(PING_PONG) > num_sms:
            choice.append((PING_PONG, GENERAL_PING_PONG_COST))
        if k >= WIDE_LENGTH and programs(WIDE) > num_sms:
            choice.append((WIDE, GENERAL_WIDE_COST))
    return min(choice, key=lambda each: _time(each[1], programs(each[0]), k, num_sms))[0]


def _lone_symmetric(m: int, batch: int, num_sms: int, same: bool, shifted: bool) -> list[tuple[Tile, Cost]]:
    """Lone tiles, where there are enough multiprocessors for one program on each."""
    found = []
    for tile, cost in LONE_SYMMETRIC:
        ways = [tile]
        if same and tile == LONE_SMALL[0]:
            ways.append(tile._replace(joined=True))
        elif (same or not shifted) and tile == LONE[0] and cdiv(m, tile.side) % 4 == 0:
            ways.append(tile._replace(quartered=True))
        found += [(way, cost) for way in ways if batch * symmetric_programs(m, way) <= num_sms][:1]
    return found


def _time(cost: Cost, tiles: int, k: int, num_sms: int) -> float:
    """Predicted microseconds of a launch."""
    return cost.launch + cdiv(tiles, num_sms) * (cost.slope * k / 1024 + cost.end)
