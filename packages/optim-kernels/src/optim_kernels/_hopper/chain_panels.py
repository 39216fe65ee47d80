"""Where X is in `chain_kernel`: [matrices, m, n], or [panels, m, BLOCK], a matrix in panels of BLOCK columns.

There are three buffers of X; in panels buffers 0 and 2 are one.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from optim_kernels._hopper.ring import load, store
from optim_kernels._hopper.turns import BLOCK


@gluon.jit
def place_of(x, column, PANELS: gl.constexpr):
    """Where a column of X is: its matrix and the column; or, in panels of BLOCK columns, the panel and its column."""
    if PANELS:
        return x + column // BLOCK, column % BLOCK
    else:
        return x, column


@gluon.jit
def load_x(descs, which, x, row, column, full, target, PANELS: gl.constexpr):
    """Copy a block of X from buffer ``which``."""
    where, inside = place_of(x, column, PANELS)
    if which == 1:
        load(descs[1], [where, row, inside], full, target)
    elif PANELS:
        load(descs[0], [where, row, inside], full, target)
    else:
        if which == 0:
            load(descs[0], [where, row, inside], full, target)
        else:
            load(descs[2], [where, row, inside], full, target)


@gluon.jit
def store_x(descs, which, x, row, column, source, PANELS: gl.constexpr):
    """Copy a tile to buffer ``which`` of X; buffer 0 is only read, unless it is 2 as well."""
    where, inside = place_of(x, column, PANELS)
    if which == 1:
        store(descs[1], [where, row, inside], source)
    elif PANELS:
        store(descs[0], [where, row, inside], source)
    else:
        store(descs[2], [where, row, inside], source)
