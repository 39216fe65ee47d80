"""A step in a training loop: clipping, scaling, schedules, dtypes of sums, and what is sent.

All scenarios of a backend run in one launch of ranks, each with its own optimizer; a test looks at what its scenario
raised.
"""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, alone, device_of, normal
from dist_loops import Net, assert_same, batch, build, values
from torch import nn

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, clip_grad_norm_
from optim_dist._reduction.collectives import Communicator

scenario = Scenarios()


@scenario(2)
def nanochats_loop_runs_unchanged(rank, world_size):
    """Accumulation without ``no_sync``, lr from ``initial_lr``, ``model.zero_grad``, a state file a rank."""

    def make():
        net = Net(device_of(rank))
        matrices = [p for p in net.parameters() if p.ndim == 2]
        vectors = [p for p in net.parameters() if p.ndim == 1]
        adamw = {
            "kind": "adamw",
            "params": vectors,
            "lr": 0.01,
            "betas": (0.8, 0.95),
            "eps": 1e-10,
            "weight_decay": 0.0,
        }
        muon = {"kind": "muon", "params": matrices, "lr": 0.02, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9}
        optimizer = TritonDistMuonAdamW([adamw, {**muon, "weight_decay": 0.1}], reducer="exact")
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return net, optimizer

    def loop(net, optimizer, steps):
        for step in steps:
            for micro in range(2):
                (net(batch(rank, step, micro)) / 2).backward()
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / 10)
                if group["kind"] == "muon":
                    group["momentum"] = 0.85 + 0.02 * step
            optimizer.step()
            net.zero_grad(set_to_none=True)

    net, optimizer = make()
    loop(net, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    twin, twin_optimizer = make()
    twin.load_state_dict(net.state_dict())
    twin_optimizer.load_state_dict(state)
    loop(net, optimizer, range(2, 4))
    loop(twin, twin_optimizer, range(2, 4))
    assert_same(values(net), values(twin))
    assert optimizer.param_groups[0]["initial_lr"] == twin_optimizer.param_groups[0]["initial_lr"] == 0.01


@scenario(2)
def joint_clipping_of_two_optimizers(rank, world_size):
    net, twin = Net(device_of(rank)), Net(device_of(rank))
    matrices = [p for p in net.parameters() if p.ndim == 2]
    vectors = [p for p in net.parameters() if p.ndim == 1]
    two = [TritonDistMuon(matrices, reducer="exact"), TritonDistAdamW(vectors, lr=3e-4, reducer="exact")]
    groups = [
        {"kind": "muon", "params": [p for p in twin.parameters() if p.ndim == 2], "variant": "nanochat-2025"},
        {"kind": "adamw", "params": [p for p in twin.parameters() if p.ndim == 1], "betas": (0.9, 0.999)},
    ]
    groups[1] |= {"eps": 1e-8, "weight_decay": 0.01}
    one = TritonDistMuonAdamW(groups, reducer="exact")
    for step in range(2):
        net(batch(rank, step)).backward()
        twin(batch(rank, step)).backward()
        norm = clip_grad_norm_(net.parameters(), 0.1)
        assert torch.allclose(norm, clip_grad_norm_(one, 0.1), rtol=1e-6)
        for optimizer in (*two, one):
            optimizer.step()
            optimizer.zero_grad()
    for left, right in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(left, right)
    with pytest.raises(ValueError, match=r"5 of 5 parameters \(\(1,\), .*, \(4,\) and 1 more\) belong to no optimizer"):
        clip_grad_norm_([nn.Parameter(torch.ones(size)) for size in range(1, 6)], 1.0)
    with pytest.raises(ValueError, match=r"1 of 1 parameters \(\(3,\)\) belong to no optimizer"):
        clip_grad_norm_([nn.Parameter(torch.ones(3), requires_grad=False)], 1.0)
    with pytest.raises(ValueError, match="only some of the parameters"):
        clip_grad_norm_(vectors[:1], 1.0)


@scenario(2)
def optimizers_of_different_ranks_have_no_joint_norm(rank, world_size):
    """Each rank would clip its part of the shared layers by a norm of its own."""
    net = Net(device_of(rank))
    shared, own = net.layers[:3], net.layers[3]
    optimizers = [TritonDistAdamW(shared.parameters()), TritonDistAdamW(own.parameters(), process_group=alone(rank))]
    net(batch(rank, 0)).backward()
    for given in (optimizers, list(net.parameters())):
        with pytest.raises(ValueError, match=r"different ranks, \[0, 1\] and"):
            clip_grad_norm_(given, 0.1)
    # as the error says
    both, mine = (clip_grad_norm_(optimizer, math.inf) for optimizer in optimizers)
    squares = mine.square()
    dist.all_reduce(squares)
    factor = torch.clamp(0.1 / (both.square() + squares).sqrt(), max=1.0)
    for optimizer in optimizers:
        optimizer.step(clip_factor=factor)


@scenario(1, 2)
def clipping_by_the_parameters_that_are_trained_now(rank, world_size):
    net, twin = Net(device_of(rank)), Net(device_of(rank))
    optimizer, its = (TritonDistAdamW(model.named_parameters(), reducer="exact") for model in (net, twin))
    for model in (net, twin):
        model.layers[0].requires_grad_(False)
        model(batch(rank, 0)).backward()
    norm = clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 0.1)
    assert torch.equal(norm, its.clip_grad_norm_(0.1))
    optimizer.step()
    its.step()
    assert_same(values(net), values(twin))
    # it counts as long as it has a gradient
    net.layers[0].weight.grad = torch.ones_like(net.layers[0].weight)
    with pytest.raises(ValueError, match="only some of the parameters"):
        clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 0.1)


