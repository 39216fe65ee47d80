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

h is found by Dijkstra's algorithm run backwards from the target, no further than it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Mapping as Table
from heapq import heappop, heappush
from itertools import combinations, product
from math import inf, prod

from optim_redist._multi_axis_moves import Axes, State, axes_size
from optim_redist._multi_axis_parts import Part

# (collective, n_procs, elements of the most loaded rank before) -> scalar cost
Prices = Table[tuple[str, int, int], float]

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
        self._home, self._start = _places(sizes, target), _places(sizes, start)
        self.goal = sum(HOME << 2 * axis for axis in self._home)
        self._all_used = sum(1 << 2 * axis for axis in range(len(sizes)))
        self._least = least_elements(shape, sizes, memory_limit)
        # pairs (j at START, k at HOME) that exclude each other: their bits, the pair, what makes k AWAY again
        self._excluded: list[tuple[int, int, int]] = []
        # the digits of an axis that is neither FREE nor HOME
        self._astray: list[tuple[int, ...]] = [(AWAY,)] * len(sizes)
        for j, place in self._start.items():
            if place != self._home.get(j):
                for k, home in self._home.items():
                    if j != k:
                        excludes = place[0] == home[0] and not self._beside(place[1], j, home[1], k)
                        if excludes:
                            bits, pair = 3 << 2 * j | 3 << 2 * k, START << 2 * j | HOME << 2 * k
                            self._excluded.append((bits, pair, (HOME ^ AWAY) << 2 * k))
                        if excludes or (sizes[j] == sizes[k] and place != home):
                            self._astray[j] = AWAY, START
        # the best that each axis can be, in its place in the code, when it comes to each dimension
        self.arrivals = [
            [(HOME if self._home.get(axis, (None,))[0] == d else AWAY) << 2 * axis for axis in range(len(sizes))]
            for d in range(len(shape))
        ]
        self._equal_axes = [
            (3 << 2 * i | 3 << 2 * j, self._before_permutation(i, j))
            for i, j in combinations(range(len(sizes)), 2)
            if sizes[i] == sizes[j]
        ]
        self._most_permutations = sum(sizes.count(size) // 2 for size in set(sizes))
        self._joint: dict[int, list[tuple[Axes, float]]] = {}
        # an exchange costs at least this much, and what is left at most
        self.cap = prices["alltoall", prod(sizes), target_size]
        self._settled: dict[int, float] = {}
        self._distance = {self.goal: 0.0}
        self._queue = [(0.0, self.goal)]
        self._radius = 0.0  # no code that is not settled is nearer

    def __call__(self, code: int, enough: float) -> float:
        """The bound from ``code``, exact if it is at most ``enough``."""
        left = self._settled.get(code)
        while left is None and self._radius <= enough and self._radius < self.cap:
            self._settle_next()
            left = self._settled.get(code)
        return self._radius if left is None else left

    def code_of(self, tensor_dim: int, axes: Axes, blocks: tuple[int, ...]) -> int:
        """The digits of the axes of a dimension that has one of ``blocks``: the smallest there are."""
        code, inner = 0, 1
        for axis in reversed(axes):
            digit, home = AWAY, self._home.get(axis)
            if home is not None and home[0] == tensor_dim and home[1] % inner == 0 and home[1] // inner in blocks:
                digit = HOME
            elif len(blocks) == 1 and START in self._astray[axis]:
                digit = START if self._start[axis] == (tensor_dim, inner * blocks[0]) else AWAY
            code |= digit << 2 * axis
            inner *= self._sizes[axis]
        return code

    def possible(self, code: int) -> int:
        """``code`` with axes AWAY that cannot be at home before another has left."""
        for bits, pair, not_home in self._excluded:
            if code & bits == pair:
                code ^= not_home
        return code

    def moves_left(self, parts: Sequence[Part]) -> int:
        """The least number of moves from a state to the target without an exchange.

        There is something to do in every dimension with an axis that is not at home, and for every axis that has a home
        and is FREE. A move settles one of these, or makes one of two; gathering everything leaves all axes that have a
        home. Only a permutation settles two, at most once for each axis.
        """
        code, with_home = sum(part.code for part in parts), self.goal >> 1
        used = (code | code >> 1) & self._all_used
        # AWAY and START are the odd digits
        astray = sum(1 for part in parts if part.code & self._all_used)
        to_do = astray + (with_home & ~used).bit_count()
        return min(to_do - self._most_permutations, 1 + with_home.bit_count())

    def _beside(self, stride: int, axis: int, other_stride: int, other: int) -> bool:
        """Whether two axes can lie in one dimension at these strides, further axes filling the gap between them."""
        fillers = {1}
        for k, size in enumerate(self._sizes):
            if k != axis and k != other:
                fillers |= {filler * size for filler in fillers}
        # one of the two is behind; at equal strides one of size 1
        behind, other_behind = stride * self._sizes[axis], other_stride * self._sizes[other]
        return any(other_stride == behind * gap or stride == other_behind * gap for gap in fillers)

    # -- the graph of codes, backwards

    def _settle_next(self) -> None:
        queue, settled, distance, excluded = self._queue, self._settled, self._distance, self._excluded
        while queue and queue[0][1] in settled:
            heappop(queue)
        if not queue or queue[0][0] >= self.cap:
            self._radius = self.cap
            return
        self._radius, code = cost, _ = heappop(queue)
        settled[code] = cost
        for through, before in self._leading_to(code, cost):
            if through < distance.get(before, inf) and not (excluded and self.possible(before) != before):
                distance[before] = through
                heappush(queue, (through, before))

    def _leading_to(self, code: int, cost: float) -> list[tuple[float, int]]:
        """(cost from there, code) of the states one move before ``code``, itself ``cost`` from the target."""
        sizes, prices, least = self._sizes, self._prices, self._least
        found: list[tuple[float, int]] = []
        used = (code | code >> 1) & self._all_used
        elements = least[used]
        for axis, astray in enumerate(self._astray):
            shift = 2 * axis
            digit = code >> shift & 3
            rest = code ^ digit << shift
            through = -1.0
            if digit == FREE:
                before = least[used | 1 << shift]
                if before:
                    through = cost + prices["allgather", sizes[axis], before]
            elif digit != START:
                if least[used ^ 1 << shift]:
                    found.append((cost, rest))
                if digit == AWAY and axis in self._home:
                    found.append((cost, rest | HOME << shift))
                if digit == HOME or len(astray) > 1:
                    through = cost + prices["alltoall", sizes[axis], elements]
            if through >= 0.0:
                for before in astray:
                    found.append((through, rest | before << shift))
        for bits, leading in self._equal_axes:
            if code & bits in leading:
                through, rest = cost + prices["permute", 2, elements], code & ~bits
                for before in leading[code & bits]:
                    found.append((through, rest | before))
        if used & used - 1:
            for axes, price in self._worth_moving_together(used):
                if all(code >> 2 * axis & 3 in (AWAY, HOME) for axis in axes):
                    found += [(cost + price, before) for before in self._all_astray(code, axes)]
        if not used:
            for axes, price in self._worth_gathering_at_once():
                found += [(cost + price, before) for before in self._all_astray(code, axes)]
        return found

    def _before_permutation(self, i: int, j: int) -> dict[int, list[int]]:
        """For the digits of two axes after they changed places, in the code, those before."""
        found: dict[int, list[int]] = {}
        for digits in product((FREE, *self._astray[i]), (FREE, *self._astray[j])):
            after = 0
            for axis, other, digit in ((i, j, digits[1]), (j, i, digits[0])):
                if digit != FREE:
                    home = self._home.get(axis)
                    comes_home = home is not None and (digit == AWAY or self._start[other] == home)
                    after |= (HOME if comes_home else AWAY) << 2 * axis
            if after:
                found.setdefault(after, []).append(digits[0] << 2 * i | digits[1] << 2 * j)
        return found

    def _all_astray(self, code: int, axes: Axes) -> Iterator[int]:
        """``code`` with all of ``axes`` neither FREE nor HOME, in every way."""
        rest = code & ~sum(3 << 2 * axis for axis in axes)
        for digits in product(*[self._astray[axis] for axis in axes]):
            yield rest | sum(digit << 2 * axis for axis, digit in zip(axes, digits))

    def _worth_moving_together(self, used: int) -> list[tuple[Axes, float]]:
        """Several of the axes in ``used`` whose all-to-all is cheaper than one for each, and its price."""
        found = self._joint.get(used)
        if found is None:
            found = self._joint[used] = []
            sizes, prices, elements = self._sizes, self._prices, self._least[used]
            in_use = [axis for axis in range(len(sizes)) if used >> 2 * axis & 1]
            for axes in _several(in_use):
                price = prices["alltoall", axes_size(sizes, axes), elements]
                if price < sum(prices["alltoall", sizes[axis], elements] for axis in axes):
                    found.append((axes, price))
        return found

    def _worth_gathering_at_once(self) -> list[tuple[Axes, float]]:
        """Axes that are cheaper to gather at once than one after the other, and what that costs."""
        found = []
        sizes, prices, least = self._sizes, self._prices, self._least
        for axes in _several(range(len(sizes))):
            used, singly = sum(1 << 2 * axis for axis in axes), 0.0
            if least[used]:
                at_once = prices["allgather", axes_size(sizes, axes), least[used]]
                for axis in axes:
                    singly += prices["allgather", sizes[axis], least[used]]
                    used ^= 1 << 2 * axis
                if at_once < singly:
                    found.append((axes, at_once))
        return found


def _several(axes: Sequence[int]) -> Iterator[Axes]:
    for count in range(2, len(axes) + 1):
        yield from combinations(axes, count)


def _places(sizes: tuple[int, ...], state: State) -> dict[int, tuple[int, int]]:
    """(dimension, stride) of every axis in use."""
    places = {}
    for tensor_dim, (axes, stride) in enumerate(zip(*state)):
        for axis in reversed(axes):
            places[axis] = tensor_dim, stride
            stride *= sizes[axis]
    return places


def least_elements(shape: tuple[int, ...], sizes: tuple[int, ...], limit: float) -> dict[int, int]:
    """The least that the most loaded rank can hold with axes in use, 0 if that is above ``limit``.

    By the sum of ``1 << 2 * axis``. With dimensions taken one by one, N the length of the last,

        least(dimensions, used) = min over axes P of used:  least(those before the last, used without P) · ceil(N/P)
    """
    used, n_procs = [0], [1]
    for axis, size in enumerate(sizes):
        used += [others | 1 << 2 * axis for others in used]
        n_procs += [others * size for others in n_procs]
    if any(length % n_procs[-1] == 0 for length in shape):
        total = prod(shape)
        least = [total // together for together in n_procs]
    else:
        subsets = [[part for part in range(whole + 1) if part | whole == whole] for whole in range(len(used))]
        least = [1] + [0] * (len(used) - 1)
        for length in shape:
            shares = [-(-length // together) if together <= length else 0 for together in n_procs]
            least = [
                min((size for part in parts if (size := least[parts[-1] ^ part] * shares[part])), default=0)
                for parts in subsets
            ]
    return {axes: elements if elements <= limit else 0 for axes, elements in zip(used, least)}
