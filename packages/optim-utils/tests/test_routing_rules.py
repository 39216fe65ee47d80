"""Rules of routing: every argument, which one wins, and which are wrong."""

import copy
import pickle
from collections import Counter

import pytest
import torch
from routed_models import Weights, gpt2, nested
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from optim_utils.param_groups import Rule, UnroutedParameterError, route_parameters
from optim_utils.testing import run_ranks


def route_one(shape, *rules, name="layer.weight"):
    return route_parameters([(name, nn.Parameter(torch.zeros(shape)))], rules)[0]


@pytest.mark.parametrize(
    ("shape", "options", "shapes"),
    [
        ((8, 4), {"split": (4, 2, 2)}, ((4, 4), (2, 4), (2, 4))),
        ((4, 8), {"split": [4, 2, 2]}, ((4, 4), (4, 2), (4, 2))),
        ((4, 8), {"split": (4, 2, 2), "transposed": True}, ((4, 4), (2, 4), (2, 4))),
        ((8, 4), {"split": 2}, ((4, 4),) * 2),
        ((4, 8), {"split": 2}, ((4, 4),) * 2),
        ((4, 4), {"split": 2, "split_dim": 1}, ((4, 2),) * 2),
        ((4, 4), {"split": 2, "split_dim": -2}, ((2, 4),) * 2),
        ((12, 4), {"split": 3, "num_heads": 2}, ((2, 2, 4),) * 3),
        ((8, 4), {"split": (4, 2, 2), "num_heads": 2}, ((2, 2, 4), (1, 2, 4), (1, 2, 4))),
        ((8, 4), {"split": (4, 2, 2), "num_heads": (4, 1, 2)}, ((4, 1, 4), (1, 2, 4), (2, 1, 4))),
        ((4, 6), {"num_heads": 2}, ((2, 2, 6),)),
        ((4, 6), {"transposed": True, "num_heads": 3}, ((3, 2, 4),)),
        ((0, 6), {"num_heads": 3}, ((3, 0, 6),)),
        ((6, 0), {"transposed": True, "split": 2, "split_dim": -2, "num_heads": 3}, ((3, 0, 3), (3, 0, 3))),
        ((5, 4, 6), {"batched": True}, ((5, 4, 6),)),
        ((5, 4, 6), {"batched": False}, ((5, 24),)),
        ((6, 4, 6), {"batched": False, "split": 2, "split_dim": 0}, ((3, 24),) * 2),
        ((2, 5, 4, 6), {"batched": True, "split": 2}, ((2, 5, 2, 6),) * 2),
        ((5, 4, 6), {"batched": True, "split": (1, 5), "split_dim": 2, "transposed": True}, ((5, 1, 4), (5, 5, 4))),
    ],
)
def test_rules_about_matrices(shape, options, shapes):
    route = route_one(shape, Rule("layer.weight", **options))
    assert (route.kind, route.role) == ("muon", "matrix")
    assert route.view.shapes == shapes
    assert [tuple(view.shape) for view in route.view.views(torch.zeros(shape))] == list(shapes)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 4), {"split": (4, 2)}, r"split=\(4, 2\) adds up to 6, not to 8 or 4"),
        ((8, 4), {"split": 3}, "8 does not divide into 3 equal parts"),
        ((8, 4), {"split": 2, "split_dim": 2}, "split_dim=2 is no dimension"),
        ((8, 4), {"num_heads": 3}, "8 rows do not divide into 3 heads"),
        ((8, 4), {"split": (4, 1, 3), "num_heads": 2}, "do not all divide into heads of 2 rows"),
        ((8, 4), {"split": (4, 4), "num_heads": (2, 2, 2)}, "each of the 2 parts"),
        ((2, 3, 4), {"split": 2, "batched": True, "split_dim": 0}, "no row or column"),
        ((4, 6, 2), {"split": 2, "batched": False, "split_dim": 1}, "no row or column"),
        ((2, 3, 4), {"split": 2}, "nothing says what its matrices are"),
        ((8,), {"to": "muon"}, r"Muon takes matrices, got shape \(8,\)"),
    ],
)
def test_rules_that_do_not_fit(shape, options, message):
    with pytest.raises(UnroutedParameterError, match=message):
        route_one(shape, Rule("layer.weight", **options))


