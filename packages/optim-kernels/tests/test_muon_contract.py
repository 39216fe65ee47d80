"""TritonMuon and TritonMuonAdamW keep the contract of a ``torch.optim`` optimizer."""

from typing import Any

import pytest

from optim_kernels import TritonMuon, TritonMuonAdamW
from optim_utils.testing.contract import OptimizerCase, contract, run_check

pytestmark = pytest.mark.installed

MATRICES = ((8, 6), (6, 10), (4, 8))


def nanochat_muon(params: list[Any], **options: Any) -> TritonMuonAdamW:
    """Every parameter in Muon groups of the mixed optimizer."""
    return _mixed(params, "muon", options)


def mixed_adamw(params: list[Any], **options: Any) -> TritonMuonAdamW:
    """Every parameter in AdamW groups of the mixed optimizer."""
    return _mixed(params, "adamw", options)


def _mixed(params: list[Any], kind: str, options: dict[str, Any]) -> TritonMuonAdamW:
    groups = [dict(p) for p in params] if params and isinstance(params[0], dict) else [{"params": params}]
    of_optimizer = {key: options.pop(key) for key in ("max_norm",) if key in options}
    return TritonMuonAdamW([{"kind": kind, **options, **group} for group in groups], **of_optimizer)


CASES = [
    OptimizerCase("TritonMuon", TritonMuon, {"lr": 0.02}, MATRICES),
    OptimizerCase("TritonMuon.keller", TritonMuon.keller, {"lr": 0.02, "missing_grad": "skip"}, MATRICES),
    OptimizerCase("TritonMuon, NorMuon", TritonMuon, {"lr": 0.02, "beta2": 0.9, "cautious": True}, MATRICES),
    # lr of the mixed optimizer are the defaults of its kinds, which an added group takes
    OptimizerCase("TritonMuonAdamW, muon", nanochat_muon, {"lr": 0.02}, MATRICES, {"kind": "muon"}),
    OptimizerCase("TritonMuonAdamW, adamw", mixed_adamw, {"lr": 3e-4}, group_options={"kind": "adamw"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "check"), contract(CASES), ids=str)
def test_contract(case: OptimizerCase, check: str) -> None:
    run_check(case, check)
