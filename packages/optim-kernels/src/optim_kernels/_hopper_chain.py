"""Newton–Schulz of a batch in one launch behind its norms: which batches take it, its tables and its buffers.

    squares → divisors → chain      fp16 matrices are read as they are; their first products bring them to norm 1
    squares → scale → chain         others are divided and rounded first

What the chain computes is said in `_chain_jobs`, how it runs in `_hopper_chain_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from optim_kernels._chain_jobs import BLOCK, Ending, Members, job_table, jobs_of, num_squares, places, tile_list
from optim_kernels._normalize_kernels import divisors_of, normalize_into
from optim_kernels._ns_config import NSConfig
from optim_kernels._product_launches import empty_matrices, has_gluon, is_readable, num_multiprocessors
from optim_kernels._tiles import PING_PONG, cdiv

# Tiles of a symmetric product over all matrices, for each multiprocessor, from which one launch is faster than many:
# with fewer, smaller tiles are.
LEAST_ROUNDS = 1.0
# Matrices with longer short sides fill the chip one by one, and larger tiles are faster for them.
LARGEST_SIDE = 1536

Xs = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Chain:
    """The jobs and tiles of matrices that share their short side m, on the device; see `_chain_jobs`.

    Args:
        in_panels: whether X is ``[panels, m, BLOCK]`` instead of ``[matrices, m, n]``.
    """

    groups: tuple[Members, ...]
    m: int
    in_panels: bool
    entries: Tensor
    jobs: Tensor
    places: Tensor

    @classmethod
    def of(cls, groups: Sequence[Members], m: int, device: torch.device, *, in_panels: bool) -> Chain:
        num_matrices = max(group.first + group.count for group in groups)
        tables = (tile_list(groups, m), job_table(groups, m), places(groups, num_matrices))
        return cls(tuple(groups), m, in_panels, *(table.to(device) for table in tables))

    @property
    def num_squares(self) -> int:
        """Square buffers of all matrices."""
        return sum(group.count * num_squares(group.jobs) for group in self.groups)


def takes_chain(count: int, m: int, n: int, config: NSConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``count`` matrices of short side m are orthogonalised in one launch."""
    if device.type != "cuda" or dtype.itemsize != 2 or not has_gluon(device.index):
        return False
    if config.row_factors or config.steps == 0 or m > LARGEST_SIDE:
        return False
    blocks = cdiv(m, BLOCK)
    return count * blocks * (blocks + 1) // 2 >= LEAST_ROUNDS * num_multiprocessors(device.index)


def run_chain(
    chain: Chain,
    xs: Xs,
    scales: Tensor,
    squared_scales: Tensor,
    state: Tensor,
    counter: int,
    *,
    ending: Ending = Ending.STORE,
    addresses: Tensor | None = None,
    **update: Any,
) -> None:
    """Run the chain.

    Args:
        xs: where X is, then the two buffers that it moves to in turn; the first and the third may be one, and are in
            panels. The result is in the one that the last job names.
        scales, squared_scales: σ and σ² of each matrix.
        state: int32, zero: how many tiles of each matrix are done, and at ``counter`` the number of the next tile.
        ending: of the last product; with ``addresses`` as `_hopper_chain_tiles` numbers them, and the compile-time
            arguments of an update.
    """
    from optim_kernels import _hopper_chain_kernel as kernels
    from optim_kernels._hopper_ring import descriptor

    side, depth, m = PING_PONG.rows, PING_PONG.depth, chain.m
    assert not chain.in_panels or xs[0] is xs[2]
    squares = empty_matrices(chain.num_squares, m, m, like=xs[0])
    kernels.chain_kernel[(min(len(chain.entries), num_multiprocessors(xs[0].device.index)),)](
        descriptor(squares, side, depth),
        *(descriptor(x, side, depth) for x in xs),
        *(descriptor(x, depth, side) for x in xs),
        descriptor(squares, side, side),
        *(descriptor(x, side, side) for x in xs),
        chain.entries,
        chain.jobs,
        chain.places,
        scales,
        squared_scales,
        state,
        chain.entries if addresses is None else addresses,
        counter,
        len(chain.entries),
        DEPTH=depth,
        STAGES=PING_PONG.num_stages,
        PANELS=chain.in_panels,
        ENDING=ending.value,
        **{"P_DTYPE": None, "MASTER_KIND": 0, "CAUTIOUS": False, **update},
        num_warps=4,
    )


def orthogonalize_batch(x: Tensor, config: NSConfig) -> Tensor:
    """The result ``[batch, M, N]`` for ``x [..., M, N]``, M ≤ N, in the compute dtype."""
    g = x.reshape(prod(x.shape[:-2]), *x.shape[-2:])
    count, m, n = g.shape
    chain = _chain_of(config, count, m, n, x.device)
    dtype = config.compute_dtype(x)
    like = x.new_empty(0, dtype=dtype)
    state = torch.empty(1 + count, dtype=torch.int32, device=x.device)
    other, third = (empty_matrices(count, m, n, like=like) for _ in range(2))
    scale, eps, add_eps = config.norm_scale, config.eps, config.eps_mode == "add"
    if dtype == x.dtype == torch.float16 and is_readable(g):
        first = g
        scales = divisors_of(g, norm_scale=scale, eps=eps, add_eps=add_eps, state=state)
    else:
        first = third
        normalize_into(first, g, norm_scale=scale, eps=eps, add_eps=add_eps, state=state)
        scales = torch.ones(2, count, device=x.device)
    xs = (first, other, third)
    run_chain(chain, xs, scales[0], scales[1], state, count)
    return xs[chain.groups[0].jobs[-1].d]


@lru_cache(maxsize=64)
def _chain_of(config: NSConfig, count: int, m: int, n: int, device: torch.device) -> Chain:
    """The chain of ``count`` matrices m×n.

    Raises:
        RuntimeError: it is not known yet while a CUDA graph is captured, which cannot hold the upload of its tables.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"Newton–Schulz of {count} matrices {m}×{n} has to run once before it can be captured")
    return Chain.of([Members(tuple(jobs_of(config, m, n)), 0, count, n)], m, device, in_panels=False)
