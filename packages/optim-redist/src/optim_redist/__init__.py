"""Moving tensors between distributed layouts: what no plan can beat, the cheapest plan, and running it.

Names are loaded when they are first used, so that describing layouts, bounds and plans imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "errors": [
        "LayoutError",
        "NotRepresentableError",
        "PlanInfeasibleError",
        "PlanMismatchError",
        "RedistError",
        "UnsupportedError",
    ],
    "layout": ["Block", "Chunk", "Cyclic", "Intervals", "Layout", "Mesh", "Ragged"],
    "ownership": ["same_ownership"],
}
_HOME = {name: module for module, names in _MODULE_OF.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
