"""Newton–Schulz by others: torch's own ways to write it, and packages that are installed, on a matrix or a batch.

Each takes ``x`` [..., M, N] in fp16 or bf16. torch's ways run the iteration that ours does. A package runs five steps
with its own kernels, with the coefficients and the method that it runs fastest; all cost the same products.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from optim_kernels import NSConfig

Iteration = Callable[[Tensor], Tensor]

STEPS = 5
KELLER = (3.4445, -4.7750, 2.0315)


def peers_of(config: NSConfig, wanted: str, device: str) -> dict[str, Iteration]:
    """What ours is compared with, by name: plain torch's ways, and packages that are installed."""
    peers: dict[str, Iteration] = {}
    if wanted != "none":
        peers = {"built-in": lambda x: torch_built_in(x, config), "addmm": lambda x: torch_addmm(x, config)}
        if device == "cuda":
            peers["torch.compile"] = torch.compile(lambda x: torch_built_in(x, config), dynamic=False)
    if device == "cuda" and wanted == "all":
        peers |= installed_peers()
    return peers


def torch_built_in(x: Tensor, config: NSConfig) -> Tensor:
    """The iteration as torch.optim.Muon writes it, on batches too: dense products, no use of symmetry."""
    y = x.mT if x.shape[-2] > x.shape[-1] else x
    y = (y.float() / y.float().norm(dim=(-2, -1), keepdim=True)).to(x.dtype)
    for a, b, c in config.triples:
        gram = y @ y.mT
        s = b * gram + c * (gram @ gram)
        y = a * y + s @ y
    return y.mT if x.shape[-2] > x.shape[-1] else y


def torch_addmm(x: Tensor, config: NSConfig) -> Tensor:
    """The iteration with the additions inside dense products, as cuBLAS offers them."""
    y = x.mT if x.shape[-2] > x.shape[-1] else x
    y = (y.float() / y.float().norm(dim=(-2, -1), keepdim=True)).to(x.dtype)
    add = torch.addmm if y.ndim == 2 else torch.baddbmm
    for a, b, c in config.triples:
        gram = y @ y.mT
        y = add(y, add(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if x.shape[-2] > x.shape[-1] else y


def installed_peers() -> dict[str, Iteration]:
    """The peers whose packages can be found and imported; one that cannot be is said so."""
    peers: dict[str, Iteration] = {}
    for name, (packages, make) in PEERS.items():
        try:
            peers |= {name: make()} if all(map(find_spec, packages)) else {}
        except ImportError as problem:
            print(f"{name} is installed but cannot be imported: {problem}")
    return peers


def gram_newton_schulz(by_quack: bool) -> Iteration:
    """gram-newton-schulz: the Gram form, its products by quack's kernels (CuTe) or by torch's."""
    from gram_newton_schulz import GramNewtonSchulz  # type: ignore[import-not-found]

    # the compiled form's own CUDA graphs would be nested in the one that is timed
    return GramNewtonSchulz(ns_use_kernels=by_quack, compile_kwargs={"fullgraph": True})


def triton_muon_adamw() -> Iteration:
    """triton-muon-adamw: a launch for each of the three products of a step, one matrix at a time."""
    from triton_muon_adamw.muon.triton_muon import newton_shultz_step  # type: ignore[import-not-found]

    def one(x: Tensor) -> Tensor:
        tall = x.shape[0] > x.shape[1]
        x = x.T.contiguous() if tall else x
        x = x / x.norm().clamp(min=1e-7)
        other = torch.empty_like(x)
        for _ in range(STEPS):
            newton_shultz_step(x, *KELLER, other)
            x, other = other, x
        return x.T if tall else x

    return lambda x: one(x) if x.ndim == 2 else torch.stack([one(matrix) for matrix in x])


def muonium() -> Iteration:
    """muonium: its symmetric Triton kernel inside a compiled loop."""
    from muonium.orthogonalize.newton_schulz import ns_loop_triton  # type: ignore[import-not-found]

    return lambda x: ns_loop_triton(x if x.ndim == 3 else x[None], STEPS).view(x.shape)


def emerging_optimizers() -> Iteration:
    """Emerging-Optimizers: symmetric products by its kernel, from fp32 to fp32; bf16 inside needs torch's global flag.

    Its kernel is tuned over 486 configurations, half an hour a shape; here over those with tiles of 128, depth 64.
    """
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import (  # type: ignore[import-not-found]
        newton_schulz,
    )
    from emerging_optimizers.triton_kernels import syrk  # type: ignore[import-not-found]

    for kernel in (syrk.syrk_kernel_bf16, syrk.syrk_kernel_bf16_for_small_matrix):
        kernel.configs = [each for each in kernel.configs if _is_usual(each.kwargs)]

    def run(x: Tensor) -> Tensor:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            return newton_schulz(x.float(), STEPS, use_syrk=x.ndim == 2)
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def _is_usual(tiles: dict[str, int]) -> bool:
    """Whether a configuration's tiles are 128×128×64, rows in groups of 8 if at all."""
    usual = {"TILE_M": 128, "TILE_N": 128, "TILE_K": 64, "GROUP_SIZE_M": 8}
    return all(usual[name] == size for name, size in tiles.items())


PEERS: dict[str, tuple[tuple[str, ...], Callable[[], Iteration]]] = {
    "gram-newton-schulz": (("gram_newton_schulz",), partial(gram_newton_schulz, by_quack=False)),
    "gram-newton-schulz, quack": (("gram_newton_schulz", "quack"), partial(gram_newton_schulz, by_quack=True)),
    "triton-muon-adamw": (("triton_muon_adamw",), triton_muon_adamw),
    "muonium": (("muonium",), muonium),
    "Emerging-Optimizers": (("emerging_optimizers",), emerging_optimizers),
}
