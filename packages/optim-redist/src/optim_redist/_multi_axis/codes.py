"""What a lower bound needs to know of a multi-axis distribution between a start and a target, in one integer: its code.

In a dimension with blocks of b, an axis of size s lies at stride σ = b · (sizes of the axes behind it) and covers the
strides [σ, σ·s). If axes come or leave at the front of a dimension, its block stays; at the back, the block is divided
or multiplied by just the size of what comes or leaves. So an axis keeps its place, a dimension and a stride, until a
move touches it. The code keeps one digit for the place of each axis:

    FREE   it splits nothing                  START   it lies where the start had it, and that is known to matter
    HOME   it lies where the target has it    ACROSS  it lies where the target has another axis of its size
    AWAY   it lies anywhere else              OPEN    it is in use: HOME, ACROSS or AWAY, whichever is best

START matters if another axis has its home across that place, so that the other cannot come home before this one has
left. ACROSS matters because a permutation brings an axis home only if the axis that it is exchanged with lies at its
home. If two others of an axis's size have homes, ACROSS does not say at which of them the axis lies; such an axis
is never AWAY, its digit is ACROSS in place of that.

The code is the sum of ``digit << 3 * axis``. A set of axes is the sum of ``1 << 3 * axis``; so the low bits of a code
are the axes that are astray (in use and not at home), and the low and middle bits together are the axes in use.
"""

from __future__ import annotations

from collections.abc import Sequence

from optim_redist._multi_axis.moves import Axes, State

FREE, AWAY, HOME, START, ACROSS, OPEN = 0b000, 0b001, 0b010, 0b011, 0b101, 0b110

# dimension and stride
Place = tuple[int, int]


