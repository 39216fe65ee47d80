"""Redistribution beside DTensor: what plans move, how long planning takes, and how long moves take.

python -m benchmarks.redist_benchmark --planning               volumes, cuts, memory, planning time; no ranks needed
python -m benchmarks.redist_benchmark --sizes 1MiB,16MiB       moves timed on 4 gloo ranks of this machine
torchrun --nproc-per-node 4 -m benchmarks.redist_benchmark --sizes 64MiB,512MiB,2GiB     the same on GPUs

Without options it does both at sizes for a CPU. Timed moves are compared with DTensor's result first; a row that
differs shows no time.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks import redist_planning
from benchmarks.arguments import add_json, count
from benchmarks.report import Report
from optim_redist import benchmarking
from optim_redist.cli import joined_ranks
from optim_redist.units import parse_bytes
from optim_utils.testing import run_ranks


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--planning", action="store_true", help="only the planning figures")
    one.add_argument("--sizes", type=sizes_of, help="only moves, of tensors of so many bytes, such as 64MiB,2GiB")
    parser.add_argument("--cases", type=count, default=1000, help="random redistributions of each kind")
    parser.add_argument("--repeats", type=count, default=9)
    parser.add_argument("--ranks", type=count, default=4, help="gloo ranks where torchrun has started none")
    add_json(parser)
    options = parser.parse_args(arguments)
    if "RANK" in os.environ:
        if options.planning:
            parser.error("--planning takes no ranks: start it without torchrun")
        return _under_torchrun(options)
    report = Report("Redistribution beside DTensor")
    if not options.sizes:
        planning = Report("Planning redistributions beside DTensor's planners")
        planning.rows = redist_planning.rows_of(options.cases)
        planning.show()
        report.rows += planning.rows
    if not options.planning:
        measured = run_ranks(_measure, options.ranks, options.sizes or [1 << 20], options.repeats, timeout=1800.0)[0]
        print(f"{report.heading()}\n{options.ranks} gloo ranks\n\n{benchmarking.table(measured)}\n")
        report.rows += [asdict(row) for row in measured]
    if options.json:
        report.save_json(options.json)
    return 0


def sizes_of(text: str) -> list[int]:
    try:
        return [parse_bytes(part) for part in text.split(",")]
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def _measure(rank: int, world_size: int, sizes: list[int], repeats: int) -> list[benchmarking.Row]:
    # DTensor says on every call that it falls back on gloo and that it would rather have flattened meshes
    logging.disable(logging.WARNING)
    return benchmarking.measure(sizes, repeats=repeats)


def _under_torchrun(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    with joined_ranks():
        rows = _measure(dist.get_rank(), dist.get_world_size(), options.sizes or [64 << 20], options.repeats)
        if dist.get_rank() == 0:
            report = Report("Redistribution beside DTensor")
            report.rows = [asdict(row) for row in rows]
            print(f"{report.heading()}\n\n{benchmarking.table(rows)}")
            if options.json:
                report.save_json(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
