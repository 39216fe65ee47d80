"""Newton–Schulz by kept plans: buffers, every kind of input and result, replays, the operator."""

import gc
from collections import OrderedDict
from functools import partial
from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
from h200 import on_an_h200
from plain_products import by_torch
from random_tensors import DEVICE, relative_error
from torch import Tensor
from torch.autograd import forward_ad

from optim_kernels import NSConfig, newton_schulz, orthogonalization, reference

pytest.importorskip("triton")

from optim_kernels._kernels.normalize import Norm
from optim_kernels._kernels.normalize import apply_row_factors as apply_row_factors_by_kernels
from optim_kernels._newton_schulz import job_launches, plan
from optim_kernels._newton_schulz.buffers import Buffers
from optim_kernels._newton_schulz.chain_jobs import Job, Kind, jobs_of
from optim_kernels._newton_schulz.coefficients import COEFFICIENTS
from optim_kernels._newton_schulz.copy_engine import as_batch
from optim_kernels._newton_schulz.iterations import apply_row_factors
from optim_kernels._newton_schulz.product_launches import symmetric_product
from optim_kernels._newton_schulz.tile_choice import finds_norm, has_gluon, takes_factors, takes_pairs
from optim_kernels.orthogonalization import _operator, _taken_apart, _values
from optim_utils.testing import run_ranks

gpu = pytest.mark.gpu


def expected_of(x: Tensor, **options: object) -> Tensor:
    config = NSConfig(**options)
    return reference.newton_schulz(
        x.double(), config.triples, norm_scale=config.norm_scale, eps=config.eps, eps_mode=config.eps_mode
    )


@pytest.mark.parametrize("shape", [(20, 40), (40, 20), (2, 24, 24), (2, 2, 9, 33), (1, 7), (7, 1)], ids=str)
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_kernels_compute_the_reference(shape: tuple[int, ...], method: str) -> None:
    x = torch.randn(shape, device=DEVICE)
    result = newton_schulz(x, method=method, compute_dtype=torch.float32, impl="triton")
    assert relative_error(result, expected_of(x)) <= 2e-5
    assert (result if shape[-2] <= shape[-1] else result.mT).is_contiguous()


def written_by(job: Job) -> set[int]:
    return set() if job.kind is Kind.RECTANGLE else {job.d, job.d + job.twice, job.q}


@pytest.mark.parametrize("options", [{}, {"in_pairs": True}, {"in_factors": True}], ids=str)
@pytest.mark.parametrize("coefficients", [*COEFFICIENTS, (1.5, -0.5, 0.0)], ids=str)
def test_what_a_product_reads_ahead_is_complete(coefficients: Any, options: dict[str, bool]) -> None:
    """For every list of jobs: the launches that have written an operand have ended for sure when it is read."""
    found = 0
    for steps, restarts, method in product(range(11), [None, "accurate", (), (1,), (3, 4)], ["standard", "gram"]):
        try:
            config = NSConfig(coefficients=coefficients, steps=steps, restarts=restarts, method=method)
        except ValueError:
            continue  # a set for one number of steps
        jobs = jobs_of(config, 256, 1024, **options)
        ahead = job_launches._reads_ahead(jobs)
        # how many launches have ended for sure when this one begins: the first may begin before the norm's have
        ended = -1
        for number, job in enumerate(jobs):
            if number > 0 and ahead[number] and jobs[number - 1].kind not in (Kind.RECTANGLE, Kind.FULL):
                ended = number - 1
            if ahead[number]:
                writers = [n for n in range(number) if written_by(jobs[n]) & {job.a, job.a + job.twice}]
                assert 0 <= max(writers, default=-1) < ended
                found += 1
        assert len(ahead) == len(jobs) + 1
    assert found > 0


