"""Newton–Schulz in one launch on a GPU: against fp64, alone and inside a step, captured, with NaN."""

import json
import re
import sys
from typing import Any

import pytest
import torch
from compiling_apart import lines_of
from random_tensors import DEVICE, assert_same_bits
from torch import nn

from optim_kernels import NSConfig, TritonMuon, newton_schulz, reference
from optim_kernels.muon_groups import MuonEntry, MuonPlanner
from optim_utils.param_groups import MatrixView

pytest.importorskip("triton")
from optim_kernels._kernels.normalize import Start
from optim_kernels._newton_schulz import chain, tile_choice
from optim_kernels._newton_schulz.chain_jobs import Ending
from optim_kernels._newton_schulz.copy_engine import empty_matrices
from optim_kernels._newton_schulz.tile_choice import has_gluon
from optim_kernels._triton import triton
from optim_kernels.functional import _muon_families

# In a process of its own, for the interpreter of the other tests replaces what would be compiled; one process for all
# variants, for importing takes as long as compiling one.
COMPILE = """
import json
import subprocess
import sys
import traceback
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from optim_kernels._hopper.chain_kernel import chain_kernel
from ptx import fused_with_sums
from sass import disassembled, unwritten_reads

def block(rows, columns):
    layout = gl.NVMMASharedLayout.get_default_for([1, rows, columns], gl.float16)
    return f"tensordesc<fp16[1, {rows}, {columns}],{layout!r}>"

def kind(name):
    if name.startswith("right_load"):
        return block(64, 128)
    if "_load" in name or "_desc" in name:
        return block(128, 64 if "_load" in name else 128)
    if name in ("entries", "matrices", "state"):
        return "*i32"
    return {"total": "i32", "counter": "i32", "side": "i32", "addresses": "*i64"}.get(name, "*fp32")

def compiled(panels, ending, parameter, master):
    constants = dict(DEPTH=64, STAGES=5, PANELS=panels, ENDING=ending)
    constants |= dict(P_DTYPE=getattr(tl, parameter), MASTER_KIND=master, CAUTIOUS=master != 0)
    names = [parameter.name for parameter in chain_kernel.params]
    signature = {name: "constexpr" if name in constants else kind(name) for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(chain_kernel, signature, values)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    path = Path(sys.argv[1])
    path.write_text(made.asm["ptx"])
    command = [get_ptxas(90).path, "-arch=sm_90a", "-v", path, "-o", path.with_suffix(".cubin")]
    messages = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    code = disassembled(path.with_suffix(".cubin"))
    fused = fused_with_sums(made.asm["ptx"])
    return messages, made.metadata.shared, code.count("R2UR"), code.count("HGMMA"), unwritten_reads(code), fused

for variant in json.loads(sys.argv[2]):
    try:
        print(json.dumps(compiled(*variant)))
    except Exception:
        print(json.dumps(traceback.format_exc()))
"""
# In a process of its own, for a launch that does not end takes its process with it.
LAUNCH = """
import json
import sys

import torch

from optim_kernels import newton_schulz

x = torch.randn(*map(int, sys.argv[1:]), device="cuda").half()
expected = newton_schulz(x)
is_equal = True
for _ in range(8):
    for _ in range(500):
        result = newton_schulz(x)
    is_equal &= torch.equal(result, expected)
print(json.dumps(is_equal))
"""
VARIANTS = [
    (False, Ending.STORE, "float16", 0),
    (True, Ending.UPDATE, "bfloat16", 2),
    (True, Ending.UPDATE, "float32", 0),
    (True, Ending.SQUARES, "bfloat16", 0),
]
# ptxas's messages, shared memory, moves, products, reads of nothing, sums multiplied in a fused addition
Compiled = tuple[str, int, int, int, list[str], list[str]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Compiled | str]:
    """Of every variant what COMPILE finds, or why it does not."""
    path = tmp_path_factory.mktemp("chain") / "chain.ptx"
    variants = json.dumps([(panels, ending.value, *rest) for panels, ending, *rest in VARIANTS])
    return lines_of(COMPILE, str(path), variants, count=len(VARIANTS))


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6) or sys.platform != "linux", reason="needs Triton 3.6"
)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant)))
def test_the_chain_compiles_for_hopper(variant: tuple[bool, Ending, str, int], compiled: list[Compiled | str]) -> None:
    """Within its shared memory, little spilled, products wait neither for one another nor for their own addresses.

    And its sums are rounded as in other kernels.
    """
    found = compiled[VARIANTS.index(variant)]
    assert not isinstance(found, str), found[-3000:]
    messages, shared, moves, products, unwritten, fused = found
    assert shared <= 232_448  # bytes that a program on Hopper may have
    assert "serialized" not in messages
    assert unwritten == []
    assert fused == []
    # addresses of operands stay in uniform registers: four moves a product where ptxas sees warps part (`pairs.rank`)
    assert moves < products
    # by ptxas as it is: the level of register allocation that Triton 3.9 asks for spills up to 280 bytes
    (spilled,) = re.findall(r"(\d+) bytes spill stores", messages)[-1:]
    # a tile's numbers, between its loops; most with Triton 3.9 (3.8 has 304 bytes of the last)
    assert int(spilled) <= {Ending.STORE: 4, Ending.UPDATE: 52, Ending.SQUARES: 76}[variant[1]]


