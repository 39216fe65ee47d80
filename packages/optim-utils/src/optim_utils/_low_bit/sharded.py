"""Low-bit tensors of DTensors: each rank codes its own part, and nothing is communicated.

The parts become DTensors with the placements of the input. That is right only if no block lies on two ranks, and if the
scales split over the ranks as DTensor splits a tensor of their shape; both are checked, identically on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC2701

from optim_utils._low_bit.blocks import Blocks, codes_shape, decode_blocks, encode_blocks, scale_shape
from optim_utils._low_bit.formats import LowBitFormat
from optim_utils._philox import Word, philox_words, random_bits

__all__ = ["check_encodable", "decode_sharded", "encode_sharded", "local_shape", "random_bits_of_part"]


def encode_sharded(x: DTensor, fmt: LowBitFormat, *, uniform: Tensor | None) -> Blocks:
    """The blocks of the DTensor x, as DTensors; ``uniform`` is for this rank's part, see ``encode_blocks``."""
    _check_shards(x, fmt)
    codes, scale, offset = encode_blocks(x.to_local(), fmt, uniform=uniform)
    of_scale = scale_shape(x.shape, fmt)
    return Blocks(
        _as_dtensor(codes, x, codes_shape(x.shape, fmt)),
        _as_dtensor(scale, x, of_scale),
        None if offset is None else _as_dtensor(offset, x, of_scale),
    )


def random_bits_of_part(x: DTensor, *, seed: Word | None, generator: torch.Generator | None) -> Tensor:
    """16 random bits (int32) for each element of this rank's part; with a seed, the element's bits in the whole."""
    local = x.to_local()
    if seed is None or generator is not None:
        _check_replicas(x, generator)
        return random_bits(local.shape, local.device, seed=seed, generator=generator)
    _, first = compute_local_shape_and_global_offset(tuple(x.shape), x.device_mesh, x.placements)
    index = torch.zeros((), dtype=torch.int64, device=local.device)
    for size, part, start in zip(x.shape, local.shape, first):
        index = index[..., None] * size + torch.arange(start, start + part, device=local.device)
    return (philox_words(seed, index) & 0xFFFF).to(torch.int32)


def check_encodable(x: DTensor, fmt: LowBitFormat, *, stochastic: bool, generator: torch.Generator | None) -> None:
    """Raise ValueError if `encode_sharded` would, or, where x is rounded at random, `random_bits_of_part`."""
    _check_shards(x, fmt)
    if stochastic:
        _check_replicas(x, generator)


def _check_replicas(x: DTensor, generator: torch.Generator | None) -> None:
    """Raise ValueError if replicas of x would not stay alike: each rank has a default generator of its own."""
    sizes = (x.device_mesh.size(axis) for axis, placement in enumerate(x.placements) if placement.is_replicate())
    if generator is None and any(size > 1 for size in sizes):
        raise ValueError(
            f"replicas of a DTensor of shape {tuple(x.shape)} with placements {x.placements} would be rounded in "
            "different ways on different ranks: give a seed, or a generator in the same state, on all of them"
        )


def decode_sharded(blocks: Blocks, fmt: LowBitFormat, shape: Sequence[int]) -> Tensor:
    """The DTensor of fp32 numbers, of the given shape, that blocks of DTensors stand for."""
    codes, scale, offset = blocks
    assert isinstance(codes, DTensor)
    assert isinstance(scale, DTensor)
    local_offset = offset.to_local() if isinstance(offset, DTensor) else None
    numbers = decode_blocks(codes.to_local(), scale.to_local(), local_offset, fmt, local_shape(codes, shape))
    return _as_dtensor(numbers, codes, shape)


def local_shape(codes: DTensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of this rank's part of a tensor of the given shape, whose codes are the DTensor ``codes``."""
    return tuple(compute_local_shape_and_global_offset(tuple(shape), codes.device_mesh, codes.placements)[0])


def _as_dtensor(local: Tensor, like: DTensor, shape: Sequence[int]) -> DTensor:
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def _check_shards(x: DTensor, fmt: LowBitFormat) -> None:
    """Raise ValueError if x is cut where its codes or scales can't be."""
    shape = tuple(x.shape)
    for placement in x.placements:
        # subclasses of Shard are refused too: the elements of their parts need not be adjacent
        if type(placement) not in (Shard, Replicate):
            raise ValueError(
                f"a DTensor of shape {shape} must have placements Shard or Replicate, got {placement}; redistribute it"
            )
    axis_sizes: dict[int, list[int]] = {}
    for mesh_axis, placement in enumerate(x.placements):
        if isinstance(placement, Shard):
            axis_sizes.setdefault(placement.dim % x.dim(), []).append(x.device_mesh.size(mesh_axis))
    for dim, sizes in axis_sizes.items():
        _check_dim(shape, dim, sizes, fmt)


def _check_dim(shape: tuple[int, ...], dim: int, axis_sizes: Sequence[int], fmt: LowBitFormat) -> None:
    """Raise ValueError if a shard along ``dim`` cuts a block, or is not cut as DTensor cuts its codes or scales."""
    if fmt.layout == "rows" and dim < len(shape) - 1:
        return
    # even where all dimensions before are 1: flat scales, and codes of 4 bits, have one dimension alone
    if fmt.layout == "flat" and dim > 0:
        raise ValueError(
            f"flat blocks of a tensor of shape {shape} run across its sharded dimension {dim}: shard dimension 0, or "
            'use layout="rows"'
        )
    unit, block_size, num_shards = math.prod(shape[dim + 1 :]), fmt.block_size, math.prod(axis_sizes)
    cuts = [index * unit for index in _cuts(shape[dim], axis_sizes)]
    total = cuts[-1]
    for offset in cuts:
        if offset < total and offset % block_size:
            raise ValueError(
                f"{num_shards} shards of dimension {dim} of a tensor of shape {shape} divide a block: element {offset} "
                f"is no multiple of the block size {block_size}; the next aligned offset is "
                f"{-(-offset // block_size) * block_size}"
            )
    # codes of 8 bits have the tensor's shape
    parts = {"scales": block_size} if fmt.bits == 8 else {"scales": block_size, "bytes of codes": 2}
    for what, elements in parts.items():
        wanted = [-(-offset // elements) for offset in cuts]
        found = _cuts(wanted[-1], axis_sizes)
        for shard, (start, stop, end) in enumerate(zip(wanted, wanted[1:], found[1:])):
            if stop != end:
                raise ValueError(
                    f"shard {shard} of {num_shards} of dimension {dim} of a tensor of shape {shape} has {stop - start} "
                    f"{what}, but of a DTensor of all {wanted[-1]} it would have {end - start}: make the dimension "
                    f"divisible by {num_shards}, or use another block size"
                )


def _cuts(length: int, axis_sizes: Sequence[int]) -> list[int]:
    """Where the shards of ``length`` indices begin, and where the last one ends; each axis cuts as torch.chunk does."""
    starts, stops = [0], [length]
    for size in axis_sizes:
        starts = [
            min(start + k * -(-(stop - start) // size), stop) for start, stop in zip(starts, stops) for k in range(size)
        ]
        stops = [*starts[1:], length]
    return [*starts, length]
