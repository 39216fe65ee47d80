"""DTensors, and what is here of one. They are recognised by what they can do: torch's class takes long to import."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor


def is_dtensor(tensor: object) -> bool:
    """Whether the tensor is spread over ranks."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def has_dtensors(tensors: Iterable[Tensor | None]) -> bool:
    """Whether one of the tensors is spread over ranks; asked of their few classes, in less time than of all of them."""
    return any(map(is_dtensor, set(map(type, tensors))))


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor has no memory of its own: made of others, as DTensors and torchao's are, or fake."""
    return hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "fake_mode")


def local(tensor: Any) -> Any:
    """The part of a DTensor that is here; any other tensor (or ``None``) itself."""
    return tensor.to_local() if tensor is not None and is_dtensor(tensor) else tensor


def whole(tensor: Any) -> Any:
    """All of a DTensor, on every rank; any other tensor (or ``None``) itself."""
    return tensor.full_tensor() if tensor is not None and is_dtensor(tensor) else tensor


def spread_as(tensor: Any, like: Any) -> Any:
    """A DTensor with the placements of another, where sums over ranks are done; any other tensor (or ``None``) itself.

    The gradient of a replicated parameter is a pending sum where its input was sharded (sequence parallelism).
    """
    if tensor is None or not is_dtensor(tensor) or tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(like.device_mesh, like.placements)


def gradients_of(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of parameters, each spread over ranks as its parameter is; to be asked for once in a step.

    Ranks that asked more often than others would wait for them.
    """
    grads = [param.grad for param in params]
    return list(map(spread_as, grads, params)) if has_dtensors(grads) else grads


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