@scenario(2)
def variants_of_groups_leave_the_constructors_arguments_alone(rank, world_size):
    net = Net(device_of(rank))
    first, second, *_ = [p for p in net.parameters() if p.ndim == 2]
    groups = [{"params": [first], "variant": "keller"}, {"params": [second], "variant": "nanochat-2026-07", "lr": 0.3}]
    optimizer = TritonDistMuon(groups, lr=0.05, maximize=True, ns_steps=4)
    found = [tuple(group[key] for key in ("lr", "maximize", "ns_steps")) for group in optimizer.param_groups]
    assert found == [(0.05, True, 4), (0.3, True, 4)]
    assert [group["beta2"] for group in optimizer.param_groups] == [None, 0.9]
    # also where it is what the constructor's own variant has
    for beta2 in (0.95, 0.8):
        optimizer = TritonDistMuon(groups, beta2=beta2)
        assert [group["beta2"] for group in optimizer.param_groups] == [beta2, beta2]


@scenario(2)
def norms_of_every_order(rank, world_size):
    for order in (2.0, 1.0, float("inf"), 3.0):
        net, optimizer = build(rank)
        net(batch(rank, 0)).backward()
        gradients = [p.grad.clone() for p in net.parameters()]
        for g in gradients:
            torch.distributed.all_reduce(g)
        wanted = torch.nn.utils.get_total_norm([g.double() / world_size for g in gradients], order)
        found = optimizer.clip_grad_norm_(1e9, order)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0.0)
        optimizer.step()


