"""What moving bytes costs on one machine: its ``Topology``, and measured curves of seconds over bytes.

A step in which the busiest rank moves b bytes takes

    call + curve(b),         curve = seconds measured for that collective, interpolated in log b, monotone in b,

and no less than any group's traffic takes to cross its border. Packing and unpacking read and write every byte once.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from optim_redist._machine.curves import (
    COLLECTIVES,
    Curve,
    as_curve,
    curve_from_bus_rates,
    interpolate,
    latency_and_bandwidth,
)
from optim_redist._machine.topology import Level, Topology, as_rates, check_topology
from optim_redist._tools.files import check_object, read_json, reading, undamaged
from optim_redist._tools.lazy import lazy
from optim_redist.errors import RedistError

__all__ = ["CommModel", "Level", "Topology", "check_topology"]

_FORMAT = "optim-redist.model/1"

# what a program takes beside its exchange on the hosts of H200s: 65 µs measured on slow ones
_NCCL_CALL = 60e-6  # seconds


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
        bandwidth, seconds = as_rates("a cost model", self.pack_bandwidth, self.call_seconds)
        if not isinstance(self.has_library, bool):
            raise RedistError(f"has_library is True or False, got {self.has_library!r}")
        if not isinstance(self.name, str):
            raise RedistError(f"a cost model has a name, got {self.name!r}")
        check_topology(self.topology, needed=True)
        if not isinstance(self.curves, Mapping):
            raise RedistError(f"curves maps collectives to pairs of (bytes, seconds), got {self.curves!r}")
        curves = {op: as_curve(op, curve) for op, curve in self.curves.items()}
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
        return min(self.seconds(op, num_bytes) for op in COLLECTIVES)

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
