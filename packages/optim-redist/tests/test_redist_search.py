"""The search over plain collectives: the worked optima, an exhaustive search beside it, and steps that can be done."""

import heapq
import json
import random
from itertools import product
from math import inf, prod
from pathlib import Path

import pytest
from redist_cases import random_case

from optim_redist import Chunk, Cyclic, Layout, Mesh, Ragged, Strided, plan, same_ownership, verify
from optim_redist._methods.collective_search import search_collectives
from optim_redist._methods.collective_states import prime_factors
from optim_redist.index_sets import elements

EXAMPLES = json.loads((Path(__file__).parent / "redist_examples.json").read_text(encoding="utf-8"))
ROWS = [
    row for row in EXAMPLES["redistributions"] + EXAMPLES["named"] if row["best_collective_sequence_recv"] is not None
]


def layout_of(mesh: Mesh, dims) -> Layout:
    return Layout(mesh, [tuple(axes) or None for axes in dims])


def held_by(layout: Layout, shape) -> dict[int, set]:
    """Every (contribution, element) a rank holds, one by one."""
    found = {}
    for rank, point in layout.mesh.coordinates.items():
        contribution = tuple((axis, point[axis]) for axis, _ in layout.partial)
        held = product(*(elements(indices) for indices in layout.indices(shape, rank)))
        found[rank] = {(contribution, index) for index in held}
    return found


def check_steps(shape, src: Layout, dst: Layout, steps) -> None:
    """Every step can be done inside its groups, receives no more than it says, and the last layout is the target."""
    layout = src
    for step in steps:
        before, after = held_by(layout, shape), held_by(step.layout, shape)
        points = step.layout.mesh.coordinates
        most = 0
        for rank, held in after.items():
            group = [
                other
                for other, point in points.items()
                if step.op == "permute"
                or all(a == b for axis, (a, b) in enumerate(zip(point, points[rank])) if axis not in step.axes)
            ]
            if step.op in ("reduce_scatter", "all_reduce"):
                wanted = {index for _, index in held}
                assert all(wanted <= {index for _, index in before[other]} for other in group)
            elif step.op == "init_partial":
                assert {index for _, index in held} == {index for _, index in before[rank]}
            else:
                assert held <= set().union(*(before[other] for other in group)), f"{step.op} needs a stranger's data"
                most = max(most, len(held - before[rank]))
            assert step.op == "permute" or len(group) == step.group_size
        assert most <= step.recv
        assert step.op != "slice" or most == 0
        layout = step.layout
    assert same_ownership(layout, dst, shape)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.get("id") or row["name"])
def test_worked_optima(row):
    mesh = Mesh(row["mesh"])
    src, dst = layout_of(mesh, row["src"]["map"]), layout_of(mesh, row["dst"]["map"])
    steps = search_collectives(row["shape"], src, dst)
    assert sum(step.recv for step in steps) == row["best_collective_sequence_recv"]
    if prod(row["shape"]) <= 5000:
        check_steps(row["shape"], src, dst, steps)
    live = max(prod(src.local_shape(row["shape"], 0)), prod(dst.local_shape(row["shape"], 0)))
    assert all(prod(step.layout.local_shape(row["shape"], 0)) <= live for step in steps)


