"""The compiled plans of many tensors: one exchange for all tensors of a bucket, and one for each of its phases."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from optim_redist._methods.buckets import buckets_of
from optim_redist._running import collectives
from optim_redist._running.bucket_exchange import BucketExchange
from optim_redist._running.collectives import Team, Waitable
from optim_redist._running.copies import Together
from optim_redist._running.given import give_up, is_pending, resolved, resolved_donated
from optim_redist._running.stage_program import StageProgram, stage_programs
from optim_redist.errors import UnsupportedError, noting
from optim_redist.plans import Plan


class ManyProgram:
    """The compiled plans of many tensors on one rank.

    Args:
        names: the tensors' names, on which ranks must agree as on the plans; empty if names are not compared.
        memory_limit: bytes that no rank may exceed with sources, targets and buffers together.
        donate: free each source when its bucket is done.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        bucket_bytes: int,
        group: ProcessGroup | None,
        names: Sequence[str] = (),
        *,
        memory_limit: int | None = None,
        donate: bool = False,
    ) -> None:
        self.plans, self._names = list(plans), tuple(names)
        self.rank = collectives.my_rank()
        self.team: Team | None = None
        members: tuple[int, ...] = ()
        if any(made.communicates for made in plans):
            ranks = {rank for made in plans for layout in (made.src, made.dst) for rank in layout.mesh.ranks}
            self.team = Team.of(ranks, group)
            members = self.team.members
            if self.rank not in members:
                raise UnsupportedError(
                    f"rank {self.rank} is in no layout and not in the group; only ranks {members} take part"
                )
        buckets = buckets_of(plans, bucket_bytes, memory_limit, donate=donate)
        self.buckets = [bucket.numbers for bucket in buckets]
        self._bucket_bytes, self._memory_limit, self._donate = bucket_bytes, memory_limit, donate
        # the most bytes that this rank holds in each bucket; without a limit they are not counted
        self._peaks = [bucket.peak.get(self.rank, 0) for bucket in buckets]
        self.stages: list[StageProgram] = []
        self.exchanges: list[list[BucketExchange]] = []
        for bucket in buckets:
            stages = [_stage_of(plans[number], self.rank, bucket.rounds) for number in bucket.numbers]
            self.stages += stages
            depth = max(len(stage.phases) for stage in stages)
            numbered = list(zip(bucket.numbers, stages))
            self.exchanges.append([BucketExchange(numbered, k, members, bucket.alignment) for k in range(depth)])
        self._compared = self.team is None

    def device_of(self, tensors: Sequence[Tensor | None]) -> torch.device:
        """The device of the tensors, and so of the targets."""
        return next((t.device for t in tensors if t is not None), collectives.device_of(self.team))

    def run(
        self, tensors: list[Tensor | None], async_op: bool
    ) -> Generator[Waitable | None, None, list[Tensor | None]]:
        """Yields once for every exchange it has started; the caller waits and resumes. Returns the targets.

        It lets go of the ``tensors``, one bucket after the other.
        """
        device = self.device_of(tensors)
        self.compare()
        take = resolved_donated if self._donate else resolved
        targets: list[Tensor | None] = [None] * len(tensors)
        for bucket, (numbers, exchanges) in enumerate(zip(self.buckets, self.exchanges)):
            for number in numbers:
                tensors[number] = take(tensors[number])
            for number in numbers:
                targets[number] = self.stages[number].allocate(device)
            communicates = any(self.plans[number].communicates for number in numbers)
            for k, exchange in enumerate(exchanges):
                with noting(self._where, f"in exchange {k + 1} of {len(exchanges)} of", bucket):
                    sent = torch.empty(exchange.num_sent, dtype=torch.uint8, device=device)
                    Together(exchange.packing(sent, tensors, targets)).run()
                    received = torch.empty(exchange.num_received, dtype=torch.uint8, device=device)
                    work = None
                    if communicates:
                        assert self.team is not None, "plans that communicate have a team"
                        work = self.team.exchange(
                            received, sent, exchange.receive_splits, exchange.send_splits, async_op=async_op
                        )
                    Together(exchange.staying(tensors, targets)).run()
                    yield work
                    Together(exchange.unpacking(received, tensors, targets)).run()
                    exchange.end(targets)
                    # free these buffers before the next exchange makes its own
                    del sent, received, work
            for number in numbers:
                if self._donate:
                    give_up(tensors[number])
                tensors[number] = None
        return targets

    def check_resolving(self, tensors: Sequence[Tensor | None]) -> None:
        """Raise if copies that resolve pending conjugations and negations do not fit under the limit."""
        if self._memory_limit is None:
            return
        for numbers, peak in zip(self.buckets, self._peaks):
            pending = [tensor for number in numbers if is_pending(tensor := tensors[number])]
            held = peak + sum(tensor.nbytes for tensor in pending if tensor is not None)
            if pending and held > self._memory_limit:
                raise UnsupportedError(
                    f"rank {self.rank}: sources have a pending conjugation or negation, and copies that resolve it "
                    f"would be held too, {held - self._memory_limit} bytes above memory_limit={self._memory_limit}; "
                    "call with a limit that is higher by so much, or give .resolve_conj().resolve_neg() and let go of "
                    "what they were made of"
                )

    def _where(self, what: str, bucket: int) -> str:
        return f"{what} bucket {bucket + 1} of {len(self.buckets)} on rank {self.rank}"

    def compare(self) -> None:
        """At the first call, make sure that all ranks have the same plans, names and ``bucket_bytes``."""
        if not self._compared:
            assert self.team is not None, "plans that communicate have a team"
            with noting("in the comparison of {} plans on rank {}".format, len(self.plans), self.rank):
                self.team.compare(self._agreement())
            self._compared = True

    def _agreement(self) -> str:
        """All that ranks have to agree on; each line says what it is about, so that the first that differs tells."""
        lines = [
            f"tensors: {len(self.plans)}",
            f"bucket_bytes: {self._bucket_bytes}",
            f"memory_limit: {json.dumps(self._memory_limit)}",
            f"donate: {json.dumps(self._donate)}",
            *(f"name.{number}: {name}" for number, name in enumerate(self._names)),
        ]
        for name, made in zip(self._names or range(len(self.plans)), self.plans):
            of_tensor = f"{name!r}: "
            lines.append(of_tensor + made.canonical_text().replace("\n", f"\n{of_tensor}"))
        return "\n".join(lines)


def _stage_of(plan: Plan, rank: int, rounds: int) -> StageProgram:
    """A rank's part of the only stage of a plan, in so many rounds."""
    if rounds > 1:
        plan = replace(plan, stages=(plan.stages[0]._replace(rounds=rounds),))
    (stage,) = stage_programs(plan, rank)
    return stage
