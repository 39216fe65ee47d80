"""8-bit states of AdamW: the same codes and scales on any number of ranks, and in and out of everything that saves."""

import copy
import json
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_cases import (
    BACKENDS,
    Case,
    Scenarios,
    Tensors,
    assert_equal,
    assert_same_state,
    device_of,
    gradient,
    make_parameters,
    mesh_of,
    normal,
    sum_in_rank_order,
    train,
    train_each,
    world_sizes,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuonAdamW, checkpoint, make_plan
from optim_dist._checkpoint import codes, loading
from optim_kernels import TritonAdamW
from optim_utils import attach_state_dict_hooks
from optim_utils.low_bit import CUBIC8, QUINTIC8_UNSIGNED, LowBitTensor
from optim_utils.testing import run_ranks

BF16 = torch.bfloat16
BLOCK = 256
EXACT = {"reducer": "exact"}
INT8 = {"state_dtype": "int8"}

# cut by several ranks in rows and in blocks, small ones, one of another order in memory, one of which none is sure
TENSORS = (
    Tensors((70, 101)),
    Tensors((9,)),
    Tensors((4096,)),
    Tensors((83, 57), transposed=True),
    Tensors((5000,), absent=frozenset({(0, -1), (1, 0)})),
    Tensors((65, 66), group=1),
    Tensors((300,), group=1),
    Tensors((80, 61), BF16),
)
GROUPS = ({"lr": 0.01, **INT8}, {"lr": 0.02})
CASES = {
    "plain": Case("adamw", TENSORS, GROUPS),
    "amsgrad": Case("adamw", TENSORS, GROUPS, {"amsgrad": True}),
    "clipped": Case("adamw", TENSORS, GROUPS, max_norm=5.0),
    "masters": Case("adamw", (TENSORS[-1],), ({"lr": 0.01, "master_weights": "fp32", **INT8},)),
    "split16": Case("adamw", (TENSORS[-1],), ({"lr": 0.01, "master_weights": "split16", **INT8},)),
    "at random": Case("adamw", (TENSORS[-1],), ({"lr": 0.01, "stochastic_rounding": True, "seed": 3, **INT8},)),
    "model": Case(
        "muon_adamw",
        (Tensors((12, 10)), Tensors((12, 10)), Tensors((70, 101), group=1), Tensors((9,), group=1)),
        ({"kind": "muon", "impl": "torch"}, {"kind": "adamw", **INT8}),
    ),
}


# the plan

SIZES = st.lists(st.sampled_from([0, 1, 255, 300, 4095, 4096, 4097, 5000, 9999]), min_size=1, max_size=8)


def plan_of(sizes, world_size, bucket_mb=None, **options):
    named = {f"w{number}": (size,) for number, size in enumerate(sizes)}
    coded, other = [*named][::2], [*named][1::2]
    groups = [{"kind": "adamw", "params": coded, **options}, {"kind": "adamw", "params": other}]
    return make_plan(named, groups, world_size, bucket_mb=bucket_mb)


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(1, 9), st.sampled_from([None, 1e-3, 1e-2]))
def test_codes_are_cut_between_blocks(sizes, world_size, bucket_mb):
    plan = plan_of(sizes, world_size, bucket_mb, **INT8)
    for number, spec in enumerate(plan.parameters):
        is_coded = int(spec.name[1:]) % 2 == 0 and spec.numel >= 4096
        assert spec.block == (BLOCK if is_coded else 1)
        pieces = plan.ranges(number)
        assert sum(piece.stop - piece.start for piece in pieces) == spec.numel
        if is_coded:
            assert all(piece.start % BLOCK == 0 for piece in pieces)
    for bucket in plan.buckets:
        taken = torch.zeros(bucket.numel, dtype=torch.int32)
        for piece in bucket.pieces():
            taken[piece.offset : piece.offset + piece.stop - piece.start] += 1
        assert taken.max() <= 1
        # before each that is coded, and behind all
        assert bucket.padding < BLOCK * (len(bucket.slots) + world_size)


