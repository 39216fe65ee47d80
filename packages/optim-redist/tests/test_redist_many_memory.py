"""Many tensors under a memory limit: what every rank holds, what is given up, and what cannot fit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from redist_cases import part_of, random_case
from redist_memory import Live, NoWire

from optim_redist import (
    Item,
    Layout,
    LayoutError,
    Mesh,
    Plan,
    PlanInfeasibleError,
    PlanMismatchError,
    RedistError,
    UnsupportedError,
    plan,
    redistribute_many,
)
from optim_redist._methods.buckets import ALIGNMENT, Bucket, buckets_of
from optim_redist._methods.chunked import CHUNK
from optim_redist._running import many_program
from optim_redist._running.many_program import ManyProgram
from optim_redist.handle import Handle
from optim_utils.testing import run_ranks

LINE = Mesh(4)
ROWS, COLUMNS, WHOLE = (Layout(LINE, dims) for dims in ([0, None], [None, 0], [None, None]))
ONE, TWO = Layout(Mesh(1, ranks=[1]), [None, None]), Layout(Mesh(2, ranks=[3, 2]), [None, 0])
SUMMED, AVERAGED = (Layout(LINE, [None, None], {0: op}) for op in ("sum", "avg"))
MOVES = [
    ((256, 192), torch.float32, ROWS, COLUMNS),
    ((7, 5), torch.uint8, ROWS, WHOLE),
    ((300, 128), torch.bfloat16, COLUMNS, WHOLE),
    ((64,), torch.int64, Layout(LINE, [0]), Layout(LINE, [None])),
    ((512, 512), torch.uint8, ONE, TWO),
    ((128, 128), torch.float32, ROWS, ROWS),
    ((31, 33), torch.complex128, COLUMNS, ROWS),
    ((512, 384), torch.int16, COLUMNS, ROWS),
]
REDUCTIONS = [
    ((200, 128), torch.float32, AVERAGED, WHOLE),
    ((256, 128), torch.bfloat16, SUMMED, ROWS),
    ((3, 4), torch.float16, SUMMED, WHOLE),
    ((256, 256), torch.float8_e5m2, SUMMED, COLUMNS),
]
Task = tuple[tuple[int, ...], torch.dtype, Layout, Layout]


def _plans(tasks: Sequence[Task]) -> list[Plan]:
    return [plan(*task, planners=("direct", "relay")) for task in tasks]


def _everything(plans: Sequence[Plan], *, donate: bool = False) -> int:
    """Bytes of all sources and targets on the fullest rank, or of the larger of the two if sources are donated."""
    found = []
    for rank in range(4):
        sides = [
            sum(made.problems[0].num_stored.get(rank, (0, 0))[side] * made.itemsize for made in plans)
            for side in (0, 1)
        ]
        found.append(max(sides) if donate else sum(sides))
    return max(found)


def _asked(plans: Sequence[Plan], limit: int, *, donate: bool) -> int:
    """The limit if it is enough, or else what the error asks for, which is not proven."""
    try:
        buckets_of(plans, 2**40, limit, donate=donate)
    except PlanInfeasibleError as error:
        if error.proven:
            raise
        return sum(error.terms.values())
    return limit


def _peak(buckets: Sequence[Bucket]) -> int:
    return max(max(bucket.peak.values()) for bucket in buckets)


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("spare", [0, 100_000, 400_000], ids=["one chunk", "100 kB", "400 kB"])
@pytest.mark.parametrize("tasks", [MOVES, [*MOVES, *REDUCTIONS]], ids=["moves", "reductions"])
def test_no_rank_holds_more_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, tasks: list[Task], spare: int, donate: bool
) -> None:
    monkeypatch.setattr(many_program.Team, "of", lambda *_: cast(Any, NoWire()))
    monkeypatch.setattr(many_program.collectives, "device_of", lambda _: torch.device("cpu"))
    plans = _plans(tasks)
    limit = _asked(plans, _everything(plans, donate=donate), donate=donate) + spare
    measured = []
    for rank in range(4):
        monkeypatch.setattr(many_program.collectives, "my_rank", lambda rank=rank: rank)
        program = ManyProgram(plans, 2**40, None, memory_limit=limit, donate=donate)
        buckets = buckets_of(plans, 2**40, limit, donate=donate)
        assert spare or any(bucket.rounds > 1 for bucket in buckets)
        assert any(len(bucket.numbers) > 1 for bucket in buckets)
        sources = [
            torch.zeros(src.local_shape(shape, rank)).to(dtype) if rank in src.mesh.ranks else None
            for shape, dtype, src, _ in tasks
        ]
        with Live() as live:
            for source in sources:
                if source is not None:
                    source.view(-1)
            Handle(program.run([*sources], async_op=False)).wait()
        claimed = max(bucket.peak[rank] for bucket in buckets)
        assert live.peak <= claimed <= limit
        # at most three messages each way of a tensor are filled up
        if tasks is MOVES:
            assert claimed - live.peak < 2 * 3 * ALIGNMENT * max(len(bucket.numbers) for bucket in buckets)
        if donate:
            assert all(source is None or not source.untyped_storage().nbytes() for source in sources)
        measured.append(live.peak)
    # without the limit some rank would hold more
    if not donate and spare < 400_000:
        free = buckets_of(plans, 2**40, 2**60)
        assert len(free) == 1
        assert _peak(free) > limit >= max(measured)


@pytest.mark.parametrize("donate", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("seed", range(12))
def test_a_limit_that_an_error_asks_for_is_enough(seed: int, donate: bool) -> None:
    draw = random.Random(seed)
    dtypes = ["uint8", "bf16", "float32", "complex128"]
    plans = [
        plan(*task, planners=("direct", "relay"))
        for task in (
            (shape, draw.choice(dtypes if not (src.partial or dst.partial) else ["bf16", "float32"]), src, dst)
            for shape, src, dst in (random_case(100 * seed + k, "COBURIEKM", [(4,), (2, 2), (3,)]) for k in range(8))
            if not dst.partial
        )
    ]
    everything = _everything(plans, donate=donate)
    with pytest.raises(PlanInfeasibleError, match="no method can stay below it") as caught:
        buckets_of(plans, 2**40, 0, donate=donate)
    least = sum(caught.value.terms.values())
    assert caught.value.proven
    assert least <= everything
    asked = _asked(plans, least, donate=donate)
    assert donate or asked <= everything + CHUNK
    # no more than one tensor after the other takes without a limit
    assert asked <= max(least, _peak(buckets_of(plans, 1, 2**60, donate=donate)))
    assert _peak(buckets_of(plans, 2**40, asked, donate=donate)) <= asked
    # everything and one chunk is enough, also if sources are given up
    for more in (CHUNK, CHUNK + 1, 2**20):
        limit = _everything(plans) + more
        assert _peak(buckets_of(plans, 2**40, limit, donate=donate)) <= limit


def test_buckets_are_as_large_as_the_limit_allows() -> None:
    shape, tasks = (64, 64), [((64, 64), torch.float32, ROWS, COLUMNS)] * 6
    plans = _plans(tasks)
    quarter = 4 * 64 * 16
    # six sources and targets, and for each tensor of a bucket three of four parts go out and come in
    fixed = 2 * 6 * quarter
    for count in (6, 5, 3):
        # if so many share the last bucket, they hold what they move
        limit = fixed + count * 2 * quarter * 3 // 4
        found = [len(bucket.numbers) for bucket in buckets_of(plans, 2**40, limit)]
        assert sum(found) == 6
        assert found[-1] <= count <= found[0]
        assert len(found) == (1 if count == 6 else 2)
    assert [len(b.numbers) for b in buckets_of(plans, 2 * plans[0].steps[0].bytes, 2**60)] == [2, 2, 2]
    assert [b.numbers for b in buckets_of(plans, 2 * plans[0].steps[0].bytes)] == [(0, 1), (2, 3), (4, 5)]
    (alone,) = buckets_of(plans[:1], 2**40, 2 * quarter + 64)
    assert alone.rounds > 1
    assert shape == plans[0].shape


def _limited(rank: int, world: int, donate: bool, async_op: bool) -> None:
    items, expected, plans = {}, {}, []
    tasks: list[Task] = [*MOVES]
    for seed in range(30):
        shape, src, dst = random_case(seed, "COBURIEKM", [(4,), (2, 2), (3,), (2,)])
        if max((*src.mesh.ranks, *dst.mesh.ranks)) < 4:
            tasks.append((shape, random.Random(seed).choice([torch.int8, torch.int16, torch.float64]), src, dst))
    for number, (shape, dtype, src, dst) in enumerate(tasks):
        generator = torch.Generator().manual_seed(number)
        full = torch.randint(0, 9, shape, generator=generator).to(dtype)
        name = f"w{number:03d}"
        plans.append(plan(shape, dtype, src, dst, planners=("direct", "relay")))
        items[name] = Item(part_of(full, src, rank), shape, src, dst, dtype)
        expected[name] = part_of(full, dst, rank)
    limit = _asked(plans, _everything(plans, donate=donate), donate=donate)
    buckets = buckets_of(plans, 2**28, limit, donate=donate)
    assert any(bucket.rounds > 1 for bucket in buckets)
    assert any(len(bucket.numbers) > 1 for bucket in buckets)
    # what is given up may not be the result of cutting another tensor
    items = {k: item._replace(tensor=None if item.tensor is None else item.tensor.clone()) for k, item in items.items()}
    found = redistribute_many(items, memory_limit=limit, donate=donate, async_op=async_op)
    found = found.wait() if async_op else found
    for name, part in expected.items():
        assert (part is None) == (found[name] is None)
        assert part is None or torch.equal(part, found[name]), name
    given = [item.tensor for item in items.values() if item.tensor is not None]
    assert all((not tensor.untyped_storage().nbytes()) == (donate or not tensor.numel()) for tensor in given)
    with pytest.raises(PlanInfeasibleError):
        redistribute_many(
            {
                name: item._replace(tensor=part_of(torch.zeros(item.shape), item.src, rank), dtype=torch.float32)
                for name, item in items.items()
            },
            memory_limit=100,
        )


@pytest.mark.parametrize(("donate", "async_op"), [(False, False), (True, True)], ids=["kept", "donated"])
def test_tensors_arrive_under_a_limit(donate: bool, async_op: bool) -> None:
    run_ranks(_limited, 4, donate, async_op)


def _reduced(rank: int, world: int) -> None:
    items, wanted, plans = [], [], []
    for number, (shape, dtype, src, dst) in enumerate(REDUCTIONS):
        parts = [
            torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(9 * number + k)).to(dtype)
            for k in range(4)
        ]
        total = torch.stack([part.double() for part in parts]).sum(0)
        total = total / 4 if src is AVERAGED else total
        wanted.append(part_of(total.to(dtype).double(), dst, rank))
        items.append(Item(parts[rank], shape, src, dst))
        plans.append(plan(shape, dtype, src, dst, planners=("direct", "relay")))
    found = redistribute_many(items, memory_limit=_asked(plans, _everything(plans), donate=False))
    for part, right in zip(found, wanted, strict=True):
        assert torch.equal(part.double(), right)


def test_reductions_arrive_under_a_limit() -> None:
    run_ranks(_reduced, 4)


def _other_limits(rank: int, world: int) -> None:
    src, dst = Layout(Mesh(2), [0, None]), Layout(Mesh(2), [None, 0])
    full = torch.arange(64.0).reshape(8, 8)
    for limit in (10_000 + rank, 10_000.5 + rank):
        with pytest.raises(PlanMismatchError, match="memory_limit: 10000' against 'memory_limit: 10001'"):
            redistribute_many([(part_of(full, src, rank), (8, 8), src, dst)], memory_limit=limit)
    with pytest.raises(PlanMismatchError, match="donate: true"):
        redistribute_many([(part_of(full, src, rank).clone(), (8, 8), src, dst)], donate=rank == 0)
    # a source with a pending conjugation is resolved into memory of its own
    item = (part_of(full, src, rank) * 1j).conj(), (8, 8), src, dst
    held = 3 * 8 * 32
    with pytest.raises(UnsupportedError, match=f"{8 * 32} bytes above memory_limit={held}; call with"):
        redistribute_many([item], memory_limit=held)
    (found,) = redistribute_many([item], memory_limit=held + 8 * 32)
    assert torch.equal(found, part_of(-1j * full, dst, rank))
    resolved = item[0].resolve_conj()
    (found,) = redistribute_many([(resolved, *item[1:])], memory_limit=held)
    assert torch.equal(found, part_of(-1j * full, dst, rank))


def test_ranks_agree_on_the_limit() -> None:
    run_ranks(_other_limits, 2)


def test_what_cannot_be_limited_or_given_up_is_refused() -> None:
    one = Layout(Mesh(1), [None])
    whole = torch.zeros(4)
    with pytest.raises(RedistError, match="memory_limit must be a number of bytes, got nan"):
        redistribute_many([(whole, (4,), one, one)], memory_limit=float("nan"))
    with pytest.raises(LayoutError, match="rank 0: 'a', a source that is donated has to be all of its storage"):
        redistribute_many({"a": (whole[:2], (2,), one, one)}, donate=True)
    with pytest.raises(LayoutError, match="rank 0: 'a' and 'b' are one tensor, which is freed when the first of them"):
        redistribute_many({"a": (whole, (4,), one, one), "b": (whole, (4,), one, one)}, donate=True)
    assert whole.untyped_storage().nbytes() == 16
    with pytest.raises(PlanInfeasibleError, match=r"rank 0 needs sources 16 \+ targets 0 = 16 bytes; no method"):
        redistribute_many({"a": (whole, (4,), one, one)}, memory_limit=15)
    with pytest.raises(PlanInfeasibleError, match=r"rank 0 needs sources 16 \+ targets 16 = 32 bytes; none of"):
        redistribute_many({"a": (whole, (4,), one, one)}, memory_limit=16)
    (moved,) = redistribute_many([(whole, (4,), one, one)], memory_limit=32, donate=True)
    assert torch.equal(moved, torch.zeros(4))
    assert whole.untyped_storage().nbytes() == 0
