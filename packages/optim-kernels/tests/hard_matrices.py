"""Matrices that are hard for Newton–Schulz, and how far from fp64 its results may be on them."""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from optim_kernels import NSConfig, reference

# Relative errors simulated at 256×1024, products rounded and sums in fp32: Gaussian, singular values 1/i, 1/i² and from
# 1 to 1e-6, rank 8 beside noise of 1e-5. Limits are 1.3×.
ERRORS = {
    (torch.float16, "standard"): {
        "keller": (1.5e-3, 3.2e-3, 2.0e-2, 1.2e-2, 4.3e-2),
        "you": (6.9e-4, 2.8e-3, 1.9e-2, 1.1e-2, 4.6e-2),
        "polar_express": (1.2e-3, 2.6e-3, 3.1e-2, 1.9e-2, 7.6e-2),
        "polar_express_gram": (1.1e-3, 2.7e-3, 2.7e-2, 1.6e-2, 6.3e-2),
        "cans": (2.6e-3, 2.6e-3, 3.3e-2, 2.0e-2, 8.7e-2),
    },
    (torch.float16, "gram"): {
        "keller": (1.7e-3, 8.2e-3, 2.1e-2, 2.1e-2, 3.4e-2),
        "you": (9.2e-4, 5.5e-3, 1.9e-2, 1.7e-2, 3.6e-2),
        "polar_express": (1.9e-3, 7.9e-3, 3.4e-2, 5.2e-2, 6.4e-2),
        "polar_express_gram": (1.5e-3, 7.6e-3, 3.0e-2, 3.8e-2, 5.2e-2),
        "cans": (6.6e-3, 7.6e-3, 3.5e-2, 5.4e-2, 7.6e-2),
    },
    (torch.bfloat16, "auto"): {
        "keller": (1.2e-2, 2.5e-2, 0.16, 0.098, 0.34),
        "you": (5.4e-3, 2.3e-2, 0.15, 0.088, 0.36),
        "polar_express": (9.9e-3, 2.1e-2, 0.24, 0.15, 0.61),
        "polar_express_gram": (8.7e-3, 2.2e-2, 0.22, 0.13, 0.50),
        "cans": (2.7e-2, 2.1e-2, 0.26, 0.16, 0.70),
    },
}


def matrix(spectrum: Tensor, columns: int, seed: int = 0) -> Tensor:
    """A fp64 matrix with the given singular values."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(spectrum)
    u = torch.linalg.qr(torch.randn(rows, rows, dtype=torch.float64, generator=generator))[0]
    v = torch.linalg.qr(torch.randn(columns, rows, dtype=torch.float64, generator=generator))[0]
    return u * spectrum @ v.mT


@cache
def hard_matrices(m: int, n: int) -> tuple[Tensor, ...]:
    """Those that ``ERRORS`` is for."""
    generator = torch.Generator().manual_seed(0)
    gaussian, left, right = (torch.randn(s, generator=generator).double() for s in ((m, n), (m, 8), (8, n)))
    i = torch.arange(1.0, m + 1).double()
    spectra = [matrix(values, n) for values in (1 / i, 1 / i**2, torch.logspace(0, -6, m).double())]
    return gaussian, *spectra, left @ right / 8 + 1e-5 * gaussian


@cache
def matrices_of_few_rows(m: int, n: int) -> tuple[Tensor, ...]:
    """Gaussian rows beside zeros, and equal blocks of ones: rounding errors do not average out."""
    generator = torch.Generator().manual_seed(0)
    matrices = []
    for rows in (1, 2, 3, 4, 6, 8):
        matrices.append(torch.zeros(m, n).double())
        matrices[-1][:rows] = torch.randn(rows, n, generator=generator)
    blocks = [torch.block_diag(*[torch.ones(m // count, n // count)] * count).double() for count in (1, 2, 4)]
    return *matrices, *blocks


@cache
def with_results(
    matrices: Callable[[int, int], tuple[Tensor, ...]], m: int, n: int, config: NSConfig
) -> list[tuple[Tensor, Tensor]]:
    """Each with what Newton–Schulz makes of it in fp64."""
    return [(x, reference.newton_schulz(x, config.triples, norm_scale=config.norm_scale)) for x in matrices(m, n)]
