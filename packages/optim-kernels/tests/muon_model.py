"""What the user of a Muon optimizer knows of it, in float64: every group's options, every parameter's value and state.

A step moves them by Muon's formulas, written out here once more (by torch's AdamW in groups of that kind). What was
compared with an optimizer is taken over from it, so that one step is compared with one step, and rounding does not add
up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import Any

import torch
from random_tensors import DEVICE
from torch import Tensor, nn
from torch.optim.adamw import adamw

from optim_kernels import COEFFICIENTS
from optim_utils.param_groups import MatrixView
from optim_utils.rounding import join_master

# By which key a state has a master of each kind; its number is part of the parameter's value here.
MASTERS = {"fp32": "master", "split16": "master_low"}
# Of an update of fp32 numbers, relative to its size.
ERROR = 1e-5


@dataclass
class Known:
    """A parameter; ``atol``: how far off its optimizer may be after a step, ``None`` where there was none.

    ``terms``: the largest of the numbers that made the first moment, which may have cancelled.
    """

    value: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    atol: Tensor | None = None
    error: float = ERROR
    terms: float = 0.0
    momentum_dtype: torch.dtype | None = None

    def muon(
        self, dtype: torch.dtype, grad: Tensor, options: dict[str, Any], factor: float, view: MatrixView | None = None
    ) -> None:
        """A step of Muon for a parameter that is stored in ``dtype``."""
        self.convert(dtype, options, makes_masters=True)
        if "momentum_buffer" not in self.state:
            self.state["momentum_buffer"] = torch.zeros_like(self.value)
            self.momentum_dtype = options["momentum_dtype"] or grad.dtype
        if options["stochastic_rounding"]:
            self.state["step"] = self.state.get("step", 0.0) + 1
        # rounding grows as the smallest of the singular values do, and the kernels take the buffer as it is stored
        growth = max(1.0, prod(a for a, _, _ in triples_of(options)) / 33)
        self.error = growth * (ERROR if self.momentum_dtype in (torch.float32, torch.float64) else 5e-2)
        self.atol = torch.zeros_like(self.value)
        g = grad.double().contiguous() * (-factor if options["maximize"] else factor)
        momentum, buffer = options["momentum"], self.state["momentum_buffer"]
        self.terms = largest(g) + largest(buffer)
        buffer.copy_(momentum * buffer + (1 - momentum) * g)
        u = (1 - momentum) * g + momentum * buffer if options["nesterov"] else buffer
        places = matrices(self.value.shape, options, view)
        value, allowed = self.value.view(-1), self.atol.view(-1)
        for place, v in zip(places, self._moments(places, options), strict=True):
            o, p = direction(u.reshape(-1)[place], v, options), value[place]
            step_size = float(options["lr"]) * lr_scale(options["adjust_lr_fn"], place.shape, self.value.shape)
            allowed[place] = self.error * step_size
            if options["cautious"]:
                # decay hangs on a sign that is not clear
                allowed[place] += step_size * options["weight_decay"] * p.abs() * (o.abs() < self.error)
                value[place] = p - step_size * (o + options["weight_decay"] * p * (o * p >= 0))
            else:
                value[place] = p * (1 - float(options["lr"]) * options["weight_decay"]) - step_size * o

    def _moments(self, places: list[Tensor], options: dict[str, Any]) -> Sequence[Tensor | None]:
        """The second moments of each of the matrices."""
        if options["beta2"] is None:
            return [None] * len(places)
        shapes = [(*b, r, 1) if r >= c else (*b, 1, c) for *b, r, c in (place.shape for place in places)]
        sizes = [prod(shape) for shape in shapes]
        moment = self.state.setdefault("second_momentum_buffer", self.value.new_zeros(sum(sizes)))
        return [v.view(shape) for v, shape in zip(moment.view(-1).split(sizes), shapes, strict=True)]

    def adamw(self, grad: Tensor, options: dict[str, Any], factor: float) -> None:
        """A step of AdamW."""
        state = self.state
        for key in ("exp_avg", "exp_avg_sq"):
            state.setdefault(key, torch.zeros_like(self.value))
        self.terms = largest(grad) * factor + largest(state["exp_avg"])
        count = torch.tensor(state.get("step", 0.0))
        adamw(
            [self.value],
            [grad.double().contiguous() * factor],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [count],
            foreach=False,
            amsgrad=False,
            beta1=options["betas"][0],
            beta2=options["betas"][1],
            lr=float(options["lr"]),
            weight_decay=options["weight_decay"],
            eps=options["eps"],
            maximize=options["maximize"],
        )
        state["step"] = float(count)
        self.atol = torch.full_like(self.value, ERROR * float(options["lr"]))

    def convert(self, dtype: torch.dtype, options: dict[str, Any], *, makes_masters: bool) -> None:
        """Into the storage that a Muon group's options ask for by now."""
        kept = [self.state.pop(key) for key in MASTERS.values() if key in self.state]
        if options["master_weights"] is not None and (kept or makes_masters):
            self.state[MASTERS[options["master_weights"]]] = ...
        elif kept:
            self.value = self.value.to(dtype).double()
        if options["momentum_dtype"] is not None and "momentum_buffer" in self.state:
            self.momentum_dtype = options["momentum_dtype"]
            self.state["momentum_buffer"] = self.state["momentum_buffer"].to(self.momentum_dtype).double()

    def note_new_states(self, dtype: torch.dtype, state: dict[str, Any], options: dict[str, Any]) -> None:
        """After a step that did nothing: states may have been made, or converted."""
        if "momentum_buffer" in state and _is_converted(state, options):
            self.convert(dtype, options, makes_masters=True)
            self.momentum_dtype = state["momentum_buffer"].dtype
        for key in state.keys() - self.state.keys():
            self.state[key] = 0.0 if key == "step" else torch.zeros_like(state[key], dtype=torch.float64)

    def compare(self, p: Tensor, state: dict[str, Any], options: dict[str, Any]) -> None:
        """The optimizer's numbers with these, which become the optimizer's."""
        assert state.keys() == self.state.keys()
        value = value_of(p, state)
        stored = torch.float32 if {*MASTERS.values()} & state.keys() else p.dtype
        # a whole unit where rounding is up to chance
        units = 1.0 if options.get("stochastic_rounding") else 0.5
        self._assert_close(value, self.value, stored, units, self.atol)
        for key, ours in state.items():
            if key == "step":
                assert float(ours) == self.state[key]
            elif key not in MASTERS.values():
                known = self.state[key].view(ours.shape)
                error = self.error if key == "second_momentum_buffer" else 1e-6
                size = self.terms if key in ("momentum_buffer", "exp_avg") else largest(known)
                self._assert_close(ours.double(), known, ours.dtype, 0.5, torch.tensor(error * size))
                self.state[key] = ours.double().contiguous().clone()
        assert "momentum_buffer" not in state or state["momentum_buffer"].dtype == self.momentum_dtype
        self.value, self.atol = value, None

    def _assert_close(
        self, ours: Tensor, known: Tensor, stored: torch.dtype, units: float, atol: Tensor | None
    ) -> None:
        if self.atol is None or atol is None:
            torch.testing.assert_close(ours, known, rtol=0, atol=0, equal_nan=True)
            return
        assert torch.equal(ours.isnan(), known.isnan())
        # where 16 bits end, and fp32 before float64 does
        smallest = max(torch.finfo(stored).smallest_normal * torch.finfo(stored).eps, 1e-30)
        excess = (ours - known).abs() - max(units * torch.finfo(stored).eps, 1e-6) * known.abs() - atol - smallest
        assert not (excess > 0).any(), f"{ours} is not {known}"


