"""``lr_mul`` and ``wd_mul`` of a parameter do what a group of its own with such hyperparameters does, bit for bit."""

import pytest
import torch
from dist_cases import Scenarios, device_of, mesh_of, normal
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW

scenario = Scenarios()

SHAPES = ((7, 5), (8, 8), (1, 6), (12, 5), (7, 5))
MULTIPLIERS = ((1, 1), (0.5, 1), (1, 0), (2, 3), (0.5, 1))
# powers of two, whose products are the same however they are formed
RATES = [0.0625, 0.03125, 0.015625]


def parameters(rank, form, dtype=torch.float32):
    device = device_of(rank)
    values = [normal(shape, 3, number).to(device, dtype) for number, shape in enumerate(SHAPES)]
    if form == "cut":
        values = [distribute_tensor(value, mesh_of(torch.distributed.get_world_size()), [Shard(0)]) for value in values]
    return [nn.Parameter(value) for value in values]


def give_gradients(params, step):
    for number, p in enumerate(params):
        gradient = normal(tuple(p.shape), 5, number, step).to(p.device, p.dtype)
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements) if isinstance(p, DTensor) else gradient


def one_group(params, kind, lr):
    group = {"params": params, "lr": lr, "weight_decay": 0.25}
    return [{**group, **({"kind": kind, "impl": "torch"} if kind == "muon" else {"kind": kind})}]


def own_groups(params, kind, lr, multipliers):
    """A group for each parameter, by which its place for random bits differs alone."""
    (group,) = one_group(params, kind, lr)
    return [
        {**group, "params": [p], "lr": lr * lr_mul, "weight_decay": 0.25 * wd_mul}
        for p, (lr_mul, wd_mul) in zip(params, multipliers)
    ]


def build(groups, kind, **options):
    if kind == "mixed":
        return TritonDistMuonAdamW(groups, reducer="exact", **options)
    kinds = {"adamw": TritonDistAdamW, "muon": TritonDistMuon}
    return kinds[kind]([{k: v for k, v in g.items() if k != "kind"} for g in groups], reducer="exact", **options)


def set_multipliers(params, multipliers):
    for p, (lr_mul, wd_mul) in zip(params, multipliers):
        p.lr_mul, p.wd_mul = lr_mul, wd_mul


def whole(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


def assert_alike(params, twins, optimizer, twin_optimizer):
    optimizer.wait()
    twin_optimizer.wait()
    for number, (p, twin) in enumerate(zip(params, twins)):
        assert torch.equal(whole(p), whole(twin)), (number, p.lr_mul, p.wd_mul)


def check(rank, world_size, form, as_rate=float):
    for kind in ("adamw", "muon"):
        params, twins = parameters(rank, form), parameters(rank, form)
        set_multipliers(params, MULTIPLIERS)
        optimizer = build(one_group(params, kind, as_rate(RATES[0])), kind)
        twin_optimizer = build(own_groups(twins, kind, RATES[0], MULTIPLIERS), kind)
        for step, rate in enumerate(RATES):
            lr = optimizer.param_groups[0]["lr"]
            optimizer.param_groups[0]["lr"] = lr.fill_(rate) if isinstance(lr, torch.Tensor) else rate
            multipliers = MULTIPLIERS if step < 2 else MULTIPLIERS[::-1]  # from then on others
            set_multipliers(params, multipliers)
            for group, (lr_mul, wd_mul) in zip(twin_optimizer.param_groups, multipliers):
                group |= {"lr": rate * lr_mul, "weight_decay": 0.25 * wd_mul}
            for some, opt in ((params, optimizer), (twins, twin_optimizer)):
                give_gradients(some, step)
                opt.step()
                opt.zero_grad()
            assert_alike(params, twins, optimizer, twin_optimizer)
        # what a scheduler reads and writes is the group's
        assert float(optimizer.param_groups[0]["lr"]) == RATES[-1]
        assert optimizer.param_groups[0]["weight_decay"] == 0.25


@scenario(1, 2, 3)
def plain_parameters_take_their_share(rank, world_size):
    check(rank, world_size, "plain")


@scenario(2, 3)
def dtensors_take_their_share(rank, world_size):
    check(rank, world_size, "cut")


@scenario(1, 2)
def a_tensor_lr_is_multiplied(rank, world_size):
    check(rank, world_size, "plain", torch.tensor)
    check(rank, world_size, "plain", lambda rate: torch.tensor(rate, device=device_of(rank)))
    if world_size > 1:
        check(rank, world_size, "cut", lambda rate: torch.tensor(rate, device=device_of(rank)))


@scenario(1, 2)
def a_whole_lr_in_a_tensor_is_multiplied(rank, world_size):
    for kind in ("adamw", "muon"):
        params, twins = parameters(rank, "plain"), parameters(rank, "plain")
        set_multipliers(params, MULTIPLIERS)
        optimizer = build(one_group(params, kind, torch.tensor(1, device=device_of(rank))), kind)
        twin_optimizer = build(own_groups(twins, kind, 1.0, MULTIPLIERS), kind)
        for some, opt in ((params, optimizer), (twins, twin_optimizer)):
            give_gradients(some, 0)
            opt.step()
        assert_alike(params, twins, optimizer, twin_optimizer)


@scenario(2)
def both_kinds_in_one_optimizer_under_a_scheduler(rank, world_size):
    params, twins = parameters(rank, "plain"), parameters(rank, "plain")
    set_multipliers(params, MULTIPLIERS)
    optimizer = build([*one_group(params[:3], "muon", 0.5), *one_group(params[3:], "adamw", 0.25)], "mixed")
    twin_optimizer = build(
        [
            *own_groups(twins[:3], "muon", 0.5, MULTIPLIERS[:3]),
            *own_groups(twins[3:], "adamw", 0.25, MULTIPLIERS[3:]),
        ],
        "mixed",
    )
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) for opt in (optimizer, twin_optimizer)]
    for step in range(3):
        for some, opt, scheduler in zip((params, twins), (optimizer, twin_optimizer), schedulers):
            give_gradients(some, step)
            opt.step()
            opt.zero_grad()
            scheduler.step()
    assert_alike(params, twins, optimizer, twin_optimizer)


