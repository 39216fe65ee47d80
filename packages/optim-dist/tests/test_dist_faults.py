"""A rank that dies: the others end with an error within the timeout. One that fails in a checkpoint: all raise."""

import errno
import os
import re
import signal
import time
from functools import reduce
from importlib import import_module
from itertools import product

import pytest
import torch
import torch.distributed as dist
from dist_cases import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint
from optim_dist._checkpoint import contents, loading, manifest, saving
from optim_dist._optimizers import bucketed, whole_state
from optim_utils.testing import RankFailure, run_ranks


def lose_a_rank(rank, world_size, folder):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)], timeout=5)
    for step in range(3):
        if step == 1 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        parameter.grad = torch.ones(100)
        start = time.monotonic()
        try:
            optimizer.step()
        except RuntimeError as error:
            with open(f"{folder}/rank-{rank}", "w") as file:
                file.write(f"{time.monotonic() - start} {error}")
            raise
        optimizer.zero_grad()


def test_a_killed_rank_ends_the_others_with_an_error(tmp_path):
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(lose_a_rank, 3, str(tmp_path), timeout=60)


def refuse_alone(rank, world_size):
    model = nn.Linear(8, 8)
    weight = {"params": [model.weight], "kind": "muon"}
    for optimizer, given, bad, message in (
        (TritonDistAdamW, model.parameters(), {"lr": -1.0, "timeout": 20}, "Invalid learning rate: -1.0"),
        (TritonDistMuon, [{**weight, "lr": -1.0}], {}, "Learning rate should be >= 0 but is: -1.0"),
        (TritonDistMuon, [{**weight, "views": [3]}], {"timeout": 20}, "the view of .* must be a MatrixView or None"),
        (TritonDistMuon, [weight], {"variant": "best"}, "unknown variant 'best'"),
        (TritonDistMuonAdamW, [weight], {"variant": "best"}, "unknown variant 'best'"),
        (TritonDistAdamW, [weight], {"bucket_mb": -1}, "bucket_mb must be"),
        (TritonDistAdamW, [weight], {"reducer": "fast", "timeout": 20}, "reducer must be one of"),
        (TritonDistAdamW, [weight], {"gradients": "streamed"}, "gradients='streamed' reduces in every backward pass"),
        (TritonDistAdamW, [weight], {"bucket_size": 1}, "TritonDistAdamW got an unexpected keyword argument"),
        # by which ranks would connect
        (TritonDistAdamW, [weight], {"timeout": -1.0}, "timeout must be positive"),
        (TritonDistAdamW, [weight], {"transport": "fast"}, "transport must be one of"),
        (TritonDistAdamW, [weight], {"mesh": 3}, "mesh must be None or a DeviceMesh, got 3"),
    ):
        if rank == 1:
            with pytest.raises((ValueError, TypeError), match=f"^{message}"):
                optimizer(given, **bad)
        else:
            refused = "the optimizer was not built, because of rank 1: (ValueError|TypeError)"
            with pytest.raises(RuntimeError, match=f"^{refused}: {message}"):
                optimizer([weight], timeout=20 if "timeout" in bad else None)
    # and nothing is left behind
    TritonDistAdamW(model.parameters())


def test_what_one_rank_refuses_when_it_builds_the_others_name():
    run_ranks(refuse_alone, 3, timeout=60)


def give_wrong_arguments_alone(rank, world_size, folder):
    model = nn.Linear(8, 8)
    optimizer = TritonDistAdamW(model.named_parameters(), timeout=20)
    checkpoint.save(f"{folder}/a", model, optimizer)
    for call, what in ((checkpoint.save, "nothing was saved"), (checkpoint.load, "nothing was loaded")):
        for given, message in (
            ((None, model), "path must be that of a checkpoint, got None"),  # latest() of a host that has none
            ((3, model), "path must be that of a checkpoint, got 3"),
            ((f"{folder}/a", 3), "model must be a module, or None, got int"),
        ):
            if rank == 1:
                with pytest.raises(TypeError, match=f"^{message}"):
                    call(*given, optimizer)
            else:
                with pytest.raises(RuntimeError, match=f"^{what}, because of rank 1: TypeError: {message}"):
                    call(f"{folder}/a", model, optimizer)
    # and nothing is left behind
    checkpoint.load(f"{folder}/a", model, optimizer)
    checkpoint.save(f"{folder}/b", model, optimizer)


