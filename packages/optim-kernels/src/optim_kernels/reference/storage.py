"""How every update reads and writes what is stored: parameters with their masters, moments in any format, rounded once.

Gradients are multiplied by ``clip_factor / grad_scale`` as they are read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from optim_utils.low_bit import LowBitTensor, quantize
from optim_utils.rounding import join_master, packed_philox_uint16, round_with_bits, split_master

# Streams of random bits (counter word 2 of the packed Philox stream): which stored tensor they round.
STREAM_PARAM, STREAM_EXP_AVG, STREAM_EXP_AVG_SQ = 0, 1, 2
# Where a parameter's full precision is kept: in itself, in an fp32 master, or beside it in the int16 low half that a
# bf16 parameter lacks.
NO_MASTER, FP32_MASTER, SPLIT16 = 0, 1, 2
MASTER_KINDS: dict[torch.dtype | None, int] = {None: NO_MASTER, torch.float32: FP32_MASTER, torch.int16: SPLIT16}


class Rounding(NamedTuple):
    """Where one tensor's random bits come from: the key and the counter of its first element, and the step."""

    seed: int
    parameter: int
    start: int
    step: int


def gradient_scale(clip_factor: Tensor | None, grad_scale: Tensor | None) -> Tensor | None:
    """The factor that multiplies gradients first: ``clip_factor / grad_scale``, a 0-d tensor."""
    if clip_factor is not None and clip_factor.ndim:
        # a factor with a dimension would broadcast a 0-d gradient to it
        clip_factor = clip_factor.reshape(())
    if grad_scale is None:
        return clip_factor
    inverse = 1 / grad_scale.reshape(()).to(torch.float32)
    return inverse if clip_factor is None else clip_factor.to(inverse) * inverse


def read_param(p: Tensor, master: Tensor | None) -> Tensor:
    """The parameter at full precision: widened, its fp32 master, or joined with its int16 low half."""
    if master is None:
        return p.to(torch.promote_types(p.dtype, torch.float32))
    return join_master(p, master) if master.dtype == torch.int16 else master


def read(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """A stored moment as numbers of ``dtype``; 8-bit codes are decoded."""
    return stored.dequantize(dtype) if isinstance(stored, LowBitTensor) else stored.to(dtype)


def write_param(p: Tensor, master: Tensor | None, value: Tensor, bits: Rounding | None) -> None:
    """Store ``value`` in the parameter and, where there is one, in its master (an int16 master takes the low half)."""
    if master is None:
        write(p, value, bits, STREAM_PARAM)
    elif master.dtype == torch.int16:
        # of wider moments the value is wider than a master
        high, low = split_master(value.to(torch.float32))
        p.copy_(high)
        master.copy_(low)
    else:
        master.copy_(value)
        p.copy_(value)


def write(stored: Tensor, value: Tensor, bits: Rounding | None, stream: int) -> None:
    """Store ``value`` rounded once: at random into bf16 when ``bits`` are given, else to nearest."""
    if isinstance(stored, LowBitTensor):
        value = quantize(value, stored.fmt, dtype=stored.dtype)
    elif bits is not None and stored.dtype == torch.bfloat16:
        value = round_with_bits(value, stored.dtype, _random_bits(stored, bits, stream))
    stored.copy_(value)


def _random_bits(stored: Tensor, bits: Rounding, stream: int) -> Tensor:
    """16 random bits for each element, counted in memory order from the parameter's start, gaps included."""
    last = sum((size - 1) * stride for size, stride in zip(stored.shape, stored.stride()))
    flat = packed_philox_uint16(
        bits.seed,
        bits.parameter,
        last + 1 if stored.numel() else 0,
        stream=stream,
        step=bits.step,
        offset=bits.start,
        device=stored.device,
    )
    return flat.as_strided(stored.shape, stored.stride())
