"""Cheapest sequences of moves between two multi-axis distributions, by A*.

Four of five pairs need no search: ``straight`` finds a sequence that costs no more than the bound.

For the other pairs, queue entries are taken in the order of f = g + h, where g is the cost so far and h a lower bound
of what is left: when the target is first taken, its path is a cheapest one. The steps out of a state wait in one entry,
sorted by the best they could lead to; steps of equal price and bound are one. What they lead to is computed when their
turn comes. Block lengths stay open (``parts``) until the path is known, and are filled in from its end.

The bound is what ``estimate`` knows of a code: the floor, or what the search for a straight path has found out.
Searching over codes for a better bound would take longer than following the states that it would save.

``exchange_*`` straight to the target is charged for what a rank holds before it, which is what it really moves only if
the target is no larger. It is proposed only then, so that the search cannot buy a growing exchange for the price of a
small one. It also guarantees a plan: if no other sequence stays inside the limits, it is the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf, nextafter, prod
from operator import itemgetter
from typing import NamedTuple

from optim_redist._multi_axis.codes import Codes
from optim_redist._multi_axis.estimate import Estimate
from optim_redist._multi_axis.floor import Prices
from optim_redist._multi_axis.moves import Axes, DimsMapping, Move, State, axes_size
from optim_redist._multi_axis.moves_left import MovesLeft
from optim_redist._multi_axis.names import name_of
from optim_redist._multi_axis.parts import Part
from optim_redist._multi_axis.steps import AlikeSteps, MoveSet, Parts, Step, state_of
from optim_redist._multi_axis.straight import StraightPath


class Node(NamedTuple):
    """A state on the way: what it is, elements of the most loaded rank, its code, and by which step it was reached."""

    parts: Parts
    elements: int
    code: int
    before: Node | None = None
    made_by: AlikeSteps | None = None
    step: Step = (None, None, ())


# (price and bound, bound, price, steps) of the steps out of a state, in this order
Onward = list[tuple[float, float, float, AlikeSteps]]
# An entry is (f, h, elements, tie-break: latest first, cost, moves, node, steps, which of them): of equal f the entry
# estimated nearest to the target goes first, then the one that holds least. It stands for the node's steps from which
# on; without steps it stands for the node itself. (Named tuples here and above slow the search down by a tenth.)
Entry = tuple[float, float, int, int, float, int, Node, Onward, int]


def cheapest_moves(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    start: State,
    target: State,
    elements: tuple[int, int],
    prices: Prices,
    *,
    memory_limit: float,
    wanted: Callable[[State], bool] | None,
    max_depth: int | None,
) -> Sequence[Move]:
    """A cheapest sequence of at most ``max_depth`` moves through wanted states of at most ``memory_limit`` elements.

    Start and target differ; ``elements`` are those of the most loaded rank at each.
    Block lengths of a dimension are 1, those of its two ends, and their multiples and divisors by sizes of mesh axes.
    Other lengths are not worth trying, unless to hold just as much as the target before an exchange: as long as a
    dimension is split, its block changes by factors that are sizes of axes, and of the lengths that allow the same
    steps the shortest leaves no rank with more.
    The target itself is always wanted.
    """
    start_size, target_size = elements
    codes = Codes(sizes, start, target)
    estimate = Estimate(shape, codes, prices, memory_limit, target_size)
    if start_size <= memory_limit:
        straight = StraightPath(
            shape, target, codes, prices, estimate, memory_limit=memory_limit, wanted=wanted, max_depth=max_depth
        )
        moves = straight.find(start, start_size)
        if moves:
            return moves
    blocks = list(zip(start.blocks, target.blocks))
    arrivals = [codes.arrivals(d) for d in range(len(shape))]
    moves_left = MovesLeft(sizes, target, codes.equal_axes)
    move_set = MoveSet(shape, sizes, blocks, codes.code_of, arrivals, merged=wanted is None)
    most_moves = inf if max_depth is None else max_depth
    first, goal = move_set.parts(start), move_set.parts(target)
    leap: AlikeSteps = ("exchange", prod(sizes), 0, codes.goal, [(None, None, ())])
    # sequences must cost less than this: the cheapest one known, or at first the least price above an exchange's
    ceiling = nextafter(prices["alltoall", leap[1], start_size], inf) if start_size >= target_size else inf
    # a split that could come before another step is not tried after it, unless the state between may be forbidden
    early_splits = wanted is None and start_size <= memory_limit
    steps_by_bound = _StepsByBound(move_set, estimate, prices, target_size, leap)

    root = Node(first, start_size, sum(part.code for part in first))
    # the bound does not hold for a start that is above the limit itself
    left = estimate.at_least[root.code] if start_size <= memory_limit else 0.0
    order, at_least, every_axis = count(), estimate.at_least, codes.all
    homes, goal_code = ~(codes.all << 2), codes.goal
    queue: list[Entry] = [(left, left, start_size, 0, 0.0, 0, root, [], 0)]
    reached: dict[Parts, list[tuple[float, int]]] = {first: [(0.0, 0)]}
    while queue:
        f, _, held, _, cost, depth, node, steps, which = heappop(queue)
        if not steps:
            if node.parts is goal:
                return _moves_to(node, sizes, start, target)
            if (cost, depth) not in reached[node.parts] or depth == max_depth:
                continue
            steps = steps_by_bound(node)
        tie_break, found_next = -next(order), False
        # take one step after the other until one leads to a state that is next in the queue
        while which < len(steps) and not found_next and cost + steps[which][0] <= f:
            _, _, price, alike = steps[which]
            _, n_procs, _, _, choices = alike
            which += 1
            spent = cost + price
            for step in choices:
                # what such a split makes is reached by other steps that cost no more
                if not n_procs and ((early_splits and _commutes(node.step, step)) or _is_detour(node, step, prices)):
                    continue
                for after in (goal,) if alike is leap else move_set.after(node.parts, step):
                    front = reached.get(after)
                    if front and (front[0][0] <= spent if max_depth is None else _dominated(front, spent, depth)):
                        continue
                    size, code = 1, 0
                    for part in after:
                        size *= part.share
                        code += part.code
                    if code & homes == goal_code and _covers(after, goal):
                        left, after, front = 0.0, goal, reached.get(goal)
                        if front and _dominated(front, spent, depth):
                            continue
                    elif size > memory_limit or (wanted and not wanted(state_of(after))):
                        reached[after] = [(-inf, 0)]
                        continue
                    elif depth + 2 >= most_moves <= depth + moves_left(after, (code | code >> 1) & every_axis):
                        left = estimate.cap  # too few moves are left for anything but an exchange
                    else:
                        left = at_least[code]
                    if spent + left < ceiling:
                        # arrivals that cost no less than this one stay only if they took fewer moves
                        better = (
                            [one for one in front if one[0] < spent or (max_depth and one[1] <= depth)] if front else ()
                        )
                        reached[after] = [(spent, depth + 1), *better]
                        if after is goal:
                            ceiling = spent
                        found_next = found_next or spent + left <= f
                        made = Node(after, size, code, node, alike, step)
                        f_after = max(f, spent + left)
                        heappush(queue, (f_after, left, size, -next(order), spent, depth + 1, made, [], 0))
        if which < len(steps) and cost + steps[which][0] < ceiling:
            bound, left, *_ = steps[which]
            heappush(queue, (max(f, cost + bound), left, held, tie_break, cost, depth, node, steps, which))
    return _moves_to(Node(goal, target_size, codes.goal, root, leap), sizes, start, target)


class _StepsByBound:
    """The steps out of a state, sorted by the least cost at which they could lead to the target."""

    def __init__(
        self, move_set: MoveSet, estimate: Estimate, prices: Prices, target_size: int, leap: AlikeSteps
    ) -> None:
        self._move_set, self._estimate, self._prices = move_set, estimate, prices
        self._target_size, self._leap = target_size, leap
        self._known: dict[tuple[DimsMapping, int, int], Onward] = {}

    def __call__(self, node: Node) -> Onward:
        """The steps out of ``node``, kept for all states that differ from it in their blocks alone.

        A step's bound is that of the best it could lead to; what it really leads to is computed when its turn comes.
        """
        mapping, elements, code = tuple([part.axes for part in node.parts]), node.elements, node.code
        found = self._known.get((mapping, elements, code))
        if found is None:
            found = self._known[mapping, elements, code] = []
            prices, at_least = self._prices, self._estimate.at_least
            for alike in self._move_set.steps_from(mapping):
                collective, n_procs, kept, arrived, _ = alike
                left = at_least[code & kept | arrived]
                price = prices[collective, n_procs, elements] if n_procs else 0.0
                found.append((price + left, left, price, alike))
            if elements >= self._target_size:
                price = prices["alltoall", self._leap[1], elements]
                found.append((price, 0.0, price, self._leap))
            found.sort(key=itemgetter(0, 1))
        return found


def _commutes(before: Step, split: Step) -> bool:
    """Whether a split that follows a step can as well come before it, so that the step has less to move.

    It can if the step touches neither the dimension nor the axis; of two splits the one with the smaller numbers goes
    first.
    """
    source, target, moved = before
    _, tensor_dim, (axis,) = split
    if source is None and target is None:
        return False
    apart = tensor_dim != source and tensor_dim != target and axis not in moved
    return apart and (source is not None or (tensor_dim, axis) < (target, *moved))


def _is_detour(node: Node, split: Step, prices: Prices) -> bool:
    """Whether a split brings a just gathered axis to another dimension, which one all-to-all does for no more.

    An all-to-all moves the last axis of a dimension: an axis gathered from the front could not have gone alone.
    """
    source, target, moved = node.step
    before, made_by = node.before, node.made_by
    if before is None or made_by is None or source is None or target is not None:
        return False
    _, split_dim, split_axes = split
    if moved != split_axes or source == split_dim or before.parts[source].axes[-1:] != moved:
        return False
    n_procs, elements = made_by[1], before.elements
    return prices["alltoall", n_procs, elements] <= prices["allgather", n_procs, elements]


def _covers(parts: Parts, goal: Parts) -> bool:
    """Whether some choice of blocks makes ``parts`` the goal."""
    return all(part.axes == end.axes and end.blocks[0] in part.blocks for part, end in zip(parts, goal))


def _dominated(front: list[tuple[float, int]], cost: float, depth: int) -> bool:
    """Whether some (cost, moves) of ``front`` is as good as arriving at ``cost`` by ``depth`` + 1 moves."""
    return any(known <= cost and moves <= depth + 1 for known, moves in front)


def _moves_to(node: Node, sizes: tuple[int, ...], start: State, target: State) -> list[Move]:
    """The moves that lead to the target, with every open block filled in from the end on."""
    moves, after = [], target
    while node.before is not None and node.made_by is not None:
        collective, n_procs, *_ = node.made_by
        step, before, parts = node.step, start, node.before.parts
        if node.before.before is not None:
            blocks = [_block_before(sizes, step, *dim) for dim in zip(range(len(parts)), parts, *after)]
            before = State(tuple([part.axes for part in parts]), tuple(blocks))
        if collective == "exchange":
            moves.append(Move("exchange_*", "alltoall", after, n_procs, node.elements))
        else:
            moves.append(Move(name_of(collective, before, after), collective, after, n_procs, node.elements))
        node, after = node.before, before
    return moves[::-1]


def _block_before(sizes: tuple[int, ...], step: Step, tensor_dim: int, part: Part, axes: Axes, block: int) -> int:
    """The block that ``part`` must have so that ``step`` makes it a split over ``axes`` in blocks of ``block``."""
    source, target, moved = step
    if source is None and target is None and not moved:
        return part.blocks[0]
    if tensor_dim not in (source, target):
        return block
    if not part.axes or not axes:
        return part.blocks[0]
    if source == target:
        return next(old for old in part.blocks if old != block and (old % block == 0 or block % old == 0))
    size, longer = axes_size(sizes, moved), max(part.axes, axes, key=len)
    if longer[-len(moved) :] != moved:
        return block
    return block * size if tensor_dim == target else block // size
