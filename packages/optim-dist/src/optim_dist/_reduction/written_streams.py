"""In which streams of a device something was written that is read in another one, perhaps."""

from __future__ import annotations

import torch
from torch import Tensor


class WrittenStreams:
    """Streams that nobody has followed yet; on a CPU there are none.

    Hooks of parameters note theirs one by one, so they are asked for by the index of the device, which takes a third of
    the time of ``torch.cuda.current_stream(device)``.
    """

    def __init__(self) -> None:
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
                current.wait_stream(stream)
            self._streams = {current}

    def forget(self) -> None:
        self._streams.clear()
