"""Merging, splitting, packing and distributing: the tables of known results, and the laws."""

import math
import random
import re
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from optim_utils import (
    MergePlan,
    ParameterizeEnterExitContext,
    compress_list,
    distribute_buffer_sizes,
    generate_pairwise_indices,
    get_dtype_size,
    merge_small_dims,
    multi_dim_split,
    multi_dim_unsplit,
    pack_upper_triangular,
    plan_merge,
    unpack_upper_triangular,
)

# shared machines stall: time says nothing about these
law = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

CONV = (32, 3, 64, 64)
MERGES = [
    (CONV, 10, 2, CONV),
    (CONV, 200, 2, (32, 192, 64)),
    (CONV, 1024, 2, (32, 192, 64)),
    (CONV, 4096, 1, (96, 4096)),
    (CONV, 4096, 2, (96, 4096)),
    (CONV, 12287, 1, (96, 4096)),
    (CONV, 12287, 2, (96, 4096)),
    (CONV, 12288, 2, (32, 12288)),
    (CONV, 10**6, 1, (393216,)),
    (CONV, 8192, 3, (32, 3, 4096)),
    (CONV, 8192, 4, CONV),
    ((512, 256, 3, 3), 1024, 2, (512, 256, 9)),
    ((512, 256, 3, 3), 8192, 2, (512, 2304)),
    ((12, 64, 768), 8192, 2, (768, 768)),
    ((64, 3, 7, 7), 1024, 2, (64, 147)),
    ((4, 2, 3, 5), 6, 1, (4, 6, 5)),
    ((2,) * 8, 16, 3, (2, 8, 16)),
    ((1, 2, 5, 1), 10, 1, (10,)),
    ((1, 2, 5, 1), 1, 1, (2, 5)),
    ((1, 2, 5, 1), 10, 10, (2, 5)),
    ((1, 2, 5, 1), 10, math.inf, (1, 2, 5, 1)),
    ((), 10, 2, (1,)),
    ((), 10, math.inf, ()),
    ((1, 1), 10, 2, (1,)),
    ((3, 0, 2), 10, 2, (0,)),
    ((3, 0, 2), 10, math.inf, (0,)),
    ((3, 0, 2), 10, 2.0, (0,)),
    ((2, 3), 10, 0, (6,)),
    ((2, 3), 10, -5, (6,)),
    ((2, 3, 4), math.inf, 1, (24,)),
    ([2, 3], 10, 1, (6,)),
]
sizes = st.lists(st.integers(0, 7), max_size=5).map(tuple)


@pytest.mark.parametrize(("shape", "threshold", "target", "expected"), MERGES, ids=str)
def test_merge(shape, threshold, target, expected):
    assert merge_small_dims(shape, threshold, target) == expected


def test_merge_with_an_infinite_target_returns_the_same_object():
    merge_small_dims((1, 2, 5), 10, math.inf)
    shape = torch.Size((1, 2, 5))
    assert merge_small_dims(shape, 10, math.inf) is shape


@pytest.mark.parametrize("target", [2.0, math.nan, -math.inf, 2.5])
def test_merge_refuses_other_float_targets_even_after_the_integer_was_cached(target):
    merge_small_dims((2, 3), 10, 2)
    with pytest.raises(AssertionError) as error:
        merge_small_dims((2, 3), 10, target)
    assert str(error.value) == f"target_tensor_dimensionality={target} has to be an integer or math.inf."


def test_merge_refuses_what_is_no_size_or_threshold():
    with pytest.raises(ValueError, match=r"tensor_shape=\(-3, 4\)"):
        merge_small_dims((-3, 4), 100, 1)
    for threshold in (math.nan, "8", None):
        with pytest.raises(ValueError, match=f"threshold={threshold!r}"):
            merge_small_dims((3, 4), threshold, 2)


@pytest.mark.parametrize("target", [2, math.inf])
@pytest.mark.parametrize("function", [merge_small_dims, plan_merge])
def test_merge_refuses_what_is_no_shape_by_name(function, target):
    # an iterator would be used up by the search for a 0, and nothing left to merge
    for wrong in (iter((2, 3, 4)), (size for size in (2, 3)), 12, None, "23", (2.0, 3)):
        with pytest.raises(TypeError, match="tensor_shape must hold integers, the sizes of a tensor, got "):
            function(wrong, 100, target)
    with pytest.raises(ValueError, match=r"tensor_shape=\(-2, 0\) must hold the sizes of a tensor"):
        function((-2, 0), 100, target)


