"""The whole state on one rank, for loops and frameworks that save the ``state_dict()`` of that rank alone.

As with torch's ``ZeroRedundancyOptimizer`` all ranks call ``consolidate_state_dict``; then ``state_dict()`` of one rank
returns the whole state without asking the others. Unlike torch's, that state is never one of an earlier step, and it is
marked as whole, so that ``load_state_dict`` takes it over at any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from optim_dist._optimizers.agreement import compare_options
from optim_dist._optimizers.live import LiveOptimizer
from optim_dist._optimizers.whole_state import full_state_dict

IS_WHOLE = "is_whole"  # an entry of state dicts, which torch's optimizers ignore


@dataclass
class Consolidated:
    """What ``consolidate_state_dict`` has gathered: ``state`` on the rank ``to``, None on the others."""

    to: int
    state: dict[int, dict[str, Tensor]] | None
    outdated_by: str = ""

    def outdate(self, how: str) -> None:
        """Drop the gathered state: the call ``how`` has changed the optimizer's state since."""
        self.state, self.outdated_by = None, self.outdated_by or how

    def current(self) -> dict[int, dict[str, Tensor]] | None:
        """The whole state on the rank that has it.

        Raises:
            RuntimeError: if the state has changed since; on every rank, so that none saves its part as the whole.
        """
        if self.outdated_by:
            raise RuntimeError(
                f"{self.outdated_by} came after consolidate_state_dict(to={self.to}), whose state is an earlier one; "
                "call it again on all ranks before state_dict(), or with to=None to have each rank's own part again"
            )
        return None if self.state is None else {number: dict(state) for number, state in sorted(self.state.items())}


def consolidate(optimizer: LiveOptimizer, to: int | None) -> Consolidated | None:
    """Gather the state of all ranks on rank ``to`` of the process group, or nowhere if that is None. Collective."""
    communicator = optimizer.communicator
    optimizer.check_open()
    communicator.check_ranks()
    compare_options({"to of consolidate_state_dict": repr(to)}, communicator)
    if to is None:
        return None
    if not isinstance(to, int) or not 0 <= to < communicator.world_size:
        raise ValueError(f"to must be one of the optimizer's ranks 0-{communicator.world_size - 1}, got {to!r}")
    full = full_state_dict(optimizer, "consolidate_state_dict()", communicator.chunk_of(to))
    return Consolidated(to, full.get("state"))
