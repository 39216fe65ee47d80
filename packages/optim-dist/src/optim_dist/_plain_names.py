"""Names of parameters and buffers without the modules that torch puts around others, which come and go between runs.

    torch.compile(module)        module._orig_mod.weight
    checkpoint_wrapper(module)   module._checkpoint_wrapped_module.weight

A model may have such modules around all of it, around some of its blocks, and around each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})  # what a wrapper calls the module inside


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Each name's form in the model without wrappers; names that would become one stay as they are."""
    found = {name: _unwrapped(name) for name in names}
    counts = Counter(found.values())
    return {name: plain if counts[plain] == 1 else name for name, plain in found.items()}


def plain_path(path: str) -> str:
    """The path of a module in the model without wrappers, which have the paths of what is inside them."""
    return ".".join(module for module in path.split(".") if module not in _WRAPPED)


def _unwrapped(name: str) -> str:
    *modules, last = name.split(".")
    return ".".join([*(module for module in modules if module not in _WRAPPED), last])
