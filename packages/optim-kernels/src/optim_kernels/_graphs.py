"""CUDA graphs: whether a caller captures one, what stays alive for it, and where launches of ours are recorded."""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor


def is_capturing(device: torch.device) -> bool:
    """Whether launches on the device are being captured into a CUDA graph."""
    # fake tensors may be on a GPU that this machine lacks
    return is_cuda(device) and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


@cache
def is_cuda(device: torch.device) -> bool:
    """Whether the device is a GPU; cached, because ``device.type`` takes three times as long."""
    return device.type == "cuda"


def is_capturing_here() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    # nothing is captured before CUDA is initialised, which is cheaper to find out
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


# Tensors that captured graphs read, alive as long as the process, since nothing tells when a graph is gone. Most are
# small: tables and counters, never parameters, but also copies of gradients that lie otherwise than their parameter.
_OWNED_BY_GRAPHS: list[Tensor] = []


def keep_for_graphs(*tensors: Tensor) -> None:
    """Keep tensors that a captured launch reads, for the graph's replays."""
    _OWNED_BY_GRAPHS.extend(tensors)


# Held during a capture. A process may have only one: `torch.cuda.graph` begins by synchronising the device, which fails
# while another capture is under way.
ONE_AT_A_TIME = threading.Lock()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of ``device`` to record on, since the default stream cannot be captured.

    `torch.cuda.graph`'s own stream is on the device where the process first recorded, so launches on another device
    would not be in the graph.
    """
    return torch.cuda.Stream(device)
