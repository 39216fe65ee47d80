"""An optimizer's life up to ``close()``: later groups, state out and in, what is frozen in between, the next one.

All scenarios of a backend run in one launch of ranks, each with its own optimizer; a test looks at what its scenario
raised.
"""

import copy
import gc
import inspect
import io
import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, device_of
from dist_loops import Net, assert_same, batch, build, values
from torch import nn

from optim_dist import TritonDistAdamW, TritonDistMuon, checkpoint, clip_grad_norm_
from optim_dist._optimizers.agreement import AFTER_STEP, check_replicas
from optim_kernels import TritonMuon
from optim_utils.testing import run_ranks

scenario = Scenarios(unbound=True)


@scenario(2)
def groups_added_later(rank, world_size):
    net, twin = Net(device_of(rank)), Net(device_of(rank))
    optimizer = TritonDistAdamW(net.layers[:2].parameters(), reducer="exact")
    twin_optimizer = TritonDistAdamW(twin.layers[:2].parameters(), reducer="exact")
    later = TritonDistAdamW(twin.layers[2:].parameters(), lr=0.1, reducer="exact")
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": net.layers[2:].parameters(), "lr": 0.1})
        net(batch(rank, step)).backward()
        twin(batch(rank, step)).backward()
        for opt in (optimizer, twin_optimizer, *([later] if step else [])):
            opt.step()
        net.zero_grad()
        twin.zero_grad()
    assert_same(values(net), values(twin))


def num_groups():
    return len(dist.distributed_c10d._world.pg_names)


@scenario(2)
def optimizers_have_the_groups_of_closed_ones(rank, world_size):
    """Each has sockets and threads, or a communicator of NCCL, that nothing frees before the process ends."""
    counts, found = [], []
    for number in range(6):
        net, optimizer = build(rank, accumulation_steps=1, timeout=101 + number % 2)
        for step in range(2):
            net(batch(rank, step)).backward()
            optimizer.step()
            net.zero_grad()
        found.append(values(net))
        optimizer.close()
        counts.append(num_groups())
    assert counts[0] < counts[1]
    assert counts[2:] == [counts[1]] * 4
    for each in found[1:]:
        assert_same(each, found[0])


@scenario(2)
def optimizers_have_the_groups_of_those_that_are_gone(rank, world_size):
    """Without ``close()``, for ranks that collect garbage at different times; not while something is under way."""
    for options in ({}, {"gradients": "streamed"}):
        counts = []
        for _ in range(4):
            net, optimizer = build(rank, accumulation_steps=1, **options)
            net(batch(rank, 0)).backward()
            optimizer.step()
            kept = optimizer if rank == 0 else None
            del net, optimizer
            gc.collect()
            del kept
            gc.collect()
            counts.append(num_groups())
        assert counts[1:] == [counts[0]] * 3
    if device_of(rank).type == "cuda":
        return  # there a reduction that one rank launches alone stays on its device, and a new group waits for that
    net, optimizer = build(rank, accumulation_steps=1)
    if rank == 0:
        net(batch(rank, 0)).backward()  # the other rank launches nothing
    del net, optimizer
    gc.collect()
    net, optimizer = build(rank, accumulation_steps=1)
    assert num_groups() == counts[0] + 1
    net(batch(rank, 0)).backward()
    optimizer.step()
    optimizer.close()


@scenario(2)
def groups_of_steps_that_have_failed_are_not_given_away(rank, world_size):
    """Nobody knows what other ranks have launched in them; no gradients are left that would say so."""
    for is_closed in (False, True):
        for each in range(2):
            net, optimizer = build(rank, accumulation_steps=1, timeout=106)
            net(batch(rank, 0)).backward()
            if each == 0:
                before = num_groups()
                with patch.object(optimizer, "_update", side_effect=ArithmeticError), pytest.raises(ArithmeticError):
                    optimizer.step()
                optimizer.zero_grad()
            else:
                assert num_groups() == before + 2  # with timeout= all collectives have a group of their own
                optimizer.step()
            if is_closed or each == 1:
                optimizer.close()
            del net, optimizer
            gc.collect()


