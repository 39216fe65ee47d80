"""The norm of a model's gradients, alone and with scaling: ours, torch's, the floor.

    python -m benchmarks.clip_benchmark --model d20 --dtype bfloat16

"not clipping" is a norm below ``max_norm``, where ours reads the gradients and writes nothing; "clipping" one above.
``python -m benchmarks.adamw_benchmark --max-norm 1.0`` measures clipping and AdamW together.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import torch

from benchmarks import timing
from benchmarks.model_lists import make_parameters, model_shapes, num_elements
from benchmarks.report import Report
from optim_kernels import clip_grad_norm_, compute_global_grad_norm

COPY_BYTES_PER_SECOND = 4.24e12


def main() -> int:
    arguments = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = [tuple(arguments.shape)] if arguments.shape else model_shapes(arguments.model)
    if device == "cpu" and num_elements(shapes) > 1 << 22:
        shapes = model_shapes("tiny")
    dtype = getattr(torch, arguments.dtype)
    size = num_elements(shapes) * dtype.itemsize
    num_sets = max(1, math.ceil(3 * timing.L2_BYTES / size)) if device == "cuda" else 1
    sets = [make_parameters(shapes, dtype, device, seed=i) for i in range(num_sets)]

    report = Report(f"Gradient clipping, {arguments.model or arguments.shape}, {arguments.dtype}")
    exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in sets[0] if p.grad is not None))
    error = abs(float(compute_global_grad_norm(sets[0])) - exact) / exact
    if not error <= 1e-6:
        print(f"the norm is wrong: relative error {error:.3g}; no speed is printed")
        return 1
    theirs = torch.nn.utils.clip_grad_norm_
    rows: list[tuple[str, float, Callable[[list[torch.nn.Parameter]], object]]] = [
        ("not clipping, ours", 1.0, lambda params: clip_grad_norm_(params, 1e9)),
        ("not clipping, torch", 1.0, lambda params: theirs(params, 1e9, foreach=True)),
        # a factor so near to one that repeating it leaves the gradients what they are
        ("clipping, ours", 3.0, lambda params: clip_grad_norm_(params, exact * 0.99999)),
        ("clipping, torch", 3.0, lambda params: theirs(params, exact * 0.99999, foreach=True)),
    ]
    for name, passes, function in rows:
        calls = [lambda params=params, function=function: function(params) for params in sets]
        row = {"wall_ms": timing.wall_ms(calls)}
        if device == "cuda":
            row = {"graph_ms": timing.graph_ms(calls), **row}
        floor = 1e3 * passes * size / COPY_BYTES_PER_SECOND
        report.add(what=name, **row, floor_ms=floor, of_floor=next(iter(row.values())) / floor)
    report.add(what="relative error of the norm", note=f"{error:.3g}")
    report.show()
    if arguments.json:
        report.save_json(arguments.json)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=int, nargs="+", help="one gradient of this shape instead of a model's")
    parser.add_argument("--model", default="gpt2_124m", help="gpt2_124m, gpt2_1.56b, d20 or tiny")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--json", help="write rows, machine and versions to this file")
    arguments = parser.parse_args()
    if arguments.shape:
        arguments.model = None
    return arguments


if __name__ == "__main__":
    sys.exit(main())
