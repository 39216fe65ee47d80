"""Checkpoints that load at any number of ranks, and of which every byte is checked before any is used.

    save   each rank writes what it owns, the first one the rest and a manifest; all into a hidden folder that gets its
           name only when everything is on the disk, so that a crash leaves the previous checkpoint whole; what a
           killed save leaves is removed by the next one to the same path
    load   names, shapes, dtypes, routes, sizes and digests first, all problems in one error on every rank; then the
           files, each read by one rank; then, if ranks or plan differ, one exchange by ``optim_redist``

Nothing is unpickled beyond tensors and plain values (``weights_only=True``).
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import pickle
import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optim_dist._checkpoint import manifest as manifests
from optim_dist._checkpoint.codes import with_numbers
from optim_dist._checkpoint.common import packed, packed_readable
from optim_dist._checkpoint.contents import (
    compare_groups,
    compare_rest,
    describe_state,
    group_members,
    group_options,
    load_groups,
    load_rest,
    named_specs,
    own_parts,
    pieces_of,
    rest_of_model,
    restore,
    saved_parameters,
    whole_rest,
)
from optim_dist._checkpoint.faults import described, raised_together
from optim_dist._checkpoint.manifest import CheckpointError, Manifest, SavedParameter, read_manifest
from optim_dist._checkpoint.reshard import exchange, streams
from optim_dist._optimizers.base import DistOptimizer
from optim_dist.plan import ParameterSpec

__all__ = ["CheckpointError", "latest", "load", "save"]

LATEST = "latest"
NONCE = 12  # hexadecimal digits in the name of a temporary folder

Path_ = str | os.PathLike[str]


def save(path: Path_, model: nn.Module | None, opt: DistOptimizer, extra: Any = None) -> Path:
    """Write model, optimizer and ``extra`` into the new folder ``path``; collective.

    Args:
        model: gives parameters their names, and its buffers and frozen parameters are saved; None for neither.
        extra: plain values and tensors, of the first rank.

    Raises:
        RuntimeError: on every rank: if ``path`` exists or is not the same folder for all, if ranks give models with
            other names, if gradients in buckets are being accumulated or reduced, if ``load`` could not read ``extra``,
            a group or the rest of the model again, or if a rank could not write.
    """
    folder, communicator = Path(path), opt.communicator
    failed = f"checkpoint {folder} was not saved"
    is_between_steps = opt.is_between_steps
    with raised_together(communicator, failed) as problems:
        if not is_between_steps:
            problems.append("gradients have arrived since the last step(); save after step()")
        if folder.exists():
            problems.append(f"{folder} exists; every checkpoint gets a folder of its own")
        # before this save has a temporary folder itself
        if communicator.rank == 0:
            for left in _left_behind(folder):
                shutil.rmtree(left, ignore_errors=True)  # in nobody's way if it cannot be removed
    opt.wait()
    rest_here, specs = rest_of_model(model, opt), named_specs(opt, model)
    nonces, ends, names = zip(*communicator.gather_json([uuid.uuid4().hex, folder.name, _digest_of_names(specs)]))
    if len(set(ends)) > 1:
        raise RuntimeError(f"{failed}: ranks were given different paths, that end in {', '.join(ends)}")
    if len(set(names)) > 1:
        raise RuntimeError(f"{failed}: {_different_names(communicator.gather_json([spec.name for spec in specs]))}")
    temporary = folder.with_name(f".{folder.name}.{nonces[0][:NONCE]}.tmp")
    file = manifests.rank_file(communicator.rank)
    written: dict[str, list[Any]] = {}
    # collective where there are DTensors, so outside of what may fail on one rank
    mine, rest = own_parts(opt, specs), whole_rest(rest_here, opt)
    try:
        with raised_together(communicator, failed):
            temporary.mkdir(parents=True, exist_ok=True)
            written[file] = _write(temporary / file, packed(mine))
            if communicator.rank == 0:
                groups = {"groups": group_options(opt), "members": group_members(specs)}
                common = {**groups, "model": rest, "extra": extra}
                written[manifests.COMMON] = _write(temporary / manifests.COMMON, packed_readable(common))
        every = communicator.gather_json([written, describe_state(opt, specs)])
        with raised_together(communicator, failed):
            if communicator.rank == 0:
                files = {name: entry for found, _ in every for name, entry in found.items()}
                _check_shared(temporary, files)
                parameters = saved_parameters(opt, specs, [state for _, state in every])
                Manifest(communicator.world_size, opt.plan.hash, files, parameters).write(temporary)
                _finish(temporary, folder)
    finally:
        # by the rank that renames it, when all went well: another that gave up waiting would remove what gets its name
        if communicator.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def load(path: Path_, model: nn.Module | None, opt: DistOptimizer) -> Any:
    """Bring model and optimizer to the saved state, whatever the number of ranks; returns ``extra``. Collective.

    Raises:
        CheckpointError: on every rank, before anything is written, with everything that does not fit.
    """
    opt.check_open()
    folder, communicator = Path(path), opt.communicator
    rest, specs = rest_of_model(model, opt), named_specs(opt, model)
    problems: list[str] = []
    manifest: Manifest | None = None
    contents: dict[int, dict[str, dict[str, Tensor]]] = {}
    common: dict[str, Any] = {}
    saved: list[SavedParameter] = []
    identity: str | None = None
    cause: Exception | None = None
    opt.wait()  # what is on its way would overwrite what is loaded
    try:
        manifest, identity = read_manifest(folder), manifests.file_digest(folder / manifests.MANIFEST)
        problems += manifests.compare(manifest, specs)
        common = _read(folder, manifests.COMMON, manifest)
        problems += compare_rest(common["model"], rest)
        # those of version 0.3 have no members
        problems += compare_groups(common["groups"], common.get("members", {}), opt, specs)
        for saved_rank in range(communicator.rank, manifest.world_size, communicator.world_size):
            contents[saved_rank] = _read(folder, manifests.rank_file(saved_rank), manifest)
            problems += _compare_contents(contents[saved_rank], saved_rank, manifest)
        if not problems:
            saved = with_numbers(manifest.parameters, specs, contents)
    except Exception as error:  # of any kind: the other ranks wait for what this one has found
        problems += error.problems if isinstance(error, CheckpointError) else [described(communicator, error)]
        cause = error
    found, identities = zip(*communicator.gather_json([problems, identity]))
    if len({each for each in identities if each is not None}) > 1:
        folders = communicator.gather_json(str(folder))
        found += ([f"ranks read different checkpoints: {', '.join(folders)}; let one rank choose for all"],)
    if any(found):
        raise CheckpointError(folder, list(dict.fromkeys(problem for rank in found for problem in rank))) from cause
    assert manifest is not None, "reading it was no problem"
    index = {spec.name: place for place, spec in enumerate(specs)}
    with opt.begun_together("checkpoint.load()"), torch.no_grad():
        parts = exchange(
            streams(saved, communicator.world_size, lambda name: pieces_of(opt, index[name])),
            lambda file, name, key: contents[file][name][key],
            communicator.rank,
            communicator.ranks,
            communicator.group,
            communicator.device,
        )
        load_groups(opt, common["groups"])
        restore(opt, specs, {entry.name: entry for entry in saved}, parts)
        load_rest(model, rest, common["model"])
        communicator.barrier()  # nobody goes on with what others have not loaded
    return common["extra"]


def latest(directory: Path_) -> Path | None:
    """The newest complete checkpoint in ``directory``: the one that ``save`` finished last; None if there is none."""
    folder = Path(directory)
    pointer = folder / LATEST
    if pointer.is_file():
        named = folder / pointer.read_text(errors="replace").strip()
        if (named / manifests.MANIFEST).is_file():
            return named
    # the pointer is gone or names a checkpoint that was removed: the manifests' own times decide
    complete = [file for file in folder.glob(f"*/{manifests.MANIFEST}") if not file.parent.name.startswith(".")]
    return max(complete, key=lambda file: file.stat().st_mtime_ns).parent if complete else None


def _digest_of_names(specs: Iterable[ParameterSpec]) -> str:
    return hashlib.sha256("\n".join(spec.name for spec in specs).encode()).hexdigest()


def _different_names(found: Sequence[Sequence[str]]) -> str:
    """The first parameter that ranks name differently, and which rank does."""
    for rank, names in enumerate(found):
        for mine, theirs in zip(found[0], names, strict=True):
            if mine != theirs:
                return f"{mine} of rank 0 is {theirs} on rank {rank}; give every rank the same model, or none"
    raise AssertionError("names differ")


def _left_behind(folder: Path) -> list[Path]:
    """Temporary folders of saves to this path that were killed; those of other paths may still be written."""
    return list(folder.parent.glob(f".{glob.escape(folder.name)}.{'[0-9a-f]' * NONCE}.tmp"))


def _write(file: Path, content: io.BytesIO) -> list[Any]:
    """Write a file; its size and digest."""
    manifests.write_durably(file, content.getvalue())
    return [file.stat().st_size, manifests.file_digest(file)]


def _check_shared(folder: Path, files: Iterable[str]) -> None:
    """Refuse a folder in which the first rank does not see what the others have written."""
    elsewhere = [name for name in files if not (folder / name).is_file()]
    if elsewhere:
        raise FileNotFoundError(
            f"{', '.join(elsewhere)} of other ranks cannot be seen in {folder}; give every rank the same path, on a "
            "disk that all of them share"
        )


def _finish(temporary: Path, folder: Path) -> None:
    """Give a whole checkpoint its name, and make it the latest; what needs space on the disk comes before."""
    manifests.write_durably(temporary / LATEST, folder.name.encode())
    manifests.flush_folder(temporary)
    temporary.rename(folder)
    (folder / LATEST).replace(folder.parent / LATEST)
    manifests.flush_folder(folder.parent)


def _read(folder: Path, name: str, manifest: Manifest) -> Any:
    """A file's content, once its size and digest are right."""
    try:
        problems = manifests.verify_file(folder, name, manifest)
        content = None if problems else torch.load(folder / name, map_location="cpu", weights_only=True)
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(folder, [f"{name}: {error}"]) from error
    if problems:
        raise CheckpointError(folder, problems)
    return content


def _compare_contents(content: dict[str, dict[str, Tensor]], saved_rank: int, manifest: Manifest) -> list[str]:
    """Whether a rank's file holds what the manifest says, element for element."""
    problems = []
    for stream in streams(manifest.parameters, 1):
        for name, part in stream.own(stream.before, 0):
            if part.file != saved_rank:
                continue
            tensor = content.get(name, {}).get(stream.key)
            found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            expected = ((part.stop - part.start,), stream.dtype)
            if found != expected:
                problems.append(f"{manifests.rank_file(saved_rank)}: {name}.{stream.key} is {found}, not {expected}")
    return problems
