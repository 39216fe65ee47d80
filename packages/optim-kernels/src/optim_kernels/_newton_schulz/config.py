"""What determines a Newton–Schulz run beside the matrix: coefficients, steps, method, dtype, norm."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from optim_kernels._newton_schulz.coefficients import Triple, resolve
from optim_kernels._options import check_python_numbers, is_one_of

Method = Literal["auto", "standard", "gram"]
EpsMode = Literal["clamp", "add"]
# What chooses the tiles of a matrix's products: its shape alone ("shape"), or also the size of the batch ("auto").
Tiles = Literal["auto", "shape"]
Coefficients = str | tuple[Triple, ...] | Sequence[float] | Sequence[Sequence[float]]

# (slope, n/m): up to that slope of the whole polynomial at 0, "auto" takes the Gram iteration from that n/m on. The
# slope is how much the iteration enlarges small singular values, and with them the rounding of R. Below 1.5 Gram wins
# no time; the other limits keep Gaussian matrices in fp16 within 2e-3 (2.5e-3 from slope 900) of fp64, see
# "Newton–Schulz and Muon" in the benchmarks' notes for the errors measured.
GRAM_ASPECTS = ((600.0, 1.5), (900.0, 3.0), (float("inf"), 4.0))
# Short side m from which "auto" takes the Gram iteration. A smaller Gaussian matrix may be so badly conditioned that
# Gram's errors are 1e-2, and its time is that of the launches, of which the standard iteration has fewer.
GRAM_SIDE = 256
# n/m from which a restart takes m×m products alone: 3 % fewer operations at 3, 10 % at 4, and X is read and written
# less often.
FACTORS_ASPECT = 3.0
# The largest m·slope² with which it does. What the tensor cores cut off from R's sums stays away, and the iteration
# enlarges it: the more, the steeper it is and the longer the sums are. Up to here matrices with singular values 1/i or
# 1/i² end at most 1.24 times as far off as by X; beyond, 1.3 times ("polar_express", slope 989, at 2048×8192) or 1.4
# times ("cans", 1,050).
FACTORS_LIMIT = 1.3e9
# The slope up to which `newton_schulz` does product by product. Where it gains time, "polar_express_gram" (804) would
# end 1.21 to 1.25 times as far off, "keller" (485) at most 1.1 times.
LONE_FACTORS_SLOPE = 490.0
# The largest slope of a Gram iteration's factor Q for a block of steps: Q's entries are as large as its slope, and fp16
# ends at 65,504.
LARGEST_SLOPE = 2.0**15
# The most steps in the first block, and in a later one, with which "auto" takes the Gram iteration. Rounding puts small
# eigenvalues of R below zero, where each step of a block enlarges them by a², until the factor leaves fp16.
MOST_STEPS = (2, 3)
# The short side from which the first step may take int8 (`int8_start`): one such matrix fills the chip for longer than
# launches take. The longest row, whose products' sum is below 2^31. And the set whose polynomials bear it.
INT8_SIDE, INT8_LENGTH, INT8_SET = 3584, 2**17, "keller"
COMPUTE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True)
class NSConfig:
    """Everything that determines a Newton–Schulz run beside the matrix; validated once.

    Args:
        coefficients: a name of ``COEFFICIENTS``, a triple, or a list of triples, one per step: a shorter list repeats
            its last triple, a longer one is cut. ``"cubic5"`` and ``"aol4"`` were tuned as a whole, for exactly 5 and 4
            steps.
        steps: how many, under 100.
        method: ``"auto"`` takes ``"gram"`` for fp16 operands and matrices with m ≥ 256 and n ≥ `gram_aspect` m, unless
            a block between restarts has more steps than rounding allows (``MOST_STEPS``); else ``"standard"``. In bf16
            the errors of ``"gram"`` are up to 4.6 times those of ``"standard"``; in fp32, which is chosen for small
            errors, 4 to 9 times for singular values from 1 to 1e-6.
        dtype: of the products' operands; ``None`` is fp16 on CUDA, where tensor cores accumulate in fp32, and elsewhere
            fp32 (fp64 for fp64 matrices). With ``None`` the kernels take large matrices' first standard step of
            ``"keller"`` in int8 on Hopper (`int8_start`), by which errors grow in matrices with few rows that are not
            zero. Kernels take an fp32 operand as the sum of two tf32 numbers, 23 bits; in the first two steps, which
            matter most, they multiply fp32 matrices in fp64 where that is fast.
        restarts: step numbers after which the Gram iteration forms R anew. ``None`` is after every second step, unless
            a single step would be left: ``(2,)`` up to five steps, ``(2, 4)`` for six and seven. ``"accurate"`` is
            after every second step from the first on. Numbers from ``steps`` on are ignored: a list may serve several
            numbers of steps. Longer blocks are faster, but with 16-bit operands four steps without a restart may be 25
            times as far from the exact result, and five or more leave fp16. Where one launch on Hopper runs the whole
            iteration, in steps of few matrices there, and up to the slope of ``"keller"`` where m×m products of few
            matrices fill the chip once (one of 2048×8192), a single restart of long matrices forms R from its factors
            (`chain_jobs`), unless they have too many rows for a steep set (``FACTORS_LIMIT``).
        norm_scale, eps, eps_mode: X = G / max(s‖G‖, eps) (``"clamp"``) or G / (s‖G‖ + eps) (``"add"``).
    """

    coefficients: Coefficients = "keller"
    steps: int = 5
    method: Method = "auto"
    dtype: torch.dtype | None = None
    restarts: tuple[int, ...] | Literal["accurate"] | None = None
    norm_scale: float = 1.0
    eps: float = 1e-7
    eps_mode: EpsMode = "clamp"

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if not isinstance(self.coefficients, str):
            # at least one triple: an empty tuple would not be valid coefficients
            object.__setattr__(self, "coefficients", resolve(self.coefficients, max(self.steps, 1)))
        if not is_one_of(self.method, get_args(Method)):
            raise ValueError(f"method must be one of {get_args(Method)}, got {self.method!r}")
        if not is_one_of(self.dtype, (None, *COMPUTE_DTYPES)):
            raise ValueError(
                f"the dtype of products (compute_dtype, ns_dtype) must be None or one of {COMPUTE_DTYPES}, got "
                f"{self.dtype!r}"
            )
        if not is_one_of(self.eps_mode, get_args(EpsMode)):
            raise ValueError(f"eps_mode must be one of {get_args(EpsMode)}, got {self.eps_mode!r}")
        for name in ("norm_scale", "eps"):
            # not a tensor, whose value may change after this config was looked up
            if not isinstance(getattr(self, name), Real):
                raise ValueError(f"{name} must be a number, got {getattr(self, name)!r}")
            check_python_numbers((name,), (getattr(self, name),))
        if not self.eps >= 0:
            raise ValueError(f"eps must be at least 0, got {self.eps}")
        if not self.norm_scale > 0:
            raise ValueError(f"norm_scale must be above 0, got {self.norm_scale}")
        # Triton may compile an int into a kernel, which is kept for other numbers too
        object.__setattr__(self, "norm_scale", float(self.norm_scale))
        object.__setattr__(self, "eps", float(self.eps))
        restarts = restart_steps(self.restarts, self.steps)
        if not isinstance(restarts, list | tuple) or not all(isinstance(step, int) for step in restarts):
            raise ValueError(f"restarts must be None, 'accurate' or step numbers, got {self.restarts!r}")
        if any(later <= earlier for earlier, later in zip((0, *restarts), restarts)):
            raise ValueError(f"restarts must be increasing step numbers from 1, got {self.restarts!r}")
        object.__setattr__(self, "restarts", tuple(restarts))
        self.triples  # noqa: B018  (an unknown name, or a wrong number of steps for it, is found here)

    @cached_property
    def triples(self) -> tuple[Triple, ...]:
        """(a, b, c) of every step."""
        return resolve(self.coefficients, self.steps)

    @property
    def row_factors(self) -> bool:
        """Whether the first Gram matrix supplies row factors ``rsqrt(Σ_j |A_ij|)`` (the set ``"aol4"``)."""
        return self.coefficients == "aol4"

    @cached_property
    def blocks(self) -> tuple[tuple[Triple, ...], ...]:
        """The triples between restarts of the Gram iteration."""
        assert isinstance(self.restarts, tuple)
        cuts = [0, *(after for after in self.restarts if after < self.steps), self.steps]
        return tuple(self.triples[start:stop] for start, stop in pairwise(cuts) if start < stop)

    def method_for(self, m: int, n: int) -> Literal["standard", "gram"]:
        """The iteration that a matrix with short side ``m`` and long side ``n`` takes."""
        if self.method == "auto":
            if self.dtype not in (None, torch.float16):
                return "standard"
            first, *later = self.blocks or ((),)
            fits = len(first) <= MOST_STEPS[0] and all(len(block) <= MOST_STEPS[1] for block in later)
            fits = fits and all(_slope(block) <= LARGEST_SLOPE for block in self.blocks)
            return "gram" if fits and m >= GRAM_SIDE and n >= self.gram_aspect * m else "standard"
        return self.method

    @cached_property
    def gram_aspect(self) -> float:
        """n/m from which ``"auto"`` takes the Gram iteration: 1.5, 3 or 4, the steeper the polynomial the larger."""
        slope = _slope(self.triples)
        return next(aspect for limit, aspect in GRAM_ASPECTS if slope <= limit)

    @cached_property
    def restarts_alone_in_factors(self) -> bool:
        """Whether matrices may do so product by product and outside of steps, too, where they `restarts_in_factors`."""
        return _slope(self.triples) <= LONE_FACTORS_SLOPE

    def restarts_in_factors(self, m: int, n: int) -> bool:
        """Whether matrices in fp16 may restart the Gram iteration by m×m products (`chain_jobs`)."""
        is_possible = self.method_for(m, n) == "gram" and self.dtype in (None, torch.float16) and len(self.blocks) == 2
        # row factors would have to scale both numbers of R
        is_possible = is_possible and not self.row_factors
        return is_possible and n >= FACTORS_ASPECT * m and m * _slope(self.triples) ** 2 <= FACTORS_LIMIT

    def may_start_in_int8(self, m: int, n: int) -> bool:
        """Whether m×n matrices take the first step in int8 on Hopper, however many they are (`int8_start`)."""
        fits = m >= INT8_SIDE and n <= INT8_LENGTH
        if self.dtype is not None or not fits or self.norm_scale < 1.0 or self.steps < 2:
            return False
        return set(self.triples) == set(resolve(INT8_SET, 1)) and self.method_for(m, n) == "standard"

    def flops(self, rows: int, columns: int) -> int:
        """Flops for one ``rows × columns`` matrix, with symmetric halves counted once and restarts that form XXᵀ."""
        m, n = sorted((rows, columns))
        cube, rectangle = m**3, m * m * n  # a symmetric m×m product; a symmetric XXᵀ (SX and QX take two)
        if self.method_for(m, n) == "standard":
            return sum(3 * rectangle + (cube if c != 0.0 else 0) for _, _, c in self.triples)
        total = 0
        for block in self.blocks:
            squares = sum(1 for _, _, c in block if c != 0.0)
            total += 3 * rectangle + cube * (squares + 2 * (len(block) - 1) + len(block) - 1)
        return total

    def compute_dtype(self, x: Tensor) -> torch.dtype:
        """The dtype of the operands of every product for input ``x``."""
        if self.dtype is not None:
            return self.dtype
        if x.is_cuda:
            return torch.float16
        return torch.float64 if x.dtype == torch.float64 else torch.float32

    def of(self, x: Tensor) -> NSConfig:
        """This config with the dtype that it has for input ``x``: what depends on the dtype takes ``None`` for fp16."""
        return self if self.dtype is not None or x.is_cuda else replace(self, dtype=self.compute_dtype(x))


def check_steps(steps: object) -> None:
    """Raise ``ValueError`` for a bad number of steps, also for 5.0 or True, which a cache takes for 5 and 1."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps < 100:
        raise ValueError(f"steps must be an int from 0 to 99, got {steps!r}")


