"""Random bits that a kernel can draw as well: two streams of Philox, and torch's generator where no seed is given.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) maps a key of two and a counter
of four 32-bit words to four random words. Two streams are drawn from it; M = 2**32:

    plain stream:   element i takes the low 16 bits of word 0 of
                    philox(key=(seed mod M, seed div M), counter=(i mod M, i div M, 0, 0))
    packed stream:  element i takes half i mod 8 of
                    philox(key=(seed mod M, parameter index), counter=(b mod M, b div M, stream, step)), b = i div 8;
                    halves in memory order: half 2j is the low half of word j, half 2j + 1 its high half

A shard that is rounded with its first element's index as ``offset`` therefore equals the slice of the whole, and a
kernel that follows these lines gives the same bits. The packed stream needs an eighth of the calls.

Without a seed the bits need not be the same elsewhere, so the cheapest ones are taken. In eager mode four elements
share a 64-bit draw of torch's generator. In compiled code drawing would be a pass over memory of its own, so one such
draw is the seed of Philox 2x32-7, the paper's fastest generator that passes BigCrush, and each word is computed where
it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch import Tensor

from optim_utils._arguments import sizes_of

__all__ = [
    "Word",
    "packed_philox_uint16",
    "philox_2x32",
    "philox_4x32",
    "philox_uint32",
    "philox_words",
    "random_bits",
]

_WORD = 0xFFFFFFFF
# Multipliers and key increments of Philox 4x32 and 2x32 (the paper's table 2 and section 3.3).
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_MULTIPLIER_OF_TWO = 0xD256D193
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_PIECE = 1 << 14  # words that are computed at a time on a CPU, 128 KiB

Word = int | Tensor


def philox_4x32(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four random words of Philox 4x32-10 for each counter, as int64 tensors with values in [0, 2**32).

    Words are ints or int64 tensors in [0, 2**32) that broadcast together; at least one counter word is a tensor.
    """
    _check_int64(*counter, *key)
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The product wraps modulo 2**64 in int64: shift and mask then give its exact high and low words.
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) & _WORD) ^ c1 ^ k0
        c1 = product_1 & _WORD
        c2 = ((product_0 >> 32) & _WORD) ^ c3 ^ k1
        c3 = product_0 & _WORD
        k0 = (k0 + _WEYL_0) & _WORD
        k1 = (k1 + _WEYL_1) & _WORD
    if not (isinstance(c0, Tensor) and isinstance(c1, Tensor) and isinstance(c2, Tensor) and isinstance(c3, Tensor)):
        raise TypeError("philox_4x32 needs at least one counter word as an int64 tensor, got only ints")
    return c0, c1, c2, c3


def philox_2x32(counter: tuple[Word, Word], key: Word, *, rounds: int = 7) -> tuple[Tensor, Tensor]:
    """The two random words of Philox 2x32 for each counter, as int64 tensors with values in [0, 2**32)."""
    _check_int64(*counter, key)
    c0, c1 = counter
    for _ in range(rounds):
        product = c0 * _MULTIPLIER_OF_TWO
        c0, c1 = ((product >> 32) & _WORD) ^ c1 ^ key, product & _WORD
        key = (key + _WEYL_0) & _WORD
    if not (isinstance(c0, Tensor) and isinstance(c1, Tensor)):
        raise TypeError("philox_2x32 needs at least one counter word as an int64 tensor, got only ints")
    return c0, c1


def _check_int64(*words: Word) -> None:
    """Raise TypeError for a tensor of another dtype, in which products of words wrap around."""
    for word in words:
        if isinstance(word, Tensor) and word.dtype != torch.int64:
            raise TypeError(f"words of Philox have to be ints or int64 tensors, got {word.dtype}")


def _words(value: Word, name: str) -> tuple[Word, Word]:
    """Low and high 32-bit word of an int (modulo 2**64) or of a 0-dim integer tensor."""
    value = _wide(value, name)
    return value & _WORD, (value >> 32) & _WORD


def _wide(value: Word, name: str) -> Word:
    """``value`` as an int or an int64 tensor: narrower integers of torch and NumPy would wrap around or overflow."""
    if isinstance(value, Tensor):
        if value.dim() != 0 or value.is_floating_point() or value.is_complex():
            raise TypeError(
                f"{name} must be an int or a 0-dim integer tensor, got {value.dtype} of {tuple(value.shape)}"
            )
        return value.to(torch.int64)
    # dynamo of torch 2.9 cannot trace a union, and may not know the class of NumPy's integers
    if isinstance(value, (int, torch.SymInt)):
        return value
    if not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int or a 0-dim integer tensor, got {value!r}")
    return index(value)


