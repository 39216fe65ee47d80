"""What something that waits in one stream costs the kernels of another, on a GPU.

    python -m benchmarks.waiting

Many kernels follow each other in the current stream, launched by a host that is ahead. Meanwhile others wait for an
event, each with nothing behind the wait, a copy to the host, or a kernel: as a reduction does that is launched before
backward is over. A figure is the median of the microseconds from one kernel to the next.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.arguments import add_json, count
from benchmarks.report import Report

# Cycles: that the host takes to launch all, and that something waits, which is longer.
AHEAD, LONG = 30_000_000, 60_000_000
NUM_KERNELS = 900  # of which a GPU takes as many before the host has to wait
BEHIND = ("nothing", "a copy to the host", "a kernel")


def microseconds(kernel: Callable[[], object], streams: Sequence[torch.cuda.Stream], behind: str) -> float:
    """From one kernel to the next, while the streams wait with something behind that."""
    buffer = torch.ones(1 << 20, device="cuda")
    host = torch.empty(1 << 20, pin_memory=True)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    awaited, holding = torch.cuda.Event(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    start.record()
    with torch.cuda.stream(holding):
        holding.wait_event(start)
        torch.cuda._sleep(LONG)
        awaited.record()
    for stream in streams:
        stream.wait_event(awaited)
        with torch.cuda.stream(stream):
            if behind == "a kernel":
                buffer.add_(1)
            elif behind == "a copy to the host":
                host.copy_(buffer, non_blocking=True)
    for _ in range(NUM_KERNELS):
        kernel()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / NUM_KERNELS


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=count, default=7, help="of which a figure is the median")
    add_json(parser)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("streams wait on GPUs alone, and there is none")
    x = torch.ones(1 << 22, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    kernels = {"8 MB elementwise": partial(x.mul_, 1.0), "product of 2048²": partial(torch.mm, a, a, out=a.clone())}
    streams = [torch.cuda.Stream() for _ in range(4)]
    report = Report("Kernels beside streams that wait")
    for name, kernel in kernels.items():
        for _ in range(50):
            kernel()
        for num_waiting, behind in ((0, BEHIND[0]), *((1, each) for each in BEHIND), (2, BEHIND[2]), (4, BEHIND[2])):
            times = [microseconds(kernel, streams[:num_waiting], behind) for _ in range(options.runs)]
            report.add(kernel=name, waiting=num_waiting, behind=behind, us=statistics.median(times), least=min(times))
    report.publish(options.json)
    return report


if __name__ == "__main__":
    main()
