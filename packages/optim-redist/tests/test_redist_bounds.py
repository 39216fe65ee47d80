"""Bounds against the examples, against masks and against exhaustive search."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from math import ceil, inf, prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redist_cases import EXAMPLES, FAMILIES, Case, elements_of, example_case, example_cases, random_case

from optim_redist import Block, Chunk, CommModel, Cyclic, Layout, Mesh, Topology, bounds, plan
from optim_redist._methods.direct import direct_phases
from optim_redist.cost import Level
from optim_redist.errors import RedistError
from optim_redist.lower_bounds import crossing
from optim_redist.problem import Problem

NAMED = example_cases()


@pytest.mark.parametrize(("row", "case"), [n[1:] for n in NAMED], ids=[n[0] for n in NAMED])
def test_examples(row: dict[str, Any], case: Case) -> None:
    found = bounds(*case)
    assert found.recv == row["bounds"]["bound_max_recv"]
    assert found.lb == row["bounds"]["lower_bound"]
    (phase,) = direct_phases(Problem(*case))
    volumes = [*phase.received().values(), *phase.sent().values()]
    assert max(volumes, default=0) == found.single_hop
    if "family" in row or row.get("id", "").startswith(("C", "O")) or "name" in row:
        # even layouts, and all named cases: one step reaches the bound
        assert found.single_hop == found.lb
    cut = row["bounds"].get("node_cut_axis0")
    if cut is not None:
        with_nodes = bounds(*case, Topology.from_mesh_axis(case.src.mesh, 0))
        assert max(c.inbound for c in with_nodes.cuts) == cut


def test_single_hop_can_exceed_the_bound() -> None:
    row = next(r for r in EXAMPLES["redistributions"] if r["id"] == "U030")
    found = bounds(*example_case(row))
    assert (found.lb, found.single_hop) == (1248, 1344)


def test_operations_of_the_examples() -> None:
    for row in EXAMPLES["operations"]:
        if "result" not in row:
            continue
        start = row["dist"]
        layout = Layout(
            Mesh(start["mesh"]),
            [(tuple(axes), Cyclic(block)) if axes else None for axes, block in zip(start["map"], start["block"])],
        )
        target = _parse(Mesh(start["mesh"]), row["result"])
        assert bounds(row["shape"], layout, target).recv == row["lower_bound_recv"], row


def _parse(mesh: Mesh, text: str) -> Layout:
    """The notebook's text, e.g. ``D_[2,2]⊥{(0,1),∅}(2,∅)``."""
    mapping, blocks = text.split("⊥{")[1].split("}(")
    dims: list[Any] = []
    axes = eval(f"[{mapping.replace('∅', 'None')}]")
    for used, block in zip(axes, blocks.rstrip(")").split(",")):
        dims.append(None if used is None else (used if isinstance(used, tuple) else (used,), Cyclic(int(block))))
    return Layout(mesh, dims)


def test_the_notebooks_third_example() -> None:
    row = EXAMPLES["notebook"]["memory_constrained_2"]
    mesh = Mesh(row["mesh"])
    src, dst = _parse(mesh, row["src"]), _parse(mesh, row["dst"])
    found = bounds(row["shape"], src, dst, Topology.from_mesh_axis(mesh, 0))
    assert found.lb == row["recv_elements"]["lower_bound"] == 224
    assert [cut.inbound for cut in found.cuts] == [row["axis0_between_nodes"]["cut_in_elements"]] * 4


def _brute_force(case: Case, group: set[int]) -> tuple[int, int]:
    """In and Out of a group, element by element."""
    shape, src, dst = case
    partial = [axis for axis, _ in src.partial]
    holders: dict[Any, set[int]] = {}
    for rank in src.mesh.ranks:
        number = src.linear(src.mesh.coordinates[rank], partial)
        for element in elements_of(src, shape, rank):
            holders.setdefault((element, number), set()).add(rank)
    count = prod(src.mesh.sizes[axis] for axis in partial)
    inbound = outbound = 0
    for element in product(*map(range, shape)):
        needers = {rank for rank in dst.mesh.ranks if element in needs[rank]} if (needs := _needs(case)) else set()
        for inside, side in ((group, 0), (set(_ranks(case)) - group, 1)):
            if needers & inside and any(not holders[element, c] & inside for c in range(count)):
                inbound, outbound = (inbound + 1, outbound) if side == 0 else (inbound, outbound + 1)
    return inbound, outbound


