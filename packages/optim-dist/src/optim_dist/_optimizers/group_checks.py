"""Hyperparameters are checked before every step begins, since schedules and users may have written anything to groups.

What only the update of a group would refuse is refused while no other group, and no other rank, has been updated. Every
rank finds the same then, before any waits for another, so that a loop may put the number right and step again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from optim_dist.plan import RouteName
from optim_kernels.adamw_groups import check_adamw_scalars
from optim_kernels.muon_groups import KnownOptions, check_choices, check_muon_scalars


class GroupChecks:
    """Checks of the groups of one optimizer."""

    def __init__(self) -> None:
        # Muon's groups whose options were checked, and these, keyed by number: other than the numbers that schedules
        # write they hardly change, and to compare them takes a tenth of the time
        self._checked: dict[int, tuple[Mapping[str, Any], KnownOptions]] = {}

    def check(self, groups: Sequence[Mapping[str, Any]], routes: Mapping[int, RouteName]) -> None:
        """Refuse what the update of a group cannot take; reads nothing from a device.

        Args:
            routes: the update of each group that has parameters in the plan, keyed by the group's number.

        Raises:
            TypeError, ValueError: naming the group, what it has, and what it may have.
            KeyError: naming the option that a group has lost.
        """
        for number, route in routes.items():
            try:
                if route == "adamw":
                    check_adamw_scalars(groups[number])
                    _check_betas(groups[number]["betas"])
                else:
                    self._check_muon(number, groups[number])
            except (TypeError, ValueError) as error:
                raise type(error)(f"param_groups[{number}]: {error}") from None
            except KeyError as error:
                raise lost(number, error) from None

    def _check_muon(self, number: int, group: Mapping[str, Any]) -> None:
        check_muon_scalars(group)
        checked, options = self._checked.get(number, (None, None))
        if checked is not group or options is None or not options.are_unchanged():
            check_choices(group)
            self._checked[number] = group, KnownOptions([group])


def lost(number: int, error: KeyError) -> KeyError:
    """The error for an option that group ``number`` has no more."""
    return KeyError(f"param_groups[{number}] has lost its {error}, which every step reads")


def _check_betas(betas: Sequence[Any]) -> None:
    """Refuse what constructors do, in torch's words; kernels refuse it once other groups, or ranks, have moved."""
    for index, beta in enumerate(betas):
        on_host = not isinstance(beta, Tensor) or beta.device.type == "cpu"
        if on_host and not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {float(beta)}")
