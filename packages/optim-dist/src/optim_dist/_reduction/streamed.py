"""Reductions of gradients that are not kept: every backward pass reduces, and leaves no ``.grad``.

A step has ``accumulation_steps`` rounds. In each, every bucket is reduced once, in plan order, so that every rank
issues the same collectives in the same order, whenever its gradients arrive:

    a bucket is full        its reduction is launched, if those of all buckets before it have been
    a pass ends             buckets that are not full yet are launched with zeros for missing gradients
    step(), clipping        rounds for which this rank has had no pass are launched with the gradients there are

A reduction needs a buffer. If none is free, it waits for the oldest reduction in flight, which ends once all ranks have
launched it: a rank that lacks a gradient does so at the end of its pass. Two optimizers that waited like this could
wait for each other. So if there are several, none waits during backward: each launches as many reductions as it has
free buffers, and the rest in its step. Ranks agree on which other optimizers exist, because one that is no longer used
may have been collected on some ranks only.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.autograd import Variable

from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.rolling import NUM_BUFFERS, Buffer, StreamedBucket, build_streamed_bucket
from optim_dist._reduction.storage import Contribution, Member, ParameterBucket, no_rank_had_gradients
from optim_dist._reduction.written_streams import keep_until_read
from optim_dist.overlap import Reduction, refused_passes
from optim_dist.plan import BucketPlan
from optim_dist.reducers import Reducer

# the reductions of this process whose backward passes may wait for other ranks
_live: weakref.WeakSet[StreamedReduction] = weakref.WeakSet()


class StreamedReduction(Reduction):
    """Counts gradients in, and launches reductions of full buckets from rolling buffers."""

    number = 0  # among the optimizers of this process, the same on all ranks; set by ``agree_on_others``

    def __init__(
        self,
        accumulation_steps: int,
        ranks: Sequence[int],
        sums_dtype: Callable[[BucketPlan], torch.dtype],
        in_pairs: bool,
    ) -> None:
        super().__init__(accumulation_steps, ranks, knows_last_pass=True, by_copies=False)
        self.buckets: list[StreamedBucket] = []
        num_paired = accumulation_steps if in_pairs else None
        self.build = partial(build_streamed_bucket, sums_dtype=sums_dtype, num_paired=num_paired)
        self._num_passes = 0  # backward passes of this step in which a gradient has arrived
        self._task = -1  # autograd's number of the latest such pass
        self._free: list[Buffer] = []
        self._in_flight: deque[tuple[StreamedBucket, Contribution, Buffer]] = deque()
        self._others: set[int] = set()  # other optimizers' numbers; while there are any, backward does not wait

    def extend(self, buckets: Sequence[ParameterBucket], reducer: Reducer) -> None:
        """Append buckets that ``build`` has made."""
        new = [bucket for bucket in buckets if isinstance(bucket, StreamedBucket)]
        self.buckets += new
        self.reducer = reducer
        assert not self._in_flight, "parameters are added between steps"
        self._free.clear()  # freed before larger ones are allocated
        if self.buckets:
            self._free += [Buffer(self.buckets, reducer.communicator) for _ in range(NUM_BUFFERS)]
        self._handles += [
            member.parameter.register_post_accumulate_grad_hook(self._hook(bucket, place, member))
            for bucket in new
            for place, member in enumerate(bucket.members)
        ]

    def agree_on_others(self, communicator: Communicator, number: int) -> None:
        """Agree on which other streamed optimizers any rank has. Collective; ``close`` takes an optimizer out again."""
        self.number = number
        _live.discard(self)
        found = communicator.gather_json([other.number for other in _live])
        self._others = {other for numbers in found for other in numbers}
        if self.buckets:
            for other in _live:
                other._others.add(number)
            _live.add(self)

    @property
    def gradient_bytes(self) -> int:
        """Bytes for gradients that stay allocated."""
        buffers = [*self._free, *(buffer for *_, buffer in self._in_flight)]
        trees = sum(bucket.tree.nbytes for bucket in self.buckets if bucket.tree is not None)
        return sum(buffer.nbytes for buffer in buffers) + sum(bucket.sums.nbytes for bucket in self.buckets) + trees

    def no_sync(self) -> AbstractContextManager[None]:
        if not self.buckets:
            return nullcontext()
        raise RuntimeError(
            "no_sync() keeps gradients where they are until a later pass, but with gradients='streamed' every backward "
            "pass reduces, so that none are kept; leave no_sync() out (accumulation_steps= says how many passes make a "
            "step), or use gradients='resident'"
        )

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has arrived since the last step."""
        return any(member.arrived for bucket in self.buckets for member in bucket.members)

    @property
    def _has_counted(self) -> bool:
        return self._num_passes > 0

    def were_gradients_dropped(self) -> bool:
        """False: reductions leave no ``.grad``, so that there is none says nothing."""
        return False

    def launch_all(self) -> None:
        """Launch all that is left of this step's rounds."""
        while self._lacks_some_of(self.passes_per_step):
            self._launch()

    def finish(self, bucket: ParameterBucket) -> Tensor:
        """The own chunk's sum over ranks and the step's rounds."""
        assert isinstance(bucket, StreamedBucket), "buckets are our own"
        self._streams.follow(bucket.values)
        while any(each is bucket for each, *_ in self._in_flight):
            self._add_up()
        return bucket.sums

    def finish_launched(self) -> None:
        """Refuse a ``GradScaler``, which calls this before it reads ``.grad``, and fails if there is none."""
        if not self.buckets:
            return
        raise RuntimeError(
            "a GradScaler looks for infinities in .grad, of which gradients='streamed' leaves nothing; use "
            "gradients='resident', or set the optimizer's attributes grad_scale and found_inf (tensors) yourself: "
            "step() reads them, and finds what has overflowed in the sums"
        )

    def _finish_unused(self) -> None:
        while self._lacks_some_of(self.passes_per_step):
            self._launch(is_given_up=True)
        while self._in_flight:
            self._add_up()

    def restart(self) -> None:
        super().restart()
        self._num_passes, self._task = 0, -1
        for bucket in self.buckets:
            bucket.restart()
            for member in bucket.members:
                member.arrived = False

    def clear(self) -> None:
        """Let go of all buckets; ``extend`` may bring others."""
        self.close()
        self.buckets.clear()
        self._free.clear()
        self.restart()

    def close(self) -> None:
        super().close()  # also takes this optimizer out of what ``agree_on_others`` has found
        for other in _live:
            other._others.discard(self.number)

    def remove_hooks(self) -> None:
        super().remove_hooks()
        _live.discard(self)

    def _hook(self, bucket: StreamedBucket, place: int, member: Member) -> Callable[[Tensor], None]:
        def gradient_arrived(_: Tensor) -> None:
            self._begin_pass(member)
            member.arrived = True
            bucket.missing.discard(place)
            self._streams.note(bucket.values)
            while self._lacks_some_of(self.passes_per_step) and not self._following.missing and self._may_launch:
                self._launch()

        # compiled autograd would trace it
        return torch.compiler.disable(gradient_arrived)

    def _begin_pass(self, arriving: Member) -> None:
        """If ``arriving`` is the first gradient of a backward pass: count the pass, and have ``_end_pass`` called."""
        task = torch._C._current_graph_task_id()
        if task == self._task:
            return
        if no_rank_had_gradients(self.counts, self.buckets):
            self.drop()
        if self._num_passes == self.passes_per_step or self.counts is not None:
            # other optimizers read this, see ``overlap.refused_passes``
            refused_passes[self._ranks] += 1
            raise RuntimeError(
                f"a gradient of {arriving.name} arrived after the {self.passes_per_step} backward passes of "
                "accumulation_steps= had been reduced, or gradients were clipped; every call of backward() counts, "
                "also those of torch.utils.checkpoint with use_reentrant=True (pass False). Call step() before the "
                "next one or, to give the batch up, zero_grad() of the optimizer (that of the model leaves the sums)"
            )
        self._task = task
        self._num_passes += 1
        # not called if an error cuts the pass short; the end of the next pass makes up for it
        Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        """Launch the rest of the rounds that this rank has had passes for, with zeros for missing gradients."""
        while self._lacks_some_of(self._num_passes) and self._may_launch:
            self._launch()

    @property
    def _may_launch(self) -> bool:
        """Whether the next reduction may be launched during backward."""
        may_wait = not self._others and self.reducer.starts_alone
        return may_wait or (bool(self._free) and self.reducer.is_ready(self._following))

    def _lacks_some_of(self, num_rounds: int) -> bool:
        """Whether some of this step's first rounds are not launched yet."""
        return self._num_launched < num_rounds * len(self.buckets)

    @property
    def _following(self) -> StreamedBucket:
        """The bucket that is launched next."""
        return self.buckets[self._num_launched % len(self.buckets)]

    def _launch(self, is_given_up: bool = False) -> None:
        bucket = self._following
        if not is_given_up:
            bucket.check_gradients()
        self._streams.follow(bucket.values)
        if not self._free:
            self._add_up()
        buffer = self._free.pop()
        places = buffer.places(bucket)
        if not is_given_up:
            with torch.no_grad():
                keep_until_read(bucket.take_gradients(places))
        contribution = places.contribution(bucket)
        self.reducer.launch(contribution)
        bucket.is_averaged = contribution.is_averaged
        self._in_flight.append((bucket, contribution, buffer))
        bucket.is_over = not self._lacks_some_of(self.passes_per_step - 1)
        self._num_launched += 1
        bucket.begin_pass()

    def _add_up(self) -> None:
        """Add the oldest reduction in flight to the sums of its bucket; its buffer is free again."""
        bucket, contribution, buffer = self._in_flight.popleft()
        with torch.no_grad():
            bucket.add(self.reducer.finish(contribution))
        self._free.append(buffer)
