"""Gradients in another dtype than their parameters: bf16 micro-batches that add up in fp32, and the wire they take."""

import copy
import gc
import tempfile
from functools import partial

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, alone, device_of, mesh_of, normal, sum_in_rank_order
from dist_loops import Net, assert_same, assert_same_updates, backward, make, nothing_skipped, values
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, checkpoint, make_plan
from optim_dist._optimizers import gradient_dtype

IS_SUPPORTED = hasattr(torch.Tensor, "grad_dtype")
FP32 = {"grad_dtype": torch.float32}

scenario = Scenarios()


def build(rank, kind="adamw", dtype=torch.bfloat16, **options):
    net = Net(device_of(rank)).to(dtype)
    options = {"reducer": "exact", "bucket_mb": 1e-4, "model": net, **FP32, **options}
    return net, make(net, kind, **options)


def run(rank, mode="plain", steps=3, micro_batches=3, skip=nothing_skipped, max_norm=None, **options):
    """Parameters and norms after some steps on several ranks."""
    if mode == "counted":
        options["accumulation_steps"] = micro_batches
    net, optimizer = build(rank, **options)
    norms = []
    for step in range(steps):
        for micro in range(micro_batches):
            if mode == "no_sync" and micro < micro_batches - 1:
                with optimizer.no_sync():
                    backward(net, rank, step, micro, skip)
            else:
                backward(net, rank, step, micro, skip)
        if max_norm is not None:
            norms.append(optimizer.clip_grad_norm_(max_norm))
        optimizer.step()
        optimizer.zero_grad(set_to_none=mode != "zeroed")
    return values(net) + norms


def run_alone(rank, world_size, steps=3, micro_batches=3, kind="adamw", skip=nothing_skipped, max_norm=None):
    """The same in one process, which adds up in fp32 because its parameters were told to."""
    net = Net(device_of(rank)).bfloat16()
    optimizer = make(net, kind, process_group=alone(rank))
    parameters, average = list(net.parameters()), torch.tensor(1 / world_size, device=device_of(rank))
    for p in parameters:
        p.grad_dtype = torch.float32
    norms = []
    for step in range(steps):
        found = []
        for each in range(world_size):
            for micro in range(micro_batches):
                backward(net, each, step, micro, skip)
            found.append([p.grad for p in parameters])
            net.zero_grad()
        for p, gradients in zip(parameters, zip(*found)):
            p.grad = sum_in_rank_order(list(gradients))
        if max_norm is not None:
            norms.append(optimizer.clip_grad_norm_(max_norm * world_size) / world_size)
        optimizer.step(clip_factor=average)
        optimizer.zero_grad()
    return values(net) + norms


@scenario(2, 3)
def micro_batches_add_up_in_fp32_as_in_one_process(rank, world_size):
    for kind in ("adamw", "muon_adamw"):
        expected = run_alone(rank, world_size, kind=kind)
        for mode in ("plain", "counted", "no_sync", "zeroed"):
            assert_same_updates(run(rank, mode, kind=kind), expected, kind)
        # what adds up in bf16 is something else
        assert not all(map(torch.equal, run(rank, kind=kind, grad_dtype=None), expected))


@scenario(2)
def missing_gradients_count_as_in_one_process(rank, world_size):
    def skip(rank, step, micro):
        return 2 if step == 1 else (rank + step + micro) % 4

    expected = run_alone(rank, world_size, skip=skip)
    for mode in ("plain", "counted", "no_sync"):
        assert_same(run(rank, mode, skip=skip), expected)


@scenario(2)
def rs_is_within_rounding_of_one_process(rank, world_size):
    # in fp32 two ranks have one order
    for mode in ("plain", "counted"):
        assert_same(run(rank, mode, reducer="rs"), run_alone(rank, world_size))
    mixed = run(rank, reducer="rs", reduce_dtype=torch.bfloat16)
    for actual, wanted in zip(mixed, run_alone(rank, world_size)):
        torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.05)


@scenario(3)
def sums_are_rounded_to_reduced_dtype(rank, world_size):
    """With bf16 sums it is one rounding more, which one process can make too."""
    wide, narrow = run(rank, micro_batches=1), run(rank, micro_batches=1, reduced_dtype=torch.bfloat16)
    plain = run(rank, micro_batches=1, grad_dtype=None)
    # one micro-batch has bf16 gradients, of which the sum is fp32 unless it is rounded
    assert_same(narrow, plain)
    assert not all(map(torch.equal, wide, plain))


