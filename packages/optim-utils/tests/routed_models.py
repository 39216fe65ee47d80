"""Models for tests of routing, from bare parameters to those that the documentation names, and a table in short."""

import torch
from torch import nn


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