@scenario(1, 2, 3)
def doubles_are_averaged_and_clipped_in_fp64(rank, world_size):
    """As in one process; a third in fp32, or a norm, would be 1e-8 away."""
    for options in ({"max_norm": 0.5}, {"max_norm": 0.5, "overlap": False}, {"skip_nonfinite": True}, {}):
        net, twin = Net(device_of(rank)).double(), Net(device_of(rank)).double()
        # a large eps, as otherwise the size of the gradients would hardly matter
        mine = TritonDistAdamW(net.named_parameters(), lr=0.05, eps=1.0, model=net, **options)
        its = torch.optim.AdamW(twin.parameters(), lr=0.05, eps=1.0)
        for step in range(2):
            net(batch(rank, step).double()).backward()
            for other in range(world_size):
                (twin(batch(other, step).double()) / world_size).backward()
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
            found = clip_grad_norm_(net.parameters(), 0.5) if "max_norm" not in options else None
            for optimizer in (mine, its):
                optimizer.step()
                optimizer.zero_grad()
            for each in filter(lambda given: given is not None, (found, mine.grad_norm)):
                torch.testing.assert_close(each, norm, rtol=1e-14, atol=0.0)
        for left, right in zip(values(net), values(twin)):
            torch.testing.assert_close(left, right, rtol=1e-13, atol=1e-14)


@scenario(1, 2)
def norms_of_negative_order_are_refused(rank, world_size):
    net, optimizer = build(rank)
    net(batch(rank, 0)).backward()
    for order in (-1.0, float("-inf"), float("nan")):
        with pytest.raises(ValueError, match="norm_type must be at least 0, or inf, got"):
            optimizer.clip_grad_norm_(1.0, order)
    optimizer.step()


@scenario(1, 2)
def limits_of_the_norm_that_would_turn_gradients_around_are_refused(rank, world_size):
    net, optimizer = build(rank)
    net(batch(rank, 0)).backward()
    for limit in (-1.0, float("nan"), "1", None):
        with pytest.raises(ValueError, match="max_norm must be a number of at least 0, or inf, got"):
            optimizer.clip_grad_norm_(limit)
    for limit in (float("inf"), 1, torch.tensor(1.0)):
        optimizer.clip_grad_norm_(limit)
    optimizer.step()


@scenario(1, 2)
def the_smaller_of_two_limits_counts(rank, world_size):
    for max_norm, limit in ((1.0, 0.1), (0.1, 1.0)):
        net, optimizer = build(rank, max_norm=max_norm)
        twin, twin_optimizer = build(rank)
        for step in range(2):
            for model in (net, twin):
                model(batch(rank, step)).backward()
            optimizer.clip_grad_norm_(limit)
            twin_optimizer.clip_grad_norm_(0.1)
            for opt in (optimizer, twin_optimizer):
                opt.step()
                opt.zero_grad()
        assert_same(values(net), values(twin))


@scenario(1, 2)
def the_smallest_limit_of_several_calls_counts(rank, world_size):
    net, optimizer = build(rank)
    twin, twin_optimizer = build(rank)
    for step in range(2):
        for model in (net, twin):
            model(batch(rank, step)).backward()
        norms = [clip_grad_norm_(net.parameters(), limit).item() for limit in (1.0, 0.1, float("inf"))]
        assert norms == [twin_optimizer.clip_grad_norm_(0.1).item()] * 3
        for opt in (optimizer, twin_optimizer):
            opt.step()
            opt.zero_grad()
    assert_same(values(net), values(twin))


