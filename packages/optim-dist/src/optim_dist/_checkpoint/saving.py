"""The half of a save before anything is written: ranks agree, and each takes its snapshot of the training.

With ``async_`` the snapshot is a copy, and the other half, ``writing.write``, runs in a thread; else it follows at
once.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from optim_dist._checkpoint import background
from optim_dist._checkpoint.background import Saving
from optim_dist._checkpoint.contents import (
    add_rows,
    describe_state,
    group_members,
    group_options,
    named_specs,
    own_parts,
    pieces_of,
)
from optim_dist._checkpoint.faults import raised_together
from optim_dist._checkpoint.removal import Choice
from optim_dist._checkpoint.reshard import VALUE
from optim_dist._checkpoint.rest import rest_of_model, whole_rest
from optim_dist._checkpoint.staging import Staging, on_host
from optim_dist._checkpoint.writing import LATEST, Destination, Snapshot, write
from optim_dist._optimizers.agreement import check_options, check_same_entries
from optim_dist._optimizers.base import DistOptimizer
from optim_dist._plain_names import plain_names, plain_path
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import ParameterSpec


def save(
    folder: Path,
    model: nn.Module | None,
    opt: DistOptimizer,
    extra: object,
    *,
    async_: bool,
    old: Choice | None = None,
    copies: int = 1,
    may_be_fewer: bool = False,
    options: Mapping[str, Any],
    faults: Sequence[str] = (),
) -> Saving | None:
    """Save a checkpoint, or with ``async_`` begin to; collective.

    Args:
        old: chooses the checkpoints beside it that are removed once it is complete.
        copies: how many folders, which ranks do not share, are to have each rank's file.
        may_be_fewer: if there are fewer such folders, as many copies will do.
        options: names and values that have to be the same on all ranks.
        faults: what is wrong with the options on this rank.
    """
    communicator = opt.communicator
    communicator.check_ranks()
    destination = _agreed(Destination(folder, "", old, copies, may_be_fewer), opt, options, faults)
    opt.wait()
    staging = Staging()
    to_host = staging.copy if async_ else on_host
    with raised_together(communicator, destination.failed):
        (rest, _, elsewhere, forms), specs = rest_of_model(model, opt), named_specs(opt, model)
        names = plain_names([*(spec.name for spec in specs), *rest])
        specs = [replace(spec, name=names[spec.name]) for spec in specs]
        rest = {names[name]: value for name, value in rest.items()}
        # takes memory, of which one rank may have too little
        parts, cut = own_parts(opt, specs, to_host)
    _check_names(specs, rest, communicator, destination.failed)
    entries: dict[str, list[str]] = {}
    for part in cut:
        entries.setdefault(part.name, []).extend([] if part.key == VALUE else [part.key])
    check_same_entries(entries, destination.failed, communicator)
    is_first = communicator.rank == 0
    # collective if there are DTensors, so not inside ``raised_together``
    with opt.begun_together("checkpoint.save()"):
        late = add_rows(parts, cut, opt, specs, to_host)
        common: dict[str, Any] = {"model": whole_rest(rest, opt)}
    with raised_together(communicator, destination.failed) as problems:
        problems += late.found
        pieces = [pieces_of(opt, index) for index in range(len(specs))]
        described = describe_state(opt, specs, pieces)
        if is_first:
            common |= {"groups": group_options(opt), "members": group_members(specs), "extra": extra}
            common["elsewhere"] = sorted(plain_names(elsewhere).values())
            # a wrapper comes before the module inside it, whose form is the one to keep
            common["forms"] = {plain_path(path): form for path, form in forms.items()}
            if async_:
                common = staging.copy_common(common)
        staging.finish()
    snapshot = Snapshot(
        communicator.rank,
        communicator.world_size,
        opt.plan.hash,
        specs,
        pieces,
        parts,
        described,
        common if is_first else {},
    )
    if not async_:
        write(snapshot, destination, communicator)
        return None
    on_cpu = background.on_cpu(communicator)
    return background.start(folder, lambda: write(snapshot, destination, on_cpu))


def _agreed(wanted: Destination, opt: DistOptimizer, options: Mapping[str, Any], faults: Sequence[str]) -> Destination:
    """Check that nothing is in the way of a save; return one destination for all ranks."""
    communicator, folder, failed = opt.communicator, wanted.folder, wanted.failed
    is_between_steps = opt.agree_between_steps()
    with raised_together(communicator, failed) as problems:
        problems += faults
        if not is_between_steps:
            problems.append("gradients have arrived since the last step(); save after step()")
        if earlier := background.settle():
            problems.append(f"an earlier one was not, for which nobody has waited since: {earlier}")
        if background.has_lost_ranks(communicator):
            problems.append("an earlier save has lost other ranks; start all of them again")
        if folder.exists() or folder.is_symlink():
            problems.append(f"{folder} exists; every checkpoint gets a folder of its own")
        pointer = folder.parent / LATEST
        if folder == pointer or (pointer.is_dir() and not pointer.is_symlink()):
            problems.append(
                f"{pointer} has to be the file that says which checkpoint is newest, not a folder; rename it"
            )
        opt.check_places()
    described = {name: str(value) for name, value in options.items()}
    nonces, ends, given = zip(*communicator.gather_json([uuid.uuid4().hex, folder.name, described]))
    if len(set(ends)) > 1:
        raise RuntimeError(f"{failed}: ranks were given different paths, that end in {', '.join(ends)}")
    check_options(dict(zip(communicator.ranks, given)))
    # absolute, since the working directory may change while a thread writes
    return replace(wanted, folder=folder.absolute(), nonce=nonces[0])


def _check_names(
    specs: Iterable[ParameterSpec], rest: Mapping[str, Any], communicator: Communicator, failed: str
) -> None:
    """Refuse ranks that would write parameters under different names, or put other DTensors of the rest together."""
    cut = {name: value for name, value in rest.items() if isinstance(value, DTensor)}
    names = [spec.name for spec in specs]
    # those of fewer ranks may be each rank's own, as frozen experts are
    names += [f"{name} {x.placements}" for name, x in cut.items() if x.device_mesh.size() == communicator.world_size]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
    if len(set(communicator.gather_json(digest))) > 1:
        raise RuntimeError(f"{failed}: {_different_names(communicator.gather_json(names))}")


def _different_names(found: Sequence[Sequence[str]]) -> str:
    """The first tensor that ranks name differently, and which rank does."""
    for rank, names in enumerate(found):
        for mine, theirs in zip_longest(found[0], names, fillvalue="nothing"):
            if mine != theirs:
                return f"{mine} of rank 0 is {theirs} on rank {rank}; give every rank the same model, or none"
    raise AssertionError("names differ")
