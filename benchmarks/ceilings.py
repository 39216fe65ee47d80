"""How fast this machine copies and multiplies at best: a step's bytes and operations over these are its floor.

Of the card that the notes are written on, the figures found there; of any other, and of CPUs, they are measured when
they are first asked for, which takes a second or two.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from benchmarks import timing


@dataclass(frozen=True)
class Ceilings:
    """Bytes (read and written) that a copy moves in a second, and operations of a large product."""

    copy: float
    product: float
    source: str

    def __str__(self) -> str:
        rates = f"copies at {self.copy / 1e12:.3g} TB/s and products at {self.product / 1e12:.3g} TFLOP/s"
        return f"floors by {rates}, {self.source}"


H200 = Ceilings(4.24e12, 803e12, "measured on an H200 before")
KNOWN = {"NVIDIA H200": H200}


@cache
def ceilings() -> Ceilings:
    """Those of the first GPU, or of the processor."""
    if not torch.cuda.is_available():
        return _measured("cpu", num_bytes=64 << 20, size=512, dtype=torch.float32)
    known = KNOWN.get(torch.cuda.get_device_name(0))
    return known or _measured("cuda", num_bytes=2 << 30, size=4096, dtype=torch.bfloat16)


def _measured(device: str, *, num_bytes: int, size: int, dtype: torch.dtype) -> Ceilings:
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    # random, for zeros draw less power
    square = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(square)
    copies = 2 * num_bytes / _seconds(lambda: target.copy_(source))
    products = 2 * size**3 / _seconds(lambda: torch.mm(square, square, out=product))
    return Ceilings(copies, products, f"measured here ({device}, {str(dtype).removeprefix('torch.')} products)")


def _seconds(call: Callable[[], object], *, runs: int = 15, repeats: int = 5) -> float:
    """The least mean time of a call in several rows, on a rested card. Not from a graph, where copies are slower."""
    for _ in range(3):
        call()
    timing.rest()
    figures = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(runs):
            call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        figures.append((time.perf_counter() - start) / runs)
    return min(figures)
