"""One distributed optimizer step, reduce + update + gather and no model compute, beside torch's own ways to do it.

    torchrun --nproc-per-node 4 -m benchmarks.dist_benchmark --models d20 d32 --json dist.json
    torchrun --nproc-per-node 2 -m benchmarks.dist_benchmark --models tiny        # gloo: a smoke test

Ceilings are measured first, and floors follow from them. W ranks, f = (W-1)/W, N elements of g (p) bytes:

    wire  = f N g / reduce-scatter rate + f N p / all-gather rate
    local = 7 N p / (W copy rate)  for AdamW: gradient, two states and parameter read, three of them written
    floor = max(wire, local)       Muon: without Newton–Schulz, which only the machine's product rate bounds

Gradients are ready, different on every rank. Ours starts with them in its buckets, where backward accumulates into
them ("in place"), or outside ("copied in"); peers driven by hooks, and ours where it keeps no gradients ("streamed"),
get them from an empty backward, in which they are copied once. The first step of every row is compared with ours in
exact mode before its time counts. A figure is the slowest rank's.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arguments import add_json, count
from benchmarks.dist_optimizers import ADAMW, our_optimizer, torch_optimizers
from benchmarks.errors import largest
from benchmarks.model_lists import Shape, gpt2, make_tensors, model_shapes, nanochat, num_elements
from benchmarks.ranks import agreed, end_ranks, need_ranks, start_ranks, synchronize
from benchmarks.report import Report
from optim_dist import TritonDistAdamW

MODELS: dict[str, list[Shape]] = {
    "tiny": model_shapes("tiny"),
    "gpt2": gpt2(12, 768, vocabulary=50304),
    "d20": model_shapes("d20"),
    "d32": nanochat(32, 2048),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class _Give(torch.autograd.Function):
    """A scalar whose gradients are given: a backward pass without compute."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, *ctx.gradients


class Bag(nn.Module):
    """Parameters without a model; ``forward`` gives a loss whose gradients are those it was given."""

    def __init__(self, shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        for number, value in enumerate(make_tensors(shapes, std=0.02, dtype=dtype, device=device)):
            self.register_parameter(f"w{number}", nn.Parameter(value))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        loss: Tensor = _Give.apply(gradients, *self.parameters())
        return loss


@dataclass
class Job:
    """What every row of one table starts from."""

    shapes: list[Shape]
    dtype: torch.dtype
    mode: str
    device: torch.device
    gradients: list[Tensor]

    def bag(self) -> Bag:
        return Bag(self.shapes, self.dtype, self.device)

    def divided(self, parameters: list[Any]) -> tuple[list[Any], list[Any]]:
        """What Muon updates, and what AdamW does."""
        sides: tuple[list[Any], list[Any]] = ([], [])
        for number, (parameter, shape) in enumerate(zip(parameters, self.shapes)):
            is_matrix = self.mode == "muon" and number >= 2 and len(shape) == 2
            sides[not is_matrix].append(parameter)
        return sides


@dataclass
class Row:
    """A prepared way to take a step: ``before`` is not timed."""

    parameters: Callable[[], list[Tensor]]
    step: Callable[[], Any]
    before: Callable[[], Any] = lambda: None
    close: Callable[[], Any] = lambda: None
    bytes_sent: Callable[[], int] | None = None
    bytes_shared: Callable[[], int] = lambda: 0  # that torch's allocator does not count


def ours(job: Job, *, in_place: bool, **options: Any) -> Row:
    bag = job.bag()
    parameters = list(bag.parameters())
    optimizer = our_optimizer(*job.divided(parameters), model=bag, **options)
    communicator = optimizer.communicator

    @torch.no_grad()
    def before() -> None:
        for parameter, gradient in zip(parameters, job.gradients):
            if parameter.grad is None or not in_place:
                parameter.grad = gradient.clone() if in_place else gradient
            else:
                parameter.grad.copy_(gradient)

    def step() -> None:
        optimizer.step()
        # what would run into the next forward pass belongs to the step alone
        optimizer.wait()

    def values() -> list[Tensor]:
        return [parameter.detach() for parameter in parameters]

    shared = communicator.bytes_shared
    return Row(values, step, before, optimizer.close, lambda: communicator.traffic.bytes_sent, lambda: shared)


def streamed(job: Job) -> Row:
    """Reduced from rolling buffers while gradients come, none of which is kept."""
    bag = job.bag()
    parameters = list(bag.parameters())
    optimizer = our_optimizer(*job.divided(parameters), model=bag, gradients="streamed", accumulation_steps=1)

    def step() -> None:
        bag(job.gradients).backward()
        optimizer.step()
        optimizer.wait()

    def values() -> list[Tensor]:
        return [parameter.detach() for parameter in parameters]

    return Row(values, step, close=optimizer.close, bytes_sent=lambda: optimizer.communicator.traffic.bytes_sent)


def ddp(job: Job, *, zero: bool = False) -> Row:
    """All-reduce by DDP's hooks, then every rank updates everything, or (``zero``) its share."""
    wrapped = DistributedDataParallel(job.bag(), gradient_as_bucket_view=True, bucket_cap_mb=256)
    parameters = list(wrapped.module.parameters())
    optimizers: list[torch.optim.Optimizer]
    if zero:
        fused = job.device.type == "cuda"
        optimizers = [
            ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, parameters_as_bucket_view=True, **ADAMW, fused=fused)
        ]
    else:
        optimizers = torch_optimizers(*job.divided(parameters))

    def before() -> None:
        wrapped.zero_grad(set_to_none=False)

    def step() -> None:
        wrapped(job.gradients).backward()
        for optimizer in optimizers:
            optimizer.step()

    return Row(lambda: [parameter.detach() for parameter in parameters], step, before)


