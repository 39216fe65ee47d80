"""newton_schulz in call after call, on matrices of any kind and the same or other memory, beside the reference in fp64.

Calls keep plans for the kinds of matrices that they have seen: what a plan finds has to be what its call was given.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from random_tensors import DEVICE, NUMPY_MAY_WARN, laid_out, random
from state_machines import try_sequences
from torch import Tensor, nn

from optim_kernels import COEFFICIENTS, NSConfig, newton_schulz, orthogonalization, reference
from optim_kernels.orthogonalization import newton_schulz_with, orthogonalize

pytest.importorskip("triton")

SHAPES = [(4, 6), (6, 4), (5, 5), (1, 7), (7, 1), (1, 1), (0, 4), (3, 0), (2, 3, 5), (0, 2, 3), (2, 1, 5, 3), (17, 33)]
FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
# What results may be off by, by the coarsest dtype there is.
ERRORS = {FP64: 1e-7, FP32: 2e-3, FP16: 0.05, BF16: 0.3}
LAYOUTS = ["plain", "transposed", "gaps", "offset", "flipped", "negative", "parameter", "cut"]

seeds = st.integers(0, 2**31)
places = st.integers(0, 9)
matrices = st.tuples(
    st.sampled_from(SHAPES), st.sampled_from([FP32, FP32, FP16, BF16, FP64]), st.sampled_from(LAYOUTS), seeds
)
options = st.fixed_dictionaries(
    {
        "coefficients": st.sampled_from(
            ["keller", "polar_express", "cubic5", "aol4", (2.0, -1.5, 0.5), [[3.0, -3.2, 1.2], [1.5, -0.5, 0.0]]]
        ),
        "method": st.sampled_from(["auto", "standard", "gram"]),
    },
    optional={
        "steps": st.integers(0, 5),
        "compute_dtype": st.sampled_from([None, FP32, FP16, BF16, FP64]),
        "restarts": st.sampled_from([None, "accurate", (1, 2), [2, 4]]),
        "norm_scale": st.sampled_from([1.0, 1.02, 3.0]),
        "eps": st.sampled_from([0.0, 1e-7, 0.5]),
        "eps_mode": st.sampled_from(["clamp", "add"]),
    },
)


def config_of(options: dict[str, Any]) -> NSConfig:
    values = dict(options)
    values["dtype"] = values.pop("compute_dtype", None)
    if isinstance(values.get("restarts"), list):
        values["restarts"] = tuple(values["restarts"])
    return NSConfig(**values)


def made(shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
    # not so badly conditioned that rounding decides
    x = random(shape, seed) + 3 * torch.eye(*shape[-2:], device=DEVICE)
    x = x.to(dtype)
    if layout == "offset":
        return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    if layout == "flipped":
        return x.mT.contiguous().mT
    if layout == "negative" and dtype in (FP32, FP64):
        return torch.complex(x, -x).conj().imag
    if layout == "cut":
        return torch.cat((x, x, x), -1)[..., x.shape[-1] : 2 * x.shape[-1]]
    return nn.Parameter(x, requires_grad=False) if layout == "parameter" else laid_out(x, layout)


class Sequences(RuleBasedStateMachine):
    """Matrices that are orthogonalized again and again, by options that come again."""

    @initialize(impl=st.sampled_from(["torch", "triton"]), first=options, second=options)
    def build(self, impl: Any, first: dict[str, Any], second: dict[str, Any]) -> None:
        self.impl = impl
        self.options = [self.possible(first), self.possible(second)]
        self.kept: list[Tensor] = []
        # so few that they are dropped and made again
        self.most = orthogonalization.NUM_PLANS
        orthogonalization.NUM_PLANS = 3

    def teardown(self) -> None:
        orthogonalization.NUM_PLANS = self.most

    def possible(self, options: dict[str, Any]) -> dict[str, Any]:
        """With as many steps as a set has, and what the kernels can multiply."""
        options = dict(options)
        if options["coefficients"] in ("aol4", "cubic5"):
            options["steps"] = 4 if options["coefficients"] == "aol4" else 5
        if self.impl == "triton" and options.get("compute_dtype") == FP64:
            options["compute_dtype"] = FP16
        return options

    def matrix(self, shape: tuple[int, ...], dtype: torch.dtype, layout: str, seed: int) -> Tensor:
        return made(shape, FP32 if self.impl == "triton" and dtype == FP64 else dtype, layout, seed)

    def expected(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        config = config_of(options)
        norm = {"norm_scale": config.norm_scale, "eps": config.eps, "eps_mode": config.eps_mode}
        return reference.newton_schulz(
            x.detach().double().contiguous(), config.triples, **norm, row_factors=config.row_factors
        )

    def check(self, result: Tensor, x: Tensor, options: dict[str, Any], expected: Tensor | None = None) -> None:
        assert result.shape == x.shape
        assert result.dtype == x.dtype
        exact = self.expected(x, options) if expected is None else expected
        dtypes = {x.dtype, config_of(options).compute_dtype(x)}
        error = max(ERRORS[dtype] for dtype in dtypes)
        if error <= 2e-3 and config_of(options).method_for(*sorted(x.shape[-2:])) == "gram":
            error *= 10
        torch.testing.assert_close(result.detach().double(), exact, rtol=0, atol=error)

    @rule(each=matrices)
    def keep(self, each: Any) -> None:
        self.kept.append(self.matrix(*each))

    @precondition(lambda self: self.kept)
    @rule(place=places, seed=seeds, how=st.sampled_from(["written", "new memory", "wants a gradient", "swapped"]))
    def change(self, place: int, seed: int, how: str) -> None:
        place %= len(self.kept)
        x = self.kept[place]
        with torch.no_grad():
            if how == "written":
                x.copy_(made(tuple(x.shape), x.dtype, "plain", seed))
            elif how == "new memory":
                self.kept[place] = x.detach().clone()
            elif how == "swapped":
                self.kept[place] = x.detach().mT
        if how == "wants a gradient":
            self.kept[place] = x.detach().requires_grad_(not x.requires_grad)

    @precondition(lambda self: self.kept)
    @rule(
        place=places,
        which=st.integers(0, 1),
        how=st.sampled_from(["call", "alias", "config", "no_grad", "inference", "autocast", "operator"]),
    )
    def one(self, place: int, which: int, how: str) -> None:
        x, options = self.kept[place % len(self.kept)], self.options[which]
        before, version = x.detach().clone(), x._version
        if how == "config":
            result = newton_schulz_with(x, config_of(options), self.impl)
        elif how == "no_grad":
            with torch.no_grad():
                result = newton_schulz(x, **options, impl=self.impl)
        elif how == "inference":
            with torch.inference_mode():
                result = newton_schulz(x, **options, impl=self.impl)
        elif how == "autocast":
            with torch.autocast(DEVICE, torch.bfloat16):
                result = newton_schulz(x, **options, impl=self.impl)
        elif how == "operator":
            result = newton_schulz(x.detach().requires_grad_(), **options, impl=self.impl)
        else:
            result = (orthogonalize if how == "alias" else newton_schulz)(x, **options, impl=self.impl)
        assert torch.equal(x, before)
        assert x._version == version
        assert result.requires_grad == (how == "operator" or (x.requires_grad and how not in ("no_grad", "inference")))
        self.check(result, x, options)
        # the result is memory of its own, which later calls leave alone
        with torch.no_grad():
            again = newton_schulz(x.detach() * 2, **{**options, "eps": 0.0}, impl=self.impl)
            assert again.numel() == 0 or again.data_ptr() != result.data_ptr()
        self.check(result, x, options)

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 1), with_out=st.sampled_from([None, "same", "fp64", "stack", "inputs"]))
    def many(self, which: int, with_out: str | None) -> None:
        xs, options = [x.detach() for x in self.kept], self.options[which]
        expected = [self.expected(x, options) for x in xs]
        out: Sequence[Tensor] | Tensor | None = None
        if with_out == "stack":
            xs, expected = [xs[0], xs[0]], [expected[0], expected[0]]
            out = xs[0].new_zeros(2, *xs[0].shape)
        elif with_out == "inputs":
            xs = [x.clone() for x in xs]
            out = xs
        elif with_out is not None:
            out = [x.new_zeros(x.shape, dtype=FP64 if with_out == "fp64" else x.dtype).mT.contiguous().mT for x in xs]
        results = newton_schulz(tuple(xs), **options, out=out, impl=self.impl)  # type: ignore[arg-type]
        assert isinstance(results, list)
        for i, (x, result, exact) in enumerate(zip(xs, results, expected, strict=True)):
            if out is not None:
                assert result is out[i] or with_out == "stack"
                result = out[i].to(x.dtype)
            self.check(result, x, options, exact)

    @rule(each=matrices, which=st.integers(0, 1))
    def gradient(self, each: Any, which: int) -> None:
        """Of a weighted sum, beside autograd's through the reference."""
        x, options = self.matrix(*each).detach().requires_grad_(), self.options[which]
        weights = random(x.shape, each[-1] + 1).to(x.dtype)
        config = config_of(options)
        if config.row_factors:
            return
        result = newton_schulz(x, **options, impl=self.impl)
        (grad,) = torch.autograd.grad(result, x, weights)
        exact = x.detach().double().requires_grad_()
        norm = {"norm_scale": config.norm_scale, "eps": config.eps, "eps_mode": config.eps_mode}
        expected = reference.newton_schulz(exact, config.triples, **norm)
        if not x.numel():
            assert grad.shape == x.shape
            return
        (exact_grad,) = torch.autograd.grad(expected, exact, weights.double())
        assert grad.dtype == x.dtype
        error = 1e-7 if x.dtype == FP64 else 2e-3 if x.dtype == FP32 else 0.05
        torch.testing.assert_close(
            grad.double(), exact_grad, rtol=error, atol=error * float(1 + exact_grad.abs().max())
        )

    # the interpreter has one thread
    @precondition(lambda self: self.kept and (DEVICE == "cuda" or self.impl == "torch"))
    @rule(count=st.integers(2, 3))
    def threads(self, count: int) -> None:
        """More kinds than are remembered, from several threads at once."""
        xs = [x.detach() for x in self.kept]
        found: list[list[Tensor]] = [[] for _ in range(count)]

        def work(i: int) -> None:
            for x in [*xs, *xs]:
                for options in self.options:
                    found[i].append(newton_schulz(x, **options, impl=self.impl))

        threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for results in found:
            expected = [(x, options) for x in [*xs, *xs] for options in self.options]
            for result, (x, options) in zip(results, expected, strict=True):
                self.check(result, x, options)