_known: dict[Any, Any] = {}


def _needs(case: Case) -> dict[int, set[tuple[int, ...]]]:
    if case not in _known:
        _known.clear()
        _known[case] = {rank: elements_of(case.dst, case.shape, rank) for rank in case.dst.mesh.ranks}
    return _known[case]


def _ranks(case: Case) -> list[int]:
    return sorted({*case.src.mesh.ranks, *case.dst.mesh.ranks})


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_crossings_against_masks(seed: int) -> None:
    case = random_case(seed, FAMILIES, [(4,), (2, 2), (3, 2)])
    rng = random.Random(seed)
    case = Case(tuple(min(n, 4) for n in case.shape), *_fitting(case))
    ranks = _ranks(case)
    group = set(rng.sample(ranks, rng.randint(1, len(ranks))))
    assert crossing(Problem(*case), sorted(group)) == _brute_force(case, group)


def _fitting(case: Case) -> tuple[Layout, Layout]:
    """Layouts of the same axes whose kinds fit any shape; half of the sources pending on their free axes."""
    found = []
    for layout in (case.src, case.dst):
        dims = [None if split is None else (split.axes, Cyclic(1)) for split in layout.dims]
        found.append(Layout(layout.mesh, dims))
    if len(case.shape) % 2:
        found[0] = Layout(found[0].mesh, found[0].dims, dict.fromkeys(found[0].replicated_axes, "sum"))
    return found[0], found[1]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6))
def test_every_number_against_masks(seed: int) -> None:
    case = _small_case(random.Random(seed))
    shape, src, dst = case
    divide = seed % 2 == 0
    found = bounds(*case, partial_init="divide" if divide else "owner")
    held = {rank: elements_of(src, shape, rank) for rank in src.mesh.ranks}
    stored = {rank: elements_of(dst, shape, rank) for rank in dst.mesh.ranks}
    # where a sum starts, one coordinate gets the value and the others fill in the identity, or each divides the value
    started = [] if divide else [axis for axis, _ in dst.partial]
    needed = {r: set() if any(dst.mesh.coordinates[r][a] for a in started) else stored[r] for r in stored}
    reduced = [axis for axis, _ in src.partial]
    contribution = {rank: src.linear(src.mesh.coordinates[rank], reduced) for rank in held}

    def inbound(group: set[int]) -> int:
        there = [
            set().union(*(held[rank] for rank in group & {*held} if contribution[rank] == number))
            for number in set(contribution.values())
        ]
        return len(set().union(*(needed[rank] for rank in group & {*needed})) - set.intersection(*there))

    parts: dict[Any, set[int]] = {}
    for rank in held:
        parts.setdefault((frozenset(held[rank]), contribution[rank]), set()).add(rank)
    ranks = set(_ranks(case))
    sizes = [(len(held.get(rank, ())), len(stored.get(rank, ()))) for rank in ranks]
    assert found.recv == max(inbound({rank}) for rank in ranks)
    assert found.send == max(ceil(inbound(ranks - group) / len(group)) for (part, _), group in parts.items() if part)
    # in one step every contribution comes from one of its holders, who share what others need of it
    arrive = [len(needed[r]) * len({*contribution.values()}) - len(needed[r] & held.get(r, set())) for r in needed]
    asked = [
        ceil(sum(len(part & needed[rank]) for rank in {*needed} - group) / len(group))
        for (part, _), group in parts.items()
    ]
    assert (found.direct_recv, found.direct_send) == (max(arrive), max(asked))
    assert (found.memory, found.live) == (max(map(sum, sizes)), max(map(max, sizes)))
    assert found.live_src == max(map(len, held.values()))
    transfers = 0
    for element in product(*map(range, shape)):
        holders = {rank for rank in held if element in held[rank]}
        needers = {rank for rank in needed if element in needed[rank]}
        transfers += len(holders) + len(needers) - 1 - bool(holders & needers)
    is_alone = all(len(group) == 1 for (part, _), group in parts.items() if part)
    is_reduced = is_alone and len({*contribution.values()}) > 1
    assert found.reduction == (ceil(transfers / len(ranks)) if is_reduced else 0)


