"""Muon's parameters sorted by what updates them: batches for grouped launches, the rest for `functional.muon_`.

A batch has the parameters that share everything but hyperparameters: the rule, the orthogonalization, the dtypes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from optim_kernels._impl import why_not_grouped_on
from optim_kernels._newton_schulz.config import NSConfig, Tiles
from optim_kernels._newton_schulz.tiles import cdiv
from optim_kernels._optimizers.muon_entries import MuonEntry
from optim_kernels._optimizers.muon_options import ns_config_of, rule_of
from optim_kernels._optimizers.storage import master_of

if TYPE_CHECKING:
    from optim_kernels.functional._muon_matrices import MuonTensors

Options = tuple[Hashable, ...]
# Options, dtypes and device; then alignment with tiles="shape", and the part's number with a workspace.
Key = tuple[Hashable, ...]
GroupEntries = tuple[Mapping[str, Any], list[MuonEntry]]


@dataclass
class Batch:
    """What one plan updates: tensors, and the groups whose hyperparameters they use.

    Args:
        nbytes_of_x: how many bytes of a workspace X takes.
    """

    groups: list[Mapping[str, Any]]
    tensors: list[MuonTensors]
    entries: list[MuonEntry]
    nbytes_of_x: int = 0

    def add(self, group: Mapping[str, Any], entry: MuonEntry, tensors: MuonTensors) -> None:
        """Take one more parameter; those of a group come one after the other."""
        if not self.groups or self.groups[-1] is not group:
            self.groups.append(group)
        number = len(self.groups) - 1
        self.entries.append(entry)
        self.tensors.append(tensors if number == 0 else replace(tensors, group=number))

    def parts(self, limit: int) -> list[Batch]:
        """The batch in parts of ``limit`` bytes of a workspace at most, or of one parameter; like matrices together."""
        from optim_kernels.functional._muon_batch_plan import workspace_of

        of_x, of_factors = zip(*workspace_of(self.tensors, **step_options_of(self.groups[0])))
        sizes = [sum(both) for both in zip(of_x, of_factors)]
        # parts of about one size, so that no small rest is left that does not fill a chip
        share = sum(sizes) / cdiv(sum(sizes), limit)
        parts: list[list[int]] = []
        taken = limit
        shapes = [sorted(tensors.param.shape) for tensors in self.tensors]
        for number in sorted(range(len(sizes)), key=lambda number: (shapes[number], sizes[number])):
            if taken >= share or taken + sizes[number] > limit:
                parts.append([])
                taken = 0
            parts[-1].append(number)
            taken += sizes[number]
        return [self._part(sorted(numbers), sum(of_x[number] for number in numbers)) for numbers in parts]

    def _part(self, numbers: Sequence[int], nbytes_of_x: int) -> Batch:
        used = dict.fromkeys(self.tensors[number].group for number in numbers)
        rows = {group: row for row, group in enumerate(used)}
        tensors = [replace(self.tensors[number], group=rows[self.tensors[number].group]) for number in numbers]
        entries = [self.entries[number] for number in numbers]
        return Batch([self.groups[group] for group in used], tensors, entries, nbytes_of_x)


def sorted_entries(
    entries: Sequence[GroupEntries], tiles: Tiles
) -> tuple[dict[Key, Batch], list[GroupEntries], list[str]]:
    """What grouped launches update, by plan; what plain torch updates; and why it does."""
    batches: dict[Key, Batch] = {}
    others: list[GroupEntries] = []
    reasons: list[str] = []
    for group, members in entries:
        options, ns, rest = shared_options(group), ns_config_of(group), []
        for entry in members:
            found = _tensors_or_reason(entry, group, ns)
            if isinstance(found, str):
                rest.append(entry)
                reasons.append(found)
            else:
                key = (options, *found.kind(tiles))
                batches.setdefault(key, Batch([], [], [])).add(group, entry, found)
        if rest:
            others.append((group, rest))
    return batches, others, reasons


def why_not_grouped(entry: MuonEntry, group: Mapping[str, Any]) -> str | None:
    """What keeps grouped launches from updating a parameter; ``None`` where they do."""
    found = _tensors_or_reason(entry, group, ns_config_of(group))
    return found if isinstance(found, str) else None


def _tensors_or_reason(entry: MuonEntry, group: Mapping[str, Any], ns: NSConfig) -> MuonTensors | str:
    """The tensors that grouped launches need to update a parameter, or the reason why they cannot."""
    reason = why_not_grouped_on(group["impl"], entry.param.device)
    if reason is not None:
        return reason
    # needs Triton
    from optim_kernels.functional._muon_matrices import MuonTensors, why_not_plan

    state = entry.state
    tensors = MuonTensors(
        param=entry.param,
        grad=entry.grad,
        momentum_buffer=state["momentum_buffer"],
        second_moment=state.get("second_momentum_buffer"),
        master=master_of(state),
        step=state.get("step") if group["stochastic_rounding"] else None,
        view=entry.view,
        place=entry.index,
        seed=group["seed"],
        name=entry.name,
    )
    return why_not_plan(tensors, ns) or tensors


def shared_options(group: Mapping[str, Any]) -> Options:
    """What all groups of a plan have in common."""
    return tuple(step_options_of(group).values())


def step_options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a plan of the group's parameters that say what it computes."""
    return {
        "rule": rule_of(group),
        "ns": ns_config_of(group),
        "variance": group["beta2"] is not None,
        # not NumPy's, with which numbers of launches do not add up
        "stochastic_rounding": bool(group["stochastic_rounding"]),
    }
