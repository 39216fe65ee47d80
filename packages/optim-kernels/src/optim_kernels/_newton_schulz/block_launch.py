"""A kept launch of a kernel whose first arguments are blocks of matrices, which the bulk copy engine moves.

Triton describes such a matrix by a `TensorDescriptor`, and checks each one that is made. Here only the first launch
makes and checks them; later launches differ in the matrices' addresses alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from optim_kernels._newton_schulz.copy_engine import ALIGNMENT
from optim_kernels._triton import INTERPRETED, Launch

Block = tuple[int, int]
# Kept launches of each product.
NUM_LAUNCHES = 1024


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """``x [batch, M, N]`` in blocks of rows × columns of one matrix, for the copy engine."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, columns])


def layout_of(x: Tensor | None) -> tuple[Any, ...] | None:
    """What a descriptor says of a matrix beside its address."""
    return None if x is None else (x.shape, x.stride(), x.dtype)


def alignment_of(x: Tensor | float | None) -> int | None:
    """What the compiler may know of the address of a scalar that is passed by its address."""
    return x.data_ptr() % ALIGNMENT if isinstance(x, Tensor) else None


class BlockLaunch(Launch):
    """A kernel with its grid, its blocks and compile-time arguments, launched again and again.

    Args:
        blocks: (rows, columns) of each matrix argument's blocks.
        describe: makes a matrix's descriptor.
    """

    def __init__(
        self,
        kernel: Any,
        grid: int | tuple[int, int, int],
        blocks: Sequence[Block],
        constants: Sequence[Any],
        *,
        describe: Callable[[Tensor, int, int], Any] = descriptor,
        **options: Any,
    ) -> None:
        super().__init__(kernel, grid, constants, **options)
        self._blocks = blocks
        self._describe = describe
        self._known: list[Any] = []

    def launch(self, matrices: Sequence[Tensor | None], others: Sequence[Any]) -> None:
        """Launch with matrices of the first launch's shapes and strides, then tensors and numbers in their order.

        A kernel that does without one of its matrices is given ``None``.
        """
        if self._run is not None:
            self.again((*map(_descriptor_like, self._known, matrices), *others))
            return
        pairs = zip(matrices, self._blocks, strict=True)
        known = [None if x is None else self._describe(x, *block) for x, block in pairs]
        device = next(x.device for x in matrices if x is not None)
        if not INTERPRETED.value:
            # of the first matrices only their shapes are kept; before other threads may launch the kernel again
            self._known = [None if each is None else _descriptor_like(each, None) for each in known]
        self._first(device, (*known, *others))


def _descriptor_like(known: object, x: Tensor | None) -> Any:
    """The descriptor of ``x``, which differs from the matrix that ``known`` describes in its address alone."""
    if known is None:
        return None
    described = object.__new__(type(known))
    described.__dict__.update(known.__dict__, base=x)
    return described
