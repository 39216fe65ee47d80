"""Figures of optim_utils beside the goals set for them; what a row times is checked first, and a red check stops it.

    python -m benchmarks.utils_benchmark                     # every row, on the CPU
    python -m benchmarks.utils_benchmark --device cuda --only low-bit rounding --json out.json

``low-bit`` and ``rounding`` compare with ``copy_`` of the same input: GB/s of the bytes that must move, as a share of
the GB/s of the copy. On a GPU they are also compiled, and timed as graphs, for the host does not matter to bytes; on a
CPU they are eager, for which there is no goal.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import truediv
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.arguments import add_json
from benchmarks.model_lists import Shape, gpt2, llama, num_elements, resnet50
from benchmarks.report import Report
from benchmarks.timing import graph_ms, wall_ms
from optim_utils import (
    BytesCost,
    CombinedLinear,
    CubicCost,
    DequantizeQuantizedTensorListContext,
    DictZipIterator,
    LowBitFormat,
    OptimizerModule,
    QuantizedTensorList,
    dequantize,
    flatten,
    low_bit,
    merge_small_dims,
    partition,
    quantize,
    route_parameters,
    stochastic_round,
    unflatten,
)

Rows = Iterator[dict[str, Any]]


def once_ms(call: Callable[[], object], *, repeats: int = 3) -> float:
    """The fastest of a few single calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def in_turn(calls: Mapping[str, Callable[[], object]], *, rounds: int = 15) -> dict[str, list[float]]:
    """Many short timings of each call, one of each in every round."""
    timings: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            timings[name].append(wall_ms([call], at_least_ms=20, repeats=1, warmups=1))
    return timings


def check(condition: bool, what: str) -> None:
    if not condition:
        raise SystemExit(f"wrong result, so no figure: {what}")


def variants(function: Callable[..., Any], device: str) -> list[tuple[str, Callable[..., Any]]]:
    """The function as it is and, on a GPU, compiled."""
    if device == "cpu":
        return [("eager", function)]
    torch._dynamo.reset()
    return [("eager", function), ("compiled", torch.compile(function, fullgraph=True))]


def alone_ms(call: Callable[[], object], device: str) -> float:
    """Time of a call: on a GPU the device's, without the host's."""
    return wall_ms([call]) if device == "cpu" else graph_ms([call], repeat=8)


def copy_speed(x: Tensor) -> float:
    """Bytes a millisecond that ``copy_`` reads and writes."""
    out = torch.empty_like(x)
    return 2 * x.nbytes / alone_ms(lambda: out.copy_(x), x.device.type)


def against_copy(name: str, how: str, ms: float, num_bytes: float, speed: float, goal: float | None) -> dict[str, Any]:
    share = 100 * num_bytes / ms / speed
    compiled_goal = f">= {goal:.0f} % of copy_" if goal and how == "compiled" else ""
    return {"row": name, "how": how, "ms": ms, "GB/s": num_bytes / ms / 1e6, "% of copy_": share, "goal": compiled_goal}


def rows_low_bit(device: str) -> Rows:
    x = torch.randn(1 << (22 if device == "cpu" else 26), device=device)
    speed = copy_speed(x)
    presets = [name for name in low_bit.__all__ if isinstance(getattr(low_bit, name), LowBitFormat)]
    for name in presets:
        fmt: LowBitFormat = getattr(low_bit, name)
        values = x.square() if fmt.unsigned or fmt.has_offset else x
        q = quantize(values, fmt)
        error = ((dequantize(q) - values).norm() / values.norm()).item()
        check(error < (0.3 if fmt.bits == 4 else 0.06), f"{name} decodes with relative error {error:.2g}")
        num_bytes = values.nbytes + values.numel() * fmt.bytes_per_element
        for how, encode in variants(lambda values, fmt=fmt: quantize(values, fmt), device):
            # inductor divides with an error of 2 ulp on a GPU, so a number between two codes may go the other way
            different = 1e6 * (encode(values).codes != q.codes).double().mean().item()
            check(different < 100, f"{name} {how}: {different:.0f} codes in a million differ")
            ms = alone_ms(partial(encode, values), device)
            yield against_copy(f"quantize {name}", how, ms, num_bytes, speed, 60) | {"other codes, ppm": different}
        for how, decode in variants(lambda q: dequantize(q), device):
            close = torch.isclose(decode(q), dequantize(q), rtol=1e-6, atol=0)
            check(bool(close.all()), f"{name} {how}: other numbers")
            ms = alone_ms(partial(decode, q), device)
            yield against_copy(f"dequantize {name}", how, ms, num_bytes, speed, 80)