@pytest.mark.parametrize(
    ("name", "shape", "options", "proposed"),
    [
        ("a.weight", (2, 6, 4), {"batched": True, "split": 5}, ["split=1, batched=True"]),
        ("a.qkv", (4, 6), {"transposed": True}, [f"split={s}, transposed=True" for s in ((4, 1, 1), 3, 1)]),
        ("a.weight", (2, 6, 4), {"split": 2}, [f"to='muon', split=2, batched={b}" for b in (True, False)]),
        ("a.weight", (6, 4), {"num_heads": 4, "options": {"lr": 0.1}}, ["split=1, options={'lr': 0.1}"]),
        ("a.qkv", (8, 8, 4), {"split": (4, 2, 2)}, [f"to='muon', split=(4, 2, 2), batched={b}" for b in (True, False)]),
        ("a.gate_up_proj", (2, 6, 4), {"split": 1}, [f"to='muon', split=1, batched={b}" for b in (True, False)]),
        ("a.gate_up_proj", (2, 6, 4), {"transposed": False}, ["split=2, split_dim=-2, transposed=False, batched=True"]),
        ("a.gate_up_proj", (2, 6, 4), {"transposed": True}, ["split=2, split_dim=-1, transposed=True, batched=True"]),
    ],
    ids=["stack", "transposed", "whole-or-stack", "options", "qkv", "gate-up", "gate-up-rows", "gate-up-columns"],
)
def test_rules_to_paste_keep_what_the_rule_in_their_place_says(name, shape, options, proposed):
    with pytest.raises(UnroutedParameterError) as error:
        route_one(shape, Rule("*", **options), name=name)
    lines = [line.strip() for line in str(error.value).splitlines() if "Rule(" in line]
    pasted = [eval(line) for line in lines if "to='adamw'" not in line]
    assert pasted == [eval(f"Rule({name!r}, {arguments})") for arguments in proposed]
    assert [route_one(shape, rule, name=name).kind for rule in pasted] == ["muon"] * len(pasted)


@pytest.mark.parametrize(("transposed", "shapes"), [(False, ((2, 3, 4),) * 2), (True, ((2, 2, 6),) * 2)])
def test_a_rule_that_knows_the_storage_knows_along_which_dimension_gate_and_up_are_fused(transposed, shapes):
    rule = Rule("*", batched=True, transposed=transposed)
    assert route_one((2, 6, 4), rule, name="a.gate_up_proj").view.shapes == shapes


def test_muon_is_given_no_numbers_that_it_does_not_take():
    param = nn.Parameter(torch.zeros(2, 3, dtype=torch.complex64))
    with pytest.raises(UnroutedParameterError, match=r"Muon takes real .* matrices, got torch\.complex64"):
        route_parameters([("layer.weight", param)], Rule("*", to="muon"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"to": "adamw"}, ("adamw", "matrix")),
        ({"to": "muon"}, ("muon", "matrix")),
        ({"to": "frozen"}, ("frozen", "frozen")),
        ({"role": "frozen"}, ("frozen", "frozen")),
        ({"role": "matrix"}, ("muon", "matrix")),
        ({"role": "head"}, ("adamw", "head")),
        ({"to": "adamw", "role": "vector"}, ("adamw", "vector")),
        ({"to": "adamw", "role": "matrix"}, ("adamw", "matrix")),
        ({"options": {"lr": 1.0}}, ("muon", "matrix")),
    ],
)
def test_rules_about_destinations(options, expected):
    route = route_one((3, 2), Rule("*", **options))
    assert (route.kind, route.role) == expected


