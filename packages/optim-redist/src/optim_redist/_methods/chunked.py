"""An exchange in several rounds, so that the buffers of one round fit into the memory that is left.

Finished values: every box is cut into as many parts as there are rounds, along its first dimension that is long enough,
or else into row-major ranges; round c moves part c of every box. Different boxes have their larger parts in different
rounds, so that all rounds move about equally much.

Contributions to one element have to arrive in one round, but their boxes differ. So the target is cut instead: along
its longest dimension what every coordinate needs is divided into equal parts, and round c moves what lies in part c of
its receiver. More rounds than this dimension is long cut the next longest too, so that the parts form a grid, which the
rounds go through in row-major order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from math import prod
from struct import unpack

from optim_redist.boxes import Box, cut
from optim_redist.index_sets import IndexSet, intersect, num_below, size, take
from optim_redist.moves import Phase, Transfer
from optim_redist.problem import Point, Problem

# contributions in a narrower type than the partial results are added in slices of so many elements on the CPU, where
# torch makes a copy of each slice in the wider type: 1 MiB in fp32, which keeps eight threads busy
COMBINED_AT_ONCE = 2**18
CHUNK = 64 * 1024  # bytes of buffers that rounds can always be cut down to


def in_rounds(problem: Problem, phase: Phase, num_rounds: int, numbers: Sequence[int] | None = None) -> list[Phase]:
    """The phase as ``num_rounds`` phases that together make the same transfers.

    If ``phase`` is one rank's part of a phase, ``numbers`` are the numbers of its transfers in the whole phase.
    """
    if num_rounds == 1:
        return [phase]
    if problem.num_contributions > 1:
        rounds = _rounds_of_reduction(problem, phase, num_rounds)
    else:
        rounds = _rounds_of_values(phase, num_rounds, range(len(phase.transfers)) if numbers is None else numbers)
    return [Phase.of(phase.name, transfers) for transfers in rounds]


def _rounds_of_values(phase: Phase, num_rounds: int, numbers: Sequence[int]) -> list[list[Transfer]]:
    """The transfers of every round, where each box is cut by itself."""
    rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
    for number, transfer in zip(numbers, phase.transfers):
        if transfer.sender == transfer.receiver:
            # local copies need no buffer: all in the first round
            rounds[0].append(transfer)
            continue
        points = points_of(*_steps_of_box(transfer.box, num_rounds), num_rounds, number % num_rounds)
        for taking, boxes in zip(rounds, cut(transfer.box, points)):
            taking += (Transfer(transfer.sender, transfer.receiver, box, transfer.read) for box in boxes)
    return rounds


def fullest_round(problem: Problem, phase: Phase, num_rounds: int) -> dict[int, int]:
    """For every rank, the most elements that it sends and receives in any one round; boxes are not cut for this."""
    of_value, totals = RoundSizes(num_rounds), defaultdict[int, int](int)
    of_contribution = _sizes_of_reduction(problem, num_rounds) if problem.num_contributions > 1 else None
    for number, transfer in enumerate(phase.transfers):
        if transfer.sender != transfer.receiver:
            if of_contribution is not None:
                sizes = of_contribution(transfer)
            else:
                sizes = of_value(*_steps_of_box(transfer.box, num_rounds), number % num_rounds)
            totals[transfer.sender] += sizes
            totals[transfer.receiver] += sizes
    return {rank: of_value.largest(total) for rank, total in totals.items()}


class RoundSizes:
    """How many elements of a box are in each of n rounds, in one integer: to add such integers is to add every round.

    With r = steps mod n, the parts that ``points_of`` cuts have, in units,

        steps // n,  and one more in round c if (r c + shift) mod n >= n - r
    """

    def __init__(self, num_rounds: int) -> None:
        self._num_rounds = num_rounds
        self._one_each = int.from_bytes(_ONE * num_rounds, "little")
        # at most 64 MiB
        self._one_more = lru_cache(max(1, 2**22 // num_rounds))(partial(_one_more, num_rounds))

    def __call__(self, unit: int, steps: int, shift: int) -> int:
        each, rest = divmod(steps, self._num_rounds)
        return unit * (each * self._one_each + self._one_more(rest, shift))

    def largest(self, sizes: int) -> int:
        """The elements of the fullest round."""
        words = unpack(f"<{2 * self._num_rounds}Q", sizes.to_bytes(len(_ONE) * self._num_rounds, "little"))
        high, low = max(zip(words[1::2], words[::2]))
        return high << 64 | low


# a round has 128 bits of the integer, which no number of elements fills
_ONE = (1).to_bytes(16, "little")
_NONE = bytes(16)


def _one_more(num_rounds: int, rest: int, shift: int) -> int:
    """1 for every round c with (rest c + shift) mod n >= n - rest.

    There rest (c + 1) + shift reaches the next multiple of n. So the x-th round that gets nothing, counted from 0, has
    floor((rest x + shift) / (n - rest)) before it that get one.
    """
    fewer = num_rounds - rest
    lanes = _ONE * (shift // fewer) + _NONE + _stairs(rest, fewer, shift % fewer, fewer - 1, _ONE, _NONE)
    return int.from_bytes(lanes + _ONE * (num_rounds - len(lanes) // len(_ONE)), "little")


def _stairs(rise: int, run: int, start: int, length: int, up: bytes, on: bytes) -> bytes:
    """For each x from 1 to ``length`` as many ``up`` as whole numbers y = (rise x + start) / run reaches, then ``on``.

    0 <= start < run. As in Euclid's algorithm, steps are joined until few are left, so that long strings are copied
    instead of made step by step.
    """
    if rise >= run:
        return _stairs(rise % run, run, start, length, up, up * (rise // run) + on)
    height = (rise * length + start) // run
    if not height:
        return on * length
    first, last = (run - start - 1) // rise, (run * height - start - 1) // rise
    inner = _stairs(run, rise, (run - start - 1) % rise, height - 1, on, up)
    return on * first + up + inner + on * (length - last)


def _steps_of_box(box: Box, num_rounds: int) -> tuple[int, int]:
    return steps_of([size(indices) for indices in box], num_rounds)


def steps_of(sizes: Sequence[int], num_rounds: int) -> tuple[int, int]:
    """(unit, steps): a box of these sizes has ``steps`` steps of ``unit`` elements, which the rounds share."""
    total = prod(sizes)
    unit = next((total // length for length in sizes if length >= 4 * num_rounds), 1)
    return unit, total // unit


def points_of(unit: int, steps: int, num_rounds: int, shift: int) -> list[int]:
    """Where the parts of a box begin and end; ``shift`` decides which rounds get the larger parts."""
    points = [unit * ((steps * c + shift) // num_rounds) for c in range(num_rounds + 1)]
    return [0, *points[1:-1], unit * steps]


def largest_part(problem: Problem, num_rounds: int) -> Callable[[Point], int]:
    """A function from a target point to the elements of the largest part into which rounds of a reduction cut it."""
    grid = grid_of(problem, num_rounds)

    def part(point: Point) -> int:
        found = problem.num_needed(point)
        for dim, count in grid:
            length = problem.overlaps[dim].dst.sizes[point[dim]]
            found = found // max(length, 1) * -(-length // count)
        return found

    return part


def grid_of(problem: Problem, num_rounds: int) -> list[tuple[int, int]]:
    """(dimension, parts) of the grid into which rounds of reductions cut the target; empty for a scalar."""
    lengths = [max(o.dst.sizes) for o in problem.overlaps]
    found, left = [], num_rounds
    for dim in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        count = min(left, lengths[dim])
        if count > 1:
            found.append((dim, count))
            left //= count
    return found


def parts_of_grid(problem: Problem, num_rounds: int) -> int:
    """The parts of the grid for so many rounds: as many, or fewer where no grid has so many."""
    return prod([count for _, count in grid_of(problem, num_rounds)])


def over_grid(parts: Sequence[Sequence[int]], num_rounds: int) -> list[int]:
    """The elements of every round, from those of the parts along every dimension of the grid."""
    found = [1]
    for along in parts:
        found = [count * more for count in found for more in along]
    return found + [0] * (num_rounds - len(found))


def _rounds_of_reduction(problem: Problem, phase: Phase, num_rounds: int) -> list[list[Transfer]]:
    """The transfers of every round, where the target is cut; all of a scalar comes in the first."""
    grid = grid_of(problem, num_rounds)
    slabs = [[_equal_parts(held, count) for held in problem.overlaps[dim].dst.sets] for dim, count in grid]
    rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
    for t in phase.transfers:
        point = problem.dst_points[t.receiver]
        # (round, box), cut along one dimension of the grid after the other
        found = [(0, t.box)]
        for (dim, count), along in zip(grid, slabs):
            parts = [(c, intersect(t.box[dim], slab)) for c, slab in enumerate(along[point[dim]])]
            found = [
                (number * count + c, (*box[:dim], part, *box[dim + 1 :]))
                for number, box in found
                for c, part in parts
                if part
            ]
        for number, box in found:
            rounds[number].append(Transfer(t.sender, t.receiver, box, t.read, t.contribution))
    return rounds


def _sizes_of_reduction(problem: Problem, num_rounds: int) -> Callable[[Transfer], int]:
    """A function from a transfer to its elements in every round, as ``_rounds_of_reduction`` cuts it, in one integer.

    It is made as those of ``RoundSizes``.
    """
    grid = grid_of(problem, num_rounds)
    known: dict[tuple[tuple[int, IndexSet], ...], int] = {}

    def sizes(t: Transfer) -> int:
        point = problem.dst_points[t.receiver]
        key = tuple([(point[dim], t.box[dim]) for dim, _ in grid])
        found = known.get(key)
        if found is None:
            parts = [
                part_sizes(problem.overlaps[dim].dst.sets[place], part, count)
                for (dim, count), (place, part) in zip(grid, key)
            ]
            words = [count.to_bytes(len(_ONE), "little") for count in over_grid(parts, num_rounds)]
            found = known[key] = int.from_bytes(b"".join(words), "little")
        return found * (t.num_elements // prod([size(part) for _, part in key]))

    return sizes


def part_sizes(held: IndexSet, part: IndexSet, num_rounds: int) -> list[int]:
    """How many indices of ``part`` lie in each of the equal parts into which rounds cut the indices ``held``."""
    if len(held) == 1 and held[0].repeats == 1:
        start, length = held[0].start, held[0].length
        points = [start + length * c // num_rounds for c in range(num_rounds + 1)]
        return [b - a for a, b in pairwise([num_below(part, point) for point in points])]
    return [size(intersect(part, slab)) for slab in _equal_parts(held, num_rounds)]


def _equal_parts(indices: IndexSet, count: int) -> list[IndexSet]:
    total = size(indices)
    return [take(indices, total * c // count, total * (c + 1) // count) for c in range(count)]