def test_wrong_arguments_of_one_rank_for_a_checkpoint_are_an_error_on_all(tmp_path):
    run_ranks(give_wrong_arguments_alone, 3, str(tmp_path), timeout=60)


def stall(rank, world_size, folder):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)], timeout=1)
    parameter.grad = torch.ones(100)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 1:
        time.sleep(4)
        return "slept"
    parameter.grad = torch.ones(100)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"rank 0 gave up the all-gather over 2 ranks .*: another rank .* is late"):
        optimizer.step()
    return time.monotonic() - start


def test_a_stalled_rank_ends_the_wait_at_the_timeout(tmp_path):
    waited = run_ranks(stall, 2, str(tmp_path), timeout=60)[0]
    assert 0.8 < waited < 3.8


class Boom(Exception):
    pass


def boom(*_, **__):
    raise Boom


STAGES = ["communicator.gather_message", "_bucketed._reducer.finish", "_apply", "_bucketed.finish_step", "_restart"]


def go_on_after_a_failed_step(rank, world_size, stage):
    parameters = [nn.Parameter(torch.ones(size)) for size in (100, 7, 200)]
    optimizer = TritonDistAdamW(parameters, timeout=5, bucket_mb=1e-4, max_norm=1.0)
    texts = []
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1 and step == 1:
                *holders, name = stage.split(".")
                patch.setattr(reduce(getattr, holders, optimizer), name, boom)
            try:
                optimizer.step()
            except (Boom, RuntimeError) as error:
                texts.append(repr(error))
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"failed \(.*\) on this rank after all ranks had begun"):
        optimizer.state_dict()
    return texts


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_whose_step_failed_does_not_go_on(stage):
    others, failed, _ = run_ranks(go_on_after_a_failed_step, 3, stage, timeout=60)
    assert failed[0] == "Boom()"
    assert "failed (Boom: ) on this rank after all ranks had begun with it" in failed[1]
    assert "another rank has ended or raised an error" in others[0]


def a_save(optimizer, folder):
    checkpoint.save(f"{folder}/x", None, optimizer)


def a_group(optimizer, folder):
    optimizer.add_param_group({"params": [("late", nn.Parameter(torch.ones(50)))]})


def a_full_state(optimizer, folder):
    optimizer.full_state_dict()


def a_consolidation(optimizer, folder):
    optimizer.consolidate_state_dict()


# what all ranks do together, and where it fails on one of them
CALLS = [
    (a_save, contents, "to_rows"),
    (a_group, bucketed, "synchronise"),
    (a_full_state, whole_state, "_gathered"),
    (a_consolidation, whole_state, "_gathered"),
]


def go_on_after_a_failed_call(rank, world_size, call, module, name, folder):
    parameters = [("w", nn.Parameter(torch.ones(10_000)))]
    if name == "to_rows":
        mesh = init_device_mesh("cpu", (world_size,))
        parameters.append(("cut", nn.Parameter(distribute_tensor(torch.ones(6, 5), mesh, [Shard(1)]))))
    optimizer = TritonDistAdamW(parameters, timeout=5)
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    texts = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(import_module(module), name, boom)
        try:
            call(optimizer, folder)
        except (Boom, RuntimeError) as error:
            texts.append(repr(error))
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        optimizer.step()
    except RuntimeError as error:
        texts.append(str(error))
    return texts


@pytest.mark.parametrize(("call", "module", "name"), [(call, where.__name__, name) for call, where, name in CALLS])
def test_a_rank_on_which_a_call_of_all_has_failed_does_not_go_on(tmp_path, call, module, name):
    others, failed, _ = run_ranks(go_on_after_a_failed_call, 3, call, module, name, str(tmp_path), timeout=60)
    assert failed[0] == "Boom()"
    assert "failed (Boom: ) on this rank after all ranks had begun with it" in failed[1]
    # rows are waited for in optim_redist, with the backend's own error
    assert name == "to_rows" or "another rank has ended or raised an error" in others[0]


def a_plan(optimizer, folder):
    optimizer.rebuild_plan()


