"""Measure the running group's collectives and make a cost model of them, by which plans are chosen.

Every collective is measured at every buffer size S per rank, from 4 KiB up to what memory allows: the median over some
repeats of the slowest rank's time. The model keeps these seconds with the bytes that a rank receives:

    all_to_all, reduce_scatter   (n - 1)/n · S
    all_gather                   (n - 1)/n · S, where S is the gathered buffer
    all_reduce                   2(n - 1)/n · S
    send_recv                    S

A redistribution packs, takes the steps of a program on the host, and exchanges. So the model also has the rate of a
strided copy, from the difference of two sizes, in which the launch cancels; and the time of a small redistribution
above that of its exchange.

With a mesh of several axes the groups along each proper subset of its axes are measured too and kept in the file.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, combinations
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from optim_redist._machine.curves import interpolate, latency_and_bandwidth, monotone
from optim_redist._mesh import int_tuple
from optim_redist._running import collectives
from optim_redist._tools.progress import progress
from optim_redist.cost import CommModel, Topology
from optim_redist.errors import RedistError, UnsupportedError
from optim_redist.layout import Layout, Mesh
from optim_redist.planning import plan
from optim_redist.program import compile

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SIZES = tuple(4096 * 4**k for k in range(10))  # 4 KiB to 1 GiB
_MIN_REPEATS, _MAX_REPEATS = 3, 30
_Call = Callable[[], object]


def calibrate(
    group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    sizes: Sequence[int] | None = None,
    seconds: float = 60,
    out: str | Path | None = "costs.json",
) -> CommModel:
    """Measure the group's collectives and return the model; rank 0 writes it to ``out``.

    Every rank of the group calls.

    Args:
        mesh: measure also the groups along every proper subset of its axes.
        sizes: bytes of the buffer on each rank. A size is left out if two such buffers do not fit into a quarter of
            the free memory of a GPU, or if it is beyond 64 MiB on a CPU.
        seconds: about how long all measurements may take; longer if three calls of each take longer.

    Raises:
        UnsupportedError: without a running group of at least two ranks, or if none of the sizes fits.
        RedistError: for ``seconds`` or ``sizes`` of other types, and on every rank if rank 0 cannot write ``out``.
    """
    if not collectives.is_initialized():
        raise UnsupportedError("calibrate measures a running group; call torch.distributed.init_process_group first")
    whole = group if group is not None else dist.group.WORLD
    assert whole is not None
    if dist.get_world_size(whole) < 2:
        raise UnsupportedError("calibrate measures exchanges between ranks; the group has only one")
    # not "< 0", which is false for NaN
    if not isinstance(seconds, Real) or not seconds >= 0:
        raise RedistError(f"seconds must be a number, 0 or more, got {seconds!r}")
    buffers = int_tuple(sizes or SIZES, "sizes")
    device = collectives.device_of(whole)
    check_folder(out, whole)
    fitting = _fitting(buffers, device, whole)
    if not fitting:
        raise UnsupportedError(f"none of the sizes {list(buffers)} (bytes) fits into a quarter of the free memory")
    axis_groups = {} if mesh is None else _axis_groups(mesh)
    kinds = {"all": whole, **axis_groups}
    tasks = [(kind, members, op, size) for kind, members in kinds.items() for size in fitting for op in _OPS]
    share = seconds / len(tasks)
    measured: dict[str, dict[str, list[tuple[float, float]]]] = {kind: {} for kind in kinds}
    first = dist.get_rank(whole) == 0
    for kind, members, op, size in progress(tasks, "calibrate") if first else tasks:
        received, call = _OPS[op](size, members, device)
        measured[kind].setdefault(op, []).append((received, _slowest_median(call, whole, device, share)))
    # process groups may hold device memory
    for members in axis_groups.values():
        dist.destroy_process_group(members)
    pack = _pack_rate(whole, device, share)
    model = _model(measured["all"], dist.get_world_size(whole), dist.get_backend(whole), pack)
    model = replace(model, call_seconds=_call_seconds(model, whole, device, share))
    if out is not None and first:
        Path(out).write_text(json.dumps(_as_file(model, measured, whole, device), indent=1) + "\n")
    return model


def check_folder(path: str | Path | None, group: ProcessGroup) -> None:
    """Raise ``RedistError`` on every rank if the group's first rank could not write this file after measuring."""
    if path is None:
        return
    is_missing = not Path(path).absolute().parent.is_dir() or Path(path).is_dir()
    found = torch.tensor([int(is_missing)], device=collectives.device_of(group))
    dist.broadcast(found, src=dist.get_process_group_ranks(group)[0], group=group)
    if found.item():
        raise RedistError(f"{path} cannot be written: it is a folder, or its folder is missing; nothing was measured")


