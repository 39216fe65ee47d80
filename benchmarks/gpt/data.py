"""Real text that every machine has: the Python standard library's own sources, as bytes.

Files are split between training and validation by a hash of their name, so that no file is on both sides and the
split does not move when the library gains a module. Of few files, or one, the last tenth of the text is held out. A
batch is a pure function of (seed, step): a resumed run and a run on another number of ranks see the same global batch
at the same step.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import RequestError

# Left out: what is installed beside the library, and its own tests, half of which are generated tables.
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3", "ensurepip"}
_VALIDATION_SHARE = 10  # percent of the files
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes to validate on, and where they came from."""

    train: Tensor  # uint8 [num_train_bytes]
    validation: Tensor  # uint8 [num_validation_bytes]
    source: str

    def fingerprint(self) -> str:
        """A hash of both texts, the same wherever they lie."""
        return hashlib.sha256(self.train.numpy().tobytes() + self.validation.numpy().tobytes()).hexdigest()[:16]

    def batch(self, step: int, *, batch_size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """The global batch of ``step``: inputs and next-byte targets, int64 ``[batch_size, context]`` each."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - context - 1, (batch_size,), generator=generator)
        return _windows(self.train, starts, context)

    def validation_batches(self, *, num_batches: int, batch_size: int, context: int) -> list[tuple[Tensor, Tensor]]:
        """The same evenly spread windows every time."""
        count = num_batches * batch_size
        starts = torch.linspace(0, len(self.validation) - context - 2, count).long()
        return [_windows(self.validation, chunk, context) for chunk in starts.split(batch_size)]


def load_corpus(path: Path | None, *, context: int) -> Corpus:
    """Read ``path`` (a file, or a folder of text files), or without one the running interpreter's standard library.

    Raises:
        RequestError: if ``path`` cannot be read, or holds too little text for one training and one validation window.
    """
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        train, validation = _split_by_name(_python_sources(folder), folder)
        source = "the Python standard library"
    else:
        try:
            train, validation = _given_text(path, context)
        except OSError as error:
            raise RequestError(f"--data {path} cannot be read: {error}; give a file or folder of text") from error
        source = str(path)
    if min(len(train), len(validation)) < context + 2:
        raise RequestError(
            f"{source} holds {len(train)} training and {len(validation)} validation bytes; "
            f"--context {context} needs at least {context + 2} of each"
        )
    return Corpus(_as_tensor(train), _as_tensor(validation), source)


def _given_text(path: Path, context: int) -> tuple[bytes, bytes]:
    """Training and validation bytes of a file or a folder."""
    if not path.exists():
        raise RequestError(f"--data {path} does not exist; give a text file or a folder of text files")
    files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
    train, validation = _split_by_name(files, path)
    if min(len(train), len(validation)) < context + 2:
        # one file, or so few that hashes of their names leave a side without text
        text = b"".join(text for _, text in _texts(files))
        cut = len(text) * (100 - _VALIDATION_SHARE) // 100
        train, validation = text[:cut], text[cut:]
    return train, validation


def _python_sources(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*.py") if not _SKIPPED & set(f.relative_to(folder).parts))


def _split_by_name(files: list[Path], folder: Path) -> tuple[bytes, bytes]:
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for file, text in _texts(files):
        name = file.relative_to(folder).as_posix().encode()
        held_out = int.from_bytes(hashlib.sha256(name).digest()[:4], "big") % 100 < _VALIDATION_SHARE
        sides[held_out].append(text)
    return b"".join(sides[0]), b"".join(sides[1])


def _texts(files: list[Path]) -> Iterator[tuple[Path, bytes]]:
    """The files and their bytes, up to ``_MAX_BYTES`` of all files; what comes after these is not opened."""
    left = _MAX_BYTES
    for file in files:
        if left == 0:
            return
        with file.open("rb") as opened:
            text = opened.read(left)
        yield file, text
        left -= len(text)


def _as_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    window = text[starts[:, None] + torch.arange(context + 1)].long()  # [batch, context + 1]
    return window[:, :-1], window[:, 1:]
