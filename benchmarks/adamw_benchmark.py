"""The AdamW step of one tensor or a whole model: ours, torch's, other packages where they can be imported, the floor.

    python -m benchmarks.adamw_benchmark --shape 4096 1024 --dtype float16
    python -m benchmarks.adamw_benchmark --model d20 --dtype bfloat16 --max-norm 1.0 --peers all --json out.json

The floor is the bytes a step has to move over 4.24 TB/s, what a copy reaches on an H200; "graph" is device time with
cold caches, "wall" what a training loop sees (``benchmarks.timing``). A first step is compared with the reference in
fp64, and a wrong one prints no speed. On a CPU the same command measures the fallback on the tiny list.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import torch

from benchmarks import timing
from benchmarks.model_lists import Shape, make_parameters, model_shapes, num_elements
from benchmarks.report import Report, clocks
from optim_kernels import TritonAdamW, reference

COPY_BYTES_PER_SECOND = 4.24e12

Params = list[torch.nn.Parameter]
MakeStep = Callable[[Params], Callable[[], object]]

HYPERPARAMETERS = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def main() -> int:
    arguments = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [tuple(arguments.shape)] if arguments.shape else model_shapes(arguments.model)
    if device == "cpu" and num_elements(shapes) > 1 << 22:
        shapes = model_shapes("tiny")
    dtype = getattr(torch, arguments.dtype)
    options = own_options(arguments)

    report = Report(f"AdamW step, {arguments.model or arguments.shape}, {arguments.dtype}, {options or 'as torch'}")
    error, limit = first_step_error(shapes, dtype, options)
    if not error <= limit:
        print(f"the first step is wrong: error {error:.3g} where {limit:.3g} is allowed; no speed is printed")
        return 1
    size = bytes_of_step(dtype, options) * num_elements(shapes)
    floor = 1e3 * size / COPY_BYTES_PER_SECOND
    for name, make_step in contenders(arguments, options).items():
        try:
            row = measure(make_step, shapes, dtype, device)
        except (RuntimeError, ImportError, TypeError) as problem:
            report.add(what=name, note=str(problem).splitlines()[0][:60])
            continue
        best = row.get("graph_ms", row["wall_ms"])
        report.add(what=name, **row, gb_per_s=size / best / 1e6, of_floor=best / floor)
        torch.cuda.empty_cache()
    report.add(what="floor", graph_ms=floor, gb_per_s=COPY_BYTES_PER_SECOND / 1e9, of_floor=1.0)
    report.add(what="error of the first step", note=f"{error:.3g}, allowed {limit:.3g}; {clocks()}")
    report.show()
    if arguments.json:
        report.save_json(arguments.json)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs="+", help="one tensor of this shape instead of a model")
    parser.add_argument("--model", default=None, help="gpt2_124m, gpt2_1.56b, d20 or tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], help="dtype of the moments")
    parser.add_argument("--master-weights", choices=["fp32", "split16"])
    parser.add_argument("--stochastic-rounding", action="store_true")
    parser.add_argument("--max-norm", type=float, help="clip first: ours in the step, others by torch's function")
    parser.add_argument("--peers", default="torch", choices=["torch", "all", "none"])
    parser.add_argument("--json", help="write rows, machine and versions to this file")
    parser.add_argument("--steps", type=int, default=200, help="kept for scripts; figures are medians of enough steps")
    parser.add_argument("--warmup", type=int, default=20, help="as --steps")
    arguments = parser.parse_args()
    if arguments.shape is None and arguments.model is None:
        arguments.model = "gpt2_124m"
    return arguments


def own_options(arguments: argparse.Namespace) -> dict[str, object]:
    """What the command line asks of TritonAdamW beyond torch's options."""
    options: dict[str, object] = {}
    if arguments.state_dtype:
        options["state_dtype"] = getattr(torch, arguments.state_dtype)
    if arguments.master_weights:
        options["master_weights"] = arguments.master_weights
    if arguments.stochastic_rounding:
        options["stochastic_rounding"] = True
    if arguments.max_norm is not None:
        options["max_norm"] = arguments.max_norm
    return options


def contenders(arguments: argparse.Namespace, options: dict[str, object]) -> dict[str, MakeStep]:
    """What is measured: a function for each name that turns parameters with gradients into a step."""

    def of(optimizer_class: type[torch.optim.Optimizer], **own: object) -> MakeStep:
        def make_step(params: Params) -> Callable[[], object]:
            optimizer = optimizer_class(params, **HYPERPARAMETERS, **own)  # type: ignore[call-arg]
            if arguments.max_norm is None or optimizer_class is TritonAdamW:
                return optimizer.step
            return lambda: (torch.nn.utils.clip_grad_norm_(params, arguments.max_norm, foreach=True), optimizer.step())

        return make_step

    def compiled(params: Params) -> Callable[[], object]:
        lr = torch.tensor(HYPERPARAMETERS["lr"], device=params[0].device)
        optimizer = torch.optim.AdamW(params, **{**HYPERPARAMETERS, "lr": lr}, foreach=True, capturable=True)  # type: ignore[arg-type]
        return torch.compile(optimizer.step, fullgraph=False)

    on_gpu = torch.cuda.is_available()
    chosen: dict[str, MakeStep] = {"ours": of(TritonAdamW, capturable=on_gpu, **options)}
    if arguments.peers != "none":
        chosen["torch fused"] = of(torch.optim.AdamW, fused=True, capturable=on_gpu)
        chosen["torch foreach"] = of(torch.optim.AdamW, foreach=True, capturable=on_gpu)
        chosen["torch for-loop"] = of(torch.optim.AdamW, foreach=False, capturable=on_gpu)
    if arguments.peers == "all" and on_gpu:
        chosen["torch compiled"] = compiled
        chosen |= importable_peers(of)
    return chosen


def importable_peers(of: Callable[..., MakeStep]) -> dict[str, MakeStep]:
    """AdamW of other packages, those that are installed."""
    peers: dict[str, MakeStep] = {}
    for name, module, attribute in (
        ("apex FusedAdam", "apex.optimizers", "FusedAdam"),
        ("bitsandbytes AdamW8bit", "bitsandbytes.optim", "AdamW8bit"),
        ("torchao AdamW8bit", "torchao.optim", "AdamW8bit"),
        ("heavyball AdamW", "heavyball", "ForeachAdamW"),
        ("triton_muon_adamw", "triton_muon_adamw", "TritonAdamW"),
        ("flashoptim", "flashoptim", "FlashAdamW"),
    ):
        try:
            peers[name] = of(getattr(__import__(module, fromlist=[attribute]), attribute))
        except (ImportError, AttributeError):
            continue
    return peers


def measure(make_step: MakeStep, shapes: list[Shape], dtype: torch.dtype, device: str) -> dict[str, float]:
    """Graph (cold), wall and host time of a step; inputs rotate until they exceed three times the L2."""
    one = num_elements(shapes) * 4 * dtype.itemsize
    num_sets = max(1, math.ceil(3 * timing.L2_BYTES / one)) if device == "cuda" else 1
    steps = [make_step(make_parameters(shapes, dtype, device, seed=i)) for i in range(num_sets)]
    wall = timing.wall_ms(steps)
    if device == "cpu":
        return {"wall_ms": wall}
    host = timing.host_us(steps[0])
    return {"graph_ms": timing.graph_ms(steps), "wall_ms": wall, "host_us": host}


def first_step_error(shapes: list[Shape], dtype: torch.dtype, options: dict[str, object]) -> tuple[float, float]:
    """The largest error of a first step against the reference in fp64, and what is allowed: 1 ulp and 1e-6 of it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = sorted(shapes, key=math.prod)[: len(shapes) // 2 + 1][-8:]
    params = make_parameters(shapes, dtype, device)
    wide = [p.detach().double() for p in params]
    grads = [p.grad.double() for p in params if p.grad is not None]
    if "max_norm" in options:
        factor = reference.clip_factor(reference.total_norm(grads), float(str(options["max_norm"])))
        grads = [grad * factor for grad in grads]
    before = [p.clone() for p in wide]
    reference.adamw_(
        wide,
        grads,
        [torch.zeros_like(p) for p in wide],
        [torch.zeros_like(p) for p in wide],
        steps=torch.zeros(()),
        **HYPERPARAMETERS,  # type: ignore[arg-type]
    )
    TritonAdamW(params, **HYPERPARAMETERS, **options).step()  # type: ignore[arg-type]
    error = max(float((p.detach().double() - q).abs().max()) for p, q in zip(params, wide))
    largest = max(float(p.abs().max()) for p in wide)
    moved = max(float((p - q).abs().max()) for p, q in zip(wide, before))
    return error, largest * torch.finfo(dtype).eps + 1e-6 * moved


def bytes_of_step(dtype: torch.dtype, options: dict[str, object]) -> int:
    """Bytes for an element: parameter, moments and master read and written, gradient read, once more if clipped."""
    state_dtype = options.get("state_dtype", dtype)
    assert isinstance(state_dtype, torch.dtype)
    size = 3 * dtype.itemsize + 4 * state_dtype.itemsize
    if options.get("master_weights") == "fp32":
        size += 8 - dtype.itemsize
    elif options.get("master_weights") == "split16":
        size += 4
    return size + (dtype.itemsize if "max_norm" in options else 0)


if __name__ == "__main__":
    sys.exit(main())
