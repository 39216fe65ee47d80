"""Multi-axis distributions: every worked fact, and every operation against masks of who owns what."""

import json
from itertools import product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from optim_redist import MultiAxisDist
from optim_redist._multi_axis.moves import max_block_size, split_fits

EXAMPLES = json.loads((Path(__file__).parent / "redist_examples.json").read_text(encoding="utf-8"))
MANUAL = EXAMPLES["notebook"]["manual"]


def dist_of(facts: dict, mesh: list[int] | None = None) -> MultiAxisDist:
    return MultiAxisDist(mesh or facts["mesh"], facts["map"], facts["block"])


# -- construction and printing


@pytest.mark.parametrize(
    "fact", EXAMPLES["constructors"], ids=lambda fact: f"{fact['mesh']}-{fact['map']}-{fact['block']}"
)
def test_constructor_facts(fact):
    if "raises" in fact:
        with pytest.raises(ValueError):
            dist_of(fact)
    else:
        dist = dist_of(fact)
        assert str(dist) == fact["prints"]
        assert list(dist.blockSizes) == fact["block_stored"]


@pytest.mark.parametrize("mesh", [[], 0, [2, 0], [-1]])
def test_empty_or_negative_mesh_is_refused(mesh):
    with pytest.raises(ValueError, match="processor_mesh"):
        MultiAxisDist(mesh, [[]], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2.9, 2), [[0]], 1), r"processor_mesh has whole numbers as sizes, got \(2.9, 2\)"),
        (("x", [[0]], 1), "processor_mesh has whole numbers as sizes, got 'x'"),
        ((None, [[0]], 1), "processor_mesh has whole numbers as sizes, got None"),
        (((2, 2), [[0.5]], 1), r"dims_mapping has whole numbers as axes, got \[0.5\]"),
        (((2, 2), 0, 1), "dims_mapping has one entry for each tensor dimension, got 0"),
        (((2, 2), [[0]], 1.5), r"block_sizes has whole numbers as lengths, got \[1.5\]"),
        (((2, 2), [[0]], "1"), r"block_sizes has whole numbers as lengths, got \['1'\]"),
    ],
)
def test_what_is_no_whole_number_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        MultiAxisDist(*arguments)


@pytest.mark.parametrize("mesh", [torch.Size([4]), (4,), [4], 4], ids=lambda mesh: type(mesh).__name__)
def test_mesh_may_be_size_tuple_list_or_int(mesh):
    dist = MultiAxisDist(mesh, ((0,), None), None)
    assert dist == MultiAxisDist((4,), [[0], []], (1, -1))
    assert hash(dist) == hash(MultiAxisDist((4,), [[0], []], (1, -1)))
    assert dist.processorMesh == (4,)
    assert dist.numProcessors == 4


@pytest.mark.parametrize("axis", [0, 1])
def test_one_axis_may_be_an_int(axis):
    # 0 is no axis less
    assert MultiAxisDist((2, 4), (axis, None), 1) == MultiAxisDist((2, 4), ((axis,), ()), 1)


def test_distributions_are_immutable_and_compared_literally():
    dist = MultiAxisDist((2, 2), ((0,), (1,)), 2)
    with pytest.raises(AttributeError):
        dist.blockSizes = (1, 1)
    assert dist != MultiAxisDist((2, 2), ((1,), (0,)), 2)
    assert dist != MultiAxisDist((2, 2), ((0,), (1,)), 1)
    assert eval(repr(dist)) == dist


def test_latex():
    assert MultiAxisDist((2, 4), ((0,), None), 4).latexStr() == r"$T_{\perp\{ 0,\emptyset \}(4,\emptyset)}$"


# -- ownership


@pytest.mark.parametrize("fact", EXAMPLES["block_limits"], ids=str)
def test_block_limits(fact):
    assert max_block_size(fact["axis"], fact["procs"]) == fact["max_block"]
    assert split_fits(fact["axis"], fact["procs"], fact["block"]) == fact["compatible"]
    assert MultiAxisDist(fact["procs"], [[0]], fact["block"]).compatible([fact["axis"]]) == fact["compatible"]