def fsdp2(job: Job, *, is_ours: bool = False) -> Row:
    """FSDP2 with gradients reduced and parameters gathered by its hooks, one group, our optimizer or fused AdamW."""
    mesh = dist.init_device_mesh(job.device.type, (dist.get_world_size(),))
    bag = job.bag()
    fully_shard(bag, mesh=mesh, reshard_after_forward=False)
    parameters = list(bag.parameters())
    optimizers = [our_optimizer(*job.divided(parameters))] if is_ours else torch_optimizers(*job.divided(parameters))

    def step() -> None:
        bag(job.gradients).backward()
        for optimizer in optimizers:
            optimizer.step()

    def values() -> list[Tensor]:
        return [parameter.full_tensor().detach() for parameter in parameters if isinstance(parameter, DTensor)]

    return Row(values, step, lambda: bag.zero_grad(set_to_none=True))


REFERENCE = "ours exact, in place"
ROWS: dict[str, Callable[[Job], Row]] = {
    REFERENCE: lambda job: ours(job, reducer="exact", in_place=True),
    "ours rs, in place": lambda job: ours(job, reducer="rs", in_place=True),
    "ours rs, in place, deterministic": lambda job: ours(job, reducer="rs", in_place=True, deterministic=True),
    "ours symm, in place": lambda job: ours(job, transport="symm", in_place=True),
    "ours rs, copied in": lambda job: ours(job, reducer="rs", in_place=False),
    "ours rs, streamed": streamed,
    "DDP + torch": ddp,
    "DDP + ZeroRedundancyOptimizer": lambda job: ddp(job, zero=True),
    "FSDP2 + torch": fsdp2,
    "FSDP2 + ours": lambda job: fsdp2(job, is_ours=True),
}


def rows_for(mode: str, wanted: str) -> list[str]:
    """The first row is what the others are checked against."""
    names = [name for name in ROWS if wanted == "all" or ("ours" in name) == (wanted == "ours")]
    if not torch.cuda.is_available():
        names = [name for name in names if "symm" not in name]
    if mode == "muon":
        # ZeRO's shards are no matrices, and torch's Muon takes FSDP2's for such
        names = [name for name in names if "Zero" not in name and name != "FSDP2 + torch"]
    else:
        # an option of Muon's
        names = [name for name in names if "deterministic" not in name]
    return [REFERENCE, *[name for name in names if name != REFERENCE]]


def limits_of_ranks(device: torch.device) -> dict[str, float]:
    """GB/s of reduce-scatter and all-gather (bus), of a copy (read and written), and TFLOP/s of a bf16 product."""
    cuda, world_size = device.type == "cuda", dist.get_world_size()
    numel = (2**29 if cuda else 2**18) // (128 * world_size) * 128 * world_size
    flat = torch.ones(numel, dtype=torch.bfloat16, device=device)
    other = torch.empty_like(flat)
    communicator = TritonDistAdamW([nn.Parameter(torch.zeros(1, device=device))]).communicator
    wire = numel * 2 * (world_size - 1) / world_size
    found = {
        "reduce_scatter": wire / timed(lambda: communicator.reduce_scatter_(flat).wait(), device, 8)[0] / 1e6,
        "all_gather": wire / timed(lambda: communicator.all_gather_(flat).wait(), device, 8)[0] / 1e6,
        "copy": 2 * numel * 2 / timed(lambda: other.copy_(flat), device, 8)[0] / 1e6,
    }
    size = 8192 if cuda else 128
    square = torch.randn(size, size, device=device).to(torch.bfloat16 if cuda else torch.float32)
    found["product"] = 2 * size**3 / timed(lambda: square @ square, device, 8)[0] / 1e9
    return found


