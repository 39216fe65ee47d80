"""Triton kernels for Muon's elementwise parts alone, each over many tensors that lie flat in memory.

    momenta    g <- ±g f;  B <- μB + (1 − μ)g;  U = (1 − μ)g + μB with ``nesterov``, else B
    updates    p <- p (1 − lr λ) − lr' O                        plain
               p <- p − lr' O − lr' λ p [O p ≥ 0]               ``cautious``;  lr' = lr · scale of the tensor

What comes between them, O from U, may happen elsewhere: on another rank, for matrices that are sharded. U comes from
the unrounded B. A group's numbers are formed in fp64 and rounded to fp32 once, as torch does with Python floats, and
products are rounded before they are added (``UNFUSED``): so the bits are those of ``reference.muon`` in plain torch.

One launch has one table, of int64: a row for each tensor, then a row for each group, two words per number: its value
(fp64), and the address of an fp32 number that replaces it, or 0. A program works on one chunk
(``multi_tensor.ChunkMap``); full ones of aligned tensors are read and written 16 bytes a thread.
"""

from __future__ import annotations

from optim_kernels._kernels.chunks import read_chunk
from optim_kernels._kernels.flat_tiles import full_parameter, load_parameter, load_tile, pointer_to, store_parameter
from optim_kernels._kernels.step_counts import advance, arrive
from optim_kernels._triton import after_previous, div_rn, narrow, tl, triton

# Columns of a tensor's row in the table of ``momenta_kernel``, of which the fifth is its number of chunks.
_GRAD, _BUFFER, _U, _NUMEL_OF_GRAD, _, _GROUP_OF_GRAD = map(tl.constexpr, range(6))
_MOMENTUM_ROW = tl.constexpr(6)
# Those of ``updates_kernel``: addresses, 0 of tensors that do not exist; then what stays from step to step. The factor
# of the learning rate is the bits of an fp64 number; the last three are for random bits: the key, the parameter's
# number, and the index in it of the tensor's first element.
_PARAM, _UPDATE, _MASTER, _STEP, _NUMEL, _NUM_CHUNKS, _GROUP, _SCALE, _SEED, _PLACE, _START = map(
    tl.constexpr, range(11)
)
_UPDATE_ROW = tl.constexpr(11)
# Words of a number in a group's row.
_SCALAR_SIZE = tl.constexpr(2)


@triton.jit
def _number(place):
    """A hyperparameter in fp64, from its two words."""
    value, address = tl.load(place).to(tl.float64, bitcast=True), tl.load(place + 1)
    given = tl.load(address.to(tl.pointer_type(tl.float32)), mask=address != 0, other=0.0)
    return tl.where(address != 0, given.to(tl.float64), value)


