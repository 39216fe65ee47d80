"""Many tensors of different dtypes, layouts and meshes in one exchange a bucket."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from redist_cases import part_of, random_case

from optim_redist import (
    Item,
    Layout,
    LayoutError,
    Mesh,
    PlanMismatchError,
    RedistError,
    UnsupportedError,
    many,
    redistribute_local,
    redistribute_many,
)
from optim_utils.testing import run_ranks

DTYPES = [torch.bfloat16, torch.int64, torch.uint8, torch.float32, torch.complex128]


def _tasks(rank: int, num_tasks: int) -> tuple[dict[str, Item], dict[str, Any]]:
    items, expected = {}, {}
    for seed in range(num_tasks):
        shape, src, dst = random_case(seed, "COBURIEKM", [(4,), (2, 2), (3,), (2,)])
        if max((*src.mesh.ranks, *dst.mesh.ranks)) > 3:
            continue
        full = torch.arange(prod(shape)).reshape(shape).to(DTYPES[seed % len(DTYPES)])
        items[f"w{seed}"] = Item(part_of(full, src, rank), shape, src, dst, full.dtype)
        expected[f"w{seed}"] = part_of(full, dst, rank)
    return items, expected


def _move_all(rank: int, world: int, bucket_bytes: int, async_op: bool) -> None:
    items, expected = _tasks(rank, 40)
    assert len(items) > 20
    # every rank may list them in its own order
    names = sorted(items, key=lambda name: hash((rank, int(name[1:]))))
    for _ in range(2):
        found = redistribute_many({name: items[name] for name in names}, bucket_bytes=bucket_bytes, async_op=async_op)
        found = found.wait() if async_op else found
        assert list(found) == names
        for name, part in expected.items():
            assert (part is None) == (found[name] is None)
            assert part is None or torch.equal(part, found[name]), name


@pytest.mark.parametrize(("bucket_bytes", "async_op"), [(2**20, False), (200, True)], ids=["one-bucket", "many"])
def test_many_tensors_at_once(bucket_bytes: int, async_op: bool) -> None:
    run_ranks(_move_all, 4, bucket_bytes, async_op)


def _gradients(rank: int, world: int) -> None:
    mesh = Mesh(4)
    partial, sharded, whole = Layout(mesh, [None], {0: "sum"}), Layout(mesh, [0]), Layout(mesh, [None])
    mine = torch.full((10,), float(rank + 1))
    found = redistribute_many(
        [
            (mine, (10,), partial, sharded),
            (mine, (10,), partial, whole),
            (mine[:3] if rank < 3 else mine[:1], (10,), sharded, whole),
        ]
    )
    assert torch.equal(found[0], torch.full(sharded.local_shape((10,), rank), 10.0))
    assert torch.equal(found[1], torch.full((10,), 10.0))
    assert torch.equal(found[2], torch.tensor([1.0] * 3 + [2.0] * 3 + [3.0] * 3 + [4.0]))


def test_reductions_share_the_exchange() -> None:
    run_ranks(_gradients, 4)


def _forgetful(rank: int, world: int) -> None:
    mesh, pair = Mesh(4), Mesh(2)
    src, dst = Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    full = torch.arange(64.0).reshape(8, 8)
    for _ in range(2):
        (found,) = redistribute_many([(part_of(full, src, rank), (8, 8), src, dst)])
        assert torch.equal(found, part_of(full, dst, rank))
        # two of the ranks do so much else that they forget what all of them did
        for n in range(2, 2 + many._CACHE_SIZE if rank < 2 else 2):
            half = part_of(torch.zeros(n), Layout(pair, [0]), rank)
            redistribute_many([(half, (n,), Layout(pair, [0]), Layout(pair, [None]))])


def test_ranks_that_forget_programs_do_not_wait_for_those_that_know_them() -> None:
    run_ranks(_forgetful, 4, timeout=60)


def _other_names(rank: int, world: int) -> None:
    src, dst = Layout(Mesh(2), [0, None]), Layout(Mesh(2), [None, 0])
    full = torch.arange(64.0).reshape(8, 8)
    item = Item(part_of(full, src, rank), (8, 8), src, dst)
    names = ("weight", f"only on rank {rank}")
    with pytest.raises(PlanMismatchError, match=r"name\.0: only on rank 0' against 'name\.0: only on rank 1'"):
        redistribute_many(dict.fromkeys(names, item))
    # the same tensors by agreed names, and by numbers
    for items in ({"weight": item, "bias": item}, {("weight", 0): item}, [item, item]):
        found = redistribute_many(items)
        for part in found.values() if isinstance(found, dict) else found:
            assert torch.equal(part, part_of(full, dst, rank))


def _other_tensors(rank: int, world: int) -> None:
    src, dst = Layout(Mesh(2), [0]), Layout(Mesh(2), [None])
    items = [Item(part_of(torch.zeros(n), src, rank), (n,), src, dst) for n in (4, 5, 6)]
    with pytest.raises(PlanMismatchError, match="'tensors: 3' against 'tensors: 2'"):
        redistribute_many(items[rank:])
    with pytest.raises(PlanMismatchError, match="'memory_limit: 1000000' against 'memory_limit: null'"):
        redistribute_many(items, memory_limit=None if rank else 10**6)
    with pytest.raises(PlanMismatchError, match=r"'1: plan\.shape\.0: 5' against '1: plan\.shape\.0: 6'"):
        redistribute_many([items[0], items[1 + rank]])
    with pytest.raises(PlanMismatchError, match=r"'bias': plan\.shape\.0: 4. against .'bias': plan\.shape\.0: 6"):
        redistribute_many({"weight": items[1], "bias": items[2 * rank]})


def test_other_tensors_on_a_rank_are_named() -> None:
    run_ranks(_other_tensors, 2)


def test_tensors_of_other_names_are_not_exchanged() -> None:
    run_ranks(_other_names, 2)


def _outside(rank: int, world: int) -> None:
    src, dst = Layout(Mesh(2), [0]), Layout(Mesh(2), [None])
    item = Item(part_of(torch.arange(4), src, rank), (4,), src, dst, torch.int64)
    if rank < 2:
        assert torch.equal(redistribute_many([item])[0], torch.arange(4))
    else:
        with pytest.raises(UnsupportedError, match=r"rank 2 is in no layout and not in the group; only ranks \(0, 1\)"):
            redistribute_many([item])
        with pytest.raises(UnsupportedError, match=r"rank 2 is in neither layout nor group; only ranks \(0, 1\)"):
            redistribute_local(None, (4,), src, dst, dtype=torch.int64)
    far = Layout(Mesh(2, ranks=[0, 7]), [0])
    with pytest.raises(UnsupportedError, match="the layouts name rank 7, the world has 3 ranks"):
        redistribute_local(torch.zeros(2), (4,), far, Layout(far.mesh, [None]))


def test_a_rank_in_no_layout_is_refused() -> None:
    run_ranks(_outside, 3)


def test_errors_name_the_tensor() -> None:
    one = Layout(Mesh(1), [None])
    halves = Item(torch.zeros(2), (4,), Layout(Mesh(2), [0]), Layout(Mesh(2), [None]))
    with pytest.raises(UnsupportedError, match=r"call torch\.distributed\.init_process_group first"):
        redistribute_many([halves])
    with pytest.raises(LayoutError, match="'b' has no tensor"):
        redistribute_many({"b": (None, (3,), one, one)})
    with pytest.raises(LayoutError, match=r"'b' has local shape \(2,\)"):
        redistribute_many({"b": (torch.zeros(2), (3,), one, one)})
    with pytest.raises(LayoutError, match=r"'b' is a tensor of torch\.float32, and dtype=torch\.int8 was given"):
        redistribute_many({"b": (torch.zeros(3), (3,), one, one, torch.int8)})
    for there in (torch.zeros(3), None):
        with pytest.raises(UnsupportedError, match=r"the dtype of 'b' must be a torch\.dtype or None, got 'float32'"):
            redistribute_many({"b": (there, (3,), one, one, "float32")})
    with pytest.raises(UnsupportedError, match=r"'b' is a ndarray, this takes a torch\.Tensor or None"):
        redistribute_many({"b": (torch.zeros(3).numpy(), (3,), one, one)})
    apart = {"a": (torch.zeros(3), (3,), one, one), "b": (torch.zeros(3, device="meta"), (3,), one, one)}
    with pytest.raises(LayoutError, match=r"'a' is on cpu, and 'b' on meta; .* call once for each device"):
        redistribute_many(apart)
    with pytest.raises(LayoutError, match=r"'b' is a tuple of 3, .* \(tensor, shape, src, dst\[, dtype\]\)"):
        redistribute_many({"b": (torch.zeros(3), (3,), one)})
    with pytest.raises(LayoutError, match="0 is a Tensor, not an Item"):
        redistribute_many(torch.zeros(3))
    with pytest.raises(LayoutError, match=r"names that have an order, got 'b', 1"):
        redistribute_many(dict.fromkeys(("b", 1), (torch.zeros(3), (3,), one, one)))
    with pytest.raises(LayoutError, match="items is a NoneType, this takes a dict or a list of Item"):
        redistribute_many(None)  # type: ignore[call-overload]
    for none in (0, float("nan"), "1MiB"):
        with pytest.raises(RedistError, match="bucket_bytes must be positive, got "):
            redistribute_many({"b": (torch.zeros(3), (3,), one, one)}, bucket_bytes=none)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="src must be a Layout") as caught:
        redistribute_many({"a": (torch.zeros(3), (3,), one, one), "b": (torch.zeros(3), (3,), [one], one)})
    assert caught.value.__notes__ == ["in the plan of 'b'"]
    assert redistribute_many({}) == {}
    assert redistribute_many([]) == []
    with pytest.raises(RedistError, match="bucket_bytes"):
        redistribute_many([], bucket_bytes=0)
    with pytest.raises(RedistError, match="donate is True or False, got 'no'"):
        redistribute_many([], donate="no")  # type: ignore[call-overload]


def test_no_tensors_come_as_asked_for() -> None:
    assert redistribute_many([]) == []
    assert redistribute_many({}) == {}
    assert redistribute_many([], async_op=True).wait() == []
    assert redistribute_many({}, async_op=True).wait() == {}
