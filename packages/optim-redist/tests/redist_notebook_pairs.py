"""Random pairs that the notebook's redistributors can be asked about, and a search through everything beside theirs."""

import heapq
import random
from math import inf, prod

from optim_redist import MultiAxisDist
from optim_redist._multi_axis.moves import max_block_size

MESHES = [(4,), (8,), (2, 2), (2, 4), (4, 2), (4, 4), (2, 2, 2), (4, 2, 4), (2, 4, 2), (3, 2), (2, 3, 2)]


def random_dist(rng: random.Random, mesh, shape) -> MultiAxisDist:
    while True:
        mapping = [[] for _ in shape]
        for axis in rng.sample(range(len(mesh)), len(mesh)):
            if rng.random() < 0.75:
                mapping[rng.randrange(len(shape))].append(axis)
        procs = [prod(mesh[axis] for axis in axes) for axes in mapping]
        if all(p <= n for p, n in zip(procs, shape)):
            limits = [max_block_size(n, p) for n, p in zip(shape, procs)]
            blocks = [
                rng.choice([b for b in (1, 2, 4, -(-n // p)) if b <= limit])
                for n, p, limit in zip(shape, procs, limits)
            ]
            return MultiAxisDist(mesh, mapping, blocks)


def random_pairs(seed: int, number: int, meshes=MESHES, max_dims=4):
    rng = random.Random(seed)
    for _ in range(number):
        mesh = rng.choice(meshes)
        unit = prod(mesh)
        shape = tuple(
            rng.choice([unit, 2 * unit, unit + rng.choice([0, 1, 2, 3, 5])]) for _ in range(rng.randint(2, max_dims))
        )
        yield shape, random_dist(rng, mesh, shape), random_dist(rng, mesh, shape)


def cheapest_by_exhaustion(shape, start, target, price, limit=inf, max_depth=None) -> float:
    """Dijkstra over every compatible distribution that any block length of the planner's choice leads to."""
    leap_size = target.maxNumElements(shape)
    queue, done, order = [(0.0, 0, 0, start)], set(), 0
    while queue:
        cost, depth, _, dist = heapq.heappop(queue)
        if dist == target:
            return cost
        key = (dist, depth if max_depth is not None else 0)
        if key in done or depth == max_depth:
            continue
        done.add(key)
        moves = dist.neighbours(shape, [*start.blockSizes, *target.blockSizes])
        elements = dist.maxNumElements(shape)
        if elements >= leap_size:
            moves.append(("exchange_*", target, elements, target.numProcessors))
        for name, result, volume, n_procs in moves:
            if result == target or result.maxNumElements(shape) <= limit:
                step = 0.0 if name.startswith("split") else price(name, n_procs, volume)
                order += 1
                heapq.heappush(queue, (cost + step, depth + 1, order, result))
    return inf
