"""A save that runs in a thread while training goes on, and what becomes of its failure.

    groups    saves in the background use a group of their own, on the CPU, which ranks make at the first such save, for
              all optimizers of the same ranks: in the training's group, collectives of two threads would come in
              another order on each rank. Compared with meeting through files it has two advantages: a failure of one
              rank, a full disk say, reaches the others at once, and a rank that dies does not keep them waiting.
    one       save at a time in a process: the next save or load waits for the one before
    failures  are logged, and raised by ``wait()`` and ``result()``, on every rank. A failure that nobody has waited for
              is raised by the next save, on every rank, so that none is silent
    exits     of the interpreter wait for the thread. A process that is killed leaves a hidden folder, and the
              checkpoint before it as it was

Nobody waits for a rank that has died: its connections end with it. A rank that does not answer is given up in time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from optim_dist._reduction.collectives import Communicator
from optim_dist._reduction.groups import new_group

# how much later the slowest disk may be done than the fastest; a rank that has died is noticed at once
PATIENCE = timedelta(minutes=30)

_logger = logging.getLogger(__name__)
_on_cpu: dict[tuple[int, ...], Communicator] = {}  # keyed by global ranks, in ascending order
_last: Saving | None = None


class Saving:
    """A checkpoint that is being saved in the background.

    Attributes:
        path: the folder, which gets its name when everything is on the disk.
    """

    def __init__(self, path: Path, write: Callable[[], None]) -> None:
        self.path = path
        self._error: BaseException | None = None
        self._is_known = False  # whether somebody was told of the error
        # no daemon: the interpreter waits for it
        self._thread = threading.Thread(target=self._run, args=(write,), name=f"saving {path.name}", daemon=False)
        self._thread.start()

    def done(self) -> bool:
        """Whether it is over, well or not, on this rank."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete.

        Raises:
            RuntimeError: if it was not saved, with what failed on any rank.
        """
        self._finish()
        if self._error is not None:
            self._is_known = True
            raise self._error

    def result(self) -> Path:
        """``path``, when the checkpoint is complete; raises what ``wait()`` does."""
        self.wait()
        return self.path

    def _finish(self) -> None:
        """Return when it is over, well or not."""
        self._thread.join()

    def _unknown_failure(self) -> str:
        """The text of the error, once; empty if there is none, or if somebody was told of it before."""
        self._finish()
        if self._error is None or self._is_known:
            return ""
        self._is_known = True
        return str(self._error)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # of any kind, SystemExit too: it is for whoever waits
            _logger.error("in the background: %s", error, exc_info=error)
            self._error = _without_frames(error)


def _without_frames(error: BaseException) -> BaseException:
    """The error without its tracebacks, whose frames hold everything that was to be written."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def start(path: Path, write: Callable[[], None]) -> Saving:
    """Call ``write`` in a thread, and remember it as the last save; the save before it must be over."""
    global _last
    _last = Saving(path, write)
    return _last


def settle() -> str:
    """Wait for the last save in the background; return the text of a failure that nobody knows of yet, or ""."""
    return "" if _last is None else _last._unknown_failure()


def wait_for_last() -> None:
    """Wait for the last save in the background; a failure is still left to be reported."""
    if _last is not None:
        _last._finish()


def on_cpu(communicator: Communicator) -> Communicator:
    """The same ranks in a group of their own on the CPU; the first call makes the group, and is collective."""
    if communicator.world_size == 1 or communicator is _known(communicator):
        return communicator
    known = _known(communicator)
    if known is None:
        ranks = sorted(communicator.ranks)
        known = Communicator(new_group(ranks, [communicator], PATIENCE, "gloo"), torch.device("cpu"))
        _on_cpu[tuple(ranks)] = known
    return known


def has_lost_ranks(communicator: Communicator) -> bool:
    """Whether an earlier save, in the background or to several hosts, could not reach the others any more."""
    known = _known(communicator)
    return known is not None and known.is_lost


def _known(communicator: Communicator) -> Communicator | None:
    """What ``on_cpu`` has made for the same ranks, unless the default process group has changed since."""
    known = _on_cpu.get(tuple(sorted(communicator.ranks)))
    return known if known is not None and known.has_same_world_as(communicator) else None
