"""What one rank holds at once, measured on the CPU in a run whose exchanges bring nothing."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """The bytes of all storages that are alive, and the most there were, with copies that torch makes to convert."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in returned if isinstance(returned, list | tuple) else [returned]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        alive = [found for reference in self.storages.values() if (found := reference()) is not None]
        # those that were given up are empty
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive) + _converted(args, kwargs))
        return returned


def _converted(args: Any, kwargs: Any) -> int:
    """Bytes of the copies of tensors that an operation on the CPU converts to the type of its ``out``."""
    out = (kwargs or {}).get("out")
    narrower = (a for a in args if out is not None and isinstance(a, torch.Tensor) and a.dtype != out.dtype)
    return sum(a.numel() * out.itemsize for a in narrower)


class NoWire:
    """A team whose exchanges bring nothing: gloo's threads drop buffers a moment after the work is done."""

    members, is_nccl, takes_lists, is_whole = (0, 1, 2, 3), False, False, True

    def compare(self, text: str) -> None:
        pass

    def exchange(self, *buffers: Any, **options: Any) -> None:
        pass
