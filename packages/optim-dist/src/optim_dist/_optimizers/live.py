"""The interface of an optimizer for modules that need not know how it steps, and a list of live optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.shards import Shard
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import Plan
from optim_redist import Layout

# in order of construction, so that every rank goes through them in the same order
_live: dict[int, weakref.ref[LiveOptimizer]] = {}


class LiveOptimizer(Optimizer):
    """An optimizer that shares out its parameters' gradients and state over ranks: what `DistOptimizer` implements."""

    plan: Plan
    entries: list[Entry]  # trained parameters in the order of the plan
    communicator: Communicator  # of the ranks that share the work
    _closed = False
    _failure = ""  # what has failed on this rank after all ranks had begun it together

    @property
    def layouts(self) -> dict[int, Layout]:
        """The layout of each DTensor of several ranks, keyed by its index in the plan."""
        raise NotImplementedError

    def check_listed(self) -> None:
        """Refuse groups that list other parameters than when they were planned."""
        raise NotImplementedError

    def shards(self) -> list[Shard]:
        """What this rank updates, in the order of the plan."""
        raise NotImplementedError

    def new_state(self, shard: Shard) -> dict[str, Any]:
        """A fresh state for a shard, as its first step would find it."""
        raise NotImplementedError

    def completed_state(self, shard: Shard) -> dict[str, Any]:
        """A shard's state with all keys that its options require; missing ones are made."""
        raise NotImplementedError

    def kept_state(self, shard: Shard) -> dict[str, Any]:
        """A shard's state as steps and loads have made it, without what a call of ``state_dict()`` has added."""
        raise NotImplementedError

    def put_state(self, shard: Shard, state: dict[str, Any]) -> None:
        """Replace a shard's state by one that steps have made elsewhere."""
        raise NotImplementedError

    def note_masters(self) -> None:
        """Masters have been loaded with their parameters: from now on they follow what others write to these."""
        raise NotImplementedError

    def encode_state(self, shard: Shard) -> None:
        """Turn a loaded state into 8-bit codes if the group has them."""
        raise NotImplementedError

    def group_fault(self, number: int, saved: dict[str, Any]) -> str:
        """Why our group ``number`` cannot take over a saved group; empty if it can."""
        raise NotImplementedError

    def measure_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the gradients as the update will see them: 0-dim, fp64, the same bits on every rank."""
        raise NotImplementedError

    def clip_with(self, factor: Tensor, norm: Tensor) -> None:
        """Let the next ``step()`` multiply gradients by ``factor``; ``norm`` is what ``grad_norm`` shows."""
        raise NotImplementedError

    def hand_over(self) -> None:
        """Give parameters up to another optimizer: finish what is in flight, ignore later gradients."""
        raise NotImplementedError

    def gather_parameters(self) -> None:
        """All-gather the parameters; the current stream waits for them."""
        raise NotImplementedError

    def trained_ids(self) -> set[int]:
        """``id`` of every parameter that is updated."""
        return {id(entry.parameter) for entry in self.entries}

    def check_open(self) -> None:
        """Refuse to go on after ``close()``, or after a failure that other ranks may not know of."""
        if self._closed:
            raise RuntimeError("this optimizer was closed; build a new one (its state can be taken before close())")
        if self._failure:
            raise RuntimeError(
                f"{self._failure} on this rank after all ranks had begun with it, so that they no longer agree on "
                "where they are; start all of them again from the newest checkpoint"
            )

    @contextmanager
    def begun_together(self, what: str) -> Iterator[None]:
        """On several ranks an error inside is final: other ranks may wait for this one, or have gone on."""
        self.check_open()
        try:
            yield
        except BaseException as error:
            if self.communicator.world_size > 1:
                self._failure = f"{what} failed ({type(error).__name__}: {error})"
            raise

    def _register(self) -> None:
        _live[id(self)] = weakref.ref(self)
        weakref.finalize(self, _live.pop, id(self), None)

    def _unregister(self) -> None:
        _live.pop(id(self), None)


def live_optimizers() -> list[LiveOptimizer]:
    """Every optimizer of this package that exists, in order of construction."""
    found = (reference() for reference in list(_live.values()))
    return [optimizer for optimizer in found if optimizer is not None]
