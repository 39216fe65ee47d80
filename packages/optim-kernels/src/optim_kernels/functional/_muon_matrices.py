"""Parameters as Muon's grouped launches see them: matrices of lines of adjacent elements, and what excludes one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from optim_kernels._dtensors import is_wrapper
from optim_kernels._impl import KERNEL_DTYPES, why_not_on
from optim_kernels._kernels import muon_table as fields
from optim_kernels._newton_schulz.config import NSConfig, Tiles
from optim_kernels._newton_schulz.tiles import cdiv
from optim_kernels.functional._lists import called
from optim_kernels.reference.muon import MuonRule, lr_scale
from optim_utils.param_groups import MatrixView

TILE: int = fields.TILE.value


@dataclass(frozen=True, slots=True)
class MuonTensors:
    """One parameter's tensors, all read through one view; of equal strides, except the second moment.

    Args:
        master: an fp32 master, or the int16 low half of one (split16).
        step: with stochastic rounding, the number of steps taken, fp32 on the device; the plan advances it.
        place, seed: with stochastic rounding, the parameter's number and the seed, which choose the bits.
        group: the row of hyperparameters that is used.
        name: what errors call the parameter.
        number: its place in the caller's list, by which errors call it if it has no name; by default that in the plan.
    """

    param: Tensor
    grad: Tensor
    momentum_buffer: Tensor
    second_moment: Tensor | None = None
    master: Tensor | None = None
    step: Tensor | None = None
    view: MatrixView | None = None
    group: int = 0
    place: int = 0
    seed: int = 0
    name: str | None = None
    number: int | None = None

    def called(self, kind: str, number: int) -> str:
        """How errors call a tensor of a kind, this one's number in a plan being ``number``."""
        return called(kind, number if self.number is None else self.number, self.name)

    def kind(self, tiles: Tiles) -> tuple[Hashable, ...]:
        """What the parameters of one plan have in common: dtypes and device, and with ``"shape"`` the alignment."""
        master = None if self.master is None else self.master.dtype
        dtypes = (self.param.dtype, self.grad.dtype, self.momentum_buffer.dtype, master)
        # a plan is aligned only if all its parameters are
        return (dtypes, self.param.device, *(alignment_of(self) if tiles == "shape" else ()))

    def address_key(self) -> tuple[Any, ...]:
        """What the tables hold of parameter and state, to tell when a tensor was replaced or is read otherwise.

        A plan need not keep a state alive, so its memory may have become that of a tensor of another kind.
        """
        p, b = self.param, self.momentum_buffer
        # dtypes of these are the same in a whole plan, strides of both are equal, and the parameter's shape the view's
        of_both = p.data_ptr(), b.data_ptr(), p.stride(), b.shape
        optional = (self.second_moment, self.master, self.step)
        kinds = [t if t is None else (t.data_ptr(), t.dtype, t.shape, t.stride()) for t in optional]
        return (*of_both, *kinds, self.view, self.group, self.place, self.seed)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix inside a parameter, as it is stored: `outer` lines of `inner` adjacent elements.

    Args:
        parameter: number of the parameter in the plan's list.
        offset: elements from the parameter's first to the matrix's first.
        moment_offset: elements from the second moment's first to the matrix's own.
        scale: what the learning rate is multiplied by.
    """

    parameter: int
    offset: int
    stride: int
    outer: int
    inner: int
    rows_are_inner: bool
    scale: float
    moment_offset: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of X: the short side first."""
        return min(self.outer, self.inner), max(self.outer, self.inner)

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        return (self.inner, self.outer) if self.rows_are_inner else (self.outer, self.inner)

    @property
    def lines_are_columns(self) -> bool:
        """Whether V has a value for each column of X, the longer side; if not, X is square and V follows its rows."""
        return self.outer != self.inner or self.rows_are_inner

    @property
    def tiles(self) -> tuple[int, int]:
        return cdiv(self.outer, TILE), cdiv(self.inner, TILE)


def why_not_plan(tensors: MuonTensors, ns: NSConfig) -> str | None:
    """What keeps the grouped launches from updating these tensors; ``None`` where they can."""
    p, b = tensors.param, tensors.momentum_buffer
    reason = why_not_on(p.device)
    if reason is not None:
        return reason
    for name, tensor in (("it", p), ("its gradient", tensors.grad)):
        if is_wrapper(tensor):
            return f"{name} is a {type(tensor).__name__}, which has no memory of its own"
        if tensor.layout != torch.strided:
            return f"{name} is {tensor.layout}"
    if p.is_neg() or b.is_neg():
        return "it is negated lazily"
    for name, tensor in (("its", p), ("its gradient's", tensors.grad), ("its momentum's", b)):
        if tensor.dtype not in KERNEL_DTYPES:
            return f"{name} dtype is {tensor.dtype}"
    for name, state in (
        ("momentum", b),
        ("second moment", tensors.second_moment),
        ("master", tensors.master),
        ("step count", tensors.step),
    ):
        if state is not None and state.device != p.device:
            return f"its {name} is on {state.device}"
    if ns.dtype == torch.float64:
        return "it is orthogonalized in fp64"
    if ns.steps == 0:
        return "it takes no Newton–Schulz step"
    if b.stride() != p.stride() or (tensors.master is not None and tensors.master.stride() != p.stride()):
        return "its state has other strides"
    view = tensors.view or MatrixView.identity(p.shape)
    for part in view.views(p):
        if part.numel() == 0:
            return "it is empty"
        if 1 not in part.stride()[-2:]:
            return "no dimension of its matrices is contiguous"
    return None


