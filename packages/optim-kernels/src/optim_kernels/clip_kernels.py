"""The norm of many gradients in one launch, and their scaling in another, which returns at once if none is due.

    total  = Σ |g|^p, p = 1 or 2, or max |g| for p = inf;  norm = total^(1/p)
    factor = min(1, max_norm / (norm + 1e-6))
    g     <- factor · g

Squares are added in fp32 in runs of at most 32 within a thread and in fp64 beyond, so that values up to 1e18 neither
overflow nor lose digits. Each program writes one fp64 partial; the last one to finish adds them in the order of the
programs, so the result is the same bits in every run. The maximum is taken over the bit patterns of |g|, which order
like the values with NaN above infinity.

A tensor's row in the table is ``address, numel``; ``multi_tensor`` defines chunks.
"""

from __future__ import annotations

from optim_kernels._kernels.chunks import fields_of_chunk, read_chunk
from optim_kernels._triton import after_previous, div_rn, fetch, narrow, tl, triton

_ROW_SIZE = tl.constexpr(2)

INF_NORM = 0
_INF_NORM = tl.constexpr(INF_NORM)

# Tiles that a thread adds up in fp32: it has 8 elements of each tile, so 32 squares.
_RUN = tl.constexpr(4)


@triton.jit
def _tile_magnitudes(pointer, lanes, end, NORM: tl.constexpr, MASKED: tl.constexpr):
    """|g|, g² or the bit pattern of |g| for one tile: for the norms 1, 2 and inf."""
    if MASKED:
        x = tl.load(pointer + lanes, mask=lanes < end, other=0.0).to(tl.float32)
    else:
        x = tl.load(pointer + lanes).to(tl.float32)
    if NORM == 2:
        x = x * x
    elif NORM == 1:
        x = tl.abs(x)
    else:
        x = tl.abs(x).to(tl.int32, bitcast=True)
    return x