def hold_what_nobody_could_load(rank, world_size, folder):
    parameter = nn.Parameter(torch.ones(10_000))
    optimizer = TritonDistAdamW([("w", parameter)], timeout=20)
    parameter.grad = torch.ones(10_000)
    optimizer.step()
    optimizer.zero_grad()
    state = optimizer.state[parameter]
    for key, value, message in (
        ("note", "warm", "the state of w has note='warm', but can be saved and moved between ranks only if"),
        ("exp_avg", torch.ones(3), r"the loaded exp_avg of w has shape \(3,\) here, its parameter"),
        ("mine", torch.ones(()), "the state of w has mine, of which nobody knows how the parts of ranks belong"),
    ):
        before = dict(state)
        if rank == 1:
            state[key] = value
        for call in (a_save, a_full_state, a_consolidation, a_plan):
            is_alone = rank == 1 and call is not a_save
            text = message if is_alone else f"rank 1: ValueError: {message}"
            with pytest.raises(ValueError if is_alone else RuntimeError, match=text):
                call(optimizer, folder)
        if rank == 1 and key == "note":
            with pytest.raises(ValueError, match=message):
                optimizer.state_dict()
        state.clear()
        state.update(before)
    # and nothing is left behind
    for call in (a_save, a_full_state, a_consolidation, a_plan):
        call(optimizer, folder)
    parameter.grad = torch.ones(10_000)
    optimizer.step()


def test_a_state_that_nobody_could_load_is_an_error_on_all_before_anything_is_sent(tmp_path):
    run_ranks(hold_what_nobody_could_load, 3, str(tmp_path), timeout=60)


def hold_what_is_its_own(rank, world_size, folder):
    """What is whole on a rank may have anything; of DTensors, what is alike on all ranks."""
    cut = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh_of(world_size), [Shard(0)]))
    whole, mine = nn.Parameter(torch.ones(6, 4)), torch.arange(3.0)
    groups = [{"kind": "muon", "params": [("w", whole)]}, {"kind": "adamw", "params": [("cut", cut)]}]
    optimizer = TritonDistMuonAdamW(groups, timeout=20)
    whole.grad, cut.grad = torch.ones_like(whole), torch.ones_like(cut)
    optimizer.step()
    optimizer.zero_grad()
    states = [state for state in optimizer.state.values() if state]
    for state in states:
        state["mine"] = mine.clone()
    for number, call in enumerate((a_save, a_full_state, a_consolidation, a_plan)):
        call(optimizer, folder)
        assert all(torch.equal(state["mine"], mine) for state in optimizer.state.values() if state), number
    for state in states:
        state["mine"].zero_()
    checkpoint.load(f"{folder}/x", None, optimizer)
    assert all(torch.equal(state["mine"], mine) for state in optimizer.state.values() if state)
    optimizer.state[cut]["mine"] = torch.zeros_like(cut)
    a_full_state(optimizer, folder)
    a_plan(optimizer, folder)
    with pytest.raises(RuntimeError, match="rank 0: ValueError: the state of cut has mine, a DTensor, but checkpoints"):
        a_save(optimizer, f"{folder}/more")
    del optimizer.state[cut]["mine"]
    optimizer.state[cut]["value"] = mine
    with pytest.raises(RuntimeError, match="rank 0: ValueError: the state of cut has 'value', as checkpoints call"):
        a_save(optimizer, f"{folder}/more")
    optimizer.state[cut][3] = optimizer.state[cut].pop("value")
    for call in (a_save, a_full_state, a_plan):
        with pytest.raises((ValueError, RuntimeError), match="the state of cut has an entry 3, but names are texts"):
            call(optimizer, f"{folder}/more")


def test_what_a_user_has_added_to_a_state_that_is_whole_is_kept(tmp_path):
    run_ranks(hold_what_is_its_own, 2, str(tmp_path), timeout=60)


