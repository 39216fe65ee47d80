"""What a checkpoint says about itself: a JSON file beside the tensors, and the checks that need nothing else.

    manifest.json      versions, ranks, plan, every parameter's pieces, state keys and scalars, size and digest of each
                       file below, and its own digest
    rank-00000.pt ...  what each rank owned: values and state, flat, in memory order
    common.pt          groups, the rest of the model's state (buffers, frozen parameters), the caller's ``extra``

A folder without a manifest is no checkpoint: the manifest is written last, before the folder gets its name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any, cast

from optim_dist._checkpoint.digesting import DigestingStream
from optim_dist.plan import ParameterSpec, dtype_name

FORMAT = "optim-dist.checkpoint/1"
CODED_FORMAT = "optim-dist.checkpoint/2"  # with 8-bit codes, which version 0.5 cannot read
MANIFEST = "manifest.json"
DIGEST = "sha256"  # of the rest of the manifest
COMMON = "common.pt"
ABSENT = f"there is no {MANIFEST}: no checkpoint, or one that was never finished"
NONCE = 12  # hexadecimal digits in the names of hidden folders


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged or of another model; the text lists everything that was found."""

    def __init__(self, path: Path, problems: Sequence[str]) -> None:
        super().__init__(f"checkpoint {path} was not loaded:\n  " + "\n  ".join(problems))
        self.path = path
        self.problems = list(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.problems)  # the inherited one would call the class with the text


@dataclass(frozen=True)
class SavedState:
    """One state tensor of a parameter: stored in the parameter's pieces, or whole at the first piece's rank.

    ``block``: for scales, how many elements of the parameter share one. ``format``: for 8-bit codes, what they stand
    for.
    """

    dtype: str
    shape: list[int]
    in_pieces: bool
    block: int = 1
    format: dict[str, int] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """As JSON; a tensor that is neither codes nor scales as it was before there were any."""
        described = asdict(self)
        if self.block == 1:
            del described["block"]
        if not self.format:
            del described["format"]
        return described


@dataclass(frozen=True)
class SavedParameter:
    """A parameter: ``pieces`` are ``[rank, start, stop]``, ``scalars`` its 0-dim state by key.

    Up to version 0.12.8 names had the wrappers that ``plain_names`` leaves out.
    """

    name: str
    shape: list[int]
    stride: list[int]
    dtype: str
    route: str
    pieces: list[list[int]]
    state: dict[str, SavedState]
    scalars: dict[str, float]


