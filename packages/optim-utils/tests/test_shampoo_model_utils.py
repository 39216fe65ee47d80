"""`CombinedLinear` is a Linear in everything but its one parameter, and takes a Linear's place and checkpoints."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.prune import random_unstructured
from torch.utils.flop_counter import FlopCounterMode

from optim_utils import CombinedLinear, combine_linears, join_weight_bias, split_weight_bias, uncombine_linears
from optim_utils.testing import run_ranks

BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
LAYOUT = pytest.mark.parametrize(
    "layout", [{}, {"align_rows": True}, {"column_major": True}], ids=["dense", "aligned", "columns"]
)
# of a matrix of 7 rows: (row, column) for a number of columns and an element's bytes
STRIDES = {
    "dense": lambda columns, size: (columns, 1),
    "align_rows": lambda columns, size: (-(-columns * size // 16) * 16 // size, 1),
    "column_major": lambda columns, size: (1, 7),
}
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)


def pair(bias: bool = True, dtype: torch.dtype = torch.float32, **options: object) -> tuple[nn.Linear, CombinedLinear]:
    torch.manual_seed(3)
    linear = nn.Linear(10, 7, bias, dtype=dtype)
    torch.manual_seed(3)
    return linear, CombinedLinear(10, 7, bias, dtype=dtype, **options)


@BIAS
@LAYOUT
@DTYPE
def test_same_values_as_linear_under_the_same_seed(bias, layout, dtype):
    linear, layer = pair(bias, dtype, **layout)
    assert layer.combined_weight.shape == (7, 11 if bias else 10)
    assert torch.equal(layer.weight, linear.weight)
    assert layer.bias is bias
    assert layer.has_bias is bias
    assert (layer.in_features, layer.out_features, layer.in_features_with_bias) == (10, 7, 10 + bias)
    assert [name for name, _ in layer.named_parameters()] == list(layer.state_dict()) == ["combined_weight"]
    if bias:
        assert torch.equal(layer.bias_vector, linear.bias)
        assert layer.bias_vector.data_ptr() == layer.combined_weight[0, -1].data_ptr()
    else:
        assert layer.bias_vector is None
    # both have drawn as much from the generator
    expected = torch.rand(1)
    torch.manual_seed(3)
    nn.Linear(10, 7, bias, dtype=dtype)
    assert torch.equal(torch.rand(1), expected)


@BIAS
@LAYOUT
@pytest.mark.parametrize("shape", [(10,), (4, 10), (2, 0, 10), (2, 3, 4, 10)], ids=str)
def test_outputs_and_gradients_of_any_leading_dimensions(bias, layout, shape):
    linear, layer = pair(bias, torch.float64, **layout)
    x = torch.randn(shape, dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(layer(ours), linear(theirs), rtol=1e-14, atol=1e-14)
    layer(ours).square().sum().backward()
    linear(theirs).square().sum().backward()
    weight, bias_gradient = split_weight_bias(layer.combined_weight.grad, bias)
    torch.testing.assert_close(weight, linear.weight.grad, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-13, atol=1e-13)
    if bias:
        torch.testing.assert_close(bias_gradient, linear.bias.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("column_major", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("shape", [(10,), (4, 10), (2, 0, 10), (2, 3, 10)], ids=str)
def test_derivatives_of_every_kind(shape, column_major):
    _, layer = pair(dtype=torch.float64)

    def output(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"combined_weight": weight}, (x,))

    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn((11, 7) if column_major else (7, 11), dtype=torch.float64)
    weight = (weight.mT if column_major else weight).requires_grad_()
    assert torch.autograd.gradcheck(output, (x, weight), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(output, (x, weight))


def test_derivatives_of_a_layer_in_training_as_it_is():
    """Forward mode of a parameter that requires a gradient, of the input, of both; and the input's gradient alone."""
    linear, layer = pair(dtype=torch.float64)
    x, direction = torch.randn(2, 4, 10, dtype=torch.float64)
    weight = layer.combined_weight
    change = torch.randn_like(weight)
    of_x = direction @ linear.weight.mT
    of_weight = x @ change[:, :-1].mT + change[:, -1]
    for arguments, tangents, expected in (
        ((x, weight), (direction, change), of_x + of_weight),
        ((x, weight), (direction, torch.zeros_like(weight)), of_x),
        ((x, weight), (torch.zeros_like(x), change), of_weight),
    ):
        with torch.autograd.forward_ad.dual_level():
            dual = [
                torch.autograd.forward_ad.make_dual(argument, tangent) if tangent.any() else argument
                for argument, tangent in zip(arguments, tangents)
            ]
            output = torch.func.functional_call(layer, {"combined_weight": dual[1]}, (dual[0],))
            torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(output).tangent, expected)
    torch.testing.assert_close(torch.func.jacfwd(layer)(x), torch.func.jacrev(layer)(x))
    x.requires_grad_()
    torch.testing.assert_close(*(torch.autograd.grad(each(x).sum(), x)[0] for each in (layer, linear)))
    assert weight.grad is None
    _, columns = pair(dtype=torch.float64, column_major=True)
    (gradient,) = torch.autograd.grad(columns(x).sum(), columns.combined_weight)
    # in another layout autograd would copy it
    assert gradient.stride() == columns.combined_weight.stride() == (1, 7)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["data", "activations"])
