"""How lists of tensors are cut into chunks, and recognised when they come again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from optim_kernels import _tensor_lists
from optim_kernels._memory import is_dense, sharing_memory
from optim_kernels._tensor_lists import KnownAddresses, KnownKinds, TensorList
from optim_kernels.multi_tensor import SIZE_SHIFT, TENSOR_SHIFT, UNIT, ChunkMap, ChunkSize

CPU = torch.device("cpu")


def pieces(chunks: ChunkMap) -> list[tuple[int, int, int]]:
    """Tensor, first element and size of every chunk."""
    words = chunks.words.tolist()
    size_mask, start_mask = (1 << TENSOR_SHIFT - SIZE_SHIFT) - 1, (1 << SIZE_SHIFT) - 1
    return [(w >> TENSOR_SHIFT, (w & start_mask) * UNIT, (w >> SIZE_SHIFT & size_mask) * UNIT) for w in words]


@settings(max_examples=60, deadline=None)
@given(
    numels=st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    flags=st.lists(st.booleans(), min_size=6, max_size=6),
    sizes=st.sampled_from([[(1024, None)], [(512, 1024), (1024, 4096), (2048, None)], [(1024, 2048), (8192, None)]]),
)
def test_chunks_cover_every_element_once(
    numels: list[int], flags: list[bool], sizes: list[tuple[int, int | None]]
) -> None:
    granule = 512 if len(sizes) > 1 else 1024
    chunks = ChunkMap.build(numels, flags[: len(numels)], [ChunkSize(*each) for each in sizes], CPU, granule=granule)
    found = pieces(chunks)
    assert chunks.num_chunks == len(found)
    assert [sum(tensor == i for tensor, _, _ in found) for i in range(len(numels))] == chunks.counts
    assert all(chunks.counts)
    seen = [torch.zeros(numel, dtype=torch.int64) for numel in numels]
    for number, (tensor, start, size) in enumerate(found):
        seen[tensor][start : start + size] += 1
        if number < chunks.num_full:
            assert flags[tensor]
            assert start + size <= numels[tensor]
            assert size % granule == 0
    assert all((each == 1).all() for each in seen)


def test_sizes_go_by_the_place_in_the_list() -> None:
    sizes = [ChunkSize(512, 1024), ChunkSize(1024, 2048), ChunkSize(4096)]
    chunks = ChunkMap.build([1536, 100, 12000], [True] * 3, sizes, CPU, granule=512)
    assert pieces(chunks)[: chunks.num_full] == [
        (0, 0, 512),
        (0, 512, 512),
        (0, 1024, 512),
        (2, 0, 1024),
        (2, 1024, 512),
        (2, 1536, 4096),
        (2, 5632, 4096),
        (2, 9728, 2048),
    ]


@pytest.mark.parametrize("numel", [2**31 + 1, 2**33])
def test_elements_beyond_32_bits_have_a_place(numel: int) -> None:
    chunks = ChunkMap.build([5, numel], [True] * 2, [ChunkSize(1 << 13)], CPU)
    tensor, start, size = pieces(chunks)[chunks.num_full - 1]
    assert (tensor, start + size) == (1, numel // 8192 * 8192)


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x.view(torch.int32),
    "narrower dtype": lambda x: x.view(torch.float16)[:, :3],
    "shape": lambda x: x.view(2, 6),
    "fewer elements": lambda x: x[:2],
    "strides": lambda x: x.as_strided((4, 3), (1, 4)),
    "dimensions": lambda x: x.view(12),
}


@pytest.mark.parametrize("with_guards", [True, False], ids=["guards", "plain"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_at_the_same_address_is_seen(
    change: Callable[[Tensor], Tensor], with_guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_guards:
        monkeypatch.setattr(_tensor_lists, "TensorGuards", None)
    tensors, known = [torch.randn(4, 3), torch.randn(7)], KnownKinds()
    kinds = [TensorList(tensors, known).kinds for _ in range(4)]
    assert kinds[0] == TensorList(tensors).kinds
    assert all(each is kinds[0] for each in kinds)
    changed = [change(tensors[0]), tensors[1]]
    assert changed[0].data_ptr() == tensors[0].data_ptr()
    for each in (changed, tensors, changed[:1], tensors[:1], tensors, tensors, tensors, changed):
        assert TensorList(each, known).kinds == TensorList(each).kinds


@pytest.mark.parametrize("with_guards", [True, False], ids=["guards", "plain"])
@pytest.mark.parametrize("change", [*CHANGES.values(), Tensor.clone], ids=[*CHANGES, "address"])
def test_known_addresses_are_of_one_address_dtype_shape_and_layout(
    change: Callable[[Tensor], Tensor], with_guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_guards:
        monkeypatch.setattr(_tensor_lists, "TensorGuards", None)
    tensors = [torch.randn(4, 3), torch.randn(7)]
    known = KnownAddresses(tensors)
    whole = tensors[0].data
    for _ in range(3):
        for _ in range(3):
            assert known.are_those_of(tensors)
        tensors[0].data = change(whole)
        assert not known.are_those_of(tensors)
        assert not known.are_those_of(tensors)
        tensors[0].data = whole
    assert not known.are_those_of(tensors[:1])


def test_lists_that_a_kernel_reads_otherwise_are_of_other_kinds() -> None:
    memory = torch.randn(64)
    x, y = memory[:24].view(2, 3, 4), memory[:12].view(3, 4)
    lists = [
        [x, x],
        [x.view(torch.int32), x],
        [x, x[:1]],
        [x, x.transpose(1, 2)],
        [x.transpose(1, 2), x],
        # of one shape, or of the same strides
        [x, memory.as_strided((3, 2, 4), (4, 12, 1))],
        [x, memory.as_strided((3, 2, 4), (4, 16, 1))],
        [x, memory.as_strided((2, 3, 4), (4, 16, 1))],
        [y, y.t()],
        [y, torch._neg_view(y)],
        [torch._neg_view(y), y],
        [x],
    ]
    kinds = [TensorList(tensors).kinds for tensors in lists]
    assert all(one != other for one, other in combinations(kinds, 2))


def test_elements_are_dense_where_they_fill_a_range_of_memory() -> None:
    x = torch.randn(4, 3, 2, 5)
    # the stride of a single element says nothing
    for dense in (x, x.permute(2, 0, 3, 1), x[1], x.as_strided((24, 1, 5), (1, 7, 24)), x[:0]):
        assert is_dense(dense)
    gaps, overlaps = (x[:, :2], x[..., 0], x[::2]), (x[0, 0, 0].expand(3, 5), x.as_strided((4, 4), (1, 2)))
    for each in (*gaps, *overlaps, *(each.mT for each in overlaps)):
        assert not is_dense(each)


def test_tensors_share_memory_where_one_begins_inside_the_other() -> None:
    x = torch.randn(8, 6)
    apart = [x[4:], x[:2, :3], x[:2, 3:], x[2:4], x[:0], x[1:1], torch.empty(3, device="meta"), x[0].to("meta")]
    assert sharing_memory(apart) is None
    assert sharing_memory([*apart, x.view(torch.int16).view(-1)[-1:]]) == (0, len(apart))
    assert sharing_memory([x[7], *apart]) == (0, 1)
    assert sharing_memory([x[2:4, :2], *apart]) == (0, 4)


def test_what_changes_in_place_is_seen() -> None:
    """The same tensor object, at the same address."""
    tensors, known = [torch.randn(4, 3)], KnownKinds()
    for change in (None, None, None, lambda x: x.t_(), lambda x: x.resize_(2, 3), lambda x: x.resize_(6)):
        if change is not None:
            change(tensors[0])
        assert known.of(tensors) == TensorList(tensors).kinds


def test_a_known_list_is_looked_at_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its third time on, also when the tensors are new ones; where that call says no, each is looked at."""
    known = KnownKinds()
    for _ in range(2):
        known.of([torch.randn(4, 3), torch.randn(7)])
    kinds, looks = _tensor_lists._kinds, []

    def look(tensors: list[Tensor]) -> object:
        looks.append(len(tensors))
        return kinds(tensors)

    monkeypatch.setattr(_tensor_lists, "_kinds", look)
    new = [torch.randn(4, 3), torch.randn(7)]
    known.of(new)
    assert looks == []
    with torch.inference_mode():
        assert known.of(new) == kinds(new)
    assert looks == [2]
    known.of(new)
    assert looks == [2]


def test_no_tensor_is_kept_alive() -> None:
    known = KnownKinds()
    tensor = torch.randn(5)
    for _ in range(4):
        known.of([tensor])
    gone = weakref.ref(tensor)
    del tensor
    assert gone() is None


def test_maps_are_made_where_torch_has_no_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def numpy(tensor: Tensor) -> None:
        raise RuntimeError("Numpy is not available")

    monkeypatch.setattr(Tensor, "numpy", numpy)
    assert pieces(ChunkMap.build([300, 700], [True, True], [ChunkSize(512)], CPU)) == [
        (1, 0, 512),
        (0, 0, 512),
        (1, 512, 256),
    ]