def test_a_rule_for_adamw_keeps_the_role_that_the_default_would_give():
    model = gpt2(4, 1, 8)
    table = route_parameters(model, [Rule("*", to="adamw")])
    assert Counter(route.role for route in table) == {"matrix": 4, "embedding": 2, "vector": 10}
    # of which the first would be one row, too
    convolutions = nested({"a": nn.Conv1d(3, 1, 1), "b": nn.Conv1d(8, 1, 3), "c": nn.Conv1d(8, 6, 3)})
    by_default = [route.role for route in route_parameters(convolutions)]
    assert [route.role for route in route_parameters(convolutions, Rule("*", to="adamw"))] == by_default


def test_the_first_rule_that_matches_wins(caplog):
    first, second, late = Rule("a.weight", to="adamw"), Rule("*.weight", to="muon"), Rule("re:[ab].weight", to="adamw")
    table = route_parameters(nested({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)}), [first, second, late])
    assert [route.rule for route in table] == [first, None, second, None]
    assert "decides nothing: earlier rules match" in caplog.text


def test_patterns_match_whole_names_with_or_without_wrappers():
    inner = nested({"block.0": nn.Linear(3, 2)})
    wrapped = nested({"module": nested({"_orig_mod": inner})})
    for pattern in ("module._orig_mod.block.0.weight", "block.?.weight", "re:block.[0-9].weight", "*.weight"):
        assert route_parameters(wrapped, [Rule(pattern, to="adamw")])[0].kind == "adamw"
    for pattern in ("block", "0.weight", "re:block", "re:lock.0.weight"):
        with pytest.raises(ValueError, match=r"matches none of the 2 parameters; names like it: .*block\.0\.weight"):
            route_parameters(wrapped, [Rule(pattern, to="adamw")])


def test_a_name_is_a_pattern_of_itself():
    # as a glob, "[0]" is the character 0: the rule to paste would match nothing
    named = [("blocks[0].kernel", nn.Parameter(torch.zeros(2, 3, 4)))]
    with pytest.raises(UnroutedParameterError, match=r"Rule\('blocks\[0\]\.kernel', to='adamw'\)"):
        route_parameters(named)
    assert route_parameters(named, Rule("blocks[0].kernel", to="adamw"))[0].kind == "adamw"


def test_fused_weights_that_keep_each_head_together():
    """GPT-NeoX's storage, as the README has it: a head's Q, K and V, then the next head's."""
    heads, head_dim, width = 2, 3, 6
    stored = torch.randn(heads, 3, head_dim, width)
    model = nested({"attention.query_key_value": Weights(weight=stored.reshape(-1, width))})
    (route,) = route_parameters(model, Rule("*.query_key_value.weight", split=1, num_heads=3 * heads))
    (view,) = route.view.views(route.param)
    assert torch.equal(view, stored.flatten(0, 1))


def test_names_that_peft_gives():
    """peft puts ``base_model.model`` in front, and keeps trained copies of modules by the names of adapters."""
    layer = "base_model.model.encoder.0.dense"
    modules = {
        f"{layer}.base_layer": nn.Linear(3, 2),
        f"{layer}.lora_A.default": nn.Linear(3, 4, bias=False),
        f"{layer}.lora_B.default": nn.Linear(4, 2, bias=False),
        "base_model.model.classifier.original_module": nn.Linear(3, 2, bias=False),
        "base_model.model.classifier.modules_to_save.default": nn.Linear(3, 2, bias=False),
    }
    model = nested(modules)
    for name, param in model.named_parameters():
        param.requires_grad_("lora" in name or "modules_to_save" in name)
    for wrapped in (model, nested({"module": model})):
        table = route_parameters(wrapped)
        assert [route.role for route in table] == ["frozen", "frozen", "matrix", "matrix", "frozen", "head"]
        assert route_parameters(wrapped, [Rule("classifier.weight", to="muon")])[-1].kind == "muon"
    table = route_parameters(nested({"base_model.model.qkv.base_layer": nn.Linear(3, 9, bias=False)}))
    assert table[0].num_matrices == 3


