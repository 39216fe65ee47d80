"""What a Muon step asks of its lists, before anything is written; and how their tensors are read as matrices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from optim_kernels._dtensors import is_wrapper
from optim_kernels._graphs import is_capturing
from optim_kernels._impl import Impl, check_impl, use_triton
from optim_kernels._newton_schulz.config import NSConfig
from optim_kernels.functional._lists import (
    check_computable,
    check_floating,
    check_lengths,
    check_list,
    check_masters,
    check_shapes,
    check_tensors,
    check_whole,
    check_whole_matrices,
    check_writable,
    description,
)
from optim_kernels.reference.muon import second_moment_shape, wide_dtype
from optim_utils.param_groups import MatrixView

Views = Sequence[MatrixView | None]


def check_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    ns: NSConfig | None,
    second_moments: Sequence[Tensor] | None,
    views: Views | None,
    masters: Sequence[Tensor | None] | None,
    steps: Sequence[int] | None,
    indices: Sequence[int] | None,
    impl: Impl,
) -> list[MatrixView]:
    """Each parameter's view, if the lists are what `functional.muon_` takes; else it raises as that says."""
    check_lengths(
        len(params),
        "params",
        grads=grads,
        momentum_buffers=momentum_buffers,
        second_moments=second_moments,
        views=views,
        masters=masters,
        steps=steps,
        indices=indices,
    )
    check_tensors(params=params, grads=grads, momentum_buffers=momentum_buffers)
    check_whole_matrices(params=params, masters=masters)
    check_masters(params, masters)
    check_shapes(params, "params", grads=grads, momentum_buffers=momentum_buffers, masters=masters)
    check_floating(params=params)
    check_computable(params=params)
    check_writable(params=params, masters=masters)
    check_whole(steps=steps, indices=indices)
    found = check_update(grads, momentum_buffers, ns=ns, second_moments=second_moments, views=views, impl=impl)
    check_layouts(found, params=params, masters=masters)
    return found


def check_random_bits(params: Sequence[Tensor], masters: Sequence[Tensor | None] | None) -> None:
    """Raise ``RuntimeError`` where stochastic rounding is captured: all replays would draw the bits of one step."""
    for i, p in enumerate(params):
        if p.dtype == torch.bfloat16 and (masters is None or masters[i] is None) and is_capturing(p.device):
            raise RuntimeError(
                f"params[{i}] would be rounded at random in a step that is being captured into a CUDA graph, whose "
                "replays would all draw the same bits; TritonMuon counts its steps on the device"
            )


def check_update(
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    *,
    ns: NSConfig | None,
    second_moments: Sequence[Tensor] | None,
    views: Views | None,
    impl: Impl,
) -> list[MatrixView]:
    """Each gradient's view, if the lists are what `functional.muon_update` takes; else it raises as that says."""
    check_impl(impl)
    if not isinstance(ns, NSConfig | None):
        raise TypeError(f"ns must be an NSConfig or None, got {ns!r}; give NSConfig(coefficients=...)")
    check_list("grads", grads)
    check_lengths(len(grads), "grads", momentum_buffers=momentum_buffers, second_moments=second_moments, views=views)
    check_tensors(grads=grads, momentum_buffers=momentum_buffers, second_moments=second_moments)
    check_whole_matrices(grads=grads, momentum_buffers=momentum_buffers, second_moments=second_moments)
    check_shapes(grads, "grads", momentum_buffers=momentum_buffers)
    check_floating(grads=grads, momentum_buffers=momentum_buffers, second_moments=second_moments)
    check_writable(momentum_buffers=momentum_buffers, second_moments=second_moments)
    found = views_of(views, grads, "grads")
    check_layouts(found, momentum_buffers=momentum_buffers)
    for i, (moment, grad, view) in enumerate(zip(second_moments or (), grads, found)):
        _check_moment(moment, grad, view, i)
    if impl == "triton":
        for i, (grad, buffer) in enumerate(zip(grads, momentum_buffers)):
            check_kernels(grad, buffer, ns or NSConfig(), f"grads[{i}]")
    return found


def check_kernels(grad: Tensor, momentum_buffer: Tensor, ns: NSConfig, name: str) -> None:
    """Raise ``RuntimeError`` unless the kernels, which ``impl="triton"`` asks for, can orthogonalize this update."""
    u = torch.empty(0, dtype=wide_dtype(grad, momentum_buffer), device=grad.device)
    if torch.float64 in (u.dtype, ns.compute_dtype(u)):
        raise RuntimeError(
            f"impl='triton' multiplies no fp64, in which {name} is orthogonalized; use impl='auto' or 'torch', or fp32"
        )
    use_triton("triton", u, name)


def check_layouts(views: Sequence[MatrixView], **lists: Sequence[Tensor | None] | None) -> None:
    """Raise ``ValueError`` for a tensor whose strides do not allow its view; all allow one without matrix_shape."""
    for name, each in lists.items():
        for i, (tensor, view) in enumerate(zip(each or (), views)):
            if tensor is None or not view.matrix_shape or is_wrapper(tensor):
                continue
            try:
                view.views(tensor)
            except ValueError as error:
                raise ValueError(f"{name}[{i}] cannot be read as matrices: {error}") from error


def _check_moment(moment: Tensor, grad: Tensor, view: MatrixView, i: int) -> None:
    if moment.numel() != num_second_moments(view):
        raise ValueError(
            f"second_moments[{i}] must have {num_second_moments(view)} elements (new_second_moment makes it) for "
            f"matrices {view.describe()}, got shape {tuple(moment.shape)}"
        )
    if moment.device != grad.device:
        raise ValueError(f"second_moments[{i}] must be where grads[{i}] is, on {grad.device}, got {moment.device}")
    # one of another shape is read as a line of numbers
    shapes = [second_moment_shape(shape) for shape in view.shapes]
    if [moment.shape] != shapes and moment.ndim != 1 and not moment.is_contiguous():
        raise ValueError(f"second_moments[{i}], {description(moment)}, must be contiguous; give its contiguous()")


def num_second_moments(view: MatrixView) -> int:
    """How many second moments the matrices of a parameter have."""
    return sum(prod(second_moment_shape(shape)) for shape in view.shapes)


def views_of(views: Views | None, tensors: Sequence[Tensor], of: str) -> list[MatrixView]:
    """How each of the tensors is read as matrices."""
    found = []
    for i, tensor in enumerate(tensors):
        view = views[i] if views is not None else None
        if view is None:
            if tensor.ndim < 2:
                raise ValueError(f"{of}[{i}] must be matrices [..., r, c], got shape {tuple(tensor.shape)}")
            view = MatrixView.identity(tensor.shape)
        elif not isinstance(view, MatrixView):
            raise TypeError(f"views[{i}] must be a MatrixView or None, got {view!r}")
        elif tuple(view.shape) != tuple(tensor.shape):
            raise ValueError(f"views[{i}] is of shape {tuple(view.shape)}, {of}[{i}] {tuple(tensor.shape)}")
        found.append(view)
    return found
