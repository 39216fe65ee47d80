"""Ownership against masks, the canonical form, and layouts from slices."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redist_cases import EXAMPLES, FAMILIES, elements_of, indices_of, random_case

from optim_redist import (
    Chunk,
    Cyclic,
    Intervals,
    Layout,
    LayoutError,
    Mesh,
    NotRepresentableError,
    Ragged,
    same_ownership,
)
from optim_redist.ownership import from_slices, ownership


def test_examples_of_ownership() -> None:
    for row in EXAMPLES["ownership"]:
        dims = [(tuple(axes), Cyclic(block)) if axes else None for axes, block in zip(row["map"], row["block"])]
        layout = Layout(Mesh(row["mesh"]), dims)
        shapes = [layout.local_shape(row["shape"], rank) for rank in layout.mesh.ranks]
        assert shapes == [tuple(shape) for shape in row["local_shapes"]]
        assert max(map(prod, shapes)) == row["max_num_elements"]
        for rank, rows in row["rows_of_dim0"].items():
            assert indices_of(layout, row["shape"], int(rank))[0] == rows


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**6))
def test_every_element_is_held_equally_often(seed: int) -> None:
    shape, layout, _ = random_case(seed, "COBURIK")
    held = torch.zeros(shape, dtype=torch.int64)
    for rank in layout.mesh.ranks:
        indices = indices_of(layout, shape, rank)
        if all(indices):
            held[torch.meshgrid(*map(torch.tensor, indices), indexing="ij")] += 1
    assert bool((held == prod(layout.mesh.sizes[axis] for axis in layout.replicated_axes)).all())


def test_chunk_is_what_torch_chunk_gives() -> None:
    for n in range(23):
        for sizes in ((4,), (2, 3), (3, 2, 2)):
            pieces = [torch.arange(n)]
            for size in sizes:
                pieces = [
                    part[k] if k < len(part) else piece[:0]
                    for piece in pieces
                    for part in (torch.chunk(piece, size),)
                    for k in range(size)
                ]
            layout = Layout(Mesh(sizes), [(tuple(range(len(sizes))), Chunk())])
            assert [indices_of(layout, (n,), r)[0] for r in layout.mesh.ranks] == [p.tolist() for p in pieces]


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6))
def test_the_canonical_form_has_the_same_ownership_and_is_its_own(seed: int) -> None:
    case = random_case(seed, FAMILIES + "P", [(4,), (2, 2), (2, 4), (2, 3, 2), (3, 3)])
    for layout in (case.src, case.dst):
        canonical = layout.canonical(case.shape)
        assert same_ownership(layout, canonical, case.shape)
        assert canonical.canonical(case.shape) == canonical
        for rank in layout.mesh.ranks:
            assert elements_of(layout, case.shape, rank) == elements_of(canonical, case.shape, rank)


def test_equal_canonical_forms_mean_equal_ownership() -> None:
    shape = (4, 3)
    by_ownership: dict[object, Layout] = {}
    for seed in range(1500):
        case = random_case(seed, "COBURK", [(4,), (2, 2)])
        for layout in (case.src, case.dst):
            layout = Layout(layout.mesh, [*layout.dims, None][:2], dict(layout.partial))
            try:
                owned = ownership(layout, shape)
            except ValueError:
                continue  # cut points of another size
            canonical = layout.canonical(shape)
            assert by_ownership.setdefault(owned, canonical) == canonical
    forms = list(by_ownership.values())
    assert len(forms) > 30
    assert len(set(forms)) == len(forms)


def test_same_ownership_across_meshes() -> None:
    both, one = Layout(Mesh((2, 4)), [(0, 1)]), Layout(Mesh(8), [0])
    assert same_ownership(both, one, (16,))
    assert both.canonical((16,)) == one
    assert not same_ownership(Layout(Mesh((2, 4)), [(1, 0)]), one, (16,))
    assert not same_ownership(one, Layout(Mesh(8, ranks=range(7, -1, -1)), [0]), (16,))
    # nested chunks differ from blocks unless they divide evenly
    nested = Layout(Mesh((2, 2)), [((0, 1), Chunk())])
    assert same_ownership(nested, Layout(Mesh(4), [0]), (12,))
    assert not same_ownership(nested, Layout(Mesh(4), [0]), (10,))
    # a rank outside the mesh holds nothing, like one with an empty shard
    assert same_ownership(Layout(Mesh(4), [0]), Layout(Mesh(2), [0]), (2,))
    assert not same_ownership(Layout(Mesh(2), [None], {0: "sum"}), Layout(Mesh(2), [None]), (2,))
    assert str(Layout(Mesh((2, 2)), [(0, Cyclic(3)), None]).canonical((6, 2))) == "[0, -]"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_slices_round_trip(seed: int) -> None:
    shape, layout, _ = random_case(seed, "COBURIK")
    assert same_ownership(Layout.from_slices(layout.mesh, shape, layout.slices(shape)), layout, shape)


def test_slices_that_no_layout_has() -> None:
    mesh = Mesh((2, 2))
    overlapping = {rank: [[(rank, rank + 2)]] for rank in mesh.ranks}
    with pytest.raises(NotRepresentableError, match="dimension 0"):
        from_slices(mesh, (5,), overlapping)
    tangled = {rank: [[(rank, rank + 1)], [(rank, rank + 1)]] for rank in mesh.ranks}
    with pytest.raises(NotRepresentableError, match="same mesh axis"):
        from_slices(mesh, (4, 4), tangled)
    with pytest.raises(NotRepresentableError, match="no rank holds all"):
        from_slices(mesh, (4,), {rank: [[(0, 3)]] for rank in mesh.ranks})


@pytest.mark.parametrize("last", [None, [], [[(0, 4)], [(0, 4)]], [[(0, 3.7)]], [[0, 4]], [[(0, 4, 1)]]], ids=str)
def test_slices_are_whole_numbers_for_every_rank_and_dimension(last: Any) -> None:
    slices = {0: [[(0, 4)]], **({} if last is None else {1: last})}
    with pytest.raises(LayoutError, match=r"of rank 1 a list of \(start, stop\) for each of 1 dimensions, got"):
        from_slices(Mesh(2), (4,), slices)


def test_intervals_become_the_simplest_kind() -> None:
    rows = [[(k, k + 1), (k + 4, k + 5)] for k in range(4)]
    assert Layout(Mesh(4), [((0,), Intervals(rows))]).canonical((8,)).dims[0].kind == Cyclic(1)
    # whole blocks of three, dealt out in one turn
    for kind in (Intervals([[(0, 3)], [(3, 4)]]), Ragged((0, 3, 4))):
        assert Layout(Mesh(2), [((0,), kind)]).canonical((4,)).dims[0].kind == Cyclic(3)
    cuts = [0, 1, 1, 6, 8]
    ragged = Layout(Mesh(4), [((0,), Intervals([[pair] for pair in pairwise(cuts)]))]).canonical((8,))
    assert str(ragged).startswith("[0!")