def largest(x: Tensor) -> float:
    return float(x.double().nan_to_num().abs().amax()) if x.numel() else 0.0


def value_of(p: Tensor, state: dict[str, Any]) -> Tensor:
    """The parameter as exactly as the optimizer has it."""
    value = p.detach()
    if "master" in state:
        torch.testing.assert_close(value, state["master"].to(p.dtype), rtol=0, atol=0, equal_nan=True)
        value = state["master"]
    if "master_low" in state:
        value = join_master(value, state["master_low"])
    return value.double().contiguous().clone()


def direction(u: Tensor, v: Tensor | None, options: dict[str, Any]) -> Tensor:
    """The update O of the matrices ``u [..., r, c]``; ``v``, NorMuon's second moments, moves."""
    *_, r, c = u.shape
    if options["row_equilibrate"]:
        u = u * (norm(u) / sqrt(max(1, r)) / u.norm(dim=-1, keepdim=True).clamp(min=1e-6))
    o = newton_schulz(u, options)
    if options["renormalize"]:
        o = o * sqrt(min(r, c)) / norm(o).clamp(min=1e-6)
    if v is None:
        return o
    squares = o.square().sum(-1 if r >= c else -2, keepdim=True) / max(1, min(r, c))
    v.copy_(options["beta2"] * v + (1 - options["beta2"]) * squares)
    scaled = o / v.clamp(min=1e-10).sqrt()
    return scaled * norm(o) / norm(scaled).clamp(min=1e-10)


