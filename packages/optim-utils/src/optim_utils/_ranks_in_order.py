"""Ranks kept in the order of a key (a load, or the room left for one), each with the memory it holds, up to a cap.

The first rank with room for an item is found without looking at every rank before it: ranks lie in short blocks, and a
block in which no rank has room is skipped as a whole. Which ranks share a block changes no answer.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence

__all__ = ["Entry", "RanksInOrder"]

# key, rank, memory held; a plain tuple, as the search compares and unpacks millions of them
Entry = tuple[float, int, float]
_BLOCK = 12  # ranks; blocks are split at twice as many


class RanksInOrder:
    """Ranks that hold nothing yet, by ascending ``keys``; ranks of equal keys by their number."""

    def __init__(self, keys: Sequence[float], cap: float) -> None:
        self._cap = cap
        entries: list[Entry] = sorted((key, rank, 0.0) for rank, key in enumerate(keys))
        self._blocks = [entries[k : k + _BLOCK] for k in range(0, len(entries), _BLOCK)]
        # of each block its first entry, and the least memory that one of its ranks holds
        self._firsts = [block[0] for block in self._blocks]
        self._least_held = [0.0] * len(self._blocks)

    def take_first(self, memory: float, key: float = -math.inf) -> Entry | None:
        """Take out the first rank with a key of at least ``key`` and room for ``memory``; None if there is none."""
        cap, start = self._cap, (key, -1)
        begin = max(0, bisect_right(self._firsts, start) - 1)
        for k in range(begin, len(self._blocks)):
            if self._least_held[k] + memory > cap:
                continue
            block = self._blocks[k]
            for place in range(bisect_left(block, start) if k == begin else 0, len(block)):
                if block[place][2] + memory <= cap:
                    return self._take(k, place)
        return None

    def take_least_full(self, cost: float, memory: float, mean_load: float) -> Entry | None:
        """Take out the rank that an item of ``cost`` and ``memory`` leaves least full; None if no rank has room for it.

        Fullness is the larger of two ratios, the key (a load) to ``mean_load`` and the memory held to the cap; of
        equally full ranks the first is taken.
        """
        cap, fullness, found = self._cap, math.inf, None
        for k, (first, least) in enumerate(zip(self._firsts, self._least_held)):
            if (first[0] + cost) / mean_load >= fullness:
                break
            if least + memory > cap or (least + memory) / cap >= fullness:
                continue
            for place, (key, _, held) in enumerate(self._blocks[k]):
                full = max((key + cost) / mean_load, (held + memory) / cap)
                if full < fullness and held + memory <= cap:
                    fullness, found = full, (k, place)
        return None if found is None else self._take(*found)

    def put(self, entry: Entry) -> None:
        """Put in a rank that was taken out."""
        k = max(0, bisect_right(self._firsts, entry) - 1)
        if not self._blocks:
            self._blocks, self._firsts, self._least_held = [[]], [entry], [math.inf]
        block = self._blocks[k]
        insort(block, entry)
        self._firsts[k] = block[0]
        self._least_held[k] = min(self._least_held[k], entry[2])
        if len(block) == 2 * _BLOCK:
            halves = block[:_BLOCK], block[_BLOCK:]
            self._blocks[k : k + 1] = halves
            self._firsts[k : k + 1] = [half[0] for half in halves]
            self._least_held[k : k + 1] = map(_least_held_in, halves)

    def _take(self, k: int, place: int) -> Entry:
        block = self._blocks[k]
        entry = block.pop(place)
        if not block:
            del self._blocks[k], self._firsts[k], self._least_held[k]
            return entry
        self._firsts[k] = block[0]
        if entry[2] == self._least_held[k]:
            self._least_held[k] = _least_held_in(block)
        return entry


def _least_held_in(entries: Iterable[Entry]) -> float:
    return min(held for _, _, held in entries)
