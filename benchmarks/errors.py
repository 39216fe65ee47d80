"""How far results are from what they should be: no speed is printed of what is wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def largest(errors: Iterable[Tensor]) -> float:
    """The largest of some numbers; NaN if there is one, which Python's ``max`` would pass over."""
    return float(torch.stack(list(errors)).max())
