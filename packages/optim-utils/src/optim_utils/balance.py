"""Who owns what: items given to ranks so that the slowest rank finishes as early as possible.

    minimise   max over ranks r of  initial_load[r] + Σ costs of the items of r
    subject to                      Σ memory of the items of r ≤ memory_cap

The answer depends on the arguments alone, so every rank of a job computes the same one; `Partition.fingerprint` lets
them compare. Costs come from a model of the work: bytes moved, eigendecompositions, Newton–Schulz products.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from numbers import Integral, Real

import torch

from optim_utils._arguments import check_torch_dtype, iterated, sizes_of
from optim_utils._balance_search import Problem, best_owners, largest_load, loads_of, longest_first, lower_bound

__all__ = ["BytesCost", "CostModel", "CubicCost", "NewtonSchulzCost", "Partition", "partition"]

CostModel = Callable[[Sequence[int], torch.dtype], float]


@dataclass(frozen=True)
class BytesCost:
    """The bytes of a tensor, rounded up to ``alignment`` bytes: elementwise updates, buffers, messages."""

    alignment: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "alignment", _count("alignment", self.alignment))

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        check_torch_dtype(dtype)
        return -(-prod(sizes_of(shape)) * dtype.itemsize // self.alignment) * self.alignment


@dataclass(frozen=True)
class CubicCost:
    """Σ d³ over the dimensions d: eigendecompositions or roots of one square factor per dimension (Shampoo, SOAP)."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return sum(size**3 for size in sizes_of(shape))


@dataclass(frozen=True)
class NewtonSchulzCost:
    """Flops of ``steps`` Newton–Schulz steps on (..., m, n), times the batch (Muon).

    With m ≤ n a step X ← aX + (bA + cA²)X, A = XXᵀ, is three dense products: 4 m² n + 2 m³. Kernels that leave out
    symmetric halves take less: 3 m² n + m³.
    """

    steps: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _count("steps", self.steps))

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        sizes = sizes_of(shape)
        if len(sizes) < 2:
            raise ValueError(f"Newton–Schulz works on matrices, got shape {sizes}")
        *batch, rows, columns = sizes
        m, n = sorted((rows, columns))
        return prod(batch) * self.steps * (4 * m * m * n + 2 * m**3)


@dataclass(frozen=True)
class Partition:
    """The rank of each item (``owner``), what each rank holds, and how near that is to the optimum.

    ``lower_bound`` is a load that no partition can undercut; ``loads`` are in the units of the costs.
    """

    owner: tuple[int, ...]
    loads: tuple[float, ...]
    memory_loads: tuple[float, ...] | None
    lower_bound: float
    costs: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        """How many ranks share the items."""
        return len(self.loads)

    @property
    def imbalance(self) -> float:
        """Largest load over mean load; 1 is perfect."""
        return _ratio(max(self.loads), sum(self.loads) / self.num_ranks)

    @property
    def gap(self) -> float:
        """How far the largest load is above the lower bound, as a fraction: 0 means that nothing can be better."""
        return _ratio(max(self.loads), self.lower_bound) - 1

    def items(self, rank: int) -> tuple[int, ...]:
        """The items that ``rank`` owns, ascending."""
        if rank not in range(self.num_ranks):
            raise ValueError(f"rank must be one of the {self.num_ranks} ranks from 0 on, got {rank!r}")
        return tuple(item for item, owner in enumerate(self.owner) if owner == rank)

    def report(self) -> str:
        """A few lines for a log: balance, bound, what limits it and what would help."""
        full = max(range(self.num_ranks), key=lambda rank: (self.loads[rank], -rank))
        lines = [
            f"{len(self.owner)} items on {self.num_ranks} ranks: max/mean {self.imbalance:.3f}, "
            f"{100 * self.gap:.1f} % above the lower bound of {self.lower_bound:.6g}",
            f"fullest: rank {full} with {self.loads[full]:.6g} in {len(self.items(full))} item(s)",
        ]
        if self.memory_loads is not None:
            mean = sum(self.memory_loads) / self.num_ranks
            lines.append(
                f"memory: at most {max(self.memory_loads):.6g}, {_ratio(max(self.memory_loads), mean):.3f} × the mean"
            )
        mean = sum(self.loads) / self.num_ranks
        if self.costs and max(self.costs) > mean * (1 + 1e-9):
            item = self.costs.index(max(self.costs))
            lines.append(f"split item {item}: alone it costs {_ratio(max(self.costs), mean):.2f} × the mean load")
        return "\n".join(lines)

    def fingerprint(self) -> str:
        """A hash of who owns what, equal on all ranks that were given the same problem."""
        return hashlib.sha256(json.dumps([self.num_ranks, self.owner]).encode()).hexdigest()


