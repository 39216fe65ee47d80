"""Routing: the models named in the documentation, every default, every rule argument, every refusal."""

import copy
import pickle

import pytest
import torch
from torch import nn

from optim_utils.param_groups import MatrixView, Rule, route_parameters


class Conv1D(nn.Module):
    """A linear layer stored (in, out), as transformers' GPT-2 has it."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))


def gpt2(width=768, layers=12, vocabulary=50257, linear=Conv1D):
    """GPT-2's parameters under transformers' names, head tied to the embedding."""

    def block():
        attn = nn.ModuleDict({"c_attn": linear(width, 3 * width), "c_proj": linear(width, width)})
        mlp = nn.ModuleDict({"c_fc": linear(width, 4 * width), "c_proj": linear(4 * width, width)})
        return nn.ModuleDict({"ln_1": nn.LayerNorm(width), "attn": attn, "ln_2": nn.LayerNorm(width), "mlp": mlp})

    trunk = {"wte": nn.Embedding(vocabulary, width), "wpe": nn.Embedding(1024, width)}
    trunk |= {"h": nn.ModuleList(block() for _ in range(layers)), "ln_f": nn.LayerNorm(width)}
    model = nn.ModuleDict({"transformer": nn.ModuleDict(trunk), "lm_head": nn.Linear(width, vocabulary, bias=False)})
    model["lm_head"].weight = model["transformer"]["wte"].weight
    return model


def test_gpt2_124m():
    with torch.device("meta"):
        table = route_parameters(gpt2())
    assert len(table.to("muon")) == 48
    assert sum(route.num_matrices for route in table.to("muon")) == 72
    assert len(table.to("adamw")) == 100
    assert table["lm_head.weight"].names == ("transformer.wte.weight", "lm_head.weight")
    assert table["lm_head.weight"].role == "embedding"
    assert table["transformer.h.0.attn.c_attn.weight"].view.shapes == ((768, 768),) * 3
    assert table["transformer.h.0.mlp.c_fc.weight"].view.shapes == ((3072, 768),)


def test_groups_carry_what_an_optimizer_reads():
    with torch.device("meta"):
        model = gpt2(8, 1, 16)
    table = route_parameters(model, [Rule("*.mlp.c_fc.*", options={"lr": 7.0})])
    groups = table.param_groups(muon={"lr": 1.0}, adamw={"lr": 2.0, "eps": 1e-8}, vector={"lr": 3.0})
    assert [(group["kind"], group["role"], group["lr"], len(group["params"])) for group in groups] == [
        ("muon", "matrix", 1.0, 3),
        ("muon", "matrix", 7.0, 1),
        ("adamw", "embedding", 2.0, 2),
        ("adamw", "vector", 3.0, 9),
        ("adamw", "vector", 7.0, 1),
    ]
    assert all(group["eps"] == 1e-8 for group in groups[2:])
    assert all(("views" in group) == (group["kind"] == "muon") for group in groups)
    assert sorted(name for group in groups for name in group["param_names"]) == sorted(dict(model.named_parameters()))
    named = dict(model.named_parameters())
    for group in groups:
        assert all(named[name] is param for name, param in zip(group["param_names"], group["params"], strict=True))


def test_plain_form_of_a_view_is_builtins_and_comes_back(tmp_path):
    view = MatrixView(shape=(8, 24), split=(8, 8, 8), split_dim=-1, transposed=True, num_heads=(2, 2, 2))
    torch.save(view.to_plain(), tmp_path / "view.pt")
    plain = torch.load(tmp_path / "view.pt", weights_only=True)
    assert MatrixView.from_plain(plain) == view
    assert {view: 1}[pickle.loads(pickle.dumps(view))] == 1
    assert copy.deepcopy(view) == view
    with pytest.raises(ValueError, match="plain form"):
        MatrixView.from_plain({"shape": (2, 2), "sizes": ()})
