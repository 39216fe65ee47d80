"""DTensors and their local parts. A DTensor is recognised by its attributes, since torch's class is slow to import."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: object) -> bool:
    """Whether the tensor is a DTensor, spread over ranks."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def has_dtensors(tensors: Iterable[Tensor | None]) -> bool:
    """Whether any tensor is a DTensor; each class is checked once, which is faster than checking each tensor."""
    return any(map(is_dtensor, set(map(type, tensors))))


def replicates_implicitly() -> bool:
    """Whether torch takes a tensor beside DTensors for a replicated one, as it does in ``implicit_replication()``."""
    from torch.distributed.tensor import DTensor

    return bool(DTensor._op_dispatcher._allow_implicit_replication)


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor has no memory of its own: it wraps others, as DTensors and torchao's do, or is fake."""
    return hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "fake_mode")


def local(tensor: Any) -> Any:
    """The local part of a DTensor; any other tensor (or ``None``) itself."""
    return tensor.to_local() if tensor is not None and is_dtensor(tensor) else tensor


def whole(tensor: Any) -> Any:
    """A DTensor gathered in full, on every rank; any other tensor (or ``None``) itself."""
    return tensor.full_tensor() if tensor is not None and is_dtensor(tensor) else tensor


def spread_as(tensor: Any, like: Any) -> Any:
    """A DTensor redistributed to the placements of ``like``; any other tensor (or ``None``) itself.

    This also reduces pending sums (``Partial``): the gradient of a replicated parameter is one where its input was
    sharded (sequence parallelism).
    """
    if tensor is None or not is_dtensor(tensor) or tensor.placements == like.placements:
        return tensor
    return tensor.redistribute(like.device_mesh, like.placements)


def gradients_of(params: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of parameters, each with the placements of its parameter; call it once a step.

    Redistribution is a collective, so a rank that called this more often than the others would wait for them.
    """
    grads = [param.grad for param in params]
    return list(map(spread_as, grads, params)) if has_dtensors(grads) else grads


def note_shards_were_written(tensors: Iterable[Tensor]) -> None:
    """Tell autograd of DTensors whose local parts were written to; it counts writes to other tensors itself."""
    torch.autograd.graph.increment_version([tensor for tensor in tensors if is_dtensor(tensor)])


def placed_like(part: Tensor, tensor: Any) -> Tensor:
    """A DTensor with the local part ``part``, spread as the DTensor ``tensor`` is; ``part`` for any other tensor."""
    if not is_dtensor(tensor):
        return part
    from torch.distributed.tensor import DTensor

    shape, stride = tensor.shape, tensor.stride()
    spread: Tensor = DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=stride
    )
    return spread
