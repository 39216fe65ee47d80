"""Groups of ranks, and how fast bytes move inside them and across their borders.

Level 1 groups ranks (a node), level 2 groups level-1 groups (a rack), …. A rank sends and receives at
``rank_bandwidth`` inside the innermost group; the border of a group limits its traffic to the group's bandwidth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import inf
from numbers import Real
from operator import index
from typing import Any

from optim_redist._mesh import Axis, Mesh
from optim_redist._tools.files import undamaged
from optim_redist._tools.lazy import lazy
from optim_redist.errors import RedistError

# assumed of a machine that has not been measured: the links of an H200 and one 400 Gb/s port a rank
_RANK_BANDWIDTH, _PORT_BANDWIDTH = 300e9, 50e9  # bytes per second
_LATENCY, _NODE_LATENCY = 20e-6, 30e-6  # seconds


def as_rates(what: str, bandwidth: object, seconds: object) -> tuple[float, float]:
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
    return as_rates("a port", bandwidth, 0)[0] * count


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
        bandwidth, latency = as_rates(f"level {self.name!r}", self.bandwidth, self.latency)
        if self.size is not None and (not isinstance(self.size, int) or self.size < 1):
            raise RedistError(f"level {self.name!r} has groups of a whole number of ranks, got {self.size!r}")
        try:
            # lists and arrays would have no hash, and iterators nothing left
            members = tuple([tuple(map(index, group)) for group in self.members])
        except TypeError:
            raise RedistError(f"members of level {self.name!r} are groups of ranks, got {self.members!r}") from None
        if (self.size is None) == (not members):
            raise RedistError(f"level {self.name!r} has a size or members, got {self.size!r} and {members}")
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
        bandwidth, latency = as_rates("a topology", self.rank_bandwidth, self.latency)
        # a list would have no hash, and an iterator nothing left
        levels = tuple(self.levels) if isinstance(self.levels, Iterable) else None
        if levels is None or not all(isinstance(level, Level) for level in levels):
            raise RedistError(f"levels of a topology are a tuple of Level, innermost first, got {self.levels!r}")
        vars(self).update(rank_bandwidth=bandwidth, latency=latency, levels=levels)
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
        levels = tuple(Level(**item) for item in data["levels"])
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
