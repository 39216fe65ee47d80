"""A pytest plugin for ``coverage run``: the first case of a test is measured, if it is not ``slow`` or ``timing``.

A tracer makes Python twice as slow. That is too much for slow tests, breaks the limits of those that hold a time, and
further cases of a test mostly reach what its first has reached. So all tests together reach at least what is reported.
Ranks and other processes that tests start are not measured either.
"""

import sys
import threading
from collections.abc import Generator

import pytest

_measured: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    test = item.nodeid.partition("[")[0]
    if test not in _measured and not {"slow", "timing"} & item.keywords.keys():
        _measured.add(test)
        return (yield)
    tracer, tracer_of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
        threading.settrace(tracer_of_threads)
