"""Combining contributions in a fixed order, so that every run and every rank count gives the same bits.

Contributions are combined by ascending number. 16-bit and narrower floats (also as parts of complex numbers) are
combined in fp32 and rounded once at the end:

    target = ( … ((c₀ ∘ c₁) ∘ c₂) … ) / scale,     scale = number of contributions along avg axes.

Averages of fp32 are added in fp64, so that the average of equal values is that value, as it is for narrower floats (of
which bf16 may leave fp32: an average is infinite if the sum is).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from optim_redist._dtypes import dtype_name, why_not_combined
from optim_redist._methods.chunked import COMBINED_AT_ONCE
from optim_redist._running.views import view_of
from optim_redist.errors import UnsupportedError

if TYPE_CHECKING:
    from optim_redist._running.message import Message, Piece
    from optim_redist._running.rank_program import RankPhase
    from optim_redist._running.views import View


def as_reals(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of their parts, in the same memory; any other tensor itself.

    torch adds and divides complex numbers by multiplying them, so that inf + 0i becomes inf + NaN i, and -0 becomes 0.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _add(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    torch.add(as_reals(a), as_reals(b), out=as_reals(out))
    return out


_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": _add,
    "avg": _add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


@dataclass(frozen=True)
class Reduction:
    """How the contributions of one redistribution are combined.

    Attributes:
        op: one operation; sum stands for mixtures of sum and avg.
        scale: divisor of the result.
        accumulate: element type of the partial results.
    """

    op: str
    scale: int
    accumulate: torch.dtype

    @classmethod
    def of(cls, reduced: Sequence[tuple[str, int]], dtype: torch.dtype) -> Reduction:
        """The reduction over axes with these operations and sizes.

        Raises:
            UnsupportedError: for averages of integers and of bool, min and max of complex numbers, and types without
                arithmetic.
        """
        ops = {op for op, _ in reduced}
        for op in sorted(ops):
            if reason := why_not_combined(op, dtype_name(dtype)):
                raise UnsupportedError(reason)
        narrow = dtype.is_floating_point and dtype.itemsize < 4
        op = next(iter(ops)) if len(ops) == 1 else "sum"
        scale = prod(count for name, count in reduced if name == "avg")
        accumulate = torch.float32 if narrow else torch.complex64 if dtype == torch.complex32 else dtype
        if "avg" in ops and dtype == torch.float32:
            accumulate = torch.float64
        return cls(op, scale, accumulate)

    def combine(
        self, phase: RankPhase, arrived: Sequence[tuple[Message, Tensor]], src: Tensor | None, dst: Tensor
    ) -> None:
        """Write to ``dst`` the combination of the contributions that arrived and this rank's own."""
        parts: list[_Part] = []
        for message, slot in arrived:
            values, place = slot.view(dst.dtype), 0
            for k, view in enumerate(message.views(dst.stride())):
                size = prod(view[0])
                parts.append(_Part(message.contributions[k], values[place : place + size].view(view[0]), message, k))
                place += size
        if phase.stays_from.pieces:
            assert src is not None, "what stays comes from the source"
            for k, view in enumerate(phase.stays_from.views(src.stride())):
                parts.append(_Part(phase.stays_from.contributions[k], view_of(src, view), phase.stays_to, k))
        parts.sort(key=lambda part: part.contribution)
        if parts and not (self.scale == 1 and _combined_in_place(self, parts, dst)):
            self._combine_by_contribution(parts, dst)

    def _combine_by_contribution(self, parts: list[_Part], dst: Tensor) -> None:
        """Combine one contribution after the other, each in the pieces in which it arrived.

        Partial results of a wider type take memory of their own, as large as the box around all parts, which is one
        round's share of the target.
        """
        low, high = _around([part.piece for part in parts])
        box = dst[tuple(map(slice, low, high))]
        total = box
        if self.accumulate != dst.dtype:
            total = torch.empty(box.shape, dtype=self.accumulate, device=dst.device)
        corner = sum(first * stride for first, stride in zip(low, total.stride()))
        combine = _COMBINE[self.op]
        finished: list[tuple[Tensor, Tensor]] = []
        for part in parts:
            sizes, strides, offset = part.view(total.stride())
            region = view_of(total, (sizes, strides, offset - corner))
            value = part.value
            if part.contribution == parts[0].contribution:
                region.copy_(value)
                finished.append((view_of(dst, part.view(dst.stride())), region))
            elif value.element_size() == 1:
                # torch does not promote 8-bit floats
                combine(region, value.to(self.accumulate), out=region)
            elif value.dtype != self.accumulate and value.device.type == "cpu":
                # torch copies a narrower operand in the wider type
                for some, of_value in _in_slices(region, value):
                    combine(some, of_value, out=some)
            else:
                combine(region, value, out=region)
        if sum(region.numel() for _, region in finished) == total.numel():
            finished = [(box, total)]
        for target, region in finished:
            if self.scale != 1:
                as_reals(region).div_(self.scale)
            if total is not box:
                target.copy_(region)


