"""Maximum flow in a small network, by augmenting along shortest paths."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

Network = dict[Hashable, dict[Hashable, int]]


def add_edge(network: Network, a: Hashable, b: Hashable, capacity: int) -> None:
    """Room for ``capacity`` more from a to b."""
    out = network.setdefault(a, {})
    out[b] = out.get(b, 0) + capacity
    network.setdefault(b, {}).setdefault(a, 0)


def saturate(network: Network, source: Hashable, sink: Hashable) -> int:
    """Push as much as possible from source to sink; the network becomes its residual. Returns the amount.

    What flows from a to b is then what its capacity has lost.
    """
    total = 0
    while (path := _shortest_path(network, source, sink)) is not None:
        amount = min(network[a][b] for a, b in path)
        for a, b in path:
            network[a][b] -= amount
            network[b][a] += amount
        total += amount
    return total


def _shortest_path(network: Network, source: Hashable, sink: Hashable) -> list[tuple[Hashable, Hashable]] | None:
    came_from: dict[Hashable, Hashable] = {source: source}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        for other, room in network.get(node, {}).items():
            if room and other not in came_from:
                came_from[other] = node
                if other == sink:
                    path = []
                    while other != source:
                        path.append((came_from[other], other))
                        other = came_from[other]
                    return path[::-1]
                queue.append(other)
    return None
