"""How well a cost model predicts: every plan that planners offer, predicted and measured on the running ranks.

torchrun --nproc-per-node 4 -m benchmarks.redist_model                 on GPUs, after 30 s of calibration
torchrun --nproc-per-node 4 -m benchmarks.redist_model --model h200x4  by a preset or a file of calibrate
python -m benchmarks.redist_model --sizes 64KiB,1MiB                   on 4 gloo ranks of this machine

Rows are redistributions: those of the benchmark beside DTensor, and others between different sets of ranks. Plans of
different planners that make the same exchanges count as one, with the median of their times. Figures:

    error         |predicted / measured - 1|, the median over plans
    correlation   of ranks by predicted and by measured seconds (Spearman)
    chosen        the share of redistributions whose chosen plan takes at most 1.05 times as long as the quickest one
"""

from __future__ import annotations

import argparse
import os
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arguments import count
from benchmarks.ranks import end_ranks, start_ranks
from benchmarks.redist_benchmark import sizes_of
from benchmarks.report import Report
from optim_redist import CommModel, Layout, Mesh, Plan, RedistError, calibrate, compile, parse_layout, plan
from optim_redist.benchmarking import FLAT_MOVES, GRID_MOVES, matrix_shape
from optim_redist.calibration import slowest_seconds
from optim_utils.testing import run_ranks

PLANNERS = ("direct", "spread", "forward", "relay", "scatter", "collectives", "naive")
TOLERANCE = 1.05  # slower plans than this, relative to the quickest, are wrong choices


@dataclass(frozen=True)
class Measured:
    """One plan of one redistribution: seconds predicted and measured, and whether it is the one that is chosen."""

    src: str
    dst: str
    size: int
    planner: str
    exchanges: tuple[tuple[int, int], ...]
    predicted: float
    measured: float
    chosen: bool


