"""Training that outlives its ranks: every start goes on from the newest checkpoint, at the number of ranks it finds.

    start   join the process group that torchrun describes; load the newest checkpoint that is complete on all hosts
            together, if there is one
    train   the steps that are left; save after every ``every``-th and after the last, in the background if asked to
    stop    on SIGTERM: save at the next poll, leave

A rank that dies takes its group with it: the other ranks fail in their next collective, torchrun starts all that are
left again, and nothing is lost but the steps since the last save. A checkpoint does not know how many ranks wrote it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from numbers import Real
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from optim_dist import checkpoint
from optim_dist._checkpoint import background
from optim_dist._checkpoint.background import Saving
from optim_dist._checkpoint.faults import raised_together
from optim_dist._checkpoint.removal import remove
from optim_dist._checkpoint.saving import save
from optim_dist._checkpoint.surveying import survey
from optim_dist._fresh_store import fresh_store
from optim_dist._optimizers.agreement import compare_options
from optim_dist._optimizers.base import DistOptimizer
from optim_dist._reduction.collectives import Communicator

__all__ = ["Run", "run"]

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{9,})")  # of folders that are ours; copies under other names are the user's


class Run:
    """One start of a training that may have begun in another process.

    Attributes:
        directory: where checkpoints lie, one folder a save.
        done: how many steps are over, those of earlier starts included; at least ``total`` when nothing is left to do.
        resumed_from: the checkpoint that ``steps`` went on from; None for a fresh start.
        extra: plain values and tensors that are saved with every checkpoint, and loaded by ``steps``: the state of a
            scheduler, say, or a position in the data. Those of the first rank count.
        stopped: whether ``steps`` ended before the last step because a SIGTERM arrived.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int,
        keep: int = 3,
        poll: int = 10,
        async_: bool = False,
        copies: int = 1,
    ) -> None:
        for name, value in {"every": every, "keep": keep, "poll": poll, "copies": copies}.items():
            if not isinstance(value, Real) or value < 1 or value % 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not isinstance(async_, bool):
            raise ValueError(f"async_ must be True or False, got {async_!r}")
        # the loop may change the working directory
        self.directory = Path(directory).absolute()
        self.every, self.keep, self.poll, self.async_ = int(every), int(keep), int(poll), async_
        self.copies = int(copies)
        self.done = 0
        self.resumed_from: Path | None = None
        self.extra: dict[str, Any] = {}
        self.stopped = False
        self._sigterm = False
        self._saving: Saving | None = None

    def steps(self, model: nn.Module | None, optimizer: DistOptimizer, total: int) -> Iterator[int]:
        """The numbers of the steps that are left of ``total``, after model, optimizer and ``extra`` have been loaded.

        A step is over when the next number is asked for; if a save is due, it is made then. Collective: every rank goes
        through all numbers. The last save is complete when there is no number left.

        Raises:
            CheckpointError: if the newest complete checkpoint does not fit model and optimizer, or is damaged, if there
                are checkpoints but none is complete, or if a disk does not answer.
            RuntimeError: if ranks were given different numbers.
            TypeError, ValueError: for arguments of another kind.
        """
        if not isinstance(optimizer, DistOptimizer):
            raise TypeError(f"steps takes model, an optimizer of optim_dist and total, got {type(optimizer).__name__}")
        given = {name: repr(getattr(self, name)) for name in ("every", "keep", "poll", "async_", "copies")}
        compare_options({"total": repr(total), **given}, optimizer.communicator)
        # the save after the last step would be left out
        if not isinstance(total, Real) or math.isnan(total) or total % 1 > 0:
            raise ValueError(f"total must be a whole number of steps, got {total!r}")
        self.done = self._resume(model, optimizer)
        while self.done < total and not self.stopped:
            yield self.done
            self.done += 1
            is_poll = self.done < total and self.done % self.poll == 0
            self.stopped = is_poll and self._is_anyone_stopped(optimizer)
            if self.done % self.every == 0 or self.done == total or self.stopped:
                self._save(model, optimizer)
        self.wait()

    def wait(self) -> None:
        """Wait until the last save is complete, and raise what has failed in it; ``run`` does so at its end."""
        if self._saving is not None:
            self._saving.wait()

    @contextmanager
    def watching_for_sigterm(self) -> Iterator[None]:
        """SIGTERM asks for a stop instead of ending the process."""

        def remember(number: int, frame: FrameType | None) -> None:
            self._sigterm = True

        before = signal.signal(signal.SIGTERM, remember)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _resume(self, model: nn.Module | None, optimizer: DistOptimizer) -> int:
        background.wait_for_last()  # of an earlier run in this process
        self.resumed_from = self._newest_complete(optimizer.communicator)
        if self.resumed_from is None:
            return 0
        saved = checkpoint.load(self.resumed_from, model, optimizer)
        if not isinstance(saved, dict) or not {"step", "extra"} <= saved.keys():
            raise checkpoint.CheckpointError(
                self.resumed_from,
                ["its extra has no step and extra of elastic's; give elastic a directory in which nobody else saves"],
            )
        self.extra = saved["extra"]
        return int(saved["step"])

    def _newest_complete(self, communicator: Communicator) -> Path | None:
        """The newest checkpoint of which all ranks together have every file, not newer than ``latest`` says.

        If none is complete, the newest of all: loading it says what is missing. None if there is none.
        """
        failed = f"training was not resumed from {self.directory}"
        with raised_together(communicator, failed):
            for unfinished in self.directory.glob(".step-*.tmp"):  # of a save that was killed
                remove(unfinished)
            newest = checkpoint.latest(self.directory)
        candidate = first = max(communicator.gather_json(newest.name if newest else ""), key=_by_age)
        while candidate:
            found = survey(self.directory / candidate, communicator)
            if not found.problems:
                return self.directory / candidate
            _logger.warning(
                "%s is not complete, and left out: %s", self.directory / candidate, "; ".join(found.problems)
            )
            with raised_together(communicator, failed):
                own = [f.name for f in self.directory.glob("step-*") if _NAME.fullmatch(f.name)]
                older = [name for name in own if _by_age(name) < _by_age(candidate)]
            candidate = max(communicator.gather_json(max(older, key=_by_age, default="")), key=_by_age)
        return self.directory / first if first else None

    def _save(self, model: nn.Module | None, optimizer: DistOptimizer) -> None:
        folder, communicator = self.directory / f"step-{self.done:09d}", optimizer.communicator
        with raised_together(communicator, f"{folder} of an earlier start was not removed"):
            remove(folder)  # left by a run that was killed before this became its newest checkpoint

        def old(found: list[Path]) -> list[Path]:
            # later steps are of a run that has gone back to an earlier checkpoint: they do not count among the newest
            own = [f for f in found if _NAME.fullmatch(f.name) and _by_age(f.name) <= _by_age(folder.name)]
            return sorted(own, key=lambda f: _by_age(f.name))[: -self.keep]

        extra = {"step": self.done, "extra": self.extra}
        options = {"async_": self.async_}
        # may_be_fewer: hosts that are left when others have gone go on with fewer copies
        self._saving = save(
            folder,
            model,
            optimizer,
            extra,
            async_=self.async_,
            old=old,
            copies=self.copies,
            may_be_fewer=True,
            options=options,
        )

    def _is_anyone_stopped(self, optimizer: DistOptimizer) -> bool:
        return any(optimizer.communicator.gather_json(self._sigterm))


