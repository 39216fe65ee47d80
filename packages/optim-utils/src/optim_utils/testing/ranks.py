"""Run a function on several ranks of one machine, quickly, and fail with the traceback of the rank that failed.

Ranks start from a forkserver that has torch imported already. Its start costs a few seconds once per process; after
that, a launch of four ranks takes about 0.15 s instead of 6 s by ``spawn``. The function and its arguments are pickled,
so the function has to be at the top of an importable module.
"""

from __future__ import annotations

import gc
import io
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

_PRELOAD = ["torch", "torch._dynamo", "torch.distributed", "torch.distributed.tensor", "torch.distributed.checkpoint"]
# the environment variable with the comma-separated names of more modules to preload, first; missing ones are skipped
PRELOAD_VARIABLE = "RANKS_PRELOAD"


Result = TypeVar("Result")


class RankFailure(AssertionError):
    """A rank raised, died or did not finish in time; the text holds every failed rank's traceback."""


def run_ranks(
    function: Callable[..., Result],
    world_size: int,
    *args: object,
    backend: str = "gloo",
    timeout: float = 120.0,
    environment: dict[str, str] | None = None,
    init_process_group: bool = True,
    bind_device: bool = True,
) -> list[Result]:
    """The results of ``function(rank, world_size, *args)`` on each rank, in rank order.

    Every rank has one thread, an initialised process group (and, for ``backend="nccl"``, its own CUDA device) and
    ``timeout`` seconds. Results travel through ``torch.save``, so tensors come back as copies. At the first launch of a
    process the variable ``RANKS_PRELOAD`` may name modules, separated by commas, that ranks find imported.

    Args:
        environment: variables that are set in every rank before ``function`` runs.
        init_process_group: False leaves it to ``function`` to make a process group.
        bind_device: for ``"nccl"``, whether the group is bound to each rank's device (``device_id=`` of
            ``init_process_group``). torch then makes its communicator at once and every later group by splitting it,
            for which all ranks are needed; without, communicators are made at a group's first collective.

    Raises:
        ValueError: for fewer than one rank.
        RankFailure: if any rank raised, was killed, or was still running after ``timeout`` seconds. The other ranks
            are killed then: they may be waiting in a collective for the one that is gone.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    context = get_context("forkserver")
    context.set_forkserver_preload([*filter(None, os.environ.get(PRELOAD_VARIABLE, "").split(",")), *_PRELOAD])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = os.path.join(folder, "store")
        made = backend if init_process_group else None
        settings = _Settings(world_size, made, bind_device, store, timeout, environment or {})
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(sender, function, rank, args, settings), daemon=True)
            try:
                process.start()
            except (AttributeError, TypeError, PicklingError) as error:
                error.add_note(f"{function!r} and its arguments are pickled for the ranks: give a function of a module")
                raise
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        try:
            return _collect(processes, pipes, timeout)
        finally:
            for started in processes:
                if started.is_alive():
                    started.kill()
                started.join()
            for pipe in pipes:
                pipe.close()


class _Settings(NamedTuple):
    """What all ranks of a launch have in common."""

    world_size: int
    backend: str | None  # None for no process group
    bind_device: bool
    store: str  # the path of the file through which the ranks meet
    timeout: float
    environment: dict[str, str]


def _collect(processes: Sequence[BaseProcess], pipes: list[Connection], timeout: float) -> list[Any]:
    """Wait for every rank; stop at the first failure, after a moment in which other ranks may report theirs."""
    deadline = time.monotonic() + timeout
    pending = dict(enumerate(pipes))
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
            succeeded, found = _received(rank, processes[rank], pending.pop(rank))
            if succeeded:
                results[rank] = found
            else:
                failures[rank] = found
        if failures:
            deadline = min(deadline, time.monotonic() + 1.0)
    if failures:
        raise RankFailure("\n".join(failures[rank] for rank in sorted(failures)))
    if pending:
        raise RankFailure(f"ranks {sorted(pending)} were still running after {timeout} s")
    return [results[rank] for rank in sorted(results)]


def _received(rank: int, process: BaseProcess, pipe: Connection) -> tuple[bool, Any]:
    """Whether a rank succeeded, and its result or the text of its failure."""
    try:
        succeeded, payload = pipe.recv()
    except EOFError:
        process.join(5)
        # with 1 Python ends before it calls `_rank_main`, if it cannot import the program or the function
        advice = '; see its output, and call run_ranks under `if __name__ == "__main__":` of a file'
        return False, f"rank {rank} died with exit code {process.exitcode}{advice if process.exitcode == 1 else ''}"
    return succeeded, torch.load(io.BytesIO(payload), weights_only=False) if succeeded else payload


def _rank_main(
    pipe: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...], settings: _Settings
) -> None:
    gc.freeze()  # what the forkserver has loaded is not looked through by each collection of each rank
    try:
        os.environ.update(settings.environment)
        torch.set_num_threads(1)
        if settings.backend is not None:
            _init_process_group(settings.backend, rank, settings)
        try:
            result = function(rank, settings.world_size, *args)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        buffer = io.BytesIO()
        torch.save(result, buffer)
        pipe.send((True, buffer.getvalue()))
    except BaseException:
        pipe.send((False, f"rank {rank} of {settings.world_size} failed:\n{traceback.format_exc()}"))
    finally:
        pipe.close()


def _init_process_group(backend: str, rank: int, settings: _Settings) -> None:
    on_cuda = "nccl" in backend
    if on_cuda:
        torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.world_size))
    dist.init_process_group(
        backend,
        store=dist.FileStore(settings.store, settings.world_size),
        rank=rank,
        world_size=settings.world_size,
        timeout=timedelta(seconds=settings.timeout),
        device_id=torch.device("cuda", rank) if on_cuda and settings.bind_device else None,
    )
    if not on_cuda:
        # without the barrier, a rank whose function ends at once would close connections that others have yet to make
        dist.barrier()
