"""The hyperparameters of a group as the kernels read them: a row of fp64 numbers, or addresses of them."""

from __future__ import annotations

import math
from array import array

from torch import Tensor

from optim_kernels.reference.adamw import AdamWScalars, Scalar


def hyperparameter_row(scalars: AdamWScalars) -> list[float]:
    """A group's row of the hyperparameter table (``adamw_kernels.Hyperparameters``)."""
    lr, beta1, beta2 = scalars.lr, _number(scalars.beta1), _number(scalars.beta2)
    address = 0
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        address, lr = lr.data_ptr(), 0.0
    return [
        float(lr),
        array("d", array("q", [address]).tobytes())[0],
        beta1,
        beta2,
        math.log2(beta1) if beta1 > 0 else -math.inf,
        math.log2(beta2) if beta2 > 0 else -math.inf,
        scalars.eps,
        scalars.weight_decay,
        -1.0 if scalars.maximize else 1.0,
    ]


def _number(x: Scalar) -> float:
    return x.item() if isinstance(x, Tensor) else x