def partition(
    costs: Sequence[float],
    num_ranks: int,
    *,
    memory: Sequence[float] | None = None,
    memory_cap: int | float | None = None,
    initial_load: Sequence[float] | None = None,
    improve: bool = True,
) -> Partition:
    """Give each item to a rank so that the largest load is small: longest first, then moves, swaps and best fit.

    Args:
        costs: what each item costs its owner; finite and not negative.
        num_ranks: how many ranks there are.
        memory: what each item weighs under ``memory_cap``, in bytes.
        memory_cap: the most memory a rank may own: an int in bytes, a float as a multiple of the mean over ranks.
        initial_load: cost that each rank bears already.
        improve: False stops after longest first (LPT), unless that exceeds ``memory_cap``; the improved result is
            never worse.

    Raises:
        TypeError: for a cost, a weight or a cap that is no number.
        ValueError: for an argument out of its range, or whose length does not match ``costs`` or ``num_ranks``; and if
            no partition within ``memory_cap`` was found: the error names the smallest cap for which one was found.
    """
    num_ranks = _count("num_ranks", num_ranks)
    costs = _checked("costs", costs)
    initial = _checked("initial_load", initial_load, num_ranks) if initial_load is not None else [0] * num_ranks
    _check_total("costs and initial_load", [*costs, *initial])
    item_memory = _checked("memory", memory, len(costs)) if memory is not None else [0] * len(costs)
    cap = _cap_in_bytes(item_memory, num_ranks, memory_cap, has_memory=memory is not None)
    problem = Problem(costs, num_ranks, initial, item_memory, cap)
    owner = None if improve else longest_first(problem)
    if owner is None:
        owner = best_owners(problem)
    if owner is None:
        raise _infeasible(problem)
    loads = tuple(loads_of(costs, owner, initial))
    return Partition(
        owner=tuple(owner),
        loads=loads,
        memory_loads=tuple(loads_of(item_memory, owner, [0] * num_ranks)) if memory is not None else None,
        # floats that are summed in another order may differ in the last digit
        lower_bound=min(lower_bound(costs, num_ranks, initial), max(loads)),
        costs=tuple(costs),
    )


def _count(name: str, value: int) -> int:
    """``value`` as an int of Python's own, as numpy's would overflow; ValueError if it is no integer of at least 1."""
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
    return int(value)


def _checked(name: str, values: Sequence[float], length: int | None = None) -> list[float]:
    values = list(iterated(values, name))
    if length is not None and len(values) != length:
        raise ValueError(f"{name} must have {length} entries, got {len(values)}")
    for i, value in enumerate(values):
        if not isinstance(value, Real):
            raise TypeError(f"{name}[{i}] must be a number, got a {type(value).__name__}")
        if not (math.isfinite(number := _total([value])) and value >= 0):
            raise ValueError(f"{name}[{i}] must be finite and not negative, got {number:g}")
        # sums of numpy's numbers would wrap around
        values[i] = int(value) if isinstance(value, Integral) else number
    _check_total(name, values)
    return values


def _check_total(name: str, values: Sequence[float]) -> None:
    if not math.isfinite(total := _total(values)):
        raise ValueError(f"{name} must add up to a finite number, got {total}")


def _total(values: Sequence[float]) -> float:
    """The sum as a float; infinity if it is of ints or fractions that are too large for one."""
    try:
        return float(sum(values))
    except OverflowError:
        return math.inf


def _cap_in_bytes(memory: Sequence[float], num_ranks: int, cap: int | float | None, *, has_memory: bool) -> float:
    if cap is None:
        return math.inf
    if not has_memory:
        raise ValueError("memory_cap needs memory: what each item weighs")
    if not isinstance(cap, Real) or isinstance(cap, bool):
        raise TypeError(f"memory_cap must be an int in bytes, or a float as a multiple of the mean, got {cap!r}")
    if not cap > 0:
        raise ValueError(f"memory_cap must be positive, got {cap}")
    if not any(memory) or _total([cap]) == math.inf:
        # items that weigh nothing are within every cap, but a float cap would be a multiple of zero; and no sum of
        # memory reaches a cap that is beyond all floats
        return math.inf
    return cap if isinstance(cap, Integral) else cap * sum(memory) / num_ranks


def _infeasible(problem: Problem) -> ValueError:
    by_memory = problem.swapped()
    owner = best_owners(by_memory)
    assert owner is not None
    smallest = largest_load(by_memory, owner)
    mean = sum(problem.memory) / problem.num_ranks
    # rounded up, because as a cap it has to suffice: the exact ratio times the mean may round to less than the smallest
    multiple = math.ceil(1000 * _ratio(smallest, mean)) / 1000
    if _cap_in_bytes(problem.memory, problem.num_ranks, multiple, has_memory=True) < smallest:
        multiple += 0.001
    return ValueError(
        f"no partition found within memory_cap = {_exact(problem.cap)} bytes per rank; the smallest cap found is "
        f"{_exact(smallest)} bytes ({multiple:.3f} × the mean): raise it, or split the largest items"
    )


def _exact(amount: float) -> str:
    return str(int(amount)) if amount == int(amount) else str(amount)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 1.0
