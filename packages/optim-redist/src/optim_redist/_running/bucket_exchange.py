"""One exchange for all tensors of a bucket: the messages between two ranks lie one after the other in one buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from optim_redist._running.copies import Copy
from optim_redist._running.message import Message
from optim_redist._running.stage_program import StageProgram


class Segment(NamedTuple):
    """Where one message of one tensor lies in the bucket's buffer."""

    number: int
    message: Message
    offset: int
    num_bytes: int

    def of(self, buffer: Tensor, bits: torch.dtype) -> Tensor:
        """This part of a buffer of bytes, as integers of the tensor's width."""
        return buffer[self.offset : self.offset + self.num_bytes].view(bits)


class BucketExchange:
    """Phase k of every plan of a bucket, as one exchange.

    Its methods take the sources and targets of all plans, those outside of the bucket, too.

    Attributes:
        send_splits, receive_splits: bytes, keyed by the rank that they go to, or come from.
        num_sent, num_received: bytes of the two buffers.
    """

    def __init__(
        self, bucket: Sequence[tuple[int, StageProgram]], k: int, members: Sequence[int], alignment: int
    ) -> None:
        """``bucket``: plans by number, with their stages; messages begin at multiples of ``alignment`` bytes."""
        self._k = k
        self._stages = {number: stage for number, stage in bucket if k < len(stage.phases)}
        sends = [(number, stage, stage.phases[k].sends) for number, stage in self._stages.items()]
        receives = [(number, stage, stage.phases[k].receives) for number, stage in self._stages.items()]
        self._sends, self.send_splits = _lay_out(sends, members, alignment)
        self._receives, self.receive_splits = _lay_out(receives, members, alignment)
        self.num_sent, self.num_received = sum(self.send_splits.values()), sum(self.receive_splits.values())

    def packing(self, sent: Tensor, sources: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> list[Copy]:
        """The copies into the buffer to send."""
        copies: list[Copy] = []
        for segment in self._sends:
            number = segment.number
            slot = segment.of(sent, self._stages[number].bits)
            copies += segment.message.packing(slot, sources[number], targets[number])
        return copies

    def staying(self, sources: Sequence[Tensor | None], targets: Sequence[Tensor | None]) -> list[Copy]:
        """The copies of what stays on the rank."""
        each = ((stage, sources[number], targets[number]) for number, stage in self._stages.items())
        return [copy for stage, source, target in each for copy in stage.staying(self._k, source, target)]

    def unpacking(
        self, received: Tensor, sources: Sequence[Tensor | None], targets: Sequence[Tensor | None]
    ) -> list[Copy]:
        """Combine the contributions in the buffer that was received, and return the copies of all else out of it."""
        arrived: dict[int, list[tuple[Message, Tensor]]] = {number: [] for number in self._stages}
        for segment in self._receives:
            slot = segment.of(received, self._stages[segment.number].bits)
            arrived[segment.number].append((segment.message, slot))
        copies: list[Copy] = []
        for number, stage in self._stages.items():
            target = targets[number]
            if target is None:
                continue
            if stage.phases[self._k].combines:
                stage.combine(self._k, arrived[number], sources[number], target)
            else:
                copies += [copy for message, slot in arrived[number] for copy in message.unpacking(slot, target)]
        return copies

    def end(self, targets: Sequence[Tensor | None]) -> None:
        """What comes after the copies of ``unpacking``."""
        for number, stage in self._stages.items():
            stage.end(self._k, targets[number])


def _lay_out(
    messages: Iterable[tuple[int, StageProgram, Sequence[Message]]], members: Sequence[int], alignment: int
) -> tuple[list[Segment], dict[int, int]]:
    """Every message's place in the buffer, and the bytes of each member."""
    by_peer: dict[int, list[tuple[int, int, Message]]] = {member: [] for member in members}
    for number, stage, found in messages:
        for message in found:
            by_peer[message.peer].append((number, message.num_elements * stage.dtype.itemsize, message))
    segments: list[Segment] = []
    splits: dict[int, int] = {}
    offset = 0
    for member in members:
        start = offset
        for number, num_bytes, message in by_peer[member]:
            segments.append(Segment(number, message, offset, num_bytes))
            offset += -(-num_bytes // alignment) * alignment
        splits[member] = offset - start
    return segments, splits
