"""What moving bytes costs: a tree of groups with bandwidths, and measured curves of seconds over bytes.

Topology. Level 1 groups ranks (a node), level 2 groups level-1 groups (a rack), …. A rank sends and receives at
``rank_bandwidth`` inside the innermost group; the border of a group limits its traffic to the group's bandwidth.

Model. A step in which the busiest rank moves b bytes takes

    call + curve(b),         curve = seconds measured for that collective, interpolated in log b, monotone in b,

and no less than any group's traffic takes to cross its border. Packing and unpacking read and write every byte once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any

from optim_redist._curves import Curve, curve_from_bus_rates, interpolate, latency_and_bandwidth, monotone
from optim_redist._files import check_object, read_json, reading, undamaged
from optim_redist._lazy import lazy
from optim_redist._mesh import Axis, Mesh
from optim_redist.errors import RedistError

_FORMAT = "optim-redist.model/1"

# assumed of a machine that has not been measured: the links of an H200 and one 400 Gb/s port a rank
_RANK_BANDWIDTH, _PORT_BANDWIDTH = 300e9, 50e9  # bytes per second
_LATENCY, _NODE_LATENCY = 20e-6, 30e-6  # seconds
# what a program takes beside its exchange on the hosts of H200s: 65 µs measured on slow ones
_NCCL_CALL = 60e-6  # seconds

# of a library, those that do steps; a model may have no curve for some of them
_COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
_MEASURED = (*_COLLECTIVES, "send_recv")


def _as_rates(what: str, bandwidth: object, seconds: object) -> tuple[float, float]:
    """Both as floats, so that equal numbers of any type are written alike, in JSON and in the ids of models.

    Raises:
        RedistError: for rates that would fail in a division in the middle of planning.
    """
    if not isinstance(bandwidth, Real) or not float(bandwidth) > 0:
        raise RedistError(f"{what} has a bandwidth above 0 bytes per second, got {bandwidth!r}")
    # infinite times are no multiple of each other, so no plan would be nearer to the bound on time than another
    if not isinstance(seconds, Real) or not 0 <= float(seconds) < inf:
        raise RedistError(f"{what} has a finite latency of 0 seconds or more, got {seconds!r}")
    return float(bandwidth), float(seconds)


def _of_ports(bandwidth: Any, count: int) -> float:
    """The bandwidth of a border with as many ports as there are ranks behind it."""
    # a text would be repeated
    return _as_rates("a port", bandwidth, 0)[0] * count


def _as_curve(op: str, given: Any) -> Curve:
    """A measured curve of floats, monotone."""
    if op not in _MEASURED:
        raise RedistError(f"curves are of {_MEASURED}, got one of {op!r}")
    try:
        usable = all(0 < num_bytes < inf and 0 < seconds < inf for num_bytes, seconds in given)
        points = [(float(num_bytes), float(seconds)) for num_bytes, seconds in given]
    except (TypeError, ValueError, OverflowError):
        usable = False
    if not usable or any(a[0] > b[0] for a, b in pairwise(points)):
        raise RedistError(f"the curve of {op} is (bytes, seconds) above 0, finite, bytes ascending, got {given}")
    return monotone(points)


@dataclass(frozen=True)
class Level:
    """Groups of ranks whose border is a bottleneck.

    Attributes:
        name: as printed, e.g. "node".
        bandwidth: bytes per second into a group, and as many out of it.
        latency: least seconds of a message across the border.
        size: ranks of a group, where groups are blocks of consecutive ranks; else None.
        members: the ranks of every group, where ``size`` is None.
    """

    name: str
    bandwidth: float
    latency: float
    size: int | None = None
    members: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise RedistError(f"a level of a topology has a name, got {self.name!r}")
        bandwidth, latency = _as_rates(f"level {self.name!r}", self.bandwidth, self.latency)
        if self.size is not None and (not isinstance(self.size, int) or self.size < 1):
            raise RedistError(f"level {self.name!r} has groups of a whole number of ranks, got {self.size!r}")
        if (self.size is None) == (not self.members):
            raise RedistError(f"level {self.name!r} has a size or members, got {self.size!r} and {self.members!r}")
        try:
            # lists would have no hash
            members = tuple(map(tuple, self.members))
        except TypeError:
            raise RedistError(f"members of level {self.name!r} are groups of ranks, got {self.members!r}") from None
        vars(self).update(bandwidth=bandwidth, latency=latency, members=members)
        counts = Counter(chain.from_iterable(members))
        if twice := [rank for rank, count in counts.items() if count > 1]:
            raise RedistError(f"level {self.name!r} has each rank in one group, and rank {twice[0]} in two")

    @lazy
    def _group_of(self) -> dict[int, int]:
        return {rank: number for number, ranks in enumerate(self.members) for rank in ranks}

    def group_of(self, rank: int) -> int:
        """The number of the group that a rank belongs to."""
        if self.size is not None:
            return rank // self.size
        if rank not in self._group_of:
            raise RedistError(f"level {self.name!r} of the topology has no group with rank {rank}")
        return self._group_of[rank]


@dataclass(frozen=True)
class Topology:
    """A tree of groups, innermost level first.

    Attributes:
        rank_bandwidth: bytes per second that one rank receives (and sends) inside the innermost group.
        latency: seconds of the shortest exchange.
        levels: the groups whose borders are bottlenecks.
    """

    rank_bandwidth: float = _RANK_BANDWIDTH
    latency: float = _LATENCY
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        bandwidth, latency = _as_rates("a topology", self.rank_bandwidth, self.latency)
        if not isinstance(self.levels, Iterable) or not all(isinstance(level, Level) for level in self.levels):
            raise RedistError(f"levels of a topology are a tuple of Level, innermost first, got {self.levels!r}")
        # a list would have no hash
        vars(self).update(rank_bandwidth=bandwidth, latency=latency, levels=tuple(self.levels))
        names = [level.name for level in self.levels]
        if len(set(names)) < len(names):
            raise RedistError(f"levels of a topology have names of their own, got {names}")
        for inner, outer in pairwise(self.levels):
            if (rank := _in_two_groups(inner, outer)) is not None:
                raise RedistError(
                    f"a group of level {outer.name!r} holds whole groups of level {inner.name!r}, and that of rank "
                    f"{rank} is in two; give the innermost level first"
                )

    @classmethod
    def flat(cls, num_ranks: int = 0, *, bandwidth: float = _RANK_BANDWIDTH, latency: float = _LATENCY) -> Topology:
        """A topology in which all pairs of ranks are alike; ``num_ranks`` only documents how many."""
        del num_ranks
        return cls(bandwidth, latency)

    @classmethod
    def nodes(
        cls,
        ranks_per_node: int,
        *,
        bandwidth: float = _PORT_BANDWIDTH,
        rank_bandwidth: float = _RANK_BANDWIDTH,
        latency: float = _NODE_LATENCY,
    ) -> Topology:
        """Nodes of consecutive ranks; ``bandwidth`` is one rank's share of the node's border."""
        given = f"ranks_per_node={ranks_per_node!r}"
        if not isinstance(ranks_per_node, int) or ranks_per_node < 1:
            raise RedistError(f"a node has a whole number of ranks, at least one, got {given}")
        # others may be beyond what floats count
        if ranks_per_node >= 2**63:
            raise RedistError(f"a node has fewer than 2**63 ranks, got {given}")
        level = Level("node", _of_ports(bandwidth, ranks_per_node), latency, size=ranks_per_node)
        return cls(rank_bandwidth, _LATENCY, (level,))

    @classmethod
    def from_mesh_axis(
        cls, mesh: Mesh, axis: Axis, *, bandwidth: float = _PORT_BANDWIDTH, name: str = "node"
    ) -> Topology:
        """Ranks with the same coordinate on ``axis`` form a node; ``bandwidth`` is one rank's share of the border."""
        if not isinstance(mesh, Mesh):
            raise RedistError(f"mesh must be a Mesh, got {mesh!r}")
        k = mesh.axis(axis)
        found: list[list[int]] = [[] for _ in range(mesh.sizes[k])]
        for rank, point in mesh.coordinates.items():
            found[point[k]].append(rank)
        level = Level(name, _of_ports(bandwidth, len(found[0])), _NODE_LATENCY, members=tuple(map(tuple, found)))
        return cls(levels=(level,))

    @classmethod
    def from_hosts(cls, hosts: Sequence[str], *, bandwidth: float = _PORT_BANDWIDTH) -> Topology:
        """Ranks of the same host name form a node: ``hosts[r]`` is where rank r runs.

        ``bandwidth`` is one rank's share of the border of the largest node; smaller nodes get the same border.
        """
        # a string would pass as a sequence, of its letters
        if (
            isinstance(hosts, str)
            or not isinstance(hosts, Sequence)
            or not hosts
            or not all(isinstance(host, str) for host in hosts)
        ):
            raise RedistError(f"hosts is {hosts!r}; give a list of the host name of every rank, rank 0's first")
        found: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            found.setdefault(host, []).append(rank)
        largest = max(map(len, found.values()))
        level = Level("node", _of_ports(bandwidth, largest), _NODE_LATENCY, members=tuple(map(tuple, found.values())))
        return cls(levels=(level,))

    def groups(self, ranks: Iterable[int]) -> list[tuple[str, tuple[int, ...], float]]:
        """(level, ranks, bandwidth) of every group that holds some but not all of the ranks."""
        every = tuple(ranks)
        found = []
        for level in self.levels:
            parts: dict[int, list[int]] = {}
            for rank in every:
                parts.setdefault(level.group_of(rank), []).append(rank)
            if len(parts) > 1:
                found += [(level.name, tuple(part), level.bandwidth) for _, part in sorted(parts.items())]
        return found

    def distance(self, a: int, b: int) -> int:
        """How many levels two ranks are apart: 0 inside the innermost group."""
        for k, level in enumerate(self.levels):
            if level.group_of(a) == level.group_of(b):
                return k
        return len(self.levels)

    def to_json(self) -> dict[str, Any]:
        levels = [
            {"name": v.name, "bandwidth": v.bandwidth, "latency": v.latency, "size": v.size, "members": v.members}
            for v in self.levels
        ]
        return {"rank_bandwidth": self.rank_bandwidth, "latency": self.latency, "levels": levels}

    @classmethod
    @undamaged("the JSON of a topology")
    def from_json(cls, data: Mapping[str, Any]) -> Topology:
        levels = tuple(
            Level(**{**item, "members": tuple(tuple(group) for group in item["members"])}) for item in data["levels"]
        )
        return cls(data["rank_bandwidth"], data["latency"], levels)


