"""Products by the kernels for Hopper, against fp64 and bit by bit against the plain kernels; all need such a GPU."""

import pytest
import torch
from torch import Tensor

from optim_kernels._newton_schulz.tiles import (
    LONE,
    LONE_GENERAL,
    LONE_HALF,
    LONE_SMALL,
    PING_PONG,
    WIDE,
    WIDE_LENGTH,
    Tile,
    cdiv,
    may_find_norm,
)

pytest.importorskip("triton")
from optim_kernels import muon_kernels as mk
from optim_kernels._kernels.normalize import Norm

pytestmark = pytest.mark.gpu
LONE_WIDE, LONE_TALL, LONE_SQUARE, LONE_SMALL_WIDE = (tile for tile, _ in LONE_GENERAL)
DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])


@pytest.fixture(autouse=True)
def _on_hopper() -> None:
    if not mk.has_gluon(None):
        pytest.skip("needs Hopper and Triton 3.6")


def assert_near(result: Tensor, expected: Tensor) -> None:
    assert (result - expected).norm() <= (4e-4 if result.dtype == torch.float16 else 3e-3) * expected.norm()


@DTYPES
@pytest.mark.parametrize(
    "shape", [(2, 256, 128), (3, 320, 200), (1, 136, 1000), (5, 1280, 640), (40, 640, 72)], ids=str
)
def test_ping_pong_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """On Hopper: against fp64, symmetric to the last bit, and bit by bit the same on a second run."""

    def empty(like: Tensor) -> Tensor:
        return mk.empty_matrices(*like.shape, like=like).fill_(float("nan"))

    x = (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(dtype)
    a = mk.symmetric_product(x, x, tile=PING_PONG, out=empty(x @ x.mT))
    assert_near(a, x.double() @ x.double().mT)
    z, q, scale = empty(a), empty(a), torch.rand(len(x), device="cuda") + 0.5
    mk.symmetric_product(a, a, c=a, alpha=0.5, beta=2.0, shifted=(q, 3.0), scale=scale, tile=PING_PONG, out=z)
    expected = (0.5 * a.double() @ a.double() + 2 * a.double()) * scale[:, None, None]
    assert_near(z, expected)
    assert_near(q, expected + 3 * torch.eye(shape[1], device="cuda"))
    p = mk.symmetric_product(a, z, c=a, beta=2.0, tile=PING_PONG, out=empty(a))
    assert_near(p, a.double() @ z.double() + 2 * a.double())
    for each in (a, z, q, p):
        assert torch.equal(each, each.mT)
    y = mk.general_product(z, x, c=x, alpha=0.25, beta=-1.0, tile=PING_PONG, out=empty(x))
    assert_near(y, 0.25 * z.double() @ x.double() - x.double())
    assert torch.equal(y, mk.general_product(z, x, c=x, alpha=0.25, beta=-1.0, tile=PING_PONG))


@DTYPES
@pytest.mark.parametrize("shape", [(2, 768, 640), (3, 640, 1000), (1, 1608, 584), (12, 1600, 1600)], ids=str)
def test_wide_products(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """On Hopper: the bits of the ping-pong kernel, whose sums have the same order, and a NaN stays in its matrix."""
    x = (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(dtype)
    scale = torch.rand(len(x), device="cuda") + 0.5
    results = []
    for tile in (WIDE, PING_PONG):
        a, z = (mk.empty_matrices(*shape[:2], shape[1], like=x).fill_(float("nan")) for _ in range(2))
        mk.symmetric_product(x, x, tile=tile, out=a)
        mk.symmetric_product(a, a, c=a, alpha=0.5, beta=2.0, scale=scale, tile=tile, out=z)
        y, w = (mk.empty_matrices(*shape, like=x).fill_(float("nan")) for _ in range(2))
        mk.general_product(z, x, c=x, alpha=0.25, beta=-1.0, scale=scale, tile=tile, out=y)
        mk.general_product(z, x, tile=tile, out=w)
        results.append((a, z, y, w))
    for wide, square in zip(*results, strict=True):
        assert torch.equal(wide, square)
    assert torch.equal(results[0][1], results[0][1].mT)
    x[0, 0, 0] = float("nan")
    a = mk.symmetric_product(x, x, tile=WIDE)
    assert a[0].isnan().any()
    assert torch.equal(a[1:], results[0][0][1:])


LONE_SHAPES = [(1, 2048, 2048), (1, 1936, 72), (2, 500, 1000), (3, 264, 8), (1, 64, 128), (1, 1600, 1600)]


# the shape, the tile of A Aᵀ, that of other symmetric products, that of general ones
LONE_CASES = [
    pytest.param(shape, same, square, wide, id=f"{shape}, {square[:2]}, {wide[:2]}, {name}")
    for shape in LONE_SHAPES
    for square, wide, banded in (
        (LONE[0], LONE_WIDE, {"quartered": True}),
        (LONE[0], LONE_SQUARE, {}),
        (LONE_HALF[0], LONE_TALL, {}),
        (LONE_SMALL[0], LONE_SMALL_WIDE, {"joined": True}),
    )
    for name, same in (("whole", square), ("banded", square._replace(**banded)))[: 1 + len(banded)]
    # four tiles of 128² on the diagonal go to three programs
    if not same.quartered or cdiv(shape[1], 128) % 4 == 0
]


@DTYPES
@pytest.mark.parametrize(("shape", "lone", "whole", "wide"), LONE_CASES)
def test_lone_products(shape: tuple[int, int, int], lone: Tile, whole: Tile, wide: Tile, dtype: torch.dtype) -> None:
    """On Hopper: the bits of the plain kernels, whose sums have the same order, many times one after another."""
    plain = Tile(128, 128, 64, 4, 3)
    x = (torch.randn(shape, device="cuda") / shape[-1] ** 0.5).to(dtype)
    scale = torch.rand(len(x), device="cuda") + 0.5

    def empty() -> Tensor:
        return mk.empty_matrices(*shape[:2], shape[1], like=x).fill_(float("nan"))

    results = []
    for tile in (lone, plain, *(5 * [lone])):
        other = whole if tile is lone else tile
        without_shift = tile if tile.quartered else other
        a, z, z_shifted, p, p_shifted = (empty() for _ in range(5))
        mk.symmetric_product(x, x, tile=tile, out=a)
        mk.symmetric_product(a, a, c=a, alpha=0.5, beta=2.0, shifted=(z_shifted, 3.0), scale=scale, tile=tile, out=z)
        mk.symmetric_product(a, z, c=a, beta=2.0, tile=without_shift, out=p)
        mk.symmetric_product(z, p, shifted=(p_shifted, -1.5), tile=other, out=empty())
        y, w = (mk.empty_matrices(*shape, like=x).fill_(float("nan")) for _ in range(2))
        general = Tile(128, 256, 64, 8, 3) if tile is plain else wide
        mk.general_product(z, x, c=x, alpha=0.25, beta=-1.0, scale=scale, tile=general, out=y)
        mk.general_product(z, x, tile=general, out=w)
        results.append((a, z, z_shifted, p, p_shifted, y, w))
    for again in results[1:]:
        for first, second in zip(results[0], again, strict=True):
            assert torch.equal(first, second)
    for result in results[0][:5]:
        assert torch.equal(result, result.mT)
    # two products with one operand at once
    a, z, _, p, *_ = results[0]
    both = mk.empty_matrices(2 * len(x), *a.shape[1:], like=x)
    torch.cat([a, p], out=both)
    singles = [mk.symmetric_product(each, z, c=each, beta=2.0, tile=whole) for each in (a, p)]
    assert torch.equal(mk.symmetric_product(both, z, c=both, beta=2.0, tile=whole), torch.cat(singles))
    # a scale that the product finds
    for parts, adds_eps in ((1, False), (300, True)) if may_find_norm(x.shape[1], lone) else ():
        sums = torch.rand(len(x) * parts, dtype=torch.float64, device="cuda")
        norm = Norm(sums, torch.empty(2, len(x), device="cuda"), parts, 1.25, 0.5, adds_eps)
        found = mk.symmetric_product(x, x, scale=norm, tile=lone)
        divisor = 1.25 * sums.view(-1, parts).sum(1).sqrt()
        divisor = divisor + 0.5 if adds_eps else divisor.clamp_min(0.5)
        torch.testing.assert_close(norm.inverses, torch.stack([1 / divisor, divisor**-2]).float(), rtol=2e-7, atol=0)
        assert torch.equal(found, mk.symmetric_product(x, x, scale=norm.inverses[1], tile=lone))
    if len(x) > 1:
        x[0, 0, 0] = float("nan")
        a = mk.symmetric_product(x, x, tile=lone)
        assert a[0].isnan().any()
        assert torch.equal(a[1:], results[0][0][1:])


@DTYPES
@pytest.mark.parametrize("shape", [(1, 2048, 520), (2, 1000, 64), (1, 1704, 5000), (3, 40, 8), (1, 1, 1)], ids=str)
def test_results_in_two_numbers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """On Hopper: the result beside its rounding error, and a diagonal beside the rest; the result has the same bits."""
    count, m, k = shape
    digits = torch.finfo(dtype).eps
    like = torch.empty(0, dtype=dtype, device="cuda")

    def matrices(rows: int, columns: int) -> Tensor:
        x = mk.empty_matrices(count, rows, columns, like=like)
        return x.copy_(torch.randn(x.shape, device="cuda") / columns**0.5)

    def near(high: Tensor, low: Tensor, wide: Tensor) -> None:
        # the tensor cores' sums are 2e-5 off themselves
        assert (high.double() + low - wide).norm() <= digits * (high - wide).norm() + 4e-5 * wide.norm()

    x, low = matrices(m, k), matrices(m, m)
    wide = 64 * x.double() @ x.double().mT
    tiles = [LONE[0], LONE[0]._replace(quartered=True)][: 1 + (cdiv(m, 128) % 4 == 0)]
    for tile in tiles:
        plain = mk.symmetric_product(x, x, alpha=64.0, tile=tile)
        assert torch.equal(mk.symmetric_product(x, x, alpha=64.0, low=low.fill_(torch.nan), tile=tile), plain)
        assert torch.equal(low, low.mT)
        near(plain, low, wide)
    s, c, y = matrices(m, m), matrices(m, m), matrices(m, 2056)
    product = s.double() @ plain.double()
    for tile in (LONE_WIDE, LONE_SQUARE, LONE_TALL):
        result = mk.general_product(s, plain, c=c, beta=2.0, tile=tile)
        again = mk.general_product(s, plain, c=c, beta=2.0, low=low.fill_(torch.nan), tile=tile)
        assert torch.equal(again, result)
        near(result, low, product + 2 * c.double())
        diagonal = torch.full((count * m + 5,), 7.0, device="cuda")
        rest = mk.general_product(s, plain, diagonal=diagonal, tile=tile)
        plain_rest = mk.general_product(s, plain, tile=tile)
        plain_rest.diagonal(dim1=-2, dim2=-1).zero_()
        assert torch.equal(rest, plain_rest)
        torch.testing.assert_close(
            diagonal[: count * m].view(count, m),
            product.diagonal(dim1=-2, dim2=-1).float(),
            rtol=1e-5,
            atol=2e-6 * float(product.norm()),
        )
        assert (diagonal[count * m :] == 7.0).all()
    if m >= WIDE_LENGTH:
        betas = torch.randn(count * m, device="cuda")
        result = mk.general_product(s, y, c=y, betas=betas, tile=WIDE)
        wide = s.double() @ y.double() + betas.view(count, m, 1).double() * y.double()
        assert (result - wide).norm() <= 0.3 * digits * wide.norm()


@DTYPES
@pytest.mark.parametrize("m", [1, 40, 700])
@pytest.mark.parametrize("k", [1, 2])
def test_sums_of_one_number(m: int, k: int, dtype: torch.dtype) -> None:
    """On Hopper in every tile, as of matrices with one row: Triton compiles an argument that is 1 as a constant."""

    def matrices(rows: int, columns: int) -> Tensor:
        x = mk.empty_matrices(3, rows, columns, like=torch.empty(0, dtype=dtype, device="cuda"))
        return x.copy_(torch.randn(x.shape, device="cuda"))

    x, other, c, scale = matrices(m, k), matrices(m, k), matrices(m, m), torch.rand(3, device="cuda") + 0.5
    other.copy_(x)
    c.copy_((c + c.mT) / 2)
    wide = x.double() @ x.double().mT
    for tile in (LONE[0], LONE_SMALL[0], LONE_HALF[0], PING_PONG, Tile(128, 128, 64, 4, 3)):
        assert_near(mk.symmetric_product(x, x, scale=scale, tile=tile), wide * scale[:, None, None])
        assert_near(mk.symmetric_product(x, other, c=c, beta=2.0, tile=tile), wide + 2 * c.double())
    y, c = matrices(k, 300), matrices(m, 300)
    for tile in (LONE_WIDE, LONE_TALL, LONE_SQUARE, LONE_SMALL_WIDE, PING_PONG, Tile(128, 256, 64, 8, 3)):
        assert_near(mk.general_product(x, y, c=c, beta=2.0, tile=tile), x.double() @ y.double() + 2 * c.double())