def _small_case(rng: random.Random) -> Case:
    """Any kinds on meshes that may differ, even and uneven; pending sums on one side or none."""
    sizes = rng.choice([(4,), (2, 2), (3, 2), (2,), (6,)])
    others = rng.choice([sizes, sizes, (4,), (2, 2), (3,)])
    first = rng.choice([0, 0, 1, 4])
    shape = tuple(rng.choice([4, 6, 12, rng.randint(1, 7)]) for _ in range(rng.randint(1, 2)))
    layouts = []
    for mesh in (Mesh(sizes), Mesh(others, ranks=range(first, first + prod(others)))):
        axes: list[list[int]] = [[] for _ in shape]
        for axis in rng.sample(range(mesh.num_axes), rng.randint(0, mesh.num_axes)):
            rng.choice(axes).append(axis)
        kinds = [Cyclic(1), Cyclic(2), Block(), Chunk()]
        layouts.append(Layout(mesh, [(used, rng.choice(kinds)) if used else None for used in axes]))
    side = rng.choice([None, None, 0, 1])
    if side is not None:
        plain = layouts[side]
        pending = [axis for axis in plain.replicated_axes if rng.random() < 0.7]
        layouts[side] = Layout(plain.mesh, plain.dims, dict.fromkeys(pending, "sum"))
    return Case(shape, *layouts)


def test_least_largest_send_is_the_fair_share_of_the_busiest_point() -> None:
    # holders of different points are different ranks, so no choice can do better than even shares of one point
    for seed in range(400):
        case = random_case(seed, "CUR", [(2, 2), (3, 2)])
        problem = Problem(case.shape, case.src, case.dst)
        found = bounds(*case)
        by_point: dict[Any, int] = {}
        for (point, _), ranks in problem.holders.items():
            demand = 0
            for rank in problem.dst_points:
                if rank not in ranks:
                    demand += problem.num_common(point, problem.dst_points[rank])
            by_point[point] = ceil(demand / len(ranks))
        assert found.direct_send == max(by_point.values())


