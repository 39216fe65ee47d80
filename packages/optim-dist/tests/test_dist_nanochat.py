"""nanochat's optimizer files, of any number of ranks, go on at any other; what does not fit is refused whole."""

import copy
import io
import os
import shutil

import pytest
import torch
from dist_cases import BACKENDS, assert_equal, assert_same_state, device_of, mesh_of, normal, world_sizes
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint
from optim_utils.param_groups import MatrixView
from optim_utils.testing import run_ranks


class Theirs(torch.optim.Optimizer):
    """What rank r of W ranks of nanochat keeps of the state that one process has after the same steps."""

    def __init__(self, groups, rank, world_size):
        super().__init__(groups, {})
        self.rank, self.world_size = rank, world_size

    def keep(self, whole):
        for group in self.param_groups:
            (self.keep_muon if group["kind"] == "muon" else self.keep_adamw)(group["params"], whole.state)

    def keep_adamw(self, params, whole):
        for p in params:
            if not whole[p]:
                continue  # no gradient
            is_small = p.numel() < 1024
            rows = 0 if is_small else p.shape[0] // self.world_size
            mine = slice(None) if is_small else slice(self.rank * rows, (self.rank + 1) * rows)
            self.state[p]["step"] = int(whole[p]["step"])
            for key in ("exp_avg", "exp_avg_sq"):
                self.state[p][key] = whole[p][key][mine].clone() if p.ndim else whole[p][key].clone()

    def keep_muon(self, params, whole):
        chunk = (len(params) + self.world_size - 1) // self.world_size
        for key in ("momentum_buffer", "second_momentum_buffer"):
            stack = torch.stack([whole[p][key] for p in params])
            padded = torch.zeros(chunk * self.world_size, *stack.shape[1:])
            padded[: len(params)] = stack
            self.state[params[0]][key] = padded[self.rank * chunk : (self.rank + 1) * chunk].clone()


WORLD_SIZES = (1, 2, 4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(64, 20))  # above 1024 elements
        self.small = nn.Parameter(torch.empty(40))
        self.scalar = nn.Parameter(torch.empty(()))
        self.unused = nn.Parameter(torch.empty(64, 32))
        self.tall = nn.ParameterList(torch.empty(8, 6) for _ in range(3))
        self.wide = nn.ParameterList(torch.empty(6, 8) for _ in range(5))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 3, number))


