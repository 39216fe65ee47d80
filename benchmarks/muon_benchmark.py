"""Newton–Schulz on one shape or a suite of them, or the Muon step of a model's or other matrices, beside peers.

    python -m benchmarks.muon_benchmark --dim 2048 --dtype float16 --steps 5 --warmup 3 --runs 10
    python -m benchmarks.muon_benchmark --shape 24 1024 4096
    python -m benchmarks.muon_benchmark --suite --json muon.json --plot muon.png
    python -m benchmarks.muon_benchmark --model d20 --semantics nanochat --ns-dtype bfloat16
    python -m benchmarks.muon_benchmark --matrices 768x768 2x768x3072

Shapes are measured in each ``--dtype``, a suite in both 16-bit ones: fp16 is the more accurate, bf16 draws less power,
which is what limits large products. ``--matrices`` are those of a step, as one rank of many has. ``--steps`` counts
Newton–Schulz steps, ``--runs`` graph replays. The floor is the iteration's flops, symmetric halves counted once, at the
rate of a large matrix product, and for a step the bytes of its elementwise part at the speed of a copy
(`benchmarks.ceilings`). Peers are those of `newton_schulz_peers`: torch's own ways to write the iteration (as
``torch.optim.Muon`` does, with cuBLAS's ``addmm``, compiled), and installed packages. Without a GPU plain torch runs,
small.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import timing
from benchmarks.arguments import add_json, count
from benchmarks.ceilings import ceilings
from benchmarks.errors import largest
from benchmarks.model_lists import MODELS, make_parameters, model_shapes, muon_shapes, num_elements
from benchmarks.newton_schulz_peers import peers_of
from benchmarks.report import Report
from optim_kernels import NSConfig, TritonMuon, TritonMuonAdamW, newton_schulz, reference

# Relative error against fp64 above which no speed is printed: twice that of bf16 products; of exact ones rounded to
# bf16 on the CPU.
ERROR_LIMITS = {"cuda": 2.5e-2, "cpu": 4e-3}
# Longest side on a CPU, where larger matrices would take minutes.
CPU_SIDE = 128
SUITE = (
    (1024, 1024),
    (2048, 2048),
    (4096, 4096),
    (8192, 8192),
    (768, 3072),
    (1024, 4096),
    (4096, 1024),
    (2048, 8192),
    (4096, 14336),
    (12, 768, 768),
    (24, 1024, 4096),
)


def main() -> int:
    arguments = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.is_step:
        report = measure_step(arguments, device)
    else:
        shapes = SUITE if arguments.suite else [tuple(arguments.shape or (arguments.dim, arguments.dim))]
        title = f"Newton–Schulz, {arguments.steps} steps, {' and '.join(arguments.dtype)}"
        said = f"\non a CPU sides are cut to {CPU_SIDE}" if device == "cpu" else ""
        report = Report(title, note=f"{ceilings()}{said}")
        dtypes = [getattr(torch, name) for name in arguments.dtype]
        if not all(measure_iteration(shape, dtype, arguments, device, report) for shape in shapes for dtype in dtypes):
            report = None
    if report is None:
        return 1
    report.publish(arguments.json)
    if arguments.plot:
        if arguments.is_step:
            report.save_plot(arguments.plot, value="wall_ms", labels=["what"])
        else:
            report.save_plot(arguments.plot, value="of_floor", labels=["what", "dtype"], group="shape")
    return 0


def measure_iteration(
    shape: tuple[int, ...], dtype: torch.dtype, arguments: argparse.Namespace, device: str, report: Report
) -> bool:
    """Rows of Newton–Schulz on one shape; whether ours is right (else its speed is not reported)."""
    shape = cut(shape, device)
    config = iteration_of(arguments)
    num_sets = min(12, timing.num_cold_sets(math.prod(shape) * dtype.itemsize))
    inputs = [torch.randn(shape, device=device).to(dtype) for _ in range(num_sets)]
    # fp16 is what is taken where the dtype is left open
    ours = our_iteration(config, None if device == "cpu" or dtype == torch.float16 else dtype)
    error = relative_error(ours(inputs[0]), inputs[0], config)
    if not error <= ERROR_LIMITS[device]:
        print(f"Newton–Schulz is wrong at {shape}: relative error {error:.3g}; no speed is printed")
        return False
    flops = config.flops(*shape[-2:]) * math.prod(shape[:-2])
    floor = 1e3 * flops / ceilings().product
    ours_first = 0.0
    for name, function in {"ours": ours, **peers_of(config, arguments.peers, device)}.items():
        calls = [lambda x=x, function=function: function(x) for x in inputs]
        try:
            times = time_calls(calls, arguments, device)
        except Exception as problem:
            if name == "ours":
                raise
            # what other packages cannot do must not end the run
            print(f"{name} fails at {shape}: {type(problem).__name__}: {str(problem)[:200]}")
            continue
        first = next(iter(times.values()))
        ours_first = ours_first or first
        report.add(
            shape="×".join(map(str, shape)),
            dtype=str(dtype).removeprefix("torch."),
            what=name,
            **times,
            floor_ms=floor,
            of_floor=first / floor,
            of_ours=first / ours_first,
            useful_TF=flops / first / 1e9,
            error=error if name == "ours" else None,
            method=config.method_for(*sorted(shape[-2:])) if name == "ours" else None,
        )
    return True


def cut(shape: Sequence[int], device: str) -> tuple[int, ...]:
    """The shape, on a CPU with shorter sides."""
    return tuple(shape) if device == "cuda" else tuple(min(size, CPU_SIDE) for size in shape)


def iteration_of(arguments: argparse.Namespace) -> NSConfig:
    """What the command line says of the iteration."""
    return NSConfig(coefficients=arguments.coefficients, steps=arguments.steps, method=arguments.method)


def our_iteration(config: NSConfig, compute_dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """Our Newton–Schulz, as a function of the matrices alone."""

    def ours(x: Tensor) -> Tensor:
        result: Tensor = newton_schulz(
            x, config.steps, coefficients=config.coefficients, method=config.method, compute_dtype=compute_dtype
        )
        return result

    return ours


def time_calls(calls: Sequence[Callable[[], object]], arguments: argparse.Namespace, device: str) -> dict[str, float]:
    """A call's time by graph replay, back to back, and, of one shape, of single calls after a flush of L2.

    By replay both from a rested card and over a second.
    """
    at_least = 30.0 if arguments.suite else 100.0
    wall = partial(timing.wall_ms, calls, at_least_ms=at_least, warmups=arguments.warmup, repeats=1)
    if device == "cpu":
        return timing.alternate({"wall_ms": wall})
    graph, num_calls = timing.capture_rounds(calls, warmups=arguments.warmup)
    replay = partial(timing.replay_ms, graph, num_calls, replays=arguments.runs)
    timers = {"graph_ms": replay, "wall_ms": wall}
    if not arguments.suite:
        timers["flushed_ms"] = partial(timing.flushed_ms, calls[0])
    return timing.alternate(timers) | {"sustained_ms": timing.sustained_ms(graph, num_calls)}


def relative_error(result: Tensor, x: Tensor, config: NSConfig) -> float:
    """Against the fp64 run; of a batch, the first matrix."""
    first = (0,) * (x.ndim - 2)
    expected = reference.newton_schulz(x[first].double(), config.triples, row_factors=config.row_factors)
    return float((result[first].double() - expected).norm() / expected.norm())


def measure_step(arguments: argparse.Namespace, device: str) -> Report | None:
    """The step of a model's or other matrices; ``None`` if ours and torch's part further than bf16 products explain."""
    if arguments.matrices:
        model = ", ".join(f"{number} of {'×'.join(map(str, shape))}" for number, *shape in arguments.matrices)
        shapes = [cut(shape, device) for number, *shape in arguments.matrices for _ in range(number)]
    else:
        model = arguments.model if device == "cuda" else "tiny"
        shapes = muon_shapes(model_shapes(model))
    dtype = getattr(torch, arguments.dtype[0])
    options: dict[str, Any] = {"ns_dtype": getattr(torch, arguments.ns_dtype) if arguments.ns_dtype else None}
    makers: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {}
    if arguments.semantics == "torch":
        makers["TritonMuon"] = lambda params: TritonMuon(params, capturable=True, **options)
        makers["torch.optim.Muon"] = lambda params: torch.optim.Muon(params)
    else:
        makers["TritonMuonAdamW"] = lambda params: TritonMuonAdamW(
            [{"params": params, "kind": "muon", **options}], capturable=True
        )
    products = f", products in {arguments.ns_dtype}" if arguments.ns_dtype else ""
    title = f"Muon step, {model}, {arguments.dtype[0]}{products}, {arguments.semantics} semantics"
    report = Report(title, note=str(ceilings()))
    config = NSConfig(coefficients="keller" if arguments.semantics == "torch" else "polar_express")
    flops = sum(config.flops(*shape) for shape in shapes)
    # read p, g and B, write p and B; with NorMuon the update O is read once more, in 16 bits
    size = num_elements(shapes) * (5 * dtype.itemsize + (0 if arguments.semantics == "torch" else 2))
    floor = 1e3 * (flops / ceilings().product + size / ceilings().copy)
    results = {name: make_parameters(shapes, dtype, device) for name in makers}
    optimizers = {name: make(results[name]) for name, make in makers.items()}
    for optimizer in optimizers.values():
        optimizer.step()
    if len(results) == 2:
        apart = largest_difference(*results.values())
        if not apart <= 1e-2:
            print(f"ours and torch's step differ by {apart:.3g}; no speed is printed")
            return None
    for name, optimizer in optimizers.items():
        row = time_step(optimizer, device)
        launches = sum(plan.launches for plan in plans_of(optimizer))
        report.add(what=name, **row, floor_ms=floor, of_floor=row["wall_ms"] / floor, launches=launches or None)
    return report


@torch.no_grad()
def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """By how much a tensor differs at most, relative to its norm."""
    return largest((p.float() - q.float()).norm() / q.float().norm() for p, q in zip(found, expected, strict=True))


def time_step(optimizer: torch.optim.Optimizer, device: str) -> dict[str, float]:
    """A step's time on the wall, on the host and, where it can be captured, by graph replay."""
    timers: dict[str, timing.Timer] = {"wall_ms": partial(timing.wall_ms, [optimizer.step], repeats=1)}
    row: dict[str, float] = {}
    if device == "cuda":
        row["host_us"] = timing.host_us(optimizer.step, num_calls=5)
        if plans_of(optimizer):
            # torch.optim.Muon cannot be captured
            graph, num_steps = timing.capture_rounds([optimizer.step])
            timers["graph_ms"] = partial(timing.replay_ms, graph, num_steps)
            row["sustained_ms"] = timing.sustained_ms(graph, num_steps)
    return timing.alternate(timers) | row