def test_reductions_cost_what_ring_algorithms_cost() -> None:
    mesh, n = Mesh(4), 64
    partial = Layout(mesh, [None], {0: "sum"})
    assert bounds((n,), partial, Layout(mesh, [0])).lb == 3 * n // 4
    all_reduce = bounds((n,), partial, Layout(mesh, [None]))
    assert (all_reduce.lb, all_reduce.lb_kind) == (2 * 3 * n // 4, "reduction")
    # a Partial that the target keeps is no reduction
    assert bounds((n,), partial, partial).lb == 0
    assert bounds((n,), partial, Layout(mesh, [None], {0: "max"})).lb > 0
    both = Layout(Mesh((2, 2)), [None], {0: "sum", 1: "sum"})
    kept = Layout(Mesh((2, 2)), [None], {1: "sum"})
    assert bounds((n,), both, kept).lb == n
    # two holders of each of two contributions, which two others need: each sends half of it to both
    several = bounds((n,), kept, Layout(Mesh((2, 2)), [None]))
    assert (several.direct_send, several.reduction) == (n, 0)
    # kept along another axis: two ranks need the contribution that they have not, and none needs a sum
    assert Problem((n,), Layout(Mesh((2, 2)), [None], {0: "sum"}), kept).num_contributions == 1


def test_layouts_of_other_dimensions_are_refused() -> None:
    one, two = Layout(Mesh(4), [0]), Layout(Mesh(4), [0, None])
    for src, dst in ((one, two), (two, one)):
        with pytest.raises(RedistError, match=r"is for 1 dimensions, the shape is \(8, 8\)"):
            bounds((8, 8), src, dst)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_triangle_inequality(seed: int, other: int) -> None:
    shape, a, c = random_case(seed, "COBUIK", [(2, 2), (4, 2)])
    rng = random.Random(other)
    axes = list(range(a.mesh.num_axes))
    rng.shuffle(axes)
    dims: list[Any] = [None] * len(shape)
    for axis, k in zip(axes, rng.sample(range(len(shape)), min(len(axes), len(shape)))):
        dims[k] = ((axis,), Cyclic(rng.randint(1, 3)))
    b = Layout(a.mesh, dims)
    assert bounds(shape, a, c).recv <= bounds(shape, a, b).recv + bounds(shape, b, c).recv


def test_every_group_of_the_source_and_target_ranks() -> None:
    # disjoint meshes: everything needed enters the target, and leaves the source
    src, dst = Layout(Mesh(4), [0, None]), Layout(Mesh((2, 3), ranks=range(4, 10)), [None, 1])
    found = bounds((8, 9), src, dst)
    cuts = {cut.level: (cut.inbound, cut.outbound) for cut in found.cuts}
    assert cuts == {"source": (0, 72), "target": (72, 0)}
    # bounds of groups never exceed what their members need one by one
    problem = Problem((8, 9), src, dst)
    for group in combinations(range(10), 3):
        assert crossing(problem, group)[0] <= sum(crossing(problem, (rank,))[0] for rank in group)


def test_nodes_are_the_ranks_of_a_host() -> None:
    mesh, shape = Mesh([2, 2], names=["outer", "inner"]), (8, 8)
    src, dst = Layout(mesh, ["outer", None]), Layout(mesh, [None, "outer"])
    blocks = Topology.from_hosts(["a", "a", "b", "b"])
    assert bounds(shape, src, dst, blocks) == bounds(shape, src, dst, Topology.nodes(2))
    assert blocks.groups(range(4)) == Topology.nodes(2).groups(range(4))
    # what 4 / 2 gives
    with pytest.raises(RedistError, match=r"a whole number of ranks, at least one, got ranks_per_node=2\.0"):
        Topology.nodes(2.0)  # type: ignore[arg-type]
    with pytest.raises(RedistError, match=r"fewer than 2\*\*63 ranks, got ranks_per_node=1000"):
        Topology.nodes(10**400)
    # rank 0 and rank 2, as on the mesh's second axis
    in_turn = Topology.from_hosts(["a", "b", "a", "b"])
    assert bounds(shape, src, dst, in_turn) == bounds(shape, src, dst, Topology.from_mesh_axis(mesh, "inner"))
    assert [ranks for _, ranks, _ in in_turn.groups(range(4))] == [(0, 2), (1, 3)]
    # of unlike nodes the largest says how much all may bring
    unlike = Topology.from_hosts(["b", "a", "a", "a"], bandwidth=1e9)
    assert unlike.groups(range(4)) == [("node", (0,), 3e9), ("node", (1, 2, 3), 3e9)]
    assert not Topology.from_hosts(["a"] * 4).groups(range(4))
    for wrong in ([], "", "node0", [["a"], ["b"]], 5):
        with pytest.raises(RedistError, match=rf"hosts is {re.escape(repr(wrong))}; give a list of the host name"):
            Topology.from_hosts(wrong)  # type: ignore[arg-type]
    for text in (
        lambda: Topology.nodes(2, bandwidth="9"),  # type: ignore[arg-type]
        lambda: Topology.from_hosts(["a"], bandwidth="9"),  # type: ignore[arg-type]
        lambda: Topology.from_mesh_axis(mesh, 0, bandwidth="9"),  # type: ignore[arg-type]
    ):
        with pytest.raises(RedistError, match="a port has a bandwidth above 0 bytes per second, got '9'"):
            text()


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        ([(2, ()), (3, ())], "a group of level 'rack' holds whole groups of level 'node', and that of rank 3 is"),
        ([(8, ()), (4, ())], "a group of level 'rack' holds whole groups of level 'node'"),
        ([(2, ()), (None, ((0, 2), (1, 3)))], "a group of level 'rack' holds whole groups of level 'node'"),
        ([(None, ((0, 3), (1, 2))), (2, ())], "a group of level 'rack' holds whole groups of level 'node'"),
        ([(None, ((0, 1), (1, 2)))], "level 'node' has each rank in one group, and rank 1 in two"),
    ],
)
def test_groups_that_are_no_tree_are_refused(
    levels: list[tuple[int | None, tuple[tuple[int, ...], ...]]], message: str
) -> None:
    made = zip(("node", "rack"), levels)
    with pytest.raises(RedistError, match=message):
        Topology(levels=tuple(Level(name, 1e9, 0.0, size, members) for name, (size, members) in made))


