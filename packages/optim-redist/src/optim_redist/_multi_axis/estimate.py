"""The least that a path between multi-axis distributions can cost, from where each mesh axis is.

Only the code of a state counts (``codes``): whether each axis is FREE, AWAY, HOME, at START, ACROSS or OPEN. A move is
charged for the sizes of its axes and the least that a rank can hold, given which axes are in use; and it changes the
digits in the best way that is possible:

    split       FREE -> AWAY, ACROSS or HOME           allgather   astray -> FREE, one axis or all
    alltoall    astray -> HOME, ACROSS or AWAY, any axes at once
    permute     two axes of equal size take each other's place: in the place of an axis that was ACROSS the other one is
                HOME, in the place of one that was HOME it is ACROSS, and in the place of one that was AWAY it is AWAY

A HOME axis may be called AWAY for nothing, and an OPEN one any digit that OPEN stands for. So h(HOME) <= h(AWAY),
h(ACROSS) <= h(AWAY) and h(OPEN) <= both, whatever the other axes, and if less is known of a state, the digit with the
lower h is used.
The cost h of a cheapest path to the target over these codes never exceeds the true one, if no collective gets cheaper
with more elements: every real move is one of the above, at no higher price. An all-to-all of several axes is a move of
its own only if it is cheaper than one for each axis: single axes could be moved from the top down where strides grow,
from the bottom up where they shrink, and never be in each other's way. ``exchange_*`` is charged for at least what the
target holds; its price caps h.

Codes are settled: an axis that is FREE and could be at home without delay counts as in use, OPEN. That costs nothing
and leaves less to move. But it rules out one move, a permutation that puts an axis out of use by bringing a FREE one to
its place; so OPEN axes take part in permutations as FREE, charged for what is held without them.

A* over settled codes, guided by ``floor``, finds h for each code when it is asked for, and only up to the cost that is
asked about.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf, prod

from optim_redist._multi_axis.codes import ACROSS, AWAY, FREE, HOME, OPEN, Codes
from optim_redist._multi_axis.floor import Floor, Prices, least_elements, least_of_subsets


class Estimate:
    """A lower bound of the cost from any state to the target, by its code."""

    def __init__(
        self, shape: tuple[int, ...], codes: Codes, prices: Prices, memory_limit: float, target_size: int
    ) -> None:
        self.codes, self._prices = codes, prices
        # an exchange costs at least this much, and no bound is above it
        self.cap = prices["alltoall", prod(codes.sizes), target_size]
        self._least = _Least(shape, codes.sizes, memory_limit)
        self.floor = Floor(codes, self._least, prices, self.cap)
        # the bound by code, and the codes for which it is exact
        self.at_least = _AtLeast(codes, self.floor)
        self._exact = {codes.goal}
        self._onward: dict[int, list[tuple[float, int]]] = {}
        self._joint: dict[tuple[int, int], list[tuple[int, float]]] = {}
        self._at_once: list[tuple[int, float]] | None = None

    def __call__(self, code: int, enough: float) -> float:
        """The bound from ``code``, exact if it is at most ``enough``."""
        left = self.at_least[code]
        if left <= enough and left < self.cap and code not in self._exact:
            settled = self.codes.settled(code)
            if settled not in self._exact:
                self.at_least[settled] = self._search(settled, enough)
            left = self.at_least[code] = self.at_least[settled]
            if settled in self._exact:
                self._exact.add(code)
        return left

    # -- the graph of codes

    def _search(self, root: int, enough: float) -> float:
        """The cost of a cheapest path from ``root``, or, if that exceeds ``enough``, a lower bound above ``enough``."""
        exact, at_least, floor, beyond, everything = self._exact, self.at_least, self.floor, self.cap, self.codes.all
        queue, order = [(0.0, 0, root, 0.0)], 0
        spent, before = {root: 0.0}, dict[int, int]()
        while queue:
            f, _, code, cost = heappop(queue)
            if cost > spent[code]:
                continue
            if code in exact or not code & everything:
                # from now on the bound is exact for all codes on the path
                f = cost + at_least[code]
                exact.add(code)
                while code != root:
                    code = before[code]
                    at_least[code] = f - spent[code]
                    exact.add(code)
                return f
            onward = self._onward.get(code)
            if onward is None:
                onward = self._onward[code] = self._moves(code)
            for price, after in onward:
                through = cost + price
                if through < spent.get(after, inf):
                    left = at_least.get(after)
                    if left is None:
                        left = at_least[after] = floor(after)
                    left += through
                    if left > enough or left >= beyond:
                        beyond = min(beyond, left)
                    else:
                        spent[after], before[after] = through, code
                        order -= 1
                        heappush(queue, (left, order, after, through))
        if beyond == self.cap:
            exact.add(root)
        return beyond

    def _moves(self, code: int) -> list[tuple[float, int]]:
        """(price, code after it) of the moves from ``code``, which is settled."""
        codes, prices, least = self.codes, self._prices, self._least
        settled, taking, arriving = codes.settled, codes.taking, codes.arriving
        astray = code & codes.all
        used = astray | code >> 1 & codes.all
        elements = least[used]
        found: list[tuple[float, int]] = []
        if not elements:
            return found
        not_home, not_across = codes.excluded(code)
        across = codes.across & ~not_across
        for axis, (bit, size, alike) in enumerate(self.floor.axes):
            digit = code >> 3 * axis & 7
            rest = code ^ digit * bit
            if digit & 1:
                came = arriving(bit)
                gathered, moved = rest | (codes.settled_free & 7 * bit), rest | came
                if not_home or not_across:
                    gathered, moved = settled(rest), settled(moved)
                if least[used ^ bit] or used ^ bit == codes.with_home:
                    found.append((prices["allgather", size, elements], gathered))
                found.append((prices["alltoall", size, elements], moved))
            elif digit == FREE:
                if not bit & codes.never_away:
                    found.append((0.0, rest | AWAY * bit))
                if bit & across:
                    found.append((0.0, rest | ACROSS * bit))
            elif alike & astray:
                # this axis may give up HOME or OPEN to swap with one of its size that is astray
                if digit == OPEN:
                    found.append((0.0, rest | HOME * bit))
                elif not bit & codes.never_away:
                    found.append((0.0, rest | AWAY * bit))
                if bit & (codes.never_away if digit == HOME else across):
                    found.append((0.0, rest | ACROSS * bit))
            elif digit == OPEN:
                found.append((0.0, rest | HOME * bit))
        for i, j in codes.equal_axes:
            here, there, held = code >> 3 * i & 7, code >> 3 * j & 7, used
            # nothing is gained if neither is astray, or both are AWAY
            if not (here | there) & 1 or here == there == AWAY:
                continue
            rest = code ^ (here << 3 * i | there << 3 * j)
            # an OPEN axis may take part as FREE, which it was before the code was settled
            if here == OPEN:
                here, held = FREE, used ^ 1 << 3 * i
            elif there == OPEN:
                there, held = FREE, used ^ 1 << 3 * j
            if least[held]:
                after = rest | taking(i, j, there) << 3 * i | taking(j, i, here) << 3 * j
                found.append((prices["permute", 2, least[held]], settled(after)))
        for axes, price in self._worth_moving_together(used, astray):
            moved = axes & astray
            found.append((price, settled(code & ~(7 * moved) | arriving(moved))))
        found += [
            (price, codes.goal)
            for axes, price in self._worth_gathering_at_once()
            if self.floor.has_state(0) and not astray & ~axes and not axes & ~used
        ]
        return found

    def _worth_moving_together(self, used: int, astray: int) -> list[tuple[int, float]]:
        """Sets of axes whose common all-to-all is cheaper than one for each axis, and its price."""
        prices, among = self._prices, astray if self._prices.grow else used
        if not among & among - 1:
            return []
        found = self._joint.get((used, among))
        if found is None:
            found = self._joint[used, among] = []
            elements = self._least[used]
            for axes, n_procs in self.floor.several:
                if not axes & ~among:
                    price = prices["alltoall", n_procs, elements]
                    singly = [prices["alltoall", size, elements] for bit, size, _ in self.floor.axes if bit & axes]
                    if price < sum(singly):
                        found.append((axes, price))
        return found

    def _worth_gathering_at_once(self) -> list[tuple[int, float]]:
        """Sets of axes that are cheaper to gather at once than one after the other, and the price."""
        if self._at_once is None:
            self._at_once = []
            prices, least = self._prices, self._least
            for axes, n_procs in self.floor.several:
                if least[axes]:
                    at_once, singly, left = prices["allgather", n_procs, least[axes]], 0.0, axes
                    for bit, size, _ in self.floor.axes:
                        if bit & axes:
                            # one after the other may lead through states above the memory limit
                            singly += prices["allgather", size, least[left]] if least[left] else inf
                            left ^= bit
                    if at_once < singly:
                        self._at_once.append((axes, at_once))
        return self._at_once


class _AtLeast(dict[int, float]):
    """The bound by code: the floor until a search finds more, infinite for codes of no state."""

    def __init__(self, codes: Codes, floor: Floor) -> None:
        super().__init__({codes.goal: 0.0})
        self._codes, self._floor = codes, floor

    def __missing__(self, code: int) -> float:
        # there may be no state within the limit with these axes in use
        found = inf
        if self._floor.has_state((code | code >> 1) & self._codes.all):
            settled = self._codes.settled(code)
            if settled not in self:
                self[settled] = self._floor(settled)
            found = self[settled]
        self[code] = found
        return found


class _Least(dict[int, int]):
    """The least that a rank can hold, by axes in use; computed when it is first asked for."""

    def __init__(self, shape: tuple[int, ...], sizes: tuple[int, ...], limit: float) -> None:
        super().__init__()
        self._of = shape, sizes, limit

    def __missing__(self, used: int) -> int:
        self.update(least_of_subsets(least_elements(*self._of)))
        return self[used]
