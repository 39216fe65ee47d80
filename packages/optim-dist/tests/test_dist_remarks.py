"""What ``explain()`` remarks on groups."""

import pytest
import torch
from torch import nn

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW
from optim_kernels import VARIANTS

NAMELESS = (
    "parameters without names: 1, which ranks and checkpoints tell apart by their places alone; give "
    "named_parameters() or model="
)


def matrix():
    return ("w", nn.Parameter(torch.randn(8, 4)))


def remarks(optimizer):
    explanation = optimizer.explain()
    assert all(remark in explanation.splitlines() for remark in explanation.data["remarks"])
    return explanation.data["remarks"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_variant_of_muon_groups_is_named(variant):
    assert remarks(TritonDistMuon([matrix()], variant=variant)) == [f"group 0: Muon, variant {variant!r}"]
    group = {"kind": "muon", "params": [matrix()], "lr": 0.3, "weight_decay": 0.1}
    assert remarks(TritonDistMuonAdamW([group], variant=variant)) == [f"group 0: Muon, variant {variant!r}"]


def test_the_variant_of_muon_groups_is_that_of_their_options():
    assert remarks(TritonDistMuon([matrix()])) == ["group 0: Muon, variant 'nanochat-2025'"]
    assert remarks(TritonDistMuon([matrix()], beta2=0.95)) == ["group 0: Muon, variant 'nanochat-2026-01'"]
    groups = [
        {"kind": "adamw", "params": [("b", nn.Parameter(torch.randn(4)))]},
        {"kind": "muon", "params": [matrix()], "ns_steps": 4, "beta2": torch.tensor(0.9)},
    ]
    optimizer = TritonDistMuonAdamW(groups)
    assert remarks(optimizer) == ["group 1: Muon, variant 'nanochat-2026-07', ns_steps=4, beta2=tensor(0.9000)"]
    optimizer.param_groups[1]["norm_scale"] = 1.02
    assert remarks(optimizer)[0].endswith("ns_steps=4, norm_scale=1.02, beta2=tensor(0.9000)")


@pytest.mark.parametrize(("storage", "is_coarse"), [
    ({}, True),
    ({"state_dtype": torch.bfloat16}, True),
    ({"state_dtype": (torch.float32, torch.bfloat16)}, True),
    ({"state_dtype": (None, torch.float32)}, False),
    ({"state_dtype": "int8"}, False),
    ({"stochastic_rounding": True}, False),
], ids=str)  # fmt: skip
def test_second_moments_of_8_bits_that_round_to_nearest_are_remarked(storage, is_coarse):
    parameter = ("w", nn.Parameter(torch.randn(8, 4, dtype=torch.bfloat16)))
    found = remarks(TritonDistAdamW([parameter], **storage))
    assert [remark.startswith("group 0: second moments in bfloat16") for remark in found] == [True] * is_coarse
    assert remarks(TritonDistAdamW([matrix()])) == []


def test_parameters_without_names_are_counted():
    model = nn.Linear(3, 2, bias=False)
    assert remarks(TritonDistAdamW(model.parameters())) == [NAMELESS]
    assert remarks(TritonDistAdamW(model.parameters(), model=model)) == []
    assert remarks(TritonDistAdamW(model.named_parameters())) == []
