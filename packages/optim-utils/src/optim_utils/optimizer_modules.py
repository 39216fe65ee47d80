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
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

from optim_utils._state.load_plan import LoadPlan
from optim_utils._state.load_report import LoadIssue, LoadReport, StateLoadError, in_words
from optim_utils._state.own_load import hand_over
from optim_utils._state.walk import Stateful, is_never_stored, items_of, refuse_cycles
from optim_utils.low_bit import LowBitTensor, to_plain

__all__ = ["LoadIssue", "LoadReport", "OptimizerModule", "StateLoadError"]

logger = logging.getLogger(__name__)


class OptimizerModule(Stateful):
    """An object whose attributes, recursively, are its state.

    The state holds tensors, other `OptimizerModule` objects, dicts and sequences of them, and plain values. It leaves
    out things that belong to the process (callables, modules, optimizers, generators, process groups, meshes and
    `BlockInfo`) and the attributes named in the class attribute ``non_state_attributes``.
    """

    def state_dict(
        self, destination: dict[Any, Any] | None = None, keep_vars: bool = False, store_non_tensors: bool = True
    ) -> dict[Any, Any]:
        """The state as a nested dict; sequences become dicts keyed by position.

        Args:
            destination: a dict to fill and return; its present entries stay.
            keep_vars: store the tensors themselves, instead of detached ones that share their memory.
            store_non_tensors: store plain values too, by reference.

        Raises:
            ValueError: for an object that contains itself, as by a reference from a child to its parent.
        """
        state = {} if destination is None else destination
        if not isinstance(state, MutableMapping):
            raise TypeError(f"destination has to be a dict to fill, got a {type(state).__name__}")
        try:
            for name, value in self.state_attributes():
                stored = stored_form(value, keep_vars, store_non_tensors)
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
        """Fill this object from ``state_dict``; return a report of what was done.

        Tensors are filled in place: they keep identity, memory, dtype, device and sharding. A sequence is replaced by a
        new one of its type, a plain value by a deep copy of the loaded one, which has to be of exactly its type; an int
        or a float also takes a 0-dim tensor that holds it exactly. Containers that hold only plain values take over the
        loaded contents, of whatever types, and length.

        Args:
            state_dict: a dict made by `state_dict`; positions may have become strings, and dicts of positions sequences
                again.
            store_non_tensors: load plain values too, instead of keeping the present ones.
            strict: refuse missing, unexpected and mismatched entries, instead of skipping each with a warning.
            cast: convert floating-point tensors to the present dtype, instead of refusing another one.
            assign: where there is no memory to fill (None, a meta tensor, a missing attribute or key, the place behind
                the last item of a list, tuple or deque), put the loaded tensor itself.

        A nested object whose class overrides ``load_state_dict`` is loaded by that method, after all others, with those
        options that the method has parameters for. As a part of the check, the method is tried on a copy first.

        Raises:
            TypeError: for what is no dict, such as the object in place of its state.
            StateLoadError: with all problems in its ``report``, and nothing written; for tensors of another shape or
                without memory (meta) always, for every other problem if ``strict``.
        """
        if not isinstance(state_dict, Mapping):
            what = type(state_dict).__name__
            raise TypeError(f"state_dict has to be a dict that state_dict() makes of an object, got a {what}")
        plan = LoadPlan(store_non_tensors=store_non_tensors, cast=cast, assign=assign)
        plan.add_object(self, state_dict, ())
        report = plan.run(strict=strict)
        if not hand_over(report):
            for issue in report.problems:
                logger.warning(f"{type(self).__name__}: {in_words(issue)}")
        return report

    def own_load_state_dict(self) -> Callable[..., object] | None:
        """The ``load_state_dict`` that a subclass overrides, else None; it is called instead of planning the load."""
        return None if type(self).load_state_dict is OptimizerModule.load_state_dict else self.load_state_dict


_LEFT_OUT = object()


def stored_form(value: object, keep_vars: bool = False, store_non_tensors: bool = True) -> Any:
    """What stands for ``value`` in a state; the private ``_LEFT_OUT`` if nothing does."""
    if isinstance(value, LowBitTensor):
        return to_plain(value)
    if isinstance(value, Tensor):
        return value if keep_vars else value.detach()
    if isinstance(value, OptimizerModule):
        if store_non_tensors and not keep_vars:
            # an override of `state_dict` need not know these options as long as they are not used
            return value.state_dict()
        return value.state_dict(keep_vars=keep_vars, store_non_tensors=store_non_tensors)
    if (items := items_of(value)) is None:
        return value if store_non_tensors and not is_never_stored(value) else _LEFT_OUT
    stored = ((key, stored_form(item, keep_vars, store_non_tensors)) for key, item in items)
    return {key: item for key, item in stored if item is not _LEFT_OUT}
