"""One rank's transfers of the direct exchange and of relays, without listing those of other ranks.

All ranks together may have as many transfers as the square of their number, and each rank needs only its own. Two
numbers depend on other ranks' transfers. The first is where a box begins in the demand on source point i: the holders
divide this demand in the order of target points and needers, so this decides which holder sends the box. For the k-th
of q needers of target point j

    begin(i, j, k) = q · Σ_{j' < j} |B(i, j')| + k · |B(i, j)| - (elements before it that holders keep)

    Σ_{j' < j} |B(i, j')| = Σ_d  Π_{c<d} n_c(i_c, j_c) · Σ_{j' < j_d} n_d(i_d, j') · Π_{c>d} |A_c(i_c)|

The second is a box's number in the whole phase, which decides which rounds get the larger parts of the box.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, product

from optim_redist._inside import Part
from optim_redist._methods.chunked import in_rounds
from optim_redist._methods.direct import demands_of, stays
from optim_redist._methods.relay import relay_phases
from optim_redist.boxes import Box, cut, fair_shares, volume
from optim_redist.cost import Topology
from optim_redist.moves import FINISHED, Phase, Stage, Transfer
from optim_redist.problem import Point, Problem


def own_phases(problem: Problem, stage: Stage, topology: Topology, rank: int) -> tuple[list[Phase], list[bool]] | None:
    """One rank's transfers, round by round, and for every round whether it brings contributions to any rank.

    None if they depend on all transfers: if holders are asked by nearness, up to what all of them can send; in rounds
    of parts that several holders share, whose pieces are numbered after those of all senders before; and for methods
    that even out what ranks send, "forward" and "hierarchical".
    """
    reduces = problem.num_contributions > 1
    if stage.method == "relay":
        phases = relay_phases(problem, rank)
        parts = [part for phase in phases for part in in_rounds(problem, phase, stage.rounds)]
        return parts, [True] * stage.rounds + [False] * stage.rounds
    numbered = stage.rounds > 1 and not reduces
    if not is_in_order(problem, stage.method, topology) or (numbered and problem.src_replicas > 1):
        return None
    whole = Phase.of("exchange", [*stays(problem, (rank,)), *_dealt(problem, rank)])
    parts = in_rounds(problem, whole, stage.rounds, _numbers(problem, whole) if numbered else None)
    return parts, [reduces] * len(parts)


def is_in_order(problem: Problem, method: str, topology: Topology) -> bool:
    """Whether a method is one exchange in which the holders of a part divide the demand on it in order."""
    return method in ("direct", "nearest", "packed") and not (topology.levels and problem.src_replicas > 1)


def _dealt(problem: Problem, rank: int) -> Iterator[Transfer]:
    """What the rank sends and receives."""
    reduces = problem.num_contributions > 1
    src, dst = problem.src_points.get(rank), problem.dst_points.get(rank)
    if src is not None:
        own = problem.part_of[rank]
        holders, number = problem.holders[own], own[1] if reduces else FINISHED
        ends, begin = _ends(problem, own), 0
        for receiver, box in demands_of(problem, *own):
            for sender, piece in _pieces(box, begin, holders, ends):
                if sender == rank:
                    yield Transfer(rank, receiver, piece, contribution=number)
            begin += volume(box)
    for point, box in () if dst is None else problem.atoms_to(dst):
        for contribution in range(problem.num_contributions):
            part = point, contribution
            holders = problem.holders[part]
            if rank not in holders:
                begin = _begin(problem, part, rank) if len(holders) > 1 else 0
                for sender, piece in _pieces(box, begin, holders, _ends(problem, part)):
                    yield Transfer(sender, rank, piece, contribution=contribution if reduces else FINISHED)


def _ends(problem: Problem, part: Part) -> list[int]:
    """Where each holder's share of the demand on a part ends."""
    return list(accumulate(fair_shares(problem.demand(part), len(problem.holders[part]))))


def _pieces(box: Box, begin: int, holders: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """(holder, piece) of a box that begins ``begin`` elements into the demand, cut where the holders' shares end."""
    if len(holders) == 1:
        yield holders[0], box
        return
    stop = begin + volume(box)
    first, last = bisect_right(ends, begin), bisect_left(ends, stop)
    points = [0, *(end - begin for end in ends[first:last]), stop - begin]
    for holder, pieces in zip(holders[first:], cut(box, points)):
        yield from ((holder, piece) for piece in pieces)


def _begin(problem: Problem, part: Part, rank: int) -> int:
    """How many elements are asked of a part's holders before what the rank asks for."""
    src, dst = part[0], problem.dst_points[rank]
    before, meeting = 0, 1
    for o, i, j in zip(problem.overlaps, src, dst):
        before = before * o.src.sizes[i] + meeting * o.before[i][j]
        meeting *= o.common[i][j]
    needers = problem.needers[dst]
    kept = problem.num_kept
    return (
        before * problem.dst_replicas
        + meeting * needers.index(rank)
        - sum(kept[h] for h in problem.holders[part] if h in kept and (problem.dst_points[h], h) < (dst, rank))
    )


def _numbers(problem: Problem, phase: Phase) -> list[int]:
    """The numbers of these transfers in the whole phase, where every pair of ranks has at most one box."""
    rows = Receivers(problem)
    return [
        rows.first_number[t.sender] + bisect_left(rows.of(problem.src_points[t.sender]), t.receiver)
        for t in phase.transfers
    ]


class Receivers:
    """The ranks that receive from each sender, itself included, where every element has one holder.

    Attributes:
        first_number: for every sender, how many transfers the senders before it have.
    """

    def __init__(self, problem: Problem) -> None:
        self._needers = problem.needers
        # senders that meet the same target coordinates have the same receivers
        self._met = [[tuple(row) for row in o.common] for o in problem.overlaps]
        self._known: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        self.first_number: dict[int, int] = {}
        number = 0
        for rank in sorted(problem.src_points):
            self.first_number[rank] = number
            count = problem.dst_replicas
            for rows, i in zip(self._met, problem.src_points[rank]):
                count *= len(rows[i])
            number += count

    def of(self, point: Point) -> list[int]:
        """The receivers of what is at a source point, ascending."""
        met = tuple([rows[i] for rows, i in zip(self._met, point)])
        found = self._known.get(met)
        if found is None:
            found = self._known[met] = sorted(rank for dst in product(*met) for rank in self._needers[dst])
        return found
