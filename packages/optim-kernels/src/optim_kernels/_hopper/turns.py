"""A consumer's turn in `ping_pong_kernels` and `chain_kernel`: the products of its tile, one after another.

    begin    wait for the turn
    add      multiply the ring's blocks, step by step; called once, or once for each way to multiply
    end      hand the turn over, then wait for the sums

Ways to multiply are loops one after another, not branches: where the sums of two branches meet, the compiler makes one
product wait for the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

# Side of a tile.
BLOCK = gl.constexpr(128)


@gluon.jit
def begin(ME: gl.constexpr, turn, turns, INT8: gl.constexpr = False):
    """Wait for this consumer's turn number ``turns`` and return zero sums; consumer 0 starts, then they alternate.

    INT8: sums of products of int8 are int32.
    """
    mbarrier.wait(turn.index(ME), (turns & 1) ^ (1 - ME))
    if INT8:
        return gl.zeros([BLOCK, BLOCK], gl.int32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32]))
    else:
        return gl.zeros([BLOCK, BLOCK], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))


@gluon.jit
def add(
    acc,
    ring,
    step,
    first,
    end,
    b_first,
    A_UPRIGHT: gl.constexpr,
    B_UPRIGHT: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Add the products from ``first`` to ``end`` along K; return the sums and the ring's next step.

    The last product may still be under way. Upright blocks are [K, rows of A] or [K, columns]; others are [rows, K],
    those of Bᵀ too. Slots of B are numbered from ``b_first`` on.
    """
    a_ring, b_ring, ready, empty = ring
    for k in range(first, end, DEPTH):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        if A_UPRIGHT:
            a = a_ring.index(slot).reshape([DEPTH, BLOCK]).permute((1, 0))
        else:
            a = a_ring.index(slot).reshape([BLOCK, DEPTH])
        if B_UPRIGHT:
            b = b_ring.index(slot + b_first).reshape([DEPTH, BLOCK])
        else:
            b = b_ring.index(slot + b_first).reshape([BLOCK, DEPTH]).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # all but this step's product are done
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    return acc, step


@gluon.jit
def end(ME: gl.constexpr, acc, empty, turn, step, STAGES: gl.constexpr):
    """Hand the turn over and return the sums when all products are done; ``step`` is the one after the last."""
    mbarrier.arrive(turn.index(1 - ME))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc
