"""A step in a training loop: accumulation, eager reduction, gradients from elsewhere, scaling, clipping, and errors.

All scenarios of a backend run in one launch of ranks, each with its own optimizer; a test looks at what its scenario
raised.
"""

import copy
import functools

import pytest
import torch
from dist_cases import Scenarios, device_of, normal
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint, clip_grad_norm_
from optim_dist._collectives import Communicator
from optim_dist._construction import check_replicas

scenario = Scenarios()


class Net(nn.Module):
    """Four layers; ``skip`` leaves one out, so that its parameters get no gradient."""

    def __init__(self, device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        for number, parameter in enumerate(self.parameters()):
            with torch.no_grad():
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 11, number))
        self.to(device)

    def forward(self, x, skip=None):
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = torch.tanh(layer(x))
        return x.square().sum()


def batch(rank, step, micro=0):
    return normal((3, 5), 21, rank, step, micro).to(device_of(rank))


def build(rank, **options):
    net = Net(device_of(rank))
    options = {"lr": 0.05, "reducer": "exact", "bucket_mb": 1e-4, **options}
    return net, TritonDistAdamW(net.named_parameters(), model=net, **options)


def values(net):
    net.state_dict()  # waits for gathers in flight
    return [parameter.detach().clone() for parameter in net.parameters()]


def run(rank, steps=3, micro_batches=1, mode="plain", skip=lambda rank, step, micro: None, **options):
    """Parameters after some steps; every mode must give the same bits."""
    if mode == "counted":
        options["accumulation_steps"] = micro_batches
    net, optimizer = build(rank, **options)
    for step in range(steps):
        for micro in range(micro_batches):
            last = micro == micro_batches - 1
            if mode == "no_sync" and not last:
                with optimizer.no_sync():
                    net(batch(rank, step, micro), skip(rank, step, micro)).backward()
            else:
                net(batch(rank, step, micro), skip(rank, step, micro)).backward()
        if mode in ("no_sync", "counted") and last:
            assert any(bucket.launched for bucket in optimizer._bucketed.buckets), "nothing was reduced during backward"
        optimizer.step()
        optimizer.zero_grad(set_to_none=mode != "zeroed")
    return values(net)


def assert_same(actual, expected):
    assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))


@scenario(2)
def accumulation_by_any_means_gives_the_same_bits(rank, world_size):
    plain = run(rank, micro_batches=3)
    for mode in ("no_sync", "counted"):
        assert_same(run(rank, micro_batches=3, mode=mode), plain)
        assert_same(run(rank, micro_batches=3, mode=mode, overlap=True, bucket_mb=1.0), plain)


@scenario(2)
def eager_reduction_equals_reduction_at_step(rank, world_size):
    assert_same(run(rank, mode="counted"), run(rank))


@scenario(2)
def layers_skipped_on_some_ranks_do_not_block_eager_reduction(rank, world_size):
    def skip(rank, step, micro):
        return (rank + step) % 3

    for mode in ("counted", "no_sync"):
        assert_same(run(rank, micro_batches=2, mode=mode, skip=skip), run(rank, micro_batches=2, skip=skip))


@scenario(2)
def two_optimizers_reduce_side_by_side_whatever_each_rank_uses(rank, world_size):
    found = []
    for options in ({}, {"accumulation_steps": 1}):
        nets, optimizers = zip(*(build(rank, **options) for _ in range(2)))
        for step in range(3):
            # of the first model some layers have no gradient, others on each rank
            (nets[0](batch(rank, step), skip=(rank + step) % 3) + nets[1](batch(rank, step, 1))).backward()
            # a collective of the loop's own, for its log
            total = torch.full((3,), rank + 1.0, device=device_of(rank))
            torch.distributed.all_reduce(total)
            assert total.tolist() == [3.0] * 3
            for optimizer in reversed(optimizers):
                optimizer.step()
                optimizer.zero_grad()
        found.append([value for net in nets for value in values(net)])
    assert_same(*found)


@scenario(2)
def backward_waits_for_nobody(rank, world_size):
    """Else a rank that lacks a gradient, and waits for the others in a collective of the loop, waits for ever."""
    found = []
    for options in ({}, {"accumulation_steps": 1}):
        net, optimizer = build(rank, bucket_mb=1e-6, **options)
        assert len(optimizer.plan.buckets) > 4
        for step in range(2):
            # the last layer is the first to be reduced
            net(batch(rank, step), skip=3 if rank else None).backward()
            torch.distributed.all_reduce(torch.ones(1, device=device_of(rank)))
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(net))
    assert_same(*found)


@scenario(2)
def zeroed_gradients_equal_dropped_ones(rank, world_size):
    assert_same(run(rank, mode="zeroed"), run(rank))
    assert_same(run(rank, mode="zeroed", accumulation_steps=1), run(rank))


@scenario(2)
def gradients_set_by_hand_are_copied_in(rank, world_size):
    net, optimizer = build(rank)
    twin, twin_optimizer = build(rank)
    for step in range(2):
        net(batch(rank, step)).backward()
        twin(batch(rank, step)).backward()
        for parameter in net.parameters():
            parameter.grad = parameter.grad.clone()
        for model, opt in ((net, optimizer), (twin, twin_optimizer)):
            opt.step()
            model.zero_grad(set_to_none=True)
    assert_same(values(net), values(twin))
    assert optimizer.explain().data["gradients_copied"] == 2 * len(list(net.parameters()))


@scenario(2)
def a_second_backward_into_a_reduced_bucket_is_an_error(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1)
    net(batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"layers\.\d\.\w+ arrived after its bucket was reduced.*no_sync"):
        net(batch(rank, 1)).backward()
    optimizer.zero_grad()
    net(batch(rank, 1)).backward()
    optimizer.step()


@scenario(2)
def a_backward_after_clipping_is_an_error(rank, world_size):
    net, optimizer = build(rank)
    net(batch(rank, 0)).backward()
    optimizer.clip_grad_norm_(1.0)
    with pytest.raises(RuntimeError, match="arrived after its bucket was reduced"):
        net(batch(rank, 1)).backward()
    optimizer.zero_grad()


@scenario(2)
def forgetting_zero_grad_is_an_error(rank, world_size):
    net, optimizer = build(rank)
    net(batch(rank, 0)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="zero_grad"):
        net(batch(rank, 1)).backward()
    optimizer.zero_grad()
    net(batch(rank, 1)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="was reduced in an earlier step"):
        optimizer.step()
    optimizer.zero_grad()


@scenario(2)
def a_gradient_changed_after_its_reduction_is_an_error(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1, reducer="rs")
    net(batch(rank, 0)).backward()
    net.layers[0].weight.grad = torch.ones_like(net.layers[0].weight)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight was assigned or changed after"):
        optimizer.step()
    optimizer.zero_grad()


@scenario(2)
def a_gradient_changed_after_clipping_is_an_error(rank, world_size):
    for change in (lambda p: None, torch.zeros_like):
        net, optimizer = build(rank)
        net(batch(rank, 0)).backward()
        optimizer.clip_grad_norm_(1.0)
        bias = net.layers[3].bias
        bias.grad = change(bias)
        with pytest.raises(RuntimeError, match=r"layers\.3\.bias was assigned or changed .* before clip_grad_norm_"):
            optimizer.step()
        optimizer.zero_grad()
        net(batch(rank, 1)).backward()
        optimizer.step()


@scenario(2)
def model_zero_grad_skips_a_batch(rank, world_size):
    twin, twin_optimizer = build(rank)
    twin(batch(rank, 0)).backward()
    twin_optimizer.step()
    for max_norm, options in ((None, {"accumulation_steps": 1}), (0.001, {}), (0.001, {"accumulation_steps": 1})):
        net, optimizer = build(rank, **options)
        net(batch(rank, 7)).backward()
        if max_norm is not None:
            optimizer.clip_grad_norm_(max_norm)
        assert not optimizer.is_between_steps
        net.zero_grad()
        net(batch(rank, 0)).backward()
        optimizer.step()
        assert_same(values(net), values(twin))
        net.zero_grad()
        net(batch(rank, 1)).backward()
        net.zero_grad()
        assert optimizer.is_between_steps


@scenario(2)
def a_batch_is_skipped_after_unequal_numbers_of_reductions(rank, world_size):
    for of_model in (True, False):
        net, optimizer = build(rank, accumulation_steps=1)
        twin, twin_optimizer = build(rank)
        for step, used in enumerate((False, True, False, True)):
            net(batch(rank, step), skip=None if used else rank).backward()
            if not used:
                (net if of_model else optimizer).zero_grad()
                continue
            twin(batch(rank, step)).backward()
            for opt in (optimizer, twin_optimizer):
                opt.step()
                opt.zero_grad()
        assert_same(values(net), values(twin))