def check_tiles(tiles: str) -> None:
    """Raise ``ValueError`` unless ``tiles`` is one of `Tiles`."""
    if tiles not in get_args(Tiles):
        raise ValueError(f"tiles must be one of {get_args(Tiles)}, got {tiles!r}")


def restart_steps(restarts: object, steps: int) -> Any:
    """The option ``restarts`` of `NSConfig`, with ``None`` and ``"accurate"`` as step numbers."""
    if restarts is None:
        return tuple(range(2, max(steps - 1, 3), 2))
    if isinstance(restarts, str) and restarts == "accurate":
        return tuple(range(1, max(steps, 4), 2))
    return restarts


def _slope(triples: Sequence[Triple]) -> float:
    """The slope at 0 of the polynomial of these steps: how much it enlarges the smallest singular values."""
    return prod(abs(a) for a, _, _ in triples)


@lru_cache(maxsize=256)
def config_of(*values: Any) -> NSConfig:
    """The config whose fields have the `values_of` these, in their order: one object for values that come again."""
    return NSConfig(**dict(zip(_FIELDS, values, strict=True)))


def values_of(
    coefficients: object,
    steps: object,
    method: object,
    dtype: object,
    restarts: object,
    norm_scale: object,
    eps: object,
    eps_mode: object,
) -> tuple[Any, ...]:
    """The fields of an `NSConfig` as keys of caches: lists become tuples.

    To a cache 5.0, True and Decimal(5) are 5. So fields of the wrong type are refused here, whatever it has seen.
    """
    are_plain = (
        type(steps) is int
        and type(norm_scale) in _NUMBERS
        and type(eps) in _NUMBERS
        and type(method) is str
        and type(eps_mode) is str
        and (dtype is None or type(dtype) is torch.dtype)
        and (restarts is None or type(restarts) is str or _are_steps(restarts))
    )
    coefficients = _hashable(coefficients)
    # while a call is traced, its operator's fake looks at them
    if not are_plain and not torch.compiler.is_compiling():
        given = (coefficients, steps, method, dtype, restarts, norm_scale, eps, eps_mode)
        NSConfig(**dict(zip(_FIELDS, given, strict=True)))  # type: ignore[arg-type]
    return coefficients, steps, method, dtype, _hashable(restarts), norm_scale, eps, eps_mode


_NUMBERS = (float, int)
_PLAIN = (float, int, str, type(None))
_FIELDS = tuple(field.name for field in fields(NSConfig))


def _are_steps(restarts: object) -> bool:
    return isinstance(restarts, (list, tuple)) and all(type(step) is int for step in restarts)


def _hashable(value: object) -> Any:
    """Coefficients or restarts, which may be lists, of lists perhaps, as tuples."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    if not isinstance(value, Hashable):
        raise TypeError(
            "coefficients are a name or tuples and lists of numbers, got a "
            f"{type(value).__name__}; of an array give its .tolist()"
        )
    return value
