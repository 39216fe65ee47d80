"""Copies between tensors and buffers: as few as possible, and the same bytes as many would move."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod
from random import Random
from typing import Any, cast

import pytest
import torch
from redist_cases import random_case, random_parts
from torch.autograd import forward_ad

from optim_redist import Cyclic, Intervals, Layout, Mesh, parse_layout, plan, simulate
from optim_redist._methods.in_place import in_place
from optim_redist._running.copies import Copies, Pair, merged
from optim_redist._running.given import is_plain, refuse_other_than_values, resolved, waited_for
from optim_redist._running.rank_program import RankPhase
from optim_redist._running.stage_program import stage_programs
from optim_redist._running.views import FLAT, View, form_of, view_of
from optim_redist.layout import Kind
from optim_redist.problem import Problem


def _elements(view: View) -> list[int]:
    """The places of a view's elements, in order."""
    sizes, strides, offset = view
    return [
        offset + sum(k * stride for k, stride in zip(point, strides)) for point in product(*(range(n) for n in sizes))
    ]


def _moves(pairs: list[Pair]) -> list[tuple[str, int, int]]:
    return sorted(
        (pair.which, read, write) for pair in pairs for read, write in zip(_elements(pair.read), _elements(pair.write))
    )


def _random_pairs(rng: Random) -> list[Pair]:
    """Runs of equal views at even distances, here and there interrupted."""
    pairs, read, write = [], 0, 0
    for _ in range(rng.randint(1, 4)):
        sizes = tuple(rng.randint(1, 3) for _ in range(rng.randint(1, 2)))
        steps = rng.choice([0, 2, 5]), prod(sizes) + rng.choice([0, 1])
        for _ in range(rng.randint(1, 6)):
            strides = tuple(4**k for k in reversed(range(len(sizes))))
            slots = tuple(prod(sizes[k + 1 :]) for k in range(len(sizes)))
            pairs.append(Pair(rng.choice(["src", "src", "src", "dst"]), (sizes, strides, read), (sizes, slots, write)))
            read, write = read + steps[0], write + steps[1]
    return pairs


def test_merged_copies_move_the_same_elements() -> None:
    fewer = 0
    for seed in range(300):
        pairs = _random_pairs(Random(seed))
        found = merged(pairs)
        assert _moves(found) == _moves(pairs), seed
        fewer += len(found) < len(pairs)
    assert fewer > 200


def test_a_grid_of_blocks_is_one_copy() -> None:
    blocks = [
        Pair("src", ((2, 3), (12, 1), 24 * i + 3 * j), ((2, 3), (3, 1), 6 * k))
        for k, (i, j) in enumerate(product(range(3), range(4)))
    ]
    (pair,) = merged(blocks)
    assert pair.read[0] == (3, 4, 2, 3)
    assert _moves([pair]) == _moves(blocks)


def test_what_is_written_twice_or_backwards_is_not_merged() -> None:
    view: View = ((2,), (1,), 0)
    same = [Pair("src", view, view), Pair("src", ((2,), (1,), 2), view)]
    backwards = [Pair("src", ((2,), (1,), 4), view), Pair("src", view, ((2,), (1,), 2))]
    assert merged(same) == same
    assert merged(backwards) == backwards


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.complex128])
@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "shifted"])
def test_a_buffer_that_one_copy_fills(dtype: torch.dtype, offset: int) -> None:
    storage = torch.randint(0, 2, (8 * 64 + offset,)).to(dtype)
    source = storage[offset:].view(8, 64)
    blocks = [Pair("src", ((8, 16), (64, 1), 16 * k), ((8, 16), (16, 1), 128 * k)) for k in range(4)]
    copies = Copies(blocks, dtype.itemsize, [FLAT, ((8, 64), (64, 1))])
    assert copies.fills(512)
    assert not copies.fills(513)
    expected = torch.cat([source[:, 16 * k : 16 * (k + 1)].reshape(-1) for k in range(4)])
    assert torch.equal(copies.packed({"src": source}).view(-1).view(dtype), expected)
    target = torch.empty_like(expected)
    copies.run({"src": source}, target)
    assert torch.equal(target, expected)
    assert all(torch.equal(view_of(expected, pair.write), view_of(source, pair.read)) for pair in copies.pairs)


def _phase(mesh: tuple[int, ...], src: str, dst: str, rank: int) -> RankPhase:
    grid = Mesh(mesh)
    made = plan((64, 64), "bf16", *(parse_layout(text, grid, num_dims=2) for text in (src, dst)), planners=["direct"])
    return stage_programs(made, rank, separate=True)[0].phases[0]


