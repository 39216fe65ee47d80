"""The sums of a tile in `_hopper_chain_kernel`, from the slots of the ring, on one consumer's turn.

Of a symmetric matrix only the tiles on and below the diagonal are in memory. So a row of it is there as far as the
diagonal, and its columns are from there on: blocks [K, rows] in place of [rows, K], which the tensor cores read too.
Each way to multiply is a loop of its own, one behind the other. In branches they would be slow: where sums of two ways
meet, the compiler lets one product wait for the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from optim_kernels._hopper_kernels import BLOCK


@gluon.jit
def _add(
    acc,
    ring,
    step,
    first,
    end,
    second,
    A_MIRRORED: gl.constexpr,
    B_UPRIGHT: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Add the products from ``first`` to ``end`` along K; the last one may still be under way.

    B is in slot + ``second``.
    """
    blocks, upright, ready, empty = ring
    for k in range(first, end, DEPTH):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        if A_MIRRORED:
            a = upright.index(slot).reshape([DEPTH, BLOCK]).permute((1, 0))
        else:
            a = blocks.index(slot).reshape([BLOCK, DEPTH])
        if B_UPRIGHT:
            b = upright.index(slot + second).reshape([DEPTH, BLOCK])
        else:
            b = blocks.index(slot + second).reshape([BLOCK, DEPTH]).permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # all but this step's product are done
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    return acc, step


@gluon.jit
def _begin(ME: gl.constexpr, turn, turns):
    """Sums of nothing, when it is this consumer's turn: consumer 0 starts, then they alternate."""
    mbarrier.wait(turn.index(ME), (turns & 1) ^ (1 - ME))
    return gl.zeros([BLOCK, BLOCK], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16]))


@gluon.jit
def _end(ME: gl.constexpr, acc, ring, turn, step, STAGES: gl.constexpr):
    """The sums, when all products are done."""
    _blocks, _upright, _ready, empty = ring
    mbarrier.arrive(turn.index(1 - ME))
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    return acc


@gluon.jit
def multiply_squares(ME: gl.constexpr, ring, turn, step, turns, K, of_a, of_b, second, flags: gl.constexpr):
    """Sums of A Bᵀ: A is there up to ``of_a`` along K, B up to ``of_b``; beyond, their mirror images are."""
    DEPTH: gl.constexpr = flags[0]
    STAGES: gl.constexpr = flags[1]
    acc = _begin(ME, turn, turns)
    acc, step = _add(acc, ring, step, 0, gl.minimum(of_a, of_b), second, False, False, DEPTH, STAGES)
    acc, step = _add(acc, ring, step, of_b, of_a, second, False, True, DEPTH, STAGES)
    acc, step = _add(acc, ring, step, of_a, of_b, second, True, False, DEPTH, STAGES)
    acc, step = _add(acc, ring, step, gl.maximum(of_a, of_b), K, second, True, True, DEPTH, STAGES)
    return _end(ME, acc, ring, turn, step, STAGES)


@gluon.jit
def multiply_x(ME: gl.constexpr, ring, turn, step, turns, K, of_a, flags: gl.constexpr):
    """Sums of A X."""
    DEPTH: gl.constexpr = flags[0]
    STAGES: gl.constexpr = flags[1]
    acc = _begin(ME, turn, turns)
    acc, step = _add(acc, ring, step, 0, of_a, STAGES, False, True, DEPTH, STAGES)
    acc, step = _add(acc, ring, step, of_a, K, STAGES, True, True, DEPTH, STAGES)
    return _end(ME, acc, ring, turn, step, STAGES)
