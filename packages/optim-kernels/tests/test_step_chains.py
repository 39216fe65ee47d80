"""The Muon step around a chain, whose own kernel needs a Hopper GPU: what it finds and leaves, how many launches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from h200 import on_an_h200
from torch import nn

from optim_kernels import NSConfig, TritonMuon
from optim_kernels._optimizers.muon_options import ns_config_of, rule_of

pytest.importorskip("triton")
from optim_kernels._kernels import muon_table as fields
from optim_kernels._newton_schulz import chain as hopper_chain
from optim_kernels._newton_schulz.chain_jobs import Ending
from optim_kernels.functional import _muon_families
from optim_kernels.functional import _muon_launches as launches_of_a_plan
from optim_kernels.functional._muon_batch_plan import MuonBatchPlan
from optim_kernels.functional._muon_families import PANEL, ChainedBatches
from optim_kernels.functional._muon_matrices import MuonTensors
from optim_kernels.functional._muon_tables import MuonTables


class ChainInTorch:
    """What a chain leaves behind, in plain torch: on panels, with sums of O², and NaN wherever a NaN would get."""

    def __init__(
        self, chained: ChainedBatches, number: int, ns: NSConfig, tables: MuonTables, *, ending: Ending, **_: Any
    ) -> None:
        assert ending is not Ending.UPDATE
        self._chained, self._ns, self._tables, self._squares = chained, ns, tables, ending is Ending.SQUARES
        self._counter = len(tables.matrices) + number
        for x in (chained.x, chained.other):
            x.fill_(float("nan"))

    def take(self, _inputs: Any) -> None:
        """The real one's last product reads hyperparameters, this one's does not."""

    def run(self) -> None:
        for batch in self._chained.batches:
            count, _, n = batch.shape
            assert not self._tables.progress[batch.numbers].any()
            assert self._tables.progress[self._counter] == 0
            last = batch.other if batch.num_moves % 2 else batch.x
            for i in range(count):
                panels = slice(i * len(batch.x) // count, (i + 1) * len(batch.x) // count)
                o = self._orthogonalized(batch.first + i, torch.cat(list(batch.x[panels]), 1), n)
                last[panels] = torch.stack(o.split(PANEL, 1))
                if self._squares:
                    self._add_squares(batch.first + i, o[:, :n])

    def _orthogonalized(self, number: int, x: torch.Tensor, n: int) -> torch.Tensor:
        x = x * self._tables.scales[number]
        for a, b, c in self._ns.triples:
            read = x[:, : -(-n // 64) * 64]
            gram = read @ read.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x

    def _add_squares(self, number: int, o: torch.Tensor) -> None:
        record = self._tables.matrices[number]
        outer, inner, first = (int(record[field.value]) for field in (fields.OUTER, fields.INNER, fields.FIRST_PART))
        lines = o.mT if outer != inner or record[fields.ROWS_ARE_INNER.value] else o
        for part, values in enumerate(lines.split(128, 1)):
            start = first + part * len(lines)
            self._tables.parts[start : start + len(lines)] = values.square().sum(1)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU")
@pytest.mark.parametrize("variant", ["torch", "nanochat-2026-07"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_the_step_around_a_chain(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """X in panels, of all lengths of one short side; what a NaN leaves in them, the next step does not see."""
    shapes = [(20, 20), (150, 20), (20, 77), (20, 264), (333, 20)]
    runs = []
    for impl in ("triton", "torch"):
        if impl == "triton":
            monkeypatch.setattr(_muon_families, "takes_step_chain", lambda *_, **__: True)
            monkeypatch.setattr(launches_of_a_plan, "StepChain", ChainInTorch)
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in shapes]
        params[2] = nn.Parameter(params[2].detach().mT)  # stored by columns
        group = {"params": params, "variant": variant, "lr": 0.1, "ns_dtype": torch.float32, "impl": impl}
        optimizer = TritonMuon([group])
        for seed in range(3):
            optimizer.found_inf = torch.ones(()) if seed == 1 else None
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
                if seed == 1:
                    p.grad.fill_(float("nan"))
            optimizer.step()
        runs.append(params)
        monkeypatch.undo()
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q, atol=5e-5, rtol=0)


def test_which_batches_take_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200: those that fill it together, and large long ones, which restart in factors nowhere else."""
    monkeypatch.setattr(hopper_chain, "has_gluon", lambda _: True)
    monkeypatch.setattr(hopper_chain, "num_multiprocessors", lambda _: 132)
    chained = [
        (count, m, n)
        for count, m, n in [
            (12, 768, 768),
            (6, 768, 3072),
            (24, 1024, 4096),
            (1, 1600, 1600),
            (2, 1600, 1600),
            (1, 2048, 2048),
            (2, 2048, 2048),
            (1, 2048, 8192),
            (2, 2048, 8192),
            (8, 2560, 2560),
            (1, 4096, 4096),
            (1, 4096, 14336),
        ]
        if hopper_chain.takes_chain(count, m, n, NSConfig(), torch.float16, torch.device("cuda", 0))
    ]
    assert chained == [
        (12, 768, 768),
        (24, 1024, 4096),
        (2, 1600, 1600),
        (2, 2048, 2048),
        (2, 2048, 8192),
        (1, 4096, 14336),
    ]


