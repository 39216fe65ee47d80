"""Newton–Schulz's products on the GPU, with gradients, and the names that other projects have for them.

    gram                alpha x xᵀ             one triangle computed and mirrored
    symmetric_matmul    alpha a b + beta c     likewise, for symmetric operands that commute
    matmul_add          alpha a b + beta c     b rectangular

They are built on `symmetric_product` and `general_product`, the launches on batches that the copy engine can read.
"""

from __future__ import annotations

from torch import Tensor

from optim_kernels._newton_schulz.copy_engine import as_batch, empty_matrices
from optim_kernels._newton_schulz.product_launches import general_product, symmetric_product
from optim_kernels._newton_schulz.product_ops import gram, matmul_add, symmetric_matmul
from optim_kernels._newton_schulz.tile_choice import has_gluon, num_multiprocessors, portable_tile
from optim_kernels.orthogonalization import newton_schulz

__all__ = [
    "as_batch",
    "empty_matrices",
    "fast_newtonschulz",
    "general_product",
    "gram",
    "has_gluon",
    "matmul_add",
    "matmul_transpose",
    "matmul_transpose_assign",
    "num_multiprocessors",
    "portable_tile",
    "symmetric_matmul",
    "symmetric_product",
    "zeropower_via_newtonschulz5",
]


def zeropower_via_newtonschulz5(G: Tensor, steps: int = 5) -> Tensor:
    """Keller Jordan's function: Newton–Schulz with his coefficients, on bf16 matrices; the result is bf16."""
    return newton_schulz(G.bfloat16(), steps, eps_mode="add")


# flash-muon's name for it
fast_newtonschulz = zeropower_via_newtonschulz5


def matmul_transpose(x: Tensor) -> Tensor:
    """``x xᵀ``, as flash-muon calls it."""
    return gram(x)


def matmul_transpose_assign(x: Tensor, out: Tensor) -> None:
    """``out = x xᵀ``, as flash-muon calls it."""
    gram(x, out=out)
