"""Random sequences of what users do to quantized lists, beside a list of tensors that is converted one by one."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from optim_utils import FLOAT_DTYPES, DequantizeQuantizedTensorListContext, QuantizedTensorList
from optim_utils import _many_tensors as many
from optim_utils.low_bit import INT4, INT8, MOMENT8, UINT8_AFFINE, LowBitFormat, LowBitTensor, dequantize, quantize
from optim_utils.rounding import round_with_bits

SHAPES = [(8,), (8,), (4, 8), (4, 8), (3, 5), (), (0, 3), (2, 8), (16,)]
FORMATS = [fmt.with_(block_size=8) for fmt in (INT8, MOMENT8, UINT8_AFFINE, INT4)]


class Interruption(Exception):
    pass


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


class Sequence:
    """One list, the numbers that it must hold, and those to compute with while there are any."""

    def __init__(self, seed: int) -> None:
        draw = self.draw = random.Random(seed)
        self.log: list[object] = [f"seed {seed}"]
        self.dtype = draw.choice([*FLOAT_DTYPES, *FORMATS])
        self.computed = draw.choice([torch.float32, torch.float32, *FLOAT_DTYPES])
        can_be_random = isinstance(self.dtype, LowBitFormat) or self.dtype in (torch.bfloat16, torch.float16)
        self.is_random = can_be_random and draw.random() < 0.4
        shapes = [draw.choice(SHAPES) for _ in range(draw.randrange(7))]
        given = [self.numbers(shape) for shape in shapes]
        self.list = QuantizedTensorList(
            [(x, None, None) for x in given],
            self.dtype,
            self.computed,
            rounding="stochastic" if self.is_random else "nearest",
            generator=torch.Generator().manual_seed(seed) if self.is_random else None,
        )
        self.log.append((self.dtype, self.computed, self.is_random, shapes))
        self.stored = [self.decoded(self.rounded(x)) for x in given]
        self.values: list[Tensor] | None = None

    def numbers(self, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(self.draw.randrange(999))) ** 2
        x = x.to(self.draw.choice(FLOAT_DTYPES))
        how = self.draw.choice(["dense", "dense", "gaps", "gradient"])
        if how == "gaps" and x.ndim:
            return torch.stack((x, x), -1)[..., 0]
        return x.requires_grad_() if how == "gradient" else x

    def rounded(self, x: Tensor) -> Tensor:
        x = x.detach().clone()
        return quantize(x, self.dtype) if isinstance(self.dtype, LowBitFormat) else x.to(self.dtype)

    def decoded(self, stored: Tensor) -> Tensor:
        """Stored numbers, as they are."""
        return dequantize(stored, torch.float32) if isinstance(stored, LowBitTensor) else stored.detach().clone()

    @property
    def shares(self) -> bool:
        """Whether the values to compute with are the storage."""
        return self.dtype == self.computed

    @torch.no_grad()
    def run(self, length: int) -> None:
        for _ in range(length):
            operation = self.draw.choice(OPERATIONS)
            self.log.append(operation.__name__)
            try:
                operation(self)
                self.check()
            except Exception as error:
                error.add_note(f"after {self.log}")
                raise

    def check(self) -> None:
        assert len(self.list) == len(self.stored)
        same([self.decoded(value) for value in self.list.quantized_value], self.stored)
        same(list(self.list.dequantize()), [value.to(self.computed) for value in self.stored])
        assert self.list.is_dequantized_stored() == (self.values is not None)
        if self.values is not None:
            same(list(self.list.dequantized_value), self.values)
            assert all(value.dtype == self.computed for value in self.list.dequantized_value)

    def wrote(self, given: list[Tensor]) -> None:
        """The list was to store these numbers."""
        for position, (x, found) in enumerate(zip(given, map(self.decoded, self.list.quantized_value))):
            if self.is_random:
                self.check_neighbours(x, found)
                self.stored[position] = found
            else:
                self.stored[position] = self.decoded(self.rounded(x))
        if self.shares and self.values is not None:
            self.values = [value.clone() for value in self.stored]

    def check_neighbours(self, x: Tensor, found: Tensor) -> None:
        if isinstance(self.dtype, LowBitFormat):
            # in a block of even or growing steps no number is off by more than two of the largest
            off = (x.double() - found.double()).abs()
            assert not x.numel() or off.max() <= x.abs().max() / 3
            return
        zeros = torch.zeros(x.shape, dtype=torch.int32)
        low, high = (round_with_bits(x, self.dtype, zeros + bits) for bits in (0, 0xFFFF))
        assert ((found == low) | (found == high)).all()

    # operations

    def open_by_hand(self) -> None:
        self.list.dequantize_()
        self.values = [value.to(self.computed).clone() for value in self.stored]

    def close_by_hand(self) -> None:
        values, self.values = self.values, None
        self.list.quantize_()
        if values is not None:
            self.wrote(values)

    def compute(self) -> None:
        """In place, on the values to compute with."""
        if self.values:
            position = self.draw.randrange(len(self.values))
            factor = self.draw.choice([0.5, 1.25, 0.0])
            self.list.dequantized_value[position].mul_(factor)
            self.values[position].mul_(factor)
            if self.shares:
                self.stored[position] = self.values[position].clone()

    def write(self) -> None:
        """Other tensors; sometimes the list's own, in another order."""
        given = [self.numbers(tuple(value.shape)) for value in self.stored]
        how = self.draw.choice(["new", "new", "some", "own", "values"])
        self.log.append(how)
        own = list(self.list.dequantize())
        if how == "some" and given:
            given[0] = own[0]
        elif how == "own":
            places: dict[tuple[int, ...], list[Tensor]] = {}
            for value in own:
                places.setdefault(tuple(value.shape), []).append(value)
            given = [places[tuple(value.shape)].pop() for value in own]
        elif how == "values" and self.values is not None:
            given = list(self.list.dequantized_value)
        copies = [x.detach().clone() for x in given]
        self.list.quantize(given)
        self.wrote(copies)

    def use_a_context(self) -> None:
        draw = self.draw
        write_back, on_exception = draw.random() < 0.7, draw.choice(["discard", "keep"])
        fails, was_open = draw.random() < 0.4, self.values is not None
        self.log.append((write_back, on_exception, fails))
        context = DequantizeQuantizedTensorListContext(self.list, write_back=write_back, on_exception=on_exception)
        with suppress(Interruption), context as values:
            if not was_open:
                self.values = [value.to(self.computed).clone() for value in self.stored]
            self.check()
            same(list(values), self.values)
            self.compute()
            with DequantizeQuantizedTensorListContext(self.list, write_back=draw.random() < 0.5):
                self.compute()
                self.check()
            if fails:
                raise Interruption
        if was_open:
            return
        done, self.values = self.values, None
        assert done is not None
        if write_back and (not fails or on_exception == "keep"):
            self.wrote(done)

    def write_through(self) -> None:
        """Into the storage itself."""
        if self.stored:
            position = self.draw.randrange(len(self.stored))
            x = self.numbers(tuple(self.stored[position].shape)).detach()
            self.list.quantized_value[position].copy_(x)
            self.stored[position] = self.decoded(self.rounded(x))
            if self.shares and self.values is not None:
                self.values[position] = self.stored[position].clone()

    def compress(self) -> None:
        selector = [self.draw.random() < 0.8 for _ in self.stored]
        if self.values is not None:
            with pytest.raises(AssertionError, match="Cannot compress"):
                self.list.compress(selector)
            return
        kept = [value for value, chosen in zip(self.list.quantized_value, selector) if chosen]
        self.list = self.list.compress(selector)
        assert all(map(lambda mine, other: mine is other, self.list.quantized_value, kept))
        self.stored = [value for value, chosen in zip(self.stored, selector) if chosen]

    def copy(self) -> None:
        if self.is_random and self.draw.random() < 0.5:
            return
        how = self.draw.choice(["deepcopy", "pickle"])
        if how == "pickle" and self.list.generator is not None:
            return  # torch's generators have no pickled form on every supported version
        self.list = copy.deepcopy(self.list) if how == "deepcopy" else pickle.loads(pickle.dumps(self.list))

    def resume(self) -> None:
        """From a file, into a list of other numbers."""
        if self.values is not None:
            return
        file = io.BytesIO()
        torch.save(self.list.state_dict(), file)
        file.seek(0)
        for value in self.list.quantized_value:
            value.copy_(torch.zeros_like(value))
        places = list(self.list.quantized_value)
        assert self.list.load_state_dict(torch.load(file, weights_only=True), strict=True).ok
        assert all(map(lambda mine, other: mine is other, self.list.quantized_value, places))


OPERATIONS: list[Callable[[Sequence], None]] = [
    Sequence.open_by_hand,
    Sequence.close_by_hand,
    Sequence.compute,
    Sequence.compute,
    Sequence.write,
    Sequence.write,
    Sequence.use_a_context,
    Sequence.use_a_context,
    Sequence.write_through,
    Sequence.compress,
    Sequence.copy,
    Sequence.resume,
]


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [1 << 22, 64], ids=["one row", "short rows"])
def test_sequences(monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    monkeypatch.setattr(many, "_MAX_ROW", longest)
    for seed in range(60):
        Sequence(seed).run(20)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_many_sequences(part: int) -> None:
    for seed in range(500 * part, 500 * (part + 1)):
        Sequence(seed).run(50)
