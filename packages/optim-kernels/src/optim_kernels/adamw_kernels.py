"""One AdamW step over a list of tensors in one launch.

The formula is in ``_kernels.adamw_update``, the storage formats in ``_kernels.adamw_tiles``, a program's work in
``_kernels.adamw_chunk``; this module assigns the work to programs. Tensors are cut into chunks, one program each
(``multi_tensor.ChunkMap``): full chunks of aligned tensors first, then tails and unaligned views. A program reads the
tensor and the elements of its chunk, and from the tensor's record the addresses and everything that stays the same
between steps; gradients and hyperparameters change, so they have tables of their own. A list of one tensor mostly needs
none of these but the last: ``adamw_kernel_of_one`` takes the record as arguments.

Step counts live on the device. A program announces that it has read its count (``counters``); the last one to do so
stores the next count and clears the counter. So the whole step, counts included, is one launch.

Loads that depend on no other load are issued before the first wait: chunk, tensor, addresses and elements form a chain
of dependent loads, and its latency is the only one that a small model feels.
"""

from __future__ import annotations

from typing import NamedTuple

from optim_kernels._kernels.adamw_chunk import update_chunk
from optim_kernels._kernels.adamw_tiles import Format
from optim_kernels._kernels.adamw_update import MEMO_SIZE, ROW_SIZE
from optim_kernels._kernels.chunks import read_chunk
from optim_kernels._kernels.step_counts import GROUPED_SIZE, grouped
from optim_kernels._triton import after_previous, before_next, tl, triton, wide

__all__ = [
    "GROUPED_SIZE",
    "MEMOS_SIZE",
    "Format",
    "Record",
    "adamw_kernel",
    "adamw_kernel_of_one",
]


class Record(NamedTuple):
    """A tensor's row in the record table: addresses (0: none) and what stays the same between steps, as int64."""

    param: int
    exp_avg: int
    exp_avg_sq: int
    max_exp_avg_sq: int
    master: int
    step: int
    # address of an fp32 number that is zero if the tensor is to be left alone
    present: int
    numel: int
    # index of the step count's counter, and how many programs announce themselves there
    slot: int
    slot_chunks: int
    group: int
    # for random bits: the parameter's number, the index in it of the tensor's first element, and the key
    place: int
    start: int
    seed: int
    # addresses of the scales of 8-bit moments
    exp_avg_scale: int = 0
    exp_avg_sq_scale: int = 0


RECORD_SIZE = len(Record._fields)
# words of a slot's two memos, which carry bias corrections from step to step
MEMOS_SIZE = 2 * MEMO_SIZE

# Positions in the row, for the kernel.
(
    _PARAM,
    _EXP_AVG,
    _EXP_AVG_SQ,
    _MAX_EXP_AVG_SQ,
    _MASTER,
    _STEP,
    _PRESENT,
    _NUMEL,
    _SLOT,
    _SLOT_CHUNKS,
    _GROUP,
    _PLACE,
    _START,
    _SEED,
    _EXP_AVG_SCALE,
    _EXP_AVG_SQ_SCALE,
) = map(tl.constexpr, range(RECORD_SIZE))
_RECORD_SIZE = tl.constexpr(RECORD_SIZE)
_ROW_SIZE = tl.constexpr(ROW_SIZE)
_MEMOS_SIZE = tl.constexpr(MEMOS_SIZE)


_LIST_NUMBERS = [
    "clip_factor",
    "grad_scale",
    "found_inf",
    "num_chunks",
    "num_full",
    "rates0",
    "rates1",
    "rates2",
    "rates3",
]


