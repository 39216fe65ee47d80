"""The device tables of a Muon step: which column holds what, for the kernels that read and the plan that fills them.

A matrix is a row of int64: addresses of its parameter's tensors and of its X, strides in elements, sizes. It is stored
as OUTER lines of INNER adjacent elements (rows of columns, or the reverse for transposed storage) and cut into
TILE×TILE tiles; a tile is a row (matrix, first outer index, first inner index) of an int32 map. A group's
hyperparameters are a row of fp32.
"""

from __future__ import annotations

from optim_kernels._triton import tl

# Columns of a matrix.
P, G, B, X, V, MASTER = (tl.constexpr(column) for column in range(6))
P_STRIDE, G_STRIDE, B_STRIDE, X_STRIDE = (tl.constexpr(column) for column in range(6, 10))
OUTER, INNER, FIRST_TILE, OUTER_TILES, INNER_TILES = (tl.constexpr(column) for column in range(10, 15))
FIRST_LINE, ROWS_ARE_INNER, GROUP, NUM_FIELDS = (tl.constexpr(column) for column in range(15, 19))

# Columns of a group's hyperparameters.
LR, WEIGHT_DECAY, MOMENTUM, BETA2, NUM_HYPER = (tl.constexpr(column) for column in range(5))

# Side of a tile; lines are padded to a multiple of it in buffers.
TILE = tl.constexpr(64)
