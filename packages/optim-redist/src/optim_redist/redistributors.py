"""From one multi-axis distribution to another by a sequence of collectives, as the notebook presents it.

A redistributor returns ``(sequence, cost)``. ``sequence`` is a list of ``(op_name, distribution, Cost)`` whose first
row is the start; ``cost`` is the scalar ``alpha·latency + beta·bandwidth + gamma·computation + epsilon·memory`` of the
summed costs. A split sends nothing: its cost is the (negative) change of memory. Every other operation is charged by
the cost model with its group size and the elements of the most loaded rank before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from math import inf
from operator import add

from optim_redist._multi_axis.moves import Move, max_local_size
from optim_redist._multi_axis.search import cheapest_moves
from optim_redist.collective_costs import Cost, CostModel, Formula
from optim_redist.multi_axis import MultiAxisDist

Row = tuple[str, MultiAxisDist, Cost]


class Redistributor(ABC):
    """Base class: a way to choose the sequence of collectives.

    Args:
        cost_model: what each collective costs.
        alpha, beta, gamma, epsilon: the weights of latency, bandwidth, computation and growth of memory.
    """

    def __init__(
        self,
        cost_model: CostModel,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma: float = 1.0,
        epsilon: float = 0.0,
    ) -> None:
        self.cost_model = cost_model
        self.alpha, self.beta, self.gamma, self.epsilon = alpha, beta, gamma, epsilon

    def redistribute(self, shape: Sequence[int], dist: MultiAxisDist, target: MultiAxisDist) -> tuple[list[Row], float]:
        """The rows from ``dist`` to ``target``, and their cost.

        Raises:
            ValueError: if either side is not compatible with the shape, or their meshes or types differ.
        """
        self._check_arguments(shape, dist, target)
        rows: list[Row] = [("", dist, Cost())]
        if dist != target:
            rows += self._steps(tuple(shape), dist, target)
        return rows, self.scalar(reduce(add, (cost for _, _, cost in rows)))

    @abstractmethod
    def _steps(self, shape: tuple[int, ...], dist: MultiAxisDist, target: MultiAxisDist) -> list[Row]:
        """The rows after the first, for two different compatible distributions on one mesh."""

    def scalar(self, cost: Cost) -> float:
        """``cost`` under this redistributor's weights."""
        return cost.scalar(self.alpha, self.beta, self.gamma, self.epsilon)

    @staticmethod
    def _check_arguments(shape: Sequence[int], dist: MultiAxisDist, target: MultiAxisDist) -> None:
        found = None
        if not isinstance(dist, MultiAxisDist) or not isinstance(target, MultiAxisDist):
            found = f"both sides must be MultiAxisDist, got {type(dist).__name__} and {type(target).__name__}"
        elif dist.processorMesh != target.processorMesh:
            found = f"the meshes {list(dist.processorMesh)} and {list(target.processorMesh)} differ"
        else:
            for name, side in (("dist", dist), ("target", target)):
                if not side.compatible(shape):
                    found = f"{name} {side} is not compatible with shape {tuple(shape)}"
        if found is not None:
            raise ValueError(f"Incompatible arguments. {found}")


class NaiveGathererRedist(Redistributor):
    """Gather everything everywhere, then keep what the target wants."""

    def __init__(
        self, cost_model: CostModel, alpha: float = 1.0, beta: float = 1.0, gamma: float = 1.0, epsilon: float = 1.0
    ) -> None:
        super().__init__(cost_model, alpha, beta, gamma, epsilon)

    def _steps(self, shape: tuple[int, ...], dist: MultiAxisDist, target: MultiAxisDist) -> list[Row]:
        rows: list[Row] = []
        replicated = dist
        if dist.isDistributed():
            replicated, volume, n_procs = dist.allgather(shape)
            charged = self.cost_model.allgather(n_procs, volume)
            growth = replicated.maxNumElements(shape) - volume
            rows.append(("allgather_*", replicated, charged + Cost(max_memory_delta=growth)))
        if target.isDistributed():
            shrinkage = target.maxNumElements(shape) - replicated.maxNumElements(shape)
            rows.append(("split_*", target, Cost(max_memory_delta=shrinkage)))
        return rows


