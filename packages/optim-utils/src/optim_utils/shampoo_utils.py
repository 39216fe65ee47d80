"""Shapes, splits and assignments for Shampoo-like optimizers.

A preconditioner works on matrices of bounded size. Three steps bring a parameter of any shape there: small
neighbouring dimensions are merged (`merge_small_dims`, and `plan_merge` for tensors that are not contiguous), big ones
are split into blocks (`multi_dim_split`, undone by `multi_dim_unsplit`), and the blocks are given to ranks
(`distribute_buffer_sizes`).
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from numbers import Integral
from types import TracebackType
from typing import Generic, TypeVar

import torch
from torch import Tensor

from optim_utils._arguments import check_torch_dtype, integer, iterated, sizes_of
from optim_utils._merge import MergePlan, merge_small_dims, plan_merge
from optim_utils._triangles import pack_upper_triangular, unpack_upper_triangular

__all__ = [
    "MergePlan",
    "ParameterizeEnterExitContext",
    "compress_list",
    "distribute_buffer_sizes",
    "generate_pairwise_indices",
    "get_dtype_size",
    "merge_small_dims",
    "multi_dim_split",
    "multi_dim_unsplit",
    "pack_upper_triangular",
    "plan_merge",
    "unpack_upper_triangular",
]

T = TypeVar("T")

# buffers start at multiples of this, in bytes: no two of them share a cache line or a DMA transaction
_ALIGNMENT = 64


def multi_dim_split(tensor: Tensor, split_size: int | float | tuple[int | float, ...]) -> tuple[Tensor, ...]:
    """Views of ``tensor`` cut along every dimension into pieces of ``split_size``, blocks in row-major order.

    The last piece along a dimension may be smaller. A tuple gives each dimension its own size; ``math.inf`` leaves a
    dimension whole, and on its own returns ``(tensor,)``, the same object.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"multi_dim_split takes a tensor, got a {type(tensor).__name__}")
    blocks: tuple[Tensor, ...] = (tensor,)
    for dim, size in enumerate(_size_per_dim(split_size, tensor.ndim)):
        if size is not None:
            blocks = tuple(piece for block in blocks for piece in torch.split(block, size, dim=dim))
    return blocks


def multi_dim_unsplit(
    blocks: Sequence[Tensor], split_size: int | float | tuple[int | float, ...], shape: Sequence[int]
) -> Tensor:
    """The tensor of ``shape`` that `multi_dim_split` cuts into ``blocks``.

    Raises:
        TypeError: for a block that is no tensor, or a ``shape`` that is none.
        ValueError: if the number of blocks, a block's shape, or the dtypes and devices of the blocks do not fit, or
            for a negative size in ``shape``.
    """
    blocks, shape = tuple(iterated(blocks, "blocks")), sizes_of(shape)
    # splitting an expanded meta element gives the shape that every block has to have, without memory
    expected = [block.shape for block in multi_dim_split(torch.empty((), device="meta").expand(shape), split_size)]
    if len(blocks) != len(expected):
        raise ValueError(f"shape {shape} split by {split_size} has {len(expected)} blocks, got {len(blocks)}")
    for number, (block, block_shape) in enumerate(zip(blocks, expected)):
        if not isinstance(block, Tensor):
            raise TypeError(f"block {number} has to be a tensor, got a {type(block).__name__}")
        if block.shape != block_shape:
            raise ValueError(f"block {number} has to be of shape {tuple(block_shape)}, got {tuple(block.shape)}")
        if (block.dtype, block.device) != (blocks[0].dtype, blocks[0].device):
            raise ValueError(
                f"block {number} is {block.dtype} on {block.device}, block 0 {blocks[0].dtype} on {blocks[0].device}"
            )
    # put the pieces together in the reverse order of cutting: along the last dimension first
    pieces = list(blocks)
    for dim, size in reversed(list(enumerate(_size_per_dim(split_size, len(shape))))):
        if size is not None and (count := _num_pieces(shape[dim], size)) > 1:
            pieces = [torch.cat(pieces[i : i + count], dim=dim) for i in range(0, len(pieces), count)]
    return pieces[0]