# -- what is timed


def _elements(size: int, members: ProcessGroup) -> int:
    """Two-byte elements of a buffer of about ``size`` bytes that divides evenly among the members."""
    num_ranks = dist.get_world_size(members)
    return max(1, size // 2 // num_ranks) * num_ranks


def _buffer(size: int, members: ProcessGroup, device: torch.device) -> Tensor:
    return torch.zeros(_elements(size, members), dtype=torch.bfloat16, device=device)


def _all_to_all(size: int, members: ProcessGroup, device: torch.device) -> tuple[float, _Call]:
    sent, received = _buffer(size, members, device), _buffer(size, members, device)
    n = dist.get_world_size(members)
    return sent.nbytes * (n - 1) / n, lambda: dist.all_to_all_single(received, sent, group=members)


def _all_gather(size: int, members: ProcessGroup, device: torch.device) -> tuple[float, _Call]:
    n, gathered = dist.get_world_size(members), _buffer(size, members, device)
    own = gathered.chunk(n)[dist.get_rank(members)].clone()
    return gathered.nbytes * (n - 1) / n, lambda: collectives.all_gather(gathered, own, members)


def _reduce_scatter(size: int, members: ProcessGroup, device: torch.device) -> tuple[float, _Call]:
    n, full = dist.get_world_size(members), _buffer(size, members, device)
    own = torch.empty_like(full.chunk(n)[0])
    return full.nbytes * (n - 1) / n, lambda: collectives.reduce_scatter(own, full, "sum", members)


def _all_reduce(size: int, members: ProcessGroup, device: torch.device) -> tuple[float, _Call]:
    n, full = dist.get_world_size(members), _buffer(size, members, device)
    return 2 * full.nbytes * (n - 1) / n, lambda: dist.all_reduce(full, group=members)


def _send_recv(size: int, members: ProcessGroup, device: torch.device) -> tuple[float, _Call]:
    """Every rank sends to the next and receives from the one before."""
    ranks, me = dist.get_process_group_ranks(members), dist.get_rank(members)
    sent, received = _buffer(size, members, device), _buffer(size, members, device)

    def call() -> None:
        ahead, behind = ranks[(me + 1) % len(ranks)], ranks[me - 1]
        ops = [
            dist.P2POp(dist.isend, sent, ahead, group=members),
            dist.P2POp(dist.irecv, received, behind, group=members),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return float(sent.nbytes), call


_OPS: dict[str, Callable[[int, ProcessGroup, torch.device], tuple[float, _Call]]] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "send_recv": _send_recv,
}


def _pack_rate(whole: ProcessGroup, device: torch.device, seconds: float) -> float:
    """Bytes read plus written per second by a copy that packs a row-major matrix as blocks of columns."""
    spent, moved = [], []
    # on a GPU the larger one takes far longer than its launch, and neither fits into the cache
    for rows in (4096, 16384) if device.type == "cuda" else (512, 2048):
        source = torch.zeros(rows, 4096, dtype=torch.bfloat16, device=device)
        packed = torch.empty(4, rows, 1024, dtype=torch.bfloat16, device=device)
        # 16 bytes at a time, as programs copy
        wide, blocks = packed.view(torch.complex128), source.view(torch.complex128).view(rows, 4, 128).transpose(0, 1)
        spent.append(_slowest_median(partial(wide.copy_, blocks), whole, device, seconds / 2))
        moved.append(2 * source.nbytes)
    return (moved[1] - moved[0]) / max(spent[1] - spent[0], 1e-3 * spent[1])


def _call_seconds(model: CommModel, whole: ProcessGroup, device: torch.device, seconds: float) -> float:
    """What a program takes beside its exchange: its steps on the host, and the launch of a copy."""
    ranks = dist.get_process_group_ranks(whole)
    mesh, size = Mesh(len(ranks), ranks=ranks), 64 * len(ranks)
    made = plan((size, size), torch.bfloat16, Layout(mesh, [0, None]), Layout(mesh, [None, 0]), planners=("direct",))
    program, source = compile(made, whole), torch.zeros(64, size, dtype=torch.bfloat16, device=device)
    spent = _slowest_median(lambda: program(source), whole, device, seconds)
    return max(0.0, spent - model.seconds("all_to_all", made.steps[0].bytes))


def slowest_seconds(call: _Call, group: ProcessGroup, device: torch.device) -> float:
    """Seconds of one call on the slowest rank, from a barrier on; the same number on every rank."""
    dist.barrier(group=group)
    _synchronize(device)
    started = time.perf_counter()
    call()
    _synchronize(device)
    spent = torch.tensor([time.perf_counter() - started], dtype=torch.float64, device=device)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=group)
    return float(spent.item())


