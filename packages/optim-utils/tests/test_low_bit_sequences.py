"""Random sequences of torch's operations on low-bit tensors, beside plain tensors of the numbers that they decode to.

Each low-bit tensor has a twin, the plain tensor of what it decodes to, and whatever is done to it is done to the twin;
where one shares memory with another, so do their twins. What is refused must have changed nothing, and every write must
be as near to what was written as the format says.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from optim_utils import low_bit
from optim_utils._low_bit.codes import code_of
from optim_utils._many_tensors import decode_many, encode_many
from optim_utils.low_bit import LowBitFormat, LowBitTensor, dequantize, from_plain, quantize, quantize_into, to_plain

PRESETS = [each for each in map(low_bit.__dict__.get, low_bit.__all__) if isinstance(each, LowBitFormat)]
SHAPES = [(), (0,), (1,), (4,), (7,), (12, 8), (8, 5), (5, 8), (3, 4, 2), (0, 4), (4, 0), (1, 16), (1, 1, 8), (16, 1)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
REFUSED = (NotImplementedError, ValueError)


def numbers(shape: Sequence[int], draw: random.Random) -> Tensor:
    x = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(draw.randrange(1 << 20)))
    kind = draw.choice(["normal", "normal", "squares", "tiny", "huge", "zero", "decades", "nan", "inf"])
    if kind == "squares":
        x = x * x
    elif kind == "tiny":
        x = x * 1e-42
    elif kind == "huge":
        x = x.clamp(-1, 1) * 3e38
    elif kind == "zero":
        x = x * 0
    elif kind == "decades":
        x = torch.exp(3 * x - 12)
    elif kind in ("nan", "inf") and x.numel() and draw.random() < 0.3:
        x.view(-1)[draw.randrange(x.numel())] = float(kind) * draw.choice([1, -1])
    return laid_out(x, draw)


def laid_out(x: Tensor, draw: random.Random) -> Tensor:
    """The same numbers, otherwise in memory or of another dtype that holds them."""
    how = draw.choice(["dense", "dense", "transposed", "gaps", "double"])
    if how == "transposed" and x.ndim == 2:
        return x.t().contiguous().t()
    if how == "gaps" and x.ndim:
        return torch.stack((x, x), -1)[..., 0]
    return x.double() if how == "double" else x


def limit(x: Tensor, fmt: LowBitFormat) -> Tensor:
    """How far at most a block of numbers may lie from what it decodes to."""
    x = x.double()
    slack = x.abs().max() * 2e-7 + 2.0**-148
    if fmt.has_offset:
        # 255 times what a scale loses that is no normal number
        return (x.max() - x.min()) / 510 + slack + 2.0**-140
    x = x.clamp(min=0) if fmt.unsigned else x
    map_of_fmt, _ = code_of(fmt).ascending
    gaps = torch.tensor(map_of_fmt, dtype=torch.float64).diff()
    largest = x.abs().max() / code_of(fmt).peak
    if fmt.companding == "sqrt":
        # a root is off by half a gap, or in the lowest gap by all of it: (r + e)² - r² ≤ (2 r + e) e
        error = gaps.max() * largest.sqrt() * code_of(fmt).peak ** -0.5
        return (2 * x.abs().max().sqrt() + error) * error + slack
    return gaps.max() * largest + slack


@dataclass
class Pair:
    """A low-bit tensor, and the plain fp32 tensor of what it decodes to."""

    low: LowBitTensor
    twin: Tensor

    def check(self) -> None:
        assert self.low.shape == self.twin.shape
        assert self.low.codes.shape == low_bit.quantize(torch.zeros(self.low.shape), self.low.fmt).codes.shape
        same(self.low.dequantize(torch.float32), self.twin)
        same(dequantize(self.low), self.twin.to(self.low.dtype))


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Sequences:
    """Runs operations on a few pairs; an operation is a method, which returns False if it makes no sense."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pairs: list[Pair] = []
        self.log: list[object] = [f"seed {seed}"]

    def run(self, length: int) -> None:
        self.make()
        for _ in range(length):
            operation = self.draw.choice(OPERATIONS)
            self.log.append(operation.__name__)
            try:
                operation(self)
                for pair in self.pairs:
                    pair.check()
            except Exception as error:
                error.add_note(f"after {self.log}")
                raise
            del self.pairs[:-6]

    def pick(self) -> Pair:
        return self.draw.choice(self.pairs)

    def of_one_kind(self, pair: Pair) -> list[Pair]:
        return [each for each in self.pairs if (each.low.fmt, each.low.shape) == (pair.low.fmt, pair.low.shape)]

    def say(self, *words: object) -> None:
        self.log.append(words)

    # new ones

    def make(self) -> None:
        draw = self.draw
        fmt = draw.choice(PRESETS).with_(block_size=draw.choice([2, 4, 8, 64]), layout=draw.choice(["flat", "rows"]))
        x = numbers(draw.choice(SHAPES), draw)
        dtype = draw.choice([None, *DTYPES])
        self.say(fmt, tuple(x.shape), dtype)
        low = quantize(x, fmt, dtype=dtype)
        assert low.dtype == (dtype or torch.float32)
        self.pairs.append(Pair(low, self.decoded(x, fmt)))

    def decoded(self, x: Tensor, fmt: LowBitFormat) -> Tensor:
        """What x decodes to, worked out block by block; near to x."""
        x = x.float()
        if not x.numel():
            return torch.zeros(x.shape)
        runs = [x.flatten()] if fmt.layout == "flat" or x.ndim == 0 else x.reshape(-1, x.shape[-1]).unbind()
        decoded = []
        for block in (block for run in runs for block in run.split(fmt.block_size)):
            decoded.append(dequantize(quantize(block, fmt.with_(layout="flat"))))
            if not block.isfinite().all():
                assert decoded[-1].isnan().all()
                continue
            given = block.clamp(min=0) if fmt.unsigned else block
            assert ((decoded[-1].double() - given.double()).abs() <= limit(block, fmt)).all(), (block, decoded[-1])
            if fmt.unsigned:
                assert torch.equal(decoded[-1] > 0, given > 0)
        return torch.cat(decoded).view(x.shape)

    def copies(self) -> None:
        pair, draw = self.pick(), self.draw
        low, how = (
            pair.low,
            draw.choice(["clone", "deepcopy", "copy", "pickle", "save", "plain", "to", "dtype", "numbers"]),
        )
        self.say(how)
        if how == "clone":
            low = low.clone()
        elif how == "deepcopy":
            low = copy.deepcopy({"x": [low]})["x"][0]
        elif how == "pickle":
            low = pickle.loads(pickle.dumps(low))
        elif how in ("save", "plain"):
            file = io.BytesIO()
            torch.save(low if how == "save" else to_plain(low), file)
            file.seek(0)
            low = torch.load(file, weights_only=True)
            low = from_plain(low, pair.low.fmt) if how == "plain" else low
        elif how == "to":
            low = low.to("cpu", copy=True)
        elif how == "dtype":
            dtype = draw.choice([dtype for dtype in DTYPES if dtype != low.dtype])
            low = low.to(dtype)
            assert low.dtype == dtype
        elif how == "numbers":
            # the scale of what was decoded may differ in its last bit
            again = quantize(low.dequantize(torch.float32), low.fmt)
            finite = pair.twin.isfinite().all()
            # the map of "dynamic" has no -1, and an offset may lose its last bit
            assert not finite or low.fmt.code in ("dynamic", "affine") or torch.equal(again.codes, low.codes)
            return
        else:
            # as of a plain tensor: another object, the same memory
            self.pairs.append(Pair(copy.copy(low), pair.twin.view_as(pair.twin)))
            return
        assert low.dtype == pair.low.dtype or how == "dtype"
        self.pairs.append(Pair(low, pair.twin.clone()))

    def likes(self) -> None:
        pair, dtype = self.pick(), self.draw.choice([None, *DTYPES])
        zeros = torch.zeros_like(pair.low, dtype=dtype)
        assert zeros.dtype == (dtype or pair.low.dtype)
        self.pairs.append(Pair(zeros, torch.zeros_like(pair.twin)))
        assert torch.empty_like(pair.low, dtype=dtype).codes.shape == zeros.codes.shape

    # views

    def views(self) -> None:
        pair, draw = self.pick(), self.draw
        dim, size = draw.randrange(-2, 3), draw.randrange(0, 9)
        start, stop = draw.randrange(-9, 17), draw.choice([None, *range(-9, 17)])
        how = draw.choice(list(VIEWS))
        self.say(how, tuple(pair.low.shape), dim, size, start, stop)
        view = VIEWS[how]
        if not -pair.twin.ndim <= dim < pair.twin.ndim:
            return
        try:
            twins = view(pair.twin, dim, size, start, stop)
        except (RuntimeError, IndexError):
            with pytest.raises((RuntimeError, IndexError, *REFUSED)):
                view(pair.low, dim, size, start, stop)
            return
        try:
            lows = view(pair.low, dim, size, start, stop)
        except REFUSED:
            # only what would divide a block, or turn its elements around
            assert not pair.twin.numel() or any(twin.numel() != pair.twin.numel() for twin in twins)
            return
        assert len(lows) == len(twins)
        assert all(low.dtype == pair.low.dtype and low.fmt == pair.low.fmt for low in lows)
        self.pairs += [Pair(*each) for each in zip(lows, twins)][-4:]

    # writes

    def write(self) -> None:
        pair, draw = self.pick(), self.draw
        how = draw.choice(["copy_", "[...]", "quantize_into", "many", "data", "module"])
        x = numbers(pair.low.shape, draw)
        self.say(how, tuple(x.shape))
        low = pair.low
        if how == "copy_":
            assert low.copy_(x) is low
        elif how == "[...]":
            low[...] = x
        elif how == "quantize_into":
            quantize_into(low.codes, low.scale, x, low.fmt, offset=low.offset)
        elif how == "many":
            others = self.of_one_kind(pair)
            others = [each for each in others if each is pair or not shares_memory(each, pair)][:2]
            given = [numbers(pair.low.shape, draw) for _ in others]
            if len(others) == 2 and shares_memory(*others):
                return
            encode_many([each.low for each in others], given)
            for each, value in zip(others, given):
                each.twin.copy_(self.decoded(value, low.fmt))
            return
        elif how == "data":
            low.data = quantize(x, low.fmt, dtype=low.dtype)
            pair.twin = pair.twin.clone()
        else:
            holder = torch.nn.Module()
            holder.register_buffer("low", low)
            holder.load_state_dict({"low": x})
        pair.twin.copy_(self.decoded(x, low.fmt))

    def write_codes(self) -> None:
        pair = self.pick()
        others = [each for each in self.of_one_kind(pair) if not shares_memory(each, pair)]
        if others:
            other = self.draw.choice(others)
            assert pair.low.copy_(other.low) is pair.low
            pair.twin.copy_(other.twin)

    def decode_together(self) -> None:
        pairs = [self.pick() for _ in range(5)]
        dtype = self.draw.choice(DTYPES)
        for found, pair in zip(decode_many([pair.low for pair in pairs], dtype), pairs):
            same(found, pair.twin.to(dtype))

    def refused(self) -> None:
        """What is no operation of theirs is refused, and has changed nothing."""
        pair = self.pick()
        low, other = pair.low, torch.ones(pair.low.shape)
        for operation in REFUSALS:
            with pytest.raises((*REFUSED, TypeError, RuntimeError)):
                operation(low, other)
        pair.check()
        same(other, torch.ones_like(other))


