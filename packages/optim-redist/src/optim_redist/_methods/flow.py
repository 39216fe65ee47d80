"""Maximum flow in a small network, by Dinic's method: augment along all shortest paths, then look for longer ones."""

from __future__ import annotations

from collections.abc import Hashable

Node = Hashable
Network = dict[Node, dict[Node, int]]


def add_edge(network: Network, a: Node, b: Node, capacity: int) -> None:
    """Add ``capacity`` to the edge from a to b."""
    out = network.setdefault(a, {})
    out[b] = out.get(b, 0) + capacity
    network.setdefault(b, {}).setdefault(a, 0)


def saturate(network: Network, source: Node, sink: Node) -> int:
    """Push as much as possible from source to sink; the network becomes its residual. Returns the amount.

    The flow from a to b is then the capacity from b to a, if that was 0 before.
    """
    network.setdefault(source, {})
    total = 0
    while sink in (levels := _levels(network, source)):
        untried = {node: list(reversed(network[node])) for node in levels}
        while amount := _push(network, source, sink, sum(network[source].values()), levels, untried):
            total += amount
    return total


def _levels(network: Network, source: Node) -> dict[Node, int]:
    """Every node that can be reached, with the least number of edges to it."""
    levels = {source: 0}
    frontier = [source]
    while frontier:
        following = []
        for node in frontier:
            for other, room in network[node].items():
                if room and other not in levels:
                    levels[other] = levels[node] + 1
                    following.append(other)
        frontier = following
    return levels


def _push(
    network: Network, node: Node, sink: Node, amount: int, levels: dict[Node, int], untried: dict[Node, list[Node]]
) -> int:
    """Push up to ``amount`` from a node to the sink, a level per edge; edges that lead nowhere are not tried again."""
    if node == sink or not amount:
        return amount
    pushed, out, others = 0, network[node], untried[node]
    while others:
        other = others[-1]
        if out[other] and levels.get(other) == levels[node] + 1:
            more = _push(network, other, sink, min(amount - pushed, out[other]), levels, untried)
            out[other] -= more
            network[other][node] += more
            pushed += more
            if pushed == amount:
                # this edge may have room for more
                return pushed
        others.pop()
    return pushed
