"""What torch's cache of compiled graphs tells one `LowBitTensor` from another by.

A kept graph is used again if its inputs have the same text here. So the text holds all that tracing looks at: the
format, shape, strides, dtype and device of the tensor and of its parts, and the code that the traced operations run,
which torch does not see. Where a size is a symbol, the number that it stood for when it was traced decided which way
the code went, so the text holds this number beside the symbol's name.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from importlib.resources import files
from importlib.resources.abc import Traversable
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from optim_utils._low_bit.tensor import LowBitTensor

__all__ = ["stable_hash"]

# Modules of the package that those in this folder import beside each other.
BESIDE = ("_arguments", "_dtensors", "_philox")


def stable_hash(t: LowBitTensor) -> str:
    """A hash that every process computes alike."""
    parts = [None if part is None else _described(part) for part in t.parts]
    return _hash(repr((_code(), t.fmt, t.requires_grad, _layout(t), parts)).encode())


def _described(part: Tensor) -> str:
    # a DTensor has such a hash of its own
    of_its_own = getattr(part, "_stable_hash_for_caching", None)
    return repr((part.requires_grad, _layout(part))) if of_its_own is None else of_its_own()


def _layout(t: Tensor) -> tuple[object, ...]:
    return _numbers(t.shape), _numbers(t.stride()), _numbers([t.storage_offset()]), t.dtype, t.device


def _numbers(sizes: Iterable[int | torch.SymInt]) -> list[str]:
    return [f"{size}={size.node.hint}" if isinstance(size, torch.SymInt) else str(size) for size in sizes]


@functools.cache
def _code() -> str:
    beside = [file for file in _sources("optim_utils") if file.name.partition(".")[0] in BESIDE]
    found = sorted([*_sources(__package__), *beside], key=attrgetter("name"))
    return _hash(b"".join(file.read_bytes() for file in found))


def _sources(package: str) -> list[Traversable]:
    # in a package that is imported from an archive, too; where sources are left out, what is compiled from them. A
    # program that is frozen with its packages may have neither
    folder = files(package)
    return [file for file in folder.iterdir() if file.name.endswith((".py", ".pyc"))] if folder.is_dir() else []


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
