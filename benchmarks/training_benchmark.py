"""What a training step takes beyond its compute on several ranks: forward, backward and step, beside torch's own ways.

    torchrun --nproc-per-node 4 -m benchmarks.training_benchmark --model d20 --batch-size 8 --context 1024
    torchrun --nproc-per-node 2 -m benchmarks.training_benchmark        # gloo, a tiny model: a smoke test

    exposed = milliseconds of a step - milliseconds of forward and backward alone
    gap     = milliseconds from the last kernel of a backward pass to the first of the next forward pass (GPUs)

What a step reduces, updates and gathers beside products is not in the gap, but makes these slower, which is exposed,
too: products and collectives share multiprocessors, memory and power. Steps follow each other without a wait, as in a
training loop; a figure is the mean of a run of steps on the slowest rank, whose gap is the shortest as it waits for
nobody, and of such runs the median. DDP and FSDP2 wait for their reductions inside of backward, so that these are
exposed, but in no gap. Before the time of a way counts its first steps are compared with those of DDP: by how far the
mean loss of all ranks has fallen.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arguments import add_json, count
from benchmarks.dist_benchmark import DTYPES
from benchmarks.dist_optimizers import our_optimizer, torch_optimizers
from benchmarks.gpt.model import GPT, MODELS, next_byte_loss
from benchmarks.ranks import agreed, end_ranks, need_ranks, start_ranks, synchronize
from benchmarks.report import Report

CHECKED_STEPS = 5
# of how far the loss falls, relative: the ways round differently, and torch's Muon iterates in bf16
LARGEST_DIFFERENCE = 0.15


@dataclass(frozen=True)
class Setting:
    """What every row of a table trains."""

    model: str
    mode: str
    dtype: torch.dtype
    device: torch.device
    batch: tuple[Tensor, Tensor]

    def net(self) -> GPT:
        """The model, the same on every rank."""
        torch.manual_seed(0)
        with self.device:
            return GPT(MODELS[self.model]).to(self.dtype)

    def sides(self, net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """What Muon updates, and what AdamW does."""
        sides: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for name, parameter in net.named_parameters():
            sides[not (self.mode == "muon" and "blocks." in name and parameter.ndim == 2)].append(parameter)
        return sides


class Gap:
    """Events in the current stream at the end of every backward pass and at the start of every forward pass."""

    def __init__(self, first: nn.Module) -> None:
        # registered behind those of the optimizer, so it runs when what the module needs has been waited for
        first.register_forward_pre_hook(lambda *_: self.starts.append(_recorded()))
        self.clear()

    def clear(self) -> None:
        self.starts: list[torch.cuda.Event] = []
        self.ends: list[torch.cuda.Event] = []

    def backward_has_ended(self) -> None:
        self.ends.append(_recorded())

    def milliseconds(self) -> float:
        """The mean since the events were cleared, once all of them are over."""
        return statistics.mean(end.elapsed_time(start) for end, start in zip(self.ends, self.starts[1:]))


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass
class Way:
    """A model and what steps it: None for compute alone."""

    net: nn.Module
    optimizers: Iterable[torch.optim.Optimizer] = ()
    close: Callable[[], Any] = lambda: None
    bytes_shared: int = 0  # that torch's allocator does not count
    gap: Gap | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if torch.cuda.is_available():
            self.gap = Gap(next(module for module in self.net.modules() if isinstance(module, nn.Embedding)))

    def step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = next_byte_loss(self.net, *batch)
        loss.backward()
        if self.gap is not None:
            self.gap.backward_has_ended()
        for optimizer in self.optimizers:
            optimizer.step()
        self.net.zero_grad(set_to_none=True)
        return loss.detach()


def compute_alone(setting: Setting) -> Way:
    return Way(setting.net())


def ours(setting: Setting, **options: Any) -> Way:
    """Reduced in the step unless the options say otherwise, gathered under the next forward pass."""
    net = setting.net()
    optimizer = our_optimizer(*setting.sides(net), model=net, **options)
    return Way(net, [optimizer], optimizer.close, optimizer.communicator.bytes_shared)


def ddp(setting: Setting) -> Way:
    """All-reduces under backward, and every rank updates everything."""
    net = setting.net()
    return Way(DistributedDataParallel(net, gradient_as_bucket_view=True), torch_optimizers(*setting.sides(net)))


def fsdp2(setting: Setting, *, is_ours: bool = False) -> Way:
    """Reduced under backward and gathered under forward by FSDP2's hooks, block by block."""
    net = setting.net()
    mesh = dist.init_device_mesh(setting.device.type, (dist.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return Way(net, [our_optimizer(*setting.sides(net))] if is_ours else torch_optimizers(*setting.sides(net)))


COMPUTE, REFERENCE = "compute alone", "DDP + torch"
WAYS: dict[str, Callable[[Setting], Way]] = {
    COMPUTE: compute_alone,
    REFERENCE: ddp,
    "ours": ours,
    "ours, under backward": lambda setting: ours(setting, accumulation_steps=1),
    "ours, symm": lambda setting: ours(setting, transport="symm"),
    "ours, symm, under backward": lambda setting: ours(setting, transport="symm", accumulation_steps=1),
    "ours, overlap=False": lambda setting: ours(setting, overlap=False),
    "ours, streamed": lambda setting: ours(setting, accumulation_steps=1, gradients="streamed"),
    "ours, exact": lambda setting: ours(setting, accumulation_steps=1, reducer="exact"),
    "FSDP2 + torch": fsdp2,
    "FSDP2 + ours": lambda setting: fsdp2(setting, is_ours=True),
}


def ways_for(mode: str) -> list[str]:
    """torch's Muon takes FSDP2's shards for matrices; only GPUs have memory that others reach."""
    names = [name for name in WAYS if (mode, name) != ("muon", "FSDP2 + torch")]
    return names if torch.cuda.is_available() else [name for name in names if "symm" not in name]


def timed(way: Way, setting: Setting, runs: int, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of a step, and of the gap in it, in runs of steps, on the slowest rank; without a GPU no gaps."""
    found = []
    for _ in range(runs + 1):
        synchronize(setting.device)
        dist.barrier()
        synchronize(setting.device)
        if way.gap is not None:
            way.gap.clear()
        start = time.perf_counter()
        for _ in range(steps):
            way.step(setting.batch)
        synchronize(setting.device)
        passed = [1e3 * (time.perf_counter() - start) / steps]
        if way.gap is not None:
            passed.append(-way.gap.milliseconds())
        largest = torch.tensor(passed, dtype=torch.float64, device=setting.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        found.append(largest.abs().tolist())
    whole, *gaps = map(list, zip(*found[1:], strict=True))
    return whole, gaps[0] if gaps else []


def measure(setting: Setting, name: str, options: argparse.Namespace, report: Report, known: dict[str, float]) -> None:
    """Add the row of one way; ``known`` has how far the loss shall fall, and the time of the compute."""
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"mode": setting.mode, "model": setting.model, "what": name}
    way = WAYS[name](setting)
    try:
        losses = torch.stack([way.step(setting.batch) for _ in range(CHECKED_STEPS)])
        dist.all_reduce(losses)
        fall = (losses[0] - losses[-1]).item() / dist.get_world_size()
        if name == REFERENCE:
            known["fall"] = fall
        if name != COMPUTE and not abs(fall / known["fall"] - 1) <= LARGEST_DIFFERENCE:
            report.add(**row, note=f"wrong: the loss falls by {fall:.4g} for {known['fall']:.4g}, not timed")
            return
        times, gaps = timed(way, setting, options.runs, options.steps)
        median = statistics.median(times)
        if name == COMPUTE:
            known["ms"] = median
        peak = None
        if setting.device.type == "cuda":
            peak = (torch.cuda.max_memory_allocated() + way.bytes_shared) / 2**30
        exposed, gap = median - known["ms"], statistics.median(gaps) if gaps else None
        figures = {"ms": median, "least": min(times), "exposed_ms": exposed, "gap_ms": gap, "peak_GiB": peak}
        report.add(**row, **figures, fall=None if name == COMPUTE else fall)
    finally:
        way.close()


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="tiny", choices=list(MODELS))
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES), help="of parameters, activations, gradients")
    parser.add_argument("--modes", nargs="+", default=["adamw", "muon"], choices=["adamw", "muon"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--batch-size", type=count, default=2, help="sequences of a rank")
    parser.add_argument("--context", type=count, default=32)
    parser.add_argument("--steps", type=count, default=5, help="of a run, two or more")
    parser.add_argument("--runs", type=count, default=5)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds; what does not fit is left out")
    add_json(parser)
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error(f"--steps has to be 2 or more, as gaps lie between two steps; got {options.steps}")
    deadline = time.monotonic() + options.budget
    need_ranks("distributed training", "training_benchmark")
    device = start_ranks()
    report = Report(f"A training step on {dist.get_world_size()} ranks", announce=dist.get_rank() == 0)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    tokens = torch.randint(256, (options.batch_size, options.context + 1), generator=generator).to(device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    for mode in options.modes:
        setting = Setting(options.model, mode, DTYPES[options.dtype], device, batch)
        known: dict[str, float] = {}
        for name in ways_for(mode):
            if name not in {COMPUTE, REFERENCE, *options.ways}:
                continue
            if agreed(time.monotonic() > deadline, device):
                report.add(mode=mode, model=options.model, what=name, note="left out: out of time")
                continue
            measure(setting, name, options, report, known)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        report.publish(options.json)
    return report


if __name__ == "__main__":
    main()
    end_ranks()