def test_integers_may_be_numpys_and_do_not_wrap_around():
    numpy = pytest.importorskip("numpy")
    assert merge_small_dims(numpy.array([70_000, 70_000], "int32"), 2**40, numpy.int64(1)) == (70_000**2,)
    assert distribute_buffer_sizes(numpy.array([128, 64]), numpy.int64(2)) == ((128, 0), (64, 1))
    for lengths in (numpy.array([100, 100], "int8"), torch.tensor([100, 100], dtype=torch.int8)):
        assert list(generate_pairwise_indices(lengths)) == [(0, 100), (100, 200)]


def test_merge_is_cached_with_a_bound():
    merge_small_dims.cache_clear()
    merge_small_dims((4, 5, 6), 30, 1)
    merge_small_dims([4, 5, 6], 30, 1)
    info = merge_small_dims.cache_info()
    assert (info.hits, info.misses) == (1, 1)
    assert info.maxsize is not None


@law
@given(sizes, st.integers(1, 60), st.integers(-1, 5))
def test_merge_keeps_the_elements_and_their_order(shape, threshold, target):
    merged = merge_small_dims(shape, threshold, target)
    assert math.prod(merged) == math.prod(shape)
    # only neighbours merge: each merged size is the product of the next few sizes
    remaining = [size for size in shape if size != 1]
    for size in merged if math.prod(shape) > 1 else ():
        product = 1
        while product < size:
            product *= remaining.pop(0)
        assert product == size
    tensor = torch.arange(math.prod(shape)).view(shape)
    plan = plan_merge(shape, threshold, target)
    assert torch.equal(plan.merge(tensor).flatten(), tensor.flatten())
    assert torch.equal(plan.unmerge(plan.merge(tensor)), tensor)


@law
@given(sizes, st.integers(1, 60), st.integers(1, 3), st.data())
def test_is_view_agrees_with_torch(shape, threshold, target, data):
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.arange(math.prod(shape)).view([shape[dim] for dim in order])
    tensor = tensor.permute([order.index(dim) for dim in range(len(shape))])
    assert tensor.shape == shape
    plan = plan_merge(shape, threshold, target)
    try:
        tensor.view(plan.merged_shape)
        has_view = True
    except RuntimeError:
        has_view = False
    assert plan.is_view(tensor) == has_view
    assert torch.equal(plan.unmerge(plan.merge(tensor)), tensor)


def test_plan_of_a_channels_last_weight():
    weight = torch.randn(8, 4, 3, 3)
    strided = weight.to(memory_format=torch.channels_last)
    plan = plan_merge((8, 4, 3, 3), 1024, 2)
    assert plan == MergePlan((8, 4, 3, 3), (8, 36))
    assert plan.is_view(weight)
    assert plan.merge(weight).data_ptr() == weight.data_ptr()
    assert not plan.is_view(strided)
    assert torch.equal(plan.merge(strided), plan.merge(weight))
    merged = plan.merge(strided)
    assert plan.unmerge(merged).data_ptr() == merged.data_ptr()
    with pytest.raises(ValueError, match=r"\(8, 4, 3, 3\), got \(4, 8, 3, 3\)"):
        plan.merge(torch.randn(4, 8, 3, 3))
    with pytest.raises(TypeError, match=r"\(8, 36\), got a NoneType"):
        plan.unmerge(None)


@pytest.mark.parametrize(
    ("shape", "split_size", "expected"),
    [
        ((), 2, [()]),
        ((0,), 2, [(0,)]),
        ((0, 5), 2, [(0, 2), (0, 2), (0, 1)]),
        ((3, 2), 5, [(3, 2)]),
        ((0,), 0, [(0,)]),
        ((4, 3), (2, math.inf), [(2, 3), (2, 3)]),
        ((4, 3), (math.inf, 2), [(4, 2), (4, 1)]),
        ((), (), [()]),
    ],
    ids=str,
)
def test_split_shapes(shape, split_size, expected):
    assert [tuple(block.shape) for block in multi_dim_split(torch.zeros(shape), split_size)] == expected


def test_blocks_are_row_major_views():
    tensor = torch.arange(20).view(4, 5)
    blocks = multi_dim_split(tensor, 3)
    assert [block.flatten()[0].item() for block in blocks] == [0, 3, 15, 18]
    for block in blocks:
        block += 100
    assert tensor.min() == 100


