"""Balancing: the documented models to the digit, the laws, the errors."""

import math
import pickle
import time
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from yardsticks import times_as_long

from optim_utils._ranks_in_order import RanksInOrder
from optim_utils.balance import BytesCost, CubicCost, NewtonSchulzCost, Partition, partition
from optim_utils.shampoo_utils import merge_small_dims


def gpt2(width, layers):
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,), (width,), (width,)]
    block += [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(50257, width), (1024, width), *block * layers, (width,), (width,)]


def llama(vocabulary, key_value, hidden):
    width = 4096
    block = [(width, width), (key_value, width), (key_value, width), (width, width)]
    block += [(hidden, width), (hidden, width), (width, hidden), (width,), (width,)]
    return [(vocabulary, width), *block * 32, (width,), (vocabulary, width)]


def resnet50():
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for i in range(blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if i == 0:
                convolutions.append((4 * width, channels, 1, 1))
            for shape in convolutions:
                shapes += [shape, shape[:1], shape[:1]]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


MODELS = {
    "GPT-2 124M": (gpt2(768, 12), 148),
    "GPT-2 XL": (gpt2(1600, 48), 580),
    "Llama-7B": (llama(32000, 4096, 11008), 291),
    "Llama-3-8B": (llama(128256, 1024, 14336), 291),
    "ResNet-50": (resnet50(), 161),
}


def blocks(model, size):
    """Shapes of the blocks that a block size cuts a model's parameters into."""
    shapes = []
    for shape in MODELS[model][0]:
        merged = merge_small_dims(shape, size, 2)
        cuts = [[size] * (length // size) + [length % size] * (length % size > 0) for length in merged]
        shapes += product(*cuts)
    return shapes


def weights(model, size):
    shapes = blocks(model, size)
    byte, cube = BytesCost(), CubicCost()
    return [byte(shape, torch.float32) for shape in shapes], [cube(shape, torch.float32) for shape in shapes]


def ratio(owner, loads):
    """Largest over mean load of 64 ranks, for any weights."""
    per_rank = [0] * 64
    for rank, load in zip(owner, loads, strict=True):
        per_rank[rank] += load
    return max(per_rank) / (sum(per_rank) / 64)


@pytest.mark.parametrize("model", MODELS)
def test_models_have_their_published_number_of_tensors(model):
    shapes, count = MODELS[model]
    assert len(shapes) == count


# model, block size, max/mean compute when LPT balances bytes, limit when cost is balanced, lower bound
TABLE = [
    ("GPT-2 124M", 1024, 1.53, 1.04, 1.00),
    ("GPT-2 124M", 2048, 2.04, 1.33, 1.29),
    ("GPT-2 124M", 4096, 7.57, 1.99, 1.98),
    ("GPT-2 XL", 1024, 2.04, 1.001, 1.00),
    ("GPT-2 XL", 2048, 3.97, 1.002, 1.00),
    ("GPT-2 XL", 4096, 4.77, 1.006, 1.00),
    ("Llama-7B", 1024, 1.14, 1.001, 1.00),
    ("Llama-7B", 2048, 1.57, 1.001, 1.00),
    ("Llama-7B", 4096, 3.30, 1.013, 1.00),
    ("Llama-3-8B", 1024, 1.05, 1.003, 1.00),
    ("Llama-3-8B", 2048, 1.23, 1.003, 1.00),
    ("Llama-3-8B", 4096, 1.93, 1.021, 1.00),
    ("ResNet-50", 1024, 8.84, 1.842, 1.84),
    ("ResNet-50", 2048, 3.97, 3.542, 3.54),
    ("ResNet-50", 4096, 3.16, 3.162, 3.16),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "size", "by_bytes", "limit", "bound"), TABLE)
def test_compute_of_64_ranks(model, size, by_bytes, limit, bound):
    sizes, costs = weights(model, size)
    result = partition(costs, 64)
    assert result.imbalance == pytest.approx(ratio(result.owner, costs))
    assert result.imbalance <= limit
    assert result.lower_bound / (sum(costs) / 64) == pytest.approx(bound, abs=0.006)
    assert ratio(partition(sizes, 64, improve=False).owner, costs) == pytest.approx(by_bytes, abs=0.006)


def test_bytes_of_gpt2_xl():
    for size, plain, limit in ((4096, 1.052, 1.015), (2048, 1.018, 1.006)):
        sizes, _ = weights("GPT-2 XL", size)
        assert partition(sizes, 64, improve=False).imbalance == pytest.approx(plain, abs=0.0006)
        assert partition(sizes, 64).imbalance <= limit


@pytest.mark.parametrize(
    ("model", "size", "num_ranks", "cap", "limit"),
    [
        ("GPT-2 XL", 4096, 64, 1.1, 1.006),
        ("ResNet-50", 1024, 8, 1.25, 1.002),
        ("GPT-2 124M", 1024, 64, 1.25, 1.04),
        ("GPT-2 124M", 2048, 64, 1.25, 1.33),
    ],
)
def test_compute_under_a_memory_cap(model, size, num_ranks, cap, limit):
    sizes, costs = weights(model, size)
    result = partition(costs, num_ranks, memory=sizes, memory_cap=cap)
    assert result.imbalance <= limit
    assert max(result.memory_loads) <= cap * sum(sizes) / num_ranks
    free = partition(costs, num_ranks, memory=sizes)
    assert max(free.memory_loads) >= max(result.memory_loads)


def test_infeasible_cap_names_the_smallest_that_was_found():
    sizes, costs = weights("GPT-2 124M", 1024)
    with pytest.raises(
        ValueError, match=r" bytes per rank; the smallest cap found is 94\d{5} bytes \(1\.21. × the mean\)"
    ) as caught:
        partition(costs, 64, memory=sizes, memory_cap=1.1)
    smallest = int(str(caught.value).split("found is ")[1].split()[0])
    assert max(partition(costs, 64, memory=sizes, memory_cap=smallest).memory_loads) <= smallest


def test_an_infeasible_cap_is_not_rounded_to_the_smallest_that_was_found():
    with pytest.raises(ValueError, match=r"memory_cap = 3\.75 bytes .* found is 4 bytes \(1\.067 × the mean\)"):
        partition([1] * 15, 4, memory=[1] * 15, memory_cap=1.0)
    # either number can be given
    for cap in (4, 1.067):
        assert max(partition([1] * 15, 4, memory=[1] * 15, memory_cap=cap).memory_loads) == 4
    with pytest.raises(ValueError, match=r"memory_cap = 2 bytes .* found is 2\.5 bytes"):
        partition([1] * 3, 3, memory=[2.5] * 3, memory_cap=2)


def test_the_smallest_cap_that_was_found_can_be_given_as_a_multiple():
    # exact as a decimal: in floating point 2.28 times the mean of 25 bytes on 3 ranks is less than 19
    assert 2.28 * 25 / 3 < 19
    with pytest.raises(ValueError, match=r"found is 19 bytes \(2\.281 × the mean\)"):
        partition([1, 1], 3, memory=[19, 6], memory_cap=1.0)
    assert max(partition([1, 1], 3, memory=[19, 6], memory_cap=2.281).memory_loads) == 19


def test_the_lower_bound_is_no_rounding_error_above_the_loads():
    # added from the largest on they are more
    assert 0.4 + 0.2 + 0.1 > 0.1 + 0.4 + 0.2
    result = partition([0.1, 0.4, 0.2], 1)
    assert result.lower_bound == result.loads[0]
    assert result.gap == 0


@pytest.mark.parametrize("cap", [1.5, 1e-9, 1])
def test_what_weighs_nothing_is_within_every_cap(cap):
    result = partition([1.0, 2.0], 2, memory=[0, 0], memory_cap=cap)
    assert sorted(result.loads) == [1, 2]
    assert result.memory_loads == (0, 0)


def test_whole_tensors_are_bound_by_one_item():
    costs = [BytesCost()(shape, torch.float32) for shape in MODELS["GPT-2 124M"][0]]
    result = partition(costs, 64)
    assert result.imbalance == pytest.approx(19.9, abs=0.06)
    assert result.gap == pytest.approx(0)
    assert result.report().splitlines()[-1] == "split item 0: alone it costs 19.85 × the mean load"
    assert "split" not in partition([1, 1, 1, 1], 2).report()
    assert "memory: at most 3, 1.200 × the mean" in partition([1, 1, 1], 2, memory=[1, 2, 2]).report()


@pytest.mark.timing
@pytest.mark.parametrize("skewed", [False, True])
def test_8000_items_on_64_ranks_take_less_than_half_a_second(skewed):
    costs = [((7919 * i) % 8009 + 1) ** (6 if skewed else 1) for i in range(8000)]
    times = []
    for _ in range(3):
        start = time.process_time()
        result = partition(costs, 64)
        times.append(time.process_time() - start)
    assert result.gap < 1e-3
    assert min(times) < 0.5


COSTS = st.lists(st.one_of(st.integers(0, 50), st.floats(0, 1e6)), max_size=40)


@pytest.mark.timing
def test_a_cap_that_longest_first_keeps_costs_no_time_on_thousands_of_ranks():
    start = time.process_time()
    split = partition([5] * 8000, 2048, memory=[1] * 8000, memory_cap=1.5)
    assert split.gap == 0
    assert time.process_time() - start < 0.5


@pytest.mark.timing
@pytest.mark.parametrize("opposed", [False, True])
def test_a_cap_that_binds_takes_seconds_on_thousands_of_ranks(opposed):
    costs = [(7919 * i) % 1009 + 1 for i in range(10_000)]
    memory = [1010 - cost for cost in costs] if opposed else [(104729 * i) % 1013 + 1 for i in range(10_000)]
    ranks = [(0.0, rank, 0.0) for rank in range(4096)]
    splits = []

    def look_at_each_rank_for_some_items():
        for needed in memory[::25]:
            assert all(held + needed < 1e6 for _, _, held in ranks)

    ratio = times_as_long(
        lambda: splits.append(partition(costs, 4096, memory=memory, memory_cap=1.2)),
        look_at_each_rank_for_some_items,
        turns=1,
    )
    # it is 10 to 20; a look at each rank for each item, in each heuristic, made it 192 and more
    assert ratio < 40
    assert splits[0].gap < 0.61


@pytest.mark.slow
@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 100))
def test_ranks_in_order_find_what_a_look_at_each_rank_finds(data, num_ranks):
    amounts = st.integers(0, 12) | st.floats(0, 12)
    cap = data.draw(st.sampled_from([20, math.inf]))
    entries = [(data.draw(amounts) if num_ranks < 20 else rank % 7, rank, 0) for rank in range(num_ranks)]
    ranks = RanksInOrder([key for key, _, _ in entries], cap)
    for _ in range(data.draw(st.integers(0, 100))):
        entries.sort()
        cost, size, fill = data.draw(amounts), data.draw(amounts), data.draw(st.booleans())

        def fullness(entry, cost=cost, size=size):
            return max((entry[0] + cost) / 10, (entry[2] + size) / cap)

        fitting = [entry for entry in entries if entry[2] + size <= cap]
        if fill:
            expected = min(fitting, key=fullness, default=None)
            found = ranks.take_least_full(cost, size, 10)
        else:
            expected = next((entry for entry in fitting if entry[0] >= cost), None)
            found = ranks.take_first(size, cost)
        assert found == expected
        if found is not None:
            entries.remove(found)
            if data.draw(st.integers(0, 3)):
                entries.append((found[0] + cost, found[1], found[2] + size))
                ranks.put(entries[-1])