def rows_rounding(device: str) -> Rows:
    x = torch.randn(1 << (22 if device == "cpu" else 26), device=device)
    speed = copy_speed(x)
    for name, seed, goal in (("default", None, 60.0), ("seeded", 1, None)):
        for how, rounded in variants(lambda x, seed=seed: stochastic_round(x, torch.bfloat16, seed=seed), device):
            error = (rounded(x).float() - x).abs()
            check(bool((error <= 2**-7 * x.abs()).all()), f"stochastic_round {name} {how} leaves the neighbours")
            ms = alone_ms(partial(rounded, x), device)
            yield against_copy(f"stochastic_round {name}", how, ms, 1.5 * x.nbytes, speed, goal)


def rows_context(device: str) -> Rows:
    tensors = [torch.randn(64, 64, device=device) for _ in range(1000)]
    stored = [t.bfloat16() for t in tensors]

    def context(quantized: QuantizedTensorList) -> None:
        with DequantizeQuantizedTensorListContext(quantized):
            pass

    def copies() -> None:
        torch._foreach_copy_(tensors, stored)
        torch._foreach_copy_(stored, tensors)

    calls: dict[str, Callable[[], object]] = {"two _foreach_copy_": copies}
    for how, dtype in (("bf16", torch.bfloat16), ("INT8", low_bit.INT8), ("MOMENT8", low_bit.MOMENT8)):
        quantized = QuantizedTensorList([(t.abs(), None, None) for t in tensors], dtype)
        before: list[Tensor] = [t.clone() for t in quantized.dequantize()]
        context(quantized)
        same = all(map(torch.equal, before, quantized.dequantize()))
        check(same, f"the context changes {how} values that nobody touched")
        calls[f"{how}, enter + exit"] = partial(context, quantized)
    # what they take where nothing else runs
    times = {how: min(timings) for how, timings in in_turn(calls).items()}
    limit = 1.1 * times["two _foreach_copy_"] + 1
    for how, ms in times.items():
        goal = f"<= {limit:.3g} (1.1 x + 1 ms)" if how.startswith("bf16") else ""
        yield {"row": "context, 1,000 tensors", "how": how, "ms": ms, "goal": goal}


def rows_flatten(device: str) -> Rows:
    wide = {f"layer{i}": {f"block{j}": {k: (i, j, k) for k in range(10)} for j in range(100)} for i in range(100)}
    deep: dict[str, Any] = {"leaf": 1}
    for _ in range(10_000):
        deep = {"x": deep}
    for name, state, goal in (("100k leaves", wide, 500), ("10,000-deep chain", deep, 2000)):
        flat = flatten(state)
        # comparing 10,000 nested dicts recurses; their flat forms can be compared
        check(flatten(unflatten(flat)) == flat, f"flatten and unflatten of {name}")
        yield {"row": f"flatten, {name}", "ms": once_ms(partial(flatten, state)), "goal": f"< {goal}"}
        yield {"row": f"unflatten, {name}", "ms": once_ms(partial(unflatten, flat)), "goal": f"< {goal}"}


class ManyTensors(OptimizerModule):
    """10,000 tensors in a list of dicts."""

    def __init__(self, fill: float, device: str) -> None:
        self.blocks: list[dict[str, Any]] = [
            {"m": torch.full((8,), fill, device=device), "step": i} for i in range(10_000)
        ]


def rows_modules(device: str) -> Rows:
    source, target = ManyTensors(1.0, device), ManyTensors(0.0, device)
    state = source.state_dict()
    check(target.load_state_dict(state, strict=True).ok, "a state does not load")
    check(bool(torch.stack([block["m"] for block in target.blocks]).eq(1).all()), "a load leaves values behind")
    yield {
        "row": "OptimizerModule, 10k tensors",
        "how": "state_dict",
        "ms": once_ms(source.state_dict),
        "goal": "< 100",
    }
    load_ms = once_ms(lambda: target.load_state_dict(state, strict=True))
    yield {"row": "OptimizerModule, 10k tensors", "how": "strict load", "ms": load_ms, "goal": "< 500"}


def rows_zip(device: str) -> Rows:
    data = {key: list(range(100_000)) for key in "abcd"}
    last = list(DictZipIterator(data))[-1]
    check(last == dict.fromkeys("abcd", 99_999), "the last row")
    ms = once_ms(lambda: sum(1 for _ in DictZipIterator(data)))
    yield {"row": "DictZipIterator, 100k rows of 4 keys", "ms": ms, "goal": "<= 100"}


PARTITIONED = {
    "GPT-2 124M": gpt2(12, 768),
    "GPT-2 XL": gpt2(48, 1600),
    "Llama-7B": llama(32000, 4096, 11008),
    "Llama-3-8B": llama(128256, 1024, 14336),
    "ResNet-50": resnet50(),
}
# largest over mean compute of 64 ranks, for blocks of 1024, 2048, 4096
PARTITION_GOALS = {
    "GPT-2 124M": (1.04, 1.33, 1.99),
    "GPT-2 XL": (1.001, 1.002, 1.006),
    "Llama-7B": (1.001, 1.001, 1.013),
    "Llama-3-8B": (1.003, 1.003, 1.021),
    "ResNet-50": (1.842, 3.542, 3.162),
}


