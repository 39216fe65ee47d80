"""Gradients that are not kept: the same sums as those that are, in a few rolling buffers, whatever a rank lacks."""

import copy
import gc
import random
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from dist_cases import Scenarios, alone, device_of, mesh_of, normal, sum_in_rank_order
from dist_loops import Net, assert_same, assert_same_updates, backward, batch, make, nothing_skipped, values
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from optim_dist import TritonDistAdamW, checkpoint
from optim_dist._optimizers.shards import StepContext
from optim_dist._reduction.rolling import NUM_BUFFERS
from optim_utils.testing import run_ranks

scenario = Scenarios()


def build(rank, kind="adamw", dtype=torch.float32, **options):
    net = Net(device_of(rank)).to(dtype)
    options = {"gradients": "streamed", "accumulation_steps": 1, "reducer": "exact", "bucket_mb": 1e-4, **options}
    if options["gradients"] is None:
        del options["gradients"]
    return net, make(net, kind, **{"model": net, **options})


def run(rank, steps=(0, 1, 2), micro_batches=1, skip=nothing_skipped, before=lambda net, step: None, **options):
    """Parameters after some steps; the optimizer is closed, for while there are several none waits under backward."""
    net, optimizer = build(rank, accumulation_steps=micro_batches, **options)
    for step in steps:
        before(net, step)
        for micro in range(micro_batches):
            backward(net, rank, step, micro, skip)
            if options.get("gradients", "streamed") == "streamed":
                assert all(p.grad is None for p in net.parameters())
        optimizer.step()
        optimizer.zero_grad()
    found = values(net)
    optimizer.close()
    return found


def go_on(rank, net, optimizer, steps, micro_batches=1):
    """Parameters after more steps."""
    for step in steps:
        for micro in range(micro_batches):
            backward(net, rank, step, micro)
        optimizer.step()
    return values(net)


def run_resident(rank, **options):
    return run(rank, gradients="resident", **options)


def run_alone(rank, world_size, micro_batches, kind="adamw", steps=3, skip=nothing_skipped, dtype=torch.float32):
    """One process that adds up over ranks, then over micro-batches, in fp32."""
    net = Net(device_of(rank)).to(dtype)
    optimizer = make(net, kind, process_group=alone(rank))
    parameters, average = list(net.parameters()), torch.tensor(1 / world_size, device=device_of(rank))
    for step in range(steps):
        totals = [None] * len(parameters)
        for micro in range(micro_batches):
            found = []
            for each in range(world_size):
                backward(net, each, step, micro, skip)
                found.append([None if p.grad is None else p.grad.float() for p in parameters])
                net.zero_grad()
            for place, gradients in enumerate(zip(*found)):
                total = sum_in_rank_order(list(gradients))
                if total is not None:
                    totals[place] = total if totals[place] is None else totals[place] + total
        for p, total in zip(parameters, totals):
            if hasattr(p, "grad_dtype"):
                p.grad_dtype = torch.float32
            p.grad = total
        optimizer.step(clip_factor=average)
        optimizer.zero_grad()
        for p in parameters:
            if hasattr(p, "grad_dtype"):
                p.grad_dtype = dtype
    return values(net)


@scenario(2, 3)
def what_is_not_kept_gives_the_same_bits(rank, world_size):
    for kind in ("adamw", "muon_adamw"):
        for dtype in (torch.float32, torch.bfloat16):
            expected = run_resident(rank, kind=kind, dtype=dtype)
            for bucket_mb in (1e-6, 1e-4, None):
                found = run(rank, kind=kind, dtype=dtype, bucket_mb=bucket_mb)
                assert_same_updates(found, expected, kind)


@scenario(2, 3)
def rs_adds_what_it_adds_of_kept_ones(rank, world_size):
    for dtype in (torch.float32, torch.bfloat16):
        for actual, wanted in zip(
            run(rank, reducer="rs", dtype=dtype), run_resident(rank, reducer="rs", dtype=dtype), strict=True
        ):
            # two ranks have one order
            tolerance = 0 if world_size == 2 else 2e-2 if dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(actual, wanted, rtol=tolerance, atol=tolerance)


