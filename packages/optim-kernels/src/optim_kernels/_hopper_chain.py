"""Newton–Schulz of a batch in one launch behind its norms: which batches take it, its tables and its buffers.

    squares → divisors → chain      fp16 matrices are read as they are; their first products bring them to norm 1
    squares → scale → chain         others are divided and rounded first

What the chain computes is said in `_chain_jobs`, how it runs in `_hopper_chain_kernel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from optim_kernels._block_launch import BlockLaunch
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


class ChainLaunch:
    """The launch of a chain, kept: again and again on buffers of the same shapes.

    Args:
        ending: of the last product; others than STORE need ``addresses`` at every launch.
        update: the compile-time arguments of an update.
    """

    def __init__(self, chain: Chain, *, ending: Ending = Ending.STORE, **update: Any) -> None:
        from optim_kernels import _hopper_chain_kernel as kernels
        from optim_kernels._hopper_ring import descriptor

        self._chain, self._num_squares = chain, chain.num_squares
        side, depth = PING_PONG.rows, PING_PONG.depth
        options = {"P_DTYPE": None, "MASTER_KIND": 0, "CAUTIOUS": False, **update}
        self._launch = BlockLaunch(
            kernels.chain_kernel,
            min(len(chain.entries), num_multiprocessors(chain.entries.device.index)),
            [(side, depth), *3 * [(side, depth)], *3 * [(depth, side)], (side, side), *3 * [(side, side)]],
            (
                depth,
                PING_PONG.num_stages,
                chain.in_panels,
                ending.value,
                options["P_DTYPE"],
                options["MASTER_KIND"],
                options["CAUTIOUS"],
            ),
            describe=descriptor,
            num_warps=4,
        )

    def __call__(
        self,
        xs: Xs,
        scales: Tensor,
        squared_scales: Tensor,
        state: Tensor,
        counter: int,
        addresses: Tensor | None = None,
    ) -> None:
        """Run the chain.

        Args:
            xs: where X is, then the two buffers that it moves to in turn; the first and the third may be one, and are
                in panels. The result is in the one that the last job names.
            scales, squared_scales: σ and σ² of each matrix.
            state: int32, zero: how many tiles of each matrix are done, and at ``counter`` the number of the next tile.
            addresses: what the ending needs, as `_hopper_chain_tiles` numbers it.
        """
        chain = self._chain
        assert not chain.in_panels or xs[0] is xs[2]
        squares = empty_matrices(self._num_squares, chain.m, chain.m, like=xs[0])
        tables = (chain.entries, chain.jobs, chain.places)
        others = chain.entries if addresses is None else addresses
        numbers = (counter, len(chain.entries))
        self._launch.launch(
            (squares, *xs, *xs, squares, *xs), (*tables, scales, squared_scales, state, others, *numbers)
        )


class BatchPlan:
    """Newton–Schulz of batches like ``g [batch, M, N]``, M ≤ N, in one launch behind the norms.

    Args:
        shape: ``[..., M, N]``, in which they come and the results go.
    """

    def __init__(self, g: Tensor, shape: torch.Size, config: NSConfig) -> None:
        self._shape, self._dtype = shape, g.dtype
        self._compute_dtype = config.compute_dtype(g)
        self._is_read = g.dtype == self._compute_dtype == torch.float16 and is_readable(g)
        self._norm: Any = {
            "norm_scale": config.norm_scale,
            "eps": config.eps,
            "add_eps": config.eps_mode == "add",
        }
        count, m, n = g.shape
        chain = _chain_of(config, count, m, n, g.device)
        self._launch, self._last = ChainLaunch(chain), chain.groups[0].jobs[-1].d
        # of matrices that are divided first
        self._ones = None if self._is_read else torch.ones(count, device=g.device)

    def __call__(self, x: Tensor) -> Tensor:
        """The result for ``x [..., M, N]``."""
        g = x.reshape(-1, *x.shape[-2:])
        count, m, n = g.shape
        like = g.new_empty(0, dtype=self._compute_dtype)
        state = g.new_empty(1 + count, dtype=torch.int32)
        other, third = (empty_matrices(count, m, n, like=like) for _ in range(2))
        if self._ones is None:
            first, inverses = g, divisors_of(g, **self._norm, state=state)
            scales, squared_scales = inverses[0], inverses[1]
        else:
            first, scales, squared_scales = third, self._ones, self._ones
            normalize_into(first, g, **self._norm, state=state)
        xs = (first, other, third)
        self._launch(xs, scales, squared_scales, state, count)
        return xs[self._last].reshape(self._shape).to(self._dtype).contiguous()


@lru_cache(maxsize=64)
def _chain_of(config: NSConfig, count: int, m: int, n: int, device: torch.device) -> Chain:
    """The chain of ``count`` matrices m×n.

    Raises:
        RuntimeError: it is not known yet while a CUDA graph is captured, which cannot hold the upload of its tables.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"Newton–Schulz of {count} matrices {m}×{n} has to run once before it can be captured")
    return Chain.of([Members(tuple(jobs_of(config, m, n)), 0, count, n)], m, device, in_panels=False)