def test_no_product_is_computed_for_an_input_that_needs_no_gradient(requires_grad):
    x = torch.randn(4, 10, requires_grad=requires_grad)
    counts = []
    for layer in pair():
        output = layer(x).sum()
        with FlopCounterMode(display=False) as counter:
            output.backward()
        counts.append(counter.get_total_flops())
    assert counts == [2 * 4 * 10 * 7 * (1 + requires_grad)] * 2


def test_gradients_of_each_sample_and_under_autocast():
    linear, layer = pair()
    x = torch.randn(4, 10)

    def loss(weight: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"combined_weight": weight}, (sample,)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(layer.combined_weight.detach(), x)
    for sample, gradient in zip(x, each):
        torch.testing.assert_close(gradient, torch.func.grad(loss)(layer.combined_weight.detach(), sample))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = layer(x), linear(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    ours.sum().backward()
    theirs.sum().backward()
    torch.testing.assert_close(layer.combined_weight.grad, join_weight_bias(linear.weight.grad, linear.bias.grad))


@LAYOUT
def test_gradients_of_complex_numbers(layout):
    linear, layer = pair(dtype=torch.complex64, **layout)
    x = torch.randn(4, 10, dtype=torch.complex64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, value in zip((linear, layer), inputs):
        module(value).abs().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(layer.combined_weight.grad, join_weight_bias(linear.weight.grad, linear.bias.grad))


@BIAS
def test_a_symbolic_trace_sees_through_it(bias):
    model = nn.Sequential(pair(bias)[1], nn.ReLU())
    x = torch.randn(4, 10)
    assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


def test_extra_repr_is_exact():
    text = CombinedLinear(10, 20).extra_repr()
    assert text == "self.in_features=10, self.out_features=20, self.in_features_with_bias=11"
    # None is no bias, as for torch.nn.Linear
    assert CombinedLinear(10, 20, None).extra_repr() == text.replace("11", "10")


@pytest.mark.parametrize(("in_features", "out_features"), [(0, 3), (3, 0)])
def test_empty_layers(in_features, out_features):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: initializing zero-element tensors is a no-op
        layer = CombinedLinear(in_features, out_features)
    output = layer(torch.randn(2, in_features))
    assert output.shape == (2, out_features)
    output.sum().backward()
    expected = torch.tensor([2.0]).expand(out_features, 1) if in_features == 0 else torch.empty(0, 4)
    assert torch.equal(layer.combined_weight.grad, expected)


@BIAS
@LAYOUT
def test_the_layout_survives_copies_and_moves(bias, layout):
    _, layer = pair(bias, **layout)
    stride = layer.combined_weight.stride()
    assert stride == STRIDES[next(iter(layout), "dense")](10 + bias, 4)
    saved = io.BytesIO()
    torch.save(layer, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        torch.load(saved, weights_only=False),
        copy.deepcopy(layer).double().float(),
    ]
    for twin in copies:
        assert twin.combined_weight.stride() == stride
        assert torch.equal(twin.combined_weight, layer.combined_weight)
        assert twin.combined_weight.requires_grad
    half = copy.deepcopy(layer).bfloat16().combined_weight
    assert half.stride() == STRIDES[next(iter(layout), "dense")](10 + bias, 2)


def test_layers_that_version_0_3_pickled_have_rows():
    _, layer = pair(True)
    twin = CombinedLinear.__new__(CombinedLinear)
    twin.__setstate__({name: value for name, value in vars(layer).items() if name != "column_major"})
    assert torch.equal(twin.double().to_linear().weight, layer.to_linear().weight.double())


def test_gradients_lie_in_memory_as_the_columns_do():
    """Else autograd would copy them."""
    _, layer = pair(column_major=True)
    layer(torch.randn(4, 10)).sum().backward()
    assert layer.combined_weight.grad.stride() == layer.combined_weight.stride() == (1, 7)


def test_two_layouts_at_once_are_refused():
    with pytest.raises(ValueError, match="give one of them"):
        CombinedLinear(2, 2, align_rows=True, column_major=True)


@LAYOUT
def test_an_optimizer_trains_it_as_it_trains_a_linear(layout):
    linear, layer = pair(**layout)
    x = torch.randn(5, 10)
    for model in (linear, layer):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(layer.combined_weight, join_weight_bias(linear.weight, linear.bias))


@BIAS
@LAYOUT
def test_meta_script_and_fullgraph_compile(bias, layout):
    _, layer = pair(bias, **layout)
    x = torch.randn(3, 10)
    assert CombinedLinear(10, 7, bias, device="meta", **layout)(x.to("meta")).shape == (3, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert torch.equal(torch.jit.script(layer)(x), layer(x))
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), layer(x))


def test_the_flag_bias_cannot_become_a_parameter_that_nothing_reads():
    layer = CombinedLinear(3, 2)
    for value in (nn.Parameter(torch.zeros(2)), torch.zeros(2)):
        with pytest.raises(TypeError, match=r"bias of a CombinedLinear says whether there is one, .* bias_vector"):
            layer.bias = value
    assert layer.bias is True
    assert list(layer.state_dict()) == ["combined_weight"]


def test_sizes_may_be_numpys():
    numpy = pytest.importorskip("numpy")
    layer = CombinedLinear(numpy.uint8(255), numpy.uint8(3))
    assert layer.combined_weight.shape == (3, 256)
    assert layer.extra_repr() == "self.in_features=255, self.out_features=3, self.in_features_with_bias=256"


def test_wrong_format_is_refused():
    with pytest.raises(ValueError, match="checkpoint_format='flat'"):
        CombinedLinear(1, 1, checkpoint_format="flat")


@BIAS
def test_loads_a_linear_and_is_loaded_by_one(bias):
    linear, _ = pair(bias)
    layer = CombinedLinear(10, 7, bias, checkpoint_format="linear", align_rows=True)
    assert layer.load_state_dict(linear.state_dict()) == ([], [])
    assert torch.equal(layer.combined_weight, join_weight_bias(linear.weight, linear.bias))
    state = layer.state_dict()
    assert list(state) == list(linear.state_dict())
    assert state["weight"].data_ptr() == layer.combined_weight.data_ptr()
    other = nn.Linear(10, 7, bias)
    other.load_state_dict(state)
    assert torch.equal(other.weight, linear.weight)


@LAYOUT
@pytest.mark.parametrize("form", ["combined", "linear"])
def test_an_assigned_parameter_gets_the_layout_too(layout, form):
    _, source = pair(checkpoint_format=form)
    layer = CombinedLinear(10, 7, device="meta", **layout)
    assert layer.load_state_dict(source.state_dict(), assign=True) == ([], [])
    assert torch.equal(layer.combined_weight, source.combined_weight)
    strides = STRIDES[next(iter(layout), "dense")]
    assert layer.combined_weight.stride() == strides(11, 4)
    assert layer.combined_weight.requires_grad
    assert source.combined_weight.stride() == (11, 1)
    # memory of the right layout is taken over as it is
    other = CombinedLinear(10, 7, device="meta", **layout)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert other.combined_weight.data_ptr() == layer.combined_weight.data_ptr()


@LAYOUT
def test_the_layout_comes_back_after_something_else_made_the_parameter_dense(layout):
    _, layer = pair(**layout)
    layer.combined_weight.data = layer.combined_weight.data.clone(memory_format=torch.contiguous_format)
    assert layer.float().combined_weight.stride() == STRIDES[next(iter(layout), "dense")](11, 4)


def nested(**options: object) -> nn.Module:
    return nn.ModuleDict({"block": nn.ModuleDict({"proj": CombinedLinear(3, 2, **options)})})


@pytest.mark.parametrize(
    ("state", "texts"),
    [
        ({"weight": torch.ones(2, 3)}, ['Missing key(s) in state_dict: "block.proj.bias"']),
        ({"bias": torch.ones(2)}, ['Missing key(s) in state_dict: "block.proj.weight"']),
        ({}, ['Missing key(s) in state_dict: "block.proj.combined_weight"']),
        ({"weight": torch.ones(3, 2), "bias": torch.ones(2)}, ["size mismatch for block.proj.weight"]),
        ({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, ["size mismatch for block.proj.bias"]),
        ({"weight": torch.ones(2, 3), "bias": 3.0}, ["expected a tensor for block.proj.bias, got a float"]),
        (
            {"combined_weight": torch.ones(2, 4), "weight": torch.ones(2, 3)},
            ["block.proj.combined_weight and block.proj.weight are two forms"],
        ),
        (
            {"weight": torch.ones(2, 3), "bias": torch.ones(2), "extra": torch.ones(1)},
            ['Unexpected key(s) in state_dict: "block.proj.extra"'],
        ),
    ],
    ids=["no bias", "no weight", "nothing", "weight shape", "bias shape", "no tensor", "both forms", "extra"],
)
def test_what_is_wrong_is_named_in_full(state, texts):
    model = nested()
    state = {f"block.proj.{name}": value for name, value in state.items()}
    keys = set(state)
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(state)
    for text in texts:
        assert text in str(error.value)
    assert set(state) == keys


def test_a_part_is_loaded_without_strict():
    model = nested()
    before = model["block"]["proj"].weight.detach().clone()
    missing, unexpected = model.load_state_dict({"block.proj.bias": torch.full((2,), 9.0)}, strict=False)
    assert (missing, unexpected) == (["block.proj.weight"], [])
    assert torch.equal(model["block"]["proj"].weight, before)
    assert torch.equal(model["block"]["proj"].bias_vector, torch.full((2,), 9.0))


@pytest.mark.parametrize("form", ["combined", "linear"])
def test_a_parametrized_or_pruned_layer_saves_and_loads_what_torch_keeps_of_it(form):
    def make() -> nn.Module:
        torch.manual_seed(3)
        model = nn.ModuleDict({name: CombinedLinear(3, 2, checkpoint_format=form) for name in ("wn", "pruned")})
        weight_norm(model["wn"], "combined_weight")
        random_unstructured(model["pruned"], "combined_weight", amount=0.5)
        return model

    source, x = make(), torch.randn(4, 3)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(2)
    state = source.state_dict()
    assert sorted(state) == [
        "pruned.combined_weight_mask",
        "pruned.combined_weight_orig",
        "wn.parametrizations.combined_weight.original0",
        "wn.parametrizations.combined_weight.original1",
    ]
    model = make()
    assert model.load_state_dict(state) == ([], [])
    for name in ("wn", "pruned"):
        assert torch.equal(model[name](x), source[name](x))
    with pytest.raises(RuntimeError, match=r"""(?s)Missing.*"wn.*original1".*Unexpected.*"wn.weight", "wn.bias"."""):
        model.load_state_dict({"wn.weight": torch.ones(2, 3), "wn.bias": torch.ones(2)})


def test_moving_copying_and_loading_a_parametrized_layer_does_not_compute_its_weight():
    layer = CombinedLinear(3, 2, align_rows=True, checkpoint_format="linear")
    spectral_norm(layer, "combined_weight")  # every computation moves its power iteration on
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    twin = copy.deepcopy(layer).double().float()
    twin.load_state_dict(before)
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())


def _load_full_states(rank: int, world_size: int) -> None:
    for is_sharded in (False, True):
        linear, layer = pair(checkpoint_format="linear")
        full = {f"0.{name}": value + 1 for name, value in linear.state_dict().items()}
        model = nn.Sequential(layer)
        if is_sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
        set_model_state_dict(model, dict(full), options=StateDictOptions(full_state_dict=True))
        # a part alone as well
        model.load_state_dict({"0.bias": full["0.bias"] + 1}, strict=False)
        found = layer.combined_weight.full_tensor() if is_sharded else layer.combined_weight
        assert torch.equal(found, join_weight_bias(full["0.weight"], full["0.bias"] + 1)), is_sharded


def test_full_states_in_the_form_of_a_linear_load_with_torchs_set_model_state_dict():
    run_ranks(_load_full_states, 2)


def test_a_bias_for_a_layer_without_one_is_unexpected():
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "block.proj.bias"'):
        nested(bias=False).load_state_dict({"block.proj.weight": torch.ones(2, 3), "block.proj.bias": torch.ones(2)})


@BIAS
@DTYPE
@pytest.mark.parametrize("requires_grad", [True, False])
def test_from_and_to_linear_are_exact(bias, dtype, requires_grad):
    linear, _ = pair(bias, dtype)
    linear.requires_grad_(requires_grad).train(not requires_grad)
    state = torch.get_rng_state()
    layer = CombinedLinear.from_linear(linear, align_rows=True)
    back = layer.to_linear()
    assert torch.equal(torch.get_rng_state(), state)
    for converted in (layer, back):
        assert converted.training is linear.training
        assert all(p.requires_grad is requires_grad and p.dtype == dtype for p in converted.parameters())
    assert layer.combined_weight.is_leaf
    assert layer.combined_weight.data_ptr() != linear.weight.data_ptr()
    assert torch.equal(back.weight, linear.weight)
    assert (back.bias is None) if linear.bias is None else torch.equal(back.bias, linear.bias)
    assert back.weight.is_contiguous()


def test_mixed_requires_grad_is_refused():
    linear = nn.Linear(2, 2)
    linear.bias.requires_grad_(False)
    with pytest.raises(ValueError, match="True for the weight and False for the bias"):
        CombinedLinear.from_linear(linear)
    model = nn.Sequential(nn.Linear(2, 2), linear)
    with pytest.raises(ValueError) as error:
        combine_linears(model)
    assert error.value.__notes__ == ["the layer is '1'"]
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (
            torch.zeros(2, dtype=torch.bfloat16),
            r"dtype is torch\.float32 for the weight and torch\.bfloat16 for the bias",
        ),
        (torch.zeros(2, device="meta"), "device is cpu for the weight and meta for the bias"),
    ],
    ids=["dtype", "device"],
)
def test_a_bias_of_another_kind_than_the_weight_is_refused(bias, message):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].bias = nn.Parameter(bias)
    with pytest.raises(ValueError, match=message):
        combine_linears(model)
    assert type(model[0]) is nn.Linear


