"""Lists that belong together: what does not fit is refused by its name, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def check_lengths(count: int, of: str, **lists: Sequence[Any] | None) -> None:
    """Raise ``ValueError`` unless each list that is given has ``count`` entries, one for each of ``of``."""
    for name, each in lists.items():
        if each is not None and len(each) != count:
            raise ValueError(f"{name} must have one entry for each of the {count} {of}, got {len(each)}")


def check_shapes(like: Sequence[Tensor], of: str, **lists: Sequence[Tensor | None] | None) -> None:
    """Raise ``ValueError`` unless each tensor has the shape of its neighbour in ``like``: torch would broadcast it."""
    for name, each in lists.items():
        for i, (tensor, other) in enumerate(zip(each or (), like)):
            if tensor is not None and tensor.shape != other.shape:
                raise ValueError(
                    f"{name}[{i}] must have the shape of {of}[{i}], {tuple(other.shape)}, got {tuple(tensor.shape)}"
                )
