"""Curves of seconds over bytes: from measurements, between the measured points, and the best line below them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import chain, combinations, pairwise
from math import exp, inf, log
from typing import Any

from optim_redist.errors import RedistError

Curve = tuple[tuple[float, float], ...]  # (bytes, seconds), bytes ascending

# of a library, those that do steps; a model may have no curve for some of them
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


def as_curve(op: str, given: Any) -> Curve:
    """What was measured of a collective as floats, monotone.

    Raises:
        RedistError: for what is no curve.
    """
    measured = (*COLLECTIVES, "send_recv")
    if op not in measured:
        raise RedistError(f"curves are of {measured}, got one of {op!r}")
    try:
        # an iterator has nothing left for a second look
        given = tuple(given)
        usable = all(0 < num_bytes < inf and 0 < seconds < inf for num_bytes, seconds in given)
        points = [(float(num_bytes), float(seconds)) for num_bytes, seconds in given]
    except (TypeError, ValueError, OverflowError):
        usable = False
    if not usable or any(a[0] > b[0] for a, b in pairwise(points)):
        raise RedistError(f"the curve of {op} is (bytes, seconds) above 0, finite, bytes ascending, got {given}")
    return monotone(points)


def monotone(points: Iterable[tuple[float, float]]) -> Curve:
    """The curve through (bytes, seconds), each time raised to at least those of smaller sizes."""
    found, latest = [], 0.0
    for num_bytes, seconds in sorted(points):
        latest = max(latest, seconds)
        found.append((num_bytes, latest))
    return tuple(found)


def curve_from_bus_rates(num_ranks: int, rates: Mapping[int, float], *, reduces_twice: bool = False) -> Curve:
    """(bytes received, seconds) from measured bus bandwidths, keyed by buffer size per rank in bytes.

    A buffer of S bytes on each of n ranks moves (n - 1)/n · S per rank, twice that in an all-reduce.
    """
    share = (num_ranks - 1) / num_ranks * (2 if reduces_twice else 1)
    return monotone((share * size, share * size / rate) for size, rate in rates.items())


def interpolate(curve: Curve, num_bytes: float) -> float:
    """Seconds at a size: log-log between measured points, flat below the first, above the last at its bandwidth."""
    k = bisect_left(curve, (num_bytes,))
    if k == 0:
        return curve[0][1]
    if k == len(curve):
        return curve[-1][1] * num_bytes / curve[-1][0]
    (b0, s0), (b1, s1) = curve[k - 1], curve[k]
    weight = log(num_bytes / b0) / log(b1 / b0)
    return exp((1 - weight) * log(s0) + weight * log(s1))


def latency_and_bandwidth(curve: Curve, curves: Iterable[Curve] = ()) -> tuple[float, float]:
    """Seconds α, bytes per second β of the line α + b/β below all ``curves`` that is nearest to ``curve``, in shares of
    its times.

    A line below all measured points is below ``interpolate`` everywhere: between two points the interpolation is
    straight in log-log coordinates, and there the line is convex. So no predicted time is below a bound by α and β.
    """
    points = [*curve, *chain.from_iterable(curves)]
    # the best line below all points goes through two of them, or through one and the origin
    lines = [(0.0, min(seconds / num_bytes for num_bytes, seconds in points))]
    for (b0, s0), (b1, s1) in combinations(sorted(points), 2):
        if b0 < b1 and s0 < s1:
            slope = (s1 - s0) / (b1 - b0)
            lines.append((s0 - slope * b0, slope))
    under = [
        (alpha, slope)
        for alpha, slope in lines
        if alpha >= 0 and all(alpha + slope * num_bytes <= seconds * (1 + 1e-12) for num_bytes, seconds in points)
    ]
    alpha, slope = max(under, key=lambda line: sum((line[0] + line[1] * b) / s for b, s in curve))
    # a margin, so that rounding puts no line above the curve
    hair = 1 - 1e-9
    return alpha * hair, 1 / (slope * hair)
