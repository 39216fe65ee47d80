"""What few matrices launch on Hopper, on any machine: kernels are replaced by their formulas, in fp64 on a CPU.

So the order of products, their buffers, scales and arguments are those of a GPU; what kernels compute is tested there.
"""

import importlib.util
import json

import pytest
from compiling_apart import lines_of

triton = pytest.importorskip("triton")

# in a process of its own, for the interpreter that other tests use takes other tiles
RUN = """
import json
import sys
from types import SimpleNamespace
from unittest import mock

import torch

from optim_kernels import NSConfig, reference
from optim_kernels._newton_schulz import chain, plan, product_launches, tile_choice
from optim_kernels._newton_schulz.chain_jobs import Ending
from optim_kernels._triton import Launch
from optim_kernels.functional._muon_families import families_of
from optim_kernels.functional._muon_products import FamilyProducts

launched = []
# what the launch before has written, and whether the next one starts only when all before that one is complete
before = SimpleNamespace(written=set(), late=False)

def launch(self, device, arguments):
    name, names = self._kernel.__name__.removesuffix("_kernel"), [parameter.name for parameter in self._kernel.params]
    given = dict(zip(names, [*arguments, *self._constants], strict=True))
    ahead = given.get("AHEAD", False)
    launched.append((name, ahead))
    # as the kernel is written for
    if name == "lone":
        assert self._options.get("launch_pdl", False) == given["OVERLAP"]
        assert self._options.get("maxnreg") == (128 if given["TALL"] == 1 else None)
    if ahead:
        assert before.late and before.written.isdisjoint(each.data_ptr() for each in given["a_desc"].base)
    {"squares": squares, "divisors": divisors, "lone": lone, "general": general}[name](**given)
    results = [given[each].base for each in ("d_desc", "q_desc") if each in given]
    before.written = {each.data_ptr() for result in results for each in result}
    before.late = given.get("LATE", name == "general")

def squares(g, partials, x, COPIES, **_):
    partials.view(len(g), -1).zero_()[:, 0] = g.double().square().sum((1, 2))
    if COPIES:
        x.copy_(g)

def divisors(partials, inverses, parts, norm_scale, eps, ADD_EPS, **_):
    norm = norm_scale * partials.view(-1, parts).sum(1).sqrt()
    norm = norm + eps if ADD_EPS else norm.clamp_min(eps)
    inverses.copy_(torch.stack([1 / norm, norm**-2]))

def general(a_desc, b_desc, c_desc, d_desc, scale, K, alpha, beta, HAS_C, HAS_SCALE, **_):
    a, b, d = a_desc.base, b_desc.base, d_desc.base
    assert K == a.shape[2]
    wide = alpha * a.double() @ b.double()
    if HAS_C:
        wide += beta * c_desc.base.double()
    if HAS_SCALE:
        wide *= scale.double()[:, None, None]
    d.copy_(wide)
    return wide

def lone(a_desc, b_desc, d_desc, q_desc, q, scale, inverses, omega, SYMMETRIC, PARTS, **given):
    a, b, d = a_desc.base, b_desc.base, d_desc.base
    assert (a is b) == given["SAME"]
    if PARTS:
        assert PARTS >= given["parts"] and given["HAS_SCALE"]
        divisors(scale, inverses, given["parts"], given["norm_scale"], given["eps"], given["ADD_EPS"])
        scale = inverses[1]
    if SYMMETRIC:
        b_desc = SimpleNamespace(base=b.repeat(len(a) // len(b), 1, 1).mT)
    wide = general(a_desc, b_desc, d_desc=d_desc, scale=scale, **given)
    if SYMMETRIC:
        d.copy_(d.tril() + d.tril(-1).mT)
        wide = wide.tril() + wide.tril(-1).mT
    if given["HAS_Q"]:
        q_desc.base.copy_(d.double() + omega * torch.eye(len(d[0])))
    if given["LOW"]:
        q_desc.base.copy_(wide - d)
    if given["APART"]:
        q.view(d.shape[:2]).copy_(wide.diagonal(dim1=1, dim2=2))
        d.diagonal(dim1=1, dim2=2).zero_()

def steps(shapes, config):
    # the largest error of the matrices of a Muon step; what comes before and after the products is computed here
    matrices = [SimpleNamespace(shape=tuple(shape)) for shape in shapes]
    families, chains = families_of(
        matrices, config, torch.float16, torch.device("cpu"), ending=Ending.SQUARES, tiles="auto"
    )
    assert not chains
    batches, errors = [batch for family in families for batch in family], []
    for batch in batches:
        batch.x.copy_(torch.randn(batch.shape) * 0.1)
        batch.other.fill_(torch.nan)
    norms = torch.cat([batch.x.double().norm(dim=(1, 2)) for batch in batches])
    tables = SimpleNamespace(scales=(1 / norms).float(), squared_scales=(norms**-2).float())
    expected = {batch.first: reference.newton_schulz(batch.x.double(), config.triples) for batch in batches}
    for family in families:
        products, before = FamilyProducts(family, config, tables, "auto"), len(launched)
        for last in products.run_but_last():
            count, m, _ = last.x.shape
            o = last.alpha * last.s.double() @ last.x.double()
            if last.c is not None:
                o += (last.beta if last.betas is None else last.betas[: count * m].view(count, m, 1)) * last.c
            if last.scale is not None:
                o *= last.scale[:, None, None]
            wanted = expected[last.batch.first]
            errors.append(float((o - wanted).norm() / wanted.norm()))
        assert len(launched) - before == products.count - len(family)
    return max(errors)

for case in sys.argv[1:]:
    num_sms, shape, options = json.loads(case)
    config = NSConfig(dtype=torch.float16, **options)
    launched.clear()
    before.late = False
    # kept for one number of multiprocessors
    for kept in (product_launches._symmetric_launch, product_launches._general_launch):
        kept.cache_clear()
    with (
        mock.patch.object(tile_choice, "has_gluon", return_value=True),
        mock.patch.object(tile_choice, "num_multiprocessors", return_value=num_sms),
        mock.patch.object(tile_choice, "shared_bytes", return_value=232_448),
        mock.patch.object(tile_choice, "can_overlap", return_value=True),
        mock.patch.object(chain, "num_multiprocessors", return_value=num_sms),
        mock.patch.object(chain, "_can_chain", return_value=True),
        mock.patch.object(Launch, "_first", launch),
    ):
        if isinstance(shape[0], list):
            print(json.dumps([steps(shape, config), launched]))
            continue
        x = torch.randn(shape).half() * 30
        expected = reference.newton_schulz(x.double(), config.triples, eps=config.eps, eps_mode=config.eps_mode)
        result = plan.plan_for(x, config)(x).double()
    print(json.dumps([float((result - expected).norm() / expected.norm()), launched]))
"""
# multiprocessors, shape or those of a step, options; launches of the start, of products, and of these those that read
# ahead
CASES = [
    (132, [256, 1024], {}, 1, 17, 8),
    (132, [1024, 256], {}, 1, 17, 8),
    (132, [2, 300, 520], {"eps_mode": "add"}, 1, 17, 8),
    (132, [256, 1024], {"restarts": [], "method": "gram"}, 1, 18, 11),
    # halves of tiles; of two products in one launch, which 20 multiprocessors have no room for
    (24, [384, 600], {}, 1, 17, 0),
    (20, [384, 600], {}, 1, 18, 9),
    (132, [2, 200, 200], {}, 1, 15, 0),
    # one tile, whose norm is found by a launch
    (132, [60, 90], {}, 2, 15, 0),
    # read across its rows, so copied
    (132, [3, 264, 101], {"steps": 3}, 1, 9, 0),
    # steps of such matrices, whose last products are left to the update; a long one alone, and beside others
    (132, [[256, 1024]], {}, 0, 20, 10),
    (132, [[256, 256], [256, 512], [256, 520], [256, 1024], [256, 1024], [256, 1280]], {}, 0, 54, 18),
    (132, [[256, 1024], [264, 800], [264, 1000]], {"coefficients": "polar_express_gram"}, 0, 41, 20),
    (40, [[300, 600], [300, 608]], {}, 0, 20, 0),
]


@pytest.fixture(scope="module")
def found() -> list[tuple[float, list[tuple[str, bool]]]]:
    """Of every case the error and the kernels launched, and whether they read ahead."""
    return lines_of(RUN, *(json.dumps(case[:3]) for case in CASES), count=len(CASES))


@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6)
    or importlib.util.find_spec("triton.experimental.gluon") is None,
    reason="needs Gluon of Triton 3.6",
)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{shape} {options}" for _, shape, options, *_ in CASES])
def test_launches_on_hopper_compute_the_reference(
    number: int, found: list[tuple[float, list[tuple[str, bool]]]]
) -> None:
    """And none reads ahead what the launch before has written."""
    error, launched = found[number]
    names, ahead = zip(*launched, strict=True)
    assert error <= 4e-3
    *_, of_start, of_products, of_ahead = CASES[number]
    assert list(names[:of_start]) == ["squares", "divisors"][:of_start]
    assert len(launched) == of_start + of_products
    assert set(names[of_start:]) <= {"lone", "general"}
    assert sum(ahead) == of_ahead
