"""``torch.distributed.checkpoint`` in and out: any number of ranks to any other, and torch's own optimizers."""

import copy
import io
import traceback
from itertools import product
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dist_cases import BACKENDS, device_of, mesh_of, normal, world_sizes
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint
from optim_dist._optimizers import interchange
from optim_dist._optimizers.state_part import StatePart, boxes
from optim_utils.testing import run_ranks

WORLD_SIZES = (1, 2, 4)


class Net(nn.Module):
    """Shapes that no number of ranks divides, one parameter stored transposed, one of a single element."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.odd = nn.Parameter(torch.zeros(17, 13, 5))
        self.across = nn.Parameter(torch.zeros(40, 30).t())
        self.gain = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 13, number))


def build(kind, net):
    if kind == "adamw":
        return TritonDistAdamW(net.named_parameters(), lr=0.05, amsgrad=True, average=False, bucket_mb=1e-4)
    if kind == "torch":
        return torch.optim.AdamW(net.named_parameters(), lr=0.05, amsgrad=True)
    matrices = [(name, p) for name, p in net.named_parameters() if name.endswith("weight")]
    rest = [(name, p) for name, p in net.named_parameters() if not name.endswith("weight")]
    groups = [{"kind": "muon", "params": matrices, "impl": "torch"}, {"kind": "adamw", "params": rest, "lr": 0.05}]
    return TritonDistMuonAdamW(groups, average=False, bucket_mb=1e-4)


def make(kind, sharded):
    net = Net().to(device_of(dist.get_rank()))
    if sharded:
        # FSDP wants its parameters row by row
        net.across = nn.Parameter(net.across.detach().contiguous())
        fully_shard(net, mesh=mesh_of(dist.get_world_size()))
    return net, build(kind, net)


def train(net, optimizer, steps):
    """The same gradients whatever the number of ranks: sums over ranks are those of the first one."""
    for step in steps:
        for number, parameter in enumerate(net.parameters()):
            gradient = normal(tuple(parameter.shape), 17, number, step).to(parameter.device)
            if isinstance(parameter, DTensor):
                gradient = DTensor.from_local(gradient, parameter.device_mesh).redistribute(
                    placements=parameter.placements
                )
            elif dist.get_rank() and not isinstance(optimizer, torch.optim.AdamW):
                gradient.zero_()
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
        optimizer.step()
        optimizer.zero_grad()


def whole(net):
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    return [value.detach().cpu().clone() for value in found]


def state_of(net, optimizer, flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {"model": get_model_state_dict(net), "optim": get_optimizer_state_dict(net, optimizer, options=options)}


def save(rank, world_size, folder, kind, sharded, flat):
    net, optimizer = make(kind, sharded)
    train(net, optimizer, range(2))
    dcp.save(state_of(net, optimizer, flat), checkpoint_id=folder)
    train(net, optimizer, range(2, 4))
    return whole(net)


def load(rank, world_size, folder, kind, sharded, flat):
    net, optimizer = make(kind, sharded)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(2)
    found = state_of(net, optimizer, flat)
    dcp.load(found, checkpoint_id=folder)
    set_model_state_dict(net, found["model"])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(net, optimizer, found["optim"], options=options)
    train(net, optimizer, range(2, 4))
    return whole(net)


def run_jobs(rank, world_size, jobs):
    """Each job's result, or its traceback."""
    found = []
    for job, *arguments in jobs:
        try:
            found.append(job(rank, world_size, *arguments))
        except Exception:
            found.append(f"{arguments}\n{traceback.format_exc()}")
            break  # the other ranks may have gone on elsewhere
    return found


def run_all(backend, world_size, jobs):
    results = run_ranks(run_jobs, world_size, jobs, backend=backend, timeout=240)
    failed = [f"rank {rank}:\n{each}" for rank, found in enumerate(results) for each in found if isinstance(each, str)]
    assert not failed, "\n".join(failed)
    return results


