"""Every group of ranks fetches each missing element once, then shares it inside.

Level by level from the outermost: if no rank of a group holds an element that the group needs, one of its needers
fetches it; inside the group the next level does the same, from holders in the group or from the needer that fetched.
So what enters a group is exactly In(group), the bound, and still no rank receives more than it needs.

The needers of one target point in one group share what the group must fetch for them in equal parts; no other rank
could fetch it without receiving more than it needs, so the busiest one's share is the least possible. The holders
that are asked divide the sending so that, with what they have to send besides, they send equally much. Holders inside
a group that would send more than the bound leave some of it to needers of the same elements: see ``forward``.

A transfer that reads a source tensor runs in the first phase; one that reads what a fetcher received in phase p runs in
phase p+1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from optim_redist._methods.direct import Demand, deal, level_shares, share, stays
from optim_redist._methods.forward import Asked, relieved
from optim_redist.boxes import Box, volume
from optim_redist.cost import Topology
from optim_redist.lower_bounds import bounds_of
from optim_redist.moves import Phase, Transfer
from optim_redist.problem import Point, Problem


@dataclass(frozen=True)
class _Available:
    """Where a box is available: at its source holders (phase -1), or at the one rank that received it in a phase."""

    ranks: tuple[int, ...]
    since: int


def hierarchical_phases(problem: Problem, topology: Topology) -> list[Phase]:
    """One phase per level that has to fetch, and one for what is shared inside the innermost groups.

    It reduces nothing: plans with reductions go through several layouts, see ``reduce_inside``.
    """
    return _Draft(problem, topology).phases()


class _Draft:
    """The phases under construction: transfers that are decided, and what is still asked of holders."""

    def __init__(self, problem: Problem, topology: Topology) -> None:
        self.problem, self.topology = problem, topology
        self.transfers: list[list[Transfer]] = [[*stays(problem)]]
        # demands on the same holders are dealt out together, so that the holders' shares are equal
        self.asked: dict[tuple[Point, tuple[int, ...]], list[Demand]] = {}
        # boxes that ranks ask of holders in their own innermost group
        self.inside: list[Asked] = []
        # elements that ranks send so far
        self.sending = dict.fromkeys(problem.ranks, 0)

    def phases(self) -> list[Phase]:
        for dst, needers in self.problem.needers.items():
            self._fetch_groups(dst, needers)
        for hop, transfers in enumerate(relieved(self.inside, bounds_of(self.problem).lb, self.sending)):
            self._in_phase(hop).extend(transfers)
        # fewest holders first: larger sets can make up for what smaller ones have to send anyway
        for (_, holders), demands in sorted(self.asked.items(), key=lambda item: len(item[0][1])):
            total = sum(volume(box) for _, box in demands)
            dealt, _ = deal(demands, holders, level_shares(total, [self.sending.get(rank, 0) for rank in holders]))
            for sender, (receiver, box) in dealt:
                self.transfers[0].append(Transfer(sender, receiver, box))
                self.sending[sender] += volume(box)
        names = ["fetch", *("share" for _ in self.transfers[1:])]
        return [Phase.of(name, transfers) for name, transfers in zip(names, self.transfers)]

    def _fetch_groups(self, dst: Point, needers: list[int]) -> None:
        """Serve the ranks at one target point with all that they need and do not hold."""
        missing: list[tuple[Box, Point, _Available]] = []
        for src, box in self.problem.atoms_to(dst):
            missing.append((box, src, _Available(tuple(self.problem.holders[src, 0]), -1)))
        self._spread(missing, needers, len(self.topology.levels) - 1)

    def _spread(self, missing: list[tuple[Box, Point, _Available]], needers: list[int], level: int) -> None:
        """Serve needers of the same boxes from where these are available, one level of groups at a time."""
        if level < 0:
            for box, _, available in missing:
                ranks = tuple(rank for rank in needers if rank not in available.ranks)
                if available.since < 0 and ranks:
                    self.inside.append(Asked(available.ranks, box, ranks))
                elif ranks:
                    self._share(box, available, ranks)
            return
        groups: dict[int, list[int]] = {}
        for rank in needers:
            groups.setdefault(self.topology.levels[level].group_of(rank), []).append(rank)
        for group, members in groups.items():
            inside: list[tuple[Box, Point, _Available]] = []
            outside: list[tuple[tuple[Point, _Available], Box]] = []
            for box, src, available in missing:
                here = tuple(r for r in available.ranks if self.topology.levels[level].group_of(r) == group)
                if here:
                    inside.append((box, src, _Available(here, available.since)))
                else:
                    outside.append(((src, available), box))
            for fetcher, (src, available), box in _deal_out(outside, members):
                since = self._fetch(fetcher, box, src, available)
                inside.append((box, src, _Available((fetcher,), since)))
            self._spread(inside, members, level - 1)

    def _fetch(self, receiver: int, box: Box, src: Point, available: _Available) -> int:
        """Schedule one transfer into a group; returns the phase in which it runs."""
        if available.since < 0:
            self.asked.setdefault((src, available.ranks), []).append((receiver, box))
            return 0
        self._share(box, available, (receiver,))
        return available.since + 1

    def _share(self, box: Box, available: _Available, ranks: Sequence[int]) -> None:
        """Schedule the transfers of a box from the one rank that has fetched it to ``ranks``."""
        (fetcher,) = available.ranks
        self._in_phase(available.since + 1).extend(Transfer(fetcher, rank, box, "dst") for rank in ranks)
        self.sending[fetcher] += volume(box) * len(ranks)

    def _in_phase(self, phase: int) -> list[Transfer]:
        while len(self.transfers) <= phase:
            self.transfers.append([])
        return self.transfers[phase]


def _deal_out(
    wanted: list[tuple[tuple[Point, _Available], Box]], members: list[int]
) -> list[tuple[int, tuple[Point, _Available], Box]]:
    """Each member's equal share of the boxes."""
    keyed = [(k, box) for k, (_, box) in enumerate(wanted)]
    return [(member, wanted[k][0], box) for member, (k, box) in share(keyed, members)]
