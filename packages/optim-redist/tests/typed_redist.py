"""What type checkers see of the public functions: checked by the session ``typecheck``, not run."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from optim_redist import Handle, Item, Layout, Mesh, compile, plan, redistribute, redistribute_local, redistribute_many


def local(part: Tensor, src: Layout, dst: Layout, later: bool) -> None:
    assert_type(redistribute_local(part, (8,), src, dst), Tensor | None)
    assert_type(redistribute_local(part, (8,), src, dst, async_op=True), Handle[Tensor | None])
    assert_type(redistribute_local(part, (8,), src, dst, async_op=True).wait(), Tensor | None)
    assert_type(redistribute_local(part, (8,), src, dst, async_op=later), Tensor | Handle[Tensor | None] | None)


def program(part: Tensor, src: Layout, dst: Layout) -> None:
    run = compile(plan((8,), torch.bfloat16, src, dst))
    assert_type(run(part), Tensor | None)
    assert_type(run(part, async_op=True), Handle[Tensor | None])
    plan((8,), "bf16", src, dst)
    plan((8,), 16, src, dst)  # type: ignore[arg-type]


def distributed(tensor: DTensor, later: bool) -> None:
    assert_type(redistribute(tensor, placements=[Replicate()]), DTensor)
    assert_type(redistribute(tensor, placements=[Replicate()], async_op=True).wait(), DTensor)
    assert_type(redistribute(tensor, placements=[Replicate()], async_op=later), DTensor | Handle[DTensor])


def many(item: Item, later: bool) -> None:
    assert_type(redistribute_many([item]), list[Tensor | None])
    assert_type(redistribute_many({"w": item}), dict[str, Tensor | None])
    assert_type(redistribute_many({0: item}, async_op=True).wait(), dict[int, Tensor | None])
    assert_type(redistribute_many([item], async_op=True).wait(), list[Tensor | None])
    assert_type(redistribute_many([item], async_op=later), list[Tensor | None] | Handle[list[Tensor | None]])


def placed() -> None:
    Layout.from_placements(Mesh(4), [Replicate()], (8,), {0: [0]})
    Layout.from_placements(Mesh(4), ["R"], (8,))  # type: ignore[list-item]
