"""Random redistributions, the example file, and what a tensor's parts are: shared by the tests, usable by anyone.

Families: ``C`` even, contiguous, axes in mesh order; ``O`` the same in any axis order; ``B`` block-cyclic; ``U`` uneven
and contiguous. Ours: ``R`` ragged, ``I`` intervals, ``E`` sizes below the number of ranks (empty shards), ``K`` nested
chunks, ``M`` another mesh on the other side (disjoint, overlapping, permuted ranks), ``P`` pending reductions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from itertools import product
from math import lcm, prod
from pathlib import Path
from typing import Any, NamedTuple

from optim_redist import Block, Chunk, Cyclic, Intervals, Layout, Mesh, Ragged
from optim_redist._methods.relay_volumes import most_moved
from optim_redist.index_sets import elements
from optim_redist.moves import Phase

EXAMPLES: dict[str, Any] = json.loads((Path(__file__).parent / "redist_examples.json").read_text())
MESHES = [(4,), (8,), (2, 2), (2, 4), (4, 2), (4, 4), (2, 2, 2), (4, 2, 4), (2, 4, 2), (3, 2), (2, 3, 2)]
FAMILIES = "COBURIEKM"


class Case(NamedTuple):
    """One redistribution."""

    shape: tuple[int, ...]
    src: Layout
    dst: Layout


def example_case(example: dict[str, Any]) -> Case:
    """A redistribution of the example file."""
    mesh = Mesh(example["mesh"])
    return Case(tuple(example["shape"]), _example_layout(mesh, example["src"]), _example_layout(mesh, example["dst"]))


def _example_layout(mesh: Mesh, side: dict[str, Any]) -> Layout:
    dims = [(tuple(axes), Cyclic(block)) if axes else None for axes, block in zip(side["map"], side["block"])]
    return Layout(mesh, dims)


def example_cases() -> list[tuple[str, dict[str, Any], Case]]:
    """(name, row, case) of every redistribution of the example file."""
    rows = [*EXAMPLES["redistributions"], *EXAMPLES["named"]]
    return [(row.get("id") or row["name"], row, example_case(row)) for row in rows]


def random_case(seed: int, families: str = FAMILIES, meshes: Sequence[tuple[int, ...]] = MESHES) -> Case:
    """A redistribution drawn from one of the families; the same seed gives the same case."""
    rng = random.Random(seed)
    family = rng.choice(families)
    sizes = rng.choice(meshes)
    num_dims = 0 if family == "E" and rng.random() < 0.05 else rng.randint(2, 4)
    total = prod(sizes)
    shape = _shape(rng, family, num_dims, total)
    mesh, other = Mesh(sizes), Mesh(sizes)
    if family == "M":
        other = _other_mesh(rng, meshes, total)
        mesh = Mesh(sizes, ranks=rng.sample(range(total), total)) if rng.random() < 0.5 else mesh
    src, dst = (_random_layout(rng, family, m, shape) for m in (mesh, other))
    if family in "CO":
        parts = zip(*([prod(layout.axis_sizes(k)) for k in range(num_dims)] for layout in (src, dst)))
        shape = tuple(lcm(*pair) * rng.choice([1, 2]) if max(pair) > 1 else rng.choice([4, 6]) for pair in parts)
    if family in "BU":
        # no rank is without elements, as the notebook's layouts demand
        parts = zip(*([prod(layout.axis_sizes(k)) for k in range(num_dims)] for layout in (src, dst)))
        shape = tuple(_without_idle(n, pair) for n, pair in zip(shape, parts))
    if family == "P" or (family == "M" and rng.random() < 0.2):
        src, dst = _with_partial(rng, src, 0.5), _with_partial(rng, dst, 0.15)
    return Case(shape, src, dst)


def _shape(rng: random.Random, family: str, num_dims: int, total: int) -> tuple[int, ...]:
    if family == "E":
        return tuple(rng.choice([0, 1, 1, 2, 3, 5]) for _ in range(num_dims))
    if family in "BU":
        # as in the example file: the number of ranks, or twice that in two dimensions
        sizes = [total * rng.choice([1, 2]) if num_dims == 2 else min(total, 16) for _ in range(num_dims)]
    else:
        base = 8 if total == 32 else total
        longest = 16 if num_dims == 2 else 12 if num_dims == 3 else 6
        sizes = [base * rng.choice([1, 2]) if base <= longest else longest for _ in range(num_dims)]
    return tuple(size + rng.choice([0, 1, 2, 3, 5]) for size in sizes) if family in "URIKM" else tuple(sizes)


def _without_idle(n: int, parts: tuple[int, ...]) -> int:
    """The first size from n on of which contiguous blocks leave no coordinate of either side empty."""
    while any((p - 1) * -(-n // p) >= n for p in parts):
        n += 1
    return n


def _other_mesh(rng: random.Random, meshes: Sequence[tuple[int, ...]], total: int) -> Mesh:
    sizes = rng.choice(meshes)
    count = prod(sizes)
    ranks = rng.choice(
        [
            list(range(count)),
            [total + k for k in range(count)],
            [total // 2 + k for k in range(count)],
            rng.sample(range(total + count), count),
        ]
    )
    return Mesh(sizes, ranks=ranks)


def _random_layout(rng: random.Random, family: str, mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    axes: list[list[int]] = [[] for _ in shape]
    for axis in range(mesh.num_axes):
        if shape and rng.random() >= 0.25:
            axes[rng.randrange(len(shape))].append(axis)
    dims: list[Any] = []
    for n, used in zip(shape, axes):
        if family != "C":
            rng.shuffle(used)
        dims.append((tuple(used), _kind(rng, family, n, prod(mesh.sizes[a] for a in used))) if used else None)
    return Layout(mesh, dims)


def _kind(rng: random.Random, family: str, n: int, parts: int) -> Any:
    if family == "B":
        # blocks that leave no coordinate empty
        return Cyclic(rng.choice([b for b in (1, 2, 4, n // parts) if 0 < b * (parts - 1) < n] or [1]))
    if family == "M":
        family = rng.choice("CBRIK")
    if family == "B":
        return Cyclic(rng.choice([1, 2, 3]))
    if family == "R":
        return Ragged([0, *sorted(rng.randint(0, n) for _ in range(parts - 1)), n])
    if family == "I":
        owner = [rng.randrange(parts) for _ in range(n)]
        return Intervals([[(k, k + 1) for k in range(n) if owner[k] == c] for c in range(parts)])
    return Chunk() if family == "K" else Block()


def _with_partial(rng: random.Random, layout: Layout, probability: float) -> Layout:
    op = rng.choice(["sum", "sum", "max", "min"])
    partial: dict[int | str, str] = {axis: op for axis in layout.replicated_axes if rng.random() < probability}
    return Layout(layout.mesh, layout.dims, partial)


def indices_of(layout: Layout, shape: Sequence[int], rank: int) -> list[list[int]]:
    """What a rank holds of every dimension, index by index."""
    return [elements(held) for held in layout.indices(shape, rank)]


def elements_of(layout: Layout, shape: Sequence[int], rank: int) -> set[tuple[int, ...]]:
    """What a rank holds, element by element."""
    return set(product(*indices_of(layout, shape, rank)))


def part_of(full: Any, layout: Layout, rank: int) -> Any:
    """The rank's local tensor of a layout without contributions, None outside its mesh."""
    if rank not in layout.mesh.coordinates:
        return None
    for k, held in enumerate(indices_of(layout, full.shape, rank)):
        full = full[(slice(None),) * k + (held,)]
    return full.clone()


