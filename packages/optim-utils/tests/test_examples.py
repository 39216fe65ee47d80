"""The examples that users of the original utilities know, one test each; the numbers are those of the list of them.

Examples 4, 18 and 19 are about quantized tensors and live in their tests.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import pytest
import torch

from optim_utils import (
    AbstractDataclass,
    CombinedLinear,
    DictZipIterator,
    OptimizerModule,
    ParameterizeEnterExitContext,
    batched,
    compress_list,
    distribute_buffer_sizes,
    extract_state_dict_content,
    flatten,
    generate_pairwise_indices,
    get_all_non_abstract_subclasses,
    get_dtype_size,
    merge_small_dims,
    multi_dim_split,
    unflatten,
    update_param_state_dict_object,
)


def test_01_configuration_with_its_own_init():
    @dataclass
    class MyOptimizerConfig(AbstractDataclass):
        learning_rate: float = 0.001
        momentum: float = 0.9

        def __init__(self, learning_rate: float = 0.001, momentum: float = 0.9):
            self.learning_rate = learning_rate
            self.momentum = momentum

    config = MyOptimizerConfig(0.01, 0.95)
    assert (config.learning_rate, config.momentum) == (0.01, 0.95)
    assert repr(config).endswith("MyOptimizerConfig(learning_rate=0.01, momentum=0.95)")
    assert config == MyOptimizerConfig(0.01, 0.95)
    assert config != MyOptimizerConfig(0.01, 0.9)


def test_02_merge_then_split():
    merged = merge_small_dims(tensor_shape=(32, 3, 64, 64), threshold=1024, target_tensor_dimensionality=2)
    assert merged == (32, 192, 64)
    blocks = multi_dim_split(torch.randn(100, 200), split_size=50)
    assert [block.shape for block in blocks] == [(50, 50)] * 8


class CountingPreconditioner(OptimizerModule):
    """Divides gradients by the root of the sum of their squares."""

    def __init__(self, size: int) -> None:
        self.squared_gradients = torch.zeros(size)
        self.step_count = 0

    def update(self, g: torch.Tensor) -> torch.Tensor:
        self.step_count += 1
        self.squared_gradients.add_(g * g)
        return g / (self.squared_gradients.sqrt() + 1e-8)


def test_03_module_with_a_counter():
    module = CountingPreconditioner(100)
    for _ in range(3):
        module.update(torch.randn(100))
    state = module.state_dict()
    assert list(state) == ["squared_gradients", "step_count"]
    restored = CountingPreconditioner(100)
    restored.load_state_dict(state)
    assert restored.step_count == 3
    assert torch.equal(restored.squared_gradients, module.squared_gradients)


def test_05_combined_linear():
    layer = CombinedLinear(in_features=256, out_features=128, bias=True)
    assert layer(torch.randn(32, 256)).shape == (32, 128)
    assert layer.combined_weight.shape == (128, 257)


def test_06_rows_of_lists():
    data = {"samples": ["a", "b", "c"], "labels": [0, 1, 0], "weights": [1.0, 0.8, 1.2]}
    rows = list(DictZipIterator(data))
    assert len(rows) == 3
    assert rows[0] == {"samples": "a", "labels": 0, "weights": 1.0}
    gradients, parameters = list(torch.randn(3, 4)), list(torch.randn(3, 4))
    steps = DictZipIterator({"gradients": gradients, "parameters": parameters, "learning_rates": [0.1, 0.01, 0.001]})
    for row, gradient, parameter, rate in zip(steps, gradients, parameters, [0.1, 0.01, 0.001], strict=True):
        assert row["gradients"] is gradient
        assert row["parameters"] is parameter
        assert row["learning_rates"] == rate


def test_07_abstract_base_configuration():
    @dataclass(init=False)
    class MyBaseConfig(AbstractDataclass):
        @abstractmethod
        def __init__(self, *args: object, **kwargs: object) -> None: ...

    @dataclass
    class ConcreteConfig(MyBaseConfig):
        learning_rate: float = 0.001

    ConcreteConfig.__qualname__ = "ConcreteConfig"
    with pytest.raises(TypeError, match="Can't instantiate abstract class MyBaseConfig"):
        MyBaseConfig()
    assert repr(ConcreteConfig()) == "ConcreteConfig(learning_rate=0.001)"


def test_08_concrete_subclasses():
    class BaseOptimizer(ABC):  # noqa: B024 - a base without abstract methods is the point
        pass

    class SGDOptimizer(BaseOptimizer):
        pass

    class AdamOptimizer(BaseOptimizer):
        pass

    assert list(get_all_non_abstract_subclasses(BaseOptimizer)) == [SGDOptimizer, AdamOptimizer]


def test_09_batches():
    assert list(batched(range(10), 3)) == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9,)]


class PreconditionerModule(OptimizerModule):
    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.accumulator = torch.zeros(shape)
        self.step_count = 0


def test_10_module_with_a_shape():
    module = PreconditionerModule((100, 50))
    module.accumulator += 2
    module.step_count = 7
    state = module.state_dict()
    assert list(state) == ["shape", "accumulator", "step_count"]
    assert state["shape"] == {0: 100, 1: 50}
    restored = PreconditionerModule((100, 50))
    restored.load_state_dict(state)
    assert restored.shape == (100, 50)
    assert restored.step_count == 7
    assert torch.equal(restored.accumulator, module.accumulator)


def test_11_merge():
    assert merge_small_dims((1, 2, 5, 1), 10, 1) == (10,)
    assert merge_small_dims((32, 3, 64, 64), 8192, 2) == (96, 4096)


def test_12_split():
    tensor = torch.randn(5, 3)
    shapes = [block.shape for block in multi_dim_split(tensor, split_size=2)]
    assert shapes == [(2, 2), (2, 1), (2, 2), (2, 1), (1, 2), (1, 1)]
    (whole,) = multi_dim_split(tensor, split_size=math.inf)
    assert whole is tensor


def test_13_small_helpers():
    assert compress_list(["a", "b", "c", "d"], [True, False, True, False]) == ("a", "c")
    assert get_dtype_size(torch.float32) == 4
    assert get_dtype_size(torch.bool) == 1
    assert list(generate_pairwise_indices([2, 3, 1])) == [(0, 2), (2, 5), (5, 6)]
    assert distribute_buffer_sizes((128, 64, 500, 256), group_size=2) == ((128, 1), (64, 1), (512, 0), (256, 1))


def test_14_enter_and_exit():
    class Switch:
        active = False

        def activate(self) -> None:
            self.active = True

        def deactivate(self) -> None:
            self.active = False

    obj = Switch()
    with ParameterizeEnterExitContext(
        input_with_enter_exit_context=obj,
        enter_method_caller=lambda x: x.activate(),
        exit_method_caller=lambda x: x.deactivate(),
    ):
        assert obj.active
    assert not obj.active


def test_15_slices_of_combined_linear():
    layer = CombinedLinear(512, 256)
    assert layer(torch.randn(32, 512)).shape == (32, 256)
    assert layer.combined_weight.shape == (256, 513)
    assert layer.combined_weight[:, :-1].shape == (256, 512)
    assert layer.combined_weight[:, -1].shape == (256,)


def test_16_flatten():
    nested = {
        "model": {
            "layer1": {"weight": torch.randn(3, 2), "bias": torch.randn(3)},
            "layer2": {"weight": torch.randn(1, 3)},
        },
        "optimizer": {"step": torch.tensor(100), "param_groups": [{"lr": 0.001}]},
    }
    flat = flatten(nested)
    assert next(iter(flat)) == '["model", "layer1", "weight"]'
    assert flat['["optimizer", "param_groups"]'] is nested["optimizer"]["param_groups"]
    assert len(flat) == 5
    assert unflatten(flat) == nested  # tensors compare by identity first: these are the same objects


def test_17_extract_and_update():
    module, t = PreconditionerModule((4, 3)), torch.randn(2)
    content = extract_state_dict_content({"preconditioner": module, "parameters": {"weight": t}})
    assert content["preconditioner"].keys() == {"shape", "accumulator", "step_count"}
    assert content["parameters"]["weight"] is t
    current = {"param1": torch.zeros(3), "param2": {"nested": torch.zeros(2)}}
    kept = current["param1"], current["param2"]["nested"]
    update_param_state_dict_object(current, {"param1": torch.ones(3), "param2": {"nested": torch.full((2,), 2.0)}})
    assert current["param1"] is kept[0]
    assert current["param2"]["nested"] is kept[1]
    assert torch.equal(kept[0], torch.ones(3))
    assert torch.equal(kept[1], torch.full((2,), 2.0))


def test_20_configuration_with_fields():
    @dataclass(init=False)
    class BaseOptimizerConfig(AbstractDataclass):
        pass

    @dataclass
    class ShampooPreconditionerConfig(BaseOptimizerConfig):
        max_preconditioner_dim: int = 8192
        precondition_frequency: int = 100
        epsilon: float = 1e-8

    with pytest.raises(TypeError, match="Can't instantiate abstract class BaseOptimizerConfig"):
        BaseOptimizerConfig()
    assert repr(ShampooPreconditionerConfig()).endswith(
        "(max_preconditioner_dim=8192, precondition_frequency=100, epsilon=1e-08)"
    )


class AdaptivePreconditioner(OptimizerModule):
    """Adam's second moment with bias correction."""

    def __init__(self, param_shape: tuple[int, ...], beta2: float = 0.999) -> None:
        self.param_shape = param_shape
        self.beta2 = beta2
        self.step = 0
        self.squared_avg = torch.zeros(param_shape)

    def update(self, g: torch.Tensor) -> None:
        self.step += 1
        self.squared_avg.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)

    def precondition(self, g: torch.Tensor) -> torch.Tensor:
        return g / ((self.squared_avg / (1 - self.beta2**self.step)).sqrt() + 1e-8)


