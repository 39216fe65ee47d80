"""How lists of tensors are cut into chunks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
