"""The sums of a tile in `chain_kernel`: which blocks of the ring are read as they are, and which upright.

Of a symmetric matrix only the tiles on and below the diagonal are in memory. So a row is stored up to the diagonal;
from there on it is read upright, from the column that mirrors it: blocks [K, rows] in place of [rows, K], which the
tensor cores read too.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from optim_kernels._hopper.turns import add, begin, end


@gluon.jit
def multiply_squares(ME: gl.constexpr, ring, turn, step, turns, K, of_a, of_b, second, flags: gl.constexpr):
    """Sums of A Bᵀ: A is stored up to ``of_a`` along K, B up to ``of_b``; beyond, their mirror images are.

    B is in the step's slot + ``second``.
    """
    DEPTH: gl.constexpr = flags.depth
    STAGES: gl.constexpr = flags.stages
    blocks, upright, ready, empty = ring
    acc = begin(ME, turn, turns)
    acc, step = add(
        acc, (blocks, blocks, ready, empty), step, 0, gl.minimum(of_a, of_b), second, False, False, DEPTH, STAGES
    )
    acc, step = add(acc, (blocks, upright, ready, empty), step, of_b, of_a, second, False, True, DEPTH, STAGES)
    acc, step = add(acc, (upright, blocks, ready, empty), step, of_a, of_b, second, True, False, DEPTH, STAGES)
    acc, step = add(
        acc, (upright, upright, ready, empty), step, gl.maximum(of_a, of_b), K, second, True, True, DEPTH, STAGES
    )
    return end(ME, acc, empty, turn, step, STAGES)


@gluon.jit
def multiply_x(ME: gl.constexpr, ring, turn, step, turns, K, of_a, flags: gl.constexpr):
    """Sums of A X: A is stored up to ``of_a`` along K; beyond, its mirror image is."""
    DEPTH: gl.constexpr = flags.depth
    STAGES: gl.constexpr = flags.stages
    blocks, upright, ready, empty = ring
    acc = begin(ME, turn, turns)
    acc, step = add(acc, (blocks, upright, ready, empty), step, 0, of_a, STAGES, False, True, DEPTH, STAGES)
    acc, step = add(acc, (upright, upright, ready, empty), step, of_a, K, STAGES, True, True, DEPTH, STAGES)
    return end(ME, acc, empty, turn, step, STAGES)