def newton_schulz(x: Tensor, options: dict[str, Any]) -> Tensor:
    """Of ``x [..., r, c]`` in its dtype; r×r factors from the left, whichever side is the longer."""
    size, eps = options["norm_scale"] * norm(x), options["eps"]
    size = size + eps if options["eps_mode"] == "add" else size.clamp(min=eps)
    x = x / torch.where(size == 0, 1.0, size)
    for a, b, c in triples_of(options):
        gram = x @ x.mT
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return x


def triples_of(options: dict[str, Any]) -> list[tuple[float, float, float]]:
    """One for every step; the last of too few is repeated."""
    given = options["ns_coefficients"]
    triples = COEFFICIENTS[given] if isinstance(given, str) else [given] if isinstance(given[0], float) else given
    return [triples[min(i, len(triples) - 1)] for i in range(options["ns_steps"])]


def norm(x: Tensor) -> Tensor:
    """Of each matrix."""
    return x.square().sum((-2, -1), keepdim=True).sqrt()


def lr_scale(rule: str | None, matrix: Sequence[int], parameter: Sequence[int]) -> float:
    r, c = (parameter if rule == "keller" else matrix)[-2:]
    if not r or not c or rule == "none":
        return 1.0
    if rule == "match_rms_adamw":
        return 0.2 * sqrt(max(r, c))
    return sqrt(r / c if rule == "spectral_unclamped" else max(1.0, r / c))


def matrices(shape: Sequence[int], options: dict[str, Any], view: MatrixView | None = None) -> list[Tensor]:
    """The matrices ``[..., r, c]`` inside a contiguous tensor of this shape: each element's place in it."""
    places = torch.arange(prod(shape), device=DEVICE).view(tuple(shape))
    if view is not None:
        places = places.permute(view.order or tuple(range(len(shape))))
        places = places.reshape(view.matrix_shape or places.shape)
        parts = list(places.split(view.split, view.split_dim)) if view.split else [places]
        parts = [part.mT if view.transposed else part for part in parts]
        return [part.unflatten(-2, (heads, -1)) for part, heads in zip(parts, view.num_heads)] or parts
    if is_flattened(shape, options["nd"]):
        places = places.view(shape[0], -1)
    rows = options["split_rows"]
    if rows is None:
        return [places]
    return [places.unflatten(-2, (-1, rows))] if isinstance(rows, int) else list(places.split(rows, -2))


def is_flattened(shape: Sequence[int], nd: str | None) -> bool:
    return len(shape) >= {None: 9, "batch": 9, "flatten": 3, "convolution": 4}[nd]


def _is_converted(state: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether a state is stored as the options ask for."""
    wanted = set() if options["master_weights"] is None else {MASTERS[options["master_weights"]]}
    dtype = options["momentum_dtype"]
    return {*MASTERS.values()} & state.keys() == wanted and dtype in (None, state["momentum_buffer"].dtype)


@dataclass
class Group:
    """A group: its options as they were told, and its parameters."""

    options: dict[str, Any]
    members: list[Known]

    @property
    def is_muon(self) -> bool:
        return self.options.get("kind") != "adamw"

    def step(self, params: Sequence[nn.Parameter], factor: float) -> None:
        """The step that the gradients of ``params``, the members, ask for."""
        for i, (known, p) in enumerate(zip(self.members, params, strict=True)):
            grad = p.grad
            if grad is None and p.requires_grad and self.options.get("missing_grad") == "zero":
                grad = torch.zeros_like(p)
            if grad is not None and self.is_muon:
                views = self.options["views"]
                known.muon(p.dtype, grad, self.options, factor, None if views is None else views[i])
            elif grad is not None:
                known.adamw(grad, self.options, factor)
