"""``rebuild_plan()``: afterwards an optimizer is one that was built for what is trained now, and has loaded the state.

What differs between the two is where the state has been: here it went from owner to owner, there over one process.
"""

import ctypes
import gc
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, assert_same_state, device_of, memory_taken, mesh_of, normal
from dist_loops import Net, assert_same, batch, build, values
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint
from optim_utils.testing import run_ranks

scenario = Scenarios()

BF16 = torch.bfloat16
# a class's kind, the options of all groups, and the parameters' dtype
KINDS = {
    "adamw": ("adamw", {"amsgrad": True}, torch.float32),
    "masters": ("adamw", {"master_weights": "fp32", "state_dtype": torch.float32}, BF16),
    "split16": ("adamw", {"master_weights": "split16"}, BF16),
    "at random": ("adamw", {"stochastic_rounding": True, "seed": 3}, BF16),
    "muon": ("muon", {"beta2": 0.9}, torch.float32),
    "muon at random": ("muon", {"stochastic_rounding": True, "seed": 3}, BF16),
    "mixed": ("mixed", {}, torch.float32),
}
OPTIONS = {"lr": 0.05, "reducer": "exact", "bucket_mb": 1e-4}


def make_net(rank, dtype=torch.float32, frozen=(2,)):
    net = Net(device_of(rank)).to(dtype)
    freeze(net, frozen)
    return net


def freeze(net, frozen):
    for place, layer in enumerate(net.layers):
        layer.requires_grad_(place not in frozen)


def make_optimizer(net, kind, options, **others):
    weights = [(name, p) for name, p in net.named_parameters() if p.ndim == 2]
    rest = [(name, p) for name, p in net.named_parameters() if p.ndim < 2]
    others = {"reducer": "exact", "bucket_mb": 1e-4, **others}
    if kind == "adamw":
        return TritonDistAdamW([{"params": weights, "lr": 0.05}, {"params": rest}], **options, **others)
    if kind == "muon":
        return TritonDistMuon([{"params": weights, "impl": "torch", **options}], **others)
    groups = [{"kind": "muon", "params": weights, "impl": "torch"}, {"kind": "adamw", "params": rest, "lr": 0.05}]
    return TritonDistMuonAdamW(groups, **others)


