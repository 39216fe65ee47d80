"""``python -m optim_kernels [--json]``: versions, the device, and a check of every kernel against the reference.

Without a GPU the kernels are checked in Triton's interpreter, if ``TRITON_INTERPRET=1`` is set. The exit status is 1 if
a check fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from optim_kernels import functional, newton_schulz, reference
from optim_kernels._gradient_norm import GradientNorms
from optim_kernels._impl import has_triton, is_interpreted
from optim_kernels.reference.muon import MuonRule, momentum_, updated
from optim_utils.low_bit import CUBIC8, QUINTIC8_UNSIGNED, quantize

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m optim_kernels", description="Report and check the kernels.")
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
    as_json = parser.parse_args(argv).json
    report: dict[str, Any] = {**environment(), "checks": run_checks()}
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        print("\n".join(f"{key:<16}{value}" for key, value in report.items() if key != "checks"))
        print("\n".join(f"{name:<44}{result}" for name, result in report["checks"].items()))
    return int(any(not result.startswith("ok") for result in report["checks"].values()))


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
    if torch.cuda.is_available():
        return "compiled"
    return "not available: no CUDA device; plain torch is used (TRITON_INTERPRET=1 interprets them, with numpy)"


def _has_numpy() -> bool:
    return importlib.util.find_spec("numpy") is not None


def run_checks() -> dict[str, str]:
    """The result of each check: "ok" with the error found, or what is wrong; empty where no kernel runs."""
    if not has_triton() or not (_has_numpy() if is_interpreted() else torch.cuda.is_available()):
        return {}
    device = "cpu" if is_interpreted() else "cuda"
    results = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        checks: dict[str, Callable[[], tuple[float, float]]] = {
            f"AdamW {name}": partial(check_adamw, dtype, device),
            f"AdamW {name}, amsgrad": partial(check_adamw, dtype, device, amsgrad=True),
            f"AdamW {name}, 8-bit moments": partial(check_adamw, dtype, device, codes=True),
            f"norm of gradients {name}": partial(check_norm, dtype, device),
            f"Muon's elementwise parts {name}": partial(check_muon_elements, dtype, device),
        }
        if dtype == torch.bfloat16:
            checks[f"AdamW {name}, stochastic rounding"] = partial(check_adamw, dtype, device, stochastic_rounding=True)
        for label, check in checks.items():
            results[label] = outcome(check)
    results["Newton–Schulz float32, tall and wide"] = outcome(partial(check_newton_schulz, device))
    return results


def outcome(check: Callable[[], tuple[float, float]]) -> str:
    """Run a check that returns its error and the largest allowed one; an exception is a result, too."""
    try:
        error, allowed = check()
    except Exception as problem:  # whatever goes wrong on a user's machine belongs in the report
        return f"FAILED: {type(problem).__name__}: {problem}"
    return f"ok, error {error:.2g}" if error <= allowed else f"FAILED: error {error:.2g}, allowed {allowed:.2g}"


def check_adamw(
    dtype: torch.dtype, device: str, *, amsgrad: bool = False, codes: bool = False, stochastic_rounding: bool = False
) -> tuple[float, float]:
    """Two steps of the kernel beside two of the reference: the largest difference, and an ulp of the parameters."""
    generator = torch.Generator().manual_seed(0)

    def made(scale: float) -> list[Tensor]:
        shapes = ((300, 17), (5,), (2048,))
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
    error = max(float((p.double() - q.double()).abs().max()) for p, q in zip(params, expected["params"]))
    return error, 4 * torch.finfo(dtype).eps


def check_norm(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """The relative error of the norm of a few tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(device, dtype) for size in (5000, 3, 4096)]
    norm, _ = GradientNorms("triton").norm_and_factor(tensors, 2.0, 1.0)
    exact = reference.sum_of_squares(tensors).sqrt()
    return float(((norm.double() - exact) / exact).abs()), 1e-6


def check_muon_elements(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """The momentum of a few tensors, and their update by U: the largest difference from plain torch, which is none."""
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
    error = max(float((x.double() - y.double()).abs().max()) for x, y in zip(found, expected, strict=True))
    return error, 0.0


def check_newton_schulz(device: str) -> tuple[float, float]:
    """The largest error of the kernels' polynomial against the one in fp64."""
    generator = torch.Generator().manual_seed(0)
    errors = []
    for shape in ((16, 48), (48, 16)):
        x = torch.randn(shape, generator=generator).to(device)
        found = newton_schulz(x, compute_dtype=torch.float32, impl="triton").double()
        exact = newton_schulz(x.double(), compute_dtype=torch.float64, impl="torch")
        errors.append(float((found - exact).norm() / exact.norm()))
    return max(errors), 2e-5


if __name__ == "__main__":
    sys.exit(main())
