"""The cheapest sequence of plain collectives from one layout to another, by A*.

States and moves are those of ``collective_states`` and ``collective_moves``, plus one permutation: at most once, ranks
may swap all they hold, which leads to any state with equal pieces and costs the L elements of the fullest rank.

The estimate is the receive bound of what is left. If in every dimension the factors of the state are a prefix of the
target's or the other way round, every rank keeps  K = product of n / max(P_state, P_target)  elements; else some rank
keeps none (K = 0). That rank has to receive |target| - K. Where sizes divide evenly the estimate is never too large, so
the result is a cheapest sequence; where they do not, the volumes are those of the fullest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from optim_redist._methods.collective_moves import collective_moves
from optim_redist._methods.collective_states import CollectiveOp, Move, Space, State
from optim_redist.layout import Layout


@dataclass(frozen=True)
class CollectiveStep:
    """One collective of a sequence.

    Attributes:
        op: which collective.
        axes: axes of ``layout.mesh`` along which ranks of a group differ; empty for a permutation, which has no groups.
        group_size: ranks in a group.
        layout: the layout after it, on the mesh of prime factors.
        recv: elements that the fullest rank receives, as ``collective_moves`` counts them.
    """

    op: CollectiveOp
    axes: tuple[int, ...]
    group_size: int
    layout: Layout
    recv: int


def search_collectives(
    shape: Sequence[int], src: Layout, dst: Layout, *, max_expansions: int = 20_000
) -> list[CollectiveStep] | None:
    """The cheapest sequence of collectives in which no rank ever holds more than the larger of source and target.

    None if the two meshes have not the same ranks in one order or no common refinement, or if ``max_expansions``
    states are not enough.
    """
    space = Space.of(tuple(shape), src, dst)
    if space is None:
        return None
    moves = _Search(space).run(max_expansions)
    return None if moves is None else _as_steps(space, moves)


def _as_steps(space: Space, moves: list[Move]) -> list[CollectiveStep]:
    """The moves as steps, with consecutive slices merged into one."""
    steps: list[CollectiveStep] = []
    for move in moves:
        axes = tuple(sorted(move.factors))
        step = CollectiveStep(move.op, axes, space.group_size(axes) or 1, space.layout(move.state), move.recv)
        if move.op == "permute":
            step = replace(step, group_size=space.mesh.num_ranks)
        if steps and step.op == steps[-1].op == "slice":
            before = steps.pop()
            axes = tuple(sorted((*before.axes, *axes)))
            step = replace(step, axes=axes, group_size=space.group_size(axes))
        steps.append(step)
    if space.started:
        axes = tuple(sorted(space.started))
        last = moves[-1].state if moves else space.start
        steps.append(CollectiveStep("init_partial", axes, space.group_size(axes), space.layout(last, started=True), 0))
    return steps


_Trail = tuple[Move, "_Trail"] | None


class _Search:
    """A* with two layers: before and after the one permutation.

    A permutation may lead to any labelling of the pieces, and moves treat factors of equal size alike. After the
    permutation, states are therefore told apart only by the sizes of their factors: each is kept with the smallest
    labels. Once the sequence is known, the true labels are assigned backwards from the target.
    """

    def __init__(self, space: Space) -> None:
        self.space, self.live = space, max(space.start_size, space.target_size)
        self.unlabelled_target = space.relabelled(space.target)
        self._estimates: dict[tuple[bool, State], float] = {}

    def run(self, max_expansions: int) -> list[Move] | None:
        space = self.space
        order = count()
        best: dict[tuple[bool, State], float] = {(False, space.start): 0.0}
        # (f, tie-break: latest first, cost so far, whether permuted, state, trail)
        queue: list[tuple[float, int, float, bool, State, _Trail]] = [(0.0, 0, 0.0, False, space.start, None)]

        def push(cost: float, permuted: bool, move: Move, trail: _Trail) -> None:
            key = (permuted, space.relabelled(move.state) if permuted else move.state)
            if cost < best.get(key, inf):
                bound = cost + self.estimate(key)
                if bound < inf:
                    best[key] = cost
                    heappush(queue, (bound, -next(order), cost, *key, (move, trail)))

        for _ in range(max_expansions):
            if not queue:
                return None
            _, _, cost, permuted, state, trail = heappop(queue)
            if cost > best[permuted, state]:
                continue
            if not permuted and state == space.target:
                return _moves_of(trail)
            if permuted and state == self.unlabelled_target:
                return space.labelled(_moves_of(trail))
            for move in collective_moves(space, state, permuted):
                push(cost + move.recv, permuted, move, trail)
            if not permuted:
                size = space.local_size(state)
                for result in space.permutations(state):
                    push(cost + size, True, Move("permute", (), size, result), trail)
        return None

    def estimate(self, key: tuple[bool, State]) -> float:
        """A lower bound of what is left; infinite if a rank would hold too much."""
        if key not in self._estimates:
            permuted, state = key
            fits = self.space.local_size(state) <= self.live
            self._estimates[key] = self.space.least_recv(state, any_labels=permuted) if fits else inf
        return self._estimates[key]


def _moves_of(trail: _Trail) -> list[Move]:
    moves = []
    while trail is not None:
        move, trail = trail
        moves.append(move)
    return moves[::-1]
