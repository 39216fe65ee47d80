"""Gradients of local parts by both rules, against torch's autograd through the same map in one process, in float64."""

from __future__ import annotations

import random
import warnings
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from redist_cases import Case, contributions_of, part_of, random_case
from redist_memory import Live
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, vmap

from optim_redist import (
    Cyclic,
    Handle,
    Intervals,
    Layout,
    LayoutError,
    Mesh,
    UnsupportedError,
    plan,
    redistribute_local,
    redistribute_many,
    verify,
)
from optim_redist.gradients import GradientRule, dual, way_back
from optim_redist.shares import put_back, shared_out
from optim_utils import MOMENT8, quantize
from optim_utils.testing import run_ranks

RULES: tuple[GradientRule, ...] = ("replicate", "adjoint")
FOUR_RANKS = [(4,), (2, 2), (3,), (2,), (1, 4)]
GRID, PAIR, OTHERS, LINE = Mesh((2, 2)), Mesh(2), Mesh(2, ranks=[3, 1]), Mesh(4)
NAMED = [
    Case((5, 6), Layout(GRID, [0, 1]), Layout(GRID, [None, None])),
    Case((5, 6), Layout(GRID, [None, None]), Layout(GRID, [1, 0])),
    Case((5, 6), Layout(GRID, [0, None]), Layout(GRID, [1, None])),
    Case((5, 6), Layout(GRID, [0, None]), Layout(GRID, [(1, 0), None])),
    Case((7, 3), Layout(GRID, [(0, Cyclic(2)), None]), Layout(GRID, [((0, 1), Cyclic(1)), None])),
    Case((5, 6), Layout(GRID, [None, None], {0: "sum"}), Layout(GRID, [None, 1])),
    Case((5, 6), Layout(GRID, [None, None], {0: "sum", 1: "sum"}), Layout(GRID, [None, None])),
    # contributions that are kept, on the same axis and on another, and ones that begin
    Case((5, 6), Layout(GRID, [1, None], {0: "sum"}), Layout(GRID, [None, 1], {0: "sum"})),
    Case((5, 6), Layout(GRID, [None, None], {0: "sum"}), Layout(GRID, [None, None], {1: "sum"})),
    Case((5, 6), Layout(GRID, [None, 1]), Layout(GRID, [None, None], {0: "sum"})),
    Case((5, 6), Layout(GRID, [None, None]), Layout(GRID, [None, None], {0: "sum", 1: "sum"})),
    # averages
    Case((5, 6), Layout(GRID, [None, None], {0: "avg"}), Layout(GRID, [0, None])),
    Case((5, 6), Layout(GRID, [None, None], {0: "avg", 1: "sum"}), Layout(GRID, [None, None])),
    Case((5, 6), Layout(GRID, [1, None], {0: "avg"}), Layout(GRID, [None, 1], {0: "avg"})),
    Case((5, 6), Layout(GRID, [1, None]), Layout(GRID, [None, 1], {0: "avg"})),
    # ranks outside of the source, of the target, and other numbers of replicas
    Case((5, 6), Layout(PAIR, [0, None]), Layout(OTHERS, [None, None])),
    Case((5, 6), Layout(OTHERS, [None, None]), Layout(PAIR, [None, 0])),
    Case((5, 6), Layout(OTHERS, [None, None], {0: "sum"}), Layout(LINE, [None, None])),
    Case((5, 6), Layout(LINE, [None, None]), Layout(OTHERS, [None, None], {0: "sum"})),
    Case((5, 6), Layout(LINE, [None, None]), Layout(PAIR, [None, None])),
    Case((5, 6), Layout(Mesh(1, ranks=[2]), [None, None]), Layout(LINE, [None, None])),
    # a dimension that is divided already is the longest
    Case((9, 1), Layout(GRID, [(0, Intervals([[(0, 2), (5, 9)], [(2, 5)]])), None]), Layout(PAIR, [None, None])),
    Case((), Layout(LINE, []), Layout(PAIR, [])),
    Case((), Layout(LINE, [], {0: "sum"}), Layout(LINE, [])),
    Case((0, 3), Layout(LINE, [None, 0]), Layout(LINE, [None, None])),
]