def _indices(offset: Word, count: int, device: torch.device | str | None) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device) + offset


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    return sizes_of((shape,) if isinstance(shape, int) else shape)


def philox_uint32(
    seed: Word, offset: Word, shape: int | Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """The plain stream: one random word (int64, in [0, 2**32)) for each of the elements offset, offset + 1, ..."""
    offset = _wide(offset, "offset")
    sizes = _sizes(shape)
    count = math.prod(sizes)

    def words(start: int, stop: int) -> Tensor:
        return philox_words(seed, _indices(offset + start, stop - start, device))

    if torch.compiler.is_compiling() or torch.empty(0, device=device).device.type != "cpu":
        return words(0, count).view(sizes)
    # The ten rounds make about a hundred passes over the words: in pieces, these stay in a CPU's cache.
    pieces = [words(start, min(start + _PIECE, count)) for start in range(0, max(count, 1), _PIECE)]
    return torch.cat(pieces).view(sizes)


def philox_words(seed: Word, index: Tensor) -> Tensor:
    """The plain stream's word (int64, in [0, 2**32)) for each of the elements ``index`` (int64)."""
    return philox_4x32((index & _WORD, (index >> 32) & _WORD, 0, 0), _words(seed, "seed"))[0]


def packed_philox_uint16(
    seed: int,
    parameter_index: int,
    shape: int | Sequence[int],
    *,
    stream: int,
    step: Word,
    offset: int = 0,
    device: torch.device | str | None = None,
) -> Tensor:
    """The packed stream: 16 random bits for each of the elements offset, offset + 1, ... of one parameter (int32).

    Args:
        seed: low word of the key; only its low 32 bits count, as in a kernel.
        parameter_index: high word of the key.
        stream: 0 for the parameter, 1 for the first moment, 2 for the second.
        step: number of the optimizer step, an int or a 0-dim integer tensor.
        offset: index within the parameter of the first element, for shards.
    """
    key = _words(seed, "seed")[0], _words(parameter_index, "parameter_index")[0]
    first: Any = _wide(offset, "offset")
    sizes = _sizes(shape)
    count = math.prod(sizes)
    first_block = first // 8
    num_blocks = (first + count + 7) // 8 - first_block
    block = _indices(first_block, num_blocks, device)
    counter = (block & _WORD, (block >> 32) & _WORD, _words(stream, "stream")[0], _words(step, "step")[0])
    words = torch.stack(philox_4x32(counter, key), dim=-1)
    halves = torch.stack((words & 0xFFFF, words >> 16), dim=-1)  # [block, word, half]
    skip = first - 8 * first_block
    return halves.view(-1)[skip : skip + count].to(torch.int32).view(sizes)


def random_bits(
    shape: Sequence[int],
    device: torch.device | str | None = None,
    *,
    generator: torch.Generator | None = None,
    seed: Word | None = None,
    offset: Word = 0,
) -> Tensor:
    """16 random bits per element (int32): from the plain stream if there is a seed, else from a torch generator."""
    if seed is not None:
        if generator is not None:
            raise ValueError("random bits come from a seed or a generator, got both")
        return (philox_uint32(seed, offset, shape, device) & 0xFFFF).to(torch.int32)
    sizes = _sizes(shape)
    count = math.prod(sizes)
    if generator is None and torch.compiler.is_compiling():
        low, high = _words(_draws(1, device, None).view(()), "seed")
        index = _indices(0, count, device)
        return (philox_2x32((index & _WORD, (index >> 32) ^ high), low)[0] & 0xFFFF).to(torch.int32).view(sizes)
    # Four elements share a draw: drawing costs more than all the rest.
    draws = _draws(-(-count // 4), device, generator)
    return (draws.view(torch.int16)[:count].to(torch.int32) & 0xFFFF).view(sizes)


def _draws(count: int, device: torch.device | str | None, generator: torch.Generator | None) -> Tensor:
    """64-bit words from a torch generator. (One of the 2**64 values is never drawn.)"""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {generator!r}")
    return torch.randint(-(1 << 63), (1 << 63) - 1, (count,), generator=generator, dtype=torch.int64, device=device)