@pytest.mark.parametrize(
    ("split_size", "error", "text"),
    [
        (2.0, AssertionError, "split_size=2.0 has to be an integer or math.inf."),
        (-math.inf, AssertionError, "split_size=-inf has to be an integer or math.inf."),
        ((2, 2.0), AssertionError, "has to be an integer or math.inf."),
        (True, TypeError, "bool"),
        ((2, False), TypeError, "bool"),
        ("2", TypeError, "str"),
        ((2,), ValueError, "one size for each of 2 dimensions"),
        (0, RuntimeError, "split_size"),
        (-1, RuntimeError, "split_size"),
    ],
    ids=str,
)
def test_split_refuses(split_size, error, text):
    with pytest.raises(error) as caught:
        multi_dim_split(torch.zeros(3, 4), split_size)
    assert text in str(caught.value)
    if isinstance(split_size, float):
        assert str(caught.value) == text


@law
@given(sizes, st.data())
def test_unsplit_undoes_split(shape, data):
    one = st.one_of(st.integers(1, 8), st.just(math.inf))
    split_size = data.draw(st.one_of(one, st.tuples(*[one for _ in shape])))
    tensor = torch.arange(math.prod(shape)).view(shape)
    blocks = multi_dim_split(tensor, split_size)
    assert torch.equal(multi_dim_unsplit(blocks, split_size, shape), tensor)
    assert math.prod(shape) == sum(block.numel() for block in blocks)


def test_unsplit_refuses_wrong_blocks():
    blocks = multi_dim_split(torch.zeros(4, 4), 2)
    with pytest.raises(ValueError, match="4 blocks, got 3"):
        multi_dim_unsplit(blocks[:3], 2, (4, 4))
    with pytest.raises(ValueError, match=r"block 3 has to be of shape \(2, 2\), got \(2, 1\)"):
        multi_dim_unsplit((*blocks[:3], torch.zeros(2, 1)), 2, (4, 4))
    with pytest.raises(ValueError, match=r"block 3 is torch.float64"):
        multi_dim_unsplit((*blocks[:3], torch.zeros(2, 2, dtype=torch.float64)), 2, (4, 4))


def test_unsplit_infers_no_size():
    with pytest.raises(ValueError, match=r"shape=\(-1, 4\) must hold the sizes of a tensor"):
        multi_dim_unsplit([torch.zeros(4, 4)], 4, (-1, 4))


def test_split_and_unsplit_carry_gradients():
    tensor = torch.randn(5, 3, requires_grad=True)
    blocks = multi_dim_split(tensor, 2)
    multi_dim_unsplit([block * (number + 1) for number, block in enumerate(blocks)], 2, (5, 3)).sum().backward()
    expected = multi_dim_unsplit([torch.full_like(b, n + 1) for n, b in enumerate(blocks)], 2, (5, 3))
    assert torch.equal(tensor.grad, expected.detach())


def test_merge_and_split_compile_without_warnings():
    def blocks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        merged = x.reshape(merge_small_dims(x.shape, 1024, 2))
        parts = multi_dim_split(merged, 16)
        return (multi_dim_unsplit(parts, 16, merged.shape), *parts)

    x = torch.randn(20, 3, 3, 3)
    compiled = torch.compile(blocks, fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ours, theirs in zip(blocks(x), compiled(x), strict=True):
            assert torch.equal(ours, theirs)


def test_compress_list():
    assert compress_list([1, 2, 3], ["x", 0, [5]]) == (1, 3)
    assert compress_list((), ()) == ()
    with pytest.raises(AssertionError) as error:
        compress_list([1, 2, 3], (True, False))
    assert str(error.value) == "Inconsistent lengths between complete_list 3 and selector 2!"
    with pytest.raises(TypeError, match="complete_list has to be a sequence, got a generator"):
        compress_list((i for i in range(3)), (True, False, True))
    with pytest.raises(TypeError, match="selector has to be a sequence, got a NoneType"):
        compress_list((1, 2), None)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bool, 1),
        (torch.bfloat16, 2),
        (torch.float8_e4m3fn, 1),
        (torch.float8_e5m2, 1),
        (torch.complex64, 8),
        (torch.complex128, 16),
        (torch.bits1x8, 1),
        (torch.bits16, 2),
        (torch.uint4, 1),
        (torch.int64, 8),
    ],
    ids=str,
)
def test_dtype_sizes(dtype, size):
    assert get_dtype_size(dtype) == size