def test_the_hash_of_a_plan_sees_blocks():
    sizes = [4096] * 4
    plan, coded = plan_of(sizes, 2), plan_of(sizes, 2, **INT8)
    assert plan.buckets == coded.buckets, "nothing has to be cut otherwise"
    assert plan.hash != coded.hash
    # as described since version 0.3, so that states of these plans still fit
    assert plan.parameters[0].describe() == ["w0", [4096], [1], "torch.bfloat16", "adamw", 0, "cpu", [], ""]
    assert plan_of([9, 300], 2).hash == plan_of([9, 300], 2, **INT8).hash


# steps


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_at_any_number_of_ranks(backend):
    sizes = world_sizes(backend)
    jobs = [(case, size) for size in sizes for case in CASES.values()]
    oracle = iter(run_ranks(train_each, 1, jobs, backend=backend)[0])
    for world_size in sizes:
        jobs = [(case, 0, EXACT) for case in CASES.values()]
        results = run_ranks(train_each, world_size, jobs, backend=backend)
        for number, name in enumerate(CASES):
            expected = next(oracle)
            if CASES[name].max_norm is not None or (backend == "nccl" and name == "model"):
                # norms are summed in another order, and matrices multiplied in other tiles
                for actual, wanted in zip(results[0][number]["parameters"], expected["parameters"]):
                    torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-3)
                continue
            for rank, found in enumerate(results):
                what = f"{name}, rank {rank} of {world_size}"
                assert_equal(found[number]["parameters"], expected["parameters"], what)
            assert_same_state(results[0][number]["state"], expected["state"])


def single_device(rank, world_size, case, simulated, kept):
    """``TritonAdamW`` in one process that sums the gradients of ``simulated`` ranks in their order."""
    device = device_of(rank)
    parameters = make_parameters(case, device)
    groups = [{**group, "params": []} for group in case.groups]
    for spec, parameter in zip(case.tensors, parameters):
        groups[spec.group]["params"].append(parameter)
    optimizer = TritonAdamW(groups, **case.options)
    for step in range(case.steps):
        for number, (spec, parameter) in enumerate(zip(case.tensors, parameters)):
            found = sum_in_rank_order([gradient(spec, number, step, r) for r in range(simulated)])
            parameter.grad = None if found is None else torch.empty_like(parameter).copy_(found)
        optimizer.step(clip_factor=torch.tensor(1 / simulated, device=device))
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    states = [{key: numbers(value) for key, value in optimizer.state[p].items()} for p in listed]
    coded = [isinstance(optimizer.state[p]["exp_avg"], LowBitTensor) for p in parameters]
    assert coded == kept
    return [p.detach().cpu() for p in parameters], states


def numbers(value):
    return (value.dequantize() if isinstance(value, LowBitTensor) else value).detach().cpu()


@pytest.mark.parametrize("backend", BACKENDS)
def test_over_ranks_it_is_tritonadamw(backend):
    """Both groups of one kind, where a CPU's reference updates all; codes where a single device has codes."""
    case = Case("adamw", TENSORS, ({"lr": 0.01, **INT8}, {"lr": 0.02, **INT8}))
    kept = [spec.shape not in ((9,), (300,), (83, 57)) for spec in TENSORS]
    for world_size in world_sizes(backend):
        wanted, states = run_ranks(single_device, 1, case, world_size, kept, backend=backend)[0]
        for found in run_ranks(train, world_size, case, 0, EXACT, backend=backend):
            assert_equal(found["parameters"], wanted, f"{world_size} ranks")
            for number, state in found["state"].get("state", {}).items():
                assert state.keys() == states[number].keys()
                for key, value in state.items():
                    assert torch.equal(value, states[number][key]), (world_size, number, key)


scenarios = Scenarios()