@scenario(2)
def dtypes_of_wire_and_sums_are_those_that_were_asked_for(rank, world_size):
    choices = [{"reduce_dtype": torch.bfloat16}, {"reduce_dtype": torch.bfloat16, "reducer": "rs"}]
    choices += [{"reduced_dtype": torch.float32, "dtype": torch.bfloat16}, {"dtype": torch.float16}]
    choices += [{"dtype": torch.float16, "reducer": "rs"}, {"average": False}]
    if hasattr(torch.Tensor, "grad_dtype"):
        choices += [{"dtype": torch.bfloat16, "grad_dtype": torch.float32, "reducer": each} for each in ("rs", "exact")]
        choices[-1]["reduce_dtype"] = torch.float16
    for options in choices:
        assert_same(run(rank, **options), run_resident(rank, **options))


@scenario(2, 3)
def micro_batches_add_up_in_fp32_as_in_one_process(rank, world_size):
    for kind in ("adamw", "muon_adamw"):
        # of bf16 one process would have to be told to keep fp32
        for dtype in (torch.float32, torch.bfloat16)[: 1 + hasattr(torch.Tensor, "grad_dtype")]:
            expected = run_alone(rank, world_size, 3, kind=kind, dtype=dtype)
            assert_same_updates(run(rank, micro_batches=3, kind=kind, dtype=dtype), expected, kind)
    for actual, wanted in zip(run(rank, micro_batches=3, reducer="rs"), run_alone(rank, world_size, 3), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


@scenario(2)
def a_layer_that_some_ranks_or_all_lack_counts_as_with_kept_gradients(rank, world_size):
    def some(rank, step, micro):
        return (rank + step) % 4

    def everyone(rank, step, micro):
        return step

    def in_some_passes(rank, step, micro):
        return 1 if step == 1 else (rank + step + micro) % 4

    for kind in ("adamw", "muon_adamw"):
        for skip in (some, everyone):
            assert_same(run(rank, skip=skip, kind=kind), run_resident(rank, skip=skip, kind=kind))
        found = run(rank, micro_batches=2, skip=in_some_passes, kind=kind)
        expected = run_alone(rank, world_size, 2, skip=in_some_passes, kind=kind)
        assert_same_updates(found, expected, kind)


@scenario(2, 3)
def random_passes_equal_those_of_one_process(rank, world_size):
    for seed in range(8):
        draw = random.Random(seed)
        missing = {
            (each, step, micro): draw.choice([None, None, 0, 1, 2, 3])
            for each in range(world_size)
            for step in range(3)
            for micro in range(3)
        }
        number, bucket_mb = draw.choice([1, 2, 3]), draw.choice([1e-6, 1e-4, None])

        def skip(*where, missing=missing):
            return missing[where]

        found = run(rank, micro_batches=number, skip=skip, bucket_mb=bucket_mb)
        assert_same(found, run_alone(rank, world_size, number, skip=skip))


@scenario(2)
def only_for_what_this_rank_lacks_the_others_are_asked(rank, world_size):
    """Which waits for the device, of matrices. That ``.grad`` is None says nothing here."""
    count = StepContext.count
    for skip in (None, 0 if rank else None):
        asked = []

        def recorded(context, shard, asked=asked):
            found = count(context, shard)
            if found is not None:
                asked.append(shard.name)
            return found

        net, optimizer = build(rank, kind="muon_adamw")
        net(batch(rank, 0), skip).backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepContext, "count", recorded)
            optimizer.step()
        assert set(asked) <= {"layers.0.weight", "layers.0.bias"}
        mine = {shard.name for shard in optimizer.shards()} & {"layers.0.weight", "layers.0.bias"}
        assert set(asked) == (set() if skip is None else mine)
        optimizer.close()


@scenario(2)
def parameters_frozen_later_stay_as_they_are(rank, world_size):
    def freeze(net, step):
        net.layers[2].requires_grad_(step != 1)

    assert_same(run(rank, before=freeze), run_resident(rank, before=freeze))


@scenario(2)
def the_loop_may_communicate_behind_a_pass_that_lacks_layers(rank, world_size):
    found = []
    for gradients in ("streamed", "resident"):
        net, optimizer = build(rank, bucket_mb=1e-6, gradients=gradients)
        assert len(optimizer.plan.buckets) > NUM_BUFFERS + 1
        for step in range(3):
            # the last layer is the first to be reduced
            net(batch(rank, step), skip=3 if rank else None).backward()
            dist.all_reduce(torch.ones(1, device=device_of(rank)))
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(net))
        optimizer.close()
    assert_same(*found)