def test_what_is_no_layer_or_model_is_refused_by_name():
    with pytest.raises(TypeError, match=r"from_linear takes a torch\.nn\.Linear, got a Conv1d"):
        CombinedLinear.from_linear(nn.Conv1d(2, 2, 1))
    for function in (combine_linears, uncombine_linears):
        with pytest.raises(TypeError, match=rf"{function.__name__} takes a torch\.nn\.Module, got a list"):
            function([nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="predicate has to be a function of name and layer, got a str"):
        combine_linears(nn.Sequential(nn.Linear(2, 2)), "*")
    with pytest.raises(TypeError, match=r"\(in_features, out_features\) must hold integers, .* got \('2', 3\)"):
        CombinedLinear("2", 3)
    with pytest.raises(ValueError, match=r"\(in_features, out_features\)=\(-1, 3\) must hold the sizes"):
        CombinedLinear(-1, 3)


class Special(nn.Linear):
    pass


def test_combine_and_uncombine_a_model():
    torch.manual_seed(0)
    inner = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(inner, nn.Tanh(), Special(4, 4)), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    expected = model(x)
    names = combine_linears(model, lambda name, layer: name != "2")
    assert names == ["0", "1.0"]
    assert [type(model[0]), type(model[1][2]), type(model[2])] == [CombinedLinear, Special, nn.Linear]
    torch.testing.assert_close(model(x), expected, rtol=1e-14, atol=1e-14)
    assert uncombine_linears(model) == names
    assert torch.equal(model(x), expected)


def test_the_layout_of_combined_layers():
    model = nn.Sequential(nn.Linear(4, 2))
    combine_linears(model, column_major=True)
    assert model[0].combined_weight.stride() == (1, 2)
    uncombine_linears(model)
    combine_linears(model, align_rows=True)
    assert model[0].combined_weight.stride() == (8, 1)


def test_one_layer_at_two_places_stays_one_layer():
    layer = nn.Linear(3, 3)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    assert combine_linears(model) == ["0", "2"]
    assert model[0] is model[2]
    assert isinstance(model[0], CombinedLinear)


def test_tied_weights_are_refused_by_name():
    model = nn.ModuleDict({"wte": nn.Embedding(5, 4), "up": nn.Linear(4, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["wte"].weight
    with pytest.raises(ValueError, match=r"wte\.weight and head\.weight are tied"):
        combine_linears(model)
    assert type(model["up"]) is nn.Linear
    assert combine_linears(model, lambda name, _: name != "head") == ["up"]


def test_hooks_are_not_lost_in_silence():
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="'0' has hooks"):
        combine_linears(model)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_not_lost_in_silence(register):
    model = nn.Sequential(nn.Linear(2, 2))
    handle = getattr(model[0].bias, register)(lambda *_: None)
    with pytest.raises(ValueError, match="'0' has parameters with hooks"):
        combine_linears(model)
    handle.remove()
    combine_linears(model)
    getattr(model[0].combined_weight, register)(lambda *_: None)
    with pytest.raises(ValueError, match=r"'0' has parameters with hooks, which would be lost; remove that first$"):
        uncombine_linears(model)


def test_nothing_is_lost_on_the_way_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    combine_linears(model)
    handle = model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="'1' has hooks"):
        uncombine_linears(model)
    handle.remove()
    model[1].combined_weight = model[0].combined_weight
    with pytest.raises(ValueError, match=r"0\.combined_weight and 1\.combined_weight are tied; untie '0' first$"):
        uncombine_linears(model)
    assert all(isinstance(layer, CombinedLinear) for layer in model)
    with pytest.raises(ValueError, match=r"itself is a CombinedLinear.*to_linear"):
        uncombine_linears(model[0])


def with_buffer(layer: nn.Linear) -> None:
    layer.register_buffer("mask", torch.ones(2))


def with_module(layer: nn.Linear) -> None:
    layer.adapter = nn.Identity()


def with_parameter(layer: nn.Linear) -> None:
    layer.gain = nn.Parameter(torch.ones(2))


def with_forward(layer: nn.Linear) -> None:
    layer.forward = torch.zeros_like


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (with_buffer, "buffers"),
        (with_module, "modules"),
        (with_parameter, "other parameters"),
        (with_forward, "a forward of its own"),
    ],
)
def test_what_a_layer_has_beside_weight_and_bias_is_not_lost_in_silence(change, what):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    change(model[1])
    with pytest.raises(ValueError, match=f"'1' has {what}, which would be lost"):
        combine_linears(model)
    assert type(model[0]) is nn.Linear


