"""Handles of moves that are under way: what ``wait()`` returns and raises, in which mode, stream and thread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import pytest
import torch

from optim_redist import Handle, Layout, Mesh, redistribute_local, redistribute_many
from optim_utils.testing import run_ranks


def _in_and_out_of_inference_mode(rank: int, world: int) -> None:
    mesh = Mesh(2)
    mine, pending = torch.full((4,), rank + 1.0), Layout(mesh, [None], {0: "sum"})
    tasks = [(mine, (4,), pending, Layout(mesh, [None])), (mine[:2], (4,), Layout(mesh, [0]), Layout(mesh, [None]))]
    wanted = [torch.full((4,), 3.0), torch.tensor([1.0, 1.0, 2.0, 2.0])]
    for is_inference in (True, False):
        with torch.inference_mode(is_inference):
            handles = [redistribute_local(*task, async_op=True) for task in tasks]
            many_of_them = redistribute_many(tasks, async_op=True)
        with torch.inference_mode(not is_inference):
            found = [*(handle.wait() for handle in handles), *many_of_them.wait()]
        for tensor, expected in zip(found, [*wanted, *wanted]):
            assert tensor.is_inference() == is_inference
            assert torch.equal(tensor, expected)


def test_a_handle_goes_on_in_the_mode_in_which_it_began() -> None:
    run_ranks(_in_and_out_of_inference_mode, 2, timeout=60)


def test_a_handle_raises_again_what_went_wrong() -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("the wire is cut")

    def steps() -> Any:
        yield Broken()
        return 1

    handle = Handle(steps())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the wire is cut"):
            handle.wait()


def test_threads_wait_for_a_handle_together() -> None:
    is_waiting, goes_on = Event(), Event()

    class Work:
        def wait(self) -> None:
            is_waiting.set()
            goes_on.wait(timeout=10)

    def steps() -> Any:
        yield Work()
        return "the result"

    handle, found = Handle(steps()), []
    threads = [Thread(target=lambda: found.append(handle.wait())) for _ in range(2)]
    for thread in threads:
        thread.start()
        is_waiting.wait(timeout=10)
    goes_on.set()
    for thread in threads:
        thread.join(timeout=10)
    assert found == ["the result"] * 2


class _Stream:
    """A CUDA stream, as far as a handle asks."""

    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.follows: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.follows.append(other)


class _Made:
    used_on: _Stream | None = None

    def record_stream(self, stream: _Stream) -> None:
        self.used_on = stream


@pytest.mark.parametrize("kind", ["one", "list", "dict", "none"])
def test_a_handle_goes_on_in_the_stream_in_which_it_began(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    # its buffers are of that stream, which may take them again as soon as they are dropped
    here, there = _Stream(), _Stream()
    current, seen = [here], []

    @contextmanager
    def switched(stream: _Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", switched)
    made = _Made()

    class Work:
        def wait(self) -> None:
            seen.append(current[-1])

    def steps() -> Any:
        for _ in range(2):
            yield Work()
            seen.append(current[-1])
        return {"one": made, "list": [None, made], "dict": {"a": made, "b": None}, "none": None}[kind]

    with switched(there):
        handle = Handle(steps(), torch.device("cuda"))
    handle.wait()
    assert seen == [there] * 4
    assert here.follows == [there]
    assert made.used_on is (None if kind == "none" else here)
    # waited for again on a third stream, which has to follow, too
    third = _Stream()
    with switched(third):
        handle.wait()
    assert third.follows == [there]
    assert made.used_on is (None if kind == "none" else third)
    seen.clear()
    Handle(steps(), torch.device("cuda")).wait()
    assert seen == [here] * 4
    assert len(here.follows) == 1


def _dropped_handle(rank: int, world: int) -> None:
    mesh = Mesh(4)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    handles = [redistribute_local(torch.zeros(2, 8), (8, 8), src, dst, async_op=True)]
    with pytest.warns(UserWarning, match="dropped without wait"):
        handles.clear()


def test_a_dropped_handle_waits_and_warns() -> None:
    run_ranks(_dropped_handle, 4)


def test_a_dropped_handle_waits_where_warnings_are_errors() -> None:
    finished = []

    def steps() -> Any:
        yield None
        yield None
        finished.append(True)

    handle = Handle(steps())
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="dropped without wait"):
        warnings.simplefilter("error")
        # what the collector calls, and whose errors it prints
        handle.__del__()
    # others would wait for the later rounds for ever
    assert finished