def train(pairs, rank, steps):
    for step in steps:
        for net, optimizer in pairs:
            net(batch(rank, step).to(net.layers[0].weight.dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
            net.zero_grad()  # of what no optimizer has


def on_every_rank(full):
    found = [full]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def names(optimizer):
    return [spec.name for spec in optimizer.plan.parameters]


@scenario(1, 2, 3, 4)
def it_goes_on_as_one_built_from_scratch(rank, world_size):
    for name, (kind, options, dtype) in KINDS.items():
        net = make_net(rank, dtype)
        optimizer = make_optimizer(net, kind, options)
        train([(net, optimizer)], rank, range(2))
        before = on_every_rank(optimizer.full_state_dict())
        twin = make_net(rank, dtype, frozen=(0,))
        twin.load_state_dict(net.state_dict())
        freeze(net, (0,))
        optimizer.rebuild_plan()
        oracle = make_optimizer(twin, kind, options)
        assert optimizer.plan.hash == oracle.plan.hash
        oracle.load_full_state_dict(before)
        gone = {n for n, p in enumerate(p for g in optimizer.param_groups for p in g["params"]) if not p.requires_grad}
        after = optimizer.full_state_dict()
        if rank == 0:
            kept = {number: state for number, state in before["state"].items() if number not in gone}
            assert len(kept) < len(before["state"]), name
            assert_same_state(after, {"state": kept})
        train([(net, optimizer), (twin, oracle)], rank, range(2, 5))
        assert_same(values(net), values(twin))
        assert_same_state(optimizer.full_state_dict() or {"state": {}}, oracle.full_state_dict() or {"state": {}})
        # what was frozen begins anew, as in an optimizer that has never seen it
        for each in (net, twin):
            freeze(each, ())
        optimizer.rebuild_plan()
        full = on_every_rank(oracle.full_state_dict())
        oracle = make_optimizer(twin, kind, options)
        oracle.load_full_state_dict(full)
        train([(net, optimizer), (twin, oracle)], rank, range(5, 7))
        assert_same(values(net), values(twin))


@scenario(1, 2, 3)
def with_reductions_and_gathers_under_way(rank, world_size):
    """Hooks, and the group in which reductions run, go along."""
    net, twin = make_net(rank), make_net(rank)
    common = {"lr": 0.05, "reducer": "exact", "bucket_mb": 1e-4}
    optimizer = TritonDistAdamW(net.named_parameters(), model=net, accumulation_steps=1, timeout=60.0, **common)
    oracle = TritonDistAdamW(twin.named_parameters(), overlap=False, **common)
    train([(net, optimizer), (twin, oracle)], rank, range(2))
    groups = len(dist.distributed_c10d._world.pg_names)
    for first, frozen in enumerate([(), (1, 3), (0, 1, 2, 3), (1,)]):
        for each, opt in ((net, optimizer), (twin, oracle)):
            freeze(each, frozen)
            opt.rebuild_plan()
        if len(frozen) < 4:
            train([(net, optimizer), (twin, oracle)], rank, range(2 * first, 2 * first + 2))
            # a batch that is given up
            net(batch(rank, 9)).backward()
            net.zero_grad()
        assert_same(values(net), values(twin))
    assert len(dist.distributed_c10d._world.pg_names) == groups


@scenario(2)
def nothing_of_a_former_plan_stays(rank, world_size):
    net = make_net(rank)
    optimizer = TritonDistAdamW(net.named_parameters(), model=net)
    former = weakref.ref(optimizer._bucketed._gathers)
    optimizer.rebuild_plan()
    gc.collect()
    assert former() is None


@scenario(1, 2, 3)
def state_stays_with_parameters_that_the_model_calls_otherwise_by_now(rank, world_size):
    pairs = []
    for with_model in (True, False):
        net = Net(device_of(rank))
        options = {"model": net} if with_model else {}
        pairs.append((net, TritonDistAdamW(net.named_parameters(), **options, **OPTIONS)))
    (net, optimizer), (twin, _) = pairs
    train(pairs, rank, range(2))
    optimizer.wait()
    for each, opt in pairs:
        # two exchange their names, one gets a wrapper, and one leaves its name to another
        layers = each.layers
        layers[0], layers[1] = layers[1], layers[0]
        layers[2] = nn.Sequential(layers[2])
        layers[3].requires_grad_(False)
        layers[3] = Net(device_of(rank), 1).layers[0]
        opt.add_param_group({"params": [(f"layers.3.{name}", p) for name, p in layers[3].named_parameters()]})
    train(pairs, rank, range(2, 3))
    optimizer.rebuild_plan()
    train(pairs, rank, range(3, 5))
    assert_same(values(net), values(twin))


@scenario(1, 2)
def a_group_of_another_kind_starts_anew(rank, world_size):
    """The former update's state is none of the new one's, and nobody would know how to cut it."""
    device = device_of(rank)

    def made(kind, values):
        parameters = [nn.Parameter(value.clone()) for value in values]
        return parameters, TritonDistMuonAdamW([groups[kind] | {"params": [*zip("wv", parameters)]}], timeout=20)

    def train(parameters, optimizer, steps):
        for step in steps:
            for parameter in parameters:
                torch.manual_seed(step)
                parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype).to(device)
            optimizer.step()
            optimizer.zero_grad()

    groups = {
        "muon": {"kind": "muon", "beta2": 0.9, "impl": "torch"},
        "adamw": {"kind": "adamw", "betas": (0.9, 0.99), "eps": 1e-8, "lr": 0.05},
    }
    for first, second in (("muon", "adamw"), ("adamw", "muon")):
        parameters, optimizer = made(first, [torch.ones(6, 4, device=device), torch.ones(2, 2, device=device)])
        train(parameters, optimizer, range(2))
        optimizer.state_dict()  # which shows states
        wanted, oracle = made(second, [parameter.detach() for parameter in parameters])
        group, names = optimizer.param_groups[0], optimizer.param_groups[0].get("param_names")
        kept = {"params": group["params"]} | ({} if names is None else {"param_names": names})
        group.clear()
        group |= {key: value for key, value in oracle.param_groups[0].items() if key not in kept} | kept
        optimizer.rebuild_plan()
        for steps in (range(2, 4), range(4, 5)):
            train(parameters, optimizer, steps)
            train(wanted, oracle, steps)
            assert_same(parameters, wanted)
            found, expected = optimizer.full_state_dict(), oracle.full_state_dict()
            torch.testing.assert_close(found.get("state"), expected.get("state"), rtol=0, atol=0)
            optimizer.rebuild_plan()


@scenario(1, 2)
def what_has_left_its_name_to_another_is_frozen_and_left_out(rank, world_size):
    net, optimizer = build(rank)
    former = net.layers[3]
    net.layers[3] = Net(device_of(rank), 1).layers[0]
    new = [(f"layers.3.{name}", p) for name, p in net.layers[3].named_parameters()]
    optimizer.add_param_group({"params": new})
    for refused in (lambda: checkpoint.save("nowhere", net, optimizer), optimizer.rebuild_plan):
        with pytest.raises(
            (RuntimeError, ValueError), match=r"layers\.3\.weight.* no longer has.*freeze|freeze .* no longer"
        ):
            refused()
    former.requires_grad_(False)
    optimizer.rebuild_plan()
    assert sorted(names(optimizer)) == sorted(name for name, _ in net.named_parameters())
    train([(net, optimizer)], rank, range(1))


@scenario(1, 2)
def order_decides_which_bucket_comes_first(rank, world_size):
    net, optimizer = build(rank)
    forward = [name for name, _ in net.named_parameters()]
    assert names(optimizer) == forward
    optimizer.rebuild_plan(forward[::-1])
    assert names(optimizer) == forward[::-1]
    train([(net, optimizer)], rank, range(1))
    parameters = dict(net.named_parameters())
    other = forward[4:] + forward[:4]
    # as parameters, one of them twice, among others
    optimizer.rebuild_plan([nn.Parameter(torch.ones(1)), "what", *(parameters[name] for name in [*other, forward[4]])])
    assert names(optimizer) == other
    train([(net, optimizer)], rank, range(1))
    optimizer.rebuild_plan()
    assert names(optimizer) == forward


@scenario(1, 2)
def an_order_that_is_none_is_refused_on_every_rank(rank, world_size):
    net, optimizer = build(rank)
    forward = [name for name, _ in net.named_parameters()]
    is_last = rank == world_size - 1
    for given, error, text in (
        (3, TypeError, "order must be a list of names or parameters, got 3"),
        ("layers", TypeError, "order must be a list of names or parameters, got 'layers'"),
        ([*forward[:2], *forward[3:]], ValueError, r"it lacks layers\.1\.weight"),
        ([*forward, 3], TypeError, "names or parameters, got 3 at place 8"),
    ):
        with pytest.raises(error if is_last else RuntimeError, match=text):
            optimizer.rebuild_plan(given if is_last else forward)
    if world_size > 1:
        with pytest.raises(RuntimeError, match=r"first that differs is number 0: rank 0 has layers\.0\.weight"):
            optimizer.rebuild_plan(forward[::-1] if is_last else forward)
    assert names(optimizer) == forward
    twin, oracle = build(rank)
    train([(net, optimizer), (twin, oracle)], rank, range(2))
    assert_same(values(net), values(twin))


@scenario(1, 2)
def it_is_refused_where_gradients_are(rank, world_size):
    for accumulation_steps in (None, 1):
        net, optimizer = build(rank, accumulation_steps=accumulation_steps)
        twin, oracle = build(rank)
        net.layers[1].weight.requires_grad_(False)
        is_last = rank == world_size - 1
        if is_last or accumulation_steps:
            net(batch(rank, 0)).backward()
        text = r"layers\.0\.weight, layers\.0\.bias, layers\.1\.bias, .* and 3 more have gradients, which would be lost"
        with pytest.raises(RuntimeError, match=text):
            optimizer.rebuild_plan()
        if not is_last and not accumulation_steps:
            net(batch(rank, 0)).backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match=text):  # those of the last step would be added to
            optimizer.rebuild_plan()
        optimizer.zero_grad()
        optimizer.rebuild_plan()
        twin.layers[1].weight.requires_grad_(False)
        train([(twin, oracle)], rank, range(1))
        train([(net, optimizer), (twin, oracle)], rank, range(1, 3))
        assert_same(values(net), values(twin))


