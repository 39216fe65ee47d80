"""The ranks that torchrun has started, from their process group to its end."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def start_ranks() -> torch.device:
    """The process group of torchrun's ranks: NCCL with a device each where there are GPUs, else gloo."""
    cuda = torch.cuda.is_available()
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if not dist.is_initialized():
        timeout = timedelta(seconds=300)
        dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None, timeout=timeout)
    return device


def need_ranks(what: str, module: str) -> None:
    """Exit with the command to start ranks, unless there are two at least."""
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2:
        raise SystemExit(f"{what} needs two ranks: torchrun --nproc-per-node 2 -m benchmarks.{module}")


def end_ranks() -> None:
    """End the process group, once no thread of it holds tensors."""
    # Such a thread of gloo takes Python's lock to let go of the last collective's tensors, and aborts a process that
    # ends meanwhile (torch 2.13): leave it the lock for a moment.
    time.sleep(0.1)
    dist.destroy_process_group()


def agreed(flag: bool, device: torch.device) -> bool:
    """Whether any rank says so."""
    votes = torch.tensor(float(flag), device=device)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item())


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
