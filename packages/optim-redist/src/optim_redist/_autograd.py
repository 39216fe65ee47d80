"""Moves of this rank's part that autograd follows.

A rank outside of a layout takes part in every backward pass all the same, so it has an input and an output there, too:
tensors of no elements.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from optim_redist.gradients import GradientRule, way_back
from optim_redist.layout import Layout
from optim_redist.shares import put_back


class Mover(Protocol):
    """Moves a rank's part from one layout to another; None stands for no part, which is to be on ``like``'s device."""

    def __call__(self, part: Tensor | None, src: Layout, dst: Layout, like: Tensor) -> Tensor | None: ...


class Move(NamedTuple):
    """A move as this rank sees it, and the rule of its gradients."""

    shape: tuple[int, ...]
    src: Layout
    dst: Layout
    rank: int
    rule: GradientRule
    run: Mover


def followed(tensor: Tensor, move: Move) -> Tensor:
    """This rank's part of the target, with a gradient; a tensor of no elements outside of the target."""
    moved: Tensor = _Followed.apply(tensor, move)
    return moved


class _Followed(torch.autograd.Function):
    """Forward moves values, backward moves gradients, which is again a move that autograd follows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, move: Move) -> Tensor:
        ctx.move = move
        # any other shape is refused as the part of a rank that has none
        absent = tuple(tensor.shape) == (0,) and move.rank not in move.src.mesh.coordinates
        part = None if absent else tensor
        moved = move.run(part, move.src, move.dst, tensor)
        return moved if moved is not None else tensor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        move: Move = ctx.move
        way = way_back(move.shape, move.src, move.dst, move.rule)
        gradient = gradients[0] if way.factor == 1 else gradients[0] * way.factor
        arrived = followed(gradient, move._replace(src=way.src, dst=way.dst))
        return put_back(arrived, move.shape, way.dst, way.whole, move.rank), None
