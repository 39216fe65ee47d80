"""Newton–Schulz of a batch in one launch after its norms: which batches take it, its tables and its buffers.

    squares → divisors → chain      fp16 matrices are read as they are; their first products bring them to norm 1
    squares → scale → chain         others are divided and rounded first

`chain_jobs` says what the chain computes, `_hopper.chain_kernel` how it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from optim_kernels._graphs import is_capturing, keep_for_graphs
from optim_kernels._kernels.normalize import Start
from optim_kernels._newton_schulz.block_launch import BlockLaunch
from optim_kernels._newton_schulz.buffers import Xs
from optim_kernels._newton_schulz.chain_jobs import (
    TILE_SIDE,
    Ending,
    Kind,
    MatrixGroup,
    job_table,
    jobs_of,
    num_squares,
    places,
)
from optim_kernels._newton_schulz.chain_list import tile_list
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.copy_engine import empty_matrices, is_readable
from optim_kernels._newton_schulz.tile_choice import has_gluon, may_launch_factors, num_multiprocessors
from optim_kernels._newton_schulz.tiles import PING_PONG, cdiv
from optim_kernels._triton import Cluster, has_short_launch

# Tiles per multiprocessor, of a symmetric product over all matrices, from which a chain is faster than a launch per
# product. With fewer, smaller tiles are faster, or for short sides beyond SMALL_SIDE lone tiles.
LEAST_ROUNDS, SMALL_SIDE, LARGE_ROUNDS = 1.0, 1536, 1.3
# Matrices with longer short sides fill the chip one by one; they take a chain only to restart in factors, if they are
# long.
LARGEST_SIDE = 2304


@dataclass(frozen=True)
class Chain:
    """The jobs and tiles of matrices that share their short side m, on the device; see `chain_jobs`.

    Args:
        in_panels: whether X is ``[panels, m, TILE_SIDE]`` instead of ``[matrices, m, n]``.
    """

    groups: tuple[MatrixGroup, ...]
    m: int
    in_panels: bool
    entries: Tensor
    jobs: Tensor
    places: Tensor

    @classmethod
    def of(cls, groups: Sequence[MatrixGroup], m: int, device: torch.device, *, in_panels: bool) -> Chain:
        num_matrices = max(group.first + group.count for group in groups)
        tables = (tile_list(groups, m), job_table(groups, m), places(groups, num_matrices))
        return cls(tuple(groups), m, in_panels, *(table.to(device) for table in tables))

    @property
    def num_matrices(self) -> int:
        """One more than the last matrix's number."""
        return len(self.places)

    @property
    def has_diagonals(self) -> bool:
        """Whether a job keeps a diagonal apart."""
        return any(job.apart for group in self.groups for job in group.jobs)

    @property
    def num_squares(self) -> int:
        """Square buffers of all matrices."""
        return sum(group.count * num_squares(group.jobs) for group in self.groups)


