"""Newton–Schulz of a batch in one launch behind its norms: which batches take it, its tables and its buffers.

    squares → divisors → chain      fp16 matrices are read as they are; their first products bring them to norm 1
    squares → scale → chain         others are divided and rounded first

What the chain computes is said in `_chain_jobs`, how it runs in `_hopper_chain_kernel`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from optim_kernels._chain_jobs import BLOCK, Job, job_table, jobs_of, num_squares, tile_list
from optim_kernels._normalize_kernels import divisors_of, normalize_into
from optim_kernels._tiles import PING_PONG, cdiv
from optim_kernels.muon_kernels import ALIGNMENT, empty_matrices, has_gluon, num_multiprocessors
from optim_kernels.orthogonalization import NSConfig

# Tiles of a symmetric product over all matrices, for each multiprocessor, from which one launch is faster than many:
# with fewer, smaller tiles are.
LEAST_ROUNDS = 1.0
# Matrices with longer short sides fill the chip one by one, and larger tiles are faster for them.
LARGEST_SIDE = 1536


@dataclass(frozen=True)
class Chain:
    """The jobs and tiles of a batch, on the device.

    Args:
        jobs: all of the iteration, also where the last one is left out of the other two.
        entries: int32 [tiles, ENTRY_FIELDS], see `_chain_jobs.tile_list`.
        table: fp32 [jobs, JOB_FIELDS], see `_chain_jobs.job_table`.
    """

    jobs: tuple[Job, ...]
    entries: Tensor
    table: Tensor


@lru_cache(maxsize=64)
def chain_of(config: NSConfig, count: int, m: int, n: int, device: torch.device, *, leave_last: bool = False) -> Chain:
    """The chain of ``count`` matrices m×n; ``leave_last``: without its last product.

    Raises:
        RuntimeError: it is not known yet while a CUDA graph is captured, which cannot hold the upload of its tables.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"Newton–Schulz of {count} matrices {m}×{n} has to run once before it can be captured")
    jobs = jobs_of(config, m, n)
    run = jobs[:-1] if leave_last else jobs
    entries = torch.tensor(tile_list(run, count, m, n, num_multiprocessors(device.index)), dtype=torch.int32)
    table = torch.tensor(job_table(run, count), dtype=torch.float32)
    return Chain(tuple(jobs), entries.to(device), table.to(device))


def takes_chain(count: int, m: int, n: int, config: NSConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``count`` matrices m×n are orthogonalised in one launch."""
    if device.type != "cuda" or dtype.itemsize != 2 or not has_gluon(device.index):
        return False
    if config.row_factors or config.steps == 0 or m > LARGEST_SIDE:
        return False
    blocks = cdiv(m, BLOCK)
    return count * blocks * (blocks + 1) // 2 >= LEAST_ROUNDS * num_multiprocessors(device.index)


def run_chain(
    chain: Chain,
    xs: tuple[Tensor, Tensor, Tensor],
    scales: Tensor,
    squared_scales: Tensor,
    state: Tensor,
) -> Tensor:
    """Run the chain on ``xs[0] [count, m, n]``; returns the square buffers ``[squares, count, m, m]``.

    Args:
        xs: where X is, then the two buffers that it moves to in turn; the first and the third may be one. The result
            is in the one that the last job names.
        scales, squared_scales: σ and σ² of each matrix.
        state: int32 [1 + count], zero: the number of the next tile, and how many of each matrix are done.
    """
    from optim_kernels import _hopper_chain_kernel as kernels
    from optim_kernels._hopper_kernels import descriptor

    count, m, n = xs[0].shape
    side, depth = PING_PONG.rows, PING_PONG.depth
    squares = empty_matrices(num_squares(chain.jobs) * count, m, m, like=xs[0])
    kernels.chain_kernel[(min(len(chain.entries), num_multiprocessors(xs[0].device.index)),)](
        descriptor(squares, side, depth),
        *(descriptor(x, side, depth) for x in xs),
        *(descriptor(x, depth, side) for x in xs),
        descriptor(squares, side, side),
        *(descriptor(x, side, side) for x in xs),
        chain.entries,
        chain.table,
        scales,
        squared_scales,
        state,
        len(chain.entries),
        m,
        n,
        DEPTH=depth,
        STAGES=PING_PONG.num_stages,
        num_warps=4,
    )
    return squares.unflatten(0, (-1, count))


def orthogonalize_batch(x: Tensor, config: NSConfig) -> Tensor:
    """The result ``[batch, M, N]`` for ``x [..., M, N]``, M ≤ N, in the compute dtype."""
    g = x.reshape(prod(x.shape[:-2]), *x.shape[-2:])
    count, m, n = g.shape
    chain = chain_of(config, count, m, n, x.device)
    dtype = config.compute_dtype(x)
    like = x.new_empty(0, dtype=dtype)
    state = torch.empty(1 + count, dtype=torch.int32, device=x.device)
    other, third = (empty_matrices(count, m, n, like=like) for _ in range(2))
    scale, eps, add_eps = config.norm_scale, config.eps, config.eps_mode == "add"
    if dtype == x.dtype == torch.float16 and _is_readable(g):
        first = g
        scales = divisors_of(g, norm_scale=scale, eps=eps, add_eps=add_eps, state=state)
    else:
        first = third
        normalize_into(first, g, norm_scale=scale, eps=eps, add_eps=add_eps, state=state)
        scales = torch.ones(2, count, device=x.device)
    xs = (first, other, third)
    run_chain(chain, xs, scales[0], scales[1], state)
    return xs[chain.jobs[-1].d]


def _is_readable(g: Tensor) -> bool:
    """Whether the copy engine can read the matrices where they are."""
    step = ALIGNMENT // g.element_size()
    strides = all(g.stride(dim) % step == 0 and g.stride(dim) > 0 for dim in (0, 1))
    return g.stride(2) == 1 and strides and g.data_ptr() % ALIGNMENT == 0
