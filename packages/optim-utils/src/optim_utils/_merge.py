"""Merging small neighbouring dimensions, so that a parameter of many dimensions becomes a few large matrices.

Walking from the last dimension to the first, the current group takes the next dimension in, if

    (groups so far) + (dimensions not yet looked at) > target    and    (product of the group with it) ≤ threshold.

Otherwise a new group begins there: (32, 3, 64, 64) at threshold 1024 and target 2 becomes (32, 192, 64).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from numbers import Integral, Real
from operator import index

import torch
from torch import Tensor

from optim_utils._arguments import sizes_of


def merge_small_dims(
    tensor_shape: Sequence[int], threshold: int | float, target_tensor_dimensionality: int | float
) -> tuple[int, ...]:
    """The shape after merging neighbouring dimensions up to ``threshold`` elements, aiming at a number of dimensions.

    Dimensions of size 1 are dropped, unless there is no other; an empty tensor becomes ``(0,)``; ``math.inf`` as the
    target returns the given shape unchanged. The result may have more dimensions than the target, as the threshold
    takes precedence. A tensor that is not contiguous may have no view of this shape: see `plan_merge`.
    """
    sizes = sizes_of(tensor_shape, "tensor_shape")
    if 0 in sizes:
        return (0,)
    if target_tensor_dimensionality == math.inf:
        # the same object, as callers compare with `is`
        return tensor_shape  # type: ignore[return-value]
    # in two steps: the compiler may not know the class of NumPy's integers
    if not isinstance(target_tensor_dimensionality, int) and not isinstance(target_tensor_dimensionality, Integral):
        raise AssertionError(f"{target_tensor_dimensionality=} has to be an integer or math.inf.")
    if torch.compiler.is_compiling():
        return _merge(sizes, threshold, target_tensor_dimensionality)
    return _cached_merge(tuple(map(index, sizes)), threshold, index(target_tensor_dimensionality))


def _merge(shape: tuple[int, ...], threshold: int | float, target: int) -> tuple[int, ...]:
    sizes = [size for size in shape if size != 1] or [1]
    # products of the groups, the last group of dimensions first
    merged = [sizes.pop()]
    while sizes:
        size = sizes[-1]
        if len(merged) + len(sizes) > target and merged[-1] * size <= threshold:
            merged[-1] *= size
        else:
            merged.append(size)
        sizes.pop()
    return tuple(reversed(merged))


def _checked_merge(shape: tuple[int, ...], threshold: int | float, target: int) -> tuple[int, ...]:
    # every comparison with NaN is false: nothing would be merged
    if not isinstance(threshold, Real) or math.isnan(threshold):
        raise ValueError(f"{threshold=} must be a number of elements or math.inf")
    return _merge(shape, threshold, target)


# typed: 2 and 2.0 must not share an entry. Dynamo ignores such caches with a warning, so compiled code avoids this one.
_cached_merge = lru_cache(maxsize=4096, typed=True)(_checked_merge)
merge_small_dims.cache_info = _cached_merge.cache_info  # type: ignore[attr-defined]
merge_small_dims.cache_clear = _cached_merge.cache_clear  # type: ignore[attr-defined]


@dataclass(frozen=True)
class MergePlan:
    """How tensors of one shape are merged, and brought back.

    ``merge`` gives a view wherever one exists and a copy otherwise (a channels_last convolution weight, whose memory
    runs over the channels before the pixels); ``is_view`` says which. ``unmerge`` always gives a view.
    """

    shape: tuple[int, ...]
    merged_shape: tuple[int, ...]

    def merge(self, tensor: Tensor) -> Tensor:
        """``tensor`` of ``shape`` as one of ``merged_shape``."""
        self._check(tensor, self.shape)
        return tensor.reshape(self.merged_shape)

    def unmerge(self, tensor: Tensor) -> Tensor:
        """``tensor`` of ``merged_shape`` as a view of ``shape``."""
        self._check(tensor, self.merged_shape)
        return tensor.view(self.shape)

    def is_view(self, tensor: Tensor) -> bool:
        """Whether ``merge(tensor)`` shares memory with ``tensor``."""
        self._check(tensor, self.shape)
        if tensor.numel() == 0:
            return True
        # sizes and strides without the dimensions of size 1, whose strides mean nothing
        dims = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride()) if size != 1]
        position = 0
        for merged in self.merged_shape:
            start, product = position, 1
            while product < merged:
                product *= dims[position][0]
                position += 1
            group = dims[start:position]
            # one stride has to step through the whole group
            if any(outer[1] != inner[0] * inner[1] for outer, inner in pairwise(group)):
                return False
        return True

    @staticmethod
    def _check(tensor: Tensor, shape: tuple[int, ...]) -> None:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"this plan is for tensors of shape {shape}, got a {type(tensor).__name__}")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"this plan is for tensors of shape {shape}, got {tuple(tensor.shape)}")


def plan_merge(
    tensor_shape: Sequence[int], threshold: int | float, target_tensor_dimensionality: int | float
) -> MergePlan:
    """The `MergePlan` of tensors of ``tensor_shape``, by the rule of `merge_small_dims`."""
    merged = merge_small_dims(tensor_shape, threshold, target_tensor_dimensionality)
    return MergePlan(tuple(tensor_shape), tuple(merged))