def test_21_preconditioner_through_a_file(tmp_path):
    original = AdaptivePreconditioner((1000, 500))
    for _ in range(2):
        original.update(torch.randn(1000, 500))
    assert list(original.state_dict()) == ["param_shape", "beta2", "step", "squared_avg"]
    torch.save(original.state_dict(), tmp_path / "state.pt")
    restored = AdaptivePreconditioner((1000, 500))
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    g = torch.randn(1000, 500)
    assert torch.equal(restored.precondition(g), original.precondition(g))


@pytest.mark.parametrize(
    ("shape", "num_blocks", "last"),
    [
        ((64, 3, 7, 7), 1, (64, 147)),
        ((512, 512, 3, 3), 1, (512, 512, 9)),
        ((50257, 768), 13, (1105, 768)),
        ((4096, 11008), 3, (4096, 2816)),
        ((20000, 3, 3, 3), 5, (3616, 27)),
    ],
    ids=str,
)
def test_22_blocks_of_weights(shape, num_blocks, last):
    weight = torch.empty(shape, device="meta")  # only shapes matter here
    merged = weight.view(merge_small_dims(shape, 1024, 2))
    blocks = multi_dim_split(merged, 4096) if any(size > 8192 for size in merged.shape) else (merged,)
    assert len(blocks) == num_blocks
    assert blocks[-1].shape == last


def test_23_blocks_by_device():
    blocks = [torch.zeros(100), torch.zeros(4, 4), torch.zeros(3)]
    sizes = tuple(block.numel() * get_dtype_size(block.dtype) for block in blocks)
    by_device: dict[int, list[tuple[int, ...]]] = {}
    for index, (_size, device) in enumerate(distribute_buffer_sizes(sizes, 2)):
        by_device.setdefault(device, []).append(tuple(blocks[index].shape))
    assert by_device == {1: [(4, 4), (3,)], 0: [(100,)]}
    one = {device for _, device in distribute_buffer_sizes((400,), 2)}
    assert one == {0}