def exhaustive_optimum(shape, mesh, src, dst) -> float:
    """Dijkstra over every labelled state, with one permutation to any state with as many pieces in each dimension."""
    factors, of_axis = [], []
    for size in mesh:
        primes = prime_factors(size)
        of_axis.append(tuple(range(len(factors), len(factors) + len(primes))))
        factors += primes
    expand = lambda dims: tuple(tuple(f for axis in axes for f in of_axis[axis]) for axes in dims)  # noqa: E731
    pieces = lambda state: tuple(prod(factors[f] for f in dim) for dim in state)  # noqa: E731
    fits = lambda state: all(n % p == 0 for n, p in zip(shape, pieces(state)))  # noqa: E731
    states = {((),) * len(shape)}
    for factor in range(len(factors)):
        grown = set()
        for state in states:
            for k, dim in enumerate(state):
                grown |= {(*state[:k], (*dim[:i], factor, *dim[i:]), *state[k + 1 :]) for i in range(len(dim) + 1)}
        states |= grown
    by_pieces = {}
    for state in filter(fits, states):
        by_pieces.setdefault(pieces(state), []).append(state)

    def moves(state):
        size = prod(shape) // prod(pieces(state))
        used = {f for dim in state for f in dim}
        for k, dim in enumerate(state):
            put = lambda at, new, base: (*base[:at], new, *base[at + 1 :])  # noqa: E731
            for factor in set(range(len(factors))) - used:
                yield 0, put(k, (*dim, factor), state)
            for first in range(len(dim)):
                moved = dim[first:]
                n_procs = prod(factors[f] for f in moved)
                left = put(k, dim[:first], state)
                yield (n_procs - 1) * size, left
                for other in range(len(state)):
                    if other != k:
                        yield size - size // n_procs, put(other, state[other] + moved, left)

    start, target = (False, expand(src)), expand(dst)
    queue, best, seen_pieces = [(0, start)], {start: 0}, set()
    while queue:
        cost, (permuted, state) = heapq.heappop(queue)
        if state == target:
            return cost
        if cost > best[permuted, state]:
            continue
        options = [(step, (permuted, result)) for step, result in moves(state) if fits(result)]
        if not permuted and pieces(state) not in seen_pieces:
            seen_pieces.add(pieces(state))
            size = prod(shape) // prod(pieces(state))
            options += [(size, (True, result)) for result in by_pieces[pieces(state)]]
        for step, key in options:
            if cost + step < best.get(key, inf):
                best[key] = cost + step
                heapq.heappush(queue, (cost + step, key))
    raise AssertionError("every state leads to the target")


def random_even_pairs(seed: int, number: int):
    rng = random.Random(seed)
    meshes = [
        (4,),
        (8,),
        (2, 2),
        (2, 4),
        (4, 2),
        (4, 4),
        (2, 2, 2),
        (2, 4, 2),
        (3, 2),
        (2, 3, 2),
        (6, 2),
        (12,),
        (2,) * 5,
    ]
    for _ in range(number):
        mesh, num_dims = rng.choice(meshes), rng.randint(2, 3)
        pair = []
        for _ in range(2):
            dims = [[] for _ in range(num_dims)]
            for axis in rng.sample(range(len(mesh)), len(mesh)):
                if rng.random() < 0.75:
                    rng.choice(dims).append(axis)
            pair.append(dims)
        yield (prod(mesh),) * num_dims, mesh, *pair


@pytest.mark.slow
def test_the_search_equals_the_exhaustive_one():
    beyond = 0
    for shape, mesh, src_dims, dst_dims in random_even_pairs(7, 60):
        grid = Mesh(mesh)
        src, dst = layout_of(grid, src_dims), layout_of(grid, dst_dims)
        steps = search_collectives(shape, src, dst)
        total = sum(step.recv for step in steps)
        assert total == exhaustive_optimum(shape, mesh, src_dims, dst_dims), (shape, mesh, src_dims, dst_dims)
        assert sum(step.op == "permute" for step in steps) <= 1
        beyond += any(step.op == "permute" for step in steps[:-1])
        if prod(shape) * prod(mesh) <= 30_000:
            check_steps(shape, src, dst, steps)
    assert beyond, "no permutation in mid-sequence: the labels behind one are not exercised"


def test_limits():
    mesh = Mesh((2, 2))
    src, dst = layout_of(mesh, [[0, 1], []]), layout_of(mesh, [[1, 0], []])
    assert search_collectives((8, 8), src, dst)[0].op == "permute"
    assert search_collectives((8, 8), src, dst, max_expansions=1) is None
    assert search_collectives((8, 8), src, src) == []


def test_other_ranks_are_left_to_other_planners():
    src = Layout(Mesh(4), [0])
    assert search_collectives((8,), src, Layout(Mesh(8), [0])) is None
    assert search_collectives((8,), src, Layout(Mesh(4, ranks=[3, 2, 1, 0]), [0])) is None
    # 2×3 and 3×2 have no common refinement
    assert search_collectives((6, 6), Layout(Mesh((2, 3)), [0, 1]), Layout(Mesh((3, 2)), [0, 1])) is None
    # two shapes of one grid have
    assert search_collectives((8,), Layout(Mesh((2, 4)), [(0, 1)]), Layout(Mesh(8), [0])) == []


