"""An exchange in several rounds, so that the buffers of one round fit into what memory is left.

Every box is cut into as many parts as there are rounds, along its first dimension that is long enough and else in
row-major ranges; round c moves part c of every box. Where boxes have fewer elements than there are rounds, their
parts start at different rounds, so that rounds stay alike.
"""

from __future__ import annotations

from math import prod

from optim_redist.boxes import Box, cut
from optim_redist.index_sets import size
from optim_redist.moves import Phase, Transfer


def in_rounds(phase: Phase, num_rounds: int) -> list[Phase]:
    """The phase as ``num_rounds`` phases that together make the same transfers."""
    if num_rounds == 1:
        return [phase]
    rounds: list[list[Transfer]] = [[] for _ in range(num_rounds)]
    for number, transfer in enumerate(phase.transfers):
        if transfer.sender == transfer.receiver:
            # local copies need no buffer: all in the first round
            rounds[0].append(transfer)
            continue
        points = _points(transfer.box, num_rounds, number % num_rounds)
        for taking, boxes in zip(rounds, cut(transfer.box, points)):
            taking += (Transfer(transfer.sender, transfer.receiver, box, transfer.read) for box in boxes)
    return [Phase.of(phase.name, transfers) for transfers in rounds]


def _points(box: Box, num_rounds: int, shift: int) -> list[int]:
    sizes = [size(indices) for indices in box]
    total = prod(sizes)
    unit = next((total // length for length in sizes if length >= 4 * num_rounds), 1)
    steps = total // unit
    points = [unit * ((steps * c + shift) // num_rounds) for c in range(num_rounds + 1)]
    return [0, *points[1:-1], total]
