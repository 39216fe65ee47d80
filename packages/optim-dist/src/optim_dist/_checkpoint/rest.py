"""The rest of a model, which the optimizer does not own: buffers, frozen parameters, and modules' extra state."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optim_dist._checkpoint.manifest import Manifest
from optim_dist._optimizers.layouts import layout_of, local
from optim_dist._optimizers.live import LiveOptimizer, live_optimizers
from optim_dist._optimizers.whole_state import cut_like, on_one_rank
from optim_dist._plain_names import plain_names, plain_path
from optim_dist.plan import ParameterSpec, dtype_name
from optim_kernels.multi_tensor import has_overlaps

EXTRA_STATE = "_extra_state"  # torch's name for what a module's ``get_extra_state`` gives, of any type and shape


class Rest(NamedTuple):
    """The model's state that an optimizer does not own, under the names that the state has.

    Attributes:
        values: buffers and frozen parameters, which go into the optimizer's checkpoint.
        aliases: names for what the optimizer owns, where they are no names of the model's parameters: torch's
            ``checkpoint_wrapper`` leaves itself out of them, and `optim_utils.CombinedLinear` may show a Linear's
            weight and bias, views of its parameter.
        elsewhere: parameters that an optimizer of other ranks trains (experts beside layers of all ranks, say). They
            are in its checkpoint alone: each of this optimizer's ranks may have others.
        forms: for each module, keyed by its path, the version of the form that its state has. Without it a module that
            has changed this form since its first version would convert the state again when it is loaded.
    """

    values: dict[str, Any]
    aliases: set[str]
    elsewhere: set[str]
    forms: dict[str, Any]


class _State(dict[str, Any]):
    """What ``load_state_dict`` takes: names and values, and ``Rest.forms`` in torch's attribute for them."""

    _metadata: dict[str, Any]


@torch.no_grad()
def rest_of_model(model: nn.Module | None, optimizer: LiveOptimizer) -> Rest:
    """The model's state that the optimizer does not own.

    To be called before parameters' names are read: after an evaluation FSDP2 leaves whole parameters in the model, and
    ``state_dict()`` puts the cut ones back.
    """
    if model is None:
        return Rest({}, set(), set(), {})
    # a model's own state_dict() need not take keep_vars, without which only names tell what is trained
    is_torchs = getattr(model.state_dict, "__func__", None) is nn.Module.state_dict
    state = model.state_dict(keep_vars=True) if is_torchs else model.state_dict()
    trained = optimizer.trained_ids()
    parameters = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    known = parameters if is_torchs else {**_by_plain_name(model, state, parameters), **parameters}
    ids = {name: known.get(name, id(_whole(value))) for name, value in state.items()}
    owned = {name for name in state if ids[name] in trained}
    of_others = _trained_on_other_ranks(optimizer) - trained
    elsewhere = {name for name in state if ids[name] in of_others}
    rest = {name: value for name, value in state.items() if name not in owned | elsewhere}
    values = {name: value.detach() if isinstance(value, Tensor) else value for name, value in rest.items()}
    return Rest(values, owned - parameters.keys(), elsewhere, dict(getattr(state, "_metadata", None) or {}))


def _trained_on_other_ranks(optimizer: LiveOptimizer) -> set[int]:
    """``id`` of every parameter that an optimizer of other ranks updates."""
    mine = optimizer.communicator
    others = [
        other
        for other in live_optimizers()
        if other.communicator.has_same_world_as(mine) and {*other.communicator.ranks} != {*mine.ranks}
    ]
    return set().union(*(other.trained_ids() for other in others))


def _by_plain_name(model: nn.Module, state: Iterable[str], parameters: Mapping[str, int]) -> dict[str, int]:
    """The values of ``parameters`` by the state's names for them, which may have fewer wrappers."""
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    plain = plain_names([*parameters, *buffers])
    found = {plain[name]: value for name, value in parameters.items()}
    return {name: found[known] for name, known in plain_names(state).items() if known in found and name not in buffers}


def _whole(value: object) -> object:
    """The tensor that ``value`` is a view of, or itself."""
    base = value._base if isinstance(value, Tensor) else None
    return value if base is None else base