@settings(deadline=None, max_examples=200)
@given(COSTS, st.integers(1, 9), st.data())
def test_laws(costs, num_ranks, data):
    initial = data.draw(st.none() | st.lists(st.integers(0, 60), min_size=num_ranks, max_size=num_ranks))
    result = partition(costs, num_ranks, initial_load=initial)
    plain = partition(costs, num_ranks, initial_load=initial, improve=False)
    assert len(result.owner) == len(costs)
    assert all(0 <= rank < num_ranks for rank in result.owner)
    assert sorted(item for rank in range(num_ranks) for item in result.items(rank)) == list(range(len(costs)))
    for rank in range(num_ranks):
        own = (initial[rank] if initial else 0) + sum(costs[item] for item in result.items(rank))
        assert result.loads[rank] == pytest.approx(own)
    slack = 1e-9 * (sum(costs) + sum(initial or [0])) + 1e-9
    assert result.lower_bound <= max(result.loads) + slack
    assert max(result.loads) <= max(plain.loads) + slack
    again = partition(costs, num_ranks, initial_load=initial)
    assert again == result
    assert again.fingerprint() == result.fingerprint()


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=25), st.integers(1, 6))
def test_a_cap_is_kept_or_refused(items, num_ranks):
    costs, memory = zip(*items, strict=True)
    cap = math.ceil(1.2 * sum(memory) / num_ranks) + 1
    try:
        result = partition(costs, num_ranks, memory=memory, memory_cap=cap)
    except ValueError as error:
        smallest = int(str(error).split("found is ")[1].split()[0])
        assert smallest > cap
        result, cap = partition(costs, num_ranks, memory=memory, memory_cap=smallest), smallest
    assert max(result.memory_loads) <= cap


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 3))
def test_lower_bound_is_below_the_optimum(costs, num_ranks):
    optimum = min(
        max(sum(c for c, r in zip(costs, owner, strict=True) if r == rank) for rank in range(num_ranks))
        for owner in product(range(num_ranks), repeat=len(costs))
    )
    result = partition(costs, num_ranks)
    assert result.lower_bound <= optimum <= max(result.loads) <= 4 / 3 * optimum


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 3))
def test_small_partitions_beside_all_there_are(data, num_ranks):
    """A cap is refused only if nothing fits it, and what is found is near the best."""
    items = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6))
    costs, memory = map(list, zip(*items, strict=True))
    initial = data.draw(st.lists(st.integers(0, 15), min_size=num_ranks, max_size=num_ranks))
    cap = data.draw(st.integers(1, 60))

    def loads(values, owner, start):
        return [
            start[rank] + sum(v for v, r in zip(values, owner, strict=True) if r == rank) for rank in range(num_ranks)
        ]

    every = list(product(range(num_ranks), repeat=len(items)))
    fitting = [owner for owner in every if max(loads(memory, owner, [0] * num_ranks)) <= cap]
    if not fitting:
        with pytest.raises(ValueError, match="no partition found within memory_cap"):
            partition(costs, num_ranks, memory=memory, memory_cap=cap, initial_load=initial)
        return
    best = min(max(loads(costs, owner, initial)) for owner in fitting)
    result = partition(costs, num_ranks, memory=memory, memory_cap=cap, initial_load=initial)
    assert result.owner in fitting
    assert result.loads == tuple(loads(costs, result.owner, initial))
    assert result.lower_bound <= best <= max(result.loads)


