"""When collectives start: during backward where that is allowed, otherwise at ``step()``; always in plan order.

A hook on every parameter counts its bucket down. A full bucket is launched once all buckets before it have been, so
that every rank issues the same collectives in the same order, whatever order its gradients arrive in; what never fills
is launched by ``launch_all``. Launching early is allowed only when the loop has said how it accumulates:
``accumulation_steps=k`` (every k-th backward pass reduces) or one use of ``no_sync()`` (the passes outside it reduce).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optim_dist.buckets import Bucket, Member
from optim_dist.reducers import Reducer


class BackwardReduction:
    """Counts gradients in, and launches the reductions of buckets in plan order."""

    def __init__(
        self, buckets: Sequence[Bucket], reducer: Reducer, accumulation_steps: int | None, overlap: bool
    ) -> None:
        self.buckets = buckets
        self.reducer = reducer
        self.overlap = overlap
        self.passes = accumulation_steps or 1
        self.eager = overlap and accumulation_steps is not None
        self.paused = False
        self._next = 0
        self._streams: set[Any] = set()
        self._handles = [
            member.parameter.register_post_accumulate_grad_hook(self._hook(bucket, member))
            for bucket in buckets
            for member in bucket.members
        ]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; from now on those outside reduce while they run."""
        self.eager = self.overlap
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @property
    def started(self) -> bool:
        """Whether a reduction of this step has been launched."""
        return self._next > 0

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived since the last step."""
        return any(member.arrived for bucket in self.buckets for member in bucket.members)

    def launch_all(self) -> None:
        """Launch every bucket that is still waiting, full or not."""
        while self._next < len(self.buckets):
            self._launch()

    def restart(self) -> None:
        """Forget what was launched and what has arrived: the next gradients belong to a new step."""
        self._next = 0
        for bucket in self.buckets:
            bucket.launched = False
            for member in bucket.members:
                member.arrivals, member.arrived = 0, False
            bucket.missing = len(bucket.members)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, bucket: Bucket, member: Member) -> Callable[[Tensor], None]:
        def gradient_arrived(_: Tensor) -> None:
            bucket.check_arrival(member)
            member.arrived = True
            if self.paused:
                return
            member.arrivals += 1
            if member.arrivals == self.passes:
                bucket.missing -= 1
            if not self.eager:
                return
            if bucket.gradients.is_cuda:
                self._streams.add(torch.cuda.current_stream(bucket.gradients.device))
            while self._next < len(self.buckets) and not self.buckets[self._next].missing:
                self._launch()

        return gradient_arrived

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        if self._streams:
            # gradients may have been written on several streams; the reduction follows all of them
            current = torch.cuda.current_stream(bucket.gradients.device)
            for stream in self._streams:
                if stream != current:
                    current.wait_stream(stream)
        bucket.collect_gradients()
        self.reducer.launch(bucket)
        bucket.note_reduced()
        bucket.launched = True
        self._next += 1
        if self._next == len(self.buckets):
            self._streams.clear()
