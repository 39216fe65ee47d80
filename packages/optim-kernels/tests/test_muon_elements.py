"""Muon's elementwise launches have the bits of ``reference.muon`` in plain torch, for any tensors and options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tensors import DEVICE
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from optim_kernels.functional import MuonMomenta, MuonUpdates
from optim_kernels.reference.muon import MuonRule, momentum_, updated
from optim_kernels.reference.storage import Rounding, gradient_scale, read_param, write_param
from optim_utils.rounding import split_master

pytest.importorskip("triton")
from optim_kernels.functional import _element_launch

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = st.sampled_from([FP32, FP16, BF16])


class Piece(NamedTuple):
    """A tensor's elements, how many of its storage are in front of it, and its group."""

    numel: int
    offset: int
    group: int


# chunks of 2048: none, tails, full ones, several
PIECES = st.lists(
    st.builds(
        Piece,
        numel=st.sampled_from([0, 1, 7, 255, 2047, 2048, 2049, 4096, 5077]),
        offset=st.sampled_from([0, 0, 1, 8]),
        group=st.integers(0, 1),
    ),
    min_size=1,
    max_size=5,
)


def flat(pieces: Sequence[Piece], dtype: torch.dtype, seed: int, scale: float = 1.0) -> list[Tensor]:
    """A tensor for each piece, of one or two dimensions."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for numel, offset, _ in pieces:
        values = scale * torch.randn(offset + numel, generator=generator)
        tensor = values.to(DEVICE, dtype)[offset:]
        found.append(tensor.view(2, -1) if numel and numel % 2 == 0 else tensor)
    return found


def clones(tensors: Sequence[Tensor] | None) -> list[Tensor] | None:
    return None if tensors is None else [tensor.clone() for tensor in tensors]


def assert_equal(found: Sequence[Tensor] | None, expected: Sequence[Tensor] | None, what: str) -> None:
    for i, (left, right) in enumerate(zip(found or (), expected or (), strict=True)):
        assert torch.equal(left, right), f"{what}[{i}]: {(left != right).sum().item()} of {left.numel()} differ"


def numbers(step: int) -> dict[str, list[float]]:
    """Hyperparameters of two groups, others in each step."""
    return {
        "momentum": [0.95 - 0.01 * step, 0.6],
        "lr": [0.02 / (step + 1), 0.3],
        "weight_decay": [0.1, 0.013 * step],
    }


@settings(max_examples=40, deadline=None)
@given(
    pieces=PIECES,
    dtypes=st.tuples(DTYPES, DTYPES, DTYPES),
    nesterov=st.booleans(),
    maximize=st.booleans(),
    factors=st.tuples(st.sampled_from([None, 0.3]), st.sampled_from([None, 1024.0])),
)
def test_momenta_are_those_of_plain_torch(
    pieces: list[Piece],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    nesterov: bool,
    maximize: bool,
    factors: tuple[float | None, float | None],
) -> None:
    grad_dtype, buffer_dtype, u_dtype = dtypes
    clip_factor, grad_scale = (None if x is None else torch.tensor(x, device=DEVICE) for x in factors)
    buffers, launch = flat(pieces, buffer_dtype, 1), MuonMomenta()
    expected_buffers = [buffer.clone() for buffer in buffers]
    for step in range(3):
        # gradients and U are elsewhere in every step
        grads = flat(pieces, grad_dtype, 2 + step)
        us = [torch.full_like(grad, torch.nan, dtype=u_dtype) for grad in grads]
        given_grads = [grad.clone() for grad in grads]
        momenta = numbers(step)["momentum"]
        expected = [
            momentum_(
                grad,
                buffer,
                momentum=momenta[piece.group],
                rule=MuonRule(nesterov=nesterov, maximize=maximize),
                clip_factor=gradient_scale(clip_factor, grad_scale),
            ).to(u_dtype)
            for piece, grad, buffer in zip(pieces, grads, expected_buffers, strict=True)
        ]
        launch.step(
            grads,
            buffers,
            us,
            momentum=momenta,
            groups=[piece.group for piece in pieces],
            nesterov=nesterov,
            maximize=maximize,
            clip_factor=clip_factor,
            grad_scale=grad_scale,
        )
        assert_equal(buffers, expected_buffers, "buffers")
        assert_equal(us, expected, "us")
        assert_equal(grads, given_grads, "grads")


# dtypes of parameters and masters, and whether steps are counted, as rounding at random wants it
STORED = [
    (FP32, None, False),
    (FP16, None, False),
    (BF16, None, False),
    (BF16, FP32, False),
    (FP16, FP32, False),
    (BF16, torch.int16, False),
    (BF16, None, True),
    (FP32, None, True),
    (BF16, torch.int16, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "master_dtype", "counted"), STORED, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    pieces=PIECES,
    update_dtype=DTYPES,
    cautious=st.booleans(),
    starts=st.sampled_from([(0, 8, 16, 24, 2**35), (3, 2**33 + 1, 8, 5, 1)]),
)
def test_updates_are_those_of_plain_torch(
    dtype: torch.dtype,
    master_dtype: torch.dtype | None,
    counted: bool,
    pieces: list[Piece],
    update_dtype: torch.dtype,
    cautious: bool,
    starts: tuple[int, ...],
) -> None:
    count, launch = len(pieces), MuonUpdates()
    params, masters = flat(pieces, dtype, 1), None
    if master_dtype is not None:
        wide = flat(pieces, FP32, 1)
        masters = wide if master_dtype == FP32 else [split_master(each)[1] for each in wide]
        for param, each in zip(params, wide, strict=True):
            param.copy_(split_master(each)[0] if master_dtype == torch.int16 else each)
    steps = [torch.tensor(float(10 * i), device=DEVICE) for i in range(count)] if counted else None
    scales = [1.0, 0.2 * 7**0.5, 1.5, 3.0, 0.7][:count]
    seeds, indices = [3, 2**40 + 5, 0, 7, 11][:count], [4, 0, 9, 2, 1000][:count]
    expected, expected_masters = [param.clone() for param in params], clones(masters)
    for step in range(2):
        updates = flat(pieces, update_dtype, 20 + step)
        for i, (piece, param, o) in enumerate(zip(pieces, expected, updates, strict=True)):
            master = None if expected_masters is None else expected_masters[i]
            new = updated(
                read_param(param, master),
                o.float(),
                lr=numbers(step)["lr"][piece.group],
                scale=scales[i],
                weight_decay=numbers(step)["weight_decay"][piece.group],
                cautious=cautious,
            )
            bits = Rounding(seeds[i] & 0xFFFFFFFF, indices[i], starts[i], 10 * i + step + 1) if counted else None
            write_param(param, master, new, bits)
        launch.step(
            params,
            updates,
            lr=numbers(step)["lr"],
            weight_decay=numbers(step)["weight_decay"],
            groups=[piece.group for piece in pieces],
            scales=scales,
            cautious=cautious,
            masters=masters,
            steps=steps,
            seed=seeds,
            indices=indices,
            starts=starts[:count],
        )
        assert_equal(params, expected, "params")
        assert_equal(masters, expected_masters, "masters")
        if steps is not None:
            assert [int(each) for each in steps] == [10 * i + step + 1 for i in range(count)]


def test_random_bits_round_up_as_often_as_they_should() -> None:
    """Against the formula alone: a third of an ulp above a bf16 number is rounded up a third of the time."""
    param, o = torch.ones(6000, dtype=BF16, device=DEVICE), torch.ones(6000, device=DEVICE)
    count = torch.zeros((), device=DEVICE)
    MuonUpdates().step([param], [o], lr=-(2**-7) / 3, steps=[count])
    ups = (param == 1 + 2**-7).float().mean().item()
    assert set(param.tolist()) == {1.0, 1 + 2**-7}
    assert abs(ups - 1 / 3) < 5 * (2 / 9 / 6000) ** 0.5


def test_fp32_is_as_near_to_fp64_as_its_roundings() -> None:
    pieces = [Piece(3000, 0, 0)]
    (grad,), (buffer,), (param,) = (flat(pieces, FP32, seed) for seed in range(3))
    wide_buffer, u = buffer.double(), torch.empty_like(grad)
    wide_u = momentum_(grad.double(), wide_buffer, momentum=0.95, rule=MuonRule())
    wide_param = updated(param.double(), wide_u, lr=0.02, scale=1.4, weight_decay=0.1, cautious=False)
    MuonMomenta().step([grad], [buffer], [u], momentum=0.95)
    MuonUpdates().step([param], [u], lr=0.02, weight_decay=0.1, scales=[1.4])
    # two products and a sum, each rounded by half an ulp of at most 4, twice over for U
    for found, expected, ulps in ((buffer, wide_buffer, 2), (u, wide_u, 4), (param, wide_param, 4)):
        assert (found.double() - expected).abs().max().item() <= ulps * 2.0**-22


def test_what_stays_is_kept_and_what_changes_is_not_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is bound once for hyperparameters, addresses and factors; a second time for other chunks."""
    made: list[Any] = []
    from optim_kernels import _triton

    class Counted(_triton.Launch):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(args)
            super().__init__(*args, **options)

    monkeypatch.setattr(_triton, "Launch", Counted)
    pieces, launch = [Piece(1025, 0, 0), Piece(40, 0, 1)], MuonMomenta()
    buffers, us = flat(pieces, FP32, 0), flat(pieces, FP32, 1)
    for step in range(4):
        factor = torch.tensor(0.5 + step, device=DEVICE)
        momenta = [0.9 + step / 100, 0.5]
        launch.step(flat(pieces, FP32, step), buffers, us, momentum=momenta, groups=[0, 1], clip_factor=factor)
    assert len(made) == 1
    # not aligned any more, and then of another kind
    for others, dtype in (([Piece(2049, 1, 0), Piece(40, 0, 0)], FP32), ([Piece(2048, 0, 0), Piece(41, 0, 0)], BF16)):
        grads, expected = flat(others, dtype, 9), flat(others, FP32, 0)
        found, us = [each.clone() for each in expected], flat(others, FP32, 1)
        launch.step(grads, found, us, momentum=[0.9, 0.5], groups=[0, 1])
        each = zip(grads, expected, (0.9, 0.5), strict=True)
        wanted = [momentum_(grad, buffer, momentum=value, rule=MuonRule()) for grad, buffer, value in each]
        assert_equal(us, wanted, "us")
        assert_equal(found, expected, "buffers")
    assert len(made) == 3


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
def test_hyperparameters_are_read_on_the_device(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Those of a GPU are; the interpreter is told that a CPU is one."""
    monkeypatch.setattr(_element_launch, "on_device", lambda value: isinstance(value, Tensor))
    monkeypatch.setattr(
        _element_launch, "readable", lambda value, _: value.float() if isinstance(value, Tensor) else value
    )
    pieces = [Piece(1100, 0, 0), Piece(9, 0, 1)]
    momenta, updates = MuonMomenta(), MuonUpdates()
    # powers of two, whose products are the same in fp32 and in fp64
    lr, momentum = (torch.tensor(value, dtype=dtype, device=DEVICE) for value in (0.25, 0.5))
    weight_decay = torch.tensor(0.5, dtype=dtype, device=DEVICE)
    buffers, params = flat(pieces, FP32, 1), flat(pieces, FP32, 2)
    for step in range(2):
        grads, us = flat(pieces, FP32, 3 + step), flat(pieces, FP32, 5)
        expected_buffers, expected = clones(buffers), clones(params)
        momenta.step(grads, buffers, us, momentum=[momentum, 0.75], groups=[0, 1])
        updates.step(params, us, lr=[lr, 0.125], weight_decay=[0.25, weight_decay], groups=[0, 1])
        for i, (grad, buffer, param) in enumerate(zip(grads, expected_buffers or (), expected or (), strict=True)):
            u = momentum_(grad, buffer, momentum=(momentum.item(), 0.75)[i], rule=MuonRule())
            rates = {"lr": (lr.item(), 0.125)[i], "weight_decay": (0.25, weight_decay.item())[i]}
            param.copy_(updated(param, u, scale=1.0, cautious=False, **rates))
            assert torch.equal(us[i], u)
        assert_equal(buffers, expected_buffers, "buffers")
        assert_equal(params, expected, "params")
        # written in place, as a scheduler does
        for value in (lr, momentum, weight_decay):
            value.mul_(0.5)


def test_a_compiled_caller() -> None:
    """The compiler leaves both launches as they are."""
    torch._dynamo.reset()
    ours, theirs = ([torch.linspace(-1, 1, 40, device=DEVICE) for _ in range(3)] for _ in range(2))

    def step(tensors: list[Tensor], momenta: MuonMomenta, updates: MuonUpdates, lr: float) -> None:
        param, grad, buffer = tensors
        u = torch.empty_like(param)
        momenta.step([grad * lr], [buffer], [u], momentum=0.9)
        updates.step([param], [u], lr=lr, weight_decay=0.1)

    kept = MuonMomenta(), MuonUpdates()
    compiled = torch.compile(lambda lr: step(ours, *kept, lr), backend="eager")
    for lr in (0.1, 0.2, 0.3):
        compiled(lr)
        step(theirs, MuonMomenta(), MuonUpdates(), lr)
    assert all(map(torch.equal, ours, theirs))


def test_no_tensors_are_no_launch() -> None:
    MuonMomenta().step([], [], [], momentum=0.9)
    MuonUpdates().step([], [], lr=0.1)
    with pytest.raises(ValueError, match="us must have one entry for each of the 0 grads, got 1"):
        MuonMomenta().step([], [], [torch.ones(2)], momentum=0.9)


def test_lists_that_were_written_to_are_seen() -> None:
    """The same list object, with other groups in it."""
    pieces, groups = [Piece(5, 0, 0), Piece(5, 0, 0)], [0, 0]
    launch, params = MuonUpdates(), [torch.zeros(5, device=DEVICE) for _ in pieces]
    ones = [torch.ones(5, device=DEVICE) for _ in pieces]
    launch.step(params, ones, lr=[1.0, 10.0], groups=groups)
    groups[1] = 1
    launch.step(params, ones, lr=[1.0, 10.0], groups=groups)
    assert [param[0].item() for param in params] == [-2.0, -11.0]


def good(numel: int = 6, count: int = 2, dtype: torch.dtype = FP32) -> list[Tensor]:
    return [torch.ones(numel, dtype=dtype, device=DEVICE) for _ in range(count)]


def momenta_of(**options: Any) -> None:
    MuonMomenta().step(**{"grads": good(), "buffers": good(), "us": good(), "momentum": 0.9, **options})


def updates_of(**options: Any) -> None:
    MuonUpdates().step(**{"params": good(), "updates": good(), "lr": 0.1, **options})


def freed() -> Tensor:
    tensor = torch.ones(6, device=DEVICE)
    tensor.untyped_storage().resize_(0)
    return tensor


MEMORY = torch.ones(12, device=DEVICE)
FAULTS: list[tuple[Any, dict[str, Any], str]] = [
    (momenta_of, {"buffers": good(count=1)}, r"buffers must have one entry for each of the 2 grads, got 1"),
    (momenta_of, {"grads": good(dtype=torch.float64)}, r"grads\[0\] is torch.float64; the kernels take float32, "),
    (momenta_of, {"us": [*good(count=1), *good(5, 1)]}, r"us\[1\] must have 6 elements on \w+(:0)?, but is .*\(5,\)"),
    (momenta_of, {"us": [*good(count=1), *good(count=1, dtype=BF16)]}, r"us\[1\] is torch.bfloat16, us\[0\] torch.fl"),
    (momenta_of, {"grads": [torch.ones(3, 2, device=DEVICE).t()] * 2}, r"grads\[0\] must be contiguous, but is .*\(2"),
    (momenta_of, {"grads": [freed(), *good(count=1)]}, r"grads\[0\] has no memory: its storage was freed"),
    (momenta_of, {"us": [MEMORY[:6], MEMORY[3:9]]}, r"us\[0\] and us\[1\] share memory, to which two programs"),
    (momenta_of, {"groups": [0, 1]}, r"groups must be numbers of the 1 entries of momentum, got \[0, 1\]"),
    (momenta_of, {"clip_factor": torch.ones(2, device=DEVICE)}, r"clip_factor must be a 0-d tensor, one number"),
    (
        updates_of,
        {"lr": [0.1, 0.2], "weight_decay": [0.1] * 3},
        r"weight_decay must have one entry for each of the 2 l",
    ),
    (momenta_of, {"momentum": torch.ones(2)}, r"Tensor momentum must be 1-element, got shape \(2,\)"),
    (momenta_of, {"momentum": "0.9"}, "momentum must be a number or a 1-element tensor, got '0.9'"),
    (updates_of, {"lr": [0.1, None]}, "lr must be a number or a 1-element tensor, got None"),
    (momenta_of, {"momentum": torch.ones((), device="meta")}, "momentum is on meta, and so has no value"),
    (updates_of, {"lr": torch.ones((), device="meta")}, "lr is on meta, and so has no value"),
    (updates_of, {"weight_decay": "0"}, "weight_decay must be a number or a 1-element tensor, got '0'"),
    (updates_of, {"lr": []}, r"groups must be numbers of the 0 entries of lr, got \[0\]"),
    (updates_of, {"scales": [1.0]}, r"scales must have one entry for each of the 2 params, got 1"),
    (updates_of, {"seed": [1]}, r"seed must have one entry for each of the 2 params, got 1"),
    (updates_of, {"masters": good(dtype=FP16)}, r"masters\[0\] is torch.float16; the kernels take float32, int16"),
    (
        updates_of,
        {"masters": good(dtype=torch.int16)},
        r"masters are int16, which complete bfloat16 .* are torch.float32",
    ),
    (
        updates_of,
        {"steps": good()},
        r"steps\[0\] must have 1 elements on \w+(:0)?, but is torch.float32 of shape \(6,\)",
    ),
    (updates_of, {"steps": good(1, 1) * 2}, r"steps\[0\] and steps\[1\] share memory"),
    (updates_of, {"params": good(count=1) * 2}, r"params\[0\] and params\[1\] share memory"),
]


@pytest.mark.parametrize(("call", "options", "message"), FAULTS, ids=[fault[2][:24] for fault in FAULTS])
def test_what_a_kernel_cannot_take_is_refused_by_name(call: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(**options)


def test_a_call_that_was_refused_leaves_nothing_behind() -> None:
    launch, params, ones = MuonUpdates(), good(), good()
    launch.step(params, ones, lr=1.0)
    with pytest.raises(ValueError, match=r"updates\[1\] must have 6 elements"):
        launch.step(params, [ones[0], torch.ones(5, device=DEVICE)], lr=1.0)
    launch.step(params, ones, lr=1.0)
    assert all((param == -1).all() for param in params)


def test_lists_of_other_lengths_are_seen() -> None:
    """Though there are as many tensors as before, of the same kinds, one behind the other."""
    launch = MuonMomenta()
    for _ in range(3):
        launch.step(good(), good(), good(), momentum=0.9)
    buffers = good(count=3)
    with pytest.raises(ValueError, match="buffers must have one entry for each of the 2 grads, got 3"):
        launch.step(good(), buffers, good(count=1), momentum=0.9)
    assert all((buffer == 1).all() for buffer in buffers)


def test_a_tensor_that_becomes_one_without_memory_is_named() -> None:
    launch, lists = MuonMomenta(), [good(), good(), good()]
    for _ in range(3):
        launch.step(*lists, momentum=0.9)
    lists[0][1] = AsyncCollectiveTensor(lists[0][1])
    with pytest.raises(ValueError, match=r"grads\[1\] is a AsyncCollectiveTensor, which has no memory of its own"):
        launch.step(*lists, momentum=0.9)


def test_why_not_says_what_a_step_would_refuse() -> None:
    one, wide = torch.ones(3, 2, device=DEVICE), torch.ones(3, 2, dtype=torch.float64, device=DEVICE)
    assert MuonMomenta.why_not(one, one, one) is None
    assert MuonUpdates.why_not(one, one, None, torch.ones((), device=DEVICE)) is None
    found = MuonMomenta.why_not(one, wide, one)
    assert found == "its momentum is torch.float64; the kernels take float32, float16, bfloat16"
    found = MuonUpdates.why_not(one, one, torch.zeros(3, 2, dtype=torch.int16, device=DEVICE), None)
    assert found == "its master is int16, which completes bfloat16; its value is torch.float32"
    found = MuonUpdates.why_not(one, one.t().contiguous().t(), None, None)
    assert found is not None
    assert found.startswith("its update must be contiguous, but is torch.float32 of shape (3, 2) and strides (1, 3)")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_waits_for_the_device() -> None:
    pieces = [Piece(3000, 0, 0), Piece(40, 1, 1)]
    momenta, updates = MuonMomenta(), MuonUpdates()
    params, buffers = flat(pieces, BF16, 0), flat(pieces, BF16, 1)
    steps = [torch.zeros((), device=DEVICE) for _ in pieces]
    lr, factor = torch.tensor(0.1, device=DEVICE), torch.tensor(0.5, device=DEVICE)
    lists = [(flat(pieces, BF16, 2 + i), flat(pieces, BF16, 9)) for i in range(3)]
    try:
        torch.cuda.set_sync_debug_mode("error")
        for grads, us in lists:
            momenta.step(grads, buffers, us, momentum=0.9, clip_factor=factor)
            updates.step(params, us, lr=[lr, 0.1], groups=[0, 1], steps=steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [int(step) for step in steps] == [3, 3]


@pytest.mark.gpu
def test_a_captured_step_reads_what_hyperparameters_are_by_then() -> None:
    launch, params, ones = MuonUpdates(), good(3000), good(3000)
    lr, steps = torch.tensor(0.0, device=DEVICE), [torch.zeros((), device=DEVICE) for _ in params]
    launch.step(params, ones, lr=lr, steps=steps)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch.step(params, ones, lr=lr, steps=steps)
    lr.fill_(1.0)
    for _ in range(3):
        graph.replay()
    launch.step(params, ones, lr=4.0, steps=steps)
    assert all((param == 1 - 3 - 4).all() for param in params)
    assert [int(step) for step in steps] == [5, 5]


@pytest.mark.gpu
def test_more_than_two_billion_elements() -> None:
    """Both ends of a tensor beyond 32-bit offsets, against the ends alone."""
    numel = 2**31 + 4096 + 3
    param, grad, buffer = (torch.empty(numel, dtype=BF16, device=DEVICE).normal_() for _ in range(3))
    ends = [slice(0, 5000), slice(numel - 5003, None)]
    pieces = [[tensor[end].clone() for end in ends] for tensor in (param, grad, buffer)]
    us, u = [torch.empty_like(piece) for piece in pieces[0]], torch.empty_like(grad)
    for params, grads, buffers, directions in (([param], [grad], [buffer], [u]), (*pieces, us)):
        MuonMomenta().step(grads, buffers, directions, momentum=0.9)
        MuonUpdates().step(params, directions, lr=0.1, weight_decay=0.1)
    for end, p, b, direction in zip(ends, pieces[0], pieces[2], us, strict=True):
        assert torch.equal(param[end], p)
        assert torch.equal(buffer[end], b)
        assert torch.equal(u[end], direction)
