"""The kernels of Newton–Schulz's products: results, and which tiles compute them."""

from functools import partial

import pytest
import torch
from h200 import on_an_h200
from random_tensors import DEVICE
from torch import Tensor

from optim_kernels import NSConfig
from optim_kernels._impl import multiplies_fp64_fast
from optim_kernels._newton_schulz import tile_choice
from optim_kernels._newton_schulz.tiles import (
    INTERPRETED,
    LONE,
    LONE_GENERAL,
    LONE_HALF,
    LONE_SMALL,
    PING_PONG,
    WIDE,
    Tile,
    cdiv,
    general_tile,
    symmetric_programs,
    symmetric_tile,
    symmetric_tiles,
)

pytest.importorskip("triton")
from optim_kernels import muon_kernels as mk
from optim_kernels._kernels.lone_places import lone_place, quotient, shifted_place
from optim_kernels._kernels.normalize import Norm, Start
from optim_kernels._kernels.product import rectangle_tile, triangle_tile
from optim_kernels._newton_schulz.iterations import normalize
from optim_kernels._triton import FUSED, tl, triton

LONE_WIDE, LONE_TALL, LONE_SQUARE, LONE_SMALL_WIDE = (tile for tile, _ in LONE_GENERAL)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_near(x: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert (x.double() - expected).norm() <= TOLERANCE[dtype] * expected.norm()


@triton.jit
def _tiles_kernel(out, T, GROUP: tl.constexpr, RECTANGLE: tl.constexpr):
    q = tl.program_id(0)
    if RECTANGLE:
        i, j = rectangle_tile(q, T, T + 3, GROUP)
    else:
        i, j = triangle_tile(q, T, GROUP)
    tl.store(out + 2 * q, i)
    tl.store(out + 2 * q + 1, j)


@triton.jit
def _quotients_kernel(out, b, SIZE: tl.constexpr):
    a = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + a, quotient(a, b))