@scenario(2)
def groups_of_reductions_that_ranks_launch_as_they_end_are_not_given_away(rank, world_size):
    """On a GPU they launch what others may have launched: a rank that got no gradient at all launches nothing."""
    options = {"accumulation_steps": 1, "timeout": 105}  # of nobody else here
    net, optimizer = build(rank, **options)
    net(batch(rank, 0), skip=3).backward()  # the bucket that is launched first is not full
    assert not optimizer._bucketed.reduction.has_launched
    assert optimizer._bucketed.reduction.any_rank_may_have_launched
    with patch.object(optimizer.communicator, "device", torch.device("cuda", rank)):
        optimizer.hand_over()
    del net, optimizer
    gc.collect()
    before = num_groups()
    _, optimizer = build(rank, **options)
    assert num_groups() == before + 2  # with timeout= all collectives have a group of their own
    optimizer.close()


@scenario(2)
def groups_are_not_given_away_before_all_ranks_are_done(rank, world_size):
    options = {"accumulation_steps": 1, "timeout": 103}  # of nobody else here
    net, optimizer = build(rank, **options)
    _, beside = build(rank, **options)

    def close_alone():
        # with an error, which says on a GPU that the other rank may not close
        with suppress(ZeroDivisionError):
            try:
                1 / 0
            finally:
                beside.close()

    if rank == 0:
        close_alone()
    before = num_groups()
    other, later = build(rank, **options)
    assert num_groups() > before
    for model, each in ((net, optimizer), (other, later)):
        model(batch(rank, 0)).backward()
        each.step()
    assert_same(values(net), values(other))
    optimizer.close()
    later.close()
    if rank != 0:
        close_alone()


@scenario(2)
def groups_in_which_something_may_be_under_way_are_not_given_away(rank, world_size):
    options = {"accumulation_steps": 1, "timeout": 104}
    net, optimizer = build(rank, **options)
    if rank == 0:
        net(batch(rank, 0)).backward()  # the other rank launches nothing
    optimizer.close()
    before = num_groups()
    net, optimizer = build(rank, **options)
    assert num_groups() > before
    net(batch(rank, 0)).backward()
    optimizer.step()
    optimizer.close()


@scenario(1, 2)
def a_refused_group_leaves_everything_as_it_was(rank, world_size):
    device = device_of(rank)
    net, optimizer = build(rank)
    bad = nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))
    good = nn.Parameter(torch.ones(3, device=device))
    for _ in range(2):
        with pytest.raises(ValueError, match="only dense real"):
            optimizer.add_param_group({"params": [("bad", bad)]})
        with pytest.raises(TypeError, match="lr must be a number or a 1-element tensor, got 'fast'"):
            optimizer.add_param_group({"params": [("good", good)], "lr": "fast"})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("good", good)]})
    (net(batch(rank, 0)) + good.sum()).backward()
    optimizer.step()
    optimizer.wait()
    assert torch.all(good < 1.0)


@scenario(2)
def a_group_that_comes_during_reductions_can_come_later(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1)
    later = nn.Parameter(torch.ones(3, device=device_of(rank)))
    net(batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match="add the group after step"):
        optimizer.add_param_group({"params": [("later", later)]})
    assert len(optimizer.param_groups) == 1
    # where nothing is left of the batch, or nothing was there
    net.zero_grad()
    net(batch(rank, 0), skip=3 if rank else None).backward()
    net.zero_grad()
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(2, device=device_of(rank))))]})
    net(batch(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [("later", later)]})
    (net(batch(rank, 0)) + later.sum()).backward()
    optimizer.step()
    optimizer.wait()
    assert torch.all(later < 1.0)


@scenario(2)
def what_one_rank_alone_has_got_between_two_steps_counts_on_all(rank, world_size):
    (net, optimizer), (twin, twin_optimizer) = (build(rank, accumulation_steps=1) for _ in range(2))
    for loser in (0, 1):
        if rank != loser:
            net(batch(rank, 0)).backward()
        assert not optimizer.agree_between_steps()
        net.zero_grad()
        assert optimizer.agree_between_steps()  # the one that knows of nothing takes part in what others have begun
        for model, opt in ((net, optimizer), (twin, twin_optimizer)):
            model(batch(rank, loser)).backward()
            opt.step()
            opt.zero_grad()
        assert_same(values(net), values(twin))


def _exchange(optimizer):
    optimizer.param_groups[0]["params"] = [nn.Parameter(p.detach()) for p in optimizer.param_groups[0]["params"]]


def _swap_two(optimizer):
    params = optimizer.param_groups[0]["params"]
    params[0], params[2] = params[2], params[0]


def _append(optimizer):
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))


def _leave_out(optimizer):
    del optimizer.param_groups[0]["params"][0]


