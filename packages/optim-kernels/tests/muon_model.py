"""What the user of a Muon optimizer knows of it, in float64: every group's options, every parameter's value and state.

A step moves them by `optim_kernels.reference` (by torch's AdamW in groups of that kind). What was compared with an
optimizer is taken over from it, so that one step is compared with one step, and rounding does not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from optim_kernels import NSConfig
from optim_kernels.reference import newton_schulz
from optim_kernels.reference.muon import MuonRule, direction_, lr_scale, momentum_, second_moment_shape, updated
from optim_utils.rounding import join_master

# By which key a state has a master of each kind; its number is part of the parameter's value here.
MASTERS = {"fp32": "master", "split16": "master_low"}
# Of an update of fp32 numbers, relative to its size.
ERROR = 1e-5


@dataclass
class Known:
    """A parameter; ``atol``: how far off its optimizer may be after a step, ``None`` where there was none."""

    value: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    atol: Tensor | None = None
    error: float = ERROR
    momentum_dtype: torch.dtype | None = None

    def muon(self, dtype: torch.dtype, grad: Tensor, options: dict[str, Any], factor: float) -> None:
        """A step of Muon for a parameter that is stored in ``dtype``."""
        self.convert(dtype, options, makes_masters=True)
        if "momentum_buffer" not in self.state:
            self.state["momentum_buffer"] = torch.zeros_like(self.value)
            self.momentum_dtype = options["momentum_dtype"] or grad.dtype
        if options["stochastic_rounding"]:
            self.state["step"] = self.state.get("step", 0.0) + 1
        # the kernels take the buffer as it is stored, rounded
        self.error = ERROR if self.momentum_dtype == torch.float32 else 5e-2
        self.atol = torch.zeros_like(self.value)
        chosen = ("nesterov", "row_equilibrate", "renormalize", "cautious", "maximize")
        rule = MuonRule(**{key: options[key] for key in chosen}, scale=options["adjust_lr_fn"] or "original")
        triples = NSConfig(coefficients=options["ns_coefficients"], steps=options["ns_steps"]).triples
        norm = {key: options[key] for key in ("norm_scale", "eps", "eps_mode")}
        lr, decay = float(options["lr"]), options["weight_decay"]
        gradient, buffer = grad.double().contiguous() * factor, self.state["momentum_buffer"]
        directions = matrices(momentum_(gradient, buffer, momentum=options["momentum"], rule=rule), options)
        parts = matrices(self.value, options), matrices(self.atol, options), self._moments(directions, options)
        for u, p, atol, v in zip(directions, *parts, strict=True):
            o = direction_(u, lambda x: newton_schulz(x, triples, **norm), rule, v, options["beta2"] or 0.0)
            scale = lr_scale(rule.scale, u.shape, self.value.shape)
            atol.add_(self.error * lr * scale)
            if rule.cautious:
                # decay hangs on a sign that is not clear
                atol.add_(lr * scale * decay * p.abs() * (o.abs() < self.error))
            p.copy_(updated(p, o, lr=lr, scale=scale, weight_decay=decay, cautious=rule.cautious))

    def _moments(self, directions: list[Tensor], options: dict[str, Any]) -> Sequence[Tensor | None]:
        """The second moments of each of the matrices."""
        if options["beta2"] is None:
            return [None] * len(directions)
        shapes = [torch.Size(second_moment_shape(u.shape)) for u in directions]
        sizes = [shape.numel() for shape in shapes]
        moment = self.state.setdefault("second_momentum_buffer", self.value.new_zeros(sum(sizes)))
        return [v.view(shape) for v, shape in zip(moment.view(-1).split(sizes), shapes, strict=True)]

    def adamw(self, grad: Tensor, options: dict[str, Any], factor: float) -> None:
        """A step of AdamW."""
        state = self.state
        for key in ("exp_avg", "exp_avg_sq"):
            state.setdefault(key, torch.zeros_like(self.value))
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
                size = known.abs().nan_to_num().amax() if known.numel() else torch.tensor(0.0)
                self._assert_close(ours.double(), known, ours.dtype, 0.5, error * size)
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
        # 1e-30: fp32 ends, before float64 does
        excess = (ours - known).abs() - max(units * torch.finfo(stored).eps, 1e-6) * known.abs() - atol - 1e-30
        assert not (excess > 0).any(), f"{ours} is not {known}"


def value_of(p: Tensor, state: dict[str, Any]) -> Tensor:
    """The parameter as exactly as the optimizer has it."""
    value = p.detach()
    if "master" in state:
        torch.testing.assert_close(value, state["master"].to(p.dtype), rtol=0, atol=0, equal_nan=True)
        value = state["master"]
    if "master_low" in state:
        value = join_master(value, state["master_low"])
    return value.double().contiguous().clone()


def matrices(tensor: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """The matrices, or batches of them, inside a contiguous tensor: views, which may be written to."""
    if options["views"] is not None:
        return [part.mT for part in tensor.split(options["views"][0].split, -1)]
    matrix = tensor.view(tensor.shape[0], -1) if is_flattened(tensor.shape, options["nd"]) else tensor
    rows = options["split_rows"]
    if rows is None:
        return [matrix]
    return [matrix.unflatten(-2, (-1, rows))] if isinstance(rows, int) else list(matrix.split(rows, -2))


def is_flattened(shape: Sequence[int], nd: str) -> bool:
    return len(shape) >= {"batch": 9, "flatten": 3, "convolution": 4}[nd]


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

    def step(self, dtype: torch.dtype, params: Sequence[nn.Parameter], factor: float) -> None:
        """The step that the gradients of ``params``, the members, ask for."""
        for known, p in zip(self.members, params, strict=True):
            grad = p.grad
            if grad is None and self.options.get("missing_grad") == "zero":
                grad = torch.zeros_like(p)
            if grad is not None and self.is_muon:
                known.muon(dtype, grad, self.options, factor)
            elif grad is not None:
                known.adamw(grad, self.options, factor)