def contributions_of(layout: Layout, rank: int) -> int:
    """Which contribution a rank holds: its linear coordinate on the partial axes."""
    return layout.linear(layout.mesh.coordinates[rank], [axis for axis, _ in layout.partial])


def random_parts(layout: Layout, shape: Sequence[int], *, seed: int = 0, most: int = 99) -> dict[int, Any]:
    """Every rank's part of random whole numbers in fp32, other ones for each contribution: sums of them are exact."""
    import torch

    parts = {}
    for rank in layout.mesh.ranks:
        generator = torch.Generator().manual_seed(seed + contributions_of(layout, rank))
        parts[rank] = part_of(torch.randint(-most, most, tuple(shape), generator=generator).float(), layout, rank)
    return parts


def combined(layout: Layout, shape: Sequence[int], locals: dict[int, Any]) -> Any:
    """The full tensor that local contributions of a partial layout stand for, computed in one process.

    Every replica of a contribution must hold the same bits.
    """
    import torch

    combine = {"sum": torch.add, "avg": torch.add, "min": torch.minimum, "max": torch.maximum, "product": torch.mul}
    full = None
    seen: dict[Any, Any] = {}
    some = next(iter(locals.values()))
    parts: dict[int, Any] = {}
    for rank in sorted(layout.mesh.ranks):
        number = contributions_of(layout, rank)
        part = parts.setdefault(number, torch.zeros(tuple(shape), dtype=some.dtype))
        indices = indices_of(layout, shape, rank)
        key = (number, tuple(map(tuple, indices)))
        assert torch.equal(seen.setdefault(key, locals[rank]), locals[rank]), f"replicas differ on rank {rank}"
        if all(indices):
            where = torch.meshgrid(*map(torch.tensor, indices), indexing="ij") if indices else ...
            part[where] = locals[rank]
    for _, part in sorted(parts.items()):
        full = part if full is None else combine[layout.partial[0][1]](full, part)
    scale = prod(layout.mesh.sizes[axis] for axis, op in layout.partial if op == "avg")
    return full / scale if scale > 1 else full


def replicated_contributions() -> Iterator[Case]:
    """Contributions that several ranks hold, of shapes whose shares are slabs and of such whose shares are ranges."""
    for sizes, shape in product([(2, 3), (3, 2, 2), (2, 2, 3)], [(12, 7), (5, 3), (1, 2), (3, 5, 7)]):
        mesh = Mesh(sizes)
        rest: list[Any] = [None] * (len(shape) - 1)
        for src in ([None, *rest], [mesh.num_axes - 1, *rest]):
            for dst in ([None, *rest], [0, *rest], [*rest, 1]):
                yield Case(shape, Layout(mesh, src, {0: "sum"}), Layout(mesh, dst))


def busiest(phases: Sequence[Phase]) -> int:
    """Elements that the busiest rank sends or receives over all phases."""
    return most_moved([phase.sent() for phase in phases], [phase.received() for phase in phases])