@pytest.mark.parametrize("fact", EXAMPLES["ownership"], ids=lambda fact: fact["dist"])
def test_ownership_facts(fact):
    dist = dist_of(fact)
    shape = fact["shape"]
    assert str(dist) == fact["dist"]
    assert [list(dist.localShape(shape, rank)) for rank in range(dist.numProcessors)] == fact["local_shapes"]
    assert dist.maxNumElements(shape) == fact["max_num_elements"]
    view = dist.processorView(shape)
    for rank, rows in fact["rows_of_dim0"].items():
        held = view[..., int(rank)]
        assert held.any(1).nonzero().flatten().tolist() == rows
        assert torch.equal(held.any(1), held.all(1))


def mask_by_definition(dist: MultiAxisDist, shape: list[int]) -> torch.Tensor:
    """Element by element from the rule: block j lives on linear coordinate j mod P."""
    mesh = dist.processorMesh
    view = torch.zeros(*shape, prod(mesh), dtype=torch.bool)
    for rank, coordinates in enumerate(product(*map(range, mesh))):
        for index in product(*map(range, shape)):
            holds = True
            for i, axes, block in zip(index, dist.dimsMapping, dist.blockSizes):
                linear, total = 0, 1
                for axis in axes:
                    linear, total = linear * mesh[axis] + coordinates[axis], total * mesh[axis]
                holds &= not axes or i // block % total == linear
            view[(*index, rank)] = holds
    return view


