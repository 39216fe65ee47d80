"""Checkpoints of DTensors: any layout on any number of ranks loads any other, plain parameters included."""

import json
import time
from math import prod

import pytest
import torch
import torch.distributed as dist
from dist_cases import BACKENDS, assert_equal, assert_same_state, device_of, mesh_of, normal, world_sizes
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from optim_dist import TritonDistAdamW, TritonDistMuonAdamW, checkpoint, elastic
from optim_dist._checkpoint import loading
from optim_dist._checkpoint.rows import row_pieces, rows_of
from optim_dist._reduction.collectives import Communicator
from optim_dist.sharded import flat_start
from optim_utils.testing import RankFailure, run_ranks

PLAIN, FSDP, HSDP, TP, BOTH = "plain", "fsdp", "hsdp", "tp", "fsdp and tp"
FORMS = {1: (PLAIN, FSDP), 2: (FSDP, PLAIN), 3: (FSDP,), 4: (HSDP, TP, BOTH)}


class Model(nn.Module):
    """Matrices, vectors, a scalar, an empty parameter, a frozen one and a buffer; sizes that divide by nothing."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 13, number))

    def forward(self, tokens):
        self.seen += 1
        x = self.embed(tokens)
        x = self.frozen(x + self.down(torch.tanh(self.up(x))))
        return self.head(x).square().mean() * self.scale.sum()


def build(form, variant="nanochat-2026-07", seed=None):
    model = Model().to(device_of(dist.get_rank()))
    if seed is not None:
        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(normal(tuple(parameter.shape), seed, number))
    if form in (TP, BOTH):
        mesh = mesh_of(4, names=("tp",)) if form == TP else mesh_of(2, 2, names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if form == BOTH:
            fully_shard(model, mesh=mesh["dp"])
    elif form == HSDP:
        fully_shard(model, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    elif form == FSDP:
        for part in (model.up, model.down):
            fully_shard(part, mesh=mesh_of(dist.get_world_size()))
        fully_shard(model, mesh=mesh_of(dist.get_world_size()))
    inside = [(name, p) for name, p in model.named_parameters() if name in ("up.weight", "down.weight", "head.weight")]
    others = [(name, p) for name, p in model.named_parameters() if name not in dict(inside)]
    groups = [{"kind": "muon", "params": inside, "impl": "torch"}, {"kind": "adamw", "params": others, "lr": 0.01}]
    return model, TritonDistMuonAdamW(groups, variant=variant, reducer="exact")


def steps(model, optimizer, numbers):
    """The same batch on every rank, so that the number of ranks does not matter."""
    for number in numbers:
        tokens = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(number))
        model(tokens.to(device_of(dist.get_rank()))).backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(model, optimizer):
    state = model.state_dict()
    return {
        "model": {n: (v.full_tensor() if isinstance(v, DTensor) else v).cpu().clone() for n, v in state.items()},
        "state": optimizer.full_state_dict(),
    }


def save_each(rank, world_size, folder):
    saved = {}
    for form in FORMS[world_size]:
        model, optimizer = build(form)
        steps(model, optimizer, range(2))
        checkpoint.save(f"{folder}/{world_size} {form}", model, optimizer, extra={"step": 2})
        saved[form] = everything(model, optimizer)
        steps(model, optimizer, range(2, 4))
        saved[form]["later"] = everything(model, optimizer)
    return saved


def load_each(rank, world_size, folder, names):
    loaded = {}
    for form in FORMS[world_size]:
        for name in names:
            model, optimizer = build(form, seed=99)
            assert checkpoint.load(f"{folder}/{name}", model, optimizer) == {"step": 2}
            loaded[form, name] = everything(model, optimizer)
            # as lies a parameter, so lies its state
            for parameter in filter(lambda p: isinstance(p, DTensor), model.parameters()):
                for key, value in optimizer.state.get(parameter, {}).items():
                    if key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                        assert value.placements == parameter.placements
            if name == f"{world_size} {form}":
                steps(model, optimizer, range(2, 4))
                loaded[form, name]["later"] = everything(model, optimizer)
            else:  # as sums come in another order, the results are others
                steps(model, optimizer, [2])
    return loaded


def load_each_in_parts(*args):
    loading.ROOM = 40  # bytes: of most parameters there are several parts
    return load_each(*args)


def save_all(folder, sizes, backend="gloo"):
    found = {size: run_ranks(save_each, size, str(folder), backend=backend) for size in sizes}
    return {f"{size} {form}": each for size in sizes for form, each in found[size][0].items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, save_all(folder, FORMS)


def assert_everything(actual, expected, what, with_state):
    names = list(expected["model"])
    assert actual["model"].keys() == expected["model"].keys()
    assert_equal([actual["model"][n] for n in names], [expected["model"][n] for n in names], what)
    if with_state:
        assert_same_state(actual["state"], expected["state"])


def check_loads(folder, expected, world_size, backend="gloo", load=load_each):
    ranks = run_ranks(load, world_size, str(folder), list(expected), timeout=300, backend=backend)
    for rank, found in enumerate(ranks):
        for (form, name), loaded in found.items():
            what = f"{name} into {world_size} {form}, rank {rank}"
            assert_everything(loaded, expected[name], what, rank == 0)
            if name == f"{world_size} {form}":
                assert_everything(loaded["later"], expected[name]["later"], what + ", later", rank == 0)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", FORMS)
def test_any_layout_loads_any_other(saved, world_size):
    check_loads(*saved, world_size)


def test_any_layout_loads_another_in_many_parts(tmp_path):
    check_loads(tmp_path, save_all(tmp_path, (2,)), 2, load=load_each_in_parts)


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_any_layout_loads_any_other_on_devices(backend, tmp_path):
    sizes = world_sizes(backend, tuple(FORMS))
    expected = save_all(tmp_path, sizes, backend)
    for world_size in sizes:
        check_loads(tmp_path, expected, world_size, backend)


def evaluate_before(rank, world_size, folder):
    tokens = torch.arange(4)
    model, optimizer = build(FSDP)
    steps(model, optimizer, range(2))
    other, other_optimizer = build(FSDP, seed=99)
    for each in (model, other):
        with torch.no_grad():
            each(tokens)
        assert not isinstance(each.scale, DTensor), "FSDP2 leaves what it has put together"
    checkpoint.save(f"{folder}/evaluated", model, optimizer)
    checkpoint.load(f"{folder}/evaluated", other, other_optimizer)
    with torch.no_grad():
        assert torch.equal(model(tokens), other(tokens))
    assert_everything(everything(other, other_optimizer), everything(model, optimizer), "evaluated", rank == 0)


def test_models_that_were_evaluated_are_saved_and_loaded(tmp_path):
    run_ranks(evaluate_before, 2, str(tmp_path))


def convert_after_building(rank, world_size, folder):
    (model, optimizer), (other, other_optimizer) = build(FSDP), build(FSDP, seed=99)
    model.bfloat16()
    steps(model, optimizer, range(2))
    checkpoint.save(f"{folder}/converted", model, optimizer)
    checkpoint.load(f"{folder}/converted", other.bfloat16(), other_optimizer)
    assert_everything(everything(other, other_optimizer), everything(model, optimizer), "converted", rank == 0)


def test_models_that_got_another_dtype_are_saved_and_loaded(tmp_path):
    run_ranks(convert_after_building, 2, str(tmp_path))


def load_what_does_not_fit(rank, world_size, folder):
    model, _ = build(FSDP)
    before = [parameter.full_tensor() for parameter in model.parameters()]
    groups = [{"kind": "adamw", "params": [(n, p) for n, p in model.named_parameters() if p.requires_grad]}]
    with pytest.raises(checkpoint.CheckpointError, match=r"up\.weight: route muon, this run has adamw"):
        checkpoint.load(f"{folder}/2 fsdp", model, TritonDistMuonAdamW(groups))
    assert_equal([parameter.full_tensor() for parameter in model.parameters()], before, "untouched")


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0, 3), (5, 0), (8, 3), (9, 2, 2), (3, 5)], ids=str)
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 5])
def test_pieces_are_the_rows_of_each_rank(shape, num_ranks):
    ranks = [3 * place + 1 for place in range(num_ranks)]
    layout = rows_of(shape, ranks)
    pieces = {piece.rank: (piece.start, piece.stop) for piece in row_pieces(6, shape, ranks)}
    for place, rank in enumerate(layout.mesh.ranks):
        start, numel = flat_start(layout, shape, rank), prod(layout.local_shape(shape, rank))
        assert pieces.pop(place, (start, start)) == (start, start + numel)
    assert not pieces


def test_a_thousand_ranks_know_their_rows_at_once():
    """What takes the square of the number of ranks, or its cube, for each parameter, takes hours for a model."""
    ranks, shape = list(range(1024)), (4096, 64)
    layout = rows_of(shape, ranks)
    start = time.monotonic()
    for index in range(20):
        pieces = row_pieces(index, shape, ranks)
        assert flat_start(layout, shape, 1000) == pieces[1000].start == 1000 * 4 * 64
    assert time.monotonic() - start < 20


def longest_message(rank, world_size, folder):
    """Of those that this rank sends to all when it saves, in characters."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40)))
    fully_shard(model, mesh=mesh_of(world_size))
    optimizer = TritonDistAdamW(model.named_parameters())
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    sent, gather = [], optimizer.communicator.gather_json
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer.communicator, "gather_json", lambda value: sent.append(value) or gather(value))
        checkpoint.save(f"{folder}/of-{world_size}", model, optimizer)
        optimizer.full_state_dict()
    return max(len(json.dumps(value)) for value in sent)


