"""Checkpoints that load at any number of ranks, and of which every byte is checked before any is used.

    save   each rank writes what it owns, the first one the rest and a manifest; all into a hidden folder that gets its
           name only when everything is on the disk, so that a crash leaves the previous checkpoint whole
    load   names, shapes, dtypes, routes, sizes and digests first, all problems in one error on every rank; then the
           files, each read by one rank; then, if ranks or plan differ, one exchange by ``optim_redist``

Nothing is unpickled beyond tensors and plain values (``weights_only=True``).
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optim_dist import _manifest as manifests
from optim_dist._checkpoint_state import (
    compare_groups,
    compare_rest,
    describe_state,
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
from optim_dist._manifest import CheckpointError, Manifest, read_manifest
from optim_dist._optimizer import DistOptimizer
from optim_dist._reshard import exchange, streams

__all__ = ["CheckpointError", "latest", "load", "save"]

LATEST = "latest"

Path_ = str | os.PathLike[str]


def save(path: Path_, model: nn.Module | None, opt: DistOptimizer, extra: Any = None) -> Path:
    """Write model, optimizer and ``extra`` into the new folder ``path``; collective.

    Args:
        model: gives parameters their names, and its buffers and frozen parameters are saved; None for neither.
        extra: plain values and tensors, of the first rank.

    Raises:
        RuntimeError: on every rank: if ``path`` exists, if gradients are being accumulated or reduced, or if a rank
            could not write.
    """
    folder, communicator = Path(path), opt.communicator
    problems = [] if opt.is_between_steps else ["gradients have arrived since the last step(); save after step()"]
    if folder.exists():
        problems.append(f"{folder} exists; every checkpoint gets a folder of its own")
    communicator.raise_together(problems, f"checkpoint {folder} was not saved")
    opt.wait()
    temporary = folder.with_name(f".{folder.name}.{communicator.gather_json(uuid.uuid4().hex)[0][:12]}.tmp")
    specs = named_specs(opt, model)
    file = manifests.rank_file(communicator.rank)
    written: dict[str, list[Any]] = {}
    # collective where there are DTensors, so outside of what may fail on one rank
    mine, rest = own_parts(opt, specs), whole_rest(rest_of_model(model, opt), opt)
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        written[file] = _write(temporary / file, mine)
        if communicator.rank == 0:
            common = {"groups": group_options(opt), "model": rest, "extra": extra}
            written[manifests.COMMON] = _write(temporary / manifests.COMMON, common)
    except (OSError, RuntimeError, pickle.PicklingError) as error:
        problems.append(f"rank {communicator.rank} could not write: {error}")
    described = communicator.gather_json([written, describe_state(opt, specs)])
    try:
        communicator.raise_together(problems, f"checkpoint {folder} was not saved")
        if communicator.rank == 0:
            files = {name: entry for found, _ in described for name, entry in found.items()}
            parameters = saved_parameters(opt, specs, [state for _, state in described])
            Manifest(communicator.world_size, opt.plan.hash, files, parameters).write(temporary)
            manifests.flush_folder(temporary)
            temporary.rename(folder)
            pointer = temporary.with_suffix(".latest")
            manifests.write_durably(pointer, folder.name.encode())
            pointer.replace(folder.parent / LATEST)
            manifests.flush_folder(folder.parent)
    except RuntimeError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    communicator.barrier()
    return folder


def load(path: Path_, model: nn.Module | None, opt: DistOptimizer) -> Any:
    """Bring model and optimizer to the saved state, whatever the number of ranks; returns ``extra``. Collective.

    Raises:
        CheckpointError: on every rank, before anything is written, with everything that does not fit.
    """
    folder, communicator = Path(path), opt.communicator
    specs = named_specs(opt, model)
    rest = rest_of_model(model, opt)
    problems: list[str] = []
    manifest: Manifest | None = None
    contents: dict[int, dict[str, dict[str, Tensor]]] = {}
    common: dict[str, Any] = {}
    try:
        manifest = read_manifest(folder)
        problems += manifests.compare(manifest, specs)
        common = _read(folder, manifests.COMMON, manifest)
        problems += compare_rest(common["model"], rest)
        problems += compare_groups(common["groups"], opt)
        for saved_rank in range(communicator.rank, manifest.world_size, communicator.world_size):
            contents[saved_rank] = _read(folder, manifests.rank_file(saved_rank), manifest)
            problems += _compare_contents(contents[saved_rank], saved_rank, manifest)
    except CheckpointError as error:
        problems += error.problems
    found = communicator.gather_json(problems)
    if any(found):
        raise CheckpointError(folder, list(dict.fromkeys(problem for rank in found for problem in rank)))
    assert manifest is not None, "reading it was no problem"
    index = {spec.name: place for place, spec in enumerate(specs)}
    parts = exchange(
        streams(manifest.parameters, communicator.world_size, lambda name: pieces_of(opt, index[name])),
        lambda file, name, key: contents[file][name][key],
        communicator.rank,
        communicator.ranks,
        communicator.group,
        communicator.device,
    )
    with torch.no_grad():
        load_groups(opt, common["groups"])
        restore(opt, specs, {entry.name: entry for entry in manifest.parameters}, parts)
        load_rest(model, rest, common["model"])
    return common["extra"]


def latest(directory: Path_) -> Path | None:
    """The newest complete checkpoint in ``directory``: the one that ``save`` finished last; None if there is none."""
    folder = Path(directory)
    pointer = folder / LATEST
    if pointer.is_file():
        named = folder / pointer.read_text().strip()
        if (named / manifests.MANIFEST).is_file():
            return named
    # the pointer is gone or names a checkpoint that was removed: the manifests' own times decide
    complete = [file for file in folder.glob(f"*/{manifests.MANIFEST}") if not file.parent.name.startswith(".")]
    return max(complete, key=lambda file: file.stat().st_mtime_ns).parent if complete else None


def _write(file: Path, content: Any) -> list[Any]:
    """Save ``content``; its size and digest."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    manifests.write_durably(file, buffer.getvalue())
    return [file.stat().st_size, manifests.file_digest(file)]


def _read(folder: Path, name: str, manifest: Manifest) -> Any:
    """A file's content, once its size and digest are right."""
    problems = manifests.verify_file(folder, name, manifest)
    if problems:
        raise CheckpointError(folder, problems)
    try:
        return torch.load(folder / name, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(folder, [f"{name}: {error}"]) from error


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