def without_copies(
    saved: Mapping[str, Any], manifest: Manifest, aliases: Iterable[str], specs: Sequence[ParameterSpec]
) -> dict[str, Any]:
    """``saved`` without copies of trained parameters, which versions up to 0.12.6 saved under the state's names.

    Args:
        saved: the rest of a model, under the names that the file has, as ``manifest`` does.
        aliases: those of ``Rest``, of this run.
        specs: this run's parameters, under plain names.
    """
    trained = {entry.name for entry in manifest.parameters}
    # torch's checkpoint_wrapper leaves itself out of a state's names, but not out of parameters'
    in_state = {name.replace("_checkpoint_wrapped_module.", "") for name in trained} - trained
    # of views, that is: a frozen parameter of the checkpoint may have the name of one that is trained here
    others = set(plain_names(aliases).values()) - {spec.name for spec in specs}
    plain = plain_names(saved)
    return {name: value for name, value in saved.items() if name not in in_state and plain[name] not in others}


def whole_rest(rest: Mapping[str, Any], optimizer: LiveOptimizer) -> dict[str, Any]:
    """``rest`` with DTensors whole on the first rank's CPU, one after another; None elsewhere. Collective."""
    return {
        name: on_one_rank(value, layout_of(value), optimizer.communicator) if isinstance(value, DTensor) else value
        for name, value in rest.items()
    }


def load_rest(
    model: nn.Module | None,
    mine: Mapping[str, Any],
    saved: Mapping[str, Any],
    names: Mapping[str, str],
    forms: Mapping[str, Any],
) -> None:
    """Load the saved rest of the model.

    Args:
        names: those in ``saved``, keyed by those in ``mine``, the model's.
        forms: the saved ``Rest.forms``, keyed by ``plain_path``.
    """
    if model is not None:
        found = {name: saved[names[name]] for name in mine}
        cut = {name: cut_like(found[name], value) for name, value in mine.items() if isinstance(value, DTensor)}
        state = _State({**found, **cut})
        paths = {path: plain_path(path) for path, _ in model.named_modules(remove_duplicate=False)}
        state._metadata = {path: forms[plain] for path, plain in paths.items() if plain in forms}
        model.load_state_dict(state, strict=False)


@dataclass(frozen=True)
class Kinds:
    """Plain names of a run's state by kind: what its optimizer trains, and the parts of ``Rest``."""

    trained: AbstractSet[str]
    rest: AbstractSet[str]
    elsewhere: AbstractSet[str]


def misplaced(saved: Kinds, here: Kinds) -> dict[str, str]:
    """What to do about each parameter that was saved as another kind of parameter than it is here."""
    found = {
        "trained in the checkpoint, frozen here; load before freezing it": saved.trained & here.rest,
        "frozen in the checkpoint, trained here; load before unfreezing it": saved.rest & here.trained,
        "in the checkpoint, but an optimizer of other ranks trains it here; load before building that one": (
            (saved.trained | saved.rest) & here.elsewhere
        ),
        "not in the checkpoint, since an optimizer of other ranks trained it, whose checkpoint has it; build that "
        "optimizer before you load this one": saved.elsewhere & (here.trained | here.rest),
    }
    fitting = saved.trained & here.trained
    problems = {name: f"{name}: {advice}" for advice, names in found.items() for name in names - fitting}
    return dict(sorted(problems.items()))


def compare_rest(saved: Mapping[str, Any], mine: Mapping[str, Any], *, but: Container[str]) -> list[str]:
    """How the rest of the saved model differs from this one's, except for names in ``but``."""
    problems = [f"{name}: not in the checkpoint" for name in mine if name not in saved and name not in but]
    problems += [
        f"{name}: in the checkpoint, not in this model" for name in saved if name not in mine and name not in but
    ]
    for name in mine.keys() & saved.keys():
        if name.rpartition(".")[2] == EXTRA_STATE:
            continue
        if isinstance(mine[name], Tensor) and mine[name].shape != saved[name].shape:
            problems.append(f"{name}: shape {tuple(saved[name].shape)}, this run has {tuple(mine[name].shape)}")
        elif isinstance(mine[name], Tensor) and not _fits_dtype(saved[name], mine[name]):
            dtypes = dtype_name(saved[name].dtype), dtype_name(mine[name].dtype)
            problems.append(f"{name}: dtype {dtypes[0]}, this run has {dtypes[1]}")
        elif isinstance(mine[name], Tensor) and has_overlaps(local(mine[name])):
            problems.append(
                f"{name}: this run's has several elements at one place in memory, which cannot be written; give the "
                "model its clone(memory_format=torch.contiguous_format)"
            )
    return sorted(problems)


def _fits_dtype(saved: Tensor, mine: Tensor) -> bool:
    """Whether torch would load the tensor as it is, or round it; from or to integers, numbers would change."""
    return saved.dtype == mine.dtype or (saved.is_floating_point() and mine.is_floating_point())