def lose_a_group(rank, world_size, folder):
    groups = [{"params": [(name, nn.Parameter(torch.ones(9)))]} for name in "ab"]
    optimizer = TritonDistAdamW(groups, timeout=20)
    checkpoint.save(f"{folder}/whole", None, optimizer)
    lost = optimizer.param_groups.pop() if rank == 0 else None
    for call, name in ((checkpoint.save, "new"), (checkpoint.load, "whole")):
        with pytest.raises(RuntimeError, match=r"rank 0: RuntimeError: param_groups\[1\] was exchanged after"):
            call(f"{folder}/{name}", None, optimizer)
    for call in (a_full_state, a_consolidation, a_group):
        with pytest.raises(RuntimeError, match=r"param_groups\[1\] was exchanged after"):
            call(optimizer, folder)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"param_groups\[1\] was exchanged after"):
            optimizer.load_full_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    if lost is not None:
        optimizer.param_groups.append(lost)
    checkpoint.save(f"{folder}/new", None, optimizer)
    a_full_state(optimizer, folder)


def test_a_checkpoint_without_a_group_is_not_saved(tmp_path):
    run_ranks(lose_a_group, 2, str(tmp_path), timeout=60)


def consolidate_to_different_kinds(rank, world_size):
    optimizer = TritonDistAdamW([("w", nn.Parameter(torch.ones(9)))], timeout=20)
    with pytest.raises(RuntimeError, match="to of consolidate_state_dict is 0 on rank 0, '0' on rank 1"):
        optimizer.consolidate_state_dict("0" if rank else 0)
    optimizer.consolidate_state_dict()


def test_a_text_is_no_rank():
    run_ranks(consolidate_to_different_kinds, 2, timeout=60)


def have_state_on_one_rank(rank, world_size, folder):
    mesh = mesh_of(world_size)
    for dim in range(2):
        cut = nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(dim)]))
        optimizer = TritonDistAdamW([("cut", cut), ("plain", nn.Parameter(torch.ones(9)))], timeout=10)
        gradient = torch.ones_like(cut)
        cut.grad = gradient if rank == 0 else None
        optimizer.step()
        optimizer.zero_grad()
        for call in (a_save, a_full_state, a_consolidation):
            with pytest.raises(RuntimeError, match=r"state of cut has exp_avg, .* on rank 0, nothing on rank 1\."):
                call(optimizer, f"{folder}/{dim}")
        # the optimizer goes on, and so do checkpoints once all ranks have it
        cut.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        for call in (a_save, a_full_state, a_consolidation):
            call(optimizer, f"{folder}/{dim}")
        checkpoint.load(f"{folder}/{dim}/x", None, optimizer)
        # entries are told apart by their names, whatever their order on each rank
        full = optimizer.full_state_dict().get("state")
        if rank == 1:
            optimizer.state[cut] = dict(reversed(optimizer.state[cut].items()))
        checkpoint.save(f"{folder}/{dim}/reversed", None, optimizer)
        torch.testing.assert_close(optimizer.full_state_dict().get("state"), full, rtol=0, atol=0)
        checkpoint.load(f"{folder}/{dim}/reversed", None, optimizer)
        torch.testing.assert_close(optimizer.full_state_dict().get("state"), full, rtol=0, atol=0)


def test_state_of_a_dtensor_on_some_ranks_alone_is_not_saved(tmp_path):
    run_ranks(have_state_on_one_rank, 2, str(tmp_path), timeout=60)


def have_a_buffer_on_one_rank(rank, world_size, folder):
    mesh = mesh_of(world_size)
    cut = [DTensor.from_local(torch.full((2,), i + 1.0), mesh, [Shard(0)], run_check=False) for i in range(2)]
    of_all, others = {"x": cut[0], "y": cut[1]}, "give every rank the same model, or none"
    for number, (found, text) in enumerate(
        (
            ({"x": torch.ones(4)}, r"x \(Shard\(dim=0\),\) of rank 0 is nothing on rank 1"),
            ({"x": cut[0]}, r"y \(Shard\(dim=0\),\) of rank 0 is nothing on rank 1"),
            ({"y": cut[1], "x": cut[0]}, r"x \(Shard\(dim=0\),\) of rank 0 is y \(Shard\(dim=0\),\) on rank 1"),
            (None, r"x \(Shard\(dim=0\),\) of rank 0 is nothing on rank 1"),
        )
    ):
        model = nn.Linear(2, 2)
        optimizer = TritonDistAdamW(model.named_parameters(), timeout=20)
        for name, value in (of_all if rank == 0 or found is None else found).items():
            model.register_buffer(name, value)
        given = None if rank == 1 and found is None else model
        with pytest.raises(RuntimeError, match=f"was not saved: {text}; {others}"):
            checkpoint.save(f"{folder}/{number}", given, optimizer)
        checkpoint.save(f"{folder}/{number}", None, optimizer)  # and nothing is left behind