@scenario(2)
def clipping_takes_the_norm_of_fp32_gradients(rank, world_size):
    for mode in ("plain", "counted"):
        *actual, first, second, third = run(rank, mode, max_norm=0.5)
        *expected, a, b, c = run_alone(rank, world_size, max_norm=0.5)
        torch.testing.assert_close(torch.stack([first, second, third]), torch.stack([a, b, c]), rtol=1e-6, atol=0)
        for left, right in zip(actual, expected):
            torch.testing.assert_close(left, right, rtol=0.01, atol=0.01)


@scenario(2)
def the_wire_and_the_plan_count_fp32_gradients(rank, world_size):
    for options, itemsize in ((FP32, 4), ({**FP32, "reduce_dtype": torch.bfloat16}, 2), ({"grad_dtype": None}, 2)):
        for reducer in ("rs", "exact"):
            net, optimizer = build(rank, reducer=reducer, bucket_mb=None, **options)
            numel = optimizer.plan.buckets[0].numel
            assert len(optimizer.plan.buckets) == 1
            before = optimizer.communicator.traffic.bytes_sent
            backward(net, rank, 0, 0)
            optimizer.step()
            sent = optimizer.communicator.traffic.bytes_sent - before
            assert optimizer.plan.wire_bytes == numel // 2 * (2 + itemsize)
            # beside it the message that says which gradients there are
            assert 0 <= sent - optimizer.plan.wire_bytes < 100
            said = optimizer.explain().data
            assert said["memory_bytes"] == numel * (4 if options["grad_dtype"] is None else 6)
            assert said["buckets"][0]["wire_dtype"] == ("float32" if itemsize == 4 else "bfloat16")
            optimizer.close()