@pytest.mark.parametrize(
    ("mesh", "src", "dst", "most"),
    [
        ((4,), "S(0)", "S(1)", 1),
        ((4,), "S(1)", "S(0)", 1),
        ((4,), "S(0)", "R", 0),
        ((2, 2), "S(0),S(0)", "S(0),S(1)", 1),
        ((2, 2), "S(0),S(0)", "S(1),S(1)", 1),
        ((2, 2), "S(0),S(1)", "R,R", 1),
    ],
)
def test_what_stays_travels_with_the_rest_where_that_takes_fewer_copies(
    mesh: tuple[int, ...], src: str, dst: str, most: int
) -> None:
    for rank in range(prod(mesh)):
        phase = _phase(mesh, src, dst, rank)
        grid = Mesh(mesh)
        shapes = [parse_layout(text, grid, num_dims=2).local_shape((64, 64), rank) for text in (src, dst)]
        forms = [(shape, (shape[1], 1)) for shape in shapes]
        views = phase.views_for(*forms, to_itself=True)
        assert views.num_copies <= most
        assert views.num_copied <= sum(message.num_elements for message in (*phase.sends, *phase.receives))


def test_what_is_charged_for_copies_is_what_is_copied() -> None:
    seen: Counter[tuple[bool, bool]] = Counter()
    equal = 0
    for seed in range(300):
        shape, src, dst = random_case(seed, "COBUKRI")
        made = plan(shape, "bf16", src, dst, planners=["direct"])
        # what several ranks hold is cut once more, between them
        if not made.communicates or made.problems[0].src_replicas > 1:
            continue
        packs = unpacks = False
        for rank in {*src.mesh.ranks, *dst.mesh.ranks}:
            (stage,) = stage_programs(made, rank, separate=True)
            forms = [form_of(torch.empty(layout.local_shape(shape, rank))) for layout in (src, dst)]
            views = stage.phases[0].views_for(*forms)
            packs = packs or bool(views.packs.pairs)
            unpacks = unpacks or bool(views.unpacks.pairs)
        leaves, arrives = in_place(Problem(shape, src, dst))
        # dimensions that hold one index on all ranks that move anything are not looked for
        assert not (leaves and packs), seed
        assert not (arrives and unpacks), seed
        equal += (leaves, arrives) == (not packs, not unpacks)
        seen[leaves, arrives] += 1
    assert min(seen.values()) > 10
    assert len(seen) == 4
    assert equal > 0.95 * seen.total()


def test_buffers_are_no_larger_than_plans_say() -> None:
    to_itself = 0
    for seed in range(200):
        shape, src, dst = random_case(seed, "COBU")
        made = plan(shape, "bf16", src, dst, planners=["direct"])
        if not made.communicates:
            continue
        for rank in made.src.mesh.ranks:
            (stage,) = stage_programs(made, rank, separate=True)
            source, target = (
                torch.empty(layout.local_shape(shape, rank), dtype=torch.bfloat16) for layout in (src, dst)
            )
            views = stage.phases[0].views_for(form_of(source), form_of(target), to_itself=True)
            held = (source.numel() + target.numel() + views.num_copied) * made.itemsize
            assert held <= made.peak_bytes, (seed, rank)
            to_itself += rank in views.sent
    assert to_itself > 50


def test_plain_tensors_are_those_that_nothing_is_done_about() -> None:
    real, complex_ = torch.randn(4, 3), torch.randn(4, 3, dtype=torch.complex64)
    seen: list[bool] = []
    for tensor in (
        real,
        real.t()[1:],
        torch.empty(0),
        torch.tensor(1.0),
        torch.nn.Parameter(real),
        real.clone().requires_grad_(),
        complex_.conj(),
        complex_.conj().imag,
        real.to_sparse(),
        cast(Any, real.numpy()),
    ):
        seen.append(is_plain(tensor))
        if seen[-1]:
            refuse_other_than_values(tensor, "it")
            assert waited_for(tensor) is tensor
            assert resolved(tensor) is tensor
    assert seen == [True] * 4 + [False] * 6
    with forward_ad.dual_level():
        assert not is_plain(forward_ad.make_dual(real, real))

    def inside(row: torch.Tensor) -> torch.Tensor:
        seen.append(is_plain(row))
        return row

    torch.func.vmap(inside)(real)
    assert not seen[-1]


@pytest.mark.parametrize(
    "kind", [Cyclic(3), Intervals([[(0, 1), (4, 6), (7, 8)], [(1, 4), (6, 7), (8, 14)]])], ids=["dealt", "intervals"]
)
def test_a_dimension_that_stays_is_copied_at_once_however_many_pieces_it_has(kind: Kind) -> None:
    mesh, shape = Mesh((2, 2)), (14, 6)
    src, dst = Layout(mesh, [((0,), kind), 1]), Layout(mesh, [((0,), kind), None])
    made = plan(shape, "float32", src, dst)
    for rank in range(4):
        ((phase,),) = [stage.phases for stage in stage_programs(made, rank)]
        assert [len(message.pieces) for message in (*phase.sends, *phase.receives, phase.stays_from)] == [1] * 3
    moved = simulate(made, random_parts(src, shape))
    assert all(torch.equal(cast(Any, moved[rank]), part) for rank, part in random_parts(dst, shape).items())
