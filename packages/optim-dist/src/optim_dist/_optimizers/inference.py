"""Calls under ``torch.inference_mode()``: after an evaluation, say, or where a framework saves behind one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Result = TypeVar("Result")


def out_of_inference_mode(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """``function``, under ``no_grad`` in place of ``inference_mode``.

    What it makes and keeps (buckets, states) is written to later, which torch refuses for tensors that were made there.
    """

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return called