def plans_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The grouped launches of one of our optimizers; none of torch's."""
    return optimizer.plans() if isinstance(optimizer, TritonMuon | TritonMuonAdamW) else []


def matrices(text: str) -> tuple[int, int, int]:
    """How many matrices, their rows and columns, from ``4x768x3072``, or ``768x3072`` for one."""
    numbers = list(map(count, text.split("x")))
    if len(numbers) not in (2, 3):
        raise argparse.ArgumentTypeError(f"expected matrices as 4x768x3072 or 768x3072, got {text!r}")
    number, rows, columns = numbers if len(numbers) == 3 else (1, *numbers)
    return number, rows, columns


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=count, default=2048, help="one square matrix of this size")
    parser.add_argument("--shape", type=count, nargs="+", help="a matrix, or a batch of matrices, of this shape")
    parser.add_argument("--suite", action="store_true", help="all shapes of the suite")
    parser.add_argument("--model", choices=MODELS, help="the full step of this model's matrices")
    parser.add_argument("--matrices", type=matrices, nargs="+", help="the full step of these, as 4x768x3072 or 768x768")
    parser.add_argument("--semantics", default="torch", choices=["torch", "nanochat"])
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=["float16", "bfloat16", "float32"],
        help="of the matrices: float16 (one shape), float16 and bfloat16 (a suite), bfloat16 (a model, one dtype)",
    )
    parser.add_argument(
        "--ns-dtype",
        choices=["float16", "bfloat16", "float32"],
        help="of a model's products (float16 on CUDA)",
    )
    parser.add_argument("--steps", type=count, default=5, help="Newton–Schulz steps")
    parser.add_argument("--coefficients", default="keller")
    parser.add_argument("--method", default="auto", choices=["auto", "standard", "gram"])
    parser.add_argument("--peers", default="builtin", choices=["none", "builtin", "all"], help="all: packages too")
    parser.add_argument("--warmup", type=int, default=2, help="calls before measuring")
    parser.add_argument("--runs", type=count, default=15, help="graph replays, of which the median is taken")
    add_json(parser)
    parser.add_argument("--plot", help="draw the rows into this file")
    arguments = parser.parse_args()
    arguments.is_step = bool(arguments.model or arguments.matrices)
    if arguments.model and arguments.matrices:
        parser.error("a step is that of a --model or of --matrices, got both")
    if arguments.dtype is None:
        arguments.dtype = (
            ["bfloat16"] if arguments.is_step else ["float16", "bfloat16"] if arguments.suite else ["float16"]
        )
    if arguments.is_step and len(arguments.dtype) > 1:
        parser.error(f"--dtype is one dtype for a step, got {' '.join(arguments.dtype)}")
    if arguments.ns_dtype and not arguments.is_step:
        parser.error("--ns-dtype is for a step; a shape's products take its --dtype")
    if arguments.shape and len(arguments.shape) < 2:
        parser.error(f"--shape is that of a matrix or a batch of matrices, got {arguments.shape[0]} alone")
    try:
        iteration_of(arguments)
    except ValueError as problem:
        parser.error(str(problem))
    return arguments


if __name__ == "__main__":
    sys.exit(main())