@scenario(2)
def zero_grad_discards_a_step_that_did_not_happen(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1)
    twin, twin_optimizer = build(rank)
    net(batch(rank, 7)).backward()
    optimizer.clip_grad_norm_(0.001)
    optimizer.zero_grad()
    for model, opt in ((net, optimizer), (twin, twin_optimizer)):
        model(batch(rank, 0)).backward()
        opt.step()
    assert_same(values(net), values(twin))


@scenario(2)
def a_parameter_that_left_its_bucket_is_refused(rank, world_size):
    net, optimizer = build(rank)
    net.layers[1].weight.data = net.layers[1].weight.data.clone()
    net(batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight is no longer a view of its bucket"):
        optimizer.step()


@scenario(2)
def thawed_parameters_are_refused(rank, world_size):
    net = Net(device_of(rank))
    net.layers[2].requires_grad_(False)
    optimizer = TritonDistAdamW(net.parameters())
    net.layers[2].requires_grad_(True)
    net(batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match="did not need one when the optimizer was built"):
        optimizer.step()


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
    with pytest.raises(ValueError, match="belong to no optimizer"):
        clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0)
    with pytest.raises(ValueError, match="only some of the parameters"):
        clip_grad_norm_(vectors[:1], 1.0)


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


@scenario(1, 2)
def norms_of_negative_order_are_refused(rank, world_size):
    net, optimizer = build(rank)
    net(batch(rank, 0)).backward()
    for order in (-1.0, float("-inf"), float("nan")):
        with pytest.raises(ValueError, match="norm_type must be at least 0, or inf, got"):
            optimizer.clip_grad_norm_(1.0, order)
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


@scenario(2)
def unscaling_what_was_reduced_already_is_an_error(rank, world_size):
    scaler = torch.amp.GradScaler(device_of(rank).type, init_scale=256.0)
    net, optimizer = build(rank, accumulation_steps=1)
    before = values(net)
    scaler.scale(net(batch(rank, 0))).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="overlap=False"):
        scaler.step(optimizer)
    assert_same(values(net), before)


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


@scenario(1, 2)
def a_refused_group_leaves_everything_as_it_was(rank, world_size):
    device = device_of(rank)
    net, optimizer = build(rank)
    bad = nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))
    good = nn.Parameter(torch.ones(3, device=device))
    for _ in range(2):
        with pytest.raises(ValueError, match="only dense real"):
            optimizer.add_param_group({"params": [("bad", bad)]})
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
def state_dict_at_an_equal_plan(rank, world_size):
    import io

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
    with pytest.raises(ValueError, match="checkpoint loads at any number of ranks"):
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


class Arriving:
    """A gather whose result appears when it is waited for."""

    def __init__(self, flat, arrived):
        self.flat, self.arrived = flat, arrived

    def wait(self):
        self.flat.copy_(self.arrived)


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


@scenario(2)
def wire_bytes_are_two_f_p(rank, world_size):
    net = nn.Linear(1000, 1000, bias=False).to(device_of(rank))
    optimizer = TritonDistAdamW(net.parameters())
    start = optimizer.communicator.bytes_sent
    net(torch.ones(1, 1000, device=device_of(rank))).sum().backward()
    optimizer.step()
    sent = optimizer.communicator.bytes_sent - start
    wanted = 2 * 4_000_000 * (world_size - 1) / world_size
    assert wanted <= sent <= 1.03 * wanted
    assert optimizer.plan.wire_bytes == pytest.approx(wanted, rel=0.001)


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


@scenario(2)
def parameters_are_those_of_the_first_rank(rank, world_size):
    parameter = nn.Parameter(torch.full((5,), float(rank), device=device_of(rank)))
    with pytest.raises(RuntimeError, match="parameters differ from rank 0"):
        TritonDistAdamW([("w", parameter)], sync_params="check")
    TritonDistAdamW([("w", parameter)])
    assert torch.equal(parameter, torch.zeros_like(parameter))


@scenario(2)
def unequal_parameter_lists_are_refused_on_every_rank(rank, world_size):
    shapes = [(3,), (4,) if rank == 0 else (5,), (6,)]
    named = [(f"w{i}", nn.Parameter(torch.ones(shape, device=device_of(rank)))) for i, shape in enumerate(shapes)]
    with pytest.raises(RuntimeError, match=r"number 1: rank 0 has w1 \(4,\).*rank 1 has w1 \(5,\)"):
        TritonDistAdamW(named)


