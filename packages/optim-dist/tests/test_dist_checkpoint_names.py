"""Models whose state calls parameters otherwise than they do: nothing is saved twice, and wrappers come and go."""

import itertools
import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist_cases import mesh_of, normal
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from optim_dist import TritonDistAdamW, checkpoint
from optim_dist._checkpoint import saving
from optim_utils import CombinedLinear
from optim_utils.testing import run_ranks

# the module that torch.compile() gives, with the same names, but nothing in it is compiled, ever
as_compiled = torch.compiler.disable

# forms of a model: what is around blocks, and around the whole of it
WRAPPERS = {
    "plain": ([], []),
    "wrapped": ([checkpoint_wrapper], []),
    "compiled": ([], [as_compiled]),
    "blocks": ([as_compiled], []),
    "in blocks": ([checkpoint_wrapper, as_compiled], []),
    "around blocks": ([as_compiled, checkpoint_wrapper], []),
    "everywhere": ([checkpoint_wrapper, as_compiled], [checkpoint_wrapper, as_compiled]),
}


def within(wrappers, module):
    for wrapper in wrappers:
        module = wrapper(module)
    return module


def build(form, is_sharded=False, seed=0):
    """Two linear layers around a normalization, perhaps behind wrappers, or one of them in a Linear's form."""
    first, last = nn.Linear(5, 7), nn.Linear(7, 3)
    for number, parameter in enumerate([*first.parameters(), *last.parameters()]):
        with torch.no_grad():
            parameter.copy_(normal(tuple(parameter.shape), seed, number))
    if form == "combined":
        first = CombinedLinear.from_linear(first, checkpoint_format="linear")
    around_blocks, around_model = WRAPPERS.get(form, WRAPPERS["plain"])
    blocks = [within(around_blocks, block) for block in (first, nn.BatchNorm1d(7, affine=False))]
    if is_sharded:
        fully_shard(blocks[0], mesh=mesh_of(dist.get_world_size()))
    model = within(around_model, nn.Sequential(*blocks, last))
    if is_sharded:
        fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    return model, TritonDistAdamW(model.named_parameters(), lr=0.1, model=model)


def values(model):
    model.state_dict()  # waits for gathers in flight
    found = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [value.detach().clone() for value in [*found, *model.buffers()]]


def given_names(names):
    """What versions up to 0.12.8 called parameters and buffers."""
    return {name: name for name in names}


def rest_of_0_12_6(model, optimizer):
    trained = optimizer.trained_ids()
    names = {name for name, p in model.named_parameters() if id(p) in trained}
    return {name: value for name, value in model.state_dict().items() if name not in names}, set(), set(), {}


def check_same(found, expected):
    """Compare states of an optimizer on the rank that has them."""
    for index, entries in (expected or {}).items():
        for key, value in entries.items():
            assert torch.equal(found[index][key], value)


def save(rank, world_size, folder, forms, is_sharded):
    found = {}
    for form in forms:
        model, optimizer = build(form, is_sharded)
        model(normal((4, 5), 9, rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoint.save(f"{folder}/new-{form}", model, optimizer)
        with mock.patch.multiple(saving, rest_of_model=rest_of_0_12_6, plain_names=given_names):
            checkpoint.save(f"{folder}/old-{form}", model, optimizer)
        found[form] = values(model), optimizer.full_state_dict().get("state")
        if form != "combined":  # and a rank's own part fits the same part of any form
            part, other = optimizer.state_dict(), build("plain" if form != "plain" else "compiled", is_sharded)[1]
            other.load_state_dict(part)
            check_same(other.full_state_dict().get("state"), found[form][1])
            if not is_sharded:
                optimizer.load_state_dict({**part, "plan": {**part["plan"], "hash": optimizer.plan.hash}})
    return found


def load(rank, world_size, folder, pairs, is_sharded):
    found = []
    for age, (saved, form) in itertools.product(("new", "old"), pairs):
        model, optimizer = build(form, is_sharded, seed=1)
        checkpoint.load(f"{folder}/{age}-{saved}", model, optimizer)
        found.append((saved, values(model), optimizer.full_state_dict().get("state")))
        # and what was loaded can be trained and saved
        model(normal((4, 5), 9, rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if age == "old":
            checkpoint.save(f"{folder}/{saved}-by-{world_size}-{form}", model, optimizer)
    return found


@pytest.mark.parametrize("is_sharded", [False, True], ids=["buckets", "FSDP2"])
def test_trained_parameters_are_saved_once_whatever_the_state_calls_them(tmp_path, is_sharded):
    forms = ["wrapped", "plain", "combined", "compiled", "in blocks"]
    pairs = [("wrapped", "wrapped"), ("wrapped", "plain"), ("plain", "wrapped"), ("combined", "combined")]
    pairs += [("compiled", "plain"), ("plain", "in blocks"), ("in blocks", "compiled")]
    written = run_ranks(save, 2, str(tmp_path), forms, is_sharded)[0]
    for form in forms:
        rest = torch.load(tmp_path / f"new-{form}" / "common.pt", weights_only=True)["model"]
        assert list(rest) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
        parameters = json.loads((tmp_path / f"new-{form}" / "manifest.json").read_text())["parameters"]
        first = ["0.combined_weight"] if form == "combined" else ["0.weight", "0.bias"]
        assert [entry["name"] for entry in parameters] == [*first, "2.weight", "2.bias"]
    for world_size in (1, 2):
        is_cut = is_sharded and world_size > 1
        loaded = run_ranks(load, world_size, str(tmp_path), pairs, is_cut)[0]
        assert len(loaded) == 2 * len(pairs)
        for form, found, found_state in loaded:
            expected, state = written[form]
            assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))
            check_same(found_state, state)


class Block(nn.Module):
    """Trained and frozen parameters, buffers and an extra state."""

    def __init__(self):
        super().__init__()
        self.trained, self.frozen, self.norm = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), nn.BatchNorm1d(3)
        self.extra = torch.zeros(2)

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def everything_of(model, optimizer):
    """All that a checkpoint holds of them, in an order that no wrapper changes."""
    blocks = [module for module in model.modules() if type(module) is Block]
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters() if p in optimizer.state]
    return [*model.parameters(), *model.buffers(), *(block.extra for block in blocks), *moments]