class AttentionWithPlainLinear(nn.MultiheadAttention):
    def __init__(self) -> None:
        super().__init__(16, 2, batch_first=True)
        self.out_proj = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), "block.linear1"),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
            "block.layers.0.linear1",
        ),
        (AttentionWithPlainLinear(), "block.out_proj"),
    ],
    ids=["encoder layer", "encoder", "attention"],
)
def test_layers_whose_bias_their_parent_reads_are_refused_by_name(block, name):
    model = nn.ModuleDict({"block": copy.deepcopy(block), "head": nn.Linear(16, 4)}).eval()
    x = torch.randn(2, 3, 16)
    inputs = (x, x, x) if isinstance(block, nn.MultiheadAttention) else (x,)
    with pytest.raises(ValueError, match=f"'{name}' cannot be replaced: the .* around it reads its bias"):
        combine_linears(model)
    assert combine_linears(model, lambda name, _: name == "head") == ["head"]
    # without gradients in eval mode torch takes its fast path
    with torch.no_grad():
        model["block"](*inputs)


def test_a_decoder_layer_can_be_combined():
    torch.manual_seed(0)
    model = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True).eval()
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        expected = model(x, x)
        assert combine_linears(model) == ["linear1", "linear2"]
        torch.testing.assert_close(model(x, x), expected)


