"""nanochat's optimizer files, one per rank, as the state of one process.

    AdamW   step            the same on every rank, an int or a tensor
            exp_avg(_sq)    whole on every rank if the parameter is small, else ``shape[0] / W`` rows of it on each of W
    Muon    the state of a group of K parameters of one shape is under the first: chunks of C = ceil(K / W) matrices on
            each of W ranks, zeros behind the K-th
            momentum_buffer         (C, *shape)
            second_momentum_buffer  (C, r, 1) if r >= c else (C, 1, c)  for matrices r x c

Shapes tell which of these a tensor is, so that one process is W = 1. In 2025 each matrix had its own state, on one
rank.
"""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_dist._checkpoint.manifest import CheckpointError
from optim_kernels.functional import new_second_moment

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM, SECOND = "momentum_buffer", "second_momentum_buffer"

State = dict[str, Any]  # of one parameter, or of a Muon group


def paths_of(files: object) -> list[Path]:
    """The paths in ``files``.

    Raises:
        TypeError: if it is a single path, or no iterable.
    """
    if isinstance(files, str | os.PathLike) or not isinstance(files, Iterable):
        raise TypeError(f"files must be a list of the paths of all ranks, got {files!r}")
    return [Path(file) for file in files]


def in_rank_order(files: Sequence[Path]) -> list[Path]:
    """The files by the ranks in their names (``optim_000100_rank12.pt``); as they are if no name has one.

    Raises:
        CheckpointError: if there are no files, ranks are missing or come twice, or files are of several saves.
    """
    found = [re.fullmatch(r"(.*rank[-_]?)(\d+)(.*)", file.name) for file in files]
    named = [(int(match[2]), (match[1], match[3]), file) for match, file in zip(found, files) if match]
    if not files:
        raise CheckpointError(Path("of nanochat"), ["no files were given"])
    if not named:
        return list(files)
    if len(named) < len(files) or len({(file.parent, around) for _, around, file in named}) > 1:
        listed = ", ".join(file.name for file in files)
        raise CheckpointError(
            files[0].parent, [f"files of several saves: {listed}; give one of each rank, of one save"]
        )
    ranks = sorted(rank for rank, _, _ in named)
    if ranks != list(range(len(ranks))):
        raise CheckpointError(files[0].parent, [f"files of ranks {ranks}; give one of each rank, from 0 on"])
    return [file for *_, file in sorted(named)]


def read(files: Sequence[Path], index: int | None) -> list[dict[str, Any]]:
    """The state dict in each file, or the ``index``-th of those that it lists; nothing but tensors is unpickled."""
    found, problems = [], []
    for file in files:
        if file.is_file() and not zipfile.is_zipfile(file):
            problems.append(f"{file.name}: no file of torch.save, or not all of one")
            continue
        try:
            # pages are read as they are needed
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
            problems.append(f"{file.name}: {error}")
            continue
        if isinstance(content, list):
            if index is None or not 0 <= index < len(content):
                numbers = f"states of {len(content)} optimizers; pass index= of the one to load, from 0 on"
                problems.append(f"{file.name} has {numbers}, got {index}")
                continue
            content = content[index]
        if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
            problems.append(f"{file.name} has no state_dict() of an optimizer")
            continue
        found.append(content)
    if problems:
        raise CheckpointError(files[0].parent, problems)
    return found