@triton.jit
def _chunk_total(
    pointer,
    end,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The totals of ``_RUN`` tiles, one number for every ``VECTOR`` neighbouring lanes."""
    lanes = tl.arange(0, TILE)
    run = _tile_magnitudes(pointer, lanes, end, NORM, MASKED)
    for i in tl.static_range(1, _RUN):
        more = _tile_magnitudes(pointer, lanes + i * TILE, end, NORM, MASKED)
        run = tl.maximum(run, more) if NORM == _INF_NORM else run + more
    run = tl.reshape(run, [TILE // VECTOR, VECTOR])
    return tl.max(run, axis=1) if NORM == _INF_NORM else tl.sum(run, axis=1).to(tl.float64)


@triton.jit
def _combined(a, b, NORM: tl.constexpr):
    return tl.maximum(a, b) if NORM == _INF_NORM else a + b


@triton.jit(do_not_specialize=["counter", "num_chunks", "num_full"])
def norm_kernel(
    chunks,
    rows,
    partials,
    counter,
    total,
    factor,
    num_chunks,
    num_full,
    max_norm,
    norm_result,
    dtype: tl.constexpr,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
    VECTOR: tl.constexpr,
    PARTIALS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the fp64 ``total``, norm and factor of all chunks; ``PARTIALS`` >= number of programs."""
    CHUNK: tl.constexpr = _RUN * TILE
    if OVERLAP != 0 and tl.program_id(0) < num_full:
        # tables are copied, not written by a kernel: they are complete before any later kernel starts
        tensor, start, _ = read_chunk(chunks, tl.program_id(0))
        SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
        fetch(tl.load(rows + tensor * _ROW_SIZE) + start * SIZE, CHUNK * SIZE)
    after_previous(OVERLAP)
    accumulator = tl.zeros([TILE // VECTOR], dtype=tl.int32 if NORM == _INF_NORM else tl.float64)
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        tensor, start, _ = read_chunk(chunks, chunk)
        row = rows + tensor * _ROW_SIZE
        pointer = tl.load(row).to(tl.pointer_type(dtype))
        if chunk < num_full:
            pointer = tl.multiple_of(pointer, 16) + start
            found = _chunk_total(pointer, CHUNK, NORM, TILE, VECTOR, False)
        else:
            found = _chunk_total(pointer + start, tl.load(row + 1) - start, NORM, TILE, VECTOR, True)
        accumulator = _combined(accumulator, found, NORM)
    if NORM == _INF_NORM:
        partial = tl.max(accumulator, axis=0).to(tl.float32, bitcast=True).to(tl.float64)
    else:
        partial = tl.sum(accumulator, axis=0)
    tl.store(partials + tl.program_id(0), partial)
    # release this partial; the last program acquires all of them
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter, 0)
        programs = tl.arange(0, PARTIALS)
        # bypass L1, which may hold partials of an earlier launch
        found = tl.load(partials + programs, mask=programs < tl.num_programs(0), other=0.0, cache_modifier=".cg")
        if NORM == _INF_NORM:
            # patterns of non-negative fp64 numbers order like the numbers, NaN last
            norm = tl.max(found.to(tl.int64, bitcast=True), axis=0).to(tl.float64, bitcast=True)
            tl.store(total, norm)
        else:
            norm = tl.sum(found, axis=0)
            tl.store(total, norm)
            if NORM == 2:
                norm = tl.sqrt(norm)
        norm = norm.to(tl.float32)
        # the reciprocal first, as torch divides a number by a tensor
        found_factor = div_rn(tl.where(norm == norm, 1.0, norm), norm + 1e-6) * max_norm
        tl.store(norm_result, norm)
        tl.store(factor, tl.where(found_factor > 1.0, 1.0, found_factor))


@triton.jit
def _tile_address(word, part, rows, dtype: tl.constexpr, TILE: tl.constexpr):
    """The address of tile ``part`` of the chunk that ``word`` describes."""
    tensor, start, _ = fields_of_chunk(word)
    return tl.load(rows + tensor * _ROW_SIZE) + (start + part * TILE) * (dtype.primitive_bitwidth // 8)


@triton.jit
def _tile_pointer(address, dtype: tl.constexpr, TILE: tl.constexpr):
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16) + tl.arange(0, TILE)


@triton.jit
def _read_tile(address, wanted, dtype: tl.constexpr, TILE: tl.constexpr):
    # one condition for all lanes, so that loads stay wide; evict first, as no tile is read twice
    mask = tl.full([TILE], wanted, tl.int32) != 0
    return tl.load(_tile_pointer(address, dtype, TILE), mask=mask, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["factor", "num_chunks", "num_full"])
def scale_kernel(
    chunks,
    rows,
    factor,
    num_chunks,
    num_full,
    dtype: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Multiply all tensors by ``factor``; a factor of 1 or more leaves them unread and unwritten.

    The grid is small and its programs persistent, so a launch with nothing to scale costs nothing. Each program
    prefetches: a chunk's word three turns ahead, its address two, its elements one, so that no turn waits for a load.
    """
    PARTS: tl.constexpr = CHUNK // TILE
    after_previous(OVERLAP)
    scale = tl.load(factor)
    if scale >= 1.0:
        return
    turn = tl.num_programs(0)
    # last tiles first: the norm has just read them, and L2 still has them
    i = num_full * PARTS - 1 - tl.program_id(0)
    word = tl.load(chunks + tl.maximum(i, 0) // PARTS)
    address = _tile_address(word, i % PARTS, rows, dtype, TILE)
    word = tl.load(chunks + tl.maximum(i - turn, 0) // PARTS)
    next_address = _tile_address(word, (i - turn) % PARTS, rows, dtype, TILE)
    word = tl.load(chunks + tl.maximum(i - 2 * turn, 0) // PARTS)
    x = _read_tile(address, i >= 0, dtype, TILE)
    while i >= 0:
        next_x = _read_tile(next_address, i >= turn, dtype, TILE)
        address_after = _tile_address(word, (i - 2 * turn) % PARTS, rows, dtype, TILE)
        word = tl.load(chunks + tl.maximum(i - 3 * turn, 0) // PARTS)
        scaled = narrow(x.to(tl.float32) * scale, dtype)
        tl.store(_tile_pointer(address, dtype, TILE), scaled, eviction_policy="evict_first")
        x, address, next_address = next_x, next_address, address_after
        i -= turn
    lanes = tl.arange(0, TILE)
    for chunk in range(num_full + tl.program_id(0), num_chunks, turn):
        tensor, start, _ = read_chunk(chunks, chunk)
        pointer = tl.load(rows + tensor * _ROW_SIZE).to(tl.pointer_type(dtype))
        end = tl.load(rows + tensor * _ROW_SIZE + 1)
        for first in range(start, tl.minimum(start + CHUNK, end), TILE):
            mask = first + lanes < end
            rest = tl.load(pointer + first + lanes, mask=mask).to(tl.float32)
            tl.store(pointer + first + lanes, narrow(rest * scale, dtype), mask=mask)