def test_a_partition_by_hand():
    # longest first ends with (3, 2, 2) and (3, 2); the optimum is (3, 3) and (2, 2, 2)
    assert max(partition([3, 3, 2, 2, 2], 2, improve=False).loads) == 7
    assert max(partition([3, 3, 2, 2, 2], 2).loads) == 6
    result = partition([4, 1, 1], 2, initial_load=[0, 3])
    assert sorted(result.loads) == [4, 5]
    assert partition([], 3).loads == (0, 0, 0)
    assert partition([0, 0], 2).imbalance == 1.0
    assert partition([1.5], 1) == pickle.loads(pickle.dumps(partition([1.5], 1)))
    assert isinstance(partition([1], 1), Partition)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float16"])
def test_sums_of_numpy_numbers_do_not_wrap_around(dtype):
    numpy = pytest.importorskip("numpy")
    largest = int(numpy.finfo(dtype).max if dtype == "float16" else numpy.iinfo(dtype).max)
    split = partition(numpy.full(4, largest, dtype), 2, memory=numpy.full(4, largest, dtype), memory_cap=2 * largest)
    assert split.loads == split.memory_loads == (2 * largest, 2 * largest)


def test_a_number_of_ranks_may_be_numpys():
    numpy = pytest.importorskip("numpy")
    split = partition([2, 1] * 300, numpy.uint8(64))
    assert split == partition([2, 1] * 300, 64)
    assert type(split.lower_bound) is float


