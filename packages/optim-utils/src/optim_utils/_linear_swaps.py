"""Replacing the ``torch.nn.Linear`` layers of a model by `CombinedLinear`, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import nn

from optim_utils._combined_linear import CombinedLinear

L = TypeVar("L", bound=nn.Module)

# modules whose fast paths read the `.bias` of the layers in them, and take it for a tensor
_BIAS_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)
_PARAMETERS = {"weight", "bias", "combined_weight"}
_BY_PREDICATE = ", or leave it out with the predicate"


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
        TypeError: for a model that is no module, or a predicate that cannot be called.
        ValueError: before anything is replaced, if a layer cannot be replaced: its parameters are tied to another
            module's, which a new joined parameter would not be; they differ in ``requires_grad``, dtype or device; it
            has hooks (also on its parameters), buffers or a ``forward`` of its own, which would be lost; or its parent
            reads its ``bias``, as ``torch.nn.TransformerEncoderLayer`` and ``torch.nn.MultiheadAttention`` do with
            their own layers.
    """
    _check_model(model, "combine_linears")
    if not (predicate is None or callable(predicate)):
        raise TypeError(f"predicate has to be a function of name and layer, got a {type(predicate).__name__}")
    if type(model) is nn.Linear:
        raise ValueError(
            "the model itself is a Linear, which cannot be replaced in place; use CombinedLinear.from_linear"
        )
    found = {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear and name}
    chosen = {name: layer for name, layer in found.items() if predicate is None or predicate(name, layer)}
    _check_bias_is_not_read(model, chosen)
    _check_nothing_is_lost(model, chosen, way_out=_BY_PREDICATE)
    replacements = {}
    for name, layer in chosen.items():
        try:
            replacements[layer] = CombinedLinear.from_linear(layer, align_rows=align_rows, column_major=column_major)
        except ValueError as error:
            error.add_note(f"the layer is {name!r}")
            raise
    return _replace(model, replacements)


def _check_model(model: object, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function} takes a torch.nn.Module, got a {type(model).__name__}")


def _check_bias_is_not_read(model: nn.Module, chosen: dict[str, nn.Linear]) -> None:
    """Refuse layers whose ``bias`` is taken for a tensor by the module around them."""
    readers = {
        child: parent for parent in model.modules() if isinstance(parent, _BIAS_READERS) for child in parent.children()
    }
    for name, layer in chosen.items():
        if layer in readers:
            raise ValueError(
                f"{name!r} cannot be replaced: the {type(readers[layer]).__name__} around it reads its bias itself; "
                "leave it out with the predicate"
            )


def _check_nothing_is_lost(model: nn.Module, chosen: Mapping[str, nn.Module], *, way_out: str = "") -> None:
    """Refuse tied layers and those with something that new layers would lack; ``way_out`` ends the errors' advice."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(prefix=name, recurse=False):
            owners.setdefault(id(parameter), []).append(parameter_name)
    for name, layer in chosen.items():
        if lost := _what_would_be_lost(layer):
            raise ValueError(f"{name!r} has {lost}, which would be lost; remove that first{way_out}")
        for parameter in layer.parameters():
            if len(names := owners[id(parameter)]) > 1:
                raise ValueError(f"{' and '.join(names)} are tied; untie {name!r} first{way_out}")


def _what_would_be_lost(layer: nn.Module) -> str | None:
    """What a layer has besides weight and bias, or None."""
    attributes = vars(layer)
    if any(value for name, value in attributes.items() if name.endswith("_hooks")):
        return "hooks"
    if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in layer.parameters()):
        return "parameters with hooks"
    for kind in ("buffers", "modules"):
        if attributes[f"_{kind}"]:
            return kind
    if attributes["_parameters"].keys() - _PARAMETERS:
        return "other parameters"
    return "a forward of its own" if "forward" in attributes else None


def uncombine_linears(model: nn.Module) -> list[str]:
    """Replace every `CombinedLinear` in ``model`` by a ``torch.nn.Linear``, in place; return their names.

    Subclasses stay, and so do layers with parametrizations, which torch makes subclasses of.

    Raises:
        TypeError: for a model that is no module.
        ValueError: before anything is replaced, for a layer whose parameter is tied or that has something that would be
            lost, as in `combine_linears`; and for a model that is a `CombinedLinear` itself.
    """
    _check_model(model, "uncombine_linears")
    if type(model) is CombinedLinear:
        raise ValueError("the model itself is a CombinedLinear, which cannot be replaced in place; use its to_linear()")
    found = {name: layer for name, layer in model.named_modules() if type(layer) is CombinedLinear}
    _check_nothing_is_lost(model, found)
    return _replace(model, {layer: layer.to_linear() for layer in found.values()})


def _replace(model: nn.Module, replacements: dict[L, nn.Linear] | dict[L, CombinedLinear]) -> list[str]:
    """Put each layer's replacement in its place, at every name that leads to them."""
    names = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if module in replacements]
    for name, module in names:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacements[module])
    return [name for name, _ in names]