def test_a_model_that_is_itself_a_linear_is_refused():
    with pytest.raises(ValueError, match="from_linear"):
        combine_linears(nn.Linear(2, 2))


def test_join_and_split():
    w, b = torch.randn(4, 3), torch.randn(4)
    joined = join_weight_bias(w, b)
    weight, bias = split_weight_bias(joined, True)
    assert torch.equal(weight, w)
    assert torch.equal(bias, b)
    assert weight.data_ptr() == joined.data_ptr()
    assert join_weight_bias(w, None) is w
    assert split_weight_bias(w, False) == (w, None)
    for wrong in ((w, torch.zeros(3)), (b, b), (w, torch.zeros(4, 1))):
        with pytest.raises(ValueError, match=r"weight \(out, in\)"):
            join_weight_bias(*wrong)
    for wrong in (b, torch.zeros(4, 0)):
        with pytest.raises(ValueError, match="expected a matrix"):
            split_weight_bias(wrong, True)
    with pytest.raises(TypeError, match="w of join_weight_bias has to be a tensor, got a NoneType"):
        join_weight_bias(None, b)
    with pytest.raises(TypeError, match="b of join_weight_bias has to be a tensor, got a float"):
        join_weight_bias(w, 0.5)
    with pytest.raises(TypeError, match="c of split_weight_bias has to be a tensor, got a NoneType"):
        split_weight_bias(None, True)