def block_shapes(shapes: list[Shape], size: int) -> list[Shape]:
    """The blocks that cuts of ``size`` make of the merged shapes."""
    blocks: list[Shape] = []
    for shape in shapes:
        merged = merge_small_dims(shape, size, 2)
        blocks += itertools.product(*([size] * (n // size) + [n % size] * (n % size > 0) for n in merged))
    return blocks


def rows_partition(device: str) -> Rows:
    cost, size_of = CubicCost(), BytesCost()
    for model, shapes in PARTITIONED.items():
        for size, goal in zip((1024, 2048, 4096), PARTITION_GOALS[model]):
            blocks = block_shapes(shapes, size)
            costs = [cost(shape, torch.float32) for shape in blocks]
            check(sum(size_of(s, torch.float32) for s in blocks) >= 4 * num_elements(shapes), "blocks lose elements")
            for num_ranks in (8, 64):
                best, lpt = partition(costs, num_ranks), partition(costs, num_ranks, improve=False)
                check(sum(best.loads) == sum(costs), "a partition loses items")
                yield {
                    "row": f"partition {model}",
                    "how": f"B={size}, {num_ranks} ranks, {len(costs)} items",
                    "ms": once_ms(partial(partition, costs, num_ranks), repeats=1),
                    "LPT": lpt.imbalance,
                    "max/mean": best.imbalance,
                    "bound": best.lower_bound / (sum(costs) / num_ranks),
                    "goal": f"max/mean <= {goal}, < 500 ms" if num_ranks == 64 else "< 500 ms",
                }


def rows_linear(device: str) -> Rows:
    size = 1024 if device == "cpu" else 4096
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    x = torch.randn(size, size, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(size, size, device=device, dtype=dtype)
    plain = nn.Linear(size, size, device=device, dtype=dtype)

    def step(layer: nn.Module) -> None:
        # as in training: gradients are made anew
        x.grad = None
        layer.zero_grad()
        layer(x).backward(gradient)

    combined = partial(CombinedLinear, size, size, device=device, dtype=dtype)
    layers: dict[str, nn.Module] = {"nn.Linear": plain}
    for how, layer in (
        ("CombinedLinear", combined()),
        ("CombinedLinear, aligned rows", combined(align_rows=True)),
        ("CombinedLinear, column major", combined(column_major=True)),
    ):
        layers[how] = layer
        with torch.no_grad():
            layer.combined_weight[:, :-1] = plain.weight
            layer.combined_weight[:, -1] = plain.bias
        difference = (layer(x) - plain(x)).abs().max().item()
        check(difference <= 2e-2, f"{how} differs from nn.Linear by {difference:.2g}")
    timings = in_turn({how: partial(step, layer) for how, layer in layers.items()}, rounds=25)
    goals = {"CombinedLinear, aligned rows": "<= 1.12 x", "CombinedLinear, column major": "<= 1.05 x"}
    for how, figures in timings.items():
        yield {
            "row": f"linear {size}², forward + backward",
            "how": how,
            "ms": statistics.median(figures),
            # round by round: products run at the power limit, whose clocks drift
            "x nn.Linear": statistics.median(map(truediv, figures, timings["nn.Linear"])),
            "goal": goals.get(how, ""),
        }


def rows_routing(device: str) -> Rows:
    names = [
        f"layers.{i}.{part}" for i in range(2500) for part in ("wq.weight", "mlp.weight", "norm.weight", "wq.bias")
    ]
    shapes = {"wq.weight": (8, 8), "mlp.weight": (16, 8), "norm.weight": (8,), "wq.bias": (8,)}
    named = [(name, nn.Parameter(torch.empty(shapes[name.split(".", 2)[2]]))) for name in names]
    table = route_parameters(named)
    check(len(table.to("muon")) == 5000, "half of the parameters are matrices")
    yield {"row": "route_parameters, 10k parameters", "ms": once_ms(lambda: route_parameters(named)), "goal": "< 500"}


ROWS: dict[str, Callable[[str], Rows]] = {
    "low-bit": rows_low_bit,
    "rounding": rows_rounding,
    "context": rows_context,
    "flatten": rows_flatten,
    "modules": rows_modules,
    "zip": rows_zip,
    "partition": rows_partition,
    "linear": rows_linear,
    "routing": rows_routing,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS))
    add_json(parser)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    torch.manual_seed(0)
    report = Report(f"optim_utils on {arguments.device}")
    for name in arguments.only:
        for row in ROWS[name](arguments.device):
            report.add(**row)
    report.publish(arguments.json)
    print("load average: {:.1f}, {:.1f}, {:.1f}".format(*os.getloadavg()))


if __name__ == "__main__":
    main()
