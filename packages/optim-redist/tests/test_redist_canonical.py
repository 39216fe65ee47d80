"""Canonical forms by two ways, and what follows for plans: one for all ways to write a pair of layouts."""

from __future__ import annotations

import dataclasses

import pytest
from redist_cases import FAMILIES, random_case

from optim_redist import Chunk, Cyclic, Layout, Mesh, Plan, plan, planning, same_ownership, verify
from optim_redist.canonical import _by_holdings, _by_strides, _grid_with_idle


def test_both_ways_to_the_canonical_form_agree() -> None:
    by_strides = 0
    for seed in range(1200):
        shape, src, dst = random_case(seed, FAMILIES)
        for layout in (src, dst):
            found = _by_strides(layout, shape)
            if found is not None:
                assert found == _by_holdings(layout, shape), seed
                by_strides += 1
    assert by_strides > 1200


def test_the_grid_with_idle_ranks_is_the_first_that_all_fit_in() -> None:
    assert _grid_with_idle([2, 3], 12) == [2, 6]
    # 6×6×7 would be the first for the first two
    assert _grid_with_idle([6, 4, 9], 252) == [7, 4, 9]


NAMES = Mesh((2, 4), names=("dp", "tp"))
WRITTEN = [
    (Layout(NAMES, [("dp", "tp"), None]), Layout(NAMES, [None, ("dp", "tp")])),
    (Layout(Mesh(8), [0, None]), Layout(Mesh(8), [None, 0])),
    (Layout(Mesh((2, 1, 2, 2)), [((0, 2, 3), Chunk()), 1]), Layout(Mesh((8, 1)), [1, ((0,), Cyclic(2))])),
]


@pytest.mark.parametrize(("src", "dst"), WRITTEN, ids=["names", "one axis", "axes of one"])
def test_plans_do_not_depend_on_how_layouts_are_written(src: Layout, dst: Layout) -> None:
    first = plan((16, 16), "bf16", *WRITTEN[0])
    made = plan((16, 16), "bf16", src, dst)
    assert made.hash == first.hash
    assert made.canonical_text() == first.canonical_text()
    assert made.phases[0][1] == first.phases[0][1]
    # but each is printed as it was asked for
    assert (made.src, made.dst) == (src, dst)
    assert made.steps[-1].layout == str(dst)
    assert str(dst) in str(made)
    verify(made)
    assert Plan.from_json(made.to_json()).hash == made.hash


def test_equal_pairs_and_widths_are_decided_once() -> None:
    planning.clear_cache()
    for src, dst in WRITTEN:
        for dtype in ("bf16", "float16", "int16"):
            assert plan((16, 16), dtype, src, dst).dtype in ("bfloat16", "float16", "int16")
    assert len(planning._decisions) == 1
    plan((16, 16), "float32", *WRITTEN[0])
    assert len(planning._decisions) == 2


def test_sums_and_averages_pending_together() -> None:
    mesh = Mesh((2, 3, 2))
    both = Layout(mesh, [2], {0: "avg", 1: "sum"})
    found = both.canonical((8,))
    assert sorted((op, found.mesh.sizes[axis]) for axis, op in found.partial) == [("avg", 2), ("sum", 3)]
    assert same_ownership(both, found, (8,))
    assert found.canonical((8,)) == found
    # which axis of the mesh is which does not matter
    square = Mesh((2, 2))
    for ops in ({0: "sum", 1: "avg"}, {0: "avg", 1: "sum"}):
        assert Layout(square, [None], ops).canonical((8,)) == Layout(square, [None], {0: "sum", 1: "avg"})


def test_other_ownership_means_another_hash() -> None:
    hashes = set()
    for dst in ([None, (1, 0)], [None, ((0, 1), Cyclic(1))], [None, 0], [(0, 1), None]):
        hashes.add(plan((16, 16), "bf16", WRITTEN[0][0], Layout(NAMES, dst)).hash)
    hashes |= {plan((16, 32), "bf16", *WRITTEN[0]).hash, plan((16, 16), "int32", *WRITTEN[0]).hash}
    assert len(hashes) == 6
    made = plan((16, 16), "bf16", *WRITTEN[0])
    assert dataclasses.replace(made, deterministic=True).hash != made.hash


def test_pending_reductions_are_planned_as_written() -> None:
    # merged into one axis of four, the contributions that the target keeps could not be told from the others
    mesh = Mesh((2, 2))
    both, kept = Layout(mesh, [None], {0: "sum", 1: "sum"}), Layout(mesh, [None], {1: "sum"})
    assert plan((64,), "float32", both, kept).bounds.lb == 64
    assert not plan((64,), "float32", kept, kept).communicates
