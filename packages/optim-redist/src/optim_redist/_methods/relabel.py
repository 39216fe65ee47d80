"""Which rank gets which part of the target, so that most data stays where it is.

Ranks of the target may be permuted freely if the caller only cares for the grid. The best permutation is a linear
assignment: giving part p (a place of the target's mesh) to rank r gains |S_r ∩ D_p|, and the sum is to be largest.
Solved by the Hungarian method with potentials, O(n³) for n ranks; above ``_EXACT`` ranks greedily, largest gain first.
"""

from __future__ import annotations

from optim_redist.layout import Layout, Mesh
from optim_redist.problem import Problem

_EXACT = 128


def relabelled(problem: Problem) -> Layout:
    """The target with its mesh's ranks permuted so that the fewest elements have to move; unchanged if none gains."""
    ranks = list(problem.dst.mesh.ranks)
    sizes = problem.dst_points
    points = [sizes.get(rank) for rank in ranks]
    gain = []
    for rank in ranks:
        src = problem.src_points.get(rank)
        row = [0 if src is None or point is None else problem.num_common(src, point) for point in points]
        gain.append(row)
    assignment = _assign(gain) if len(ranks) <= _EXACT else _assign_greedily(gain)
    now = sum(gain[k][k] for k in range(len(ranks)))
    best = sum(gain[r][p] for r, p in enumerate(assignment))
    if best <= now:
        return problem.dst
    rank_at = dict(zip(assignment, ranks))
    mesh = Mesh(problem.dst.mesh.sizes, problem.dst.mesh.names, [rank_at[place] for place in range(len(ranks))])
    return Layout(mesh, problem.dst.dims, problem.dst.partial)


def _assign(gain: list[list[int]]) -> list[int]:
    """For every row its column, each column once, with the largest total gain.

    Rows are added one by one; each grows a tree of tight edges (gain = u + v) until it finds a free column, and the
    potentials u, v stay feasible: u_r + v_c >= gain_rc.
    """
    n = len(gain)
    u, v = [0] * (n + 1), [0] * (n + 1)
    row_of = [0] * (n + 1)  # column -> row, 1-based; column 0 holds the row being added
    for row in range(1, n + 1):
        row_of[0] = row
        slack = [float("inf")] * (n + 1)
        came_from = [0] * (n + 1)
        visited = [False] * (n + 1)
        column = 0
        while row_of[column]:
            visited[column] = True
            current, delta, following = row_of[column], float("inf"), 0
            for c in range(1, n + 1):
                if visited[c]:
                    continue
                reduced = u[current] + v[c] - gain[current - 1][c - 1]
                if reduced < slack[c]:
                    slack[c], came_from[c] = reduced, column
                if slack[c] < delta:
                    delta, following = slack[c], c
            step = int(delta)
            for c in range(n + 1):
                if visited[c]:
                    u[row_of[c]] -= step
                    v[c] += step
                else:
                    slack[c] -= step
            column = following
        while column:
            row_of[column] = row_of[came_from[column]]
            column = came_from[column]
    assignment = [0] * n
    for c in range(1, n + 1):
        assignment[row_of[c] - 1] = c - 1
    return assignment


def _assign_greedily(gain: list[list[int]]) -> list[int]:
    n = len(gain)
    order = sorted((-gain[r][c], r, c) for r in range(n) for c in range(n) if gain[r][c])
    assignment, taken = [-1] * n, set()
    for _, row, column in order:
        if assignment[row] < 0 and column not in taken:
            assignment[row] = column
            taken.add(column)
    free = iter(c for c in range(n) if c not in taken)
    return [c if c >= 0 else next(free) for c in assignment]