class Codes:
    """The codes of states between a start and a target.

    Attributes:
        home: the places of the axes that the target uses.
        goal: the target's code; ``settled_free``: 0, which has all axes FREE, settled if no axis waits for another.
        all, with_home: sets of axes.
        equal_axes: pairs of axes of equal size; ``alike``: for each axis the set of the others of its size.
        across: the axes that can be ACROSS; ``across_at_start``: those that the start has there; ``never_away``: those
            whose digit is ACROSS in place of AWAY.
    """

    def __init__(self, sizes: tuple[int, ...], start: State, target: State) -> None:
        self.sizes, self.home, self._start = sizes, _places(sizes, target), _places(sizes, start)
        home, starts, num_axes = self.home, self._start, len(sizes)
        self.all = (1 << 3 * num_axes) // 7
        self.with_home = 0
        for axis in home:
            self.with_home |= 1 << 3 * axis
        self.goal = self.with_home << 1
        # for each axis the homes of other axes of its size
        self._homes_across: dict[int, list[Place]] = {}
        self.equal_axes: list[tuple[int, int]] = []
        self.alike = [0] * num_axes
        self.across = self.across_at_start = self.never_away = self._paired = 0
        if len(set(sizes)) < num_axes:
            self._pair_equal_axes()
        self.settled_free = self.goal | (self.with_home & self._paired) << 2
        # (an axis, the axes whose START excludes that it is HOME or ACROSS), and all axes that can be at START
        self._home_excluded: list[tuple[int, int]] = []
        self._across_excluded: list[tuple[int, int]] = []
        self._can_start = 0
        leaving = [(axis, place) for axis, place in starts.items() if place != home.get(axis)]
        for k, place in home.items():
            self._find_who_excludes(k, place, leaving, self._home_excluded)
        for k, places in self._homes_across.items():
            if len(places) == 1:
                self._find_who_excludes(k, places[0], leaving, self._across_excluded)
        self._excluded_by: dict[int, tuple[int, int]] = {}
        # the digits of an axis by its place, where it is not AWAY
        self._digits = {(axis, place): ACROSS for axis, places in self._homes_across.items() for place in places}
        for axis, place in leaving if self._can_start else ():
            if self._can_start >> 3 * axis & 1:
                self._digits[axis, place] = START
        for item in home.items():
            self._digits[item] = HOME

    def _pair_equal_axes(self) -> None:
        sizes, home = self.sizes, self.home
        for j, size in enumerate(sizes):
            for i in range(j):
                if sizes[i] == size:
                    self.equal_axes.append((i, j))
                    for axis, other in ((i, j), (j, i)):
                        self.alike[axis] |= 1 << 3 * other
                        if other in home and home[other] != home.get(axis):
                            self._homes_across.setdefault(axis, []).append(home[other])
        self._paired = sum(1 << 3 * axis for axis, alike in enumerate(self.alike) if alike)
        for axis, places in self._homes_across.items():
            self.across |= 1 << 3 * axis
            if len(places) > 1:
                self.never_away |= 1 << 3 * axis
            if self._start.get(axis) in places:
                self.across_at_start |= 1 << 3 * axis

    def _find_who_excludes(
        self, axis: int, place: Place, leaving: Sequence[tuple[int, Place]], excluded: list[tuple[int, int]]
    ) -> None:
        """Record the axes of ``leaving`` that cannot be where the start has them while ``axis`` is at ``place``."""
        tensor_dim, stride = place
        excluding = 0
        for other, (other_dim, other_stride) in leaving:
            if other_dim == tensor_dim and other != axis and not self._beside(stride, axis, other_stride, other):
                excluding |= 1 << 3 * other
        if excluding:
            excluded.append((1 << 3 * axis, excluding))
            self._can_start |= excluding

    def _beside(self, stride: int, axis: int, other_stride: int, other: int) -> bool:
        """Whether two axes can lie in one dimension at these strides, further axes filling the gap between them."""
        # one of the two is behind; at equal strides one of size 1
        behind, other_behind = stride * self.sizes[axis], other_stride * self.sizes[other]
        if behind == other_stride or other_behind == stride:
            return True
        gaps = [front // end for front, end in ((other_stride, behind), (stride, other_behind)) if front % end == 0]
        fillers = {1}
        for k, size in enumerate(self.sizes if gaps else ()):
            if k != axis and k != other:
                fillers |= {filler * size for filler in fillers}
        return not fillers.isdisjoint(gaps)

    # -- codes of states

    def code_of(self, tensor_dim: int, axes: Axes, blocks: tuple[int, ...]) -> int:
        """The digits of a dimension's axes; with several possible ``blocks``, the digits that stand for all of them."""
        code = 0
        if len(blocks) == 1:
            stride = blocks[0]
            for axis in axes[::-1]:
                code |= self._digits.get((axis, (tensor_dim, stride)), AWAY) << 3 * axis
                stride *= self.sizes[axis]
            return self._blurred(code)
        behind, home, homes_across = 1, self.home, self._homes_across
        for axis in axes[::-1]:
            at_home = across = False
            if axis in home:
                place, stride = home[axis]
                at_home = place == tensor_dim and stride % behind == 0 and stride // behind in blocks
            if axis in homes_across:
                across = any(
                    place == tensor_dim and stride % behind == 0 and stride // behind in blocks
                    for place, stride in homes_across[axis]
                )
            code |= _either(at_home, across) << 3 * axis
            behind *= self.sizes[axis]
        return self._blurred(code)

    def _blurred(self, code: int) -> int:
        """``code`` with ACROSS in place of AWAY for axes that are never AWAY."""
        return code | (code & ~(code >> 1) & self.never_away) << 2

    def arrivals(self, tensor_dim: int) -> list[int]:
        """For each axis that comes to a dimension, the digit (shifted to its place) for all that it can be there."""
        found = []
        for axis in range(len(self.sizes)):
            at_home = axis in self.home and self.home[axis][0] == tensor_dim
            across = any(place[0] == tensor_dim for place in self._homes_across.get(axis, ()))
            found.append(_either(at_home, across or self.never_away >> 3 * axis & 1 == 1) << 3 * axis)
        return found

    def arriving(self, axes: int) -> int:
        """The digits that stand for all that a set of axes can become by a move."""
        return axes & ~self.with_home | (axes & self.with_home) << 1 | (axes & self.across) << 2

    def excluded(self, code: int) -> tuple[int, int]:
        """The axes that cannot be HOME, and those that cannot be ACROSS, because of axes that are at START."""
        at_start = code & code >> 1 & self._can_start
        found = self._excluded_by.get(at_start)
        if found is None:
            found = self._excluded_by[at_start] = (
                sum(bit for bit, excluding in self._home_excluded if excluding & at_start),
                sum(bit for bit, excluding in self._across_excluded if excluding & at_start),
            )
        return found

    def settled(self, code: int) -> int:
        """``code`` with FREE axes that can be at home put in use, and axes made AWAY that wait for another to leave."""
        low, middle, high = code, code >> 1, code >> 2
        not_home = 0
        if low & middle & self._can_start:
            not_home, not_across = self.excluded(code)
            across = low & high & not_across
            at_home = middle & ~low & not_home
            # ACROSS becomes AWAY; HOME becomes AWAY; OPEN becomes ACROSS, or AWAY
            code ^= across << 2 | at_home << 1 | at_home | (at_home & high & (not_across | ~self.across)) << 2
            if self.never_away:
                code = self._blurred(code)
        free = self.with_home & ~(low | middle | not_home)
        if free:
            code |= self.settled_free & 7 * free
        return code

    def waits(self, code: int) -> bool:
        """Whether an axis that is FREE can only come home after another has left."""
        return bool(self.with_home & ~(code | code >> 1) & self.excluded(code)[0])

    def taking(self, axis: int, other: int, digit: int) -> int:
        """The digit of ``axis`` at the place of ``other``, whose digit there is ``digit``."""
        if digit in (FREE, AWAY):
            return self._blurred(digit << 3 * axis) >> 3 * axis
        home, homes_across = self.home.get(axis), self._homes_across.get(axis, ())
        if digit == ACROSS:
            if len(self._homes_across[other]) > 1:
                return self.arriving(1 << 3 * axis) >> 3 * axis
            return HOME if self._homes_across[other][0] == home else ACROSS
        place = self.home[other] if digit == HOME else self._start[other]
        return HOME if place == home else ACROSS if place in homes_across or len(homes_across) > 1 else AWAY


def _either(at_home: bool, across: bool) -> int:
    """The digit of an axis that may be AWAY in any case, and HOME or ACROSS as given."""
    return (OPEN if across else HOME) if at_home else ACROSS if across else AWAY


def _places(sizes: tuple[int, ...], state: State) -> dict[int, Place]:
    """Where every axis in use lies."""
    places = {}
    for tensor_dim, (axes, stride) in enumerate(zip(*state)):
        for axis in reversed(axes):
            places[axis] = tensor_dim, stride
            stride *= sizes[axis]
    return places
