"""Checks of what has to be the same on every rank: options, plans, hyperparameters, steps, bits of parameters."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optim_dist._listing import listed
from optim_dist._optimizers.entries import Entry
from optim_dist._optimizers.multipliers import ATTRIBUTES, given_multipliers
from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.storage import ParameterBucket
from optim_dist.plan import Plan
from optim_kernels.multi_tensor import is_dense


class Comparison(NamedTuple):
    """When parameters are compared, and what to do where they differ, for errors."""

    when: str
    advice: str


SYNC_CHECK = Comparison(
    "sync_params='check'", "give every rank the same, or leave sync_params out, and all get those of the first rank"
)
AFTER_STEP = Comparison("after the step", "write to them on all ranks alike, or on none")


@contextmanager
def refused_together(what: str, communicator: Communicator) -> Iterator[None]:
    """Raise what is raised inside or, if nothing is, an error for what is on other ranks. Collective at its end."""
    refused: Exception | None = None
    try:
        yield
    except Exception as error:
        refused = error
    problems = communicator.gather_json(None if refused is None else f"{type(refused).__name__}: {refused}")
    raise_refusals(refused, what, dict(zip(communicator.ranks, problems)))


def raise_refusals(refused: Exception | None, what: str, problems: Mapping[int, Any]) -> None:
    """Raise ``refused`` or, if it is None, an error with the ``problems`` of other ranks (keyed by rank), if any."""
    if refused is not None:
        raise refused
    for rank, text in problems.items():
        if not isinstance(text, str | None):
            raise RuntimeError(
                f"{what}: rank {rank} does something else meanwhile; call the same methods in the same order on every "
                "rank"
            )
    if any(problems.values()):
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in problems.items() if text)
        raise RuntimeError(f"{what}, because of {listed}")


def describe_groups(groups: Sequence[dict[str, Any]], found: Sequence[Entry]) -> dict[str, str]:
    """The hyperparameters of the groups that ``found`` belong to, and the multipliers of ``found``, as text.

    Values that are not plain are left out.
    """
    described = {
        f"{key} of group {index}": str(_without_tensors(value))
        for index in sorted({entry.group for entry in found})
        for key, value in groups[index].items()
        if key not in ("params", "param_names") and value is not None and _is_plain(value)
    }
    for name, pair in given_multipliers(found).items():
        described |= {f"{key} of {name}": str(value) for key, value in zip(ATTRIBUTES, pair) if value != 1}
    return described


def _is_plain(value: object) -> bool:
    """Whether the text of a hyperparameter tells its value, and is the same on every rank."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Tensor | int | float | str | torch.dtype)


def _without_tensors(value: Any) -> Any:
    """A plain value with numbers for tensors, whose own text has their device, another on each rank, and few digits."""
    if isinstance(value, list | tuple):
        return tuple(map(_without_tensors, value))
    return value.tolist() if isinstance(value, Tensor) else value


def check_plan(plan: Plan, hyperparameters: Mapping[str, str], communicator: Communicator) -> None:
    """Fail on every rank if ranks do not have the same plan and groups, naming the first difference."""
    ranks = communicator.ranks
    hashes, groups = zip(*communicator.gather_json([plan.hash, dict(hyperparameters)]))
    if len(set(hashes)) == 1:
        check_options(dict(zip(ranks, groups)))
        return
    described = communicator.gather_json(plan.describe()["parameters"])
    first = described[0]
    for rank, other in zip(ranks, described):
        for place in range(max(len(first), len(other))):
            mine = first[place] if place < len(first) else None
            theirs = other[place] if place < len(other) else None
            if mine != theirs:
                raise RuntimeError(
                    f"ranks were given different parameters; the first that differs is number {place}: "
                    f"rank {ranks[0]} has {_brief(mine, theirs)}, rank {rank} has {_brief(theirs, mine)}"
                )
    raise RuntimeError(
        "ranks have the same parameters and options but different plans; install the same optim_dist on all"
    )


def compare_options(described: Mapping[str, str], communicator: Communicator) -> None:
    """``check_options`` of what every rank was given. Collective."""
    check_options(dict(zip(communicator.ranks, communicator.gather_json(dict(described)))))


def check_options(described: Mapping[int, Mapping[str, str]]) -> None:
    """Refuse options that differ between ranks, naming the first; ``described`` has their texts, keyed by rank."""
    (number, first), *others = described.items()
    for rank, theirs in others:
        for name in {**first, **theirs}:
            here, there = first.get(name, "not given"), theirs.get(name, "not given")
            if here != there:
                raise RuntimeError(
                    f"ranks were given different options: {name} is {here} on rank {number}, {there} on rank {rank}; "
                    "pass the same on every rank"
                )


def synchronise(buckets: Sequence[ParameterBucket], communicator: Communicator, how: str) -> None:
    """Make parameters equal on all ranks (``broadcast``), or refuse if they are not (``check``)."""
    if how == "broadcast":
        for bucket in buckets:
            communicator.broadcast_(bucket.values)
    else:
        check_replicas(buckets, communicator, SYNC_CHECK)


