"""What the tests of optim-dist share: parameter sets, gradients that every process can compute, and training loops.

A run over W ranks is compared with one process that sums the W gradients in rank order in fp32 (``simulated=W``): in
exact mode both must agree to the last bit.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW
from optim_utils.testing import run_ranks

try:
    from quick import interpreter  # from the folder of all packages; it needs Triton
except ImportError:
    pass
else:
    interpreter.install()  # as conftest.py does, which ranks do not import

# each backend as a parameter; NCCL needs two devices
BACKENDS = [
    "gloo",
    pytest.param(
        "nccl",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
        ],
    ),
]


def world_sizes(backend: str, wanted: tuple[int, ...] = (1, 2, 3, 4)) -> list[int]:
    """Those of ``wanted`` that the backend has devices for; without any the test is skipped."""
    found = [size for size in wanted if backend == "gloo" or size <= torch.cuda.device_count()]
    if not found:
        pytest.skip(f"needs {min(wanted)} CUDA devices")
    return found


@dataclass(frozen=True)
class Tensors:
    """A parameter of a case: ``absent`` lists (step, rank) without a gradient, rank -1 meaning all."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    group: int = 0
    transposed: bool = False
    frozen: bool = False
    absent: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Case:
    """An optimizer's class by name, its groups' options, its parameters."""

    kind: str
    tensors: tuple[Tensors, ...]
    groups: tuple[dict[str, Any], ...] = ({},)
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 3
    max_norm: float | None = None


CLASSES = {"adamw": TritonDistAdamW, "muon": TritonDistMuon, "muon_adamw": TritonDistMuonAdamW}


def device_of(rank: int) -> torch.device:
    """The device that ``run_ranks`` gave this process."""
    on_cuda = dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda", rank) if on_cuda else torch.device("cpu")


@cache
def alone(rank: int) -> dist.ProcessGroup:
    """The group of this rank only, for what one process does; made once, since a new group takes NCCL a while."""
    return dist.new_group([rank], use_local_synchronization=True)


