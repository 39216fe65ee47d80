"""Exchanges between the same tensors again and again: right values, memory that is lent, nothing planned anew."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

import pytest
import torch
from redist_cases import part_of, random_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from optim_redist import Layout, LayoutError, Mesh, Plan, RedistError, RepeatedExchange, UnsupportedError, plan
from optim_utils.testing import run_ranks

DTYPES = [torch.bfloat16, torch.int64, torch.uint8, torch.float32, torch.complex128]
CPU = torch.device("cpu")


class _Views(TorchDispatchMode):
    """Counts views that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.is_view
        return func(*args, **(kwargs or {}))


def _cases() -> list[tuple[tuple[int, ...], torch.dtype, Layout, Layout]]:
    """Shapes and layouts of up to four ranks, without partial sums."""
    found = []
    for seed in range(60):
        shape, src, dst = random_case(seed, "COBURIEKM", [(4,), (2, 2), (3,), (2,)])
        if max((*src.mesh.ranks, *dst.mesh.ranks)) <= 3:
            found.append((shape, DTYPES[seed % len(DTYPES)], src, dst))
    # strided pieces that 16 bytes at a time fit
    mesh = Mesh(4)
    return [*found, ((8, 64), torch.bfloat16, Layout(mesh, [None, 0]), Layout(mesh, [0, None]))]


def _plans(cases: Any) -> list[Plan]:
    return [plan(shape, dtype, src, dst, planners=("direct",)) for shape, dtype, src, dst in cases]