def build(form="plain", state_dtype="int8", has_across=True, **options):
    """A net whose parameters are coded, small and (FSDP takes none) of another order in memory, and its optimizer."""
    net = nn.Module()
    net.wide = nn.Parameter(normal((70, 101), 1))
    net.gain = nn.Parameter(normal((9,), 2))
    net.long = nn.Parameter(normal((5003,), 3))
    if has_across:
        net.across = nn.Parameter(normal((83, 57), 4).t())
    net.to(device_of(dist.get_rank()))
    if form == "cut":
        fully_shard(net, mesh=mesh_of(dist.get_world_size()))
    if form == "torch":
        return net, torch.optim.AdamW(net.named_parameters(), lr=0.01)
    if form == "alone":
        return net, TritonAdamW(net.named_parameters(), lr=0.01, state_dtype=state_dtype)
    return net, TritonDistAdamW(
        net.named_parameters(), lr=0.01, state_dtype=state_dtype, reducer="exact", average=False, **options
    )


def steps(net, optimizer, which):
    """The same sums whatever the number of ranks; afterwards the parameters."""
    for step in which:
        for number, p in enumerate(net.parameters()):
            given = normal(tuple(p.shape), 5, number, step).to(p.device)
            if isinstance(p, torch.distributed.tensor.DTensor):
                given = distribute_tensor(given, p.device_mesh, p.placements)
            elif dist.get_rank() and isinstance(optimizer, TritonDistAdamW):
                given.zero_()
            p.grad = torch.empty_like(p).copy_(given)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu().clone() for p in net.parameters()]


