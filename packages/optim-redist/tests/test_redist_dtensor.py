"""Layouts from and to DTensor: against torch's own splitting, and round trips."""

import random
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, placement_types
from torch.distributed.tensor.device_mesh import init_device_mesh

from optim_redist import (
    Block,
    Chunk,
    Cyclic,
    Layout,
    LayoutError,
    Mesh,
    NotRepresentableError,
    PlanInfeasibleError,
    Ragged,
    RedistError,
    Strided,
    UnsupportedError,
    parse_layout,
    same_ownership,
)
from optim_redist.index_sets import elements
from optim_utils.testing import run_ranks

StridedShard = placement_types._StridedShard
# torch 2.9 cuts a strided shard into all its chunks at once
FLAT = torch.__version__.startswith("2.9")


def replayed(mesh: Mesh, placements, shape, order=None) -> dict[int, list[list[int]]]:
    """What each rank holds of every dimension, by torch's own splitting of index vectors."""
    held = {}
    for rank, point in mesh.coordinates.items():
        vectors = [torch.arange(n) for n in shape]
        axes = range(mesh.num_axes)
        if order:
            axes = [axis for dim_axes in order.values() for axis in dim_axes]
            axes += [axis for axis in range(mesh.num_axes) if axis not in axes]
        for axis in axes:
            placement = placements[axis]
            if isinstance(placement, Shard | StridedShard):
                # asked first: in torch 2.9 a strided shard is a Shard
                is_strided = isinstance(placement, StridedShard)
                alone = StridedShard(0, split_factor=placement.split_factor) if is_strided else Shard(0)
                parts, _ = alone._split_tensor(vectors[placement.dim], mesh.sizes[axis], with_padding=False)
                vectors[placement.dim] = parts[point[axis]] if point[axis] < len(parts) else vectors[0][:0]
        held[rank] = [vector.tolist() for vector in vectors]
    return held


def held_by(layout: Layout, shape) -> dict[int, list[list[int]]]:
    return {rank: [elements(indices) for indices in layout.indices(shape, rank)] for rank in layout.mesh.ranks}


@st.composite
def placed(draw):
    """A mesh, a shape and placements; strided shards with any small factor."""
    mesh = Mesh(tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))))
    shape = draw(st.lists(st.integers(0, 13), min_size=1, max_size=3))
    dim = st.integers(0, len(shape) - 1)
    one = st.one_of(
        st.just(Replicate()),
        dim.map(Shard),
        st.builds(lambda d, s: StridedShard(d, split_factor=s), dim, st.integers(2, 5)),
        st.just(Partial("sum")),
    )
    return mesh, shape, [draw(one) for _ in mesh.sizes]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(placed())
def test_ownership_is_that_of_torchs_splitting_and_placements_round_trip(case):
    mesh, shape, placements = case
    layout = Layout.from_placements(mesh, placements, shape)
    assert held_by(layout, shape) == replayed(mesh, placements, shape)
    back = layout.to_placements(shape)
    assert list(back) == placements
    assert back.shard_order == {}
    assert Layout.from_json(layout.to_json()) == layout