def build_blocks(form, value=0.0):
    """Two blocks, with each number of a kind of its own from ``value`` on, and an optimizer with a state."""
    around_blocks, around_model = WRAPPERS[form]
    model = within(around_model, nn.Sequential(*(within(around_blocks, Block()) for _ in range(2))))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = TritonDistAdamW(trained)
    for _, parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    with torch.no_grad():
        for number, found in enumerate(everything_of(model, optimizer)):
            found.fill_(value + number)
    return model, optimizer


def test_wrappers_come_and_go_with_all_that_a_checkpoint_holds(tmp_path):
    forms = list(WRAPPERS)
    for number, form in enumerate(forms):
        model, optimizer = build_blocks(form, value=number)
        with mock.patch.object(saving, "plain_names", given_names):
            checkpoint.save(tmp_path / f"old-{form}", model, optimizer)
        if form in ("plain", "around blocks", "everywhere"):
            checkpoint.save(tmp_path / f"new-{form}", model, optimizer)
            parameters = json.loads((tmp_path / f"new-{form}" / "manifest.json").read_text())["parameters"]
            rest = torch.load(tmp_path / f"new-{form}" / "common.pt", weights_only=True)["model"]
            if form == "plain":
                trained = [name for name, p in model.named_parameters() if p.requires_grad]
                frozen = [name for name in model.state_dict() if name not in trained]
            assert ([entry["name"] for entry in parameters], list(rest)) == (trained, frozen)
    pairs = [(f"old-{form}", loads) for form, loads in zip(forms, forms[1:] + forms[:1])]
    for file, form in [*pairs, ("new-plain", "in blocks"), ("new-plain", "everywhere"), ("new-around blocks", "plain")]:
        model, optimizer = build_blocks(form, value=-100.0)
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        checkpoint.load(tmp_path / file, model, optimizer)
        first = forms.index(file[4:])
        for number, found in enumerate(everything_of(model, optimizer)):
            assert (found == first + number).all()
        assert optimizer.param_groups[0]["param_names"] == names


def test_errors_name_parameters_without_wrappers(tmp_path):
    with mock.patch.object(saving, "plain_names", given_names):
        checkpoint.save(tmp_path / "x", *build_blocks("blocks"))
    other, _ = build_blocks("wrapped")
    block = next(module for module in other.modules() if type(module) is Block)
    block.trained.weight = nn.Parameter(torch.zeros(2, 3))
    block.norm.running_mean = torch.zeros(2)
    block.frozen.weight.requires_grad_(True)
    block.norm.bias.requires_grad_(False)
    with pytest.raises(checkpoint.CheckpointError) as raised:
        checkpoint.load(tmp_path / "x", other, TritonDistAdamW([p for p in other.parameters() if p.requires_grad]))
    assert sorted(raised.value.problems) == [
        "0.frozen.weight: frozen in the checkpoint, trained here; load before unfreezing it",
        "0.norm.bias: trained in the checkpoint, frozen here; load before freezing it",
        "0.norm.running_mean: shape (3,), this run has (2,)",
        "0.trained.weight: shape (3, 3), this run has (2, 3)",
    ]


class Twice(nn.Module):
    """Two tensors whose names differ only by the name that a wrapper would give to the module inside."""

    def __init__(self, first, second):
        super().__init__()
        self.table = first
        self._orig_mod = nn.Module()
        self._orig_mod.table = second


TABLES = {
    "trained": nn.Parameter,
    "frozen": lambda table: nn.Parameter(table, requires_grad=False),
    "buffer": nn.Buffer,
}