@scenario(2)
def ranks_with_fewer_passes_are_not_left_behind(rank, world_size):
    found = []
    for gradients in ("streamed", None):
        net, optimizer = build(rank, bucket_mb=None, gradients=gradients, accumulation_steps=gradients and 3)
        for step in range(2):
            for micro in range(3 if rank == 0 else step):
                backward(net, rank, step, micro)
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(net))
        optimizer.close()
    for left, right in zip(*found):
        torch.testing.assert_close(left, right)


@scenario(2)
def two_optimizers_do_not_wait_for_each_other(rank, world_size):
    """Whatever layers a rank lacks: while it holds back one optimizer's buckets, the other's wait for no buffer."""
    found = []
    for gradients in ("streamed", "resident"):
        net = Net(device_of(rank))
        options = {"accumulation_steps": 1, "reducer": "exact", "bucket_mb": 1e-6, "gradients": gradients}
        matrices = TritonDistAdamW([(n, p) for n, p in net.named_parameters() if p.ndim == 2], lr=0.05, **options)
        vectors = TritonDistAdamW([(n, p) for n, p in net.named_parameters() if p.ndim == 1], lr=0.05, **options)
        for step in range(3):
            # buckets of the first wait for the last layer on one rank, those of the second for the bias on the other
            net.layers[3].weight.requires_grad_(rank == 0)
            net.layers[3].bias.requires_grad_(rank == 1)
            backward(net, rank, step)
            net.requires_grad_(True)
            for optimizer in (matrices, vectors):
                optimizer.step()
                optimizer.zero_grad()
        found.append(values(net))
        matrices.close()
        vectors.close()
    assert_same(*found)


@scenario(2)
def an_optimizer_that_is_gone_on_some_ranks_alone_holds_nobody_up(rank, world_size):
    """Beside it none waits under backward, on any rank: else those without it wait for those that have it."""
    options = {"gradients": "streamed", "accumulation_steps": 1, "reducer": "exact", "bucket_mb": 1e-6, "timeout": 20}
    gc.collect()
    gc.disable()
    try:
        garbage = make(Net(device_of(rank)), **options)
        if rank == 1:
            garbage.itself = garbage  # which only the collector frees
        del garbage
        net = Net(device_of(rank))
        optimizer = make(net, **options)
        for step in range(2):
            backward(net, rank, step)
            assert any(p.grad is not None for p in net.parameters())
            dist.all_reduce(torch.ones(1, device=device_of(rank)))
            optimizer.step()
            if rank == 1:
                gc.collect()
        found = values(net)
        optimizer.rebuild_plan()  # ranks agree anew
        backward(net, rank, 2)
        assert all(p.grad is None for p in net.parameters())
        optimizer.close()
    finally:
        gc.enable()
    assert_same(found, run(rank, [0, 1]))


@scenario(2)
def clipping_is_that_of_kept_gradients(rank, world_size):
    found = []
    for gradients in ("streamed", "resident"):
        for of_step in (True, False):
            net, optimizer = build(rank, gradients=gradients, max_norm=0.5 if of_step else None)
            norms = []
            for step in range(3):
                backward(net, rank, step)
                if not of_step:
                    optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
                norms.append(optimizer.grad_norm)
            found.append(values(net) + norms)
    for each in found[1:]:
        assert_same(each, found[0])


@scenario(2)
def nonfinite_sums_skip_the_step_everywhere(rank, world_size):
    net, optimizer = build(rank, skip_nonfinite=True, accumulation_steps=2)
    before = values(net)
    for micro in range(2):
        (net(batch(rank, 0, micro)) * (float("inf") if (rank, micro) == (1, 0) else 1.0)).backward()
    optimizer.step()
    assert_same(values(net), before)
    found = go_on(rank, net, optimizer, [1], 2)
    optimizer.close()
    assert_same(found, run(rank, [1], 2))


