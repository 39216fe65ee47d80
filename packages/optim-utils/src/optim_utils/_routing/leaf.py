"""One parameter as routing sees it: its names, the module that owns it, its neighbours' shapes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from torch import Tensor, nn

__all__ = ["CONVOLUTIONS", "Convolution", "Leaf", "Refusal", "matcher", "unparametrized"]

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
CONVOLUTIONS = get_args(Convolution)

# Wrappers put these components into the names of what they wrap: torch.compile, FSDP1, checkpointing, DeepSpeed, and
# peft around a layer that it adds to.
_WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "base_layer"}
)
# What wrappers put only at the front of a name: DDP and DataParallel the first, peft the second.
_PREFIXES = (["module"], ["base_model", "model"])
# What torch.nn.utils.parametrize calls the tensors that a parameter is computed from.
_is_original = re.compile(r"original\d*").fullmatch
# The name of the magnitudes in torch's new and old weight norm, and of the direction that belongs to each.
_DIRECTION_OF = {"original0": "original1", "weight_g": "weight_v"}


class Refusal(Exception):
    """A parameter that cannot be routed: the reason, and arguments of a `Rule` that would settle it."""

    def __init__(self, reason: str, *suggestions: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.suggestions = suggestions


def matcher(*globs: str) -> Callable[[str], object]:
    """Truthy for a name component that matches one of ``globs``, upper and lower case alike."""
    return re.compile("|".join(fnmatch.translate(glob) for glob in globs), re.IGNORECASE).match


def unparametrized(components: Sequence[str]) -> list[str]:
    """``components``, where an original of torch's parametrizations becomes the parameter that it stands for."""
    if len(components) > 2 and components[-3] == "parametrizations" and _is_original(components[-1]):
        return [*components[:-3], components[-2]]
    return list(components)


def _path(name: str) -> tuple[str, ...]:
    """The components of the name in the unwrapped model."""
    # a parameter of its own may be called like a wrapper
    *modules, own = name.split(".")
    components = unparametrized([*(module for module in modules if module not in _WRAPPERS), own])
    while prefix := next((p for p in _PREFIXES if components[: len(p)] == p and len(components) > len(p)), None):
        del components[: len(prefix)]
    if "modules_to_save" in components[:-2]:
        # peft keeps its trained copy of a module under modules_to_save.<adapter>
        place = components.index("modules_to_save")
        del components[place : place + 2]
    return tuple(components)


@dataclass(frozen=True, eq=False)
class Leaf:
    """A parameter with all its names (several if tied) and, where the model is known, the modules that own it.

    ``shapes`` maps every parameter's name to its shape: a neighbour's shape sometimes tells how a weight is fused.
    ``is_softmax_output``: whether a layer of an adaptive softmax has it, one whose rows are classes.
    """

    names: tuple[str, ...]
    param: Tensor
    modules: tuple[nn.Module, ...]
    shapes: Mapping[str, tuple[int, ...]]
    is_softmax_output: bool

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.param.shape)

    @cached_property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """Each name's components, without wrappers."""
        return tuple(_path(name) for name in self.names)

    @cached_property
    def own_names(self) -> tuple[str, ...]:
        """What the parameter itself is called; an item of a ParameterList, whose name is a number, as its list."""
        return tuple(path[-2] if path[-1].isdecimal() and len(path) > 1 else path[-1] for path in self.paths)

    @cached_property
    def is_magnitude(self) -> bool:
        """Whether this parameter holds the magnitudes of a weight norm: one number for each slice of the direction."""
        for name in self.names:
            above, dot, last = name.rpartition(".")
            direction = self.shapes.get(f"{above}{dot}{_DIRECTION_OF.get(last)}")
            if direction is not None and len(direction) == len(self.shape) and direction != self.shape:
                return all(size in (1, whole) for size, whole in zip(self.shape, direction, strict=True))
        return False

    def is_in(self, *types: type[nn.Module]) -> bool:
        """Whether a module of one of ``types`` owns the parameter."""
        return any(isinstance(module, types) for module in self.modules)

    def is_called(self, matches: Callable[[str], object]) -> bool:
        """Whether the parameter itself or the module right above it has a matching name."""
        return any(matches(component) for path in self.paths for component in path[-2:])
