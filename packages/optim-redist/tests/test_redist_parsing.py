"""Layouts as text: every notation read, written back, and refused where it says nothing."""

import json
import re
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_redist import (
    Block,
    Chunk,
    Cyclic,
    Intervals,
    Layout,
    LayoutError,
    Mesh,
    MultiAxisDist,
    NotRepresentableError,
    Ragged,
    Strided,
    parse_layout,
)
from optim_redist.parsing import format_layout, parse_mesh

EXAMPLES = json.loads((Path(__file__).parent / "redist_examples.json").read_text(encoding="utf-8"))
XYZW = Mesh((2, 2, 2, 3), names=("x", "y", "z", "w"))


@pytest.mark.parametrize(
    "text, layout",
    [
        ("[x.y, -, z~4, w!0:3:7:16]", Layout(XYZW, [(0, 1), None, (2, Cyclic(4)), (3, Ragged([0, 3, 7, 16]))])),
        ("[y.x, z]+sum(w)", Layout(XYZW, [(1, 0), 2], {3: "sum"})),
        ("[-, -]+avg(w)+sum(x,z)", Layout(XYZW, [None, None], {3: "avg", 0: "sum", 2: "sum"})),
        ("[x/y, z/]", Layout(XYZW, [((0, 1), Chunk()), (2, Chunk())])),
        ("[x@3/y@1]", Layout(XYZW, [((0, 1), Strided((3, 1)))])),
        ("[x{0:2,4:6|2:4}, -]", Layout(XYZW, [(0, Intervals([[(0, 2), (4, 6)], [(2, 4)]])), None])),
        ("[x{|0:4}]", Layout(XYZW, [(0, Intervals([[], [(0, 4)]]))])),
        ("[]", Layout(XYZW, [])),
        ("[1.0,-]", Layout(XYZW, [(1, 0), None])),
        ("  [ x.y ,- ]  ", Layout(XYZW, [(0, 1), None])),
    ],
)
def test_own_notation(text, layout):
    assert parse_layout(text, XYZW) == layout
    assert parse_layout(str(layout), XYZW) == layout
    assert parse_layout(format_layout(layout), XYZW) == layout


@pytest.mark.parametrize("ascii_form", [False, True])
@pytest.mark.parametrize("row", EXAMPLES["redistributions"][::7], ids=lambda row: row["id"])
def test_notebook_notation(row, ascii_form):
    for side in ("src", "dst"):
        dist = MultiAxisDist(row["mesh"], row[side]["map"], row[side]["block"])
        text = str(dist).replace("⊥", "_|_").replace("∅", "-") if ascii_form else str(dist)
        layout = parse_layout(text)
        assert layout == dist.to_layout()
        assert format_layout(layout, "notebook") == str(dist)
        assert parse_layout(text, Mesh(row["mesh"])) == layout


def test_the_command_lines_examples():
    notebook = parse_layout("D_[4,2,4]_|_{(0,1),-,-,-}(1,-,-,-)", "4,2,4")
    assert notebook == MultiAxisDist((4, 2, 4), ((0, 1), (), (), ()), 1).to_layout()
    own = parse_layout("[-,1~4,0~2,-]", "4,2,4")
    assert own == MultiAxisDist((4, 2, 4), ((), (1,), (0,), ()), (-1, 4, 2, -1)).to_layout()
    mesh = parse_mesh("dp=2,tp=4")
    assert parse_layout("S(1),S(0)", mesh) == Layout(mesh, [1, 0])


@pytest.mark.parametrize(
    "text, dims, partial",
    [
        ("P('y', None, 'x')", [1, None, 0], {}),
        ("P(None, ('x','y'), None)", [None, (0, 1), None], {}),
        ("PartitionSpec(('x',), None)", [0, None], {}),
        ("PartitionSpec('x', None,)", [0, None], {}),
        ('P("x", unreduced={"z"})', [0], {2: "sum"}),
        ("P(None, unreduced={'z', 'w'})", [None], {2: "sum", 3: "sum"}),
        ("P()", [], {}),
    ],
)
def test_partition_specs(text, dims, partial):
    layout = Layout(XYZW, dims, partial)
    assert parse_layout(text, XYZW) == layout
    assert parse_layout(format_layout(layout, "partition_spec"), XYZW) == layout