@scenario(2)
def scales_that_are_set_by_hand_are_read_by_the_step(rank, world_size):
    net, optimizer = build(rank)
    twin, expected = build(rank, gradients="resident")
    device = device_of(rank)
    for model, opt in ((net, optimizer), (twin, expected)):
        (model(batch(rank, 0)) * 8).backward()
        opt.grad_scale, opt.found_inf = torch.full((), 8.0, device=device), torch.zeros((), device=device)
        opt.step()
        opt.zero_grad()
        before = values(model)
        # an infinity in the sum
        (model(batch(rank, 1)) * (float("inf") if rank else 8.0)).backward()
        opt.step()
        assert_same(values(model), before)
    assert_same(values(net), values(twin))


@scenario(2)
def a_grad_scaler_is_refused(rank, world_size):
    net, optimizer = build(rank)
    scaler = torch.amp.GradScaler(device_of(rank).type)
    scaler.scale(net(batch(rank, 0))).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler looks for infinities in \.grad.*grad_scale"):
        scaler.step(optimizer)


@scenario(2)
def a_checkpoint_between_steps_goes_on(rank, world_size):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    net, optimizer = build(rank, accumulation_steps=2)
    go_on(rank, net, optimizer, [0], 2)
    checkpoint.save(f"{folder[0]}/1", net, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    backward(net, rank, 1)
    with pytest.raises(RuntimeError, match="have arrived since the last step"):
        checkpoint.save(f"{folder[0]}/2", net, optimizer)
    backward(net, rank, 1, 1)
    optimizer.step()
    expected = values(net)
    optimizer.close()
    for how in ("checkpoint", "state_dict"):
        net, optimizer = build(rank, accumulation_steps=2)
        checkpoint.load(f"{folder[0]}/1", net, optimizer)
        if how == "state_dict":
            optimizer.load_state_dict(state)
        assert_same(go_on(rank, net, optimizer, [1], 2), expected)
        optimizer.close()


@scenario(2)
def zero_grad_gives_a_batch_up(rank, world_size):
    for micro_batches, number, skip in ((1, 1, 2), (2, 1, None), (2, 2, rank), (3, 1 + rank, 3)):
        expected = run(rank, [0], micro_batches)
        net, optimizer = build(rank, accumulation_steps=micro_batches)
        for micro in range(number):
            net(batch(rank, 7, micro), skip).backward()
        if number == micro_batches:
            optimizer.clip_grad_norm_(0.001)
            assert not optimizer.agree_between_steps()
        optimizer.zero_grad()
        assert optimizer.agree_between_steps()
        assert_same(go_on(rank, net, optimizer, [0], micro_batches), expected)
        optimizer.close()


@scenario(2)
def a_pass_that_an_error_cuts_short_may_be_given_up(rank, world_size):
    def fail(gradient):
        raise ValueError("in the middle")

    expected = run(rank, [0], 2, bucket_mb=1e-6)
    net, optimizer = build(rank, accumulation_steps=2, bucket_mb=1e-6)
    backward(net, rank, 7)
    # as many buckets are launched as fit into buffers: what other ranks don't launch nobody can wait for
    handle = net.layers[2 + rank].bias.register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        backward(net, rank, 7, 1)
    handle.remove()
    optimizer.zero_grad()
    assert_same(go_on(rank, net, optimizer, [0], 2), expected)


@scenario(2)
def a_pass_too_many_is_an_error(rank, world_size):
    expected = run(rank, [1], 2)
    net, optimizer = build(rank, accumulation_steps=2)
    for micro in range(2):
        backward(net, rank, 0, micro)
    with pytest.raises(
        RuntimeError, match=r"layers\.3\.\w+ arrived after the 2 backward passes of accumulation_steps="
    ):
        backward(net, rank, 0, 2)
    optimizer.zero_grad()
    backward(net, rank, 0)
    optimizer.clip_grad_norm_(1.0)  # which takes what there is
    with pytest.raises(RuntimeError, match="or gradients were clipped"):
        backward(net, rank, 0, 1)
    optimizer.zero_grad()
    assert_same(go_on(rank, net, optimizer, [1], 2), expected)


@scenario(2)
def zero_grad_may_be_left_out_and_a_step_without_gradients_moves_nothing(rank, world_size):
    net, optimizer = build(rank)
    twin, expected = build(rank, gradients="resident")
    for step in range(2):
        backward(net, rank, step)
        optimizer.step()
        before = values(net)
        optimizer.step()
        assert_same(values(net), before)
        backward(twin, rank, step)
        expected.step()
        twin.zero_grad()
    assert_same(values(net), values(twin))


@scenario(2)
def gradients_set_by_hand_are_taken_at_the_step(rank, world_size):
    net, optimizer = build(rank)
    twin, expected = build(rank, gradients="resident")
    for model, opt in ((net, optimizer), (twin, expected)):
        for p in model.layers[rank].parameters():
            p.grad = torch.ones_like(p)
        opt.step()
    assert_same(values(net), values(twin))
    backward(net, rank, 0)
    net.layers[1].bias.grad = torch.ones_like(net.layers[1].bias)
    with pytest.raises(RuntimeError, match=r"layers\.1\.bias was assigned after its bucket had been reduced"):
        optimizer.step()
    optimizer.zero_grad()


@scenario(2)
def what_no_bucket_can_take_is_refused(rank, world_size):
    embedding = nn.Embedding(4, 3, sparse=True).to(device_of(rank))
    optimizer = TritonDistAdamW(embedding.named_parameters(), gradients="streamed", accumulation_steps=1)
    with pytest.raises(RuntimeError, match=r"gradient of weight is torch\.sparse_coo; make it dense"):
        embedding(torch.zeros(2, dtype=torch.int64, device=device_of(rank))).sum().backward()
    embedding.weight.grad = None
    optimizer.zero_grad()


@scenario(2)
def no_sync_is_refused(rank, world_size):
    _, optimizer = build(rank)
    with (
        pytest.raises(RuntimeError, match=r"no_sync\(\) keeps gradients.*every backward pass reduces"),
        optimizer.no_sync(),
    ):
        pass


@scenario(2)
def ranks_that_disagree_are_refused(rank, world_size):
    with pytest.raises(RuntimeError, match="gradients is streamed on rank 0, resident on rank 1"):
        build(rank, gradients="resident" if rank else "streamed")


@scenario(2)
def groups_come_and_buckets_go(rank, world_size):
    net, expected = Net(device_of(rank)), run(rank, [0])
    first, *rest = net.layers
    options = {"gradients": "streamed", "accumulation_steps": 1, "reducer": "exact"}
    optimizer = TritonDistAdamW(first.parameters(), lr=0.05, **options)
    first(torch.ones(1, 5, device=device_of(rank))).sum().backward()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [p for layer in rest for p in layer.parameters()]})
    largest = max(bucket.gradient_nbytes for bucket in optimizer.plan.buckets)
    chunks = sum(bucket.chunk * 4 for bucket in optimizer.plan.buckets)
    assert optimizer._bucketed.gradient_bytes == NUM_BUFFERS * largest + chunks
    assert_same(go_on(rank, net, optimizer, [0]), expected)
    # by another optimizer, and by closing that
    newer = TritonDistAdamW(net.parameters(), lr=0.05, **options)
    backward(net, rank, 1)
    newer.close()
    backward(net, rank, 1)
    assert all(p.grad is not None for p in net.parameters())
    assert_same(values(net), expected)


