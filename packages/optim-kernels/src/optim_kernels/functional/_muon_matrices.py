"""Parameters as Muon's grouped launches see them: matrices of lines of adjacent elements, and what keeps one out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from optim_kernels import _muon_table as table
from optim_kernels._impl import KERNEL_DTYPES, is_interpreted
from optim_kernels._tiles import cdiv
from optim_kernels.orthogonalization import NSConfig
from optim_kernels.reference.muon import MuonRule, lr_scale
from optim_utils.param_groups import MatrixView

TILE: int = table.TILE.value


@dataclass(frozen=True)
class MuonTensors:
    """One parameter's tensors, all read through one view; of equal strides, except the second moment."""

    param: Tensor
    grad: Tensor
    momentum_buffer: Tensor
    second_moment: Tensor | None = None
    master: Tensor | None = None
    view: MatrixView | None = None
    group: int = 0

    def address_key(self) -> tuple[int, ...]:
        """What the tables hold of the tensors that stay, to tell when they have been replaced."""
        optional = (0 if t is None else t.data_ptr() for t in (self.second_moment, self.master))
        return (self.param.data_ptr(), self.momentum_buffer.data_ptr(), *optional, self.group)


@dataclass(frozen=True)
class Matrix:
    """One matrix inside a parameter, as it is stored: `outer` lines of `inner` adjacent elements."""

    parameter: int
    offset: int
    stride: int
    outer: int
    inner: int
    rows_are_inner: bool
    scale: float

    @property
    def short_and_long(self) -> tuple[int, int]:
        return min(self.outer, self.inner), max(self.outer, self.inner)

    @property
    def tiles(self) -> tuple[int, int]:
        return cdiv(self.outer, TILE), cdiv(self.inner, TILE)


def why_not_plan(tensors: MuonTensors, ns: NSConfig) -> str | None:
    """What keeps the grouped launches from updating these tensors; ``None`` where they can."""
    p, b = tensors.param, tensors.momentum_buffer
    if not (p.is_cuda or (is_interpreted() and p.device.type == "cpu")):
        return f"it is on {p.device.type}"
    for name, tensor in (("its", p), ("its gradient's", tensors.grad), ("its momentum's", b)):
        if tensor.dtype not in KERNEL_DTYPES:
            return f"{name} dtype is {tensor.dtype}"
    if ns.dtype == torch.float64:
        return "it is orthogonalised in fp64"
    if tensors.master is not None and tensors.master.dtype != torch.float32:
        return "it has a split16 master"
    if b.stride() != p.stride():
        return "its momentum has other strides"
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
    for part in view.views(p):
        rows, columns = part.shape[-2:]
        row_stride, column_stride = part.stride()[-2:]
        rows_are_inner = column_stride != 1 or (columns == 1 and row_stride == 1)
        stride, outer, inner = (column_stride, columns, rows) if rows_are_inner else (row_stride, rows, columns)
        scale = lr_scale(rule.scale, part.shape, p.shape)
        for index in product(*(range(size) for size in part.shape[:-2])):
            offset = int(part.storage_offset() - p.storage_offset())
            offset += sum(i * step for i, step in zip(index, part.stride()))
            matrices.append(Matrix(parameter, offset, stride, outer, inner, rows_are_inner, scale))
    return matrices


def address_of(tensor: Tensor, offset: int) -> int:
    """The address of an element, ``offset`` elements from the tensor's first."""
    return tensor.data_ptr() + offset * tensor.element_size()


def is_aligned(row: list[int], tensors: MuonTensors) -> bool:
    """Whether the matrix keeps the promise of ALIGNED (`_muon_tiles`)."""
    addresses = [row[table.P], row[table.G], row[table.B]]
    addresses += [] if tensors.master is None else [row[table.MASTER]]
    sizes = (row[table.P_STRIDE], row[table.OUTER], row[table.INNER])
    return all(address % 16 == 0 for address in addresses) and all(size % 8 == 0 for size in sizes)


def on_device(value: float | Tensor) -> bool:
    """Whether a hyperparameter is read on the device."""
    return isinstance(value, Tensor) and value.device.type != "cpu"
