"""What surrounds the update in every ``step``: hooks and profiles, ``no_grad``, the closure, checks of arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from optim_kernels._dtensors import whole
from optim_kernels._graphs import is_capturing_here
from optim_kernels._options import check_scalar_tensors
from optim_utils.compiling import not_compiled


def hooked_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """A ``step`` without gradients, with torch's hooks around it and its name in profiles, and not compiled.

    torch wraps every optimizer's step for hooks and profiles, and takes 10 µs for the name alone. Its wrapper is used
    here too, but entered only while a profiler runs or a hook is registered; and ``torch.no_grad()`` is replaced by
    what it calls, in a seventh of its time. A step that fails forgets what a ``GradScaler`` has told of its gradients:
    the scaler does so after a step that succeeds, and would multiply the next scale by what it finds.
    """
    with_hooks = Optimizer.profile_hook_step(torch.no_grad()(step))

    @wraps(step)
    def run(self: Optimizer, *args: object, **kwargs: object) -> Any:
        try:
            if (
                self._optimizer_step_pre_hooks
                or self._optimizer_step_post_hooks
                or torch_optimizer._global_optimizer_pre_hooks
                or torch_optimizer._global_optimizer_post_hooks
                or torch.autograd._profiler_enabled()
            ) and not _hooks_ran_outside(self, run):
                return with_hooks(self, *args, **kwargs)
            enabled = torch.is_grad_enabled()
            torch._C._set_grad_enabled(False)
            try:
                return step(self, *args, **kwargs)
            finally:
                torch._C._set_grad_enabled(enabled)
        except BaseException:
            for name in ("grad_scale", "found_inf"):
                vars(self).pop(name, None)
            raise

    # tells torch that the step needs no wrapper
    cast(Any, run).hooked = True
    return not_compiled(run)


def _hooks_ran_outside(optimizer: Optimizer, step: Callable[..., Any]) -> bool:
    """Whether ``step`` is called by a subclass's own step, which torch has wrapped."""
    outer = type(optimizer).step
    return getattr(outer, "hooked", False) and unwrap(outer, stop=lambda inner: inner is step) is not step


def begin_step(
    optimizer: Optimizer, closure: Callable[[], Any] | None, clip_factor: object
) -> tuple[Any, Tensor | None]:
    """The loss of ``closure``, run with gradients enabled, and the ``clip_factor``, a DTensor in full.

    Raises ``RuntimeError`` when the step is being captured into a graph and a group is not ``capturable``.
    """
    if is_capturing_here() and not all(group["capturable"] for group in optimizer.param_groups):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() is being captured into a CUDA graph, but capturable is False in at "
            "least one group; construct the optimizer with capturable=True"
        )
    check_scalar_tensors(clip_factor=clip_factor)
    factor: Tensor | None = whole(clip_factor)
    if closure is None:
        return None, factor
    with torch.enable_grad():
        return closure(), factor
