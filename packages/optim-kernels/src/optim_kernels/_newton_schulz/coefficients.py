"""The triples (a, b, c) of Newton–Schulz iterations ``X ← aX + bAX + cA²X``, each set with its source.

A set that is shorter than the number of steps repeats its last triple.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TypeAlias

Triple: TypeAlias = tuple[float, float, float]


def _with_safety(triples: Sequence[Triple], factor: float) -> tuple[Triple, ...]:
    """Triples of the polynomial ``p(x / factor)``: an argument up to ``factor`` too large stays in the basin."""
    return tuple((a / factor, b / factor**3, c / factor**5) for a, b, c in triples)


COEFFICIENTS: dict[str, tuple[Triple, ...]] = {
    # Keller Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024): steepest at zero.
    "keller": ((3.4445, -4.7750, 2.0315),),
    # @YouJiacheng, in the same post's follow-up: six-digit triples that differ from step to step.
    "you": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Polar Express, arXiv 2505.16932, as tuned in modded-nanogpt and nanochat (norm_scale 1.02 or 1.01).
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # Polar Express, unmodified, with a safety factor of 1.05 in place of a scaled norm: the set of Gram iterations.
    "polar_express_gram": _with_safety(
        (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        ),
        1.05,
    ),
    # CANS (Chebyshev-accelerated), arXiv 2506.10935. Each polynomial maps its interval onto all of what the next one
    # can bring back. So with 16-bit operands a matrix of few rows, whose errors do not average out, may grow without
    # bound, whatever its norm was divided by (6 or 8 Gaussian rows; fp16 is off by up to 6 times the result, bf16 by
    # 1e6).
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    # Cubic steps, arXiv 2606.00371: c = 0 saves the product A². Tuned as a whole, so exactly five of them.
    "cubic5": (
        (3.3656576, -3.3420992, 0.0),
        (2.5744352, -1.4957376, 0.0),
        (2.5368962, -1.4312570, 0.0),
        (2.4418906, -1.2764040, 0.0),
        (2.2230472, -0.9630650, 0.0),
    ),
    # Turbo-Muon: almost-orthogonal-layer row factors, taken from the first Gram matrix, buy one step.
    "aol4": (
        (4.6051, -9.6552, 5.6769),
        (4.7505, -6.0861, 2.1790),
        (2.7763, -2.3190, 0.5523),
        (2.4231, -2.2861, 0.8193),
    ),
}

# Sets that were optimised for one number of steps.
EXACT_STEPS = {"cubic5": 5, "aol4": 4}


def resolve(coefficients: str | Sequence[float] | Sequence[Sequence[float]], steps: int) -> tuple[Triple, ...]:
    """The ``steps`` triples of a named set, of one triple, or of a list of triples."""
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            raise ValueError(f"unknown coefficients {coefficients!r}; choose one of {sorted(COEFFICIENTS)}")
        if steps != EXACT_STEPS.get(coefficients, steps):
            raise ValueError(f"coefficients {coefficients!r} take {EXACT_STEPS[coefficients]} steps, got {steps}")
        triples = COEFFICIENTS[coefficients]
    else:
        rows = list(coefficients) if isinstance(coefficients, Sequence) else []
        if rows and not isinstance(rows[0], Sequence):
            rows = [rows]
        if not rows or not all(map(_is_triple, rows)):
            raise ValueError(
                "coefficients are a name, a triple (a, b, c) of finite numbers or a list of triples, got "
                f"{coefficients!r}"
            )
        triples = tuple((float(row[0]), float(row[1]), float(row[2])) for row in rows)  # type: ignore[index]
    return tuple(triples[min(i, len(triples) - 1)] for i in range(steps))


def _is_triple(row: object) -> bool:
    # no tensors, whose values may change after this was looked up
    if not isinstance(row, Sequence) or len(row) != 3:
        return False
    return all(isinstance(number, Real) and math.isfinite(number) for number in row)
