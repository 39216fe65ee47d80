"""The least that a path between multi-axis distributions can cost, from where each mesh axis is.

An axis of size s lies at stride σ of a dimension if that has blocks of b: σ = b · (sizes of the axes behind it). It
covers the strides [σ, σ·s). Axes that come to the front of a dimension or leave it keep the block, at the back the
block is divided or multiplied by just what comes or leaves. So an axis keeps its place, a dimension and a stride, until
a move touches it; and that move is charged with the size of the axis and with what a rank holds at least, given which
axes are in use. All else is forgotten. What is left of a state is one digit an axis:

    FREE   it splits nothing                  HOME    it lies where the target has it
    AWAY   it lies anywhere                   START   it lies where the start had it, and that is known to matter

START matters where another axis has its home across that place, so that one cannot come before the other has left, and
where an axis of equal size has its home elsewhere, so that exchanging the two does not bring that one home. On these
digits every move does the best it could:

    split      FREE -> AWAY or HOME                           allgather   AWAY, START -> FREE, one axis or all
    alltoall   AWAY, START -> AWAY or HOME, any axes          permute     two axes of equal size change places

and HOME may be called AWAY for nothing. So h(HOME) <= h(AWAY) <= h(START), whatever the other axes, and a state of
which less is known may be given the smaller digit. The cost h of a cheapest path to the target over these at most 4^n
codes never exceeds the true one, if no collective gets cheaper with more elements: every real move is one of the above,
at no higher price. An all-to-all of several axes stands for itself only if it is cheaper than one for each: those could
be moved from the top down where strides grow, from the bottom up where they shrink, and never be in each other's way.
``exchange_*`` is charged for at least what the target holds; its price caps h.

A code is settled: what is FREE and could be at home without delay is called HOME. That costs nothing and leaves less to
move. It takes one move away, a permutation that puts an axis out of use by bringing a FREE one home, which therefore is
a move of its own, charged for what is held without the latter.

h is found by A* over settled codes, guided by ``_multi_axis_floor``, for each code when it is asked for and no further
than it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf, prod

from optim_redist._multi_axis_floor import Floor, Prices, least_elements, least_of_subsets
from optim_redist._multi_axis_moves import Axes, State
from optim_redist._multi_axis_parts import Part

FREE, AWAY, HOME, START = range(4)


class Estimate:
    """A lower bound of the cost from any state to the target, by its code: the sum of ``digit << 2 * axis``."""

    def __init__(
        self,
        shape: tuple[int, ...],
        sizes: tuple[int, ...],
        start: State,
        target: State,
        prices: Prices,
        memory_limit: float,
        target_size: int,
    ) -> None:
        self._sizes, self._prices = sizes, prices
        self.home, self._start = _places(sizes, target), _places(sizes, start)
        self.goal = sum(HOME << 2 * axis for axis in self.home)
        # sets of axes: the low bit of each one's digit, which is 1 where it is AWAY or at START
        self.all, self._with_home = (1 << 2 * len(sizes)) // 3, self.goal >> 1
        # an exchange costs at least this much, and what is left at most
        self.cap = prices["alltoall", prod(sizes), target_size]
        self._least = least_of_subsets(least_elements(shape, sizes, memory_limit))
        self.floor = Floor(sizes, self._with_home, self._least, prices, self.cap)
        self._axes, self._several = self.floor.axes, self.floor.several
        self.equal_axes = [(i, j) for j, size in enumerate(sizes) for i in range(j) if sizes[i] == size]
        # the axes that exclude, at START, that one with a home is there; those of which START is told
        self._excluding = dict.fromkeys(self.home, 0)
        self._told = 0
        self._find_who_excludes()
        # by code: what is left, and what it is at least
        self.exact = {self.goal: 0.0}
        self._at_least: dict[int, float] = {}
        self._onward: dict[int, list[tuple[float, int]]] = {}
        self._joint: dict[int, list[tuple[int, float]]] = {}
        self._at_once: list[tuple[int, float]] | None = None

    def _find_who_excludes(self) -> None:
        sizes = self._sizes
        for j, place in self._start.items():
            if place != self.home.get(j):
                for k, home in self.home.items():
                    if j == k:
                        continue
                    if place[0] == home[0] and not self._beside(place[1], j, home[1], k):
                        self._excluding[k] |= 1 << 2 * j
                        self._told |= 1 << 2 * j
                    elif sizes[j] == sizes[k] and place != home:
                        self._told |= 1 << 2 * j

    def __call__(self, code: int, enough: float) -> float:
        """The bound from ``code``, exact if it is at most ``enough``."""
        left = self.exact.get(code)
        if left is None:
            left = self._at_least.get(code)
            if left is None or left <= enough:
                left = self._improved(code, enough)
        return left

    def _improved(self, code: int, enough: float) -> float:
        """The bound from ``code`` as far as it is asked for, remembered."""
        settled = self.settled(code)
        left = self.exact.get(settled)
        if left is None:
            left = self.floor(settled)
            if left <= enough and left < self.cap:
                left = self._search(settled, enough)
        (self.exact if settled in self.exact else self._at_least)[code] = left
        return left

    def arrivals(self, tensor_dim: int) -> list[int]:
        """The best that each axis can be, in its place in the code, when it comes to a dimension."""
        places = [self.home.get(axis, (None,))[0] for axis in range(len(self._sizes))]
        return [(HOME if place == tensor_dim else AWAY) << 2 * axis for axis, place in enumerate(places)]

    def code_of(self, tensor_dim: int, axes: Axes, blocks: tuple[int, ...]) -> int:
        """The digits of the axes of a dimension that has one of ``blocks``: the smallest there are."""
        code, inner = 0, 1
        for axis in reversed(axes):
            digit, home = AWAY, self.home.get(axis)
            if home is not None and home[0] == tensor_dim and home[1] % inner == 0 and home[1] // inner in blocks:
                digit = HOME
            elif len(blocks) == 1 and self._told >> 2 * axis & 1:
                digit = START if self._start[axis] == (tensor_dim, inner * blocks[0]) else AWAY
            code |= digit << 2 * axis
            inner *= self._sizes[axis]
        return code

    def settled(self, code: int) -> int:
        """``code`` with axes at home that are FREE to be, and AWAY that cannot be before another has left."""
        at_start = code & code >> 1
        for axis, excluding in self._excluding.items():
            shift = 2 * axis
            digit = code >> shift & 3
            if excluding & at_start:
                if digit == HOME:
                    code ^= (HOME ^ AWAY) << shift
            elif digit == FREE:
                code |= HOME << shift
        return code

    def waits(self, code: int) -> bool:
        """Whether an axis that is FREE can only come home after another has left."""
        code = self.settled(code)
        return bool(self._with_home & ~(code | code >> 1))

    def moves_left(self, parts: Sequence[Part]) -> int:
        """The least number of moves from a state to the target without an exchange.

        There is something to do in every dimension with an axis that is not at home, and for every axis that has a home
        and is FREE. A move settles one of these, or makes one of two; gathering everything leaves all axes that have a
        home. Only a permutation settles two, at most once for each axis.
        """
        code, with_home = sum(part.code for part in parts), self._with_home
        used = (code | code >> 1) & self.all
        most_permutations = sum(self._sizes.count(size) // 2 for size in set(self._sizes))
        # AWAY and START are the odd digits
        astray = sum(1 for part in parts if part.code & self.all)
        to_do = astray + (with_home & ~used).bit_count()
        return min(to_do - most_permutations, 1 + with_home.bit_count())

    def _beside(self, stride: int, axis: int, other_stride: int, other: int) -> bool:
        """Whether two axes can lie in one dimension at these strides, further axes filling the gap between them."""
        fillers = {1}
        for k, size in enumerate(self._sizes):
            if k != axis and k != other:
                fillers |= {filler * size for filler in fillers}
        # one of the two is behind; at equal strides one of size 1
        behind, other_behind = stride * self._sizes[axis], other_stride * self._sizes[other]
        return any(other_stride == behind * gap or stride == other_behind * gap for gap in fillers)

    # -- the graph of codes

    def _search(self, root: int, enough: float) -> float:
        """The cost of a cheapest path from ``root``, or what it exceeds once that is more than ``enough``."""
        exact, at_least, cap = self.exact, self._at_least, self.cap
        queue, order = [(self.floor(root), 0, root, 0.0)], 0
        spent, before = {root: 0.0}, dict[int, int]()
        while queue:
            f, _, code, cost = heappop(queue)
            if f >= cap:
                break
            if f > enough:
                return f
            if cost > spent[code]:
                continue
            if code in exact:
                # all on the way are exact from now on
                while code != root:
                    code = before[code]
                    exact[code] = f - spent[code]
                return f
            onward = self._onward.get(code)
            if onward is None:
                onward = self._onward[code] = self._moves(code)
            for price, after in onward:
                through = cost + price
                if through < spent.get(after, inf):
                    spent[after], before[after] = through, code
                    left = exact.get(after)
                    if left is None:
                        left = at_least.get(after)
                        if left is None:
                            left = self.floor(after)
                    order -= 1
                    heappush(queue, (through + left, order, after, through))
        exact[root] = cap
        return cap

    def _moves(self, code: int) -> list[tuple[float, int]]:
        """(price, code after it) of the moves from ``code``."""
        prices, least, with_home, settled = self._prices, self._least, self._with_home, self.settled
        used, astray = (code | code >> 1) & self.all, code & self.all
        elements = least[used]
        found: list[tuple[float, int]] = []
        if not elements:
            return found
        for bit, size, alike in self._axes:
            digit = code & 3 * bit
            if not digit:
                found.append((0.0, code | AWAY * bit))
            elif digit & bit:
                gathered, arrived = settled(code ^ digit), HOME if bit & with_home else AWAY
                found.append((prices["allgather", size, elements], gathered))
                found.append((prices["alltoall", size, elements], settled(code ^ digit | arrived * bit)))
                partners = alike & code >> 1 & ~code
                if not bit & with_home and partners and least[used ^ (partners & -partners)]:
                    found.append((prices["permute", 2, least[used ^ (partners & -partners)]], gathered))
        for i, j in self.equal_axes:
            here, there = code >> 2 * i & 3, code >> 2 * j & 3
            if (here | there) & 1:
                rest = code & ~(3 << 2 * i | 3 << 2 * j)
                after = rest | self._taking(i, j, there) << 2 * i | self._taking(j, i, here) << 2 * j
                found.append((prices["permute", 2, elements], settled(after)))
        for axes, price in self._worth_moving_together(used):
            moved = axes & astray
            after = code & ~(3 * moved) | HOME * (moved & with_home) | AWAY * (moved & ~with_home)
            found.append((price, settled(after)))
        found += [
            (price, self.goal)
            for axes, price in self._worth_gathering_at_once()
            if not astray & ~axes and not axes & ~used
        ]
        return found

    def _taking(self, axis: int, other: int, digit: int) -> int:
        """What ``axis`` is at the place of ``other``, of which ``digit`` is known."""
        if digit == FREE:
            return FREE
        home = self.home.get(axis)
        return HOME if home is not None and (digit != START or self._start[other] == home) else AWAY

    def _worth_moving_together(self, used: int) -> list[tuple[int, float]]:
        """Several of the axes in ``used`` whose all-to-all is cheaper than one for each, and its price."""
        found = self._joint.get(used)
        if found is None:
            found = self._joint[used] = []
            prices, elements = self._prices, self._least[used]
            for axes, n_procs in self._several:
                if not axes & ~used:
                    price = prices["alltoall", n_procs, elements]
                    singly = [prices["alltoall", size, elements] for bit, size, _ in self._axes if bit & axes]
                    if price < sum(singly):
                        found.append((axes, price))
        return found

    def _worth_gathering_at_once(self) -> list[tuple[int, float]]:
        """Axes that are cheaper to gather at once than one after the other, and what that costs."""
        if self._at_once is None:
            self._at_once = []
            prices, least = self._prices, self._least
            for axes, n_procs in self._several:
                if least[axes]:
                    at_once, singly, left = prices["allgather", n_procs, least[axes]], 0.0, axes
                    for bit, size, _ in self._axes:
                        if bit & axes:
                            singly += prices["allgather", size, least[left]]
                            left ^= bit
                    if at_once < singly:
                        self._at_once.append((axes, at_once))
        return self._at_once


def _places(sizes: tuple[int, ...], state: State) -> dict[int, tuple[int, int]]:
    """(dimension, stride) of every axis in use."""
    places = {}
    for tensor_dim, (axes, stride) in enumerate(zip(*state)):
        for axis in reversed(axes):
            places[axis] = tensor_dim, stride
            stride *= sizes[axis]
    return places