def test_groups_may_be_lists() -> None:
    mesh = Mesh(4)
    sides = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    tuples = Topology(levels=(Level("node", 1e9, 0.0, members=((0, 1), (2, 3))),))
    lists = Topology(levels=[Level("node", 1e9, 0.0, members=[[0, 1], [2, 3]])])  # type: ignore[arg-type, list-item]
    assert lists == tuples
    assert plan((8, 8), "bf16", *sides, topology=lists) is plan((8, 8), "bf16", *sides, topology=tuples)
    # an iterator would be empty after the checks
    members = np.arange(4).reshape(2, 2)
    for groups in (members, iter(members)):
        nodes = Level("node", 1e9, 0.0, members=groups)  # type: ignore[arg-type]
        assert Topology(levels=iter([nodes])) == tuples  # type: ignore[arg-type]
        assert hash(nodes) == hash(tuples.levels[0])


def test_a_curve_may_be_an_iterator() -> None:
    points = ((1, 1e-6), (100, 2e-6))
    model = CommModel("m", Topology(), {"all_to_all": zip(*zip(*points))})  # type: ignore[dict-item]
    assert model == CommModel("m", Topology(), {"all_to_all": points})
    assert len(model.curves["all_to_all"]) == 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Level("node", 1e9, 0.0), "level 'node' has a size or members, got None and ()"),
        (lambda: Level("node", 1e9, 0.0, 2, ((0, 1),)), "level 'node' has a size or members, got 2 and ((0, 1),)"),
        (lambda: Level("node", 1e9, 0.0, None, (0, 1)), "members of level 'node' are groups of ranks, got (0, 1)"),
        (lambda: Level("node", 1e9, 0.0, None, ([[0]],)), "members of level 'node' are groups of ranks, got ([[0]],)"),
        (lambda: Level("node", 1e9, 0.0, None, ("01",)), "members of level 'node' are groups of ranks, got ('01',)"),
        (lambda: Level("node", 1e9, 0.0, None, None), "members of level 'node' are groups of ranks, got None"),
        (lambda: Topology(levels="node"), "levels of a topology are a tuple of Level, innermost first, got 'node'"),
        (lambda: Topology(levels=None), "levels of a topology are a tuple of Level, innermost first, got None"),
        (lambda: Topology(latency=inf), "a topology has a finite latency of 0 seconds or more, got inf"),
        (lambda: CommModel("m", None), "topology must be a Topology, got None; Topology.nodes("),
        (lambda: CommModel("m", Topology(), []), "curves maps collectives to pairs of (bytes, seconds), got []"),
        (lambda: CommModel("m", Topology(), {"alltoall": ((1, 1),)}), "'send_recv'), got one of 'alltoall'"),
        (
            lambda: CommModel("m", Topology(), {"all_to_all": ((1, inf),)}),
            "above 0, finite, bytes ascending, got ((1, inf",
        ),
        (
            lambda: CommModel("m", Topology(), {"all_to_all": ((inf, 1),)}),
            "above 0, finite, bytes ascending, got ((inf, 1",
        ),
        (lambda: CommModel("m", Topology(), {"all_to_all": (1, 2)}), "above 0, finite, bytes ascending, got (1, 2)"),
        (lambda: CommModel("m", Topology(), {"all_to_all": None}), "above 0, finite, bytes ascending, got None"),
        (lambda: CommModel("m", Topology(), call_seconds=inf), "a finite latency of 0 seconds or more, got inf"),
    ],
)
def test_parts_of_cost_models_that_make_no_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(RedistError, match=re.escape(message)):
        make()