def _in_two_groups(inner: Level, outer: Level) -> int | None:
    """A rank whose group of ``inner`` lies in two groups of ``outer``; None if the groups are those of a tree.

    Ranks that a level does not know are left out.
    """
    listed = [set(level._group_of) for level in (inner, outer) if level.size is None]
    if listed:
        ranks = sorted(set.intersection(*listed))
    else:
        assert outer.size is not None
        ranks = [outer.size - 1, outer.size]  # where blocks do not nest, the first border of the outer ones shows it
    around: dict[int, int] = {}
    for rank in ranks:
        if around.setdefault(inner.group_of(rank), outer.group_of(rank)) != outer.group_of(rank):
            return rank
    return None


def check_topology(topology: object, *, needed: bool = False) -> None:
    """Raise ``RedistError`` if this is no topology; None will do unless one is needed."""
    if not isinstance(topology, Topology if needed else Topology | None):
        raise RedistError(f"topology must be a Topology, got {topology!r}; Topology.nodes(ranks_per_node) makes one")


@dataclass(frozen=True)
class CommModel:
    """Predicts the seconds of every step on one machine.

    Attributes:
        name: as printed; the id adds a digest of the numbers.
        topology: groups and bandwidths.
        curves: keyed by collective: (bytes the busiest rank receives, seconds), ascending; seconds are raised to at
            least those of fewer bytes. A collective without a curve takes the topology's latency and bandwidth. By a
            curve of "all_to_all" the topology is corrected, so that its bound on time holds for all curves; without
            one, none of the others is quicker than the topology.
        pack_bandwidth: bytes read plus written per second by a local copy.
        call_seconds: host time of one exchange, beyond what the curves have measured.
        has_library: whether a library's collectives do the steps that they can do, as programs on NCCL let them.
    """

    name: str
    topology: Topology
    curves: Mapping[str, Curve] = field(default_factory=dict)
    pack_bandwidth: float = 3e12
    call_seconds: float = 10e-6
    has_library: bool = False

    def __post_init__(self) -> None:
        bandwidth, seconds = _as_rates("a cost model", self.pack_bandwidth, self.call_seconds)
        if not isinstance(self.has_library, bool):
            raise RedistError(f"has_library is True or False, got {self.has_library!r}")
        if not isinstance(self.name, str):
            raise RedistError(f"a cost model has a name, got {self.name!r}")
        check_topology(self.topology, needed=True)
        if not isinstance(self.curves, Mapping):
            raise RedistError(f"curves maps collectives to pairs of (bytes, seconds), got {self.curves!r}")
        curves = {op: _as_curve(op, curve) for op, curve in self.curves.items()}
        vars(self).update(pack_bandwidth=bandwidth, call_seconds=seconds, curves=curves)

    def __hash__(self) -> int:
        return hash(self.id)

    @lazy
    def id(self) -> str:
        """Name and digest: equal for equal numbers, on every rank."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def seconds(self, op: str, num_bytes: float) -> float:
        """Time of one collective in which the busiest rank receives (or sends) ``num_bytes``; borders not counted."""
        curve = self.curves.get(op)
        measured = self.call_seconds + interpolate(curve, num_bytes) if curve else 0.0
        if curve and self.curves.get("all_to_all"):
            return measured
        return max(measured, self.call_seconds + self.topology.latency + num_bytes / self.topology.rank_bandwidth)

    def least_seconds(self, num_bytes: float) -> float:
        """Time of the quickest collective in which the busiest rank receives (or sends) ``num_bytes``."""
        if not self.has_library or not self.curves:
            return self.seconds("all_to_all", num_bytes)
        return min(self.seconds(op, num_bytes) for op in _COLLECTIVES)

    @lazy
    def _measured(self) -> tuple[float, float] | None:
        """The latency and bandwidth of a rank by the curve of exchanges, if there is one."""
        curve = self.curves.get("all_to_all")
        return latency_and_bandwidth(curve, self.curves.values()) if curve else None

    def in_groups_of(self, topology: Topology | None) -> CommModel:
        """The model with the groups of another topology; inside them, ranks stay as fast as the curve has measured.

        None stands for the model's own topology: the result is ``consistent``.
        """
        if topology is None:
            return self.consistent
        if self._measured is not None:
            latency, bandwidth = self._measured
            topology = replace(topology, latency=latency, rank_bandwidth=bandwidth)
        return self if topology == self.topology else replace(self, topology=topology)

    @lazy
    def consistent(self) -> CommModel:
        """The model itself, or with a topology that predicts nothing to be slower than the curves do."""
        topology = self.topology
        points = chain.from_iterable(self.curves.values())
        below = all(topology.latency + b / topology.rank_bandwidth <= seconds for b, seconds in points)
        return self if below else self.in_groups_of(topology)

    def border_seconds(self, level: str, num_bytes: float) -> float:
        """Time for ``num_bytes`` to cross the border of one group of a level."""
        found = next(v for v in self.topology.levels if v.name == level)
        return found.latency + num_bytes / found.bandwidth

    def pack_seconds(self, num_bytes: float) -> float:
        """Time of one local copy: every byte is read and written."""
        return 2 * num_bytes / self.pack_bandwidth

    def to_json(self) -> dict[str, Any]:
        found = {
            "format": _FORMAT,
            "name": self.name,
            "topology": self.topology.to_json(),
            "curves": {op: [list(point) for point in curve] for op, curve in sorted(self.curves.items())},
            "pack_bandwidth": self.pack_bandwidth,
            "call_seconds": self.call_seconds,
        }
        # models without a library keep the id that they had before any had one
        return {**found, "has_library": True} if self.has_library else found

    @classmethod
    @undamaged("the JSON of a cost model")
    def from_json(cls, data: Mapping[str, Any]) -> CommModel:
        check_object(data, "a cost model")
        if data.get("format") != _FORMAT:
            raise RedistError(f"expected a cost model of format {_FORMAT}, got {data.get('format')}")
        topology = Topology.from_json(data["topology"])
        # older files know no libraries
        has_library = data.get("has_library", False)
        return cls(data["name"], topology, data["curves"], data["pack_bandwidth"], data["call_seconds"], has_library)

    def save(self, path: str | Path) -> None:
        """Write the model as JSON, without the details of the measurement that ``calibrate`` adds to its file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> CommModel:
        """The model in a file that ``save`` or ``calibrate`` wrote."""
        with reading(Path(path)):
            return cls.from_json(read_json(Path(path)))

    @classmethod
    def preset(cls, name: str) -> CommModel:
        """A machine known here: "h200x4", "h200x8", "nodes-400g", "nccl" or "flat".

        "flat" supposes GPUs with fast links; "nccl" also that NCCL's collectives do what they can do.
        """
        if name not in _PRESETS:
            raise RedistError(f"presets are {sorted(_PRESETS)}, got {name!r}")
        return _PRESETS[name]