def needs_hopper() -> None:
    if not has_gluon(None):
        pytest.skip("needs Hopper and Triton 3.6")


@pytest.mark.parametrize("eps_mode", ["clamp", "add"])
def test_divisors(eps_mode: str) -> None:
    """1/N and 1/N² of every matrix: tiny ones, a zero one (1 and 1), one with a NaN; and the state is cleared."""
    g = torch.randn(4, 37, 300, device=DEVICE)
    g[1] *= 1e-3
    g[2] = 0
    g[3, 5, 5] = float("nan")
    g = g.half()
    state = torch.full((5,), 7, dtype=torch.int32, device=DEVICE)
    config = NSConfig(norm_scale=1.02, eps=0.5, eps_mode=eps_mode)
    found = Start(g, None, config, has_state=True)(g, state=state)
    assert found is not None
    scaled = 1.02 * g.double().square().sum((1, 2)).sqrt()
    divisor = scaled + 0.5 if eps_mode == "add" else scaled.clamp(min=0.5)
    expected = torch.stack([1 / divisor, 1 / divisor**2])
    expected[:, 2] = 1.0
    torch.testing.assert_close(found.double()[:, :3], expected[:, :3], rtol=1e-6, atol=0)
    assert found[:, 3].isnan().all()
    assert state.tolist() == [0] * 5
    # beside a copy, from other strides
    transposed = g.mT.contiguous().mT
    copy = empty_matrices(*g.shape, like=g)
    again = Start(transposed, copy, config, is_scaled=True)(transposed, copy)
    torch.testing.assert_close(again, found, equal_nan=True)
    torch.testing.assert_close(copy, g, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (12, 768, 768),
        (40, 640, 1000),
        (40, 300, 1300),
        (30, 1000, 300),
        (16, 1000, 1040),
        (2, 1600, 1600),
        (2, 2048, 2048),
        (2, 2200, 5000),
    ],
    ids=str,
)
def test_one_launch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Right against fp64, the same bits twice and in a graph, both iterations, inputs left alone."""
    needs_hopper()
    x = torch.randn(shape, device="cuda").to(dtype)
    m, n = sorted(shape[-2:])
    before = x.clone()
    assert chain.takes_chain(shape[0], m, n, NSConfig(), torch.float16, x.device)
    for name, method in (("keller", "standard"), ("you", "gram"), ("cubic5", "standard")):
        result = newton_schulz(x, coefficients=name, method=method)
        expected = reference.newton_schulz(x.double(), NSConfig(coefficients=name).triples)
        # Gram is meant for wide matrices
        limit = (5e-3 if n < 1.5 * m and method == "gram" else 2.2e-3) + (2e-3 if dtype == torch.bfloat16 else 0)
        errors = (result.double() - expected).norm(dim=(-2, -1)) / expected.norm(dim=(-2, -1))
        assert errors.max() <= limit
        assert torch.equal(result, newton_schulz(x, coefficients=name, method=method))
    assert torch.equal(x, before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = newton_schulz(x, coefficients="cubic5", method="standard")
    for _ in range(2):
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, result)


@pytest.mark.gpu
def test_one_launch_keeps_matrices_apart() -> None:
    """NaN and zero stay where they are, scale does not matter, and neither does who else is in the batch."""
    needs_hopper()
    x = torch.randn(16, 768, 768, device="cuda").half()
    alone = newton_schulz(x)
    x[3, 5, 5] = float("nan")
    x[5] = 0
    x[6] *= 2.0**-9
    x[7] *= 2.0**9
    result = newton_schulz(x)
    assert result[3].isnan().all()
    assert (result[5] == 0).all()
    others = [i for i in range(16) if i not in (3, 5, 6, 7)]
    assert torch.equal(result[others], alone[others])
    torch.testing.assert_close(result[6:8], alone[6:8], rtol=0, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(357, 64, 64), (200, 256, 512), (140, 136, 700)], ids=str)
def test_thousands_of_launches(shape: tuple[int, ...]) -> None:
    """Of short tiles, so that programs draw, wait and post as often as they can: all end, with the same bits."""
    needs_hopper()
    assert lines_of(LAUNCH, *map(str, shape), count=1, timeout=100) == [True]


@pytest.mark.gpu
def test_two_at_the_same_time() -> None:
    """On two streams, where neither may have all of the chip: both end, both are right."""
    needs_hopper()
    xs = [torch.randn(16, 512, 1536, device="cuda").half() for _ in range(2)]
    expected = [newton_schulz(x) for x in xs]
    streams = [torch.cuda.Stream() for _ in xs]
    torch.cuda.synchronize()
    results = []
    for _ in range(5):
        for stream, x in zip(streams, xs, strict=True):
            with torch.cuda.stream(stream):
                results.append(newton_schulz(x))
    torch.cuda.synchronize()
    for i, result in enumerate(results):
        assert torch.equal(result, expected[i % 2])


@pytest.mark.gpu
@pytest.mark.parametrize("master", [None, "fp32", "split16"])
@pytest.mark.parametrize("variant", ["torch", "nanochat-2026-07"])
@pytest.mark.parametrize("m", [512, 576])
def test_step(m: int, variant: str, master: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with one launch for each short side equal those with one for each product, to rounding; few launches.

    Sides that tiles divide and that they do not, tall, wide and square, and lengths that no panel divides.
    """
    needs_hopper()
    shapes = [(m, m)] * 24 + [(1032, m)] * 20 + [(m, 2056)] * 20 + [(m, m + 8)] * 3
    runs = []
    for chained in (True, False):
        if not chained:
            for choice in ("takes_step_chain", "steps_in_factors"):
                monkeypatch.setattr(_muon_families, choice, lambda *_, **__: False)
        torch.manual_seed(0)
        params = [nn.Parameter(0.02 * torch.randn(shape, device="cuda").bfloat16()) for shape in shapes]
        optimizer = TritonMuon([{"params": params, "variant": variant, "lr": 0.02, "master_weights": master}])
        for _ in range(4):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        runs.append((params, sum(plan.launches for plan in optimizer.plans())))
    (params, launches), (plain, more_launches) = runs
    assert launches <= 5 < more_launches
    for p, q in zip(params, plain, strict=True):
        assert (p.float() - q.float()).norm() <= 1e-3 * q.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "m", "count", "most"),
    [
        ("keller", 512, 24, 1.2),
        ("polar_express", 512, 24, 1.2),
        ("keller", 1280, 8, 1.2),
        ("polar_express", 1280, 8, 1.3),
    ],
)
def test_a_restart_in_factors_is_as_accurate_as_one_by_x(name: str, m: int, count: int, most: float) -> None:
    """On singular values 1/i and 1/i², which feel every digit that R and Q₁R lack; a lone matrix restarts by X."""
    needs_hopper()
    n, config = 4 * m, NSConfig(coefficients=name)
    assert config.restarts_in_factors(m, n)
    i = torch.arange(1, m + 1, dtype=torch.float64, device="cuda")
    for values in (1 / i, 1 / i**2):
        u, v = (torch.linalg.qr(torch.randn(count, size, m, dtype=torch.float64, device="cuda"))[0] for size in (m, n))
        x = ((u * values) @ v.mT).half()
        expected = reference.newton_schulz(x.double(), config.triples)
        batch = newton_schulz(x, coefficients=name)
        alone = torch.stack([newton_schulz(each, coefficients=name) for each in x[:4]])
        error = (batch - expected).norm() / expected.norm()
        assert error <= most * (alone - expected[:4]).norm() / expected[:4].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(24, 512, 512), (20, 640, 1000), (12, 768, 768), (3, 2048, 2048)], ids=str)
