"""`DequantizeQuantizedTensorListContext`: values to compute with around a block, written back at its end."""

from __future__ import annotations

from collections.abc import Sequence
from operator import methodcaller
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor

from optim_utils.shampoo_utils import ParameterizeEnterExitContext

if TYPE_CHECKING:
    from optim_utils.shampoo_quantization import QuantizedTensorList

__all__ = ["DequantizeQuantizedTensorListContext"]


class DequantizeQuantizedTensorListContext(ParameterizeEnterExitContext["QuantizedTensorList"], Sequence[Tensor]):
    """Dequantized on entry, written back on exit; ``as tensors`` gives the context, a sequence of the values.

    Contexts of one list nest: they share the values, and only the outermost makes them and writes them back. Values
    that were stored by hand before entering count as an outer level.

    Args:
        write_back: False to only read. What an outer context writes back is its own affair.
        on_exception: whether the half-done values are dropped or written back when an exception passes. If stored and
            computation dtype are equal, the values are the storage, and nothing can be undone.
    """

    def __init__(
        self,
        quantized_tensor_list: QuantizedTensorList,
        *,
        write_back: bool = True,
        on_exception: Literal["discard", "keep"] = "discard",
    ) -> None:
        if on_exception not in ("discard", "keep"):
            raise ValueError(f'on_exception must be "discard" or "keep", got {on_exception!r}')
        super().__init__(quantized_tensor_list, methodcaller("dequantize_"), methodcaller("quantize_"))
        self._list = quantized_tensor_list
        self._write_back = write_back
        self._on_exception = on_exception
        # One entry for each time this context is entered: whether it made the values.
        self._made_values: list[bool] = []

    def __enter__(self) -> DequantizeQuantizedTensorListContext:
        makes_values = not self._list.is_dequantized_stored()
        if makes_values:
            super().__enter__()
        self._made_values.append(makes_values)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._made_values.pop():
            return
        if self._write_back and (exc_type is None or self._on_exception == "keep"):
            super().__exit__(exc_type, exc_value, traceback)
        else:
            self._list.discard_()

    def __len__(self) -> int:
        return len(self._list)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._list.dequantized_value[index]