@scenario(2)
def a_checkpoint_goes_on_and_fits_another_grad_dtype(rank, world_size):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    net, optimizer = build(rank)
    backward(net, rank, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(f"{folder[0]}/1", net, optimizer)
    per_rank = optimizer.state_dict()
    states = {}
    for options in (FP32, {"grad_dtype": None}):
        again, its = build(rank, **options)
        checkpoint.load(f"{folder[0]}/1", again, its)
        its.load_state_dict(per_rank)  # the plan is the same
        for micro in range(2):
            backward(again, rank, 1, micro)
        its.step()
        states[options["grad_dtype"]] = values(again)
    for micro in range(2):
        backward(net, rank, 1, micro)
    optimizer.step()
    assert_same(states[torch.float32], values(net))
    assert not all(map(torch.equal, states[None], values(net)))


@scenario(1, 2)
def the_attribute_goes_back(rank, world_size):
    for how in ("close", "delete", "newer"):
        net, optimizer = build(rank)
        net.layers[1].weight.grad_dtype = None if how == "close" else torch.float32
        assert net.layers[0].weight.grad_dtype == torch.float32
        backward(net, rank, 0, 0)
        gradient = net.layers[0].bias.grad.clone()
        assert gradient.dtype == torch.float32
        if how == "close":
            optimizer.close()
        elif how == "newer":
            newer = TritonDistAdamW(net.named_parameters(), lr=0.05, reducer="exact")
        del optimizer
        gc.collect()
        assert net.layers[0].bias.grad_dtype == torch.bfloat16
        assert torch.equal(net.layers[0].bias.grad, gradient.bfloat16())
        # what somebody else has chosen since stays
        assert net.layers[1].weight.grad_dtype == (None if how == "close" else torch.bfloat16)
        backward(net, rank, 0, 1)
        assert net.layers[0].bias.grad.dtype == torch.bfloat16
        if how == "newer":
            newer.step()


@scenario(1, 2)
def what_was_chosen_before_goes_back(rank, world_size):
    net = Net(device_of(rank)).bfloat16()
    weight, bias = net.layers[0].weight, net.layers[0].bias
    weight.grad_dtype, bias.grad_dtype = None, torch.float32
    optimizer = TritonDistAdamW(net.named_parameters(), **FP32)
    assert weight.grad_dtype == torch.float32
    optimizer.close()
    assert weight.grad_dtype is None
    assert bias.grad_dtype == torch.float32


@scenario(2)
def gradients_that_there_are_come_along(rank, world_size):
    found = []
    for is_early in (True, False):
        net = Net(device_of(rank)).bfloat16()
        make_it = partial(TritonDistAdamW, net.named_parameters(), lr=0.05, reducer="exact", **FP32)
        optimizer = None if is_early else make_it()
        backward(net, rank, 0, 0)
        optimizer = optimizer or make_it()
        backward(net, rank, 0, 1)
        optimizer.step()
        found.append(values(net))
    assert_same(*found)


@scenario(2)
def gradients_of_another_dtype_are_refused(rank, world_size):
    net, optimizer = build(rank)
    weight = net.layers[0].weight
    with pytest.raises(RuntimeError, match="dtype"):
        weight.grad = torch.ones_like(weight)  # by torch
    weight.grad_dtype = None
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight is torch\.bfloat16 .* takes torch\.float32 "):
        optimizer.step()
    weight.grad = torch.ones_like(weight, dtype=torch.float32)
    optimizer.step()
    net, optimizer = build(rank, grad_dtype=None)
    net.layers[0].weight.grad_dtype = torch.float32
    backward(net, rank, 0, 0)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight is torch\.float32 .* takes torch\.bfloat16 "):
        optimizer.step()


@scenario(2)
def ranks_that_disagree_are_refused(rank, world_size):
    net = Net(device_of(rank)).bfloat16()
    with pytest.raises(RuntimeError, match=r"grad_dtype is torch\.float32 on rank 0, None on rank 1"):
        TritonDistAdamW(net.parameters(), **(FP32 if rank == 0 else {}))
    assert net.layers[0].weight.grad_dtype == torch.bfloat16


@scenario(2)
def dtensors_are_refused(rank, world_size):
    value = normal((4, 4), 3).to(device_of(rank), torch.bfloat16)
    cut = nn.Parameter(distribute_tensor(value, mesh_of(world_size), [Shard(0)]))
    with pytest.raises(ValueError, match=r"cut: a DTensor.*grad_dtype=torch\.float32 cannot be had.*reduce_dtype"):
        TritonDistAdamW([("cut", cut)], **FP32)
    TritonDistAdamW([("cut", cut)])


@scenario(2)
def groups_that_come_later_have_it_too(rank, world_size):
    net = Net(device_of(rank)).bfloat16()
    twin, expected = build(rank)
    first, *rest = net.layers
    optimizer = TritonDistAdamW(first.parameters(), lr=0.05, reducer="exact", **FP32)
    optimizer.add_param_group({"params": [p for layer in rest for p in layer.parameters()]})
    for model, opt in ((net, optimizer), (twin, expected)):
        for micro in range(3):
            backward(model, rank, 0, micro)
        opt.step()
    assert_same(values(net), values(twin))


@scenario(1, 2)
def a_rebuilt_plan_has_it_for_those_that_are_trained_now(rank, world_size):
    net = Net(device_of(rank)).bfloat16()
    net.layers[0].requires_grad_(False)
    optimizer = make(net, "adamw", reducer="exact", **FP32)
    backward(net, rank, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    net.layers[0].requires_grad_(True)
    net.layers[3].requires_grad_(False)
    optimizer.rebuild_plan()
    found = [layer.weight.grad_dtype for layer in net.layers]
    assert found == [torch.float32, torch.float32, torch.float32, torch.bfloat16]
    for micro in range(2):
        backward(net, rank, 1, micro)
    optimizer.step()
    optimizer.close()
    assert net.layers[0].weight.grad_dtype == torch.bfloat16


@scenario(2)
def fp16_sums_in_fp32_do_not_overflow_and_need_no_division(rank, world_size):
    for reducer in ("rs", "exact"):
        p = nn.Parameter(torch.zeros(4, dtype=torch.float16, device=device_of(rank)))
        optimizer = TritonDistAdamW([p], lr=0.5, reducer=reducer, **FP32)
        for _ in range(2):
            (p * 60000).sum().backward()
        assert p.grad.tolist() == [120000.0] * 4
        assert optimizer.clip_grad_norm_(1e9).item() == 240000.0
        optimizer.step()
        assert torch.isfinite(p).all()
        assert p[0] < 0


@scenario(1)
def one_rank_adds_up_in_fp32(rank, world_size):
    for kind in ("adamw", "muon_adamw"):
        assert_same_updates(run(rank, kind=kind, model=None), run_alone(rank, 1, kind=kind), kind)


@scenario(1)
def a_state_that_torch_asks_for_before_the_first_step(rank, world_size):
    """torch would make it by a step of gradients in the parameters' dtype."""
    net, optimizer = build(rank, model=None, master_weights="fp32")
    backward(net, rank, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    saved = get_optimizer_state_dict(net, optimizer)
    again, its = build(rank, model=None, master_weights="fp32")
    get_optimizer_state_dict(again, its)
    again.load_state_dict(net.state_dict())
    set_optimizer_state_dict(again, its, copy.deepcopy(saved))
    for model, opt in ((net, optimizer), (again, its)):
        backward(model, rank, 1, 0)
        opt.step()
    assert_same(values(again), values(net))


@scenario(1)
def a_checkpoint_of_one_rank_goes_on(rank, world_size):
    """Its state takes the place of the one that is there for torch to see."""
    with tempfile.TemporaryDirectory() as folder:
        net, optimizer = build(rank, model=None, master_weights="fp32")
        for step in range(2):
            backward(net, rank, step, 0)
            optimizer.step()
            optimizer.zero_grad()
        expected = optimizer.full_state_dict()["state"]
        checkpoint.save(f"{folder}/1", net, optimizer)
        again, its = build(rank, model=None, master_weights="fp32")
        checkpoint.load(f"{folder}/1", again, its)
        found = its.full_state_dict()["state"]
        assert found.keys() == expected.keys()
        for number, state in expected.items():
            assert found[number].keys() == state.keys()
            assert_same([*found[number].values()], [state[key] for key in found[number]])
        checkpoint.save(f"{folder}/2", again, its)
        third, last = build(rank, model=None, master_weights="fp32")
        checkpoint.load(f"{folder}/2", third, last)
    for model, opt in ((net, optimizer), (again, its), (third, last)):
        backward(model, rank, 2, 0)
        opt.step()
    assert_same(values(again), values(net))
    assert_same(values(third), values(net))


@pytest.mark.skipif(not IS_SUPPORTED, reason="torch 2.9 has no Tensor.grad_dtype")
@scenario.parametrize()
def test_grad_dtype(backend, world_size, name):
    scenario.check(backend, world_size, name)


@pytest.mark.skipif(not IS_SUPPORTED, reason="torch 2.9 has no Tensor.grad_dtype")
def test_without_a_process_group_it_is_the_same():
    twin = nn.Parameter(torch.linspace(-1, 1, 8).view(2, 4).bfloat16())
    twin.grad_dtype = torch.float32
    p = nn.Parameter(twin.detach().clone())
    optimizers = [TritonDistAdamW([twin], lr=0.1), TritonDistAdamW([p], lr=0.1, **FP32)]
    for each, optimizer in zip((twin, p), optimizers):
        for micro in range(3):
            (each * normal((2, 4), micro)).pow(2).sum().backward()
        assert each.grad.dtype == torch.float32
        optimizer.step()
    assert torch.equal(twin, p)
    copied = copy.deepcopy(optimizers[1])
    assert copied.param_groups[0]["params"][0].grad_dtype == torch.float32


@pytest.mark.skipif(not IS_SUPPORTED, reason="torch 2.9 has no Tensor.grad_dtype")
def test_zeros_for_a_missing_gradient_have_the_dtype_of_the_others():
    p = nn.Parameter(torch.eye(4, dtype=torch.bfloat16))
    optimizer = TritonDistMuon([{"params": [p], "missing_grad": "zero"}], **FP32)
    for has_gradient in (True, False, True):
        if has_gradient:
            (p * normal((4, 4), 1)).sum().backward()
        before = p.detach().clone()
        optimizer.step()
        assert optimizer.shards()[0].gradient_or_zeros.dtype == torch.float32
        optimizer.zero_grad()
        assert not torch.equal(p, before)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn, "float32"])
def test_what_is_no_dtype_of_gradients_is_refused(dtype):
    with pytest.raises(ValueError, match="grad_dtype must be None"):
        TritonDistAdamW([nn.Parameter(torch.ones(2))], grad_dtype=dtype)


def test_torch_without_the_attribute_is_refused(monkeypatch):
    monkeypatch.setattr(gradient_dtype, "IS_SUPPORTED", False)
    with pytest.raises(RuntimeError, match=r"grad_dtype=torch\.float32 needs torch 2\.10 or newer"):
        TritonDistAdamW([nn.Parameter(torch.ones(2))], **FP32)


def test_plans_count_reduction_in_gradients_and_gather_in_parameters():
    shapes, groups = {"w": (64, 64)}, [{"kind": "muon", "params": ["w"]}]
    plan = make_plan(shapes, groups, 2, **FP32)
    assert plan.wire_bytes == plan.buckets[0].chunk * (4 + 2)
    assert plan.gradient_nbytes == 2 * plan.nbytes
    narrow = make_plan(shapes, groups, 2, **FP32, reduce_dtype=torch.bfloat16)
    assert narrow.wire_bytes == make_plan(shapes, groups, 2).wire_bytes
    assert plan.hash == narrow.hash == make_plan(shapes, groups, 2).hash
