"""8-bit moments in a checkpoint: codes and scales as they are, each a flat tensor in the pieces of its parameter.

    exp_avg         uint8, one for each element
    exp_avg.scale   fp32, one for each block of elements

Pieces begin between blocks, at any number of ranks, so that both are exchanged like any tensor. For an optimizer that
cuts the parameter elsewhere (without 8-bit states, or as DTensors) the rank that reads codes dequantizes them, as many
at a time as are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

from torch import Tensor

from optim_dist._checkpoint.manifest import SavedParameter, SavedState
from optim_dist.plan import ParameterSpec
from optim_utils.low_bit import LowBitFormat, LowBitTensor

SCALE = ".scale"  # appended to the key of the moment


class Flat(Protocol):
    """What can be read piece by piece."""

    def __getitem__(self, part: slice, /) -> Tensor: ...


PartsByFile = Mapping[int, dict[str, dict[str, Any]]]  # keyed by file, parameter, key: tensors; Flat once decoded


@dataclass(frozen=True)
class Numbers:
    """The numbers that flat codes stand for, dequantized when they are read."""

    codes: Tensor
    scale: Tensor
    fmt: LowBitFormat

    def __getitem__(self, part: slice, /) -> Tensor:
        size = self.fmt.block_size
        first, last = part.start // size, -(-part.stop // size)  # blocks
        codes = self.codes[first * size : last * size]
        numbers = LowBitTensor(codes, self.scale[first:last], None, self.fmt, codes.shape).dequantize()
        return numbers[part.start - first * size : part.stop - first * size]


def in_files(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, int, dict[str, int]]]:
    """Yield key, tensor, how many elements of the parameter each of its elements is for, and the format of codes."""
    for key, value in state.items():
        if isinstance(value, LowBitTensor):
            yield key, value.codes, 1, value.fmt.to_ints()
            yield key + SCALE, value.scale, value.fmt.block_size, {}
        else:
            yield key, value, 1, {}


def join_codes(state: dict[str, Tensor], saved: SavedParameter) -> None:
    """Replace codes and scales that have been read, in ``state``, by 8-bit moments."""
    for key, fmt in _coded(saved):
        codes = state[key]
        state[key] = LowBitTensor(codes, state.pop(key + SCALE), None, fmt, codes.shape)


def decode_where_cut(
    parameters: Sequence[SavedParameter], specs: Sequence[ParameterSpec], read: PartsByFile
) -> list[SavedParameter]:
    """Put numbers in the place of codes in ``read``, where ``specs`` may cut through blocks; return what it has now."""
    blocks = {spec.name: 1 if spec.sharding else spec.block for spec in specs}
    found = []
    for saved in parameters:
        state = dict(saved.state)
        for key, fmt in _coded(saved):
            if blocks[saved.name] % fmt.block_size == 0:
                continue
            state[key] = SavedState("float32", state[key].shape, in_pieces=True)
            del state[key + SCALE]
            for parts in (file[saved.name] for file in read.values() if saved.name in file):
                parts[key] = Numbers(parts[key], parts.pop(key + SCALE), fmt)
        found.append(replace(saved, state=state))
    return found


def blocks_of(state: SavedState, start: int, stop: int) -> tuple[int, int]:
    """The elements of a state tensor that belong to the elements ``[start, stop)`` of its parameter."""
    return start // state.block, -(-stop // state.block)


def whole_shape(shape: Sequence[int], block: int) -> list[int]:
    """The shape of a state tensor in pieces."""
    return list(shape) if block == 1 else [-(-prod(shape) // block)]


def _coded(saved: SavedParameter) -> list[tuple[str, LowBitFormat]]:
    return [(key, LowBitFormat.from_ints(state.format)) for key, state in saved.state.items() if state.format]
