"""What `TritonAdamW` and `TritonMuonAdamW` share: AdamW's step, prepared once for many, and the norm they clip by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._graphs import is_capturing
from optim_kernels._optimizers.adamw_parts import Group
from optim_kernels._optimizers.adamw_state import NEEDED, laid_out, zero_state
from optim_kernels._optimizers.adamw_step import PreparedStep
from optim_kernels._optimizers.inference import out_of_inference_mode
from optim_kernels._optimizers.private_state import PrivateState
from optim_kernels._optimizers.storage import drop_other_masters, missing_master
from optim_kernels._tensor_lists import TensorList


class AdamWOptimizer(PrivateState):
    """An optimizer with AdamW groups, which may clip by the norm of all its gradients."""

    # Returns those options of a group on which a prepared step depends.
    _planned_options: Callable[[Group], Any]
    # Derived from groups and state, never saved.
    _norms: GradientNorms
    _prepared: PreparedStep | None = None

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients in the latest step, before clipping: a 0-d tensor."""
        return self._shared.grad_norm

    @grad_norm.setter
    def grad_norm(self, norm: Tensor | None) -> None:
        self._shared.grad_norm = norm

    def _prepared_for(
        self, groups: list[Group], params: list[Tensor], grads: list[Tensor | None]
    ) -> tuple[PreparedStep, TensorList]:
        """The step of these groups, prepared for an earlier one or anew, and the gradients that kernels will read.

        Whatever does not fit is refused here, before anything moves.
        """
        known, self._prepared = self._prepared, None
        # among the kernels' gradients, a sparse one fails in ``look_at``
        if (
            known is None
            or not known.is_for(groups, params, grads, self._state_to_check())
            or not known.with_torch.have_dense_gradients()
        ):
            # it keeps states alive that others may have dropped, and new ones may take as much memory
            known = None
            known = self._prepare(groups, params, grads)
        try:
            seen = known.look_at(grads)
        except RuntimeError:
            # no address: a gradient has become sparse, for which the next line raises a better error
            self._prepare(groups, params, grads)
            raise
        if not known.fits(seen):
            known = self._prepare(groups, params, grads)
        self._prepared = known
        known.with_torch.refuse_unfit(grads, self._parameter_names)
        return known, seen

    @out_of_inference_mode
    def _prepare(self, groups: list[Group], params: list[Tensor], grads: list[Tensor | None]) -> PreparedStep:
        """Sort the parameters that have gradients by what updates them, make their states, and plan the launch."""
        names = self._parameter_names()
        group_of = [group for group in groups for _ in group["params"]]
        indices: list[int] = []
        reasons: list[str] = []
        for index, (param, grad, group) in enumerate(zip(params, grads, group_of, strict=True)):
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} takes dense gradients, but that of {names[param]} is {grad.layout}; make "
                    "it dense (sparse=False in nn.Embedding) or give the parameter to torch.optim.SparseAdam"
                )
            reason = self._make_ready(param, grad, group, names[param])
            if reason is None:
                indices.append(index)
            else:
                reasons.append(reason)
        self._log_fallbacks(reasons)
        return PreparedStep(groups, params, grads, self._own_state, indices, options=self._planned_options, names=names)

    def _make_ready(self, param: Tensor, grad: Tensor, group: Group, name: str) -> str | None:
        """Make what the state of a parameter lacks; return what keeps the kernels from it, or ``None``.

        Raises for what no step of the group can update.
        """
        raise NotImplementedError

    def _ensure_state(
        self, param: Tensor, group: Group, name: str, *, step_device: torch.device, for_kernels: bool
    ) -> None:
        """Make what the state of ``param`` lacks, in the layout and on the devices that the step needs.

        The kernels go through parameter and moments in one order, that of the parameter in memory. What the state has
        without any moments is Muon's, of a parameter that was in one of its groups.
        """
        state = self._own_state[param]
        made = {} if state.keys() >= {*NEEDED} else zero_state(param, group, step_device=step_device)
        made |= missing_master(param, group, state)
        moved = laid_out(param, state) if for_kernels else {}
        if (made or moved) and is_capturing(param.device):
            what = (
                f"{name} has no state yet ({', '.join(made)})"
                if made
                else f"{' and '.join(moved)} of {name} have another order in memory than it has"
            )
            raise RuntimeError(
                f"{type(self).__name__}.step() is being captured into a CUDA graph, but {what}, and every replay would "
                "make them anew; run a step before the capture"
            )
        state.update(moved | made)
        drop_other_masters(group, state)
        # in fp32, as the kernels take it: a user may have cast whole states, and a loaded count is on the CPU
        state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=step_device)

    def _count_launches(self) -> int:
        """How many launches of kernels AdamW's part of the latest step took, and the norm."""
        kernels = None if self._prepared is None else self._prepared.kernels
        is_clipping = any(group["max_norm"] is not None for group in self.param_groups)
        return (0 if kernels is None else kernels.plan.num_launches) + is_clipping * self._norms.num_launches
