"""Parameters that a forward pass reads before a module that holds them has run: only watching all operations sees it.

A mode of torch sees all operations on tensors while a model's forward pass runs. It costs the host some microseconds
for each, so it is for debugging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from optim_dist._reduction.compiled import is_compiled

# attributes that are views of a tensor's values; all others, and these methods, ask for its form alone
_VIEWS = ("T", "mT", "H", "mH", "data", "real", "imag")
_FORM = {
    getattr(Tensor, name)
    for name in ("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "storage_offset", "type")
} | {
    getattr(Tensor, name)
    for name in ("is_contiguous", "is_complex", "is_floating_point", "get_device", "data_ptr", "untyped_storage")
}


def watch(model: nn.Module, begun: Callable[[], None], found: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Show ``found`` every tensor that an operation of the model's forward pass reads; returns the hooks' handles.

    ``begun`` is called before each such pass.
    """
    forward = _OutermostForward(begun, found)
    return [
        model.register_forward_pre_hook(forward.begin, prepend=True),
        # also after a forward pass that has failed
        model.register_forward_hook(forward.end, always_call=True),
    ]


class _OutermostForward:
    """Hooks that have the mode on from the beginning of the outermost forward pass to its end."""

    def __init__(self, begun: Callable[[], None], found: Callable[[Tensor], None]) -> None:
        self._begun = begun
        self._mode = _Reads(found)
        self._is_on: list[bool] = []

    def begin(self, module: nn.Module, arguments: object) -> None:
        # an evaluation waits for all parameters, the compiler would trace the mode, and what is compiled would be
        # compiled anew under it
        is_watched = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not any(self._is_on)
        self._is_on.append(is_watched and not any(map(is_compiled, module.modules())))
        if self._is_on[-1]:
            self._begun()
            self._mode.__enter__()

    def end(self, module: nn.Module, arguments: object, result: object) -> None:
        if self._is_on and self._is_on.pop():
            self._mode.__exit__(None, None, None)


class _Reads(TorchFunctionMode):
    """The mode: shows ``found`` the tensors whose values an operation reads."""

    def __init__(self, found: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self, function: Any, types: object, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if _reads_values(function):
            for tensor in _tensors_in((arguments, keywords)):
                self._found(tensor)
        return function(*arguments, **(keywords or {}))


def _reads_values(function: Any) -> bool:
    if getattr(function, "__name__", "") == "__get__":
        return getattr(function.__self__, "__name__", "") in _VIEWS
    try:
        return function not in _FORM
    except TypeError:  # what cannot be hashed is none of them
        return True


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