@scenarios(1, 2, 3)
def states_are_codes_where_they_save_memory(rank, world_size):
    net, optimizer = build()
    assert optimizer.explain().data["state_bytes"] == 0
    steps(net, optimizer, range(2))
    held = 0
    for shard in optimizer.shards():
        state = optimizer.state[shard.parameter]
        numel = shard.stop - shard.start
        if shard.name in ("wide", "long"):
            assert shard.start % BLOCK == 0
            assert (state["exp_avg"].fmt, state["exp_avg_sq"].fmt) == (CUBIC8, QUINTIC8_UNSIGNED)
            assert state["exp_avg"].shape == shard.value.shape
            held += 2 * (numel + 4 * -(-numel // BLOCK))
        else:
            assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
            held += 8 * numel
        held += 4  # the step count
    assert optimizer.explain().data["state_bytes"] == held
    assert f"states on this rank: {held:,} bytes" in optimizer.explain()
    blocks = {entry["name"]: entry["block"] for entry in optimizer.explain().data["parameters"]}
    assert world_size == 1 or blocks == {"wide": BLOCK, "gain": 1, "long": BLOCK, "across": 1}


def same_codes(optimizer, other):
    """The same bytes in two optimizers' states."""
    for shard, twin in zip(optimizer.shards(), other.shards(), strict=True):
        mine, theirs = optimizer.state[shard.parameter], other.state[twin.parameter]
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if isinstance(value, LowBitTensor):
                assert torch.equal(value.codes, theirs[key].codes), (shard.name, key)
                assert torch.equal(value.scale, theirs[key].scale), (shard.name, key)
            else:
                assert torch.equal(value, theirs[key]), (shard.name, key)


def through_state_dict(net, optimizer, again, restored):
    again.load_state_dict(copy.deepcopy(net.state_dict()))
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def through_full_state_dict(net, optimizer, again, restored):
    again.load_state_dict(copy.deepcopy(net.state_dict()))
    restored.load_full_state_dict(broadcast(optimizer.full_state_dict()))


def through_consolidation(net, optimizer, again, restored):
    again.load_state_dict(copy.deepcopy(net.state_dict()))
    optimizer.consolidate_state_dict()
    restored.load_state_dict(broadcast(optimizer.state_dict() if dist.get_rank() == 0 else {}))
    optimizer.consolidate_state_dict(to=None)


def broadcast(content):
    found = [content]
    dist.broadcast_object_list(found, src=0)
    return found[0]


@scenarios(1, 2, 3)
def a_state_that_was_loaded_goes_on_to_the_last_bit(rank, world_size):
    for through in (through_state_dict, through_full_state_dict, through_consolidation):
        net, optimizer = build()
        steps(net, optimizer, range(2))
        again, restored = build()
        through(net, optimizer, again, restored)
        same_codes(optimizer, restored)
        wanted = steps(net, optimizer, range(2, 4))
        assert_equal(steps(again, restored, range(2, 4)), wanted, through.__name__)
        same_codes(optimizer, restored)


@scenarios(1, 3)
def one_process_states_come_and_go(rank, world_size):
    """From ``TritonAdamW`` in codes and from torch's AdamW in fp32, and to both."""
    net, ours = build()
    steps(net, ours, range(2))
    full = broadcast(ours.full_state_dict())
    assert all(value.dtype == torch.float32 for state in full["state"].values() for value in state.values())
    for form in ("torch", "alone"):
        there, theirs = build(form)
        theirs.load_state_dict(copy.deepcopy(full))
        with torch.no_grad():
            for p, q in zip(there.parameters(), net.parameters()):
                p.copy_(q)
        if form == "alone":
            found = theirs.state[there.wide]["exp_avg"]
            assert isinstance(found, LowBitTensor)
            assert torch.equal(found.dequantize().cpu(), full["state"][0]["exp_avg"])
        steps(there, theirs, range(2, 4))
        again, restored = build()
        with torch.no_grad():
            for p, q in zip(again.parameters(), there.parameters()):
                p.copy_(q)
        restored.load_full_state_dict(copy.deepcopy(theirs.state_dict()))
        wanted = steps(there, theirs, range(4, 6))
        found = steps(again, restored, range(4, 6))
        if form == "alone":
            # also of the parameters with fp32 moments, which the reference updates beside codes
            assert_equal(found, wanted, form)
        else:
            for mine, other in zip(found, wanted):
                torch.testing.assert_close(mine, other, rtol=0.0, atol=2e-3)


@scenarios(2)
def what_shards_may_cut_is_refused(rank, world_size):
    cut = nn.Parameter(distribute_tensor(torch.ones(64, 64), mesh_of(world_size), [Shard(0)]))
    plain = nn.Parameter(torch.ones(64, 64, device=device_of(rank)))
    with pytest.raises(ValueError, match=r"shards may cut, and w is a DTensor; choose a floating dtype"):
        TritonDistAdamW([("w", cut)], state_dtype="int8")
    with pytest.raises(ValueError, match=r"shards may cut, and params\[1\] is a DTensor; choose a floating dtype"):
        TritonDistMuonAdamW([{"kind": "adamw", "params": [plain, cut], **INT8}])
    # beside each other in groups of their own
    TritonDistAdamW([{"params": [plain], **INT8}, {"params": [cut]}]).close()
    with pytest.raises(ValueError, match="momentum_dtype"):
        TritonDistMuonAdamW([{"kind": "muon", "params": [plain], "momentum_dtype": "int8"}])


@scenarios(1, 2)
def it_has_to_be_chosen_when_the_optimizer_is_built(rank, world_size):
    net, optimizer = build(state_dtype=None)
    before = steps(net, optimizer, range(1))
    optimizer.param_groups[0]["state_dtype"] = "int8"
    with pytest.raises(ValueError, match=r"of wide came after the optimizer was built.*build a new optimizer"):
        steps(net, optimizer, range(1, 2))
    optimizer.zero_grad()
    assert_equal([p.detach().cpu() for p in net.parameters()], before, "nothing has moved")
    optimizer.param_groups[0]["state_dtype"] = None
    steps(net, optimizer, range(1, 2))
    # given up and taken up again
    again, coded = build()
    for number, dtype in enumerate(("int8", torch.float32, "int8")):
        coded.param_groups[0]["state_dtype"] = dtype
        steps(again, coded, range(number, number + 1))
        for shard in coded.shards():
            if shard.name == "wide":
                assert isinstance(coded.state[shard.parameter]["exp_avg"], LowBitTensor) == (dtype == "int8")


@scenarios(2)
def groups_that_are_added_are_cut_between_blocks_too(rank, world_size):
    net, optimizer = build(state_dtype=None)
    more = nn.Parameter(normal((6000,), 8).to(device_of(rank)))
    optimizer.add_param_group({"params": [("more", more)], **INT8})
    net.more = more
    steps(net, optimizer, range(2))
    (spec,) = [spec for spec in optimizer.plan.parameters if spec.name == "more"]
    assert spec.block == BLOCK
    assert all(isinstance(s["exp_avg"], LowBitTensor) for p, s in optimizer.state.items() if p is more and s)


@scenarios(2)
def one_rank_alone_is_refused_by_name(rank, world_size):
    with pytest.raises(
        RuntimeError, match=r"rank 1 has wide \(70, 101\) float32 \(adamw, group 0, state_dtype='int8'\)"
    ):
        build(state_dtype="int8" if rank else None)


@scenarios(4)
def a_grid_of_ranks_has_the_same_codes(rank, world_size):
    net, optimizer = build()
    wanted = steps(net, optimizer, range(2))
    again, other = build(mesh=mesh_of(2, 2, names=("replicate", "shard")))
    assert_equal(steps(again, other, range(2)), wanted, "over a grid")
    found, expected = other.full_state_dict(), optimizer.full_state_dict()
    if rank == 0:
        assert_same_state(found, expected)


@scenarios.parametrize()
def test_codes_over_ranks(backend, world_size, name):
    scenarios.check(backend, world_size, name)


# checkpoints


def save(rank, world_size, folder):
    net, optimizer = build()
    steps(net, optimizer, range(2))
    checkpoint.save(f"{folder}/ours", net, optimizer)
    dcp.save(
        {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=f"{folder}/dcp"
    )
    return steps(net, optimizer, range(2, 4)), optimizer.full_state_dict()


def load(rank, world_size, folder):
    loading.ROOM = 1000  # bytes: of most parameters there are several parts
    outcome = []
    for how in ("ours", "dcp"):
        net, optimizer = build()
        if how == "ours":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(codes, "Numbers", None)  # codes travel as they are
                checkpoint.load(f"{folder}/ours", net, optimizer)
        else:
            target = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
            dcp.load(target, checkpoint_id=f"{folder}/dcp")
            net.load_state_dict(target["model"])
            set_optimizer_state_dict(net, optimizer, target["optim"])
        held = [s["exp_avg"] for p, s in optimizer.state.items() if p is net.wide and s]
        assert all(isinstance(value, LowBitTensor) for value in held), "not in four times the memory"
        outcome.append((how, steps(net, optimizer, range(2, 4)), optimizer.full_state_dict()))
    return outcome


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_load_at_any_number_of_ranks(backend, tmp_path):
    """Parameters and codes go on to the last bit, for the numbers of the sum are the same."""
    sizes = world_sizes(backend)
    for before in sizes:
        wanted, state = run_ranks(save, before, str(tmp_path / str(before)), backend=backend)[0]
        for after in sizes:
            results = run_ranks(load, after, str(tmp_path / str(before)), backend=backend)
            for how, found, _ in (each for rank in results for each in rank):
                assert_equal(found, wanted, f"{how} from {before} to {after} ranks")
            for _, _, restored in results[0]:
                assert_same_state(restored, state)


def converted(rank, world_size, folder):
    """8-bit states become others, and others 8-bit ones, in the formats that a single device gives them."""
    for before, after in product(("int8", None, BF16), repeat=2):
        net, optimizer = build(state_dtype=before)
        steps(net, optimizer, range(2))
        where = f"{folder}/{before}-{after}-{world_size}"
        checkpoint.save(where, net, optimizer)
        again, restored = build(state_dtype=after)
        checkpoint.load(where, again, restored)
        there, alone = build("alone", state_dtype=after)
        there.load_state_dict({name: value.clone() for name, value in net.state_dict().items()})
        alone.load_state_dict(broadcast(optimizer.full_state_dict()))
        found, wanted = (steps(*pair, range(2, 3)) for pair in ((again, restored), (there, alone)))
        for mine, theirs in zip(found, wanted):
            # torch's own loop, where nothing is coded, rounds between operations
            torch.testing.assert_close(mine, theirs, rtol=0.0 if after == "int8" else 1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_loaded_does_not_choose_the_format(backend, tmp_path):
    for world_size in world_sizes(backend, (1, 2)):
        run_ranks(converted, world_size, str(tmp_path), backend=backend)


def sizes_of_files(rank, world_size, folder):
    """Codes as they are; a checkpoint without any is what it was before there were codes."""
    for state_dtype, bytes_each, kind in (("int8", 2 + 8 / BLOCK, 2), (torch.float32, 8, 1)):
        p = nn.Parameter(normal((512, 128), 1).to(device_of(rank)))
        optimizer = TritonDistAdamW([("p", p)], state_dtype=state_dtype)
        p.grad = torch.ones_like(p)
        optimizer.step()
        where = checkpoint.save(f"{folder}/{state_dtype}", None, optimizer)
        files = sum(file.stat().st_size for file in where.glob("rank-*.pt"))
        assert (4 + bytes_each) * p.numel() < files < (4 + bytes_each) * p.numel() + 8000
        found = json.loads((where / "manifest.json").read_text())
        assert found["format"] == f"optim-dist.checkpoint/{kind}"
        state = found["parameters"][0]["state"]
        if kind == 1:
            assert state["exp_avg"] == {"dtype": "float32", "shape": [512, 128], "in_pieces": True}
        else:
            assert state["exp_avg.scale"]["shape"] == [256]


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_hold_codes(backend, tmp_path):
    run_ranks(sizes_of_files, 2, str(tmp_path), backend=backend)


def from_and_to_shards(rank, world_size, folder):
    """Over DTensors states are numbers; in buckets they become codes, the same ones on the way back."""
    loading.ROOM = 1000  # bytes: parts begin and end within blocks
    options = {"has_across": False}
    net, optimizer = build(**options)
    steps(net, optimizer, range(2))
    there, shards = build("cut", state_dtype=torch.float32, **options)
    back, restored = build(**options)
    for number, (source, target) in enumerate(((net, optimizer), (there, shards)), start=1):
        checkpoint.save(f"{folder}/{number}", source, target)
        checkpoint.load(f"{folder}/{number}", *((there, shards), (back, restored))[number - 1])
    assert_equal(steps(back, restored, range(2, 4)), steps(net, optimizer, range(2, 4)), "by way of shards")
    same_codes(optimizer, restored)


@pytest.mark.parametrize("backend", BACKENDS)
def test_codes_come_back_from_shards(backend, tmp_path):
    run_ranks(from_and_to_shards, 2, str(tmp_path), backend=backend)


def test_states_load_with_the_hooks_of_optim_utils():
    def stepped(seed):
        parameter = nn.Parameter(normal((70, 70), seed, 0))
        optimizer = TritonDistAdamW([parameter], state_dtype="int8")
        parameter.grad = normal((70, 70), seed, 1)
        optimizer.step()
        attach_state_dict_hooks(optimizer)
        return parameter, optimizer

    (parameter, optimizer), (other, loaded) = stepped(1), stepped(2)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with torch.no_grad():
        other.copy_(parameter)
    for each, its in ((parameter, optimizer), (other, loaded)):
        each.grad = normal((70, 70), 3, 0)
        its.step()
    assert torch.equal(parameter, other)
