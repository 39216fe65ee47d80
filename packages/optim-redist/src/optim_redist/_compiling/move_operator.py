"""The operator ``optim_redist::move``: a move of a rank's part, as ``torch.compile`` takes it into its graphs.

The layouts are texts, so that they are constants of the graph, and a plan is made when it is traced. So is the rank:
caches of compiled graphs are shared by the ranks of a machine, whose parts differ in shape. The operator is an ordered
effect: no compiler drops a call whose result one rank does not need, or changes the order of calls on some ranks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from json import loads
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op

from optim_redist._compiling.call_order import keep_order
from optim_redist._running import collectives
from optim_redist.errors import LayoutError, UnsupportedError
from optim_redist.execute import default_model, program_for, redistribute_local
from optim_redist.gradients import GradientRule, check_linear, check_rule, way_back
from optim_redist.layout import Layout, PartialInit
from optim_redist.planning import plan, whole_bytes
from optim_redist.plans import Plan
from optim_redist.shares import put_back


def _rank() -> int:
    return collectives.my_rank()


def _is_inside(src: str, dst: str) -> bool:
    """Whether this rank has a part in both layouts, which are known."""
    return all(text != "" and collectives.my_rank() in _layout(text).mesh.coordinates for text in (src, dst))


# called while a graph is traced, and not traced themselves
for _function in (Layout.to_text, _rank, _is_inside):
    torch.compiler.assume_constant_result(_function)


def takes(
    tensor: Any,
    shape: object,
    src: Any,
    dst: Any,
    *,
    out: object = None,
    group: object = None,
    dtype: Any = None,
    async_op: bool = False,
    cost_model: object = None,
    topology: object = None,
    donate: bool = False,
    memory_limit: object = None,
    device: object = None,
    copy: object = True,
    grad: object = "replicate",
    partial_init: object = "owner",
    **unknown: object,
) -> bool:
    """Whether the operator does what ``redistribute_local`` does with these arguments; it refuses the unknown ones."""
    if not _IS_ORDERED or unknown:
        return False
    if out is not None or group is not None or cost_model is not None or topology is not None or async_op or donate:
        return False
    if not isinstance(src, Layout) or not isinstance(dst, Layout) or type(tensor) not in (Tensor, torch.nn.Parameter):
        return False
    # of options of other types, the function says what is wrong with them
    if not isinstance(memory_limit, int | float | None) or not all(isinstance(o, str) for o in (grad, partial_init)):
        return False
    return (dtype is None or dtype == tensor.dtype) and _is_inside(src.to_text(), dst.to_text())


def moved(
    tensor: Tensor,
    shape: Sequence[int],
    src: Layout,
    dst: Layout,
    *,
    memory_limit: float | None = None,
    grad: str = "replicate",
    partial_init: str = "owner",
    **others: object,
) -> Tensor:
    """``redistribute_local`` by the operator."""
    limit = whole_bytes(memory_limit)
    found: Tensor = move(tensor, tuple(shape), src.to_text(), dst.to_text(), _rank(), limit, grad, partial_init)
    return found


# what a graph break says, and the error of fullgraph=True
_REASON = (
    "a graph takes redistribute_local without out, async_op, donate, group, cost_model and topology, for a tensor of "
    "its dtype, between layouts that are made outside of the compiled function and have this rank, where torch has "
    "ordered effects"
)
untraced = torch.compiler.disable(cast(Any, redistribute_local).__wrapped__, reason=_REASON)


@lru_cache(maxsize=4096)
def _layout(text: str) -> Layout:
    return Layout.from_json(loads(text))


def _plan(part: Tensor, shape: Sequence[int], src: str, dst: str, memory_limit: int | None, partial_init: str) -> Plan:
    limit = None if memory_limit is None else int(memory_limit)
    sizes = [int(n) for n in shape]
    start, model = cast(PartialInit, partial_init), default_model(None)
    layouts = _layout(src), _layout(dst)
    return plan(sizes, part.dtype, *layouts, cost_model=model, memory_limit=limit, partial_init=start)


# a program's first run makes groups and compares plans, so no CUDA graph captures it
@custom_op("optim_redist::move", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def move(
    part: Tensor,
    shape: Sequence[int],
    src: str,
    dst: str,
    rank: int,
    memory_limit: int | None,
    grad: str,
    partial_init: str,
) -> Tensor:
    """This rank's part of the target, in memory of its own."""
    if rank != collectives.my_rank():
        raise UnsupportedError(
            f"this compiled function was traced on rank {rank}, and this process is rank {collectives.my_rank()} now; "
            "call torch.compiler.reset() when process groups are made anew, so that it is traced again"
        )
    found = program_for(_plan(part, shape, src, dst, memory_limit, partial_init))(part)
    assert found is not None, "this rank is in the target"
    return found.clone(memory_format=torch.contiguous_format) if found is part else found


@move.register_fake
def _(
    part: Tensor,
    shape: Sequence[int],
    src: str,
    dst: str,
    rank: int,
    memory_limit: int | None,
    grad: str,
    partial_init: str,
) -> Tensor:
    check_rule(grad)
    # called anew by each compiler that takes the graph
    keep_order(torch.ops.optim_redist.move.default)
    made = _plan(part, shape, src, dst, memory_limit, partial_init)
    expected = made.src.local_shape(made.shape, rank)
    if tuple(part.shape) != expected:
        raise LayoutError(f"rank {rank}: the source tensor has shape {tuple(part.shape)}, its layout says {expected}")
    return part.new_empty(made.dst.local_shape(made.shape, rank))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, shape, src, dst, rank, memory_limit, grad, _ = inputs
    check_linear(_layout(src), _layout(dst))
    ctx.way = way_back(tuple(int(n) for n in shape), _layout(src), _layout(dst), cast(GradientRule, grad))
    ctx.options = tuple(shape), rank, memory_limit, grad


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    way = ctx.way
    shape, rank, memory_limit, grad = ctx.options
    gradient = gradient if way.factor == 1 else gradient * way.factor
    arrived = move(gradient, shape, way.src.to_text(), way.dst.to_text(), rank, memory_limit, grad, "owner")
    return put_back(arrived, shape, way.dst, way.whole, rank), *[None] * 7


move.register_autograd(_backward, setup_context=_remember)
# not every torch has ordered effects
_IS_ORDERED = hasattr(torch.library, "EffectType") and hasattr(move, "register_effect")
if _IS_ORDERED:
    move.register_effect(torch.library.EffectType.ORDERED)