class OptimalRedist(Redistributor):
    """A cheapest sequence of the operations of ``MultiAxisDist``, found by exact best-first search.

    The search minimises latency, bandwidth and computation as weighted; it supposes that the model never charges less
    for more elements. Block lengths considered for a dimension are 1, those of its two ends, and their multiples and
    divisors by sizes of mesh axes. ``exchange_*`` straight to the target is a candidate wherever the target is no
    larger, and it is the result if nothing else stays inside the limits, so a sequence is always found.

    Args:
        memory_limit: elements that no rank may exceed at an intermediate distribution.
        node_filter: called with an intermediate distribution; only distributions for which it is true are used.
        max_depth: the largest number of operations.
    """

    def __init__(
        self,
        cost_model: CostModel,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma: float = 1.0,
        epsilon: float = 0.0,
        *,
        memory_limit: int | None = None,
        node_filter: Callable[[MultiAxisDist], bool] | None = None,
        max_depth: int | None = None,
    ) -> None:
        super().__init__(cost_model, alpha, beta, gamma, epsilon)
        if max_depth is not None and max_depth < 1:
            raise ValueError(f"max_depth must be at least 1, got {max_depth}")
        self.memory_limit, self.node_filter, self.max_depth = memory_limit, node_filter, max_depth

    def _limit(self, start_size: int, target_size: int) -> float:
        return inf if self.memory_limit is None else self.memory_limit

    def _steps(self, shape: tuple[int, ...], dist: MultiAxisDist, target: MultiAxisDist) -> list[Row]:
        mesh, node_filter = dist.processorMesh, self.node_filter
        start_size, target_size = (max_local_size(shape, mesh, side._state) for side in (dist, target))
        moves = cheapest_moves(
            shape,
            mesh,
            dist._state,
            target._state,
            (start_size, target_size),
            _Prices(self),
            memory_limit=self._limit(start_size, target_size),
            wanted=None if node_filter is None else lambda state: node_filter(MultiAxisDist._of(mesh, state)),
            max_depth=self.max_depth,
        )
        return self._rows(mesh, moves, start_size)

    def _rows(self, mesh: tuple[int, ...], moves: Sequence[Move], elements: int) -> list[Row]:
        """The rows of ``moves``; before the first, the most loaded rank holds ``elements``."""
        rows: list[Row] = []
        for move in moves:
            if move.collective == "split":
                cost = Cost(max_memory_delta=move.elements - elements)
            else:
                cost = getattr(self.cost_model, move.collective)(move.n_procs, elements)
            rows.append((move.name, MultiAxisDist._of(mesh, move.state), cost))
            elements = move.elements
        return rows


class _Prices(dict[tuple[str, int, int], float]):
    """The weighted cost of each (collective, n_procs, elements), computed when first asked for; a split is free."""

    def __init__(self, redistributor: Redistributor) -> None:
        super().__init__()
        self._weights = redistributor.alpha, redistributor.beta, redistributor.gamma, 0.0
        self._model = redistributor.cost_model
        # only what the model's own class defines: a subclass may charge something else than inherited formulas
        said = vars(type(self._model))
        self._formulas: Mapping[str, Formula] = said.get("formulas", {})
        self.grow: bool = said.get("grows_with_processes", False)

    def __missing__(self, key: tuple[str, int, int]) -> float:
        collective, n_procs, elements = key
        found = 0.0
        formula = self._formulas.get(collective)
        if formula is not None:
            alpha, beta, gamma, _ = self._weights
            latency, bandwidth, computation = formula(n_procs, elements)
            found = float(alpha * latency + beta * bandwidth + gamma * computation)
        elif collective != "split":
            charged: Cost = getattr(self._model, collective)(n_procs, elements)
            found = charged.scalar(*self._weights)
        self[key] = found
        return found


class MemoryConstrainedRedist(OptimalRedist):
    """``OptimalRedist`` in at most five operations; between them no rank holds more than the larger of both ends."""

    def __init__(
        self,
        cost_model: CostModel,
        alpha: float = 1.0,
        beta: float = 1.0,
        gamma: float = 1.0,
        epsilon: float = 0.0,
        *,
        max_depth: int | None = 5,
    ) -> None:
        super().__init__(cost_model, alpha, beta, gamma, epsilon, max_depth=max_depth)

    def _limit(self, start_size: int, target_size: int) -> float:
        return max(start_size, target_size)
