"""Who orthogonalizes which matrix: even work first, even bytes second, buckets last.

Five steps of Newton–Schulz on an m x n matrix (m <= n) cost 5 (3 m^2 n + m^3) flops; moving it costs its bytes. Equal
shapes are dealt round-robin as far as their count divides by the number of ranks: equal chunks, equal work, no padding.
The rest is placed by ``optim_utils.balance.partition``. Placing everything by ``partition`` is tried, too, and the
better of the two results taken.

Packing each bucket on its own would be uneven: at 8 ranks some rank gets 1.8 to 3.7 times the mean. So owners are dealt
over the whole model, and only then is every owner's list cut into buckets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from optim_kernels.orthogonalization import NSConfig
from optim_utils.balance import partition

MEMORY_CAP = 1.1  # bytes of the fullest owner over the mean, where that can be met
MAX_PADDING = 0.03  # as a share of all bytes

# What owners are dealt by, whatever a group's options are: these may change between steps, owners not.
_ITERATION = NSConfig(method="standard")


@dataclass(frozen=True)
class Matrix:
    """One parameter of the Muon route; ``index`` is its place in the plan."""

    index: int
    shape: tuple[int, ...]
    cost: int  # flops
    nbytes: int


def newton_schulz_flops(shape: Sequence[int]) -> int:
    """Flops of five steps on every matrix of a ``[..., m, n]`` tensor."""
    return prod(shape[:-2]) * _ITERATION.flops(*shape[-2:])


def deal(matrices: Sequence[Matrix], world_size: int, num_buckets: int) -> list[list[list[int]]]:
    """Plan indices as ``[bucket][rank]`` lists, each in the order of ``matrices``; no bucket is empty."""
    owners = min(
        _round_robin(matrices, world_size), _partitioned(matrices, world_size), key=lambda o: _cost(matrices, o)
    )
    lists: list[list[Matrix]] = [[] for _ in range(world_size)]
    for matrix, owner in zip(matrices, owners):
        lists[owner].append(matrix)
    allowed = max(MAX_PADDING, _padding(_cut(lists, 1)))
    most = max(len(mine) for mine in lists)
    count = next(n for n in range(min(num_buckets, most), 0, -1) if n == 1 or _padding(_cut(lists, n)) <= allowed)
    return [
        [[matrix.index for matrix in mine] for mine in bucket] for bucket in _cut(lists, count) if any(map(len, bucket))
    ]


def _round_robin(matrices: Sequence[Matrix], world_size: int) -> list[int]:
    """Equal shapes dealt in turn; what does not divide is placed by cost on top of that (even) load."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for position, matrix in enumerate(matrices):
        by_shape.setdefault(matrix.shape, []).append(position)
    owners = [-1] * len(matrices)
    rest = []
    for positions in by_shape.values():
        dealt = len(positions) // world_size * world_size
        for turn, position in enumerate(positions[:dealt]):
            owners[position] = turn % world_size
        rest += positions[dealt:]
    for position, owner in zip(rest, _partitioned([matrices[position] for position in rest], world_size)):
        owners[position] = owner
    return owners


def _partitioned(matrices: Sequence[Matrix], world_size: int) -> list[int]:
    """Owners by cost, with bytes capped where the cap can be met."""
    costs = [float(matrix.cost) for matrix in matrices]
    if not any(costs):
        return [position % world_size for position in range(len(matrices))]
    memory = [matrix.nbytes for matrix in matrices]
    try:
        return list(partition(costs, world_size, memory=memory, memory_cap=MEMORY_CAP).owner)
    except ValueError:  # the cap is below the largest matrix or otherwise infeasible: cost alone decides
        return list(partition(costs, world_size).owner)


def _cost(matrices: Sequence[Matrix], owners: Sequence[int]) -> tuple[int, int]:
    """Work of the busiest rank, then bytes of the fullest."""
    work: dict[int, int] = {}
    memory: dict[int, int] = {}
    for matrix, owner in zip(matrices, owners):
        work[owner] = work.get(owner, 0) + matrix.cost
        memory[owner] = memory.get(owner, 0) + matrix.nbytes
    return max(work.values()), max(memory.values())


def _cut(lists: Sequence[Sequence[Matrix]], count: int) -> list[list[list[Matrix]]]:
    """``count`` buckets: of n matrices of a shape that a rank owns, the i-th goes to bucket i count / n.

    Ranks that own equally many of every shape then fill every bucket alike, to the last byte.
    """
    buckets: list[list[list[Matrix]]] = [[[] for _ in lists] for _ in range(count)]
    for rank, mine in enumerate(lists):
        of_shape = Counter(matrix.shape for matrix in mine)
        seen: Counter[tuple[int, ...]] = Counter()
        for matrix in mine:
            buckets[seen[matrix.shape] * count // of_shape[matrix.shape]][rank].append(matrix)
            seen[matrix.shape] += 1
    return buckets


def _padding(buckets: Sequence[Sequence[Sequence[Matrix]]]) -> float:
    """Bytes that equal chunks waste, as a share of the matrices' bytes."""
    used = sum(matrix.nbytes for bucket in buckets for mine in bucket for matrix in mine)
    chunks = sum(len(bucket) * max(sum(m.nbytes for m in mine) for mine in bucket) for bucket in buckets)
    return (chunks - used) / max(1, used)