@scenario(2)
def a_rebuilt_plan_streams_those_that_are_trained_now(rank, world_size):
    found = []
    for gradients in ("streamed", "resident"):
        net = Net(device_of(rank))
        net.layers[0].requires_grad_(False)
        optimizer = make(net, gradients=gradients, accumulation_steps=1, reducer="exact", bucket_mb=1e-6)
        backward(net, rank, 7)
        with pytest.raises(RuntimeError, match=r"zero_grad\(\)"):
            optimizer.rebuild_plan()
        optimizer.zero_grad()
        for step in range(2):
            net.layers[0].requires_grad_(step == 1)
            net.layers[3].requires_grad_(step == 0)
            optimizer.rebuild_plan()
            backward(net, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(net))
        net.requires_grad_(False)
        optimizer.rebuild_plan()
        assert optimizer._bucketed.gradient_bytes == 0
        optimizer.step()
        optimizer.close()
    assert_same(*found)


@scenario(2)
def buffers_are_few_and_what_stays_is_the_own_chunk(rank, world_size):
    for kind in ("adamw", "muon_adamw"):
        for micro_batches in (1, 2):
            gc.collect()  # another optimizer that is not gone would keep this one from waiting
            net, optimizer = build(rank, kind=kind, accumulation_steps=micro_batches, bucket_mb=1e-6)
            buckets = optimizer.plan.buckets
            assert len(buckets) > NUM_BUFFERS
            largest = max(bucket.gradient_nbytes for bucket in buckets)
            kept = NUM_BUFFERS * largest + sum(bucket.chunk * 4 for bucket in buckets)
            assert optimizer._bucketed.gradient_bytes == kept
            assert optimizer.explain().data["memory_bytes"] == optimizer.plan.nbytes + kept
            most = [0]

            def measure(_, net=net, most=most):
                most[0] = max(most[0], sum(p.grad.nbytes for p in net.parameters() if p.grad is not None))

            for p in net.parameters():
                p.register_post_accumulate_grad_hook(measure)
            for micro in range(micro_batches):
                backward(net, rank, 0, micro)
            # each kind of bucket fills while the other does
            assert 0 <= most[0] <= len({bucket.route for bucket in buckets}) * largest
            assert not any(p.grad is not None for p in net.parameters())
            optimizer.step()
            assert optimizer._bucketed.gradient_bytes == kept
            optimizer.close()


