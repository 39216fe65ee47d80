"""Products of Newton–Schulz for Hopper in Gluon, one tile per program: for products that fill the chip at most once.

    D = s (α A Bᵀ + β C),  Q = D + ω I     SYMMETRIC: tiles on and below the diagonal, mirrored
    D = s (α A B + β C)                    otherwise

With SYMMETRIC, B may be a shorter batch, which is repeated. With LOW, of tiles with two consumers and more, Q is the
rounding error of D, so that D + Q has twice the digits. With APART, not SYMMETRIC, D has zeros on the diagonal, which
is stored by itself at the address of Q, in fp32 [batch, M].

A tile has TALL × BROAD blocks of 64×64:

    SYMMETRIC     1×1, 2×2, and 1×2: halves of square tiles, one of two on the diagonal half above it
    otherwise     1×2, 2×2, 3×2, 2×4

A program has a multiprocessor to itself: a producer (`lone_producer`) copies A and B for each step along K into a ring
in shared memory, and TALL consumers (`lone_tiles`) multiply 64 rows each. A tile waits for what a multiprocessor can
read, TALL + BROAD blocks a step. Nothing hides the start and the end of a tile, so they are kept short: the producer
alone prepares the ring, C comes as one more step of it, and results leave from slots that have been read, so no buffers
of their own take room from the ring. With OVERLAP a program of the next launch waits for any free multiprocessor, not
for all: two programs never share one, as the ring takes more than half of its memory. With EARLY, where only the scale
comes from the launch before, a program even multiplies before the scale is there. With AHEAD, where A is older than the
launch before, it copies as much of A as the ring has room for while that one still runs. That one must be LATE: it lets
the next start when its own wait is over, so that whatever came before it is complete. With PARTS the scale is 1/N²,
which a program finds when its sums are done, from squares of parts of the matrix (`_kernels.normalize`): a launch for
that in between would take longer.

Tiles on the diagonal need less work, and where every program counts (BANDED) they are combined, those of A Aᵀ:

    TALL 1    two tiles to a program, which reads as much for them as for one below the diagonal
    TALL 2    consumer 1 computes the lower half [64, 128] of a tile and consumer 0 the upper left quarter, which leaves
              it half idle: so four tiles go to three programs, each of which computes one of them, and a quarter of the
              fourth

Tiles of a product of two matrices are not: a quarter beside such a tile would read as much as half a tile. There
(BANDED, not SAME, TALL 2) tiles begin at odd rows of blocks and even columns, and what they leave out, blocks on the
diagonal and those of the last row, goes to programs that read five blocks a step for the four of a tile
(`lone_shifted`).

T = 16 tiles a side then make 128 or 132 programs in place of 136, and an H100 has 132 multiprocessors. These programs
are the first: the last ones start when one of the launch before ends, and all others wait for them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from optim_kernels._hopper.flags import lone_flags
from optim_kernels._hopper.lone_producer import produce
from optim_kernels._hopper.lone_shifted import consume_shifted, produce_shifted
from optim_kernels._hopper.lone_tiles import SIDE, corner, half_tile, lower_half, whole_tile
from optim_kernels._hopper.overlap import computed_here, let_next_start, wait_for_previous
from optim_kernels._hopper.ring import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    barriers,
    blocks_of,
    room_for_barriers,
)
from optim_kernels._kernels.lone_places import lone_place, quotient, shifted_place

# Registers of a thread where TALL is 1, consumer or producer: a program starts sooner where none change hands.
REGISTERS = gl.constexpr(128)
# Of three consumers, the second and third.
_CONSUMER_REGISTERS_OF_THREE = gl.constexpr(152)


@gluon.jit
def _place(T, num_b, flags: gl.constexpr):
    """The matrix, and B's of ``num_b``; the tile's first row and column; a quarter beside it, its row and column.

    BANDED and not SAME, in place of the last three: the kind of program, nothing, and the second column.
    """
    batch = computed_here(gl.program_id(1))
    b_batch = batch
    if flags.symmetric and not flags.same:
        b_batch = computed_here(batch - quotient(batch, num_b) * num_b)
    if flags.shifted:
        kind, i, j, second = shifted_place(gl.program_id(0), T)
        row, column, second = computed_here(i * SIDE), computed_here(j * SIDE), computed_here(second * SIDE)
        return batch, b_batch, row, column, computed_here(kind), 0, second
    i, j, quarter, other = lone_place(gl.program_id(0), T, flags.symmetric, flags.banded, flags.tall, flags.broad)
    row, column = computed_here(i * flags.tall * SIDE), computed_here(j * flags.broad * SIDE)
    if not flags.banded:
        return batch, b_batch, row, column, 0, 0, 0
    other *= flags.tall * SIDE
    other_row, other_column = other + (quarter + 1) // 2 * SIDE, other + quarter // 2 * SIDE
    return batch, b_batch, row, column, computed_here(quarter), computed_here(other_row), computed_here(other_column)


@gluon.jit
def _consume(ME: gl.constexpr, descs, ring, where, K, numbers, flags: gl.constexpr):
    # so that no path goes around the loop: from Triton 3.7 on, such a path writes the zeros of sums without steps once
    # more where it ends, and the compiler makes every product wait for the one before
    gl.assume(K > 0)
    if flags.overlap and ME == 0:
        if flags.late:
            wait_for_previous(K)
        let_next_start(K)
    mbarrier.wait(ring[4], 0)
    if flags.shifted:
        consume_shifted(ME, where, descs, ring, K, numbers, flags)
    elif flags.halved:
        half_tile(where, descs, ring, K, numbers, flags)
    elif flags.symmetric:
        # the sums of the branches must not meet, or the compiler makes one product wait for the other
        if where[2] != where[3]:
            whole_tile(ME, where, descs, ring, K, numbers, flags)
        else:
            if ME == 0:
                corner(where, descs, ring, K, numbers, flags)
            else:
                lower_half(where, descs, ring, K, numbers, flags)
    else:
        whole_tile(ME, where, descs, ring, K, numbers, flags)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "K", "parts"])
def lone_kernel(
    a_desc,
    b_desc,
    c_desc,
    d_desc,
    q_desc,
    d,
    q,
    scale,
    inverses,
    T,
    K,
    alpha,
    beta,
    omega,
    parts,
    norm_scale,
    eps,
    SYMMETRIC: gl.constexpr,
    SAME: gl.constexpr,
    HAS_C: gl.constexpr,
    HAS_Q: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    LOW: gl.constexpr,
    APART: gl.constexpr,
    BANDED: gl.constexpr,
    PARTS: gl.constexpr,
    ADD_EPS: gl.constexpr,
    AHEAD: gl.constexpr,
    LATE: gl.constexpr,
    IN_EIGHTS: gl.constexpr,
    STAGES: gl.constexpr,
    TALL: gl.constexpr,
    BROAD: gl.constexpr,
    OVERLAP: gl.constexpr,
    EARLY: gl.constexpr,
):
    """A grid of programs and matrices; T tiles a side, or rows of tiles.

    With PARTS, at least as many as ``parts``, ``scale`` is their squares, and 1/N and 1/N² are left in ``inverses``.
    """
    flags: gl.constexpr = lone_flags(
        SYMMETRIC,
        SAME,
        HAS_C,
        HAS_Q,
        HAS_SCALE,
        LOW,
        APART,
        BANDED,
        PARTS,
        ADD_EPS,
        AHEAD,
        LATE,
        IN_EIGHTS,
        STAGES,
        TALL,
        BROAD,
        OVERLAP,
        EARLY,
    )
    # before the warps part: what each computes for itself, the compiler puts behind its wait for the launch before
    where = _place(T, b_desc.shape[0], flags)
    a_blocks = blocks_of(a_desc, (3 if flags.shifted else flags.deep * TALL) * STAGES)
    b_blocks = blocks_of(b_desc, flags.deep * BROAD * STAGES)
    ring = (a_blocks, b_blocks, room_for_barriers(STAGES), room_for_barriers(STAGES), barriers(1).index(0))
    descs = (a_desc, b_desc, c_desc, (d_desc, d), (q_desc, q))
    numbers = (alpha, beta, omega, (scale, inverses, a_desc.shape[0], parts, norm_scale, eps))
    if TALL == 1:
        gl.warp_specialize(
            [
                (_consume, (0, descs, ring, where, K, numbers, flags)),
                (produce, (descs, ring, where, K, flags)),
            ],
            [1],
            [REGISTERS],
        )
    elif TALL == 2:
        gl.warp_specialize(
            [
                (_consume, (0, descs, ring, where, K, numbers, flags)),
                (_consume, (1, descs, ring, where, K, numbers, flags)),
                (produce_shifted if flags.shifted else produce, (descs, ring, where, K, flags)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (0, descs, ring, where, K, numbers, flags)),
                (_consume, (1, descs, ring, where, K, numbers, flags)),
                (_consume, (2, descs, ring, where, K, numbers, flags)),
                (produce, (descs, ring, where, K, flags)),
            ],
            [4, 4, 1],
            [_CONSUMER_REGISTERS_OF_THREE, _CONSUMER_REGISTERS_OF_THREE, PRODUCER_REGISTERS],
        )