pytestmark = NUMPY_MAY_WARN


@pytest.mark.slow
def test_sequences() -> None:
    try_sequences(Sequences, examples=10, steps=8)


@pytest.mark.nightly
def test_many_sequences() -> None:
    try_sequences(Sequences, examples=300, steps=30)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "impl"),
    [
        ("eager", "triton"),
        ("aot_eager", "torch"),
        pytest.param("eager", "torch", marks=pytest.mark.nightly),
        pytest.param("aot_eager", "triton", marks=pytest.mark.nightly),
    ],
)
def test_compiled_calls(backend: str, impl: Any) -> None:
    """One tensor, a tall one, a list, and gradients through them."""

    def f(x: Tensor, ys: list[Tensor]) -> Tensor:
        first = newton_schulz(x, coefficients="polar_express", method="gram", impl=impl)
        return sum((y.square().sum() for y in newton_schulz([y * 1.0 for y in ys], 3, impl=impl)), (first * x).sum())

    compiled = torch.compile(f, backend=backend)
    for seed in (0, 7):
        inputs = [random(shape, seed).requires_grad_() for shape in ((4, 6), (6, 4), (3, 2, 2))]
        expected, found = (each(inputs[0], inputs[1:]) for each in (f, compiled))
        torch.testing.assert_close(found, expected)
        pairs = zip(torch.autograd.grad(expected, inputs), torch.autograd.grad(found, inputs), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other)


def test_every_set_has_derivatives() -> None:
    for name in COEFFICIENTS.keys() - {"aol4"}:
        x = random((2, 3, 4), 0, FP64).requires_grad_()
        in_fp64: Any = partial(newton_schulz, coefficients=name, compute_dtype=FP64)
        assert torch.autograd.gradcheck(in_fp64, (x,))
