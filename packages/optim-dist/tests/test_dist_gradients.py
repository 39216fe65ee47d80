"""Gradients until they are reduced: accumulation, reductions under backward, gradients from elsewhere, and errors.

All scenarios of a backend run in one launch of ranks, each with its own optimizer; a test looks at what its scenario
raised.
"""

import pytest
import torch
import torch._dynamo.compiled_autograd
from dist_cases import Scenarios, device_of, mesh_of, normal
from dist_loops import Net, assert_same, batch, build, make, values
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.checkpoint import checkpoint

from optim_dist import TritonDistAdamW
from optim_dist._reduction.collectives import Communicator

scenario = Scenarios()


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


@scenario(2)
def accumulation_by_any_means_gives_the_same_bits(rank, world_size):
    plain = run(rank, micro_batches=3)
    for mode in ("no_sync", "counted"):
        assert_same(run(rank, micro_batches=3, mode=mode), plain)
        assert_same(run(rank, micro_batches=3, mode=mode, overlap=True, bucket_mb=1.0), plain)


@scenario(2)
def eager_reduction_equals_reduction_at_step(rank, world_size):
    assert_same(run(rank, mode="counted"), run(rank))


@scenario(3)
def torchs_default_dtype_changes_no_average(rank, world_size):
    """A third is not a number of bf16."""
    found = []
    for default in (torch.float32, torch.bfloat16):
        net, batches = Net(device_of(rank)), [batch(rank, step) for step in range(3)]
        torch.set_default_dtype(default)
        try:
            optimizer = TritonDistAdamW(net.named_parameters(), lr=0.05, max_norm=0.5, model=net)
            for given in batches:
                net(given).backward()
                optimizer.step()
                found.append(optimizer.grad_norm)
                optimizer.zero_grad()
        finally:
            torch.set_default_dtype(torch.float32)
        found += values(net)
    assert_same(found[: len(found) // 2], found[len(found) // 2 :])


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
def connections_are_made_before_backward(rank, world_size):
    """A collective of every size that backward launches; the first one waits for all ranks, with NCCL on the host."""
    for reducer in ("rs", "exact"):
        net, optimizer = build(rank, reducer=reducer)
        sent, sizes = optimizer.communicator.traffic.bytes_sent, []
        rehearse = Communicator.rehearse

        def recorded(communicator, collective, rehearse=rehearse, sizes=sizes):
            sizes.append(collective.args[-1].numel())
            rehearse(communicator, collective)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Communicator, "rehearse", recorded)
            for _ in range(2):
                with optimizer.no_sync():
                    net(batch(rank, 0)).backward()
        assert sorted(sizes) == sorted({bucket.plan.numel for bucket in optimizer._bucketed.buckets})
        assert optimizer.communicator.traffic.bytes_sent == sent


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
def what_is_copied_in_outlives_its_stream(rank, world_size):
    """As where layers run in streams of their own, in one of which backward goes on."""
    net, optimizer = build(rank, accumulation_steps=1)
    with pytest.MonkeyPatch.context() as patch:
        kept = []
        patch.setattr("optim_dist.overlap.keep_until_read", lambda gradients: kept.extend(map(id, gradients)))
        for are_several in (False, True):
            optimizer._bucketed.reduction._streams.are_several = are_several
            net(batch(rank, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert len(kept) == are_several * len(list(net.parameters()))


@scenario(2)
def gradients_that_were_given_other_memory_are_what_counts(rank, world_size):
    """As by ``p.grad.data = ...``, which torch neither counts nor tells."""
    found = []
    for moves in (True, False):
        net, optimizer = build(rank)
        for step in range(3):
            net(batch(rank, step)).backward()
            for parameter in net.parameters():
                if moves:
                    parameter.grad.data = 0.5 * parameter.grad.data
                else:
                    parameter.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        found.append(values(net))
    assert_same(*found)


@scenario(2)
def gradients_that_an_earlier_hook_takes_are_missing(rank, world_size):
    """As where another optimizer steps some parameters inside of backward."""
    found = []
    for options in ({}, {"accumulation_steps": 1}, {"accumulation_steps": 1, "gradients": "streamed"}):
        net = Net(device_of(rank))
        initial = values(net)
        for parameter in net.layers[1].parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        if rank:  # on one rank alone
            net.layers[2].bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        optimizer = make(net, reducer="exact", bucket_mb=1e-4, **options)
        for step in range(3):
            net(batch(rank, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(net))
        moved = [not torch.equal(before, after) for before, after in zip(initial, values(net), strict=True)]
        assert moved == [True] * 2 + [False] * 2 + [True] * 4
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])


@scenario(2)
def compiled_backward_passes_reduce_as_others_do(rank, world_size):
    for gradients in ("resident", "streamed"):
        torch._dynamo.reset()
        # as each parameter's hook ends a graph, two layers are enough to compile
        options = {"accumulation_steps": 2, "gradients": gradients, "num_layers": 2}
        net, optimizer = build(rank, **options)
        twin, twin_optimizer = build(rank, **options)
        for micro in range(2):
            with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
                net(batch(rank, 0, micro)).backward()
            twin(batch(rank, 0, micro)).backward()
        assert optimizer._bucketed.reduction.has_launched
        optimizer.step()
        twin_optimizer.step()
        assert_same(values(net), values(twin))
        optimizer.close()
        twin_optimizer.close()


@scenario(2)
def a_second_backward_into_a_reduced_bucket_is_an_error(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1)
    net(batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"layers\.\d\.\w+ arrived after .* reaches it next; .* no_sync"):
        net(batch(rank, 1)).backward()
    optimizer.zero_grad()
    net(batch(rank, 1)).backward()
    optimizer.step()


@scenario(2)
def a_module_that_a_checkpoint_runs_twice_is_an_error_that_names_the_cause(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1)
    x = batch(rank, 0).requires_grad_()
    for layer in (*net.layers, net.layers[-1]):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"layers\.3\.\w+ arrived after .*torch\.utils\.checkpoint.*pass False"):
        x.sum().backward()
    optimizer.zero_grad()


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
def a_forgotten_zero_grad_may_be_made_up_for(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1)
    twin, twin_optimizer = build(rank)
    for model, opt in ((net, optimizer), (twin, twin_optimizer)):
        # what is reduced is the last to get a gradient on one rank, the first on the other
        for parameter in (model.layers[0] if rank else model).parameters():
            parameter.grad = torch.ones_like(parameter)
        opt.step()
    with pytest.raises(RuntimeError, match="arrived after its bucket was reduced"):
        net(batch(rank, 1)).backward()
    for model, opt in ((net, optimizer), (twin, twin_optimizer)):
        opt.zero_grad()
        model(batch(rank, 2)).backward()
        opt.step()
    assert_same(values(net), values(twin))


def two_optimizers(rank, **options):
    net = Net(device_of(rank))
    options = {"lr": 0.05, "reducer": "exact", "bucket_mb": 1e-4, **options}
    return net, [TritonDistAdamW(net.layers[i : i + 2].named_parameters(), **options) for i in (0, 2)]


@scenario(2)
def a_pass_that_each_rank_refuses_in_another_optimizer_may_be_made_up_for(rank, world_size):
    for of_model in (False, True):
        net, optimizers = two_optimizers(rank, accumulation_steps=1)
        twin, twin_optimizers = two_optimizers(rank)
        for model, opts in ((net, optimizers), (twin, twin_optimizers)):
            for parameter in (model.layers[:2] if rank else model.layers[2:]).parameters():
                parameter.grad = torch.ones_like(parameter)
            for opt in opts:
                opt.step()
        with pytest.raises(RuntimeError, match="arrived after its bucket was reduced"):
            net(batch(rank, 1)).backward()
        for model, opts in ((net, optimizers), (twin, twin_optimizers)):
            for each in [model] if of_model else opts:
                each.zero_grad()
            model(batch(rank, 2)).backward()
            for opt in opts:
                opt.step()
        assert_same(values(net), values(twin))


@scenario(2)
def a_batch_may_be_given_up_for_one_that_gives_a_rank_nothing(rank, world_size):
    for first in (0, 1):
        net, optimizer = build(rank, accumulation_steps=1)
        twin, twin_optimizer = build(rank)
        # another number of reductions is under way on each rank
        net(batch(rank, 7), skip=rank).backward()
        net.zero_grad()
        for model, opt in ((net, optimizer), (twin, twin_optimizer)):
            if rank != first:
                model(batch(rank, 0)).backward()
            opt.step()
        assert_same(values(net), values(twin))


@scenario(2)
def ranks_that_have_seen_no_gradient_give_up_a_batch_with_the_others(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1)
    if rank == 0:
        net(batch(rank, 7)).backward()
    net.zero_grad()
    assert optimizer.agree_between_steps()
    twin, twin_optimizer = build(rank)
    for model, opt in ((net, optimizer), (twin, twin_optimizer)):
        model(batch(rank, 0)).backward()
        opt.step()
    assert_same(values(net), values(twin))


@scenario(2)
def a_gradient_changed_after_its_reduction_is_an_error(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1, reducer="rs")
    net(batch(rank, 0)).backward()
    weight = net.layers[0].weight
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight was assigned or changed after"):
        optimizer.step()
    optimizer.zero_grad()
    net(batch(rank, 0)).backward()
    weight.grad.data = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight was assigned or changed after"):
        optimizer.step()
    optimizer.zero_grad()


@scenario(2)
def gradients_that_ddp_averages_after_their_reduction_are_an_error(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=1, reducer="rs")
    wrapped = nn.parallel.DistributedDataParallel(net)
    wrapped(batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match="leave DistributedDataParallel out"):
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


@scenario(1)
def what_is_clipped_before_there_are_gradients_says_nothing_of_them(rank, world_size):
    net, optimizer = build(rank, skip_nonfinite=True)
    before = values(net)
    optimizer.clip_grad_norm_(1.0)
    net(batch(rank, 0)).backward()
    net.layers[0].weight.grad.fill_(float("inf"))
    optimizer.step()
    assert_same(values(net), before)


@scenario(1)
def model_zero_grad_skips_a_clipped_batch_on_one_rank(rank, world_size):
    net, optimizer = build(rank)
    twin, twin_optimizer = build(rank)
    net(batch(rank, 7)).backward()
    optimizer.clip_grad_norm_(0.001)
    net.zero_grad()
    for model, opt in ((net, optimizer), (twin, twin_optimizer)):
        model(batch(rank, 0), skip=2).backward()
        opt.step()
    assert_same(values(net), values(twin))


@scenario(2, 3)
def clipping_before_any_gradient_leaves_the_step_to_those_that_come(rank, world_size):
    """On some ranks alone, by backward or by hand: the others find out that nobody had any, too."""
    for options in ({}, {"accumulation_steps": 1}, {"gradients": "streamed", "accumulation_steps": 1}):
        for by_hand in (False, True):
            net, optimizer = build(rank, **options)
            twin, twin_optimizer = build(rank)
            assert optimizer.clip_grad_norm_(0.001) == 0
            for model, opt in ((net, optimizer), (twin, twin_optimizer)):
                if rank == 1 and by_hand:
                    model.layers[2].bias.grad = torch.ones_like(model.layers[2].bias)
                elif rank == 1:
                    model(batch(rank, 0), skip=2).backward()
                opt.step()
                opt.zero_grad()
                model(batch(rank, 1)).backward()
                opt.step()
            assert_same(values(net), values(twin))
            optimizer.close()
            twin_optimizer.close()


@scenario(2)
def what_was_clipped_stays_so_beside_buckets_without_gradients(rank, world_size):
    for options in ({}, {"accumulation_steps": 1}, {"gradients": "streamed", "accumulation_steps": 1}):
        found = []
        for is_alone in (False, True):
            value = normal((4, 4), 3).to(device_of(rank))
            cut = nn.Parameter(distribute_tensor(value, mesh_of(world_size), [Shard(0)]))
            idle = [] if is_alone else [("idle", nn.Parameter(value.clone()))]
            # of AdamW a first step has the same size whatever the factor
            optimizer = TritonDistAdamW([("cut", cut), *idle], lr=0.1, eps=1.0, **options)
            (cut.full_tensor() * 2).sum().backward()
            optimizer.clip_grad_norm_(0.01)
            optimizer.clip_grad_norm_(10.0)
            optimizer.step()
            found.append([cut.full_tensor().detach()])
            optimizer.close()
        assert_same(*found)


@scenario(2)
def a_step_without_gradients_reduces_once(rank, world_size):
    for options in ({"max_norm": 1.0}, {"skip_nonfinite": True}, {"max_norm": 1.0, "gradients": "streamed"}):
        _, optimizer = build(rank, accumulation_steps=1, **options)
        before = optimizer.communicator.traffic.bytes_sent
        optimizer.step()
        assert 0 <= optimizer.communicator.traffic.bytes_sent - before - optimizer.plan.wire_bytes < 200
        optimizer.close()


@scenario(2)
def model_zero_grad_skips_a_clipped_batch_whose_successor_gives_a_rank_nothing(rank, world_size):
    for options in ({}, {"accumulation_steps": 1}):
        net, optimizer = build(rank, **options)
        twin, twin_optimizer = build(rank)
        net(batch(rank, 7)).backward()
        optimizer.clip_grad_norm_(0.001)
        net.zero_grad()
        for model, opt in ((net, optimizer), (twin, twin_optimizer)):
            if rank == 0:
                model(batch(rank, 0)).backward()
            opt.step()
        assert_same(values(net), values(twin))


@scenario(2)
def model_zero_grad_skips_gradients_set_by_hand(rank, world_size):
    net, optimizer = build(rank)
    twin, twin_optimizer = build(rank)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.clip_grad_norm_(0.001)
    net.zero_grad()
    for model, opt in ((net, optimizer), (twin, twin_optimizer)):
        model(batch(rank, 0)).backward()
        opt.step()
    assert_same(values(net), values(twin))


@scenario(2)
def model_zero_grad_between_micro_batches_begins_to_count_again(rank, world_size):
    net, optimizer = build(rank, accumulation_steps=2)
    twin, twin_optimizer = build(rank)
    net(batch(rank, 7)).backward()
    net.zero_grad()
    for micro in range(2):
        net(batch(rank, 0, micro)).backward()
        twin(batch(rank, 0, micro)).backward()
    optimizer.step()
    twin_optimizer.step()
    assert_same(values(net), values(twin))


@scenario(2)
def no_sync_may_begin_behind_other_passes(rank, world_size):
    """Those before the first one only accumulate, also where the batch is skipped then."""
    for is_skipped in (False, True):
        net, optimizer = build(rank)
        twin, twin_optimizer = build(rank)
        # on one rank nothing arrives in the plain pass
        loss = net(batch(rank, 0))
        if rank == 0:
            loss.backward()
        with optimizer.no_sync():
            net(batch(rank, 0, 1)).backward()
        if is_skipped:
            net.zero_grad()
        else:
            net(batch(rank, 0, 2)).backward()
            if rank == 0:
                twin(batch(rank, 0)).backward()
            for micro in (1, 2):
                twin(batch(rank, 0, micro)).backward()
            optimizer.step()
            twin_optimizer.step()
            optimizer.zero_grad()
            twin_optimizer.zero_grad()
        for model, opt in ((net, optimizer), (twin, twin_optimizer)):
            model(batch(rank, 1)).backward()
            opt.step()
        assert_same(values(net), values(twin))


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
        assert not optimizer.agree_between_steps()
        net.zero_grad()
        net(batch(rank, 0)).backward()
        optimizer.step()
        assert_same(values(net), values(twin))
        net.zero_grad()
        net(batch(rank, 1)).backward()
        net.zero_grad()
        assert optimizer.agree_between_steps()


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


@scenario(1, 2)
def a_step_is_seen_by_autograd(rank, world_size):
    """A graph that needs the weights of before does not go on with others silently."""
    for overlap in (False, True):
        net, optimizer = build(rank, overlap=overlap)
        loss = net(batch(rank, 0))
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@scenario(2)
def debug_mode_finds_no_fault_in_a_sound_run(rank, world_size):
    assert_same(run(rank, debug=True), run(rank))


@scenario(2)
def sparse_gradients_are_refused_in_the_first_step_and_later(rank, world_size):
    device = device_of(rank)
    for num_before in (0, 3):
        parameter = torch.nn.Parameter(torch.ones(4, 4, device=device))
        optimizer = TritonDistAdamW([("w", parameter)])
        for _ in range(num_before):
            parameter.grad = torch.ones(4, 4, device=device)
            optimizer.step()
            optimizer.zero_grad()
        parameter.grad = torch.ones(4, 4, device=device).to_sparse()
        with pytest.raises(RuntimeError, match=r"gradient of w is torch\.sparse_coo; make it dense"):
            optimizer.step()


@scenario(1, 2)
def dtensors_as_gradients_of_plain_parameters_are_refused(rank, world_size):
    """torch gives them where a model mixes both, as sums that are pending over a mesh of its own choice."""
    mesh, device = mesh_of(world_size), device_of(rank)
    for options in ({}, {"accumulation_steps": 1}, {"accumulation_steps": 1, "gradients": "streamed"}):
        parameter = nn.Parameter(torch.ones(4, device=device))
        optimizer = TritonDistAdamW([("w", parameter)], **options)
        rows = distribute_tensor(torch.ones(2, 4, device=device), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match=r"gradient of w is a DTensor.*make the parameter one, too"):
            with implicit_replication():
                (rows * parameter).sum().backward()
            optimizer.step()
        parameter.grad = None
        optimizer.zero_grad()
        assert torch.all(parameter == 1.0)
        (rows.to_local() * parameter).sum().backward()
        optimizer.step()
        optimizer.wait()
        assert torch.all(parameter < 1.0)


@scenario.parametrize()
def test_gradients(backend, world_size, name):
    scenario.check(backend, world_size, name)
