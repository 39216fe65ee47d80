"""The choice among candidate plans.

``plan`` asks the planners for their candidates, but for planners that cannot be quicker than a candidate found before.
It costs all of them with one model, and keeps the cheapest; ties go to fewer steps, then to the lower peak, then to the
smaller name. It is a pure function of its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf, isnan
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

from optim_redist._dtypes import check_started, dtype_name, itemsize
from optim_redist._mesh import as_shape, coordinates, grid_points, int_tuple
from optim_redist._methods.chunked import CHUNK
from optim_redist._methods.relabel import relabelled
from optim_redist._tools.recent import Recent
from optim_redist.canonical import canonical
from optim_redist.cost import CommModel, Topology, check_topology
from optim_redist.errors import PlanInfeasibleError, RedistError
from optim_redist.layout import Layout, PartialInit, check_layouts
from optim_redist.lower_bounds import Bounds, bounds_of
from optim_redist.moves import Candidate, Request
from optim_redist.overlap import overlap
from optim_redist.planners import candidates
from optim_redist.plans import Alternative, Plan
from optim_redist.problem import Problem, check_partial_init
from optim_redist.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import torch

_CACHE_SIZE = 4096

_Decision = dict[str, Any]  # the fields of a plan besides dtype, src and dst


class _Question(NamedTuple):
    """All that a decision depends on, and the key under which it is kept.

    Plans of complex32 are shared with no other dtype of its size, since its partial results are wider.
    """

    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    partial_init: PartialInit
    itemsize: int
    of_complex_halves: bool
    model: CommModel
    memory_limit: int | None
    donate: bool
    deterministic: bool
    budget: int
    planners: tuple[str, ...] | None

    def between_canonical_layouts(self) -> _Question:
        """The question that layouts of equal ownership share.

        Layouts with pending reductions stay as they are written, since their axes decide which contributions are kept.
        For the notebook layouts stay as written, too, since its operations are named by the axes of one mesh.
        """
        if self.src.partial or self.dst.partial or "notebook" in (self.planners or ()):
            return self
        return self._replace(src=canonical(self.src, self.shape), dst=canonical(self.dst, self.shape))

    def request(self) -> Request:
        """What the planners are asked for."""
        return Request(
            Problem(self.shape, self.src, self.dst, self.partial_init),
            self.itemsize,
            self.model,
            memory_limit=self.memory_limit,
            donate=self.donate,
            budget=self.budget,
            deterministic=self.deterministic,
            of_complex_halves=self.of_complex_halves,
        )


_plans: Recent[Plan] = Recent(_CACHE_SIZE)  # keyed by layouts as the caller wrote them
_decisions: Recent[_Decision] = Recent(_CACHE_SIZE)  # keyed by questions between canonical layouts, and their names


def clear_cache() -> None:
    """Forget all cached plans, and the cached overlaps and coordinates that plans share."""
    _plans.clear()
    _decisions.clear()
    for shared in (overlap, coordinates, grid_points):
        shared.cache_clear()


def plan(
    shape: Sequence[int],
    dtype: torch.dtype | str,
    src: Layout,
    dst: Layout,
    *,
    cost_model: CommModel | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
    donate: bool = False,
    relabel: bool = False,
    deterministic: bool = False,
    planners: Sequence[str] | None = None,
    budget: int = 0,
    partial_init: PartialInit = "owner",
) -> Plan:
    """The cheapest plan that gets a tensor of this shape and dtype from ``src`` to ``dst``.

    Args:
        shape: the global shape.
        dtype: a ``torch.dtype`` or its name.
        cost_model: seconds and bytes of the machine; a flat one by default.
        topology: groups of ranks, in place of the cost model's. A model with a curve for "all_to_all" keeps what it
            measured as latency and bandwidth of a rank.
        memory_limit: bytes that no rank may exceed with source, target and buffers together.
        donate: the source may be given up once it has been read.
        relabel: the target's ranks may be renumbered so that most data stays; ``Plan.dst`` has the new numbers. They
            keep their own if only so there is a plan under ``memory_limit``.
        deterministic: reduce in rank order, whatever the library could do faster.
        planners: names of the planners to ask; by default all but "notebook", whose search takes milliseconds to
            seconds, and, without a ``budget``, "collectives".
        budget: states that the search for sequences of collectives may expand; with 0 only ``planners`` can ask for it.
        partial_init: how a reduction begins that is pending in the target and was not in the source. With "owner" the
            ranks at coordinate 0 of its axis get the value and the others the identity, so that it comes back bit for
            bit, and a NaN as some NaN. With "divide", DTensor's way, each of the n ranks along the axes of sums gets
            value / n, rounded: for sums, and averages beside them, of float16, bfloat16, float32 and float64. Then
            every rank needs the value. Averages always begin as copies of the value, and come back if their sum does
            not leave the type in which it is added up: float64 for float32, else float32.

    Raises:
        LayoutError: if a layout does not fit the shape, or is no ``Layout``.
        PlanInfeasibleError: if no candidate stays under ``memory_limit``; it carries the certificate.
        UnsupportedError: for an unknown dtype or ``partial_init``, and if the target has a reduction pending that
            elements of this dtype cannot start, or not so.
        RedistError: for unknown ``planners``, if none of the named planners fits this redistribution, and for an
            invalid ``cost_model``, ``topology`` or ``memory_limit``, or an option without a hash, as a list is.
    """
    name = dtype_name(dtype)
    sizes = as_shape(shape)
    try:
        asked = None if planners is None else tuple(planners)
        options = (cost_model, topology, memory_limit, donate, relabel, deterministic, asked, budget, partial_init)
        # layouts on axes of other names are equal, but a plan shows the names of its own
        key = (sizes, name, src, dst, src.mesh.names, dst.mesh.names, *options)
        known = _plans.find(key)
    except (TypeError, AttributeError):
        _check_arguments(src, dst, cost_model, topology, planners)
        given = {"memory_limit": memory_limit, "partial_init": partial_init, "planners": tuple(planners or ())}
        _check_hashes(shape=sizes, donate=donate, relabel=relabel, deterministic=deterministic, budget=budget, **given)
        raise
    if known is None:
        _check_arguments(src, dst, cost_model, topology, planners)
        shape = int_tuple(sizes, "sizes")
        check_partial_init(partial_init)
        check_choices(donate=donate, relabel=relabel, deterministic=deterministic)
        if not isinstance(budget, int) or budget < 0:
            raise RedistError(f"budget must be a whole number of states, 0 or more, got {budget!r}")
        if dst.partial:
            problem = Problem(shape, src, dst, partial_init)
            check_started(problem.started_ops, name, divide=partial_init == "divide")
        if not dst.partial or problem.divisor == 1:
            # nothing is divided
            partial_init = "owner"
        model = (cost_model or CommModel.preset("flat")).in_groups_of(topology)
        question = _Question(
            shape=shape,
            src=src,
            dst=dst,
            partial_init=partial_init,
            itemsize=itemsize(name),
            of_complex_halves=name == "complex32",
            model=model,
            memory_limit=whole_bytes(memory_limit),
            donate=donate,
            deterministic=deterministic,
            budget=budget,
            planners=asked,
        )
        questions = [question]
        if relabel:
            renumbered = relabelled(Problem(shape, src, dst, partial_init))
            if renumbered != dst:
                # there may be room under the limit for the target as it was given, if not for what keeps most in place
                questions.insert(0, question._replace(dst=renumbered))
        question, decision = _first_decided(questions)
        known = _as_written(decision, name, src, question.dst)
        _plans.put(key, known)
    return known


def _check_arguments(
    src: object, dst: object, cost_model: object, topology: object, planners: Sequence[str] | None
) -> None:
    """Raise for arguments that would otherwise fail far from here, in words that do not name them."""
    check_layouts(src=src, dst=dst)
    if not isinstance(cost_model, CommModel | None):
        raise RedistError(f"cost_model must be a CommModel, got {cost_model!r}; CommModel.preset(name) has known ones")
    check_topology(topology)
    # a string is a sequence of its letters
    if isinstance(planners, str) or not isinstance(planners, Iterable | None):
        raise RedistError(f"planners is {planners!r}; give a list of names")


def check_choices(**choices: object) -> None:
    """Raise ``RedistError`` for what is neither True nor False: a text such as "no" would count as True."""
    for name, value in choices.items():
        if not isinstance(value, bool):
            raise RedistError(f"{name} is True or False, got {value!r}")


def _check_hashes(**arguments: object) -> None:
    """Raise ``RedistError`` for the first argument that is, or has, something without a hash, as no valid one does."""
    for name, value in arguments.items():
        try:
            hash(value)
        except TypeError:
            raise RedistError(f"{name} cannot be {value!r}") from None


def whole_bytes(memory_limit: float | None) -> int | None:
    """A memory limit in whole bytes, so that equal limits are written alike in every canonical text; None without one.

    Raises:
        RedistError: if it is no number.
    """
    # every comparison with a limit of NaN would be false
    if memory_limit is not None and (
        not isinstance(memory_limit, Real)
        or isinstance(memory_limit, bool)
        or isnan(memory_limit)
        or memory_limit == -inf
    ):
        raise RedistError(f"memory_limit must be a number of bytes, got {memory_limit!r}")
    return None if memory_limit is None or memory_limit == inf else int(memory_limit // 1)


def _as_written(decision: _Decision, dtype: str, src: Layout, dst: Layout) -> Plan:
    """The plan between two layouts as the caller wrote them, from the decision for their canonical forms."""
    # the last step leads to the target, which its text has to show as the caller wrote it
    steps, text = decision["steps"], str(dst)
    if steps[-1].layout != text:
        steps = (*steps[:-1], steps[-1]._replace(layout=text))
    made = object.__new__(Plan)
    # a frozen dataclass's __init__ sets field after field, which takes as long as computing all bounds
    vars(made).update(decision, dtype=dtype, src=src, dst=dst, steps=steps)
    return made


def _first_decided(questions: Sequence[_Question]) -> tuple[_Question, _Decision]:
    """The first question with a plan under its memory limit, and the answer.

    Raises:
        PlanInfeasibleError: if none has; it is that of the least need, of those that not only held parts exclude.
    """
    refusals = []
    for question in questions:
        try:
            return question, _decided(question)
        except PlanInfeasibleError as error:
            refusals.append(error)
    raise min(refusals, key=lambda error: (error.proven, sum(error.terms.values())))


def _decided(question: _Question) -> _Decision:
    """The answer to the question between the canonical forms of its layouts, found once."""
    question = question.between_canonical_layouts()
    key = question, question.src.mesh.names, question.dst.mesh.names
    known = _decisions.find(key)
    if known is None:
        known = _decide(question.request(), question.planners)
        _decisions.put(key, known)
    return known


def _decide(request: Request, asked: tuple[str, ...] | None) -> _Decision:
    """The cheapest candidate, as the fields of its plan."""
    problem, model = request.problem, request.model
    limits = bounds_of(problem, model.topology, itemsize=request.itemsize)
    found, hopeless = candidates(request, limits, asked)
    fitting = [c for c in found if request.allows(c.peak_bytes)]
    if not fitting:
        raise _infeasible(request, limits, asked)
    chosen = min(fitting, key=lambda c: (c.seconds, len(c.steps), c.peak_bytes, c.planner))
    lost = [Alternative(c.planner, c.seconds, _why_not(c, chosen, request)) for c in found if c is not chosen]
    lost += [Alternative(*other) for other in hopeless]
    seconds = chosen.seconds
    return {
        "shape": problem.shape,
        "model": model.id,
        "topology": model.topology,
        "planner": chosen.planner,
        "stages": chosen.stages,
        "steps": chosen.steps,
        "bounds": limits,
        "time": seconds,
        "peak_bytes": chosen.peak_bytes,
        "gap": seconds / limits.seconds - 1 if limits.seconds else 0.0,
        "volume_ratio": chosen.busiest / limits.lb if limits.lb else 1.0,
        "memory_limit": request.memory_limit,
        "donate": request.donate,
        "deterministic": request.deterministic,
        "alternatives": tuple(lost),
        "partial_init": problem.partial_init,
    }


def _why_not(loser: Candidate, winner: Candidate, request: Request) -> str:
    # differences are written out, as three digits may not tell the two times or sizes apart
    if not request.allows(loser.peak_bytes):
        assert request.memory_limit is not None
        above = format_bytes(loser.peak_bytes - request.memory_limit)
        peak = f"its peak of {format_bytes(loser.peak_bytes)} is {above} above the limit"
        return f"takes {format_seconds(loser.seconds)}, and {peak}"
    if loser.seconds > winner.seconds:
        more = format_seconds(loser.seconds - winner.seconds)
        return f"takes {format_seconds(loser.seconds)}, {more} more than {winner.planner}"
    more_steps, higher = len(loser.steps) > len(winner.steps), loser.peak_bytes > winner.peak_bytes
    better = "has fewer steps" if more_steps else "has a lower peak" if higher else "is as good in all else"
    return f"as fast as {winner.planner}, which {better}"


def _infeasible(request: Request, limits: Bounds, asked: tuple[str, ...] | None) -> PlanInfeasibleError:
    """The certificate: what the fullest rank holds in any case, and the buffers that the planners need besides."""
    assert request.memory_limit is not None
    problem, width = request.problem, request.itemsize
    needs = []
    for rank, (src, dst) in problem.num_stored.items():
        # a part that stays as it is may be its own target
        once = request.donate or problem.stays_whole(rank)
        needs.append((max(src, dst) if once else src + dst, -rank, src, dst))
    need, negative_rank, src, dst = max(needs)
    terms = {"source": src * width, "target": dst * width}
    if need != src + dst:
        terms = {"larger of source and target": need * width}
    proven = request.memory_limit < need * width
    if not proven:
        buffers = _least_that_fits(request, limits, asked) - need * width
        terms["one chunk" if buffers == CHUNK else "buffers"] = buffers
    return PlanInfeasibleError(-negative_rank, terms, request.memory_limit, proven=proven)


def _least_that_fits(request: Request, limits: Bounds, asked: tuple[str, ...] | None) -> int:
    """A limit under which there is a plan: the least peak with room for one chunk of buffers, more if need be."""
    room = CHUNK
    while True:
        enough = limits.memory * request.itemsize + room
        found, _ = candidates(replace(request, memory_limit=enough), limits, asked)
        least = min(candidate.peak_bytes for candidate in found)
        if least <= enough:
            return least
        room *= 2