def moves(world: int) -> Iterator[tuple[Layout, Layout]]:
    """Redistributions of a matrix among the ranks 0 … world - 1."""
    flat = Mesh(world)
    texts = [(flat, *move) for move in FLAT_MOVES]
    if world >= 4 and world % 2 == 0:
        texts += [(Mesh((2, world // 2)), *move) for move in GRID_MOVES]
    for mesh, src, dst in texts:
        yield parse_layout(src, mesh, num_dims=2), parse_layout(dst, mesh, num_dims=2)
    for some in range(1, world):
        few = Mesh(some)
        yield Layout(few, [0, None]), Layout(flat, [None, None])
        yield Layout(flat, [0, None]), Layout(few, [None, None])
        yield Layout(flat, [0, None]), Layout(few, [None, 0])
        yield Layout(few, [None, 0]), Layout(flat, [0, None])
    half = world // 2
    here, there = Mesh(half), Mesh(half, ranks=range(world - half, world))
    for source in ([0, None], [None, None]):
        for target in ([0, None], [None, 0], [None, None]):
            yield Layout(here, source), Layout(there, target)


def measure(model: CommModel, sizes: Sequence[int], repeats: int, device: torch.device) -> list[Measured]:
    """Every plan of every move, on all ranks of the world; each time is the median of the slowest rank."""
    rows = []
    for size in sizes:
        shape = matrix_shape(size)
        for src, dst in moves(dist.get_world_size()):
            chosen = plan(shape, torch.bfloat16, src, dst, cost_model=model)
            if not chosen.communicates:
                continue
            times: dict[tuple[tuple[int, int], ...], list[float]] = {}
            found: dict[tuple[tuple[int, int], ...], Plan] = {}
            for made in [chosen, *_others(shape, src, dst, model)]:
                exchanges = _exchanges(made)
                found.setdefault(exchanges, made)
                times.setdefault(exchanges, []).append(_seconds(made, repeats, device))
            for exchanges, made in found.items():
                measured = statistics.median(times[exchanges])
                is_chosen = exchanges == _exchanges(chosen)
                ends = _on_ranks(src), _on_ranks(dst)
                rows.append(Measured(*ends, size, made.planner, exchanges, made.time, measured, is_chosen))
    return rows


def _on_ranks(layout: Layout) -> str:
    return f"{layout} on {list(layout.mesh.ranks)} as {layout.mesh.sizes}"


def _others(shape: tuple[int, int], src: Layout, dst: Layout, model: CommModel) -> Iterator[Plan]:
    for name in PLANNERS:
        try:
            yield plan(shape, torch.bfloat16, src, dst, cost_model=model, planners=[name])
        except RedistError:
            # the planner is for other redistributions
            continue


def _exchanges(made: Plan) -> tuple[tuple[int, int], ...]:
    return tuple((step.recv, step.send) for step in made.steps)


def _seconds(made: Plan, repeats: int, device: torch.device) -> float:
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None, "ranks run"
    # ranks outside of both layouts only wait for the others
    program = compile(made) if rank in {*made.src.mesh.ranks, *made.dst.mesh.ranks} else None
    shape = made.src.local_shape(made.shape, rank) if rank in made.src.mesh.coordinates else None
    local = None if shape is None else torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def call() -> None:
        if program is not None:
            program(local, device=device)

    times = [slowest_seconds(call, world, device) for _ in range(repeats + 2)]
    return statistics.median(times[2:])


def judged(rows: Sequence[Measured]) -> dict[str, float]:
    """The figures of a list of measurements."""
    by_move: dict[tuple[str, str, int], list[Measured]] = {}
    for row in rows:
        by_move.setdefault((row.src, row.dst, row.size), []).append(row)
    right = [
        next(row.measured for row in plans if row.chosen) <= TOLERANCE * min(row.measured for row in plans)
        for plans in by_move.values()
    ]
    return {
        "plans": len(rows),
        "error": statistics.median(abs(row.predicted / row.measured - 1) for row in rows),
        "correlation": _rank_correlation([row.predicted for row in rows], [row.measured for row in rows]),
        "chosen": sum(right) / len(right),
    }


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; equal values take their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values]

    return statistics.correlation(ranks(a), ranks(b))


def figures(rows: Sequence[Measured]) -> list[dict[str, Any]]:
    """The figures of every size, and of all of them."""
    sizes = sorted({row.size for row in rows})
    found = [{"MiB": f"{size / 2**20:g}", **judged([row for row in rows if row.size == size])} for size in sizes]
    return [*found, {"MiB": "all", **judged(rows)}]


def _named(name: str) -> CommModel:
    return CommModel.load(name) if Path(name).exists() else CommModel.preset(name)


def _model(name: str | None, seconds: float) -> CommModel:
    """The model named, or that of a calibration, rank 0's on every rank."""
    if name is not None:
        return _named(name)
    boxed = [calibrate(seconds=seconds, out=None)]
    dist.broadcast_object_list(boxed)
    return boxed[0]


def _measure(rank: int, world_size: int, name: str | None, seconds: float, sizes: list[int], repeats: int) -> Any:
    del rank, world_size
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    model = _model(name, seconds)
    return model.id, [asdict(row) for row in measure(model, sizes, repeats, device)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a preset or a file; without it the ranks are measured first")
    parser.add_argument("--seconds", type=float, default=30.0, help="of that measurement")
    parser.add_argument("--sizes", type=sizes_of, help="bytes of the tensors, such as 64KiB,64MiB")
    parser.add_argument("--repeats", type=count, default=11)
    parser.add_argument("--ranks", type=count, default=4, help="gloo ranks where torchrun has started none")
    parser.add_argument("--json", type=Path, help="write the figures and all plans to this file")
    options = parser.parse_args(arguments)
    if int(os.environ.get("WORLD_SIZE", options.ranks)) < 2:
        parser.error("one rank exchanges nothing: start two or more")
    if options.model is not None:
        try:
            _named(options.model)
        except RedistError as problem:
            parser.error(f"--model: {problem}")
    if "RANK" in os.environ:
        device = start_ranks()
        sizes = options.sizes or [2**16, 2**20, 2**23, 2**26, 2**29] if device.type == "cuda" else [2**16, 2**20]
        model, rows = _measure(0, 0, options.model, options.seconds, sizes, options.repeats)
        first = dist.get_rank() == 0
        end_ranks()
    else:
        sizes = options.sizes or [2**16, 2**20]
        task = options.model, options.seconds, sizes, options.repeats
        model, rows = run_ranks(_measure, options.ranks, *task, timeout=1800.0)[0]
        first = True
    if first:
        report = Report(f"Plans as predicted by {model} and as measured")
        report.rows = figures([Measured(**row) for row in rows])
        report.show()
        if options.json:
            report.rows += rows
            report.save_json(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