VARIANTS = [
    (kind, sharded, flat)
    for kind, sharded, flat in product(("adamw", "muon"), (False, True), (False, True))
    # torch flattens groups of a known set of optimizers' keys only where every parameter has them all
    if not (kind == "muon" and flat)
]


def name_of(*what):
    return "-".join(map(str, what))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Of a backend and a number of ranks: each variant's checkpoint, and where training went on to from there."""
    folder = tmp_path_factory.mktemp("dcp")
    continued = {}

    def of(*key):
        backend, size, *_ = key
        if key not in continued:
            variants = [*VARIANTS, ("torch", True, False), ("torch", True, True)]
            jobs = [(save, str(folder / name_of(backend, size, *v)), *v) for v in variants]
            results = run_all(backend, size, jobs)
            continued.update({(backend, size, *v): result for v, result in zip(variants, results[0], strict=True)})
        return str(folder / name_of(*key)), continued[key]

    return of


def check_loads(saved, backend, size, loads, **tolerance):
    """``loads`` are (number of ranks that saved, what they saved, what ``size`` ranks load it into)."""
    jobs, wanted = [], []
    for origin, each, target in loads:
        folder, continued = saved(backend, origin, *each)
        jobs.append((load, folder, *target))
        wanted.append(continued)
    for found in run_all(backend, size, jobs):
        for (origin, each, target), actual, expected in zip(loads, found, wanted, strict=True):
            for left, right in zip(actual, expected, strict=True):
                what = f"{each} of {origin} ranks into {target} of {size}: parameters of shape {tuple(left.shape)}"
                torch.testing.assert_close(left, right, **tolerance, msg=f"{what} went on otherwise")


def loads_of_ours(origins, variants=VARIANTS):
    """In the form in which they were saved (buckets or FSDP2), and in the other one."""
    return [
        (origin, each, (each[0], sharded, each[2])) for origin in origins for each in variants for sharded in (0, 1)
    ]


