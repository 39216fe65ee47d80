"""Routing: the models named in the documentation, every default, every rule argument, every refusal."""

import copy
import pickle
import time
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from optim_utils import CombinedLinear
from optim_utils.param_groups import MatrixView, Rule, UnroutedParameterError, route_parameters
from optim_utils.testing import run_ranks


class Conv1D(nn.Module):
    """A linear layer stored (in, out), as transformers' GPT-2 has it."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features))


class RootNorm(nn.Module):
    """A norm of somebody's own, known by its class name."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class Weights(nn.Module):
    """A module with bare parameters, given by shape or value: ``Weights(w1=(4, 3, 2))``."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            value = value if isinstance(value, torch.Tensor) else torch.zeros(value)
            self.register_parameter(name, nn.Parameter(value))


def nested(modules):
    """Modules under dotted names."""
    root = nn.Module()
    for name, module in modules.items():
        parent = root
        *path, last = name.split(".")
        for component in path:
            if component not in dict(parent.named_children()):
                parent.add_module(component, nn.Module())
            parent = parent.get_submodule(component)
        parent.add_module(last, module)
    return root


def gpt2(width=768, layers=12, vocabulary=50257, linear=Conv1D):
    """GPT-2's parameters under transformers' names, head tied to the embedding."""
    modules = {"transformer.wte": nn.Embedding(vocabulary, width), "transformer.wpe": nn.Embedding(1024, width)}
    for i in range(layers):
        block = f"transformer.h.{i}"
        modules[f"{block}.ln_1"] = nn.LayerNorm(width)
        modules[f"{block}.attn.c_attn"] = linear(width, 3 * width)
        modules[f"{block}.attn.c_proj"] = linear(width, width)
        modules[f"{block}.ln_2"] = nn.LayerNorm(width)
        modules[f"{block}.mlp.c_fc"] = linear(width, 4 * width)
        modules[f"{block}.mlp.c_proj"] = linear(4 * width, width)
    modules |= {"transformer.ln_f": nn.LayerNorm(width), "lm_head": nn.Linear(width, vocabulary, bias=False)}
    model = nested(modules)
    model.lm_head.weight = model.transformer.wte.weight
    return model


def llama_7b():
    width, hidden = 4096, 11008
    modules = {"model.embed_tokens": nn.Embedding(32000, width)}
    for i in range(32):
        block = f"model.layers.{i}"
        for name in "qkvo":
            modules[f"{block}.self_attn.{name}_proj"] = nn.Linear(width, width, bias=False)
        modules[f"{block}.mlp.gate_proj"] = nn.Linear(width, hidden, bias=False)
        modules[f"{block}.mlp.up_proj"] = nn.Linear(width, hidden, bias=False)
        modules[f"{block}.mlp.down_proj"] = nn.Linear(hidden, width, bias=False)
        modules[f"{block}.input_layernorm"] = RootNorm(width)
        modules[f"{block}.post_attention_layernorm"] = RootNorm(width)
    return nested(modules | {"model.norm": RootNorm(width), "lm_head": nn.Linear(width, 32000, bias=False)})


def resnet50():
    modules = {"conv1": nn.Conv2d(3, 64, 7, bias=False), "bn1": nn.BatchNorm2d(64)}
    channels = 64
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for i in range(blocks):
            block = f"layer{stage}.{i}"
            for j, (inputs, outputs, size) in enumerate(
                ((channels, width, 1), (width, width, 3), (width, 4 * width, 1)), start=1
            ):
                modules[f"{block}.conv{j}"] = nn.Conv2d(inputs, outputs, size, bias=False)
                modules[f"{block}.bn{j}"] = nn.BatchNorm2d(outputs)
            if i == 0:
                modules[f"{block}.downsample.0"] = nn.Conv2d(channels, 4 * width, 1, bias=False)
                modules[f"{block}.downsample.1"] = nn.BatchNorm2d(4 * width)
            channels = 4 * width
    return nested(modules | {"fc": nn.Linear(2048, 1000)})


def roles(table):
    return {route.name: route.role for route in table}


def counts(table):
    """Parameters and matrices to Muon, parameters to AdamW."""
    muon = table.to("muon")
    return len(muon), sum(route.num_matrices for route in muon), len(table.to("adamw"))


# --- whole models -----------------------------------------------------------------------------------------------------


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


# --- defaults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"a.b": nn.Linear(3, 2)}, {"a.b.weight": "matrix", "a.b.bias": "vector"}),
        ({"scale": Weights(value=())}, {"scale.value": "vector"}),
        ({"mixer": Weights(A_log=(6, 4), D=(6,))}, {"mixer.A_log": "vector", "mixer.D": "vector"}),
        ({"attn": Weights(relative_position_bias_table=(9, 2))}, {"attn.relative_position_bias_table": "vector"}),
        ({"norm": nn.LayerNorm((3, 2))}, {"norm.weight": "vector", "norm.bias": "vector"}),
        ({"a": RootNorm(3, 2)}, {"a.weight": "vector"}),
        ({"a": nn.Embedding(5, 2)}, {"a.weight": "embedding"}),
        ({"a": nn.EmbeddingBag(5, 2)}, {"a.weight": "embedding"}),
        ({"x.wte": Weights(weight=(5, 2))}, {"x.wte.weight": "embedding"}),
        ({"x": Weights(pos_embed=(1, 5, 2))}, {"x.pos_embed": "embedding"}),
        ({"x.lm_head.dense": nn.Linear(3, 2, bias=False)}, {"x.lm_head.dense.weight": "head"}),
        ({"classifier": nn.Linear(3, 2, bias=False)}, {"classifier.weight": "head"}),
        ({"classifier": CombinedLinear(3, 2)}, {"classifier.combined_weight": "head"}),
        (
            {"mlp.experts": Weights(up=(4, 3, 2), up_bias=(4, 3), bias=(4, 2))},
            {"mlp.experts.up": "matrix", "mlp.experts.up_bias": "vector", "mlp.experts.bias": "vector"},
        ),
        ({"module": nested({"score": nn.Linear(3, 2, bias=False)})}, {"module.score.weight": "head"}),
        (
            {"module": nested({"_orig_mod.fc": nn.Linear(3, 2, bias=False)})},
            {"module._orig_mod.fc.weight": "head"},
        ),
        (
            {"attention.output.dense": nn.Linear(3, 2, bias=False), "x.output": nn.Linear(3, 2, bias=False)},
            {"attention.output.dense.weight": "matrix", "x.output.weight": "matrix"},
        ),
        ({"fc": Weights(weight=(3, 2))}, {"fc.weight": "matrix"}),
        # a weight norm's magnitudes, one gate for all experts, a token that is learned, a score of one number
        ({"a": Weights(weight_g=(3, 1), weight_v=(3, 2))}, {"a.weight_g": "vector", "a.weight_v": "matrix"}),
        ({"a": Weights(shared_gate=(1, 3), token=(1, 1, 3))}, {"a.shared_gate": "vector", "a.token": "vector"}),
        ({"score": nn.Linear(3, 1, bias=False)}, {"score.weight": "head"}),
        ({"embed": Weights(weight=(1, 3))}, {"embed.weight": "embedding"}),
        (
            {"layers.0.mixer": Weights(A_log=(4, 3), D=(4,))},
            {"layers.0.mixer.A_log": "vector", "layers.0.mixer.D": "vector"},
        ),
    ],
)
def test_roles(modules, expected):
    table = route_parameters(nested(modules))
    assert roles(table) == expected
    assert {route.name for route in table.to("muon")} == {name for name, role in expected.items() if role == "matrix"}


@pytest.mark.parametrize("magnitude_dim", [0, None])
def test_the_magnitudes_of_a_weight_norm_are_a_vector(magnitude_dim):
    model = nested({"block.0": nn.Linear(3, 2, bias=False)})
    nn.utils.parametrizations.weight_norm(model.get_submodule("block.0"), dim=magnitude_dim)
    assert list(roles(route_parameters(model)).values()) == ["vector", "matrix"]


@pytest.mark.parametrize(
    ("module", "kind", "shapes"),
    [
        (nn.Conv2d(4, 8, 3, bias=False), "adamw", None),
        (nn.Conv2d(5, 8, 3, bias=False), "muon", ((8, 45),)),
        (nn.Conv1d(6, 6, 3, groups=6, bias=False), "adamw", None),
        (nn.Conv1d(6, 8, 3, groups=2, bias=False), "muon", ((2, 4, 9),)),
        (nn.Conv3d(6, 2, (1, 2, 3), bias=False), "muon", ((2, 36),)),
        (nn.ConvTranspose2d(6, 8, 2, bias=False), "muon", ((32, 6),)),
        (nn.ConvTranspose2d(6, 8, 2, groups=2, bias=False), "muon", ((2, 16, 3),)),
    ],
)
def test_convolutions(module, kind, shapes):
    route = route_parameters(nested({"body": module}))["body.weight"]
    assert (route.kind, route.role) == (kind, "matrix")
    assert (route.view.shapes if route.view else None) == shapes


PARAMETRIZED = [
    (nn.Linear(4, 6, bias=False), "body", ("muon", "matrix", ((6, 4),))),
    (nn.Linear(4, 12, bias=False), "qkv", ("muon", "matrix", ((4, 4),) * 3)),
    (nn.Linear(4, 6, bias=False), "head", ("adamw", "head", None)),
    (nn.Embedding(6, 4), "words", ("adamw", "embedding", None)),
    (nn.Conv2d(5, 8, 3, bias=False), "body", ("muon", "matrix", ((8, 45),))),
    (nn.Conv2d(3, 8, 3, bias=False), "stem", ("adamw", "matrix", None)),
    (nn.Conv1d(6, 6, 3, groups=6, bias=False), "body", ("adamw", "matrix", None)),
    (nn.ConvTranspose2d(6, 8, 2, bias=False), "body", ("muon", "matrix", ((32, 6),))),
]


@pytest.mark.parametrize("wrapped", ["", "_orig_mod"], ids=["plain", "compiled"])
@pytest.mark.parametrize("norm", ["weight", "old weight", "spectral"])
@pytest.mark.parametrize(("module", "name", "expected"), PARAMETRIZED)
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_what_a_weight_is_computed_from_is_routed_as_the_weight(module, name, expected, norm, wrapped):
    module = copy.deepcopy(module)
    if norm == "weight":
        nn.utils.parametrizations.weight_norm(module)
        suffixes = {"parametrizations.weight.original1": expected, "parametrizations.weight.original0": None}
    elif norm == "old weight":
        nn.utils.weight_norm(module)
        suffixes = {"weight_v": expected, "weight_g": None}
    else:
        nn.utils.parametrizations.spectral_norm(module)
        suffixes = {"parametrizations.weight.original": expected}
    prefix = f"{wrapped}.{name}".strip(".")
    model = nested({prefix: module})
    for table in (route_parameters(model), route_parameters(model, Rule(f"{prefix}.*", options={"lr": 1.0}))):
        for suffix, routing in suffixes.items():
            route = table[f"{prefix}.{suffix}"]
            found = route.kind, route.role, None if route.view is None else route.view.shapes
            assert found == (routing or ("adamw", "vector", None))


def test_rules_for_a_weight_are_for_its_direction():
    model = nested({"attention": nn.Linear(4, 8, bias=False)})
    nn.utils.parametrizations.weight_norm(model.attention)
    table = route_parameters(model, Rule("attention.weight", split=(4, 2, 2)))
    assert [(route.role, route.num_matrices) for route in table] == [("vector", 0), ("matrix", 3)]


def test_channels_last_convolutions_are_viewed_without_a_copy():
    module = nn.Conv2d(6, 8, 3, bias=False).to(memory_format=torch.channels_last)
    view = route_parameters(nested({"body": module}))["body.weight"].view
    (matrix,) = view.views(module.weight)
    assert matrix.data_ptr() == module.weight.data_ptr()
    plain = module.weight.reshape(8, -1)
    assert torch.equal(matrix.T.unique(dim=0), plain.T.unique(dim=0)), "the columns are permuted, nothing else"
    with pytest.raises(ValueError, match=r"cannot be viewed as \(8, 54\) without a copy"):
        view.views(module.weight.detach().contiguous())


@pytest.mark.parametrize(
    ("name", "shape", "shapes"),
    [
        ("attn.qkv.weight", (12, 4), ((4, 4),) * 3),
        ("attn.in_proj_weight", (12, 4), ((4, 4),) * 3),
        ("attn.query_key_value.weight", (12, 4), ((4, 4),) * 3),
        ("attn.c_attn.weight", (4, 12), ((4, 4),) * 3),
        ("mlp.gate_up_proj.weight", (12, 4), ((6, 4),) * 2),
        ("mlp.w13.weight", (12, 4), ((6, 4),) * 2),
        ("attn.qkv_norm_scale", (12,), None),
        ("attn.q_proj.weight", (12, 4), ((12, 4),)),
    ],
)
def test_fused_weights_by_name_alone(name, shape, shapes):
    route = route_parameters([(name, nn.Parameter(torch.zeros(shape)))])[0]
    assert (route.view.shapes if route.view else None) == shapes


def test_fused_convolution():
    model = nested({"attn.qkv": nn.Conv2d(6, 18, 1, bias=False), "conv.qkv": nn.Conv1d(6, 18, 3, bias=False)})
    table = route_parameters(model)
    assert table["attn.qkv.weight"].view.shapes == ((6, 6),) * 3
    assert table["conv.qkv.weight"].view.shapes == ((6, 18),) * 3


def test_frozen_parameters_are_listed_and_in_no_group():
    model = nested({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    model.a.requires_grad_(False)
    table = route_parameters(model, [Rule("*.weight", transposed=False)])
    assert [route.name for route in table.to("frozen")] == ["a.weight", "a.bias"]
    assert [name for group in table.param_groups() for name in group["param_names"]] == ["b.weight", "b.bias"]
    # a rule that names the destination comes before requires_grad
    assert route_parameters(model, [Rule("a.*", to="adamw")])["a.bias"].reason == "rule; needs no gradient now"


def test_names_may_come_as_pairs_or_a_mapping():
    model = gpt2(4, 1, 8)
    by_pairs = route_parameters(model.named_parameters(remove_duplicate=False))
    by_mapping = route_parameters(dict(model.named_parameters(remove_duplicate=False)))
    assert by_pairs.fingerprint() == by_mapping.fingerprint()
    assert by_pairs["lm_head.weight"].names == ("transformer.wte.weight", "lm_head.weight")
    assert counts(by_pairs) == counts(route_parameters(model))


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ([], ValueError, "no parameters to route"),
        ([nn.Parameter(torch.zeros(2))], TypeError, r"got a Parameter among them; pass the model, or model.named_"),
        ([("a", 3)], TypeError, r"\(name, parameter\) pairs, got a tuple"),
        (None, TypeError, r"\(name, parameter\) pairs, got a NoneType"),
        ([("a", nn.Parameter(torch.zeros(1))), ("a", nn.Parameter(torch.zeros(1)))], ValueError, "are named 'a'"),
    ],
)
def test_wrong_sources(source, error, message):
    with pytest.raises(error, match=message):
        route_parameters(source)


# --- refusals ---------------------------------------------------------------------------------------------------------


def refused():
    """A model in which every trained weight is refused, but one."""
    return nested(
        {
            "fine": nn.Linear(3, 2),
            "bilinear": nn.Bilinear(3, 4, 2, bias=False),
            "attn.qkv": nn.Linear(8, 16, bias=False),
            "odd.qkv": nn.Linear(8, 17, bias=False),
            "mlp.w13": nn.Linear(8, 15, bias=False),
            "moe.experts": Weights(gate_up_proj=(2, 6, 10)),
            "moe.w13": Weights(weight=(2, 6, 10)),
            "ffn.w13": Weights(weight=(2, 5, 7)),
            "stack.qkv": Weights(weight=(2, 5, 7)),
            "bag": nn.EmbeddingBag(5, 2, sparse=True, mode="sum"),
            "phase": Weights(weight=torch.zeros(2, 3, dtype=torch.complex64)),
        }
    )


def test_all_refusals_come_in_one_error_with_rules_that_work_when_pasted():
    model = refused()
    with pytest.raises(UnroutedParameterError) as caught:
        route_parameters(model)
    text = str(caught.value)
    names = [name for name, _ in model.named_parameters() if not name.startswith("fine")]
    assert list(caught.value.unrouted) == names
    assert isinstance(caught.value, ValueError)
    assert pickle.loads(pickle.dumps(caught.value)).unrouted == caught.value.unrouted
    for name, param in model.named_parameters():
        shape = f"({', '.join(map(str, param.shape))})"
        assert (f"{name}  {shape}  {param.dtype}: " in text) == (name in names)
    suggestions = [line.strip() for line in text.splitlines() if line.startswith("      ")]
    assert "Rule('attn.qkv.weight', split=(8, 4, 4))" in suggestions
    rules = [eval(suggestion) for suggestion in suggestions]
    assert {rule.pattern for rule in rules} == set(names)
    for rule in rules:
        others = [other for other in rules if other.pattern != rule.pattern]
        route = route_parameters(model, [rule, *others])[rule.pattern]
        assert route.rule is rule


@pytest.mark.parametrize("to", [None, "adamw", "muon", "frozen"])
@pytest.mark.parametrize("on_unknown", ["raise", "adamw"])
def test_lazy_parameters_are_refused(to, on_unknown):
    model = nested({"a": nn.LazyLinear(3), "unknown": Weights(weight=torch.zeros(2, 3, 4))})
    rules = [Rule("a.*", to=to)] if to is not None else []
    with pytest.raises(UnroutedParameterError, match="run the lazy module once") as caught:
        route_parameters(model, rules, on_unknown=on_unknown)
    others = ["unknown.weight"] if on_unknown == "raise" else []
    assert list(caught.value.unrouted) == ["a.weight", "a.bias", *others]
    model.a(torch.zeros(1, 2))
    route_parameters(model, rules, on_unknown="adamw")


def test_unknown_parameters_go_to_adamw_only_when_told_to():
    table = route_parameters(refused(), on_unknown="adamw")
    assert counts(table) == (1, 1, len(table) - 1)
    assert str(table).count("UNKNOWN, by on_unknown: ") == len(table) - 2
    with pytest.raises(ValueError, match='"raise" or "adamw", got \'muon\''):
        route_parameters(refused(), on_unknown="muon")


# --- rules ------------------------------------------------------------------------------------------------------------


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
        ((5, 4, 6), {"batched": True}, ((5, 4, 6),)),
        ((5, 4, 6), {"batched": False}, ((5, 24),)),
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
        ((2, 3, 4), {"split": 2}, "nothing says what its matrices are"),
        ((8,), {"to": "muon"}, r"Muon takes matrices, got shape \(8,\)"),
    ],
)
def test_rules_that_do_not_fit(shape, options, message):
    with pytest.raises(UnroutedParameterError, match=message):
        route_one(shape, Rule("layer.weight", **options))


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
        ({"to": "adamw", "split": 2}, "which only Muon sees"),
        ({"role": "head", "num_heads": 2}, "which only Muon sees"),
        ({"options": {"params": []}}, r"\['params'\] are written by the routing"),
        ({"split": 0}, "split has to be an integer or a sequence of integers, each at least 1, got 0"),
        ({"split": "qkv"}, "split has to be an integer or a sequence of integers, each at least 1, got 'qkv'"),
        ({"split": 2.0}, "each at least 1, got 2.0"),
        ({"num_heads": ()}, r"num_heads has to be .*, got \(\)"),
    ],
)
def test_wrong_rules(options, message):
    with pytest.raises(ValueError, match=message):
        Rule("*", **options)


def test_rules_of_a_wrong_type():
    with pytest.raises(TypeError, match="pattern has to be a string, got a int"):
        Rule(3)
    with pytest.raises(TypeError, match="options has to be a mapping, got a list"):
        Rule("*", options=[("lr", 1.0)])
    model = nested({"a": nn.Linear(3, 2)})
    with pytest.raises(TypeError, match=r"rules are Rule objects, got '\*'; write Rule\('\*', to=...\)"):
        route_parameters(model, ["*"])
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


# --- tables, groups, views --------------------------------------------------------------------------------------------


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
def test_10k_parameters_route_in_half_a_second():
    with torch.device("meta"):
        model = nn.ModuleDict({str(i): nn.Linear(4, 4) for i in range(5000)})
    rules = [Rule("3*.weight", options={"lr": 1}), Rule("re:.*7.bias", to="adamw")]
    times = []
    for _ in range(3):
        start = time.process_time()
        assert len(route_parameters(model, rules)) == 10_000
        times.append(time.process_time() - start)
    assert min(times) < 0.5


def test_plain_form_of_a_view_is_builtins_and_comes_back(tmp_path):
    view = MatrixView(shape=(8, 24), split=(8, 8, 8), split_dim=-1, transposed=True, num_heads=(2, 2, 2))
    torch.save(view.to_plain(), tmp_path / "view.pt")
    plain = torch.load(tmp_path / "view.pt", weights_only=True)
    assert MatrixView.from_plain(plain) == view
    assert {view: 1}[pickle.loads(pickle.dumps(view))] == 1
    assert copy.deepcopy(view) == view
    assert eval(repr(view)) == view
    assert view.describe() == "6 × 4×8"
    with pytest.raises(ValueError, match="plain form"):
        MatrixView.from_plain({"shape": (2, 2), "sizes": ()})


def test_tables_are_pickled_and_copied_with_their_parameters():
    model = gpt2(4, 1, 8)
    table = route_parameters(model, [Rule("*.c_fc.*", options={"lr": 1.0})])
    for again in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert str(again) == str(table)
        assert again.fingerprint() == table.fingerprint()
        assert again[0].param is not table[0].param


def test_identity():
    weight = torch.zeros(3, 2)
    view = MatrixView.identity(weight.shape)
    assert view.is_identity
    assert view.views(weight)[0] is weight
    assert not MatrixView(shape=(3, 2), transposed=True).is_identity
    with pytest.raises(ValueError, match=r"of shape \(3, 2\), got \(2, 3\)"):
        view.views(weight.T)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (3,)}, "at least two dimensions"),
        ({"shape": (3, 2), "order": (0, 0)}, "no permutation"),
        ({"shape": (3, 2), "matrix_shape": (3, 3)}, "does not hold the elements"),
        ({"shape": (3, 2), "split": (1, 1)}, "add up to 3"),
        ({"shape": (3, 2), "split_dim": 0}, "must be -2"),
        ({"shape": (3, 2), "num_heads": (2,)}, "do not divide into 2 heads"),
        ({"shape": (3, 2), "num_heads": (3, 3)}, "each of the 1 parts"),
    ],
)
def test_wrong_views(options, message):
    with pytest.raises(ValueError, match=message):
        MatrixView(**options)


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


@st.composite
def views(draw):
    """A view with any combination of its steps, and a tensor that it fits."""
    batch = draw(st.lists(st.integers(1, 3), max_size=2))
    heads, parts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = [heads * draw(st.integers(1, 3)) for _ in range(parts)]
    rows, columns = sum(sizes), draw(st.integers(1, 4))
    transposed = draw(st.booleans())
    matrix = (*batch, columns, rows) if transposed else (*batch, rows, columns)
    shape, order, matrix_shape = matrix, (), ()
    if draw(st.booleans()):
        # a weight whose last dimensions are flattened, stored with another order of dimensions
        shape, order, matrix_shape = (
            (*matrix[:-1], 1, matrix[-1]),
            (*range(len(matrix) - 1), len(matrix), len(matrix) - 1),
            matrix,
        )
    return MatrixView(
        shape=shape,
        order=order,
        matrix_shape=matrix_shape,
        split=tuple(sizes) if parts > 1 or draw(st.booleans()) else (),
        split_dim=-1 if transposed else -2,
        transposed=transposed,
        num_heads=(heads,) * parts if draw(st.booleans()) else (),
    )


@settings(deadline=None)
@given(views())
def test_views_cover_the_tensor_once_and_share_its_memory(view):
    tensor = torch.arange(float(torch.Size(view.shape).numel())).reshape(view.shape)
    expected = tensor.clone()
    found = view.views(tensor)
    assert tuple(tuple(part.shape) for part in found) == view.shapes
    assert sum(part[..., 0, 0].numel() for part in found) == view.num_matrices
    assert sorted(torch.cat([part.reshape(-1) for part in found]).tolist()) == expected.reshape(-1).tolist()
    for part in found:
        part.add_(0.5)
    assert torch.equal(tensor, expected + 0.5)
    assert MatrixView.from_plain(view.to_plain()) == view
    assert eval(repr(view)) == view
