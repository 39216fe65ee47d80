"""A redistribution under way: its caller goes on, and waits for the result later."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import ExitStack, suppress
from threading import Lock
from typing import Any, Generic, TypeVar

import torch

from optim_redist._compiling.uncompiled import uncompiled
from optim_redist._running.collectives import Waitable

Result = TypeVar("Result")


class Handle(Generic[Result]):
    """A redistribution under way: it owns the buffers, the source and the work until ``wait`` returns the result.

    It may read the source until then, so do not write to the source before, as with torch's asynchronous collectives.

    Waiting twice is harmless, also in several threads, which all wait for the end; every ``wait`` raises the same error
    as the first, if any. A handle that is dropped without ``wait`` warns and waits at that moment. A redistribution of
    several exchanges, as under a memory limit, starts the later ones inside ``wait``, so all ranks must wait for such
    handles in the same order.

    Wherever ``wait`` is called, it runs in the inference mode and on the CUDA stream that were current when the handle
    was made: its buffers were allocated on that stream, and on another one their memory could be reused before they
    have been read. The caller's current stream then waits for that stream.
    """

    def __init__(self, steps: Generator[Waitable | None, None, Result], device: torch.device | None = None) -> None:
        """``device``: where the buffers are; None if there are none, or if ``wait`` follows on the same stream."""
        self._is_inference = torch.is_inference_mode_enabled()
        self._stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None
        self._lock = Lock()
        self._result: Result
        self._error: BaseException | None = None
        self._begun = [next(steps, None)]
        # the generator owns the source, the buffers and the target
        self._steps: Generator[Waitable | None, None, Result] | None = steps

    @uncompiled  # traced by the compiler, its streams would be freed too early, which crashes the process
    def wait(self) -> Result:
        """Finish, and return this rank's target (None where it has none), or the targets of many tensors."""
        with self._lock:
            steps, self._steps = self._steps, None
            if steps is not None:
                try:
                    with self._as_begun():
                        self._result = completed(steps, self._begun)
                except BaseException as error:
                    self._error = error
                    raise
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            # to each stream on which it is waited for
            _hand_over(self._result, self._stream)
        return self._result

    def _as_begun(self) -> ExitStack:
        contexts = ExitStack()
        if torch.is_inference_mode_enabled() != self._is_inference:
            contexts.enter_context(torch.inference_mode(self._is_inference))
        if self._stream is not None and torch.cuda.current_stream(self._stream.device) != self._stream:
            contexts.enter_context(torch.cuda.stream(self._stream))
        return contexts

    def __del__(self) -> None:
        if getattr(self, "_steps", None) is not None:
            try:
                warnings.warn("a redistribution was dropped without wait(); it is waited for now", stacklevel=2)
            finally:
                # even if the warning is raised as an error: other ranks wait for the later rounds
                with suppress(RuntimeError):
                    self.wait()


def completed(steps: Generator[Waitable | None, None, Result], begun: list[Waitable | None] | None = None) -> Result:
    """The result of a redistribution, run to its end: of all that it starts after the work that it has begun.

    ``begun`` holds that work, which is taken out: whoever keeps it would keep its buffers through all later rounds.
    """
    work = begun.pop() if begun else None
    while True:
        try:
            try:
                if work is not None:
                    work.wait()
            except BaseException as error:
                # the generator adds a note that says which step failed
                steps.throw(error)
            # the work holds the buffers of its round
            del work
            work = next(steps)
        except StopIteration as stop:
            result: Result = stop.value
            return result


def _hand_over(result: Any, stream: torch.cuda.Stream) -> None:
    """Let the current stream use a result that was made on ``stream``."""
    current = torch.cuda.current_stream(stream.device)
    if current != stream:
        current.wait_stream(stream)
        for tensor in result.values() if isinstance(result, dict) else result if isinstance(result, list) else [result]:
            if tensor is not None:
                # its memory belongs to the other stream
                tensor.record_stream(current)


def done(result: Result) -> Generator[None, None, Result]:
    """The steps of a redistribution whose result is there already: none."""
    yield None
    return result
