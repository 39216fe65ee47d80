"""Global gradient norms and clipping without a host synchronisation.

    norm    = (Σ |g|^p)^(1/p)  over all gradients;  p = 2 unless said otherwise
    factor  = min(1, max_norm / (norm + 1e-6))
    g      <- factor · g

The functions take torch's arguments and mean what torch's mean, with three differences: the norm of bf16 gradients is
an fp32 number (torch returns bf16, three digits), the kernels do not write gradients when the factor is 1 (plain torch,
on a CPU, multiplies by 1), and the factor stays on the device, where an optimizer's ``step(clip_factor=...)`` reads it
instead of a pass over the gradients. Under ``torch.compile`` they are plain torch, traced with what is around them.
"""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_ as clip_grads_by_torch_
from torch.nn.utils import get_total_norm as total_norm_by_torch

from optim_kernels import reference
from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._memory import has_overlaps
from optim_kernels._options import check_scalar_tensors

__all__ = [
    "clip_factor",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "compute_global_grad_norm",
    "get_total_norm",
    "sum_of_squares",
]

Tensors = Tensor | Iterable[Tensor]

_NORMS = GradientNorms(any_stream=True)


def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale the gradients down in place to a total norm of at most ``max_norm``; return their norm before.

    The arguments are torch's; norm and errors are those of `get_total_norm`.
    """
    _check_numbers(max_norm=max_norm, norm_type=norm_type)
    parameters = _parameters(parameters)
    gradients = _gradients(parameters)
    if foreach is None and gradients and not error_if_nonfinite:
        # kernels only, which autograd does not see; entering no_grad would cost the host a tenth of the call
        clipped = _NORMS.clip_(gradients, float(norm_type), max_norm)
        if clipped is not None:
            return clipped
    norm = get_total_norm(gradients, norm_type, error_if_nonfinite, foreach)
    clip_grads_with_norm_(parameters, max_norm, norm, foreach)
    return norm


def compute_global_grad_norm(
    parameters: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """The norm of the gradients of ``parameters``, skipping those without a gradient; nothing is changed."""
    return get_total_norm(_gradients(_parameters(parameters)), norm_type, error_if_nonfinite, foreach)


def get_total_norm(
    tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """The norm of all tensors as if they were one vector: 0-d, fp32 (fp64 if a tensor is), on the first one's device.

    Args:
        norm_type: the order p; ``inf`` for the largest magnitude; 0 counts, as in torch, tensors that are not zero.
        foreach: as in torch: ``True`` asks for its foreach functions, whose norm is in the tensors' own dtype;
            ``False`` for one call a tensor.

    Raises:
        RuntimeError: with ``error_if_nonfinite`` (which synchronises), if the norm is NaN or infinite.
        TypeError: something else in place of a tensor, or of a number: leave out parameters without a gradient.
    """
    _check_numbers(norm_type=norm_type)
    tensors, norm_type = _as_list(tensors), float(norm_type)
    try:
        if foreach is None and tensors and not error_if_nonfinite:
            norm = _NORMS.norm_in_one_launch(tensors, norm_type)
            if norm is not None:
                return norm
        return _total_norm(tensors, norm_type, error_if_nonfinite, foreach)
    except AttributeError:
        _refuse_others(tensors, name="tensors", instead="leave out what has no gradient")
        raise


@torch.no_grad()
def _total_norm(tensors: list[Tensor], norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> Tensor:
    if foreach:
        # not torch.nn.utils.get_total_norm: a program may put the one here in its place
        norm = total_norm_by_torch(tensors, norm_type, False, True)
    elif foreach is None and tensors:
        norm = _NORMS.norm(tensors, norm_type)
    else:
        norm = reference.total_norm(tensors, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"the total norm of order {norm_type} of {len(tensors)} gradients is {norm.item()}, so they cannot be "
            "clipped; pass error_if_nonfinite=False to scale them by it all the same"
        )
    return norm


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: Tensor, foreach: bool | None = None
) -> None:
    """Scale the gradients of ``parameters`` by ``clip_factor(total_norm, max_norm)``, in place.

    Raises:
        TypeError: something else in place of a parameter, or of the norm.
        ValueError: a norm that is not one number, or a gradient that cannot be scaled in place; then none is.
    """
    parameters = _parameters(parameters)
    if foreach:
        clip_grads_by_torch_(parameters, max_norm, total_norm, True)
        return
    gradients = _gradients(parameters)
    if not gradients:
        return
    factor = clip_factor(total_norm, max_norm)
    if foreach is None and _NORMS.scale_(gradients, factor):
        return
    for place, gradient in enumerate(gradients):
        is_number = gradient.is_floating_point() or gradient.is_complex()
        if has_overlaps(gradient) or not is_number or gradient.dtype.itemsize < 2:
            raise ValueError(
                f"gradient {place}, {gradient.dtype} of shape {tuple(gradient.shape)} and strides {gradient.stride()}, "
                "cannot be scaled in place: give a contiguous one, in floats of 16 bits or more"
            )
    for gradient in gradients:
        # torch multiplies a 16-bit gradient by a 0-d fp32 tensor in 16 bits, which would round the factor
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        gradient.copy_(wide * factor.to(device=gradient.device))


@torch.no_grad()
def clip_factor(total_norm: Tensor, max_norm: float) -> Tensor:
    """``min(1, max_norm / (total_norm + 1e-6))``, 0-d on the norm's device; NaN if the norm is.

    Raises:
        TypeError: a norm that is no tensor, or a limit that is no number.
        ValueError: one that is not one real number.
    """
    _check_numbers(max_norm=max_norm)
    if total_norm is None:
        raise TypeError("total_norm must be a 0-d tensor, got None; get_total_norm returns it")
    check_scalar_tensors(total_norm=total_norm)
    if total_norm.ndim:
        # a factor with a dimension would broadcast a 0-d gradient to it
        total_norm = total_norm.reshape(())
    return reference.clip_factor(total_norm, float(max_norm))


@torch.no_grad()
def sum_of_squares(tensors: Tensors, *, out: Tensor | None = None) -> Tensor:
    """Σ g² over all tensors: 0-d fp64; one rank's part for a caller that adds up over ranks.

    Raises:
        TypeError: something else in place of a tensor.
        ValueError: an ``out`` that is not one floating-point number.
    """
    if out is not None and not isinstance(out, Tensor):
        raise TypeError(f"out must be a tensor of one floating-point number, got a {type(out).__name__}")
    if out is not None and (out.numel() != 1 or not out.is_floating_point()):
        raise ValueError(f"out must be one floating-point number, got {out.dtype} of shape {tuple(out.shape)}")
    tensors = _as_list(tensors)
    try:
        totals = _NORMS.totals(tensors, 2.0)
        total = (
            sum((part.to(totals[0].device) for part in totals[1:]), totals[0])
            if totals
            else reference.sum_of_squares(tensors)
        )
    except AttributeError:
        _refuse_others(tensors, name="tensors", instead="leave out what has no gradient")
        raise
    return total if out is None else out.copy_(total)


def _check_numbers(**numbers: object) -> None:
    """Raise ``TypeError`` for what ``float()`` does not take, in words that name it; texts it does, as in torch."""
    for name, number in numbers.items():
        if type(number) is not float and not isinstance(number, int | str) and not hasattr(number, "__float__"):
            raise TypeError(f"{name} must be a number, got {number!r}")


def _refuse_others(tensors: Sequence[object], *, name: str, instead: str) -> None:
    """Raise ``TypeError`` if not all are tensors, which to ask of each in every call would cost the host some time."""
    kinds = {type(tensor).__name__ for tensor in tensors if not isinstance(tensor, Tensor)}
    if kinds:
        raise TypeError(f"{name} must be tensors, got {', '.join(sorted(kinds))} among them; {instead}")


def _as_list(tensors: Tensors) -> list[Tensor]:
    """The tensors as a list that is only read."""
    if isinstance(tensors, list):
        return tensors
    if isinstance(tensors, Tensor):
        return [tensors]
    if not isinstance(tensors, Iterable):
        raise TypeError(f"expected a tensor or an iterable of tensors, got a {type(tensors).__name__}")
    return list(tensors)


def _parameters(parameters: Tensors) -> list[Tensor]:
    """The parameters as a list that is only read; warns of a generator without any, which may have been used up."""
    listed = _as_list(parameters)
    if not listed and isinstance(parameters, types.GeneratorType):
        warnings.warn("the generator of parameters is empty, so there is nothing to clip", stacklevel=3)
    return listed


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    # torch.compile has no := in a comprehension
    try:
        gradients = [parameter.grad for parameter in parameters]
    except AttributeError:
        _refuse_others(parameters, name="parameters", instead="give model.parameters()")
        raise
    return [gradient for gradient in gradients if gradient is not None]