def test_cost_models():
    assert BytesCost()((3, 5), torch.bfloat16) == 64
    assert BytesCost(alignment=1)((3, 5), torch.float32) == 60
    assert BytesCost()((0, 5), torch.float32) == 0
    assert CubicCost()((2, 3), torch.float32) == 8 + 27
    assert NewtonSchulzCost()((2, 3), torch.float32) == 5 * (4 * 4 * 3 + 2 * 8)
    assert NewtonSchulzCost(steps=1)((7, 3, 2), torch.float32) == 7 * (4 * 4 * 3 + 2 * 8)
    with pytest.raises(ValueError, match=r"matrices, got shape \(3,\)"):
        NewtonSchulzCost()((3,), torch.float32)
    for model in (BytesCost(), CubicCost(), NewtonSchulzCost()):
        for shape in (5, "ab", (3.5, 4), None):
            with pytest.raises(TypeError, match="shape must hold integers, the sizes of a tensor, got "):
                model(shape, torch.float32)
        with pytest.raises(ValueError, match=r"shape=\(-3, 4\) must hold the sizes of a tensor"):
            model((-3, 4), torch.float32)
    with pytest.raises(TypeError, match=r"dtype has to be a torch\.dtype, got 'float32'"):
        BytesCost()((3,), "float32")
    for wrong in (0, -64, 1.5):
        with pytest.raises(ValueError, match=f"alignment must be an integer of at least 1, got {wrong}"):
            BytesCost(alignment=wrong)
        with pytest.raises(ValueError, match=f"steps must be an integer of at least 1, got {wrong}"):
            NewtonSchulzCost(steps=wrong)