def test_parameters_that_fsdp1_has_flattened_are_refused():
    """Their matrices are gone: as vectors they would all be AdamW's, without a word."""
    run_ranks(_flattened_parameters, 2)


def _flattened_parameters(rank, world_size):
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            nested({"a.b": nn.Linear(4, 6)}), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        with pytest.raises(UnroutedParameterError, match=r"flattened by FullyShardedDataParallel.*use fully_shard"):
            route_parameters(model)
        table = route_parameters(model, [Rule("*", to="adamw")])
        assert {route.kind for route in table} == {"adamw"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "sgd"}, "to has to be one of muon, adamw, frozen"),
        ({"role": "body"}, "role has to be one of matrix, embedding"),
        ({"to": "muon", "role": "head"}, "role 'head' is updated by AdamW"),
        ({"to": "muon", "role": "frozen"}, "role 'frozen' is updated by no optimizer; drop role or to"),
        ({"to": "adamw", "role": "frozen"}, "role 'frozen' is updated by no optimizer; drop role or to"),
        ({"to": "adamw", "split": 2}, "which only Muon sees"),
        ({"role": "head", "num_heads": 2}, "which only Muon sees"),
        ({"options": {"params": []}}, r"\['params'\] are written by the routing"),
        ({"split": 0}, "split has to be an integer or a sequence of integers, each at least 1, got 0"),
        ({"split": "qkv"}, "split has to be an integer or a sequence of integers, each at least 1, got 'qkv'"),
        ({"split": 2.0}, "each at least 1, got 2.0"),
        ({"split": True}, "each at least 1, got True"),
        ({"num_heads": (2, True)}, r"each at least 1, got \(2, True\)"),
        ({"num_heads": ()}, r"num_heads has to be .*, got \(\)"),
    ],
)
def test_wrong_rules(options, message):
    with pytest.raises(ValueError, match=message):
        Rule("*", **options)


def test_rules_of_a_wrong_type():
    with pytest.raises(TypeError, match="pattern has to be a string, got a int"):
        Rule(3)
    with pytest.raises(TypeError, match="pattern has to be a string, got a NoneType"):
        Rule(None, to="adamw")
    # whoever writes a number may mean how many matrices there are, or along which dimension they lie
    with pytest.raises(TypeError, match=r"Rule\('\*', batched=8\): batched has to be True or False"):
        Rule("*", batched=8)
    with pytest.raises(TypeError, match=r"Rule\('\*', transposed='no'\): transposed has to be True or False"):
        Rule("*", transposed="no")
    for wrong in (0.5, True, "rows"):
        with pytest.raises(TypeError, match="split_dim has to be an integer"):
            Rule("*", split=2, split_dim=wrong)
    with pytest.raises(TypeError, match="options has to be a mapping, got a list"):
        Rule("*", options=[("lr", 1.0)])
    model = nested({"a": nn.Linear(3, 2)})
    with pytest.raises(TypeError, match=r"rules are Rule objects, got '\*'; write Rule\('\*', to=...\)"):
        route_parameters(model, ["*"])
    with pytest.raises(TypeError, match="rules has to be iterable, got a NoneType"):
        route_parameters(model, None)
    with pytest.raises(TypeError, match="adamw has to be a mapping of options, got a float"):
        route_parameters(model).param_groups(adamw=0.1)
    assert route_parameters(model, Rule("*", to="adamw"))[0].kind == "adamw"


def test_a_rule_prints_as_it_was_written():
    rule = Rule("a.*", "muon", split=(2, 1, 1), options={"lr": 0.1})
    assert repr(rule) == "Rule('a.*', to='muon', split=(2, 1, 1), options={'lr': 0.1})"
    assert eval(repr(rule)) == rule
    assert pickle.loads(pickle.dumps(rule)) == copy.deepcopy(rule) == rule
    with pytest.raises(ValueError, match="not a regular expression"):
        Rule("re:(", to="muon")