def matrices_of(parameter: int, tensors: MuonTensors, rule: MuonRule) -> list[Matrix]:
    """Every matrix of a parameter, as it is stored."""
    p = tensors.param
    view = tensors.view or MatrixView.identity(p.shape)
    matrices = []
    moment_offset = 0
    for part in view.views(p):
        rows, columns = part.shape[-2:]
        row_stride, column_stride = part.stride()[-2:]
        rows_are_inner = column_stride != 1 or (columns == 1 and row_stride == 1)
        stride, outer, inner = (column_stride, columns, rows) if rows_are_inner else (row_stride, rows, columns)
        scale = lr_scale(rule.scale, part.shape, p.shape)
        for index in product(*(range(size) for size in part.shape[:-2])):
            offset = int(part.storage_offset() - p.storage_offset())
            offset += sum(i * step for i, step in zip(index, part.stride()))
            matrices.append(Matrix(parameter, offset, stride, outer, inner, rows_are_inner, scale, moment_offset))
            moment_offset += max(outer, inner)
    return matrices


def is_aligned(matrix: Matrix, *tensors: Tensor | None) -> bool:
    """Whether the matrix keeps the promise of ALIGNED (`_kernels.muon_tiles`) in each of the tensors."""
    there = [tensor for tensor in tensors if tensor is not None]
    sizes = (matrix.stride, matrix.outer, matrix.inner, matrix.offset)
    return all(address_of(t, matrix.offset) % 16 == 0 for t in there) and all(size % 8 == 0 for size in sizes)


def alignment_of(t: MuonTensors) -> tuple[bool, bool]:
    """Whether all matrices of a parameter keep the promise of ALIGNED, and whether those of its gradient do as well.

    A plan makes a promise only if all its parameters keep it. If the state does not, O is stored, and so rounded,
    before it updates the parameters; if the gradient does not, sums are added in another order.
    """
    tensors = [t.param, t.momentum_buffer, *([] if t.master is None else [t.master])]
    has_sizes = _has_aligned_sizes(tuple(t.param.shape), tuple(t.param.stride()), t.view)
    state_is_aligned = has_sizes and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    # a gradient with other strides or sign is copied, and its copy is aligned
    is_read = t.grad.stride() == t.param.stride() and not t.grad.is_neg()
    return state_is_aligned, state_is_aligned and not (is_read and t.grad.data_ptr() % 16)


@lru_cache(maxsize=1024)
def _has_aligned_sizes(shape: tuple[int, ...], stride: tuple[int, ...], view: MatrixView | None) -> bool:
    like = torch.empty_strided(shape, stride, device="meta")
    tensors = MuonTensors(like, like, like, view=view)
    return all(is_aligned(matrix) for matrix in matrices_of(0, tensors, MuonRule()))


def address_of(tensor: Tensor | None, offset: int) -> int:
    """The address of an element, ``offset`` elements from the tensor's first; 0 for no tensor."""
    return 0 if tensor is None else tensor.data_ptr() + offset * tensor.element_size()


def check_memory(tensors: Sequence[MuonTensors]) -> None:
    """Raise ``ValueError`` for tensors whose storage was freed; a plan has no empty tensors."""
    for number, t in enumerate(tensors):
        for name, tensor in (
            ("params", t.param),
            ("momentum_buffers", t.momentum_buffer),
            ("second_moments", t.second_moment),
            ("masters", t.master),
        ):
            # meta tensors, of a plan that is only looked at, never have memory
            if tensor is not None and tensor.data_ptr() == 0 and not tensor.is_meta:
                raise ValueError(f"{t.called(name, number)} has elements but no memory: its storage was freed")


def check_steps(tensors: Sequence[MuonTensors]) -> None:
    """Raise ``ValueError`` unless each step count is one fp32 number: kernels read and write nothing else."""
    for number, t in enumerate(tensors):
        if t.step is not None and (t.step.dtype != torch.float32 or t.step.numel() != 1):
            raise ValueError(
                f"{t.called('steps', number)} must be one fp32 number, got {t.step.dtype} of shape "
                f"{tuple(t.step.shape)}"
            )


def check_moments(tensors: Sequence[MuonTensors], matrices: Sequence[Matrix]) -> None:
    """Raise ``ValueError`` unless every parameter has a second moment as `functional.new_second_moment` makes it."""
    wanted = [0] * len(tensors)
    for matrix in matrices:
        wanted[matrix.parameter] += max(matrix.outer, matrix.inner)
    for number, (t, size) in enumerate(zip(tensors, wanted, strict=True)):
        v = t.second_moment
        if v is None or v.dtype != torch.float32 or not v.is_contiguous() or v.numel() != size:
            found = "none" if v is None else f"{v.dtype} of shape {tuple(v.shape)} and strides {v.stride()}"
            raise ValueError(
                f"{t.called('second_moments', number)} must be contiguous fp32 of {size} elements "
                f"(functional.new_second_moment makes it) for a parameter of shape {tuple(t.param.shape)} with "
                f"{prod(t.param.shape)} elements; got {found}"
            )