def test_what_may_not_be_complete_is_not_read_ahead() -> None:
    first, last = Job(Kind.SQUARE, 0, 0, 1), Job(Kind.SQUARE, 0, 1, 3)
    for before, may in [
        (Job(Kind.SQUARE, 0, 1, 2), True),
        (Job(Kind.SQUARE, 1, 1, 0), False),
        (Job(Kind.SQUARE, 1, 1, 2, q=0), False),
        # lets the next launch start when it begins itself, also where it writes X alone
        (Job(Kind.RECTANGLE, 1, 0, 1), False),
        (Job(Kind.FULL, 1, 1, 2), False),
    ]:
        assert job_launches._reads_ahead([first, before, last]) == [False, False, may, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["rows", "columns", "gaps", "unaligned"])
def test_dtypes_and_strides(dtype: torch.dtype, layout: str) -> None:
    """fp16 rows are read where they are; the input stays as it was."""
    x = torch.randn(2, 24, 40, device=DEVICE).to(dtype)
    if layout == "columns":
        x = x.mT.contiguous().mT
    elif layout == "gaps":
        x = torch.empty(2, 48, 80, dtype=dtype, device=DEVICE)[:, ::2, ::2].copy_(x)
    elif layout == "unaligned":
        x = torch.empty(2 * 24 * 40 + 1, dtype=dtype, device=DEVICE)[1:].view(2, 24, 40).copy_(x)
    before = x.clone()
    result = newton_schulz(x, compute_dtype=torch.float16, impl="triton")
    assert result.dtype == dtype
    assert torch.equal(x, before)
    assert relative_error(result, expected_of(x)) <= (6e-3 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_few_steps(steps: int) -> None:
    """Where the last X is: in the result for fp16, in the plan's buffers else."""
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(3, 16, 24, device=DEVICE).to(dtype)
        for method in ("standard", "gram"):
            result = newton_schulz(x, steps, method=method, compute_dtype=torch.float16, impl="triton")
            assert relative_error(result, expected_of(x, steps=steps)) <= 2e-3


@pytest.mark.parametrize("name", ["polar_express", "cubic5", "aol4"])
def test_sets(name: str) -> None:
    steps = 4 if name == "aol4" else 5
    x = torch.randn(2, 20, 50, device=DEVICE)
    for method in ("standard", "gram"):
        options = {"coefficients": name, "method": method, "compute_dtype": torch.float32}
        result = newton_schulz(x, steps, impl="triton", **options)
        # on the CPU in fp64
        expected = newton_schulz(x.double().cpu(), steps, coefficients=name).to(DEVICE)
        assert relative_error(result, expected) <= 2e-5


LONE_SHAPES = [(640, 2000), (3, 264, 500), (60, 90)] if DEVICE == "cuda" else [(24, 40), (2, 20, 33)]


@pytest.mark.parametrize("options", [{}, {"restarts": (1, 4)}, {"restarts": (), "eps_mode": "add"}], ids=str)
@pytest.mark.parametrize("shape", LONE_SHAPES, ids=str)
def test_fewer_launches_compute_the_same(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Two products in one, and the norm found by the first one; by lone tiles, which plain products stand for here."""

    def plain(a: Tensor, b: Tensor, scale: Tensor | Norm | None = None, early: bool = False, **others: Any) -> Tensor:
        if isinstance(scale, Norm):
            norm = scale.norm_scale * scale.sums.view(-1, scale.parts).sum(1).sqrt()
            norm = norm + scale.eps if scale.adds_eps else norm.clamp_min(scale.eps)
            scale = scale.inverses.copy_(torch.stack([1 / norm, norm**-2]))[1]
        b = b if len(a) == len(b) else as_batch(torch.cat([b, b]))
        return symmetric_product(a, b, scale=scale, **others)

    is_hopper = DEVICE == "cuda" and has_gluon(None)
    x = torch.randn(shape, device=DEVICE).half() * 40
    config = NSConfig(method="gram", dtype=torch.float16, norm_scale=1.02, **options)
    results = []
    for found in (False, True):
        with (
            mock.patch.object(plan, "takes_pairs", return_value=found),
            # of one tile no norm is found
            mock.patch.object(plan, "finds_norm", return_value=found and (not is_hopper or shape[-2] > 64)),
            mock.patch.object(job_launches, "symmetric_product", symmetric_product if is_hopper else plain),
        ):
            own = plan.plan_for(x, config)
            # what is replayed is recorded at the second call
            results += [own(x), own(x), own(x)]
    assert all(torch.equal(results[0], result) for result in results)
    expected = expected_of(x, norm_scale=1.02, eps_mode=config.eps_mode)
    assert relative_error(results[0], expected) <= (4e-2 if options.get("restarts") == () else 5e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(24, 100), (2, 9, 36), (120, 24)], ids=str)
def test_a_restart_in_factors_launch_by_launch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """By plain products in place of Hopper's kernels; replays, which have diagonals of their own, too."""
    x = torch.randn(shape, device=DEVICE).to(dtype)
    config = NSConfig(method="gram", dtype=torch.float16)
    general = mock.Mock(side_effect=by_torch)
    with (
        mock.patch.object(plan, "takes_factors", return_value=True),
        mock.patch.object(plan, "finds_norm", return_value=False),
        mock.patch.object(plan, "takes_chain", return_value=False),
        mock.patch.object(job_launches, "symmetric_product", partial(by_torch, symmetric=True)),
        mock.patch.object(job_launches, "general_product", general),
    ):
        own = plan.plan_for(x, config)
        results = [own(x) for _ in range(3)]
        # on a GPU the second of them is recorded as well, and the third is replayed
        assert general.call_count == 3 * 4
        with mock.patch.object(plan, "takes_factors", return_value=False):
            by_x = plan.plan_for(x, config)(x)
    assert all(torch.equal(result, results[0]) for result in results)
    expected = expected_of(x)
    assert relative_error(results[0], expected) <= 2 * relative_error(by_x, expected) <= 5e-2


@pytest.mark.parametrize(("name", "steps"), [("aol4", 4), ("keller", 9), ("polar_express", 5)])
def test_matrices_with_row_factors_and_of_steep_sets_restart_by_x(name: str, steps: int) -> None:
    x = torch.randn(24, 100, device=DEVICE)
    config = NSConfig(coefficients=name, steps=steps, restarts=(2,), method="gram", dtype=torch.float16)
    with mock.patch.object(plan, "takes_factors", return_value=True):
        result = plan.plan_for(x, config)(x)
    assert torch.equal(result, plan.plan_for(x, config)(x))


@gpu
@pytest.mark.parametrize("name", ["keller", "polar_express_gram"])
@pytest.mark.parametrize("shape", [(2048, 8192), (7000, 1736)], ids=str)
def test_a_restart_in_factors_is_as_accurate_launch_by_launch(shape: tuple[int, int], name: str) -> None:
    """As one by X; the same bits from call to call, captured or not; on singular values alike, 1/i and 1/i²."""
    m, config = min(shape), NSConfig(coefficients=name)
    if not has_gluon(None):
        pytest.skip("needs Hopper and Triton 3.6")
    assert takes_factors(1, m, max(shape), torch.float16, torch.device(DEVICE))
    i = torch.arange(1, m + 1, dtype=torch.float64, device=DEVICE)
    for values in (torch.ones_like(i), 1 / i, 1 / i**2):
        u, v = (torch.linalg.qr(torch.randn(n, m, dtype=torch.float64, device=DEVICE))[0] for n in shape)
        x = (1e3 * (u * values) @ v.mT).half()
        expected = expected_of(x, coefficients=name)
        own = plan.plan_for(x, config)
        results = [own(x), own(x), own(x)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = own(x)
        graph.replay()
        assert all(torch.equal(result, captured) for result in results)
        with mock.patch.object(plan, "takes_factors", return_value=False):
            by_x = plan.plan_for(x, config)(x)
        # steeper sets restart by X
        assert torch.equal(by_x, captured) == (name != "keller")
        assert relative_error(captured, expected) <= 1.2 * relative_error(by_x, expected)


@pytest.mark.parametrize("is_hopper", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_which_launches_are_left_out(monkeypatch: pytest.MonkeyPatch, is_hopper: bool, dtype: torch.dtype) -> None:
    """On Hopper, for 16 bits, where products take one round; the norm of matrices of more than one tile."""
    on_an_h200(monkeypatch, has_gluon=is_hopper)
    can, device = is_hopper and dtype != torch.float32, torch.device("meta")
    for m, pairs, norm in ((60, True, False), (768, True, True), (1536, False, True), (4096, False, False)):
        assert takes_pairs(1, m, dtype, device) == (can and pairs)
        assert finds_norm(1, m, m, dtype, device) == (can and norm)
    for count, m, n, factors in (
        (1, 2048, 8192, True),
        (1, 1792, 7168, True),
        (3, 1024, 4096, True),
        (1, 2048, 8191, False),
        (1, 1024, 8192, False),
        (2, 2048, 8192, False),
        (1, 4096, 16384, False),
    ):
        assert takes_factors(count, m, n, dtype, device) == (can and factors)


def test_a_nan_and_a_zero_stay_in_their_matrices() -> None:
    x = torch.randn(4, 16, 24, device=DEVICE)
    x[0] = 0
    x[1, 2, 3] = float("nan")
    for (name, dtype), eps in product((("keller", torch.float16), ("aol4", torch.float32)), (1e-7, 0.0)):
        result = newton_schulz(x.to(dtype), 4, coefficients=name, compute_dtype=dtype, eps=eps, impl="triton")
        assert not result[0].any()
        assert result[1].isnan().all()
        assert result[2:].isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter_without_eps(scale: float) -> None:
    x = torch.randn(12, 30, device=DEVICE)
    options = {"eps": 0.0, "impl": "triton", "compute_dtype": torch.float32}
    torch.testing.assert_close(newton_schulz(x * scale, **options), newton_schulz(x, **options), atol=1e-5, rtol=0)


def test_row_factors() -> None:
    x = torch.randn(2, 37, 300, device=DEVICE)
    x[0, 5] = 0
    a = x @ x.mT
    scaled, gram = apply_row_factors(x.clone(), a.clone())
    apply_row_factors_by_kernels(x, a)
    torch.testing.assert_close(x, scaled)
    torch.testing.assert_close(a, gram)


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("reads_x", [True, False])
@pytest.mark.parametrize("writes_result", [True, False])
def test_buffers_do_not_overlap(steps: int, method: str, reads_x: bool, writes_result: bool) -> None:
    """One X and the m×m factors beside the caller's and the result; X is not overwritten while it is read."""
    count, m, n = 2, 13, 21
    jobs = jobs_of(NSConfig(steps=steps, method=method), m, n, in_pairs=True)
    buffers = Buffers(jobs, (count, m, n), torch.float16, reads_x=reads_x, writes_result=writes_result)
    room = torch.zeros(buffers.size, dtype=torch.float16)
    x, result = torch.full((count, m, n), -1.0).half(), torch.full((count, m, n), -2.0).half()
    squares, xs = buffers.of(room, x, result)
    given = {x.data_ptr()} if reads_x else set()
    given |= {result.data_ptr()} if writes_result else set()
    own = {each.data_ptr(): each for each in (*squares, *xs) if each.data_ptr() not in given}
    assert len(own) <= len(squares) + 2 - writes_result
    for number, each in enumerate(own.values(), start=1):
        each.fill_(number)
    for number, each in enumerate(own.values(), start=1):
        assert (each == number).all()
        assert each.stride(1) % 8 == each.stride(0) % 8 == each.data_ptr() % 16 == 0
    for job in jobs:
        if job.kind.name == "RECTANGLE":
            assert xs[job.b].data_ptr() != xs[job.d].data_ptr()
    for one, other in pairwise(squares):
        assert torch.equal(Buffers.twice(one), torch.cat([one, other]))
    last = xs[jobs[-1].d]
    assert last.data_ptr() == (result.data_ptr() if writes_result else buffers.last_x(room).data_ptr())
    assert all(first < second for first, second in pairwise(sorted(own)))


def test_the_operator_is_registered() -> None:
    for shape in ((4, 6), (6, 4)):
        fields = _taken_apart(*_values(NSConfig(coefficients=((2.0, -1.5, 0.5),), steps=2, restarts=(1,))))
        torch.library.opcheck(_operator, (torch.randn(shape, requires_grad=True), *fields, "auto"))


def test_it_is_compiled_without_a_break() -> None:
    def f(x: Tensor) -> Tensor:
        return 2 * newton_schulz(x + 1, 3, coefficients=[(2.0, -1.5, 0.5)], restarts="accurate", norm_scale=1.01)

    x = torch.randn(5, 9, requires_grad=True)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), f(x))
    torch.testing.assert_close(*(torch.autograd.grad(each(x).square().sum(), x)[0] for each in (compiled, f)))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(3, 4).to_sparse(), "dense matrices, got layout torch.sparse_coo"),
        (torch.randn(3, 4).to(torch.float8_e4m3fn), "matrices of 16 bits or more, got torch.float8_e4m3fn"),
        ([torch.randn(3, 4), "x"], "sequence of tensors, got a str"),
        (None, "sequence of tensors, got a NoneType"),
        ("x", "sequence of tensors, got a str"),
    ],
    ids=["sparse", "fp8", "list", "none", "text"],
)
def test_what_is_no_matrix_is_refused(x: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        newton_schulz(x)


def _dtensors_are_refused(rank: int, world: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    for placement in (Shard(0), Replicate()):
        x = DTensor.from_local(torch.ones(3, 4), init_device_mesh("cpu", (1,)), [placement])
        for each in (x, x.requires_grad_(), [x]):
            with pytest.raises(TypeError, match=r"whole, got a DTensor of shape \(3, 4\); give its full_tensor\(\)"):
                newton_schulz(each)


def test_a_dtensor_is_refused_with_what_to_give_instead() -> None:
    run_ranks(_dtensors_are_refused, 1)


def test_row_factors_have_no_gradient() -> None:
    x = torch.randn(4, 6, device=DEVICE, requires_grad=True)
    y = newton_schulz(x, 4, coefficients="aol4")
    with pytest.raises(NotImplementedError, match="coefficients='aol4' have no backward; use another set"):
        y.sum().backward()


def test_tangents_are_refused() -> None:
    """Forward-mode derivatives are not dropped in silence."""
    x = torch.randn(4, 6, device=DEVICE)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        newton_schulz(forward_ad.make_dual(x, x.cos()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (0, 4)], ids=str)
def test_vmap_is_the_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, *shape, dtype=dtype, device=DEVICE)
    expected = newton_schulz(x)
    twice = torch.vmap(torch.vmap(newton_schulz))
    torch.testing.assert_close(twice(x), expected)
    moved = torch.vmap(newton_schulz, in_dims=-1, out_dims=-1)(x.movedim(0, -1))
    torch.testing.assert_close(moved, expected.movedim(0, -1))
    torch.testing.assert_close(torch.compile(twice, backend="eager", fullgraph=True)(x), expected)


def test_gradients_of_torch_func_are_those_of_backward() -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        # by default in 16 bits on a GPU, where one matrix and several are multiplied by other kernels
        return newton_schulz(x, compute_dtype=torch.float64).square().sum() * x.sum()

    x = torch.randn(3, 4, 6, dtype=torch.float64, device=DEVICE, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x[0]) + loss(x[1]) + loss(x[2]), x)
    each = torch.vmap(torch.func.grad(loss))(x.detach())
    torch.testing.assert_close(each, expected)
    (outside,) = torch.autograd.grad(torch.vmap(loss)(x).sum(), x)
    torch.testing.assert_close(outside, expected)
    second = torch.func.jacrev(torch.func.grad(loss))(x[0].detach())
    torch.testing.assert_close(second, torch.autograd.functional.hessian(loss, x[0].detach()))


