"""Copies in host memory that belong to a save, so that training may go on while they are written.

Tensors on a CUDA device are copied into pinned memory, in the current stream, without the host waiting for each copy;
``finish`` waits for all. torch keeps pinned memory for the next save, so that pages are pinned once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optim_dist._checkpoint.common import packed_readable, unpacked, without_tensors_of_model

# gives a tensor in host memory
ToHost = Callable[[Tensor], Tensor]


def on_host(part: Tensor) -> Tensor:
    """A flat part on the CPU with a storage of its own, because ``torch.save`` writes the whole storage of a view.

    It shares the memory of ``part`` if that is on the CPU.
    """
    found = part.cpu()
    if found.untyped_storage().nbytes() == found.nbytes:
        return found
    # DLPack gives a storage that begins and ends with the tensor; as bytes, since it does not know all dtypes
    return torch.from_dlpack(found.view(torch.uint8)).view(found.dtype)


class Staging:
    """Starts copies, and waits for all of them."""

    def __init__(self) -> None:
        self._devices: set[torch.device] = set()

    def copy(self, value: Tensor) -> Tensor:
        """A copy on the host that shares nothing with ``value``; to be read after ``finish``."""
        value = value.detach()
        if value.device.type != "cuda":
            return value.to("cpu", copy=True)
        self._devices.add(value.device)
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)

    def copy_common(self, common: dict[str, Any]) -> dict[str, Any]:
        """A copy of what goes into ``common.pt``.

        Raises:
            TypeError: naming the entries that ``load`` could not read.
        """
        # plain values and tensors in any containers are copied by reading back what would be written
        small: dict[str, Any] = unpacked(packed_readable(without_tensors_of_model(common)))
        others = small["model"]
        tensors = {name: self.copy(value) for name, value in common["model"].items() if name not in others}
        return {**small, "model": {**others, **tensors}}

    def finish(self) -> None:
        """Wait for the copies, and for nothing that is launched later."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
