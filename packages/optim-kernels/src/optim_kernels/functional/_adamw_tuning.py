"""How AdamW's kernels cut their tensors: sizes of chunks and tiles, warps and registers, as measured on an H200."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from optim_kernels._impl import is_interpreted
from optim_kernels.functional._adamw_tensor import CODE_BLOCK, Signature
from optim_kernels.multi_tensor import ChunkSize


class Tuning(NamedTuple):
    """Elements of a chunk, elements that a program has in registers at a time, its warps, and registers of a thread.

    A chunk of 0 elements stands for chunks of several sizes. A lone tensor's programs may ask for elements first, then
    for what the whole step needs.
    """

    chunk: int
    tile: int
    tail_tile: int
    num_warps: int
    max_registers: int | None = None
    elements_first: bool = False


class OneWarp(NamedTuple):
    """Programs of one warp: a thread's registers, how many a multiprocessor then holds, and blocks of one at most."""

    registers: int
    programs: int
    most_blocks: int


# with codes: in a list; of a lone tensor the first that it is not too long for, else it is cut as a list is
IN_LISTS = OneWarp(72, 28, 24)
OF_ONE = OneWarp(96, 20, 4), OneWarp(80, 24, 14)
# elements of a lone tensor without codes, from which on memory is what it waits for, no longer the step's scalars
MEMORY_BOUND = 1 << 20


def tuning(kind: Signature, numels: Sequence[int], num_multiprocessors: int) -> Tuning:
    """The fastest of the tunings measured on an H200 (``benchmarks/NOTES.md``), by the bytes read for an element.

    Narrow elements need few bytes and many instructions, so a program's fixed cost is spread over several tiles, and 64
    or 72 registers hold two tiles; two tiles of wider elements would spill. With codes a tile is a block, and a program
    one warp, which waits for no other.
    """
    if torch.uint8 in (kind.exp_avg, kind.exp_avg_sq):
        return Tuning(0, CODE_BLOCK, CODE_BLOCK, 1, None if is_interpreted() else IN_LISTS.registers)
    if is_interpreted():
        return Tuning(4096, 4096, 4096, 1)
    read = sum(dtype.itemsize for dtype in (kind.param, kind.grad, kind.exp_avg, kind.exp_avg_sq))
    registers = 64 if read <= 8 else 72 if read <= 10 else None
    if kind.stochastic_rounding:
        return Tuning(4096, 1024, 128, 4, registers)
    if len(numels) == 1:
        return Tuning(1024, 1024, 128, 4, elements_first=numels[0] >= MEMORY_BOUND and kind.master is None)
    if registers is not None:
        # four tiles a program, where there are so many programs that the uneven end of the last ones is small
        is_long = sum(numels) > num_multiprocessors << 21
        return Tuning(4096 if is_long and read <= 8 else 2048, 1024, 128, 4, registers)
    return Tuning(1024, 1024, 128, 2)


def division_of_one(numel: int, is_aligned: bool, tuned: Tuning, num_multiprocessors: int) -> tuple[int, int] | None:
    """Programs of a lone tensor, and ``num_full`` for the kernel; ``None`` if it has to be treated as a list.

    With codes all programs are on the device at once and share the blocks equally (``adamw_kernel_of_one``). Where two
    blocks are the most that one has, all have two, as fewer programs start sooner.
    """
    if tuned.chunk:
        return max(1, -(-numel // tuned.chunk)), numel // tuned.chunk if is_aligned else 0
    num_blocks = numel // tuned.tile
    kind = _programs_of_one(num_blocks, num_multiprocessors)
    if kind is None or not is_aligned or num_blocks == 0:
        return None
    at_once = kind.programs * num_multiprocessors
    num_parts = -(-num_blocks // 2) if at_once < num_blocks <= 2 * at_once else min(num_blocks, at_once)
    return num_parts + (numel % tuned.tile > 0), num_blocks // num_parts


def tuning_of_one(tuned: Tuning, numel: int, num_multiprocessors: int) -> Tuning:
    """This tuning for a lone tensor of so many elements, where it has one of its own: with codes.

    Its loop asks for a block early if it has the registers for it. Where no tail is left none is compiled, since that
    takes registers from all programs.
    """
    kind = _programs_of_one(numel // tuned.tile, num_multiprocessors)
    if tuned.chunk or kind is None:
        return tuned
    return tuned._replace(
        tail_tile=tuned.tail_tile if numel % tuned.tile else 0,
        max_registers=tuned.max_registers and kind.registers,
    )


def _programs_of_one(num_blocks: int, num_multiprocessors: int) -> OneWarp | None:
    kinds = (kind for kind in OF_ONE if num_blocks <= kind.programs * num_multiprocessors * kind.most_blocks)
    return next(kinds, None)


def code_chunks(num_multiprocessors: int) -> list[ChunkSize]:
    """Chunks of 4, 8, 16 and then 24 blocks of codes, from the front of the list, whose programs come last.

    Starting a program of one warp costs as much as most of a block, and at the end the device waits for half a chunk.
    So most chunks are large, and those that run last are small: two of 4 blocks, one of 8 and one of 16 for each of the
    one-warp programs that a multiprocessor's registers hold. None has more blocks than
    ``_kernels.moment_scales.MOST_BLOCKS``.
    """
    programs = IN_LISTS.programs * num_multiprocessors
    sizes = [(count * programs, blocks * CODE_BLOCK) for count, blocks in ((2, 4), (1, 8), (1, 16))]
    return [*(ChunkSize(size, count * size) for count, size in sizes), ChunkSize(IN_LISTS.most_blocks * CODE_BLOCK)]
