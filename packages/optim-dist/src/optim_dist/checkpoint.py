"""Checkpoints that load at any number of ranks, and of which every byte is checked before any is used.

    save   each rank writes what it owns, the first one also the rest and a manifest. All goes into a hidden folder
           that gets its name only when everything is on the disk, so that a crash leaves the previous checkpoint
           whole; the next save to the same path removes what a killed one has left. With ``async_=True`` everything
           is copied, and written while training goes on. Where hosts do not share a disk each has what its ranks
           wrote, and with ``copies=n`` also what the ranks of n - 1 other hosts wrote
    load   first names, shapes, dtypes, routes, sizes and, with ``verify``, digests are checked, with all problems in
           one error on every rank; then each file is read by one rank that has it, or another copy if that is damaged;
           then, if ranks or plan differ, ``optim_redist`` exchanges the state, a little at a time

Nothing is unpickled beyond tensors and plain values (``weights_only=True``).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from torch import nn

from optim_dist._checkpoint import loading, nanochat
from optim_dist._checkpoint import manifest as manifests
from optim_dist._checkpoint import saving as saves
from optim_dist._checkpoint.background import Saving
from optim_dist._checkpoint.faults import Problems
from optim_dist._checkpoint.manifest import CheckpointError
from optim_dist._checkpoint.removal import all_but_the_newest
from optim_dist._checkpoint.writing import LATEST
from optim_dist._optimizers.agreement import refused_together
from optim_dist._optimizers.base import DistOptimizer
from optim_kernels.states import out_of_inference_mode

__all__ = ["CheckpointError", "Saving", "from_nanochat", "latest", "load", "load_nanochat", "save"]

Path_ = str | os.PathLike[str]

Found = TypeVar("Found")

# Errors of the system for names behind which there is no file.
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


@overload
def save(
    path: Path_,
    model: nn.Module | None,
    opt: DistOptimizer,
    extra: object = ...,
    *,
    async_: Literal[False] = ...,
    keep: int | None = ...,
    copies: int = ...,
) -> Path: ...


@overload
def save(
    path: Path_,
    model: nn.Module | None,
    opt: DistOptimizer,
    extra: object = ...,
    *,
    async_: Literal[True],
    keep: int | None = ...,
    copies: int = ...,
) -> Saving: ...


@overload
def save(
    path: Path_,
    model: nn.Module | None,
    opt: DistOptimizer,
    extra: object = ...,
    *,
    async_: bool,
    keep: int | None = ...,
    copies: int = ...,
) -> Path | Saving: ...


def save(
    path: Path_,
    model: nn.Module | None,
    opt: DistOptimizer,
    extra: object = None,
    *,
    async_: bool = False,
    keep: int | None = None,
    copies: int = 1,
) -> Path | Saving:
    """Write model, optimizer and ``extra`` into the new folder ``path``; collective.

    Args:
        model: gives parameters their names, without wrappers of ``torch.compile`` and ``checkpoint_wrapper``, and its
            buffers and frozen parameters are saved; None for neither.
        extra: plain values and tensors, of the first rank.
        async_: return a ``Saving`` once everything is copied to host memory, and write in the background, with training
            going on. The next ``save`` or ``load`` waits for it.
        keep: how many of the newest checkpoints in the directory of ``path`` stay, this one included, once it is
            complete; None keeps all. Other folders stay in any case.
        copies: how many hosts have each rank's file, where ``path`` is a folder of each host's own: with 2 the
            checkpoint stays whole if any one of them is lost.

    Raises:
        RuntimeError: on every rank: if ``path`` exists or its last part differs between ranks, if ranks give models
            with different names, if gradients in buckets are being accumulated or reduced, if ``load`` could not read
            ``extra``, a group or the rest of the model again, if a rank could not write, if there are fewer folders
            than ``copies``, or if an earlier save in the background has failed and nobody has waited for it. With
            ``async_`` the ``Saving`` says what could not be written.
    """
    folder = _checked(path, model, opt, "nothing was saved")
    faults = []
    if keep is not None and (type(keep) is not int or keep < 1):
        faults.append(f"keep must be at least 1, or None to keep all checkpoints, got {keep!r}")
    if not isinstance(async_, bool):
        faults.append(f"async_ must be True or False, got {async_!r}")
    if type(copies) is not int or copies < 1:
        faults.append(f"copies must be at least 1, got {copies!r}")
    old = None if keep is None else all_but_the_newest(keep)
    options = {"async_": async_, "keep": keep, "copies": copies}
    saving = saves.save(
        folder, model, opt, extra, async_=async_, old=old, copies=copies, options=options, faults=faults
    )
    return folder if saving is None else saving


@out_of_inference_mode
def load(path: Path_, model: nn.Module | None, opt: DistOptimizer, *, verify: bool = True) -> Any:
    """Bring model and optimizer to the saved state, whatever the number of ranks; returns ``extra``. Collective.

    Each rank looks into its own ``path``: every file has to be in one of them, and a rank need not have any.

    Args:
        verify: False trusts the disk: files are not read through for their digests before their contents are taken,
            so that changed bytes go unnoticed. Names, sizes and all that the manifest says are checked all the same.

    Raises:
        CheckpointError: on every rank, before anything is written, with everything that does not fit.
    """
    folder = _checked(path, model, opt, "nothing was loaded", verify)
    return loading.load(folder, model, opt, verify=verify)


def from_nanochat(
    files: Iterable[Path_], groups: Sequence[Mapping[str, Any]], *, index: int | None = None
) -> dict[str, Any]:
    """nanochat's optimizer files, one a rank, as the state of one process, for ``load_full_state_dict``.

    Args:
        files: of all ranks of one save, in any order if names have the rank (``optim_000100_rank3.pt``), else in order
            of ranks.
        groups: ``param_groups`` of the optimizer that is to load the state, in the order in which nanochat lists them.
        index: which optimizer, where files list several, as files from before February 2026 do.

    Raises:
        CheckpointError: with everything that does not fit.
    """
    ordered = nanochat.in_rank_order(nanochat.paths_of(files))
    return nanochat.merged(nanochat.read(ordered, index), groups, ordered[0].parent)


def load_nanochat(files: Iterable[Path_], opt: DistOptimizer, *, index: int | None = None) -> None:
    """Bring an optimizer to the state in nanochat's files, whatever the numbers of ranks then and now; collective.

    As with ``load_state_dict`` groups come in the saved order and take over hyperparameters. Parameters stay as they
    are: load nanochat's model file into the model before. Arguments are those of ``from_nanochat``.

    Raises:
        CheckpointError: on every rank, before anything has changed, with everything that does not fit.
    """
    opt.check_open()
    opt.communicator.check_ranks()
    given: list[Path] = []
    views = {id(entry.parameter): entry.view for entry in opt.entries}
    groups = [{**group, "views": [views.get(id(p)) for p in group["params"]]} for group in opt.param_groups]
    state: dict[str, Any] = {}
    problems = Problems(opt.communicator.rank)
    with problems.noted():
        given = nanochat.paths_of(files)
        state = from_nanochat(given, groups, index=index)
        try:
            opt.own_part(state)
        except ValueError as error:
            raise CheckpointError(given[0].parent, [str(error)]) from error
    found, names = zip(*opt.communicator.gather_json([problems.found, sorted(file.name for file in given)]))
    if any(theirs != names[0] for theirs in names):
        found += ([f"ranks were given different files: {' and '.join(map(str, names))}"],)
    problems.raise_with(found, given[0].parent if given else Path())
    with opt.begun_together("checkpoint.load_nanochat()"):
        opt.load_full_state_dict(state)


def latest(directory: Path_) -> Path | None:
    """The newest complete checkpoint in ``directory``: the one that ``save`` finished last; None if there is none.

    A host with a disk of its own knows only its own checkpoints: let one rank choose the name for all.

    Raises:
        OSError: if a disk does not answer: there may be a checkpoint all the same.
    """
    folder = Path(directory)
    pointer = folder / LATEST
    named = _if_there(lambda: folder / pointer.read_text(errors="replace").strip())
    if named is None or _written_at(named / manifests.MANIFEST) is None:
        # the pointer is gone or names a checkpoint that was removed: the manifests' own times decide
        times = _times(folder, manifests.MANIFEST)
    else:
        # a save that was killed once its folder had its name has left the next pointer in there
        times = {named: _written_at(pointer) or 0, **_times(folder, LATEST)}
    return max(times, key=lambda other: times[other], default=None)


def _checked(path: object, model: object, opt: object, what: str, verify: object = True) -> Path:
    """``path``, unless an argument is of a wrong type on any rank, which is an error on all. Collective.

    Args:
        what: what the other ranks' error begins with.
    """
    if not isinstance(opt, DistOptimizer):  # nor has it other ranks
        _path_of(path, model, verify)
        raise TypeError(
            f"opt must be an optimizer of optim_dist, got {type(opt).__name__}; pass what a framework has wrapped, and "
            "save others with torch.distributed.checkpoint"
        )
    opt.check_open()
    opt.communicator.check_ranks()
    with refused_together(what, opt.communicator):
        return _path_of(path, model, verify)


def _path_of(path: object, model: object, verify: object) -> Path:
    if path is None:
        # on one rank alone, say, whose host has a disk of its own and no checkpoint on it
        raise TypeError("path must be that of a checkpoint, got None, which latest() gives where there is none yet")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be that of a checkpoint, got {path!r}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module, or None, got {type(model).__name__}; pass path, model, optimizer")
    if not isinstance(verify, bool):
        raise TypeError(f"verify must be True or False, got {verify!r}")
    return Path(path)


def _times(folder: Path, file: str) -> dict[Path, int]:
    """When ``file`` was written in each complete checkpoint in ``folder`` that has it, in ns."""
    others = _if_there(lambda: [other for other in folder.iterdir() if not other.name.startswith(".")]) or []
    times: dict[Path, int] = {}
    for other in others:
        with suppress(PermissionError):  # the folder is somebody else's
            is_complete = _written_at(other / manifests.MANIFEST) is not None
            if is_complete and (written := _written_at(other / file)) is not None:
                times[other] = written
    return times


def _written_at(file: Path) -> int | None:
    """When a file was written, in ns; None if there is none."""
    return _if_there(lambda: file.stat().st_mtime_ns)


def _if_there(look: Callable[[], Found]) -> Found | None:
    """What ``look`` finds; None if there is no such file.

    ``is_file`` would not do: in Python 3.14 it is False also for files that cannot be looked at.
    """
    try:
        return look()
    except ValueError:  # for a name that no file can have
        return None
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise
