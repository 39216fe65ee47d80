"""The AdamW step of one tensor or a whole model: ours, torch's, other packages where they can be imported, the floor.

    python -m benchmarks.adamw_benchmark --shape 4096 1024 --dtype float16
    python -m benchmarks.adamw_benchmark --model d20 --dtype bfloat16 --max-norm 1.0 --peers all --json out.json
    python -m benchmarks.adamw_benchmark --suite all --peers fused

The floor is the bytes a step has to move at the speed of a copy (`benchmarks.ceilings`). "graph" is device time with
cold caches, "hot" the same with caches warm from the step before, "wall" what a training loop sees, "host" the
processor's time in a call, "sm_mhz" the clock under that load (``benchmarks.timing``). All contenders step the same
parameters, in turn. A first step is compared with the reference in fp64, and a wrong one prints no speed. On a CPU the
same command measures the fallback on the tiny list.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.adamw_peers import HYPERPARAMETERS, PEERS, MakeStep, Params, Step, of_class, peers
from benchmarks.arguments import add_json, count
from benchmarks.ceilings import ceilings
from benchmarks.errors import largest
from benchmarks.model_lists import MODELS, ONE, Shape, make_parameters, model_shapes, num_elements
from benchmarks.report import Report
from optim_kernels import TritonAdamW, reference

# More elements than this, and contenders are measured one after the other: their states do not fit side by side.
MOST_SIDE_BY_SIDE = 1_000_000_000


@dataclass
class Case:
    """One list of tensors and the options of our optimizer."""

    name: str
    shapes: list[Shape]
    dtype: torch.dtype
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        words = [f"{key}={str(value).removeprefix('torch.')}" for key, value in self.options.items()]
        return " ".join([self.name, str(self.dtype).removeprefix("torch."), *words])

    @property
    def bytes_per_element(self) -> float:
        """Parameter, moments and master read and written, gradient read, once more if there is a norm."""
        size, state_dtype = float(3 * self.dtype.itemsize), self.options.get("state_dtype", self.dtype)
        if state_dtype == "int8":
            # codes of a byte, and an fp32 scale for 256 of them
            size += 4 * (1 + 4 / 256)
        else:
            pair = state_dtype if isinstance(state_dtype, tuple) else (state_dtype, state_dtype)
            size += 2 * sum(dtype.itemsize for dtype in pair)
        if self.options.get("master_weights") == "fp32":
            size += 8 - self.dtype.itemsize
        elif self.options.get("master_weights") == "split16":
            size += 4
        return size + (self.dtype.itemsize if "max_norm" in self.options else 0)

    @property
    def arguments(self) -> dict[str, Any]:
        """What our optimizer is made with."""
        if self.dtype == torch.float16 and not torch.cuda.is_available():
            # fp16 knows no random rounding, but it leads to our reference: torch on a CPU computes in fp16, with eps 0
            return {**self.options, "stochastic_rounding": True}
        return self.options

    @property
    def num_bytes(self) -> float:
        """That a step has to move."""
        return self.bytes_per_element * num_elements(self.shapes)

    @property
    def floor_ms(self) -> float:
        return 1e3 * self.num_bytes / ceilings().copy


def main() -> int:
    arguments = parse()
    cases = suite(arguments.suite) if arguments.suite else [case_of(arguments)]
    title = "AdamW step" if arguments.suite else f"AdamW step, {cases[0].label}"
    report = Report(title, note=str(ceilings()))
    for case in cases:
        if not add_case(report, case, arguments.peers, at_least_calls=arguments.steps, warmups=arguments.warmup):
            return 1
    finish(report, arguments)
    return 0


def finish(report: Report, arguments: argparse.Namespace) -> None:
    """Show the rows, and write the files that were asked for."""
    report.publish(arguments.json)
    if arguments.plot:
        time = "graph_ms" if torch.cuda.is_available() else "wall_ms"
        report.save_plot(arguments.plot, value=time, labels=["what"], group="list")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=count, nargs="+", help="one tensor of this shape instead of a model")
    parser.add_argument("--model", default="gpt2_124m", choices=MODELS, help="default: %(default)s")
    parser.add_argument("--suite", choices=sorted(SUITES), help="many rows in one process, with one table at the end")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16", "int8"], help="how moments are stored")
    parser.add_argument("--master-weights", choices=["fp32", "split16"])
    parser.add_argument("--stochastic-rounding", action="store_true")
    parser.add_argument("--max-norm", type=float, help="clip first: ours in the step, others by torch's function")
    parser.add_argument("--peers", default="torch", choices=PEERS)
    add_json(parser)
    parser.add_argument("--plot", help="draw the device times into this file")
    parser.add_argument("--steps", type=count, default=1, help="time at least so many back to back, and at least .1 s")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    return parser.parse_args()


def case_of(arguments: argparse.Namespace) -> Case:
    """The case that the command line describes."""
    options: dict[str, Any] = {}
    if arguments.state_dtype:
        options["state_dtype"] = "int8" if arguments.state_dtype == "int8" else getattr(torch, arguments.state_dtype)
    if arguments.master_weights:
        options["master_weights"] = arguments.master_weights
    if arguments.stochastic_rounding:
        options["stochastic_rounding"] = True
    if arguments.max_norm is not None:
        options["max_norm"] = arguments.max_norm
    return fitting(Case(*chosen_list(arguments), getattr(torch, arguments.dtype), options))


def chosen_list(arguments: argparse.Namespace) -> tuple[str, list[Shape]]:
    """Name and shapes of what ``--shape`` or ``--model`` says."""
    if arguments.shape:
        return "×".join(map(str, arguments.shape)), [tuple(arguments.shape)]
    return arguments.model, model_shapes(arguments.model)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Cases by the suite they belong to: list, dtype, options.
SUITES: dict[str, list[tuple[str, torch.dtype, dict[str, Any]]]] = {
    "plain": [
        *((ONE, dtype, {}) for dtype in (FP16, BF16, FP32)),
        *((name, dtype, {}) for name in ("gpt2_124m", "d20", "gpt2_1.56b") for dtype in (BF16, FP32)),
    ],
    "formats": [
        *((name, BF16, {"state_dtype": FP32}) for name in ("gpt2_124m", "d20", "gpt2_1.56b")),
        *(
            (name, BF16, {"state_dtype": FP32, "master_weights": "split16"})
            for name in ("gpt2_124m", "d20", "gpt2_1.56b")
        ),
        *((name, BF16, {"state_dtype": (BF16, FP32)}) for name in ("d20", "gpt2_1.56b")),
        ("d20", BF16, {"stochastic_rounding": True}),
        *((name, BF16, {"state_dtype": "int8"}) for name in (ONE, "gpt2_124m", "d20", "gpt2_1.56b")),
    ],
    # the norm of these gradients is between 11 and 39: half of them is clipped, all of them is not
    "clipping": [
        (name, dtype, {"max_norm": max_norm})
        for name in ("gpt2_124m", "d20", "gpt2_1.56b")
        for dtype in (BF16, FP32)
        for max_norm in (1.0, 100.0)
    ],
}
SUITES["all"] = [*SUITES["plain"], *SUITES["clipping"], *SUITES["formats"]]


def suite(name: str) -> list[Case]:
    """The cases of a suite."""
    return [fitting(Case(lst, model_shapes(lst), dtype, options)) for lst, dtype, options in SUITES[name]]


def fitting(case: Case) -> Case:
    """The case itself, or the tiny list on a machine that would take minutes."""
    if torch.cuda.is_available() or num_elements(case.shapes) <= 1 << 22:
        return case
    return Case("tiny", model_shapes("tiny"), case.dtype, case.options)


def add_case(report: Report, case: Case, choice: str, **counts: int) -> bool:
    """Measure a case and add its rows; whether its first step was right. ``counts`` are for `timing.wall_ms`."""
    error, limit = first_step_error(case)
    if not error <= limit:
        print(f"{case.label}: the first step is wrong, error {error:.3g} of {limit:.3g} allowed; no speed is printed")
        return False
    on_gpu = torch.cuda.is_available()
    contenders = {"ours": of_class(TritonAdamW, capturable=on_gpu, **case.arguments)}
    contenders |= peers(choice, case.options.get("max_norm"))
    rows = measure(contenders, case, counts)
    time = "graph_ms" if on_gpu else "wall_ms"
    own = rows["ours"][time]
    for name, row in rows.items():
        if time in row:
            row |= {"of_floor": row[time] / case.floor_ms, "to_ours": row[time] / own}
            row["gb_per_s"] = case.num_bytes / row[time] / 1e6
        if name == "ours":
            row["error"] = error
        report.add(list=case.label, what=name, **row)
    report.add(list=case.label, what="floor", **{time: case.floor_ms})
    return True


def measure(contenders: dict[str, MakeStep], case: Case, counts: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The figures of each contender; inputs rotate until they exceed three times the L2."""
    on_gpu = torch.cuda.is_available()
    num_sets = timing.num_cold_sets(num_elements(case.shapes) * 4 * case.dtype.itemsize)
    sets = [make_parameters(case.shapes, case.dtype, "cuda" if on_gpu else "cpu", seed=i) for i in range(num_sets)]
    if num_elements(case.shapes) <= MOST_SIDE_BY_SIDE:
        rounds = [contenders]
    else:
        rounds = [{name: make_step} for name, make_step in contenders.items()]
    rows: dict[str, dict[str, Any]] = {}
    for some in rounds:
        rows |= _measure_side_by_side(some, sets, on_gpu, counts)
        _free()
    return {name: rows[name] for name in contenders}