def loads_of_torchs(origin, flat):
    """``torch.optim.AdamW`` under FSDP2 into ours in both forms, and ours in both forms into torch's."""
    theirs = [(origin, ("torch", True, flat), ("adamw", sharded, flat)) for sharded in (False, True)]
    return theirs + [(origin, ("adamw", sharded, flat), ("torch", True, flat)) for sharded in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_to_more_or_fewer(saved, backend):
    size = 3 if 3 in world_sizes(backend) else 1
    nested = [each for each in VARIANTS if not each[2]]
    check_loads(saved, backend, size, loads_of_ours([2], nested), rtol=0, atol=0)
    check_loads(saved, backend, size, loads_of_torchs(2, flat=True), rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("size", WORLD_SIZES)
def test_every_pair_of_world_sizes(saved, size):
    check_loads(saved, "gloo", size, loads_of_ours(WORLD_SIZES), rtol=0, atol=0)


@pytest.mark.nightly
@pytest.mark.parametrize(("origin", "size"), [(1, 2), (2, 4), (4, 1), (4, 4)])
def test_torchs_adamw_and_ours_load_each_other(saved, origin, size):
    loads = [*loads_of_torchs(origin, flat=False), *loads_of_torchs(origin, flat=True)]
    loads += [(origin, ("adamw", False, flat), ("torch", False, flat)) for flat in (False, True)]
    check_loads(saved, "gloo", size, loads, rtol=1e-5, atol=1e-6)


def save_while_training(rank, world_size, folder, kind):
    """torch's ``async_save`` copies the state before it returns, parts too."""
    net, optimizer = make(kind, sharded=False)
    train(net, optimizer, range(2))
    own_group = dist.new_group(backend="gloo")
    saving = dcp.async_save(state_of(net, optimizer, False), checkpoint_id=folder, process_group=own_group)
    train(net, optimizer, range(2, 4))
    saving.result()
    return whole(net), load(rank, world_size, folder, kind, False, False)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_saving_while_training_goes_on(tmp_path, kind):
    for continued, restored in run_ranks(save_while_training, 2, str(tmp_path / "dcp"), kind):
        assert all(torch.equal(left, right) for left, right in zip(continued, restored, strict=True))


def tiny(rank, world_size, folder):
    """Four ranks of which the first owns everything: torch must not step the others as if they were new."""
    net = nn.Linear(1, 1)
    optimizer = TritonDistAdamW(net.named_parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    found = {"optim": get_optimizer_state_dict(net, optimizer)}
    dcp.save(found, checkpoint_id=folder)
    again = nn.Linear(1, 1)
    restored = TritonDistAdamW(again.named_parameters(), lr=0.3)
    target = {"optim": get_optimizer_state_dict(again, restored)}
    dcp.load(target, checkpoint_id=folder)
    set_optimizer_state_dict(again, restored, target["optim"])
    return restored.full_state_dict(), optimizer.full_state_dict(), restored.param_groups[0]["lr"]


def test_ranks_that_own_nothing(tmp_path):
    restored, wanted, lr = run_ranks(tiny, 4, str(tmp_path / "tiny"))[0]
    assert lr == 0.1
    for number, state in wanted["state"].items():
        assert state["step"] == 1
        for key, value in state.items():
            assert torch.equal(restored["state"][number][key], value)


def show_states_that_were_loaded(rank, world_size):
    weight = nn.Parameter(torch.ones(3))
    optimizer = TritonDistAdamW([("weight", weight)])
    full = [optimizer.full_state_dict()]
    dist.broadcast_object_list(full)
    optimizer.load_full_state_dict(full[0])
    return weight in optimizer.state


def test_ranks_that_own_nothing_show_states_after_a_load():
    """Without any torch takes the optimizer for a new one, and steps it."""
    assert all(run_ranks(show_states_that_were_loaded, 2))


def refusals(rank, world_size, folder):
    net = nn.Linear(40, 40)
    optimizer = TritonDistAdamW(net.named_parameters())
    other = TritonDistAdamW([("weight", nn.Parameter(torch.zeros(40, 40)))], bucket_mb=1e-4)
    part = optimizer.state_dict()["state"][0]["exp_avg"]
    assert isinstance(part, StatePart)
    for operation in (lambda: part + 1, part.sum, lambda: part[0], lambda: part.copy_(torch.zeros(40, 40))):
        with pytest.raises(RuntimeError, match="full_state_dict"):
            operation()
    assert isinstance(part.detach(), StatePart)
    assert isinstance(part.to(torch.float64), StatePart)
    twin = copy.deepcopy(part)
    twin.local.add_(1)
    assert not part.local.any()
    buffer = io.BytesIO()
    torch.save({"part": part}, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=True)["part"]) is torch.Tensor
    theirs = torch.optim.AdamW(net.parameters())
    with pytest.raises(ValueError, match=r"the state of weight is of one process; load_full_state_dict"):
        other.load_state_dict(theirs.state_dict())
    foreign = TritonDistAdamW([("weight", nn.Parameter(torch.zeros(40, 40)))], bucket_mb=1.0).state_dict()
    del foreign["plan"]
    wider = TritonDistAdamW([("a", nn.Parameter(torch.zeros(999))), ("weight", nn.Parameter(torch.zeros(40, 40)))])
    moved = {**wider.state_dict(), "state": {0: foreign["state"][0], 1: foreign["state"][0]}}
    moved.pop("plan")
    with pytest.raises(ValueError, match=r"holds elements \d+-\d+, this rank owns"):
        wider.load_state_dict(moved)
    found = get_optimizer_state_dict(net, optimizer)
    net.bias.requires_grad_(False)  # torch leaves its state out
    with pytest.raises(ValueError, match=r"has nothing of bias, which is frozen: .* freeze them afterwards"):
        set_optimizer_state_dict(net, optimizer, found)
    net.bias.requires_grad_(True)
    set_optimizer_state_dict(net, optimizer, found)


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_ours_may_take_the_place_of_torchs_class(name, monkeypatch):
    """A program may replace the name, so that code that asks for torch's optimizer gets ours."""
    matrix = nn.Parameter(torch.zeros(2, 2))
    torchs_options = getattr(torch.optim, name)([matrix]).param_groups[0].keys()
    interchange._torch_defaults.cache_clear()
    monkeypatch.setattr(torch.optim, name, {"AdamW": TritonDistAdamW, "Muon": TritonDistMuon}[name])
    optimizer = getattr(torch.optim, name)([matrix])
    assert optimizer.state_dict()["param_groups"][0].keys() >= torchs_options


def test_parts_refuse_what_they_cannot_do(tmp_path):
    run_ranks(refusals, 2, str(tmp_path))


SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_are_the_elements_in_order(shape, data):
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    whole = torch.arange(total).view(shape)
    found = list(boxes(shape, start, stop))
    pieces = [whole[tuple(slice(o, o + s) for o, s in zip(*box))].reshape(-1) for box in found]
    assert torch.cat([*pieces, torch.arange(0)]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_boxes_of_the_specification():
    assert list(boxes((7, 11), 5, 30)) == [((0, 5), (1, 6)), ((1, 0), (1, 11)), ((2, 0), (1, 8))]


@given(st.permutations(range(3)), st.tuples(*[st.integers(1, 4)] * 3), st.data())
def test_parts_of_permuted_tensors(order, sizes, data):
    """The pieces of all parts, put into their boxes, are the whole tensor, whatever order it is stored in."""
    stored = torch.arange(float(prod(sizes))).view(sizes).permute(order)
    flat = stored.as_strided((stored.numel(),), (1,))
    cut = data.draw(st.integers(0, stored.numel()))
    rebuilt = torch.full(stored.shape, -1.0)
    for start, stop in ((0, cut), (cut, stored.numel())):
        part = StatePart(flat[start:stop], stored.shape, stored.stride(), start)
        for (offsets, lengths), piece in part.chunks():
            rebuilt[tuple(slice(o, o + n) for o, n in zip(offsets, lengths))] = piece
    assert torch.equal(rebuilt, stored)


def load_steps_that_are_numbers(rank, world_size):
    """As torch before 1.12 saved them; torch's optimizers still load them."""
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    for parameter in (*model.parameters(), *twin.parameters()):
        nn.init.ones_(parameter)
    torchs, ours = torch.optim.AdamW(twin.parameters(), lr=0.01), TritonDistAdamW(model.parameters())

    def step(module, optimizer, gradient):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()

    step(twin, torchs, 1.0)
    saved = torchs.state_dict()
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    model.load_state_dict(twin.state_dict())
    ours.load_full_state_dict(saved)
    full = ours.full_state_dict()
    if rank == 0:
        assert all(torch.equal(state["step"], torch.tensor(1.0)) for state in full["state"].values())
    torchs.load_state_dict(saved)
    step(twin, torchs, 5.0)
    step(model, ours, 5.0)
    ours.wait()
    for mine, theirs in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", (1, 2))
def test_steps_that_are_numbers_are_loaded(world_size):
    run_ranks(load_steps_that_are_numbers, world_size)


def gathered(rank, world_size):
    options = {"state_dtype": torch.float32, "master_weights": "fp32"}
    products = {"ns_dtype": torch.float32, "momentum_dtype": torch.float32, "impl": "torch"}

    def build(kind):
        net = nn.Linear(8, 6, bias=False, device=device_of(rank), dtype=torch.bfloat16)
        with torch.no_grad():
            net.weight.copy_(normal((6, 8), 23))
        fully_shard(net, mesh=mesh_of(world_size))
        if kind == "adamw":
            return net, TritonDistAdamW(net.parameters(), lr=0.01, **options)
        return net, TritonDistMuonAdamW([{"kind": "muon", "params": list(net.parameters()), **products}])

    def step(net, optimizer):
        net.weight.grad = 0.5 * net.weight.detach()
        optimizer.step()

    for kind, gather in product(("adamw", "muon"), ({"full_state_dict": True}, {"cpu_offload": True})):
        how = StateDictOptions(**gather)
        net, optimizer = build(kind)
        step(net, optimizer)
        values = copy.deepcopy(get_model_state_dict(net, options=how))
        saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=how))
        restored, other = build(kind)
        set_model_state_dict(restored, values, options=how)
        set_optimizer_state_dict(restored, other, saved, options=how)
        for option, value in (options if kind == "adamw" else products).items():
            assert other.param_groups[0][option] == value, option
        step(net, optimizer)
        step(restored, other)
        assert torch.equal(restored.weight.to_local(), net.weight.to_local()), (kind, gather)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torch_gathers_states_whose_options_are_dtypes(backend):
    run_ranks(gathered, 2, backend=backend)


def flattened(rank, world_size):
    """Masters of bf16 parameters hold what these cannot; torch takes the keys to load from the optimizer."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    device, dtype = device_of(rank), torch.bfloat16
    for form, fresh in product(("plain", "cut"), (False, True)):

        def build(form=form):
            net = nn.Linear(32, 24, bias=False, device=device, dtype=dtype)
            with torch.no_grad():
                net.weight.copy_(normal((24, 32), 19))
            if form == "cut":
                fully_shard(net, mesh=mesh_of(world_size))
            return net, TritonDistAdamW(net.named_parameters(), lr=0.01, master_weights="fp32", bucket_mb=1e-5)

        def step(net, optimizer):
            net.weight.grad = torch.ones_like(net.weight)
            optimizer.step()
            optimizer.zero_grad()
            found = optimizer.full_state_dict()
            return found["state"][0] if found else {}

        net, optimizer = build()
        step(net, optimizer)
        values, state = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer, options=options)
        again, restored = build()
        set_model_state_dict(again, copy.deepcopy(values))
        if fresh:
            with pytest.raises(
                ValueError, match=r"the state to load of weight is empty.*call get_optimizer_state_dict"
            ):
                set_optimizer_state_dict(again, restored, state, options=options)
            continue
        get_optimizer_state_dict(again, restored, options=options)
        set_optimizer_state_dict(again, restored, copy.deepcopy(state), options=options)
        found, wanted = step(again, restored), step(net, optimizer)
        assert found.keys() == wanted.keys(), form
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), form


@pytest.mark.parametrize("backend", BACKENDS)
def test_flattened_states_bring_masters_back(backend):
    run_ranks(flattened, 2, backend=backend)


def looked_at(rank, world_size, folder):
    """One rank alone asks for ``state_dict()`` before there is a state, of ranks and of what had no gradient yet."""
    for form, first in product(("plain", "cut"), (True, False)):
        mesh, device = mesh_of(world_size), device_of(rank)

        def build(form=form, mesh=mesh, device=device):
            values = [normal(shape, 23).to(device) for shape in ((8, 6), (6, 8), (331,))]
            if form == "cut":
                values = [distribute_tensor(value, mesh, [Shard(0)]) for value in values]
            parameters = [nn.Parameter(value) for value in values]
            groups = [
                {"kind": "muon", "params": parameters[:2], "impl": "torch"},
                {"kind": "adamw", "params": parameters[2:]},
            ]
            return parameters, TritonDistMuonAdamW(groups, bucket_mb=1e-5)

        parameters, optimizer = build()
        if not first:
            parameters[0].grad = torch.ones_like(parameters[0])
            optimizer.step()
            optimizer.zero_grad()
        if rank == 1:
            optimizer.state_dict()
        full = optimizer.full_state_dict()
        where = f"{folder}/{form}-{first}"
        checkpoint.save(where, None, optimizer)
        _, restored = build()
        checkpoint.load(where, None, restored)
        again = restored.full_state_dict()
        assert full.keys() == again.keys()
        for number, state in full.get("state", {}).items():
            assert all(torch.equal(again["state"][number][key], value) for key, value in state.items()), form
        assert not (first and full.get("state"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_rank_may_look_at_its_state(backend, tmp_path):
    run_ranks(looked_at, 2, str(tmp_path), backend=backend)
