"""The matrices that a plan reads its parameters as; groups must not ask for others afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from optim_utils.param_groups import MatrixView

# options of a group that say how its parameters are read as matrices
VIEW_OPTIONS = ("nd", "split_rows", "views")

ViewsOf = Callable[[dict[str, Any]], Sequence[MatrixView | None]]


class PlannedViews:
    """How each group read its parameters when it was planned; ``views_of`` says how it does now."""

    def __init__(self) -> None:
        self._views: list[list[MatrixView | None]] = []
        self._options: list[list[Any]] = []

    def note(self, groups: Sequence[dict[str, Any]], views_of: ViewsOf) -> None:
        """Remember how new groups read their parameters."""
        for group in groups[len(self._views) :]:
            self._views.append(list(views_of(group)))
            self._options.append(_view_options(group))

    def check(self, groups: Sequence[dict[str, Any]], views_of: ViewsOf) -> None:
        """Refuse groups that were told to read their parameters as other matrices than the plan was made for."""
        options = [*map(_view_options, groups)]
        if options == self._options:
            return
        for index, (group, planned) in enumerate(zip(groups, self._views)):
            if list(views_of(group)) != planned:
                now, then = options[index], self._options[index]
                changed = [name for name, new, old in zip(VIEW_OPTIONS, now, then) if new != old]
                raise RuntimeError(
                    f"{', '.join(changed)} of param_groups[{index}] changed after the optimizer was built, whose plan "
                    "is for the matrices of that time; build a new optimizer"
                )
        self._options = options

    def of(self, number: int) -> list[MatrixView | None]:
        """The views that group ``number`` was planned with."""
        return self._views[number]


def _view_options(group: dict[str, Any]) -> list[Any]:
    """A copy of a group's view options, as the group itself may change."""
    found = [group.get(name) for name in VIEW_OPTIONS]
    return [list(value) if isinstance(value, list | tuple) else value for value in found]
