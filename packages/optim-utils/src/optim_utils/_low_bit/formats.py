"""What a low-bit format is: which codes, how many bits, how large the blocks, and the presets.

Every block of ``block_size`` neighbouring elements shares one fp32 scale, so an element costs
``bits / 8 + 4 / block_size`` bytes (twice the 4 with an offset). Code 0 always means zero (for affine codes: the
block's minimum).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

__all__ = [
    "CUBIC8",
    "DYNAMIC8",
    "DYNAMIC8_UNSIGNED",
    "FP8_E4M3",
    "FP8_E5M2",
    "INT4",
    "INT8",
    "LOG4_UNSIGNED",
    "MOMENT8",
    "NF4",
    "OCTAL8",
    "OCTAL8_UNSIGNED",
    "OCTAL_MOMENT8",
    "QUINTIC8_UNSIGNED",
    "UINT8_AFFINE",
    "LowBitFormat",
]

CodeName = Literal[
    "int",
    "affine",
    "dynamic",
    "dynamic_unsigned",
    "e4m3",
    "e5m2",
    "nf4",
    "log_unsigned",
    "octal",
    "octal_unsigned",
    "cubic",
    "quintic_unsigned",
]
LayoutName = Literal["flat", "rows"]
CompandingName = Literal["none", "sqrt"]

_CODES: tuple[CodeName, ...] = get_args(CodeName)
_LAYOUTS: tuple[LayoutName, ...] = get_args(LayoutName)
_COMPANDINGS: tuple[CompandingName, ...] = get_args(CompandingName)
_SCALE_DTYPES = (torch.float32,)
_CODES_OF_BITS: dict[int, tuple[CodeName, ...]] = {
    4: ("int", "nf4", "log_unsigned"),
    8: tuple(code for code in _CODES if code not in ("nf4", "log_unsigned")),
}
# keyed by a format's fields: two formats equal to it, for a compiler to trace; see `LowBitFormat.specialized`
_TRACED_TWINS: dict[tuple[str, int, int, str, str], tuple[LowBitFormat, LowBitFormat]] = {}


@dataclass(frozen=True)
class LowBitFormat:
    """How numbers become codes. Use a preset, and ``.with_(...)`` for another block size or layout.

    Attributes:
        code: the map from codes to numbers in [-1, 1] (or [0, 1] for the unsigned ones).
        bits: bits per code, 4 or 8; two 4-bit codes share a byte, the first one in its low half.
        block_size: elements that share a scale.
        layout: ``"flat"``, blocks along the row-major order of all elements; ``"rows"``, blocks begin anew at every row
            of the last dimension, so the tensor can be cut along its other dimensions anywhere.
        scale_dtype: float32, the only one so far.
        companding: ``"sqrt"`` stores the roots of the numbers (second moments) and squares after decoding.
    """

    code: CodeName
    bits: int = 8
    block_size: int = 256
    layout: LayoutName = "flat"
    scale_dtype: torch.dtype = torch.float32
    companding: CompandingName = "none"

    def __post_init__(self) -> None:
        # types, too: 8.0 and True equal ints that a checkpoint of them would not
        if type(self.bits) is not int:
            raise ValueError(f"bits must be an int, 4 or 8, got {self.bits!r}")
        if self.code not in _CODES_OF_BITS.get(self.bits, ()):
            known = {bits: list(codes) for bits, codes in _CODES_OF_BITS.items()}
            raise ValueError(f"there is no {self.bits}-bit code {self.code!r}; codes by bits: {known}")
        if self.layout not in _LAYOUTS:
            raise ValueError(f"layout must be one of {_LAYOUTS}, got {self.layout!r}")
        if self.scale_dtype not in _SCALE_DTYPES:
            raise ValueError(f"scale_dtype must be torch.float32, got {self.scale_dtype}")
        if isinstance(self.block_size, bool) or not isinstance(self.block_size, int) or self.block_size < 1:
            raise ValueError(f"block_size must be a positive int, got {self.block_size!r}")
        if self.bits == 4 and self.block_size % 2:
            raise ValueError(f"block_size must be even where two codes share a byte, got {self.block_size}")
        if self.companding not in _COMPANDINGS:
            raise ValueError(f"companding must be one of {_COMPANDINGS}, got {self.companding!r}")
        if self.companding == "sqrt" and not self.unsigned:
            raise ValueError(f"companding 'sqrt' needs a code for non-negative numbers, got {self.code!r}")
        key = self._key
        # not while a compiler traces: it would guard on this write, and the ints are constants of its program anyway
        if not torch.compiler.is_compiling() and key not in _TRACED_TWINS:
            _TRACED_TWINS[key] = (self, self)
            _TRACED_TWINS[key] = (dataclasses.replace(self), dataclasses.replace(self))

    def __reduce__(self) -> tuple[type[LowBitFormat], tuple[object, ...]]:
        # unpickling calls `__init__`, so that the format is checked and entered into `_TRACED_TWINS`
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def specialized(self) -> LowBitFormat:
        """This format; while torch.compile traces, an equal one whose ints are constants.

        If an int, such as the block size, differs between two calls, the compiler makes it a symbol. The ints of a
        format that is read from a dict entry never differ.
        """
        if not torch.compiler.is_compiling() or self._key not in _TRACED_TWINS:
            return self
        first, second = _TRACED_TWINS[self._key]
        return first if second is self else second

    @property
    def _key(self) -> tuple[str, int, int, str, str]:
        """The fields that tell formats apart: all but ``scale_dtype``, which is the same for all so far."""
        return self.code, self.bits, self.block_size, self.layout, self.companding

    @property
    def unsigned(self) -> bool:
        """Whether negative numbers are clamped to zero and a positive number never becomes zero."""
        return self.code.endswith("_unsigned")

    @property
    def has_offset(self) -> bool:
        """Whether a block stores its minimum beside its scale."""
        return self.code == "affine"

    @property
    def bytes_per_element(self) -> float:
        """Bytes per element, including its share of the scale (and offset)."""
        per_block = self.scale_dtype.itemsize * (2 if self.has_offset else 1)
        return self.bits / 8 + per_block / self.block_size

    def with_(self, **changes: Any) -> LowBitFormat:
        """This format with some fields changed, e.g. ``INT8.with_(block_size=256, layout="rows")``."""
        return dataclasses.replace(self, **changes)

    def to_ints(self) -> dict[str, int]:
        """The format as ints alone: the only kind of metadata that survives in the state of every optimizer."""
        return {
            "code": _CODES.index(self.code),
            "bits": self.bits,
            "block_size": self.block_size,
            "layout": _LAYOUTS.index(self.layout),
            "scale_dtype": _SCALE_DTYPES.index(self.scale_dtype),
            "companding": _COMPANDINGS.index(self.companding),
        }

    @classmethod
    def from_ints(cls, ints: Mapping[str, Any]) -> LowBitFormat:
        """The format whose :meth:`to_ints` this is; other keys are ignored."""
        try:
            return cls(
                code=_CODES[non_negative_int(ints["code"])],
                bits=non_negative_int(ints["bits"]),
                block_size=non_negative_int(ints["block_size"]),
                layout=_LAYOUTS[non_negative_int(ints["layout"])],
                scale_dtype=_SCALE_DTYPES[non_negative_int(ints["scale_dtype"])],
                companding=_COMPANDINGS[non_negative_int(ints["companding"])],
            )
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"not the ints of a LowBitFormat: {ints!r} ({error})") from error


def check_format(fmt: object) -> None:
    """Raise TypeError unless ``fmt`` is a format."""
    if not isinstance(fmt, LowBitFormat):
        raise TypeError(f"fmt has to be a LowBitFormat, such as INT8, got a {type(fmt).__name__}")


def non_negative_int(value: object) -> int:
    """``value``, or TypeError unless it is a non-negative int of 64 bits: a checkpoint may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise TypeError(f"expected a non-negative int of 64 bits, got {value!r}")
    return value


INT8 = LowBitFormat("int", block_size=64)
UINT8_AFFINE = LowBitFormat("affine")
DYNAMIC8 = LowBitFormat("dynamic")
DYNAMIC8_UNSIGNED = LowBitFormat("dynamic_unsigned")
MOMENT8 = LowBitFormat("dynamic_unsigned", companding="sqrt")
FP8_E4M3 = LowBitFormat("e4m3")
FP8_E5M2 = LowBitFormat("e5m2")
INT4 = LowBitFormat("int", bits=4, block_size=128)
NF4 = LowBitFormat("nf4", bits=4, block_size=128)
LOG4_UNSIGNED = LowBitFormat("log_unsigned", bits=4, block_size=128)
OCTAL8 = LowBitFormat("octal")
OCTAL8_UNSIGNED = LowBitFormat("octal_unsigned")
OCTAL_MOMENT8 = LowBitFormat("octal_unsigned", companding="sqrt")
CUBIC8 = LowBitFormat("cubic")
QUINTIC8_UNSIGNED = LowBitFormat("quintic_unsigned")
