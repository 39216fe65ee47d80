"""Muon's elementwise parts alone, for many tensors in one launch each: what comes before and after Newton–Schulz.

    momenta    g <- ±g · clip_factor / grad_scale
               B <- μB + (1 − μ)g,      U = (1 − μ)g + μB  with ``nesterov``, else B
    updates    p <- p (1 − lr λ) − lr' O                                    plain
               p <- p − lr' O − lr' λ p [O p ≥ 0]                           ``cautious``;  lr' = lr · scale

O needs whole matrices, but U and p can be computed wherever parts of them lie: a rank that holds parts of many matrices
needs only these two classes. Formulas and bits are those of ``reference.muon`` in plain torch: the arithmetic is in
fp32, U comes from the unrounded B, and every stored value is rounded once.

Both classes keep tables on the device from step to step, and update in them what has changed: addresses of tensors, and
hyperparameters, which are floats or 0-d tensors (tensors on the device are read there). Nothing is compiled anew for
that, nothing waits for the device, and the host does little more than ask each tensor for its address.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from optim_kernels._dtensors import whole
from optim_kernels._impl import why_not_triton
from optim_kernels._options import are_numbers, check_scalar_tensors, check_scalars, check_switches, check_values
from optim_kernels.functional._device_scalars import as_scalar
from optim_kernels.functional._element_launch import ElementLaunch, why_not_taken
from optim_kernels.functional._lists import check_lengths
from optim_kernels.reference.muon import Scalar
from optim_kernels.reference.storage import MASTER_KINDS
from optim_utils.compiling import not_compiled

__all__ = ["MuonMomenta", "MuonUpdates"]

_WORDS = {
    "grads": "gradient",
    "buffers": "momentum",
    "us": "U",
    "params": "value",
    "updates": "update",
    "masters": "master",
    "steps": "step count",
}


class MuonMomenta:
    """Updates the momentum of many tensors and writes their U, in one launch.

    An object is for lists that come again and again; given other lists, it builds its tables anew.
    """

    def __init__(self) -> None:
        # looked up, so that a caller may be compiled (`not_compiled`)
        self.step  # noqa: B018
        self._launch = ElementLaunch("momenta_kernel", written=("buffers", "us"))

    @not_compiled
    def step(
        self,
        grads: Sequence[Tensor],
        buffers: Sequence[Tensor],
        us: Sequence[Tensor],
        *,
        momentum: Scalar | Sequence[Scalar],
        groups: Sequence[int] | None = None,
        nesterov: bool = True,
        maximize: bool = False,
        clip_factor: Tensor | None = None,
        grad_scale: Tensor | None = None,
    ) -> None:
        """Move the ``buffers`` towards the ``grads``, and write U into ``us``.

        Args:
            grads, buffers, us: contiguous, of equal numbers of elements; fp32, fp16 or bf16, one dtype a list. Tensors
                may be empty, and begin at any element of their storage.
            momentum: μ, for all or one a group.
            groups: for each tensor the number of its momentum; by default the first.
            nesterov, maximize: see the formulas.
            clip_factor, grad_scale: 0-d tensors: gradients are multiplied by the former and divided by the latter.

        Raises:
            ValueError: for tensors that the kernel cannot take, by name, before anything is written.
            RuntimeError: if there is no Triton, or it cannot run where the tensors are.
        """
        check_scalar_tensors(clip_factor=clip_factor, grad_scale=grad_scale)
        check_switches(nesterov=nesterov, maximize=maximize)
        if not grads:
            check_lengths(0, "grads", buffers=buffers, us=us)
            return
        momenta, launch = _list_of("momentum", momentum, us), self._launch
        launch.follow(
            {"grads": grads, "buffers": buffers, "us": us},
            [_groups_of(groups, len(grads), "grads", len(momenta), "momentum")],
            [*map(_dtype_of, (grads, buffers, us)), bool(nesterov), bool(maximize)],
        )
        factors = (as_scalar(whole(factor), launch.one) for factor in (clip_factor, grad_scale))
        launch.run([[value] for value in momenta], *factors)

    @staticmethod
    def why_not(grad: Tensor, buffer: Tensor, u: Tensor) -> str | None:
        """What keeps ``step`` from taking these three, in a few words; ``None`` where it can."""
        return _why_not({"grads": grad, "buffers": buffer, "us": u})


class MuonUpdates:
    """The update of many parameters, or of parts of them, in one launch.

    An object is for lists that come again and again; given other lists, it builds its tables anew.
    """

    def __init__(self) -> None:
        # looked up, so that a caller may be compiled (`not_compiled`)
        self.step  # noqa: B018
        self._launch = ElementLaunch("updates_kernel", written=("params", "masters", "steps"))

    @not_compiled
    def step(
        self,
        params: Sequence[Tensor],
        updates: Sequence[Tensor],
        *,
        lr: Scalar | Sequence[Scalar],
        weight_decay: Scalar | Sequence[Scalar] = 0.0,
        groups: Sequence[int] | None = None,
        scales: Sequence[float] | None = None,
        cautious: bool = False,
        masters: Sequence[Tensor] | None = None,
        steps: Sequence[Tensor] | None = None,
        seed: int | Sequence[int] = 0,
        indices: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Update the ``params`` by the directions O in ``updates``.

        Args:
            params, updates: contiguous, of equal numbers of elements; fp32, fp16 or bf16, one dtype a list. Tensors may
                be empty, and begin at any element of their storage.
            lr, weight_decay: one a group, or one for all; with several lr, one weight_decay may be for all.
            groups: for each tensor the number of its lr and weight_decay; by default the first.
            scales: for each tensor what its learning rate is multiplied by (``reference.muon.lr_scale``).
            cautious: see the formulas.
            masters: fp32 masters, or int16 low halves (split16) of bf16 parameters.
            steps: for each tensor its own count of the steps so far, fp32 on the device, which the step advances. With
                it bf16 parameters without masters are rounded at random, by bits of this step; else to nearest.
            seed: of the random bits, for all tensors or one each.
            indices, starts: for each tensor the number of the parameter that it is part of, and how many elements of
                that parameter precede it, so that an element's bits do not depend on how parameters are cut. By default
                the tensor's place in the list, and 0.

        Raises:
            ValueError: for tensors that the kernel cannot take, by name, before anything is written.
            RuntimeError: if there is no Triton, or it cannot run where the tensors are.
        """
        if not params:
            check_lengths(0, "params", updates=updates, scales=scales, masters=masters, steps=steps)
            return
        check_switches(cautious=cautious)
        count, launch = len(params), self._launch
        check_lengths(count, "params", updates=updates, scales=scales, indices=indices, starts=starts)
        rates, decays = _list_of("lr", lr, params), _list_of("weight_decay", weight_decay, params)
        if len(decays) == 1:
            decays = [*decays] * len(rates)
        check_lengths(len(rates), "learning rates", weight_decay=decays)
        seeds = seed if isinstance(seed, Sequence) else [seed] * count
        check_lengths(count, "params", seed=seeds)
        starts = [0] * count if starts is None else starts
        columns = [
            _groups_of(groups, count, "params", len(rates), "lr"),
            array("q", array("d", [1.0] * count if scales is None else scales).tobytes()).tolist(),
            [each & 0xFFFFFFFF for each in seeds],
            range(count) if indices is None else indices,
            starts,
        ]
        master_dtype = _dtype_of(masters or ())
        if master_dtype == torch.int16 and params[0].dtype != torch.bfloat16:
            raise ValueError(f"masters are int16, which complete bfloat16 parameters; params are {params[0].dtype}")
        draws_bits = steps is not None and masters is None and params[0].dtype == torch.bfloat16
        launch.follow(
            {"params": params, "updates": updates, "masters": masters, "steps": steps},
            columns,
            [*map(_dtype_of, (params, updates)), MASTER_KINDS.get(master_dtype), bool(cautious), steps is not None],
            starts if draws_bits else (),
        )
        launch.run(list(zip(rates, decays, strict=True)), launch.counters)

    @staticmethod
    def why_not(param: Tensor, update: Tensor, master: Tensor | None, step: Tensor | None) -> str | None:
        """What keeps ``step`` from taking these tensors, in a few words; ``None`` where it can."""
        if master is not None and master.dtype == torch.int16 and param.dtype != torch.bfloat16:
            return f"its master is int16, which completes bfloat16; its value is {param.dtype}"
        given = {"params": param, "updates": update, "masters": master, "steps": step}
        return _why_not({name: tensor for name, tensor in given.items() if tensor is not None})


def _why_not(tensors: Mapping[str, Tensor]) -> str | None:
    like = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        reason = why_not_taken(name, tensor, like)
        if reason is not None:
            return f"its {_WORDS[name]} {reason}"
    return why_not_triton(like)


def _list_of(name: str, value: Scalar | Sequence[Scalar], params: Sequence[Tensor]) -> list[Scalar]:
    """A hyperparameter of parameters as a list with a number for each group."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not are_numbers(values):
        for each in values:
            check_scalars(**{name: each})
            check_values(params, **{name: each})
    return values


def _dtype_of(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """The dtype of the first tensor; later checks refuse other dtypes in the list."""
    return tensors[0].dtype if tensors else None


def _groups_of(groups: Sequence[int] | None, count: int, of: str, num_groups: int, name: str) -> Sequence[int]:
    """The group of each of ``count`` tensors."""
    groups = [0] * count if groups is None else groups
    check_lengths(count, of, groups=groups)
    if min(groups) < 0 or max(groups) >= num_groups:
        raise ValueError(f"groups must be numbers of the {num_groups} entries of {name}, got {sorted(set(groups))}")
    return groups
