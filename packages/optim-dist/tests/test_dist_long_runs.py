"""What hundreds of steps leave behind, and what a step has the host wait for: nothing."""

import gc
import os

import pytest
import torch
from dist_cases import BACKENDS, device_of
from dist_loops import Net, batch

from optim_dist import TritonDistMuonAdamW
from optim_utils.testing import run_ranks

NUM_STEPS = 240
# what keeps records of gradients, reductions, gathers and groups in ways of its own
LOOPS = {
    "step": {},
    "exact, under backward": {"reducer": "exact", "accumulation_steps": 1},
    "streamed": {"gradients": "streamed", "accumulation_steps": 1, "max_norm": 1.0},
    "forward": {"model": True, "max_norm": 1.0},
}


def loop_of(rank, options):
    """A function that makes steps of Muon and AdamW, in which ranks take turns at leaving out a layer."""
    net = Net(device_of(rank))
    options = {**options, "model": net} if "model" in options else options
    groups = [
        {"kind": kind, "params": [item for item in net.named_parameters() if item[1].ndim == ndim]}
        for kind, ndim in (("muon", 2), ("adamw", 1))
    ]
    optimizer = TritonDistMuonAdamW(groups, bucket_mb=1e-4, **options)
    batches = [batch(rank, step) for step in range(3)]

    def run(num_steps, skips=True):
        for step in range(num_steps):
            net(batches[step % 3], skip=step % 4 if skips and step % 2 == rank else None).backward()
            if step % 5 == 0:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def held():
    """Objects, threads, open files, and bytes on the device of this process."""
    gc.collect()
    in_memory = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    return len(gc.get_objects()), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), in_memory


def held_before_and_after(rank, world_size, options):
    run = loop_of(rank, options)
    run(60)
    before = held()
    run(NUM_STEPS)
    return before, held()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts by /proc")
@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_hundreds_of_steps_leave_nothing_behind(backend, options):
    for before, after in run_ranks(held_before_and_after, 2, options, backend=backend):
        # less than a tenth of an object a step; files of connections that were not needed may be closed
        assert after[0] < before[0] + NUM_STEPS // 10
        assert all(now <= then for now, then in zip(after[1:], before[1:], strict=True))


def step_under_watch(rank, world_size, options):
    run = loop_of(rank, options)
    run(6, skips=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(6, skips=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("options", LOOPS.values(), ids=LOOPS)
def test_no_step_waits_for_the_device(options):
    run_ranks(step_under_watch, 2, options, backend="nccl")
