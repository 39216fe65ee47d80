"""A pytest plugin for ``coverage run``: what is marked ``slow`` or ``timing`` runs without the tracer.

A tracer makes Python slower, which is too much for the former and breaks the limits of the latter. Ranks and other
processes that tests start are not measured either.
"""

import sys
import threading
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if not {"slow", "timing"} & item.keywords.keys():
        return (yield)
    tracer, tracer_of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(tracer)
        threading.settrace(tracer_of_threads)
