"""The device tables of a Muon step: their columns, for the kernels that read and the plan that fills them.

A matrix is a row of int64: addresses, strides in elements, sizes. It is stored as OUTER lines of INNER adjacent
elements (rows of columns, or the reverse for transposed storage) and cut into TILE×TILE tiles; a tile is a row (matrix,
first outer index, first inner index) of an int32 map. A group's hyperparameters are a row of fp32.
"""

from __future__ import annotations

from optim_kernels._triton import tl
from optim_kernels.reference.storage import MASTER_KINDS

# Addresses, 0 where there is none: of the matrix's first element in parameter, momentum buffer, second moment, master,
# and Newton–Schulz's first and last X; of its parameter's step count. Gradients have a table of their own.
P, B, V, MASTER, X, O, STEP = (tl.constexpr(column) for column in range(7))
# One stride for parameter, gradient, buffer and master, one for both X (and see X_PANEL).
STRIDE, X_STRIDE, OUTER, INNER = (tl.constexpr(column) for column in range(7, 11))
# Where the matrix's entries begin in buffers by tile, by line and by part of a line; tiles along its sides, parts of a
# line.
FIRST_TILE, OUTER_TILES, INNER_TILES = (tl.constexpr(column) for column in range(11, 14))
FIRST_LINE, FIRST_PART, NUM_PARTS = (tl.constexpr(column) for column in range(14, 17))
# Whether the inner index numbers the rows; the group; and for random bits the parameter's place, the matrix's first
# element in the parameter's memory, and the seed.
ROWS_ARE_INNER, GROUP, PLACE, START, SEED = (tl.constexpr(column) for column in range(17, 22))
# X may be in panels of PANEL columns: elements from one panel to the next (PANEL where X is whole); and how many
# columns may be written, with zeros beyond the matrix.
X_PANEL, X_COLUMNS = (tl.constexpr(column) for column in range(22, 24))
NUM_FIELDS = tl.constexpr(24)

# Columns of a group's hyperparameters.
LR, WEIGHT_DECAY, MOMENTUM, BETA2 = (tl.constexpr(column) for column in range(4))
NUM_HYPER = tl.constexpr(4)

# Columns of a panel; side of a tile; and of a strip, which is STRIP whole rows, walked STRIP_STEP columns at a time.
PANEL = tl.constexpr(128)
TILE = tl.constexpr(64)
STRIP, STRIP_STEP = tl.constexpr(16), tl.constexpr(256)

# What a parameter keeps beside itself: nothing, an fp32 master, or the int16 low half of one.
NO_MASTER, FP32_MASTER, SPLIT16 = map(tl.constexpr, MASTER_KINDS.values())