@triton.jit(do_not_specialize=["clip_factor", "grad_scale", "num_tensors", "num_full"])
def momenta_kernel(
    chunks,
    table,
    clip_factor,
    grad_scale,
    num_tensors,
    num_full,
    TILE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    U_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Move the momentum of one chunk and write its U. A group's row: μ."""
    after_previous(OVERLAP)
    tensor, first, _ = read_chunk(chunks, tl.program_id(0))
    row = table + tensor * _MOMENTUM_ROW
    places = (tl.load(row + _GRAD), tl.load(row + _BUFFER), tl.load(row + _U))
    group = table + num_tensors * _MOMENTUM_ROW + tl.load(row + _GROUP_OF_GRAD) * _SCALAR_SIZE
    scalars = (group, clip_factor, grad_scale)
    if tl.program_id(0) < num_full:
        _move(places, first, True, scalars, TILE, G_DTYPE, B_DTYPE, U_DTYPE, NESTEROV, MAXIMIZE, False)
    else:
        mask = first + tl.arange(0, TILE) < tl.load(row + _NUMEL_OF_GRAD)
        _move(places, first, mask, scalars, TILE, G_DTYPE, B_DTYPE, U_DTYPE, NESTEROV, MAXIMIZE, True)


@triton.jit
def _move(
    places,
    first,
    mask,
    scalars,
    TILE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    B_DTYPE: tl.constexpr,
    U_DTYPE: tl.constexpr,
    NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    g_address, b_address, u_address = places
    group, clip_factor, grad_scale = scalars
    b_pointer = pointer_to(b_address, B_DTYPE, not MASKED) + first
    u_pointer = pointer_to(u_address, U_DTYPE, not MASKED) + first
    # request the elements before waiting for the scalars
    g = load_tile(pointer_to(g_address, G_DTYPE, not MASKED) + first, mask, TILE, MASKED, False, True)
    b = load_tile(b_pointer, mask, TILE, MASKED, False)
    momentum = _number(group)
    rest, momentum = (1.0 - momentum).to(tl.float32), momentum.to(tl.float32)
    factor = tl.load(clip_factor) * div_rn(1.0, tl.load(grad_scale))
    if MAXIMIZE:
        factor = -factor
    g = rest * (g.to(tl.float32) * factor)
    b = momentum * b.to(tl.float32) + g
    u = g + momentum * b if NESTEROV else b
    lanes = tl.arange(0, TILE)
    here = mask if MASKED else lanes >= 0
    tl.store(b_pointer + lanes, narrow(b, B_DTYPE), mask=here)
    tl.store(u_pointer + lanes, narrow(u, U_DTYPE), mask=here)


@triton.jit(do_not_specialize=["num_tensors", "num_full"])
def updates_kernel(
    chunks,
    table,
    counters,
    num_tensors,
    num_full,
    TILE: tl.constexpr,
    P_DTYPE: tl.constexpr,
    O_DTYPE: tl.constexpr,
    MASTER: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    COUNTED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Update one chunk. A group's row: lr, λ. With ``COUNTED`` steps are counted, and rounding is stochastic."""
    after_previous(OVERLAP)
    tensor, first, _ = read_chunk(chunks, tl.program_id(0))
    row = table + tensor * _UPDATE_ROW
    group = table + num_tensors * _UPDATE_ROW + tl.load(row + _GROUP) * (2 * _SCALAR_SIZE)
    if tl.program_id(0) < num_full:
        t = _update(row, group, first, True, TILE, P_DTYPE, O_DTYPE, MASTER, CAUTIOUS, COUNTED, False)
    else:
        mask = first + tl.arange(0, TILE) < tl.load(row + _NUMEL)
        t = _update(row, group, first, mask, TILE, P_DTYPE, O_DTYPE, MASTER, CAUTIOUS, COUNTED, True)
    if COUNTED:
        step = tl.load(row + _STEP).to(tl.pointer_type(tl.float32))
        counter = counters + tensor, tl.load(row + _NUM_CHUNKS).to(tl.int32) - 1
        # no step is skipped, and all counts are above zero
        keep = t > 0.0
        advance(step, t, arrive(counter, keep, t), counter, keep)


@triton.jit
def _moved(p, o, step_size, keep, decay, CAUTIOUS: tl.constexpr):
    """The formula: ``step_size`` is lr', ``keep`` 1 − lr λ, and ``decay`` lr' λ."""
    # not shared with `muon_parameter`, whose kernels would spill registers if these numbers came computed
    if CAUTIOUS:
        return p - step_size * o - tl.where(o * p >= 0.0, decay * p, 0.0)
    return p * keep - step_size * o


@triton.jit
def _update(
    row,
    group,
    first,
    mask,
    TILE: tl.constexpr,
    P_DTYPE: tl.constexpr,
    O_DTYPE: tl.constexpr,
    MASTER: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    COUNTED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update a tile; return the step's number if steps are counted, else 0: a program reads it once (``arrive``)."""
    p_address, master_address, o_address = tl.load(row + _PARAM), tl.load(row + _MASTER), tl.load(row + _UPDATE)
    # request the elements before waiting for the scalars
    o = load_tile(pointer_to(o_address, O_DTYPE, not MASKED) + first, mask, TILE, MASKED, False, True)
    p, low = load_parameter(p_address, master_address, first, mask, TILE, P_DTYPE, MASTER, MASKED, False)
    lr, weight_decay = _number(group), _number(group + _SCALAR_SIZE)
    step_size = lr * tl.load(row + _SCALE).to(tl.float64, bitcast=True)
    keep, decay = (1.0 - lr * weight_decay).to(tl.float32), (step_size * weight_decay).to(tl.float32)
    t, random = tl.zeros([], tl.float32), (0, 0, 0, 0)
    if COUNTED:
        t = tl.load(tl.load(row + _STEP).to(tl.pointer_type(tl.float32))) + 1.0
        random = (tl.load(row + _SEED), tl.load(row + _PLACE), tl.load(row + _START), t.to(tl.int64))
    p, o = full_parameter(p, low, P_DTYPE, MASTER), o.to(tl.float32)
    p = _moved(p, o, step_size.to(tl.float32), keep, decay, CAUTIOUS)
    here = mask if MASKED else tl.arange(0, TILE) >= 0
    store_parameter(p_address, master_address, first, here, p, random, P_DTYPE, MASTER, COUNTED, MASKED)
    return t