@settings(max_examples=60, deadline=None)
@given(placed(), st.randoms(use_true_random=False))
def test_shard_orders_round_trip(case, rng: random.Random):
    mesh, shape, placements = case
    placements = [Shard(p.dim) if isinstance(p, StridedShard) else p for p in placements]
    order = {}
    for dim in range(len(shape)):
        axes = [axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
        if axes:
            order[dim] = tuple(rng.sample(axes, len(axes)))
    layout = Layout.from_placements(mesh, placements, shape, order)
    assert held_by(layout, shape) == replayed(mesh, placements, shape, order)
    back = layout.to_placements(shape)
    assert list(back) == placements
    assert back.shard_order == {dim: axes for dim, axes in order.items() if list(axes) != sorted(axes)}
    assert Layout.from_placements(mesh, back, shape) == layout
    as_torch_writes_it = tuple(order.items())
    assert Layout.from_placements(mesh, placements, shape, as_torch_writes_it) == layout


def test_uneven_strided_and_ordered_shards_are_kept_apart():
    mesh, shape = Mesh((4, 2)), (9,)
    placements = [StridedShard(0, split_factor=2), Shard(0)]
    strided = Layout.from_placements(mesh, placements, shape)
    ordered = Layout.from_placements(mesh, placements, shape, strided="ordered")
    last_pair = lambda layout: [held_by(layout, shape)[rank][0] for rank in (6, 7)]  # noqa: E731
    assert last_pair(strided) == ([[6], [7]] if FLAT else [[8], []])
    assert last_pair(ordered) == [[], [8]]
    assert not same_ownership(strided, ordered, shape)
    assert same_ownership(strided, ordered, (8,))
    assert ordered == Layout(mesh, [((1, 0), Chunk())])
    assert ordered.to_placements(shape).shard_order == {0: (1, 0)}
    counted_from_the_last = Layout.from_placements(ordered.mesh, [Shard(0), Shard(0)], shape, {-len(shape): (1, 0)})
    assert counted_from_the_last == ordered


@pytest.mark.parametrize(
    "layout, shape, expected",
    [
        (Layout(Mesh((2, 4)), [(0, 1), None]), (16, 3), [Shard(0), Shard(0)]),
        (Layout(Mesh((2, 4)), [(1, 0), None]), (16, 3), [StridedShard(0, split_factor=4), Shard(0)]),
        (Layout(Mesh(4), [(0, Cyclic(1))]), (12,), [StridedShard(0, split_factor=3)]),
        (
            Layout(Mesh((4, 2)), [((1, 0), Cyclic(2))]),
            (32,),
            [StridedShard(0, split_factor=4), StridedShard(0, split_factor=2)],
        ),
        (Layout(Mesh(4), [(0, Ragged([0, 3, 6, 9, 10]))]), (10,), [Shard(0)]),
        (Layout(Mesh((2, 2)), [1, None], {0: "max"}), (4, 4), [Partial("max"), Shard(0)]),
    ],
    ids=str,
)
def test_placements_of_layouts_that_torch_can_say(layout, shape, expected):
    placements = layout.to_placements(shape)
    assert list(placements) == expected
    assert same_ownership(Layout.from_placements(layout.mesh, placements, shape), layout, shape)


@pytest.mark.parametrize(
    "layout, shape",
    [
        (Layout(Mesh((2, 2)), [(0, 1)]), (10,)),  # 3, 3, 3, 1 where nested chunks give 3, 2, 3, 2
        (Layout(Mesh(4), [(0, Ragged([0, 1, 2, 3, 10]))]), (10,)),
        (Layout(Mesh(2), [(0, Cyclic(4))]), (10,)),
        (Layout(Mesh(2), [(0, Cyclic(1))]), (2**40,)),  # a split factor of 2^39, piece by piece
    ],
    ids=str,
)
def test_layouts_that_torch_cannot_say_are_refused(layout, shape):
    with pytest.raises(NotRepresentableError, match="torch"):
        layout.to_placements(shape)


def test_refusals():
    mesh = Mesh((2, 2))
    masked_partial = getattr(placement_types, "_MaskPartial", None)
    if masked_partial is None:
        from torch.distributed.tensor._ops._embedding_ops import _MaskPartial as masked_partial  # torch 2.9
    masked = masked_partial(offset_shape=torch.Size([4]), offset_dim=0)
    with pytest.raises(UnsupportedError, match=r"a masked partial needs the mask of its operation; .*Replicate"):
        Layout.from_placements(mesh, [masked, Replicate()], (4,))
    norm = type("_NormPartial", (Partial,), {})("sum")
    with pytest.raises(UnsupportedError, match=r"a _NormPartial is finished by the formula of its .*Replicate"):
        Layout.from_placements(mesh, [norm, Replicate()], (4,))
    with pytest.raises(UnsupportedError, match="premul"):
        Layout.from_placements(mesh, [Partial("premul"), Replicate()], (4,))
    with pytest.raises(UnsupportedError, match="not known"):
        Layout.from_placements(mesh, [object(), Replicate()], (4,))
    with pytest.raises(LayoutError, match="as many placements"):
        Layout.from_placements(mesh, [Replicate()], (4,))
    with pytest.raises(LayoutError, match="dimensions"):
        Layout.from_placements(mesh, [Shard(2), Replicate()], (4, 4))
    with pytest.raises(LayoutError, match="shard_order"):
        Layout.from_placements(mesh, [Shard(0), Replicate()], (4,), {0: (1,)})
    with pytest.raises(LayoutError, match="both"):
        Layout.from_placements(mesh, [StridedShard(0, split_factor=2), Shard(0)], (4,), {0: (1, 0)})
    with pytest.raises(LayoutError, match="strided"):
        Layout.from_placements(mesh, [Shard(0), Shard(0)], (4,), strided="sorted")
    with pytest.raises(NotRepresentableError, match="replay"):
        Layout.from_placements(mesh, [StridedShard(0, split_factor=3), Shard(0)], (4,), strided="ordered")
    assert Layout.from_placements(mesh, [Shard(-1), Replicate()], (4, 4)) == Layout(mesh, [None, 0])


def test_order_of_three_axes_from_split_factors():
    mesh = Mesh((4, 3, 2))
    placements = [StridedShard(0, split_factor=2), StridedShard(0, split_factor=2), Shard(0)]
    ordered = Layout.from_placements(mesh, placements, (24,), strided="ordered")
    assert ordered == Layout(mesh, [((2, 0, 1), Chunk())])
    assert same_ownership(ordered, Layout.from_placements(mesh, placements, (24,)), (24,))
    assert same_ownership(ordered, Layout(mesh, [((2, 0, 1), Block())]), (24,))
    assert Strided((2, 2, 1)).index_sets(24, (4, 3, 2)) is not None


def test_strided_shards_of_both_rules_are_written_and_read():
    mesh, shape = Mesh(2), (2,)
    nested, flat = (Layout(mesh, [(0, Strided((2,), flat))]) for flat in (False, True))
    assert held_by(nested, shape) == {0: [[0, 1]], 1: [[]]}
    assert held_by(flat, shape) == {0: [[0]], 1: [[1]]}
    assert same_ownership(nested, flat, (8,))
    for layout, text in ((nested, "[0@2]"), (flat, "[0@@2]")):
        assert str(layout) == text
        assert parse_layout(text, mesh) == Layout.from_json(layout.to_json()) == layout
    # the placements of the installed torch say both where sizes are even
    for layout in (nested, flat):
        assert list(layout.to_placements((8,))) == [StridedShard(0, split_factor=2)]


def _distributed_locals(rank: int, world_size: int) -> list[str]:
    """On every rank: the local tensor of distribute_tensor holds what the layout says; returns what did not."""
    device_mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
    wrong = []
    options = [Replicate(), Shard(0), Shard(1)]
    for shape in [(6, 6), (7, 5), (4, 1), (1, 9)]:
        full = torch.arange(shape[0] * shape[1]).reshape(shape)
        for placements in product(options, options):
            tensor = distribute_tensor(full, device_mesh, placements, src_data_rank=None)
            layout = Layout.from_dtensor(tensor)
            rows, columns = (elements(indices) for indices in layout.indices(shape, rank))
            if not torch.equal(tensor.to_local(), full[rows][:, columns]):
                wrong.append(f"{shape} {placements}")
            assert layout.mesh.names == ("a", "b")
    strided = [StridedShard(0, split_factor=3), Shard(0)]
    local = torch.zeros(len(elements(Layout.from_placements(device_mesh, strided, (7,)).indices((7,), rank)[0])))
    uneven = DTensor.from_local(local, device_mesh, strided, shape=torch.Size([7]), stride=(1,))
    assert Layout.from_dtensor(uneven) == Layout.from_placements(device_mesh, strided, (7,))
    lying = DTensor.from_local(torch.zeros(9), device_mesh, [Shard(0), Shard(0)], shape=torch.Size([7]), stride=(1,))
    try:
        Layout.from_dtensor(lying)
    except LayoutError as error:
        if f"rank {rank}" not in str(error) or "(9,)" not in str(error):
            wrong.append(f"the refusal says {error}")
    else:
        wrong.append("a local tensor of another shape was accepted")
    return wrong


def test_against_distribute_tensor_on_ranks():
    assert run_ranks(_distributed_locals, 6) == [[]] * 6


# -- redistribute, beside DTensor's own


def _compare_with_dtensor(rank: int, world_size: int) -> list[str]:
    """On every rank: values and gradients of moves on 2×2 with uneven shards; returns what differs."""
    import logging
    import warnings

    from optim_redist import redistribute

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    device_mesh = init_device_mesh("cpu", (2, 2))
    wrong = []
    options = [Replicate(), Shard(0), Shard(1)]
    shape = (7, 5)
    full, weight = torch.randn(shape), torch.randn(shape)
    pairs = list(product(product(options, options), repeat=2))
    for src, dst in pairs[::3]:
        results = []
        for call in (lambda t, p: redistribute(t, None, p), lambda t, p: t.redistribute(placements=p)):
            tensor = distribute_tensor(full, device_mesh, src, src_data_rank=None).requires_grad_()
            moved = call(tensor, dst)
            assert moved.placements == dst
            (moved * distribute_tensor(weight, device_mesh, dst, src_data_rank=None)).sum().backward()
            results.append((moved.to_local().detach(), tensor.grad.to_local(), tensor.grad.placements))
        ours, theirs = results
        if not torch.equal(ours[0], theirs[0]) or not torch.equal(ours[1], theirs[1]) or ours[2] != theirs[2]:
            wrong.append(f"{src} -> {dst}")
    return wrong


def _other_features(rank: int, world_size: int) -> list[str]:
    """Contributions, dtypes, orders, handles, and meshes of other ranks; returns what went wrong."""
    from optim_redist import redistribute

    wrong = []

    def check(name: str, holds: bool) -> None:
        if not holds:
            wrong.append(name)

    device_mesh = init_device_mesh("cpu", (2, 2))
    local = torch.full((4, 4), float(rank), requires_grad=True)
    partial = DTensor.from_local(local, device_mesh, [Partial(), Partial()])
    total = redistribute(partial, None, [Shard(0), Replicate()])
    check("sum", torch.equal(total.to_local(), torch.full((2, 4), 6.0)))
    total.to_local().sum().backward()
    check("gradient of a contribution", local.grad is not None and torch.equal(local.grad, torch.ones(4, 4)))

    full = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    tensor = distribute_tensor(full, device_mesh, [Shard(0), Shard(1)], src_data_rank=None).requires_grad_()
    for wanted in (tensor.placements, [Shard(1), Shard(0)]):
        for limit, words in ((63, "memory_limit=63 bytes is too small"), ("1MiB", "must be a number of bytes")):
            try:
                redistribute(tensor, None, wanted, memory_limit=limit)
                check(f"{limit} to {wanted} is refused", False)
            except RedistError as error:
                check(f"refusal of {limit} to {wanted}", words in str(error))
    same = redistribute(tensor, None, tensor.placements, memory_limit=64)
    check("a part that stays counts once", torch.equal(same.to_local(), tensor.to_local()))
    half = redistribute(tensor, None, [Shard(1), Shard(0)], forward_dtype=torch.bfloat16, backward_dtype=torch.bfloat16)
    check("forward dtype", half.dtype == half.to_local().dtype == torch.bfloat16)
    half.to_local().float().sum().backward()
    check("gradient dtype", tensor.grad.dtype == torch.float32)

    plain = tensor.detach()
    for name, wanted in (("any", True), ("all", False)):
        # up to torch 2.13 with a sum or a product of bool pending
        found = getattr(plain > 40, name)()
        check(name, redistribute(found, None, [Replicate(), Replicate()]).to_local().item() is wanted)
    handle = redistribute(plain, None, [Replicate(), Replicate()], async_op=True)
    check("handle", torch.equal(handle.wait().to_local(), full))
    try:
        redistribute(tensor, None, [Replicate(), Replicate()], async_op=True)
        check("async under autograd is refused", False)
    except UnsupportedError:
        pass

    place = 2 * (rank % 2) + rank // 2
    try:
        ordered = redistribute(plain, None, [Shard(0), Shard(0)], shard_order={0: (1, 0)})
    except UnsupportedError as error:
        check("only torch 2.9 has no order", FLAT and "_StridedShard" in str(error))
    else:
        check("order", torch.equal(ordered.to_local(), full[2 * place : 2 * place + 2]))
        check("order read back", Layout.from_dtensor(ordered) == Layout(Mesh((2, 2)), [((1, 0), Chunk()), None]))
        check("order and back", torch.equal(redistribute(ordered, None, [Replicate(), Replicate()]).to_local(), full))

    # twice from and to the same dimension, once strided: never taken for one another
    for placements in ([StridedShard(0, split_factor=2), Shard(0)], [Shard(0), Shard(0)]) * 2:
        moved = redistribute(plain, None, placements)
        start = 2 * place if isinstance(placements[0], StridedShard) else 2 * rank
        check(f"to {placements}", torch.equal(moved.to_local(), full[start : start + 2]))
        check(f"from {placements}", torch.equal(redistribute(moved, None, [Replicate()] * 2).to_local(), full))

    # uneven nested shards on a mesh that has a flattened form: DTensor's own plans go wrong on some of these
    flattened = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    flattened[("a", "b")]._flatten("ab")
    odd = torch.arange(35, dtype=torch.float32).reshape(7, 5)
    nested = distribute_tensor(odd, flattened, [Shard(0), Shard(0)], src_data_rank=None)
    check("flattened mesh", torch.equal(redistribute(nested, None, [Replicate()] * 2).to_local(), odd))
    turned = redistribute(nested, None, [Shard(1), Shard(1)])
    check("flattened mesh, turned", torch.equal(redistribute(turned, None, [Replicate()] * 2).to_local(), odd))

    first = init_device_mesh("cpu", (4,))
    pair = torch.distributed.device_mesh.DeviceMesh("cpu", [1, 3])
    onto_pair = redistribute(plain, pair, [Shard(0)])
    if rank in (1, 3):
        check("other ranks", torch.equal(onto_pair.to_local(), full[:4] if rank == 1 else full[4:]))
    back = redistribute(onto_pair, first, [Shard(1)])
    check("back from other ranks", torch.equal(back.to_local(), full[:, 2 * rank : 2 * rank + 2]))

    scalar = DTensor.from_local(torch.tensor(2.0), first, [Replicate()])
    onto_pair = redistribute(scalar, pair, [Replicate()])
    check("no dimensions on other ranks", onto_pair.shape == () and onto_pair.stride() == ())
    check("no dimensions and back", redistribute(onto_pair, first, [Replicate()]).to_local().item() == 2)
    empty = distribute_tensor(torch.zeros(4, 0, 2), first, [Shard(0)])
    check("stride of nothing", redistribute(empty, None, [Replicate()]).stride() == empty.stride() == (2, 2, 1))

    check("counted from the last", redistribute(plain, None, [Shard(-1), Shard(-2)]).placements == (Shard(1), Shard(0)))
    for wanted, order in (([Shard(-3), Shard(0)], None), ([Shard(0)] * 2, {2: (1, 0)}), ([Shard(0)] * 2, {-3: (1, 0)})):
        try:
            redistribute(plain, None, wanted, shard_order=order)
            check(f"{wanted} {order} is refused", False)
        except LayoutError as error:
            check(f"refusal of {wanted} {order}", "the tensor has 2 dimensions" in str(error))
        except UnsupportedError:
            check("only torch 2.9 has no order", FLAT and order is not None)
    if not FLAT:
        ordered = redistribute(plain, None, [Shard(-2)] * 2, shard_order={-2: (1, 0)})
        check("order counted from the last", torch.equal(ordered.to_local(), full[2 * place : 2 * place + 2]))
        # a gradient of another dtype, back to an order of axes
        for dtypes in ({"forward_dtype": torch.bfloat16}, {"backward_dtype": torch.float64}):
            ordered = redistribute(plain, None, [Shard(0)] * 2, shard_order={0: (1, 0)}).requires_grad_()
            moved = redistribute(ordered, None, [Replicate()] * 2, **dtypes)
            weights = DTensor.from_local(full.to(moved.dtype), device_mesh, [Replicate()] * 2)
            (came,) = torch.autograd.grad(moved, ordered, weights)
            check(f"order of the gradient, {dtypes}", Layout.from_dtensor(came) == Layout.from_dtensor(ordered))
            check(f"gradient, {dtypes}", torch.equal(came.to_local(), full[2 * place : 2 * place + 2]))
    return wrong


def _strides(rank: int, world_size: int) -> list[tuple[object, ...]]:
    """The strides of what moves nowhere, on some ranks or on all, and was transposed; sums over ranks are right."""
    from optim_redist import redistribute

    device_mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(24.0).reshape(4, 6)
    found = []
    # every second row, which are several pieces
    dealt, shape = [StridedShard(1, split_factor=2)], torch.Size((6, 4))
    pieces = DTensor.from_local(full[rank::2].t(), device_mesh, dealt, run_check=False, shape=shape, stride=(1, 6))
    for tensor, wanted in (
        (distribute_tensor(full, device_mesh, [Replicate()]).t(), Partial()),
        (distribute_tensor(full[None], device_mesh, [Replicate()]).transpose(1, 2), Shard(0)),
        # one index for two ranks
        (distribute_tensor(full[None], device_mesh, [Shard(0)]).transpose(1, 2), Shard(0)),
        (pieces, dealt[0]),
    ):
        moved = redistribute(tensor, None, [wanted])
        local = moved.to_local()
        found.append((moved.stride(), local.is_contiguous(), moved.stride() == tensor.stride()))
        if wanted == Partial():
            total = local.clone()
            torch.distributed.all_reduce(total)
            assert torch.equal(total, full.t())
    return found


def _shared_memory(rank: int, world_size: int, later: bool) -> list[bool]:
    """Whether a result shares its memory with a tensor of ones, to which nobody writes through it."""
    from optim_redist import Handle, redistribute

    device_mesh, found = init_device_mesh("cpu", (2,)), []
    ones = torch.ones(1, 3)
    for src, dst in (
        (Replicate(), Shard(0)),
        (Replicate(), Partial()),
        (Replicate(), Replicate()),
        (Shard(0), Shard(0)),
        (Partial(), Partial()),
    ):
        tensor = distribute_tensor(ones, device_mesh, [Replicate() if src == Partial() else src])
        if src == Partial():
            tensor = DTensor.from_local(ones.clone(), device_mesh, [src])
        moved = redistribute(tensor, None, [dst], async_op=later)
        moved = moved.wait() if isinstance(moved, Handle) else moved
        local, before = moved.to_local(), tensor.to_local().clone()
        shares = local.numel() == 0 or local.data_ptr() == tensor.to_local().data_ptr()
        if not shares:
            local.add_(1)
            assert torch.equal(tensor.to_local(), before)
        found.append(local.numel() == 0 or shares)
    # the same on every rank, by another mesh and in other words
    other = init_device_mesh("cpu", (2, 1))
    tensor = distribute_tensor(torch.ones(4, 3), device_mesh, [Shard(0)])
    moved = redistribute(tensor, other, [Shard(0), Shard(0)])
    return [*found, moved.to_local().data_ptr() == tensor.to_local().data_ptr()]


@pytest.mark.parametrize("later", [False, True], ids=["now", "later"])
def test_what_stays_on_some_ranks_has_memory_of_its_own(later: bool):
    first, second = run_ranks(_shared_memory, 2, later)
    assert first == [False, False, True, True, True, True]
    assert second == [True, False, True, True, True, True]


def _refused_clones(rank: int, world_size: int) -> list[str]:
    """What is said of limits that hold a part once, where it stays on rank 0 only and is cloned there."""
    from optim_redist import redistribute

    device_mesh, found = init_device_mesh("cpu", (2,)), []
    whole = distribute_tensor(torch.ones(1, 3), device_mesh, [Replicate()])
    for limit in (12, 23):
        with pytest.raises(PlanInfeasibleError) as refused:
            redistribute(whole, None, [Shard(0)], memory_limit=limit)
        assert refused.value.proven
        found.append(str(refused.value))
    assert redistribute(whole, None, [Shard(0)], memory_limit=24).to_local().tolist() == [[1, 1, 1]][rank:]
    # where every part stays, there are no clones
    assert redistribute(whole, None, [Replicate()], memory_limit=12).to_local().tolist() == [[1, 1, 1]]
    return found


def test_a_limit_holds_clones_of_parts_that_stay_on_some_ranks_only():
    said = [
        f"memory_limit={limit} bytes is too small: rank 0 needs source 12 + target 12 = 24 bytes; no method can stay "
        "below it"
        for limit in (12, 23)
    ]
    assert run_ranks(_refused_clones, 2) == [said, said]


def test_strides_are_the_same_on_every_rank():
    first, second = run_ranks(_strides, 2)
    assert [each[0] for each in first] == [each[0] for each in second] == [(4, 1), (24, 4, 1), (24, 1, 6), (1, 6)]
    # what stays everywhere keeps its own
    assert [each[2] for each in first] == [False, False, True, True]
    assert all(each[1] for each in [*first[:2], *second[:2]])


@pytest.mark.slow
def test_redistribute_is_dtensors_in_value_and_gradient():
    assert run_ranks(_compare_with_dtensor, 4) == [[]] * 4


def test_redistribute_beyond_dtensor():
    assert run_ranks(_other_features, 4) == [[]] * 4


def test_redistribute_needs_placements():
    from optim_redist import redistribute

    with pytest.raises(UnsupportedError, match="placements"):
        redistribute(None)


def test_redistribute_refuses_arguments_of_other_types_by_name():
    from optim_redist import redistribute

    with pytest.raises(UnsupportedError, match=r"takes a DTensor, got Tensor.*DTensor.from_local"):
        redistribute(torch.ones(4), None, [Shard(0)])
    with pytest.raises(UnsupportedError, match=r"placements is Shard\(dim=0\); give a list of them"):
        redistribute(torch.ones(4), None, Shard(0))
    with pytest.raises(UnsupportedError, match="placements is 0; give a list of them"):
        redistribute(torch.ones(4), None, 0)
    for wrong in (Shard(0), None, "S(0)"):
        with pytest.raises(LayoutError, match=r"placements is .*; give a list of them, one for each axis"):
            Layout.from_placements(Mesh(2), wrong, (4,))
    for wrong in (None, (2,)):
        with pytest.raises(LayoutError, match="device_mesh must be a DeviceMesh or a Mesh, got "):
            Layout.from_placements(wrong, [Shard(0)], (4,))
    with pytest.raises(LayoutError, match="shape must be a sequence of sizes, got 4"):
        Layout.from_placements(Mesh(2), [Shard(0)], 4)
    for twice in ({0: (1, 0), -1: (0, 1)}, [(0, (1, 0)), (0, (0, 1))]):
        with pytest.raises(LayoutError, match=r"two orders for dimension 0: \(1, 0\) and \(0, 1\)"):
            Layout.from_placements(Mesh((2, 2)), [Shard(0), Shard(0)], (4,), shard_order=twice)
    with pytest.raises(LayoutError, match="dtensor must be a DTensor, got Tensor"):
        Layout.from_dtensor(torch.ones(4))
    for placement, kind in ((["S(0)"], "list"), (0, "int"), ("S(0)", "str")):
        with pytest.raises(UnsupportedError, match=f"placements has .* of {kind}; give Shard"):
            redistribute(torch.ones(4), None, [placement])
    for order in (0, {0: 1}, ["axis"]):
        with pytest.raises(LayoutError, match=r"shard_order is \{tensor_dim: axes\}, or pairs of them, got "):
            Layout.from_placements(Mesh((2, 2)), [Shard(0), Shard(0)], (4,), shard_order=order)
    for device_mesh in (Mesh((2, 2)), "cpu"):
        with pytest.raises(UnsupportedError, match="device_mesh must be a DeviceMesh or None, got "):
            redistribute(torch.ones(4), device_mesh, [Shard(0)])
    for name in ("forward_dtype", "backward_dtype"):
        with pytest.raises(UnsupportedError, match=f"{name} must be a torch.dtype or None, got 'bf16'"):
            redistribute(torch.ones(4), None, [Shard(0)], **{name: "bf16"})