def test_a_buffer_that_is_a_dtensor_on_some_ranks_alone_is_not_saved(tmp_path):
    run_ranks(have_a_buffer_on_one_rank, 2, str(tmp_path), timeout=60)


def step_in_order(rank, world_size, orders):
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(2)]
    optimizers = [TritonDistAdamW([("w", parameter)]) for parameter in parameters]
    for number in orders[rank]:
        parameters[number].grad = torch.ones(100)
        try:
            optimizers[number].step()
        except RuntimeError as error:
            return str(error)
        optimizers[number].zero_grad()
    return "no error"


@pytest.mark.parametrize("orders", [[(0, 1), (1, 0)], [(0, 0, 1), (0, 1)]], ids=["reversed", "left out"])
def test_ranks_that_are_not_in_the_same_step_are_refused(orders):
    step = max(map(len, orders)) - 1
    found = f"rank 0 in number {step} of optimizer 1, rank 1 in number 1 of optimizer 2"
    for text in run_ranks(step_in_order, 2, orders, timeout=60):
        assert text.startswith(
            f"ranks are not in the same step: {found}; every rank builds and steps its optimizers in"
        )


def skip_a_batch_that_one_rank_has_nothing_of(rank, world_size):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)], accumulation_steps=1)
    if rank == 0:
        parameter.sum().backward()
    optimizer.zero_grad()
    parameter.sum().backward()
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    return str(raised.value)


def test_a_batch_that_one_rank_could_not_skip_is_an_error():
    for text in run_ranks(skip_a_batch_that_one_rank_has_nothing_of, 2, timeout=60):
        assert text.startswith("rank 0 has given up 1 batches that had begun to be reduced, rank 1 0: a rank")


def skip_a_clipped_batch_that_one_rank_has_nothing_of(rank, world_size, then_clips):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)], timeout=10)
    if rank == 0:
        parameter.sum().backward()
    optimizer.clip_grad_norm_(1.0)
    parameter.grad = None
    if rank == 0:
        parameter.sum().backward()
    with pytest.raises(RuntimeError) as raised:
        optimizer.clip_grad_norm_(1.0) if then_clips else optimizer.step()
    return str(raised.value)


@pytest.mark.parametrize("then_clips", [True, False], ids=["clip", "step"])
def test_a_clipped_batch_that_one_rank_could_not_skip_is_an_error(then_clips):
    for text in run_ranks(skip_a_clipped_batch_that_one_rank_has_nothing_of, 2, then_clips, timeout=60):
        assert text.startswith("rank 0 has given up 1 batches that had begun to be reduced, rank 1 0: a rank without")
        assert "call zero_grad() of the optimizer instead of the model's" in text


def add_another_group(rank, world_size):
    parameters = [nn.Parameter(torch.ones(100)) for _ in range(2)]
    optimizer = TritonDistAdamW([("a", parameters[0])], timeout=5)
    group = {"params": [(("b", "a")[rank], parameters[1 - rank])]}
    with pytest.raises((RuntimeError, ValueError)) as raised:
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    parameters[0].grad = torch.ones(100)
    optimizer.step()
    return repr(raised.value)


def test_a_group_that_one_rank_refuses_is_added_by_none():
    added, refused = run_ranks(add_another_group, 2, timeout=60)
    assert refused.startswith("ValueError('some parameters appear in more than one")
    assert "not added, because of rank 1: ValueError: some parameters appear" in added


def build_with_a_timeout_on_one(rank, world_size):
    weight = nn.Parameter(torch.ones(100))
    with pytest.raises(RuntimeError, match=r"different options: timeout is 30 on rank 0, None on rank 1"):
        TritonDistAdamW([("w", weight)], timeout=30 if rank == 0 else None)
    TritonDistAdamW([("w", weight)])