@scenario(2)
def buckets_are_small_unless_told_otherwise(rank, world_size):
    numbers = {}
    for gradients in ("streamed", "resident"):
        net = nn.Linear(5800, 5800, bias=False, device=device_of(rank))  # 128 MiB
        parameters = [*net.parameters(), nn.Parameter(torch.zeros(1 << 24, device=device_of(rank)))]
        optimizer = TritonDistAdamW(parameters, gradients=gradients, accumulation_steps=1)
        numbers[gradients] = len(optimizer.plan.buckets)
        optimizer.close()
    assert numbers == {"streamed": 2, "resident": 1}


@scenario(2)
def a_round_sends_every_bucket_once(rank, world_size):
    for micro_batches in (1, 3):
        net, optimizer = build(rank, accumulation_steps=micro_batches, bucket_mb=None)
        before = optimizer.communicator.traffic.bytes_sent
        for micro in range(micro_batches):
            backward(net, rank, 0, micro)
        reduced = sum(bucket.reduce_bytes for bucket in optimizer.plan.buckets)
        assert optimizer.communicator.traffic.bytes_sent - before == micro_batches * reduced
        optimizer.step()
        wanted = optimizer.explain().data["wire_bytes"]
        assert wanted == optimizer.plan.wire_bytes + (micro_batches - 1) * reduced
        assert 0 <= optimizer.communicator.traffic.bytes_sent - before - wanted < 200
        optimizer.close()


@scenario(2)
def a_step_is_seen_by_autograd(rank, world_size):
    net, optimizer = build(rank, overlap=True)
    loss = net(batch(rank, 0))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@scenario(2)
def debug_mode_finds_no_fault_in_a_sound_run(rank, world_size):
    assert_same(run(rank, micro_batches=2, debug=True), run(rank, micro_batches=2))


@scenario(4)
def a_grid_adds_up_as_a_line(rank, world_size):
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    for reducer in ("exact", "rs"):
        options = {"accumulation_steps": 2, "reducer": reducer}
        found = []
        for where in ({"mesh": mesh}, {}):
            net, optimizer = build(rank, **options, **where)
            for step in range(2):
                for micro in range(2):
                    backward(net, rank, step, micro)
                optimizer.step()
            found.append(values(net))
            optimizer.close()
        for left, right in zip(*found):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@scenario(2)
def dtensors_stay_as_they_were(rank, world_size):
    found = []
    for gradients in ("streamed", "resident"):
        value = normal((4, 4), 3).to(device_of(rank))
        cut = nn.Parameter(distribute_tensor(value, mesh_of(world_size), [Shard(0)]))
        plain = nn.Parameter(value.clone())
        options = {"gradients": gradients, "accumulation_steps": 1, "reducer": "exact"}
        optimizer = TritonDistAdamW([("cut", cut), ("plain", plain)], lr=0.1, **options)
        (cut.full_tensor() * 2).sum().backward()
        (plain * (rank + 1)).sum().backward()
        assert cut.grad is not None
        assert (plain.grad is None) == (gradients == "streamed")
        optimizer.step()
        found.append([cut.full_tensor().detach(), plain.detach()])
        optimizer.close()
    assert_same(*found)


