"""Plain parameters over several ranks, in buckets: gradients reduced to owners, updates there, parameters gathered.

No condition that may differ between ranks (a gradient is missing, nothing is owned, a gradient came early) decides
whether or when a collective runs.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from optim_dist._optimizers.agreement import Comparison, check_replicas, synchronise
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.messages import StepMessages
from optim_dist._optimizers.options import Options
from optim_dist._optimizers.shards import Shard, attach_gradients, bucket_shards
from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.forward_gathers import ForwardGathers
from optim_dist._reduction.groups import gathered
from optim_dist._reduction.peers import PeerCommunicator
from optim_dist._reduction.storage import ParameterBucket, no_rank_had_gradients
from optim_dist._reduction.streamed import StreamedReduction
from optim_dist.overlap import BackwardReduction
from optim_dist.plan import Plan
from optim_dist.reducers import Exact, ExactOfPeers, Reducer, ReduceScatter

Update = Callable[[ParameterBucket], None]

_FIRST_NO_SYNC = "the first no_sync()"
_OTHERWISE = "does something else meanwhile; every rank begins with no_sync() in the same step"


class BucketedParameters:
    """The buckets of one optimizer, their reductions and gathers, and the shards that this rank owns of them."""

    def __init__(self, communicator: Communicator, options: Options) -> None:
        self._communicator = communicator
        self._backward_communicator: Communicator | None = None  # once reductions may run under backward
        self._options = options
        device = communicator.device
        self._factors = self._factors_in(torch.float32)
        self.shards_of: dict[ParameterBucket, list[Shard]] = {}  # what this rank owns of each
        # steps are watched where reading messages costs nothing, or to debug
        self._messages = StepMessages(communicator, is_watched=device.type == "cpu" or options.debug)
        self._is_retried = False  # whether this step's last reductions found nothing on any rank
        self.present: list[float] = []  # by ``reduce``: 1 for each parameter of the plan with a gradient on this rank
        self.lacks_none = False  # whether all parameters in buckets have one
        self.buckets: list[ParameterBucket] = []
        self._order: list[ParameterBucket] = []  # in which they are updated and gathered
        self.reduction = self._new_reduction()
        weakref.finalize(self, self.reduction.remove_hooks)
        self._reducer: Reducer | None = None
        self._gathers: ForwardGathers | None = None
        self._at_end: weakref.finalize[..., Any] | None = None  # what becomes of gathers in flight

    def _factors_in(self, dtype: torch.dtype) -> dict[bool, Tensor | None]:
        """See ``factors``."""
        number = partial(torch.tensor, dtype=dtype, device=self._communicator.device)
        world_size, average = self._communicator.world_size, self._options.average
        return {False: number(1 / world_size) if average else None, True: None if average else number(world_size)}

    def extend(self, plan: Plan, entries: Sequence[Entry]) -> None:
        """Build the plan's new buckets, and move their parameters into them."""
        if plan.scalar_dtype != torch.float32:
            self._factors = self._factors_in(plan.scalar_dtype)
        self.wait()
        self._messages.agree_on_number()
        parameters = [entry.parameter for entry in entries]
        new = [
            self.reduction.build(bucket, plan.parameters, parameters, self._communicator)
            for bucket in plan.buckets[len(self.buckets) :]
        ]
        synchronise(new, self._communicator, self._options.sync_params)
        self.buckets += new
        for bucket in new:
            self.shards_of[bucket] = bucket_shards(bucket, plan.parameters, entries)
        options = self._options
        self._reducer = self._new_reducer()
        if options.accumulation_steps is not None or self._backward_communicator is not None:
            self._use_backward_communicator(self._reducer)
        self.reduction.extend(new, self._reducer)
        if isinstance(self.reduction, StreamedReduction):
            self.reduction.agree_on_others(self._communicator, self._messages.number)
        if options.model is not None and options.overlap:
            if self._gathers is not None:
                self._gathers.close()
            if self._at_end is not None:
                self._at_end.detach()
            self._gathers = ForwardGathers(options.model, self.buckets, watches_reads=options.debug)
            self._at_end = weakref.finalize(self, self._gathers.release, self._communicator)
            self._at_end.atexit = False
        self._order = self._in_order()
        if self._gathers is not None and isinstance(self.reduction, BackwardReduction):
            self.reduction.arrange(self._order)

    def _new_reducer(self) -> Reducer:
        """A reducer for all buckets."""
        options = self._options
        if options.reducer == "rs":
            return ReduceScatter(self._communicator, options.reduce_dtype)
        dtypes = options.reduce_dtype, options.reduced_dtype
        exact = ExactOfPeers if self._by_copies and self._communicator.world_size > 1 else Exact
        return exact(self._communicator, *dtypes, self.buckets, in_pairs=options.is_tree)

    def clear(self) -> list[ParameterBucket]:
        """Let go of all buckets between two steps, so that ``extend`` can make others; the caller releases them."""
        self.detach()
        former, self.buckets, self._order = self.buckets, [], []
        self.shards_of.clear()
        self.reduction.clear()
        if not self._by_copies:  # else other ranks may still be reading
            if self._reducer is not None:
                del self.reduction.reducer
                self._reducer = None
            for bucket in former:
                bucket.free_gradients()
        return former

    def check_pointers(self) -> None:
        """Refuse parameters that have left their buckets."""
        for bucket in self.buckets:
            bucket.check_pointers()

    @property
    def shards(self) -> list[Shard]:
        """What this rank owns, bucket by bucket."""
        return [shard for shards in self.shards_of.values() for shard in shards]

    @property
    def collects_under_backward(self) -> bool:
        """Whether backward reduces gradients, or brings them into buckets for copies that will."""
        return bool(self.buckets) and self.reduction.knows_last_pass

    @property
    def counts(self) -> Tensor | None:
        """For each parameter of the plan, on how many ranks it has a gradient; None before ``reduce``."""
        return self.reduction.counts

    @property
    def gradient_bytes(self) -> int:
        """Bytes for gradients that stay allocated."""
        return self.reduction.gradient_bytes

    # a step

    def check(self) -> None:
        """Refuse what has gone wrong on this rank; called before gradients are reduced, and once more afterwards."""
        if no_rank_had_gradients(self.counts, self.buckets):
            # a rank on which a gradient has arrived since has already dropped the reduction
            self._is_retried = True
            self.reduction.drop()
        elif self.counts is not None and any(self.present) and self.reduction.were_gradients_dropped():
            self.reduction.drop()  # the step was skipped after clipping; ranks with new gradients have dropped it
        if self.counts is None:
            if self._gathers is not None:
                self._gathers.check()
            if self.reduction.any_rank_may_have_launched and self.reduction.were_gradients_dropped():
                self.reduction.drop()  # the batch was given up, and this rank has no new gradients
            self.check_pointers()
        for bucket in self.buckets:
            bucket.check_gradients()

    def reduce(self, num_parameters: int) -> bool:
        """Agree on which gradients exist, and launch every reduction; once a step, and again if no rank had any.

        Returns whether there may be gradients that were missing at the last call.
        """
        if not self.buckets:
            return False
        if self.counts is not None:
            if self._messages.is_watched:
                self._messages.gathered()  # other ranks may have given up the step that this rank goes on with
            return False
        present = self.present = [0.0] * num_parameters
        self.lacks_none = True
        for bucket in self.buckets:
            found = bucket.presence()
            self.lacks_none &= all(found)
            for slot, has_gradient in zip(bucket.plan.slots, found):
                present[slot.parameter] = 1.0 if has_gradient else 0.0
        self._messages.write(present, self.reduction.num_given_up)
        self._launch_before_message()
        self.reduction.counts = self._messages.gathered().sum(0)
        self.reduction.launch_all()
        is_retried, self._is_retried = self._is_retried, False
        return not (is_retried and no_rank_had_gradients(self.counts, self.buckets))

    def _launch_before_message(self) -> None:
        """Launch the reductions that come before messages are gathered, which are the same on every rank.

        If backward reduces, ranks have launched different numbers of buckets by now, so these are all; also all if
        copies are to overlap with backward. Otherwise no bucket is launched yet: none comes before a message that is
        read at once and may stop the step, else the first, whose reduction the first update waits for anyway.
        """
        reduction, is_watched = self.reduction, self._messages.is_watched
        if reduction.launches_under_backward or (reduction.knows_last_pass and not is_watched):
            reduction.launch_all()
        elif isinstance(reduction, BackwardReduction) and not is_watched:
            reduction.launch_first()

    @property
    def factors(self) -> dict[bool, Tensor | None]:
        """Factors from reduced gradients to the average, or sum, asked for; by ``ParameterBucket.is_averaged``."""
        return {each: self._factors[each] for each in sorted({bucket.is_averaged for bucket in self.buckets})}

    def reduced_gradients(self, is_averaged: bool) -> list[Tensor]:
        """This rank's reduced chunks of the buckets whose gradients are averages already, or of those of sums."""
        return [self.reduction.finish(bucket) for bucket in self.buckets if bucket.is_averaged is is_averaged]

    def overflow(self) -> Tensor:
        """1 if this rank's chunks have an inf or NaN, else 0."""
        chunks = map(self.reduction.finish, self.buckets)
        largest = torch.stack([torch.linalg.vector_norm(chunk, float("inf")) for chunk in chunks])
        return (~torch.isfinite(largest)).any().float()

    def update(self, update: Update) -> None:
        """Update bucket by bucket, overlapping each gather with the next update; call ``finish_step`` afterwards."""
        for bucket in self._order:
            attach_gradients(bucket, self.shards_of[bucket], self.reduction.finish(bucket))
            update(bucket)
            bucket.gathering = self._communicator.all_gather_(bucket.values)

    def finish_step(self) -> None:
        """Wait for the gathers that do not run into the next forward pass."""
        if self._gathers is None:
            self.wait()
        else:
            self._gathers.defer()

    def _in_order(self) -> list[ParameterBucket]:
        """The buckets in the order in which they are updated and gathered.

        If gathers overlap with the next forward pass: in its order, but one bucket of matrices first, so that the other
        buckets' reductions overlap with its Newton–Schulz. Otherwise: in the order of reduction, but the last bucket of
        matrices at the end, so that the gathers of elementwise buckets overlap with its Newton–Schulz instead of with
        nothing.
        """
        if self._gathers is not None:
            forward = sorted(self.buckets, key=lambda bucket: min(member.index for member in bucket.members))
            first = [bucket for bucket in forward if bucket.plan.route == "muon"][:1]
            return [*first, *(bucket for bucket in forward if bucket not in first)]
        last = [bucket for bucket in self.buckets if bucket.plan.route == "muon"][-1:]
        return [*(bucket for bucket in self.buckets if bucket not in last), *last]

    def restart(self) -> None:
        """Forget this step's reductions: the next gradients belong to a new step."""
        self.reduction.restart()

    def finish_launched(self) -> None:
        """Let reductions in flight end before the caller reads gradients, and let later ones begin after that read."""
        self.reduction.finish_launched()

    def drop(self, is_agreed: bool = False) -> None:
        """Give up this step's reductions; ``is_agreed``: all ranks do, also those that know of none."""
        self.reduction.drop(is_agreed)

    def agree_between_steps(self) -> bool:
        """Whether no rank has got a gradient since the last step that is still there; all then give up what others had.

        Collective.
        """
        # ranks agree first, as dropping reductions is collective
        found = self._communicator.gather_json(
            [self.reduction.has_gradients, self.reduction.any_rank_may_have_launched]
        )
        if any(has_gradients for has_gradients, _ in found):
            return False
        self.drop(is_agreed=any(may_have_launched for _, may_have_launched in found))
        return True

    def gather(self) -> None:
        """Gather every rank's part of the parameters on all ranks."""
        for bucket in self.buckets:
            bucket.gathering = self._communicator.all_gather_(bucket.values)
        self.wait()

    def wait(self) -> None:
        """Let the current stream wait for every gather in flight."""
        if self._gathers is not None:
            self._gathers.wait()
        for bucket in self.buckets:
            bucket.finish_gathering()

    def prefetch(self, module: nn.Module) -> None:
        """Let the current stream wait for the gathers of a module's parameters."""
        # without them no gather is in flight between two steps
        if self._gathers is not None:
            self._gathers.fetch({id(parameter) for parameter in module.parameters()})

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate. The first call is collective."""
        if self._reducer is None:
            return nullcontext()
        if self._by_copies and self._options.overlap and not self.reduction.knows_last_pass:
            # from here on reductions are launched in another order
            gathered(self._communicator, _FIRST_NO_SYNC, None, _OTHERWISE)
        self._use_backward_communicator(self._reducer)
        return self.reduction.no_sync()

    @property
    def _by_copies(self) -> bool:
        """Whether reductions are copies, which must not be launched before the step."""
        return isinstance(self._communicator, PeerCommunicator) and not self._options.is_streamed

    def _use_backward_communicator(self, reducer: Reducer) -> None:
        """Give reductions a group of their own if they may be launched during backward.

        A rank that lacks a gradient launches the reductions from that bucket on only at its step: after collectives of
        others (another optimizer, the user, FSDP) that on other ranks come after these reductions.
        """
        if not self._options.overlap or self._by_copies or reducer.communicator is self._backward_communicator:
            return
        if self._backward_communicator is None:
            self._backward_communicator = self._options.backward_communicator(self._communicator)
            if isinstance(self.reduction, BackwardReduction):
                self.reduction.finish_launched()  # streamed reductions have their own group from the start
            # also at exit, if nobody has closed the optimizer
            weakref.finalize(self, _let_go, self.reduction, self._backward_communicator)
        reducer.communicator = self._backward_communicator
        reducer.connect(self.buckets)

    def check_replicas(self, comparison: Comparison) -> None:
        """Refuse parameters whose bits differ between ranks."""
        self.wait()
        check_replicas(self.buckets, self._communicator, comparison)

    @property
    def _communicators(self) -> list[Communicator]:
        return [each for each in (self._communicator, self._backward_communicator) if each is not None]

    def keep_groups(self) -> None:
        """Leave no group to other optimizers: ranks may have launched different collectives."""
        for each in self._communicators:
            each.keep_group()

    def detach(self, is_failed: bool = False, is_everywhere: bool = False) -> bool:
        """Release hooks. Finish what is in flight, unless this rank has failed or lost the others.

        Args:
            is_everywhere: all ranks detach, whatever they have launched.

        Returns whether nothing is in flight any more.
        """
        is_finished = not is_failed and all(each.is_usable for each in self._communicators)
        if self.reduction.has_launched or not is_finished:
            self.keep_groups()
        try:
            if is_finished:
                is_finished = self._end_reductions(is_everywhere)
                self.wait()
            elif self.reduction.has_launched:
                self._abandon_backward_communicator()
        finally:
            self.reduction.close()
            if self._gathers is not None:
                self._gathers.close()
        return is_finished

    def _end_reductions(self, is_everywhere: bool) -> bool:
        """Give up an unfinished step, not waiting for ranks that may not come; return whether nothing is in flight.

        Ranks that got no gradient know of no reduction, and a rank with an error closes its optimizer alone.
        """
        if self.counts is not None:
            self.drop()  # all ranks have launched all reductions
            return True
        if self._communicator.device.type == "cuda":
            # No host waits here, but a reduction that other ranks do not launch would stay on the device. So ranks
            # launch what others may have launched; but a rank that handles an error may be alone in closing.
            is_agreed = is_everywhere and self.reduction.launches_under_backward and sys.exc_info()[0] is None
            if is_agreed or self.reduction.any_rank_may_have_launched:
                if not is_agreed:
                    self.keep_groups()
                    self._communicator.leave_memory()
                self.drop(is_agreed)
                for bucket in self.buckets:
                    bucket.drop_gradients()
            return True
        if not self.reduction.abandon():
            return True
        self._abandon_backward_communicator()
        return False

    def _abandon_backward_communicator(self) -> None:
        """Give up the group of reductions, in which unfinished ones would block all later ones."""
        if self._backward_communicator is not None:
            self._backward_communicator.abandon()
        self._backward_communicator = self._reducer = None

    def close(self, is_failed: bool = False) -> None:
        """Release hooks and storage; parameters and gradients become ordinary tensors again."""
        is_finished = False
        try:
            is_finished = self.detach(is_failed, is_everywhere=True)
        finally:
            if not is_finished:
                self._communicator.leave_memory()
            for bucket in self.buckets:
                bucket.release()
            self.shards_of.clear()
            self.buckets, self._order = [], []
            if is_finished and self._reducer is not None:  # else memory may still be written to
                self.reduction.clear()
                del self.reduction.reducer
                self._reducer = None
            if is_finished:
                for communicator in self._communicators:
                    communicator.give_back()

    def _new_reduction(self) -> BackwardReduction | StreamedReduction:
        options, ranks = self._options, self._communicator.ranks
        if options.is_streamed:
            assert options.accumulation_steps is not None, "options are checked"
            return StreamedReduction(options.accumulation_steps, ranks, options.dtype_of_sums, options.is_tree)
        return BackwardReduction(options.accumulation_steps, options.overlap, ranks, by_copies=self._by_copies)


def _let_go(reduction: BackwardReduction | StreamedReduction, communicator: Communicator) -> None:
    """Leave the group of reductions to the next optimizer.

    If some are unfinished, which other ranks may not have launched, nobody waits for them or uses the group any more.
    On a GPU what no other rank launches stays on the device until NCCL's timeout ends the process, as it would if the
    optimizer were still there. Aborting the group is no remedy: ``ncclCommAbort`` may wait for the whole device, and
    for what is stuck in other groups, and this runs wherever garbage is collected. ``close()`` ends it on all ranks.
    """
    if reduction.has_launched:
        communicator.abandon()
    else:
        communicator.give_back()
