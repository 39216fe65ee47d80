"""Memory that Muon plans share, orthogonalizing one after another, instead of having memory of their own.

    a matrix m×n takes at most  x m n' + k m²  elements

x is the number of buffers of X, one if X stays in place and two if it moves; n' is n rounded up to the chain's panels;
k is the number of factors that live at a time: A and S, or R, Z, P, Q and new ones. All plans have X in one piece of
memory. Factors of a family or chain are allocated as it is launched; recorded launches share one pool for them, since
no plan keeps a factor from step to step.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from numbers import Real
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from optim_kernels._newton_schulz.chain_jobs import TILE_SIDE, jobs_of, num_squares
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.copy_engine import ALIGNMENT as ROW_ALIGNMENT
from optim_kernels._newton_schulz.tiles import cdiv

# Buffers begin at multiples of so many bytes, which the copy engine takes.
ALIGNMENT = 256
_MOST_MB = 2.0**40  # instead of infinity


class Memory(Protocol):
    """Allocates room for X."""

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...


class _Planner(Protocol):
    def forget(self) -> None: ...


class Workspace:
    """Memory shared by plans that run one after another, in one stream or in streams that wait for each other.

    Each device has one piece of memory for X. When a larger piece replaces it, the old piece stays as long as graphs of
    the caller's read it.

    Args:
        limit: bytes that all of a plan's matrices may take at a time; those of one parameter may take more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rooms: dict[torch.device, Tensor] = {}
        self._planners: WeakSet[_Planner] = WeakSet()
        self._graphs: dict[torch.device, WeakSet[torch.cuda.CUDAGraph]] = {}

    def add_planner(self, planner: _Planner) -> None:
        """Register a planner, which forgets its plans when X gets other memory, so that the old memory is freed."""
        self._planners.add(planner)

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Have at least ``nbytes`` of memory for X; if that is more than before, all planners forget their plans."""
        if device in self._rooms and len(self._rooms[device]) >= nbytes:
            return
        self._rooms.pop(device, None)
        for planner in self._planners:
            planner.forget()
        self._rooms[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def memory(self, device: torch.device) -> Memory:
        """All of the memory for X, for one plan; `reserve` comes first."""
        return _Carved(self._rooms[device])

    def pool(self, device: torch.device) -> Any:
        """The pool in which graphs of recorded launches allocate; ``None`` for a new one."""
        # from a live graph: torch refuses the handle of a pool whose graphs are all gone
        return next((graph.pool() for graph in self._graphs.get(device, ())), None)

    def add_graph(self, graph: torch.cuda.CUDAGraph, device: torch.device) -> None:
        """Let later graphs allocate in the pool of this one, as long as this one is there."""
        self._graphs.setdefault(device, WeakSet()).add(graph)


def workspace_for(ns_workspace_mb: float | None) -> Workspace | None:
    """A workspace of ``ns_workspace_mb`` times 2^20 bytes; ``None`` for ``None``.

    Raises:
        ValueError: for numbers that are not positive.
        TypeError: for anything that is not a number.
    """
    if ns_workspace_mb is None:
        return None
    if isinstance(ns_workspace_mb, bool) or not isinstance(ns_workspace_mb, Real):
        raise TypeError(f"ns_workspace_mb must be a number of 2^20 bytes, or None, got {ns_workspace_mb!r}")
    if not ns_workspace_mb > 0:
        raise ValueError(f"ns_workspace_mb must be positive, or None for no limit, got {ns_workspace_mb}")
    return Workspace(max(1, round(min(ns_workspace_mb, _MOST_MB) * 2**20)))


def nbytes_of_x(m: int, n: int, dtype: torch.dtype, *, moves: bool) -> int:
    """The most bytes that X takes, of a matrix with short side m and long side n."""
    return (1 + moves) * dtype.itemsize * m * cdiv(n, TILE_SIDE) * TILE_SIDE


def nbytes_of_diagonal(m: int) -> int:
    """The most bytes that a chain of matrices with m rows takes for each diagonal that is kept apart."""
    return torch.float32.itemsize * cdiv(m, TILE_SIDE) * TILE_SIDE


@lru_cache(maxsize=1024)
def nbytes_of_factors(m: int, n: int, ns: NSConfig, dtype: torch.dtype) -> int:
    """The most bytes that all factors of such a matrix take, but for diagonals that are kept apart."""
    squares = max(num_squares(jobs_of(ns, m, n, in_factors=True)), num_squares(jobs_of(ns, m, n, in_pairs=True)))
    row = cdiv(m * dtype.itemsize, ROW_ALIGNMENT) * ROW_ALIGNMENT
    if ns.row_factors:
        # a number in fp32 for each row
        return squares * m * row + m * torch.float32.itemsize
    if not ns.may_start_in_int8(m, n):
        return squares * m * row
    # where there is Triton: optimizers import this module without it, too
    from optim_kernels._newton_schulz.int8_start import nbytes_of_first_step

    # and for the first step blocks of a single matrix, which a pool keeps, for factors of several do not fit into them
    return squares * m * row + nbytes_of_first_step(m, n)


class _Carved:
    """Allocates pieces of a room, one behind the other."""

    def __init__(self, room: Tensor) -> None:
        self._rest = room

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = prod(shape) * dtype.itemsize
        piece, self._rest = self._rest[:size], self._rest[cdiv(size, ALIGNMENT) * ALIGNMENT :]
        return piece.view(dtype).view(shape)
