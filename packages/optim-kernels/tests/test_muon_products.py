"""The products of a family inside a Muon step: their buffers, scales and operands, by plain products for kernels."""

from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from h200 import on_an_h200
from plain_products import by_torch
from random_tensors import DEVICE, give_gradients, random_parameters
from torch import Tensor

from optim_kernels import NSConfig, TritonMuon, reference

pytest.importorskip("triton")
from optim_kernels._newton_schulz import chain as hopper_chain
from optim_kernels._newton_schulz import job_launches
from optim_kernels._newton_schulz.int8_start import STEP_LAUNCHES
from optim_kernels._newton_schulz.tiles import FULL_PRECISION
from optim_kernels.functional import _muon_products
from optim_kernels.functional._muon_families import Batch, num_moves
from optim_kernels.functional._muon_products import FamilyProducts

M, FIRST = 12, 3
SHAPES = ((2, 40), (1, 24), (3, 31))
CONFIGS = [
    NSConfig(method="standard"),
    NSConfig(coefficients="cubic5", method="standard"),
    NSConfig(method="gram"),
    NSConfig(method="gram", restarts=(1, 4), steps=8),
    NSConfig(coefficients="aol4", steps=4, method="gram"),
    NSConfig(coefficients="aol4", steps=4, method="standard"),
    NSConfig(steps=1),
]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What each of the products is launched with."""
    launched: list[Any] = []

    def product(*operands: Tensor, symmetric: bool, **options: Any) -> Tensor:
        launched.append((symmetric, *operands, options))
        return by_torch(*operands, symmetric=symmetric, **options)

    monkeypatch.setattr(job_launches, "symmetric_product", partial(product, symmetric=True))
    monkeypatch.setattr(job_launches, "general_product", partial(product, symmetric=False))
    return launched


@pytest.mark.parametrize(("in_pairs", "in_factors"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.coefficients}-{c.steps}-{c.method}")
def test_each_matrix_is_brought_to_norm_1_and_orthogonalized(
    monkeypatch: pytest.MonkeyPatch, products: list[Any], config: NSConfig, in_pairs: bool, in_factors: bool
) -> None:
    """With the last products and without them; a product of factors is one launch for all shapes."""
    monkeypatch.setattr(_muon_products, "takes_pairs", lambda *_: in_pairs)
    firsts = accumulate((count for count, _ in SHAPES), initial=FIRST)
    family, given = [], []
    for first, (count, n) in zip(firsts, SHAPES):
        n += M * in_factors
        x = torch.randn(count, M, n, dtype=torch.float64, device=DEVICE)
        given.append(x.clone())
        moves, other = num_moves(M, n, config, in_factors=in_factors), torch.full_like(x, torch.nan)
        family.append(Batch(first, (count, M, n), x, other, FULL_PRECISION, count, moves, in_factors))
    norms = torch.cat([torch.ones(FIRST, device=DEVICE), *(x.norm(dim=(1, 2)) for x in given)])
    tables: Any = SimpleNamespace(scales=1 / norms, squared_scales=norms**-2)
    expected = [reference.newton_schulz(x, config.triples, row_factors=config.row_factors) for x in given]

    # row factors are in fp32, and diagonals that are kept apart
    atol = 1e-6 if config.row_factors or in_factors else 1e-9
    own = FamilyProducts(family, config, tables, "auto")
    own.run()
    # the factors of each shape's rows, and the products with them
    of_rows = 3 * len(SHAPES) * config.row_factors
    assert len(products) == own.count - of_rows
    assert all(options["out"].data_ptr() not in {a.data_ptr(), b.data_ptr()} for _, a, b, options in products)
    for batch, wanted in zip(family, expected):
        last = batch.other if batch.num_moves % 2 else batch.x
        torch.testing.assert_close(last, wanted, atol=atol, rtol=0)

    for batch, x in zip(family, given):
        batch.x.copy_(x)
    products.clear()
    lasts = own.run_but_last()
    assert len(products) == own.count - of_rows - len(SHAPES)
    for last, batch, wanted in zip(lasts, family, expected, strict=True):
        assert last.batch is batch
        assert (last.betas is not None) == (in_factors and config.restarts_in_factors(M, 4 * M))
        of_c = {"c": last.c, "beta": last.beta, "betas": last.betas}
        options = {"alpha": last.alpha, "scale": last.scale, "out": last.out, **of_c}
        torch.testing.assert_close(by_torch(last.s, last.x, **options), wanted, atol=atol, rtol=0)


def test_launches_of_a_first_step_in_int8_are_those_of_each_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_muon_products, "starts_in_int8", lambda *_: True)
    x = torch.zeros(2, 4, 8)
    family = [Batch(first, (2, 4, 8), x, x, FULL_PRECISION, 2, 2) for first in (0, 2)]
    products = FamilyProducts(family, NSConfig(steps=2), SimpleNamespace(), "auto")
    assert products.count == 4 * STEP_LAUNCHES + 2 + 1 + 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
@pytest.mark.parametrize("workspace", [None, 0.6], ids=["whole", "in-parts"])
@pytest.mark.parametrize(
    "options",
    [{}, {"beta2": 0.9}, {"renormalize": True, "row_equilibrate": True}, {"ns_coefficients": "cubic5"}],
    ids=["update", "normuon", "renormalized", "cubic"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_step_of_few_matrices_on_an_h200(
    monkeypatch: pytest.MonkeyPatch,
    products: list[Any],
    dtype: torch.dtype,
    options: dict[str, Any],
    workspace: float | None,
) -> None:
    """Long ones restart in factors, others of their short side by X; what is around the products is interpreted."""
    shapes = [(72, 216), (240, 72), (72, 112), (240, 72), (136, 408), (16, 48)]
    params, wanted = (random_parameters(*shapes, dtype=dtype, scale=0.1) for _ in range(2))
    common: dict[str, Any] = {"lr": 0.1, "ns_method": "gram", **options}
    plain = TritonMuon(wanted, impl="torch", ns_dtype=torch.float32, **common)
    for seed in range(2):
        give_gradients(*wanted, seed=seed)
        plain.step()

    on_an_h200(monkeypatch)
    monkeypatch.setattr(hopper_chain, "_can_chain", lambda *_: True)
    monkeypatch.setattr(hopper_chain, "num_multiprocessors", lambda _: 132)
    optimizer = TritonMuon(params, impl="triton", ns_dtype=torch.float16, ns_workspace_mb=workspace, **common)
    for seed in range(2):
        give_gradients(*params, seed=seed)
        optimizer.step()
    families = [family for plan in optimizer.plans() for family in plan._launches._families]
    found = [[(batch.shape, batch.in_factors) for batch in family] for family in families]
    assert found == [
        [((1, 16, 48), True)],
        [((1, 72, 112), False)],
        [((1, 72, 216), True), ((2, 72, 240), True)],
        [((1, 136, 408), True)],
    ]
    assert len(optimizer.plans()) == (1 if workspace is None else 2)
    tiles = {how for plan in optimizer.plans() for how in plan.tiles.values()}
    # the only product with a long X is the last one
    assert tiles == {"128×128 alone / 64×64 alone / 64×128", "64×64 alone / 64×64 alone / 128×128"}
    assert (families[2][0].x is families[2][0].other) == (not {"beta2", "renormalize"} & {*options})
    for p, q in zip(params, wanted, strict=True):
        torch.testing.assert_close(p, q, atol=1e-3 if dtype == torch.float32 else 4e-3, rtol=0)


def test_tiles_by_shape_take_no_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their operands are those of a larger batch."""
    monkeypatch.setattr(_muon_products, "takes_pairs", lambda *_: True)
    x = torch.zeros(1, 4, 8)
    family = [Batch(0, (1, 4, 8), x, x, FULL_PRECISION, 1, 1)]
    config = NSConfig(method="gram", restarts=(), steps=3)
    counts = [FamilyProducts(family, config, SimpleNamespace(), tiles).count for tiles in ("auto", "shape")]
    assert counts == [10, 11]