def test_what_is_no_tensor_or_dtype_is_refused_by_name():
    with pytest.raises(TypeError, match=r"dtype has to be a torch\.dtype, got 'float32'"):
        get_dtype_size("float32")
    with pytest.raises(TypeError, match="multi_dim_split takes a tensor, got a list"):
        multi_dim_split([[1, 2]], 1)
    with pytest.raises(TypeError, match="block 1 has to be a tensor, got a list"):
        multi_dim_unsplit([torch.zeros(1), [0.0]], 1, (2,))
    for shape in (2, "2", (2.0,), None):
        with pytest.raises(
            TypeError, match=f"shape must hold integers, the sizes of a tensor, got {re.escape(repr(shape))}"
        ):
            multi_dim_unsplit([torch.zeros(1)] * 2, 1, shape)
    for use, name in (
        (lambda wrong: multi_dim_unsplit(wrong, 1, (2,)), "blocks"),
        (lambda wrong: list(generate_pairwise_indices(wrong)), "input_list"),
        (lambda wrong: distribute_buffer_sizes(wrong, 2), "buffer_sizes"),
    ):
        with pytest.raises(TypeError, match=f"{name} has to be iterable, got a int"):
            use(5)
    for callers, name in (((None, print), "enter"), ((print, 3), "exit")):
        with pytest.raises(TypeError, match=f"{name}_method_caller has to be a function of the object"):
            ParameterizeEnterExitContext(object(), *callers)
    for function in (pack_upper_triangular, unpack_upper_triangular):
        with pytest.raises(TypeError, match=rf"{function.__name__} takes a dense tensor, got a list"):
            function([1.0])
        with pytest.raises(TypeError, match=rf"{function.__name__} takes a dense tensor, got a torch\.sparse_coo"):
            function(torch.eye(3).to_sparse())


def test_pairwise_indices():
    assert list(generate_pairwise_indices([])) == []
    assert list(generate_pairwise_indices([0, 2, 0])) == [(0, 0), (0, 2), (2, 2)]
    with pytest.raises(ValueError, match="got -1"):
        list(generate_pairwise_indices([1, -1]))
    with pytest.raises(ValueError, match=r"input_list\[1\]=1.5 must be an integer"):
        list(generate_pairwise_indices([1, 1.5]))


@pytest.mark.parametrize(
    ("buffer_sizes", "group_size", "expected"),
    [
        ((128, 64, 500, 256), 2, ((128, 1), (64, 1), (512, 0), (256, 1))),
        ((128, 64), 4, ((128, 0), (64, 1))),
        ((5, 700), 1, ((64, 0), (704, 0))),
        ((), 3, ()),
        ((), 0, ()),
        ((64,) * 5, 3, ((64, 0), (64, 1), (64, 2), (64, 0), (64, 1))),
        ((0, 0, 1), 2, ((0, 1), (0, 1), (64, 0))),
    ],
    ids=str,
)
def test_distribution(buffer_sizes, group_size, expected):
    assert distribute_buffer_sizes(buffer_sizes, group_size) == expected


@pytest.mark.parametrize(
    ("buffer_sizes", "group_size", "text"),
    [((64,), 0, "group_size=0"), ((64,), 1.5, "group_size=1.5"), ((64, -1), 2, "[1]=-1"), ((6.5,), 2, "[0]=6.5")],
    ids=str,
)
def test_distribution_refuses(buffer_sizes, group_size, text):
    with pytest.raises(ValueError) as error:
        distribute_buffer_sizes(buffer_sizes, group_size)
    assert text in str(error.value)


@law
@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 9))
def test_distribution_is_greedy_from_the_largest(buffer_sizes, group_size):
    loads = [0] * group_size
    expected = {}
    for number in sorted(range(len(buffer_sizes)), key=lambda i: (-math.ceil(buffer_sizes[i] / 64), i)):
        rank = loads.index(min(loads))
        expected[number] = (math.ceil(buffer_sizes[number] / 64) * 64, rank)
        loads[rank] += expected[number][0]
    assert distribute_buffer_sizes(buffer_sizes, group_size) == tuple(expected[i] for i in range(len(buffer_sizes)))


class Recorder:
    def __init__(self, fails_at: str = "") -> None:
        self.calls: list[str] = []
        self.fails_at = fails_at

    def call(self, name: str) -> str:
        self.calls.append(name)
        if name == self.fails_at:
            raise RuntimeError(name)
        return name  # a true result of exit would suppress exceptions


def context_of(recorder: Recorder) -> ParameterizeEnterExitContext[Recorder]:
    return ParameterizeEnterExitContext(recorder, lambda r: r.call("enter"), lambda r: r.call("exit"))


def test_context_is_reentrant_and_suppresses_nothing():
    recorder = Recorder()
    context = context_of(recorder)
    with context as entered, context:
        assert entered is context
    with pytest.raises(ZeroDivisionError), context:
        1 / 0
    assert recorder.calls == ["enter", "enter", "exit", "exit", "enter", "exit"]


def test_exit_is_not_called_when_enter_fails():
    recorder = Recorder(fails_at="enter")
    with pytest.raises(RuntimeError, match="enter"), context_of(recorder):
        pytest.fail("the body ran")
    assert recorder.calls == ["enter"]


DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.uint16, torch.float8_e4m3fn, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (4, 4), (2, 3, 5, 5), (0, 3, 3)], ids=str)
def test_triangles_come_back_to_the_bit(shape, dtype):
    half = torch.randint(0, 2, shape) + torch.randint(0, 2, shape) * 5
    m = (half + half.mT).to(dtype)
    packed = pack_upper_triangular(m)
    assert packed.shape == (*shape[:-2], shape[-1] * (shape[-1] + 1) // 2)
    restored = unpack_upper_triangular(packed)
    assert restored.dtype == dtype
    assert torch.equal(restored.view(torch.uint8), m.contiguous().view(torch.uint8))


@law
@given(st.integers(0, 6), st.integers(0, 3), st.integers(0, 10**6))
def test_unpack_then_pack_is_identity(n, batch, seed):
    packed = torch.randn(batch, n * (n + 1) // 2, generator=torch.Generator().manual_seed(seed))
    m = unpack_upper_triangular(packed)
    assert torch.equal(m, m.mT)
    assert torch.equal(pack_upper_triangular(m, check=True), packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint16])
def test_symmetric_to_the_bit(dtype):
    m = torch.eye(3).to(dtype)
    pack_upper_triangular(m, check=True)
    if dtype == torch.uint16:
        return
    m[0, 1] = m[1, 0] = math.nan
    pack_upper_triangular(m, check=True)
    m[0, 2], m[2, 0] = 0.0, -0.0
    with pytest.raises(ValueError, match="not symmetric"):
        pack_upper_triangular(m, check=True)


def test_gradients_conjugates_and_negatives_pass_through_triangles():
    m = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    (pack_upper_triangular(m) * torch.arange(6.0)).sum().backward()
    assert m.grad.tolist() == [[0, 1, 2], [0, 3, 4], [0, 0, 5]]
    p = torch.randn(6, dtype=torch.float64, requires_grad=True)
    unpack_upper_triangular(p).sum().backward()
    assert p.grad.tolist() == [1, 2, 2, 1, 2, 1]
    z = torch.randn(3, 3, dtype=torch.complex64)
    hermitian = z @ z.mH
    rows, columns = torch.triu_indices(3, 3)
    assert torch.equal(pack_upper_triangular(hermitian.mH), hermitian.mH[rows, columns])
    packed = pack_upper_triangular(hermitian)
    assert torch.equal(unpack_upper_triangular(packed.conj()), unpack_upper_triangular(packed).conj())
    negated = z.conj().imag
    assert negated.is_neg()
    assert torch.equal(pack_upper_triangular(negated), negated[rows, columns])


def test_packing_is_row_major_and_refuses_what_is_not_square():
    assert pack_upper_triangular(torch.arange(9).view(3, 3)).tolist() == [0, 1, 2, 4, 5, 8]
    for wrong in (torch.zeros(2, 3), torch.zeros(3), torch.zeros(())):
        with pytest.raises(ValueError, match="square"):
            pack_upper_triangular(wrong)
    with pytest.raises(ValueError, match="not symmetric"):
        pack_upper_triangular(torch.arange(9).view(3, 3), check=True)
    meta = torch.zeros(3, 3, device="meta")
    assert pack_upper_triangular(meta).shape == (6,)
    with pytest.raises(ValueError, match=r"check=True compares numbers, and a meta tensor of shape \(3, 3\) has none"):
        pack_upper_triangular(meta, check=True)
    for wrong in (torch.zeros(2), torch.zeros(3, 4), torch.zeros(())):
        with pytest.raises(ValueError, match=r"n\(n\+1\)/2"):
            unpack_upper_triangular(wrong)


def test_a_shuffled_input_gets_the_same_loads():
    numbers = [random.Random(1).randrange(10_000) for _ in range(60)]
    loads = []
    for seed in range(3):
        shuffled = random.Random(seed).sample(numbers, len(numbers))
        by_rank = [0] * 7
        for size, rank in distribute_buffer_sizes(shuffled, 7):
            by_rank[rank] += size
        loads.append(by_rank)
    assert loads[0] == loads[1] == loads[2]
