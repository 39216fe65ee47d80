"""Moving tensors between distributed layouts: what no plan can beat, the cheapest plan, and running it.

Names are loaded when they are first used, so that describing layouts, bounds and plans imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "calibration": ["calibrate"],
    "cost": ["CommModel", "Topology"],
    "errors": [
        "LayoutError",
        "NotRepresentableError",
        "PlanInfeasibleError",
        "PlanMismatchError",
        "RedistError",
        "UnsupportedError",
    ],
    "execute": ["redistribute_local", "simulate"],
    "layout": ["Block", "Chunk", "Cyclic", "Intervals", "Layout", "Mesh", "Ragged", "Strided"],
    "many": ["Item", "redistribute_many"],
    "lower_bounds": ["Bounds", "bounds"],
    "ownership": ["same_ownership"],
    "parsing": ["parse_layout"],
    "plan_text": ["explain"],
    "moves": ["Step"],
    "planning": ["Plan", "plan"],
    "verification": ["Verification", "verify"],
    "program": ["Handle", "Program", "compile"],
    "collective_costs": ["Cost", "CostModel", "IdealLowerBoundsCM", "TextbookCM"],
    "multi_axis": ["MultiAxisDist"],
    "redistribution": ["redistribute"],
    "redistributors": ["MemoryConstrainedRedist", "NaiveGathererRedist", "OptimalRedist", "Redistributor"],
}
_HOME = {name: module for module, names in _MODULE_OF.items() for name in names}

# what `import optim_redist as tc` finds under the notebook's names
_NAMESPACES = ["dist", "optim"]

__all__ = sorted([*_HOME, *_NAMESPACES])


def __getattr__(name: str) -> Any:
    if name in _NAMESPACES:
        return import_module(f"{__name__}.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
