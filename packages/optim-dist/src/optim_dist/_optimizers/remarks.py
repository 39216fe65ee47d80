"""What ``explain()`` remarks on groups: which published Muon each follows, and what is easily overlooked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optim_dist._optimizers.entries import Entry
from optim_kernels import VARIANTS

# Training loops change these as they go, or leave them to this package: they do not make another variant.
_FREE = frozenset({"lr", "weight_decay", "momentum", "maximize", "missing_grad", "views"})


def remarks(groups: Sequence[Mapping[str, Any]], entries: Sequence[Entry], model: nn.Module | None) -> list[str]:
    """One line for each finding."""
    return [*_variants(groups, entries), *_coarse_moments(groups, entries), *_unnamed(groups, entries, model)]


def _variants(groups: Sequence[Mapping[str, Any]], entries: Sequence[Entry]) -> Iterator[str]:
    """The variant that each Muon group is nearest to, and in what it differs."""
    for index in sorted({entry.group for entry in entries if entry.route == "muon"}):
        others = {name: _other_options(groups[index], options) for name, options in VARIANTS.items()}
        name = min(others, key=lambda name: len(others[name]))
        yield f"group {index}: Muon, variant {name!r}" + "".join(f", {option}" for option in others[name])


def _other_options(group: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    """The options in which the group differs from a variant's ``options``."""
    return [
        f"{key}={group[key]!r}"
        for key, value in options.items()
        # a tensor counts as different: reading it would wait for the device
        if key not in _FREE and (isinstance(group[key], Tensor) or group[key] != value)
    ]


def _coarse_moments(groups: Sequence[Mapping[str, Any]], entries: Sequence[Entry]) -> Iterator[str]:
    """Groups of AdamW whose second moments have 8 significant bits."""
    found = set()
    for entry in entries:
        group = groups[entry.group]
        chosen = group.get("state_dtype")
        dtype = chosen[1] if isinstance(chosen, tuple) else chosen
        if entry.route == "adamw" and (dtype or entry.parameter.dtype) is torch.bfloat16:
            found.add(entry.group)
    for index in sorted(found):
        if not groups[index].get("stochastic_rounding"):
            yield (
                f"group {index}: second moments in bfloat16, to nearest, which loses changes of less than 1/256 or so; "
                "stochastic_rounding=True keeps them in the mean, state_dtype=(None, torch.float32) exactly"
            )


def _unnamed(groups: Sequence[Mapping[str, Any]], entries: Sequence[Entry], model: nn.Module | None) -> Iterator[str]:
    named = set() if model is None else {id(parameter) for parameter in model.parameters()}
    num_unnamed = sum(
        "param_names" not in groups[entry.group] and id(entry.parameter) not in named for entry in entries
    )
    if num_unnamed:
        yield (
            f"parameters without names: {num_unnamed}, which ranks and checkpoints tell apart by their places alone; "
            "give named_parameters() or model="
        )