def test_partition_specs_may_leave_out_trailing_dimensions():
    assert parse_layout("P('x')", XYZW, num_dims=3) == Layout(XYZW, [0, None, None])
    assert format_layout(parse_layout("P('y', None, 'x')", "x=4,y=2"), "partition_spec") == "P('y', None, 'x')"


@pytest.mark.parametrize(
    "text, layout",
    [
        ("S(0),R,Partial(sum),_S(0,2)", Layout(XYZW, [((0, 3), Strided((1, 2)))], {2: "sum"})),
        ("S(0), S(0), R, S(1) order=0:1.0", Layout(XYZW, [((1, 0), Chunk()), 3])),
        ("S(0), S(0), R, S(1) order=0:y.x", Layout(XYZW, [((1, 0), Chunk()), 3])),
        ("(Shard(dim=0), Replicate(), Partial(max), _StridedShard(dim=1, sf=3))",
         Layout(XYZW, [0, (3, Strided((3,)))], {2: "max"})),
        ("(Shard(0), R, R, R,)", Layout(XYZW, [0])),
        ("R,R,R,R", Layout(XYZW, [])),
    ],
)  # fmt: skip
def test_placements(text, layout):
    assert parse_layout(text, XYZW) == layout
    assert parse_layout(format_layout(layout, "placements"), XYZW) == layout


def test_placements_of_kinds_that_need_a_shape():
    layout = Layout(Mesh((2, 2)), [(0, 1), None])
    with pytest.raises(LayoutError, match="pass shape"):
        format_layout(layout, "placements")
    with pytest.raises(LayoutError, match="pass shape"):
        format_layout(Layout(Mesh(2), [(0, Cyclic(1))]), "placements")
    # strided shards whose axes cut in another order, or flat, are read back as other layouts
    for axes, factors, is_flat in (((1, 0), (2, 1), False), ((1, 0), (1, 2), False), ((0, 1), (2, 1), True)):
        with pytest.raises(LayoutError, match="pass shape"):
            format_layout(Layout(Mesh((2, 2)), [(axes, Strided(factors, is_flat))]), "placements")
    assert format_layout(Layout(Mesh((2, 2)), [((0, 1), Strided((2, 1)))]), "placements") == "_S(0,2), S(0)"
    assert format_layout(Layout(Mesh(2), [0]), "placements") == "S(0)"
    assert format_layout(layout, "placements", (8, 8)) == "S(0), S(0)"
    # as axis 1 and then axis 0 cut 9 indices into chunks of chunks, which no split factor says
    cuts = Chunk().cut_points(9, (2, 4))
    chunks = Layout(Mesh((4, 2)), [((1, 0), Ragged(cuts))])
    assert format_layout(chunks, "placements", (9,)) == "S(0), S(0) order=0:1.0"
    # torch 2.9 cuts two indices into four chunks, of which the last two are empty; others cut halves into halves
    flat = Layout(Mesh(2), [(0, Strided((2,), flat=True))])
    assert [format_layout(flat, "placements", (n,)) for n in (2, 8)] == ["S(0)", "_S(0,2)"]
    with pytest.raises(NotRepresentableError):
        format_layout(layout, "placements", (10, 8))
    assert parse_layout("S(0), R", Mesh((2, 2)), num_dims=3) == Layout(Mesh((2, 2)), [0, None, None])


