"""The contract of a torch optimizer, for all three classes, on one gloo rank and without a process group."""

import pytest

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW
from optim_utils.testing.contract import OptimizerCase, contract, run_check

pytestmark = pytest.mark.installed

MATRICES = ((8, 6), (4, 8), (6, 6))
CODED = ((80, 60), (7,), (4096,))


def muon_adamw(params, lr=0.02, maximize=False, **options):
    """One optimizer for mixed shapes: matrices to Muon, the rest to AdamW, as one or two groups."""
    if params and isinstance(params[0], dict):
        return TritonDistMuonAdamW([{"lr": lr, **group} for group in params], maximize=maximize, **options)
    of = {"muon": [], "adamw": []}
    for item in params:
        tensor = item[1] if isinstance(item, tuple) else item
        of["muon" if tensor.ndim >= 2 else "adamw"].append(item)
    groups = [{"kind": kind, "params": members, "lr": lr} for kind, members in of.items() if members]
    return TritonDistMuonAdamW(groups, maximize=maximize, **options)


CASES = [
    OptimizerCase("TritonDistAdamW", TritonDistAdamW, {"lr": 0.01}),
    OptimizerCase("TritonDistMuon", TritonDistMuon, {"lr": 0.02}, shapes=MATRICES),
    OptimizerCase("TritonDistMuonAdamW", muon_adamw, {"lr": 0.02}, shapes=MATRICES, group_options={"kind": "muon"}),
    OptimizerCase("TritonDistAdamW on a rank", TritonDistAdamW, {"lr": 0.01, "amsgrad": True}, world_size=1),
    OptimizerCase(
        "TritonDistAdamW in 8 bits",
        TritonDistAdamW,
        {"lr": 0.01, "state_dtype": "int8"},
        shapes=CODED,
        skip={"fsdp2": "shards may cut the blocks that share a scale"},
    ),
    OptimizerCase("TritonDistMuon on a rank", TritonDistMuon, {"beta2": 0.95}, shapes=MATRICES, world_size=1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "check"), contract(CASES), ids=str)
def test_contract(case, check):
    run_check(case, check)