def test_a_timeout_of_one_rank_is_an_error():
    run_ranks(build_with_a_timeout_on_one, 2, timeout=20)


def change_a_group(rank, world_size):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)], debug=True)
    group = optimizer.param_groups[0]
    for name, change in (
        ("", lambda: None),
        (r"lr of group 0 is 0.001 on rank 0, 0.2 on rank 1", lambda: group.update(lr=0.2 if rank else 0.001)),
        (r"the factor of clip_grad_norm_ is 0.\d+ on rank 0, 0.\d+ on", lambda: optimizer.clip_grad_norm_(1.0 + rank)),
    ):
        parameter.grad = torch.ones(100)
        change()
        before = parameter.detach().clone()
        if name:
            with pytest.raises(RuntimeError, match=name):
                optimizer.step()
            assert torch.equal(parameter, before)
        else:
            optimizer.step()
        optimizer.zero_grad()
        group["lr"] = 0.001


def test_scalars_that_become_different_are_named_in_debug_mode():
    run_ranks(change_a_group, 2, timeout=60)


def have_a_gradient_on_one_rank(rank, world_size):
    mesh, value = init_device_mesh("cpu", (world_size,)), torch.ones(8, 4)
    for build, placement in product((TritonDistAdamW, TritonDistMuon), (Replicate(), Shard(0))):
        optimizers = []
        for name in ("used", "not"):
            parameter = nn.Parameter(distribute_tensor(value, mesh, [placement]))
            optimizers.append((parameter, build([(name, parameter)], debug=True)))
        for parameter, optimizer in optimizers:
            if optimizer is optimizers[0][1] or rank == 1:
                parameter.grad = distribute_tensor(value, mesh, [placement], src_data_rank=None)
        optimizers[0][1].step()
        parameter, optimizer = optimizers[1]
        for begin in (optimizer.step, lambda optimizer=optimizer: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(RuntimeError, match="not is a DTensor that has a gradient on rank 1 and none on rank 0"):
                begin()
        optimizer.zero_grad()
        optimizer.step()
        assert torch.equal(parameter.full_tensor(), value)


def test_a_dtensor_with_a_gradient_on_some_ranks_is_named_in_debug_mode():
    run_ranks(have_a_gradient_on_one_rank, 2, timeout=60)


def test_a_full_state_of_another_rank_is_refused():
    optimizer = TritonDistAdamW([("w", nn.Parameter(torch.ones(100)))])
    with pytest.raises(ValueError, match=r"the state is empty: full_state_dict.* gives it to the first rank alone"):
        optimizer.load_full_state_dict({})


def lose_a_rank_in_save(rank, world_size, folder):
    optimizer = TritonDistAdamW([("w", nn.Parameter(torch.ones(100)))], timeout=5)
    manifest.flush_folder = lambda _: os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.save(f"{folder}/[x]", None, optimizer)


def save(rank, world_size, folder):
    optimizer = TritonDistAdamW([("w", nn.Parameter(torch.ones(100)))], timeout=5)
    checkpoint.save(f"{folder}/[x]", None, optimizer)


def test_what_a_killed_save_leaves_is_removed_by_the_next_to_the_same_path(tmp_path):
    others = [".[x].mine.tmp", ".[x].2.0123456789ab.tmp", ".x.0123456789ab.tmp"]
    for name in others:
        (tmp_path / name).mkdir()
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(lose_a_rank_in_save, 2, str(tmp_path), timeout=60)
    assert len(list(tmp_path.iterdir())) == len(others) + 1
    run_ranks(save, 2, str(tmp_path), timeout=60)
    assert sorted(os.listdir(tmp_path)) == sorted([*others, "[x]", "latest"])


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(*_):
    raise ValueError("something of its own")


def only(file_name, fails, works):
    """``works``, but for one file."""
    return lambda file, *rest: (fails if file.name == file_name else works)(file, *rest)


# the rank that fails, in what, and how
SAVE_FAULTS = [
    (0, "write_durably", "common.pt", broken, "rank 0: ValueError: something of its own"),
    (0, "write_durably", "manifest.json", full, "rank 0: OSError: [Errno 28] No space left on device"),
    (0, "write_durably", "latest", full, "rank 0: OSError: [Errno 28] No space left on device"),
    (1, "write_durably", "rank-00001.pt", full, "rank 1: OSError: [Errno 28] No space left on device"),
    (1, "write_durably", "rank-00001.pt", broken, "rank 1: ValueError: something of its own"),
]
LOAD_FAULTS = [
    (1, "file_digest", "rank-00001.pt", full, "rank-00001.pt: [Errno 28] No space left on device"),
    (0, "file_digest", "common.pt", broken, "rank 0: ValueError: something of its own"),
]


def fail_in_turn(rank, world_size, folder):
    optimizer = TritonDistAdamW([("w", nn.Parameter(torch.ones(100)))], timeout=5)
    found = []
    for calls, faults in ((checkpoint.save, SAVE_FAULTS), (checkpoint.load, LOAD_FAULTS)):
        for failing, function, file_name, fails, _ in faults:
            with pytest.MonkeyPatch.context() as patch:
                if rank == failing:
                    patch.setattr(manifest, function, only(file_name, fails, getattr(manifest, function)))
                with pytest.raises(RuntimeError) as raised:
                    calls(f"{folder}/x", None, optimizer)
            found.append(str(raised.value))
        if calls is checkpoint.save:
            dist.barrier()
            left = os.listdir(folder)
            checkpoint.save(f"{folder}/x", None, optimizer)
    checkpoint.load(f"{folder}/x", None, optimizer)
    return found, left


def test_what_fails_on_one_rank_in_a_checkpoint_is_an_error_on_all(tmp_path):
    for texts, left in run_ranks(fail_in_turn, 2, str(tmp_path), timeout=60):
        assert left == []
        for text, (*_, expected) in zip(texts, [*SAVE_FAULTS, *LOAD_FAULTS], strict=True):
            assert text.startswith(f"checkpoint {tmp_path}/x was not ")
            assert text.endswith(f":\n  {expected}")


def no_room(*_):
    raise torch.OutOfMemoryError("CUDA out of memory")


# what takes memory of a rank while a save takes its snapshot; whether of a DTensor
SNAPSHOT_FAULTS = [("on_host", False), ("on_host", True), ("describe_state", False), ("flat_part", False)]


def run_out_of_memory_in_turn(rank, world_size, folder):
    mesh = init_device_mesh("cpu", (world_size,))
    plain, cut = (nn.Parameter(value) for value in (torch.ones(10_000), distribute_tensor(torch.ones(6, 5), mesh)))
    found = []
    for number, (function, is_cut) in enumerate(SNAPSHOT_FAULTS):
        parameter = cut if is_cut else plain
        optimizer = TritonDistAdamW([("w", parameter)], timeout=5)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(contents if function == "flat_part" else saving, function, no_room)
            with pytest.raises(RuntimeError) as raised:
                checkpoint.save(f"{folder}/{number}", None, optimizer)
        found.append(str(raised.value))
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(f"{folder}/{number}", None, optimizer)
        optimizer.close()
    return found


def test_a_rank_without_memory_for_what_it_saves_is_an_error_on_all_and_training_goes_on(tmp_path):
    for texts in run_ranks(run_out_of_memory_in_turn, 3, str(tmp_path), timeout=60):
        for number, text in enumerate(texts):
            why = "rank 1: OutOfMemoryError: CUDA out of memory"
            assert text == f"checkpoint {tmp_path}/{number} was not saved:\n  {why}"


def go_on_without_a_rank(rank, world_size, folder, closes, is_eager):
    def build_optimizer():
        return TritonDistAdamW([("w", parameter)], timeout=5, accumulation_steps=1 if is_eager else None)

    def step(optimizer):
        (parameter * torch.arange(100.0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    parameter = nn.Parameter(torch.ones(100))
    optimizer = build_optimizer()
    step(optimizer)
    checkpoint.save(f"{folder}/x", None, optimizer)
    if rank == 1:
        optimizer._apply = boom
        with pytest.raises(Boom):
            step(optimizer)
        return None
    with pytest.raises(RuntimeError, match="gave up"):
        step(optimizer)
    if closes:
        optimizer.close()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank // 2, world_size=2)
    parameter.grad = None
    after = build_optimizer()
    checkpoint.load(f"{folder}/x", None, after)
    step(after)
    return parameter.detach()


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("closes", [False, True])
def test_ranks_may_go_on_in_another_group_without_the_lost_one(tmp_path, closes, is_eager):
    first, _, last = run_ranks(go_on_without_a_rank, 3, str(tmp_path), closes, is_eager, timeout=60)
    expected = nn.Parameter(torch.ones(100))
    optimizer = torch.optim.AdamW([expected])
    for _ in range(2):
        expected.grad = torch.arange(100.0)
        optimizer.step()
    for found in (first, last):
        torch.testing.assert_close(found, expected.detach())


def fail_at_the_end_of_load(rank, world_size, folder, name):
    optimizer = TritonDistAdamW([("w", nn.Parameter(torch.ones(100)))], timeout=5)
    checkpoint.save(f"{folder}/x", None, optimizer)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(loading, name, boom)
        with pytest.raises((Boom, RuntimeError)) as raised:
            checkpoint.load(f"{folder}/x", None, optimizer)
    with pytest.raises(RuntimeError, match=r"checkpoint.load\(\) failed \([\s\S]*\) on this rank"):
        checkpoint.save(f"{folder}/y", None, optimizer)
    return str(raised.value)


@pytest.mark.parametrize(("name", "text"), [
    ("_exchange", "another rank has ended or raised an error"),
    # which a hook of the model may refuse: the others do not wait for this rank
    ("load_rest", "the rest of the model was not loaded from .*\n  rank 1: Boom: "),
])  # fmt: skip
def test_nobody_goes_on_with_what_one_rank_has_not_loaded(tmp_path, name, text):
    found = run_ranks(fail_at_the_end_of_load, 2, str(tmp_path), name, timeout=60)[0]
    assert re.search(text, found)


def test_ranks_of_torchrun_without_a_process_group_are_refused(monkeypatch):
    parameters = [("w", nn.Parameter(torch.ones(100)))]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    TritonDistAdamW(parameters)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="torchrun started 2 ranks, but there is no process group; call"):
        TritonDistAdamW(parameters)


def make_a_group(rank, world_size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world_size)
    dist.barrier()  # nobody ends before the others have connected


def step_after_the_group_was_made(rank, world_size, folder):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)])
    make_a_group(rank, world_size, folder)
    parameter.grad = torch.ones(100)
    with pytest.raises(RuntimeError, match="built for one rank, before the process group of 2; build it after"):
        optimizer.step()


