"""A trained parameter, as it is known between the groups of an optimizer and its plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from optim_dist.plan import RouteName
from optim_utils.param_groups import MatrixView


@dataclass(frozen=True)
class Entry:
    """A trained parameter: its name, its group, and the matrices inside if they are not its last two dimensions."""

    name: str
    parameter: Tensor
    group: int
    number: int  # among all parameters of the groups, as in torch's state dicts
    route: RouteName
    view: MatrixView | None = None
