"""DTensors, and what is here of one. They are recognised by what they can do: torch's class takes long to import."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def is_dtensor(tensor: object) -> bool:
    """Whether the tensor is spread over ranks."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor has no memory of its own: made of others, as DTensors and torchao's are, or fake."""
    return hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "fake_mode")


def local(tensor: Any) -> Any:
    """The part of a DTensor that is here; any other tensor (or ``None``) itself."""
    return tensor.to_local() if tensor is not None and is_dtensor(tensor) else tensor


def whole(tensor: Any) -> Any:
    """All of a DTensor, on every rank; any other tensor (or ``None``) itself."""
    return tensor.full_tensor() if tensor is not None and is_dtensor(tensor) else tensor


def placed_like(part: Tensor, tensor: Any) -> Tensor:
    """What is here of a tensor that is spread as the DTensor ``tensor`` is; of any other tensor ``part`` is all."""
    if not is_dtensor(tensor):
        return part
    from torch.distributed.tensor import DTensor

    shape, stride = tensor.shape, tensor.stride()
    spread: Tensor = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
    return spread
