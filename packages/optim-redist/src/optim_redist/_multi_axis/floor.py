"""A lower bound of the cost to the target, from which axes have to be touched and the least that a rank can hold.

An axis is astray if it is in use and not where the target has it. A path to the target touches every axis that is
astray: an axis with a home has to be moved or gathered, one without a home has to go out of use. Let S be the axes
without a home that are ever in use on the path. A rank holds least while all axes with homes and all of S are in use,
and more as soon as S gets smaller. So with

    touch(A, S) = min over moves, each charged for least(homes and S):  price + touch(A and S without what it touches)

the path costs at least the minimum of touch(A, S) over every S that contains what is in use now. A gather touches one
axis or several; so does an all-to-all, of axes with homes. A permutation brings an axis home if the other one is
ACROSS, that is, at the first one's home (``codes``), and brings both home if both are ACROSS. Else it only puts another
axis where the first one was, and touching that one then costs as much; and going ACROSS by an all-to-all is no cheaper
than going home by one. A permutation can also put an axis out of use in exchange for an unused one; it is charged for
what is held while that one is unused. A gather is not considered if it leads to no state within the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, prod
from typing import Protocol

from optim_redist._multi_axis.codes import Codes


class Prices(Protocol):
    """(collective, n_procs, elements of the most loaded rank before) -> scalar cost.

    ``grow``: whether no collective gets cheaper with more processes. No collective may get cheaper with more elements.
    """

    grow: bool

    def __getitem__(self, key: tuple[str, int, int], /) -> float: ...


class Floor:
    """The bound by code; it depends only on which axes are astray, and which of these are ACROSS.

    Args:
        least: the least that a rank can hold, by axes in use; 0 for sets of axes that cannot be in use.
        cap: the largest value of the bound.
    """

    def __init__(self, codes: Codes, least: Mapping[int, int], prices: Prices, cap: float) -> None:
        # for each axis its bit, its size and the others of that size
        self.axes = [(1 << 3 * axis, size, alike) for axis, (size, alike) in enumerate(zip(codes.sizes, codes.alike))]
        self._several: list[tuple[int, int]] = []
        self._all, self._with_home = codes.all, codes.with_home
        self._across, self._across_at_start, self._never_away = codes.across, codes.across_at_start, codes.never_away
        self._without_home = codes.all & ~codes.with_home
        self._least, self._prices, self._cap = least, prices, cap
        self._known = {0: 0.0}
        self._touched = {0: 0.0}

    def __call__(self, code: int, enough: float = inf) -> float:
        """The bound from ``code``, computed in full whatever ``enough`` is."""
        astray = code & self._all
        across = astray & (code >> 2 | code >> 1 & self._across_at_start)
        key = astray | across << 1
        found = self._known.get(key)
        if found is None:
            found = self._cap
            others = more = self._without_home & ~astray
            while True:
                touched = self._touching(astray | more, across | more & self._across)
                if touched < found:
                    found = touched
                if not more:
                    break
                more = more - 1 & others
            self._known[key] = found
        return found

    def has_state(self, used: int) -> bool:
        """Whether there is a state with no axes in use but ``used``: one within the limit, or the target."""
        return self._least[used] > 0 or used == self._with_home

    @property
    def several(self) -> list[tuple[int, int]]:
        """All sets of two or more axes, each with the product of their sizes."""
        if not self._several:
            together = [(0, 1)]
            for bit, size, _ in self.axes:
                together += [(others | bit, n_procs * size) for others, n_procs in together]
            self._several = [(axes, n_procs) for axes, n_procs in together if axes & axes - 1]
        return self._several

    def _touching(self, astray: int, across: int) -> float:
        """What it costs to touch all of ``astray`` if no other axis without a home is ever in use."""
        key = astray | across << 1
        found = self._touched.get(key)
        if found is not None:
            return found
        found, prices, least, with_home, left = inf, self._prices, self._least, self._with_home, self._touching
        used = with_home | astray
        elements = least[used]
        for bit, size, alike in self.axes if elements else ():
            if bit & astray:
                partners = alike & with_home & ~astray
                left_over = used ^ bit
                price = inf
                if least[left_over] or left_over == with_home:
                    price = prices["allgather", size, elements]
                if bit & with_home:
                    moved = prices["alltoall", size, elements]
                    if moved < price:
                        price = moved
                    if bit & across and partners:
                        price = min(price, prices["permute", 2, elements])
                    for other, *_ in self.axes if alike & across else ():
                        if other & alike & across:
                            both = other & with_home if bit & across else 0
                            no_more = bit | other & (both | ~self._never_away)
                            swap = prices["permute", 2, elements]
                            found = min(found, swap + left(astray ^ bit ^ both, across & ~no_more))
                elif partners and least[used ^ (partners & -partners)]:
                    # a swap puts this axis out of use in exchange for an unused one
                    swap = prices["permute", 2, least[used ^ (partners & -partners)]]
                    if not bit & across:
                        swap += prices["alltoall", size, elements]
                    price = min(price, swap)
                if price < found:
                    price += left(astray ^ bit, across & ~bit)
                    if price < found:
                        found = price
        if elements and (astray & astray - 1 or not prices.grow):
            for axes, n_procs in self.several:
                if axes & ~astray and prices.grow:
                    continue
                for collective, touched in (("allgather", axes & astray), ("alltoall", axes & astray & with_home)):
                    if touched and (collective == "alltoall" or self.has_state(0)):
                        price = prices[collective, n_procs, elements]
                        # often touching all one by one costs less than this price alone
                        if price < found:
                            found = min(found, price + left(astray ^ touched, across & ~touched))
        self._touched[key] = found
        return found


def least_of_subsets(least: dict[int, int]) -> dict[int, int]:
    """By set of axes, the least that a rank can hold with any subset of them in use; 0 if there is no such state.

    ``least`` lists all sets of axes; a set with the k-th axis comes 2^k places behind the same set without it.
    """
    found = list(least.values())
    if all(found):
        return least
    without = 1
    while without < len(found):
        for place, elements in enumerate(found):
            if place & without:
                fewer = found[place ^ without]
                if fewer and (fewer < elements or not elements):
                    found[place] = fewer
        without *= 2
    return dict(zip(least, found))


def least_elements(shape: tuple[int, ...], sizes: tuple[int, ...], limit: float) -> dict[int, int]:
    """By set of axes in use, the least that the most loaded rank can hold; 0 if that is above ``limit``.

    With dimensions taken one by one, N the length of the last,

        least(dimensions, used) = min over axes P of used:  least(those before the last, used without P) · ceil(N/P)
    """
    sets, n_procs, bit = [0], [1], 1
    for size in sizes:
        sets += [others | bit for others in sets]
        n_procs += [others * size for others in n_procs]
        bit <<= 3
    every = n_procs[-1]
    least: list[float]
    if any(length % every == 0 for length in shape):
        total = prod(shape)
        least = [total // together for together in n_procs]
    else:
        # the subsets of each set, 3^(number of axes) in all
        subsets = [[0]]
        for k in range(len(sizes)):
            subsets += [inner + [part | 1 << k for part in inner] for inner in subsets]
        least = [-(-shape[0] // together) if together <= shape[0] else inf for together in n_procs]
        for length in shape[1:]:
            before, shares = least, [-(-length // together) if together <= length else inf for together in n_procs]
            parted = [[before[whole ^ part] * shares[part] for part in parts] for whole, parts in enumerate(subsets)]
            least = list(map(min, parted))
    return {axes: int(elements) if elements <= limit and elements < inf else 0 for axes, elements in zip(sets, least)}
