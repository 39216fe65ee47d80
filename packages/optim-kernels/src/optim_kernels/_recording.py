"""Where launches are recorded as a CUDA graph: on a stream of their own device, by one thread at a time."""

from __future__ import annotations

import threading
from functools import cache

import torch

# A process may have one capture under way: a device cannot be synchronised meanwhile, as `torch.cuda.graph` does first.
ONE_AT_A_TIME = threading.Lock()


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream to record on, for the default one cannot be.

    That of `torch.cuda.graph` is on the device where the process recorded first: launches for another one would not be
    in the graph.
    """
    return torch.cuda.Stream(device)
