"""Replacing the ``torch.nn.Linear`` layers of a model by `CombinedLinear`, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import nn

from optim_utils._combined_linear import CombinedLinear

L = TypeVar("L", bound=nn.Module)


def combine_linears(
    model: nn.Module,
    predicate: Callable[[str, nn.Linear], bool] | None = None,
    *,
    align_rows: bool = False,
    column_major: bool = False,
) -> list[str]:
    """Replace layers of ``model`` by `CombinedLinear`, in place; return their names.

    Only layers that are exactly ``torch.nn.Linear`` are replaced, as subclasses may do more. Outputs and gradients stay
    the same. Optimizers have to be built afterwards: the parameters are new ones.

    Args:
        model: the model, which itself is not replaced.
        predicate: called with each layer's name and the layer; those that it refuses stay.
        align_rows: the layout of the new parameters, see `CombinedLinear`.
        column_major: likewise.

    Raises:
        ValueError: before anything is replaced, for a layer whose parameters are tied to another module's (joined into
            a new parameter they would not be any more), of whose parameters only one requires a gradient, or that has
            hooks, which would be lost.
    """
    if type(model) is nn.Linear:
        raise ValueError(
            "the model itself is a Linear, which cannot be replaced in place; use CombinedLinear.from_linear"
        )
    found = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and name}
    chosen = {name: layer for name, layer in found.items() if predicate is None or predicate(name, layer)}
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            owners.setdefault(id(parameter), []).append(parameter_name)
    for name, layer in chosen.items():
        if any(value for attribute, value in vars(layer).items() if attribute.endswith("_hooks")):
            raise ValueError(f"{name!r} has hooks, which would be lost; remove them or leave it out with the predicate")
        for parameter in layer.parameters():
            if len(names := owners[id(parameter)]) > 1:
                raise ValueError(f"{' and '.join(names)} are tied; leave them out with the predicate")
    new = {}
    for name, layer in chosen.items():
        try:
            new[layer] = CombinedLinear.from_linear(layer, align_rows=align_rows, column_major=column_major)
        except ValueError as error:
            error.add_note(f"the layer is {name!r}")
            raise
    return _replace(model, new)


def uncombine_linears(model: nn.Module) -> list[str]:
    """Replace every `CombinedLinear` in ``model`` by a ``torch.nn.Linear``, in place; return their names."""
    found = [layer for name, layer in model.named_modules() if type(layer) is CombinedLinear and name]
    return _replace(model, {layer: layer.to_linear() for layer in found})


def _replace(model: nn.Module, new: dict[L, nn.Linear] | dict[L, CombinedLinear]) -> list[str]:
    """Put new layers in the places of old ones, at every name that leads to them."""
    names = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if module in new]
    for name, module in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new[module])
    return [name for name, _ in names]
