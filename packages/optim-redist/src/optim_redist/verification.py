"""Proof that a plan is right, by interval algebra and without any tensor.

After every phase the verifier knows which boxes each rank has in its target and which contributions are in them. It
checks that

1. a sender holds what it sends: in its source, or finished in its target by an earlier phase;
2. nothing arrives twice: no element, and no contribution to one; contributions to one element arrive together;
3. nothing arrives that is not needed, and in the end everything needed is there, with every contribution once;
4. the stages lead from the plan's source to its target;
5. volumes and bounds are what the plan claims, no rank holds more than it claims or its memory limit allows, and none
   receives less than what it lacks.

It proves the plan, not the program: that every contribution arrives once, but not the arithmetic with which a rank
combines contributions. ``simulate`` runs that in one process, so that its results can be compared with expected sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from optim_redist._methods.borders import volumes_of
from optim_redist._methods.own import is_in_order
from optim_redist._methods.packed import packed_peak
from optim_redist.boxes import Box, DisjointBoxes, volume
from optim_redist.errors import RedistError
from optim_redist.index_sets import intersect, size
from optim_redist.lower_bounds import bounds_of, crossing
from optim_redist.moves import FINISHED, Phase, Step, Transfer, added_up
from optim_redist.ownership import same_ownership
from optim_redist.planners import held_without_moves
from optim_redist.plans import Plan, check_plan
from optim_redist.problem import Problem


@dataclass(frozen=True)
class Verification:
    """What a right plan moves, in elements.

    Attributes:
        received, sent: by rank, over all phases.
        peak: the most that a rank holds at once, buffers included, without the partial results of a reduction.
    """

    received: dict[int, int]
    sent: dict[int, int]
    peak: int


@dataclass
class _Target:
    """What has arrived at one rank: boxes by contribution, FINISHED for finished values."""

    arrived: dict[int, DisjointBoxes] = field(default_factory=lambda: defaultdict(DisjointBoxes))

    @property
    def finished(self) -> tuple[DisjointBoxes, DisjointBoxes]:
        """Complete boxes: of finished values, and of contribution 0, with which all others arrive."""
        return self.arrived[FINISHED], self.arrived[0]


def verify(plan: Plan) -> Verification:
    """Prove the plan right, or say what is wrong with it.

    Raises:
        RedistError: naming the step, the ranks and the elements that break it.
    """
    check_plan(plan)
    if not plan.stages:
        raise RedistError("the plan has no stages")
    if not same_ownership(plan.stages[0].src, plan.src, plan.shape):
        raise RedistError("the plan starts at another layout than its source")
    if not same_ownership(plan.stages[-1].dst, plan.dst, plan.shape):
        raise RedistError("the plan ends at another layout than its target")
    peak = 0
    steps = list(plan.steps)
    for number, (problem, phases) in enumerate(plan.phases):
        if number and not same_ownership(plan.stages[number - 1].dst, problem.src, plan.shape):
            raise RedistError(f"stage {number} starts where stage {number - 1} does not end")
        _verify_stage(problem, phases)
        rounds = plan.stages[number].rounds
        for k in range(0, len(phases), rounds):
            whole = Phase(phases[k].name, tuple(t for phase in phases[k : k + rounds] for t in phase.transfers))
            if not steps:
                raise RedistError(f"the plan lists {len(plan.steps)} steps, its stages have more")
            _verify_step(plan, steps.pop(0), whole)
        peak = max(peak, _peak(plan, number, problem, phases))
    if steps:
        raise RedistError(f"the plan lists {len(steps)} more steps than its stages have")
    if peak * plan.itemsize > plan.peak_bytes:
        raise RedistError(f"the plan claims a peak of {plan.peak_bytes} bytes, its steps reach {peak * plan.itemsize}")
    if plan.memory_limit is not None and plan.peak_bytes > plan.memory_limit:
        raise RedistError(f"the plan claims a peak of {plan.peak_bytes} bytes, its limit is {plan.memory_limit}")
    every_phase = [phase for _, phases in plan.phases for phase in phases]
    received, sent = added_up(map(Phase.received, every_phase)), added_up(map(Phase.sent, every_phase))
    _verify_bounds(plan, received, sent)
    return Verification(received, sent, peak)


def _peak(plan: Plan, number: int, problem: Problem, phases: Sequence[Phase]) -> int:
    """Elements that the fullest rank holds during a stage."""
    if plan.stages[number].method == "packed":
        if not plan.donate:
            raise RedistError("only a donated source is packed and given up before the target is there")
        return packed_peak(problem, volumes_of(phases[0], plan.topology))
    if not plan.communicates and len(plan.stages) == 1:
        return held_without_moves(problem)
    # the caller's source stays while later stages run, unless it was given up
    aside = {} if plan.donate or not number else plan.phases[0][0].num_stored
    most = 0
    for phase in phases:
        came, went = phase.received(), phase.sent()
        for rank, held in problem.num_stored.items():
            kept = aside[rank][0] if rank in aside else 0
            most = max(most, sum(held) + came.get(rank, 0) + went.get(rank, 0) + kept)
    return most


def _verify_stage(problem: Problem, phases: Sequence[Phase]) -> None:
    targets: dict[int, _Target] = {rank: _Target() for rank in problem.dst_points}
    for phase in phases:
        for transfer in phase.transfers:
            _check_sender(problem, targets, transfer, phase.name)
        # all reads come before all writes
        for transfer in phase.transfers:
            _receive(problem, targets, transfer, phase.name)
        if problem.num_contributions > 1:
            _check_combined(problem, phase)
    for rank, target in targets.items():
        _check_complete(problem, rank, target)


def _check_sender(problem: Problem, targets: dict[int, _Target], transfer: Transfer, step: str) -> None:
    def where() -> str:
        return f"step {step!r}: rank {transfer.sender} sends {_text(transfer.box)} to rank {transfer.receiver}"

    if transfer.read == "src":
        held = problem.held(transfer.sender)
        if held is None or not _inside(transfer.box, held):
            raise RedistError(f"{where()}, which it does not hold")
        expected = problem.contribution[transfer.sender] if problem.num_contributions > 1 else FINISHED
        if transfer.contribution != expected:
            raise RedistError(f"{where()} as contribution {transfer.contribution}, it holds contribution {expected}")
        return
    target = targets.get(transfer.sender)
    arrived = 0 if target is None else sum(boxes.num_common(transfer.box) for boxes in target.finished)
    if arrived != volume(transfer.box):
        raise RedistError(f"{where()}, which has not arrived there by then")
    if transfer.contribution != FINISHED:
        raise RedistError(f"{where()} as a contribution, though it is finished")


def _receive(problem: Problem, targets: dict[int, _Target], transfer: Transfer, step: str) -> None:
    def where() -> str:
        return f"step {step!r}: {_text(transfer.box)} from rank {transfer.sender} comes to rank {transfer.receiver}"

    needed = problem.needed(transfer.receiver)
    if needed is None or not _inside(transfer.box, needed):
        raise RedistError(f"{where()}, which does not need it")
    arrived = targets[transfer.receiver].arrived
    # a finished value counts as a second one where contributions have arrived, and the other way round
    other = 0 if transfer.contribution == FINISHED else FINISHED
    if any(arrived[number].num_common(transfer.box) for number in (transfer.contribution, other)):
        raise RedistError(f"{where()} a second time")
    arrived[transfer.contribution].add(transfer.box)


def _check_combined(problem: Problem, phase: Phase) -> None:
    """Every phase combines what it brings, so all contributions to an element have to arrive in one phase."""
    came: dict[int, dict[int, list[Box]]] = {}
    for t in phase.transfers:
        if t.contribution != FINISHED:
            came.setdefault(t.receiver, {}).setdefault(t.contribution, []).append(t.box)
    for rank, boxes in came.items():
        reduced = DisjointBoxes(boxes.get(0, ()))
        for c in range(1, problem.num_contributions):
            other = boxes.get(c, [])
            common = sum(map(reduced.num_common, other))
            if common != reduced.num_elements or sum(map(volume, other)) != reduced.num_elements:
                raise RedistError(
                    f"step {phase.name!r}: rank {rank} combines different elements of contributions 0 and {c}"
                )


def _check_complete(problem: Problem, rank: int, target: _Target) -> None:
    needed = problem.num_needed(problem.dst_points[rank])
    found = sum(boxes.num_elements for boxes in target.finished)
    if found != needed:
        raise RedistError(f"rank {rank} ends with {found} of the {needed} elements it needs")


def _verify_step(plan: Plan, step: Step, phase: Phase) -> None:
    recv, send = max(phase.received().values(), default=0), max(phase.sent().values(), default=0)
    if (step.recv, step.send) != (recv, send):
        raise RedistError(
            f"step {step.op!r} claims to receive {step.recv} and send {step.send} elements on the busiest ranks, "
            f"its transfers are {recv} and {send}"
        )
    if step.bytes != max(recv, send) * plan.itemsize:
        raise RedistError(f"step {step.op!r} claims {step.bytes} bytes for {max(recv, send)} elements")


def _verify_bounds(plan: Plan, received: dict[int, int], sent: dict[int, int]) -> None:
    problem = plan.problem
    for rank in problem.ranks:
        inbound, outbound = crossing(problem, (rank,))
        if received.get(rank, 0) < inbound or sent.get(rank, 0) < outbound:
            raise RedistError(f"rank {rank} cannot receive less than {inbound} and send less than {outbound} elements")
    busiest = max((*received.values(), *sent.values()), default=0)
    limits = bounds_of(problem, plan.topology, itemsize=plan.itemsize)
    if plan.bounds != limits:
        raise RedistError(f"the plan claims {plan.bounds}, its source and target give {limits}")
    if busiest < limits.lb:
        raise RedistError(f"the busiest rank moves {busiest} elements, the bound is {limits.lb}")
    # compare quotients, as the plan computed its own: a product of large numbers would round
    ratio = busiest / limits.lb if limits.lb else plan.volume_ratio
    if not ratio <= plan.volume_ratio or (ratio < plan.volume_ratio and _counts_by_rank(plan)):
        raise RedistError(f"the busiest rank moves {busiest} elements, the plan claims {plan.volume_ratio} × the bound")


def _counts_by_rank(plan: Plan) -> bool:
    """Whether planning counts what each rank moves over all stages; else a stage counts as its busiest rank."""
    in_order = (is_in_order(problem, "direct", plan.topology) for problem in plan.problems)
    return len(plan.stages) == 1 or all(in_order)


def _inside(part: Box, whole: Box) -> bool:
    return all(size(intersect(a, b)) == size(a) for a, b in zip(part, whole))


def _text(box: Box) -> str:
    """A box by the first and last index of every dimension."""
    return "×".join(f"[{indices[0].start}..{max(run.stop for run in indices) - 1}]" for indices in box)