def groups_of(net, lr=0.02):
    """As nanochat lists them."""
    adamw = {"kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    muon = {"kind": "muon", "momentum": 0.9, "ns_steps": 5, "beta2": 0.9, "weight_decay": 0.1}
    listed = [
        {**adamw, "params": [net.embedding, net.unused]},
        {**adamw, "params": [net.small, net.scalar]},
        {**muon, "params": list(net.tall)},
        {**muon, "params": list(net.wide)},
    ]
    return [{**group, "lr": lr * (number + 1), "initial_lr": lr} for number, group in enumerate(listed)]


def step(net, optimizer, number, rank=0):
    """The sum over ranks is the same, however many there are."""
    for place, (name, parameter) in enumerate(net.named_parameters()):
        if name != "unused":
            value = normal(tuple(parameter.shape), 5, number, place).to(parameter.device)
            parameter.grad = value if rank == 0 else torch.zeros_like(value)
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Files of every number of ranks, the whole state, and the parameters one step later."""
    folder = tmp_path_factory.mktemp("nanochat")
    net = Net()
    whole = TritonDistMuonAdamW(groups_of(net), model=net, average=False)
    for number in range(2):
        step(net, whole, number)
    for world_size in WORLD_SIZES:
        (folder / str(world_size)).mkdir()
        for rank in range(world_size):
            theirs = Theirs(groups_of(net), rank, world_size)
            theirs.keep(whole)
            torch.save(theirs.state_dict(), folder / str(world_size) / f"optim_000002_rank{rank}.pt")
    torch.save(net.state_dict(), folder / "model.pt")
    state = copy.deepcopy(whole.full_state_dict())
    step(net, whole, 2)
    return folder, state, [p.detach().clone() for p in net.parameters()]


def files_of(folder, world_size):
    # not in the order of ranks
    return sorted((folder / str(world_size)).glob("*.pt"), reverse=True)


def load_each(rank, world_size, folder, state):
    found = []
    for saved_by in WORLD_SIZES:
        net = Net().to(device_of(rank))
        net.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        optimizer = TritonDistMuonAdamW(groups_of(net, lr=9.0), model=net, average=False, reducer="exact")
        checkpoint.load_nanochat(files_of(folder, saved_by), optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.04, 0.06, 0.08]
        assert [group["initial_lr"] for group in optimizer.param_groups] == [0.02] * 4
        full = optimizer.full_state_dict()
        if rank == 0:
            assert_same_state(full, state)
        step(net, optimizer, 2, rank)
        optimizer.wait()
        found.append([p.detach().cpu().clone() for p in net.parameters()])
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_ranks_goes_on_from_any_other(saved, backend):
    folder, state, later = saved
    for world_size in world_sizes(backend, (1, 2, 3)):
        for found in run_ranks(load_each, world_size, folder, state, backend=backend):
            for saved_by, parameters in zip(WORLD_SIZES, found, strict=True):
                if backend == "gloo":
                    assert_equal(parameters, later, f"{saved_by} to {world_size}")
                for actual, expected in zip(parameters, later, strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)


def load_cut(rank, world_size, folder):
    net = Net()
    for name in ("embedding", "unused"):
        setattr(net, name, nn.Parameter(distribute_tensor(getattr(net, name).data, mesh_of(world_size), [Shard(1)])))
    for part in (net.tall, net.wide):
        for place, p in enumerate(part):
            part[place] = nn.Parameter(distribute_tensor(p.data, mesh_of(world_size), [Shard(0)]))
    optimizer = TritonDistMuonAdamW(groups_of(net))
    checkpoint.load_nanochat(files_of(folder, 4), optimizer)
    return optimizer.full_state_dict()


def test_dtensors_get_their_part(saved):
    folder, state, _ = saved
    assert_same_state(run_ranks(load_cut, 2, folder)[0], state)


def test_the_state_of_one_process_is_the_same_for_load_full_state_dict(saved):
    folder, state, _ = saved
    net = Net()
    found = checkpoint.from_nanochat(map(str, files_of(folder, 8)), groups_of(net))
    assert_same_state(found, state)
    optimizer = TritonDistMuonAdamW(groups_of(net))
    optimizer.load_full_state_dict(found)
    assert_same_state(optimizer.full_state_dict(), state)


def test_ranks_are_ordered_by_number(tmp_path):
    values = normal((24, 50), 4, 4)
    for rank in range(12):
        state = {"step": 3, "exp_avg": values[2 * rank : 2 * rank + 2], "exp_avg_sq": values[2 * rank : 2 * rank + 2]}
        listed = {"params": [0], "kind": "adamw", "lr": 0.1}
        torch.save({"state": {0: state}, "param_groups": [listed]}, tmp_path / f"optim_000003_rank{rank}.pt")
    groups = [{"kind": "adamw", "params": [torch.empty(24, 50)]}]
    former = "optim_000003_rank{}.pt"
    for name in (former, "rank{}_000003.pt", "optim-rank_{}.v2.pt"):
        for rank in range(12):
            (tmp_path / former.format(rank)).rename(tmp_path / name.format(rank))
        former = name
        # as text rank 10 comes before rank 2
        found = checkpoint.from_nanochat(sorted(tmp_path.iterdir()), groups)
        assert torch.equal(found["state"][0]["exp_avg"], values)
        assert found["state"][0]["step"] == 3
    in_order = [(tmp_path / former.format(rank)).rename(tmp_path / f"{rank}.pt") for rank in range(12)]
    found = checkpoint.from_nanochat(in_order, groups)
    assert torch.equal(found["state"][0]["exp_avg"], values)


def change(files, place, edit):
    """The files, one of which was edited and written anew beside them."""
    content = torch.load(files[place], weights_only=True)
    edit(content)
    torch.save(content, files[place])


def other_step(content):
    content["state"][0]["step"] += 1


def other_rows(content):
    content["state"][0]["exp_avg"] = content["state"][0]["exp_avg"][:-1]


def other_replica(content):
    content["state"][2]["exp_avg"] += 1


def no_moment(content):
    del content["state"][0]["exp_avg_sq"]


def no_state(content):
    del content["state"][2]


def other_chunk(content):
    state = content["state"][4]
    state["momentum_buffer"] = state["momentum_buffer"][:1]


def other_second(content):
    content["state"][7]["second_momentum_buffer"] = torch.zeros(3, 6, 1)


def other_members(content):
    content["param_groups"][0]["params"] = [0]


FAULTS = {
    "step": (other_step, "parameter 0 of group 0: steps 2.0, 3.0; give files of one save"),
    "rows": (other_rows, r"parameter 0 of group 0.exp_avg: shape \(32, 20\) and \(31, 20\) of each of 2 ranks"),
    "replica": (other_replica, "parameter 0 of group 1.exp_avg: whole on all 2 ranks, but not the same"),
    "moment": (no_moment, "parameter 0 of group 0: exp_avg_sq of some ranks is missing"),
    "state": (no_state, "parameter 0 of group 1: step, exp_avg, exp_avg_sq of some ranks is missing"),
    "chunk": (other_chunk, r"momentum_buffer has shape \(2, 8, 6\) and \(1, 8, 6\), but 3 matrices over 2 ranks"),
    "second": (other_second, r"second_momentum_buffer has shape \(3, 1, 8\) and \(3, 6, 1\), but 5 matrices"),
    "members": (other_members, "rank 1: param_groups are not those of rank 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_files_that_do_not_fit_are_refused(saved, tmp_path, name):
    edit, expected = FAULTS[name]
    files = [tmp_path / file.name for file in files_of(saved[0], 2)]
    for source, target in zip(files_of(saved[0], 2), files):
        target.write_bytes(source.read_bytes())
    change(files, 0, edit)
    with pytest.raises(checkpoint.CheckpointError, match=expected):
        checkpoint.from_nanochat(files, groups_of(Net()))


def test_everything_that_does_not_fit_is_in_one_error(saved, tmp_path):
    files = [tmp_path / file.name for file in files_of(saved[0], 2)]
    for source, target in zip(files_of(saved[0], 2), files):
        target.write_bytes(source.read_bytes())
    for edit in (other_step, other_replica, other_chunk):
        change(files, 0, edit)
    with pytest.raises(checkpoint.CheckpointError) as raised:
        checkpoint.from_nanochat(files, groups_of(Net()))
    assert len(raised.value.problems) == 3


def test_files_of_some_ranks_are_refused(saved, tmp_path):
    files = sorted(files_of(saved[0], 4))
    for given, expected in (
        ([], "no files were given"),
        (files[:1] + files[2:], r"files of ranks \[0, 2, 3\]; give one of each rank, from 0 on"),
        (files[:3], "the file of every rank"),
        ([*files, files[0]], r"files of ranks \[0, 0, 1, 2, 3\]"),
        ([*files, *files_of(saved[0], 2)], "files of several saves"),
        ([*files[:3], saved[0] / "model.pt"], "files of several saves"),
        ([tmp_path / "optim_000001_rank0.pt"], "No such file"),
        ([saved[0] / "model.pt"], "model.pt has no state_dict"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=expected):
            checkpoint.from_nanochat(given, groups_of(Net()))


def test_damaged_files_are_said_to_be_so(saved, tmp_path):
    content = files_of(saved[0], 1)[0].read_bytes()
    for damaged in (b"", b"text", content[: len(content) // 2]):
        (tmp_path / "optim_000002_rank0.pt").write_bytes(damaged)
        with pytest.raises(checkpoint.CheckpointError, match=r"rank0\.pt: no file of torch\.save, or not all of one"):
            checkpoint.from_nanochat([tmp_path / "optim_000002_rank0.pt"], groups_of(Net()))


def test_one_path_is_no_list_of_files(saved):
    (file,) = files_of(saved[0], 1)
    for given in (file, str(file)):
        with pytest.raises(TypeError, match="files must be a list of the paths of all ranks, got "):
            checkpoint.from_nanochat(given, groups_of(Net()))


def test_other_groups_are_refused(saved):
    files, net = files_of(saved[0], 2), Net()
    groups = groups_of(net)
    with pytest.raises(checkpoint.CheckpointError, match=r"sizes \[2, 2, 3, 5\], this optimizer has \[2, 2, 3\]"):
        checkpoint.from_nanochat(files, groups[:3])
    swapped = [*groups[:2], groups[3], groups[2]]
    with pytest.raises(checkpoint.CheckpointError, match=r"sizes \[2, 2, 3, 5\], this optimizer has \[2, 2, 5, 3\]"):
        checkpoint.from_nanochat(files, swapped)
    groups[1] = {"kind": "muon", "params": [torch.empty(4, 4), torch.empty(4, 4)]}
    with pytest.raises(checkpoint.CheckpointError, match="group 1: kind 'adamw', this optimizer has 'muon'"):
        checkpoint.from_nanochat(files, groups)
    groups[1] = {"kind": "adamw", "params": [torch.empty(41), torch.empty(())]}
    with pytest.raises(checkpoint.CheckpointError, match=r"shape \(40,\) of each of 2 ranks, this run has \(41,\)"):
        checkpoint.from_nanochat(files, groups)
    groups = groups_of(net)
    groups[2]["params"][2] = torch.empty(6, 8)
    with pytest.raises(checkpoint.CheckpointError, match=r"one stack, this run has shapes \(8, 6\) and \(6, 8\)"):
        checkpoint.from_nanochat(files, groups)


def test_matrices_that_were_never_stepped_have_no_state(saved, tmp_path):
    files = [tmp_path / file.name for file in files_of(saved[0], 2)]
    for place, (source, target) in enumerate(zip(files_of(saved[0], 2), files)):
        target.write_bytes(source.read_bytes())
        change(files, place, lambda content: content["state"].pop(4))
    found = checkpoint.from_nanochat(files, groups_of(Net()))["state"]
    expected = checkpoint.from_nanochat(files_of(saved[0], 2), groups_of(Net()))["state"]
    assert set(expected) - set(found) == {4, 5, 6}


def test_second_moments_of_other_matrices_are_refused(saved):
    net = Net()
    groups = groups_of(net)
    groups[2]["views"] = [MatrixView(shape=(8, 6), split=(2, 6))] * 3
    optimizer = TritonDistMuonAdamW(groups)
    with pytest.raises(checkpoint.CheckpointError, match="second_momentum_buffer has shape"):
        checkpoint.load_nanochat(files_of(saved[0], 2), optimizer)


class _Attack:
    def __reduce__(self):
        return (os.mkdir, ("this must not be made",))


def test_pickles_are_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state": {}, "param_groups": [_Attack()]}, tmp_path / "optim_000001_rank0.pt")
    with pytest.raises(checkpoint.CheckpointError, match=r"rank0\.pt: "):
        checkpoint.from_nanochat([tmp_path / "optim_000001_rank0.pt"], groups_of(Net()))
    assert not os.path.exists("this must not be made")


def refuse_on_one_rank(rank, world_size, folder):
    net = Net()
    optimizer = TritonDistMuonAdamW(groups_of(net), model=net, timeout=10)
    texts = []
    for given in ([folder / "none.pt"] if rank else files_of(folder, 2), files_of(folder, 2 + 2 * rank)):
        with pytest.raises(checkpoint.CheckpointError) as raised:
            checkpoint.load_nanochat(given, optimizer)
        texts.append(str(raised.value))
    for given in (None, str(files_of(folder, 2)[0])):
        with pytest.raises(checkpoint.CheckpointError, match="rank 1: TypeError: files must be a list of the paths"):
            checkpoint.load_nanochat(given if rank else files_of(folder, 2), optimizer)
    assert not any(optimizer.state.values())
    assert optimizer.param_groups[0]["lr"] == 0.02
    checkpoint.load_nanochat(files_of(folder, 2), optimizer)
    return texts


def test_what_one_rank_refuses_is_an_error_on_all(saved):
    for missing, different in run_ranks(refuse_on_one_rank, 2, saved[0]):
        assert "none.pt: [Errno 2] No such file" in missing
        assert "ranks were given different files: ['optim_000002_rank0.pt', 'optim_000002_rank1.pt'] and [" in different


def refuse_values(rank, world_size, folder, damaged):
    optimizer = TritonDistMuonAdamW(groups_of(Net()), timeout=10)
    texts = "group 0 cannot be taken over: Invalid beta", "the loaded step of 0.0 must be a number of steps"
    for files, text in zip(damaged, texts, strict=True):
        with pytest.raises(checkpoint.CheckpointError, match=text):
            checkpoint.load_nanochat(files, optimizer)
    assert not any(optimizer.state.values())
    # and the optimizer goes on
    checkpoint.load_nanochat(files_of(folder, 2), optimizer)


def test_values_that_nobody_takes_over_are_refused_before_anything_has_changed(saved, tmp_path):
    """The optimizer was left as after a failure in the middle of a load."""
    damaged = []
    for name, fault in (
        ("betas", lambda content: content["param_groups"][0].update(betas=(1.5, 0.9))),
        ("step", lambda content: content["state"][0].update(step=-3)),
    ):
        shutil.copytree(saved[0] / "2", tmp_path / name)
        damaged.append(sorted((tmp_path / name).glob("*.pt")))
        for place in range(2):
            change(damaged[-1], place, fault)
    run_ranks(refuse_values, 2, saved[0], damaged)


def test_moments_of_16_bits_load(tmp_path):
    parameter = nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16))
    moments = normal((64, 32), 1, 1).square().bfloat16()
    for rank, rows in enumerate(moments.chunk(2)):
        state = {0: {"step": 4, "exp_avg": rows.clone(), "exp_avg_sq": rows.clone()}}
        listed = {"params": [0], "kind": "adamw", "lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0}
        torch.save({"state": state, "param_groups": [listed]}, tmp_path / f"optim_000004_rank{rank}.pt")
    optimizer = TritonDistAdamW([("w", parameter)])
    checkpoint.load_nanochat(tmp_path.iterdir(), optimizer)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    full = optimizer.full_state_dict()["state"][0]
    assert torch.equal(full["exp_avg"].float(), moments.float())
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter]["step"] == 5


def listed_states(rank, world_size, has_own_states):
    """``DistAdamW`` and ``DistMuon`` of before February 2026, as one file lists them: groups of shapes, no kinds."""
    values = {shape: normal((count, *shape), 2, count) for shape, count in (((6, 8), 3), ((8, 6), 2))}
    adamw = {0: {"step": torch.tensor(7), "exp_avg": torch.ones(4, 3), "exp_avg_sq": torch.ones(4, 3)}}
    muon, groups, number = {}, [], 0
    for shape, stack in values.items():
        count = len(stack)
        groups.append({"params": [*range(number, number + count)], "lr": 0.3, "momentum": 0.8})
        if has_own_states:
            groups[-1]["zero_buffer"] = torch.zeros(shape)
            muon |= {number + i: {"momentum_buffer": stack[i]} for i in range(count) if i % world_size == rank}
        else:
            chunk = -(-count // world_size)
            padded = torch.cat([stack, torch.zeros(chunk * world_size - count, *shape)])
            mine = padded[rank * chunk : (rank + 1) * chunk].clone()
            second = mine.square().mean(-1 if shape[0] >= shape[1] else -2, keepdim=True)
            muon[number] = {"momentum_buffer": mine, "second_momentum_buffer": second}
        number += count
    content = [
        {"state": adamw, "param_groups": [{"params": [0], "lr": 0.2, "betas": (0.8, 0.95)}]},
        {"state": muon, "param_groups": groups},
    ]
    return content, values


@pytest.mark.parametrize("has_own_states", [True, False])
def test_two_optimizers_in_a_file(tmp_path, has_own_states):
    for rank in range(2):
        content, values = listed_states(rank, 2, has_own_states)
        torch.save(content, tmp_path / f"optim_000007_rank{rank}.pt")
    # as a model lists them, not by shape
    shapes = [(8, 6), (6, 8), (6, 8), (8, 6), (6, 8)]
    matrices = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    muon = TritonDistMuon(matrices, **({} if has_own_states else {"beta2": 0.95}))
    embedding = nn.Parameter(torch.ones(8, 3))
    adamw = TritonDistAdamW([embedding])
    files = list(tmp_path.iterdir())
    with pytest.raises(checkpoint.CheckpointError, match="has states of 2 optimizers; pass index= of the one to load"):
        checkpoint.load_nanochat(files, muon)
    with pytest.raises(checkpoint.CheckpointError, match="from 0 on, got 2"):
        checkpoint.load_nanochat(files, muon, index=2)
    checkpoint.load_nanochat(files, adamw, index=0)
    checkpoint.load_nanochat(files, muon, index=1)
    assert adamw.state[embedding]["step"] == 7
    assert torch.equal(adamw.state[embedding]["exp_avg"], torch.ones(8, 3))
    assert adamw.param_groups[0]["lr"] == 0.2
    assert (muon.param_groups[0]["lr"], muon.param_groups[0]["momentum"]) == (0.3, 0.8)
    assert "zero_buffer" not in muon.param_groups[0]
    places = dict.fromkeys(values, 0)
    for p, shape in zip(matrices, shapes, strict=True):
        wanted = values[shape][places[shape]]
        places[shape] += 1
        assert torch.equal(muon.state[p]["momentum_buffer"], wanted)
        if not has_own_states:
            second = wanted.square().mean(-1 if shape[0] >= shape[1] else -2, keepdim=True)
            assert torch.equal(muon.state[p]["second_momentum_buffer"], second)
        p.grad = torch.ones_like(p)
    muon.step()
    buffer = io.BytesIO()
    torch.save(muon.state_dict(), buffer)  # its options are plain
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    if has_own_states:
        others = [nn.Parameter(torch.ones(shape)) for shape in [(6, 9)] * 3 + [(8, 6)] * 2]
        with pytest.raises(checkpoint.CheckpointError, match=r"momentum_buffer: shape \(6, 8\), this run has \(6, 9\)"):
            checkpoint.load_nanochat(files, TritonDistMuon(others), index=1)
    (tmp_path / "optim_000007_rank1.pt").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="the file of every rank"):
        checkpoint.load_nanochat([tmp_path / "optim_000007_rank0.pt"], muon, index=1)