def merged(saved: Sequence[dict[str, Any]], groups: Sequence[Mapping[str, Any]], where: Path) -> dict[str, Any]:
    """What W ranks have saved, in rank order, as a one-process state dict for parameters as ``groups`` list them.

    Raises:
        CheckpointError: with everything that does not fit.
    """
    first = saved[0]["param_groups"]
    problems = [
        f"rank {rank}: param_groups are not those of rank 0; give files of one save"
        for rank, theirs in enumerate(saved)
        if [group["params"] for group in theirs["param_groups"]] != [group["params"] for group in first]
    ]
    members = _members(first, groups)
    sizes, mine = [len(group["params"]) for group in first], [len(numbers) for _, numbers in members]
    if sizes != mine:
        problems.append(f"param_groups: sizes {sizes}, this optimizer has {mine}; list groups as they were saved")
    if problems:
        raise CheckpointError(where, problems)
    listed = _listed(groups)
    states: dict[int, State] = {}
    for number, (theirs, (ours, numbers)) in enumerate(zip(first, members)):
        kind, wanted = theirs.get("kind", _kind(ours)), _kind(ours)
        if kind != wanted:
            problems.append(f"group {number}: kind {kind!r}, this optimizer has {wanted!r}; list groups as saved")
            continue
        by_rank = [[each["state"].get(i, {}) for i in theirs["params"]] for each in saved]
        merge = _merged_muon if kind == "muon" else _merged_adamw
        found = merge(by_rank, [listed[i] for i in numbers], problems)
        states |= {i: state for i, state in zip(numbers, found, strict=True) if state}
    if problems:
        raise CheckpointError(where, problems)
    # if one group of ours is several of theirs, their options are alike
    options = first if len(first) == len(groups) else first[:1]
    all_numbers = iter(range(len(listed)))
    described = [
        {
            # a tensor with dimensions is no hyperparameter, but the buffer of zeros that groups had in 2025
            **{key: value for key, value in theirs.items() if not isinstance(value, Tensor) or value.ndim == 0},
            "params": [next(all_numbers) for _ in group["params"]],
        }
        for theirs, group in zip(options, groups, strict=True)
    ]
    return {"state": states, "param_groups": described}


class _Listed(NamedTuple):
    """A parameter of ours; ``second`` is the shape of Muon's second moment for it."""

    name: str
    shape: tuple[int, ...]
    second: tuple[int, ...]


def _listed(groups: Sequence[Mapping[str, Any]]) -> list[_Listed]:
    found = []
    for number, group in enumerate(groups):
        names = group.get("param_names") or [f"parameter {n} of group {number}" for n in range(len(group["params"]))]
        views = group.get("views") or [None] * len(group["params"])
        for name, parameter, view in zip(names, group["params"], views, strict=True):
            shape = tuple(parameter.shape)
            second = new_second_moment(torch.empty(shape, device="meta"), view).shape if len(shape) > 1 else ()
            found.append(_Listed(name, shape, tuple(second)))
    return found


def _members(
    saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], list[int]]]:
    """For each saved group, our group, and the numbers of its parameters among all of ours.

    Until 2026 nanochat's Muon took a list and made one group per shape; ours keeps the list in one group.
    """
    if len(groups) == 1 and len(saved) > 1 and _kind(groups[0]) == "muon" and "kind" not in saved[0]:
        shapes = [tuple(parameter.shape) for parameter in groups[0]["params"]]
        return [(groups[0], [i for i, each in enumerate(shapes) if each == shape]) for shape in sorted(set(shapes))]
    found = []
    start = 0
    for group in groups:
        found.append((group, list(range(start, start + len(group["params"])))))
        start += len(group["params"])
    return found


def _kind(group: Mapping[str, Any]) -> str:
    kind: str = group.get("kind", "muon" if "momentum" in group else "adamw")
    return kind


def _merged_adamw(by_rank: Sequence[Sequence[State]], listed: Sequence[_Listed], problems: list[str]) -> list[State]:
    merged: list[State] = []
    for place, (name, shape, _) in enumerate(listed):
        states = [rank[place] for rank in by_rank]
        merged.append({})
        if not any(states):
            continue  # the parameter had no gradient
        missing = [key for key in ("step", *MOMENTS) if any(key not in state for state in states)]
        if missing:
            problems.append(f"{name}: {', '.join(missing)} of some ranks is missing")
            continue
        steps = [float(state["step"]) for state in states]
        if len(set(steps)) > 1:
            problems.append(f"{name}: steps {', '.join(map(str, steps))}; give files of one save")
        whole = {key: _whole([state[key] for state in states], shape, f"{name}.{key}", problems) for key in MOMENTS}
        merged[-1] = {"step": torch.tensor(steps[0], dtype=torch.float32), **whole}
    return merged