@scenario(2)
def nonfinite_gradients_on_one_rank_skip_the_step_on_all(rank, world_size):
    net, optimizer = build(rank, skip_nonfinite=True, max_norm=1.0)
    net(batch(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    before, state = values(net), optimizer.full_state_dict()
    net(batch(rank, 1)).backward()
    if rank == 1:
        net.layers[0].bias.grad[0] = float("nan")
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.isfinite(optimizer.grad_norm)
    assert_same(values(net), before)
    after = optimizer.full_state_dict()
    for index, entry in state.get("state", {}).items():
        for key, value in entry.items():
            assert torch.equal(after["state"][index][key], value)
    net(batch(rank, 2)).backward()
    optimizer.step()
    assert not torch.equal(values(net)[0], before[0])


@scenario(2)
def error_if_nonfinite_raises(rank, world_size):
    net, optimizer = build(rank)
    net(batch(rank, 0)).backward()
    net.layers[0].bias.grad[0] = float("inf")
    with pytest.raises(RuntimeError, match="cannot be clipped"):
        clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)
    optimizer.zero_grad()


@scenario(2)
def grad_scaler_with_inf_on_one_rank(rank, world_size):
    device = device_of(rank)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
    net, optimizer = build(rank)
    twin, twin_optimizer = build(rank)
    for step in range(3):
        scaler.scale(net(batch(rank, step))).backward()
        poisoned = step == 1
        if poisoned and rank == 0:
            net.layers[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        # ranks agree on the scale, as in every loop over ranks
        for found in scaler._found_inf_per_device(optimizer).values():
            torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        before = values(net)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if poisoned:
            assert_same(values(net), before)
            continue
        twin(batch(rank, step)).backward()
        twin_optimizer.step()
        twin_optimizer.zero_grad()
        assert_same(values(net), values(twin))


@scenario(2)
def scale_is_divided_out_without_unscale(rank, world_size):
    device = device_of(rank)
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
    net, optimizer = build(rank, max_norm=0.1)
    twin, twin_optimizer = build(rank, max_norm=0.1)
    scaler.scale(net(batch(rank, 0))).backward()
    scaler.step(optimizer)
    scaler.update()
    twin(batch(rank, 0)).backward()
    twin_optimizer.step()
    torch.testing.assert_close(optimizer.grad_norm, twin_optimizer.grad_norm)
    for left, right in zip(values(net), values(twin)):
        torch.testing.assert_close(left, right)


@scenario(1, 2)
def a_scaler_that_sees_no_gradient_of_an_optimizer_on_a_rank(rank, world_size):
    device = device_of(rank)
    twin, twin_optimizer = build(rank)
    net = Net(device)
    first, second = (TritonDistAdamW(layers.parameters(), lr=0.05, reducer="exact") for layers in split(net))
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
    for step in range(2):
        # without gradients of the second: one rank, or all
        loss, twin_loss = (
            only_first(model, batch(rank, step)) if rank == 0 else model(batch(rank, step)) for model in (net, twin)
        )
        scaler.scale(loss).backward()
        twin_loss.backward()
        for opt in (first, second):
            scaler.step(opt)
            opt.zero_grad()
        scaler.update()
        twin_optimizer.step()
        twin_optimizer.zero_grad()
    assert_same(values(net), values(twin))


def split(net):
    return net.layers[:2], net.layers[2:]


def only_first(net, x):
    for layer in net.layers[:2]:
        x = torch.tanh(layer(x))
    return x.square().sum()


@scenario(2)
def unscaling_what_was_reduced_already_is_an_error(rank, world_size):
    scaler = torch.amp.GradScaler(device_of(rank).type, init_scale=256.0)
    net, optimizer = build(rank, accumulation_steps=1)
    before = values(net)
    scaler.scale(net(batch(rank, 0))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) comes too late: .*overlap=False"):
        scaler.step(optimizer)
    assert_same(values(net), before)
    # the loop may go on without unscale_
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(net(batch(rank, 0))).backward()
    scaler.step(optimizer)
    assert not torch.equal(values(net)[0], before[0])


@scenario(1, 2)
def the_scale_of_a_step_that_failed_is_forgotten(rank, world_size):
    """Else the scaler multiplies the next scale by it, and the next batch counts for 1/256 of itself."""
    found = []
    for fails in (False, True):
        net, optimizer = build(rank)
        scaler = torch.amp.GradScaler(device_of(rank).type, init_scale=256.0)
        for step in range(3):
            scaler.scale(net(batch(rank, step))).backward()
            if fails and step == 1:
                weight = net.layers[0].weight
                dense, weight.grad = weight.grad, weight.grad.to_sparse()
                with pytest.raises(RuntimeError, match="make it dense"):
                    scaler.step(optimizer)
                weight.grad = dense
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(values(net))
    assert_same(*found)


class LateSum:
    """A reduction whose buffer holds nothing of use until it is waited for, as a backend may leave it."""

    def __init__(self, communicator, flat):
        self.flat, self.sums = flat, flat.clone()
        self.work = Communicator.reduce_scatter_(communicator, self.sums)
        flat.fill_(float("inf"))

    def wait(self):
        self.work.wait()
        self.flat.copy_(self.sums)


@scenario(2)
def a_scaler_waits_for_what_backward_reduces(rank, world_size):
    device = device_of(rank)
    found = []
    for options in ({}, {"accumulation_steps": 1}):
        scaler = torch.amp.GradScaler(device.type, init_scale=256.0)
        net, optimizer = build(rank, reducer="rs", **options)
        communicator = optimizer.communicator
        communicator.reduce_scatter_ = functools.partial(LateSum, communicator)
        for step in range(2):
            scaler.scale(net(batch(rank, step))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(values(net))
    assert_same(*found)


@scenario(2, 3)
def fp16_sums_do_not_overflow(rank, world_size):
    for dtype, options in (
        (torch.float16, {"reducer": "rs"}),
        (torch.float16, {"reducer": "exact"}),
        (torch.float32, {"reducer": "rs", "reduce_dtype": torch.float16}),
    ):
        for average in (True, False):
            wide, half = (nn.Parameter(torch.ones(16, dtype=d, device=device_of(rank))) for d in (torch.float32, dtype))
            optimizers = [
                TritonDistAdamW([wide], lr=0.5, eps=1e5, weight_decay=0.0, average=average, state_dtype=torch.float32),
                TritonDistAdamW(
                    [half], lr=0.5, eps=1e5, weight_decay=0.0, average=average, state_dtype=torch.float32, **options
                ),
            ]
            norms = []
            for parameter, optimizer in zip((wide, half), optimizers):
                parameter.grad = torch.full_like(parameter, 48000.0)
                norms.append(optimizer.clip_grad_norm_(1e9))
                optimizer.step()
            torch.testing.assert_close(norms[1], norms[0], rtol=2**-10, atol=0.0)
            torch.testing.assert_close(half.float(), wide, rtol=2**-10, atol=0.0)
            assert wide[0] < 0.95


@scenario(2)
def scalers_that_no_longer_agree_are_refused(rank, world_size):
    """One has seen an infinity that the others have not: sums would be of gradients with different scales."""
    scaler = torch.amp.GradScaler(device_of(rank).type, init_scale=256.0)
    net, optimizer = build(rank, debug=True)
    scaler.scale(net(batch(rank, 0))).backward()
    if rank == 1:
        net.layers[0].weight.grad[0, 0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    before = values(net)
    scaler.scale(net(batch(rank, 1))).backward()
    with pytest.raises(RuntimeError, match=r"by 256\.0 on rank 0, by 128\.0 on rank 1.*unscale_"):
        scaler.step(optimizer)
    assert_same(values(net), before)


@scenario(2)
def a_sum_that_overflows_skips_a_scaled_step(rank, world_size):
    device = device_of(rank)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0)
    parameter = nn.Parameter(torch.ones(300, device=device))
    optimizer = TritonDistAdamW([parameter], lr=0.1)
    # finite on every rank, infinite in the sum
    scaler.scale((parameter * (torch.arange(300, device=device) == 299) * 1e38).sum()).backward()
    assert torch.isfinite(parameter.grad).all()
    scaler.step(optimizer)
    assert torch.equal(parameter, torch.ones_like(parameter))


@scenario(2)
def schedulers_are_obeyed(rank, world_size):
    net, optimizer = build(rank)
    twin, twin_optimizer = build(rank)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=5)
    by_hand = []
    for step in range(3):
        by_hand.append({key: optimizer.param_groups[0][key] for key in ("lr", "betas")})
        net(batch(rank, step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    for step, options in enumerate(by_hand):
        twin_optimizer.param_groups[0].update(options)
        twin(batch(rank, step)).backward()
        twin_optimizer.step()
        twin_optimizer.zero_grad()
    assert_same(values(net), values(twin))


@scenario(2)
def wire_bytes_are_two_f_p(rank, world_size):
    net = nn.Linear(1000, 1000, bias=False).to(device_of(rank))
    optimizer = TritonDistAdamW(net.parameters())
    start = optimizer.communicator.traffic.bytes_sent
    net(torch.ones(1, 1000, device=device_of(rank))).sum().backward()
    optimizer.step()
    sent = optimizer.communicator.traffic.bytes_sent - start
    wanted = 2 * 4_000_000 * (world_size - 1) / world_size
    assert wanted <= sent <= 1.03 * wanted
    assert optimizer.plan.wire_bytes == pytest.approx(wanted, rel=0.001)


def _orders(rank, **options):
    """A small model's buckets as they are listed, as the step reduced them, and as it gathered them."""
    net = Net(device_of(rank))
    groups = [
        {"kind": "muon", "params": [layer.weight for layer in net.layers]},
        {"kind": "adamw", "params": [layer.bias for layer in net.layers]},
    ]
    if options.pop("under_forward"):
        options["model"] = net
    optimizer = TritonDistMuonAdamW(groups, bucket_mb=4e-5, **options)
    buckets = optimizer._bucketed.buckets
    net(batch(rank, 0)).backward()  # reductions under backward are set apart
    optimizer.step()
    optimizer.zero_grad()
    reduced, gathered = [], []
    reducing = optimizer._bucketed._reducer.communicator
    _listen(reducing, "reduce_scatter_", [bucket.gradients for bucket in buckets], reduced)
    _listen(optimizer.communicator, "all_gather_", [bucket.values for bucket in buckets], gathered)
    net(batch(rank, 0)).backward()
    optimizer.step()
    optimizer.wait()
    plans, found = [bucket.plan for bucket in buckets], (list(reduced), list(gathered))
    optimizer.close()  # which reduces once more on GPUs, where no host knows what others have launched
    assert list(map(sorted, found)) == [list(range(len(plans)))] * 2
    assert min(sum(plan.route == route for plan in plans) for route in ("muon", "adamw")) > 1
    return plans, *found


def _listen(communicator, name, flats, order):
    """Note in ``order`` which of ``flats`` a collective is called with."""
    places, collective = {flat.data_ptr(): place for place, flat in enumerate(flats)}, getattr(communicator, name)

    def listen(flat):
        if flat.data_ptr() in places:
            order.append(places[flat.data_ptr()])
        return collective(flat)

    setattr(communicator, name, listen)


@scenario(2)
def the_last_gather_alone_runs_beside_nothing(rank, world_size):
    """What is elementwise is gathered beside the last matrices' iteration, if nothing is under the forward pass."""
    plans, reduced, gathered = _orders(rank, under_forward=False)
    assert reduced == list(range(len(plans)))
    routes = [plans[place].route for place in gathered]
    assert routes == sorted(routes, reverse=True)[1:] + ["muon"]


@scenario(2)
def what_the_next_forward_pass_needs_first_goes_first(rank, world_size):
    """It begins while others are gathered; only some matrices are before what it needs first."""
    for steps in (None, 1):
        plans, reduced, gathered = _orders(rank, under_forward=True, accumulation_steps=steps)
        first, *others = gathered
        assert first == min((place for place, plan in enumerate(plans) if plan.route == "muon"), key=_needed(plans))
        assert others == sorted(others, key=_needed(plans))
        # where backward reduces, as gradients come
        assert reduced == (gathered if steps is None else list(range(len(plans))))


def _needed(plans):
    return lambda place: min(slot.parameter for slot in plans[place].slots)


@scenario(2)
def the_message_comes_behind_the_first_bucket_where_nobody_looks_at_it(rank, world_size):
    """As on a GPU, and with the same results; a norm, a dropped batch and a missing gradient included."""
    found = []
    for is_watched in (True, False):
        net, optimizer = build(rank, reducer="exact", bucket_mb=1e-4)
        optimizer._bucketed._messages.is_watched = is_watched
        order = []
        launch, gather = optimizer._bucketed._reducer.launch, optimizer.communicator.gather_message
        optimizer._bucketed._reducer.launch = lambda bucket, launch=launch, order=order: (
            order.append("bucket"),
            launch(bucket),
        )
        optimizer.communicator.gather_message = lambda message, gather=gather, order=order: (
            order.append("message"),
            gather(message),
        )[1]
        for step in range(4):
            net(batch(rank, step)).backward()
            if rank == 1:
                net.layers[0].weight.grad = None
            if step:
                optimizer.clip_grad_norm_(0.1)
            if step == 2:
                optimizer.zero_grad()
                continue
            optimizer.step()
            if step == 0:
                num_buckets = len(optimizer._bucketed.buckets)
                assert num_buckets > 2
                expected = ["message", "bucket"] if is_watched else ["bucket", "message"]
                assert order[: num_buckets + 1] == [*expected, *["bucket"] * (num_buckets - 1)]
            optimizer.zero_grad()
        found.append(values(net))
        optimizer.close()
    assert_same(*found)


@scenario(2)
def sum_instead_of_average(rank, world_size):
    average, total = nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(7))
    gradient = normal((7,), 5, rank)
    for parameter, option in ((average, True), (total, False)):
        parameter.data = parameter.data.to(device_of(rank))
        optimizer = TritonDistAdamW([parameter], average=option)
        parameter.grad = gradient.to(device_of(rank)) * (world_size if option else 1)
        optimizer.step()
    torch.testing.assert_close(average, total)


@scenario(2)
def reduce_dtype_and_reduced_dtype(rank, world_size):
    for options in (
        {"reducer": "rs", "reduce_dtype": torch.float32},
        {"reducer": "exact", "reduced_dtype": torch.float32},
    ):
        net = Net(device_of(rank)).bfloat16()
        optimizer = TritonDistAdamW(net.parameters(), lr=0.1, **options)
        for parameter in net.parameters():
            parameter.grad = normal(tuple(parameter.shape), 9, rank).to(parameter)
        norm = optimizer.clip_grad_norm_(1e9)
        squares = 0.0
        for parameter in net.parameters():
            each = [normal(tuple(parameter.shape), 9, r).bfloat16().double() for r in range(world_size)]
            squares += (sum(each) / world_size).square().sum().item()
        assert norm.item() == pytest.approx(squares**0.5, rel=1e-6)
        optimizer.step()


@scenario(1, 2)
def a_clip_factor_that_is_no_number_on_the_device_is_refused_before_the_step(rank, world_size):
    net = Net(device_of(rank))
    optimizer = TritonDistAdamW(net.parameters(), lr=0.1)
    net(batch(rank, 0)).backward()
    before = values(net)
    with pytest.raises(TypeError, match=r"clip_factor must be a 0-d tensor, got 0\.5; give torch\.tensor\(0\.5\)"):
        optimizer.step(clip_factor=0.5)
    with pytest.raises(ValueError, match=r"clip_factor must be a 0-d tensor, .* got shape \(2,\)"):
        optimizer.step(clip_factor=torch.ones(2))
    assert_same(before, values(net))
    # nothing has begun, so that the step can be taken
    optimizer.step(clip_factor=torch.tensor(0.5, device=device_of(rank)))
    assert not any(map(torch.equal, before, values(net)))


@scenario.parametrize()
def test_step(backend, world_size, name):
    scenario.check(backend, world_size, name)
