"""Routing without a rule: every default, and every refusal."""

import copy
import pickle

import pytest
import torch
from routed_models import RootNorm, Weights, counts, gpt2, nested, roles
from torch import nn

from optim_utils import CombinedLinear, combine_linears
from optim_utils.param_groups import Rule, UnroutedParameterError, route_parameters


class VocabularyEmbedding(nn.Module):
    """An embedding that does not derive from torch's, as those that are split over ranks."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(count, width))


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"a.b": nn.Linear(3, 2)}, {"a.b.weight": "matrix", "a.b.bias": "vector"}),
        ({"scale": Weights(value=())}, {"scale.value": "vector"}),
        ({"mixer": Weights(A_log=(6, 4), D=(6,))}, {"mixer.A_log": "vector", "mixer.D": "vector"}),
        # those of Vision Mamba, VMamba and S4D, and what RWKV keeps for each head
        (
            {"mixer": Weights(A_b_log=(6, 4), A_logs=(6, 4), log_A_real=(6, 4), A_imag=(6, 4))},
            {f"mixer.{name}": "vector" for name in ("A_b_log", "A_logs", "log_A_real", "A_imag")},
        ),
        (
            {"att": Weights(time_decay=(3, 2), time_faaaa=(3, 2), r_k=(3, 2), w1=(6, 4))},
            {"att.time_decay": "vector", "att.time_faaaa": "vector", "att.r_k": "vector", "att.w1": "matrix"},
        ),
        ({"attn": Weights(relative_position_bias_table=(9, 2))}, {"attn.relative_position_bias_table": "vector"}),
        # biases for queries (Transformer-XL, Conformer) and for offsets (LeViT), and what scales each head, or skips it
        (
            {"attn": Weights(pos_bias_u=(3, 2), bias_v=(3, 2), attention_biases=(3, 9), scale=(3, 2), q_scale=(3, 2))},
            {f"attn.{name}": "vector" for name in ("pos_bias_u", "bias_v", "attention_biases", "scale", "q_scale")},
        ),
        ({"mixer": Weights(D=(3, 4))}, {"mixer.D": "vector"}),
        # scales and shifts of diffusion transformers, which each block adds to those of the time
        (
            {"block": Weights(scale_shift_table=(6, 4), modulation=(1, 6, 4))},
            {"block.scale_shift_table": "vector", "block.modulation": "vector"},
        ),
        # tables that are learned: of positions (SAM, MViT), of what a resampler asks for, of registers
        (
            {"attn": Weights(rel_pos_h=(9, 2), rel_pos_w=(9, 2))},
            {"attn.rel_pos_h": "embedding", "attn.rel_pos_w": "embedding"},
        ),
        (
            {"x": Weights(temporal_pos=(9, 2), patch_pos=(1, 9, 2), positional_encoding=(9, 1, 1, 2))},
            {f"x.{name}": "embedding" for name in ("temporal_pos", "patch_pos", "positional_encoding")},
        ),
        (
            {"x": Weights(pos=(9, 2), pos_enc=(9, 2), codebook=(5, 2), centroids=(5, 2), prototypes=(2, 5, 2))},
            {f"x.{name}": "embedding" for name in ("pos", "pos_enc", "codebook", "centroids", "prototypes")},
        ),
        (
            {"x": Weights(pos_encoding=(9, 2), codebooks=(3, 5, 2), codebook_0=(5, 2), prototype_vectors=(5, 2, 1, 1))},
            {f"x.{name}": "embedding" for name in ("pos_encoding", "codebooks", "codebook_0", "prototype_vectors")},
        ),
        ({"quantizer": Weights(codevectors=(1, 5, 2))}, {"quantizer.codevectors": "embedding"}),
        # what is only called after a table maps features, be it a layer or not
        (
            {"x": Weights(pos_proj=(3, 2), pos_encoder=(3, 2), codebook_proj=(3, 2), centroid_w=(3, 2))},
            {f"x.{name}": "matrix" for name in ("pos_proj", "pos_encoder", "codebook_proj", "centroid_w")},
        ),
        ({"x.codebooks": nn.ParameterList([torch.zeros(5, 2)])}, {"x.codebooks.0": "embedding"}),
        ({"x.experts": nn.ParameterList([torch.zeros(5, 2)])}, {"x.experts.0": "matrix"}),
        # a list's name says of its items what it says of a parameter
        *(
            ({f"x.{name}": nn.ParameterList([torch.zeros(5, 2)])}, {f"x.{name}.0": "vector"})
            for name in ("biases", "q_scale", "A_logs")
        ),
        ({"codebook.proj": nn.Linear(3, 2, bias=False)}, {"codebook.proj.weight": "matrix"}),
        ({"pos": nn.Linear(3, 2, bias=False)}, {"pos.weight": "matrix"}),
        (
            {"x": Weights(latents=(5, 2), latents_1d=(5, 2), latent_query=(5, 2), queries=(5, 2))},
            {f"x.{name}": "embedding" for name in ("latents", "latents_1d", "latent_query", "queries")},
        ),
        (
            {"x": Weights(query_tokens=(1, 5, 2), reg_token=(1, 4, 2), cls_token=(1, 1, 2))},
            {"x.query_tokens": "embedding", "x.reg_token": "embedding", "x.cls_token": "vector"},
        ),
        # the names of modules say nothing of that sort
        (
            {
                "linear_tokens": nn.Linear(3, 2, bias=False),
                "rel_pos_proj": nn.Linear(3, 2, bias=False),
                "a.bias_proj": nn.Linear(3, 2, bias=False),
                "a.scale": nn.Linear(3, 2, bias=False),
            },
            {f"{name}.weight": "matrix" for name in ("linear_tokens", "rel_pos_proj", "a.bias_proj", "a.scale")},
        ),
        # nor does a part of a word, nor what projects: W_queries beside W_keys
        (
            {"x": Weights(composition=(3, 2), decomposition=(3, 2), upscale=(3, 2), W_queries=(3, 2), W_keys=(3, 2))},
            {f"x.{name}": "matrix" for name in ("composition", "decomposition", "upscale", "W_queries", "W_keys")},
        ),
        (
            {"x": Weights(positions=(3, 2), patch_position=(3, 2), rel_positions_h=(3, 2), object_queries=(3, 2))},
            {f"x.{name}": "embedding" for name in ("positions", "patch_position", "rel_positions_h", "object_queries")},
        ),
        # an output layer beside another, as in DeiT, and one of two numbers for each token
        ({"head_dist": nn.Linear(3, 2, bias=False)}, {"head_dist.weight": "head"}),
        (
            {"ctc_head": nn.Linear(3, 2, bias=False), "x.ctc_head": nn.Linear(3, 2, bias=False)},
            {"ctc_head.weight": "head", "x.ctc_head.weight": "matrix"},
        ),
        ({"qa_outputs": nn.Linear(3, 2, bias=False)}, {"qa_outputs.weight": "head"}),
        ({"to_logits": nn.Linear(3, 2, bias=False)}, {"to_logits.weight": "head"}),
        ({"output": nn.Linear(3, 2, bias=False)}, {"output.weight": "head"}),
        # those of diffusers' transformers and of Megatron's models
        (
            {"proj_out": nn.Linear(3, 2, bias=False), "blocks.proj_out": nn.Linear(3, 2, bias=False)},
            {"proj_out.weight": "head", "blocks.proj_out.weight": "matrix"},
        ),
        ({"output_layer": nn.Linear(3, 2, bias=False)}, {"output_layer.weight": "head"}),
        # XLNet's, BioGPT's, DistilBERT's
        ({"lm_loss": nn.Linear(3, 2, bias=False)}, {"lm_loss.weight": "head"}),
        ({"output_projection": nn.Linear(3, 2, bias=False)}, {"output_projection.weight": "head"}),
        ({"vocab_projector": nn.Linear(3, 2, bias=False)}, {"vocab_projector.weight": "head"}),
        # BERT's, if it is not tied to the embedding; what comes before it is hidden
        (
            {
                "cls.predictions.transform.dense": nn.Linear(3, 3, bias=False),
                "cls.predictions.decoder": nn.Linear(3, 2, bias=False),
                "x.decoder": nn.Linear(3, 2, bias=False),
            },
            {
                "cls.predictions.transform.dense.weight": "matrix",
                "cls.predictions.decoder.weight": "head",
                "x.decoder.weight": "matrix",
            },
        ),
        # linear layers over frames or pixels, as Parakeet's
        (
            {"ctc_head": nn.Conv1d(8, 2, 1, bias=False), "classifier": nn.Conv2d(8, 2, 1, bias=False)},
            {"ctc_head.weight": "head", "classifier.weight": "head"},
        ),
        (
            {"head": nn.Conv2d(8, 2, 3, bias=False), "x.head": nn.Conv2d(8, 2, 1, bias=False)},
            {"head.weight": "matrix", "x.head.weight": "matrix"},
        ),
        ({"norm": nn.LayerNorm((3, 2))}, {"norm.weight": "vector", "norm.bias": "vector"}),
        ({"a": RootNorm(3, 2)}, {"a.weight": "vector"}),
        ({"a": nn.Embedding(5, 2)}, {"a.weight": "embedding"}),
        ({"a": nn.EmbeddingBag(5, 2)}, {"a.weight": "embedding"}),
        ({"x.wte": Weights(weight=(5, 2))}, {"x.wte.weight": "embedding"}),
        ({"x": Weights(pos_embed=(1, 5, 2))}, {"x.pos_embed": "embedding"}),
        ({"x": Weights(embed_table=(5, 2))}, {"x.embed_table": "embedding"}),
        ({"x": Weights(pos_emb=(1, 5, 2), emb=(5, 2))}, {"x.pos_emb": "embedding", "x.emb": "embedding"}),
        ({"tok_emb": Weights(weight=(5, 2))}, {"tok_emb.weight": "embedding"}),
        # peft's rows for new tokens, by the name of their adapter
        ({"x.trainable_tokens_delta": Weights(default=(3, 2))}, {"x.trainable_tokens_delta.default": "embedding"}),
        ({"tokens": VocabularyEmbedding(5, 2)}, {"tokens.table": "embedding"}),
        # a projection inside of what makes embeddings is none
        ({"time_emb.mlp": nn.Linear(3, 2, bias=False)}, {"time_emb.mlp.weight": "matrix"}),
        ({"x.lm_head.dense": nn.Linear(3, 2, bias=False)}, {"x.lm_head.dense.weight": "head"}),
        # one for each codebook, as in MusicGen, and a bare parameter, as in modded-nanogpt
        ({"x.lm_heads": nn.ModuleList([nn.Linear(3, 2, bias=False)])}, {"x.lm_heads.0.weight": "head"}),
        ({"x": Weights(lm_head_w=(3, 2))}, {"x.lm_head_w": "head"}),
        ({"classifier": nn.Linear(3, 2, bias=False)}, {"classifier.weight": "head"}),
        ({"classifier": CombinedLinear(3, 2)}, {"classifier.combined_weight": "head"}),
        # rows of `head` and of the last layer of each cluster are classes
        (
            {"x.softmax": nn.AdaptiveLogSoftmaxWithLoss(8, 20, [5, 10], div_value=2.0)},
            {
                "x.softmax.head.weight": "head",
                "x.softmax.tail.0.0.weight": "matrix",
                "x.softmax.tail.0.1.weight": "head",
                "x.softmax.tail.1.0.weight": "matrix",
                "x.softmax.tail.1.1.weight": "head",
            },
        ),
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
        # filters of one channel, also if one a group, and a gate for each expert
        ({"a": nn.Conv2d(6, 1, 3, bias=False)}, {"a.weight": "vector"}),
        ({"a": nn.Conv1d(6, 2, 3, groups=2, bias=False)}, {"a.weight": "vector"}),
        ({"experts": Weights(gate=(4, 1, 3), up=(4, 2, 3))}, {"experts.gate": "vector", "experts.up": "matrix"}),
        # matrices of one expert, of all tokens, of a layer that is known
        ({"experts.2.up": Weights(weight=(3, 2))}, {"experts.2.up.weight": "matrix"}),
        ({"experts.w1": nn.ParameterList([torch.zeros(3, 2)])}, {"experts.w1.0": "matrix"}),
        ({"shared_experts.up": Weights(weight=(3, 2))}, {"shared_experts.up.weight": "matrix"}),
        ({"experts.router": nn.Linear(3, 2, bias=False)}, {"experts.router.weight": "matrix"}),
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


@pytest.mark.parametrize(
    ("module", "shapes"),
    [
        (nn.LSTM(5, 2, bias=False), {"weight_ih_l0": ((2, 5),) * 4, "weight_hh_l0": ((2, 2),) * 4}),
        (nn.GRU(5, 2, bias=False), {"weight_ih_l0": ((2, 5),) * 3, "weight_hh_l0": ((2, 2),) * 3}),
        (nn.RNN(5, 2, bias=False), {"weight_ih_l0": ((2, 5),), "weight_hh_l0": ((2, 2),)}),
        (nn.LSTMCell(5, 2, bias=False), {"weight_ih": ((2, 5),) * 4, "weight_hh": ((2, 2),) * 4}),
        (nn.GRUCell(5, 2, bias=False), {"weight_ih": ((2, 5),) * 3, "weight_hh": ((2, 2),) * 3}),
        (
            nn.LSTM(5, 3, proj_size=2, bias=False),
            {"weight_ih_l0": ((3, 5),) * 4, "weight_hh_l0": ((3, 2),) * 4, "weight_hr_l0": ((2, 3),)},
        ),
    ],
)
def test_gates_of_recurrent_layers_are_matrices_of_their_own(module, shapes):
    model = nested({"body": module})
    assert {route.name.removeprefix("body."): route.view.shapes for route in route_parameters(model)} == shapes
    assert all(route.num_matrices == 1 for route in route_parameters(model, Rule("*", split=1)))


def test_the_gates_are_the_parts_along_a_dimension_that_a_rule_names():
    model = nested({"body": nn.LSTM(5, 2, bias=False)})
    assert route_parameters(model, Rule("*", split_dim=0))["body.weight_ih_l0"].view.shapes == ((2, 5),) * 4


def test_gates_are_not_counted_by_name_alone():
    with pytest.raises(UnroutedParameterError, match="nothing says how many gates") as caught:
        route_parameters(dict(nn.LSTM(5, 2, bias=False).named_parameters()))
    assert "Rule('weight_ih_l0', split=4)" in str(caught.value)
    assert "Rule('weight_ih_l0', split=3)" not in str(caught.value)


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
        ("attn.W_pack.weight", (12, 4), ((4, 4),) * 3),
        ("cross.to_kv.weight", (12, 4), ((6, 4),) * 2),
        ("cross.kv", (12, 4), ((12, 4),)),
        ("cross.kv.lora_A.weight", (12, 4), ((12, 4),)),
        ("cross.kv_a_proj_with_mqa.weight", (12, 4), ((12, 4),)),
        ("mlp.gate_up_proj.weight", (12, 4), ((6, 4),) * 2),
        ("mlp.w13.weight", (12, 4), ((6, 4),) * 2),
        ("attn.qkv_norm_scale", (12,), None),
        ("attn.q_proj.weight", (12, 4), ((12, 4),)),
    ],
)
def test_fused_weights_by_name_alone(name, shape, shapes):
    route = route_parameters([(name, nn.Parameter(torch.zeros(shape)))])[0]
    assert (route.view.shapes if route.view else None) == shapes


@pytest.mark.parametrize("bias", [True, False])
def test_fused_weights_that_are_joined_with_their_biases(bias):
    layers = {"a.qkv": nn.Linear(4, 12, bias), "a.gate_up_proj": nn.Linear(4, 6, bias), "a.Wkv": nn.Linear(4, 6, bias)}
    model = nested(layers)
    assert combine_linears(model) == [*layers]
    table = route_parameters(model)
    assert table["a.qkv.combined_weight"].view.shapes == ((4, 4 + bias),) * 3
    for name in ("a.gate_up_proj", "a.Wkv"):
        assert table[f"{name}.combined_weight"].view.shapes == ((3, 4 + bias),) * 2
    # grouped-query attention: the rule to paste counts inputs without the column of the bias
    model = nested({"a.qkv": CombinedLinear(8, 16, bias)})
    with pytest.raises(UnroutedParameterError, match=r"neither of 16 and 8 is .*(\n.*)*split=\(8, 4, 4\)"):
        route_parameters(model)
    (route,) = route_parameters(model, Rule("*", split=(8, 4, 4)))
    assert route.view.shapes == ((8, 8 + bias), (4, 8 + bias), (4, 8 + bias))


def test_fused_convolution():
    model = nested({"attn.qkv": nn.Conv2d(6, 18, 1, bias=False), "conv.qkv": nn.Conv1d(6, 18, 3, bias=False)})
    model.attn.to_kv = nn.Conv2d(6, 8, 1, bias=False)
    model.attn.w13 = nn.Conv1d(6, 10, 3, bias=False)
    table = route_parameters(model)
    assert table["attn.w13.weight"].view.shapes == ((5, 18),) * 2
    assert table["attn.to_kv.weight"].view.shapes == ((4, 6),) * 2
    assert table["attn.qkv.weight"].view.shapes == ((6, 6),) * 3
    assert table["conv.qkv.weight"].view.shapes == ((6, 18),) * 3


@pytest.mark.parametrize(
    ("name", "groups", "transposed"),
    [("to_kv", 2, False), ("to_kv", 2, True), ("qkv", 3, False), ("qkv", 6, True), ("w13", 4, False)],
)
def test_the_groups_of_a_fused_convolution_lie_in_its_parts(name, groups, transposed):
    # K is computed by the first half of the groups, V by the second one: nothing is left to cut
    kind = nn.ConvTranspose1d if transposed else nn.Conv1d
    (route,) = route_parameters(nested({f"a.{name}": kind(24, 36, 1, groups=groups, bias=False)}))
    assert route.view.shapes == ((groups, 36 // groups, 24 // groups),)


def test_frozen_parameters_are_listed_and_in_no_group():
    model = nested({"a": nn.Linear(3, 2), "b": nn.Linear(3, 2)})
    model.a.requires_grad_(False)
    table = route_parameters(model, [Rule("*.weight", transposed=False)])
    assert [route.name for route in table.to("frozen")] == ["a.weight", "a.bias"]
    assert [name for group in table.param_groups() for name in group["param_names"]] == ["b.weight", "b.bias"]
    # a rule that names the destination comes before requires_grad
    assert route_parameters(model, [Rule("a.*", to="adamw")])["a.bias"].reason == "rule; needs no gradient now"


@pytest.mark.parametrize("name", ["x.latents", "x.q_scale", "x.q_bias"])
@pytest.mark.parametrize("first", [True, False])
def test_a_tied_parameter_is_what_any_of_its_names_says(name, first):
    weight = nn.Parameter(torch.zeros(3, 2))
    (route,) = route_parameters(dict.fromkeys([name, "y.w"] if first else ["y.w", name], weight))
    assert route.kind == "adamw"


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


@pytest.mark.parametrize(
    ("gate_up", "down", "dim"), [((2, 6, 10), (2, 10, 3), -2), ((2, 10, 6), (2, 3, 10), -1)], ids=["rows", "columns"]
)
def test_a_neighbouring_module_tells_along_which_dimension_gate_and_up_are_fused(gate_up, down, dim):
    model = nested({"experts.w13": Weights(weight=gate_up), "experts.w2": Weights(weight=down)})
    views = [route.view for route in route_parameters(model)]
    assert [(view.split, view.split_dim, view.transposed) for view in views] == [
        ((3, 3), dim, dim == -1),
        ((), -2, dim == -1),
    ]


def refused():
    """A model in which every trained weight is refused, but one."""
    return nested(
        {
            "fine": nn.Linear(3, 2),
            "bilinear": nn.Bilinear(3, 4, 2, bias=False),
            "attn.qkv": nn.Linear(8, 16, bias=False),
            "odd.qkv": nn.Linear(8, 17, bias=False),
            "wide.qkv": nn.Linear(8, 48, bias=False),
            "narrow.qkv": nn.Linear(9, 4, bias=False),
            "sideways.qkv": Weights(weight=(6, 15)),
            "joined.qkv": CombinedLinear(12, 9),
            "conv.qkv": nn.Conv1d(12, 9, 1, bias=False),
            "mlp.w13": nn.Linear(8, 15, bias=False),
            "odd.kv": nn.Linear(8, 15, bias=False),
            "grouped.kv": nn.Conv1d(24, 12, 1, groups=3, bias=False),
            "moe.experts": Weights(gate_up_proj=(2, 6, 10)),
            "moe.w13": Weights(weight=(2, 6, 10)),
            "ffn.w13": Weights(weight=(2, 5, 7)),
            "stack.qkv": Weights(weight=(2, 5, 7)),
            "stack.rnn": Weights(weight_hh=(2, 12, 3)),
            # as DBRX has them, below one another
            "flat.experts.mlp": Weights(w1=(12, 3)),
            "low_rank.gate_up_proj": Weights(lora_A=(4, 9), lora_B=(16, 4)),
            "low_rank.qkv": Weights(lora_A=(4, 12), lora_B=(36, 4)),
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
    assert caught.value.unrouted["mlp.w13.weight"] == "the name says fused gate and up, but 15 is odd"
    suggestions = [line.strip() for line in text.splitlines() if line.startswith("      ")]
    assert "Rule('attn.qkv.weight', split=(8, 4, 4))" in suggestions
    # keys and values are no wider than queries: these heads are together wider than the model
    assert [rule for rule in suggestions if "wide.qkv" in rule] == [
        "Rule('wide.qkv.weight', split=3)",
        "Rule('wide.qkv.weight', split=1)",
    ]
    assert "Rule('sideways.qkv.weight', split=3, split_dim=-1)" in suggestions
    assert "Rule('low_rank.qkv.lora_B', split=3)" in suggestions
    assert "Rule('low_rank.qkv.lora_A', split=3)" not in suggestions
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


def test_parameters_called_like_wrappers_or_tied_to_a_fused_weight():
    names = ("base_layer", "a.base_layer", "modules_to_save.a", "qkv.weight")
    named = {name: nn.Parameter(torch.zeros(6, 2)) for name in names}
    # the name outside of the fused module says nothing
    named["tied"] = named["qkv.weight"]
    table = route_parameters(named, Rule("base_layer", to="adamw"))
    assert [route.kind for route in table] == ["adamw", "muon", "muon", "muon"]
    assert table["tied"].num_matrices == 3


def test_convolutions_whose_memory_allows_no_view_are_refused():
    model = nested({"a": nn.Conv2d(8, 6, 3, bias=False)})
    model.a.weight.data = torch.zeros(3, 8, 6, 3).permute(2, 1, 3, 0)
    with pytest.raises(UnroutedParameterError, match=r"strides \(3, 18, 1, 144\) allow no view as \(6, 72\)"):
        route_parameters(model)
    assert route_parameters(model, Rule("a.weight", to="adamw"))[0].kind == "adamw"
    model.to(memory_format=torch.channels_last)
    assert route_parameters(model)[0].num_matrices == 1


def test_unknown_parameters_go_to_adamw_only_when_told_to():
    table = route_parameters(refused(), on_unknown="adamw")
    assert counts(table) == (1, 1, len(table) - 1)
    assert str(table).count("UNKNOWN, by on_unknown: ") == len(table) - 2
    with pytest.raises(ValueError, match='"raise" or "adamw", got \'muon\''):
        route_parameters(refused(), on_unknown="muon")