@triton.jit(do_not_specialize=_LIST_NUMBERS)
def adamw_kernel(
    chunks,
    records,
    grads,
    hyperparameters,
    counters,
    memos,
    clip_factor,
    grad_scale,
    found_inf,
    num_chunks,
    num_full,
    rates0: tl.int64,
    rates1: tl.int64,
    rates2: tl.int64,
    rates3: tl.int64,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    F: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Update one chunk, the last chunks first: clipping has just read their gradients, so L2 still has them.

    The learning rates, which schedulers change in each step, and the decays, which go with them, are arguments where
    there are up to four groups: to upload others would delay host and device. Of more groups they are in the rows, and
    the arguments are 0, as rows' rates are otherwise.
    """
    after_previous(OVERLAP)
    chunk = num_chunks - 1 - tl.program_id(0)
    tensor, first, size = read_chunk(chunks, chunk)
    record = records + tensor * _RECORD_SIZE
    places = (
        tl.load(record + _PARAM),
        tl.load(grads + tensor * 2),
        tl.load(grads + tensor * 2 + 1),
        tl.load(record + _EXP_AVG),
        tl.load(record + _EXP_AVG_SQ),
        tl.load(record + _MAX_EXP_AVG_SQ),
        tl.load(record + _MASTER),
    )
    numel = tl.load(record + _NUMEL)
    slot = tl.load(record + _SLOT)
    group = tl.load(record + _GROUP)
    rates = tl.where(group == 0, wide(rates0), tl.where(group == 1, wide(rates1), wide(rates2)))
    rates = tl.where(group == 3, wide(rates3), rates)
    update_chunk(
        places,
        (tl.load(record + _EXP_AVG_SCALE), tl.load(record + _EXP_AVG_SQ_SCALE)),
        first,
        tl.minimum(first + size, numel),
        chunk < num_full,
        False,
        (found_inf, tl.load(record + _PRESENT).to(tl.pointer_type(tl.float32))),
        (clip_factor, grad_scale),
        hyperparameters + group * _ROW_SIZE,
        rates,
        tl.load(record + _STEP).to(tl.pointer_type(tl.float32)),
        (tl.load(record + _SEED), tl.load(record + _PLACE), tl.load(record + _START)),
        memos + slot * _MEMOS_SIZE,
        (counters + slot, tl.load(record + _SLOT_CHUNKS) - 1),
        None,
        CHUNK,
        TILE,
        TAIL_TILE,
        F,
        False,
        False,
    )
    before_next(OVERLAP)


_NUMBERS = [
    "clip_factor",
    "grad_scale",
    "found_inf",
    "num_chunks",
    "num_full",
    "param",
    "grad",
    "slice_stride",
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "master",
    "exp_avg_scale",
    "exp_avg_sq_scale",
    "step",
    "present",
    "numel",
    "group",
    "seed",
    "place",
    "start",
    "rates",
]


@triton.jit(do_not_specialize=_NUMBERS)
def adamw_kernel_of_one(
    hyperparameters,
    counters,
    memos,
    clip_factor,
    grad_scale,
    found_inf,
    num_chunks,
    num_full,
    param: tl.int64,
    grad: tl.int64,
    slice_stride: tl.int64,
    exp_avg: tl.int64,
    exp_avg_sq: tl.int64,
    max_exp_avg_sq: tl.int64,
    master: tl.int64,
    exp_avg_scale: tl.int64,
    exp_avg_sq_scale: tl.int64,
    step: tl.int64,
    present: tl.int64,
    numel: tl.int64,
    group: tl.int64,
    seed: tl.int64,
    place: tl.int64,
    start: tl.int64,
    rates: tl.int64,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    F: tl.constexpr,
    ELEMENTS_FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As ``adamw_kernel`` for one tensor: elements can be loaded at once, without tables.

    Its chunks have one size, or with a CHUNK of 0 they are its tiles in equal parts: ``num_full`` tiles a program, and
    one more for those that start first. What is left of a tile has a program of its own, unless TAIL_TILE is 0.

    The group's learning rate and decay are always an argument.
    """
    after_previous(OVERLAP)
    chunk = num_chunks - 1 - tl.program_id(0)
    if CHUNK == 0:
        num_parts = num_chunks if TAIL_TILE == 0 else num_chunks - 1
        is_full = chunk < num_parts
        first, end = _equal_part(chunk, num_parts, num_full, numel, TILE)
    else:
        is_full = chunk < num_full
        first = chunk.to(tl.int64) * CHUNK
        end = tl.minimum(first + CHUNK, numel)
    if CHUNK == 0:
        counter, above = grouped(counters, chunk, num_chunks)
    else:
        counter, above = (counters, num_chunks - 1), None
    update_chunk(
        (wide(param), wide(grad), slice_stride, wide(exp_avg), wide(exp_avg_sq), wide(max_exp_avg_sq), wide(master)),
        (wide(exp_avg_scale), wide(exp_avg_sq_scale)),
        first,
        end,
        # a constant, where nothing for tails is to be compiled: that takes registers from all programs
        True if TAIL_TILE == 0 else is_full,
        # the tensor's last chunk is the launch's first program, so the memo that it leaves delays no one
        chunk == num_chunks - 1,
        (found_inf, wide(present).to(tl.pointer_type(tl.float32))),
        (clip_factor, grad_scale),
        hyperparameters + group * _ROW_SIZE,
        rates,
        wide(step).to(tl.pointer_type(tl.float32)),
        (seed, place, start),
        memos,
        counter,
        above,
        CHUNK,
        TILE,
        TAIL_TILE,
        F,
        True,
        ELEMENTS_FIRST,
    )
    before_next(OVERLAP)


@triton.jit
def _equal_part(part, num_parts, num_tiles, numel, TILE: tl.constexpr):
    """The first element of a part and the first behind it; what the parts leave of a tile comes as one more part."""
    larger = numel // TILE - num_parts.to(tl.int64) * num_tiles
    # the last parts are the larger ones
    before = tl.maximum(part - (num_parts - larger), 0)
    first = (part.to(tl.int64) * num_tiles + before) * TILE
    following = tl.maximum(part + 1 - (num_parts - larger), 0)
    end = ((part + 1).to(tl.int64) * num_tiles + following) * TILE
    if part == num_parts:
        first, end = numel // TILE * TILE, numel
    return first, end
