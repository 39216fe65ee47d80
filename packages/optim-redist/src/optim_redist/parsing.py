"""Layouts as text: four notations in, the same four out.

    own              [x.y, -, z~4, w!0:3:7:16]+sum(v)      what ``str(layout)`` prints
    notebook         D_[4,2]⊥{(0,1),∅}(1,∅)                MultiAxisDist; ASCII ``_|_`` and ``-`` for ⊥ and ∅
    partition_spec   P('y', None, ('x', 'z'))              JAX's, meaning ``Block``; may have unreduced={'v'}
    placements       S(0), R, Partial(sum), _S(0,2)        DTensor's, one per mesh axis; may end in order=0:1.0

In the own notation an item per tensor dimension is ``-`` (not split) or axes by name or number, major to minor:
``x.y`` blocks, ``x/y`` nested chunks (``x/`` for one axis), ``x@2/y@1`` the same with split factors (``x@@2/y@@1`` cut
flat, as torch 2.9 does), ``x.y~4`` cyclic in blocks of 4, ``x!0:3:7`` ragged between cut points, ``x{0:2,4:6|2:4}``
intervals per coordinate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from optim_redist.errors import LayoutError, NotRepresentableError
from optim_redist.index_sets import same
from optim_redist.layout import (
    Axis,
    Block,
    Chunk,
    Cyclic,
    Intervals,
    Kind,
    Layout,
    Mesh,
    Ragged,
    Split,
    Strided,
    check_layouts,
)
from optim_redist.multi_axis import MultiAxisDist
from optim_redist.placements import REPLICATE, Placement, ShardOrder, layout_from, placements_of

Notation = Literal["own", "notebook", "partition_spec", "placements"]

_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_MESH_AXIS = re.compile(r"\s*(?:(?P<name>[^=\s][^=]*?)\s*=\s*)?(?P<size>\d+)\s*")
_NOTEBOOK = re.compile(r"D_\[(?P<mesh>[\d,\s]+)\]\s*(?:⊥|_\|_)\s*\{(?P<mapping>.*)\}\s*\((?P<blocks>[^()]*)\)")
_SHARD = re.compile(r"(?:S|Shard)\((?:dim=)?(-?\d+)\)")
_STRIDED = re.compile(r"(?:_S|_StridedShard)\((?:dim=)?(-?\d+),\s*(?:split_factor=|sf=)?(\d+)\)")
_PARTIAL = re.compile(r"Partial\((?:reduce_op=)?['\"]?(\w*)['\"]?\)")


def parse_mesh(text: str) -> Mesh:
    """A mesh from ``"4,2,4"`` or ``"x=4,y=2"``."""
    if not isinstance(text, str):
        raise LayoutError(f'a mesh is written "4,2,4" or "x=4,y=2", got {text!r}')
    names, sizes = [], []
    for item in text.split(","):
        found = _MESH_AXIS.fullmatch(item)
        if found is None:
            raise LayoutError(f'a mesh is written "4,2,4" or "x=4,y=2", got {text!r}')
        sizes.append(_number(found["size"], "mesh sizes"))
        if found["name"]:
            names.append(found["name"])
    if names and len(names) != len(sizes):
        raise LayoutError(f"name all axes of a mesh or none, got {text!r}")
    return Mesh(sizes, names=names or None)


def parse_layout(text: str, mesh: Mesh | str | None = None, *, num_dims: int | None = None) -> Layout:
    """The layout that ``text`` describes in any of the four notations.

    Args:
        mesh: the mesh, or its text; the notebook's notation brings its own.
        num_dims: number of tensor dimensions, for the two notations that may leave out trailing unsplit ones. Without
            it a partition_spec has as many dimensions as entries, and placements end at the last dimension they split.

    Raises:
        LayoutError: if the text is in none of the notations, or describes no valid layout; for wrong types.
    """
    if not isinstance(text, str):
        raise LayoutError(f"text must be a string such as '[x.y, -]', got {text!r}")
    if not isinstance(mesh, Mesh | str | None):
        raise LayoutError(f"mesh must be a Mesh, or its text such as '4,2', got {mesh!r}")
    if not isinstance(num_dims, int | None):
        raise LayoutError(f"num_dims must be a whole number, got {num_dims!r}")
    written = text.strip()
    _check_brackets(written, text)
    grid = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    if written.startswith("D_"):
        layout = _parse_notebook(written, grid)
    elif grid is None:
        raise LayoutError(f"{text!r} does not say its mesh; pass mesh (on the command line --mesh)")
    elif written.startswith("["):
        layout = _parse_own(written, grid)
    elif written.startswith(("P(", "PartitionSpec(")):
        layout = _parse_partition_spec(written, grid, num_dims)
    else:
        layout = _parse_placements(written, grid, num_dims)
    if num_dims is not None and layout.num_dims != num_dims:
        raise LayoutError(f"{text!r} describes {layout.num_dims} dimensions, the tensor has {num_dims}")
    return layout


def format_layout(layout: Layout, notation: Notation = "own", shape: Sequence[int] | None = None) -> str:
    """The layout as text in ``notation``, which ``parse_layout`` reads back.

    ``shape`` is needed if the notation lacks a kind of the layout: for that shape a kind that it has may be equal.

    Raises:
        NotRepresentableError: if the notation cannot express the layout.
    """
    check_layouts(layout=layout)
    if shape is not None:
        layout.check_shape(shape)
    match notation:
        case "own":
            return str(layout)
        case "notebook":
            return str(layout.to_multi_axis(shape))
        case "partition_spec":
            return _partition_spec_text(layout, shape)
        case "placements":
            return _placements_text(layout, shape)
    raise LayoutError(f"notation is own, notebook, partition_spec or placements, got {notation!r}")


def _split_top(text: str, separator: str = ",") -> list[str]:
    """The parts of ``text`` between separators outside all brackets; an empty list for blank text."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in _BRACKETS) - (character in _BRACKETS.values())
        if character == separator and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []


def _check_brackets(part: str, text: str) -> None:
    """Raise ``LayoutError`` unless every bracket of this part of the text is closed by one of its kind."""
    closing: list[str] = []
    # names in quotes may have any characters
    for character in _QUOTED.sub("", part):
        if character in _BRACKETS:
            closing.append(_BRACKETS[character])
        elif character in _BRACKETS.values() and (not closing or closing.pop() != character):
            raise LayoutError(f"{text!r} has a {character} that closes nothing, or closes another kind of bracket")
    if closing:
        raise LayoutError(f"{text!r} has no closing bracket {closing[-1]}")


def _axis(text: str, mesh: Mesh) -> int:
    """The mesh axis that ``text`` means: one of ``axis_names``, else one of ``names``, else a number."""
    name = text.strip().strip("'\"")
    for names in (mesh.axis_names, mesh.names or ()):
        if name in names:
            return names.index(name)
    if not name.isdecimal():
        raise LayoutError(f"{name!r} is no axis of mesh {mesh}")
    return mesh.axis(_number(name, "mesh axes"))


def _numbers(text: str, what: str) -> list[int]:
    return [_number(part, what) for part in text.split(":")]


def _number(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        # also for more digits than Python reads
        raise LayoutError(f"{what} are whole numbers, got {text!r}") from None


# -- own


def _parse_own(text: str, mesh: Mesh) -> Layout:
    closing = text.rindex("]")
    _check_brackets(text[1:closing], text)
    partial: dict[Axis, str] = {}
    for suffix in _split_top(text[closing + 1 :], "+"):
        found = re.fullmatch(r"(\w+)\((.*)\)", suffix)
        if suffix and found is None:
            raise LayoutError(f"behind the dimensions come pending reductions such as +sum(x), got {suffix!r}")
        for name in found[2].split(",") if found else ():
            partial[_axis(name, mesh)] = found[1] if found else ""
    return Layout(mesh, [_parse_own_item(item, mesh) for item in _split_top(text[1:closing])], partial)


def _parse_own_item(item: str, mesh: Mesh) -> Split | None:
    if item in ("-", "∅"):
        return None
    found = re.fullmatch(r"(?P<axes>[^~!{]+)(?:~(?P<block>\d+)|!(?P<cuts>[\d:]+)|\{(?P<table>.*)\})?", item)
    if found is None:
        raise LayoutError(f"{item!r} is no dimension; write -, x.y, x/y, x@2/y@1, x.y~4, x!0:3:7 or x{{0:2|2:4}}")
    kind: Kind = Block()
    names = found["axes"].split(".")
    if "/" in found["axes"] or "@" in found["axes"]:
        pairs = [name.partition("@") for name in found["axes"].split("/") if name.strip()]
        names = [name for name, _, _ in pairs]
        kind = Chunk()
        if any(factor for _, _, factor in pairs):
            flat = "@@" in found["axes"]
            factors = (factor.removeprefix("@") or "1" for _, _, factor in pairs)
            kind = Strided(tuple(_number(factor, "split factors") for factor in factors), flat)
    if found["block"]:
        kind = Cyclic(_number(found["block"], "block lengths"))
    elif found["cuts"]:
        kind = Ragged(_numbers(found["cuts"], "cut points"))
    elif found["table"] is not None:
        rows = found["table"].split("|")
        kind = Intervals([[_numbers(piece, "intervals") for piece in _split_top(row)] for row in rows])
    return Split(tuple(_axis(name, mesh) for name in names), kind)


# -- notebook


def _parse_notebook(text: str, mesh: Mesh | None) -> Layout:
    found = _NOTEBOOK.fullmatch(text)
    if found is None:
        raise LayoutError(f"{text!r} is not of the form D_[4,2]_|_{{(0,1),-}}(1,-)")
    sizes = list(parse_mesh(found["mesh"]).sizes)
    mapping = [_parse_notebook_axes(item) for item in _split_top(found["mapping"])]
    items = _split_top(found["blocks"])
    blocks = [None if item in ("-", "∅", "-1", "") else _number(item, "block lengths") for item in items]
    try:
        layout = MultiAxisDist(sizes, mapping, blocks).to_layout()
    except ValueError as error:
        raise LayoutError(f"{text}: {error}") from error
    if mesh is None:
        return layout
    if list(mesh.sizes) != sizes:
        raise LayoutError(f"{text} is on a mesh of sizes {sizes}, the mesh given has {list(mesh.sizes)}")
    return Layout(mesh, layout.dims)


def _parse_notebook_axes(item: str) -> list[int]:
    inner = item.strip("()")
    if inner in ("", "-", "∅"):
        return []
    if not all(axis.strip().isdecimal() for axis in inner.split(",")):
        raise LayoutError(f"the axes of a dimension are numbers such as 0 or (0,1), or -, got {item!r}")
    return [_number(axis, "mesh axes") for axis in inner.split(",")]


# -- partition spec


def _parse_partition_spec(text: str, mesh: Mesh, num_dims: int | None) -> Layout:
    if not text.endswith(")"):
        raise LayoutError(f"{text!r} goes on behind its last bracket; a PartitionSpec ends there")
    inner = text[text.index("(") + 1 : -1].rstrip().removesuffix(",")
    _check_brackets(inner, text)
    dims: list[tuple[int, ...] | None] = []
    partial: dict[Axis, str] = {}
    for item in _split_top(inner):
        word, equals, value = item.partition("=")
        if equals and word.strip() == "unreduced":
            partial |= {_axis(name, mesh): "sum" for name in _split_top(value.strip().strip("{}"))}
        elif equals:
            raise LayoutError(f"{text}: {word.strip()} is not known here; a PartitionSpec may have unreduced={{...}}")
        elif not item:
            raise LayoutError(f"{text}: nothing stands before a comma; write None for what is not split")
        elif item == "None":
            dims.append(None)
        elif item.endswith("UNCONSTRAINED"):
            raise LayoutError(f"{text}: an unconstrained dimension is no layout; say what it is, None if not split")
        else:
            dims.append(tuple(_axis(name, mesh) for name in _split_top(item.strip("()")) if name))
    if num_dims is not None:
        dims += [None] * (num_dims - len(dims))
    return Layout(mesh, dims, partial)


def _partition_spec_text(layout: Layout, shape: Sequence[int] | None) -> str:
    items = []
    for tensor_dim, split in enumerate(layout.dims):
        if split is None:
            items.append("None")
            continue
        if not isinstance(split.kind, Block):
            sizes = layout.axis_sizes(tensor_dim)
            n = None if shape is None else shape[tensor_dim]
            if n is None or not all(map(same, split.kind.index_sets(n, sizes), Block().index_sets(n, sizes))):
                raise NotRepresentableError(
                    f"a PartitionSpec means blocks of ceil(n / p); dimension {tensor_dim} of {layout} is "
                    "divided otherwise" + ("; pass shape, which may make it the same" if shape is None else "")
                )
        names = [repr(layout.mesh.axis_names[axis]) for axis in split.axes]
        items.append(names[0] if len(names) == 1 else f"({', '.join(names)})")
    if any(op != "sum" for _, op in layout.partial):
        raise NotRepresentableError(f"unreduced axes of a PartitionSpec are sums; {layout} has others pending")
    if layout.partial:
        names = sorted(repr(layout.mesh.axis_names[axis]) for axis, _ in layout.partial)
        items.append(f"unreduced={{{', '.join(names)}}}")
    return f"P({', '.join(items)})"


# -- placements


def _parse_placements(text: str, mesh: Mesh, num_dims: int | None) -> Layout:
    body, _, order_text = text.strip().removeprefix("(").partition("order=")
    inside = body.strip().removesuffix(")") if text.startswith("(") else body
    placements = [_parse_placement(item) for item in _split_top(inside.rstrip().removesuffix(","))]
    if num_dims is None:
        num_dims = max((p.tensor_dim + 1 for p in placements if p.tensor_dim is not None), default=0)
    order: ShardOrder = {}
    for item in _split_top(order_text):
        tensor_dim, colon, axes = item.partition(":")
        if not colon or not tensor_dim.strip().isdecimal():
            raise LayoutError(f"{text!r}: an order is written order=0:1.0, dimension 0 cut by axis 1, then 0")
        order[_number(tensor_dim, "dimensions")] = tuple(_axis(name, mesh) for name in axes.split("."))
    return layout_from(mesh, placements, num_dims, order)


def _parse_placement(item: str) -> Placement:
    if item in ("R", "Replicate()", "Replicate"):
        return REPLICATE
    if found := _SHARD.fullmatch(item):
        return Placement(_number(found[1], "dimensions"))
    if found := _STRIDED.fullmatch(item):
        return Placement(_number(found[1], "dimensions"), _number(found[2], "split factors"))
    if found := _PARTIAL.fullmatch(item):
        return Placement(op=found[1] or "sum")
    raise LayoutError(
        f"{item!r} is in no notation known here: placements are S(0), R, Partial(sum) and _S(0,2); other layouts start "
        "with [, D_[ or P("
    )


def _is_chunked(split: Split) -> bool:
    """Whether placements say the same for every size: chunks, or strided ones in the order in which they are read."""
    if isinstance(split.kind, Strided):
        return not split.kind.flat and list(split.axes) == sorted(split.axes)
    return isinstance(split.kind, Chunk) or (isinstance(split.kind, Block) and len(split.axes) == 1)


def _placements_text(layout: Layout, shape: Sequence[int] | None) -> str:
    if shape is None:
        if not all(split is None or _is_chunked(split) for split in layout.dims):
            raise LayoutError(f"{layout}: only a shape tells whether torch's chunks say the same; pass shape")
        shape = (0,) * layout.num_dims
    placements, order = placements_of(layout, shape)
    text = ", ".join(map(str, placements))
    if order:
        names = layout.mesh.axis_names
        orders = (f"{dim}:{'.'.join([names[axis] for axis in axes])}" for dim, axes in sorted(order.items()))
        text += f" order={','.join(orders)}"
    return text
