"""What a layout may say, how it prints, and its JSON."""

from __future__ import annotations

import ast
import importlib
import inspect
import random
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redist_cases import FAMILIES, random_case

import optim_redist
from optim_redist import Block, Chunk, Cyclic, Intervals, Layout, LayoutError, Mesh, Ragged, Strided, same_ownership
from optim_redist.index_sets import (
    IndexSet,
    Run,
    aligned_runs,
    elements,
    from_intervals,
    intersect,
    interval,
    intervals,
    num_below,
    positions,
    same,
    size,
    take,
)
from optim_redist.parsing import format_layout, parse_mesh

MESH = Mesh((4, 2), names=("x", "y"))


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ([("x", "y"), None], "[x.y, -]"),
        ([None, ("y", Cyclic(4))], "[-, y~4]"),
        ([(("y", "x"), Chunk()), None], "[y/x, -]"),
        ([("y", Ragged([0, 3, 16])), "x"], "[y!0:3:16, x]"),
        ([("y", Intervals([[(0, 1), (4, 5)], [(1, 4)]])), None], "[y{0:1,4:5|1:4}, -]"),
    ],
)
def test_text(dims: list[Any], text: str) -> None:
    assert str(Layout(MESH, dims)) == text


def test_split_factors_may_be_beyond_the_size() -> None:
    for flat in (False, True):
        sets = Strided((10**9,), flat=flat).index_sets(5, (3,))
        # every piece is one index, or none: all chunks of coordinate 0, unless the cuts are made at once
        expected = [[0, 3], [1, 4], [2]] if flat else [[0, 1, 2, 3, 4], [], []]
        assert [elements(held) for held in sets] == expected