def _numel_of(tensors: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


def _exchange(rank: int, world: int) -> None:
    cases = _cases()
    assert len(cases) > 30
    plans = _plans(cases)
    wholes = [torch.arange(prod(shape)).reshape(shape).to(dtype) for shape, dtype, _, _ in cases]
    for has_sources, has_targets in product([True, False], repeat=2):
        before = [part_of(whole, src, rank) for whole, (_, _, src, _) in zip(wholes, cases)]
        after = [part_of(whole, dst, rank) for whole, (_, _, _, dst) in zip(wholes, cases)]
        # transposed in memory, where that is possible
        sources = [_transposed(t) for t in before] if has_sources else None
        targets = [_transposed(t) for t in after] if has_targets else None
        repeated = RepeatedExchange(plans, CPU, sources=sources, targets=targets)
        for step in range(3):
            for tensor in targets or ():
                if tensor is not None:
                    tensor.fill_(1)
            for given, part in zip(sources or repeated.lend_sources(), before, strict=True):
                if given is not None:
                    given.copy_(part + step)
            with _Views() as views:
                exchange = repeated.start()
                if targets is not None:
                    assert all((t == 1).all() for t in targets if t is not None)
                found = exchange.wait()
                assert exchange.wait() is found
            assert views.count == 0 or step == 0  # when plans are compared
            for given, part in zip(found, after, strict=True):
                assert (given is None) == (part is None)
                assert part is None or torch.equal(given, part + step)
            repeated.release()
            if not has_sources:
                assert _numel_of(repeated.sources) == 0
            if not has_targets:
                assert _numel_of(repeated.targets) == 0


def _transposed(like: Tensor | None) -> Tensor | None:
    if like is None or like.ndim < 2:
        return None if like is None else torch.zeros_like(like)
    return torch.zeros(like.shape[::-1], dtype=like.dtype).permute(*reversed(range(like.ndim)))


def _one_at_a_time(rank: int, world: int) -> None:
    mesh, whole = Mesh(2), torch.arange(8.0).reshape(2, 4)
    task = plan((2, 4), "float32", Layout(mesh, [0, None]), Layout(mesh, [None, 0]))
    repeated = RepeatedExchange([task], CPU, sources=[whole[rank : rank + 1]])
    for _ in range(2):
        exchange = repeated.start()
        with pytest.raises(UnsupportedError, match="has not been waited for"):
            repeated.start()
        assert torch.equal(exchange.wait()[0], whole[:, 2 * rank : 2 * rank + 2])


def test_one_exchange_at_a_time() -> None:
    run_ranks(_one_at_a_time, 2)


def test_memory_that_is_not_there_is_not_used() -> None:
    only = Layout(Mesh(1), [None])
    repeated = RepeatedExchange(_plans([((5,), torch.float32, only, only)]), CPU)
    for step in range(2):
        # neither at first nor after an exchange
        with pytest.raises(UnsupportedError, match=r"no memory before lend_sources\(\)"):
            repeated.start()
        repeated.lend_sources()[0].fill_(step)
        exchange = repeated.start()
        with pytest.raises(UnsupportedError, match="its sources go back with it"):
            repeated.lend_sources()
        with pytest.raises(UnsupportedError, match="its targets are to be written"):
            repeated.release()
        assert exchange.wait()[0].tolist() == [step] * 5
        repeated.release()


@pytest.mark.parametrize("made_in", [False, True], ids=["made outside", "made in it"])
def test_in_and_out_of_inference_mode(made_in: bool) -> None:
    only = Layout(Mesh(1), [None])
    plans = _plans([((5,), torch.float32, only, only)])
    given = torch.arange(5.0, requires_grad=True), torch.zeros(5)
    with torch.inference_mode(made_in):
        own = RepeatedExchange(plans, CPU)
        of_others = RepeatedExchange(plans, CPU, sources=[given[0]], targets=[given[1]])
    for used_in in (False, True, False):
        with torch.inference_mode(used_in):
            own.lend_sources()[0].fill_(3.0)
            assert own.start().wait()[0].tolist() == [3.0] * 5
            own.release()
            given[1].zero_()
            assert of_others.lend_sources() is of_others.sources
            assert torch.equal(of_others.start().wait()[0], given[0])


def test_targets_have_a_place_for_each_element_and_none_of_a_source() -> None:
    only = Layout(Mesh(1), [None])
    plans = _plans([((5,), torch.float32, only, only)] * 2)
    memory = torch.arange(40.0)
    apart = [memory[:5], memory[5:10], memory[10:15], memory[15:20]]
    RepeatedExchange(plans, CPU, sources=apart[:2], targets=apart[2:])
    for sources, targets, message in [
        (apart[:2], [memory[30:35], memory[9:14]], "target 1 shares memory with a source"),
        ([memory[30:35], memory[14:19]], apart[1:3], "source 1 shares memory with a target"),
        ([memory[0:30:6], memory[35:]], apart[1:3], "target 0 shares memory with a source"),
        (apart[:2], apart[:2], "shares memory"),
        (apart[:2], [memory[30:35], memory[20].expand(5)], "target 1 is expanded"),
        (apart[:2], [memory[30:35], torch.complex(memory, memory).conj().imag[:5]], "target 1 is a view with a pend"),
    ]:
        with pytest.raises(LayoutError, match=message):
            RepeatedExchange(plans, CPU, sources=sources, targets=targets)


def test_exchanges_repeat() -> None:
    run_ranks(_exchange, 4)


def _side_by_side(rank: int, world: int) -> None:
    mesh = Mesh(2)
    rows, columns = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    whole = torch.arange(24.0).reshape(4, 6)
    there = RepeatedExchange(_plans([((4, 6), torch.float32, rows, columns)]), CPU)
    back = RepeatedExchange(_plans([((4, 6), torch.float32, columns, rows)]), CPU)
    for step in range(2):
        for repeated, layout in ((there, rows), (back, columns)):
            (source,) = repeated.lend_sources()
            source.copy_(part_of(whole + step, layout, rank))
        # both are under way at once
        first, second = there.start(), back.start()
        (found,) = second.wait()
        assert torch.equal(found, part_of(whole + step, rows, rank))
        (found,) = first.wait()
        assert torch.equal(found, part_of(whole + step, columns, rank))


def test_several_may_be_under_way() -> None:
    run_ranks(_side_by_side, 2)


def test_what_never_leaves_its_rank() -> None:
    only = Layout(Mesh(1), [None])
    source, target = torch.arange(5.0), torch.zeros(5)
    repeated = RepeatedExchange(_plans([((5,), torch.float32, only, only)]), CPU, sources=[source], targets=[target])
    exchange = repeated.start()
    assert not target.any()
    exchange.wait()
    assert torch.equal(target, source)


def test_tensors_that_their_plans_do_not_mean() -> None:
    only = Layout(Mesh(1), [None])
    plans = _plans([((5,), torch.float32, only, only)])
    with pytest.raises(LayoutError, match=r"2 sources for 1 plans"):
        RepeatedExchange(plans, CPU, sources=[None, None])
    with pytest.raises(LayoutError, match=r"target 0 is \(\(4,\), torch.float32\), its plan says \(\(5,\), torch.flo"):
        RepeatedExchange(plans, CPU, targets=[torch.zeros(4)])
    with pytest.raises(LayoutError, match=r"source 0 is None"):
        RepeatedExchange(plans, CPU, sources=[None])
    with pytest.raises(RedistError, match="plans must be a list with a plan for each tensor, got Plan"):
        RepeatedExchange(plans[0], CPU)
    with pytest.raises(ValueError, match="plans is empty"):
        RepeatedExchange([], CPU)
    with pytest.raises(LayoutError, match="pending"):
        imaginary = _plans([((5,), torch.complex64, only, only)])
        RepeatedExchange(imaginary, CPU, sources=[torch.zeros(5, dtype=torch.complex64).conj()])


def _refused(rank: int, world: int) -> None:
    mesh = Mesh(2)
    partial, rows = Layout(mesh, [None], {0: "sum"}), Layout(mesh, [0])
    with pytest.raises(UnsupportedError, match="without reductions repeat"):
        RepeatedExchange(_plans([((6,), torch.float32, partial, rows)]), CPU)
    halves = Layout(mesh, [None, 0])
    limited = plan((64, 64), torch.float32, Layout(mesh, [0, None]), halves, memory_limit=18000)
    assert sum(stage.rounds for stage in limited.stages) > 1
    with pytest.raises(UnsupportedError, match="memory_limit"):
        RepeatedExchange([limited], CPU)


def test_what_does_not_repeat() -> None:
    run_ranks(_refused, 2)
