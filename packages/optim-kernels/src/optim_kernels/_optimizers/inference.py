"""Calls under ``torch.inference_mode()``: after an evaluation, say, or where a framework saves after one."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Given = ParamSpec("Given")
Result = TypeVar("Result")


def out_of_inference_mode(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """``function``, but run under ``no_grad`` in place of ``inference_mode``.

    It makes tensors that are written to later (buckets, states); torch refuses that for tensors of inference mode.
    """

    @wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return called


def as_normal(value: object) -> Any:
    """A copy of a tensor of inference mode, which can be written outside of it; dicts by value, others unchanged."""
    if isinstance(value, dict):
        return {key: as_normal(each) for key, each in value.items()}
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