def test_transforms_of_torch_func_refuse_what_calls_refuse() -> None:
    x = torch.randn(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match=r"takes matrices \[..., M, N\], got shape \(4,\)"):
        torch.vmap(newton_schulz)(x)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(newton_schulz, (x,), (x,))


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize(
    "shape", [(256, 1000), (1024, 1024), (1024, 256), (3, 512, 640), (2048, 8192), (12, 768, 768)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_repeated_calls_are_right_and_do_not_synchronise(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The first call compiles, the second records, later ones replay; inputs and places of memory change."""
    results, inputs = [], [torch.randn(shape, device="cuda").to(dtype) for _ in range(5)]
    for number, x in enumerate(inputs):
        torch.cuda.set_sync_debug_mode("default" if number == 0 else "error")
        try:
            results.append(newton_schulz(x))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for x, result in zip(inputs, results, strict=True):
        assert relative_error(result, expected_of(x)) <= 2.2e-3
        assert torch.equal(newton_schulz(x), result)


@gpu
def test_replays_of_what_has_to_be_copied_first() -> None:
    """Leading dimensions that are no view of a batch."""
    for _ in range(4):
        x = torch.randn(3, 256, 2, 320, device="cuda").half().permute(2, 0, 1, 3)
        assert relative_error(newton_schulz(x), expected_of(x)) <= 2.2e-3


@gpu
def test_replays_of_several_streams_and_places() -> None:
    x = torch.randn(4, 640, 700, device="cuda").half()
    expected = newton_schulz(x[0]), newton_schulz(x[1])
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    torch.cuda.synchronize()
    for number in range(24):
        with torch.cuda.stream(streams[number % 3]):
            # some stay, so memory moves
            results.append(newton_schulz(x[number % 2]))
            held = torch.empty(1 << (10 + number % 8), device="cuda")
            del held
    torch.cuda.synchronize()
    for number, result in enumerate(results):
        assert torch.equal(result, expected[number % 2])


@gpu
def test_it_is_captured_and_replayed_with_new_values() -> None:
    xs = [torch.randn(shape, device="cuda").half() for shape in ((512, 1000), (12, 768, 768), (700, 300))]
    eager = [newton_schulz(x) for x in xs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [newton_schulz(x) for x in xs]
    graph.replay()
    for result, other in zip(eager, captured, strict=True):
        assert torch.equal(result, other)
    for x in xs:
        x.normal_()
    graph.replay()
    for x, result in zip(xs, captured, strict=True):
        assert relative_error(result, expected_of(x)) <= 2.2e-3


@gpu
def test_lists_are_done_in_batches() -> None:
    xs = [torch.randn(shape, device="cuda") for shape in ((256, 512), (512, 256), (256, 512), (300, 300), (256, 512))]
    for x, result in zip(xs, newton_schulz(xs), strict=True):
        assert result.shape == x.shape
        assert relative_error(result, expected_of(x)) <= 2.2e-3
    outs = [torch.empty_like(x, dtype=torch.bfloat16) for x in xs]
    assert newton_schulz(xs, out=outs)[3] is outs[3]
    assert relative_error(outs[4], expected_of(xs[4])) <= 1e-2


@gpu
def test_nothing_is_compiled_anew_and_no_memory_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    from optim_kernels._triton import triton

    # those of other tests would be dropped meanwhile, and with them memory
    monkeypatch.setattr(orthogonalization, "_plans", OrderedDict())
    xs = [torch.randn(512, 640, device="cuda").half() for _ in range(8)]
    for x in xs:
        newton_schulz(x)
    gc.collect()
    before = torch.cuda.memory_allocated()
    compiled: list[object] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *args, **kwargs: compiled.append(args)
    try:
        for step in range(200):
            newton_schulz(xs[step % 8], eps=1e-7 * (1 + step))
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not compiled
    assert torch.cuda.memory_allocated() == before


@gpu
def test_gradients_and_compilation_on_a_gpu() -> None:
    x = torch.randn(128, 200, device="cuda", requires_grad=True)
    compiled = torch.compile(lambda x: newton_schulz(x, 3), fullgraph=True, backend="aot_eager")
    first, second = (torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, lambda x: newton_schulz(x, 3)))
    torch.testing.assert_close(first, second)
    wide = x.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(newton_schulz(wide, 3).sum(), wide)
    assert relative_error(first, exact) <= 1e-3