@scenario(2)
def ranks_that_freeze_differently_are_refused(rank, world_size):
    net, optimizer = build(rank)
    net.layers[1].weight.requires_grad_(rank == 0)
    with pytest.raises(RuntimeError, match=r"ranks were given different parameters.* rank 0 has layers\.1\.weight"):
        optimizer.rebuild_plan()
    net.layers[1].weight.requires_grad_(True)
    twin, oracle = build(rank)
    train([(net, optimizer), (twin, oracle)], rank, range(2))
    assert_same(values(net), values(twin))


@scenario(2)
def unequal_parameters_are_refused_before_anything_has_changed(rank, world_size):
    net = make_net(rank, frozen=(0,))
    optimizer = make_optimizer(net, "adamw", {}, sync_params="check")
    train([(net, optimizer)], rank, [0])
    plan, state = optimizer.plan, optimizer.full_state_dict()
    freeze(net, ())
    with torch.no_grad():
        net.layers[0].weight.add_(rank)
    with pytest.raises(
        RuntimeError,
        match=r"sync_params='check': parameters differ .* layers\.0\.weight \(rank 1\); give every rank the same",
    ):
        optimizer.rebuild_plan()
    assert optimizer.plan is plan
    if rank == 0:
        assert_same_state(optimizer.full_state_dict(), state)
    else:
        optimizer.full_state_dict()
    with torch.no_grad():
        net.layers[0].weight.sub_(rank)
    dist.broadcast(net.layers[0].weight.data, src=0)
    optimizer.rebuild_plan()
    train([(net, optimizer)], rank, [1])


