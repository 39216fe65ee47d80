"""A lower bound from which axes have to be touched, and the least that a rank can hold.

An axis is astray if it is in use and not where the target has it. A path to the target touches every axis that is
astray: with a home it has to be moved or gathered, without one it has to go out of use. Let S be the axes without a
home that are ever in use. A rank holds least with all homes and S in use, and more from the moment that S gets
smaller. So with

    touch(A, S) = min over moves, each charged for least(homes and S):  price + touch(A and S without what it touches)

the path costs at least the minimum of touch(A, S) over every S that contains what is in use now. A move touches one
axis (a gather, and with a home an all-to-all), several of any, or, as a permutation, two that both have a home. A
permutation puts an axis out of use only for one that was not in use, and is charged for what is held without that.
"""

from __future__ import annotations

from collections.abc import Mapping as Table
from math import inf, prod

# (collective, n_procs, elements of the most loaded rank before) -> scalar cost
Prices = Table[tuple[str, int, int], float]


class Floor:
    """The bound by code, of which it reads the low bit of each digit: 1 for an axis that is astray.

    Args:
        with_home: the axes that the target uses; all sets of axes are sums of ``1 << 2 * axis``.
        least: by axes in use, what a rank holds at least, 0 for those that cannot be.
        cap: what is left at most.
    """

    def __init__(
        self, sizes: tuple[int, ...], with_home: int, least: Table[int, int], prices: Prices, cap: float
    ) -> None:
        # for each axis its bit, its size and the others of that size; several axes and their processes together
        self.axes: list[tuple[int, int, int]] = []
        together = [(0, 1)]
        for axis, size in enumerate(sizes):
            bit = 1 << 2 * axis
            alike = sum(1 << 2 * other for other, same in enumerate(sizes) if same == size and other != axis)
            self.axes.append((bit, size, alike))
            together += [(others | bit, n_procs * size) for others, n_procs in together]
        self.several = [(axes, n_procs) for axes, n_procs in together if axes & axes - 1]
        self._all, self._with_home = (1 << 2 * len(sizes)) // 3, with_home
        self._least, self._prices, self._cap = least, prices, cap
        self._known = {0: 0.0}
        self._touched = {0: 0.0}

    def __call__(self, code: int, enough: float = inf) -> float:
        """The bound from ``code``, computed in full whatever is ``enough``."""
        astray = code & self._all
        found = self._known.get(astray)
        if found is None:
            found = self._cap
            others = more = self._all & ~self._with_home & ~astray
            while True:
                found = min(found, self._touching(astray | more))
                if not more:
                    break
                more = more - 1 & others
            self._known[astray] = found
        return found

    def _touching(self, astray: int) -> float:
        """What it costs to touch all of ``astray`` if no other axis without a home is ever in use."""
        found = self._touched.get(astray)
        if found is not None:
            return found
        found, prices, least, with_home, left = inf, self._prices, self._least, self._with_home, self._touching
        used = with_home | astray
        elements = least[used]
        for bit, size, alike in self.axes if elements else ():
            if bit & astray:
                price, partners = prices["allgather", size, elements], alike & with_home
                if bit & with_home:
                    price = min(price, prices["alltoall", size, elements])
                    if alike:
                        swap = prices["permute", 2, elements]
                        price = min(price, swap)
                        for other, *_ in self.axes if partners & astray else ():
                            if other & partners & astray:
                                found = min(found, swap + left(astray ^ bit ^ other))
                elif partners and least[used ^ (partners & -partners)]:
                    # it goes out of use for one that was not in use
                    price = min(price, prices["permute", 2, least[used ^ (partners & -partners)]])
                found = min(found, price + left(astray ^ bit))
        for axes, n_procs in self.several if elements else ():
            for collective, touched in (("allgather", axes & astray), ("alltoall", axes & astray & with_home)):
                if touched:
                    price = prices[collective, n_procs, elements]
                    # often one by one is cheaper than these alone
                    if price < found:
                        found = min(found, price + left(astray ^ touched))
        self._touched[astray] = found
        return found


def least_of_subsets(least: dict[int, int]) -> dict[int, int]:
    """The least that a rank can hold with any of some axes in use, 0 if there is no such state."""
    if all(least.values()):
        return least
    found: dict[int, int] = {}
    for used, elements in least.items():
        fewer = [found[used ^ 1 << bit] for bit in range(used.bit_length()) if used >> bit & 1]
        found[used] = min((size for size in (elements, *fewer) if size), default=0)
    return found


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
        least = [-(-shape[0] // together) if together <= shape[0] else 0 for together in n_procs]
        for length in shape[1:]:
            shares = [-(-length // together) if together <= length else 0 for together in n_procs]
            before, least = least, []
            for whole in range(len(used)):
                best = 0
                for part in range(whole + 1):
                    if part | whole == whole:
                        elements = before[whole ^ part] * shares[part]
                        if elements and (elements < best or not best):
                            best = elements
                least.append(best)
    return {axes: elements if elements <= limit else 0 for axes, elements in zip(used, least)}
