"""`QuantizedTensor`: one tensor stored in a smaller dtype than it is computed in, and the supported dtypes."""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from optim_utils._arguments import check_torch_dtype
from optim_utils._dtensors import is_dtensor
from optim_utils._state.tensor_fill import sharded_like
from optim_utils.block_info import BlockInfo
from optim_utils.low_bit import LowBitFormat, LowBitTensor, quantize
from optim_utils.optimizer_modules import OptimizerModule

T = TypeVar("T")

__all__ = ["FLOAT_DTYPES", "QuantizedTensor", "check_numbers", "check_supported", "is_supported", "stored_as"]

# The dtypes that plain casts convert between for storage and computation
FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def stored_as(values: Tensor) -> torch.dtype | LowBitFormat:
    """The quantized dtype of ``values``: the format of a `LowBitTensor`, else the dtype."""
    if not isinstance(values, Tensor):
        raise TypeError(f"quantized values must be a tensor, got a {type(values).__name__}")
    return values.fmt if isinstance(values, LowBitTensor) else values.dtype


def is_supported(dtype: torch.dtype | LowBitFormat) -> bool:
    """Whether tensors can be stored in ``dtype``."""
    return isinstance(dtype, LowBitFormat) or dtype in FLOAT_DTYPES


def check_supported(dtype: torch.dtype | LowBitFormat) -> None:
    """Raise NotImplementedError unless tensors can be stored in ``dtype``."""
    if not is_supported(dtype):
        error = NotImplementedError(f"Quantization for {dtype} is not yet supported!")
        error.add_note("for integer and 8-bit float storage give a LowBitFormat of optim_utils.low_bit as the dtype")
        raise error


def check_numbers(numbers: object, name: str, *, floating: bool = False) -> None:
    """Raise TypeError unless ``numbers`` is a dense tensor of real numbers, or of floating-point ones only."""
    if not isinstance(numbers, Tensor):
        raise TypeError(f"{name} must be a tensor, got a {type(numbers).__name__}")
    fits = numbers.is_floating_point() if floating else not numbers.is_complex()
    if not fits or numbers.layout != torch.strided:
        kind = "floating-point" if floating else "real"
        raise TypeError(f"{name} must hold dense {kind} numbers, got {numbers.dtype} in layout {numbers.layout}")


class QuantizedTensor(OptimizerModule):
    """One tensor in storage, and the block it belongs to.

    Attributes:
        quantized_values: the stored tensor.
        block_info: how its block allocates tensors; not part of the state.
        min_value, max_value: the range of integer storage, which can be built but not yet used; else None.
    """

    non_state_attributes: ClassVar[tuple[str, ...]] = ("block_info",)

    # of the class, so that None is no state: float storage has the one entry `quantized_values`
    min_value: Tensor | None = None
    max_value: Tensor | None = None

    def __init__(
        self,
        quantized_values: Tensor,
        block_info: BlockInfo | None = None,
        min_value: Tensor | None = None,
        max_value: Tensor | None = None,
    ) -> None:
        self.quantized_values = quantized_values
        self.block_info = block_info
        if (min_value is None) != (max_value is None):
            raise AssertionError("min_value and max_value must both be given, or neither")
        if is_supported(stored_as(quantized_values)):
            if min_value is not None:
                raise AssertionError(f"min_value and max_value must be None for {stored_as(quantized_values)} values")
            return
        if min_value is None:
            if quantized_values.count_nonzero() != 0:
                raise AssertionError(
                    f"{quantized_values.dtype} values without min_value and max_value must all be zero"
                )
            min_value, max_value = (torch.zeros(1, device=quantized_values.device) for _ in range(2))
        self.min_value, self.max_value = min_value, max_value

    @classmethod
    def init_from_dequantized_tensor(
        cls,
        dequantized_values: Tensor,
        quantized_dtype: torch.dtype | LowBitFormat,
        block_info: BlockInfo | None = None,
    ) -> QuantizedTensor:
        """``dequantized_values`` in storage of its own, with the mesh and placements that the block gives its tensors.

        Storage in a float dtype is allocated by the block, if there is one.
        """
        check_numbers(dequantized_values, "dequantized_values")
        values = dequantized_values.detach()
        if isinstance(quantized_dtype, LowBitFormat):
            if block_info is not None:
                values = _placed_by(block_info, values)
            return cls(quantize(values, quantized_dtype), block_info)
        check_supported(quantized_dtype)
        if block_info is None:
            # for a DTensor this keeps the placements
            stored = torch.zeros_like(values, dtype=quantized_dtype, memory_format=torch.contiguous_format)
        else:
            stored = block_info.allocate_zeros_tensor(size=values.shape, dtype=quantized_dtype, device=values.device)
        quantized = cls(stored, block_info)
        quantized.quantize(values)
        return quantized

    def dequantize(self, dtype: torch.dtype | None = None, *, dequantized_dtype: torch.dtype | None = None) -> Tensor:
        """The values in ``dtype``: the stored tensor itself if it has that dtype, else a new one.

        ``dequantized_dtype`` is another name of ``dtype``, the original's.
        """
        dtype = _given("dtype", dtype, "dequantized_dtype", dequantized_dtype)
        check_torch_dtype(dtype)
        check_supported(stored_as(self.quantized_values))
        if isinstance(self.quantized_values, LowBitTensor):
            return self.quantized_values.dequantize(dtype)
        return self.quantized_values.to(dtype)

    @torch.no_grad()
    def quantize(self, tensor: Tensor | None = None, *, dequantized_tensor: Tensor | None = None) -> None:
        """Write ``tensor`` into the storage; ``dequantized_tensor`` is another name of it, the original's."""
        tensor = _given("tensor", tensor, "dequantized_tensor", dequantized_tensor)
        check_supported(stored_as(self.quantized_values))
        check_numbers(tensor, "tensor")
        if tensor.shape != self.quantized_values.shape:
            raise ValueError(
                f"a quantized tensor of shape {tuple(self.quantized_values.shape)} can't take one of shape "
                f"{tuple(tensor.shape)}"
            )
        stored = self.quantized_values
        stored.copy_(sharded_like(stored.codes if isinstance(stored, LowBitTensor) else stored, tensor))


def _placed_by(block_info: BlockInfo, values: Tensor) -> Tensor:
    """``values`` as a DTensor with the mesh and placements of the block's tensors; itself if those are plain."""
    placed = block_info.allocate_zeros_tensor(size=values.shape, dtype=values.dtype, device=values.device)
    return placed.copy_(sharded_like(placed, values)) if is_dtensor(placed) else values


def _given(name: str, value: T | None, other_name: str, other: T | None) -> T:
    """The value of an argument that has two names."""
    if value is not None and other is None:
        return value
    if other is not None and value is None:
        return other
    raise TypeError(f"give {name}, or {other_name} in its place")


# pickles and errors name the public module
QuantizedTensor.__module__ = "optim_utils.shampoo_quantization"