class _Part(NamedTuple):
    """One piece of one contribution: its values, and which piece of a message has their place in the target."""

    contribution: int
    value: Tensor
    message: Message
    number: int

    @property
    def piece(self) -> Piece:
        return self.message.pieces[self.number]

    def view(self, strides: tuple[int, ...]) -> View:
        """The place of the piece in a target of these strides."""
        return self.message.views(strides)[self.number]


def _combined_in_place(reduction: Reduction, parts: list[_Part], dst: Tensor) -> bool:
    """Combine straight into ``dst`` if that rounds no more often: two contributions, or partial results in its type.

    Only if every piece has all contributions: pieces that overlap without being the same, as replicas that share the
    sending cut them, would overwrite each other. Returns whether it did.
    """
    if dst.dtype.is_floating_point and dst.element_size() == 1:
        return False
    by_region: dict[View, list[_Part]] = {}
    for part in parts:
        by_region.setdefault(part.view(dst.stride()), []).append(part)
    num_contributions = len({part.contribution for part in parts})
    if {len(found) for found in by_region.values()} != {num_contributions} or num_contributions == 1:
        return False
    if num_contributions != 2 and reduction.accumulate != dst.dtype:
        return False
    combine = _COMBINE[reduction.op]
    for view, (first, second, *others) in by_region.items():
        region = view_of(dst, view)
        combine(first.value, second.value, out=region)
        for part in others:
            combine(region, part.value, out=region)
    return True


def _in_slices(a: Tensor, b: Tensor, dim: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors, of one shape, in the same slices of at most ``COMBINED_AT_ONCE`` elements."""
    if a.numel() <= COMBINED_AT_ONCE:
        yield a, b
        return
    length = max(1, COMBINED_AT_ONCE // prod(a.shape[dim + 1 :]))
    for one, other in zip(a.split(length, dim), b.split(length, dim)):
        yield from _in_slices(one, other, dim + 1)


def _around(pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    """The smallest box with all pieces in it: first and last-plus-one index of every dimension."""
    dims = list(zip(*pieces))
    return [min(run.start for run in runs) for runs in dims], [max(run.stop for run in runs) for runs in dims]


def fill_identity(dst: Tensor, op: str) -> None:
    """Fill with the identity of ``op``, the value that changes nothing when it is combined."""
    if op in ("sum", "avg"):
        # adding 0 would turn -0 into 0, adding -0 turns nothing; types without it have 0 in its place
        dst.fill_(complex(-0.0, -0.0) if dst.dtype.is_complex else -0.0 if dst.dtype.is_floating_point else 0)
    elif op == "product":
        dst.fill_(1)
    elif dst.dtype == torch.bool:
        dst.fill_(op == "min")
    else:
        limits = torch.finfo(dst.dtype) if dst.dtype.is_floating_point else torch.iinfo(dst.dtype)
        # 8-bit floats with "fn" in their names have no infinities
        infinite = dst.dtype.is_floating_point and "fn" not in str(dst.dtype)
        low, high = (float("-inf"), float("inf")) if infinite else (limits.min, limits.max)
        dst.fill_(low if op == "max" else high)
