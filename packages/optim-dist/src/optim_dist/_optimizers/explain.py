"""What ``explain()`` says: every parameter's place, every collective, and what a step costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from optim_dist._optimizers.bucketed import BucketedParameters
from optim_dist._optimizers.multipliers import ATTRIBUTES
from optim_dist._optimizers.options import Options
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import ParameterSpec, Plan, dtype_name
from optim_dist.sharded import UnbucketedParameters


class Explanation(str):
    """Text; ``data`` holds the same as plain values."""

    data: dict[str, Any]

    def __new__(cls, text: str, data: dict[str, Any]) -> Explanation:
        explanation = super().__new__(cls, text)
        explanation.data = data
        return explanation


def explain(
    plan: Plan,
    options: Options,
    communicator: Communicator,
    bucketed: BucketedParameters,
    unbucketed: UnbucketedParameters,
    *,
    state_bytes: int,
    multipliers: Mapping[str, tuple[float, float]],
    remarks: Sequence[str],
) -> Explanation:
    """The plan with what it means for this run.

    Args:
        state_bytes: bytes of this rank's states.
        multipliers: keyed by parameter name: the factors of lr and weight_decay, where one is not 1.
        remarks: on the groups, a line each.
    """
    data, buckets = describe_plan(plan), bucketed.buckets
    if buckets:
        data["memory_bytes"] = plan.nbytes + bucketed.gradient_bytes
        if options.is_streamed:
            num_reduced = options.accumulation_steps or 1
            data["wire_bytes"] += (num_reduced - 1) * sum(bucket.reduce_bytes for bucket in plan.buckets)
    data |= {
        "multipliers": {name: dict(zip(ATTRIBUTES, pair)) for name, pair in multipliers.items()},
        "sharded": _described_sharded(plan, unbucketed),
        "bytes_exchanged": unbucketed.bytes_exchanged,
        "rank": communicator.rank,
        "state_bytes": state_bytes,
        "bytes_sent": communicator.traffic.bytes_sent,
        "gradients_copied": sum(bucket.num_copied for bucket in buckets),
        "deterministic": options.deterministic,
        "order": options.order,
        "reducer": options.reducer if plan.world_size > 1 else None,
        "transport": options.transport if plan.world_size > 1 else None,
        "remarks": list(remarks),
        "phases": phases(plan, options, communicator),
    }
    unseen = [number for number, bucket in enumerate(buckets) if bucket.waits_at_step]
    if unseen:
        data["phases"]["gather under forward"] += (
            f"; not of buckets {', '.join(map(str, unseen))}, where parameters are used without their module's forward"
        )
    return Explanation("\n".join(_lines(plan, options, data)), data)


def _described_sharded(plan: Plan, unbucketed: UnbucketedParameters) -> list[dict[str, Any]]:
    """The DTensors as plain values."""
    owners, plain_torch_reasons = unbucketed.owners, unbucketed.plain_torch_reasons
    return [
        {
            **_described(spec),
            "sharding": spec.sharding,
            "owner": owners.get(index),
            "plain_torch": plain_torch_reasons.get(index),
        }
        for index, spec in enumerate(plan.parameters)
        if spec.sharding
    ]


def _lines(plan: Plan, options: Options, data: dict[str, Any]) -> list[str]:
    """What ``explain`` says, in lines."""
    lines = [plan_text(plan, data), ""]
    if data["sharded"]:
        nbytes = data["bytes_exchanged"]
        sent = "what the first step will show" if nbytes is None else f"{nbytes:,} bytes a step"
        exchanged = f"of DTensors this rank sends {sent}, beside what it sends of buckets"
        lines += [*_sharded_table(data["sharded"]), "", exchanged, ""]
        lines += _plain_lines(data["sharded"])
    if data["multipliers"]:
        rows = [(name, *map(str, factors.values())) for name, factors in data["multipliers"].items()]
        lines += [*_table(("multiplied of the group's", *ATTRIBUTES.values()), rows), ""]
    if data["remarks"]:
        lines += [*data["remarks"], ""]
    lines += [f"{phase}: {reason}" for phase, reason in data["phases"].items()]
    if options.deterministic:
        lines.append("deterministic: the bits that Muon's kernels give a matrix do not depend on how many a rank has")
    if options.is_tree:
        lines.append("order: a binary tree over all micro-batches, that of pass j on rank r being number j W + r")
    if data["transport"] == "symm":
        lines.append(
            "transport: buckets travel by copies between the memories of ranks"
            + ("; gradients, which are given up under backward, by the process group" if options.is_streamed else "")
        )
    return [
        *lines,
        f"states on this rank: {data['state_bytes']:,} bytes",
        f"since construction this rank sent {data['bytes_sent']:,} bytes and copied {data['gradients_copied']} "
        "gradients that were found outside their bucket",
    ]


def _sharded_table(sharded: Sequence[dict[str, Any]]) -> list[str]:
    header = ("DTensor", "shape", "dtype", "route", "group", "stays", "orthogonalized by")
    owners = ["" if entry["owner"] is None else f"rank {entry['owner']}" for entry in sharded]
    return _table(header, [(*_cells(entry), entry["sharding"], owner) for entry, owner in zip(sharded, owners)])


def _described(spec: ParameterSpec) -> dict[str, Any]:
    """What is said of every parameter, in a bucket or not."""
    return {
        "name": spec.name,
        "shape": spec.shape,
        "dtype": dtype_name(spec.dtype),
        "route": spec.route,
        "group": spec.group,
    }


def _cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """The first cells of a parameter's row: its ``_described`` values as text."""
    shape = "x".join(map(str, entry["shape"])) or "scalar"
    return entry["name"], shape, entry["dtype"], entry["route"], str(entry["group"])


