"""What a checkpoint can hold beside its tensors: only what ``torch.load(weights_only=True)`` gives back."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from optim_dist._listing import listed
from optim_dist._optimizers.state_part import StatePart


def without_tensors_of_model(common: Mapping[str, Any]) -> dict[str, Any]:
    """``common.pt`` without the model's plain tensors: these can always be read back, and may take much memory."""
    return {**common, "model": {name: value for name, value in common["model"].items() if not _is_plain(value)}}


def _is_plain(value: object) -> bool:
    # attributes that somebody has set on a tensor are written with it
    return type(value) is Tensor and not vars(value)


def packed_readable(content: Mapping[str, Any]) -> io.BytesIO:
    """``content`` as a file's bytes, which have been read back as a test.

    Raises:
        TypeError: naming the entries that cannot be read back, or of which this rank has a part only.
    """
    if cut := [text for key, value in content.items() for text in _cut(value, key)]:
        raise TypeError(
            f"{listed(cut, 2)}, of which only the first rank's part would be saved; give whole tensors "
            "(full_tensor(); an optimizer's full_state_dict())"
        )
    try:
        return _read_back(content)
    except Exception as error:
        refused = [text for key, value in content.items() for text in _unreadable(value, key)]
        if not refused:
            raise  # no entry's fault: memory that ran out, say
        advice = "give tensors and Python's own numbers, strings, lists, tuples and dicts"
        raise TypeError(f"{', '.join(refused)}, which load could not read; {advice}") from error


def unpacked(buffer: io.BytesIO) -> Any:
    """The content of a file's bytes, on the CPU."""
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu", weights_only=True)


def without_numpy_scalars(value: Any) -> Any:
    """``value`` with NumPy's scalars, in containers too, as Python's; NumPy need not be installed."""
    if type(value) is dict:
        return {key: without_numpy_scalars(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(without_numpy_scalars(entry) for entry in value)
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_scalar else value


def _read_back(content: object) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    unpacked(buffer)
    return buffer


def _unreadable(value: object, where: str) -> list[str]:
    """The innermost parts of ``value`` that cannot be written and read back, and their types."""
    try:
        _read_back(value)
    except Exception:
        inner = [text for place, part in _parts(value, where) for text in _unreadable(part, place)]
        return inner or [f"{where} is of {type(value)}"]
    return []


def _cut(value: object, where: str) -> list[str]:
    """The innermost parts of ``value`` that are tensors of which every rank has a part, and what they are."""
    if isinstance(value, DTensor):
        # a dimension of one rank cuts nothing, as in a mesh of replicas alone
        sizes = value.device_mesh.shape
        is_cut = any(size > 1 and not each.is_replicate() for size, each in zip(sizes, value.placements, strict=True))
        return [f"{where} is a DTensor, {value.placements}"] if is_cut else []
    if isinstance(value, StatePart):
        return [f"{where} is a part of an optimizer's state"]
    return [text for place, part in _parts(value, where) for text in _cut(part, place)]


def _parts(value: object, where: str) -> Iterator[tuple[str, Any]]:
    """What a container holds, and where."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield f"key {key!r} of {where}", key
            yield f"{where}[{key!r}]", entry
    elif isinstance(value, (list, tuple)):
        for place, entry in enumerate(value):
            yield f"{where}[{place}]", entry