def messages_of_construction(rank, world_size):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    fully_shard(model, mesh=mesh_of(world_size))
    sent, gather = [], Communicator.gather_json
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "gather_json", lambda self, value: sent.append(value) or gather(self, value))
        TritonDistAdamW(model.named_parameters())
    return json.dumps(sent)


def test_a_mesh_is_told_once_and_not_for_each_parameter():
    for messages in run_ranks(messages_of_construction, 3):
        assert messages.count("[0, 1, 2]") == 1


def test_what_ranks_tell_each_other_of_states_does_not_grow_with_their_number(tmp_path):
    (alone,) = run_ranks(longest_message, 1, str(tmp_path))
    assert max(run_ranks(longest_message, 4, str(tmp_path))) < alone / 4 + 500


def test_what_does_not_fit_is_refused_whole(saved):
    run_ranks(load_what_does_not_fit, 2, str(saved[0]))


TOTAL = 8


def train(run, lost=None):
    """Every rank has the same batch, so that the average over ranks does not depend on their number."""
    model, optimizer = build(FSDP, variant="nanochat-2025")
    numbers = []
    for number in run.steps(model, optimizer, TOTAL):
        if (dist.get_rank(), number) == lost:
            raise RuntimeError("lost")
        steps(model, optimizer, [number])
        numbers.append(number)
    return numbers, everything(model, optimizer)["model"]


def run_elastic(rank, world_size, folder, lost):
    return elastic.run(lambda run: train(run, lost), folder, every=3)


@pytest.mark.slow
def test_training_of_dtensors_goes_on_at_other_numbers_of_ranks(tmp_path):
    expected = run_ranks(run_elastic, 2, str(tmp_path / "whole"), None)
    with pytest.raises(RankFailure, match="lost"):
        run_ranks(run_elastic, 2, str(tmp_path / "cut"), (1, 4))
    with pytest.raises(RankFailure, match="lost"):
        run_ranks(run_elastic, 3, str(tmp_path / "cut"), (0, 7))
    for numbers, model in run_ranks(run_elastic, 4, str(tmp_path / "cut"), None):
        assert numbers == [6, 7]
        for name, value in expected[0][1].items():
            # averages over 2, 3 and 4 ranks of the same numbers differ in the last bits
            torch.testing.assert_close(model[name], value, rtol=1e-4, atol=1e-5)
