"""From the files of a checkpoint into model and optimizer, at any number of ranks.

    1. survey     which rank reads which file, and whether sizes and, unless told otherwise, digests are right
    2. read       what is in the files, and how it differs from model and optimizer
    3. exchange   saved pieces go to the ranks that own them now, a batch at a time

Whatever 1 and 2 find wrong on any rank is one error on every rank, before 3 writes anything.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optim_dist._checkpoint import background
from optim_dist._checkpoint import manifest as manifests
from optim_dist._checkpoint.codes import decode_where_cut
from optim_dist._checkpoint.contents import compare_groups, compare_moments, load_groups, named_specs, pieces_of
from optim_dist._checkpoint.faults import Problems, raised_together
from optim_dist._checkpoint.manifest import CheckpointError, Manifest, SavedParameter
from optim_dist._checkpoint.reshard import ROOM, exchange, in_batches, streams
from optim_dist._checkpoint.rest import Kinds, compare_rest, load_rest, misplaced, rest_of_model, without_copies
from optim_dist._checkpoint.restoring import Restoring
from optim_dist._checkpoint.surveying import Survey, survey
from optim_dist._optimizers.base import DistOptimizer
from optim_dist._plain_names import plain_names
from optim_dist._reduction.collectives import Communicator
from optim_dist.plan import ParameterSpec

# Files of a checkpoint that a rank checks at the same time, a thread each.
NUM_VERIFIED = 4


@dataclass(frozen=True)
class Contents:
    """What this rank has read, and what it is to be loaded into.

    Attributes:
        common: the content of the common file.
        saved_rest: the saved buffers and frozen parameters, under plain names.
        files: the contents of the rank files that this rank reads, as ``codes.PartsByFile``.
        saved: all saved parameters, as they come out of the files.
        rest: the model's own buffers and frozen parameters, under the names that its state has.
        specs: the parameters of this run, under plain names.
        names: plain names of this run, keyed by the model's.
    """

    common: Mapping[str, Any]
    saved_rest: Mapping[str, Any]
    files: Mapping[int, dict[str, dict[str, Any]]]
    saved: Sequence[SavedParameter]
    rest: Mapping[str, Any]
    specs: Sequence[ParameterSpec]
    names: Mapping[str, str]


def load(folder: Path, model: nn.Module | None, opt: DistOptimizer, *, verify: bool) -> Any:
    """Load a checkpoint into an optimizer that is open, and return its ``extra``; collective.

    Args:
        verify: whether this rank compares digests of the files that it reads.

    Raises:
        CheckpointError: on every rank, before anything is written, with everything that does not fit.
    """
    communicator = opt.communicator
    background.wait_for_last()  # which may be the one to load
    opt.wait()  # gathers in flight would overwrite what is loaded
    problems = Problems(communicator.rank)
    with problems.noted():
        opt.check_places()
    surveyed = _surveyed(folder, communicator, problems, verify)
    contents: Contents | None = None
    with problems.noted():
        contents = _read_all(folder, surveyed, model, opt, problems)
    problems.raise_with(communicator.gather_json(problems.found), folder)
    assert contents is not None, "to have none is a problem"
    with opt.begun_together("checkpoint.load()"), torch.no_grad():
        load_groups(opt, contents.common["groups"])
        _exchange(contents, surveyed.readers, opt)
        # no rank goes on before all have loaded
        with raised_together(communicator, f"the rest of the model was not loaded from {folder}"):
            # checkpoints up to version 0.12.14 have no forms
            load_rest(model, contents.rest, contents.saved_rest, contents.names, contents.common.get("forms", {}))
    return contents.common["extra"]


def _surveyed(folder: Path, communicator: Communicator, problems: Problems, verify: bool) -> Survey:
    """Which rank reads which file, none of which is damaged unless ``problems`` say so; collective."""
    surveyed = survey(folder, communicator)
    problems.found += surveyed.problems
    damaged: dict[str, list[str]] = {}
    with problems.noted():
        if surveyed.manifest is not None:
            damaged = _damaged(folder, surveyed.read_by(communicator.rank), surveyed.manifest, verify)
    surveyed, lost = surveyed.without_damaged(folder, damaged, communicator, verify)
    problems.found += lost
    return surveyed


def _damaged(folder: Path, names: Sequence[str], manifest: Manifest, verify: bool) -> dict[str, list[str]]:
    """What is wrong with damaged files, keyed by name."""
    with ThreadPoolExecutor(NUM_VERIFIED) as pool:
        found = pool.map(lambda name: manifests.verify_file(folder, name, manifest, with_digest=verify), names)
        return {name: faults for name, faults in zip(names, found) if faults}


def _read_all(
    folder: Path, surveyed: Survey, model: nn.Module | None, opt: DistOptimizer, problems: Problems
) -> Contents | None:
    """Read this rank's files, and add to ``problems`` what does not fit; None if there is no manifest. Collective."""
    communicator, manifest, found = opt.communicator, surveyed.manifest, problems.found
    sent = surveyed.common_file(folder, communicator)
    (rest, aliases, elsewhere, _), specs = rest_of_model(model, opt), named_specs(opt, model)
    if manifest is None:
        return None
    names = plain_names([*(spec.name for spec in specs), *rest])
    specs = [replace(spec, name=names[spec.name]) for spec in specs]
    plain_rest = {names[name]: value for name, value in rest.items()}
    common: dict[str, Any] = _read(folder, manifests.COMMON, sent=sent) if surveyed.common_readers else {}
    saved_rest = without_copies(common.get("model", {}), manifest, aliases, specs)
    saved_names = plain_names([*(entry.name for entry in manifest.parameters), *saved_rest])
    manifest = manifest.renamed(saved_names)
    saved_rest = {saved_names[name]: value for name, value in saved_rest.items()}
    differing = misplaced(
        Kinds({entry.name for entry in manifest.parameters}, saved_rest.keys(), {*common.get("elsewhere", ())}),
        Kinds({spec.name for spec in specs}, plain_rest.keys(), {*plain_names(elsewhere).values()}),
    )
    found += differing.values()
    found += manifests.compare(manifest, specs, but=differing)
    if surveyed.common_readers:
        found += compare_rest(saved_rest, plain_rest, but=differing)
        # checkpoints of version 0.3 have no members
        members = {saved_names.get(name, name): group for name, group in common.get("members", {}).items()}
        found += compare_groups(common["groups"], members, opt, specs)
    if not found:
        found += compare_moments(manifest.parameters, opt, specs)
    files: dict[int, dict[str, dict[str, Any]]] = {}
    for saved_rank in (number for number, reader in enumerate(surveyed.readers) if reader == communicator.rank):
        # mapped, not read into memory, which may have room only for this rank's part
        content = _read(folder, manifests.rank_file(saved_rank), mmap=True)
        files[saved_rank] = {saved_names.get(name, name): parts for name, parts in content.items()}
        found += _compare_file(files[saved_rank], saved_rank, manifest)
    saved = [] if found else decode_where_cut(manifest.parameters, specs, files)
    return Contents(common, saved_rest, files, saved, rest, specs, names)