@scenario(2)
def an_optimizer_that_was_taken_over_gives_nothing_up(rank, world_size):
    """A pass that is refused on one rank alone concerns those that still reduce."""
    for options in ({"reducer": "rs"}, {"gradients": "streamed"}):
        net = make_net(rank, frozen=())
        former = make_optimizer(net, "adamw", {}, accumulation_steps=1, **options)
        newer = make_optimizer(net, "adamw", {}, accumulation_steps=1, **options)
        net(batch(rank, 0)).backward()
        if rank == 0:
            with pytest.raises(RuntimeError, match="arrived after"):
                net(batch(rank, 0)).backward()
        newer.zero_grad()
        assert not former._bucketed.reduction.any_rank_may_have_launched
        newer.rebuild_plan()  # which takes them over once more
        former.zero_grad()
        train([(net, newer)], rank, [1])


@scenario(1, 2)
def what_has_left_its_bucket_or_was_closed_is_refused(rank, world_size):
    net, optimizer = build(rank)
    if world_size > 1:
        if rank == 1:
            weight = net.layers[1].weight
            kept, weight.data = weight.data, weight.data.clone()
        with pytest.raises(RuntimeError, match=r"layers\.1\.weight is no longer a view of its bucket"):
            optimizer.rebuild_plan()
        if rank == 1:
            weight.data = kept
    optimizer.rebuild_plan()
    optimizer.consolidate_state_dict()
    optimizer.rebuild_plan()
    with pytest.raises(RuntimeError, match=r"rebuild_plan\(\) came after consolidate_state_dict"):
        optimizer.state_dict()
    optimizer.close()
    with pytest.raises(RuntimeError, match="was closed"):
        optimizer.rebuild_plan()


@scenario(2)
def it_takes_new_parameters_from_the_first_rank_and_from_other_optimizers(rank, world_size):
    net = make_net(rank)
    optimizer = TritonDistAdamW(net.layers[:3].named_parameters(), lr=0.05, bucket_mb=1e-4)
    with torch.no_grad():
        net.layers[2].weight += rank
    former = TritonDistAdamW([*net.layers[3].parameters()])
    optimizer.add_param_group({"params": [*net.layers[3].named_parameters(prefix="last")]})
    freeze(net, ())
    optimizer.rebuild_plan()
    assert torch.equal(net.layers[2].weight.cpu(), 0.3 * normal((5, 5), 11, 4))
    former.close()
    train([(net, optimizer)], rank, range(2))