def test_partition_specs_of_other_kinds():
    layout = Layout(Mesh((2, 2), names=("x", "y")), [((0, 1), Chunk())])
    with pytest.raises(NotRepresentableError, match="pass shape"):
        format_layout(layout, "partition_spec")
    assert format_layout(layout, "partition_spec", (8,)) == "P(('x', 'y'))"
    with pytest.raises(NotRepresentableError, match="otherwise"):
        format_layout(layout, "partition_spec", (10,))
    with pytest.raises(NotRepresentableError, match="sums"):
        format_layout(Layout(layout.mesh, [0], {1: "max"}), "partition_spec")


def test_names_that_would_read_as_others_are_not_written():
    mesh = Mesh((2, 2, 2), names=("x", "y", "x.y"))
    layout = Layout(mesh, ["x.y", None])
    # not the axes x and y
    assert str(layout) == "[2, -]"
    assert parse_layout(str(layout), mesh) == layout
    # where texts have numbers, a number is no name
    mesh = Mesh((2, 3, 2), names=("1", "0", "x.y"))
    layout = Layout(mesh, [0, "0"])
    assert str(layout) == "[0, 1]"
    assert parse_layout(str(layout), mesh) == layout
    assert parse_layout("P('1', 'x.y')", mesh) == Layout(mesh, [1, 2])
    assert parse_layout("[1, 0]", Mesh((2, 3), names=("1", "0"))) == Layout(Mesh((2, 3)), [0, 1])


@st.composite
def layouts(draw):
    names = [None, ("x", "y", "z"), ("dp", "tp", "1d"), ("x", "y", "x.y"), ("-", "a,b", "c/"), ("a b", "+", "]")]
    names = draw(st.sampled_from(names))
    mesh = Mesh(tuple(draw(st.lists(st.integers(1, 4), min_size=3, max_size=3))), names=names)
    shape = draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    dims = [[] for _ in shape]
    partial = {}
    for axis in draw(st.permutations(range(3))):
        place = draw(st.integers(-2, len(shape) - 1))
        if place == -2:
            partial[axis] = "sum"
        elif place >= 0:
            dims[place].append(axis)
    found = []
    for n, axes in zip(shape, dims):
        parts = prod(mesh.sizes[axis] for axis in axes)
        owners = draw(st.lists(st.integers(0, parts - 1), min_size=n, max_size=n))
        table = [[(i, i + 1) for i in range(n) if owners[i] == c] for c in range(parts)]
        cuts = sorted(draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1)))
        factors = draw(st.lists(st.integers(1, 4), min_size=len(axes), max_size=len(axes)))
        kinds = [Block(), Chunk(), Cyclic(2), Ragged([0, *cuts, n]), Intervals(table), Strided(tuple(factors))]
        found.append((tuple(axes), draw(st.sampled_from(kinds))) if axes else None)
    return Layout(mesh, found, partial), shape


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_every_layout_round_trips_through_its_own_text(case):
    layout, shape = case
    read = parse_layout(str(layout), layout.mesh)
    assert read == layout
    assert str(read) == str(layout)
    for notation in ("notebook", "partition_spec", "placements"):
        try:
            text = format_layout(layout, notation, shape)
        except NotRepresentableError:
            continue
        again = parse_layout(text, layout.mesh, num_dims=len(shape))
        assert again.canonical(shape) == layout.canonical(shape), (text, str(layout))