@pytest.mark.parametrize(
    "dims, op, dst_dims, expected",
    [
        ([None, None], "sum", [0, None], [("reduce_scatter", 12)]),
        ([None, None], "sum", [None, None], [("all_reduce", 24)]),
        ([None, None], "avg", [None, 0], [("reduce_scatter", 12)]),
        ([1, None], "max", [1, 0], [("reduce_scatter", 6)]),
        ([1, None], "sum", [0, 1], [("reduce_scatter", 6), ("permute", 4)]),
    ],
)
def test_reductions(dims, op, dst_dims, expected):
    mesh = Mesh((4, 2)) if 1 in dims else Mesh(4)
    src, dst = Layout(mesh, dims, {0: op}), Layout(mesh, dst_dims)
    shape = (4, 4)
    steps = search_collectives(shape, src, dst)
    check_steps(shape, src, dst, steps)
    if len(expected) == 1:
        assert [(step.op, step.recv) for step in steps] == expected
    assert steps[0].op in ("reduce_scatter", "all_reduce")


def test_pending_reductions_are_kept_or_started():
    mesh = Mesh((2, 2))
    kept = search_collectives((4, 4), Layout(mesh, [1, None], {0: "sum"}), Layout(mesh, [None, 1], {0: "sum"}))
    assert [step.op for step in kept] == ["all_to_all"]
    assert dict(kept[-1].layout.partial) == {0: "sum"}
    started = search_collectives((4, 4), Layout(mesh, [1, None]), Layout(mesh, [1, None], {0: "sum"}))
    assert [(step.op, step.recv) for step in started] == [("init_partial", 0)]
    check_steps((4, 4), Layout(mesh, [1, None]), Layout(mesh, [1, None], {0: "sum"}), started)


@pytest.mark.parametrize("n", [8, 10, 7, 3])
@pytest.mark.parametrize(
    "src_dims, dst_dims",
    [
        ([((0, 1), Cyclic(1)), None], [((0, 1), Chunk()), None]),
        ([((0, 1), Cyclic(1)), None], [None, (1, 0)]),
        ([(0, 1), None], [((1, 0), Cyclic(2)), None]),
        ([None, 1], [((0, 1), Cyclic(1)), None]),
        ([((0, 1), Cyclic(1)), None], [((0, 1), Cyclic(2)), None]),
        ([((0, 1), Cyclic(1)), None], [((0, 1), Cyclic(1)), None]),
        ([(0, Cyclic(1)), 1], [(0, Cyclic(1)), None]),
        ([((0, 1), Chunk()), None], [0, 1]),
        ([(0, 1), None], [0, 1]),
    ],
    ids=str,
)
def test_uneven_and_cyclic_divisions(n, src_dims, dst_dims):
    mesh, shape = Mesh((2, 3)), (n, 6)
    src, dst = Layout(mesh, src_dims), Layout(mesh, dst_dims)
    steps = search_collectives(shape, src, dst)
    check_steps(shape, src, dst, steps)
    assert (src == dst) == (steps == [])


@pytest.mark.parametrize("kind", [Chunk(), Strided((3,)), Strided((3,), flat=True), Strided((1,))], ids=str)
@pytest.mark.parametrize("n", [9, 5, 8])
def test_divisions_from_axis_to_axis_stay_what_they_are_while_others_move(kind, n):
    # one axis of four is two of two to the search, and chunks of chunks of 9 or 5 elements are others than four chunks
    shape, axes = (n, 6, 8), 0 if isinstance(kind, Strided) else (0, 1)
    for src_mesh, dst_mesh in product([Mesh((4, 2)), Mesh((2, 4))], repeat=2):
        src = Layout(src_mesh, [(axes, kind), None, None], partial={1: "min"} if axes == 0 else None)
        for dims in ([(axes, kind), 1, None] if axes == 0 else [(axes, kind), None, None], [None, 0, 1], [1, None, 0]):
            dst = Layout(dst_mesh, dims)
            steps = search_collectives(shape, src, dst)
            check_steps(shape, src, dst, steps)
            assert verify(plan(shape, "int32", src, dst, planners=("collectives", "direct")))


def test_ragged_to_chunks_is_one_change_inside_the_group():
    mesh = Mesh((2, 2))
    src, dst = Layout(mesh, [(0, Ragged([0, 1, 8])), 1]), Layout(mesh, [0, 1])
    steps = search_collectives((8, 4), src, dst)
    assert [(step.op, step.axes) for step in steps] == [("change_block", (0,))]
    check_steps((8, 4), src, dst, steps)


@pytest.mark.parametrize("seed", [155, 299, 501, 574, 650, 706])
def test_divisions_of_their_own_stay_whole_when_ranks_are_permuted(seed):
    case = random_case(seed, families="COBU")
    made = plan(case.shape, "bf16", case.src, case.dst, planners=("collectives", "direct"), budget=2000)
    assert verify(made)