@scenario(2)
def unequal_options_are_refused_on_every_rank(rank, world_size):
    parameter = nn.Parameter(torch.ones(3, device=device_of(rank)))
    for name, first, second in (
        ("average", True, False),
        ("reducer", "rs", "exact"),
        ("reduce_dtype", None, torch.bfloat16),
        ("bucket_mb", 1.0, 2.0),
    ):
        with pytest.raises(RuntimeError, match=f"{name} is {first} on rank 0, {second} on rank 1"):
            TritonDistAdamW([parameter], **{name: second if rank else first})


@scenario(2)
def unequal_hyperparameters_are_refused_on_every_rank(rank, world_size):
    parameter = nn.Parameter(torch.ones(3, device=device_of(rank)))
    for name, first, second in (
        ("lr", 0.1, 0.2),
        ("lr", torch.tensor(0.5), torch.tensor(0.25)),
        ("betas", (0.9, 0.99), (0.9, 0.95)),
        ("amsgrad", True, False),
    ):
        with pytest.raises(RuntimeError, match=f"different options: {name} of group 0 is .* on rank 0, .* on rank 1"):
            TritonDistAdamW([parameter], **{name: second if rank else first})
    optimizer = TritonDistAdamW([parameter])
    with pytest.raises(RuntimeError, match=r"weight_decay of group 1 is 0\.0 on rank 0, 1\.0 on rank 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "weight_decay": float(rank)})
    with pytest.raises(RuntimeError, match="note of group 1 is not given on rank 0, x on rank 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], **({"note": "x"} if rank else {})})
    assert len(optimizer.param_groups) == 1


@scenario(1, 2)
def multipliers_of_a_parameter_are_refused(rank, world_size):
    parameter = nn.Parameter(torch.ones(3, device=device_of(rank)))
    parameter.lr_mul, parameter.wd_mul = 1.0, 1
    TritonDistAdamW([("w", parameter)])
    for key in ("lr_mul", "wd_mul"):
        setattr(parameter, key, 0.5)
        with pytest.raises(ValueError, match=f"w: its {key} is 0.5"):
            TritonDistAdamW([("w", parameter)])
        delattr(parameter, key)


@scenario(2)
def parameters_of_fsdp1_are_refused(rank, world_size):
    device = device_of(rank)
    for use_orig_params in (False, True):
        linear = nn.Linear(8, 8, bias=False).to(device)
        model = FullyShardedDataParallel(linear, use_orig_params=use_orig_params, device_id=device)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(ValueError, match=r"0\.0: a parameter of FullyShardedDataParallel.*use fully_shard"):
            TritonDistAdamW(model.parameters())
        assert_same(list(model.parameters()), before)


@scenario(2)
def what_has_no_place_in_a_bucket_is_refused(rank, world_size):
    device = device_of(rank)
    one = nn.Parameter(torch.ones(4, 4, device=device))
    overlapping = nn.Parameter(one.data[1:])
    expanded = nn.Parameter(torch.ones(1, device=device).expand(3))
    complex_valued = nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))
    with pytest.raises(ValueError, match="overlap in memory"):
        TritonDistAdamW([("a", one), ("b", overlapping)])
    with pytest.raises(ValueError, match="leave gaps or overlap"):
        TritonDistAdamW([("a", expanded)])
    with pytest.raises(ValueError, match="only dense real"):
        TritonDistAdamW([("a", complex_valued)])
    with pytest.raises(ValueError, match="give it to AdamW"):
        TritonDistMuon([("bias", nn.Parameter(torch.ones(3, device=device)))])
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(device))
    with pytest.raises(ValueError, match="reduced twice"):
        TritonDistAdamW(wrapped.parameters(), model=wrapped)


@scenario(2)
def debug_mode_finds_no_fault_in_a_sound_run(rank, world_size):
    assert_same(run(rank, debug=True), run(rank))


@scenario(2)
def replicas_that_differ_are_named(rank, world_size):
    net, optimizer = build(rank)
    with torch.no_grad():
        net.layers[3].bias += rank
    with pytest.raises(RuntimeError, match=r"differ from rank 0's: layers\.3\.bias \(rank 1\)"):
        check_replicas(optimizer._bucketed.buckets, optimizer.communicator)


@scenario.parametrize()
def test_step(backend, world_size, name):
    scenario.check(backend, world_size, name)