MODELS = {
    "gpt2_124m": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12,
    "d20": [*[(1280, 1280)] * 4, (5120, 1280), (1280, 5120)] * 20,
    "gpt2_1.56b": [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400)] * 48,
    "d32": [*[(2048, 2048)] * 4, (8192, 2048), (2048, 8192)] * 32,
}


def plan_on_an_h200(shapes: list[tuple[int, int]], variant: str, monkeypatch: pytest.MonkeyPatch) -> MuonBatchPlan:
    """The plan of bf16 parameters as on that GPU, whose tables are made without memory."""
    monkeypatch.setattr(hopper_chain, "has_gluon", lambda _: True)
    monkeypatch.setattr(hopper_chain, "num_multiprocessors", lambda _: 132)
    monkeypatch.setattr(_muon_families, "takes_step_chain", takes_step_chain_on_a_gpu)
    (group,) = TritonMuon([{"params": [nn.Parameter(torch.zeros(8, 8))], "variant": variant}]).param_groups
    tensors = []
    for shape in shapes:
        p, grad, buffer = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(3))
        moment = torch.empty(max(shape), device="meta") if group["beta2"] is not None else None
        tensors.append(MuonTensors(p, grad, buffer, moment))
    ns = replace(ns_config_of(group), dtype=torch.float16)
    return MuonBatchPlan(tensors, rule=rule_of(group), ns=ns, variance=group["beta2"] is not None)


def takes_step_chain_on_a_gpu(
    shapes: list[tuple[int, int]], m: int, config: NSConfig, dtype: torch.dtype, _: Any, *, may_launch: bool = True
) -> bool:
    return hopper_chain.takes_step_chain(shapes, m, config, dtype, torch.device("cuda", 0), may_launch=may_launch)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("variant", "around"), [("torch", 3), ("nanochat-2026-07", 4)])
def test_a_models_step_is_a_few_launches(
    model: str, variant: str, around: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All matrices of one short side are one launch."""
    plan = plan_on_an_h200(MODELS[model], variant, monkeypatch)
    assert plan.launches == around + 1 <= 20
    assert set(plan.tiles.values()) == {"128×128 in turns, all in one launch"}


def test_which_steps_take_a_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that fill the chip; and fewer that restart in factors, if launches may not, or have no kernels for it."""
    on_an_h200(monkeypatch)
    monkeypatch.setattr(hopper_chain, "has_gluon", lambda _: True)
    monkeypatch.setattr(hopper_chain, "num_multiprocessors", lambda _: 132)
    takes = partial(takes_step_chain_on_a_gpu, config=NSConfig(), dtype=torch.float16, _=None)
    assert not takes([(2560, 48), (10240, 96)], 2560)
    assert not takes([(3072, 6)], 768)
    assert takes([(3072, 7)], 768)
    assert takes([(768, 6), (3072, 1)], 768)
    assert takes([(3072, 1)], 768, may_launch=False)
    assert not takes([(768, 1), (2000, 1)], 768, may_launch=False)
    assert not takes([(8192, 1)], 2048)
    # 18 tiles a side: 171 of a triangle are more than there are multiprocessors
    assert takes([(9216, 1)], 2304)
    # as many as no chain takes have launches
    for m in range(256, 2049, 8):
        few = next(count for count in range(200) if takes([(4 * m, count + 1)], m))
        assert few > 0
        assert takes([(4 * m, few)], m, may_launch=False)


@pytest.mark.parametrize(("variant", "twice"), [("torch", 12 * 6), ("nanochat-2026-07", 12 * (6 + 18 + 24 + 24))])
def test_what_does_not_move_is_kept_once(variant: str, twice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long matrices restart in factors, and their last product goes into the parameters; sums of O² keep O."""
    found: list[ChainedBatches] = []
    monkeypatch.setattr(launches_of_a_plan, "StepChain", lambda chained, *_, **__: found.append(chained))
    plan_on_an_h200(MODELS["gpt2_124m"], variant, monkeypatch)
    (chained,) = found
    assert chained.x.shape == (12 * (6 + 18 + 24 + 24), 768, PANEL)
    assert chained.other.shape == (twice, 768, PANEL)
    assert [batch.shape for batch in chained.batches] == [(12, 768, 768), (12, 768, 2304), (24, 768, 3072)]


@pytest.mark.parametrize("which", ["momentum_buffers", "masters"])
def test_a_plan_refuses_tensors_of_another_shape(which: str) -> None:
    """With the parameter's strides, so that nothing else would notice."""
    p, grad, buffer, master = (torch.zeros(8, 32) for _ in range(4))
    short = torch.zeros(4, 32)
    tensors = MuonTensors(
        p, grad, short if which == "momentum_buffers" else buffer, master=short if which == "masters" else master
    )
    (group,) = TritonMuon([nn.Parameter(p)]).param_groups
    with pytest.raises(ValueError, match=rf"{which}\[0\] must have the shape of params\[0\], \(8, 32\), got \(4, 32\)"):
        MuonBatchPlan([tensors], rule=rule_of(group), ns=ns_config_of(group), variance=False)