def shares_memory(a: Pair, b: Pair) -> bool:
    return a.twin.untyped_storage().data_ptr() == b.twin.untyped_storage().data_ptr()


View = Callable[[Any, int, int, Any, Any], Sequence[Any]]
VIEWS: dict[str, View] = {
    "detach": lambda x, dim, size, start, stop: [x.detach()],
    "data": lambda x, dim, size, start, stop: [x.data],
    "alias": lambda x, dim, size, start, stop: [x[...]],
    "slice": lambda x, dim, size, start, stop: [x[start:stop]],
    "slice of columns": lambda x, dim, size, start, stop: [x[..., start:stop]],
    "narrow": lambda x, dim, size, start, stop: [x.narrow(dim, start, size)],
    "split": lambda x, dim, size, start, stop: x.split(size, dim),
    "split sizes": lambda x, dim, size, start, stop: x.split([size, max(x.shape[dim] - size, 0)], dim),
    "chunk": lambda x, dim, size, start, stop: x.chunk(size, dim),
    "tensor_split": lambda x, dim, size, start, stop: x.tensor_split(max(size, 1), dim),
    "tensor_split at": lambda x, dim, size, start, stop: x.tensor_split([size], dim),
}
REFUSALS: list[Callable[[Any, Any], object]] = [
    lambda low, other: low + 1,
    lambda low, other: other + low,
    lambda low, other: low.mul_(2),
    lambda low, other: other.add_(low),
    lambda low, other: other.copy_(low),
    lambda low, other: low.fill_(0),
    lambda low, other: low.zero_(),
    lambda low, other: low.lerp_(other, 0.5),
    lambda low, other: low == other,
    lambda low, other: torch.equal(low, low),
    lambda low, other: torch.cat([low, low]),
    lambda low, other: torch.stack([low, low]),
    lambda low, other: torch._foreach_add_([low], 1.0),
    lambda low, other: torch._foreach_add_([other], [low]),
    lambda low, other: torch._foreach_mul_([low], [other]),
    lambda low, other: torch._foreach_lerp_([low], [other], 0.5),
    lambda low, other: torch._foreach_copy_([low], [other]),
    lambda low, other: torch._foreach_copy_([other], [low]),
    lambda low, other: torch._foreach_addcdiv_([other], [low], [low], -1.0),
    lambda low, other: torch._foreach_norm([low]),
    lambda low, other: low.view(-1),
    lambda low, other: low[None],
    lambda low, other: low.unsqueeze(0),
    lambda low, other: low.expand(2, *low.shape),
    lambda low, other: low.as_strided((1,), (1,)),
    lambda low, other: low.int(),
    lambda low, other: low.copy_(other[None]),
    lambda low, other: low.copy_(quantize(other, low.fmt.with_(block_size=6))),
    lambda low, other: low.set_(other),
    lambda low, other: low.resize_(3),
    lambda low, other: low.apply_(lambda number: number),
    lambda low, other: quantize(low, low.fmt),
    lambda low, other: torch.where(other > 0, low, other),
]

OPERATIONS: list[Callable[[Sequences], None]] = [
    Sequences.make,
    Sequences.make,
    Sequences.copies,
    Sequences.copies,
    Sequences.likes,
    *([Sequences.views] * 4),
    *([Sequences.write] * 4),
    Sequences.write_codes,
    Sequences.decode_together,
    Sequences.refused,
]


@pytest.mark.slow
def test_sequences() -> None:
    for seed in range(20):
        Sequences(seed).run(25)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_many_sequences(part: int) -> None:
    for seed in range(200 * part, 200 * (part + 1)):
        Sequences(seed).run(60)
