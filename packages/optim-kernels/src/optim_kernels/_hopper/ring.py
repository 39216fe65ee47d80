"""The ring in shared memory between the producer and the consumers of a persistent Hopper kernel in Gluon.

A slot of the ring has a block of A and one of B, and two barriers:

    ready   the copy engine has filled the slot, as the producer requested
    empty   the tensor cores have read the slot; every consumer that reads it arrives there

The producer fills a slot for each step of each tile, in order. A wait on a barrier knows only the parity of a slot's
round: a waiting warp may be one round behind, not more.

No kernel has K specialised, which Triton would make a constant where it is 1: if the compiler knows that there is one
step, ptxas (12.8) forms the descriptors of blocks in one of two branches that multiply them, and in the other one the
tensor cores read what is anywhere.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# drop the names of Triton 3.6 when it is no longer supported
load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_HAS_OLD_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))
# Registers of a thread: the first consumer takes what the other warps leave of a multiprocessor's 65,536.
CONSUMER_REGISTERS = gl.constexpr(232)
PRODUCER_REGISTERS = gl.constexpr(40)


@gluon.jit
def as_blocks(memory, desc, NUM: gl.constexpr):
    """Shared memory as NUM blocks of a matrix, or with NUM 0 as one block."""
    shape: gl.constexpr = ([NUM] if NUM else []) + desc.block_type.shape
    if _HAS_OLD_REINTERPRET:
        return memory._reinterpret(desc.dtype, shape, desc.layout)
    else:
        return memory.reinterpret(desc.dtype, shape, desc.layout)


@gluon.jit
def blocks_as(memory, NUM: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Adjacent blocks as NUM larger ones: with more rows, or with several blocks' columns (128 bytes) side by side."""
    if _HAS_OLD_REINTERPRET:
        return memory._reinterpret(memory.dtype, [NUM, 1, ROWS, COLUMNS], memory.layout)
    else:
        return memory.reinterpret(memory.dtype, [NUM, 1, ROWS, COLUMNS], memory.layout)


@gluon.jit
def barriers(NUM: gl.constexpr, COUNT: gl.constexpr = 1):
    """Barriers that open when COUNT have arrived."""
    result = room_for_barriers(NUM)
    initialise(result, NUM, COUNT)
    return result


@gluon.jit
def room_for_barriers(NUM: gl.constexpr):
    """Barriers that are to be initialised before they are used."""
    return gl.allocate_shared_memory(gl.int64, [NUM, 1], mbarrier.MBarrierLayout())


@gluon.jit
def initialise(which, NUM: gl.constexpr, COUNT: gl.constexpr = 1):
    """Have NUM barriers open when COUNT have arrived."""
    for number in gl.static_range(NUM):
        mbarrier.init(which.index(number), count=COUNT)


@gluon.jit
def ring_barriers(STAGES: gl.constexpr, READERS: gl.constexpr):
    """The barriers of STAGES slots, each of which READERS consumers read.

    In turn, for the compiler lets all threads meet before it initialises another one of the same array.
    """
    ready, empty = room_for_barriers(STAGES), room_for_barriers(STAGES)
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return ready, empty


@gluon.jit
def blocks_of(desc, NUM: gl.constexpr):
    """Room for NUM blocks of a matrix."""
    return gl.allocate_shared_memory(desc.dtype, [NUM] + desc.block_type.shape, desc.layout)


@gluon.jit
def allocate_ring(a_desc, b_desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """The blocks of A, those of B, and the barriers of STAGES slots, each of which READERS consumers read."""
    ready, empty = ring_barriers(STAGES, READERS)
    return blocks_of(a_desc, STAGES), blocks_of(b_desc, STAGES), ready, empty


@gluon.jit
def fill(a_desc, b_desc, ring, step, place, K, SYMMETRIC: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """Request the operands of one tile from the copy engine, from ring step ``step`` on; return the step after them."""
    a_ring, b_ring, ready, empty = ring
    batch, row, column = place
    for k in range(0, K, DEPTH):
        slot = step % STAGES
        full = ready.index(slot)
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        load(a_desc, [batch, row, k], full, a_ring.index(slot))
        if SYMMETRIC:
            load(b_desc, [batch, column, k], full, b_ring.index(slot))
        else:
            load(b_desc, [batch, k, column], full, b_ring.index(slot))
        step += 1
    return step


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """``x [batch, M, N]`` in blocks of rows × columns of one matrix, for the copy engine."""
    block = [1, rows, columns]
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, _shared_layout(rows, columns, x.dtype))


@cache
def _shared_layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of a block in shared memory, swizzled as the copy engine writes and the tensor cores read it."""
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.int8: gl.int8}[dtype]
    return gl.NVMMASharedLayout.get_default_for([1, rows, columns], element)
