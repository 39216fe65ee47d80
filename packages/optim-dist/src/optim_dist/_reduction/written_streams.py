"""Which streams of a device have written tensors that another stream may read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class WrittenStreams:
    """The streams with writes that no other stream waits for yet; always empty on a CPU.

    Every parameter's hook calls ``note``, so the stream is looked up by the index of the device, which takes a third of
    the time of ``torch.cuda.current_stream(device)``.

    Attributes:
        are_several: whether ``follow`` has ever found a stream other than the current one.
    """

    def __init__(self) -> None:
        self.are_several = False
        self._streams: set[torch.Stream] = set()

    def note(self, written: Tensor) -> None:
        """Note that ``written`` is written in the current stream of its device."""
        if written.is_cuda:
            self._streams.add(torch.accelerator.current_stream(written.device.index))

    def follow(self, read: Tensor) -> None:
        """Let the current stream of ``read``'s device wait for all noted ones; to wait for it then covers them all."""
        if read.is_cuda:
            current = torch.accelerator.current_stream(read.device.index)
            for stream in self._streams - {current}:
                self.are_several = True
                current.wait_stream(stream)
            self._streams = {current}

    def forget(self) -> None:
        self._streams.clear()


def keep_until_read(gradients: Sequence[Tensor]) -> None:
    """Keep the memory of gradients, perhaps of another stream, until the current stream's reads of them are done."""
    if gradients and gradients[0].is_cuda:
        current = torch.accelerator.current_stream(gradients[0].device.index)
        for gradient in gradients:
            gradient.record_stream(current)
