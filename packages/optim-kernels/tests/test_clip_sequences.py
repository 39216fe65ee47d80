"""Norms and clipping in call after call, on lists that change between calls, beside torch's in float64.

Whatever a list of gradients was before, a call has to see what it is now: its tensors, their numbers, their memory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from random_tensors import DEVICE, NUMPY_MAY_WARN, laid_out, random
from state_machines import try_sequences
from torch import Tensor, nn

from optim_kernels import (
    clip,
    clip_factor,
    clip_grad_norm_,
    clip_grads_with_norm_,
    compute_global_grad_norm,
    get_total_norm,
    sum_of_squares,
)
from optim_kernels._gradient_norm import GradientNorms

pytest.importorskip("triton")

SHAPES = [(), (0,), (1,), (5,), (4, 3), (0, 3), (2, 3, 2, 5), (17, 31), (4099,)]
KERNEL_DTYPES = [torch.float32, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*KERNEL_DTYPES, torch.float64, torch.complex64]
LAYOUTS = ["plain", "plain", "transposed", "gaps", "expanded", "offset", "sparse"]
NORMS = [0.0, 0.5, 1.0, 2.0, 2, "inf", 3.0, math.inf, -1.0, -math.inf]

seeds = st.integers(0, 2**31)
places = st.integers(0, 9)
norm_types = st.sampled_from([*NORMS, 2.0, 2.0, 1.0, math.inf])
foreachs = st.sampled_from([None, None, None, False])
max_norms = st.sampled_from([0.01, 0.5, 1, 30.0, math.inf, 0.0])
inputs = st.sampled_from([list, tuple, iter, lambda tensors: (tensor for tensor in tensors)])
new_gradients = st.tuples(
    st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS), seeds, st.sampled_from([1.0, 100.0])
)


def exact(tensor: Tensor) -> Tensor:
    """In fp64, dense, in memory of its own."""
    return tensor.detach().to_dense().to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def exact_norm(tensors: Sequence[Tensor], norm_type: float | str) -> Tensor:
    # of magnitudes, for torch warns of complex numbers that it counts
    filled = [exact(tensor).abs() for tensor in tensors if tensor.numel()] or [torch.zeros(1, dtype=torch.float64)]
    return torch.nn.utils.get_total_norm(filled, norm_type, foreach=False)


def gradient(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int, scale: float, *, kernels: bool
) -> Tensor:
    if kernels and dtype not in KERNEL_DTYPES:
        dtype = torch.bfloat16
    made = random(shape, seed, torch.float32) * scale
    made = torch.complex(made, made.flip(0) if made.ndim else made) if dtype.is_complex else made.to(dtype)
    if layout == "sparse" and made.ndim:
        return made.to_sparse()
    if layout == "offset":
        room = made.new_zeros(made.numel() + 1)
        return room[1:].view(made.shape).copy_(made)
    return laid_out(made, layout)


class Sequences(RuleBasedStateMachine):
    """A list of parameters whose gradients are looked at, and exchanged, in any order."""

    params: list[nn.Parameter]

    @initialize(impl=st.sampled_from(["auto", "triton"]), first=st.lists(new_gradients, max_size=4))
    def build(self, impl: Any, first: list[Any]) -> None:
        self.kernels = impl == "triton"
        clip._NORMS = GradientNorms(impl, any_stream=True)
        self.params = []
        for each in first:
            self.append(each)

    def teardown(self) -> None:
        clip._NORMS = GradientNorms(any_stream=True)

    @property
    def grads(self) -> list[Tensor]:
        return [p.grad for p in self.params if p.grad is not None]

    def given(self, p: nn.Parameter, grad: Tensor) -> None:
        if hasattr(p, "grad_dtype"):
            p.grad_dtype = None
            p.grad = grad
        else:
            # before torch 2.10 a gradient has its parameter's dtype
            p.grad = grad.to(p.dtype)

    def look(self, call: Callable[[], Any]) -> Any:
        """The result of a call that changes no gradient."""
        before, versions = [exact(grad) for grad in self.grads], [grad._version for grad in self.grads]
        result = call()
        assert all(torch.equal(exact(grad), old) for grad, old in zip(self.grads, before, strict=True))
        assert versions == [grad._version for grad in self.grads]
        return result

    def check_norm(self, norm: Tensor, grads: Sequence[Tensor], norm_type: float | str) -> None:
        assert norm.shape == ()
        assert norm.dtype == (torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32)
        torch.testing.assert_close(norm.double().cpu(), exact_norm(grads, norm_type).cpu(), rtol=2e-6, atol=1e-30)

    @rule(each=new_gradients)
    def append(self, each: tuple[Any, ...]) -> None:
        grad = gradient(*each, kernels=self.kernels)
        p = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype, device=DEVICE))
        self.given(p, grad)
        self.params.append(p)

    @precondition(lambda self: self.params)
    @rule(place=places, how=st.sampled_from(["pop", "reverse", "rotate"]))
    def rearrange(self, place: int, how: str) -> None:
        place %= len(self.params)
        if how == "pop":
            del self.params[place]
        elif how == "reverse":
            self.params.reverse()
        elif how == "rotate":
            self.params = self.params[place:] + self.params[:place]

    @precondition(lambda self: self.params)
    @rule(
        place=places,
        seed=seeds,
        layout=st.sampled_from(LAYOUTS),
        how=st.sampled_from(["none", "new", "written", "data", "half", "resized"]),
    )
    def change_a_gradient(self, place: int, seed: int, layout: str, how: str) -> None:
        p = self.params[place % len(self.params)]
        new = gradient(tuple(p.shape), p.dtype, layout, seed, 1.0, kernels=self.kernels)
        if how == "none":
            p.grad = None
        elif how == "new" or p.grad is None or p.grad.is_sparse or new.is_sparse:
            self.given(p, new)
        elif how == "written":
            p.grad = p.grad.contiguous()
            p.grad.copy_(new)
        elif how == "data":
            p.grad.data = new.to(p.grad.dtype)
        elif how == "half" and not p.dtype.is_complex:
            self.given(p, new.to(torch.float16))
        elif how == "resized" and p.ndim:
            # other sizes at the same address
            p.grad = None
            p.data = p.data[: p.shape[0] // 2]
            self.given(p, new[: len(new) // 2])

    @rule(norm_type=norm_types, foreach=foreachs, passed=inputs, strict=st.booleans())
    def norms(self, norm_type: Any, foreach: bool | None, passed: Any, strict: bool) -> None:
        grads = self.grads
        if not self.params or not grads:
            assert self.look(lambda: compute_global_grad_norm(list(self.params), norm_type)) == 0.0
            return
        options = {"foreach": foreach, "error_if_nonfinite": strict}
        if strict and not exact_norm(grads, norm_type).isfinite():
            with pytest.raises(RuntimeError, match="error_if_nonfinite"):
                get_total_norm(grads, norm_type, **options)
            return
        self.check_norm(self.look(lambda: get_total_norm(passed(grads), norm_type, **options)), grads, norm_type)
        norm = self.look(lambda: compute_global_grad_norm(passed(self.params), norm_type, **options))
        self.check_norm(norm, grads, norm_type)

    @rule(passed=inputs, with_out=st.booleans())
    def squares(self, passed: Any, with_out: bool) -> None:
        if not self.grads:
            assert sum_of_squares([]) == 0.0
            return
        out = torch.zeros((), dtype=torch.float64, device=DEVICE) if with_out else None
        total = self.look(lambda: sum_of_squares(passed(self.grads), out=out))
        assert total.dtype == torch.float64
        assert out is None or total is out
        expected = sum(exact(grad).abs().square().sum() for grad in self.grads)
        torch.testing.assert_close(total, expected, rtol=2e-6, atol=0)

    @rule(
        norm_type=norm_types,
        max_norm=max_norms,
        foreach=foreachs,
        passed=inputs,
        how=st.sampled_from(["one call", "two calls", "another norm"]),
    )
    def clip(self, norm_type: Any, max_norm: float, foreach: bool | None, passed: Any, how: str) -> None:
        if not self.params:
            return
        grads = self.grads
        before, versions = [exact(grad) for grad in grads], [grad._version for grad in grads]
        norm = exact_norm(grads, norm_type) if grads else torch.zeros((), dtype=torch.float64)
        # expanded memory has no place for what each of its elements becomes
        overlaps = any(grad.layout == torch.strided and 0 in _strides(grad) for grad in grads)
        error, words = (
            (RuntimeError, "single memory location") if foreach else (ValueError, "cannot be scaled in place")
        )
        with pytest.raises(error, match=words) if overlaps else nullcontext():
            if how == "one call":
                result = clip_grad_norm_(passed(self.params), max_norm, norm_type, foreach=foreach)
                if grads:
                    self.check_norm(result, grads_of(before, grads), norm_type)
            else:
                norm = torch.tensor(3.7, dtype=torch.float64) if how == "another norm" else norm
                clip_grads_with_norm_(passed(self.params), max_norm, norm.float().to(DEVICE), foreach=foreach)
        if overlaps:
            if not foreach:
                for grad, old in zip(grads, before, strict=True):
                    torch.testing.assert_close(exact(grad), old, rtol=0, atol=0, equal_nan=True)
            # torch leaves such a list half done
            self.params.clear()
            return
        factor = float(clip_factor(norm, max_norm))
        for grad, old, version in zip(grads, before, versions, strict=True):
            tolerance = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(grad.dtype, 1e-5)
            torch.testing.assert_close(exact(grad), old * factor, rtol=tolerance, atol=1e-7, equal_nan=True)
            if factor < 1 and grad.numel():
                assert grad._version > version

    @rule(norm_type=st.sampled_from([1.0, 2.0, math.inf]), value=st.sampled_from([math.nan, math.inf]), place=places)
    def clip_what_is_not_finite(self, norm_type: float, value: float, place: int) -> None:
        """On copies: as torch on copies in fp64."""
        filled = [grad.to_dense().contiguous() for grad in self.grads if grad.numel() and not grad.is_complex()]
        if not filled:
            return
        ours = [grad.clone() for grad in filled]
        ours[place % len(ours)].view(-1)[0] = value
        theirs = [exact(grad) for grad in ours]
        lists = []
        for each in (ours, theirs):
            lists.append([nn.Parameter(torch.zeros_like(grad)) for grad in each])
            for p, grad in zip(lists[-1], each, strict=True):
                self.given(p, grad)
        norm = clip_grad_norm_(lists[0], 1.0, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(lists[1], 1.0, norm_type, foreach=False)
        torch.testing.assert_close(norm.double(), expected, equal_nan=True)
        for grad, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(exact(grad), other, equal_nan=True)
        with pytest.raises(RuntimeError, match="error_if_nonfinite"):
            clip_grad_norm_(lists[0], 1.0, norm_type, error_if_nonfinite=True)

    # the interpreter has one thread
    @precondition(lambda self: DEVICE == "cuda" or not self.kernels)
    @rule(count=st.integers(2, 3), seed=seeds)
    def norms_in_threads(self, count: int, seed: int) -> None:
        """Of lists of one length and dtype, which tables of one kind are for."""
        lists = [[random((7 + i,), seed + i), random((300,), seed + i)] for i in range(count)]
        found: list[list[Tensor]] = [[] for _ in lists]

        def work(i: int) -> None:
            for _ in range(3):
                found[i].append(get_total_norm(lists[i]))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for grads, norms in zip(lists, found, strict=True):
            assert len(norms) == 3
            for norm in norms:
                self.check_norm(norm, grads, 2.0)


def _strides(grad: Tensor) -> list[int]:
    return [stride for stride, size in zip(grad.stride(), grad.shape, strict=True) if size > 1]


def grads_of(before: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """The gradients before a call that changed them, in the dtypes that they have."""
    return [old.to(grad.dtype) for old, grad in zip(before, grads, strict=True)]


pytestmark = NUMPY_MAY_WARN


@pytest.mark.slow
def test_sequences() -> None:
    try_sequences(Sequences, examples=25, steps=12)


@pytest.mark.nightly
def test_many_sequences() -> None:
    try_sequences(Sequences, examples=300, steps=30)