@scenario(1, 2)
def explain_shows_what_is_multiplied(rank, world_size):
    parameter, other = (nn.Parameter(torch.ones(3, device=device_of(rank))) for _ in range(2))
    parameter.lr_mul = 0.5
    optimizer = TritonDistAdamW([("w", parameter), ("b", other)])
    assert optimizer.explain().data["multipliers"] == {"w": {"lr_mul": 0.5, "wd_mul": 1.0}}
    assert any(line.split() == ["w", "0.5", "1.0"] for line in optimizer.explain().splitlines())
    del parameter.lr_mul
    assert optimizer.explain().data["multipliers"] == {}


@scenario(1, 2)
def multipliers_that_are_none_are_refused_on_every_rank(rank, world_size):
    last, device = world_size - 1, device_of(rank)
    for value in ("a half", -1, float("nan"), float("inf"), True, torch.tensor(0.5)):
        for key in ("lr_mul", "wd_mul"):
            parameter = nn.Parameter(torch.ones(3, device=device))
            if rank == last:
                setattr(parameter, key, value)
            with pytest.raises(ValueError, match=f"w: its {key} is .*; give it a number of at least 0, or delete"):
                TritonDistAdamW([("w", parameter)])
    optimizer = TritonDistAdamW([("w", nn.Parameter(torch.ones(3, device=device)))])
    parameter = optimizer.param_groups[0]["params"][0]
    parameter.grad = torch.ones(3, device=device)
    parameter.lr_mul = -1
    with pytest.raises(ValueError, match="w: its lr_mul is -1"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(3, device=device))
    parameter.lr_mul = 0.0
    optimizer.step()
    optimizer.wait()
    assert torch.equal(parameter, torch.ones(3, device=device))


@scenario(2)
def unequal_multipliers_are_refused_on_every_rank(rank, world_size):
    parameter = nn.Parameter(torch.ones(3, device=device_of(rank)))
    parameter.lr_mul = 0.5 + rank
    with pytest.raises(RuntimeError, match=r"lr_mul of w is 0\.5 on rank 0, 1\.5 on rank 1"):
        TritonDistAdamW([("w", parameter)])
    parameter.lr_mul = 1
    optimizer = TritonDistAdamW([("w", parameter)], debug=True)
    parameter.grad = torch.ones(3, device=device_of(rank))
    parameter.wd_mul = 1.0 + rank
    with pytest.raises(RuntimeError, match=r"wd_mul of w is not given on rank 0, 2\.0 on rank 1"):
        optimizer.step()


@scenario.parametrize()
def test_multipliers(backend, world_size, name):
    scenario.check(backend, world_size, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_captured_step_multiplies_what_lr_is_when_it_is_replayed(kind):
    device = torch.device("cuda")
    values = [normal(shape, 3, number).to(device) for number, shape in enumerate(SHAPES)]
    gradients = [normal(shape, 5, number).to(device) for number, shape in enumerate(SHAPES)]
    found = []
    for is_captured in (False, True):
        params, lr = [nn.Parameter(value.clone()) for value in values], torch.tensor(0.5, device=device)
        set_multipliers(params, MULTIPLIERS)
        groups = [{"params": params, "lr": lr, "weight_decay": 0.25}]
        optimizer = TritonDistAdamW(groups) if kind == "adamw" else TritonDistMuon(groups)
        for p, gradient in zip(params, gradients):
            p.grad = gradient
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            optimizer.step()  # compiles
        torch.cuda.current_stream().wait_stream(stream)
        if is_captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        for rate in (0.25, 0.125):
            lr.fill_(rate)
            graph.replay() if is_captured else optimizer.step()
        found.append([p.detach().clone() for p in params])
    assert all(map(torch.equal, *found))