def test_a_chain_gives_the_bits_of_launches(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """In the standard iteration, which restarts nowhere; alone a matrix takes other tiles besides."""
    needs_hopper()
    count, m, n = shape
    x = torch.randn(shape, device="cuda").to(dtype)
    options: dict[str, Any] = {"method": "standard", "compute_dtype": dtype}
    config = NSConfig(method="standard", dtype=dtype)
    assert chain.takes_chain(count, m, n, config, dtype, x.device)
    assert not chain.takes_chain(1, m, n, config, dtype, x.device)
    results = newton_schulz(x, **options)
    for each, result in zip(x, results, strict=True):
        assert torch.equal(newton_schulz(each, **options), result)


@pytest.mark.gpu
def test_a_restart_in_factors_gives_the_bits_of_launches() -> None:
    """A lone matrix of this shape restarts in factors launch by launch."""
    needs_hopper()
    x = torch.randn(2, 2048, 8192, device="cuda").half()
    assert chain.takes_chain(*x.shape, NSConfig(), x.dtype, x.device)
    assert tile_choice.takes_factors(1, 2048, 8192, x.dtype, x.device)
    for each, result in zip(x, newton_schulz(x), strict=True):
        assert torch.equal(newton_schulz(each), result)


@pytest.mark.gpu
def test_a_long_matrix_is_the_same_alone_and_among_others() -> None:
    """To the last bit, so that it does not matter how many ranks share the matrices of a model."""
    needs_hopper()
    start, grad = (torch.randn(512, 2056, device="cuda").bfloat16() for _ in range(2))
    results = []
    # launch by launch, in a chain, and beside others
    for others in ([], [(512, 2056)] * 4, [(512, 2056)] * 20, [(512, 512), (1032, 512)], [(512, 512)] * 20):
        params = [
            nn.Parameter(start.clone()),
            *(nn.Parameter(torch.randn(s, device="cuda").bfloat16()) for s in others),
        ]
        optimizer = TritonMuon(params, lr=0.02)
        for _ in range(2):
            for p in params:
                p.grad = grad.clone() if p is params[0] else torch.randn_like(p)
            optimizer.step()
        results.append(params[0].detach())
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.gpu
def test_multiprocessors_that_stay_free() -> None:
    """A launch on fewer of them has the same bits, and ends beside one that has what it left."""
    needs_hopper()
    others = torch.cuda.get_device_properties(0).multi_processor_count
    start, grads = ([torch.randn(512, n, device="cuda").bfloat16() for n in [512] * 24 + [2056] * 6] for _ in range(2))
    entries, results = [], []
    for spare in (0, 1, 40, others - 2, others + 1):
        planner = MuonPlanner(spare=spare)
        params = [p.clone() for p in start]
        (group,) = TritonMuon(params).param_groups
        made = [
            MuonEntry(p, grad, {"momentum_buffer": torch.zeros_like(p)}, MatrixView.identity(p.shape), number)
            for number, (p, grad) in enumerate(zip(params, grads, strict=True))
        ]
        entries.append((planner, group, made))
        results.append(params)
    streams = [torch.cuda.Stream() for _ in entries]
    torch.cuda.synchronize()
    for _ in range(3):
        for stream, (planner, group, made) in zip(streams, entries, strict=True):
            with torch.cuda.stream(stream):
                planner.step([(group, made)])
    torch.cuda.synchronize()
    for params in results[1:]:
        assert_same_bits(params, results[0])


@pytest.mark.gpu
def test_found_inf_in_a_step() -> None:
    """Nothing is written, and the step after it is as if there had been none; the same bits in every run."""
    needs_hopper()
    runs = []
    for skipped in (False, True, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(512, n, device="cuda").bfloat16()) for n in [512] * 24 + [1032] * 20]
        optimizer = TritonMuon(params, lr=0.02)
        grads = [[torch.randn_like(p) for p in params] for _ in range(3)]
        for number, its in enumerate(grads):
            for p, grad in zip(params, its, strict=True):
                p.grad = grad
            optimizer.step()
            if skipped and number == 1:
                before = [p.detach().clone() for p in params]
                for p in params:
                    p.grad = torch.full_like(p, float("nan"))
                optimizer.found_inf = torch.ones((), device="cuda")
                optimizer.step()
                optimizer.found_inf = None
                assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        runs.append(params)
    for p, q, again in zip(*runs, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(q, again)
