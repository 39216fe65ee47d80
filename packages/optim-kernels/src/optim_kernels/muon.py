"""`TritonMuon`: momentum, orthogonalized by Newton–Schulz, for the matrices of a model.

A drop-in for ``torch.optim.Muon`` that also follows Keller Jordan's and nanochat's conventions (``VARIANTS``). The
formulas stand in `optim_kernels.reference.muon`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from optim_kernels._impl import Impl
from optim_kernels._optimizers.explaining import launches_line, text_table
from optim_kernels._optimizers.muon_base import MuonOptimizer
from optim_kernels._optimizers.muon_explain import HEADER, explain_row, tiles_of
from optim_kernels._optimizers.muon_options import (
    DEFAULTS,
    KELLER,
    VARIANTS,
    MissingGrad,
    check_muon_group,
    given_options,
    variant_options,
)
from optim_kernels._optimizers.private_state import of_its_own
from optim_kernels._optimizers.stepping import begin_step, hooked_step
from optim_kernels._optimizers.storage import MasterWeights
from optim_kernels.orthogonalization import Coefficients, EpsMode, Method
from optim_utils.compiling import not_compiled

__all__ = ["VARIANTS", "TritonMuon"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class TritonMuon(MuonOptimizer):
    """Muon for the matrices ``[..., M, N]`` among a model's parameters.

    The first nine arguments are those of ``torch.optim.Muon``, with its order and defaults. The update is that of
    ``optim_kernels.reference.muon``.

    Args:
        ns_coefficients: a triple, a list of triples or a name of ``COEFFICIENTS``.
        adjust_lr_fn: ``None`` or ``"original"`` multiplies lr by √max(1, r/c), ``"match_rms_adamw"`` by 0.2 √max(r, c),
            ``"spectral_unclamped"`` by √(r/c), of each matrix; ``"keller"`` is ``"original"`` with r and c from the
            parameter's last two dimensions, ``"none"`` leaves lr alone.
        ns_method, ns_dtype, ns_restarts, norm_scale, eps_mode: see `NSConfig`.
        nd: how tensors of four and more dimensions are read: ``"batch"`` as a batch over the last two, ``"flatten"``
            and ``"convolution"`` as one matrix (out, the rest). Three dimensions are a batch, except that
            ``"flatten"`` flattens them too. ``None`` refuses four and more.
        split_rows: a block size (heads) or sizes (Q, K, V): each block of rows is a matrix of its own.
        missing_grad: what to do about a parameter without a gradient: ``"skip"`` it, take its gradient as ``"zero"``,
            or ``"raise"``. If it is frozen, it is always skipped.
        beta2: NorMuon's variance normalisation; ``None`` leaves it out.
        row_equilibrate, renormalize, cautious: steps of nanochat's Muon, each on its own.
        momentum_dtype: of the momentum buffer; ``None`` is the gradient's.
        master_weights: ``"fp32"`` or ``"split16"`` masters of 16-bit parameters. They follow what others write to the
            parameters between steps; fp32 masters do not see writes by way of ``param.data``, nor between replays of a
            CUDA graph.
        stochastic_rounding: round bf16 parameters at random, with bits chosen by ``seed``.
        maximize, capturable: as in torch's optimizers: climb; the step may be captured into a CUDA graph.
        ns_workspace_mb: the memory that Newton–Schulz may take at a time, in units of 2^20 bytes, or more if a single
            parameter needs it; ``None``: as much as all matrices take together, some 6 bytes an element in 16-bit
            dtypes. With a limit, parts of the parameters are stepped in turn in one memory: parts that do not fill the
            chip cost time, and a parameter's bits depend on which others are in its part.
        impl: ``"auto"``, ``"torch"`` or ``"triton"``; the last raises, in the first step, where the kernels cannot run.

    Raises:
        ValueError: an option out of its range, or a parameter that cannot be read as matrices.
        TypeError: something else in place of a number.
    """

    _followed = "torch"  # the variant whose options stand for those not given

    @not_compiled
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = KELLER,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_method: Method = "auto",
        ns_dtype: torch.dtype | None = None,
        ns_restarts: tuple[int, ...] | Literal["accurate"] | None = None,
        norm_scale: float = 1.0,
        eps_mode: EpsMode = "clamp",
        nd: Literal["batch", "flatten", "convolution"] | None = None,
        split_rows: int | Sequence[int] | None = None,
        missing_grad: MissingGrad = "skip",
        beta2: float | None = None,
        row_equilibrate: bool = False,
        renormalize: bool = False,
        cautious: bool = False,
        momentum_dtype: torch.dtype | None = None,
        master_weights: MasterWeights = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        maximize: bool = False,
        capturable: bool = False,
        impl: Impl = "auto",
        ns_workspace_mb: float | None = None,
    ) -> None:
        given = locals()
        self._make_planner(ns_workspace_mb)
        # what is no argument here is none of the defaults: ``type(o)(params, **o.defaults)`` builds such an optimizer
        super().__init__(params, {key: given[key] for key in DEFAULTS if key in given})

    @classmethod
    def keller(
        cls, params: Params, lr: float = 0.02, weight_decay: float = 0.0, momentum: float = 0.95, **ours: object
    ) -> TritonMuon:
        """Keller Jordan's ``SingleDeviceMuon``, with its arguments; ``ours`` are further options."""
        return cls._following("keller", params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, **ours})

    @classmethod
    def nanochat(
        cls,
        params: Params,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        **ours: object,
    ) -> TritonMuon:
        """nanochat's ``Muon`` of 2025, with its arguments; ``ours`` are further options."""
        given = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
        return cls._following("nanochat-2025", params, {**given, **ours})

    @classmethod
    def _following(cls, variant: str, params: Params, given: dict[str, Any]) -> TritonMuon:
        """An optimizer whose arguments default to the options of a variant."""
        options = variant_options(variant)
        options.pop("views")
        optimizer = cls.__new__(cls)
        optimizer._followed = variant  # before the first groups come
        cls.__init__(optimizer, params, **{**options, **given})
        return optimizer

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_followed": self._followed}

    @not_compiled
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; beside options it may name a ``variant``.

        An option of the variant applies unless the group has its own, or the constructor was given another value than
        its default.
        """
        # anything but a dict is left to torch, which refuses it
        if isinstance(param_group, dict):
            if "variant" in param_group:
                given = given_options(self.defaults, VARIANTS[self._followed])
                param_group = {**variant_options(param_group["variant"]), **given, **param_group}
            # the parameters' own, so there is no default of the optimizer's
            param_group.setdefault("views", None)
        super().add_param_group(param_group)
        try:
            check_muon_group(self.param_groups[-1], self._parameter_names())
        except Exception:
            self.param_groups.pop()
            raise

    @hooked_step
    def step(self, closure: Callable[[], Any] | None = None, *, clip_factor: Tensor | None = None) -> Any:
        """Update every parameter with a gradient, and others as ``missing_grad`` says; gradients are only read.

        Args:
            closure: recomputes the loss, which is returned.
            clip_factor: 0-d tensor that multiplies the gradients, see `clip.clip_factor`.
        """
        loss, clip_factor = begin_step(self, closure, clip_factor)
        grad_scale, found_inf = self._loss_scaling()
        self._step_muon(self.param_groups, clip_factor=clip_factor, grad_scale=grad_scale, found_inf=found_inf)
        return loss

    @of_its_own
    def explain(self) -> str:
        """A table of the parameters: how they are read as matrices, which iteration they take, and what computes it.

        Tiles (of X Xᵀ / m×m products / products with X) and launches are those of the latest step.
        """
        plans, names = self.plans(), self._parameter_names()
        tiles = tiles_of(plans)
        rows = [
            explain_row(names[p], place, group, self._own_state, tiles)
            for group in self.param_groups
            for place, p in enumerate(group["params"])
        ]
        footer = [launches_line(sum(plan.launches for plan in plans))] if plans else []
        return text_table(HEADER, rows, footer=footer)