def test_levels_of_one_name_are_refused() -> None:
    node = Topology.nodes(2).levels[0]
    with pytest.raises(RedistError, match=r"levels of a topology have names of their own, got \['node', 'node'\]"):
        Topology(levels=(node, replace(node, size=4)))
    # ranks that one of two levels does not know lie in none of its groups
    Topology(levels=(node, Level("rack", 1e9, 0.0, members=((0, 1, 2, 3), (4, 5)))))


@pytest.mark.parametrize("latency", [0.0, 1e-4, 1.0], ids=["none", "small", "large"])
@pytest.mark.parametrize("curved", [False, True], ids=["flat", "curve"])
def test_no_plan_is_faster_than_the_bound(latency: float, curved: bool) -> None:
    # bytes that take as long as the latencies, also on small tensors
    curve = ((16.0, 2e-4), (64.0, 3e-4), (1024.0, 6e-3))
    known = CommModel("slow", Topology.flat(bandwidth=2e5, latency=1e-4), {"all_to_all": curve} if curved else {})
    for seed in range(60):
        case = random_case(seed, FAMILIES + "P")
        made_for = (
            (known, None),
            (known, Topology.nodes(2, bandwidth=1e5, rank_bandwidth=1e9, latency=latency)),
            (replace(known, topology=Topology.nodes(3, bandwidth=1e3, rank_bandwidth=1e3, latency=latency)), None),
            (replace(known, topology=Topology.flat(bandwidth=1e3, latency=latency)), None),
        )
        for model, topology in made_for:
            made = plan(case[0], "bf16", *case[1:], cost_model=model, topology=topology)
            assert made.time >= made.bounds.seconds
            assert made.gap >= 0
            assert bounds(case[0], *case[1:], made.topology).seconds == made.bounds.seconds


def test_no_collective_is_quicker_than_a_topology_that_no_exchange_has_measured() -> None:
    quick = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), ((64.0, 1e-07), (4096.0, 1e-06)))
    model = CommModel("quick", Topology.flat(), quick, call_seconds=0.0, has_library=True)
    split, whole = Layout(Mesh(4), [0]), Layout(Mesh(4), [None])
    pending = Layout(Mesh(4), [None], {0: "sum"})
    for src, dst in ((split, whole), (pending, split), (pending, whole)):
        for topology in (None, Topology.flat(bandwidth=1e9), Topology.nodes(8, rank_bandwidth=1e9)):
            made = plan((4096,), "bf16", src, dst, cost_model=model, topology=topology)
            assert made.time >= made.bounds.seconds


def test_borders_have_latencies_of_their_own() -> None:
    src, dst = Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0])
    shape = (1024, 1024)
    crossing = 2 * 2**18 / 2e9  # half of what a node needs, by two ports
    for latency in (0.0, 1e-6, 1.0):
        found = bounds(shape, src, dst, Topology.nodes(2, bandwidth=1e9, latency=latency))
        assert found.seconds == pytest.approx(latency + crossing)
    # what stays in its node crosses no border
    inside = Layout(Mesh((2, 2)), [1, None]), Layout(Mesh((2, 2)), [None, 1])
    assert bounds(shape, *inside, Topology.nodes(2, latency=1.0)).seconds < 1e-3
