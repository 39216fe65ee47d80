"""What a compiled caller calls as it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def uncompiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, at which ``torch.compile`` breaks the graph; inside, process groups would be errors of its own.

    ``torch.compiler.disable`` comes with imports that take a second, so it is applied only where something compiles.
    """

    @wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            hidden: Callable[Arguments, Result] = torch.compiler.disable(function)
            return hidden(*args, **kwargs)
        return function(*args, **kwargs)

    return called
