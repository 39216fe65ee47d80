"""Convert nested states to flat ones and back, and objects in them to plain dicts and back into live objects.

    flatten:     {"bar": {"_thl": {0: t}}}  ->  {'["bar", "_thl", 0]': t}
    to_dotted:   {"bar": {"_thl": {0: t}}}  ->  {"bar._thl.0": t}, and the mapping that undoes it

The first form is exact for every kind of key; the second is how ``torch.distributed.checkpoint`` names things.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from optim_utils._state.load_report import LoadReport, in_words
from optim_utils._state.nesting import flatten, from_dotted, to_dotted, unflatten
from optim_utils._state.optimizer_hooks import attach_state_dict_hooks
from optim_utils._state.update_plan import UpdatePlan
from optim_utils._state.walk import refuse_cycles
from optim_utils.optimizer_modules import OptimizerModule

__all__ = [
    "attach_state_dict_hooks",
    "extract_state_dict_content",
    "flatten",
    "from_dotted",
    "to_dotted",
    "unflatten",
    "update_param_state_dict_object",
]

logger = logging.getLogger(__name__)


def extract_state_dict_content(input_dict: object) -> dict[Any, Any]:
    """A copy of the nested dicts in which every `OptimizerModule` is replaced by its ``state_dict()``.

    Everything else is the same object; lists are not entered.

    Raises:
        TypeError: for what is neither a dict nor an `OptimizerModule`.
        ValueError: for a dict that contains itself.
    """
    if isinstance(input_dict, OptimizerModule):
        return input_dict.state_dict()
    if not isinstance(input_dict, dict):
        raise TypeError(f"input_dict has to be a dict or an OptimizerModule, got a {type(input_dict).__name__}")
    result: dict[Any, Any] = {}
    waiting: list[tuple[dict[Any, Any], dict[Any, Any] | None]] = [(input_dict, result)]
    entered: set[int] = set()
    while waiting:
        source, target = waiting.pop()
        if target is None:
            entered.remove(id(source))
            continue
        entered.add(id(source))
        waiting.append((source, None))  # popped when everything inside `source` is done
        for key, value in source.items():
            if isinstance(value, OptimizerModule):
                target[key] = value.state_dict()
            elif isinstance(value, dict):
                if id(value) in entered:
                    raise ValueError(f"the dict under {key!r} contains itself; leave the way back out of the state")
                target[key] = {}
                waiting.append((value, target[key]))
            else:
                target[key] = value
    return result


class _MissingKeyError(KeyError):
    """A KeyError whose text is its message, not the message's ``repr``."""

    def __str__(self) -> str:
        return str(self.args[0])


def update_param_state_dict_object(
    current_param_state_dict: dict[Any, Any],
    param_state_dict_to_load: Mapping[Any, Any],
    enable_missing_key_check: bool = True,
) -> LoadReport:
    """Update ``current_param_state_dict`` to the loaded values, in place; return a report of what was done.

    The keys of the current dict decide what is updated: dicts are entered, tensors are filled in place (a number fills
    only a 0-dim tensor that can hold it), objects with a ``load_state_dict`` load, and everything else is replaced by a
    deep copy. Everything is checked before anything is written, except in objects that are no `OptimizerModule`: what
    their ``load_state_dict`` does is unknown, so they load last.

    Raises:
        KeyError: for a key that is not in the loaded state, unless ``enable_missing_key_check`` is off: then it is
            skipped with a warning. A container with nothing to fill is never missing.
        StateLoadError: for a value that does not fit.
        ValueError: for a current state that contains itself, if the loaded one does, too.
        TypeError: if the current state is neither a dict nor an `OptimizerModule`, so that nothing in it could change.
    """
    if not isinstance(current_param_state_dict, dict | OptimizerModule):
        raise TypeError(
            "current_param_state_dict has to be a dict or an OptimizerModule, got a "
            f"{type(current_param_state_dict).__name__}"
        )
    plan = UpdatePlan()
    try:
        plan.add(current_param_state_dict, param_state_dict_to_load, ())
    except RecursionError:
        refuse_cycles(current_param_state_dict)
        raise
    texts = [f"Key {key} not found in state dict to load." for key in plan.missing_keys]
    if texts and enable_missing_key_check:
        error = _MissingKeyError(texts[0])
        for issue in LoadReport.of(plan.issues).missing:
            error.add_note(f"missing: {issue.path} ({issue.expected})")
        raise error
    report = plan.update()
    for text in texts:
        logger.warning(text)
    for issue in LoadReport.of(plan.objects.issues).problems:
        logger.warning(in_words(issue))
    return report