def check_replicas(buckets: Sequence[ParameterBucket], communicator: Communicator, comparison: Comparison) -> None:
    """Refuse parameters whose bits differ between ranks, naming them."""
    check_equal(
        [(member.name, member.value) for bucket in buckets for member in bucket.members], communicator, comparison
    )


def check_equal(named: Iterable[tuple[str, Tensor]], communicator: Communicator, comparison: Comparison) -> None:
    """Refuse tensors whose bits differ between ranks, naming them."""
    ranks, digests = communicator.ranks, [[name, digest(tensor)] for name, tensor in named]
    gathered = communicator.gather_json(digests)
    different = [
        f"{name} (rank {rank})"
        for rank, other in zip(ranks, gathered)
        for (name, mine), (_, theirs) in zip(gathered[0], other)
        if mine != theirs
    ]
    if different:
        raise RuntimeError(
            f"{comparison.when}: parameters differ from rank {ranks[0]}'s: {listed(different, 8)}; {comparison.advice}"
        )


def check_same_entries(entries: Mapping[str, Sequence[str]], what: str, communicator: Communicator) -> None:
    """Refuse DTensors whose states have other entries on other ranks: nobody could put their parts together.

    Collective.

    Args:
        entries: the names of the entries of every DTensor's state, by its name; no DTensors, no message.
        what: what the error begins with.
    """
    if not entries:
        return
    described = hashlib.sha256(json.dumps(list(entries.values())).encode()).hexdigest()
    if len(set(communicator.gather_json(described))) == 1:
        return
    ranks, gathered = communicator.ranks, communicator.gather_json(dict(entries))
    for rank, theirs in zip(ranks, gathered):
        for name, here in gathered[0].items():
            there = theirs.get(name, [])
            if here != there:
                mine, its = (listed(each, 4) or "nothing" for each in (here, there))
                raise RuntimeError(
                    f"{what}: the state of {name} has {mine} on rank {ranks[0]}, {its} on rank {rank}. A DTensor must "
                    "have a gradient on all ranks or on none; start all ranks again from the newest checkpoint, with "
                    "debug=True, which finds the step"
                )


def check_step(found: Sequence[Sequence[float]], ranks: Sequence[int]) -> None:
    """Refuse ranks that are in different optimizers' steps, in different steps, or have given up different batches.

    ``found`` has for each rank the numbers of its optimizer, of its step, and of batches that it has given up.
    """
    number, step, given_up = found[0]
    for rank, (its_number, its_step, its_given_up) in zip(ranks, found, strict=True):
        if its_number == number and its_given_up != given_up:
            raise RuntimeError(
                f"rank {ranks[0]} has given up {given_up:.0f} batches that had begun to be reduced, rank {rank} "
                f"{its_given_up:.0f}: a rank without a gradient does not know of those of others; after clipping call "
                "zero_grad() of the optimizer instead of the model's; where backward reduces step instead of skipping "
                "such a batch, or build the optimizer with overlap=False"
            )
        if (its_number, its_step) != (number, step):
            raise RuntimeError(
                f"ranks are not in the same step: rank {ranks[0]} in number {step:.0f} of optimizer {number:.0f}, "
                f"rank {rank} in number {its_step:.0f} of optimizer {its_number:.0f}; every rank builds and steps its "
                "optimizers in the same order, and leaves out no step that others make"
            )


def digest(tensor: Tensor) -> str:
    """SHA-256 of the elements' bits, in memory order."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)) if is_dense(tensor) else tensor.detach().reshape(-1)
    on_host = flat.cpu().contiguous()
    # torch comes without numpy, too; ``ctypes.string_at`` takes sizes below 2 GiB
    return hashlib.sha256((ctypes.c_char * on_host.nbytes).from_address(on_host.data_ptr())).hexdigest()


def _brief(described: list[Any] | None, other: list[Any] | None) -> str:
    """A parameter, as ``ParameterSpec.describe()`` gives it, as text; details only where ``other`` differs in them."""
    if described is None:
        return "no such parameter"
    name, shape, stride, dtype, route, group, device, matrices, sharding, *block = described
    shown = [route, f"group {group}", *(["state_dtype='int8'"] if block else [])]
    if other is not None:
        _, their_shape, their_stride, _, _, _, their_device, their_matrices, their_sharding, *_ = other
        if stride != their_stride and shape == their_shape:
            shown.append(f"strides {tuple(stride)}")
        if device != their_device:
            shown.append(f"on {device}")
        if matrices != their_matrices:
            shown.append(f"read as {listed([str(tuple(each)) for each in matrices], 4) or 'it is'}")
        if sharding != their_sharding:
            shown.append(f"a DTensor, {sharding}" if sharding else "no DTensor")
    return f"{name} {tuple(shape)} {dtype.removeprefix('torch.')} ({', '.join(shown)})"
