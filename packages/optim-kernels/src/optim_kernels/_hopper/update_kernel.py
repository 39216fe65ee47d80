"""Newton–Schulz's last product followed by the parameter's update, on the schedule of `ping_pong_kernels`.

    O = s (α S X + β X),  rounded to X's dtype;  then the update of `_kernels.muon_parameter`

While one consumer multiplies, the other reads its tile's parameters, updates and stores them, in two rounds of 64 of
the storage's lines, as many as registers hold. O goes through the tile's buffer in shared memory, and comes out of it
in the storage's order, transposed where the matrix has more lines than elements a line.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from optim_kernels._hopper.flags import product_flags, update_flags
from optim_kernels._hopper.ping_pong_kernels import allocate, multiply, produce
from optim_kernels._hopper.ring import CONSUMER_REGISTERS, PRODUCER_REGISTERS, barrier, load
from optim_kernels._hopper.turns import BLOCK
from optim_kernels._kernels.muon_parameter import read_parameter, updated, write_parameter
from optim_kernels._kernels.muon_table import FP32_MASTER, MASTER, NUM_FIELDS, SPLIT16, P
from optim_kernels._kernels.muon_tiles import sizes, stride_of
from optim_kernels._kernels.product import rectangle_tile, with_c

# Lines of the storage that are updated at a time.
_LINES = gl.constexpr(64)


@gluon.jit
def _consume(
    ME: gl.constexpr,
    c_desc,
    ring,
    buffers,
    c_ready,
    turn,
    schedule,
    numbers,
    parameters,
    flags: gl.constexpr,
    update: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    alpha, beta, scale = numbers
    table, first_matrix, hyper, lr_scales = parameters
    total, tiles, T, columns, K = schedule
    buffer = buffers.index(ME)
    matrix = buffer.reshape([BLOCK, BLOCK])
    steps = gl.cdiv(K, flags.depth)
    step = ME * steps
    turns = 0
    for tile in range(gl.program_id(0) + ME * gl.num_programs(0), total, 2 * gl.num_programs(0)):
        batch = tile // tiles
        i, j = rectangle_tile(tile % tiles, T, columns, flags.group)
        if flags.has_c:
            # the copy engine must not overwrite the buffer before all threads have read it
            fence_async_shared()
            barrier()
            mbarrier.expect(c_ready.index(ME), c_desc.block_type.nbytes)
            load(c_desc, [batch, i * BLOCK, j * BLOCK], c_ready.index(ME), buffer)
        acc = multiply(ME, ring, turn, step, turns, K, False, flags.depth, flags.stages)
        # past its own steps, and those of the other consumer's next tile
        step += 2 * steps
        acc = acc * alpha
        if flags.has_c:
            mbarrier.wait(c_ready.index(ME), turns & 1)
            acc = with_c(acc, beta, matrix.load(layout).to(gl.float32))
        if flags.has_scale:
            acc *= gl.load(scale + batch)
        turns += 1  # noqa: SIM113
        number = (first_matrix + batch).to(gl.int64)
        # all threads have read C, or the O of the tile before
        barrier()
        lr_scale = gl.load(lr_scales + number)
        o = acc.to(c_desc.dtype)
        update_tile(table + number * NUM_FIELDS, hyper, lr_scale, matrix, o, i, j, update)


@gluon.jit
def _in_storage(i, j, outer_size, inner_size):
    """The line of the storage, and the element in it, at which tile (i, j) of X begins."""
    is_transposed = outer_size > inner_size
    return gl.where(is_transposed, j, i) * BLOCK, gl.where(is_transposed, i, j) * BLOCK


@gluon.jit
def fetch_tile(record, i, j, update: gl.constexpr):
    """Prefetch the parameters of tile (i, j) of X to L2, by one warp that does not wait for them."""
    if update.master_kind == FP32_MASTER:
        _fetch(record, i, j, gl.load(record + MASTER), 4)
    else:
        _fetch(record, i, j, gl.load(record + P), update.p_dtype.primitive_bitwidth // 8)
        if update.master_kind == SPLIT16:
            _fetch(record, i, j, gl.load(record + MASTER), 2)


@gluon.jit
def _fetch(record, i, j, start, BYTES: gl.constexpr):
    outer_size, inner_size = sizes(record, True)
    first_outer, first_inner = _in_storage(i, j, outer_size, inner_size)
    # in place of lines beyond the matrix, its last line once more
    line = gl.minimum(first_outer + gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [1], [0])), outer_size - 1)
    address = start + (line.to(gl.int64) * stride_of(record, True) + first_inner) * BYTES
    size = (gl.minimum(inner_size - first_inner, BLOCK) * BYTES).to(gl.int32)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, $2;",
        "=r,l,r",
        [address, size],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def update_tile(record, hyper, lr_scale, matrix, o, i, j, update: gl.constexpr):
    """Update the parameters of tile (i, j) of X, whose O is ``o``.

    ``matrix`` is room for it in shared memory, whose content is no longer needed.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    outer_size, inner_size = sizes(record, True)
    if outer_size > inner_size:
        matrix.permute((1, 0)).store(o)
    else:
        matrix.store(o)
    barrier()
    first_outer, first_inner = _in_storage(i, j, outer_size, inner_size)
    inner = first_inner + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))[None, :]
    stride = stride_of(record, True)
    for part in gl.static_range(BLOCK // _LINES):
        lines = matrix.slice(part * _LINES, _LINES).load(layout).to(gl.float32)
        outer = first_outer + part * _LINES + gl.arange(0, _LINES, gl.SliceLayout(1, layout))[:, None]
        offsets = outer.to(gl.int64) * stride + inner
        mask = (outer < outer_size) & (inner < inner_size)
        p = read_parameter(record, offsets, mask, update.p_dtype, update.master_kind, True)
        p = updated(record, hyper, lr_scale, p, lines, update.cautious)
        write_parameter(record, offsets, mask, p, update.p_dtype, update.master_kind, True)
    barrier()


@gluon.jit(do_not_specialize=["first_matrix", "total", "tiles", "T", "columns", "K"])
def update_product_kernel(
    s_desc,
    x_desc,
    c_desc,
    table,
    hyper,
    control,
    lr_scales,
    scale,
    first_matrix,
    total,
    tiles,
    T,
    columns,
    K,
    alpha,
    beta,
    HAS_C: gl.constexpr,
    HAS_SCALE: gl.constexpr,
    P_DTYPE: gl.constexpr,
    MASTER_KIND: gl.constexpr,
    CAUTIOUS: gl.constexpr,
    GROUP: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):
    """All tiles of a batch of matrices, which starts with number ``first_matrix``; addresses and sizes are aligned."""
    ring, buffers, c_ready, turn = allocate(s_desc, x_desc, c_desc, STAGES)
    # found_inf: nothing is written
    total = gl.where(gl.load(control + 1) == 0.0, total, 0)
    schedule = (total, tiles, T, columns, K)
    numbers = (alpha, beta, scale)
    parameters = (table, first_matrix, hyper, lr_scales)
    flags: gl.constexpr = product_flags(False, False, HAS_C, False, HAS_SCALE, GROUP, DEPTH, STAGES)
    update: gl.constexpr = update_flags(P_DTYPE, MASTER_KIND, CAUTIOUS)
    gl.warp_specialize(
        [
            (_consume, (0, c_desc, ring, buffers, c_ready, turn, schedule, numbers, parameters, flags, update)),
            (_consume, (1, c_desc, ring, buffers, c_ready, turn, schedule, numbers, parameters, flags, update)),
            (produce, (s_desc, x_desc, ring, schedule, flags)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