def _by_age(name: str) -> tuple[int, str]:
    """Sort key: the step in a name, -1 without one; as texts, steps of more than 9 digits would be out of order."""
    step = _NAME.fullmatch(name)
    return int(step[1]) if step else -1, name


def run(
    train: Callable[[Run], Result],
    directory: str | os.PathLike[str],
    *,
    every: int,
    keep: int = 3,
    poll: int = 10,
    async_: bool = False,
    copies: int = 1,
    timeout: float = 300.0,
) -> Result:
    """Call ``train(run)`` within the process group that torchrun describes, and return what it returns.

    Args:
        train: builds model and optimizer, and loops over ``run.steps(model, optimizer, total)``.
        directory: of the checkpoints, the same for all ranks; where they share no disk, on each host.
        every: steps between two saves.
        keep: how many of the newest checkpoints stay.
        poll: steps between two looks at whether any rank has received SIGTERM; a look waits for the device.
        async_: save in the background, while training goes on. All saves are complete when this returns.
        copies: how many hosts have each rank's file, if hosts share no disk: with 2, any one of them may be lost, and
            training goes on from the last save. While there are fewer hosts there are fewer copies, with a warning.
        timeout: seconds after which a collective, the first one included, is given up.

    A process group that exists already is used and left as it is. Without one, and without torchrun, there is one rank.

    Raises:
        RuntimeError: outside of the main thread, where no signal can be watched for.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "elastic.run watches for SIGTERM, which Python allows in the main thread alone: call it there, or loop "
            "over elastic.Run(directory, every=...).steps(model, optimizer, total) in a process group of your own"
        )
    job = Run(directory, every=every, keep=keep, poll=poll, async_=async_, copies=copies)
    with _process_group(timeout), job.watching_for_sigterm():
        result = train(job)
        job.wait()
        return result


@contextmanager
def _process_group(timeout: float) -> Iterator[None]:
    """A process group from torchrun's variables, bound to this rank's device: NCCL beside gloo if there are GPUs."""
    if dist.is_initialized() or "WORLD_SIZE" not in os.environ:
        yield
        return
    backend, device = "gloo", None
    if torch.cuda.is_available():
        if "LOCAL_RANK" not in os.environ:
            raise ValueError(
                "LOCAL_RANK, the number of this process on its host and so of its GPU, has to be in the environment "
                "beside WORLD_SIZE; torchrun sets both"
            )
        backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    limit = timedelta(seconds=timeout)
    store, rank, world_size = next(rendezvous("env://", timeout=limit))
    store = fresh_store(store, rank, world_size, limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit, device_id=device)
    yield
    # Not in a finally: after an error this might wait for a rank that is gone, and the process ends anyway.
    # A thread of gloo may still hold tensors of the last collective, and needs the GIL to release them. If something
    # else keeps the group alive and the process ends meanwhile, that thread aborts it (torch 2.13): sleeping leaves it
    # the GIL for a moment.
    time.sleep(0.1)
    dist.destroy_process_group()