@scenario(1, 2, 3)
def dtensors_and_what_is_beside_them(rank, world_size):
    def make(frozen):
        net = Net(device_of(rank))
        for layer in net.layers[:2]:
            fully_shard(layer, mesh=mesh_of(world_size))
        freeze(net, frozen)
        return net

    def build_one(net):
        weights = [p for p in net.parameters() if p.ndim == 2]
        rest = [p for p in net.parameters() if p.ndim < 2]
        groups = [{"kind": "muon", "params": weights, "impl": "torch"}, {"kind": "adamw", "params": rest, "lr": 0.05}]
        return TritonDistMuonAdamW(groups, reducer="exact", bucket_mb=1e-4)

    net, twin = make((1, 2)), make((0, 3))
    optimizer = build_one(net)
    train([(net, optimizer)], rank, range(2))
    before = on_every_rank(optimizer.full_state_dict())
    with torch.no_grad():
        for p, other in zip(twin.parameters(), net.parameters()):
            p.copy_(other)
    freeze(net, (0, 3))
    optimizer.rebuild_plan()
    oracle = build_one(twin)
    assert optimizer.plan.hash == oracle.plan.hash
    oracle.load_full_state_dict(before)
    train([(net, optimizer), (twin, oracle)], rank, range(2, 5))
    for p, other in zip(net.parameters(), twin.parameters()):
        left, right = (each.full_tensor() if isinstance(each, DTensor) else each for each in (p, other))
        assert torch.equal(left, right)
    assert_same_state(optimizer.full_state_dict() or {"state": {}}, oracle.full_state_dict() or {"state": {}})


@scenario(1, 2, 3)
def codes_of_8_bits_move_as_they_are(rank, world_size):
    """Between blocks; where a group wants other moments from now on, or wants codes, as numbers."""
    shapes = {"a": (5000,), "b": (70, 70), "c": (100,), "d": (4096,), "e": (61, 100)}
    device = device_of(rank)

    def make(frozen):
        parameters = {name: nn.Parameter(normal(shape, 3).to(device)) for name, shape in shapes.items()}
        for name, parameter in parameters.items():
            parameter.requires_grad_(name not in frozen)
        return parameters

    def step(parameters, optimizer, number):
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                parameter.grad = normal(shapes[name], 5, number, rank, len(name)).to(device)
        optimizer.step()
        optimizer.zero_grad()

    for before, after in (("int8", "int8"), ("int8", torch.float32), (torch.float32, "int8")):
        ours, twins = make("b"), make("a")
        optimizer = TritonDistAdamW(ours.items(), state_dtype=before, **OPTIONS)
        for number in range(2):
            step(ours, optimizer, number)
        full = on_every_rank(optimizer.full_state_dict())
        with torch.no_grad():
            for name, parameter in ours.items():
                twins[name].copy_(parameter)
                parameter.requires_grad_(name != "a")
        optimizer.param_groups[0]["state_dtype"] = after
        optimizer.rebuild_plan(list(shapes))
        oracle = TritonDistAdamW(twins.items(), state_dtype=after, **OPTIONS)
        oracle.load_full_state_dict(full)
        assert optimizer.plan.hash == oracle.plan.hash
        for number in range(2, 4):
            step(ours, optimizer, number)
            step(twins, oracle, number)
            assert_same(list(ours.values()), list(twins.values()))
        assert_same_state(optimizer.full_state_dict() or {"state": {}}, oracle.full_state_dict() or {"state": {}})


@scenario(1, 2)
def everything_was_frozen(rank, world_size):
    net, twin = make_net(rank, frozen=range(4)), make_net(rank, frozen=())
    optimizer = TritonDistAdamW(net.named_parameters(), model=net, accumulation_steps=1, **OPTIONS)
    optimizer.step()
    freeze(net, ())
    optimizer.rebuild_plan()
    oracle = TritonDistAdamW(twin.named_parameters(), **OPTIONS)
    train([(net, optimizer), (twin, oracle)], rank, range(2))
    assert_same(values(net), values(twin))


