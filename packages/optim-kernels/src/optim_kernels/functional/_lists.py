"""Lists that belong together: refused by name if they do not fit, before any is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_kernels._dtensors import has_dtensors, is_dtensor, replicates_implicitly
from optim_kernels._memory import has_overlaps, sharing_memory
from optim_kernels._options import check_layout


class Layout(NamedTuple):
    """What a tensor is and how it lies in memory, to compare others with it without keeping that memory."""

    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The layout of a tensor."""
        return cls(tensor.dtype, tensor.shape, tensor.stride(), tensor.device)

    def is_that_of(self, tensor: Tensor) -> bool:
        """Whether a tensor of this shape visits memory in this order; strides of single elements do not matter."""
        strides = tensor.stride()
        return strides == self.strides or all(s == t for s, t, n in zip(strides, self.strides, self.shape) if n != 1)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {tuple(self.shape)} and strides {self.strides} on {self.device}"


def check_lengths(count: int, of: str, **lists: Sequence[Any] | None) -> None:
    """Raise unless each list that is given has ``count`` entries, one for each of ``of``."""
    for name, each in lists.items():
        if each is None:
            continue
        check_list(name, each)
        if len(each) != count:
            raise ValueError(f"{name} must have one entry for each of the {count} {of}, got {len(each)}")


def check_list(name: str, value: object) -> None:
    """Raise ``TypeError`` for a single tensor, an array, a dict, or whatever else has no entries at places."""
    if type(value) is list:
        return
    has_places = hasattr(value, "__getitem__") and not hasattr(value, "keys")
    if not has_places or isinstance(value, str) or hasattr(value, "__array__"):
        raise TypeError(f"{name} must be a list, with one entry for each tensor, got a {type(value).__name__}")


def check_tensors(**lists: Sequence[Any] | None) -> None:
    """Raise ``TypeError`` unless each entry is a tensor."""
    for name, each in lists.items():
        for i, tensor in enumerate(each or ()):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}[{i}] must be a tensor, got {tensor!r}")


def check_tensors_or_none(**lists: Sequence[Any] | None) -> None:
    """Raise ``TypeError`` unless each entry is a tensor or ``None``."""
    for name, each in lists.items():
        for i, tensor in enumerate(each or ()):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise TypeError(f"{name}[{i}] must be a tensor or None, got {tensor!r}")


def check_floating(**lists: Sequence[Tensor] | None) -> None:
    """Raise ``ValueError`` unless each tensor holds real floating-point numbers."""
    for name, each in lists.items():
        for i, tensor in enumerate(each or ()):
            if not tensor.is_floating_point():
                raise ValueError(f"{name}[{i}] must be of a real floating dtype, got {tensor.dtype}")


def check_strided(**lists: Sequence[Tensor | None] | None) -> None:
    """Raise ``ValueError`` for a tensor that is sparse, or whose layout is another library's."""
    for name, each in lists.items():
        for i, tensor in enumerate(each or ()):
            if tensor is not None and tensor.layout != torch.strided:
                check_layout(f"{name}[{i}]", tensor)


def check_computable(**lists: Sequence[Tensor]) -> None:
    """Raise ``ValueError`` for floats of 8 bits, in which torch does not compute."""
    for name, each in lists.items():
        for i, tensor in enumerate(each):
            if tensor.dtype.itemsize < 2:
                raise ValueError(f"{name}[{i}] must be of 16 bits or more, got {tensor.dtype}; convert it")


def check_whole(**lists: Sequence[Any] | None) -> None:
    """Raise ``ValueError`` unless each number is whole: an int, or an integer tensor."""
    for name, each in lists.items():
        for i, number in enumerate(each or ()):
            of_floats = isinstance(number, Tensor) and (number.is_floating_point() or number.is_complex())
            is_whole = isinstance(number, Tensor) and number.numel() == 1 and not of_floats
            if not is_whole and not isinstance(number, Integral):
                raise ValueError(f"{name}[{i}] must be an int, got {number!r}")


def check_masters(params: Sequence[Tensor], masters: Sequence[Tensor | None] | None) -> None:
    """Raise for a master that is neither fp32 nor the int16 that completes a bf16 parameter."""
    check_tensors_or_none(masters=masters)
    for i, (p, master) in enumerate(zip(params, masters or ())):
        if master is None or master.dtype == torch.float32:
            continue
        if master.dtype != torch.int16 or p.dtype != torch.bfloat16:
            raise ValueError(
                f"masters[{i}] must be torch.float32, or torch.int16 beside a bfloat16 parameter, but is "
                f"{master.dtype} beside {p.dtype}"
            )


def check_counts(steps: object) -> None:
    """Raise unless step counts are tensors of one number each, since a step advances them in place."""
    counts = steps if isinstance(steps, Sequence) else [steps]
    if not all(isinstance(count, Tensor) for count in counts):
        raise TypeError(
            f"steps must be a 0-d tensor, or one for each of the params, that counts the steps so far, got {steps!r}"
        )
    check_flags(steps=counts)
    for i, count in enumerate(counts):
        if count.dtype == torch.bool or count.is_complex():
            raise ValueError(f"steps[{i}] must be a number that counts, got {count.dtype}")