def _random_cases(seeds: range) -> list[Case]:
    """Cases of all families on up to four ranks, with sums pending along some axes of which there are replicas."""
    rng, cases = random.Random(0), []
    for seed in seeds:
        shape, *sides = random_case(seed, "COBURIEKM", FOUR_RANKS)
        for k, share in enumerate((0.9, 0.3) if seed % 4 else (0.0, 0.0)):
            mesh, dims = sides[k].mesh, sides[k].dims
            axes = [*sides[k].replicated_axes, *(axis for axis, _ in sides[k].partial)]
            sides[k] = Layout(mesh, dims, {axis: "sum" for axis in axes if rng.random() < share})
        if max(rank for side in sides for rank in side.mesh.ranks) < 4:
            cases.append(Case(shape, *sides))
    return cases


class _Numbers(NamedTuple):
    """Full tensors: contributions to the source, directions, and weights of the losses, one of each for all ranks."""

    contributions: list[Tensor]
    directions: list[Tensor]
    weights: list[Tensor]


def _numbers(case: Case, rule: GradientRule) -> _Numbers:
    generator = torch.Generator().manual_seed(5)

    def some(count: int) -> list[Tensor]:
        return [torch.randn(case.shape, generator=generator, dtype=torch.float64) for _ in range(count)]

    count = prod(case.src.mesh.sizes[axis] for axis, _ in case.src.partial)
    found = _Numbers(some(count), some(count), some(4))
    if rule == "replicate":
        # one loss, and one direction for all contributions, whose gradients are one
        return found._replace(directions=[found.directions[0]] * count, weights=[found.weights[0]] * 4)
    return found


def _dtype(case: Case) -> torch.dtype:
    """float64, in which no average can begin."""
    return torch.float32 if "avg" in dict(case.dst.partial).values() else torch.float64


def _num_averaged(layout: Layout) -> int:
    return prod(layout.mesh.sizes[axis] for axis, op in layout.partial if op == "avg")


def _weight_number(layout: Layout, rank: int) -> int:
    """Ranks that hold contributions to the same value have the same weights."""
    others = [axis for axis in range(layout.mesh.num_axes) if axis not in dict(layout.partial)]
    return layout.linear(layout.mesh.coordinates[rank], others)


def _loss(part: Tensor, weights: Tensor, dst: Layout) -> Tensor:
    """Quadratic, unless contributions are pending: their loss has to depend on their combination alone."""
    return (weights * part).sum() / _num_averaged(dst) if dst.partial else (weights * part**2).sum()


