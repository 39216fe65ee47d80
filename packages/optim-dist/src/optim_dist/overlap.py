"""When collectives start: during backward where that is allowed, otherwise at ``step()``; always in plan order.

A hook on every parameter counts its bucket down. A full bucket is launched once all buckets before it have been, so
that every rank issues the same collectives in the same order, whatever order its gradients arrive in; what never fills
is launched by ``launch_all``. Launching early is allowed only when the loop has said how it accumulates:
``accumulation_steps=k`` (every k-th backward pass reduces) or one use of ``no_sync()`` (the passes outside it reduce).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optim_dist.buckets import Bucket, Member
from optim_dist.reducers import Reducer


class BackwardReduction:
    """Counts gradients in, and launches the reductions of buckets in plan order."""

    reducer: Reducer  # that of all buckets; ``extend`` gives it

    def __init__(self, accumulation_steps: int | None, overlap: bool) -> None:
        self.buckets: list[Bucket] = []
        self.overlap = overlap
        self.passes = accumulation_steps or 1
        self.eager = overlap and accumulation_steps is not None
        self.paused = False
        self.counts: Tensor | None = None  # what ranks agreed on, see ``BucketedParameters.counts``
        self._next = 0
        # the last of this step to get a gradient, and that
        self._latest: tuple[Member, weakref.ref[Tensor]] | None = None
        self._streams: set[Any] = set()
        self._handles: list[Any] = []

    def extend(self, buckets: Sequence[Bucket], reducer: Reducer) -> None:
        """Take more buckets behind those that there are."""
        self.buckets += buckets
        self.reducer = reducer
        # of these alone: parameters that were frozen since they came cannot be given a hook
        self._handles += [
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
        """Whether a gradient has arrived since the last step that is still there."""
        return any(m.arrived and m.parameter.grad is not None for bucket in self.buckets for m in bucket.members)

    @property
    def _is_due(self) -> bool:
        """Whether some rank may have launched a reduction, even if this one has not."""
        return self.started or (self.eager and any(bucket.missing < len(bucket.members) for bucket in self.buckets))

    def launch_all(self) -> None:
        """Launch every bucket that is still waiting, full or not."""
        while self._next < len(self.buckets):
            self._launch()

    def drop(self) -> None:
        """Give up this step's reductions, once every rank has issued all of them, and begin a new step."""
        if self._is_due:
            for bucket in self.buckets[self._next :]:
                self.reducer.launch(bucket)
            for bucket in self.buckets:
                self.reducer.finish(bucket)
        self.restart()

    def restart(self) -> None:
        """Forget what was launched and what has arrived: the next gradients belong to a new step."""
        self.counts = self._latest = None
        self._streams.clear()
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
            if self._all_dropped(member):
                self.drop()
            gradient = member.parameter.grad
            assert gradient is not None, "hooks run behind the accumulation"
            member.arrived, self._latest = True, (member, weakref.ref(gradient))
            is_counted = self.eager and not self.paused
            if is_counted:
                member.arrivals += 1
                if member.arrivals == self.passes:
                    bucket.missing -= 1
                if bucket.gradients.is_cuda:
                    self._streams.add(torch.cuda.current_stream(bucket.gradients.device))
            # one that is refused counts: other ranks may have launched reductions before they refuse theirs
            bucket.check_arrival(member)
            while is_counted and self._is_next_ready:
                self._launch()

        return gradient_arrived

    @property
    def _is_next_ready(self) -> bool:
        """Whether a bucket can be launched under backward: full, and without waiting for ranks that launch it later."""
        if self._next == len(self.buckets):
            return False
        bucket = self.buckets[self._next]
        return not bucket.missing and self.reducer.is_ready(bucket)

    def _all_dropped(self, arriving: Member) -> bool:
        """Whether the user has set this step's gradients to None, so that ``arriving`` is the first of a new step."""
        if self._latest is None:
            if not self.started:
                return False  # nothing has arrived or was reduced since the last step
        else:
            latest, gradient = self._latest
            found = latest.parameter.grad
            if found is not None and (latest is not arriving or found is gradient()):
                return False
        # a gradient that autograd made anew is not in the bucket yet
        if arriving.parameter.grad is arriving.gradient:
            return False
        others = (m for b in self.buckets for m in b.members if (b.launched or m.arrived) and m is not arriving)
        return all(m.parameter.grad is None for m in others)

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
