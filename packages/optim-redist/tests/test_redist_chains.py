"""Random chains of redistributions of up to 16 ranks in one process, by any planners: as one process would do it."""

from __future__ import annotations

from math import prod
from random import Random
from typing import Any

import pytest
import torch
from redist_cases import combined
from redist_sequences import (
    BITS,
    NUMBERS,
    SIZES,
    check_layout,
    check_plan,
    fresh,
    random_layout,
    random_shape,
    same_bits,
    wide,
)

from optim_redist import Mesh, PlanInfeasibleError, RedistError, Topology, plan, simulate
from optim_redist.cost import Level

# torch says so of every complex32 tensor
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

MANY = [*SIZES, (5,), (6,), (7,), (8,), (2, 3), (3, 2), (2, 4), (4, 2), (3, 3), (2, 5), (4, 3), (2, 2, 2), (3, 1, 2)]
MANY += [(2, 3, 2), (2, 2, 3), (2, 2, 2, 2)]
PLANNERS = [
    "local",
    "direct",
    "nearest",
    "spread",
    "forward",
    "relay",
    "scatter",
    "hierarchical",
    "collectives",
    "naive",
    "packed",
    "stopover",
]
NODES = Topology.nodes(2).levels[0]


def _mesh(draw: Random, num_ranks: int) -> Mesh:
    sizes = draw.choice([sizes for sizes in MANY if prod(sizes) <= num_ranks])
    ranks = draw.sample(range(num_ranks), prod(sizes))
    return Mesh(sizes, ranks=draw.choice([ranks, sorted(ranks), range(len(ranks))]))


def _options(draw: Random) -> dict[str, Any]:
    nodes = [Topology.nodes(count) for count in (1, 2, 3, 4)]
    racks = Topology(levels=(NODES, Level("rack", 1e11, 1e-4, size=draw.choice([4, 6, 8]))))
    options: dict[str, Any] = {
        "topology": draw.choice([None, Topology.flat(), racks, *nodes]),
        "donate": draw.random() < 0.3,
        "deterministic": draw.random() < 0.2,
        "relabel": draw.random() < 0.1,
        "budget": draw.choice([0, 0, 0, 50]),
    }
    if draw.random() < 0.3:
        options["planners"] = draw.sample([*PLANNERS, "packed", "notebook"], 2) + ["direct"] * (draw.random() < 0.7)
    return options


def _chain(seed: int, length: int) -> int:
    """How many of the moves were made."""
    draw, done = Random(seed), 0
    num_ranks, shape = draw.choice([4, 6, 8, 12, 16]), random_shape(draw)
    dtype, ops = draw.choice(BITS), ()
    if draw.random() < 0.6:
        # of these many, sums of many are what they are in any order
        dtype = draw.choice([torch.int32, torch.int64, torch.float32, torch.float64])
        ops = ("sum", "avg", "product", "min", "max")[0 if dtype.is_floating_point else 2 :]
    elif dtype in NUMBERS and not dtype.is_complex:
        ops = ("min", "max")
    layout = random_layout(draw, _mesh(draw, num_ranks), shape, ops)
    values, parts = draw.randrange(2**31), {}
    for rank in layout.mesh.ranks:
        tensor = fresh(Random(values), rank, layout, shape, dtype)
        parts[rank] = tensor.mine
    for _ in range(length):
        mesh = layout.mesh if draw.random() < 0.5 else _mesh(draw, num_ranks)
        keeps = tensor.ops if dtype.itemsize > 2 and draw.random() < 0.4 else ()
        dst, options = random_layout(draw, mesh, shape, keeps), _options(draw)
        check_layout(dst, shape)
        try:
            made = plan(shape, dtype, layout, dst, **options)
            if draw.random() < 0.5:
                least = made.bounds.memory * made.itemsize
                limit = draw.choice([least, made.peak_bytes, made.peak_bytes - 1, least + 16, least // 2])
                made = plan(shape, dtype, layout, dst, memory_limit=limit, **options)
        except PlanInfeasibleError as error:
            # one chunk more always does
            if error.limit >= least + 2**16:
                raise
            continue
        except RedistError as error:
            if "planners" in options and "none of the planners" in str(error):
                continue
            raise
        check_plan(made)
        before = {rank: part.clone() for rank, part in parts.items() if part is not None}
        found, layout = simulate(made, parts), made.dst
        assert all(same_bits(parts[rank], part) for rank, part in before.items()), made
        assert {rank for rank, part in found.items() if part is not None} == set(layout.mesh.ranks)
        if layout.partial:
            whole = combined(layout, shape, {rank: wide(found[rank]) for rank in layout.mesh.ranks})
            assert torch.equal(whole, tensor.full), made
        for rank in () if layout.partial else layout.mesh.ranks:
            wanted = tensor.part(layout, rank)
            same = torch.equal(wide(found[rank]), wide(wanted)) if tensor.is_number else same_bits(found[rank], wanted)
            assert same, (made, rank)
        parts, done = found, done + 1
    return done


@pytest.mark.slow
def test_chains() -> None:
    assert sum(_chain(seed, 8) for seed in range(40)) > 150


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(1000, 3000, 500))
def test_many_chains(first: int) -> None:
    for seed in range(first, first + 500):
        _chain(seed, 8)