def check_flags(**lists: Sequence[Any] | None) -> None:
    """Raise unless each entry that is not ``None`` is a tensor of one number."""
    for name, each in lists.items():
        for i, flag in enumerate(each or ()):
            if flag is None:
                continue
            if not isinstance(flag, Tensor):
                raise TypeError(f"{name}[{i}] must be a 0-d tensor, got {flag!r}")
            check_layout(f"{name}[{i}]", flag)
            if flag.numel() != 1:
                raise ValueError(f"{name}[{i}] must be a 0-d tensor, got shape {tuple(flag.shape)}")


def check_shapes(like: Sequence[Tensor], of: str, **lists: Sequence[Tensor | None] | None) -> None:
    """Raise ``ValueError`` unless each tensor has its neighbour's shape, which torch would broadcast, and device."""
    for name, each in lists.items():
        for i, (tensor, other) in enumerate(zip(each or (), like)):
            if tensor is None:
                continue
            if tensor.shape != other.shape:
                raise ValueError(
                    f"{name}[{i}] must have the shape of {of}[{i}], {tuple(other.shape)}, got {tuple(tensor.shape)}"
                )
            if tensor.device != other.device:
                raise ValueError(f"{name}[{i}] must be where {of}[{i}] is, on {other.device}, got {tensor.device}")


def check_whole_matrices(**lists: Sequence[Tensor | None] | None) -> None:
    """Raise ``TypeError`` for a DTensor, of whose matrices a rank may have parts."""
    for name, each in lists.items():
        if each is None or not has_dtensors(each):
            continue
        i = next(i for i, tensor in enumerate(each) if is_dtensor(tensor))
        raise TypeError(
            f"{name}[{i}] is a DTensor, and matrices have to be whole; give its full_tensor(), or the to_local() of "
            "one that every rank has whole"
        )


def check_spread(like: Sequence[Tensor], of: str, **lists: Sequence[Tensor | None] | None) -> None:
    """Raise ``TypeError`` for a DTensor whose neighbour is none: unless told to, torch computes with no such pairs."""
    if not any(has_dtensors(each or ()) for each in (like, *lists.values())):
        return
    for name, each in lists.items():
        for i, (tensor, other) in enumerate(zip(each or (), like)):
            if tensor is not None and is_dtensor(tensor) != is_dtensor(other) and not replicates_implicitly():
                one, none = (name, of) if is_dtensor(tensor) else (of, name)
                raise TypeError(
                    f"{one}[{i}] is a DTensor, and {none}[{i}] is none; give DTensors alone, or their local parts"
                )


def check_writable(**lists: Sequence[Tensor | None] | None) -> None:
    """Raise ``ValueError`` for a tensor that cannot be written: sparse, or with several elements at one place."""
    check_strided(**lists)
    for name, each in lists.items():
        for i, tensor in enumerate(each or ()):
            if tensor is not None and has_overlaps(tensor):
                raise ValueError(
                    f"{name}[{i}], {description(tensor)}, has several elements at one place; give its contiguous()"
                )


def check_normal(places: Iterable[int], **lists: Sequence[Tensor | None] | None) -> None:
    """Raise ``ValueError`` outside of inference mode for a tensor that was made in it: torch refuses to write it."""
    # torch.compile traces neither question
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return
    for name, each in lists.items():
        if not each:
            continue
        for i in places:
            tensor = each[i]
            if tensor is not None and tensor.is_inference():
                raise ValueError(
                    f"{name}[{i}] was made in inference mode, outside of which it cannot be written; give its clone()"
                )


def check_dense(names: Sequence[str] | None, **lists: Sequence[Tensor | None] | None) -> None:
    """Raise ``ValueError`` for a sparse tensor, which kernels cannot read; ``names`` are those of the parameters."""
    for kind, each in lists.items():
        for i, tensor in enumerate(each or ()):
            if tensor is not None and tensor.layout != torch.strided:
                raise ValueError(
                    f"{called(kind, i, names[i] if names else None)} is {tensor.layout}; the kernels take dense "
                    "tensors: give its to_dense()"
                )


def check_apart(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise ``ValueError`` if two parameters are one tensor, or share memory: two programs would update it at once."""
    found = sharing_memory(params)
    if found is None:
        return
    (one, name), (other, other_name) = ((params[place], names[place]) for place in found)
    how = "are one tensor" if one.data_ptr() == other.data_ptr() and one.shape == other.shape else "share memory"
    shared = f"{name} and {other_name} {how}" if name != other_name else f"{name} is there twice"
    raise ValueError(
        f"{shared}, {description(other)}, which the kernels would update twice at once; give every parameter once, and "
        "tie parameters by using one object"
    )


def called(kind: str, place: int, name: str | None) -> str:
    """What errors call the tensor at ``place`` in the list ``kind``: by its parameter's name, if that is known."""
    if name is None:
        return f"{kind}[{place}]"
    return name if kind == "params" else f"{kind.removesuffix('s')} of {name}"


def are_same(lists: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> bool:
    """Whether the lists hold the same objects."""
    return len(lists) == len(others) and all(
        len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(lists, others, strict=True)
    )


def description(tensor: Tensor) -> str:
    return str(Layout.of(tensor))
