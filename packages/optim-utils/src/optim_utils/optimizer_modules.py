"""Objects whose attributes are their state, and that survive a checkpoint.

A preconditioner, a quantized tensor, a running average: each is an object with some tensors, some numbers and some
nested containers. `OptimizerModule` turns it into a nested dict of the kinds of values that checkpoints can hold, and
fills a live object from such a dict in place.

    state_dict:       attribute      ->  tensor (sharing memory) | dict | plain value
    load_state_dict:  live object    <-  whatever of the dict fits, tensor by tensor, in place

What fits is decided for the whole object before anything is written; the decision comes back as a `LoadReport`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from optim_utils._state.load_plan import LoadPlan
from optim_utils._state.load_report import LoadIssue, LoadReport, StateLoadError, in_words
from optim_utils._state.own_load import hand_over
from optim_utils._state.walk import SEQUENCES, Stateful, is_never_stored, refuse_cycles
from optim_utils.low_bit import LowBitTensor, to_plain

__all__ = ["LoadIssue", "LoadReport", "OptimizerModule", "StateLoadError"]

logger = logging.getLogger(__name__)


class OptimizerModule(Stateful):
    """An object whose attributes, recursively, are its state.

    Stored are tensors, other `OptimizerModule` objects, dicts and sequences of them, and plain values. Left out are
    things that belong to the process: callables, modules, optimizers, generators, process groups, meshes and
    `BlockInfo`, and attributes named in the class attribute ``non_state_attributes``.
    """

    def state_dict(
        self, destination: dict[Any, Any] | None = None, keep_vars: bool = False, store_non_tensors: bool = True
    ) -> dict[Any, Any]:
        """The state as a nested dict; sequences become dicts keyed by position.

        Args:
            destination: a dict to fill and return; what it holds stays.
            keep_vars: store the tensors themselves, instead of detached ones that share their memory.
            store_non_tensors: store plain values too, by reference.

        Raises:
            ValueError: for an object that contains itself, as by a reference from a child to its parent.
        """
        state = {} if destination is None else destination
        try:
            for name, value in self.state_attributes():
                stored = store(value, keep_vars, store_non_tensors)
                if stored is not _LEFT_OUT:
                    state[name] = stored
        except RecursionError:
            refuse_cycles(self)
            raise
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[Any, Any],
        store_non_tensors: bool = True,
        *,
        strict: bool = False,
        cast: bool = True,
        assign: bool = False,
    ) -> LoadReport:
        """Fill this object from ``state_dict``; say what was done.

        Tensors are filled in place: they keep identity, memory, dtype, device and sharding. Sequences are replaced by
        new ones of their type, plain values by deep copies of exactly their type; an int or a float also takes a 0-dim
        tensor that holds it exactly. Containers that hold only plain values take over contents and length.

        Args:
            state_dict: as `state_dict` made it; positions may have become strings, or sequences again.
            store_non_tensors: load plain values too, instead of keeping the present ones.
            strict: refuse missing, unexpected and mismatched entries, instead of skipping each with a warning.
            cast: convert floating-point tensors to the present dtype, instead of refusing another one.
            assign: where there is no memory to fill (None, a meta tensor, no such attribute, behind the last item of a
                list, tuple or deque), let the loaded tensor itself take the place.

        A nested object of a subclass with a ``load_state_dict`` of its own is loaded by that, after all others, with
        those of the options that it has parameters for. It is tried on a copy first, as a part of the check.

        Raises:
            StateLoadError: with all problems in its ``report``, and nothing written; for tensors of another shape or
                without memory (meta) always, for every other problem if ``strict``.
        """
        plan = LoadPlan(store_non_tensors=store_non_tensors, cast=cast, assign=assign)
        plan.add_object(self, state_dict, ())
        report = plan.run(strict=strict)
        if not hand_over(report):
            for issue in report.problems:
                logger.warning(f"{type(self).__name__}: {in_words(issue)}")
        return report

    def own_load_state_dict(self) -> Callable[..., object] | None:
        """The method of a subclass that loads in its own way: it is called, where others are planned."""
        return None if type(self).load_state_dict is OptimizerModule.load_state_dict else self.load_state_dict


_LEFT_OUT = object()


def store(value: Any, keep_vars: bool = False, store_non_tensors: bool = True) -> Any:
    """What stands for ``value`` in a state; a private object if that is nothing."""
    if isinstance(value, LowBitTensor):
        return to_plain(value)
    if isinstance(value, Tensor):
        return value if keep_vars else value.detach()
    if isinstance(value, OptimizerModule):
        if store_non_tensors and not keep_vars:
            # a method of the class's own need not know options that are not used
            return value.state_dict()
        return value.state_dict(keep_vars=keep_vars, store_non_tensors=store_non_tensors)
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, SEQUENCES):
        items = enumerate(value)
    else:
        return value if store_non_tensors and not is_never_stored(value) else _LEFT_OUT
    stored = ((key, store(item, keep_vars, store_non_tensors)) for key, item in items)
    return {key: item for key, item in stored if item is not _LEFT_OUT}