def fork_a_rank(rank, world_size, folder):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)])
    checkpoint.save(f"{folder}/x", None, optimizer)
    parameter.grad = torch.ones(100)
    for action in (
        optimizer.step,
        lambda: checkpoint.save(f"{folder}/y", None, optimizer),
        lambda: checkpoint.load(f"{folder}/x", None, optimizer),
        lambda: checkpoint.load_nanochat([], optimizer),
    ):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                action()
            except RuntimeError as error:
                os._exit("forked" in str(error))
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    optimizer.step()


def test_a_forked_rank_does_not_step_save_or_load(tmp_path):
    run_ranks(fork_a_rank, 2, str(tmp_path), timeout=120)


def step_in_another_group(rank, world_size, folder):
    parameter = nn.Parameter(torch.ones(100))
    optimizer = TritonDistAdamW([("w", parameter)])
    dist.destroy_process_group()
    parameter.grad = torch.ones(100)
    for is_made in (False, True):
        if is_made:
            make_a_group(rank, world_size, folder)
        for action in (
            optimizer.step,
            lambda: checkpoint.save(f"{folder}/x", None, optimizer),
            optimizer.full_state_dict,
            lambda: optimizer.add_param_group({"params": [("u", nn.Parameter(torch.ones(3)))]}),
        ):
            with pytest.raises(
                RuntimeError, match="the process group in which this optimizer was built is gone; build"
            ):
                action()


def test_a_process_group_that_was_made_anew_is_an_error(tmp_path):
    run_ranks(step_in_another_group, 2, str(tmp_path))


def test_a_process_group_that_was_made_too_late_is_an_error(tmp_path):
    run_ranks(step_after_the_group_was_made, 2, str(tmp_path), init_process_group=False)