def _add_without_asking(optimizer):
    group = optimizer.param_groups[0]
    optimizer.param_groups = [group, {**group, "params": [nn.Parameter(torch.ones(3))]}]


def _take_away(optimizer):
    optimizer.param_groups.clear()


@scenario(1, 2)
def groups_that_were_exchanged_are_refused(rank, world_size):
    for exchange in (_exchange, _swap_two, _append, _leave_out, _add_without_asking, _take_away):
        net, optimizer = build(rank)
        before = values(net)
        # groups that list the same are taken, as frameworks make them
        optimizer.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        net(batch(rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after = values(net)
        assert any(not torch.equal(left, right) for left, right in zip(before, after, strict=True))
        net(batch(rank, 1)).backward()
        exchange(optimizer)
        with pytest.raises(RuntimeError, match=r"param_groups\[\d\] was exchanged after the optimizer was built"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="add_param_group, or build a new optimizer"):
            optimizer.clip_grad_norm_(1.0)
        assert_same(values(net), after)


@scenario(1, 2)
def a_state_is_not_for_groups_that_were_exchanged(rank, world_size):
    # Lightning's BaseFinetuning, when it resumes, assigns the groups of the checkpoint, and then loads their state
    grown = build(rank)[1]
    more = nn.Parameter(torch.ones(3, device=device_of(rank)))
    grown.add_param_group({"params": [("more", more)]})
    saved = grown.state_dict()
    net, optimizer = build(rank)
    before = values(net)
    _add_without_asking(optimizer)
    words = r"param_groups\[1\] was exchanged after the optimizer was built: .*; use add_param_group"
    with pytest.raises(RuntimeError, match=words):
        optimizer.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=words):
        optimizer.state_dict()
    assert_same(values(net), before)
    # its remedy
    del optimizer.param_groups[1]
    optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(3, device=device_of(rank))))]})
    optimizer.load_state_dict(saved)


@scenario(2)
def a_group_comes_where_all_others_are_frozen(rank, world_size):
    frozen = nn.Parameter(torch.ones(3, device=device_of(rank)), requires_grad=False)
    optimizer = TritonDistAdamW([("frozen", frozen)])
    optimizer.step()
    assert optimizer.clip_grad_norm_(1.0) == 0
    assert "collectives of buckets: none, no parameter is trained" in optimizer.explain()
    more = nn.Parameter(torch.ones(3, device=device_of(rank)))
    optimizer.add_param_group({"params": [("more", more)]})
    more.grad = torch.full_like(more, rank + 1.0)
    optimizer.step()
    assert (more < 1).all()
    assert (frozen == 1).all()


@scenario(2)
def a_group_comes_while_another_is_frozen(rank, world_size):
    net, twin = Net(device_of(rank)), Net(device_of(rank))
    optimizer = TritonDistAdamW(net.layers[:2].parameters(), reducer="exact")
    twin_optimizers = [TritonDistAdamW(twin.layers[:2].parameters(), reducer="exact")]
    for step in range(3):
        for model in (net, twin):
            model.layers[0].requires_grad_(step != 1)
        if step == 1:
            optimizer.add_param_group({"params": net.layers[2:].parameters(), "lr": 0.1})
            twin_optimizers.append(TritonDistAdamW(twin.layers[2:].parameters(), lr=0.1, reducer="exact"))
        for model, optimizers in ((net, [optimizer]), (twin, twin_optimizers)):
            model(batch(rank, step)).backward()
            for opt in optimizers:
                opt.step()
            model.zero_grad()
    assert_same(values(net), values(twin))


@scenario(3)
def groups_that_only_some_ranks_are_in(rank, world_size):
    """torch names what ranks make without the others by how many groups each is in."""
    dist.new_group([1])
    few = dist.new_group([0, 1])
    if rank < 2:
        of_few = _steps_with_another(rank, few)
    found = torch.ones(1, device=device_of(rank))
    dist.all_reduce(found, group=dist.new_group([0, 1, 2]))
    assert found.item() == 3
    net, optimizer = build(rank, timeout=60)
    twin, twin_optimizer = build(rank)
    dist.new_group([2])
    for step in range(2):
        for model, opt in ((net, optimizer), (twin, twin_optimizer)):
            with opt.no_sync():
                model(batch(rank, step, 1)).backward()
            model(batch(rank, step)).backward()
            opt.step()
            opt.zero_grad()
    assert_same(values(net), values(twin))
    if rank < 2:
        of_few.close()


