"""The parameter shapes of the models that benchmarks and tests speak of, and tensors of them with realistic values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[int, ...]


def gpt2(num_layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """GPT-2's parameters in order: embeddings, layers of two norms, attention and MLP with biases, a final norm."""
    d = width
    layer: list[Shape] = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d)]
    return [(vocabulary, d), (context, d), *[*layer, (d,)] * num_layers, (d,), (d,)]


def nanochat(num_layers: int, width: int, vocabulary: int = 65536) -> list[Shape]:
    """nanochat's parameters in order: embedding and head, then layers of four square and two MLP matrices."""
    d = width
    layer: list[Shape] = [*[(d, d)] * 4, (4 * d, d), (d, 4 * d)]
    return [(vocabulary, d), (vocabulary, d), *layer * num_layers]


def llama(vocabulary: int, key_value: int, hidden: int) -> list[Shape]:
    """Llama's parameters, 4096 wide: embedding, 32 layers of attention, MLP and two norms, a final norm, the head."""
    d = 4096
    layer: list[Shape] = [(d, d), (key_value, d), (key_value, d), (d, d), (hidden, d), (hidden, d), (d, hidden)]
    return [(vocabulary, d), *[*layer, (d,), (d,)] * 32, (d,), (vocabulary, d)]


def resnet50() -> list[Shape]:
    """ResNet-50's parameters: every convolution with the two vectors of its batch norm, then the classifier."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(count):
            first: list[Shape] = [(4 * width, channels, 1, 1)] if i == 0 else []
            convolutions: list[Shape] = [
                (width, channels, 1, 1),
                (width, width, 3, 3),
                (4 * width, width, 1, 1),
                *first,
            ]
            shapes += [part for shape in convolutions for part in (shape, shape[:1], shape[:1])]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


ONE = "4096×1024"
MODELS: dict[str, list[Shape]] = {
    ONE: [(4096, 1024)],
    "gpt2_124m": gpt2(12, 768),
    "gpt2_1.56b": gpt2(48, 1600),
    "d20": nanochat(20, 1280),
    # for machines without a GPU: the same kinds of tensors, small
    "tiny": gpt2(2, 32, vocabulary=96, context=32),
}


def model_shapes(name: str) -> list[Shape]:
    """The shapes of the model called ``name``."""
    if name not in MODELS:
        raise ValueError(f"there is no model list {name!r}; choose from {', '.join(MODELS)}")
    return list(MODELS[name])


def muon_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """What Muon updates: the matrices after the first two, which are embedding and head (or positions)."""
    return [shape for shape in shapes[2:] if len(shape) == 2]


def num_elements(shapes: Sequence[Shape]) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(shape) for shape in shapes)


def make_tensors(
    shapes: Sequence[Shape], *, std: float, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> list[Tensor]:
    """Normal tensors of those shapes; never zeros, on which a GPU draws less power and so runs faster."""
    generator = torch.Generator(device=device).manual_seed(seed)
    return [torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std, generator=generator) for shape in shapes]


def make_parameters(
    shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device | str, *, seed: int = 0
) -> list[torch.nn.Parameter]:
    """Parameters N(0, 0.02) that hold gradients N(0, 1e-3)."""
    parameters = [
        torch.nn.Parameter(tensor)
        for tensor in make_tensors(shapes, std=0.02, dtype=dtype, device=device, seed=2 * seed)
    ]
    gradients = make_tensors(shapes, std=1e-3, dtype=dtype, device=device, seed=2 * seed + 1)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters
