"""``python -m optim_kernels [--json]``: versions, the device, and a check of every kernel against the reference.

On a GPU the checks multiply matrices with sides from 16 to 4096, in the tiles and schedules chosen for that GPU.
Compiling all kernels takes two or three minutes the first time; results are printed as they come. Without a GPU the
kernels are checked in Triton's interpreter, if ``TRITON_INTERPRET=1`` is set. The exit status is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optim_kernels import TritonMuon, functional, newton_schulz, reference
from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._impl import has_triton, is_interpreted, why_not_on, why_not_products
from optim_kernels.reference.muon import MuonRule, momentum_, updated
from optim_utils.low_bit import CUBIC8, QUINTIC8_UNSIGNED, quantize

_CUDA = torch.device("cuda")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# The largest relative error against fp64 of Newton–Schulz, and of a Muon step, keyed by the dtype of the products.
ALLOWED = {torch.float32: 2e-5, torch.float16: 1e-2}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m optim_kernels", description="Report and check the kernels.")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    as_json = parser.parse_args(argv).json
    facts, results = environment(), {}
    if not as_json:
        print("\n".join(f"{key:<16}{value}" for key, value in facts.items()), flush=True)
    for name, result in run_checks():
        results[name] = result
        if not as_json:
            print(f"{name:<44}{result}", flush=True)
    if as_json:
        print(json.dumps({**facts, "checks": results}, indent=1))
    return int(any(not result.startswith("ok") for result in results.values()))


def environment() -> dict[str, str]:
    """Versions, device, and how kernels run."""
    facts = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("optim-kernels", "optim-utils", "torch", "triton"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed as a distribution"
    facts["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts["kernels"] = how_kernels_run()
    return facts


def how_kernels_run() -> str:
    """Compiled, interpreted or not at all, and why."""
    if not has_triton():
        return "not available: triton is not installed; plain torch is used"
    if is_interpreted():
        return "interpreted (TRITON_INTERPRET=1)" if _has_numpy() else "not available: Triton's interpreter needs numpy"
    if not torch.cuda.is_available():
        return "not available: no CUDA device; plain torch is used (TRITON_INTERPRET=1 interprets them, with numpy)"
    reason, slow = why_not_on(_CUDA), why_not_products(_CUDA)
    if reason is not None:
        return f"not available: {reason}; plain torch is used"
    return "compiled" if slow is None else f"compiled, but for products of matrices, which are cuBLAS's: {slow}"


def _has_numpy() -> bool:
    return importlib.util.find_spec("numpy") is not None


def run_checks() -> Iterator[tuple[str, str]]:
    """Each check and its result: "ok" with the error found, or what is wrong; none where no kernel runs."""
    if how_kernels_run().startswith("not available"):
        return
    device = "cpu" if is_interpreted() else "cuda"
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        checks: dict[str, Callable[[], tuple[float, float]]] = {
            f"AdamW {name}": partial(check_adamw, dtype, device),
            f"AdamW {name}, one tensor": partial(check_adamw, dtype, device, shapes=((5000,),)),
            f"AdamW {name}, amsgrad": partial(check_adamw, dtype, device, amsgrad=True),
            f"AdamW {name}, 8-bit moments": partial(check_adamw, dtype, device, codes=True),
            f"norm of gradients {name}": partial(check_norm, dtype, device),
            f"clipping of gradients {name}": partial(check_clipping, dtype, device),
            f"sum of slices {name}": partial(check_slices, dtype, device),
            f"Muon's elementwise parts {name}": partial(check_muon_elements, dtype, device),
        }
        if dtype == torch.bfloat16:
            checks[f"AdamW {name}, stochastic rounding"] = partial(check_adamw, dtype, device, stochastic_rounding=True)
        for label, check in checks.items():
            yield label, outcome(check)
    for dtype, allowed in ALLOWED.items():
        name = str(dtype).removeprefix("torch.")
        for variant in ("torch", "nanochat-2026-07"):
            check = partial(check_muon, dtype, device, variant=variant, allowed=allowed)
            yield f"Muon's step {name}, {variant}", outcome(check)
        check = partial(check_muon, dtype, device, variant="torch", allowed=1e-2, stochastic_rounding=True)
        yield f"Muon's step {name}, stochastic rounding", outcome(check)
        check = partial(check_newton_schulz, dtype, device, allowed=allowed)
        yield f"Newton–Schulz {name}, tall and wide", outcome(check)
        check = partial(check_newton_schulz, dtype, device, allowed=allowed, coefficients="aol4", steps=4)
        yield f"Newton–Schulz {name}, row factors", outcome(check)


def outcome(check: Callable[[], tuple[float, float]]) -> str:
    """Run a check that returns its error and the largest allowed one; an exception is a result, too."""
    try:
        error, allowed = check()
    except Exception as problem:  # whatever goes wrong on a user's machine belongs in the report
        return f"FAILED: {type(problem).__name__}: {problem}"
    return f"ok, error {error:.2g}" if error <= allowed else f"FAILED: error {error:.2g}, allowed {allowed:.2g}"


def check_adamw(
    dtype: torch.dtype,
    device: str,
    *,
    shapes: Sequence[tuple[int, ...]] = ((300, 17), (5,), (2048,)),
    amsgrad: bool = False,
    codes: bool = False,
    stochastic_rounding: bool = False,
) -> tuple[float, float]:
    """Two steps of the kernel beside two of the reference: the largest difference, and 4 eps of the parameters."""
    generator = torch.Generator().manual_seed(0)

    def made(scale: float) -> list[Tensor]:
        return [(torch.randn(shape, generator=generator) * scale).to(device, dtype) for shape in shapes]

    params, grads = made(1.0), made(1.0)
    lists = {"params": params, "exp_avgs": made(0.1), "exp_avg_sqs": [x.square() for x in made(0.1)]}
    if amsgrad:
        lists["max_exp_avg_sqs"] = [x.square() for x in made(0.1)]
    if codes:
        lists["exp_avgs"] = [quantize(x, CUBIC8) for x in lists["exp_avgs"]]
        lists["exp_avg_sqs"] = [quantize(x, QUINTIC8_UNSIGNED) for x in lists["exp_avg_sqs"]]
    expected = {key: [x.clone() for x in tensors] for key, tensors in lists.items()}
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    for impl, tensors in (("triton", lists), ("torch", expected)):
        steps = torch.zeros((), dtype=torch.float32, device=device)
        arguments: dict[str, Any] = {**tensors, **options, "steps": steps, "impl": impl}
        for _ in range(2):
            functional.adamw_(grads=grads, stochastic_rounding=stochastic_rounding, **arguments)
    return largest_difference(params, expected["params"]), 4 * torch.finfo(dtype).eps


def check_norm(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """The relative error of the norm of a few tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(device, dtype) for size in (5000, 3, 4096)]
    norm, _ = GradientNorms("triton").norm_and_factor(tensors, 2.0, 1.0)
    exact = reference.sum_of_squares(tensors).sqrt()
    return float(((norm.double() - exact) / exact).abs()), 1e-6


def check_clipping(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """A few tensors scaled by 0.3: the largest difference from the rounded products, which must be 0."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(device, dtype) for size in (5000, 3, 4096)]
    factor = torch.full((), 0.3, device=device)
    expected = [(x.float() * factor).to(dtype) for x in tensors]
    if not GradientNorms("triton").scale_(tensors, factor):
        raise RuntimeError("the kernels do not take these tensors")
    return largest_difference(tensors, expected), 0.0


def check_slices(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Sums of slices in one tensor and in several: the largest difference from plain torch, which must be 0."""
    generator = torch.Generator().manual_seed(0)
    together = torch.randn(3, 5000, generator=generator).to(device, dtype)
    found, expected = (
        [
            functional.sum_slices(slices, torch.empty_like(together[0]), divisor=3.0, impl=impl)
            for slices in (together, [*together])
        ]
        for impl in ("triton", "torch")
    )
    return largest_difference(found, expected), 0.0


def check_muon_elements(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Momentum of a few tensors, and their update by U: the largest difference from plain torch, which must be 0."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((300, 17), (5,), (2048,))
    grads, buffers, params = (
        [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes] for _ in range(3)
    )
    us, expected = [torch.empty_like(p) for p in params], []
    for p, grad, buffer in zip(params, grads, buffers, strict=True):
        moved = buffer.clone()
        u = momentum_(grad, moved, momentum=0.95, rule=MuonRule()).to(dtype)
        new = updated(p, u.float(), lr=0.02, scale=1.5, weight_decay=0.1, cautious=True).to(dtype)
        expected += [moved, u, new]
    functional.MuonMomenta().step(grads, buffers, us, momentum=0.95)
    scales = [1.5] * len(shapes)
    functional.MuonUpdates().step(params, us, lr=0.02, weight_decay=0.1, scales=scales, cautious=True)
    found = [tensor for three in zip(buffers, us, params, strict=True) for tensor in three]
    return largest_difference(found, expected), 0.0


def check_muon(
    dtype: torch.dtype, device: str, *, variant: str, allowed: float, stochastic_rounding: bool = False
) -> tuple[float, float]:
    """Two steps of all matrices together beside the same in fp64: the largest relative error of a parameter's change.

    Parameters are in fp32, or in bf16 with stochastic rounding.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = ((16, 48), (48, 16), (32, 32)) if device == "cpu" else ((512, 2048), (1024, 256), (768, 768))
    # small beside their change, so that the rounding of parameters does not count
    starts = [0.02 * torch.randn(shape, generator=generator).to(device) for shape in shapes]
    if stochastic_rounding:
        starts = [x.bfloat16() for x in starts]
    ours = [x.clone().requires_grad_() for x in starts]
    exact = [x.double().requires_grad_() for x in starts]
    group = {"params": ours, "variant": variant, "stochastic_rounding": stochastic_rounding}
    by_kernels = TritonMuon([group], lr=2.0, ns_dtype=dtype, impl="triton")
    in_fp64 = TritonMuon([{"params": exact, "variant": variant}], lr=2.0, ns_dtype=torch.float64, impl="torch")
    for _ in range(2):
        for p, q in zip(ours, exact, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(p)
            q.grad = p.grad.double()
        by_kernels.step()
        in_fp64.step()
    moves = [(p.detach() - x.double(), q.detach() - x) for p, q, x in zip(ours, exact, starts, strict=True)]
    return largest((found - move).norm() / move.norm() for found, move in moves), allowed


def check_newton_schulz(
    dtype: torch.dtype, device: str, *, allowed: float, coefficients: str = "keller", steps: int = 5
) -> tuple[float, float]:
    """The largest error of the kernels' polynomial against the one in fp64."""
    generator = torch.Generator().manual_seed(0)
    # on a GPU also sizes whose products have tiles and schedules of their own
    shapes = ((16, 48), (48, 16)) + ((512, 2048), (1024, 1024), (2048, 2048), (4096, 4096)) * (device != "cpu")
    errors = []
    for shape in shapes:
        x = torch.randn(shape, generator=generator).to(device, dtype)
        run = partial(newton_schulz, steps=steps, coefficients=coefficients)
        # fp16 left open, large matrices start in int8 on Hopper
        is_open = x.is_cuda and dtype == torch.float16
        found = run(x, compute_dtype=None if is_open else dtype, impl="triton").double()
        exact = run(x.double(), compute_dtype=torch.float64, impl="torch")
        errors.append((found - exact).norm() / exact.norm())
    return largest(errors), allowed


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference between two lists of tensors, over all elements."""
    return largest((x.double() - y.double()).abs().max() for x, y in zip(found, expected, strict=True))


def largest(errors: Iterable[Tensor]) -> float:
    """The largest of some numbers; NaN if there is one, which Python's ``max`` would pass over."""
    return float(torch.stack(list(errors)).max())


if __name__ == "__main__":
    sys.exit(main())
