"""A plan: how one tensor gets from one layout to another, what that costs, and what no other plan can beat."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from optim_redist._dtypes import dtype_name, itemsize
from optim_redist._mesh import int_tuple
from optim_redist._methods.candidates import phases_of
from optim_redist._tools.files import check_object, record, undamaged
from optim_redist._tools.lazy import lazy
from optim_redist.cost import Topology
from optim_redist.errors import RedistError
from optim_redist.layout import Layout, PartialInit
from optim_redist.lower_bounds import Bounds
from optim_redist.moves import Phase, Stage, Step
from optim_redist.problem import Problem, check_partial_init

if TYPE_CHECKING:
    from optim_redist.pictures import PictureFormat

_FORMAT = "optim-redist.plan"
_VERSION = 1


class Alternative(NamedTuple):
    """A plan that was not chosen, and why; of a planner that was not asked, the least seconds that it can take."""

    planner: str
    seconds: float
    reason: str


@dataclass(frozen=True)
class Plan:
    """How one tensor gets from one layout to another; immutable and the same on every rank.

    Attributes:
        shape, dtype, src, dst: the task.
        model: id of the cost model that the choice was made by.
        topology: the cost model's groups of ranks.
        planner: name of the planner that made the plan.
        stages: the layouts the plan goes through, each with the method that leads to it.
        steps: the exchanges, with what they move and cost.
        bounds: what no plan can beat.
        time: predicted seconds.
        peak_bytes: bytes that no rank exceeds with source, target and buffers: the largest ``peak`` of the steps.
        gap: time above the bound on time, relative to it; 0 if nothing moves.
        volume_ratio: volume of the busiest rank over ``bounds.lb``; 1 if nothing has to move.
        memory_limit: the limit that the plan respects, in bytes.
        donate: whether the source may be overwritten.
        deterministic: whether reductions run in rank order everywhere.
        alternatives: the candidates that lost, and the planners that were not asked.
        partial_init: how pending reductions of the target begin.
    """

    shape: tuple[int, ...]
    dtype: str
    src: Layout
    dst: Layout
    model: str
    topology: Topology
    planner: str
    stages: tuple[Stage, ...]
    steps: tuple[Step, ...]
    bounds: Bounds
    time: float
    peak_bytes: int
    gap: float
    volume_ratio: float
    memory_limit: int | None
    donate: bool
    deterministic: bool
    alternatives: tuple[Alternative, ...]
    partial_init: PartialInit = "owner"

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    @lazy
    def hash(self) -> str:
        """SHA-256 of ``canonical_text``."""
        return hashlib.sha256(self.canonical_text().encode()).hexdigest()

    def canonical_text(self) -> str:
        """All that ranks have to agree on, as lines of "path: value", one for each number or name in ``to_json``.

        Layouts appear in canonical form and without names of axes, so plans between layouts of equal ownership have
        equal texts, however the layouts are written. Layouts with pending reductions, and those of a plan for which the
        notebook's planner was asked, appear as they are written.
        """
        found = self.to_json()
        for name in ("src", "dst", "alternatives"):
            del found[name]
        for stage in found["stages"]:
            for side in ("src", "dst"):
                stage[side]["mesh"]["names"] = None
        for step in found["steps"]:
            del step["layout"]
        return "\n".join(f"{name}: {json.dumps(value)}" for name, value in _leaves("plan", found))

    @property
    def communicates(self) -> bool:
        """Whether any rank sends anything."""
        return any(step.recv for step in self.steps)

    @lazy
    def problem(self) -> Problem:
        """The redistribution as a whole."""
        return Problem(self.shape, self.src, self.dst, self.partial_init)

    @lazy
    def problems(self) -> tuple[Problem, ...]:
        """The redistribution that every stage has to make."""
        return tuple(Problem(self.shape, stage.src, stage.dst, self.partial_init) for stage in self.stages)

    @lazy
    def phases(self) -> tuple[tuple[Problem, tuple[Phase, ...]], ...]:
        """For every stage its problem and the transfers of its phases."""
        stages = zip(self.problems, self.stages, strict=True)
        return tuple((problem, tuple(phases_of(problem, stage, self.topology))) for problem, stage in stages)

    def __str__(self) -> str:
        from optim_redist.plan_text import plan_table

        return plan_table(self)

    def explain(self) -> str:
        """Why this plan was chosen, what limits its time, and what every alternative would cost."""
        from optim_redist.plan_text import explain

        return explain(self)

    def picture(self, fmt: PictureFormat = "ascii") -> Any:
        """Source, the layout after each stage, and bytes from rank to rank: text, SVG text or a matplotlib figure."""
        from optim_redist.pictures import plan_picture
        from optim_redist.plan_text import traffic

        layouts = [("source", self.src)]
        layouts += [(f"after {stage.op}", stage.dst) for stage in self.stages[:-1]]
        layouts.append(("target", self.dst))
        ranks = sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks})
        sent = {pair: count * self.itemsize for pair, count in traffic(self).items()}
        return plan_picture(layouts, self.shape, ranks, sent, fmt)

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data; ``from_json`` reads it back."""
        found = {
            "format": f"{_FORMAT}/{_VERSION}",
            "shape": list(self.shape),
            "dtype": self.dtype,
            "src": self.src.to_json(),
            "dst": self.dst.to_json(),
            "model": self.model,
            "topology": self.topology.to_json(),
            "planner": self.planner,
            "memory_limit": self.memory_limit,
            "donate": self.donate,
            "deterministic": self.deterministic,
            "stages": [stage.to_json() for stage in self.stages],
            "steps": [step._asdict() for step in self.steps],
            "bounds": self.bounds.to_json(),
            "time": self.time,
            "peak_bytes": self.peak_bytes,
            "gap": self.gap,
            "volume_ratio": self.volume_ratio,
            "alternatives": [other._asdict() for other in self.alternatives],
        }
        # plans of versions without it have no such field, and keep their hashes
        return found if self.partial_init == "owner" else {**found, "partial_init": self.partial_init}

    @classmethod
    @undamaged("the JSON of a plan")
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The plan that ``to_json`` wrote; newer formats are refused."""
        check_object(data, "a plan")
        name, _, version = str(data.get("format")).partition("/")
        if name != _FORMAT or not version.isdecimal() or int(version) > _VERSION:
            raise RedistError(f"this version reads plans up to {_FORMAT}/{_VERSION}, got {data.get('format')}")
        found = dict(data)
        del found["format"]
        found.setdefault("partial_init", "owner")
        fields = cls.__dataclass_fields__.keys()
        if found.keys() != fields:
            raise RedistError(f"{_FORMAT}/{_VERSION} has other fields: {sorted(found.keys() ^ fields)}")
        check_partial_init(found["partial_init"])
        return record(
            cls,
            {
                **found,
                "shape": int_tuple(found["shape"], "sizes"),
                "dtype": dtype_name(found["dtype"]),
                "src": Layout.from_json(found["src"]),
                "dst": Layout.from_json(found["dst"]),
                "topology": Topology.from_json(found["topology"]),
                "stages": tuple(Stage.from_json(stage) for stage in found["stages"]),
                "steps": tuple(record(Step, {**step, "ranks": tuple(step["ranks"])}) for step in found["steps"]),
                "bounds": Bounds.from_json(found["bounds"]),
                "alternatives": tuple(record(Alternative, other) for other in found["alternatives"]),
            },
        )


def check_plan(plan: object) -> None:
    """Raise ``RedistError`` if this is no ``Plan``, but its text or a file's name, for example."""
    if not isinstance(plan, Plan):
        raise RedistError(f"plan must be a Plan, got {plan!r}; optim_redist.plan(shape, dtype, src, dst) makes one")


def _leaves(path: str, value: object) -> Iterator[tuple[str, Any]]:
    """(path, value) of every leaf of nested dictionaries and lists; an empty one is itself a leaf."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    is_leaf = True
    for key, each in inside:
        is_leaf = False
        yield from _leaves(f"{path}.{key}", each)
    if is_leaf:
        yield path, value
