"""GPUs other than Hopper: which kernels they run, and that these fit on them. None is needed here."""

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from optim_kernels import TritonMuon, newton_schulz
from optim_kernels import __main__ as report
from optim_kernels._impl import _why_not_on_gpu, why_not_on, why_not_products
from optim_kernels._newton_schulz.tiles import BESIDE_STAGES, fitted, general_tile, symmetric_tile
from optim_kernels._optimizers.muon_batches import why_not_grouped
from optim_kernels._optimizers.muon_entries import MuonEntry

pytest.importorskip("triton")
CUDA = torch.device("cuda")
# Shared memory of a program by compute capability, in bytes.
SHARED = {"8.0": 163 << 10, "8.6": 99 << 10, "9.0": 227 << 10, "12.0": 99 << 10}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes torch tell of a GPU of some compute capability, or of AMD."""

    def make(major: int, minor: int, hip: str | None = None) -> None:
        _why_not_on_gpu.cache_clear()
        why_not_products.cache_clear()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        monkeypatch.setattr(torch.version, "hip", hip)

    yield make
    monkeypatch.undo()
    _why_not_on_gpu.cache_clear()
    why_not_products.cache_clear()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_where_kernels_run(gpu: Any, capability: tuple[int, int]) -> None:
    gpu(*capability)
    assert why_not_on(CUDA) is None
    assert (why_not_products(CUDA) is None) == (capability >= (9, 0))


def test_why_kernels_do_not_run(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(7, 5)
    assert why_not_on(CUDA) == "its GPU has compute capability 7.5, and Triton needs 8.0"
    gpu(9, 4, hip="6.2")
    assert why_not_on(CUDA) == "its GPU is one of AMD's, and the kernels have instructions of NVIDIA's"
    assert why_not_on(torch.device("meta")) == "it is on meta"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert why_not_on(torch.device("cpu")) == "it is on cpu"
    assert why_not_products(torch.device("cpu")) is None


def test_products_of_older_gpus_are_torchs(gpu: Any) -> None:
    gpu(8, 6)
    entry = cast(MuonEntry, SimpleNamespace(param=SimpleNamespace(device=CUDA)))
    optimizer = TritonMuon([torch.nn.Parameter(torch.zeros(4, 4))], lr=0.1)
    (group,) = optimizer.param_groups
    words = "its GPU has compute capability 8.6, and products need the bulk copy engine of 9.0"
    assert why_not_grouped(entry, group) == words
    gpu(7, 0)
    assert why_not_grouped(entry, group) == "its GPU has compute capability 7.0, and Triton needs 8.0"


def test_the_report_says_how_kernels_run(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu(9, 0)
    assert report.how_kernels_run() == "compiled"
    gpu(8, 9)
    assert report.how_kernels_run() == (
        "compiled, but for products of matrices, which are cuBLAS's: its GPU has compute capability 8.9, and products "
        "need the bulk copy engine of 9.0"
    )
    gpu(7, 5)
    assert report.how_kernels_run() == (
        "not available: its GPU has compute capability 7.5, and Triton needs 8.0; plain torch is used"
    )
    assert not list(report.run_checks())


@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
def test_tiles_have_as_many_stages_as_there_is_room_for(shared: int) -> None:
    fewer = 0
    for m, batch, num_sms in product((64, 512, 768, 1024, 1920, 4096), (1, 12), (64, 132)):
        for k in (m, 4 * m):
            chosen = [symmetric_tile(m, k, batch, num_sms, same) for same in (False, True)]
            for tile in (*chosen, general_tile(m, k, m, batch, num_sms)):
                less = fitted(tile, shared)
                assert less._replace(num_stages=tile.num_stages) == tile
                assert 2 <= less.num_stages <= tile.num_stages
                assert less.num_stages * less.bytes_of_stage + BESIDE_STAGES <= shared
                fewer += less != tile
    assert bool(fewer) == (shared < SHARED["9.0"])


@pytest.mark.gpu
def test_plain_torch_in_place_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("orthogonalization", "_newton_schulz.product_ops", "_impl"):
        monkeypatch.setattr(f"optim_kernels.{module}.why_not_products", lambda device: "its GPU is an older one")
    torch.manual_seed(0)
    x = torch.randn(128, 320, device="cuda")
    assert torch.equal(newton_schulz(x), newton_schulz(x, impl="torch"))
    params = [torch.nn.Parameter(torch.randn(128, 320, device="cuda")) for _ in range(2)]
    params[1].data.copy_(params[0])
    optimizers = [TritonMuon([p], lr=0.1, impl=impl) for p, impl in zip(params, ("auto", "torch"), strict=True)]
    for p, optimizer in zip(params, optimizers, strict=True):
        p.grad = x.clone()
        optimizer.step()
    assert torch.equal(*params)
    assert "its GPU is an older one" in str(optimizers[0].explain())
