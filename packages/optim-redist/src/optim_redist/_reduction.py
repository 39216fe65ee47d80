"""Combining contributions in a fixed order, so that every run and every rank count gives the same bits.

Contributions are combined by ascending number, 16-bit and narrower floats in fp32, and rounded once at the end:

    target = scale · ( … ((c₀ ∘ c₁) ∘ c₂) … ),     scale = 1 / contributions of avg axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optim_redist.errors import UnsupportedError

if TYPE_CHECKING:
    from optim_redist._rank_program import Message, RankPhase

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
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
            UnsupportedError: for averages of integers, sums and products of bool, and orders of complex numbers.
        """
        ops = {op for op, _ in reduced}
        exact = not (dtype.is_floating_point or dtype.is_complex)
        if "avg" in ops and exact:
            raise UnsupportedError(f"an average of {dtype} is no {dtype}; reduce with sum and divide yourself")
        if dtype == torch.bool:
            raise UnsupportedError("bool has no arithmetic; convert to uint8 and reduce with max (any) or min (all)")
        if dtype.is_complex and ops & {"min", "max"}:
            raise UnsupportedError(f"{dtype} has no order; min and max need real numbers")
        narrow = dtype.is_floating_point and dtype.itemsize < 4
        op = next(iter(ops)) if len(ops) == 1 else "sum"
        scale = prod(count for name, count in reduced if name == "avg")
        return cls(op, scale, torch.float32 if narrow else dtype)

    def combine(
        self, phase: RankPhase, arrived: Sequence[tuple[Message, Tensor]], src: Tensor | None, dst: Tensor
    ) -> None:
        """Write to ``dst`` the combination of what came and of this rank's own contribution."""
        parts: list[tuple[int, Tensor, tuple[tuple[int, ...], tuple[int, ...], int]]] = []
        strides = _dense_strides(dst.shape)
        for message, slot in arrived:
            values, place = slot.view(dst.dtype), 0
            for contribution, view in zip(message.contributions, message.views(strides)):
                size = prod(view[0])
                parts.append((contribution, values[place : place + size].view(view[0]), view))
                place += size
        if phase.stays_from.pieces:
            assert src is not None
            here = phase.stays_from.views(src.stride())
            for contribution, (sizes, steps, offset), view in zip(
                phase.stays_from.contributions, here, phase.stays_to.views(strides)
            ):
                parts.append((contribution, src.as_strided(sizes, steps, src.storage_offset() + offset), view))
        if self.scale == 1 and self._combine_in_place(parts, strides, dst):
            return
        total = torch.empty(dst.shape, dtype=self.accumulate, device=dst.device)
        combine = _COMBINE[self.op]
        for contribution, value, (sizes, steps, offset) in sorted(parts, key=lambda part: part[0]):
            region = total.as_strided(sizes, steps, offset)
            if contribution == 0:
                region.copy_(value)
            else:
                # 8-bit floats take part in no promotion
                combine(region, value if value.element_size() > 1 else value.to(self.accumulate), out=region)
        if self.scale != 1:
            total.div_(self.scale)
        reduced = [view for contribution, _, view in parts if contribution == 0]
        if sum(prod(sizes) for sizes, _, _ in reduced) == dst.numel():
            dst.copy_(total)
            return
        # the rest of the target is another round's, or comes finished
        done = torch.zeros(dst.shape, dtype=torch.bool, device=dst.device)
        for view in reduced:
            done.as_strided(*view).fill_(True)
        dst.copy_(torch.where(done, total.to(dst.dtype), dst))

    def _combine_in_place(
        self,
        parts: list[tuple[int, Tensor, tuple[tuple[int, ...], tuple[int, ...], int]]],
        strides: tuple[int, ...],
        dst: Tensor,
    ) -> bool:
        """Combine straight into ``dst`` where that rounds no more often: one operation on pairs, or in its own type."""
        if dst.stride() != strides or dst.element_size() == 1:
            return False
        combine = _COMBINE[self.op]
        by_region: dict[tuple[tuple[int, ...], tuple[int, ...], int], list[tuple[int, Tensor]]] = {}
        for contribution, value, view in parts:
            by_region.setdefault(view, []).append((contribution, value))
        counts = {len(values) for values in by_region.values()}
        if len(counts) != 1 or counts == {1} or (counts != {2} and self.accumulate != dst.dtype):
            return False
        for (sizes, steps, offset), values in by_region.items():
            region = dst.as_strided(sizes, steps, dst.storage_offset() + offset)
            (_, first), (_, second), *others = sorted(values, key=lambda part: part[0])
            combine(first, second, out=region)
            for _, value in others:
                combine(region, value, out=region)
        return True


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides))[: len(shape)] if shape else ()


def fill_identity(dst: Tensor, op: str) -> None:
    """Fill with the value that changes nothing when it is combined."""
    if op in ("sum", "avg"):
        dst.zero_()
    elif op == "product":
        dst.fill_(1)
    else:
        limits = torch.finfo(dst.dtype) if dst.dtype.is_floating_point else torch.iinfo(dst.dtype)
        infinite = dst.dtype.is_floating_point
        low, high = (float("-inf"), float("inf")) if infinite else (limits.min, limits.max)
        dst.fill_(low if op == "max" else high)
