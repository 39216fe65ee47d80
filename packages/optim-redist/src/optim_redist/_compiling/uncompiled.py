"""Functions that ``torch.compile`` leaves as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function as a graph break of ``torch.compile``, whose tracing would fail at process groups inside.

    ``torch.compiler.disable`` comes with imports that take a second, so it is applied only while something compiles.
    """

    @wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            hidden: Callable[Arguments, Result] = torch.compiler.disable(function)
            return hidden(*args, **kwargs)
        return function(*args, **kwargs)

    return called