def _size_per_dim(split_size: int | float | tuple[int | float, ...], num_dims: int) -> list[int | None]:
    """The split size of each dimension, None where it stays whole."""
    sizes = split_size if isinstance(split_size, tuple) else (split_size,) * num_dims
    for size in sizes if isinstance(split_size, tuple) else (split_size,):
        # a tuple of types: dynamo of torch 2.9 cannot trace a union
        if isinstance(size, bool) or not isinstance(size, (int, float, torch.SymInt)):
            raise TypeError(f"{split_size=} has to hold integers or math.inf, not {type(size).__name__}")
        if isinstance(size, float) and size != math.inf:
            raise AssertionError(f"{split_size=} has to be an integer or math.inf.")
    if len(sizes) != num_dims:
        raise ValueError(f"{split_size=} has to hold one size for each of {num_dims} dimensions")
    return [None if isinstance(size, float) else size for size in sizes]


def _num_pieces(length: int, size: int) -> int:
    """How many pieces ``torch.split`` makes: an empty dimension still gives one, empty."""
    return max(1, math.ceil(length / size)) if size else 1


def compress_list(complete_list: Sequence[T], selector: Sequence[object]) -> tuple[T, ...]:
    """The elements of ``complete_list`` whose entry in ``selector`` is true."""
    for name, given in (("complete_list", complete_list), ("selector", selector)):
        if not hasattr(given, "__len__"):
            raise TypeError(f"{name} has to be a sequence, got a {type(given).__name__}")
    if len(complete_list) != len(selector):
        raise AssertionError(
            f"Inconsistent lengths between complete_list {len(complete_list)} and selector {len(selector)}!"
        )
    return tuple(itertools.compress(complete_list, selector))


def get_dtype_size(dtype: torch.dtype) -> int:
    """The bytes that an element of ``dtype`` takes; a part of a byte counts as one."""
    check_torch_dtype(dtype)
    return dtype.itemsize


def generate_pairwise_indices(input_list: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of consecutive ranges whose lengths are given: ``[2, 3]`` gives (0, 2), (2, 5)."""
    end = 0
    for number, given in enumerate(iterated(input_list, "input_list")):
        # sums of NumPy's integers and of tensors would wrap around
        length = integer(given, f"input_list[{number}]")
        if length < 0:
            raise ValueError(f"lengths must not be negative, got {length}")
        start, end = end, end + length
        yield start, end


def distribute_buffer_sizes(buffer_sizes: Sequence[int], group_size: int) -> tuple[tuple[int, int], ...]:
    """The (aligned size, rank) of each buffer, in the order of the input, sizes in bytes.

    Sizes are rounded up to 64 bytes. Largest first, each buffer goes to the rank with the least so far; equal buffers
    keep their order and equal ranks are filled from the lowest, so every rank computes the same. `optim_utils.balance`
    does this for other costs, and better.
    """
    given = enumerate(iterated(buffer_sizes, "buffer_sizes"))
    aligned = [-(-_byte_count(number, size) // _ALIGNMENT) * _ALIGNMENT for number, size in given]
    if not aligned:
        return ()
    if isinstance(group_size, bool) or not isinstance(group_size, Integral) or group_size < 1:
        raise ValueError(f"{group_size=} must be an integer and at least one")
    owner = [0] * len(aligned)
    loads = [(0, rank) for rank in range(group_size)]
    for number in sorted(range(len(aligned)), key=lambda number: -aligned[number]):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + aligned[number], rank))
        owner[number] = rank
    return tuple(zip(aligned, owner))


def _byte_count(number: int, size: int) -> int:
    count = integer(size, f"buffer_sizes[{number}]")
    if count < 0:
        raise ValueError(f"buffer_sizes[{number}]={size!r} must not be negative")
    return count


class ParameterizeEnterExitContext(Generic[T]):
    """A context manager around an object whose own methods switch something on and off.

    Entering calls ``enter_method_caller(input)`` and gives the context itself; leaving always calls
    ``exit_method_caller(input)`` and suppresses no exception. A context can be entered again, also inside itself.
    """

    def __init__(
        self,
        input_with_enter_exit_context: T,
        enter_method_caller: Callable[[T], object],
        exit_method_caller: Callable[[T], object],
    ) -> None:
        for name, caller in (("enter", enter_method_caller), ("exit", exit_method_caller)):
            if not callable(caller):
                raise TypeError(f"{name}_method_caller has to be a function of the object, got {caller!r}")
        self._input_with_enter_exit_context = input_with_enter_exit_context
        self._enter_method_caller = enter_method_caller
        self._exit_method_caller = exit_method_caller

    def __enter__(self) -> "ParameterizeEnterExitContext[T]":
        self._enter_method_caller(self._input_with_enter_exit_context)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit_method_caller(self._input_with_enter_exit_context)