def _measure_side_by_side(
    contenders: dict[str, MakeStep], sets: list[Params], on_gpu: bool, counts: dict[str, int]
) -> dict[str, dict[str, Any]]:
    """Device and wall time of all contenders in turn, so that every figure sees the clocks that the others see."""
    rows: dict[str, dict[str, Any]] = {name: {} for name in contenders}
    steps: dict[str, list[Step]] = {}
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    timers: dict[tuple[str, str], timing.Timer] = {}
    for name, make_step in contenders.items():
        start = perf_counter()
        try:
            steps[name] = [make_step(params) for params in sets]
            steps[name][0]()
            timers[name, "wall_ms"] = partial(timing.wall_ms, steps[name], repeats=1, **counts)
            if on_gpu:
                rows[name] |= {"host_us": timing.host_us(steps[name][0]), "launches": timing.launches(steps[name][0])}
                graphs[name] = timing.capture_rounds(steps[name])
                timers[name, "graph_ms"] = partial(timing.replay_ms, *graphs[name])
        except (RuntimeError, ImportError, TypeError) as problem:
            if name == "ours":
                raise
            rows[name]["note"] = str(problem).splitlines()[0][:60]
        # some compile for a minute
        print(f"{name}: ready after {perf_counter() - start:.0f} s", file=sys.stderr)
    times = timing.alternate(timers)
    for name, row in rows.items():
        figures = {kind: times[name, kind] for kind in ("graph_ms", "wall_ms") if (name, kind) in times}
        rows[name] = {**figures, **row}
        if name in graphs:
            rows[name]["sustained_ms"] = timing.sustained_ms(*graphs[name])
            rows[name]["sm_mhz"] = timing.sm_clock_mhz(graphs[name][0].replay)
            if len(sets) > 1:
                rows[name]["hot_ms"] = timing.graph_ms(steps[name][:1], repeat=len(sets))
    return rows