@dataclass(frozen=True)
class Manifest:
    """The whole description of a checkpoint."""

    world_size: int
    plan: str
    files: dict[str, list[Any]]  # name: [bytes, sha256]
    parameters: list[SavedParameter]

    def renamed(self, names: Mapping[str, str]) -> Manifest:
        """The same manifest with other names of parameters, keyed by those that they have."""
        parameters = [replace(entry, name=names[entry.name]) for entry in self.parameters]
        return replace(self, parameters=parameters)

    def write(self, folder: Path, torch_version: str) -> None:
        is_coded = any(state.format for entry in self.parameters for state in entry.state.values())
        described = {"format": CODED_FORMAT if is_coded else FORMAT, "torch": torch_version, **asdict(self)}
        for entry, saved in zip(described["parameters"], self.parameters, strict=True):
            entry["state"] = {key: state.describe() for key, state in saved.state.items()}
        described[DIGEST] = _digest(described)
        content = json.dumps(described).encode()
        write_durably(folder / MANIFEST, lambda stream: stream.write(content))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: if there is none, or it cannot be understood.
    """
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(folder, [ABSENT])
    return understood(folder, file.read_bytes())


def understood(folder: Path, content: bytes | bytearray) -> Manifest:
    """What the manifest's bytes say.

    Raises:
        CheckpointError: if they cannot be understood.
    """
    try:
        described = json.loads(content)
        if described["format"] not in (FORMAT, CODED_FORMAT):
            known = f"{FORMAT!r} and {CODED_FORMAT!r}"
            raise CheckpointError(folder, [f"its format is {described['format']!r}, this version reads {known}"])
        # manifests of version 0.3 have no digest
        expected = described.pop(DIGEST, None)
        altered = expected is not None and expected != _digest(described)
        if altered or not set(described) <= {"format", "torch", *(each.name for each in fields(Manifest))}:
            raise CheckpointError(folder, [f"{MANIFEST}: its contents were altered (SHA-256 differs)"])
        parameters = [
            SavedParameter(**{**entry, "state": {key: SavedState(**state) for key, state in entry["state"].items()}})
            for entry in described["parameters"]
        ]
        return Manifest(described["world_size"], described["plan"], described["files"], parameters)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(folder, [f"{MANIFEST} cannot be read: {error}"]) from error


def _digest(described: dict[str, Any]) -> str:
    """The digest of the content; it survives writing and reading, since JSON reads numbers back as they were."""
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def compare(manifest: Manifest, specs: Sequence[ParameterSpec], *, but: Container[str] = ()) -> list[str]:
    """How the saved parameters differ from those of this run, except for names in ``but``."""
    saved = {entry.name: entry for entry in manifest.parameters if entry.name not in but}
    specs = [spec for spec in specs if spec.name not in but]
    problems = [f"{spec.name}: not in the checkpoint" for spec in specs if spec.name not in saved]
    wanted = {spec.name for spec in specs}
    problems += [f"{name}: in the checkpoint, not in this model" for name in saved if name not in wanted]
    for spec in specs:
        entry = saved.get(spec.name)
        if entry is None:
            continue
        pairs = [
            ("shape", tuple(entry.shape), spec.shape),
            ("dtype", entry.dtype, dtype_name(spec.dtype)),
            ("route", entry.route, spec.route),
            ("strides", significant(entry.shape, entry.stride), significant(spec.shape, spec.stride)),
        ]
        problems += [
            f"{spec.name}: {what} {found}, this run has {mine}" for what, found, mine in pairs if found != mine
        ]
    return problems


def significant(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides that decide where an element lies."""
    return tuple(step for size, step in zip(shape, stride) if size > 1)


def verify_file(folder: Path, name: str, manifest: Manifest, *, with_digest: bool) -> list[str]:
    """What is wrong with a file, if anything: by its name and size and, ``with_digest``, by all that is in it."""
    file = folder / name
    if name not in manifest.files:
        return [f"{name}: the manifest does not list it"]
    size, expected = manifest.files[name]
    try:
        if not file.is_file():
            return [f"{name}: missing"]
        found = file.stat().st_size
        if found != size:
            return [f"{name}: {found} bytes, expected {size}; it is truncated or was overwritten"]
        return [_altered(name)] if with_digest and file_digest(file) != expected else []
    except OSError as error:  # of a disk that is damaged, say
        return [f"{name}: {error}"]


def verify_content(content: bytes | bytearray, name: str, manifest: Manifest) -> list[str]:
    """What is wrong with a file's bytes, if anything."""
    return [] if hashlib.sha256(content).hexdigest() == manifest.files[name][1] else [_altered(name)]


def file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _altered(name: str) -> str:
    return f"{name}: its contents were altered (SHA-256 differs)"


def write_durably(file: Path, write: Callable[[IO[bytes]], object]) -> list[Any]:
    """Make a file of what ``write`` puts into a stream, and flush it to the disk; return its size and digest.

    The stream only appends, and cannot seek.

    Raises:
        OSError: the disk is full, say.
    """
    with file.open("wb") as raw, DigestingStream(raw) as stream:
        try:
            write(cast(IO[bytes], stream))
        except RuntimeError as error:
            # torch's writer ends its file behind the error, and finds it too short
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        return list(stream.finish())


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.pt"