@scenario(2)
def groups_that_end_leave_names_to_others(rank, world_size):
    """Up to 2.13 torch names a group by how many there are, and so might give a name that another still has."""
    passing = [dist.new_group([0, 1]) for _ in range(2)]
    nets, optimizers = zip(*(build(rank, accumulation_steps=1, timeout=110) for _ in range(2)))
    for group in passing:
        dist.barrier()
        dist.destroy_process_group(group)
        net, optimizer = build(rank, accumulation_steps=1, timeout=110)
        nets, optimizers = (*nets, net), (*optimizers, optimizer)
    for net, optimizer in zip(nets, optimizers):
        net(batch(rank, 0)).backward()
        optimizer.step()
    for net in nets[1:]:
        assert_same(values(net), values(nets[0]))
    for optimizer in optimizers:
        optimizer.close()


def _steps_with_another(rank, group):
    """An optimizer of ranks 0 and 1 that has stepped as torch's does with the mean of their gradients."""
    mine, alone = (nn.Parameter(torch.ones(7, device=device_of(rank))) for _ in range(2))
    optimizer = TritonDistAdamW([("w", mine)], process_group=group, timeout=60)
    mine.grad, alone.grad = torch.full_like(mine, rank + 1.0), torch.full_like(alone, 1.5)
    optimizer.step()
    optimizer.wait()
    torch.optim.AdamW([alone]).step()
    torch.testing.assert_close(mine, alone, rtol=1e-6, atol=0.0)
    return optimizer


@scenario(3)
def ranks_of_a_part_of_a_bound_world_make_their_group_alone(rank, world_size):
    """torch would have them split the world's communicator, in which the others had to take part."""
    world, few = dist.group.WORLD, dist.new_group([0, 1])
    device = device_of(rank)
    was_bound, on_entry = world.bound_device_id, []
    # what gloo can show: whether the world is bound while groups are made
    world.bound_device_id = torch.device("cuda", rank)
    try:
        for given, ranks in ((few, [0, 1]), (None, [0, 1, 2])):
            if rank in ranks:
                with patch.object(dist, "new_group", side_effect=_noting(on_entry)):
                    parameter = nn.Parameter(torch.ones(7, device=device))
                    TritonDistAdamW([("w", parameter)], process_group=given, timeout=107)
            assert world.bound_device_id == torch.device("cuda", rank)
    finally:
        world.bound_device_id = was_bound
    # ranks in fewer groups may make some of one rank, to be in as many
    assert {(len(ranks), bound) for ranks, bound in on_entry if len(ranks) > 1} == (
        {(2, False), (3, True)} if rank < 2 else {(3, True)}
    )


def _noting(found):
    """``new_group``, which notes the ranks that it is given and whether the world is bound."""

    def call(ranks, *args, **options):
        found.append((ranks, dist.group.WORLD.bound_device_id is not None))
        return make(ranks, *args, **options)

    make = dist.new_group
    return call


@scenario(2)
def looking_at_attributes_asks_no_other_rank(rank, world_size):
    """As debuggers do, on one rank alone."""
    net, optimizer = build(rank, accumulation_steps=1)
    net(batch(rank, 0)).backward()
    optimizer.step()
    before = optimizer.communicator.traffic.num_calls
    inspect.getmembers(optimizer)
    assert optimizer.communicator.traffic.num_calls == before


@scenario(2)
def state_dict_at_an_equal_plan(rank, world_size):
    net, optimizer = build(rank)
    for step in range(2):
        net(batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    twin, twin_optimizer = build(rank)
    twin.load_state_dict(net.state_dict())
    twin_optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    for model, opt in ((net, optimizer), (twin, twin_optimizer)):
        model(batch(rank, 2)).backward()
        opt.step()
    assert_same(values(net), values(twin))
    other, other_optimizer = build(rank, bucket_mb=1.0)
    with pytest.raises(ValueError, match=r"differs with .* bucket_mb.*checkpoint loads at any number of ranks"):
        other_optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="load_full_state_dict"):
        other_optimizer.load_state_dict(torch.optim.AdamW(other.parameters()).state_dict())


