"""Where launches are recorded as a CUDA graph: on a stream of their own device, by one thread at a time."""

from __future__ import annotations

import threading
from functools import cache

import torch

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
