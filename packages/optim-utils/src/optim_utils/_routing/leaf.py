"""One parameter as routing sees it: its names, the module that owns it, its neighbours' shapes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from torch import Tensor, nn

__all__ = ["CONVOLUTIONS", "Convolution", "Leaf", "Refusal", "matcher"]

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
CONVOLUTIONS = get_args(Convolution)

# Wrappers put these components into the names of what they wrap: torch.compile, FSDP1, checkpointing, DeepSpeed.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})


class Refusal(Exception):
    """A parameter that cannot be routed: the reason, and arguments of a `Rule` that would settle it."""

    def __init__(self, reason: str, *suggestions: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.suggestions = suggestions


def matcher(*globs: str) -> Callable[[str], object]:
    """Truthy for a name component that matches one of ``globs``, upper and lower case alike."""
    return re.compile("|".join(fnmatch.translate(glob) for glob in globs), re.IGNORECASE).match


def _path(name: str) -> tuple[str, ...]:
    """The components of the name in the unwrapped model; ``module`` counts as a wrapper in front only."""
    components = [component for component in name.split(".") if component not in _WRAPPERS]
    while len(components) > 1 and components[0] == "module":
        del components[0]
    return tuple(components)


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter with all its names (several if tied) and, where the model is known, the modules that own it.

    ``shapes`` maps every parameter's name to its shape: what is fused can sometimes be told from a neighbour.
    """

    names: tuple[str, ...]
    param: Tensor
    modules: tuple[nn.Module, ...]
    shapes: Mapping[str, tuple[int, ...]]

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.param.shape)

    @cached_property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """Each name's components, without wrappers."""
        return tuple(_path(name) for name in self.names)

    def is_in(self, *types: type[nn.Module]) -> bool:
        """Whether a module of one of ``types`` owns the parameter."""
        return any(isinstance(module, types) for module in self.modules)

    def is_called(self, matches: Callable[[str], object]) -> bool:
        """Whether the parameter itself or the module right above it has a matching name."""
        return any(matches(component) for path in self.paths for component in path[-2:])