@scenario(2)
def full_state_to_torch_and_back(rank, world_size):
    net, optimizer = build(rank)
    for step in range(2):
        net(batch(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    full = [optimizer.full_state_dict()]
    torch.distributed.broadcast_object_list(full, src=0)
    theirs = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in net.parameters()])
    theirs.load_state_dict(full[0])
    state = theirs.state_dict()["state"]
    assert all(
        value.shape in (parameter.shape, ())
        for i, parameter in enumerate(net.parameters())
        for value in state[i].values()
    )
    twin, twin_optimizer = build(rank, bucket_mb=1.0)
    twin.load_state_dict(net.state_dict())
    twin_optimizer.load_full_state_dict(full[0])
    for model, opt in ((net, optimizer), (twin, twin_optimizer)):
        model(batch(rank, 2)).backward()
        opt.step()
    assert_same(values(net), values(twin))


@scenario(1, 2)
def full_state_is_a_copy(rank, world_size):
    """Schedulers change an lr that is a tensor in place."""
    _, optimizer = build(rank, lr=torch.tensor(0.5))
    full = optimizer.full_state_dict()
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert rank or full["param_groups"][0]["lr"] == 0.5


@scenario(2)
def closing_gives_ordinary_tensors(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1)
    net(batch(rank, 0)).backward()
    optimizer.step()
    before = values(net)
    optimizer.close()
    assert_same(values(net), before)
    assert len({p.untyped_storage().data_ptr() for p in net.parameters()}) == len(list(net.parameters()))
    net.zero_grad()
    for _ in range(2):
        net(batch(rank, 1)).backward()
    with pytest.raises(RuntimeError, match="closed"):
        optimizer.step()


def are_gone(storages):
    """Within a second: gloo's thread lets go of what it has gathered some time after that was waited for."""
    deadline = time.monotonic() + 1
    while any(storage() is not None for storage in storages):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
        gc.collect()
    return True


