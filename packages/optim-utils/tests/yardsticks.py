"""Times as multiples of a yardstick's, so that neither the machine's speed nor what runs beside the tests counts."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable


def times_as_long(call: Callable[[], object], yardstick: Callable[[], object], *, turns: int = 3) -> float:
    """How many times as long as the yardstick the call takes, in CPU time of this thread.

    They take turns, so that a slow moment meets both, and the quickest turn of each counts.
    """
    best, of_yardstick = math.inf, _seconds(yardstick)
    for _ in range(turns):
        best = min(best, _seconds(call))
        of_yardstick = min(of_yardstick, _seconds(yardstick))
    return best / of_yardstick


def _seconds(call: Callable[[], object]) -> float:
    collects = gc.isenabled()
    gc.disable()  # how long a collection takes depends on what other tests have left
    try:
        start = time.thread_time()
        call()
        return time.thread_time() - start
    finally:
        if collects:
            gc.enable()
