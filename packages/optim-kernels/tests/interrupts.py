"""Calls that end early, as by Ctrl-C in a notebook, whose next cell goes on with the same optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch import nn

# How a step that is interrupted, and others, differ from those before: which entry of a test's lists they take.
Step = Callable[[int], None]


def is_interrupted(call: Callable[[], object], at: int, within: Collection[str]) -> bool:
    """Make a call, and raise ``KeyboardInterrupt`` before the ``at``-th line that it runs of these functions of ours.

    ``within``: their qualified names. Returns whether there was such a line.
    """
    count = 0

    def on_line(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        if event == "line" and count == at:
            raise KeyboardInterrupt
        return on_line

    def on_call(frame: FrameType, _: str, __: Any) -> Any:
        is_ours = frame.f_globals.get("__name__", "").startswith("optim_kernels.")
        return on_line if is_ours and frame.f_code.co_qualname in within else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def assert_taken_or_not(
    start: Callable[[], tuple[Sequence[nn.Parameter], Step]], num_before: int, within: Collection[str]
) -> None:
    """Interrupt a step wherever it can be: afterwards parameters are as with all of it, or as without it.

    Args:
        start: makes parameters, the same each time, and what takes a step of them.
        num_before: how many steps are taken before the one that is interrupted.
        within: as in `is_interrupted`.
    """

    def trained(second: Callable[[Callable[[], None]], bool], after: Sequence[int]) -> Any:
        params, step = start()
        for _ in range(num_before):
            step(0)
        result = second(lambda: step(1))
        for which in after:
            step(which)
        return params, result

    # back to what was before, or once more
    for after in ((0, 1), (1, 0)):
        twins = [trained(lambda step: step() is None, after)[0], trained(lambda _: False, after)[0]]
        for at in count(1):
            params, interrupted = trained(lambda step, at=at: is_interrupted(step, at, within), after)
            if not interrupted:
                break
            assert any(all(map(torch.equal, params, twin)) for twin in twins), (after, at)
        assert at > 10