def _read(folder: Path, name: str, *, sent: io.BytesIO | None = None, mmap: bool = False) -> Any:
    """The content of a file, or of ``sent`` if another rank has sent it; with ``mmap`` it is not read into memory."""
    try:
        return torch.load(sent or folder / name, map_location="cpu", weights_only=True, mmap=mmap)
    except (OSError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(folder, [f"{name}: {error}"]) from error


def _compare_file(content: dict[str, dict[str, Tensor]], saved_rank: int, manifest: Manifest) -> list[str]:
    """Where tensors in a rank's file have another shape or dtype than the manifest says; empty if none has."""
    problems = []
    for stream in streams(manifest.parameters, [0] * manifest.world_size):
        for name, part in stream.own("before", 0):
            if part.file != saved_rank:
                continue
            tensor = content.get(name, {}).get(stream.key)
            found = None if tensor is None else (tuple(tensor.shape), tensor.dtype)
            expected = ((part.stop - part.start,), stream.dtype)
            if found != expected:
                problems.append(f"{manifests.rank_file(saved_rank)}: {name}.{stream.key} is {found}, not {expected}")
    return problems


def _exchange(contents: Contents, readers: Sequence[int], opt: DistOptimizer) -> None:
    """Bring parameters and their state to the ranks that own them now; ``readers`` of each saved rank's file."""
    index = {spec.name: place for place, spec in enumerate(contents.specs)}
    restoring = Restoring(opt, contents.specs, {entry.name: entry for entry in contents.saved})
    for batch in in_batches(streams(contents.saved, readers, lambda name: pieces_of(opt, index[name])), ROOM):
        restoring.put(exchange(batch, lambda file, name, key: contents.files[file][name][key], opt.communicator))
        restoring.end_batch(batch)
    restoring.finish()
