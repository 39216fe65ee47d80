"""Functions that ``torch.compile`` takes into its graphs as one operator, where their arguments allow it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar, cast

import torch
from torch.utils import _pytree  # noqa: PLC2701  the way that torch names in an error of torch.compile

from optim_redist.layout import Layout

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# layouts are constants of a graph: the compiler compares a call's with those it has traced, and traces anew for others
_pytree.register_constant(Layout)


def traced(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The function, moves of local parts, as an operator of the graph, or as a break of it.

    The operator is defined when something compiles, since the compiler's import takes a second.
    """

    @wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            from optim_redist._compiling import move_operator

            takes = cast(Callable[Arguments, bool], move_operator.takes)
            moved = cast(Callable[Arguments, Result], move_operator.moved)
            if takes(*args, **kwargs):
                return moved(*args, **kwargs)
            untraced = cast(Callable[Arguments, Result], move_operator.untraced)
            return untraced(*args, **kwargs)
        return function(*args, **kwargs)

    return called