def _gradients_on_ranks(rank: int, world: int, cases: list[Case]) -> list[tuple[Tensor, Tensor] | None]:
    found: list[tuple[Tensor, Tensor] | None] = []
    for case in cases:
        shape, src, dst = case
        for rule in RULES:
            if rank not in {*src.mesh.ranks, *dst.mesh.ranks}:
                found.append(None)
                continue
            numbers = _numbers(case, rule)
            x = direction = torch.empty(0, dtype=_dtype(case))
            if rank in src.mesh.ranks:
                number = contributions_of(src, rank)
                x, direction = (part_of(full[number], src, rank).to(x.dtype) for full in numbers[:2])
            x.requires_grad_()
            moved = redistribute_local(x, shape, src, dst, grad=rule)
            assert moved is not None
            loss = (moved**2).sum()
            if rank in dst.mesh.ranks:
                weights = part_of(numbers.weights[_weight_number(dst, rank)], dst, rank).to(x.dtype)
                loss = _loss(moved, weights, dst)
            else:
                assert moved.shape == (0,)
            (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
            assert gradient.shape == x.shape
            twice = torch.zeros(())
            if not dst.partial:
                (twice,) = torch.autograd.grad((direction * gradient).sum(), x)
            found.append((gradient.detach(), twice))
    return found


def _reference(case: Case, rule: GradientRule) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the whole loss for each contribution, and those of the gradients along the directions."""
    numbers = _numbers(case, rule)
    leaves = [full.clone().requires_grad_() for full in numbers.contributions]
    value = torch.stack(leaves).sum(0) / _num_averaged(case.src)
    ranks = case.dst.mesh.ranks
    if rule == "replicate":
        loss = (numbers.weights[0] * (value if case.dst.partial else value**2)).sum()
    else:
        # replicas each have their loss, contributions to the same have it together
        groups = {(_weight_number(case.dst, rank)): rank for rank in ranks}
        loss = torch.zeros((), dtype=torch.float64)
        for number, rank in groups.items():
            part = part_of(value, case.dst, rank)
            weights = part_of(numbers.weights[number], case.dst, rank)
            loss = loss + (weights * (part if case.dst.partial else part**2)).sum()
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    if case.dst.partial:
        return list(gradients), []
    along = [(direction * gradient).sum() for direction, gradient in zip(numbers.directions, gradients)]
    total = along[0] if rule == "replicate" else torch.stack(along).sum()
    return list(gradients), list(torch.autograd.grad(total, leaves))


def _assert_alike(case: Case, rule: GradientRule, found: dict[int, Tensor], expected: list[Tensor]) -> None:
    """By "replicate" every rank has all of the gradient; by "adjoint" ranks that hold the same have it together."""
    shape, src, _ = case
    totals: dict[Any, Tensor] = {}
    for rank, part in found.items():
        key = rank if rule == "replicate" else (contributions_of(src, rank), src.indices(shape, rank))
        totals[key] = totals.get(key, torch.zeros_like(part)) + part
    for rank in found:
        key = rank if rule == "replicate" else (contributions_of(src, rank), src.indices(shape, rank))
        whole = part_of(expected[contributions_of(src, rank)].detach(), src, rank)
        error = 1e-12 if _dtype(case) == torch.float64 else 1e-5
        assert torch.allclose(totals[key].double(), whole, rtol=error, atol=error), (case, rule, rank)


def _compare(cases: list[Case]) -> None:
    by_rank = run_ranks(_gradients_on_ranks, 4, cases)
    for number, (case, rule) in enumerate([(case, rule) for case in cases for rule in RULES]):
        expected = _reference(case, rule)
        pairs = {rank: found[number] for rank, found in enumerate(by_rank) if rank in case.src.mesh.ranks}
        _assert_alike(case, rule, {rank: pair[0] for rank, pair in pairs.items() if pair}, expected[0])
        if expected[1]:
            _assert_alike(case, rule, {rank: pair[1] for rank, pair in pairs.items() if pair}, expected[1])


def test_gradients_of_named_cases() -> None:
    _compare(NAMED)


@pytest.mark.slow
def test_gradients_of_random_cases() -> None:
    cases = _random_cases(range(160))
    assert len(cases) > 100
    assert sum(bool(case.src.partial) for case in cases) > 20
    _compare(cases)


def _along_a_chain(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """Rows are gathered, all ranks compute the same, columns of it are taken, and every rank has its own loss."""
    rows, columns, whole = Layout(LINE, [0, None]), Layout(LINE, [None, 0]), Layout(LINE, [None, None])
    full, weights = (torch.arange(24.0, dtype=torch.float64).reshape(4, 6) + shift for shift in (1, 7))
    start = part_of(full, rows, rank).requires_grad_()
    gathered = redistribute_local(start, full.shape, rows, whole, grad="adjoint")
    assert gathered is not None
    mine = redistribute_local(gathered.sin() * gathered, full.shape, whole, columns, grad="adjoint")
    assert mine is not None
    ((mine**2 * part_of(weights, columns, rank)).sum() + (rank + 1) * gathered.cos().sum()).backward()
    assert start.grad is not None
    leaf = full.clone().requires_grad_()
    (((leaf.sin() * leaf) ** 2 * weights).sum() + 10 * leaf.cos().sum()).backward()
    assert leaf.grad is not None
    return start.grad, part_of(leaf.grad, rows, rank)


def test_gradients_of_replicas_are_counted_once_along_a_chain() -> None:
    for found, expected in run_ranks(_along_a_chain, 4):
        assert torch.allclose(found, expected, rtol=1e-12)


def test_a_transpose_moves_as_much_as_the_move() -> None:
    shape, rows, whole = (8, 6), Layout(LINE, [0, None]), Layout(LINE, [None, None])
    pending = Layout(LINE, [None, None], {0: "sum"})
    moves = [(whole, rows), (rows, whole), (pending, rows), (pending, whole), (whole, whole)]
    # slices of what is divided already
    moves += [
        (Layout(GRID, [0, None]), Layout(GRID, [(0, 1), None])),
        (Layout(GRID, [(0, Cyclic(1)), None]), Layout(GRID, [((1, 0), Cyclic(1)), None])),
        (Layout(GRID, [None, None]), Layout(GRID, [None, ((1, 0), Cyclic(1))])),
    ]
    for src, dst in moves:
        way = way_back(shape, src, dst, "adjoint")
        there, back = plan(shape, "float32", src, dst), plan(shape, "float32", way.src, way.dst)
        assert sum(step.recv for step in back.steps) == sum(step.recv for step in there.steps), (src, dst)
        verify(back)
    assert dual(dual(rows, "adjoint"), "adjoint") == rows
    assert dual(dual(pending, "adjoint"), "adjoint") == pending


@pytest.mark.parametrize("seed", range(60))
def test_shares_are_the_tensor_once(seed: int) -> None:
    shape, dst, src = random_case(seed)
    here, there = dual(dst, "adjoint"), dual(src, "adjoint")
    shares = shared_out(shape, here, there)
    if not prod(shape) or not shape:
        return
    full = torch.arange(1, prod(shape) + 1).reshape(shape)
    found: dict[Any, Tensor] = {}
    for rank in shares.mesh.ranks:
        part = put_back(part_of(full, shares, rank), shape, shares, there, rank)
        assert part.shape == there.local_shape(shape, rank)
        # contributions that are kept are not shared out
        kept = tuple(there.mesh.coordinates[rank][axis] for axis, _ in shares.partial)
        key = kept, there.indices(shape, rank)
        found[key] = found.get(key, torch.zeros_like(part)) + part
    for rank in there.mesh.ranks:
        kept = tuple(there.mesh.coordinates[rank][axis] for axis, _ in shares.partial)
        replicas = [axis for axis in there.replicated_axes if there.mesh.sizes[axis] > 1]
        assert not replicas
        assert torch.equal(found[kept, there.indices(shape, rank)], part_of(full, there, rank))


def test_a_share_is_put_among_zeros_that_are_held_once() -> None:
    whole, shares = Layout(PAIR, [None, None]), Layout(PAIR, [0, None])
    share = torch.ones(32, 64)
    with Live() as live:
        share.view(-1)
        found = put_back(share, (64, 64), shares, whole, 1)
    assert found.sum() == share.sum() == found[32:].sum()
    # the places are whole numbers of 64 bits
    assert live.peak <= share.nbytes + found.nbytes + 32 * 8
    share.requires_grad_()
    cubes = put_back(share, (64, 64), shares, whole, 1) ** 3
    (gradient,) = torch.autograd.grad(cubes.sum(), share, create_graph=True)
    assert torch.equal(*torch.autograd.grad(gradient.sum(), share), 6 * share)


def _parameters(rank: int, world: int) -> None:
    """A leaf that stays where it is, results that share memory, dtypes, and a backward pass under a memory limit."""
    rows, columns = Layout(PAIR, [0, None]), Layout(PAIR, [None, 0])
    for dtype in (torch.bfloat16, torch.float32, torch.complex64):
        for rule in RULES:
            mine = torch.ones(2, 4, dtype=dtype, requires_grad=True)
            stays = redistribute_local(mine, (4, 4), rows, rows, grad=rule)
            moved = redistribute_local(mine, (4, 4), rows, columns, grad=rule, memory_limit=4 * 2**16)
            assert stays is not None
            assert moved is not None
            (stays.sum() + (rank + 2) * moved.sum()).abs().backward()
            assert mine.grad is not None
            # |s| has the gradient s/|s| = 1 here
            assert torch.equal(mine.grad, torch.tensor([[3, 3, 4, 4]] * 2, dtype=dtype))
    with torch.no_grad():
        handle = redistribute_local(mine, (4, 4), rows, columns, async_op=True)
    assert isinstance(handle, Handle)
    assert not handle.wait().requires_grad


def test_gradients_of_what_stays_and_what_moves_are_added() -> None:
    run_ranks(_parameters, 2)


def _values_that_are_more(rank: int, world: int) -> None:
    """Values would move, and tangents or batches be lost, on a rank whose part stays, too."""
    mine, rows = torch.ones(2, 4), Layout(PAIR, [0, None])
    for target in (Layout(PAIR, [None, 0]), rows):

        def moved(tensor: Tensor, target: Layout = target) -> Any:
            return redistribute_local(tensor, (4, 4), rows, target)

        for transform in (vmap, lambda function: grad(lambda tensor: function(tensor).sum())):
            with pytest.raises(UnsupportedError, match=r"source tensor is inside of a transform of torch\.func"):
                transform(moved)(mine[None])
        with forward_ad.dual_level():
            for primal in (mine, mine.clone().requires_grad_()):
                dual_tensor = forward_ad.make_dual(primal, mine)
                with pytest.raises(UnsupportedError, match="source tensor has a tangent of forward-mode"):
                    moved(dual_tensor)
                with pytest.raises(UnsupportedError, match="'w' has a tangent of forward-mode"):
                    redistribute_many({"w": (dual_tensor, (4, 4), rows, target)})
            # without a tangent, it is a tensor like any other
            assert torch.equal(moved(mine), torch.ones(target.local_shape((4, 4), rank)))
        low_bit, words = quantize(mine, MOMENT8), "is a LowBitTensor, which is made of other tensors"
        with pytest.raises(UnsupportedError, match=f"source tensor {words}"):
            moved(low_bit)
        with pytest.raises(UnsupportedError, match=f"'w' {words}"):
            redistribute_many({"w": (low_bit, (4, 4), rows, target)})
        with pytest.raises(UnsupportedError, match=f"out tensor {words}"):
            redistribute_local(mine, (4, 4), rows, target, out=low_bit)
        with warnings.catch_warnings(action="ignore"), pytest.raises(UnsupportedError, match="tensor is nested"):
            # torch warns that this kind of tensor is a prototype
            moved(torch.nested.nested_tensor([mine[0], mine[1]]))
        start = mine.clone().requires_grad_()
        result = moved(start)
        with pytest.raises(UnsupportedError, match=r"source tensor is torch\.sparse_coo, .*; give \.to_dense\(\)"):
            result.backward(torch.ones_like(result).to_sparse())
        result = moved(start)
        with pytest.raises(UnsupportedError, match="or of batched gradients"):
            torch.autograd.grad(result, start, torch.ones(3, *result.shape), is_grads_batched=True)


def test_tensors_that_are_more_than_values_are_refused() -> None:
    run_ranks(_values_that_are_more, 2)


def test_what_has_no_gradient_is_refused_by_name() -> None:
    mine, rows, columns = (
        torch.zeros(4, 4, requires_grad=True),
        *(Layout(Mesh(1), dims) for dims in ([0, None], [None, 0])),
    )
    for option in ({"out": torch.zeros(4, 4)}, {"async_op": True}, {"donate": True}):
        with pytest.raises(
            UnsupportedError, match=rf"of shape \(4, 4\) requires a gradient, which {next(iter(option))} "
        ):
            redistribute_local(mine, (4, 4), rows, columns, **option)  # type: ignore[call-overload]
    for op in ("min", "max", "product"):
        pending = Layout(PAIR, [None, None], {0: op})
        for sides in ((pending, Layout(PAIR, [None, None])), (Layout(PAIR, [None, None]), pending)):
            with pytest.raises(UnsupportedError, match=rf"(src|dst) is .*: a pending {op} is not linear"):
                redistribute_local(mine, (4, 4), *sides)
    with pytest.raises(UnsupportedError, match='grad is "replicate" or "adjoint", got \'sum\''):
        redistribute_local(mine.detach(), (4, 4), rows, columns, grad="sum")  # type: ignore[call-overload]
    # a rank outside of the source has no elements
    elsewhere = Layout(Mesh(1, ranks=[3]), [None, None])
    with pytest.raises(LayoutError, match=r"has shape \(4, 4\), its layout says None"):
        redistribute_local(mine, (4, 4), elsewhere, elsewhere)
