"""The hyperparameters of all groups as the kernels read them: rows of ``_kernels.adamw_update``.

The host writes Python numbers. For a learning rate on the device it writes the address, which the kernel follows; betas
on the device are copied into their row on the device. So a tensor is read when the step runs, also when a CUDA graph
replays it, and nothing waits for its value.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from optim_kernels._dtensors import whole
from optim_kernels._options import check_betas, check_python_numbers
from optim_kernels.functional._device_scalars import on_device
from optim_kernels.reference.adamw import AdamWScalars

# words of a row, and which of them are β1 and β2 in fp64, rates, β1 and β2 in fp32, and parts
ROW_SIZE = 10
_BETA, _RATES, _BETAS, _PARTS = 1, 6, 7, 8
# of so many groups the kernel takes the rates as arguments
MOST_RATES = 4


def hyperparameter_rows(scalars: Sequence[AdamWScalars]) -> bytes:
    """The table of the groups; betas on the device are left to ``write_betas``."""
    try:
        return b"".join(map(_row, scalars))
    except OverflowError:
        for lr, beta1, beta2, eps, weight_decay, *_ in scalars:
            numbers = {"lr": lr, "betas[0]": beta1, "betas[1]": beta2, "eps": eps, "weight_decay": weight_decay}
            on_host = {name: number for name, number in numbers.items() if not isinstance(number, Tensor)}
            check_python_numbers([*on_host], [*on_host.values()])
        raise


def without_rates(rows: bytes) -> tuple[Sequence[int], bytes]:
    """The groups' rates, and the table with zeros in place of them."""
    words = array("q", rows)
    rates = words[_RATES::ROW_SIZE]
    words[_RATES::ROW_SIZE] = array("q", bytes(8 * len(rates)))
    return rates, words.tobytes()


def _row(scalars: AdamWScalars) -> bytes:
    # in fp64, since a tensor's or NumPy's number would take the product with it into its own dtype
    lr, weight_decay = scalars.lr, float(scalars.weight_decay)
    betas: list[Any] = [beta if on_device(beta) else float(beta) for beta in (scalars.beta1, scalars.beta2)]
    check_betas(betas)
    # NaN holds the place of a beta on the device: no number is equal to it, so a change to one is noticed
    beta1, beta2 = (math.nan if on_device(beta) else beta for beta in betas)
    address = 0
    if on_device(lr):
        address, lr = lr.data_ptr(), 0.0
    lr = float(lr)
    logs = (math.log2(beta) if beta > 0 else -math.inf for beta in (beta1, beta2))
    sign = _sign(scalars)
    halves = array("f", [lr, lr * weight_decay, beta1, beta2, sign * (1.0 - beta1), 1.0 - beta2, scalars.eps, 0.0])
    # the root of the fp32 number, found in fp64, which has the digits to round it to fp32 correctly
    halves[5] = sign * math.sqrt(halves[5])
    numbers = array("d", [beta1, beta2, *logs, weight_decay])
    return array("q", [address]).tobytes() + numbers.tobytes() + halves.tobytes()


def _sign(scalars: AdamWScalars) -> float:
    return -1.0 if scalars.maximize else 1.0


def write_betas(table: Tensor, scalars: Sequence[AdamWScalars]) -> None:
    """Fill in the betas that are on a device, and what rows have of them, in a table (int64) of these groups."""
    rows, halves = table.view(torch.float64), table.view(torch.float32)
    for row, half, each in zip(rows.view(-1, ROW_SIZE), halves.view(-1, 2 * ROW_SIZE), scalars, strict=True):
        for place, beta in enumerate((each.beta1, each.beta2)):
            if on_device(beta):
                value = whole(beta).detach().reshape(()).double()
                row[_BETA + place].copy_(value)
                torch.log2(value, out=row[_BETA + 2 + place])
                half[2 * _BETAS + place].copy_(value)
                part = (1.0 - value).float().double()
                half[2 * _PARTS + place].copy_(_sign(each) * (part.sqrt() if place else part))
