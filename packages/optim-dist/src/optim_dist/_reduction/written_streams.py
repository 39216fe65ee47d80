"""In which streams of a device something was written that is read in another one, perhaps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class WrittenStreams:
    """Streams that nobody has followed yet; on a CPU there are none.

    Hooks of parameters note theirs one by one, so they are asked for by the index of the device, which takes a third of
    the time of ``torch.cuda.current_stream(device)``.

    Attributes:
        are_several: whether ``follow`` has ever found another than the current one.
    """

    def __init__(self) -> None:
        self.are_several = False
        self._streams: set[torch.Stream] = set()

    def note(self, written: Tensor) -> None:
        """``written`` is written in the current stream of its device."""
        if written.is_cuda:
            self._streams.add(torch.accelerator.current_stream(written.device.index))

    def follow(self, read: Tensor) -> None:
        """Let the current stream of the device of ``read`` go on behind all others; who follows it follows them."""
        if read.is_cuda:
            current = torch.accelerator.current_stream(read.device.index)
            for stream in self._streams - {current}:
                self.are_several = True
                current.wait_stream(stream)
            self._streams = {current}

    def forget(self) -> None:
        self._streams.clear()


def keep_until_read(gradients: Sequence[Tensor]) -> None:
    """Tell the allocator who reads a bucket's gradients, perhaps allocated in another stream, that are given up now."""
    if gradients and gradients[0].is_cuda:
        current = torch.accelerator.current_stream(gradients[0].device.index)
        for gradient in gradients:
            gradient.record_stream(current)
