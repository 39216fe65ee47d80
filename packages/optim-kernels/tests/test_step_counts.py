"""Programs of one launch read a step count while the last of them stores the next: none may read that."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Equal elements have equal updates, so one that is not has been updated as of another step.
STEPS = """
import time, torch
from optim_kernels import TritonAdamW
ends = time.monotonic() + 20
while time.monotonic() < ends:
    # a list counts each tensor's programs at one counter, a lone tensor with codes in groups
    for sizes, states in (((1_218_525, 1_048_576, 643_860, 26_010, 700_000, 300_000), None), ((4_194_304,), "int8")):
        params = [torch.nn.Parameter(torch.zeros(size, device="cuda")) for size in sizes]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = TritonAdamW(params, lr=1.0, weight_decay=0.0, state_dtype=states)
        for _ in range(40):
            optimizer.step()
        extremes = [p.detach().aminmax() for p in params]
        assert all(least == most for least, most in extremes), extremes
        assert all(optimizer.state[p]["step"] == 40 for p in params)
"""


@pytest.mark.gpu
@pytest.mark.nightly
def test_no_program_reads_the_next_count() -> None:
    """Of several processes, whose turns on the GPU come between a program's loads and what it does with them."""
    processes = [subprocess.Popen([sys.executable, "-c", STEPS], stderr=subprocess.PIPE, text=True) for _ in range(12)]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
