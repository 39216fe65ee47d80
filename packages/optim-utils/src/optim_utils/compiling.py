"""Methods that ``torch.compile`` leaves as they are, without the import of the compiler until one is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

__all__ = ["not_compiled"]

Method = TypeVar("Method", bound=Callable[..., Any])


def not_compiled(method: Method) -> Method:
    """The method with ``torch.compiler.disable``, for the body of a class.

    A compiled caller calls it as it is, where the compiler would trace what the host does, some of it once for each
    parameter. ``torch.compiler.disable`` imports the compiler, which takes one to two seconds, so it is applied when
    the first such method of a class is looked up, on the class or on an instance. Look one up before a caller is
    compiled, which cannot do it; torch's optimizers look up ``step`` as they are made.
    """
    return cast(Method, _NotCompiled(method))


class _NotCompiled:
    """Stands in a class for a method until it is looked up, and then makes place for the hidden one."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        for name, method in list(vars(self._owner).items()):
            if isinstance(method, _NotCompiled):
                setattr(self._owner, name, _disabled(method._method))
        return vars(self._owner)[self._name].__get__(instance, owner)


def _disabled(method: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compiler.disable(method)``, which takes next to no time where no caller is compiled, as mostly.

    Whether any is, in this thread, only torch's private functions say. Where they are gone, this is torch's own.
    """
    disabled: Callable[..., Any] = torch.compiler.disable(method)
    try:
        from torch._C._dynamo import eval_frame  # noqa: PLC2701
        from torch._dynamo import decorators  # noqa: PLC2701

        current_compiler, skip = eval_frame.get_eval_frame_callback, decorators.skip
    except (ImportError, AttributeError):
        return disabled

    @wraps(method)
    def called(*args: object, **kwargs: object) -> Any:
        return (method if current_compiler() is None else disabled)(*args, **kwargs)

    # so that the compiler leaves this frame as it is, too
    left_alone: Callable[..., Any] = skip(called)
    return left_alone
