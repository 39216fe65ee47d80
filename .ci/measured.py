"""A pytest plugin for ``coverage run``: measures the first quarter of a second of each test that is not ``timing``.

A tracer makes Python twice as slow, which is too much for all that tests do, and breaks the limits of those that hold a
time. What a test reaches later, or in further cases than its first, is mostly what it has reached by then. So all tests
together reach at least what is reported. Ranks and other processes that tests start are not measured either.
"""

import signal
import sys
import threading
from collections.abc import Generator

import pytest

_SECONDS = 0.25  # of the processor, so that a busy machine measures as much

_measured: set[str] = set()


def _stop(*_: object) -> None:
    sys.settrace(None)
    threading.settrace(None)


def pytest_configure() -> None:
    signal.signal(signal.SIGVTALRM, _stop)
    signal.siginterrupt(signal.SIGVTALRM, False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    tracer, tracer_of_threads = sys.gettrace(), threading.gettrace()
    test = item.nodeid.partition("[")[0]
    if test in _measured or "timing" in item.keywords:
        _stop()
    else:
        _measured.add(test)
        signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        sys.settrace(tracer)
        threading.settrace(tracer_of_threads)
