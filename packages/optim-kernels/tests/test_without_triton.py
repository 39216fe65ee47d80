"""Where Triton is not installed, as on macOS and Windows, plain torch does all that it can do."""

import subprocess
import sys

import pytest

STEPS = """
import sys

sys.modules["triton"] = None  # an import of it fails
import torch

import optim_kernels as kernels
from optim_kernels import __main__ as report
from optim_kernels import functional

p, q = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
p.grad, q.grad = torch.ones(4, 4), torch.eye(4)
optimizers = [
    kernels.TritonAdamW([p, q], max_norm=1.0, state_dtype="int8", stochastic_rounding=True),
    kernels.TritonMuon([p, q], ns_workspace_mb=1, beta2=0.9),
    kernels.TritonMuonAdamW([{"params": [p], "kind": "muon"}, {"params": [q], "kind": "adamw"}], max_norm=1.0),
]
for optimizer in optimizers:
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert "torch" in optimizer.explain()
moment = torch.zeros(4, 4)
functional.adamw_([p], [p.grad], [moment], [moment.clone()], steps=torch.zeros(()), lr=0.1, betas=(0.9, 0.9), eps=1e-8,
                  weight_decay=0.0)
functional.muon_([p], [p.grad], [moment], lr=0.1)
functional.muon_([p], [p.grad], [moment], lr=0.1, plan=functional.MuonPlan.build([p], [p.grad], [moment]))
functional.sum_slices(torch.ones(2, 3), torch.empty(3))
kernels.newton_schulz(p).sum().backward()
kernels.clip_grad_norm_([p, q], 1.0)
kernels.sum_of_squares([p.grad])
assert report.how_kernels_run().startswith("not available: triton is not installed")
try:
    kernels.TritonAdamW([p], impl="triton")
except RuntimeError as error:
    assert "triton is not installed" in str(error), error
else:
    raise AssertionError("impl='triton' was taken")
"""


@pytest.mark.slow
@pytest.mark.installed
def test_the_package_imports_and_steps() -> None:
    finished = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
