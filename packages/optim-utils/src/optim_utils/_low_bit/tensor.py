"""`LowBitTensor`: codes and scales that pass for one tensor.

It has the shape, dtype and device of the numbers it stands for, and supports what happens to optimizer state: detach,
clone, ``copy_``, ``.to``, ``empty_like``, ``zeros_like``, cuts between blocks, deepcopy, pickle, ``torch.save``. None
of these decodes anything: codes and scales are moved as they are. Arithmetic is refused: call ``dequantize()`` first,
so that code shows where it decodes.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from optim_utils._arguments import check_torch_dtype, sizes_of
from optim_utils._dtensors import is_dtensor, to_local
from optim_utils._low_bit.blocks import Blocks, check_blocks, decode_blocks, encode_blocks
from optim_utils._low_bit.cuts import cut_blocks
from optim_utils._low_bit.formats import LowBitFormat, check_format
from optim_utils._low_bit.graph_cache import stable_hash

__all__ = ["LowBitTensor"]

aten = torch.ops.aten

# the dtypes that a tensor can report; `to_plain` stores the position, so the order must stay
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# the last is torch's mark of a parameter
_OWN_ATTRIBUTES = ("codes", "scale", "offset", "fmt", "_is_param")


def _refusal(name: str) -> Any:
    """A method that only raises: torch's own would read the tensor's memory without asking `__torch_dispatch__`."""

    def method(self: LowBitTensor, *args: object, **options: object) -> None:
        raise NotImplementedError(
            f"a LowBitTensor of shape {tuple(self.shape)} has no memory of numbers for {name}: use its .dequantize()"
        )

    return method


class LowBitTensor(Tensor):
    """A tensor stored as low-bit codes with a scale for each block; made by :func:`optim_utils.low_bit.quantize`.

    Attributes:
        codes: uint8, shaped like the tensor. Two 4-bit codes share a byte, so that n of them are [ceil(n / 2)] in
            layout "flat", and [..., ceil(k / 2)] for rows of k in layout "rows".
        scale: fp32, one per block: [ceil(n / block_size)], or [..., ceil(k / block_size)] in layout "rows".
        offset: fp32, shaped like ``scale``, for affine formats; else None.
        fmt: the format.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor | None
    fmt: LowBitFormat

    @staticmethod
    def __new__(
        cls: type[LowBitTensor],
        codes: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        fmt: LowBitFormat,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> LowBitTensor:
        check_dtype(dtype)
        check_format(fmt)
        shape = sizes_of(shape)
        check_blocks(Blocks(codes, scale, offset), fmt, shape)
        return torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=codes.device, requires_grad=False
        )

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        offset: Tensor | None,
        fmt: LowBitFormat,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.codes, self.scale, self.offset, self.fmt = codes, scale, offset, fmt

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The numbers, in ``dtype`` or this tensor's; a DTensor if the codes are one.

        They are decoded in fp32 and then rounded: in a narrower dtype the smallest may become zero.
        """
        dtype = self.dtype if dtype is None else dtype
        check_torch_dtype(dtype)
        if not is_dtensor(self.codes):
            numbers = decode_blocks(self.codes, self.scale, self.offset, self.fmt, self.shape)
            # no view for autograd: one made without gradients could not be changed in place with them
            return numbers.to(dtype) if dtype != numbers.dtype else aten._unsafe_view.default(numbers, self.shape)
        from optim_utils._low_bit.sharded import decode_sharded

        return decode_sharded(self.parts, self.fmt, self.shape).to(dtype)

    def to_local(self) -> LowBitTensor:
        """The part of this rank, sharing memory: itself unless the codes are a DTensor."""
        if not is_dtensor(self.codes):
            return self
        from optim_utils._low_bit.sharded import local_shape

        return self.with_parts(to_local, local_shape(self.codes, self.shape))

    @property
    def parts(self) -> Blocks:
        """Codes, scale and offset."""
        return Blocks(self.codes, self.scale, self.offset)

    def with_parts(
        self, change: Callable[[Tensor], Tensor], shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> LowBitTensor:
        """A tensor of the same format, with ``change`` applied to each of this one's parts."""
        shape = self.shape if shape is None else shape
        return LowBitTensor(*self.parts.mapped(change), self.fmt, shape, self.dtype if dtype is None else dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"LowBitTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, fmt={self.fmt})"

    def share_memory_(self) -> LowBitTensor:
        for part in self.parts:
            if part is not None:
                part.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(part is None or part.is_shared() for part in self.parts)

    def _set_data(self, new: object) -> None:
        if not isinstance(new, LowBitTensor):
            raise TypeError(
                f"the data of a LowBitTensor of shape {tuple(self.shape)} must be a LowBitTensor, got a "
                f"{type(new).__name__}; copy_ quantizes numbers"
            )
        # torch's own setter changes shape, dtype and device, and does not know of the parts
        vars(torch._C.TensorBase)["data"].__set__(self, new)
        self.codes, self.scale, self.offset = new.parts
        self.fmt = new.fmt

    data: Any = property(lambda self: self.detach(), _set_data)

    apply_ = _refusal("apply_")
    map2_ = _refusal("map2_")
    __dlpack__ = _refusal("__dlpack__")
    __dlpack_device__ = _refusal("__dlpack_device__")

    def __deepcopy__(self, memo: dict[int, Any]) -> LowBitTensor:
        def copied_part(part: Tensor) -> Tensor:
            # torch's copies share memory in a copy of several tensors where the originals do; it clones what has none
            # of its own, with a warning where that is a fake tensor
            part = part.detach()
            return copy.deepcopy(part, memo) if type(part) is Tensor else part.clone()

        copied = self.with_parts(copied_part)
        twin: LowBitTensor = _as_leaf(copied, self.requires_grad, isinstance(self, nn.Parameter))
        # an attribute may lead back here
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(self._attributes_of_users(), memo))
        return twin

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., LowBitTensor], tuple[object, ...]]:
        parts = (self.codes, self.scale, self.offset, self.fmt.to_ints(), tuple(self.shape), self.dtype)
        arguments = (*parts, self.requires_grad, isinstance(self, nn.Parameter))
        attributes = self._attributes_of_users()
        # left out if there are none: versions that do not know them read the file, too
        return rebuild_low_bit_tensor, (*arguments, attributes) if attributes else arguments

    def _attributes_of_users(self) -> dict[str, Any]:
        """What others have set on this tensor, which torch's copies and files of a tensor keep."""
        return {name: value for name, value in vars(self).items() if name not in _OWN_ATTRIBUTES}

    def __tensor_flatten__(self) -> tuple[list[str], tuple[LowBitFormat, torch.dtype]]:
        names = ["codes", "scale"] if self.offset is None else ["codes", "scale", "offset"]
        return names, (self.fmt, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[LowBitFormat, torch.dtype], outer_size: Sequence[int], _: object
    ) -> LowBitTensor:
        fmt, dtype = context
        return LowBitTensor(inner["codes"], inner["scale"], inner.get("offset"), fmt, outer_size, dtype)

    def _stable_hash_for_caching(self) -> str:
        """What torch's cache of compiled graphs knows this tensor by; torch asks for a method of this name."""
        return stable_hash(self)

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = _OPERATIONS.get(func)
        # in inference mode, operations that are made of others come here whole
        result = (operation or func.decompose)(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError(
                f"{func} is not defined for a LowBitTensor of shape {_shape_of_first([*args, *kwargs.values()])}: "
                "compute with its .dequantize() and quantize the result"
            )
        return result


def rebuild_low_bit_tensor(
    codes: Tensor,
    scale: Tensor,
    offset: Tensor | None,
    format_ints: dict[str, int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool = False,
    is_parameter: bool = False,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> LowBitTensor:
    """Unpickling calls this; ``torch.load(weights_only=True)`` allows it once optim_utils is imported."""
    tensor = LowBitTensor(codes, scale, offset, LowBitFormat.from_ints(format_ints), shape, dtype)
    leaf: LowBitTensor = _as_leaf(tensor, requires_grad, is_parameter)
    vars(leaf).update(attributes)
    return leaf


def _as_leaf(tensor: Tensor, requires_grad: bool, is_parameter: bool) -> Any:
    """``tensor``, which nothing else may hold yet, as a leaf or a parameter; it keeps its class."""
    return nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


# files name the function that rebuilds their tensors: now in a public module, in version 0.3 by the old name
rebuild_low_bit_tensor.__module__ = "optim_utils.low_bit"
_OLD_NAME = "optim_utils._low_bit_tensor.rebuild_low_bit_tensor"
torch.serialization.add_safe_globals([rebuild_low_bit_tensor, (rebuild_low_bit_tensor, _OLD_NAME)])


def check_dtype(dtype: torch.dtype) -> None:
    """Raise TypeError unless a low-bit tensor can pass for a tensor of this dtype."""
    if dtype not in DTYPES:
        raise TypeError(f"the dtype of a LowBitTensor has to be one of {DTYPES}, got {dtype!r}; give another dtype=")


def _shape_of_first(args: Sequence[Any]) -> tuple[int, ...] | None:
    tensors = itertools.chain.from_iterable(arg if isinstance(arg, list | tuple) else (arg,) for arg in args)
    found = next((arg for arg in tensors if isinstance(arg, LowBitTensor)), None)
    return None if found is None else tuple(found.shape)


def _aliasing(operation: Callable[..., Any]) -> Callable[..., Any]:
    """``operation``, whose results share memory with its tensor, and so are inference tensors only if that is one."""

    @functools.wraps(operation)
    def run(x: LowBitTensor, *args: object, **options: object) -> Any:
        if not torch.is_inference_mode_enabled() or x.is_inference():
            return operation(x, *args, **options)
        with torch.inference_mode(False):
            return operation(x, *args, **options)

    return run


@_aliasing
def _detach(x: LowBitTensor) -> LowBitTensor:
    return x.with_parts(Tensor.detach)


def _clone(x: LowBitTensor, memory_format: object = None) -> LowBitTensor:
    return x.with_parts(torch.clone)


def _like(
    x: LowBitTensor,
    *,
    make: Callable[..., Tensor],
    dtype: torch.dtype | None = None,
    device: object = None,
    layout: object = None,
    pin_memory: bool | None = None,
    memory_format: object = None,
) -> LowBitTensor:
    _check_conversion(x, dtype, layout)
    return x.with_parts(lambda part: make(part, device=device, pin_memory=bool(pin_memory)), dtype=dtype)


def _check_conversion(x: LowBitTensor, dtype: torch.dtype | None, layout: object) -> None:
    for wanted, known in ((dtype, DTYPES), (layout, (torch.strided,))):
        if wanted is not None and wanted not in known:
            raise NotImplementedError(f"a LowBitTensor of shape {tuple(x.shape)} can't be {wanted}; use .dequantize()")


def _to_copy(
    x: LowBitTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    layout: object = None,
    pin_memory: object = None,
    non_blocking: bool = False,
    memory_format: object = None,
) -> LowBitTensor:
    _check_conversion(x, dtype, layout)
    # The dtype is only what dequantize() gives: codes and scales keep theirs.
    return x.with_parts(lambda part: part.to(device=device, non_blocking=non_blocking, copy=True), dtype=dtype)


def _copy_(target: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(target, LowBitTensor):
        raise NotImplementedError(
            f"a LowBitTensor of shape {tuple(source.shape)} can't be copied into a {target.dtype} tensor: "
            "copy its .dequantize()"
        )
    if not isinstance(source, Tensor):
        raise TypeError(f"copy_ takes a tensor of shape {tuple(target.shape)}, got a {type(source).__name__}")
    if target.shape != source.shape:
        raise ValueError(f"copy_ takes the same shape: {tuple(target.shape)}, got {tuple(source.shape)}")
    given = source.codes if isinstance(source, LowBitTensor) else source
    if is_dtensor(target.codes) != is_dtensor(given):
        kind = "DTensor" if is_dtensor(target.codes) else "plain tensor"
        raise TypeError(f"codes that are {kind}s are made from a {kind}, got a {type(given).__name__}")
    if not isinstance(source, LowBitTensor):
        source = LowBitTensor(*encode_tensor(source, target.fmt), target.fmt, source.shape, target.dtype)
    elif source.fmt != target.fmt:
        raise NotImplementedError(
            f"copy_ takes codes of the same format, {target.fmt}, got {source.fmt}: copy its .dequantize()"
        )
    for mine, other in zip(target.parts, source.parts):
        if mine is not None:
            mine.copy_(other, non_blocking=non_blocking)
    return target


def encode_tensor(x: Tensor, fmt: LowBitFormat, *, uniform: Tensor | None = None) -> Blocks:
    """The blocks of x, DTensors if x is one; ``uniform`` is for this rank's part, see `encode_blocks`."""
    if x.layout != torch.strided or x.is_complex():
        raise TypeError(
            f"codes are made from a dense real tensor, got {x.dtype} in layout {x.layout} of shape {tuple(x.shape)}"
        )
    if not is_dtensor(x):
        return encode_blocks(x, fmt, uniform=uniform)
    from optim_utils._low_bit.sharded import encode_sharded

    return encode_sharded(x, fmt, uniform=uniform)


@_aliasing
def _slice(
    x: LowBitTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> LowBitTensor:
    dim = _checked_dim(x, dim)
    begin, stop, stride = slice(start, end, step).indices(x.shape[dim])
    if stride != 1:
        raise NotImplementedError(f"a LowBitTensor of shape {tuple(x.shape)} is cut with step 1 only, got {step}")
    return _cut(x, dim, begin, max(begin, stop))


@_aliasing
def _split(x: LowBitTensor, size: int, dim: int = 0) -> list[LowBitTensor]:
    dim = _checked_dim(x, dim)
    total = x.shape[dim]
    if total and not size:
        raise ValueError(f"split takes a size of at least 1 for the {total} elements of dimension {dim}, got 0")
    starts = range(0, max(total, 1), max(size, 1))
    return [_cut(x, dim, start, min(start + size, total)) for start in starts]


@_aliasing
def _split_with_sizes(x: LowBitTensor, sizes: Sequence[int], dim: int = 0) -> list[LowBitTensor]:
    dim = _checked_dim(x, dim)
    if sum(sizes) != x.shape[dim]:
        raise ValueError(f"sizes {list(sizes)} must add up to {x.shape[dim]}, the size of dimension {dim}")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_cut(x, dim, start, start + size) for start, size in zip(starts, sizes)]


def _checked_dim(x: LowBitTensor, dim: int) -> int:
    """``dim`` counted from the front."""
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"a LowBitTensor of shape {tuple(x.shape)} has no dimension {dim} to cut")
    return dim % x.dim()


def _cut(x: LowBitTensor, dim: int, start: int, stop: int) -> LowBitTensor:
    """Elements start to stop along ``dim``, sharing memory; start and stop have to lie between blocks."""
    shape = tuple(x.shape)
    blocks = cut_blocks(x.parts, x.fmt, shape, dim, start, stop)
    return LowBitTensor(*blocks, x.fmt, (*shape[:dim], stop - start, *shape[dim + 1 :]), x.dtype)


def _is_pinned(x: LowBitTensor, device: object = None) -> bool:
    # torch.distributed.checkpoint asks this of a tensor first. Raising keeps it from storing this one as opaque bytes.
    raise NotImplementedError(
        f"a LowBitTensor of shape {tuple(x.shape)} has no memory of its own: for a checkpoint store "
        "optim_utils.to_plain(t), for pinned memory take t.with_parts(torch.Tensor.pin_memory)"
    )


_OPERATIONS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.alias.default: _detach,
    aten.clone.default: _clone,
    aten.copy_.default: _copy_,
    aten._to_copy.default: _to_copy,
    aten.empty_like.default: functools.partial(_like, make=torch.empty_like),
    # code 0 under scale 0 (and offset 0) is zero in every format
    aten.zeros_like.default: functools.partial(_like, make=torch.zeros_like),
    aten.is_pinned.default: _is_pinned,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
}