@pytest.mark.parametrize("kinds", [*itertools.product(TABLES, TABLES)], ids="-".join)
def test_names_that_would_become_one_stay_apart(tmp_path, kinds):
    def made(value, form):
        model = Twice(*(TABLES[kind](torch.full((2,), value + number)) for number, kind in enumerate(kinds)))
        return within(WRAPPERS[form][1], nn.Sequential(nn.Linear(1, 1), model))

    for form in ("plain", "compiled"):
        model = made(1.0, form)
        checkpoint.save(tmp_path / form, model, TritonDistAdamW(p for p in model.parameters() if p.requires_grad))
        model = made(5.0, form)
        checkpoint.load(tmp_path / form, model, TritonDistAdamW(p for p in model.parameters() if p.requires_grad))
        twice = next(module for module in model.modules() if type(module) is Twice)
        assert [twice.table[0].item(), twice._orig_mod.table[0].item()] == [1, 2]
    for form, other in [("plain", "compiled"), ("compiled", "plain")]:
        model = made(5.0, other)
        with pytest.raises(checkpoint.CheckpointError, match=r"1\._orig_mod\.table: "):
            checkpoint.load(tmp_path / form, model, TritonDistAdamW(p for p in model.parameters() if p.requires_grad))


class OwnState(nn.Module):
    def __init__(self, form="plain"):
        super().__init__()
        self.inner = within(WRAPPERS[form][0], nn.BatchNorm1d(3))

    def state_dict(self):
        return super().state_dict()


class UnwrappedState(OwnState):
    def state_dict(self):
        return {name.replace("_orig_mod.", ""): value for name, value in super().state_dict().items()}

    def load_state_dict(self, state, strict=True):
        names = {name.replace("_orig_mod.", ""): name for name in super().state_dict()}
        return super().load_state_dict({names[name]: value for name, value in state.items()}, strict)


@pytest.mark.parametrize("own", [OwnState, UnwrappedState])
@pytest.mark.parametrize(
    ("form", "loads"), [("plain", "plain"), ("blocks", "wrapped"), ("in blocks", "plain"), ("plain", "around blocks")]
)
def test_a_state_dict_without_arguments_is_asked_without_them(tmp_path, own, form, loads):
    saved, other = own(form), own(loads)
    with torch.no_grad():
        for value in saved.state_dict().values():
            value.add_(3)
    checkpoint.save(tmp_path / "x", saved, TritonDistAdamW(saved.named_parameters()))
    assert len(torch.load(tmp_path / "x" / "common.pt", weights_only=True)["model"]) == 3
    checkpoint.load(tmp_path / "x", other, TritonDistAdamW(other.named_parameters()))
    for value, expected in zip(other.state_dict().values(), saved.state_dict().values(), strict=True):
        assert torch.equal(value, expected)


def test_what_is_frozen_on_one_side_alone_is_refused_behind_wrappers_too(tmp_path):
    for number, (saved, loading) in enumerate([("wrapped", "plain"), ("plain", "wrapped"), ("wrapped", "wrapped")]):
        for was_frozen in (True, False):
            path = tmp_path / f"{number}-{was_frozen}"
            model = build(saved)[0]
            model[0].requires_grad_(not was_frozen)
            checkpoint.save(path, model, TritonDistAdamW(model.named_parameters()))
            other = build(loading)[0]
            other[0].requires_grad_(was_frozen)
            before = values(other)
            with pytest.raises(checkpoint.CheckpointError, match="weight"):
                checkpoint.load(path, other, TritonDistAdamW(other.named_parameters()))
            assert all(torch.equal(left, right) for left, right in zip(values(other), before, strict=True))


class InTenths(nn.Linear):
    """Keeps a buffer in tenths since version 2 of its state's form, and converts those of version 1."""

    _version = 2

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("seen", torch.zeros(2))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}seen"] = state_dict[f"{prefix}seen"] * 10
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


@pytest.mark.parametrize("loaded", WRAPPERS)
@pytest.mark.parametrize("saved", WRAPPERS)
def test_modules_are_told_in_which_form_their_state_was_saved(tmp_path, saved, loaded):
    def build_within(form, seen):
        around_blocks, around_model = WRAPPERS[form]
        inner = InTenths()
        inner.seen.fill_(seen)
        block = within(around_blocks, inner)
        model = within(around_model, nn.Sequential(block, block))  # whose state is under two names
        return inner, model, TritonDistAdamW(model.named_parameters())

    for version, expected in ((1, 30.0), (2, 3.0)):
        with mock.patch.object(InTenths, "_version", version):
            checkpoint.save(tmp_path / f"{version}", *build_within(saved, seen=3.0)[1:])
        inner, *run = build_within(loaded, seen=0.0)
        checkpoint.load(tmp_path / f"{version}", *run)
        assert inner.seen.tolist() == [expected] * 2


class WithoutForms(nn.Linear):
    """Whose own ``state_dict`` has torch's attribute for forms, but nothing in it."""

    def state_dict(self, *arguments, **options):
        state = super().state_dict(*arguments, **options)
        state._metadata = None
        return state


def test_a_model_may_know_nothing_of_forms(tmp_path):
    saved, loaded = WithoutForms(3, 3), WithoutForms(3, 3)
    checkpoint.save(tmp_path / "step", saved, TritonDistAdamW(saved.named_parameters()))
    checkpoint.load(tmp_path / "step", loaded, TritonDistAdamW(loaded.named_parameters()))
    assert torch.equal(loaded.weight, saved.weight)