def mesh_of(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh over this process's kind of device, which all ranks have joined: a test may be over at once."""
    mesh = init_device_mesh(device_of(dist.get_rank()).type, sizes, mesh_dim_names=names)
    dist.barrier()
    return mesh


def make_parameters(case: Case, device: torch.device) -> list[torch.nn.Parameter]:
    parameters = []
    for number, spec in enumerate(case.tensors):
        value = normal(spec.shape, 7, number).to(device, spec.dtype)
        if spec.transposed:
            value = value.transpose(0, 1).contiguous().transpose(0, 1)
        parameters.append(torch.nn.Parameter(value, requires_grad=not spec.frozen))
    return parameters


def make_optimizer(case: Case, parameters: list[torch.nn.Parameter], **options: Any) -> Any:
    groups = [{**group, "params": []} for group in case.groups]
    for spec, parameter in zip(case.tensors, parameters):
        groups[spec.group]["params"].append(parameter)
    return CLASSES[case.kind](groups, **{**case.options, **options})


def gradient(spec: Tensors, number: int, step: int, rank: int) -> Tensor | None:
    """What rank ``rank`` has for parameter ``number`` at ``step``; nothing depends on who asks."""
    if spec.frozen or {(step, rank), (step, -1)} & spec.absent:
        return None
    return normal(spec.shape, 1000 * step + 10 * rank + 1, number).to(spec.dtype)


def memory() -> int:
    """Bytes of this process that no file is behind; Linux says so."""
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(status["RssAnon"].split()[0])


def memory_taken(act: Callable[[], object]) -> int:
    """How many more bytes this process had than before, at most, while it did ``act``."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # else memory that is free, but still the process's, is used again and not seen
    most, is_over = [before := memory()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.0005):
            most.append(memory())

    watching = threading.Thread(target=watch)
    watching.start()
    act()
    most.append(memory())  # on a busy machine the thread may not have looked since
    is_over.set()
    watching.join()
    return max(most) - before


def normal(shape: tuple[int, ...], *seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randn(shape, generator=generator)


def sum_in_rank_order(gradients: list[Tensor | None]) -> Tensor | None:
    """One process's sum: fp32 (or wider), rank after rank, a missing gradient as zeros, rounded once."""
    like = next((g for g in gradients if g is not None), None)
    if like is None:
        return None
    wide = [torch.zeros_like(like) if g is None else g for g in gradients]
    total = wide[0].to(torch.promote_types(torch.float32, like.dtype), copy=True)
    for other in wide[1:]:
        total += other
    return total.to(like.dtype)


def train(rank: int, world_size: int, case: Case, simulated: int = 0, options: dict[str, Any] | None = None) -> Any:
    """Parameters and norms after the case's steps; ``simulated`` ranks are summed in this one process."""
    device = device_of(rank)
    parameters = make_parameters(case, device)
    optimizer = make_optimizer(case, parameters, **(options or {}))
    norms = []
    for step in range(case.steps):
        for number, (spec, parameter) in enumerate(zip(case.tensors, parameters)):
            if simulated:
                found = sum_in_rank_order([gradient(spec, number, step, r) for r in range(simulated)])
            else:
                found = gradient(spec, number, step, rank)
            # in the parameter's layout, as autograd gives it
            parameter.grad = None if found is None else torch.empty_like(parameter).copy_(found)
        factor = torch.tensor(1 / simulated, dtype=optimizer.plan.scalar_dtype, device=device) if simulated else None
        if case.max_norm is not None:
            norms.append(optimizer.clip_grad_norm_(case.max_norm * max(1, simulated)).item() / max(1, simulated))
        optimizer.step(clip_factor=factor)
        optimizer.zero_grad()
    return {
        "parameters": [parameter.detach().cpu().clone() for parameter in parameters],
        "norms": norms,
        "state": optimizer.full_state_dict(),
        "bytes": optimizer.explain().data["bytes_sent"],
    }


def train_each(rank: int, world_size: int, jobs: list[tuple[Any, ...]]) -> list[Any]:
    """``train`` for each job: one launch for many cases."""
    return [train(rank, world_size, *job) for job in jobs]


def assert_equal(actual: list[Tensor], expected: list[Tensor], what: str) -> None:
    """The same bits, parameter by parameter."""
    for number, (left, right) in enumerate(zip(actual, expected, strict=True)):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        difference = (left.double() - right.double()).abs().max().item() if left.numel() else 0.0
        assert torch.equal(left, right), f"{what}: parameter {number} {tuple(left.shape)} differs by {difference}"


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """The same keys, shapes and bits in two full states."""
    assert actual["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        assert actual["state"][index].keys() == state.keys(), index
        for key, value in state.items():
            assert torch.equal(actual["state"][index][key].cpu(), value.cpu()), (index, key)


class Scenarios:
    """Functions of (rank, world size), registered with the numbers of ranks that they want.

    All of one number of ranks and backend run in one launch, which takes most of a short test's time; each is a test
    of its own all the same, and one that fails on every rank leaves the others to run.

    Args:
        unbound: run with NCCL a second time, in a world that is not bound to the ranks' devices.
    """

    def __init__(self, *, unbound: bool = False) -> None:
        self.backends = ["gloo", "nccl", *(["nccl unbound"] if unbound else [])]
        self.functions: dict[int, dict[str, Callable[[int, int], None]]] = {}
        self._outcomes: dict[tuple[str, int], list[dict[str, str | None]]] = {}

    def __call__(self, *world_sizes: int) -> Callable[[Callable[[int, int], None]], Callable[[int, int], None]]:
        def register(function: Callable[[int, int], None]) -> Callable[[int, int], None]:
            for size in world_sizes:
                self.functions.setdefault(size, {})[function.__name__] = function
            return function

        return register

    def parametrize(self) -> Callable[..., Any]:
        """The test's parameters ``backend, world_size, name``: NCCL where there are devices enough."""
        found = []
        for size, functions in sorted(self.functions.items()):
            few = pytest.mark.skipif(torch.cuda.device_count() < size, reason=f"needs {size} CUDA devices")
            for backend in self.backends:
                marks = [] if backend == "gloo" else [pytest.mark.gpu, few]
                found += [pytest.param(backend, size, name, marks=marks) for name in functions]
        return pytest.mark.parametrize(("backend", "world_size", "name"), found)

    def check(self, backend: str, world_size: int, name: str) -> None:
        """Fail with the traceback of every rank on which the scenario failed."""
        key = backend, world_size
        if key not in self._outcomes:
            functions = self.functions[world_size]
            library, *unbound = backend.split()
            self._outcomes[key] = run_ranks(
                _run_each, world_size, functions, backend=library, bind_device=not unbound, timeout=240
            )
        failed = [f"rank {rank}:\n{found[name]}" for rank, found in enumerate(self._outcomes[key]) if found[name]]
        assert not failed, "\n".join(failed)


def _run_each(rank: int, world_size: int, functions: dict[str, Callable[[int, int], None]]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, function in functions.items():
        try:
            function(rank, world_size)
            found[name] = None
        except (Exception, pytest.fail.Exception):  # the latter of ``pytest.raises``, no Exception
            found[name] = traceback.format_exc()
    return found