@scenario(2)
def what_is_closed_or_planned_anew_keeps_no_former_storage(rank, world_size):
    """Whoever still has the optimizer."""
    for options in (
        {},
        {"reducer": "rs", "accumulation_steps": 1},
        {"gradients": "streamed", "accumulation_steps": 1},
        {"overlap": False},
    ):
        net, optimizer = build(rank, **options)
        for end in (optimizer.rebuild_plan, optimizer.close):
            net(batch(rank, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            bucketed = optimizer._bucketed
            tensors = [bucket.values for bucket in bucketed.buckets]
            tensors += [bucket.sums if "gradients" in options else bucket.gradients for bucket in bucketed.buckets]
            tensors += [tensor for free in getattr(bucketed._reducer, "_free", {}).values() for tensor in free]
            if "gradients" in options:
                tensors += [storage for buffer in bucketed.reduction._free for storage in buffer._storage.values()]
            storages = [weakref.ref(tensor) for tensor in tensors]
            del tensors, bucketed
            end()
            assert are_gone(storages), (options, end)


@scenario(2)
def a_closed_optimizer_has_no_state_to_save(rank, world_size):
    net, optimizer = build(rank)
    full = optimizer.full_state_dict() or {"state": {}, "param_groups": []}
    optimizer.close()
    for call in (
        optimizer.full_state_dict,
        optimizer.state_dict,
        lambda: optimizer.load_full_state_dict(full),
        lambda: optimizer.load_state_dict(full),
        lambda: checkpoint.save("not written", net, optimizer),
        lambda: optimizer.add_param_group({"params": [("w", nn.Parameter(torch.ones(2)))]}),
    ):
        with pytest.raises(RuntimeError, match="was closed; build a new one"):
            call()


class Arriving:
    """A gather whose result appears when it is waited for."""

    def __init__(self, flat, arrived):
        self.flat, self.arrived = flat, arrived

    def wait(self):
        self.flat.copy_(self.arrived)


@scenario(2)
def a_new_optimizer_takes_over(rank, world_size):
    """While the old one still gathers, is still there, and would reduce what it no longer owns."""
    found = []
    for options in ({"overlap": False}, {"accumulation_steps": 1, "reducer": "rs"}):
        net, old = build(rank, **options)
        for step in range(2):
            net(batch(rank, step)).backward()
            old.step()
            old.zero_grad()
        # as if all that others own were still on its way
        for bucket in old._bucketed.buckets if old._bucketed._gathers is not None else ():
            bucket.finish_gathering()
            arrived = bucket.values.clone()
            bucket.values.fill_(float("nan"))
            bucket.own(bucket.values).copy_(bucket.own(arrived))
            bucket.gathering = Arriving(bucket.values, arrived)
        new = TritonDistAdamW(net.named_parameters(), lr=0.05, model=net, reducer="exact")
        for step in range(2):
            net(batch(rank, step)).backward()
            new.step()
            new.zero_grad()
        found.append(values(net))
        net(batch(rank, 2)).backward()
        with pytest.raises(RuntimeError, match="no longer a view of its bucket"):
            old.step()
    assert_same(*found)


@scenario(2)
def an_end_in_the_midst_of_unequal_reductions(rank, world_size):
    for is_closed in (True, False):
        net, old = build(rank, accumulation_steps=1)
        before = values(net)
        # the last layers are reduced first: one rank has begun, the other has not
        net(batch(rank, 0), skip=3 if rank else 0).backward()
        if is_closed:
            old.close()
        new = TritonDistAdamW(net.named_parameters(), lr=0.05, model=net, reducer="exact")
        assert_same(values(net), before)
        new.zero_grad()
        twin, twin_optimizer = build(rank)
        for model, opt in ((net, new), (twin, twin_optimizer)):
            model(batch(rank, 1)).backward()
            opt.step()
        assert_same(values(net), values(twin))


# streamed, rs with small buckets, exact with more buckets than it has scratch
EAGER = (
    {"reducer": "rs", "accumulation_steps": 1, "bucket_mb": 1e-6},
    {"reducer": "exact", "accumulation_steps": 1, "bucket_mb": 1e-6},
    {"reducer": "exact", "accumulation_steps": 1, "gradients": "streamed", "bucket_mb": 1e-3},
)


def _trains_on(rank, net):
    """Whether an optimizer that comes after another steps as one of a new net does."""
    new = TritonDistAdamW(net.named_parameters(), lr=0.05, model=net, reducer="exact", timeout=60)
    new.zero_grad()
    twin, twin_optimizer = build(rank)
    for model, optimizer in ((net, new), (twin, twin_optimizer)):
        model(batch(rank, 1)).backward()
        optimizer.step()
    assert_same(values(net), values(twin))


@scenario(2, 3)
def an_end_where_a_rank_has_no_gradient_at_all(rank, world_size):
    """It knows of no reduction, and the others wait for none that it would have to launch."""
    for options in EAGER:
        # what is launched on a GPU, and not on others, ends if all close
        for is_closed in (True,) if device_of(rank).type == "cuda" else (True, False):
            net, old = build(rank, timeout=30, **options)
            twin = Net(device_of(rank))
            for model in (net, twin) if rank != 1 else ():
                model(batch(rank, 0)).backward()
            assert old._bucketed.reduction.has_launched is (rank != 1)
            start = time.monotonic()
            if is_closed:
                old.close()
                old.close()
                # what was reduced is nobody's gradient, and the rest is as it was
                left = [(p.grad, q.grad) for p, q in zip(net.parameters(), twin.parameters()) if p.grad is not None]
                assert len(left) < len(list(net.parameters()))
                assert all(torch.equal(*pair) for pair in left)
            _trains_on(rank, net)
            assert time.monotonic() - start < 20


@scenario(2)
def a_rank_with_an_error_closes_alone(rank, world_size):
    """While the other is busy elsewhere; what it has launched is not waited for, on the host."""
    store = dist.distributed_c10d._get_default_store()
    for number, options in enumerate(({}, *EAGER)):
        net, optimizer = build(rank, timeout=30, **options)
        if rank == 0:
            start = time.monotonic()
            with pytest.raises(ZeroDivisionError):
                try:
                    net(batch(rank, 0)).backward()
                    1 / 0
                finally:
                    optimizer.close()
            assert time.monotonic() - start < 20
            store.set(f"closed {number}", "")
        else:
            store.wait([f"closed {number}"])
            optimizer.close()


@scenario(2)
def gradients_that_were_not_reduced_stay_at_the_end(rank, world_size):
    for lie_in_buckets in (False, True):
        net, optimizer = build(rank, accumulation_steps=1, reducer="rs")
        twin = Net(device_of(rank))
        if lie_in_buckets:
            net(batch(rank, 0)).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            optimizer.wait()
            with torch.no_grad():
                for mine, its in zip(twin.parameters(), net.parameters(), strict=True):
                    mine.copy_(its)
        for model in (net, twin):
            # the first to be reduced has no gradient on any rank
            model(batch(rank, 1), skip=3).backward()
        optimizer.close()
        found = [p.grad for p in net.layers[:3].parameters()]
        if lie_in_buckets and device_of(rank).type == "cuda":  # ranks reduce there what others may be reducing
            assert found == [None] * len(found)
        else:
            assert_same(found, [p.grad for p in twin.layers[:3].parameters()])


@scenario(1, 2)
def a_closed_optimizer_takes_no_part_in_clipping(rank, world_size):
    net, closed = build(rank)
    closed.close()
    optimizer = TritonDistAdamW(net.parameters())
    net(batch(rank, 0)).backward()
    assert torch.equal(clip_grad_norm_(net.parameters(), 1.0), optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    with pytest.raises(RuntimeError, match="closed"):
        closed.step()


@scenario(1, 2)
def clipping_is_by_the_newest_optimizer_of_the_parameters(rank, world_size):
    net, older = build(rank)
    optimizer = TritonDistAdamW(net.parameters())
    net(batch(rank, 0)).backward()
    assert torch.equal(clip_grad_norm_(net.parameters(), 1.0), optimizer.clip_grad_norm_(1.0))
    optimizer.step()
    part = TritonDistAdamW(net.layers[:1].parameters())
    with pytest.raises(ValueError, match="have got a newer optimizer, others have not"):
        clip_grad_norm_(net.parameters(), 1.0)
    part.close()
    older.close()


@scenario(1, 2)
def what_is_frozen_in_between_stays_and_goes_on(rank, world_size):
    """Layers that a fine-tuning loop freezes and unfreezes, whatever a missing gradient means; as on one device."""
    for missing_grad in ("skip", "zero", "raise"):
        net, twin = Net(device_of(rank)), Net(device_of(rank))
        options = {"missing_grad": missing_grad, "weight_decay": 0.5, "impl": "torch"}
        groups = [[{"params": [layer.weight for layer in each.layers], **options}] for each in (net, twin)]
        optimizer = TritonDistMuon(groups[0], model=net, reducer="exact", average=False, bucket_mb=1e-4)
        oracle = TritonMuon([{**groups[1][0], "variant": "nanochat-2025"}])
        for step, frozen in enumerate([(3,), (0, 3), (0, 1), (), (2,)]):
            for each in (net, twin):
                for place, layer in enumerate(each.layers):
                    layer.weight.requires_grad_(place not in frozen)
            net(batch(rank, step)).backward()
            for other in range(world_size):
                twin(batch(other, step).to(device_of(rank))).backward()
            optimizer.step()
            oracle.step()
            for each in (net, twin):
                each.zero_grad()
            assert_same(values(net), values(twin))
            full = optimizer.full_state_dict().get("state", {})
            for number, parameter in enumerate(groups[1][0]["params"] if rank == 0 else ()):
                buffer = oracle.state.get(parameter, {}).get("momentum_buffer", torch.zeros_like(parameter))
                found = full.get(number, {}).get("momentum_buffer", torch.zeros_like(buffer))
                assert torch.equal(found.cpu(), buffer.cpu()), (missing_grad, step, number)
        if missing_grad == "raise" and world_size == 1:  # of several, the owner alone
            with pytest.raises(RuntimeError, match="has no gradient on any rank"):
                optimizer.step()


def _nothing(net, optimizer):
    pass


def _clip(net, optimizer):
    optimizer.clip_grad_norm_(0.5)


def _step(net, optimizer):
    optimizer.step()


def _show(net, optimizer):
    optimizer.state_dict()


def _load(net, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def _plan(net, optimizer):
    optimizer.zero_grad()
    optimizer.rebuild_plan()


def _add(net, optimizer):
    optimizer.zero_grad()
    optimizer.add_param_group({"params": net.late.parameters()})


@scenario(1, 2)
def what_is_made_in_inference_mode_can_be_stepped_outside(rank, world_size):
    """Of torch's optimizers neither a first step nor a load there can be followed by steps outside."""
    options = {"lr": 0.05, "reducer": "exact", "reduced_dtype": torch.bfloat16}
    for call in (_nothing, _clip, _step, _show, _load, _plan, _add):
        found = []
        for mode in (torch.inference_mode, torch.no_grad):
            net = Net(device_of(rank))
            torch.manual_seed(0)
            net.late = nn.Linear(5, 5, device=device_of(rank))
            with mode():
                optimizer = TritonDistAdamW(net.layers.parameters(), **options)
            net(batch(rank, 0)).backward()
            with mode():
                call(net, optimizer)
            for step in range(1, 3):
                optimizer.zero_grad()
                (net(batch(rank, step)) + net.late(batch(rank, step)).sum()).backward()
                optimizer.step()
            found.append(values(net.layers))
        assert_same(*found)


@scenario(1, 2)
def what_is_closed_in_inference_mode_can_be_trained_outside(rank, world_size):
    net, optimizer = build(rank)
    net(batch(rank, 0)).backward()
    with torch.inference_mode():
        optimizer.close()
    net(batch(rank, 1)).backward()
    torch.optim.SGD(net.parameters()).step()


@scenario(2)
def replicas_that_differ_are_named(rank, world_size):
    net, optimizer = build(rank)
    with torch.no_grad():
        net.layers[3].bias += rank
    with pytest.raises(RuntimeError, match=r"differ from rank 0's: layers\.3\.bias \(rank 1\)"):
        check_replicas(optimizer._bucketed.buckets, optimizer.communicator, AFTER_STEP)


@scenario.parametrize()
def test_lifetime(backend, world_size, name):
    scenario.check(backend, world_size, name)


def close_without_a_process_group(rank, world_size, options):
    net, optimizer = build(rank, timeout=30, **options)
    found = values(net)
    if rank == 0:
        net(batch(rank, 0)).backward()
    dist.destroy_process_group()
    for _ in range(2):
        optimizer.close()
    assert_same(values(net), found)
    assert any(parameter.grad is None for parameter in net.parameters())


@pytest.mark.parametrize("options", EAGER, ids=["rs", "exact", "streamed"])
def test_an_end_behind_that_of_the_process_group(options):
    run_ranks(close_without_a_process_group, 2, options, timeout=60)


def build_in_another_world(rank, world_size, folder):
    build(rank, accumulation_steps=1)[1].close()
    limit = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/met", rank=rank, world_size=world_size, timeout=limit)
    # up to torch 2.13 one of these has the name that a group of the first world had
    _, other = build(rank, accumulation_steps=1, timeout=30)
    _, optimizer = build(rank, accumulation_steps=1)
    communicators = [*other._bucketed._communicators, *optimizer._bucketed._communicators]
    assert len({id(each.group) for each in communicators}) == 4


def test_groups_of_a_world_that_has_ended_are_not_given_away(tmp_path):
    run_ranks(build_in_another_world, 2, tmp_path)


# Every case has ranks of its own, which part when all is imported, as that takes a rank longer than the rest does.
SCRIPT = """
import os, pathlib, sys, time
import torch
import torch._dynamo  # for the first optimizer
import torch.distributed as dist
from optim_dist import TritonDistAdamW

cases = [(folder, rank) for folder in map(pathlib.Path, sys.argv[1:]) for rank in range(2)]
ranks = {}
for folder, rank in cases:
    if not (process := os.fork()):
        break
    ranks[process] = folder / f"ended-{rank}"
else:
    while ranks:
        process, status = os.wait()
        path = ranks.pop(process)
        path.with_suffix(".tmp").write_text(str(os.waitstatus_to_exitcode(status)))
        path.with_suffix(".tmp").rename(path)
    sys.exit()
with open(folder / f"said-{rank}", "w") as said:
    os.dup2(said.fileno(), 2)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
optimizer = TritonDistAdamW([("w", torch.nn.Parameter(torch.ones(100)))], accumulation_steps=1, timeout=90)
try:
    if rank == 0:
        optimizer.param_groups[0]["params"][0].sum().backward()
        if folder.name == "group":
            dist.destroy_process_group()
        raise ValueError("of this rank alone")
    while not (folder / "over").exists():
        time.sleep(0.1)
finally:
    if folder.name != "open":
        optimizer.close()
"""


@pytest.mark.slow
def test_a_rank_with_an_error_ends_before_the_others(tmp_path):
    """Its exit, too, waits for nobody, so that who has started the ranks may know."""
    folders = [tmp_path / leaves for leaves in ("alone", "group", "open")]
    for folder in folders:
        folder.mkdir()
    command = [sys.executable, "-c", SCRIPT, *map(str, folders)]
    with subprocess.Popen(command, process_group=0) as ranks:
        try:
            for folder in folders:
                assert exit_code(folder / "ended-0") == 1
                assert not (folder / "ended-1").exists()
                assert (folder / "said-0").read_text().rstrip().endswith("ValueError: of this rank alone")
                (folder / "over").touch()
            for folder in folders:
                assert exit_code(folder / "ended-1") == 0
            assert ranks.wait(60) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)


def exit_code(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.parent.name}: {path.name}"
        time.sleep(0.05)
    return int(path.read_text())
