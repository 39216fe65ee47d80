"""Many tensors as one, so that elementwise work on all of them is a few launches and not a few for each.

A launch costs some microseconds whatever it does; a shard of a matrix is often too small to hide that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

# Most elements that are joined: 32 MiB in fp32, so that what one launch leaves for the next may stay in the L2 cache.
MAX_ELEMENTS = 2**23

T = TypeVar("T")


class Joined:
    """All elements concatenated as ``flat``: a copy, or the tensor itself if there is only one."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self.flat = tensors[0] if len(tensors) == 1 else torch.cat([tensor.reshape(-1) for tensor in tensors])

    def split(self, flat: Tensor) -> list[Tensor]:
        """Views of ``flat``, which is as long as all tensors together, in the shape of each tensor."""
        if len(self._tensors) == 1:
            return [flat]
        parts = flat.split([tensor.numel() for tensor in self._tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]

    def put_back(self) -> None:
        """Copy the elements of ``self.flat`` back into the tensors."""
        if len(self._tensors) > 1:
            torch._foreach_copy_(list(self._tensors), self.split(self.flat))


def alike(
    items: Sequence[T], key: Callable[[T], Hashable], numel: Callable[[T], int], limit: int = MAX_ELEMENTS
) -> Iterator[list[T]]:
    """Lists of items with one key, in order, of at most ``limit`` elements together; a larger item comes alone."""
    found: dict[Hashable, list[T]] = {}
    sizes: dict[Hashable, int] = {}
    for item in items:
        kind, size = key(item), numel(item)
        if kind in found and sizes[kind] + size > limit:
            yield found.pop(kind)
        sizes[kind] = size + (sizes[kind] if kind in found else 0)
        found.setdefault(kind, []).append(item)
    yield from found.values()