def test_partial_text_and_axes_without_names() -> None:
    layout = Layout(Mesh((2, 2, 2)), [(1, 0)], {2: "sum"})
    assert str(layout) == "[1.0]+sum(2)"
    assert layout.replicated_axes == ()
    assert Layout(MESH, ["y"]).replicated_axes == (0,)
    assert layout.mesh not in (None, 8)
    # on another mesh, what another layout says
    assert str(Layout(Mesh((3, 1, 2)), layout.dims, layout.partial)) == str(layout)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mesh((2, 0)), "at least one rank"),
        (lambda: Mesh((2, 2), names=("x",)), "different names"),
        (lambda: Mesh((2,), ranks=[1, 1]), "2 different ranks"),
        (lambda: Mesh((2,), ranks=[0, 1, 2]), "2 different ranks"),
        (lambda: Mesh((2**16, 2**16)), "a mesh has 1048576 ranks at most, got sizes .*, which are 4294967296"),
        (lambda: Layout(MESH, ["z"]), "no axis 'z'"),
        (lambda: Layout(MESH, [2]), "outside a mesh of 2"),
        (lambda: Layout(MESH, ["x", "x"]), "partial, once"),
        (lambda: Layout(MESH, ["x"], {"x": "sum"}), "partial, once"),
        (lambda: Layout(MESH, ["x"], ["y"]), "partial maps axes to operations"),
        (lambda: Layout(MESH, ["x"], 1), "partial maps axes to operations"),
        (lambda: Layout(MESH, [None], {"x": "median"}), "pending reduction"),
        (lambda: Layout(MESH, [None], {"x": "sum", "y": "max"}), "only sum and avg"),
        (lambda: Layout(MESH, [Block()]), "a dimension is None"),
        (lambda: Layout(MESH, [3.5]), "a dimension is None"),
        (lambda: Layout(MESH, [("x", Cyclic)]), r"axis is a number or a name, got <class '.*Cyclic'>, .* Cyclic\(…\)"),
        (lambda: Layout(MESH, [(0.0,)]), "axis is a number or a name, got 0.0"),
        (lambda: Layout(MESH, [None], {None: "sum"}), "axis is a number or a name, got None"),
        (lambda: Layout((4, 2), [0, 1]), r"mesh is a Mesh, got \(4, 2\)"),
        (lambda: Cyclic(0), "at least 1"),
        (lambda: Cyclic(1.5), "a whole number, got 1.5"),
        (lambda: Layout(MESH, ["x"]).index_sets((-8,)), "sizes are not negative"),
        (lambda: Layout(MESH, ["x", None]).index_sets((2**40 + 1, 2**40)), r"at most 2\*\*80 elements"),
        (lambda: Ragged([1, 2]), "start at 0"),
        (lambda: Ragged([0, 3, 2]), "never decrease"),
        (lambda: Intervals([[(3, 2)]]), "sorted"),
        (lambda: Intervals([[(0, 1, 2)]]), r"pairs \(start, stop\), got \[\[\(0, 1, 2\)\]\]"),
        (lambda: Intervals([[0, 1]]), r"pairs \(start, stop\), got \[\[0, 1\]\]"),
        (lambda: Intervals([[("a", "b")]]), r"pairs \(start, stop\), got"),
        (lambda: Intervals([[(0, 1.7)], [(1.7, 3)]]), r"whole numbers, got \(\(\(0, 1.7\)"),
        (lambda: Strided((1.5,)), "split factors must be integers, got 1.5"),
        (lambda: Strided((2,), "no"), "flat is True or False, got 'no'"),
        (lambda: Strided((2, 0)), r"split factors are 1 or more, got \(2, 0\)"),
        (lambda: Layout(MESH, [("y", Strided((1, 2)))]).index_sets((3,)), "1 mesh axes need as many split factors"),
        (lambda: Layout(MESH, [("y", Intervals([[(0, 3)]]))]).index_sets((3,)), "2 coordinates need as many rows"),
        (lambda: Mesh(2, ranks=[0.0, 1]), "ranks are integers, in lists of any depth, got 0.0 of float"),
        (lambda: Layout(MESH, [("y", Ragged([0, 1, 2, 3]))]).index_sets((3,)), "3 cut points"),
        (lambda: Layout(MESH, [("y", Intervals([[(0, 1)], [(2, 3)]]))]).index_sets((3,)), "cover"),
        (lambda: Layout(MESH, [None]).index_sets((3, 3)), "1 dimensions"),
        (lambda: Mesh(None), "mesh sizes must be integers, got None"),
        (lambda: Mesh(True), "mesh sizes must be integers, got True"),
        (lambda: Mesh(2, ranks=[False, True]), "ranks are integers, in lists of any depth, got False of bool"),
        (lambda: Mesh((2, 2), names=(1, 2)), r"names of mesh axes are texts, one for each of 2, got \(1, 2\)"),
        (lambda: Mesh(2, names=5), r"names of mesh axes are texts, one for each of 1, got \(5,\)"),
        (lambda: Layout(MESH, None), "dims has one entry for each tensor dimension, .* got None"),
        (lambda: Layout(MESH, 0), "dims has one entry for each tensor dimension, .* got 0"),
        (lambda: Layout(MESH, [True]), "axis is a number or a name, got True"),
        (lambda: Mesh((2, 4)).axis("dp"), "no axis 'dp'; its 2 axes have numbers, from 0, and no names"),
        (lambda: MESH.axis("dp"), r"no axis 'dp'; its axes are \('x', 'y'\)"),
        (lambda: Layout(MESH, [{"x", "y"}]), "the axes of a dimension are in order, .* give a tuple"),
        (lambda: Layout(MESH, [({"x", "y"}, Cyclic(2))]), "the axes of a dimension are in order, .* give a tuple"),
        (lambda: Cyclic(True), "a whole number, got True"),
        (lambda: Ragged(None), "cut points must be integers, got None"),
        (lambda: Layout(MESH, ["x"]).local_shape((5.5,), 0), r"sequence of whole sizes, got \(5.5,\)"),
        (lambda: Layout(MESH, ["x"]).slices("8"), "sequence of whole sizes, got '8'"),
        (lambda: Layout(MESH, ["x"]).canonical(8), "sequence of whole sizes, got 8"),
        (lambda: Layout(MESH, ["x"]).to_placements(None), "sequence of whole sizes, got None"),
        (lambda: Layout(MESH, ["x"]).to_multi_axis((8, 8)), "is for 1 dimensions"),
        (lambda: Layout(MESH, ["x"]).indices((8,), "0"), "a rank is a whole number, got '0'"),
        (lambda: same_ownership(Layout(MESH, ["x"]), Layout(MESH, ["x"]), (8, 8)), "is for 1 dimensions"),
        (lambda: Layout.from_slices((4, 2), (8,), {}), r"mesh must be a Mesh, got \(4, 2\)"),
        (lambda: Layout.from_slices(MESH, (8,), [[(0, 8)]]), r"slices must map every rank .* got \[\[\(0, 8\)\]\]"),
        (lambda: Layout.from_slices(MESH, 8, {}), "shape must be a sequence of sizes, got 8"),
        (lambda: format_layout("[x]"), r"layout must be a Layout, got '\[x\]'"),
        (lambda: format_layout(Layout(MESH, [("x", Cyclic(2))]), "partition_spec", 8), "whole sizes, got 8"),
        (lambda: parse_mesh(8), r'a mesh is written "4,2,4" or "x=4,y=2", got 8'),
    ],
)
def test_refusals_say_what_is_wrong(build: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        build()


def test_chunk_is_nested_and_block_is_not() -> None:
    mesh = Mesh((2, 2))
    block, chunk = Layout(mesh, [((0, 1), Block())]), Layout(mesh, [((0, 1), Chunk())])
    assert [block.local_shape((10,), rank)[0] for rank in range(4)] == [3, 3, 3, 1]
    assert [chunk.local_shape((10,), rank)[0] for rank in range(4)] == [3, 2, 3, 2]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_json_round_trip(seed: int) -> None:
    case = random_case(seed, FAMILIES + "P")
    for layout in (case.src, case.dst):
        again = Layout.from_json(layout.to_json())
        assert again == layout
        assert hash(again) == hash(layout)
        assert again.to_json() == layout.to_json()


def test_json_of_the_future_is_refused() -> None:
    data = Layout(MESH, ["x"]).to_json()
    assert data == {
        "format": "optim-redist.layout/1",
        "mesh": {"sizes": [4, 2], "names": ["x", "y"], "ranks": None},
        "dims": [{"axes": [0], "kind": "block"}],
        "partial": {},
    }
    with pytest.raises(LayoutError, match="layout/2"):
        Layout.from_json({**data, "format": "optim-redist.layout/2"})
    with pytest.raises(LayoutError, match="'spiral'"):
        Layout.from_json({**data, "dims": [{"axes": [0], "kind": "spiral"}]})


def _random_sets(seed: int) -> tuple[list[Any], list[Any]]:
    case = random_case(seed, "BRIUK")
    return list(case.src.index_sets(case.shape)), list(case.dst.index_sets(case.shape))


def _random_runs(rng: random.Random) -> IndexSet:
    """Runs of any strides, which may interleave."""
    runs: list[Run] = []
    for _ in range(rng.randint(0, 4)):
        length, repeats = rng.randint(1, 4), rng.choice([1, 1, 2, 3, 5, 9])
        run = Run(rng.randint(0, 60), length, length if repeats == 1 else length + rng.randint(1, 6), repeats)
        if not set(_listed((run,))) & set(_listed(tuple(runs))):
            runs.append(run)
    return tuple(sorted(runs))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_index_set_algebra_is_set_algebra(seed: int, rng: Any) -> None:
    for src, dst in zip(*_random_sets(seed)):
        _check_algebra(rng.choice(src), rng.choice(dst), rng)


def test_the_algebra_holds_for_runs_of_all_kinds() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        _check_algebra(_random_runs(rng), _random_runs(rng), rng)


def _check_algebra(a: IndexSet, b: IndexSet, rng: random.Random) -> None:
    listed, in_a = elements(a), _listed(a)
    assert listed == sorted(in_a)
    assert list(intervals(from_intervals((index, index + 1) for index in listed))) == list(intervals(a))
    common = intersect(a, b)
    order = _listed(common)
    assert sorted(order) == sorted(set(listed) & set(_listed(b)))
    assert size(common) == len(order)
    assert same(a, b) == (set(in_a) == set(_listed(b)))
    bound = rng.randint(0, 120)
    assert num_below(a, bound) == sum(index < bound for index in listed)
    assert [listed[place] for place in _listed(positions(a, common))] == order
    start = rng.randint(0, len(in_a))
    stop = rng.randint(start, len(in_a))
    assert _listed(take(a, start, stop)) == in_a[start:stop]
    found = []
    for at_a, at_b in aligned_runs(common, a, b):
        found += [listed[place] for place in _listed((at_a,))]
        assert found[-at_a.length * at_a.repeats :] == [elements(b)[place] for place in _listed((at_b,))]
    assert found == order
    # one way to write an interval
    assert all(run.repeats > 1 or run.stride == run.length for run in (*common, *take(a, start, stop)))


@pytest.mark.parametrize(
    "held",
    [
        *Cyclic(3).index_sets(14, (2,)),
        from_intervals([(0, 1), (4, 6), (7, 8)]),
        interval(2, 7),
    ],
    ids=["dealt with a tail", "dealt", "intervals", "interval"],
)
def test_all_that_two_sets_have_is_one_run_of_positions(held: IndexSet) -> None:
    count = size(held)
    whole = Run(0, count, count, 1)
    assert aligned_runs(held, held, from_intervals(intervals(held))) == [(whole, whole)]
    # where one of them has more, there are gaps
    assert aligned_runs(held, held, interval(0, 20))[0][1].start == held[0].start
    assert aligned_runs((), (), ()) == []


def test_places_in_many_intervals_are_found_without_going_through_all_of_them() -> None:
    rng = random.Random(0)
    for count in (15, 16, 17, 200):
        ends = sorted(rng.sample(range(3 * count), 2 * count))
        held = from_intervals(zip(ends[::2], ends[1::2]))
        part = intersect(held, from_intervals([(1, count), (count + 2, count + 3), (2 * count, 3 * count)]))
        listed = elements(held)
        assert [listed[place] for place in elements(positions(held, part))] == elements(part)
        _check_algebra(held, part, rng)
    rows = list(range(40_000))
    rng.shuffle(rows)
    held = from_intervals((row, row + 1) for row in sorted(rows[:20_000]))
    began = time.process_time()
    aligned_runs(intersect(held, interval(0, 30_000)), held, interval(0, 30_000))
    # 0.02 s here, 7 if each interval is looked for among all
    assert time.process_time() - began < 2


def _listed(indices: IndexSet) -> list[int]:
    """Every index, run by run."""
    return [run.start + k * run.stride + t for run in indices for k in range(run.repeats) for t in range(run.length)]


def test_empty_intervals_are_none() -> None:
    assert from_intervals([(0, 2), (3, 3), (5, 6), (9, 9)]) == from_intervals([(0, 2), (5, 6)])


@pytest.mark.parametrize("n", [24, 54, 69])
def test_an_interval_behind_a_run_is_met_in_the_tail_alone(n: int) -> None:
    """24 of 3 and 3 are dealt to 4, and of 5 and 5 to 2: the last 3 are where a fifth interval of 5 would go on."""
    for a in Cyclic(3).index_sets(n, (4,)):
        for b in Cyclic(5).index_sets(n, (2,)):
            assert sorted(_listed(intersect(a, b))) == sorted(set(elements(a)) & set(elements(b)))


def test_sets_of_a_long_cyclic_dimension_are_short() -> None:
    n = 10**9 + 3
    sets = Cyclic(1).index_sets(n, (8,))
    assert all(len(held) <= 2 for held in sets)
    assert sum(map(size, sets)) == n
    common = intersect(sets[3], interval(12345, n - 54321))
    assert size(common) == len(range(12347, n - 54321, 8))


def test_blocks_without_a_common_length_meet_in_few_runs() -> None:
    """Blocks of 101 dealt to 180, and of 103 dealt to 180, are where they were after 180 · 101 · 103 indices."""
    period, num_periods = 180 * 101 * 103, 1000
    a, b = (Cyclic(block).index_sets(period * num_periods, (180,))[7] for block in (101, 103))
    common = intersect(a, b)
    assert len(common) == 1
    starts = range(7 * 101, period, 180 * 101)
    expected = sum(7 * 103 <= (k + t) % (180 * 103) < 8 * 103 for k in starts for t in range(101))
    assert size(common) == expected * num_periods


def test_type_checkers_see_the_names_that_there_are() -> None:
    tree = ast.parse(inspect.getsource(optim_redist))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(seen) == optim_redist.__all__
    assert set(seen) <= set(dir(optim_redist))
    for name, module in seen.items():
        assert getattr(optim_redist, name) is getattr(importlib.import_module(module), name)


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, optim_redist as r; m = r.Mesh(4);"
        "p = r.plan((8, 8), 'bf16', r.Layout(m, [0, None]), r.Layout(m, [None, 0])); r.verify(p); p.hash;"
        "r.bounds((8, 8), p.src, p.dst); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", optim_redist.__all__)
def test_signatures_have_no_private_names(name: str) -> None:
    found = getattr(optim_redist, name)
    if inspect.isfunction(found):
        assert not re.findall(r"\b_[A-Za-z]\w*", str(inspect.signature(found)))