@scenario(4)
def over_a_grid(rank, world_size):
    """Where chunks are owned in another order than that of ranks."""
    net = make_net(rank)
    optimizer = TritonDistAdamW(net.named_parameters(), mesh=mesh_of(2, 2, names=("replicate", "shard")), **OPTIONS)
    twin = make_net(rank)
    oracle = TritonDistAdamW(twin.named_parameters(), **OPTIONS)
    train([(net, optimizer), (twin, oracle)], rank, range(2))
    for each, opt in ((net, optimizer), (twin, oracle)):
        freeze(each, (0,))
        opt.rebuild_plan()
    train([(net, optimizer), (twin, oracle)], rank, range(2, 4))
    assert_same(values(net), values(twin))
    assert_same_state(optimizer.full_state_dict() or {"state": {}}, oracle.full_state_dict() or {"state": {}})


@scenario(2)
def a_former_optimizer_that_is_closed_leaves_parameters_alone(rank, world_size):
    net, former = build(rank)
    optimizer = TritonDistAdamW(net.named_parameters(), model=net, **OPTIONS)
    train([(net, optimizer)], rank, range(1))
    before = values(net)
    former.close()
    assert_same(values(net), before)
    train([(net, optimizer)], rank, range(1, 2))


@scenario.parametrize()
def test_rebuild(backend, world_size, name):
    scenario.check(backend, world_size, name)


def memory_to_rebuild(rank, world_size, options):
    """How much more memory there was than before, at most, in bytes for each of a parameter."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 2**16)  # what is larger goes back to the system when it is freed
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
    optimizer = TritonDistAdamW(model.named_parameters(), bucket_mb=4, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    order = names(optimizer)[::-1]  # all state goes to another rank
    return memory_taken(lambda: optimizer.rebuild_plan(order)) / sum(p.numel() for p in model.parameters())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the memory of a process")
@pytest.mark.parametrize("options", [{}, {"reducer": "exact"}, {"gradients": "streamed", "accumulation_steps": 1}])
def test_parameters_and_one_kind_of_state_exist_twice_for_a_moment(options):
    for found in run_ranks(memory_to_rebuild, 2, options):
        assert found < 4 + 4 / 2


def test_without_a_process_group(tmp_path):
    net = make_net(0)
    optimizer = TritonDistAdamW(net.named_parameters(), lr=0.05)
    train([(net, optimizer)], 0, range(2))
    moments = [optimizer.state[p]["exp_avg"] for p in net.layers[1].parameters()]
    freeze(net, (0,))
    optimizer.rebuild_plan()
    assert set(optimizer.state) == {p for layer in (net.layers[1], net.layers[3]) for p in layer.parameters()}
    assert all(a is optimizer.state[p]["exp_avg"] for a, p in zip(moments, net.layers[1].parameters()))
    train([(net, optimizer)], 0, range(2))
    assert [int(optimizer.state[layer.weight]["step"]) for layer in net.layers[1:]] == [4, 2, 4]
    checkpoint.save(tmp_path / "saved", net, optimizer)
    other = make_net(0, frozen=(0,))
    loaded = TritonDistAdamW(other.named_parameters(), lr=0.05)
    checkpoint.load(tmp_path / "saved", other, loaded)
    train([(net, optimizer), (other, loaded)], 0, range(2))
    assert_same(values(net), values(other))


@pytest.mark.parametrize("kind", ["adamw", "muon", "mixed"])
def test_a_rate_that_a_schedule_has_left_below_zero_is_none_of_a_new_plans_business(kind):
    """``LinearLR`` misses 0 by a rounding error; a group that is new may not begin with such a rate."""
    net = Net("cpu")
    optimizer = make_optimizer(net, kind, {})
    for group in optimizer.param_groups:
        group["lr"] = -4.440892098500625e-19
    net.layers[1].requires_grad_(False)
    optimizer.rebuild_plan()
    # other storage is looked at in the next step
    for group in optimizer.param_groups:
        group["master_weights"] = None
        group["momentum_dtype" if "momentum" in group else "state_dtype"] = torch.float32
    net(batch(0, 0)).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = float("nan")
    with pytest.raises(ValueError, match=r"(?i)learning rate.*nan"):
        optimizer.rebuild_plan()
    later = {**optimizer.param_groups[0], "params": [("later", nn.Parameter(torch.ones(4, 4)))], "lr": -4e-19}
    with pytest.raises(ValueError, match=r"(?i)learning rate.*-4e-19"):
        optimizer.add_param_group(later)