def _whole(parts: Sequence[Tensor], shape: tuple[int, ...], name: str, problems: list[str]) -> Tensor | None:
    """The tensor of ``shape`` that each rank has whole, or in equal rows; None, and a problem, if it is neither."""
    found = [tuple(part.shape) for part in parts]
    if all(each == shape for each in found):
        if all(torch.equal(part, parts[0]) for part in parts[1:]):
            return parts[0]
        problems.append(f"{name}: whole on all {len(parts)} ranks, but not the same; give files of one save")
        return None
    if shape and shape[0] % len(parts) == 0 and found == [(shape[0] // len(parts), *shape[1:])] * len(parts):
        return torch.cat(list(parts))
    of = f" of each of {len(parts)} ranks" if len(parts) > 1 else ""
    problems.append(f"{name}: shape {_text(found)}{of}, this run has {shape}; give the file of every rank")
    return None


def _merged_muon(by_rank: Sequence[Sequence[State]], listed: Sequence[_Listed], problems: list[str]) -> list[State]:
    if not any(state for rank in by_rank for state in rank):
        return [{} for _ in listed]  # no parameter had a gradient
    stacks = [rank[0] for rank in by_rank]
    if any(MOMENTUM in state and state[MOMENTUM].ndim == len(listed[0].shape) + 1 for state in stacks):
        return _merged_stacks(stacks, listed, problems)
    return _merged_single(by_rank, listed, problems)


def _merged_stacks(stacks: Sequence[State], listed: Sequence[_Listed], problems: list[str]) -> list[State]:
    """Each rank's stack of matrices of one shape, taken apart; empty states, and a problem, if they do not fit."""
    nothing: list[State] = [{} for _ in listed]
    shapes = [each.shape for each in listed]
    if len(set(shapes)) > 1:
        problems.append(f"the group of {listed[0].name}: saved as one stack, this run has shapes {_text(shapes)}")
        return nothing
    chunk = -(-len(listed) // len(stacks))
    wanted = {MOMENTUM: (chunk, *shapes[0]), SECOND: (chunk, *listed[0].second)}
    keys = sorted({key for state in stacks for key in state} & wanted.keys())
    for key in keys:
        found = [tuple(state[key].shape) if key in state else () for state in stacks]
        if found != [wanted[key]] * len(stacks):
            problems.append(
                f"the group of {listed[0].name}: {key} has shape {_text(found)}, but {len(listed)} matrices over "
                f"{len(stacks)} ranks have {wanted[key]} on each; give the file of every rank"
            )
            return nothing
    owners = [divmod(place, chunk) for place in range(len(listed))]
    return [{key: _second_in_fp32(key, stacks[rank][key][row]) for key in keys} for rank, row in owners]


def _merged_single(by_rank: Sequence[Sequence[State]], listed: Sequence[_Listed], problems: list[str]) -> list[State]:
    """The state of each matrix, which one rank has; a problem where none has it, several have, or it does not fit."""
    merged: list[State] = []
    for place, (name, shape, second) in enumerate(listed):
        states = [rank[place] for rank in by_rank if rank[place]]
        merged.append({key: _second_in_fp32(key, value) for state in states for key, value in state.items()})
        if len(states) != 1:
            problems.append(
                f"{name}: {len(states)} of {len(by_rank)} ranks have its state; give the file of every rank"
            )
            continue
        for key, expected in ((MOMENTUM, shape), (SECOND, second)):
            if key in states[0] and tuple(states[0][key].shape) != expected:
                problems.append(f"{name}.{key}: shape {tuple(states[0][key].shape)}, this run has {expected}")
    return merged


def _second_in_fp32(key: str, value: Tensor) -> Tensor:
    """Second moments in fp32, as ours are; nanochat's have the dtype of the parameter."""
    return value.float() if key == SECOND and value.dtype != torch.float64 else value


def _text(shapes: Sequence[tuple[int, ...]]) -> str:
    return " and ".join(str(shape) for shape in dict.fromkeys(shapes))
