"""Tensors kept in a smaller dtype than they are computed in: one, a list of them, and a context to compute in.

    stored:    quantized_values, in quantized_dtype (a float dtype, or a `LowBitFormat`)
    computed:  dequantized values, in computation_dtype; made on demand, written back by rounding

`QuantizedTensorList.dequantize_` keeps the computed values beside the stored ones until `quantize_` writes them back;
`DequantizeQuantizedTensorListContext` calls both around a block:

    with DequantizeQuantizedTensorListContext(quantized) as tensors:
        for tensor in tensors:
            tensor.add_(1)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from operator import is_, methodcaller
from types import TracebackType
from typing import Any, ClassVar, Literal, cast, get_type_hints, overload

import torch
from torch import Tensor

from optim_utils._arguments import iterated
from optim_utils._dtensors import is_dtensor
from optim_utils._many_tensors import Stacks, copy_many, decode_many, encode_many, round_many
from optim_utils._quantized_tensor import FLOAT_DTYPES, QuantizedTensor, check_numbers, check_supported, stored_as
from optim_utils._state.tensor_fill import lasting_sources
from optim_utils.low_bit import LowBitFormat, LowBitTensor, quantize
from optim_utils.optimizer_modules import OptimizerModule
from optim_utils.shampoo_utils import ParameterizeEnterExitContext, compress_list

__all__ = [
    "FLOAT_DTYPES",
    "DequantizeQuantizedTensorListContext",
    "QuantizedTensor",
    "QuantizedTensorList",
]

logger = logging.getLogger(__name__)

_FLOAT_DTYPES = FLOAT_DTYPES  # the original's name

Rounding = Literal["nearest", "stochastic"]


class QuantizedTensorList(OptimizerModule):
    """Tensors in storage, and, between `dequantize_` and `quantize_`, their values to compute with.

    Args:
        quantized_data: quantized tensors, of which the part on this rank is taken, or (values, min, max) tuples. Values
            that already are of ``quantized_dtype`` are kept, not copied: writing back writes through to them; float
            values of another dtype are converted.
        quantized_dtype: what is stored: a float dtype or a `LowBitFormat`.
        computation_dtype: one of `FLOAT_DTYPES`.
        rounding: how values are written back: to the nearest stored number, or to one of the two neighbours at random,
            such that the mean is exact (`optim_utils.rounding`). In float32 and float64 it is always the nearest.
        generator: where stochastic rounding draws from; torch's default one if None.
    """

    non_state_attributes: ClassVar[tuple[str, ...]] = (
        "quantized_dtype",
        "computation_dtype",
        "dequantized_value_list",
        "rounding",
        "generator",
        "_stacks",
    )

    # of the class, so that None is no state: float storage has the one entry `quantized_value_list`
    min_value_list: tuple[Tensor, ...] | None = None
    max_value_list: tuple[Tensor, ...] | None = None

    def __init__(
        self,
        quantized_data: Sequence[tuple[Tensor, Tensor | None, Tensor | None]] | Sequence[QuantizedTensor],
        quantized_dtype: torch.dtype | LowBitFormat,
        computation_dtype: torch.dtype = torch.float32,
        *,
        rounding: Rounding = "nearest",
        generator: torch.Generator | None = None,
    ) -> None:
        if computation_dtype not in FLOAT_DTYPES:
            raise AssertionError(f"{computation_dtype=} is not supported! It must be one of {FLOAT_DTYPES}!")
        rows = _values_and_ranges(quantized_data)
        # a tuple of types: dynamo of torch 2.9 cannot trace a union
        if not isinstance(quantized_dtype, (torch.dtype, LowBitFormat)):
            raise TypeError(f"quantized_dtype must be a torch.dtype or a LowBitFormat, got {quantized_dtype!r}")
        if rounding not in ("nearest", "stochastic"):
            raise ValueError(f'rounding must be "nearest" or "stochastic", got {rounding!r}')
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
        self.quantized_dtype = quantized_dtype
        self.computation_dtype = computation_dtype
        self.rounding: Rounding = rounding
        self.generator = generator
        self.dequantized_value_list: tuple[Tensor, ...] | None = None
        self._stacks: Stacks | None = None

        self.quantized_value_list = tuple(_to_storage(value, quantized_dtype) for value, _, _ in rows)
        lows = tuple(low for _, low, _ in rows if low is not None)
        highs = tuple(high for _, _, high in rows if high is not None)
        if lows or highs:
            if not len(lows) == len(highs) == len(rows):
                raise AssertionError("min and max must be given for all values, or for none")
            self.min_value_list, self.max_value_list = lows, highs

    def __setstate__(self, state: dict[str, Any]) -> None:
        # the stacks are found anew when needed: older versions pickled other stacks, or none
        vars(self).update(state, _stacks=None)

    def __len__(self) -> int:
        return len(self.quantized_value_list)

    @property
    def quantized_value(self) -> tuple[Tensor, ...]:
        """The stored tensors."""
        return self.quantized_value_list

    @property
    def dequantized_value(self) -> tuple[Tensor, ...]:
        """The values to compute with, between `dequantize_` and `quantize_`."""
        if self.dequantized_value_list is None:
            raise AssertionError("Dequantized values are not stored! Must first call dequantize_().")
        return self.dequantized_value_list

    def is_dequantized_stored(self) -> bool:
        """Whether there are values to compute with."""
        return self.dequantized_value_list is not None

    @torch.no_grad()
    def dequantize(self) -> tuple[Tensor, ...]:
        """The values in the computation dtype: the stored tuple itself if they are stored in it, else new tensors."""
        check_supported(self.quantized_dtype)
        if self.quantized_dtype == self.computation_dtype:
            return self.quantized_value_list
        if isinstance(self.quantized_dtype, LowBitFormat):
            return decode_many(cast(Sequence[LowBitTensor], self.quantized_value_list), self.computation_dtype)
        stored = self.quantized_value_list
        if torch.compiler.is_compiling():
            return tuple(value.to(self.computation_dtype) for value in stored)
        if self._stacks is None or self._stacks.tensors is not stored:
            self._stacks = Stacks.of(stored)
        return self._stacks.converted(self.computation_dtype)

    def dequantize_(self) -> None:
        """Make the values to compute with, and keep them."""
        if self.is_dequantized_stored():
            logger.warning("Dequantized values are already stored; overwriting these values...")
        self.dequantized_value_list = self.dequantize()

    @torch.no_grad()
    def quantize(self, tensor_list: Sequence[Tensor]) -> None:
        """Write ``tensor_list`` into the storage; all of it is checked before anything is written."""
        check_supported(self.quantized_dtype)
        stored = self.dequantized_value_list
        is_given = stored is None or tensor_list is not stored
        if is_given:
            tensor_list = tuple(iterated(tensor_list, "tensor_list"))
            self._check_numbers(tensor_list)
            if stored is not None and any(mine is not given for mine, given in zip(stored, tensor_list)):
                logger.warning(
                    "Existing stored dequantized values.\n"
                    "Writing quantized values with input tensor_list without using these stored dequantized values..."
                )
        targets, numbers = self.quantized_value_list, tuple(tensor_list)
        if is_given or self.rounding == "stochastic":
            self._check_sharding(numbers)
        if any(map(is_, targets, numbers)):
            # with equal dtypes the values are the storage: nothing to write
            changed = [(mine, given) for mine, given in zip(targets, numbers) if mine is not given]
            targets, numbers = zip(*changed) if changed else ((), ())
        if not targets:
            return
        if is_given:
            # the stored tensors may be given in another order
            numbers = tuple(lasting_sources(list(zip(targets, numbers))))
        stochastic = self.rounding == "stochastic"
        generator = self.generator if stochastic else None
        if isinstance(self.quantized_dtype, LowBitFormat):
            coded = cast(Sequence[LowBitTensor], targets)
            encode_many(coded, numbers, stochastic=stochastic, generator=generator)
        elif stochastic and self.quantized_dtype.itemsize == 2:
            round_many(targets, numbers, generator=generator)
        else:
            copy_many(targets, numbers)

    def quantize_(self) -> None:
        """Write the values to compute with back into the storage, and drop them."""
        if self.dequantized_value_list is None:
            logger.warning(
                f"No stored dequantized values {self.dequantized_value_list=}. Must first call dequantize_()."
            )
            return
        self.quantize(self.dequantized_value_list)
        self.dequantized_value_list = None

    def state_attributes(self) -> Iterator[tuple[str, Any]]:
        """The stored tensors.

        Raises:
            RuntimeError: while dequantized values of another dtype are stored: a save would lack the changes made to
                them, and writing them back would overwrite what a load brings.
        """
        if self.is_dequantized_stored() and self.quantized_dtype != self.computation_dtype:
            raise RuntimeError(
                f"a list of {len(self)} quantized tensors is saved and loaded while no dequantized values are stored; "
                "leave the context, or call quantize_() or discard_(), first"
            )
        yield from super().state_attributes()

    def discard_(self) -> None:
        """Drop the values to compute with, and leave the storage as it is."""
        self.dequantized_value_list = None

    def compress(self, selector: Sequence[object]) -> QuantizedTensorList:
        """A list of the tensors whose entry in ``selector`` is true; it shares them with this one."""
        if self.is_dequantized_stored():
            raise AssertionError("Cannot compress while dequantized values are stored! Must first call quantize_().")
        nothing = (None,) * len(self)
        rows = tuple(zip(self.quantized_value_list, self.min_value_list or nothing, self.max_value_list or nothing))
        return QuantizedTensorList(
            compress_list(rows, selector),
            self.quantized_dtype,
            self.computation_dtype,
            rounding=self.rounding,
            generator=self.generator,
        )

    def _check_numbers(self, tensor_list: Sequence[Tensor]) -> None:
        if len(tensor_list) != len(self):
            raise ValueError(f"quantize takes as many tensors as are stored, {len(self)}, got {len(tensor_list)}")
        floating = isinstance(self.quantized_dtype, LowBitFormat) or self.rounding == "stochastic"
        for position, (stored, tensor) in enumerate(zip(self.quantized_value_list, tensor_list)):
            check_numbers(tensor, f"tensor {position}", floating=floating)
            if isinstance(tensor, LowBitTensor) and tensor is not stored:
                raise TypeError(f"tensor {position} of shape {tuple(tensor.shape)} is quantized; dequantize it first")
            if stored.shape != tensor.shape:
                raise ValueError(
                    f"tensor {position} must have the stored shape {tuple(stored.shape)}, got {tuple(tensor.shape)}"
                )
            if tensor.is_meta and not stored.is_meta:
                raise ValueError(f"tensor {position} of shape {tuple(tensor.shape)} is on meta and has no numbers")

    def _check_sharding(self, numbers: Sequence[Tensor]) -> None:
        """Raise for a DTensor in place of a plain tensor or the reverse, and for one that cannot be coded."""
        fmt, stochastic = self.quantized_dtype, self.rounding == "stochastic"
        for position, (stored, tensor) in enumerate(zip(self.quantized_value_list, numbers)):
            # of plain tensors each look for DTensors' class would be a tenth of the time that small ones take
            if tensor is stored or (type(tensor) is Tensor and type(stored) is Tensor):
                continue
            is_sharded = is_dtensor(stored.codes if isinstance(stored, LowBitTensor) else stored)
            if is_sharded != is_dtensor(tensor):
                kind, found = ("DTensor", "plain tensor") if is_sharded else ("plain tensor", "DTensor")
                raise TypeError(f"tensor {position} must be a {kind}, as the stored one is, got a {found}")
            if not is_sharded or not is_dtensor(tensor):
                continue
            if isinstance(fmt, LowBitFormat):
                from optim_utils._low_bit.sharded import check_encodable

                check_encodable(tensor, fmt, stochastic=stochastic, generator=self.generator)
            elif stochastic and fmt.itemsize == 2:
                raise TypeError(
                    f"tensor {position}: stochastic rounding takes plain tensors, got a DTensor: give this rank's part"
                )


class DequantizeQuantizedTensorListContext(ParameterizeEnterExitContext[QuantizedTensorList], Sequence[Tensor]):
    """Dequantize a list on entry, write it back on exit; ``as tensors`` gives the context, a sequence of the values.

    Contexts of one list nest: they share the values, and only the outermost makes them and writes them back. Values
    that were stored by hand before entering count as an outer level.

    Args:
        write_back: False to only read. An outer context of the list still writes back if its own ``write_back`` is
            True.
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
        if not isinstance(quantized_tensor_list, QuantizedTensorList):
            what = type(quantized_tensor_list).__name__
            raise TypeError(f"quantized_tensor_list must be a QuantizedTensorList, got a {what}")
        super().__init__(quantized_tensor_list, methodcaller("dequantize_"), methodcaller("quantize_"))
        self._list = quantized_tensor_list
        self._write_back = write_back
        self._on_exception = on_exception
        # One entry for each time this context was entered: whether it made the values then.
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
        try:
            if self._write_back and (exc_type is None or self._on_exception == "keep"):
                super().__exit__(exc_type, exc_value, traceback)
        finally:
            # also if writing back failed: otherwise the next context would take these values for those of an outer
            # context, and never write back
            self._list.discard_()

    def __len__(self) -> int:
        return len(self._list)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: Any) -> Any:
        return self._list.dequantized_value[index]