@st.composite
def cases(draw, max_axes=3, max_dims=3):
    """A shape and a compatible distribution, uneven ones included."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=max_axes))
    num_dims = draw(st.integers(1, max_dims))
    mapping = [[] for _ in range(num_dims)]
    for axis in draw(st.permutations(range(len(mesh)))):
        place = draw(st.integers(-1, num_dims - 1))
        if place >= 0:
            mapping[place].append(axis)
    shape = [
        draw(st.integers(prod(mesh[axis] for axis in axes), 12)) if prod(mesh[a] for a in axes) <= 12 else 27
        for axes in mapping
    ]
    blocks = [draw(st.integers(1, max_block_size(n, prod(mesh[a] for a in axes)))) for n, axes in zip(shape, mapping)]
    dist = MultiAxisDist(mesh, mapping, blocks)
    assume(prod(shape) * dist.numProcessors <= 30_000)
    return shape, dist


@settings(max_examples=40, deadline=None)
@given(cases())
def test_closed_forms_agree_with_masks(case):
    shape, dist = case
    assert dist.compatible(shape)
    expected = mask_by_definition(dist, shape)
    view = dist.processorView(shape)
    assert torch.equal(view, expected)
    counts = expected.flatten(0, -2).sum(0).tolist()
    assert [prod(dist.localShape(shape, rank)) for rank in range(dist.numProcessors)] == counts
    assert dist.maxNumElements(shape) == max(counts)
    assert min(counts) > 0
    linear = prod(shape) // 2
    assert torch.equal(dist.getElementLocation(shape, linear), expected.flatten(0, -2)[linear])
    last = [length - 1 for length in shape]
    assert torch.equal(dist.getElementLocation(shape, last), expected[tuple(last)])


def test_questions_about_what_does_not_exist_are_refused():
    dist = MultiAxisDist(4, [[0], []], 1)
    with pytest.raises(ValueError, match="compatible"):
        dist.maxNumElements([3, 3])
    with pytest.raises(ValueError, match="rank"):
        dist.localShape([4, 4], 4)
    with pytest.raises(ValueError, match="index"):
        dist.getElementLocation([4, 4], 16)
    with pytest.raises(ValueError, match="index"):
        dist.getElementLocation([4, 4], [0, 4])
    assert not dist.compatible([4])


# -- operations


def call(dist: MultiAxisDist, shape: list[int], op: str, args: dict):
    return getattr(dist, op)(shape, **args)


@pytest.mark.parametrize("number", range(len(EXAMPLES["operations"])))
def test_operation_facts(number):
    fact = EXAMPLES["operations"][number]
    shape, dist = fact["shape"], dist_of(fact["dist"])
    assert str(dist) == fact["dist"]["prints"]
    if "raises" in fact:
        with pytest.raises(ValueError):
            call(dist, shape, fact["op"], fact["args"])
    else:
        result, volume, n_procs = call(dist, shape, fact["op"], fact["args"])
        assert (str(result), volume, n_procs) == (fact["result"], fact["volume"], fact["n_procs"])
        assert result.maxNumElements(shape) == fact["max_local_after"]
        before, after = dist.processorView(shape), result.processorView(shape)
        missing = (after & ~before).flatten(0, -2).sum(0).max().item()
        assert missing <= fact["lower_bound_recv"]


@pytest.mark.parametrize("option", ["option1", "option2"])
def test_manual_options_of_the_notebook(option):
    shape = MANUAL["shape"]
    dist = MultiAxisDist(MANUAL["mesh"], ((0, 1), (), (), ()), 1)
    assert str(dist) == MANUAL["start"]
    for step in MANUAL[option]:
        dist, volume, n_procs = eval("dist." + step["call"], {"dist": dist, "shape": shape})
        assert (str(dist), volume, n_procs) == (step["dist"], step["volume"], step["n_procs"])


def groups_of(dist: MultiAxisDist, result: MultiAxisDist, op_name: str) -> list[list[int]]:
    """The groups in which a step runs: ranks that differ in the axes it moves."""
    mesh = dist.processorMesh
    coordinates = list(product(*map(range, mesh)))
    if op_name.startswith("permute"):
        first, second = (int(field) for field in op_name.split("_")[1:])
        swapped = [list(c) for c in coordinates]
        for c in swapped:
            c[first], c[second] = c[second], c[first]
        return [[rank, coordinates.index(tuple(c))] for rank, c in enumerate(swapped)]
    if op_name.startswith("changeBlockSize"):
        axes = set(dist.dimsMapping[int(op_name.split("_")[1])])
    elif op_name == "allgather_*":
        axes = {axis for dim in dist.dimsMapping for axis in dim}
    else:
        before = {axis: d for d, dim in enumerate(dist.dimsMapping) for axis in dim}
        after = {axis: d for d, dim in enumerate(result.dimsMapping) for axis in dim}
        axes = {axis for axis in range(len(mesh)) if before.get(axis) != after.get(axis)}
    fixed = lambda rank: [c for axis, c in enumerate(coordinates[rank]) if axis not in axes]  # noqa: E731
    return [
        [other for other in range(len(coordinates)) if fixed(other) == fixed(rank)] for rank in range(len(coordinates))
    ]


@settings(max_examples=40, deadline=None)
@given(cases())
def test_neighbours_are_obtainable_inside_their_group_and_replay_by_name(case):
    shape, dist = case
    before = dist.processorView(shape).flatten(0, -2)
    volume_before = dist.maxNumElements(shape)
    seen = set()
    for op_name, result, volume, n_procs in dist.neighbours(shape):
        assert dist.apply(shape, op_name) == (result, volume, n_procs), op_name
        assert result.compatible(shape)
        assert (result, op_name.split("_")[0], n_procs) not in seen
        seen.add((result, op_name.split("_")[0], n_procs))
        after = result.processorView(shape).flatten(0, -2)
        if op_name.startswith("split"):
            assert (volume, n_procs) == (0, 0)
            assert not (after & ~before).any(), f"{op_name} keeps what it does not have"
            continue
        assert volume == volume_before
        for rank, group in enumerate(groups_of(dist, result, op_name)):
            held_in_group = before[:, group].any(1)
            assert not (after[:, rank] & ~held_in_group).any(), f"{op_name} needs data from outside its group"
            assert len(set(group)) <= n_procs


def test_neighbours_cover_what_the_notebook_uses():
    dist = MultiAxisDist(MANUAL["mesh"], ((0, 1), (), (), ()), 1)
    names = {name for name, *_ in dist.neighbours(MANUAL["shape"], [4])}
    assert {"split_3_2_1", "alltoall_minor_0_1_4", "allgather_0", "allgather_1", "allgather_*", "permute_0_2"} <= names
    # the block of the source is written -1
    assert "alltoall_0_1_-1" in names
    assert "alltoall_0_1_1" not in names


def test_leaps_need_a_target():
    shape = [8, 8]
    start, target = MultiAxisDist(4, [[0], []], 2), MultiAxisDist(4, [[], [0]], 2)
    assert start.apply(shape, "exchange_*", target) == start.exchange(shape, target) == (target, 16, 4)
    replicated = MultiAxisDist(4, [[], []])
    assert replicated.apply(shape, "split_*", target) == (target, 0, 0)
    assert start.apply(shape, "permuation_0_0") == (start, 16, 2)
    for op_name in ("exchange_*", "split_*"):
        with pytest.raises(ValueError, match="target"):
            start.apply(shape, op_name)
    with pytest.raises(ValueError, match="replicated"):
        start.apply(shape, "split_*", target)
    with pytest.raises(ValueError, match="on mesh"):
        start.exchange(shape, MultiAxisDist((2, 2), [[], [0]], 2))


@pytest.mark.parametrize("op_name", ["", "gather_0", "split_0_1", "split_mf_0_1_2", "alltoall_*", "allgather_-1"])
def test_unknown_names_are_refused(op_name):
    with pytest.raises(ValueError, match="op_name"):
        MultiAxisDist((2, 2), [[0], []], 1).apply([8, 8], op_name)


@pytest.mark.parametrize(
    "refused",
    [
        lambda d, s: d.allgather(s, 1),
        lambda d, s: MultiAxisDist((2, 2, 2, 2), [[], []]).allgather(s),
        lambda d, s: d.allgather(s, 3),
        lambda d, s: d.split(s, 1, 0),
        lambda d, s: d.split(s, 2, 3),
        lambda d, s: d.split(s, 1, 3, 9),
        lambda d, s: d.split(s, 1, 3, 0),
        lambda d, s: d.split(s, 0, 3, minor=True),
        lambda d, s: d.alltoall(s, 1, 0),
        lambda d, s: d.permute(s, (0, 1, 2)),
        lambda d, s: MultiAxisDist((2, 2, 2, 2), [[], []]).permute(s, (0, 1)),
        lambda d, s: d.permute(s, (0, 4)),
        lambda d, s: d.change_block_size(s, 0, 0),
        lambda d, s: d.change_block_size(s, 0, 8),
        lambda d, s: d.split([4, 4], 1, 3),
    ],
)
def test_refusals(refused):
    dist = MultiAxisDist((2, 2, 2, 2), [[0, 1, 2], []], 1)
    with pytest.raises(ValueError):
        refused(dist, [8, 8])


@settings(max_examples=30, deadline=None)
@given(cases(), st.data())
def test_layout_says_the_same(case, data):
    shape, dist = case
    layout = dist.to_layout()
    assert layout.to_multi_axis() == dist
    view = dist.processorView(shape)
    for rank in range(dist.numProcessors):
        assert tuple(layout.local_shape(shape, rank)) == dist.localShape(shape, rank)
    assert view.any(-1).all()


@pytest.mark.parametrize("kind", ["block", "chunk", "ragged"])
def test_layouts_that_blocks_can_say_convert_given_a_shape(kind):
    from optim_redist import Block, Chunk, Layout, LayoutError, Mesh, NotRepresentableError, Ragged

    layout = Layout(
        Mesh((2, 2)), [((0, 1), {"block": Block(), "chunk": Chunk(), "ragged": Ragged([0, 3, 6, 9, 10])}[kind])]
    )
    with pytest.raises(LayoutError, match="shape"):
        layout.to_multi_axis()
    if kind == "chunk":  # 10 over 2×2 is 3, 2, 3, 2: no block length gives that
        with pytest.raises(NotRepresentableError, match="equal blocks"):
            layout.to_multi_axis([10])
        assert layout.to_multi_axis([8]) == MultiAxisDist((2, 2), [(0, 1)], 2)
    else:
        assert layout.to_multi_axis([10]) == MultiAxisDist((2, 2), [(0, 1)], 3)
    with pytest.raises(NotRepresentableError, match="pending"):
        Layout(Mesh(2), [None], {0: "sum"}).to_multi_axis()
