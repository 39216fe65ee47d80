"""The norm of a model's gradients, alone and with scaling: ours, torch's, the floor.

    python -m benchmarks.clip_benchmark --model d20 --dtype bfloat16
    python -m benchmarks.clip_benchmark --model d20 --max-norm 1.0 --with-adamw
    python -m benchmarks.clip_benchmark --suite

"not clipping" is a norm below ``max_norm``, where ours reads the gradients and writes nothing; "clipping" one above.
``--with-adamw`` adds clipping and AdamW together, ours in one step against torch's two
(``benchmarks.adamw_benchmark --max-norm``). A norm that is wrong prints no speed.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial

import torch

from benchmarks import adamw_benchmark, timing
from benchmarks.adamw_benchmark import Case
from benchmarks.adamw_peers import PEERS
from benchmarks.arguments import add_json, count
from benchmarks.ceilings import ceilings
from benchmarks.model_lists import MODELS, ONE, make_parameters, model_shapes, num_elements
from benchmarks.report import Report
from optim_kernels import clip_grad_norm_, compute_global_grad_norm

Params = list[torch.nn.Parameter]


def main() -> int:
    arguments = parse()
    if arguments.suite:
        cases = [
            Case(name, model_shapes(name), dtype)
            for name in (ONE, "gpt2_124m", "d20", "gpt2_1.56b")
            for dtype in (torch.bfloat16, torch.float32)
        ]
    else:
        cases = [Case(*adamw_benchmark.chosen_list(arguments), getattr(torch, arguments.dtype))]
    cases = list(map(adamw_benchmark.fitting, cases))
    title = "Gradient clipping" if arguments.suite else f"Gradient clipping, {cases[0].label}"
    report = Report(title, note=str(ceilings()))
    for case in cases:
        if not add_case(report, case):
            return 1
        if arguments.with_adamw:
            case.options["max_norm"] = arguments.max_norm
            if not adamw_benchmark.add_case(report, case, arguments.peers):
                return 1
    adamw_benchmark.finish(report, arguments)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=count, nargs="+", help="one gradient of this shape instead of a model's")
    parser.add_argument("--model", default="gpt2_124m", choices=MODELS, help="default: %(default)s")
    parser.add_argument("--suite", action="store_true", help="all lists in one process, with one table at the end")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--with-adamw", action="store_true", help="clipping and AdamW together as well")
    parser.add_argument("--max-norm", type=float, default=1.0, help="what --with-adamw clips to")
    parser.add_argument("--peers", default="fused", choices=PEERS, help="what --with-adamw compares with")
    add_json(parser)
    parser.add_argument("--plot", help="draw the device times into this file")
    return parser.parse_args()


def add_case(report: Report, case: Case) -> bool:
    """Measure one list of gradients and add its rows; whether the norm was right."""
    on_gpu = torch.cuda.is_available()
    size = num_elements(case.shapes) * case.dtype.itemsize
    num_sets = timing.num_cold_sets(size)
    sets = [make_parameters(case.shapes, case.dtype, "cuda" if on_gpu else "cpu", seed=i) for i in range(num_sets)]
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in sets[0] if p.grad is not None))
    error = abs(float(compute_global_grad_norm(sets[0])) - exact) / exact
    if not error <= 1e-6:
        print(f"{case.label}: the norm is wrong, relative error {error:.3g}; no speed is printed")
        return False
    theirs = torch.nn.utils.clip_grad_norm_
    # A factor of -1 is below 1 as often as it is asked for, and leaves the gradients as large as they were.
    rows: list[tuple[str, int, Callable[[Params], object]]] = [
        ("not clipping, ours", 1, lambda params: clip_grad_norm_(params, 1e9)),
        ("not clipping, torch", 1, lambda params: theirs(params, 1e9, foreach=True)),
        ("clipping, ours", 3, lambda params: clip_grad_norm_(params, -exact)),
        ("clipping, torch", 3, lambda params: theirs(params, -exact, foreach=True)),
    ]
    calls = {name: [partial(function, params) for params in sets] for name, _, function in rows}
    timers: dict[tuple[str, str], timing.Timer] = {}
    for name, mine in calls.items():
        timers[name, "wall_ms"] = partial(timing.wall_ms, mine, repeats=1)
        if on_gpu:
            timers[name, "graph_ms"] = partial(timing.replay_ms, *timing.capture_rounds(mine))
    times = timing.alternate(timers)
    for name, passes, _ in rows:
        row = {kind: times[name, kind] for kind in ("graph_ms", "wall_ms") if (name, kind) in times}
        if on_gpu:
            row |= {"host_us": timing.host_us(calls[name][0]), "launches": timing.launches(calls[name][0])}
        floor = 1e3 * passes * size / ceilings().copy
        own = {"error": error} if "ours" in name else {}
        report.add(list=case.label, what=name, **row, floor_ms=floor, of_floor=next(iter(row.values())) / floor, **own)
    return True


if __name__ == "__main__":
    sys.exit(main())
