"""Stochastic rounding against exact neighbours, Philox against its published answers, split16 against every corner."""

import itertools
import math
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optim_utils.rounding import (
    join_master,
    packed_philox_uint16,
    philox_2x32,
    philox_4x32,
    philox_uint32,
    random_bits,
    round_with_bits,
    split_master,
    stochastic_round,
    stochastic_round_,
)

HALF_DTYPES = [torch.bfloat16, torch.float16]
fp32_patterns = st.integers(-(2**31), 2**31 - 1)


def from_pattern(*patterns: int) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def neighbours(x: float, dtype: torch.dtype) -> tuple[float, float]:
    """The neighbours of x in dtype, by walking one representable value from the nearest one."""
    nearest = torch.tensor(x, dtype=torch.float32).to(dtype)
    step = torch.tensor(-math.inf if nearest.item() > x else math.inf, dtype=dtype)
    other = torch.nextafter(nearest, step)
    if nearest.item() == x:
        return x, x
    low, high = sorted((nearest.item(), other.item()))
    return low, high


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        (0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (0xFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
    ids=["zeros", "ones"],
)
def test_philox_known_answers(word: int, answer: tuple[int, ...]) -> None:
    counter = torch.tensor([word])
    words = philox_4x32((counter, counter, counter, counter), (word, word))
    assert tuple(w.item() for w in words) == answer


@pytest.mark.parametrize(
    ("word", "rounds", "answer"),
    [
        (0, 7, (0x257A3673, 0xCD26BE2A)),
        (0xFFFFFFFF, 7, (0xAB302C4D, 0x3DC9D239)),
        (0, 10, (0xFF1DAE59, 0x6CD10DF2)),
        (0xFFFFFFFF, 10, (0x2C3F628B, 0xAB4FD7AD)),
    ],
    ids=["zeros, 7 rounds", "ones, 7 rounds", "zeros, 10 rounds", "ones, 10 rounds"],
)
def test_philox_2x32_known_answers(word: int, rounds: int, answer: tuple[int, int]) -> None:
    counter = torch.tensor([word])
    words = philox_2x32((counter, counter), word, rounds=rounds)
    assert tuple(w.item() for w in words) == answer


def reference_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x32-10 on Python's unbounded ints, written from the paper's definition."""
    mask = 2**32 - 1
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [second >> 32 ^ counter[1] ^ key[0], second & mask, first >> 32 ^ counter[3] ^ key[1], first & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


@given(seed=st.integers(0, 2**64 - 1), offset=st.integers(0, 2**62))
@settings(max_examples=30, deadline=None)
def test_plain_stream_is_word_zero_of_the_reference(seed: int, offset: int) -> None:
    words = philox_uint32(seed, offset, (3,))
    key = [seed % 2**32, seed >> 32]
    expected = [reference_philox([i % 2**32, i >> 32, 0, 0], key)[0] for i in range(offset, offset + 3)]
    assert words.tolist() == expected


@given(
    seed=st.integers(0, 2**32 - 1),
    parameter=st.integers(0, 1000),
    stream=st.integers(0, 2),
    step=st.integers(1, 2**32 - 1),
    offset=st.integers(0, 2**40),
    count=st.integers(0, 20),
)
@settings(max_examples=30, deadline=None)
def test_packed_stream_is_the_halves_of_the_reference(
    seed: int, parameter: int, stream: int, step: int, offset: int, count: int
) -> None:
    bits = packed_philox_uint16(seed, parameter, count, stream=stream, step=step, offset=offset)
    expected = []
    for i in range(offset, offset + count):
        block, element = divmod(i, 8)
        words = reference_philox([block % 2**32, block >> 32, stream, step], [seed, parameter])
        expected.append(words[element // 2] >> (16 * (element % 2)) & 0xFFFF)
    assert bits.dtype == torch.int32
    assert bits.tolist() == expected


@pytest.mark.parametrize("seed", [None, 5], ids=["generator", "seed"])
def test_all_sixteen_bits_are_fair_and_independent(seed: int | None) -> None:
    count = 1 << 14
    bits = random_bits((count,), seed=seed, generator=None if seed is not None else torch.Generator().manual_seed(1))
    assert bits.dtype == torch.int32
    assert bits.min() >= 0
    assert bits.max() < 1 << 16
    signs = 2.0 * (bits[:, None] >> torch.arange(16) & 1) - 1
    correlations = signs.T @ signs / count - torch.eye(16)
    neighbours = signs[1:].T @ signs[:-1] / count
    limit = 5 / math.sqrt(count)
    assert max(signs.mean(0).abs().max(), correlations.abs().max(), neighbours.abs().max()) <= limit


def test_plain_stream_of_many_words_is_made_of_its_parts() -> None:
    whole = philox_uint32(3, 100, (5, 10_000))
    assert torch.equal(whole.flatten()[40_000:40_010], philox_uint32(3, 40_100, 10))
    assert philox_uint32(3, 100, (0, 4)).shape == (0, 4)


def test_packed_stream_takes_a_tensor_step() -> None:
    expected = packed_philox_uint16(1, 2, (2, 9), stream=1, step=7)
    assert torch.equal(packed_philox_uint16(1, 2, (2, 9), stream=1, step=torch.tensor(7.0).long()), expected)


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@given(pattern=fp32_patterns, bits=st.integers(0, 2**16 - 1))
@settings(max_examples=300, deadline=None)
def test_result_is_a_neighbour_and_goes_up_when_the_bits_say_so(dtype: torch.dtype, pattern: int, bits: int) -> None:
    x = from_pattern(pattern)
    result = round_with_bits(x, dtype, torch.tensor([bits], dtype=torch.int32))
    value = x.item()
    if not math.isfinite(value) or abs(value) > torch.finfo(dtype).max:
        assert torch.equal(result, x.to(dtype)) or (math.isnan(value) and result.isnan().all())
        return
    low, high = neighbours(value, dtype)
    assert result.item() in (low, high)
    if low != high:
        # Away from zero exactly when the lost fraction, truncated to the bits in use, and r make a carry.
        lost = Fraction(abs(value)) - min(abs(Fraction(low)), abs(Fraction(high)))
        fraction = lost / (Fraction(high) - Fraction(low))
        away = math.floor(fraction * 2**16) + bits >= 2**16
        assert abs(result.item()) == (max if away else min)(abs(low), abs(high))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_representable_values_and_signed_zero_never_move(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    every = every[~every.isnan()]
    bits = torch.full(every.shape, 0xFFFF, dtype=torch.int32)
    assert torch.equal(round_with_bits(every.float(), dtype, bits).view(torch.int16), every.view(torch.int16))
    nan = torch.tensor([math.nan, -math.nan])
    assert round_with_bits(nan, dtype, bits[:2]).isnan().all()


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("seed", [None, 11], ids=["generator", "seed"])
def test_unbiased_within_five_sigma(dtype: torch.dtype, seed: int | None) -> None:
    generator = None if seed is not None else torch.Generator().manual_seed(3)
    count = 1 << 15
    for value in (1.0 + 2**-12, -3.3, 2.0**-20 * 1.37, 2.0**-24 * 0.3, 1e-3):
        x = torch.full((count,), value)
        exact = x[0].item()
        low, high = neighbours(exact, dtype)
        rounded = stochastic_round(x, dtype, seed=seed, generator=generator).double()
        up = (rounded == high).double().mean().item()
        probability = (exact - low) / (high - low)
        sigma = math.sqrt(probability * (1 - probability) / count)
        assert abs(up - probability) <= 5 * sigma + 2**-16


def test_seeded_shard_equals_slice_of_the_whole() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = stochastic_round(x, torch.bfloat16, seed=2**40 + 5, offset=2**33)
    part = stochastic_round(x[123:457], torch.bfloat16, seed=2**40 + 5, offset=2**33 + 123)
    assert torch.equal(part, whole[123:457])
    tensor_seed = stochastic_round(x, torch.bfloat16, seed=torch.tensor(2**40 + 5), offset=torch.tensor(2**33))
    assert torch.equal(tensor_seed, whole)
    transposed = x.view(20, 50).t()
    assert torch.equal(
        stochastic_round(transposed, torch.bfloat16, seed=1),
        stochastic_round(transposed.contiguous(), torch.bfloat16, seed=1),
    )


@given(data=st.data(), dtype=st.sampled_from([torch.bfloat16, torch.float16]), seed=st.integers(-(2**63), 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_the_bits_are_the_same_however_a_tensor_is_cut(data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
    numel = data.draw(st.sampled_from([0, 1, 7, 8, 1000, 16383, 16384, 16385, 40000]))
    offset = data.draw(st.sampled_from([0, 3, 2**32 - 7, 3 * 2**32 - 1, 2**62]))
    cuts = sorted([0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))])
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    whole = stochastic_round(x, dtype, seed=seed, offset=offset)
    parts = [stochastic_round(x[a:b], dtype, seed=seed, offset=offset + a) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts).view(torch.int16), whole.view(torch.int16))
    step = data.draw(st.integers(0, 2**32 - 1))
    stream = {"stream": 1, "step": step}
    packed = packed_philox_uint16(seed, 5, numel, offset=offset, **stream)
    parts = [packed_philox_uint16(seed, 5, b - a, offset=offset + a, **stream) for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), packed)


def test_generator_reproduces_and_in_place_and_out_agree() -> None:
    x = torch.randn(7, 9)
    first = stochastic_round(x, torch.float16, generator=torch.Generator().manual_seed(5))
    second = torch.empty(7, 9, dtype=torch.float16)
    returned = stochastic_round_(second, x, generator=torch.Generator().manual_seed(5))
    assert returned is second
    assert torch.equal(first, second)
    out = torch.empty_like(second)
    assert stochastic_round(x, torch.float16, seed=3, out=out) is out
    assert torch.equal(out, stochastic_round(x, torch.float16, seed=3))
    assert stochastic_round(torch.empty(0, 3), torch.bfloat16, seed=1).shape == (0, 3)
    assert stochastic_round(torch.tensor(1.0, dtype=torch.float64), torch.bfloat16).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_has_no_gradient_instead_of_a_zero_one(dtype: torch.dtype) -> None:
    assert not stochastic_round(torch.randn(4, requires_grad=True), dtype, seed=0).requires_grad


def test_wrong_arguments_are_refused() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="float32"):
        stochastic_round(x, torch.float32)
    with pytest.raises(TypeError, match="int64"):
        stochastic_round(torch.ones(2, dtype=torch.int64), torch.bfloat16)
    with pytest.raises(ValueError, match="both"):
        stochastic_round(x, torch.bfloat16, seed=1, generator=torch.Generator())
    with pytest.raises(ValueError, match="out must be"):
        stochastic_round(x, torch.bfloat16, out=torch.empty(2))
    with pytest.raises(TypeError, match="seed must be"):
        stochastic_round(x, torch.bfloat16, seed=torch.ones(2))
    with pytest.raises(TypeError, match=r"seed must be an int or a 0-dim integer tensor, got 1\.5"):
        stochastic_round(x, torch.bfloat16, seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed must be an int or a 0-dim integer tensor, got 'a'"):
        random_bits((2,), seed="a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="only ints"):
        philox_4x32((0, 0, 0, 0), (0, 0))
    with pytest.raises(TypeError, match=r"philox_2x32 needs .* only ints"):
        philox_2x32((0, 0), 0)
    with pytest.raises(TypeError, match="stochastic_round takes a floating tensor, got a list"):
        stochastic_round([1.0], torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dense floating tensor, got torch\.float32 in layout torch\.sparse_coo"):
        stochastic_round(x.to_sparse(), torch.bfloat16)
    with pytest.raises(TypeError, match=r"out must be a torch\.bfloat16 tensor of shape \(2,\), got a list"):
        stochastic_round(x, torch.bfloat16, out=[0.0, 0.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dst must be a bfloat16 or float16 tensor, got a NoneType"):
        stochastic_round_(None, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"dst must be of src's shape \(2,\), got \(3,\)"):
        stochastic_round_(torch.zeros(3, dtype=torch.bfloat16), x)
    with pytest.raises(TypeError, match="got 'bf16'"):
        stochastic_round(x, "bf16")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"generator must be a torch\.Generator or None, got 3"):
        stochastic_round(x, torch.bfloat16, generator=3)  # type: ignore[arg-type]
    for shape in ("ab", (2.0,), None):
        with pytest.raises(TypeError, match="shape must hold integers, the sizes of a tensor, got "):
            random_bits(shape, seed=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape=\(-2,\) must hold the sizes of a tensor"):
        random_bits((-2,), seed=1)
    with pytest.raises(TypeError, match="round_with_bits takes a tensor x, got a list"):
        round_with_bits([1.0], torch.bfloat16, torch.zeros(1, dtype=torch.int32))  # type: ignore[arg-type]
    for bits, kind in ((torch.zeros(2), "torch.float32"), ([0, 0], "a list")):
        with pytest.raises(TypeError, match=rf"bits must be an int32 tensor, of values in .*, got {kind}"):
            round_with_bits(x, torch.bfloat16, bits)  # type: ignore[arg-type]
    # a bit for all elements would round them alike, silently
    with pytest.raises(ValueError, match=r"bits must be of x's shape \(2,\), got \(1,\)"):
        round_with_bits(x, torch.bfloat16, torch.zeros(1, dtype=torch.int32))
    for other in (x.to(torch.complex64), x.to_sparse()):
        with pytest.raises(TypeError, match="round_with_bits takes a dense tensor x of real numbers, got "):
            round_with_bits(other, torch.bfloat16, torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("name", ["seed", "parameter_index", "stream", "step", "offset"])
@pytest.mark.parametrize("value", [None, 1.5, "1", torch.arange(2), torch.tensor(1.0)], ids=str)
def test_words_of_the_packed_stream_are_checked(name: str, value: object) -> None:
    # one word for each block would be taken for that of all, silently
    words: dict[str, Any] = {"seed": 1, "parameter_index": 0, "stream": 0, "step": 1, "offset": 0, name: value}
    with pytest.raises(TypeError, match=f"{name} must be an int or a 0-dim integer tensor, got "):
        packed_philox_uint16(shape=(16,), **words)


narrow_integers = pytest.mark.parametrize(
    ("value", "narrow"),
    [
        (200, np.uint8(200)),
        (200, torch.tensor(200, dtype=torch.uint8)),
        (2**31 - 1, np.int32(2**31 - 1)),
        (2**31 - 1, torch.tensor(2**31 - 1, dtype=torch.int32)),
        (-1, torch.tensor(-1, dtype=torch.int32)),
    ],
    ids=["numpy-8", "torch-8", "numpy-32", "torch-32", "torch-32-negative"],
)


@narrow_integers
def test_narrow_integers_do_not_wrap_around(value: int, narrow: Any) -> None:
    # of more elements than are computed at a time
    numel = 20_000
    assert torch.equal(philox_uint32(narrow, 0, numel), philox_uint32(value, 0, numel))
    assert torch.equal(philox_uint32(0, narrow, numel), philox_uint32(0, value, numel))
    for name in ("seed", "parameter_index", "stream", "step", "offset"):
        words = {"seed": 1, "parameter_index": 2, "stream": 0, "step": 3, "offset": 4}
        expected = packed_philox_uint16(shape=20, **{**words, name: value})
        assert torch.equal(packed_philox_uint16(shape=20, **{**words, name: narrow}), expected)


def test_products_of_words_are_of_64_bits() -> None:
    narrow = torch.arange(4, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"words of Philox have to be ints or int64 tensors, got torch\.int32"):
        philox_4x32((narrow, 0, 0, 0), (1, 2))
    with pytest.raises(TypeError, match=r"words of Philox have to be ints or int64 tensors, got torch\.int32"):
        philox_2x32((torch.arange(4), 0), narrow)


@pytest.mark.parametrize("shape", [np.array([2, 3]), range(2, 4), [np.int8(2), torch.tensor(3)]], ids=str)
def test_a_shape_is_any_sequence_of_integers(shape: Any) -> None:
    packed = partial(packed_philox_uint16, stream=0, step=1)
    assert torch.equal(packed(1, 2, shape), packed(1, 2, (2, 3)))
    assert torch.equal(philox_uint32(1, 2, shape), philox_uint32(1, 2, (2, 3)))
    assert random_bits(shape).shape == (2, 3)


def test_an_offset_is_the_place_of_the_first_element() -> None:
    # one number for each element would be added to their places, silently
    for offset in (torch.arange(2), torch.tensor(1.0), 1.5, "1"):
        with pytest.raises(TypeError, match="offset must be an int or a 0-dim integer tensor, got "):
            stochastic_round(torch.ones(2), torch.bfloat16, seed=0, offset=offset)  # type: ignore[arg-type]
    whole = philox_uint32(0, 0, (5,))
    assert torch.equal(philox_uint32(0, torch.tensor(2), (3,)), whole[2:])


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_seeded_form_compiles_fullgraph(dtype: torch.dtype) -> None:
    compiled = torch.compile(lambda x, seed: stochastic_round(x, dtype, seed=seed), fullgraph=True, backend="eager")
    x = torch.randn(33)
    assert torch.equal(compiled(x, torch.tensor(9)), stochastic_round(x, dtype, seed=9))
    assert torch.equal(compiled(x, 9), stochastic_round(x, dtype, seed=9))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_default_form_compiles_fullgraph_and_is_unbiased_and_reproducible(dtype: torch.dtype, backend: str) -> None:
    compiled = torch.compile(lambda x: stochastic_round(x, dtype), fullgraph=True, backend=backend)
    x = torch.full((1 << 16,), 1 + 0.3 * torch.finfo(dtype).eps)
    torch.manual_seed(0)
    first, second = compiled(x), compiled(x)
    torch.manual_seed(0)
    assert torch.equal(compiled(x), first)
    assert not torch.equal(first, second)
    for rounded in (first, second):
        up = (rounded.float() == 1 + torch.finfo(dtype).eps).double()
        assert ((rounded == 1) | (up == 1)).all()
        assert abs(up.mean().item() - 0.3) <= 5 * math.sqrt(0.3 * 0.7 / x.numel())


@given(patterns=st.lists(fp32_patterns, min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_split16_round_trip_is_exact_and_nearest(patterns: list[int]) -> None:
    master = from_pattern(*patterns)
    parameter, low = split_master(master)
    joined = join_master(parameter, low)
    number = ~master.isnan()
    assert torch.equal(joined[number].view(torch.int32), master[number].view(torch.int32))
    assert parameter[~number].isnan().all()
    assert joined[~number].isnan().all()
    nearest = master.to(torch.bfloat16)
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(parameter[number & ~tie].view(torch.int16), nearest[number & ~tie].view(torch.int16))


def test_split16_corners() -> None:
    corners = from_pattern(0, -(2**31), 0x8000, 0x7FFF, 0x7F7FFFFF, 0x7F800000, -0x00800000, 1, 0x3F808000, 0x3F818000)
    parameter, low = split_master(corners)
    assert torch.equal(join_master(parameter, low).view(torch.int32), corners.view(torch.int32))
    for pattern in (0x7FFFFFFF, 0x7F800001, -1):  # the last is 0xffffffff
        parameter, low = split_master(from_pattern(pattern))
        assert parameter.isnan().all()
        assert join_master(parameter, low).isnan().all()


def test_lazily_negated_tensors_are_rounded_and_split_as_their_numbers() -> None:
    negated = torch.randn(5, 4, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    plain = negated.resolve_neg()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(stochastic_round(negated, dtype, seed=3), stochastic_round(plain, dtype, seed=3))
    parameter, low = split_master(negated)
    assert torch.equal(join_master(parameter, low), plain)
    assert torch.equal(join_master(torch._neg_view(-parameter), low), plain)


def test_split16_survives_a_parameter_zeroed_from_outside() -> None:
    parameter, low = split_master(torch.tensor([1.0 - 2**-20, 1.0 + 2**-20]))
    assert low.tolist() == [-16, 8]
    for zero in (0.0, -0.0):
        joined = join_master(parameter.fill_(zero), low)
        assert joined.isfinite().all()
        assert joined.abs().max().item() < 1e-40
    with pytest.raises(TypeError, match="float64"):
        split_master(torch.ones(1, dtype=torch.float64))
    with pytest.raises(TypeError, match="int32"):
        join_master(parameter, low.int())
    with pytest.raises(TypeError, match="split_master takes a float32 master, got a list"):
        split_master([1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"join_master takes bfloat16 and int16, got a NoneType and torch\.int16"):
        join_master(None, low)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"of one shape, got \(2, 1\) and \(2,\)"):
        join_master(parameter[:, None], low)


def run_average(beta: float, steps: int, store: object, start: float = 0.25, constant: bool = False) -> float:
    """Mean over lanes of v <- store(beta v + (1 - beta) g**2)."""
    generator = torch.Generator().manual_seed(0)
    v = store(torch.full((4096,), start))
    for _ in range(steps):
        g2 = 1.0 if constant else torch.randn(4096, generator=generator).square_()
        v = store(v.float().mul_(beta).add_((1 - beta) * g2))
    return v.double().mean().item()


def test_average_stalls_by_nearest_and_not_stochastically() -> None:
    stochastic = partial(stochastic_round, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    exact = run_average(0.99, 1000, lambda x: x)
    assert abs(run_average(0.99, 1000, stochastic) - exact) <= 0.005
    assert run_average(0.99, 1000, lambda x: x.bfloat16()) - exact > 0.02
    assert run_average(0.999, 100, lambda x: x.bfloat16(), constant=True) == 0.25


@pytest.mark.slow
def test_average_figures_of_ten_thousand_steps() -> None:
    stochastic = partial(stochastic_round, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    exact = run_average(0.999, 10_000, lambda x: x)
    assert exact == pytest.approx(1.0, abs=0.003)  # the standard deviation of this mean is 5e-4
    assert abs(run_average(0.999, 10_000, stochastic) - exact) <= 0.005
    assert run_average(0.999, 10_000, lambda x: x.bfloat16()) > 1.9
    assert run_average(0.999, 10_000, stochastic, constant=True) == pytest.approx(1.0, abs=0.002)
