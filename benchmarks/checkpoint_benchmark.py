"""How long training waits for a checkpoint: written at once, or copied and written in the background.

    python -m benchmarks.checkpoint_benchmark --megabytes 200
    torchrun --nproc-per-node 4 -m benchmarks.checkpoint_benchmark --megabytes 2000 --folder /on/the/disk

A model of so many megabytes of fp32 parameters by ``TritonDistAdamW``, whose checkpoint is three times as large.
"stall" is how long ``save`` takes to return, "complete" how long until the checkpoint has its name, "step" the mean of
steps that run while it is written. Beside it torch's ``dcp.save`` and ``dcp.async_save`` of the same state. What does
not load bit for bit prints no speed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from benchmarks.arguments import add_json, count
from benchmarks.ranks import end_ranks
from benchmarks.report import Report
from optim_dist import TritonDistAdamW, checkpoint

WIDTH = 1024
LAYER = 4 * WIDTH**2 >> 20  # MiB

Save = Callable[[Path], Callable[[], Any] | None]


class Trial(NamedTuple):
    """One save: seconds until it returned, until it was complete, and of each step meanwhile."""

    stall: float
    complete: float
    steps: list[float]


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    device = join()
    report = measure(given, device)
    if report is None:
        print("what was saved in the background does not load bit for bit; no speed is printed")
        return 1
    if dist.get_rank() == 0:
        report.publish(given.json)
    end_ranks()
    return 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--megabytes", type=count, default=200, help="of parameters, a multiple of 4 (default: %(default)s)"
    )
    parser.add_argument("--trials", type=count, default=5, help="saves of each kind (default: %(default)s)")
    parser.add_argument(
        "--folder", help="where to write, on a disk that all ranks share (default: for temporary files)"
    )
    add_json(parser)
    given = parser.parse_args(arguments)
    if given.megabytes % LAYER:
        parser.error(f"--megabytes must be a multiple of {LAYER}, the size of a layer, got {given.megabytes}")
    return given


def measure(given: argparse.Namespace, device: torch.device) -> Report | None:
    """A row for each way of saving; None if what was saved in the background is not what was there."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(given.megabytes // LAYER))).to(device)
    optimizer = TritonDistAdamW(model.named_parameters())
    folder = shared(tempfile.mkdtemp(dir=given.folder) if dist.get_rank() == 0 else "")
    step(model, optimizer)
    try:
        if not loads(model, optimizer, folder):
            return None
        report = Report(f"A checkpoint of {3 * given.megabytes} MB, {dist.get_world_size()} ranks, {device.type}")
        alone = statistics.mean(timed(lambda: step(model, optimizer)) for _ in range(5))
        report.add(what="a step alone", step_ms=1e3 * alone)
        for name, save in ways(model, optimizer).items():
            trials = [trial(save, folder / f"{name} {n}", model, optimizer) for n in range(given.trials)]
            steps = [seconds for each in trials for seconds in each.steps]
            report.add(
                what=name,
                stall_ms=1e3 * statistics.median(each.stall for each in trials),
                complete_ms=1e3 * statistics.median(each.complete for each in trials),
                step_ms=1e3 * statistics.mean(steps) if steps else None,
            )
        return report
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)


def join() -> torch.device:
    """A process group, and this rank's device."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29533"}.items():
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    return device


def shared(folder: str) -> Path:
    """The first rank's folder."""
    found = [folder]
    dist.broadcast_object_list(found, src=0)
    return Path(found[0])


def step(model: nn.Module, optimizer: TritonDistAdamW) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()


def ways(model: nn.Module, optimizer: TritonDistAdamW) -> dict[str, Save]:
    """Each begins a save into a folder, and gives what waits for its end; None if it has ended."""

    def state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}

    # torch's thread would else take part in the training's collectives, in another order on each rank
    apart = dist.new_group(backend="gloo")

    def at_once(folder: Path) -> None:
        checkpoint.save(folder, model, optimizer)

    def dcp_at_once(folder: Path) -> None:
        dcp.save(state(), checkpoint_id=folder)

    return {
        "save": at_once,
        "save, async_": lambda folder: checkpoint.save(folder, model, optimizer, async_=True).wait,
        "dcp.save": dcp_at_once,
        "dcp.async_save": lambda folder: dcp.async_save(state(), checkpoint_id=folder, process_group=apart).result,
    }


def trial(save: Save, folder: Path, model: nn.Module, optimizer: TritonDistAdamW) -> Trial:
    dist.barrier()
    start = time.perf_counter()
    wait = save(folder)
    stall = time.perf_counter() - start
    steps: list[float] = []
    if wait is not None:
        steps = [timed(lambda: step(model, optimizer)) for _ in range(3)]
        wait()
    complete = time.perf_counter() - start
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    return Trial(stall, complete, steps)


def timed(call: Callable[[], Any]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def loads(model: nn.Module, optimizer: TritonDistAdamW, folder: Path) -> bool:
    """Whether a save in the background, under steps, brings back what was there when it began."""
    optimizer.wait()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    saving = checkpoint.save(folder / "first", model, optimizer, async_=True)
    step(model, optimizer)
    checkpoint.load(saving.result(), model, optimizer)
    return all(torch.equal(parameter, wanted) for parameter, wanted in zip(model.parameters(), before, strict=True))


if __name__ == "__main__":
    sys.exit(main())