def _slowest_median(call: _Call, group: ProcessGroup, device: torch.device, seconds: float) -> float:
    """The median over 3 to 30 calls, as many as fit into ``seconds``; ranks see equal times, so they stop together."""
    slowest_seconds(call, group, device)
    times: list[float] = []
    while len(times) < _MIN_REPEATS or (len(times) < _MAX_REPEATS and sum(times) < seconds):
        times.append(slowest_seconds(call, group, device))
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fitting(sizes: Sequence[int], device: torch.device, group: ProcessGroup) -> list[int]:
    """Sizes of which two buffers fit into a quarter of the free memory of the fullest GPU; on a CPU up to 64 MiB."""
    limit = 1 << 26
    if device.type == "cuda":
        free = torch.tensor([torch.cuda.mem_get_info(device)[0] // 8], dtype=torch.int64, device=device)
        dist.all_reduce(free, op=dist.ReduceOp.MIN, group=group)
        limit = int(free.item())
    return [size for size in sorted(sizes) if size <= limit]


def _axis_groups(mesh: DeviceMesh) -> dict[str, ProcessGroup]:
    """This rank's group along every proper subset of the mesh axes, by axis names; all ranks make them in one order."""
    names = mesh.mesh_dim_names or tuple(str(axis) for axis in range(mesh.ndim))
    found: dict[str, ProcessGroup] = {}
    axes = range(mesh.ndim)
    for subset in chain.from_iterable(combinations(axes, count) for count in range(1, mesh.ndim)):
        rest = [axis for axis in axes if axis not in subset]
        rows = mesh.mesh.permute(*rest, *subset).reshape(-1, *(mesh.size(axis) for axis in subset)).flatten(1)
        if rows.shape[1] > 1:
            own, _ = dist.new_subgroups_by_enumeration(rows.tolist())
            assert own is not None
            found["×".join(names[axis] for axis in subset)] = own
    return found


# -- the model


def _model(
    curves: dict[str, list[tuple[float, float]]], num_ranks: int, backend: str, pack_bandwidth: float
) -> CommModel:
    """A model of monotone curves, and a topology whose latency and bandwidth bound all of them from below."""
    rising = {op: monotone(points) for op, points in curves.items()}
    # of all curves, as plans demand it: else they would correct the topology, and name the model by another id
    latency, bandwidth = latency_and_bandwidth(rising["all_to_all"], rising.values())
    topology = Topology.flat(num_ranks, bandwidth=bandwidth, latency=latency)
    name = f"{backend.replace(':', '-').replace(',', '-')}x{num_ranks}"
    # measured times include the host's time for the call
    return replace(
        CommModel.preset("flat"),
        name=name,
        topology=topology,
        curves=rising,
        pack_bandwidth=pack_bandwidth,
        call_seconds=0.0,
        has_library=backend != "gloo",
    )


def fit_error(model: CommModel, op: str) -> float:
    """The median relative error of interpolating each inner point of the curve from its two neighbours."""
    curve = model.curves[op]
    errors = []
    for before, (num_bytes, seconds), after in zip(curve, curve[1:], curve[2:]):
        errors.append(abs(interpolate((before, after), num_bytes) / seconds - 1))
    return statistics.median(errors) if errors else 0.0


def _as_file(model: CommModel, measured: dict[str, Any], group: ProcessGroup, device: torch.device) -> dict[str, Any]:
    """The model as ``CommModel.load`` reads it, with where, when and how well it was measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        **model.to_json(),
        "measured": {
            "device": name,
            "backend": dist.get_backend(group),
            "world": dist.get_world_size(group),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "fit_error": {op: round(fit_error(model, op), 4) for op in model.curves},
            "groups": {kind: curves for kind, curves in measured.items() if kind != "all"},
        },
    }
