"""Where Newton–Schulz keeps X and the m×m factors: one allocation, the caller's memory, and the result's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from optim_kernels._newton_schulz.chain_jobs import Job, Kind, num_squares
from optim_kernels._newton_schulz.copy_engine import ALIGNMENT
from optim_kernels._newton_schulz.tiles import cdiv

Xs = tuple[Tensor, Tensor, Tensor]


class Buffers:
    """The buffers of ``jobs`` on matrices of ``shape [batch, m, n]``.

    X moves from buffer 0 to 1 to 2 to 1 …; buffer 2 is buffer 0, unless that is the caller's. So beside the result
    there is one buffer of X, or two where a product cannot write the result.

    Args:
        reads_x: X starts in the caller's memory.
        writes_result: the last X is the result.
        num_extra: fp64 numbers at the end of the allocation, for other things.

    Attributes:
        size: elements of the allocation.
        first_offset: where in it the first X begins, in bytes; −1 if that is the caller's.
        extra_offset: where in it the extra numbers begin, in bytes.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        reads_x: bool = False,
        writes_result: bool = False,
        num_extra: int = 0,
    ) -> None:
        count, m, n = shape
        self.reads_x, self.writes_result = reads_x, writes_result
        self._buffer_of = (0, 1, 2 if reads_x else 0)
        self._last = self._buffer_of[jobs[-1].d if jobs else 0]
        used = {0} | {self._buffer_of[job.d] for job in jobs if job.kind is Kind.RECTANGLE}
        given = ({0} if reads_x else set()) | ({self._last} if writes_result else set())
        self._own = sorted(used - given)
        self._num_squares = num_squares(jobs) if jobs else 0
        widths = [m] * self._num_squares + [n] * len(self._own)
        step = ALIGNMENT // dtype.itemsize
        padded = [cdiv(width, step) * step for width in widths]
        *starts, end = accumulate((count * m * width for width in padded), initial=0)
        self._views = [
            ((count, m, width), (m * stride, stride, 1), start)
            for width, stride, start in zip(widths, padded, starts, strict=True)
        ]
        self.first_offset = dtype.itemsize * starts[self._index(0)] if 0 in self._own else -1
        self.extra_offset = dtype.itemsize * end
        self.size = end + 8 * num_extra // dtype.itemsize

    def of(self, room: Tensor, x: Tensor | None = None, result: Tensor | None = None) -> tuple[list[Tensor], Xs]:
        """The square buffers and those of X: in the allocation ``room``, the caller's ``x``, and the ``result``."""
        views = [room.as_strided(*view) for view in self._views]
        xs: dict[int, Tensor] = dict(zip(self._own, views[self._num_squares :]))
        if self.reads_x and x is not None:
            xs[0] = x
        if self.writes_result and result is not None:
            xs[self._last] = result
        # without steps buffer 1 is not used
        first, second, third = (xs.get(number, xs[0]) for number in self._buffer_of)
        return views[: self._num_squares], (first, second, third)

    def extra(self, room: Tensor) -> Tensor:
        """The extra numbers in ``room``."""
        return room[self.extra_offset // room.element_size() :].view(torch.float64)

    def last_x(self, room: Tensor) -> Tensor:
        """Where X ends, if that is in ``room``."""
        return room.as_strided(*self._views[self._index(self._last)])

    @staticmethod
    def twice(square: Tensor) -> Tensor:
        """A square buffer and the one after it, as one batch."""
        return square.as_strided((2 * len(square), *square.shape[1:]), square.stride())

    def _index(self, number: int) -> int:
        return self._num_squares + self._own.index(number)
