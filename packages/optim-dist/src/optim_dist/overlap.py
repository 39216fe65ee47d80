"""When reductions start: during backward where that is allowed, otherwise at ``step()``.

A hook on every parameter counts down the gradients that its bucket still lacks. A full bucket is launched once all
buckets before it in the plan have been launched, so that every rank issues the same collectives in the same order,
whatever order its gradients arrive in; ``launch_all`` launches buckets that never fill. Launching early is allowed only
when the loop has said how it accumulates: ``accumulation_steps=k`` (every k-th backward pass reduces) or one use of
``no_sync()`` (the passes outside it reduce). Until then all gradients exist when the first bucket is launched, and
buckets are launched in the order that ``arrange`` was given.

Reductions by copies (``transport="symm"``) must not be launched during backward, where a copy that waits for a late
rank holds up others. ``step()`` launches them, but on the device, which is behind the host, each begins where its
bucket became full.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from optim_dist._reduction.storage import ParameterBucket
from optim_dist._reduction.written_streams import WrittenStreams, keep_until_read
from optim_dist.buckets import Bucket, ResidentMember, build_bucket
from optim_dist.reducers import Reducer

# How many backward passes optimizers of this process have refused, keyed by the ranks over which they reduce. A refusal
# ends the pass: on each rank perhaps in another optimizer, before gradients have arrived in the remaining ones.
refused_passes: Counter[tuple[int, ...]] = Counter()


class Reduction:
    """The reductions of one optimizer's buckets in a step: what is the same whether gradients are kept or streamed."""

    reducer: Reducer  # for all buckets; ``extend`` sets it

    def __init__(self, passes_per_step: int, ranks: Sequence[int], *, knows_last_pass: bool, by_copies: bool) -> None:
        self.passes_per_step = passes_per_step
        # whether the loop has said which pass is the last of a step, whose gradients are collected as they arrive
        self.knows_last_pass = knows_last_pass
        self._by_copies = by_copies  # which are launched only in the step
        self.num_given_up = 0  # steps given up since construction
        self.counts: Tensor | None = None  # what ranks agreed on, see ``BucketedParameters.counts``
        self._num_launched = 0  # in this step
        self._ranks = tuple(ranks)
        self._refused_before = refused_passes[self._ranks]  # the count when this step began
        self._streams = WrittenStreams()  # in which gradients, or sums of them, were written
        self._handles: list[Any] = []

    @property
    def launches_under_backward(self) -> bool:
        """Whether reductions are launched during backward."""
        return self.knows_last_pass and not self._by_copies

    @property
    def has_launched(self) -> bool:
        """Whether a reduction of this step has been launched."""
        return self._num_launched > 0

    @property
    def any_rank_may_have_launched(self) -> bool:
        """Whether some rank may have launched a reduction, even if this one has not."""
        if self.has_launched or not self.launches_under_backward or not self._handles:
            return self.has_launched
        return refused_passes[self._ranks] != self._refused_before or self._has_counted

    @property
    def _has_counted(self) -> bool:
        """Whether a gradient has arrived, since the last step, that a reduction waits for."""
        raise NotImplementedError

    def drop(self, is_agreed: bool = False) -> None:
        """Give up this step's reductions, once every rank has issued all of them, and begin a new step.

        Args:
            is_agreed: all ranks call this, so that this one takes part even if it knows of no reduction.
        """
        if is_agreed or self.any_rank_may_have_launched:
            self.num_given_up += 1
            self._finish_unused()
        self.restart()

    def _finish_unused(self) -> None:
        """Launch what is left of this step, and wait for all of it; nobody needs the sums."""
        raise NotImplementedError

    def abandon(self) -> bool:
        """Begin a new step without waiting for this one's reductions; returns whether there were any.

        They may never end, as other ranks may launch none. The memory they write to stays, and is not used again.
        """
        had_launched = self.has_launched
        self.restart()
        return had_launched

    def restart(self) -> None:
        """Forget what was launched and what has arrived: the next gradients belong to a new step."""
        self.counts, self._num_launched = None, 0
        self._refused_before = refused_passes[self._ranks]

    def close(self) -> None:
        """Remove the hooks, on all ranks."""
        self.remove_hooks()

    def remove_hooks(self) -> None:
        """Remove the hooks: later gradients are ignored."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class BackwardReduction(Reduction):
    """Counts arriving gradients, and launches the reductions of buckets in the same order on all ranks."""

    build = staticmethod(build_bucket)

    def __init__(self, accumulation_steps: int | None, overlap: bool, ranks: Sequence[int], *, by_copies: bool) -> None:
        knows_last_pass = overlap and accumulation_steps is not None
        super().__init__(accumulation_steps or 1, ranks, knows_last_pass=knows_last_pass, by_copies=by_copies)
        self.buckets: list[Bucket] = []
        self.overlap = overlap
        self.paused = False
        self._order_in_step: Sequence[Bucket] = self.buckets  # launch order if none is launched under backward
        self._order: Sequence[Bucket] = self.buckets  # launch order of this step
        # the member that got this step's latest gradient, and that gradient
        self._latest: tuple[ResidentMember, weakref.ref[Tensor]] | None = None

    def extend(self, buckets: Sequence[ParameterBucket], reducer: Reducer) -> None:
        """Append buckets that ``build`` has made."""
        new = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        self.buckets += new
        self.reducer = reducer
        # for new buckets alone: parameters of older ones may have been frozen since, and then take no hook
        self._handles += [
            member.parameter.register_post_accumulate_grad_hook(self._hook(bucket, member))
            for bucket in new
            for member in bucket.members
        ]

    def arrange(self, buckets: Sequence[ParameterBucket]) -> None:
        """Set the order in which buckets are launched if none is launched under backward; it has all of them."""
        self._order_in_step = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        self._begin_order()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of permanent memory for gradients."""
        return sum(bucket.gradients.nbytes for bucket in self.buckets)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate; from now on those outside reduce while they run."""
        self.knows_last_pass = self.overlap
        if not self.has_launched:
            self._begin_order()
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @property
    def has_gradients(self) -> bool:
        """Whether any gradient that has arrived since the last step still exists."""
        return any(m.arrived and m.parameter.grad is not None for bucket in self.buckets for m in bucket.members)

    @property
    def _has_counted(self) -> bool:
        return any(bucket.missing < len(bucket.members) for bucket in self.buckets)

    def launch_first(self) -> None:
        """Launch a bucket, if none is launched yet."""
        if self.buckets and not self.has_launched:
            self._launch()

    def launch_all(self) -> None:
        """Launch every bucket that is still waiting, full or not."""
        while self._num_launched < len(self._order):
            self._launch()

    def finish(self, bucket: ParameterBucket) -> Tensor:
        """The sum over ranks of this rank's chunk."""
        assert isinstance(bucket, Bucket), "buckets are our own"
        return self.reducer.finish(bucket)

    def finish_launched(self) -> None:
        """Let the current stream wait for every reduction in flight, and later reductions wait for this stream."""
        for bucket in self.buckets:
            if bucket.launched:
                self.reducer.finish(bucket)
            else:
                bucket.forget_full()

    def _finish_unused(self) -> None:
        for bucket in self._order[self._num_launched :]:
            self.reducer.launch(bucket)
        for bucket in self.buckets:
            self.reducer.finish(bucket)

    def abandon(self) -> bool:
        for bucket in self._order[: self._num_launched]:
            bucket.drop_gradients()
        return super().abandon()

    def restart(self) -> None:
        super().restart()
        self._latest = None
        self._streams.forget()
        self._begin_order()
        for bucket in self.buckets:
            bucket.launched = False
            bucket.forget_full()
            for member in bucket.members:
                member.arrivals, member.arrived = 0, False
            bucket.missing = len(bucket.members)

    def _begin_order(self) -> None:
        self._order = self.buckets if self.knows_last_pass else self._order_in_step

    def clear(self) -> None:
        """Drop all buckets; others may be added."""
        self.close()
        self.buckets.clear()
        self._order_in_step = self.buckets
        self.restart()

    def _hook(self, bucket: Bucket, member: ResidentMember) -> Callable[[Tensor], None]:
        def gradient_arrived(_: Tensor) -> None:
            gradient = member.parameter.grad
            if gradient is None:
                return  # an earlier hook has taken it, as where another optimizer steps inside of backward
            if self._follows_dropped_step(member):
                self.drop()
            member.arrived, self._latest = True, (member, weakref.ref(gradient))
            is_counted = self.knows_last_pass and not self.paused
            if is_counted:
                member.arrivals += 1
                if member.arrivals == self.passes_per_step:
                    bucket.missing -= 1
                self._streams.note(bucket.gradients)
            # a refused gradient counts: other ranks may have launched reductions before they refuse theirs
            try:
                bucket.check_arrival(member)
            except RuntimeError:
                refused_passes[self._ranks] += 1
                raise
            if not is_counted:
                return
            if self._by_copies:
                if not bucket.missing:
                    bucket.check_gradients()
                    self._collect(bucket)
                    bucket.note_full()
                return
            while self._is_next_ready:
                self._order[self._num_launched].check_gradients()
                self._launch()

        # compiled autograd would trace it
        return torch.compiler.disable(gradient_arrived)

    @property
    def _is_next_ready(self) -> bool:
        """Whether the next bucket is full, and launching it under backward would not wait for other ranks."""
        if self._num_launched == len(self._order):
            return False
        bucket = self._order[self._num_launched]
        return not bucket.missing and self.reducer.is_ready(bucket)

    def _follows_dropped_step(self, arriving: ResidentMember) -> bool:
        """Whether the user has set this step's gradients to None, so that ``arriving`` is the first of a new step."""
        if self._latest is not None:
            latest, gradient = self._latest
            found = latest.parameter.grad
            if found is not None and (latest is not arriving or found is gradient()):
                return False
        # a gradient that autograd has made anew is not in the bucket yet
        return arriving.parameter.grad is not arriving.gradient and self.were_gradients_dropped(arriving)

    def were_gradients_dropped(self, arriving: ResidentMember | None = None) -> bool:
        """Whether this step has had gradients, perhaps only on other ranks, and none but ``arriving`` is left."""
        if not self.any_rank_may_have_launched and self._latest is None:
            return False
        # then a pass was refused in another optimizer before any gradient had arrived here: look at all members
        is_unseen = self._latest is None and not self.has_launched
        members = (m for b in self.buckets for m in b.members if is_unseen or b.launched or m.arrived)
        return all(m.parameter.grad is None for m in members if m is not arriving)

    def _launch(self) -> None:
        bucket = self._order[self._num_launched]
        if not bucket.is_as_noted:
            bucket.forget_full()
            self._collect(bucket)
        self.reducer.launch(bucket)
        bucket.note_reduced()
        bucket.launched = True
        self._num_launched += 1
        if self._num_launched == len(self._order):
            self._streams.forget()

    def _collect(self, bucket: Bucket) -> None:
        """Bring gradients into the bucket, after the streams that have written them."""
        self._streams.follow(bucket.gradients)
        strays = bucket.collect_gradients()
        if self._streams.are_several:  # else backward, in another stream, would reuse memory that is freed here
            keep_until_read(strays)
