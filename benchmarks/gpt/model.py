"""A small GPT on bytes: rotary positions, normalised queries and keys, squared-ReLU feed-forward, untied head.

B batch, T context, D width, H heads, V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """Depth, width and vocabulary; heads are 128 wide (32 in the small model) as in nanochat."""

    num_layers: int
    width: int
    num_heads: int
    vocab_size: int = 256


#: ``small`` trains in under a minute on two CPU cores; d12 and d20 have nanochat's shapes, its vocabulary included, so
#: that the optimizer's share of a step is that of a real model (bytes use the first 256 rows).
MODELS = {
    "tiny": GPTConfig(num_layers=2, width=32, num_heads=2),
    "small": GPTConfig(num_layers=4, width=128, num_heads=4),
    "d12": GPTConfig(num_layers=12, width=768, num_heads=6, vocab_size=65536),
    "d20": GPTConfig(num_layers=20, width=1280, num_heads=10, vocab_size=65536),
}


class Attention(nn.Module):
    """Causal self-attention over ``[B, T, D]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.width, config.width, bias=False)
        self.key = nn.Linear(config.width, config.width, bias=False)
        self.value = nn.Linear(config.width, config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, context, width = x.shape
        heads = (batch, context, self.num_heads, width // self.num_heads)
        query, key, value = (linear(x).view(heads).transpose(1, 2) for linear in (self.query, self.key, self.value))
        query, key = (_rotate(_rms_norm(t), rotation) for t in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # [B, H, T, D/H]
        return self.output(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width, bias=False)
        self.contract = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.contract(F.relu(self.expand(self.feed_forward_norm(x))).square())


class GPT(nn.Module):
    """Next-byte logits ``[B, T, V]`` of int64 bytes ``[B, T]``."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.width)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self._initialise()

    @torch.no_grad()
    def _initialise(self) -> None:
        """Linear weights uniform of variance 1/fan_in; the head and what writes to the residual stream start at 0."""
        nn.init.normal_(self.wte.weight)
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.output.weight", "contract.weight", "lm_head.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2 and "wte" not in name:
                bound = (3 / parameter.shape[1]) ** 0.5
                nn.init.uniform_(parameter, -bound, bound)

    def forward(self, tokens: Tensor) -> Tensor:
        head_width = self.config.width // self.config.num_heads
        x = _rms_norm(self.wte(tokens))
        rotation = _rotary_angles(tokens.shape[1], head_width, x)
        for block in self.blocks:
            x = block(x, rotation)
        return self.lm_head(self.final_norm(x))


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, nats, in fp32."""
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


def _rotary_angles(context: int, head_width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** -(torch.arange(0, head_width, 2, device=like.device, dtype=torch.float32) / head_width)
    angle = torch.arange(context, device=like.device, dtype=torch.float32)[:, None] * frequency  # [T, D/2H]
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = rotation
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine], dim=-1)
