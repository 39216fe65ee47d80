"""Blocks: what they are equal to, that they travel, and what they allocate, sharded too."""

import copy
import pickle
import subprocess
import sys
from functools import partial

import pytest
import torch

from optim_utils import BlockInfo, DTensorBlockInfo
from optim_utils.testing import run_ranks

PARAM = torch.arange(6.0).view(2, 3)


def test_defaults_and_allocation():
    block = BlockInfo(PARAM, (0, "block_0"))
    assert torch.equal(block.allocate_zeros_tensor(size=(2, 2), dtype=torch.float64, device="cpu"), torch.zeros(2, 2))
    ones = block.allocate_ones_tensor(size=(3,), dtype=torch.bfloat16, device="cpu")
    assert ones.dtype == torch.bfloat16
    assert torch.equal(ones, torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(block.allocate_eye_tensor(3, dtype=torch.float32, device="cpu"), torch.eye(3))
    assert block.get_tensor(PARAM) is PARAM
    with pytest.raises(TypeError):
        BlockInfo(PARAM, (0, "a"), torch.zeros, torch.ones)


def test_equality_and_hash():
    block = BlockInfo(PARAM, (0, "a"))
    assert block == BlockInfo(PARAM, (0, "a"))
    assert block == BlockInfo(PARAM.clone(), (0, "a"))
    assert hash(block) == hash(BlockInfo(torch.zeros(1), (0, "a")))
    others = [
        BlockInfo(PARAM, (1, "a")),
        BlockInfo(PARAM + 1, (0, "a")),
        BlockInfo(PARAM.view(3, 2), (0, "a")),
        BlockInfo(PARAM.double(), (0, "a")),
        BlockInfo(PARAM.to("meta"), (0, "a")),
        DTensorBlockInfo(PARAM, (0, "a")),
        (0, "a"),
    ]
    for other in others:
        assert block != other
    assert len({block, BlockInfo(PARAM.clone(), (0, "a")), others[0]}) == 2


def test_parameters_without_values_are_equal_if_they_are_the_same():
    block = BlockInfo(PARAM.to("meta"), (0, "a"))
    assert block == BlockInfo(block.param, (0, "a"))
    assert block != BlockInfo(PARAM.to("meta"), (0, "a"))


@pytest.mark.parametrize("cls", [BlockInfo, DTensorBlockInfo])
def test_copies(cls):
    block = cls(PARAM, (0, "a"))
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert twin == block
        assert twin.param is not PARAM
        assert torch.equal(twin.allocate_eye_tensor(2, dtype=torch.float32, device="cpu"), torch.eye(2))


def test_pickle_opens_in_a_fresh_process(tmp_path):
    (tmp_path / "block.pkl").write_bytes(pickle.dumps(DTensorBlockInfo(PARAM, (3, "b"))))
    code = """
import pickle, sys, torch
block = pickle.load(open(sys.argv[1], "rb"))
assert block.composable_block_ids == (3, "b"), block
assert torch.equal(block.param, torch.arange(6.0).view(2, 3))
assert torch.equal(block.allocate_ones_tensor(size=(2,), dtype=torch.float32, device="cpu"), torch.ones(2))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "block.pkl")], check=True, timeout=120)


def sharded_allocations(rank: int, world_size: int, n: int) -> list[bool]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor import zeros as dtensor_zeros

    mesh = init_device_mesh("cpu", (world_size,))

    def allocate(*, size, dtype, device, mesh, placements):
        assert device == "cpu"
        return dtensor_zeros(*size, dtype=dtype, device_mesh=mesh, placements=placements)

    results = []
    for placement in (Shard(0), Shard(1), Replicate()):
        block = DTensorBlockInfo(PARAM, (0, "a"), partial(allocate, mesh=mesh, placements=[placement]))
        options = {"dtype": torch.float32, "device": "cpu"}
        eye = block.allocate_eye_tensor(n, **options)
        ones = block.allocate_ones_tensor(size=(n, 3), **options)
        assert torch.equal(eye.full_tensor(), torch.eye(n)), (placement, eye.full_tensor())
        assert torch.equal(ones.full_tensor(), torch.ones(n, 3))
        local = block.get_tensor(eye)
        assert torch.equal(local, distribute_tensor(torch.eye(n), mesh, [placement]).to_local())
        assert block.get_tensor(PARAM) is PARAM
        results.append(block == pickle.loads(pickle.dumps(BlockInfo(PARAM, (0, "a")))))
    return results


@pytest.mark.parametrize("n", [1, 5, 6])
def test_the_identity_is_right_on_every_rank(n):
    # one row, rows that do not divide, rows that do
    assert run_ranks(sharded_allocations, 2, n) == [[False] * 3] * 2


def two_mesh_axes(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import Shard, init_device_mesh
    from torch.distributed.tensor import zeros as dtensor_zeros

    mesh = init_device_mesh("cpu", (2, 2))
    for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(1), Shard(0)]):
        block = DTensorBlockInfo(
            PARAM,
            (0, "a"),
            lambda size, placements=placements, **_: dtensor_zeros(*size, device_mesh=mesh, placements=placements),
        )
        eye = block.allocate_eye_tensor(7, dtype=torch.float32, device="cpu")
        assert torch.equal(eye.full_tensor(), torch.eye(7)), placements


def test_the_identity_over_two_mesh_axes():
    run_ranks(two_mesh_axes, 4)


def strided_shards(rank: int, world_size: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2, 2))
    for placements in (
        # rows and columns that are no neighbours, and what fully_shard makes of a tensor-parallel parameter
        [_StridedShard(0, split_factor=2), Replicate()],
        [Replicate(), _StridedShard(1, split_factor=4)],
        [_StridedShard(0, split_factor=2), Shard(0)],
    ):
        block = DTensorBlockInfo(
            PARAM,
            (0, "a"),
            lambda size, placements=placements, **_: distribute_tensor(torch.zeros(size), mesh, placements),
        )
        eye = block.allocate_eye_tensor(8, dtype=torch.float32, device="cpu")
        expected = distribute_tensor(torch.eye(8), mesh, placements)
        assert torch.equal(eye.to_local(), expected.to_local()), placements
    for allocate, message in (
        (lambda size, **_: DTensor.from_local(torch.zeros(size), mesh, [Partial(), Replicate()]), "sharded or replic"),
        # rows that are nowhere near what the placements say
        (
            lambda size, **_: DTensor.from_local(
                torch.zeros(3, 8), mesh, [Shard(0), Replicate()], shape=torch.Size(size), stride=(8, 1)
            ),
            "of 8 indices of dimension 0, .* give this rank 4, its part has 3; allocate it with Shard placements",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            DTensorBlockInfo(PARAM, (0, "a"), allocate).allocate_eye_tensor(8)


def test_the_identity_of_strided_shards():
    run_ranks(strided_shards, 4)
