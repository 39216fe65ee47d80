"""How one tensor dimension is split, with its block length left open as long as the choice makes no difference.

A dimension that is split afresh may take any of several block lengths. Block lengths that give the most loaded rank
equally many elements cost the same until a later move tells them apart, so they are one ``Part``. A move maps a part
block by block, by the four facts of ``moves``; if the results differ in elements, the part falls into several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from optim_redist._multi_axis.moves import (
    UNSPLIT,
    Axes,
    axes_size,
    block_candidates,
    local_length,
    max_block_size,
    swapped_axes,
)


class Part:
    """How one dimension is split: axes, the block lengths it may have, elements of the most loaded rank.

    ``Dimension`` makes one object for each pair of axes and blocks, so parts are equal if they are identical.
    ``code`` is what the caller's ``code_of`` returns for it.
    """

    __slots__ = ("axes", "blocks", "changed", "code", "entered", "left", "share")

    def __init__(self, axes: Axes, blocks: tuple[int, ...], share: int, code: int) -> None:
        self.axes, self.blocks, self.share, self.code = axes, blocks, share, code
        # the parts that moves make of it, as far as they have been asked for
        self.entered: dict[Axes, list[Part]] = {}
        self.left: dict[Axes, list[Part]] = {}
        self.changed: list[Part] | None = None


class Dimension:
    """The parts of one tensor dimension and what moves make of them, each worked out when it is first asked for.

    Args:
        blocks: block lengths to consider, with their multiples and divisors by sizes of mesh axes.
        code_of: called with the dimension, axes and blocks of every new part.
        merged: whether blocks of equal share form one part; otherwise every part has one block.
    """

    def __init__(
        self,
        tensor_dim: int,
        length: int,
        sizes: tuple[int, ...],
        blocks: Iterable[int],
        code_of: Callable[[int, Axes, tuple[int, ...]], int],
        *,
        merged: bool,
    ) -> None:
        self._tensor_dim, self._length, self._sizes, self._given = tensor_dim, length, sizes, blocks
        self._code_of, self._merged = code_of, merged
        self._candidates: tuple[int, ...] = ()
        self._alike: dict[tuple[int, tuple[int, ...]], list[tuple[int, tuple[int, ...]]]] = {}
        self._known: dict[tuple[Axes, tuple[int, ...]], Part] = {}
        self._found: dict[tuple[Axes, tuple[int, ...]], list[Part]] = {}
        self._unsplit = [Part((), (UNSPLIT,), length, 0)]

    def parts(self, axes: Axes, blocks: Iterable[int]) -> list[Part]:
        """The dimension over ``axes`` in any of ``blocks`` that leaves no process empty: one part for each share."""
        if not axes:
            return self._unsplit
        key = axes, tuple(blocks)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = []
            for share, same in self._by_share(axes_size(self._sizes, axes), key[1]):
                part = self._known.get((axes, same))
                if part is None:
                    code = self._code_of(self._tensor_dim, axes, same)
                    part = self._known[axes, same] = Part(axes, same, share, code)
                found.append(part)
        return found

    def _by_share(self, n_procs: int, blocks: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """The blocks that leave none of ``n_procs`` processes empty, by what the most loaded of them gets."""
        found = self._alike.get((n_procs, blocks))
        if found is None:
            alike: dict[int, list[int]] = {}
            length = self._length
            longest = max_block_size(length, n_procs) if length >= n_procs else 0
            shares = [(local_length(length, n_procs, block), block) for block in blocks if block <= longest]
            if self._merged:
                for share, block in shares:
                    alike.setdefault(share, []).append(block)
                found = [(share, tuple(same)) for share, same in alike.items()]
            else:
                found = [(share, (block,)) for share, block in shares]
            self._alike[n_procs, blocks] = found
        return found

    def enter(self, part: Part, moved: Axes) -> list[Part]:
        """``part`` with further axes: in any block if it was unsplit, else with the axes in front or at the back."""
        found = part.entered.get(moved)
        if found is None:
            if not part.axes:
                found = self.parts(moved, self._all_candidates())
            else:
                size = axes_size(self._sizes, moved)
                shorter = [block // size for block in part.blocks if block % size == 0]
                found = self.parts((*moved, *part.axes), part.blocks) + self.parts((*part.axes, *moved), shorter)
            part.entered[moved] = found
        return found

    def leave(self, part: Part, moved: Axes) -> list[Part]:
        """``part`` without its first or last axes."""
        found = part.left.get(moved)
        if found is None:
            axes, count = part.axes, len(moved)
            if axes[-count:] == moved:
                size = axes_size(self._sizes, moved)
                found = self.parts(axes[:-count], [block * size for block in part.blocks])
            else:
                found = self.parts(axes[count:], part.blocks)
            part.left[moved] = found
        return found

    def change(self, part: Part) -> list[Part]:
        """The same axes with other blocks that are multiples or divisors of the old ones."""
        if part.changed is None:
            others = [
                new
                for new in self._all_candidates()
                if any(new != old and (new % old == 0 or old % new == 0) for old in part.blocks)
            ]
            part.changed = [after for after in self.parts(part.axes, others) if after is not part]
        return part.changed

    def swap(self, part: Part, first: int, second: int) -> Part:
        """``part`` with two mesh axes of equal size exchanged."""
        if first not in part.axes and second not in part.axes:
            return part
        (found,) = self.parts(swapped_axes(part.axes, first, second), part.blocks)
        return found

    def _all_candidates(self) -> tuple[int, ...]:
        if not self._candidates:
            self._candidates = block_candidates(self._sizes, self._length, self._given)
        return self._candidates
