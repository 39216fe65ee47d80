"""Where gradients go: the layouts between which they move, by one of two rules.

A redistribution is linear. It takes the values x_c of the source's contributions c to the value v = Σ_c x_c, which it
writes to every place of the target that needs it. Let y_t be what target rank t gets.

``"replicate"`` is DTensor's rule: there is one loss L, which every rank computes. Ranks that hold the same have the
same gradient, and each of them gets ∂L/∂v or ∂L/∂x_c = ∂L/∂v. So gradients move between the layouts of target and
source, with pending reductions read as replicated.

``"adjoint"`` is the transpose of the map from all ranks' parts to all ranks' parts: the loss is Σ_t L_t over all ranks.

    y_t = v for t = 1 … q       =>      ∂L/∂v = Σ_t ∂L_t/∂y_t           replicated  ->  contributions to be added
    v = Σ_c x_c                 =>      ∂L/∂x_c = ∂L/∂v for every c     contributions  ->  replicated

Gradients thus move between the layouts of target and source with both exchanged: the transpose of a gather is a
reduce-scatter, that of a reduce-scatter a gather, that of an all-reduce an all-reduce. In particular the gradients of a
replicated source are contributions: over the ranks that hold the same, they add up to the gradient of what these hold.
Were each of them the whole sum, a gather that follows on would count it once for each replica.

A pending average of n contributions is v = Σ_c x_c / n, so ∂L/∂x_c = ∂L/∂v / n.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import Literal, NamedTuple, get_args

from optim_redist.errors import UnsupportedError
from optim_redist.layout import Layout
from optim_redist.shares import shared_out

GradientRule = Literal["replicate", "adjoint"]


class Way(NamedTuple):
    """How a gradient moves: times ``factor``, from ``src`` to ``dst``, and there into a part of zeros as in ``whole``.

    ``whole`` is ``dst`` unless a source that is replicated gets contributions, of which each rank has some elements.
    """

    src: Layout
    dst: Layout
    whole: Layout
    factor: float


def check_rule(rule: str) -> None:
    """Raise ``UnsupportedError`` if this is no rule."""
    if rule not in get_args(GradientRule):
        raise UnsupportedError(f'grad is "replicate" or "adjoint", got {rule!r}')


def check_linear(src: Layout, dst: Layout) -> None:
    """Raise ``UnsupportedError`` if a minimum, maximum or product is pending, which are not linear."""
    for name, layout in (("src", src), ("dst", dst)):
        for axis, op in layout.partial:
            if op not in ("sum", "avg") and layout.mesh.sizes[axis] > 1:
                raise UnsupportedError(
                    f"{name} is {layout}: a pending {op} is not linear and has no gradient here; call under "
                    "torch.no_grad(), or pass tensor.detach()"
                )


@lru_cache(maxsize=1024)
def way_back(shape: tuple[int, ...], src: Layout, dst: Layout, rule: GradientRule) -> Way:
    """How the gradient of a move from ``src`` to ``dst`` gets from the target's ranks to the source's."""
    here, there = dual(dst, rule), dual(src, rule)
    averaged = [prod(layout.mesh.sizes[axis] for axis, op in layout.partial if op == "avg") for layout in (dst, src)]
    return Way(here, shared_out(shape, here, there), there, averaged[0] / averaged[1])


def dual(layout: Layout, rule: GradientRule) -> Layout:
    """The layout of the gradient of a tensor in this layout."""
    pending = [axis for axis in layout.replicated_axes if layout.mesh.sizes[axis] > 1] if rule == "adjoint" else []
    return Layout(layout.mesh, layout.dims, dict.fromkeys(pending, "sum"))