def _values_and_ranges(quantized_data: object) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """(values, min, max) of each element; for a `QuantizedTensor`, those of its part on this rank.

    Raises:
        TypeError: unless the elements are all `QuantizedTensor`, or all tuples of three.
    """
    if isinstance(quantized_data, Sequence):
        if all(isinstance(element, QuantizedTensor) for element in quantized_data):
            return [_local_part(element) for element in quantized_data]
        if all(isinstance(element, tuple) and len(element) == 3 for element in quantized_data):
            return list(quantized_data)
    hint = get_type_hints(QuantizedTensorList.__init__)["quantized_data"]
    error = TypeError(f"quantized_data must be {hint} but get {type(quantized_data)}")
    error.add_note("give each tensor as (values, None, None)")
    raise error


def _local_part(quantized: QuantizedTensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    values, info = quantized.quantized_values, quantized.block_info
    if isinstance(values, LowBitTensor):
        values = values.to_local()
    elif info is not None:
        values = info.get_tensor(values)
    return values, quantized.min_value, quantized.max_value


def _to_storage(value: Tensor, quantized_dtype: torch.dtype | LowBitFormat) -> Tensor:
    """``value`` itself if it is of ``quantized_dtype``, else a conversion, which only float values have."""
    if stored_as(value) == quantized_dtype:
        return value
    converts = value.dtype in FLOAT_DTYPES and not isinstance(value, LowBitTensor)
    if converts and isinstance(quantized_dtype, LowBitFormat):
        return quantize(value, quantized_dtype)
    if converts and quantized_dtype in FLOAT_DTYPES:
        return value.detach().to(quantized_dtype)
    raise TypeError(f"values of {stored_as(value)} can't be stored as {quantized_dtype}; convert them first")