def _plain_lines(sharded: Sequence[dict[str, Any]]) -> list[str]:
    """Lines that name the matrices whose elementwise work is not in the grouped launches, by reason."""
    names: dict[str, list[str]] = {}
    for entry in sharded:
        if entry["plain_torch"] is not None:
            names.setdefault(entry["plain_torch"], []).append(entry["name"])
    lines = [f"momentum and update in plain torch, {reason}: {', '.join(each)}" for reason, each in names.items()]
    return [*lines, ""] if lines else []


def phases(plan: Plan, options: Options, communicator: Communicator) -> dict[str, str]:
    """Which parts of a step overlap with which, and why one does not."""
    if plan.world_size == 1:
        return {"collectives": "none, there is one rank"}
    if not plan.buckets:
        only = "there are only DTensors, whose gradients arrive reduced"
        return {"collectives of buckets": f"none, {only if plan.parameters else 'no parameter is trained'}"}
    if not options.overlap:
        backward = "off: overlap=False"
    elif communicator.waits_on_host and options.reducer == "rs":
        backward = "off: here the host waits between the dimensions of the mesh; reducer='exact' needs one for all"
    elif options.accumulation_steps is None:
        overlapped = "for the step's copies beside" if options.transport == "symm" else "to reduce during"
        backward = f"from the first use of no_sync() on; pass accumulation_steps= {overlapped} backward at once"
    elif options.is_streamed:
        backward = "on: every backward pass reduces while it runs, and no gradients are kept"
    elif options.transport == "symm":
        backward = f"on: every {options.accumulation_steps}. backward pass, which the step's copies run beside"
    else:
        backward = f"on: every {options.accumulation_steps}. backward pass reduces while it runs"
    if not options.overlap:
        forward = "off: overlap=False"
    elif options.model is None:
        forward = "off: pass model=, whose modules then wait for what they use"
    else:
        forward = "on: modules wait for what they use; read parameters otherwise after wait()"
    return {
        "reduction under backward": backward,
        "gather under update": "on: a bucket is gathered while the next is updated",
        "gather under forward": forward,
    }


def describe_plan(plan: Plan) -> dict[str, Any]:
    """The plan as plain values."""
    parameters = []
    for number, bucket in enumerate(plan.buckets):
        for slot in bucket.slots:
            spec = plan.parameters[slot.parameter]
            pieces = plan.ranges(slot.parameter)
            parameters.append(
                {
                    **_described(spec),
                    "bucket": number,
                    "block": spec.block,
                    "ranges": [(piece.rank, piece.start, piece.stop) for piece in pieces],
                }
            )
    loads = plan.loads()
    return {
        "world_size": plan.world_size,
        "hash": plan.hash,
        "parameters": parameters,
        "buckets": [
            {
                "route": b.route,
                "dtype": dtype_name(b.dtype),
                "grad_dtype": dtype_name(b.grad_dtype),
                "wire_dtype": dtype_name(b.wire_dtype),
                "bytes": b.nbytes,
                "padding": b.padding,
            }
            for b in plan.buckets
        ],
        "newton_schulz_tflop": [load / 1e12 for load in loads],
        "imbalance": plan.imbalance,
        "padding": plan.padding,
        "wire_bytes": plan.wire_bytes,
        "memory_bytes": plan.nbytes + plan.gradient_nbytes,
    }


def plan_text(plan: Plan, data: dict[str, Any]) -> str:
    """A table of the parameters, one of the buckets, and totals."""
    header = ("parameter", "shape", "dtype", "route", "group", "bucket", "owner: elements")
    rows = [
        (
            *_cells(entry),
            str(entry["bucket"]),
            ", ".join(f"{rank}: {start}-{stop}" for rank, start, stop in entry["ranges"]),
        )
        for entry in data["parameters"]
    ]
    buckets = [
        (
            str(number),
            *(bucket[key] for key in ("route", "dtype", "grad_dtype", "wire_dtype")),
            f"{bucket['bytes']:,}",
            str(bucket["padding"]),
        )
        for number, bucket in enumerate(data["buckets"])
    ]
    totals = [
        f"{plan.world_size} ranks; parameters and gradients {data['memory_bytes']:,} bytes a rank; "
        f"each rank sends {data['wire_bytes']:,} bytes a step; padding {data['padding']:.2%}"
    ]
    if any(data["newton_schulz_tflop"]):
        runs = [(load, len([*run])) for load, run in groupby(f"{load:.3g}" for load in data["newton_schulz_tflop"])]
        by_rank = ", ".join(load if count == 1 else f"{count} × {load}" for load, count in runs)
        totals.append(f"Newton–Schulz TFLOP by rank: {by_rank}; imbalance {data['imbalance']:.3f}")
    columns = ("bucket", "route", "dtype", "gradients", "on the wire", "bytes", "padding")
    return "\n".join([*_table(header, rows), "", *_table(columns, buckets), "", *totals])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [header, *rows]]
