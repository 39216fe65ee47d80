"""Which tile a program of `_hopper.lone_kernel` computes, in few instructions: programs that start late wait for them.

    rectangle      columns of tiles, one after the other
    triangle       tiles on and below the diagonal, folded to a rectangle
    banded         programs for tiles on the diagonal, which take longest: two each, or four to three programs; then
                   tiles below it
    shifted        of a product of two matrices: tiles that begin one block below those of the triangle, behind programs
                   for the blocks that these leave out

Letters: T tiles a side, or rows of tiles; q the program's number within its matrix; i, j tile row and column.
"""

from __future__ import annotations

from optim_kernels._triton import tl, triton


@triton.jit
def lone_place(q, T, SYMMETRIC: tl.constexpr, BANDED: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr):
    """The tile as (i, j), in rows of TALL and columns of BROAD blocks; a quarter of another one, and that one's number.

    With a BANDED tile on the diagonal comes a quarter of another one there: 0 upper left, 1 lower left, 2 lower right;
    of a tile of one block, 0 is all of it.
    """
    quarter = 0
    other = 0
    if not SYMMETRIC:
        j = quotient(q, T)
        i = q - j * T
    elif BANDED:
        on_diagonal = (T + 1) // 2 if TALL == 1 else T // 4 * 3
        if q < on_diagonal:
            if TALL == 1:
                i = 2 * q
                other = i + 1
            else:
                quarter = q % 3
                i = q // 3 * 4 + quarter
                other = q // 3 * 4 + 3
            j = i
        else:
            i, j = folded_tile(q - on_diagonal, T - 1)
            i += 1
    else:
        # halves of square tiles, or these
        PARTS: tl.constexpr = BROAD // TALL
        i, j = folded_tile(q // PARTS, T)
        i = i * PARTS + q % PARTS
    return i, j, quarter, other


@triton.jit
def shifted_place(q, T):
    """Which blocks of a triangle a program computes, as (kind, row, two columns) in numbers of blocks; T is 4, 8, 12, …

    In tiles that begin at the odd rows and even columns, the triangle is but for blocks (e, e) of even e and the last
    row. Four of these blocks at a time go to a program:

        0    a tile, rows and columns
        1    (e, e) and (f, f), and of the last row (·, e) and (·, f)
        2    four blocks of the last row in odd columns: these two, and those four columns further on
    """
    corners = T // 2
    special = corners + T // 4
    if q < corners:
        kind = 1
        row = 2 * T - 1
        column = 4 * q
        second = column + 2
    elif q < special:
        kind = 2
        row = 2 * T - 1
        column = 8 * (q - corners) + 1
        second = column + 2
    else:
        kind = 0
        i, j = folded_tile(q - special, T - 1)
        row = 2 * i + 1
        column = 2 * j
        second = column + 1
    return kind, row, column, second


@triton.jit
def folded_tile(q, T):
    """Tile ``q`` of the lower triangle as (i, j).

    Columns y and T − y of an odd T, or y and T − 1 − y of an even one, together are a column of a rectangle.
    """
    is_even = 1 - T % 2
    y = quotient(q, T + is_even)
    x = q - y * (T + is_even) - is_even
    i = tl.where(x >= y, x, T - 1 - is_even - x)
    j = tl.where(x >= y, y, T - is_even - y)
    return i, j


@triton.jit
def quotient(a, b):
    """``a // b`` of numbers under 2¹⁹, by a reciprocal: its error moves no (a + ½) / b past a whole number."""
    return ((a.to(tl.float32) + 0.5) * (1.0 / b)).to(tl.int32)