_SIZES = [2**20, 2**23, 2**26, 2**28, 2**30]


def _bus(num_ranks: int, gigabytes_per_second: Sequence[float], *, twice: bool = False) -> Curve:
    rates = {size: rate * 1e9 for size, rate in zip(_SIZES, gigabytes_per_second)}
    return curve_from_bus_rates(num_ranks, rates, reduces_twice=twice)


def _h200(num_ranks: int) -> CommModel:
    # bus bandwidths measured on 4×H200, every pair on NVLink, bf16; all_gather in place, device copy 4.13 TB/s
    curves = {
        "all_to_all": _bus(num_ranks, [15, 106, 242, 295, 333]),
        "all_gather": _bus(num_ranks, [7, 101, 246, 295, 327]),
        "reduce_scatter": _bus(num_ranks, [12, 105, 244, 291, 317]),
        "all_reduce": _bus(num_ranks, [20, 133, 295, 335, 352], twice=True),
    }
    latency, bandwidth = latency_and_bandwidth(curves["all_to_all"], curves.values())
    topology = Topology.flat(num_ranks, bandwidth=bandwidth, latency=latency)
    return CommModel(f"h200x{num_ranks}", topology, curves, 4.13e12, _NCCL_CALL, has_library=True)


_PRESETS = {
    "flat": CommModel("flat", Topology.flat()),
    "nccl": CommModel("nccl", Topology.flat(), call_seconds=_NCCL_CALL, has_library=True),
    "h200x4": _h200(4),
    # not measured yet: the bus rates of four GPUs, which the same switch should give to eight
    "h200x8": _h200(8),
    # nodes of eight with one 400 Gb/s port a rank
    "nodes-400g": CommModel("nodes-400g", Topology.nodes(8, bandwidth=50e9, rank_bandwidth=333e9)),
}
