"""How AdamW stores its state: moments' dtypes, masters, rounding at random; the same bits at any number of ranks."""

import copy
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_cases import (
    BACKENDS,
    Case,
    Tensors,
    assert_equal,
    assert_same_state,
    gradient,
    make_parameters,
    train_each,
    world_sizes,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint
from optim_dist._optimizers.layouts import local
from optim_kernels import TritonAdamW
from optim_utils.testing import run_ranks

BF16 = torch.bfloat16
TENSORS = (
    Tensors((33, 7), BF16),
    Tensors((40, 21), BF16, transposed=True),
    Tensors((5,), BF16, group=1),
    Tensors((301,), BF16, group=1),
)
OPTIONS = {
    "fp32 moments": {"state_dtype": torch.float32},
    "two dtypes": {"state_dtype": (None, torch.float32)},
    "fp32 masters": {"state_dtype": torch.float32, "master_weights": "fp32"},
    "split16": {"master_weights": "split16", "amsgrad": True},
    "at random": {"stochastic_rounding": True, "seed": 5, "state_dtype": BF16},
}


def case_of(options):
    # the second group stays as torch stores it
    plain = {"state_dtype": None, "master_weights": None, "stochastic_rounding": False}
    return Case("adamw", TENSORS, ({"lr": 0.01}, {"lr": 0.02, **plain}), options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_bits_at_any_number_of_ranks(backend):
    cases = [case_of(options) for options in OPTIONS.values()]
    for world_size in world_sizes(backend, (2, 3)):
        oracle = run_ranks(train_each, 1, [(case, world_size) for case in cases], backend=backend)[0]
        jobs = [(case, 0, {"reducer": "exact"}) for case in cases]
        results = run_ranks(train_each, world_size, jobs, backend=backend)
        for name, expected, *found in zip(OPTIONS, oracle, *results, strict=True):
            for actual in found:
                assert_equal(actual["parameters"], expected["parameters"], f"{name}, {world_size} ranks")
            assert_same_state(found[0]["state"], expected["state"])


@pytest.mark.parametrize("name", OPTIONS)
def test_one_rank_is_tritonadamw(name):
    case = case_of(OPTIONS[name])
    found = train_each(0, 1, [(case,)])[0]
    parameters = make_parameters(case, torch.device("cpu"))
    plain = {"state_dtype": None, "master_weights": None, "stochastic_rounding": False}
    groups = [{"params": parameters[:2], "lr": 0.01}, {"params": parameters[2:], "lr": 0.02, **plain}]
    optimizer = TritonAdamW(groups, **case.options)
    for step in range(case.steps):
        for number, (spec, parameter) in enumerate(zip(case.tensors, parameters)):
            parameter.grad = torch.empty_like(parameter).copy_(gradient(spec, number, step, 0))
        optimizer.step()
    # the other group is torch's own loop on a CPU, which rounds between operations
    for actual, wanted in zip(found["parameters"][:2], parameters[:2]):
        # an ulp of fp32 may turn a rounding to bf16
        torch.testing.assert_close(actual, wanted.detach(), rtol=2**-7, atol=1e-6)
    for number, state in optimizer.state_dict()["state"].items():
        mine = found["state"]["state"][number]
        assert {key: value.dtype for key, value in mine.items()} == {key: value.dtype for key, value in state.items()}


def round_trips(rank, world_size, folder):
    """Through our checkpoint and torch's, from masters; into an optimizer that has none, and from one."""
    outcome = []
    for name, options in OPTIONS.items():
        case = case_of(options)

        def build(case=case, **other):
            parameters = make_parameters(case, torch.device("cpu"))
            net = nn.ParameterDict({f"p{number}": parameter for number, parameter in enumerate(parameters)})
            groups = [{"params": list(net.parameters())[:2]}, {"params": list(net.parameters())[2:]}]
            return net, TritonDistAdamW(groups, lr=0.01, reducer="exact", **{**case.options, **other})

        def steps(net, optimizer, numbers):
            for step in numbers:
                for number, parameter in enumerate(net.parameters()):
                    parameter.grad = torch.empty_like(parameter).copy_(gradient(TENSORS[number], number, step, rank))
                optimizer.step()
                optimizer.zero_grad()
            return [parameter.detach().clone() for parameter in net.parameters()]

        net, optimizer = build()
        steps(net, optimizer, range(2))
        where = f"{folder}/{name.replace(' ', '-')}"
        checkpoint.save(where, net, optimizer)
        saved = {"model": net.state_dict(), "optim": get_optimizer_state_dict(net, optimizer)}
        dcp.save(saved, checkpoint_id=f"{where}-dcp")
        wanted = steps(net, optimizer, range(2, 4))
        again, restored = build()
        checkpoint.load(where, again, restored)
        outcome.append((name, "ours", steps(again, restored, range(2, 4)), wanted))
        again, restored = build()
        target = {"model": again.state_dict(), "optim": get_optimizer_state_dict(again, restored)}
        dcp.load(target, checkpoint_id=f"{where}-dcp")
        set_optimizer_state_dict(again, restored, target["optim"])
        outcome.append((name, "torch's", steps(again, restored, range(2, 4)), wanted))
        # what a checkpoint lacks is made from the parameters
        again, restored = build(master_weights="fp32")
        checkpoint.load(where, again, restored)
        steps(again, restored, range(2, 3))
    return outcome


def test_checkpoints_bring_it_back(tmp_path):
    for outcome in run_ranks(round_trips, 2, str(tmp_path)):
        for name, whose, found, wanted in outcome:
            assert_equal(found, wanted, f"{name} through {whose} checkpoint")


def on_shards(rank, world_size):
    """DTensors: the same bits as one rank's, rounding at random included where shards are whole rows."""
    mesh = init_device_mesh("cpu", (world_size,))
    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    for name, options in OPTIONS.items():
        whole = [torch.randn(7, 5, generator=torch.Generator().manual_seed(n)).to(BF16) for n in range(2)]
        cut = [nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in whole]
        twins = [nn.Parameter(value.clone()) for value in whole]
        pair = TritonDistAdamW(cut, lr=0.1, **options), TritonDistAdamW(twins, lr=0.1, process_group=alone, **options)
        for _ in range(3):
            for parameter, twin, value in zip(cut, twins, whole):
                twin.grad, parameter.grad = value, distribute_tensor(value, mesh, [Shard(0)])
            for optimizer in pair:
                optimizer.step()
        for parameter, twin in zip(cut, twins):
            assert torch.equal(parameter.full_tensor(), twin), name
    columns = nn.Parameter(distribute_tensor(whole[0], mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"w is cut otherwise; shard it along its first dimension"):
        TritonDistAdamW([("w", columns)], stochastic_rounding=True)


def test_shards():
    run_ranks(on_shards, 3)


def masters_come_later(rank, world_size, folder):
    """A checkpoint without masters goes into an optimizer that has some, which then has to step what was loaded."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = [torch.randn(7, 5, generator=torch.Generator().manual_seed(n)).to(BF16) for n in range(2)]
    for form in ("plain", "cut"):

        def build(value, form=form, **options):
            parameter = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]) if form == "cut" else value.clone())
            return parameter, TritonDistAdamW([("w", parameter)], lr=0.01, **options)

        saved, optimizer = build(whole[0])
        saved.grad = torch.ones_like(saved)
        optimizer.step()
        checkpoint.save(f"{folder}/{form}", None, optimizer)
        loaded, optimizer = build(whole[1], master_weights="fp32")
        checkpoint.load(f"{folder}/{form}", None, optimizer)
        optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
        loaded.grad = torch.ones_like(loaded)
        optimizer.step()
        optimizer.wait()
        for parameter in (saved, loaded):
            assert isinstance(parameter, DTensor) == (form == "cut")
        values = [p.full_tensor() if isinstance(p, DTensor) else p for p in (saved, loaded)]
        assert torch.equal(*values), form


def test_masters_that_were_not_saved_are_made_of_what_is_loaded(tmp_path):
    run_ranks(masters_come_later, 2, str(tmp_path))


def parameters_come_after_state_dict(rank, world_size):
    """``torch.distributed.checkpoint`` asks for the state to fill before the parameters are loaded."""
    mesh = init_device_mesh("cpu", (world_size,))
    before, after = (torch.randn(8, 6, generator=torch.Generator().manual_seed(n)).to(BF16) for n in range(2))
    plain, cut = nn.Parameter(before.clone()), nn.Parameter(distribute_tensor(before, mesh, [Shard(0)]))
    for how in ("fp32", "split16"):
        groups = [{"params": [plain, cut], "lr": 0.0, "weight_decay": 0.0}]
        optimizer = TritonDistAdamW(groups, master_weights=how, process_group=mesh.get_group())
        listed = optimizer.state_dict()["state"]
        assert [sorted(state) for state in listed.values()] == [sorted({*listed[0], *listed[1]})] * 2
        with torch.no_grad():
            plain.copy_(after)
            cut.copy_(distribute_tensor(after, mesh, [Shard(0)]))
        for parameter in (plain, cut):
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.wait()
        assert torch.equal(plain, after), how
        assert torch.equal(cut.full_tensor(), after), how
        optimizer.close()


def test_parameters_may_be_loaded_after_state_dict():
    run_ranks(parameters_come_after_state_dict, 2)


def writes_between_steps(rank, world_size):
    """What every rank writes to its parameters stays, whoever updates them; elsewhere masters keep their bits."""
    mesh = init_device_mesh("cpu", (world_size,))
    generator = torch.Generator().manual_seed(0)
    for kind in (TritonDistAdamW, TritonDistMuonAdamW):
        values = [torch.randn(8, 6, generator=generator).to(BF16) for _ in range(4)]
        plain = [nn.Parameter(value.clone()) for value in values[:3]]
        params = [*plain, nn.Parameter(distribute_tensor(values[3], mesh, [Shard(0)]))]
        group = {"params": params, "weight_decay": 0.0, "master_weights": "fp32"}
        if kind is TritonDistMuonAdamW:
            group["kind"] = "muon"
        optimizer = kind([group], process_group=mesh.get_group())

        def step(lr, optimizer=optimizer, params=params, values=values):
            optimizer.param_groups[0]["lr"] = lr
            for parameter, value in zip(params, values):
                whole = distribute_tensor(value, mesh, [Shard(0)]) if isinstance(parameter, DTensor) else value
                parameter.grad = whole.clone()
            optimizer.step()
            optimizer.wait()

        for _ in range(2):
            step(1e-3)
        bits = {shard.index: local(optimizer.state[shard.parameter]["master"]).clone() for shard in optimizer.shards()}
        wanted = [parameter.detach().clone() for parameter in params]
        for number in (0, 3):
            wanted[number] = -wanted[number]
            with torch.no_grad():
                params[number].copy_(wanted[number])
        step(0.0)
        for parameter, value in zip(params, wanted):
            assert torch.equal(local(parameter), local(value))
        for shard in optimizer.shards():
            master = local(optimizer.state[shard.parameter]["master"])
            expected = shard.value.float() if shard.index in (0, 3) else bits[shard.index]
            assert torch.equal(master.flatten(), expected.flatten())
        # a state that is loaded counts until somebody writes
        saved = copy.deepcopy(optimizer.state_dict())
        for _ in range(2):
            step(1e-3)
        optimizer.load_state_dict(saved)
        step(0.0)
        for parameter, value in zip(params, wanted):
            assert torch.equal(local(parameter), local(value))
        optimizer.close()


@pytest.mark.parametrize("world_size", [1, 3])
def test_masters_follow_what_is_written_between_steps(world_size):
    run_ranks(writes_between_steps, world_size)


def test_what_has_no_gradient_in_the_first_step_after_a_load_gets_its_masters_too():
    def build(**options):
        pair = [nn.Parameter(torch.ones(4, dtype=BF16)) for _ in range(2)]
        return pair, TritonDistAdamW(pair, lr=1e-4, **options)

    (first, second), saved = build()
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    (first, second), optimizer = build(master_weights="fp32", amsgrad=True)
    state = saved.state_dict()
    state["param_groups"][0] |= {"amsgrad": True}
    optimizer.load_state_dict(state)
    for used in ((first,), (first, second)):
        optimizer.zero_grad()
        for parameter in used:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    for parameter in (first, second):
        assert {"master", "max_exp_avg_sq"} <= optimizer.state[parameter].keys()


@pytest.mark.parametrize(
    "build",
    [
        lambda **options: TritonDistAdamW([nn.Parameter(torch.ones(3))], **options),
        lambda **options: TritonDistMuon([nn.Parameter(torch.ones(3, 4))], **options),
        lambda **options: TritonDistMuonAdamW([{"kind": "adamw", "params": [nn.Parameter(torch.ones(3))]}], **options),
    ],
    ids=["TritonDistAdamW", "TritonDistMuon", "TritonDistMuonAdamW"],
)
def test_an_unknown_option_is_refused_in_the_name_of_the_optimizer(build, request):
    name = request.node.callspec.id
    with pytest.raises(TypeError, match=rf"^{name} got an unexpected keyword argument 'fused'; .* takes model, mesh, "):
        build(fused=True)


@pytest.mark.parametrize(
    ("optimizer_class", "option"),
    [
        (TritonDistMuon, {"master_weights": "fp32"}),
        (TritonDistMuonAdamW, {"master_weights": "fp32"}),
        (TritonDistMuonAdamW, {"betas": (0.9, 0.95)}),
    ],
)
def test_an_option_of_groups_alone_is_refused_with_where_it_belongs(optimizer_class, option):
    matrix, ((name, value),) = nn.Parameter(torch.ones(3, 4, dtype=torch.bfloat16)), option.items()
    message = f"takes {name} as an option of its groups: write {{'params': ..., '{name}': {value!r}}}"
    with pytest.raises(TypeError, match=re.escape(message)):
        optimizer_class([{"kind": "muon", "params": [matrix]}], **option)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"seed": 1.5, "stochastic_rounding": True}, "seed must be an int, got 1.5"),
        ({"betas": (0.9,)}, r"betas must be a pair, got \(0.9,\)"),
        ({"betas": 0.9}, r"betas must be a pair, got 0.9"),
        ({"betas": (0.9, 1.0)}, r"Invalid beta parameter at index 1: 1.0"),
        ({"betas": (torch.ones(2), 0.9)}, r"Tensor betas\[0\] must be 1-element, got shape \(2,\)"),
        ({"lr": torch.ones(2)}, r"Tensor lr must be 1-element, got shape \(2,\)"),
        ({"lr": -1.0}, r"Invalid learning rate: -1.0"),
        ({"lr": torch.tensor(-1.0)}, r"Invalid learning rate: -1\.0"),
        ({"lr": torch.tensor(float("nan"))}, r"Invalid learning rate: nan"),
        ({"lr": torch.tensor(0.1 + 0j)}, r"lr must be a real number, got torch\.complex64"),
        ({"betas": (0.9, torch.tensor(1.0))}, r"Invalid beta parameter at index 1: 1\.0"),
        ({"eps": -1.0}, r"Invalid epsilon value: -1.0"),
        ({"weight_decay": -1.0}, r"Invalid weight_decay value: -1.0"),
        ({"maximize": "no"}, r"maximize must be True or False, got 'no'"),
        ({"amsgrad": "no"}, r"amsgrad must be True or False, got 'no'"),
        ({"stochastic_rounding": "no"}, r"stochastic_rounding must be True or False, got 'no'"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else None,
)
def test_options_that_no_step_can_take_are_refused(options, match):
    half = nn.Parameter(torch.ones(3, dtype=BF16))
    with pytest.raises(ValueError, match=match):
        TritonDistAdamW([half], **options)
    with pytest.raises(ValueError, match=match):
        TritonDistMuonAdamW([{"kind": "adamw", "params": [half], **options}])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"betas": ("0.9", 0.95)}, r"betas\[0\] must be a number or a 1-element tensor, got '0.9'"),
        ({"lr": "1e-3"}, r"lr must be a number or a 1-element tensor, got '1e-3'"),
        ({"eps": None}, r"eps must be a number or a 1-element tensor, got None"),
        ({"weight_decay": "0.1"}, r"weight_decay must be a number or a 1-element tensor, got '0.1'"),
    ],
    ids=["beta", "lr", "eps", "weight-decay"],
)
def test_hyperparameters_that_are_no_numbers_are_refused(options, match):
    half = nn.Parameter(torch.ones(3, dtype=BF16))
    with pytest.raises(TypeError, match=match):
        TritonDistAdamW([half], **options)
    with pytest.raises(TypeError, match=match):
        TritonDistMuonAdamW([{"kind": "adamw", "params": [half], **options}])


def test_what_cannot_be_stored_is_refused():
    wide, half = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"master_weights='fp32' is for .*, but w is torch.float32"):
        TritonDistAdamW([("w", wide)], master_weights="fp32")
    with pytest.raises(ValueError, match=r"master_weights='split16' is for torch.bfloat16 parameters"):
        TritonDistMuonAdamW([{"kind": "adamw", "params": [half], "master_weights": "split16"}])
    with pytest.raises(ValueError, match=r"master_weights must be None, 'fp32' or 'split16', got 'bf16'"):
        TritonDistAdamW([half], master_weights="bf16")
    for wrong in (
        "int4",
        torch.int8,
        torch.int32,
        (torch.float32,),
        [torch.float32, torch.float32],
        torch.float8_e4m3fn,
    ):
        with pytest.raises(ValueError, match=r"state_dtype must be None, one of .*, a tuple of two such or 'int8'"):
            TritonDistAdamW([wide], state_dtype=wrong)
