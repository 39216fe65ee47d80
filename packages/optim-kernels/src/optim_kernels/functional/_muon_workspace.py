"""Memory in which Muon plans orthogonalize one after another, in place of memory of their own.

    of a matrix m×n at most     2 m n' + k m²  elements

for X in two buffers, with n rounded up to the chain's panels, and the k factors that live at a time: A and S, or R, Z,
P, Q and new ones. All plans have X in one piece of memory. Factors are made by launches, and in recorded ones out of a
pool that the graphs share, for no plan keeps any from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from numbers import Real
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from optim_kernels._newton_schulz.chain_jobs import BLOCK, jobs_of, num_squares
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels._newton_schulz.tiles import cdiv

# Where a buffer begins: addresses that the copy engine takes.
ALIGNMENT = 256
# Factors that live at a time where each product is a launch (`iterations`).
STANDARD_SQUARES, GRAM_SQUARES = 3, 5
_MOST_MB = 2.0**40  # instead of infinity

Laid = TypeVar("Laid")


class Memory(Protocol):
    """Gives room for X."""

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...


class Workspace:
    """What the plans of an optimizer share, which run one after another, in one stream or in streams that wait.

    Args:
        limit: bytes that all of a plan's matrices may take at a time; those of one parameter may take more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._rooms: dict[torch.device, Tensor] = {}
        self._pools: dict[torch.device, Any] = {}

    def lay_out(self, lay_out: Callable[[Memory], Laid], device: torch.device) -> Laid:
        """What ``lay_out`` makes in this memory; it is called twice, first to see how much it takes."""
        measured = _Measured()
        lay_out(measured)
        room = self._rooms.get(device)
        if room is None or len(room) < measured.nbytes:
            # plans that have the smaller one keep it
            room = self._rooms[device] = torch.empty(measured.nbytes, dtype=torch.uint8, device=device)
        return lay_out(_Carved(room))

    def pool(self, device: torch.device) -> Any:
        """Where graphs of recorded launches allocate."""
        if device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
        return self._pools[device]


def workspace_for(ns_workspace_mb: float | None) -> Workspace | None:
    """One of so many 2^20 bytes, if any.

    Raises:
        ValueError: for numbers that are not positive.
        TypeError: for what is no number.
    """
    if ns_workspace_mb is None:
        return None
    if isinstance(ns_workspace_mb, bool) or not isinstance(ns_workspace_mb, Real):
        raise TypeError(f"ns_workspace_mb must be a number of 2^20 bytes, or None, got {ns_workspace_mb!r}")
    if not ns_workspace_mb > 0:
        raise ValueError(f"ns_workspace_mb must be positive, or None for no limit, got {ns_workspace_mb}")
    return Workspace(max(1, round(min(ns_workspace_mb, _MOST_MB) * 2**20)))


def nbytes_of(m: int, n: int, ns: NSConfig, dtype: torch.dtype) -> int:
    """The most that a matrix with short side m and long side n takes, X in ``dtype``."""
    squares = GRAM_SQUARES if ns.method_for(m, n) == "gram" else STANDARD_SQUARES
    in_chain = num_squares(jobs_of(ns, m, n, in_factors=True)) if ns.steps else 0
    xs = 3 if ns.row_factors else 2
    return dtype.itemsize * (xs * m * cdiv(n, BLOCK) * BLOCK + max(squares, in_chain) * m * m)


def _nbytes_between(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a buffer, up to where the next may begin."""
    return cdiv(prod(shape) * dtype.itemsize, ALIGNMENT) * ALIGNMENT


class _Measured:
    """Counts what is asked for, and gives what has the shape, and no memory."""

    def __init__(self) -> None:
        self.nbytes = 0

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.nbytes += _nbytes_between(shape, dtype)
        return torch.empty((), dtype=dtype, device=device).expand(shape)


class _Carved:
    """Gives one piece of the room after the other."""

    def __init__(self, room: Tensor) -> None:
        self._rest = room

    def __call__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        size = prod(shape) * dtype.itemsize
        piece, self._rest = self._rest[:size], self._rest[_nbytes_between(shape, dtype) :]
        return piece.view(dtype).view(shape)
