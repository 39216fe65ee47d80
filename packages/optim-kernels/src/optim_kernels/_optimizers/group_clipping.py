"""Clipping within a step, by the norm of all gradients of an optimizer; so all groups must have the same limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optim_kernels import reference
from optim_kernels._dtensors import has_dtensors, is_dtensor
from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._optimizers.base import StatefulOptimizer
from optim_kernels._options import are_numbers, check_scalars, check_values
from optim_kernels._tensor_lists import TensorList
from optim_kernels.reference.clip import result_dtype

# The largest norm, or None, and the order of the norm, which is 2 for groups that name none.
Clipping = tuple[float | None, float]


def _clipping_of(group: Mapping[str, Any]) -> Clipping:
    return group["max_norm"], group.get("norm_type", 2.0)


def check_limit(group: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the group has a limit, or ``None``, and it is that of the first group."""
    max_norm, norm_type = _clipping_of(group)
    check_scalars(norm_type=norm_type)
    check_values(group["params"], norm_type=norm_type, max_norm=max_norm)
    if norm_type != norm_type:
        raise ValueError(f"norm_type must be the order of a norm, got {norm_type}")
    if max_norm is not None:
        check_scalars(max_norm=max_norm)
        if not max_norm > 0:
            raise ValueError(f"max_norm must be positive or None, got {max_norm}")
    for option, wanted, found in zip(("max_norm", "norm_type"), _clipping_of(first), _clipping_of(group)):
        if found != wanted:
            raise ValueError(
                f"all groups are clipped together: {option} is {wanted} in the first group, but {found} in another; "
                "give it to the optimizer's constructor, or to all"
            )


def check_clipping(optimizer: StatefulOptimizer, group: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the group clips as the first group does, by a norm that one rank can compute."""
    check_limit(group, optimizer.param_groups[0])
    if group["max_norm"] is not None and any(map(is_dtensor, group["params"])):
        names = optimizer._parameter_names()
        name = next(names[param] for param in group["params"] if is_dtensor(param))
        raise ValueError(
            f"max_norm needs the gradients of all ranks, and {name} is a DTensor; clip with optim_dist, whose "
            "optimizers reduce the norm"
        )


def clipping_of_step(optimizer: StatefulOptimizer, grads: Sequence[Tensor | None]) -> Clipping:
    """The clipping that all groups now ask for; raises as `check_clipping` does, since options may have changed."""
    each = [_clipping_of(group) for group in optimizer.param_groups] or [(None, 2.0)]
    max_norm, norm_type = each[0]
    are_plain = are_numbers(number for pair in each for number in pair if number is not None)
    is_known_good = are_plain and (max_norm is None or (max_norm > 0 and not has_dtensors(grads)))
    if not is_known_good or any(other != each[0] for other in each):
        for group in optimizer.param_groups:
            check_clipping(optimizer, group)
        # as the constructor makes it: torch's norms take Python's numbers alone
        norm_type = float(norm_type)
    return max_norm, norm_type


def norm_and_factor(
    norms: GradientNorms,
    grads: Sequence[Tensor] | TensorList,
    max_norm: float,
    norm_type: float,
    grad_scale: Tensor | None,
    *,
    differentiable: bool = False,
) -> tuple[Tensor, Tensor]:
    """The norm of the gradients divided by ``grad_scale``, and the factor that clips that norm.

    Args:
        differentiable: whether autograd has to go through the factor; never through the norm.
    """
    if differentiable and not isinstance(grads, TensorList):
        with torch.enable_grad():
            norm = _differentiable_norm(grads, norm_type)
            norm = norm if grad_scale is None else norm / grad_scale.to(norm).reshape(())
            return norm.detach(), reference.clip_factor(norm, max_norm)
    norm, factor = norms.norm_and_factor(grads, norm_type, max_norm)
    if grad_scale is not None:
        norm = norm / grad_scale.to(norm).reshape(())
        factor = reference.clip_factor(norm, max_norm)
    return norm, factor


def _differentiable_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of the gradients' norms, for autograd.

    The root of a sum of squares, as it is computed elsewhere, has no finite derivative at 0.
    """
    # an empty tensor has no largest element
    filled = [grad for grad in grads if grad.numel()] or [grads[0].new_zeros(())]
    each = [torch.linalg.vector_norm(g, norm_type, dtype=torch.promote_types(g.dtype, torch.float64)) for g in filled]
    norm = torch.linalg.vector_norm(torch.stack([one.to(grads[0].device) for one in each]), norm_type)
    return norm.to(result_dtype(grads))