def _free() -> None:
    """Give back what the last contenders held, compiled code included."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest_of(tensors: Iterable[Tensor]) -> float:
    """The largest magnitude in all tensors."""
    return largest(tensor.abs().max() for tensor in tensors)


def first_step_error(case: Case) -> tuple[float, float]:
    """The largest error of a first step, of the largest parameter, against the reference in fp64; and what is allowed.

    Allowed is an ulp of the parameters' dtype, and 1e-6 of the largest change.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = sorted(case.shapes, key=math.prod)[: len(case.shapes) // 2 + 1][-8:]
    params = make_parameters(shapes, case.dtype, device)
    wide = [p.detach().double() for p in params]
    grads = [p.grad.double() for p in params if p.grad is not None]
    if "max_norm" in case.options:
        factor = reference.clip_factor(reference.total_norm(grads), case.options["max_norm"])
        grads = [grad * factor for grad in grads]
    before = [p.clone() for p in wide]
    reference.adamw_(
        wide,
        grads,
        [torch.zeros_like(p) for p in wide],
        [torch.zeros_like(p) for p in wide],
        steps=torch.zeros(()),
        **HYPERPARAMETERS,
    )
    TritonAdamW(params, **HYPERPARAMETERS, **case.arguments).step()
    error = largest_of(p.detach().double() - q for p, q in zip(params, wide))
    largest = largest_of(wide)
    moved = largest_of(p - q for p, q in zip(wide, before))
    return error / largest, torch.finfo(case.dtype).eps + 1e-6 * moved / largest


if __name__ == "__main__":
    sys.exit(main())
