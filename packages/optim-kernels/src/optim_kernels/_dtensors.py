"""What is here of a DTensor. A tensor is recognised by what it can do: torch's class takes long to import."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_dtensor(tensor: Tensor) -> bool:
    """Whether the tensor is spread over ranks."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def local(tensor: Any) -> Any:
    """The part of a DTensor that is here; any other tensor (or ``None``) itself."""
    return tensor.to_local() if tensor is not None and is_dtensor(tensor) else tensor