@pytest.mark.parametrize(
    "text",
    [
        "[q]",
        "[x, x]",
        "[x~0]",
        "[x~]",
        "[x!0:a]",
        "[x",
        "[x]+nothing",
        "[x]+sum(q)",
        "[x@a/y]",
        "[x@2:3/y]",
        "[x{0,1|2:4}]",
        "[x{0:1:2|2:4}]",
        "D_[2,2]_|_{0,1}(1)",
        "D_[2,2]_|_{a,-}(1,-)",
        "D_[9,9,9,9]_|_{0,-}(1,-)",
        "D_[2]",
        "D_[2,,2]_|_{0}(1)",
        "D_[2]_|_{0}(x)",
        "P('q')",
        "P('x', reduced={'y'})",
        "P('x', 'y'",
        "P(P.UNCONSTRAINED)",
        "P('x',,None)",
        "P(,'x')",
        "S(0)",
        "S(0),R,R,what",
        "S(0),,R,R,R",
        "S(0),S(0),R,R order=0",
        "S(0),S(0),R,R order=0:1",
        "",
    ],
)
def test_refusals(text):
    with pytest.raises(LayoutError):
        parse_layout(text, XYZW)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # the first one may have been meant for (x, y) on one dimension
        ("P('x','y'),)", "has a ) that closes nothing"),
        ("P(('x','y',)", "has no closing bracket )"),
        ("P('x',)('y',)", "has a ) that closes nothing"),
        ("P('x') 'y'", "goes on behind its last bracket"),
        ("P('x', unreduced={'y')", "closes another kind of bracket"),
        ("[x, -", "has no closing bracket ]"),
        ("[x]-[y]", "has a ] that closes nothing"),
        ("(S(0), R, R, R", "has no closing bracket )"),
        ("S(0), R, R, R)", "has a ) that closes nothing"),
        ("D_[2,2]_|_{((0,1),-}(1,-)", "closes another kind of bracket"),
    ],
)
def test_brackets_that_do_not_match_are_refused(text, words):
    with pytest.raises(LayoutError, match=re.escape(words)):
        parse_layout(text, XYZW)


def test_names_in_quotes_may_have_brackets():
    mesh = Mesh((2, 2), names=("x]", "(y"))
    assert parse_layout("P('x]')", mesh) == Layout(mesh, [0])
    assert parse_layout('P("(y")', mesh) == Layout(mesh, [1])


DIGITS = "9" * 5000  # more than Python reads


@pytest.mark.parametrize(
    "text",
    [
        f"S({DIGITS}),R,R,R",
        f"_S(0,{DIGITS}),R,R,R",
        f"S(0),R,R,R order=0:{DIGITS}",
        f"S(0),R,R,R order={DIGITS}:0",
        f"[{DIGITS}, -]",
        f"[x~{DIGITS}, -]",
        f"D_[{DIGITS}]_|_{{0}}(1)",
        f"D_[2,2]_|_{{{DIGITS}}}(1)",
    ],
    ids=lambda text: text.replace(DIGITS, "9…9"),
)
def test_numbers_of_any_length_are_refused_in_the_same_way(text):
    with pytest.raises(LayoutError, match="are whole numbers, got '999"):
        parse_layout(text, XYZW)


def test_refusals_about_the_mesh():
    with pytest.raises(LayoutError, match="pass mesh"):
        parse_layout("[x]")
    with pytest.raises(LayoutError, match="dimensions"):
        parse_layout("[x]", XYZW, num_dims=2)
    for text in ("", DIGITS, "4,x", "x=4,2", "4;2", "=4", "x==4", "x=4=2"):
        with pytest.raises(LayoutError):
            parse_mesh(text)
    assert parse_mesh("4, 2") == Mesh((4, 2))
    assert parse_mesh("x=4, y = 2 ") == Mesh((4, 2), names=("x", "y"))
    with pytest.raises(LayoutError, match="notation"):
        format_layout(Layout(XYZW, []), "morse")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"text": None, "mesh": "4"}, "text must be a string such as '[x.y, -]', got None"),
        ({"text": "[0]", "mesh": 4}, "mesh must be a Mesh, or its text such as '4,2', got 4"),
        ({"text": "S(0)", "mesh": "4", "num_dims": "2"}, "num_dims must be a whole number, got '2'"),
    ],
    ids=["text", "mesh", "num_dims"],
)
def test_arguments_of_wrong_types_are_named(arguments, named):
    with pytest.raises(LayoutError) as raised:
        parse_layout(**arguments)
    assert str(raised.value) == named