def timed(
    step: Callable[[], Any],
    device: torch.device,
    iterations: int,
    before: Callable[[], Any] = lambda: None,
    warmup: int = 3,
) -> tuple[float, float, float]:
    """Median and least milliseconds of the slowest rank, and the host's own."""
    slowest, host = [], []
    for iteration in range(warmup + iterations):
        before()
        synchronize(device)
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        step()
        issued = time.perf_counter()
        synchronize(device)
        passed = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(passed, op=dist.ReduceOp.MAX)
        if iteration >= warmup:
            slowest.append(1e3 * passed.item())
            host.append(1e3 * (issued - start))
    return statistics.median(slowest), min(slowest), statistics.median(host)


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference over the largest value, over a sample of parameters."""
    return largest(
        (a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30)
        for a, b in zip(found, expected, strict=True)
    )


def measure(job: Job, name: str, options: argparse.Namespace) -> Generator[Any, None, None]:
    """First the parameters after one step, then the row."""
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row = ROWS[name](job)
    row.before()
    row.step()
    synchronize(job.device)
    sample = sorted({0, 1, 2, len(job.shapes) // 2, len(job.shapes) - 1})
    values = row.parameters()
    after_one = [values[number].to(torch.float32, copy=True).cpu() for number in sample]
    del values
    yield after_one
    sent = row.bytes_sent() if row.bytes_sent else 0
    median, least, host = timed(row.step, job.device, options.iterations, row.before, options.warmup)
    wire_bytes = None
    if row.bytes_sent:
        wire_bytes = (row.bytes_sent() - sent) / (options.iterations + options.warmup)
    peak = None
    if job.device.type == "cuda":
        peak = (torch.cuda.max_memory_allocated() + row.bytes_shared()) / 2**30
    row.close()
    yield {"ms": median, "least": least, "host_ms": host, "wire_GB": wire_bytes and wire_bytes / 1e9, "peak_GiB": peak}


def table(
    job: Job, model: str, dtype: str, options: argparse.Namespace, limits: dict[str, float], report: Report
) -> None:
    """Add the rows of one model, dtype and mode, each checked against the first before it is timed."""
    world_size, numel, itemsize = dist.get_world_size(), num_elements(job.shapes), job.dtype.itemsize
    f = (world_size - 1) / world_size
    wire = f * numel * itemsize * (1 / limits["reduce_scatter"] + 1 / limits["all_gather"]) / 1e6
    local = 7 * numel * itemsize / world_size / limits["copy"] / 1e6
    floor = max(wire, local)
    reference: list[Tensor] | None = None
    for name in rows_for(job.mode, options.rows):
        if agreed(time.monotonic() > options.deadline, job.device):
            report.add(mode=job.mode, model=model, dtype=dtype, what=name, note="left out: out of time")
            continue
        steps = measure(job, name, options)
        first = next(steps)
        reference = first if reference is None else reference
        error = largest_error(first, reference)
        limit = (2**-6 if job.dtype == torch.bfloat16 else 1e-3) if job.mode == "adamw" else 5e-2
        if agreed(not error <= limit, job.device):
            report.add(mode=job.mode, model=model, dtype=dtype, what=name, note=f"wrong by {error:.2g}, not timed")
        else:
            figures = next(steps)
            ratio = {"floor_ms": floor, "over_floor": figures["ms"] / floor, "error": error}
            if name != REFERENCE or options.rows != "peers":
                report.add(mode=job.mode, model=model, dtype=dtype, what=name, **figures, **ratio)
        steps.close()
        del steps
        gc.collect()
        if job.device.type == "cuda":
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", default=["tiny"], choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--modes", nargs="+", default=["adamw", "muon"], choices=["adamw", "muon"])
    parser.add_argument("--rows", default="all", choices=["all", "ours", "peers"])
    parser.add_argument("--iterations", type=count, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds; what does not fit is left out")
    add_json(parser)
    options = parser.parse_args(arguments)
    options.deadline = time.monotonic() + options.budget
    need_ranks("a distributed step", "dist_benchmark")
    device = start_ranks()
    limits = limits_of_ranks(device)
    report = Report(
        f"One optimizer step on {dist.get_world_size()} ranks; measured ceilings: "
        + ", ".join(f"{name} {value:.4g}" for name, value in limits.items())
        + " (GB/s, TFLOP/s)",
        announce=dist.get_rank() == 0,
    )
    for mode in options.modes:
        for model in options.models:
            for dtype in options.dtypes:
                shapes, seed = MODELS[model], 1 + dist.get_rank()
                gradients = make_tensors(shapes, std=1e-3, dtype=DTYPES[dtype], device=device, seed=seed)
                job = Job(shapes, DTYPES[dtype], mode, device, gradients)
                table(job, model, dtype, options, limits, report)
    if dist.get_rank() == 0:
        report.publish(options.json)
    return report


if __name__ == "__main__":
    main()
    end_ranks()
