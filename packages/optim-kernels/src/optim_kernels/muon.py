"""`TritonMuon`: momentum, orthogonalised by Newton–Schulz, for the matrices of a model.

A drop-in for ``torch.optim.Muon`` that also follows Keller Jordan's and nanochat's conventions (``VARIANTS``). The
formulas stand in `optim_kernels.reference.muon`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from optim_kernels._impl import Impl
from optim_kernels._optimizers.base import (
    check_capture,
    checked_factor,
    hooked_step,
    launches_line,
    log_fallback,
    run_closure,
    text_table,
)
from optim_kernels._optimizers.followed_writes import can_be_followed
from optim_kernels._optimizers.muon_entries import convert_loaded_state, entries_of, explained_entry
from optim_kernels._optimizers.muon_groups import (
    DEFAULTS,
    KELLER,
    VARIANTS,
    MasterWeights,
    MissingGrad,
    check_group,
    check_param,
    given_options,
    ns_config_of,
    variant_options,
    view_of,
)
from optim_kernels._optimizers.muon_planner import MuonPlanner, why_not_grouped
from optim_kernels._optimizers.plain_options import make_groups_plain
from optim_kernels._optimizers.private_state import PrivateState
from optim_kernels.functional._muon_workspace import workspace_for
from optim_kernels.orthogonalization import Coefficients, EpsMode, Method
from optim_utils.param_groups import MatrixView

if TYPE_CHECKING:
    from optim_kernels.functional.muon_plan import MuonPlan

__all__ = ["VARIANTS", "TritonMuon"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class MuonGroups(PrivateState, Optimizer):
    """What optimizers with Muon groups share: views of parameters as matrices, in and out of checkpoints."""

    _own_options = ("momentum_dtype", "master_weights", "impl")
    # The grouped launches: derived from groups and state, never saved.
    _planner: MuonPlanner
    _ns_workspace_mb: float | None = None
    # Reasons for plain torch that were logged already.
    _logged_fallbacks: frozenset[str] = frozenset()

    def _check_muon_group(self, group: dict[str, Any]) -> None:
        """Raise where Muon cannot take the group's options or one of its parameters."""
        check_group(group)
        names = self._parameter_names()
        for i, p in enumerate(group["params"]):
            check_param(p, group, names[p])
            view_of(p, group, i, names[p])
        self._forget_launches()

    def _forget_launches(self) -> None:
        """Drop the grouped launches; the next step makes them anew."""
        if "_planner" not in self.__dict__:
            self._planner = MuonPlanner(workspace=workspace_for(self._ns_workspace_mb))
        self._planner.forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget_launches()
        for group in self.param_groups:
            if self._is_muon(group):
                for key, value in DEFAULTS.items():
                    group.setdefault(key, value)
                self._check_muon_group(group)

    def __getstate__(self) -> dict[str, Any]:
        kept = {key: value for key, value in super().__getstate__().items() if key != "_planner"}
        return {**kept, "_ns_workspace_mb": self._ns_workspace_mb}

    def plans(self) -> list[MuonPlan]:
        """The grouped launches that the latest steps used; empty where plain torch does all."""
        return self._planner.plans

    def _is_muon(self, group: dict[str, Any]) -> bool:
        return True

    def _step_muon(self, groups: list[dict[str, Any]], **scaling: Tensor | None) -> None:
        """One step of Muon groups; ``scaling``: clip_factor, grad_scale, found_inf."""
        followed = self._with_masters(groups)
        if followed:
            self._writes.follow(followed, followed, [self._own_state[p]["master"] for p in followed])
        if not self._planner.repeat(groups, self._state_to_check(), **scaling):
            names = self._parameter_names()
            indices = dict(zip(names, count()))
            entries = [(group, entries_of(group, self._own_state, names, indices)) for group in groups]
            self._planner.step(entries, state=self._own_state, **scaling)
            self._log_fallbacks(self._planner.fallbacks)
        if any(group["master_weights"] == "fp32" for group in groups):
            self._writes.note_step(self._with_masters(groups))

    def _log_fallbacks(self, reasons: Iterable[str]) -> None:
        """Log each reason why plain torch updates parameters once."""
        new = frozenset(reasons) - self._logged_fallbacks
        self._logged_fallbacks |= new
        log_fallback(self, new)

    def _with_masters(self, groups: Sequence[dict[str, Any]]) -> list[Tensor]:
        """The parameters that have an fp32 master by now, and whose writes can be followed."""
        params = [p for group in groups if group["master_weights"] == "fp32" for p in group["params"]]
        return [p for p in params if "master" in self._own_state.get(p, {}) and can_be_followed(p)]

    def _needed_state(self, group: dict[str, Any]) -> Sequence[str]:
        return ("momentum_buffer",) if self._is_muon(group) else super()._needed_state(group)

    def _place_state(self, param: Tensor, group: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """The loaded state in the group's formats; the next step makes a master that is missing."""
        state = super()._place_state(param, group, saved)
        if self._is_muon(group):
            convert_loaded_state(param, group, state)
        return state

    def state_dict(self) -> dict[str, Any]:
        """A state dict as torch's; views and dtypes are in plain form, so that it loads with ``weights_only=True``."""
        # first, since the user's hooks may change the dict in any way
        with self.register_state_dict_post_hook(_as_saved, prepend=True):
            return super().state_dict()

    def _merged_group(self, index: int, mine: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """The saved group, completed from ours, with our views; raises if it was saved with other views."""
        merged = super()._merged_group(index, mine, saved)
        if mine.get("views") is not None:
            merged["views"] = mine["views"]
        if saved.get("views") is not None:
            loaded = [
                view if view is None or isinstance(view, MatrixView) else MatrixView.from_plain(view)
                for view in saved["views"]
            ]
            if loaded != list(mine.get("views") or [None] * len(loaded)):
                raise ValueError(
                    f"param_groups[{index}] was saved with views {loaded}, this optimizer has {mine.get('views')}; "
                    "construct it with the views of the checkpoint"
                )
        return merged


def _as_saved(_: Optimizer, content: dict[str, Any]) -> None:
    make_groups_plain(content)


class TritonMuon(MuonGroups):
    """Muon for the matrices ``[..., M, N]`` among a model's parameters.

    The first nine arguments are those of ``torch.optim.Muon``, with its order and defaults. The update is that of
    ``optim_kernels.reference.muon``.

    Args:
        ns_coefficients: a triple, a list of triples or a name of ``COEFFICIENTS``.
        adjust_lr_fn: ``None`` or ``"original"`` multiplies lr by √max(1, r/c), ``"match_rms_adamw"`` by 0.2 √max(r, c);
            ``"keller"`` takes r and c from the parameter's last two dimensions, ``"none"`` leaves lr alone.
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
        master_weights: MasterWeights | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        maximize: bool = False,
        capturable: bool = False,
        impl: Impl = "auto",
        ns_workspace_mb: float | None = None,
    ) -> None:
        given = locals()
        workspace_for(ns_workspace_mb)  # raises for values that it refuses
        self._ns_workspace_mb = ns_workspace_mb
        defaults = {key: given[key] for key in DEFAULTS if key != "views"}
        super().__init__(params, {**defaults, "views": None})

    @classmethod
    def keller(
        cls, params: Params, lr: float = 0.02, weight_decay: float = 0.0, momentum: float = 0.95, **ours: Any
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
        **ours: Any,
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; beside options it may name a ``variant``.

        An option of the variant applies unless the group has its own, or the constructor was given another value than
        its default.
        """
        if "variant" in param_group:
            given = given_options(self.defaults, VARIANTS[self._followed])
            param_group = {**variant_options(param_group["variant"]), **given, **param_group}
        super().add_param_group(param_group)
        try:
            self._check_muon_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    @hooked_step
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, clip_factor: Tensor | None = None) -> Any:
        """Update every parameter with a gradient, and others as ``missing_grad`` says; gradients are only read.

        Args:
            closure: recomputes the loss, which is returned.
            clip_factor: 0-d tensor that multiplies the gradients, see `clip.clip_factor`.
        """
        check_capture(self)
        clip_factor = checked_factor(clip_factor)
        loss = run_closure(closure)
        grad_scale, found_inf = self._loss_scaling()
        self._step_muon(self.param_groups, clip_factor=clip_factor, grad_scale=grad_scale, found_inf=found_inf)
        return loss

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
        return text_table(MUON_HEADER, rows, footer=footer)


MUON_HEADER = ("parameter", "shape", "matrices", "method", "path", "reason", "tiles", "Gflop")


def tiles_of(plans: Sequence[MuonPlan]) -> dict[int, str]:
    """The tiles of every parameter that grouped launches update, keyed by the parameter's id."""
    return {param: words for plan in plans for param, words in plan.tiles.items()}


def explain_row(
    name: str, place: int, group: dict[str, Any], state: Mapping[Tensor, dict[str, Any]], tiles: Mapping[int, str]
) -> list[object]:
    """The row of ``explain()`` for the Muon parameter at ``place`` in its group."""
    param = group["params"][place]
    view = view_of(param, group, place, name)
    config = ns_config_of(group).of(param)
    methods = sorted({config.method_for(min(shape[-2:]), max(shape[-2:])) for shape in view.shapes})
    reason = why_not_grouped(explained_entry(param, view, place, state.get(param) or {}), group)
    flops = sum(config.flops(*shape[-2:]) * shape[:-2].numel() for shape in map(torch.Size, view.shapes))
    return [
        name,
        tuple(param.shape),
        view.describe(),
        "+".join(methods),
        "triton" if reason is None else "torch",
        reason or "",
        tiles.get(id(param), "") if reason is None else "",
        f"{flops / 1e9:.3g}",
    ]