@scenario(2)
def dtensors_alone_have_no_buffers(rank, world_size):
    found = []
    for gradients in ("streamed", "resident"):
        cut = nn.Parameter(distribute_tensor(normal((4, 4), 3).to(device_of(rank)), mesh_of(world_size), [Shard(0)]))
        optimizer = TritonDistAdamW([("cut", cut)], lr=0.1, gradients=gradients, accumulation_steps=2)
        (cut.full_tensor() * 2).sum().backward()
        optimizer.zero_grad()
        assert optimizer.agree_between_steps()
        for _ in range(2):
            (cut.full_tensor() * 2).sum().backward()
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.no_sync():
            (cut.full_tensor() * 2).sum().backward()
        scaler = torch.amp.GradScaler(device_of(rank).type, init_scale=4.0)
        scaler.scale((cut.full_tensor() * 2).sum()).backward()
        scaler.step(optimizer)
        found.append([cut.full_tensor().detach()])
        optimizer.close()
    assert_same(*found)


class Checkpointed(Net):
    """Every layer's forward runs again in backward."""

    def __init__(self, device, use_reentrant):
        super().__init__(device)
        self.use_reentrant = use_reentrant

    def forward(self, x, skip=None):
        x = x.requires_grad_()
        for layer in self.layers:
            x = torch.tanh(torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.use_reentrant))
        return x.square().sum()


@scenario(2)
def layers_that_run_again_in_backward_are_one_pass(rank, world_size):
    options = {"gradients": "streamed", "accumulation_steps": 2, "reducer": "exact", "bucket_mb": 1e-4}
    net = Checkpointed(device_of(rank), use_reentrant=False)
    optimizer = make(net, model=net, **options)
    found = go_on(rank, net, optimizer, [0, 1], 2)
    optimizer.close()
    assert_same(found, run(rank, [0, 1], 2))
    net = Checkpointed(device_of(rank), use_reentrant=True)
    optimizer = make(net, model=net, **options)
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        backward(net, rank, 0)
    optimizer.zero_grad()
    optimizer.close()


@scenario(1)
def one_rank_keeps_its_gradients(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=2)
    backward(net, rank, 0)
    assert net.layers[0].weight.grad is not None
    with optimizer.no_sync():
        backward(net, rank, 0, 1)
    optimizer.step()


@scenario.parametrize()
def test_streamed(backend, world_size, name):
    scenario.check(backend, world_size, name)


def peak_bytes(rank, world_size, options):
    """The most memory that two steps take on the device, and what is kept for gradients of it."""
    device = device_of(rank)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24))).to(device, torch.bfloat16)
    optimizer = TritonDistAdamW(net.parameters(), model=net, bucket_mb=4, accumulation_steps=1, **options)
    for step in range(3):
        if step == 1:
            torch.cuda.reset_peak_memory_stats(device)
        net(torch.ones(2, 1024, device=device, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    return torch.cuda.max_memory_allocated(device), optimizer._bucketed.gradient_bytes


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_memory_that_streamed_gradients_leave_free():
    choices = ({"gradients": "resident"}, {"gradients": "streamed"})
    of_ranks = zip(*(run_ranks(peak_bytes, 2, options, backend="nccl") for options in choices))
    for (most, kept), (streamed_most, streamed_kept) in of_ranks:
        # 48 MiB of gradients against three buffers of 4 MiB and half of the sums
        assert kept - streamed_kept >= 10 * 2**20
        assert most - streamed_most >= 0.8 * (kept - streamed_kept)


@pytest.mark.parametrize(("options", "match"), [
    ({"gradients": "streamed"}, "accumulation_steps= how many passes"),
    ({"gradients": "streamed", "accumulation_steps": 1, "overlap": False}, "overlap=False rules out"),
    ({"gradients": "rolling"}, "gradients must be one of 'resident', 'streamed', got 'rolling'"),
    ({"gradients": "streamed", "accumulation_steps": 2.5}, "accumulation_steps must be a whole number .* got 2.5"),
    ({"accumulation_steps": float("nan")}, "accumulation_steps must be a whole number of at least 1, got nan"),
])  # fmt: skip
def test_options_that_do_not_go_together_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        TritonDistAdamW([nn.Parameter(torch.ones(2))], **options)
