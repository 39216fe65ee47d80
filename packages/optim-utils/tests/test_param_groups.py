"""Routing whole models: the ones named in the documentation, the table, the groups, and what holds for every model."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routed_models import Conv1D, Weights, counts, gpt2, llama_7b, nested, resnet50
from torch import nn
from yardsticks import times_as_long

from optim_utils.param_groups import Rule, route_parameters
from optim_utils.testing import run_ranks


def assert_each_in_one_row(model, table):
    assert [route.param for route in table] == list(model.parameters())
    names = [name for route in table for name in route.names]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters(remove_duplicate=False))


@pytest.mark.parametrize(
    "linear", [Conv1D, lambda inputs, outputs: nn.Linear(inputs, outputs)], ids=["Conv1D", "Linear"]
)
def test_gpt2_124m(linear):
    with torch.device("meta"):
        model = gpt2(linear=linear)
    table = route_parameters(model)
    assert_each_in_one_row(model, table)
    assert counts(table) == (48, 72, 100)
    tied = table["lm_head.weight"]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert (tied.kind, tied.role) == ("adamw", "embedding")
    assert table["transformer.h.0.attn.c_attn.weight"].view.shapes == ((768, 768),) * 3
    assert table["transformer.h.0.mlp.c_fc.weight"].view.shapes == ((3072, 768),)
    assert Counter(route.role for route in table.to("adamw")) == {"embedding": 2, "vector": 98}


def test_llama_7b():
    with torch.device("meta"):
        model = llama_7b()
    table = route_parameters(model)
    assert_each_in_one_row(model, table)
    assert counts(table) == (224, 224, 67)
    assert Counter(route.role for route in table.to("adamw")) == {"vector": 65, "embedding": 1, "head": 1}


def test_resnet50():
    with torch.device("meta"):
        model = resnet50()
    table = route_parameters(model)
    assert_each_in_one_row(model, table)
    assert counts(table) == (52, 52, 109)
    assert table["layer1.0.conv2.weight"].view.shapes == ((64, 576),)
    assert table["conv1.weight"].reason == "convolution of 3 input channels"
    assert table["fc.weight"].role == "head"


def test_torch_transformer():
    with torch.device("meta"):
        model = nn.Transformer(8, 2, 2, 2, 16, batch_first=True)
    table = route_parameters(model)
    assert_each_in_one_row(model, table)
    # a layer of the encoder has 3 + 1 + 2 matrices, one of the decoder a second attention
    assert counts(table) == (2 * 4 + 2 * 6, 2 * 6 + 2 * 10, 44)


def test_mixture_of_experts():
    model = nested({"mlp.experts": Weights(w13=(4, 10, 6), w2=(4, 6, 5)), "mlp.router": nn.Linear(6, 4)})
    table = route_parameters(model)
    assert table["mlp.experts.w13"].view.shapes == ((4, 5, 6), (4, 5, 6))
    assert table["mlp.experts.w2"].view.shapes == ((4, 6, 5),)
    assert str(table).count("8 × 5×6") == 1
    stored_transposed = nested({"mlp.experts": Weights(gate_up_proj=(4, 6, 10), down_proj=(4, 5, 6))})
    table = route_parameters(stored_transposed)
    assert table["mlp.experts.gate_up_proj"].view.shapes == ((4, 5, 6), (4, 5, 6))
    assert table["mlp.experts.down_proj"].view.shapes == ((4, 6, 5),)


def test_groups_carry_what_an_optimizer_reads():
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
    named = dict(model.named_parameters())
    assert sorted(name for group in groups for name in group["param_names"]) == sorted(named)
    for group in groups:
        assert all(named[name] is param for name, param in zip(group["param_names"], group["params"], strict=True))
        for param, view in zip(group["params"], group.get("views", group["params"]), strict=True):
            assert tuple(param.shape) == tuple(view.shape)
    # torch's own optimizers take them too
    torch.optim.SGD(groups)


def test_groups_refuse_reserved_options():
    table = route_parameters(gpt2(4, 1, 8))
    with pytest.raises(ValueError, match=r"head: \['kind'\] are written by the table"):
        table.param_groups(head={"kind": "muon"})


def test_only_destinations_that_there_are_have_routes():
    table = route_parameters(gpt2(4, 1, 8))
    assert len(table.to("muon")) + len(table.to("adamw")) + len(table.to("frozen")) == len(table)
    with pytest.raises(ValueError, match="kind has to be one of muon, adamw, frozen, got 'Muon'"):
        table.to("Muon")


def test_a_table_knows_its_names_and_routes():
    linear = nn.Linear(3, 2)
    table, other = route_parameters(linear), route_parameters(linear)
    assert "weight" in table
    assert "weights" not in table
    assert table[0] in table
    assert other[0] not in table
    assert None not in table


def test_the_table_shows_every_parameter_and_totals():
    table = route_parameters(gpt2(4, 1, 8), [Rule("*.c_fc.weight", to="adamw")])
    header, *lines = str(table).splitlines()
    for column in ("name", "shape", "dtype", "numel", "destination", "role", "matrices", "reason", "rule"):
        assert column in header
    assert len(lines) == len(table) + 3
    assert lines[0].startswith("transformer.wte.weight = lm_head.weight  (8, 4)")
    assert "3 × 4×4" in str(table)
    assert "Rule('*.c_fc.weight', to='adamw')" in str(table)
    assert lines[-2:] == [
        "muon: 3 parameters = 5 matrices, 128 elements",
        f"adamw: 13 parameters, {sum(route.param.numel() for route in table.to('adamw')):,} elements",
    ]
    assert lines[-2] in repr(table)
    with pytest.raises(KeyError, match="no parameter is named 'nothing'"):
        table["nothing"]
    assert table[:2] == (table[0], table[1])
    assert table[0] in table


def test_fingerprints_tell_routings_apart():
    model = gpt2(4, 1, 8)
    same = {route_parameters(model).fingerprint(), route_parameters(gpt2(4, 1, 8)).fingerprint()}
    assert len(same) == 1
    for rule in (
        Rule("*.c_fc.weight", to="adamw"),
        Rule("*.c_fc.weight", transposed=False),
        Rule("*wpe*", role="head"),
    ):
        assert route_parameters(model, [rule]).fingerprint() not in same


def _fingerprint_of_sharded(rank, world_size):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import init_device_mesh

    model = fully_shard(gpt2(4, 1, 8), mesh=init_device_mesh("cpu", (world_size,)))
    return route_parameters(model).fingerprint()


def test_sharded_parameters_route_by_their_global_shape_on_every_rank():
    assert set(run_ranks(_fingerprint_of_sharded, 2)) == {route_parameters(gpt2(4, 1, 8)).fingerprint()}


@pytest.mark.timing
def test_10k_parameters_are_routed_and_looked_up_in_linear_time():
    model = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(5000)})
    rules = [Rule("3*.weight", options={"lr": 1}), Rule("re:.*7.bias", to="adamw")]
    names = [name for name, _ in model.named_parameters()]

    def route_and_look_up():
        table = route_parameters(model, rules)
        assert [table[name].name for name in names] == names

    def walk():
        assert len(dict(model.named_modules())) == 5001
        assert len(dict(model.named_parameters())) == 10_000

    # it is 5 to 20, by how busy the caches are; a look at each row for each name makes it 146 and more
    assert times_as_long(route_and_look_up, walk) < 40


def test_tables_are_pickled_and_copied_with_their_parameters():
    model = gpt2(4, 1, 8)
    table = route_parameters(model, [Rule("*.c_fc.*", options={"lr": 1.0})])
    for again in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert str(again) == str(table)
        assert again.fingerprint() == table.fingerprint()
        assert again[0].param is not table[0].param


MODULES = [
    lambda: nn.Linear(4, 12),
    lambda: nn.Linear(3, 2, bias=False),
    lambda: nn.Embedding(5, 4),
    lambda: nn.LayerNorm((2, 3)),
    lambda: nn.Conv2d(6, 4, 3, groups=2),
    lambda: nn.Conv1d(3, 4, 1),
    lambda: nn.Bilinear(2, 3, 4),
    lambda: Conv1D(4, 12),
    lambda: Weights(w13=(2, 6, 4), w2=(2, 4, 3)),
]


NAMES = ["qkv", "experts", "embed", "lm_head", "fc", "w13", "block", "out"]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from(MODULES)), min_size=1),
    st.lists(st.sampled_from(["muon", "adamw", "frozen", None]), max_size=3),
    st.data(),
)
def test_every_parameter_is_in_one_row_and_every_trained_one_in_one_group(parts, destinations, data):
    model = nested({f"{i}.{outer}.{inner}": make() for i, (outer, inner, make) in enumerate(parts)})
    for param in model.parameters():
        param.requires_grad_(data.draw(st.booleans()))
    names = [name for name, _ in model.named_parameters()]
    rules = [Rule(data.draw(st.sampled_from(names)), to=to, options={"lr": 1.0}) for to in destinations]
    table = route_parameters(model, rules, on_unknown="adamw")
    assert [route.name for route in table] == names
    groups = table.param_groups(muon={"lr": 0.1}, adamw={"lr": 0.2})
    assert all(group["params"] for group in groups)
    grouped = sorted(name for group in groups for name in group["param_names"])
    assert grouped == sorted(route.name for route in table if route.kind != "frozen")
    for route in table:
        assert (route.view is not None) == (route.kind == "muon")
        if route.view is not None:
            assert sum(view.numel() for view in route.view.views(route.param)) == route.param.numel()
    assert route_parameters(model, rules, on_unknown="adamw").fingerprint() == table.fingerprint()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["embed", "fc", "block", "out"]), st.integers(0, 2)), min_size=2, max_size=8),
    st.data(),
)
def test_tied_parameters_have_one_row_with_all_names(parts, data):
    """Modules that stand at several places, and weights of one module that another took over."""
    made = [nn.Linear(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)]
    model = nested({f"{i}.{name}": made[which] for i, (name, which) in enumerate(parts)})
    if data.draw(st.booleans()):
        made[0].weight = made[data.draw(st.integers(1, 2))].weight
    data.draw(st.sampled_from(made)).weight.requires_grad_(data.draw(st.booleans()))
    named = list(model.named_parameters(remove_duplicate=False))
    table = route_parameters(model)
    assert [route.name for route in table] == [name for name, _ in model.named_parameters()]
    assert {name: id(route.param) for route in table for name in route.names} == {name: id(p) for name, p in named}
    assert len({id(route.param) for route in table}) == len(table)
    params = [id(p) for group in table.param_groups() for p in group["params"]]
    assert sorted(params) == sorted({id(p) for _, p in named if p.requires_grad})
    # a rule for any of the names is one for the parameter
    name, param = data.draw(st.sampled_from(named))
    (route,) = (route for route in route_parameters(model, Rule(name, to="frozen")) if route.rule is not None)
    assert route.param is param
    assert route.kind == "frozen"
    assert [route.names for route in route_parameters(iter(named))] == [route.names for route in table]