def test_options_of_cost_models_may_be_numpys():
    numpy = pytest.importorskip("numpy")
    assert BytesCost(numpy.uint8(64))((3, 100), torch.float32) == BytesCost(64)((3, 100), torch.float32)
    assert NewtonSchulzCost(numpy.uint8(5))((100, 200), torch.float32) == NewtonSchulzCost(5)((100, 200), torch.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"costs": [1], "num_ranks": 0}, "num_ranks must be an integer of at least 1, got 0"),
        ({"costs": [1], "num_ranks": 2.0}, r"num_ranks must be an integer of at least 1, got 2\.0"),
        ({"costs": [1, -2], "num_ranks": 1}, r"costs\[1\] must be finite and not negative, got -2"),
        ({"costs": [math.nan], "num_ranks": 1}, r"costs\[0\] must be finite"),
        ({"costs": [1, math.inf], "num_ranks": 1}, r"costs\[1\] must be finite and not negative, got inf"),
        ({"costs": [1e308, 1e308], "num_ranks": 2}, "costs must add up to a finite number, got inf"),
        ({"costs": [1, 10**400], "num_ranks": 2}, r"costs\[1\] must be finite and not negative, got inf"),
        ({"costs": [2**1023, 2**1023], "num_ranks": 2}, "costs must add up to a finite number, got inf"),
        (
            {"costs": [1e308], "num_ranks": 1, "initial_load": [1e308]},
            "costs and initial_load must add up to a finite number, got inf",
        ),
        ({"costs": [1], "num_ranks": 1, "memory": [1, 2]}, "memory must have 1 entries, got 2"),
        ({"costs": [1], "num_ranks": 2, "initial_load": [1]}, "initial_load must have 2 entries, got 1"),
        ({"costs": [1], "num_ranks": 2, "memory_cap": 1.5}, "memory_cap needs memory"),
        ({"costs": [1], "num_ranks": 2, "memory": [1], "memory_cap": 0}, "memory_cap must be positive, got 0"),
    ],
)
def test_wrong_values(arguments, message):
    with pytest.raises(ValueError, match=message):
        partition(**arguments)


@pytest.mark.parametrize("cap", [10**400, Fraction(10**400), math.inf], ids=["int", "fraction", "infinity"])
def test_a_cap_beyond_all_memory_binds_nothing(cap):
    costs, memory = [4, 3, 3, 2], [1.0, 2.0, 2.0, 1.5]
    assert partition(costs, 2, memory=memory, memory_cap=cap).owner == partition(costs, 2).owner


@pytest.mark.parametrize("cap", ["2", True, torch.ones(())], ids=["str", "bool", "tensor"])
def test_caps_are_numbers(cap):
    with pytest.raises(TypeError, match="memory_cap must be an int in bytes, or a float as a multiple of the mean"):
        partition([1], 2, memory=[1], memory_cap=cap)


def test_costs_are_numbers():
    with pytest.raises(TypeError, match=r"costs\[1\] must be a number, got a Tensor"):
        partition([1, torch.tensor(2.0)], 2)
    for name, arguments in (("costs", {"costs": 1}), ("memory", {"costs": [1], "memory": 2})):
        with pytest.raises(TypeError, match=f"{name} has to be iterable, got a int"):
            partition(num_ranks=2, **arguments)


@pytest.mark.parametrize("rank", [2, -1, None, "0"])
def test_only_ranks_that_there_are_have_items(rank):
    # a job of more ranks than the partition would have left out what its last ranks were to do, silently
    with pytest.raises(ValueError, match=r"rank must be one of the 2 ranks from 0 on, got "):
        partition([1, 2, 3], 2).items(rank)
