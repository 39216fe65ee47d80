"""A save that goes on in a thread while training does, and what becomes of its failure.

    groups    ranks of a save in the background meet in a group of their own, on the CPU, which all make at the first
              one, for all optimizers of the same ranks: in the training's, collectives of two threads would come in
              another order on each rank. Beside files as the place to meet it has two advantages: what fails on one
              rank, a full disk say, reaches the others at once, and a rank that dies does not keep them waiting.
    one       at a time in a process: whoever saves or loads waits for the one before
    failures  are logged, and raised by ``wait()`` and ``result()``, on every rank. What nobody has waited for is raised
              by the next save, on every rank, so that no failure is silent
    exits     of the interpreter wait for the thread. A process that is killed leaves a hidden folder, and the
              checkpoint before it as it was

Nobody waits for a rank that has died: its connections end with it. One that does not answer is given up in time.
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

# between the fastest disk and the slowest; a rank that has died is noticed at once
PATIENCE = timedelta(minutes=30)

_logger = logging.getLogger(__name__)
_on_cpu: dict[tuple[int, ...], Communicator] = {}  # by global ranks, in ascending order
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
        """What failed, the first time that anybody asks; empty if nothing has, or somebody knows."""
        self._finish()
        if self._error is None or self._is_known:
            return ""
        self._is_known = True
        return str(self._error)

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # also what ends a thread belongs to whoever waits
            _logger.error("in the background: %s", error, exc_info=error)
            self._error = _without_frames(error)


def _without_frames(error: BaseException) -> BaseException:
    """The error apart from its frames, which hold all that was to be written."""
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


def start(path: Path, write: Callable[[], None]) -> Saving:
    """Call ``write`` in a thread, which is the last one from now on; the one before is over."""
    global _last
    _last = Saving(path, write)
    return _last


def settle() -> str:
    """Wait for the last save in the background; its failure, if it had one of which nobody knows yet."""
    return "" if _last is None else _last._unknown_failure()


def wait_for_last() -> None:
    """Wait for the last save in the background, whose failure remains to be told."""
    if _last is not None:
        _last._finish()


def on_cpu(communicator: Communicator) -> Communicator:
    """The same ranks in a group of their own on the CPU; collective, the first time by making it."""
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
    """What ``on_cpu`` has made for the same ranks, unless it was in a process group that is gone."""
    known = _on_cpu.get(tuple(sorted(communicator.ranks)))
    return known if known is not None and known.is_beside(communicator) else None
