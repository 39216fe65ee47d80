"""The hyperparameters of all groups as the kernels read them: rows of fp64 numbers.

The host writes Python numbers. For a learning rate on the device it writes the address, which the kernel follows; betas
on the device are copied into their row on the device. So a tensor is read when the step runs, also when a CUDA graph
replays it, and nothing waits for its value.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from optim_kernels._dtensors import whole
from optim_kernels.functional._device_scalars import on_device
from optim_kernels.reference.adamw import AdamWScalars

# numbers of a group
ROW_SIZE = 9


def hyperparameter_rows(scalars: Sequence[AdamWScalars]) -> bytes:
    """The table of the groups (``adamw_kernels.Hyperparameters``); betas on the device are left to ``write_betas``."""
    rows = array("d")
    for each in scalars:
        rows.extend(_row(each))
    return rows.tobytes()


def without_rates(rows: bytes) -> tuple[Sequence[int], bytes]:
    """The patterns of the groups' learning rates, and the table with zeros in place of them."""
    words = array("q", rows)
    rates = words[::ROW_SIZE]
    words[::ROW_SIZE] = array("q", bytes(8 * len(rates)))
    return rates, words.tobytes()


def _row(scalars: AdamWScalars) -> list[float]:
    lr = scalars.lr
    # NaN holds the place of a beta on the device: no number is equal to it, so a change to one is noticed
    beta1 = math.nan if on_device(scalars.beta1) else float(scalars.beta1)
    beta2 = math.nan if on_device(scalars.beta2) else float(scalars.beta2)
    address = 0.0
    if on_device(lr):
        (address,), lr = array("d", array("q", [lr.data_ptr()]).tobytes()), 0.0
    return [
        float(lr),
        address,
        beta1,
        beta2,
        math.log2(beta1) if beta1 > 0 else -math.inf,
        math.log2(beta2) if beta2 > 0 else -math.inf,
        scalars.eps,
        scalars.weight_decay,
        -1.0 if scalars.maximize else 1.0,
    ]


def write_betas(table: Tensor, scalars: Sequence[AdamWScalars]) -> None:
    """Fill in the betas that are on a device: ``β1, β2, log2 β1, log2 β2`` from the third column on, in fp64."""
    for row, each in zip(table, scalars, strict=True):
        for column, beta in enumerate((each.beta1, each.beta2), start=2):
            if on_device(beta):
                value = whole(beta).detach().reshape(()).double()
                row[column].copy_(value)
                torch.log2(value, out=row[column + 2])
