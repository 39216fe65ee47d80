"""The least number of moves from one multi-axis distribution to another, dimension by dimension.

Axes come to a dimension and leave it at its ends, so what stays is a run of consecutive axes, with their strides. So a
dimension

    has to be left     unless it has no axes, or its axes are such a run of the target's
    has to be entered  unless the target has no axes there, or the target's axes are such a run of its own

A gather or all-to-all leaves one dimension, a split or all-to-all enters one, a change of block does both to one. With
e dimensions to be entered, l to be left, and u axes of the target that are not in use, each of which takes a split,

    moves >= max(e, u + l),  and >= 2 if a dimension has to be both, unless a change of its block is enough.

A permutation only renames axes in all moves after it, so permutations may as well come last: the bound is the least
over the targets that become the target by no permutation or by one, and at most 2 where more are possible. It is at
most 1 + the number of the target's axes, since after gathering everything only splits are left.
"""

from __future__ import annotations

from collections.abc import Sequence

from optim_redist._multi_axis.moves import Axes, State, axes_size, swap_axes
from optim_redist._multi_axis.parts import Part

# three counters of a byte for every target: dimensions to be entered, to be left, and to be both by two moves
_ENTER, _LEAVE, _BOTH, _BITS = 1, 1 << 8, 1 << 16, 24


class MovesLeft:
    """A lower bound of the number of moves to ``target``, exchanges straight to it aside."""

    def __init__(self, sizes: tuple[int, ...], target: State, equal_axes: Sequence[tuple[int, int]]) -> None:
        self._sizes = sizes
        targets = [target, *[swap_axes(target, *pair) for pair in equal_axes]]
        self._used = [sum(1 << 3 * axis for axes in one.mapping for axis in axes) for one in targets]
        most = 1 + sum(map(len, target.mapping))
        self._most = min(most, 2) if len(equal_axes) > 1 else most
        # for each dimension, by axes and block, the targets that have these there: 1 in the first byte of each of them
        self._goals: list[dict[tuple[Axes, int], int]] = [{} for _ in target.blocks]
        for number, one in enumerate(targets):
            for goals, goal in zip(self._goals, zip(*one)):
                goals[goal] = goals.get(goal, 0) | 1 << _BITS * number
        self._to_do: dict[Part, int] = {}
        self._known: dict[tuple[int, int], int] = {}

    def __call__(self, parts: tuple[Part, ...], in_use: int) -> int:
        """The bound from the state of these parts; ``in_use`` is its set of axes in use."""
        to_do = 0
        for goals, part in zip(self._goals, parts):
            counts = self._to_do.get(part)
            if counts is None:
                counts = 0
                for (axes, block), where in goals.items():
                    if part.axes != axes or block not in part.blocks:
                        counts += where * self._counts(part, axes, block)
                self._to_do[part] = counts
            to_do += counts
        found = self._known.get((to_do, in_use))
        if found is None:
            found, rest = self._most, to_do
            for number, used in enumerate(self._used):
                enter, leave, both = rest & 255, rest >> 8 & 255, rest >> 16 & 255
                moves = max(enter, (used & ~in_use).bit_count() + leave, 2 if both else 0)
                found = min(found, moves + (number > 0))
                rest >>= _BITS
            self._known[to_do, in_use] = found
        return found

    def _counts(self, part: Part, axes: Axes, block: int) -> int:
        """The counters of a dimension that is to have these axes in blocks of ``block``, and does not have them."""
        if not part.axes:
            return _ENTER
        if not axes:
            return _LEAVE
        if part.axes == axes:
            changed = any(block % old == 0 or old % block == 0 for old in part.blocks)
            return _ENTER + _LEAVE + (0 if changed else _BOTH)
        if self._is_run(part.axes, part.blocks, axes, (block,)):
            return _ENTER
        return _LEAVE if self._is_run(axes, (block,), part.axes, part.blocks) else _ENTER + _LEAVE + _BOTH

    def _is_run(self, axes: Axes, blocks: Sequence[int], others: Axes, other_blocks: Sequence[int]) -> bool:
        """Whether ``axes`` in one of ``blocks`` follow one another in ``others``, at the strides they have there."""
        if axes[-1] not in others:
            return False
        end = others.index(axes[-1]) + 1
        if others[max(0, end - len(axes)) : end] != axes:
            return False
        behind = axes_size(self._sizes, others[end:])
        return any(block * behind in blocks for block in other_blocks)