@pytest.mark.parametrize("b", [1, 2, 3, 7, 11, 132, 1000, 65535])
def test_quotients_are_whole(b: int) -> None:
    out = torch.empty(2**19, dtype=torch.int32, device=DEVICE)
    _quotients_kernel[(8,)](out, b, SIZE=2**16, **FUSED)
    assert torch.equal(out, (torch.arange(2**19, device=DEVICE) // b).int())


@triton.jit
def _lone_places_kernel(out, T, SYMMETRIC: tl.constexpr, BANDED: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr):
    q = tl.program_id(0)
    place = lone_place(q, T, SYMMETRIC, BANDED, TALL, BROAD)
    for n in tl.static_range(4):
        tl.store(out + 4 * q + n, place[n])


def lone_places(programs: int, side: int, *flags: bool, blocks: tuple[int, int]) -> list[tuple[int, ...]]:
    """Row and column, quarter and number of another tile, of each program of a matrix of ``side`` tiles a side."""
    out = torch.empty(programs, 4, dtype=torch.int32, device=DEVICE)
    _lone_places_kernel[(programs,)](out, side, *flags, *blocks)
    return [tuple(row) for row in out.tolist()]


@pytest.mark.parametrize("side", [1, 2, 3, 8, 11, 12, 16])
def test_programs_of_lone_products_compute_every_tile_once(side: int) -> None:
    """Those of `_hopper.lone_kernel`, of which `symmetric_programs` says how many there are."""
    places = lone_places(side * (side + 3), side, False, False, blocks=(2, 4))
    assert sorted(places) == [(i, j, 0, 0) for i in range(side) for j in range(side + 3)]
    below = [(i, j, 0, 0) for i in range(side) for j in range(i)]
    for tile, blocks, parts in ((LONE[0], (2, 2), 1), (LONE_SMALL[0], (1, 1), 1), (LONE_HALF[0], (1, 2), 2)):
        programs = symmetric_programs(side * tile.side, tile)
        places = lone_places(programs, side, True, False, blocks=blocks)
        assert sorted(places) == [(i, j, 0, 0) for i in range(parts * side) for j in range(i // parts + 1)]
    # tiles on the diagonal in pairs, the last one perhaps with one outside of the matrix
    programs = symmetric_programs(side * 64, LONE_SMALL[0]._replace(joined=True))
    places = lone_places(programs, side, True, True, blocks=(1, 1))
    assert sorted(place for place in places if place[0] != place[1]) == below
    diagonal = [number for i, j, _, other in places if i == j for number in (i, other)]
    assert sorted(diagonal) == list(range(side + side % 2))
    # in fours
    if side % 4 == 0:
        programs = symmetric_programs(side * 128, LONE[0]._replace(quartered=True))
        places = lone_places(programs, side, True, True, blocks=(2, 2))
        assert sorted(place for place in places if place[0] != place[1]) == below
        diagonal = [(i, quarter, other) for i, j, quarter, other in places if i == j]
        assert sorted(diagonal) == [(i, i % 4, i // 4 * 4 + 3) for i in range(side) if i % 4 < 3]


@triton.jit
def _shifted_places_kernel(out, T):
    q = tl.program_id(0)
    place = shifted_place(q, T)
    for n in tl.static_range(4):
        tl.store(out + 4 * q + n, place[n])


@pytest.mark.parametrize("side", [4, 8, 12, 16])
def test_programs_of_shifted_tiles_compute_every_block_once(side: int) -> None:
    """In as many programs as a product of a matrix with itself, four blocks each."""
    programs = symmetric_programs(side * 128, LONE[0]._replace(quartered=True))
    out = torch.empty(programs, 4, dtype=torch.int32, device=DEVICE)
    _shifted_places_kernel[(programs,)](out, side)
    blocks = []
    for kind, row, one, two in out.tolist():
        if kind == 0:
            blocks += [(i, j) for i in (row, row + 1) for j in (one, two)]
        elif kind == 1:
            blocks += [(one, one), (two, two), (row, one), (row, two)]
        else:
            blocks += [(row, j + further) for j in (one, two) for further in (0, 4)]
    assert sorted(blocks) == [(i, j) for i in range(2 * side) for j in range(i + 1)]


@pytest.mark.parametrize("side", [1, 2, 8, 11])
def test_every_tile_once(side: int) -> None:
    triangle = {(i, j) for i in range(side) for j in range(i + 1)}
    rectangle = {(i, j) for i in range(side) for j in range(side + 3)}
    for expected, is_rectangle in ((triangle, False), (rectangle, True)):
        out = torch.empty(len(expected), 2, dtype=torch.int32, device=DEVICE)
        _tiles_kernel[(len(expected),)](out, side, GROUP=8, RECTANGLE=is_rectangle, **FUSED)
        found = [tuple(row) for row in out.tolist()]
        assert set(found) == expected
        assert len(found) == len(expected)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 63, 40), (1, 100, 33)], ids=str)
def test_products(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    x = mk.as_batch(torch.randn(shape, device=DEVICE).to(dtype))
    wide = x.double()
    a = mk.symmetric_product(x, x)
    assert_near(a, wide @ wide.mT, dtype)
    q = mk.empty_matrices(*a.shape, like=a).fill_(float("nan"))
    z = mk.symmetric_product(a, a, c=a, alpha=0.5, beta=2.0, shifted=(q, 3.0))
    expected = 0.5 * a.double() @ a.double() + 2 * a.double()
    assert_near(z, expected, dtype)
    assert_near(q, expected + 3 * torch.eye(shape[1], device=DEVICE), dtype)
    y = mk.general_product(z, x, c=x, alpha=0.25, beta=-1.0)
    assert_near(y, 0.25 * z.double() @ wide - wide, dtype)


@DTYPES
def test_symmetric_products_are_symmetric_to_the_last_bit(dtype: torch.dtype) -> None:
    x = torch.randn(2, 40, 72, device=DEVICE).to(dtype)
    a, b = (torch.randn(2, 40, 40, device=DEVICE).to(dtype) for _ in range(2))
    for product in (mk.symmetric_product(a, b), mk.symmetric_product(x, x)):
        assert torch.equal(product, product.mT)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_fp32_products_keep_what_fp32_has(scale: float) -> None:
    """Operands in two tf32 parts: within 4e-7 of fp64, for FMA's 5e-7, where one such part would be 3e-4 off."""
    x = scale * torch.randn(2, 132, 300, device=DEVICE)
    s = torch.randn(2, 132, 132, device=DEVICE)
    for product, a, b in ((mk.symmetric_product(x, x), x, x.mT), (mk.general_product(s, x), s, x)):
        expected = a.double() @ b.double()
        assert (product.double() - expected).norm() <= 4e-7 * expected.norm()


def test_exact_products_of_fp32_are_rounded_once() -> None:
    """Where fp64 is multiplied fast, which is everywhere that these tests run but on small GPUs."""
    if not multiplies_fp64_fast(torch.device(DEVICE)):
        pytest.skip("fp64 takes dozens of times as long as fp32 here")
    x, s = torch.randn(2, 132, 300, device=DEVICE), torch.randn(2, 132, 132, device=DEVICE)
    s = s + s.mT
    scale = torch.tensor([0.5, 3.0], device=DEVICE)
    options = {"alpha": 0.75, "beta": -3.0, "scale": scale, "exact": True}
    q = mk.empty_matrices(2, 132, 132, like=s)
    square = mk.symmetric_product(s, s, c=s, shifted=(q, 2.0), **options)
    wide = scale.double()[:, None, None] * (0.75 * s.double() @ s.double() - 3.0 * s.double())
    torch.testing.assert_close(square.double(), wide, rtol=2**-24, atol=1e-13)
    assert torch.equal(square, square.mT)
    assert torch.equal(q, square + 2.0 * torch.eye(132, device=DEVICE))
    rectangle = mk.general_product(s, x, c=x, **options).double()
    wide = scale.double()[:, None, None] * (0.75 * s.double() @ x.double() - 3.0 * x.double())
    torch.testing.assert_close(rectangle, wide, rtol=2**-24, atol=1e-13)
    # of 16-bit matrices nothing changes
    half = mk.as_batch(s.half())
    assert torch.equal(mk.symmetric_product(half, half, exact=True), mk.symmetric_product(half, half))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_fp32_products_are_not_finite_where_plain_ones_are_not(value: float) -> None:
    x, s = torch.randn(1, 72, 100, device=DEVICE), torch.randn(1, 72, 72, device=DEVICE)
    x[0, 3, 50] = value
    for product, expected in ((mk.symmetric_product(x, x), x @ x.mT), (mk.general_product(s, x), s @ x)):
        assert torch.equal(product.isfinite(), expected.isfinite())


def test_a_wide_tile_is_two_of_a_square_block() -> None:
    x = mk.as_batch(torch.randn(1, 80, 24, device=DEVICE).half())
    if DEVICE == "cpu":
        wide, square = Tile(16, 32, 32, 4, 2), Tile(32, 32, 32, 4, 2)
    else:
        wide, square = Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 4, 3)
    torch.testing.assert_close(mk.symmetric_product(x, x, tile=wide), mk.symmetric_product(x, x, tile=square))


@pytest.mark.parametrize("m", [24, 32, 80], ids=str)
def test_quarters_of_diagonal_tiles(m: int) -> None:
    """The same result as by whole tiles (on a GPU the same bits, the sums have the same order)."""
    x = mk.as_batch(torch.randn(2, m, 40, device=DEVICE).half() / 8)
    size, depth = (32, 32) if DEVICE == "cpu" else (128, 64)
    tile = Tile(size, size, depth, 4, 2)
    a = mk.symmetric_product(x, x, tile=tile)
    same = torch.equal if DEVICE == "cuda" else partial(torch.allclose, rtol=2e-3, atol=2e-3)
    assert same(mk.symmetric_product(x, x, tile=tile._replace(quartered=True)), a)
    b = mk.symmetric_product(a, a, c=a, tile=tile)
    results = []
    for each in (tile, tile._replace(quartered=True)):
        q = mk.empty_matrices(*a.shape, like=a).fill_(float("nan"))
        d = mk.symmetric_product(a, b, c=a, alpha=0.5, beta=2.0, shifted=(q, 3.0), tile=each)
        assert torch.equal(d, d.mT)
        results.append((d, q))
    for one, other in zip(*results, strict=True):
        assert same(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("m", [24, 32, 80, 128, 200], ids=str)
def test_diagonal_tiles_in_pairs(m: int) -> None:
    """The same result as by single tiles (on a GPU the same bits), with an odd number of them too."""
    x = mk.as_batch(torch.randn(3, m, 40, device=DEVICE).half() / 8)
    size, depth = (32, 32) if DEVICE == "cpu" else (64, 128)
    tile = Tile(size, size, depth, 4, 2)
    same = torch.equal if DEVICE == "cuda" else partial(torch.allclose, rtol=2e-3, atol=2e-3)
    results = []
    for each in (tile, tile._replace(joined=True)):
        a = mk.symmetric_product(x, x, tile=each)
        q = mk.empty_matrices(*a.shape, like=a).fill_(float("nan"))
        scale = torch.tensor([1.0, 0.5, 2.0], device=DEVICE)
        d = mk.symmetric_product(a, a, c=a, alpha=0.5, beta=2.0, shifted=(q, 3.0), scale=scale, tile=each)
        results.append((a, d, q))
    for one, other in zip(*results, strict=True):
        assert same(one, other)
    with pytest.raises(ValueError, match="x xᵀ alone"):
        mk.symmetric_product(x, x.clone(), tile=tile._replace(joined=True))


def test_strides_that_the_copy_engine_refuses_are_copied() -> None:
    x = torch.randn(3, 5, 7, device=DEVICE).half()
    batch = mk.as_batch(x)
    assert batch.stride(1) % 8 == 0
    torch.testing.assert_close(batch, x, atol=0, rtol=0)
    aligned = torch.randn(2, 3, 16, 24, device=DEVICE).half()
    assert mk.as_batch(aligned).data_ptr() == aligned.data_ptr()


@pytest.mark.parametrize("m", [40, 43, *(pytest.param(m, marks=pytest.mark.gpu) for m in (203, 520, 771, 1001, 1500))])
def test_nothing_beside_a_result_is_written(m: int) -> None:
    """Results within wider matrices, up to the next multiple of 16 bytes, which the copy engine writes as well."""
    x = torch.randn(1, m, 72, device=DEVICE).half()
    y = mk.as_batch(torch.randn(1, 72, m + 5, device=DEVICE).half())
    wide = x.double()
    for product, expected in ((mk.symmetric_product, wide @ wide.mT), (mk.general_product, wide @ y.double())):
        columns = expected.shape[-1]
        around = torch.full((1, m + 2, cdiv(columns + 16, 8) * 8), torch.nan, device=DEVICE, dtype=x.dtype)
        inside = around[:, 1:-1, 8 : 8 + columns]
        product(x, x if product is mk.symmetric_product else y, out=inside)
        assert_near(inside, expected, x.dtype)
        around[:, 1:-1, 8 : 8 + cdiv(columns, 8) * 8] = torch.nan
        assert around.isnan().all()


@DTYPES
@pytest.mark.parametrize("layout", ["rows", "columns", "gaps"])
@pytest.mark.parametrize("eps_mode", ["clamp", "add"])
def test_normalize(dtype: torch.dtype, layout: str, eps_mode: str) -> None:
    """Of every matrix of a batch by itself: huge, tiny, zero and one with a NaN; any strides."""
    x = torch.randn(5, 37, 300, device=DEVICE)
    if dtype != torch.float16:
        x[1:3] *= torch.tensor([1e30, 1e-30], device=DEVICE)[:, None, None]
    x[3] = 0
    x[4, 2, 7] = float("nan")
    x = x.to(dtype)
    if layout == "columns":
        x = x.mT.contiguous().mT
    elif layout == "gaps":
        x = torch.empty(5, 74, 301, dtype=dtype, device=DEVICE)[:, ::2, 1:].copy_(x)
    config = NSConfig(eps=1e-36, eps_mode=eps_mode, norm_scale=1.02, dtype=dtype)
    result = mk.empty_matrices(*x.shape, like=x)
    assert Start(x, result, config)(x, result) is None
    expected = normalize(x, config)[0]
    torch.testing.assert_close(result[:4], expected[:4], rtol=0.01 if dtype == torch.bfloat16 else 1e-3, atol=1e-6)
    assert result[4].isnan().all()
    assert not result[:4].isnan().any()


def test_tile_choice() -> None:
    """Small matrices alone take small tiles, batches and large ones large tiles; quarters where they save a round."""
    assert symmetric_tile(1024, 1024, 1, 132, True) == Tile(64, 64, 128, 4, 5, joined=True)
    assert symmetric_tile(1024, 1024, 1, 132, False) == Tile(64, 64, 128, 4, 3, quartered=True)
    assert symmetric_tile(512, 512, 4, 132, True) == Tile(64, 64, 128, 4, 5, joined=True)
    assert symmetric_tile(768, 3072, 1, 132, True) == Tile(64, 64, 128, 4, 5)
    assert symmetric_tile(1920, 1920, 1, 132, True) == Tile(128, 128, 64, 4, 3)
    assert symmetric_tile(1920, 7680, 1, 132, True) == Tile(128, 128, 64, 4, 6)
    assert symmetric_tile(2048, 2048, 1, 132, False) == Tile(128, 128, 64, 4, 3, quartered=True)
    assert symmetric_tile(2048, 2048, 1, 132, True, True) == LONE[0]._replace(quartered=True)
    assert symmetric_tile(2048, 2048, 1, 132, False, True) == LONE[0]._replace(quartered=True)
    assert symmetric_tile(2048, 2048, 1, 132, False, True, True) == Tile(128, 128, 64, 4, 3, quartered=True)
    assert symmetric_tile(1920, 1920, 1, 132, False, True) == LONE[0]
    assert symmetric_tile(1024, 1024, 1, 132, True, True) == LONE_SMALL[0]._replace(joined=True)
    assert symmetric_tile(768, 768, 1, 132, False, True) == LONE_SMALL[0]
    assert symmetric_tile(1024, 1024, 1, 132, False, True) == LONE_HALF[0]
    assert symmetric_tile(1280, 5120, 1, 132, True, True) == LONE_HALF[0]
    assert symmetric_tile(1408, 1408, 1, 132, False, True) == LONE_HALF[0]
    assert symmetric_tile(768, 768, 12, 132, False, True) == Tile(128, 128, 64, 4, 3)
    assert symmetric_tile(1280, 1280, 80, 132, True)[:2] == (128, 128)
    assert symmetric_tile(8192, 8192, 1, 132, True)[:2] == (128, 128)
    assert not symmetric_tile(512, 2048, 32, 132, True).quartered
    assert general_tile(4096, 4096, 4096, 1, 132)[:2] == (128, 256)
    assert general_tile(2048, 2048, 2048, 1, 132, True) == LONE_WIDE
    assert general_tile(1024, 1024, 1024, 1, 132) == Tile(64, 128, 64, 4, 6)
    assert general_tile(1024, 1024, 1024, 1, 132, True) == LONE_SMALL_WIDE
    assert general_tile(768, 3072, 768, 1, 132, True) == LONE_TALL
    assert general_tile(1280, 1280, 1280, 1, 132, True) == LONE_SQUARE
    assert general_tile(1600, 1600, 1600, 1, 132, True) == LONE_TALL
    assert symmetric_tile(1280, 1280, 80, 132, False, True).ping_pong
    assert general_tile(512, 512, 512, 24, 132, True) == PING_PONG
    assert general_tile(2304, 2304, 2304, 1, 132, True) == PING_PONG
    assert general_tile(3072, 3072, 3072, 1, 132, True) == PING_PONG
    assert general_tile(1280, 1280, 1280, 80, 132, True) == WIDE
    assert general_tile(1792, 1792, 1792, 1, 132, True) == LONE_WIDE
    assert general_tile(2048, 8192, 2048, 1, 132, True) == WIDE
    assert general_tile(4096, 4096, 4096, 1, 132, True) == WIDE
    assert general_tile(4096, 14336, 4096, 1, 132, True) == WIDE
    assert general_tile(1600, 6400, 1600, 96, 132, True) == WIDE
    assert symmetric_tile(8192, 8192, 1, 132, True, True) == WIDE
    assert symmetric_tile(3456, 3456, 1, 132, True, True) == PING_PONG
    assert symmetric_tile(640, 640, 24, 132, False, True) == PING_PONG
    # three rounds of wide tiles would take the time of six of square ones, of which there are four
    assert symmetric_tile(4096, 4096, 1, 132, True, True) == PING_PONG
    assert symmetric_tile(8192, 8192, 1, 132, False, True) == PING_PONG
    assert not symmetric_tile(2048, 2048, 1, 132, True, True).ping_pong
    assert not general_tile(1280, 1280, 1280, 80, 132).ping_pong
    for m in range(64, 4096, 64):
        for batch in (1, 4):
            tile = symmetric_tile(m, m, batch, 132, True, True)
            assert not tile.lone or batch * symmetric_programs(m, tile) <= 132
            tile = general_tile(m, m, m, batch, 132, True)
            assert not tile.lone or batch * cdiv(m, tile.rows) * cdiv(m, tile.columns) <= 132
    for m in range(1, 600, 13):
        assert symmetric_tiles(m, Tile(128, 256, 64, 8, 3)) * 128 * 256 * 2 >= m * m
        assert symmetric_tiles(m, INTERPRETED) == sum(i + 1 for i in range(-(-m // INTERPRETED.rows)))


def test_more_matrices_than_a_grid_takes_have_other_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    on_an_h200(monkeypatch)
    for symmetric in (True, False):
        for batch, is_lone in ((1, True), (2**16 - 1, True), (2**16, False)):
            x = torch.empty(batch, 512, 512, dtype=torch.float16, device="meta")
            assert tile_choice.tile_of_one(x, x, symmetric=symmetric).lone == is_lone


def test_tiles_that_a_product_cannot_take_are_refused() -> None:
    x = torch.randn(1, 640, 64, device=DEVICE).half()
    fours = LONE[0]._replace(quartered=True)
    with pytest.raises(ValueError, match="multiple of 4 diagonal tiles, got m = 640"):
        mk.symmetric_product(x, x, tile=fours)
    with pytest.raises(ValueError, match="x xᵀ alone"):
        mk.symmetric_product(x, x.clone(), tile=LONE_SMALL[0]._replace(joined=True))
    with pytest.raises(ValueError, match="no shift of a product of two operands"):
        mk.symmetric_product(x, x.clone(), shifted=(x, 1.0), tile=fours)
    with pytest.raises(ValueError, match="gives no rounding errors"):
        mk.symmetric_product(x, x, low=x, tile=LONE_SMALL[0])
    for kept in ({"low": x}, {"diagonal": x}):
        with pytest.raises(ValueError, match="gives neither rounding errors nor a diagonal"):
            mk.general_product(x, x.mT, **kept, tile=Tile(128, 128, 64, 4, 3))
    for more in ({"c": x}, {"scale": x}, {"alpha": 2.0}):
        with pytest.raises(ValueError, match="diagonal of a b alone goes apart"):
            mk.general_product(x, x.mT, diagonal=x, **more)
    with pytest.raises(ValueError, match="takes one beta for all rows"):
        mk.general_product(x, x.mT, c=x, betas=x, tile=LONE_WIDE)
    with pytest.raises(ValueError, match="for sums of 576 and more, got 64"):
        mk.symmetric_product(x, x, tile=WIDE)
    with pytest.raises(ValueError, match="two batches of one size, got 2 and 1 matrices"):
        mk.symmetric_product(mk.empty_matrices(2, 640, 64, like=x), x, tile=Tile(128, 128, 64, 4, 3))
    norm = Norm(torch.ones(3).double(), torch.empty(2, 1), 3, 1.0, 0.0, False)
    with pytest.raises(ValueError, match="finds no norm of matrices with m = 640"):
        mk.symmetric_product(x, x, scale=norm, tile=Tile(128, 128, 64, 4, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1280, 1280), (768, 3072), (3072, 768), (24, 512, 1000)], ids=str)
def test_default_path_on_a_gpu_is_within_the_limit(shape: tuple[int, ...]) -> None:
    from optim_kernels import NSConfig, newton_schulz, reference

    x = torch.randn(shape, device="cuda")
    for name in ("keller", "you", "polar_express_gram"):
        expected = reference.newton_schulz(x.double(), NSConfig(coefficients=name).triples)
        result = newton_schulz(x, coefficients=name)
        assert (result - expected).norm() <= 2.2e-3 * expected.norm()