def takes_chain(count: int, m: int, n: int, config: NSConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``count`` matrices m×n are orthogonalized in one launch."""
    if not _can_chain(config, dtype, device) or (m > LARGEST_SIDE and not config.restarts_in_factors(m, n)):
        return False
    blocks = cdiv(m, TILE_SIDE)
    rounds = count * blocks * (blocks + 1) / 2 / num_multiprocessors(device.index)
    return rounds >= (LEAST_ROUNDS if m <= SMALL_SIDE else LARGE_ROUNDS)


def takes_step_chain(
    shapes: Sequence[tuple[int, int]],
    m: int,
    config: NSConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    may_launch: bool,
) -> bool:
    """Whether a Muon step takes a chain for its matrices of short side m, given as ``(n, count)``.

    ``may_launch``: few matrices that restart in factors may take a launch for each product.
    """
    if m > LARGEST_SIDE or not _can_chain(config, dtype, device):
        return False
    if takes_chain(sum(count for _, count in shapes), m, m, config, dtype, device):
        return True
    num_long = sum(count for n, count in shapes if steps_in_factors(m, n, config, dtype, device))
    return num_long > 0 and not (may_launch and may_launch_factors(num_long, m, device))


def steps_in_factors(m: int, n: int, config: NSConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a step restarts matrices m×n in factors, in a chain or launch by launch, however few they are.

    That rounds differently from a restart that forms XXᵀ, and results must not depend on which other matrices the step
    has, nor on how many ranks share them.
    """
    return m <= LARGEST_SIDE and _can_chain(config, dtype, device) and config.restarts_in_factors(m, n)


def _can_chain(config: NSConfig, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda" or dtype.itemsize != 2 or not has_gluon(device.index):
        return False
    if not has_short_launch(triton.__version__):
        return False
    return config.steps > 0 and not config.row_factors


class ChainLaunch:
    """The kept launch of a chain, for buffers of the same shapes.

    Args:
        ending: what follows the last product; others than STORE need ``addresses`` at every launch.
        spare_multiprocessors: how many stay free beside the chain, which takes two at least.
        update: the compile-time arguments of an update.
    """

    def __init__(
        self, chain: Chain, *, ending: Ending = Ending.STORE, spare_multiprocessors: int = 0, **update: object
    ) -> None:
        from optim_kernels._hopper import chain_kernel as kernels
        from optim_kernels._hopper.pairs import PAIR_BYTES
        from optim_kernels._hopper.ring import descriptor

        self._chain, self._num_squares, self._has_diagonals = chain, chain.num_squares, chain.has_diagonals
        side, depth = PING_PONG.rows, PING_PONG.depth
        options = {"P_DTYPE": None, "MASTER_KIND": 0, "CAUTIOUS": False, **update}
        taken = max(2, num_multiprocessors(chain.entries.device.index) - spare_multiprocessors)
        self._launch = BlockLaunch(
            kernels.chain_kernel,
            min(len(chain.entries), taken) // 2,
            [
                (side, depth),
                (depth, side),
                *3 * [(side, depth)],
                *3 * [(depth, side)],
                (side, side),
                *3 * [(side, side)],
            ],
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
            cluster=Cluster(2, PAIR_BYTES),
            launch_pdl=True,
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
            xs: X's buffer, then the two buffers that X moves to in turn; the first and the third may be one, and in
                panels are. The result is in the buffer that the last job names.
            scales, squared_scales: σ and σ² of each matrix.
            state: int32, zero: how many tiles of each matrix are done, and at ``counter`` the number of the next pair.
            addresses: what the ending needs, as `_hopper.chain_tiles` numbers it.
        """
        chain = self._chain
        assert not chain.in_panels or xs[0] is xs[2]
        squares = empty_matrices(self._num_squares, chain.m, chain.m, like=xs[0])
        tables = (chain.entries, chain.jobs, chain.places)
        others = chain.entries if addresses is None else addresses
        # fp32 numbers, one for each row of a matrix's tiles
        side = cdiv(chain.m, TILE_SIDE) * TILE_SIDE
        diagonals = scales.new_empty(chain.num_matrices, side) if self._has_diagonals else scales
        numbers = (side, counter, len(chain.entries))
        tensors = (*tables, scales, squared_scales, diagonals, state, others)
        self._launch.launch((squares, squares, *xs, *xs, squares, *xs), (*tensors, *numbers))


class ChainPlan:
    """Newton–Schulz of batches like ``g [batch, M, N]``, M ≤ N, in one launch after the norms.

    Args:
        shape: ``[..., M, N]``, of the caller's matrices and of the results.
    """

    def __init__(self, g: Tensor, shape: torch.Size, config: NSConfig) -> None:
        self._shape, self._dtype = shape, g.dtype
        self._compute_dtype = config.compute_dtype(g)
        is_read = g.dtype == self._compute_dtype == torch.float16 and is_readable(g)
        count, m, n = g.shape
        chain, ones = _chain_of(config, count, m, n, g.device)
        (group,) = chain.groups
        self._launch, self._last = ChainLaunch(chain), group.jobs[-1].d
        # X's third buffer; where X is divided first, it is also the first one
        self._has_third = not is_read or any(job.kind is Kind.RECTANGLE and job.d == 2 for job in group.jobs)
        x = None if is_read else empty_matrices(count, m, n, like=g.new_empty(0, dtype=self._compute_dtype))
        self._start = Start(g, x, config, has_state=True)
        # the scales of matrices that are divided first
        self._ones = None if is_read else ones
        # graphs that read them keep them, as they may outlive the plan
        self._tables = [chain.entries, chain.jobs, chain.places, ones]

    def __call__(self, x: Tensor) -> Tensor:
        """The result for ``x [..., M, N]``."""
        if is_capturing(x.device):
            keep_for_graphs(*self._tables)
        g = x.reshape(-1, *x.shape[-2:])
        count, m, n = g.shape
        like = g.new_empty(0, dtype=self._compute_dtype)
        state = g.new_empty(1 + count, dtype=torch.int32)
        other = empty_matrices(count, m, n, like=like)
        third = empty_matrices(count, m, n, like=like) if self._has_third else other
        if self._ones is None:
            first, inverses = g, self._start(g, state=state)
            assert inverses is not None
            scales, squared_scales = inverses[0], inverses[1]
        else:
            first, scales, squared_scales = third, self._ones, self._ones
            self._start(g, third, state=state)
        xs = (first, other, third)
        self._launch(xs, scales, squared_scales, state, count)
        return xs[self._last].reshape(self._shape).to(self._dtype).contiguous()


@lru_cache(maxsize=64)
def _chain_of(config: NSConfig, count: int, m: int, n: int, device: torch.device) -> tuple[Chain, Tensor]:
    """The chain of ``count`` matrices m×n, and a scale of 1 for each; on the device when this returns, for any stream.

    Raises:
        RuntimeError: a CUDA graph is being captured and the chain is new: a graph cannot hold the upload of its tables.
    """
    if is_capturing(device):
        raise RuntimeError(f"Newton–Schulz of {count} matrices {m}×{n} has to run once before it can be captured")
    group = MatrixGroup(tuple(jobs_of(config, m, n, in_factors=True)), 0, count, n)
    # copied, not filled by a kernel, which other streams and replays of a graph would not wait for
    ones = torch.ones(count, dtype=torch.float32, device="cpu").to(device)
    return Chain.of([group], m, device, in_panels=False), ones
