"""What is written to parameters between steps is not undone by their fp32 masters, which keep their bits elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from random_tensors import DEVICE
from torch import Tensor, nn

from optim_kernels import TritonAdamW, TritonMuon, TritonMuonAdamW
from optim_kernels._dtensors import local
from optim_kernels.states import FollowedWrites
from optim_utils.testing import run_ranks

pytest.importorskip("triton")

Optimizer = TritonAdamW | TritonMuon | TritonMuonAdamW
Make = Callable[[list[nn.Parameter]], Optimizer]


def adamw(params: list[nn.Parameter], impl: Any = "triton") -> Optimizer:
    return TritonAdamW(params, weight_decay=0.0, master_weights="fp32", impl=impl)


def adamw_by_torch(params: list[nn.Parameter]) -> Any:
    return adamw(params, impl="torch")


def muon(params: list[nn.Parameter]) -> Optimizer:
    return TritonMuon(params, weight_decay=0.0, master_weights="fp32", impl="triton", ns_steps=2)


def both(params: list[nn.Parameter]) -> Any:
    group = {"kind": "muon", "params": params, "weight_decay": 0.0, "master_weights": "fp32"}
    return TritonMuonAdamW([group], impl="torch")


MAKES = pytest.mark.parametrize("make", [adamw, adamw_by_torch, muon, both])


def parameters(count: int = 1, dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(16, 24).to(DEVICE, dtype)) for _ in range(count)]


def master(optimizer: Optimizer, param: Tensor) -> Tensor:
    value: Tensor = optimizer.state[param]["master"]
    return value


def move(optimizer: Optimizer, params: list[nn.Parameter], lr: float = 1e-3) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()


def stay(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    """A step that leaves parameters where they are, whatever there is of them."""
    move(optimizer, params, lr=0.0)


def write(param: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        param.copy_(value)


def by_load_state_dict(param: nn.Parameter, value: Tensor) -> None:
    module = nn.Module()
    module.register_parameter("weight", param)
    module.load_state_dict({"weight": value})


def by_foreach(param: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        torch._foreach_copy_([param], [value])


def by_another_tensor(param: nn.Parameter, value: Tensor) -> None:
    param.data = value.clone()


@pytest.mark.slow
@MAKES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", [write, by_load_state_dict, by_foreach, by_another_tensor])
def test_what_was_written_stays(make: Make, how: Callable[..., None], dtype: torch.dtype) -> None:
    params = parameters(2, dtype)
    optimizer = make(params)
    for _ in range(2):
        move(optimizer, params)
    other, value = params[1].detach().clone(), -params[0].detach()
    bits = master(optimizer, params[1]).clone()
    how(params[0], value)
    stay(optimizer, params)
    assert torch.equal(params[0], value)
    assert torch.equal(master(optimizer, params[0]), value.float())
    assert torch.equal(params[1], other)
    assert torch.equal(master(optimizer, params[1]), bits)


@MAKES
def test_what_was_put_back_keeps_its_bits(make: Make) -> None:
    """An average of the weights takes their place for a while; of a part, what was not written is as it was."""
    (param,) = params = parameters()
    optimizer = make(params)
    for _ in range(3):
        move(optimizer, params)
    bits, kept = master(optimizer, param).clone(), param.detach().clone()
    assert not torch.equal(bits, kept.float())
    write(param, torch.zeros_like(kept))
    write(param, kept)
    stay(optimizer, params)
    assert torch.equal(master(optimizer, param), bits)
    write(param[:4], torch.full_like(kept[:4], 9.0))
    stay(optimizer, params)
    assert torch.equal(master(optimizer, param)[:4], torch.full_like(bits[:4], 9.0))
    assert torch.equal(master(optimizer, param)[4:], bits[4:])


@MAKES
def test_masters_are_followed_by_their_parameters_where_nobody_writes(make: Make) -> None:
    (param,) = params = parameters()
    optimizer = make(params)
    move(optimizer, params)
    for value in (0.5, 2.0):
        master(optimizer, param).fill_(value)
        stay(optimizer, params)
        assert torch.equal(param, torch.full_like(param, value))


@MAKES
def test_a_loaded_master_counts_until_somebody_writes(make: Make) -> None:
    (param,) = params = parameters()
    optimizer = make(params)
    move(optimizer, params)
    saved = copy.deepcopy(optimizer.state_dict())
    bits, then = master(optimizer, param).clone(), param.detach().clone()
    for _ in range(3):
        move(optimizer, params)
    # the state alone, as before; and with its model, in either order
    optimizer.load_state_dict(copy.deepcopy(saved))
    stay(optimizer, params)
    assert torch.equal(param, then)
    assert torch.equal(master(optimizer, param), bits)
    for model_first in (False, True):
        move(optimizer, params)
        if model_first:
            write(param, then)
        optimizer.load_state_dict(copy.deepcopy(saved))
        if not model_first:
            write(param, then)
        stay(optimizer, params)
        assert torch.equal(param, then)
        assert torch.equal(master(optimizer, param), bits)
    # another model than the state's
    optimizer.load_state_dict(copy.deepcopy(saved))
    write(param, torch.ones_like(then))
    stay(optimizer, params)
    assert torch.equal(param, torch.ones_like(then))


@MAKES
def test_a_write_is_remembered_until_the_parameter_is_stepped(make: Make) -> None:
    """By steps in which it has no gradient, by a group that is added, by a state that was refused, and by a copy."""
    params = parameters(2)
    optimizer = make(params)
    move(optimizer, params)
    value = -params[0].detach()
    write(params[0], value)
    params[0].grad = None
    params[1].grad = torch.randn_like(params[1])
    optimizer.step()
    new = parameters()
    optimizer.add_param_group({**optimizer.param_groups[0], "params": new})
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    stay(optimizer, [*params, *new])
    assert torch.equal(params[0], value)
    twin = copy.deepcopy(optimizer)
    own = [p for group in twin.param_groups for p in group["params"]]
    write(own[0], -value)
    stay(twin, own)
    assert torch.equal(own[0], -value)


@MAKES
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "file"])
def test_a_copy_follows_what_was_written_before(make: Make, copied: Callable[[Any], Any]) -> None:
    """Copies had gone on from the masters as they were before that."""
    params = parameters(2)
    optimizer = make(params)
    move(optimizer, params)
    value, bits = -params[0].detach(), master(optimizer, params[1]).clone()
    write(params[0], value)
    own, twin = copied((params, optimizer))
    for ours, each in ((params, optimizer), (own, twin), copied((own, twin))):
        stay(each, ours)
        assert torch.equal(ours[0], value)
        assert torch.equal(master(each, ours[1]), bits)


@MAKES
def test_what_is_saved_are_masters_of_the_parameters_as_they_are_then(make: Make) -> None:
    """Training that went on from a checkpoint had undone what was written before it was saved."""
    params = parameters(2)
    optimizer = make(params)
    move(optimizer, params)
    bits, kept = [master(optimizer, param).clone() for param in params], params[0].detach().clone()
    write(params[0][:4], -kept[:4])
    saved = copy.deepcopy((params, optimizer.state_dict()))
    # nothing has happened to the optimizer
    assert torch.equal(master(optimizer, params[0]), bits[0])
    write(params[0], kept)
    stay(optimizer, params)
    assert torch.equal(master(optimizer, params[0]), bits[0])
    own, state = saved
    resumed = make(own)
    resumed.load_state_dict(state)
    stay(resumed, own)
    assert torch.equal(own[0], torch.cat((-kept[:4], kept[4:])))
    assert torch.equal(master(resumed, own[0])[4:], bits[0][4:])
    assert torch.equal(master(resumed, own[1]), bits[1])


def test_masters_follow_before_a_state_takes_another_form() -> None:
    params = parameters(2)
    of_adamw, of_both = adamw_by_torch(params), both(params)
    for optimizer in (of_adamw, of_both):
        move(optimizer, params)
    write(params[0], -params[0])
    assert set(of_adamw.to_torch_state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    own, state = copy.deepcopy((params, of_both.state_dict(layout="nanochat")))
    resumed = both(own)
    resumed.load_state_dict(state)
    stay(resumed, own)
    assert torch.equal(own[0], params[0])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters:UserWarning")
@pytest.mark.parametrize("make", [adamw_by_torch, both])
def test_what_is_saved_where_a_parameter_is_twice_in_a_group(make: Make) -> None:
    """torch's numbers of the parameters then leave one out."""
    first, second = parameters(2)
    optimizer = make([first, first, second])
    move(optimizer, [first, second])
    masters = [master(optimizer, param).clone() for param in (first, second)]
    with torch.no_grad():
        # out of reach, since a master that rounds to the parameter keeps its digits
        second.fill_(9.0)
    saved = optimizer.state_dict()
    first_number, _, second_number = saved["param_groups"][0]["params"]
    assert torch.equal(saved["state"][first_number]["master"], masters[0])
    assert torch.equal(saved["state"][second_number]["master"], torch.full_like(masters[1], 9.0))


@MAKES
def test_what_a_hook_of_a_save_writes_is_in_the_masters_that_are_saved(make: Make) -> None:
    """As one that puts averaged weights in the parameters' place."""
    params = parameters()
    optimizer = make(params)
    move(optimizer, params)
    value = -params[0].detach()
    optimizer.register_state_dict_pre_hook(lambda _: write(params[0], value))
    assert torch.equal(optimizer.state_dict()["state"][0]["master"], value.float())


@pytest.mark.parametrize("make", [adamw, adamw_by_torch, muon])
def test_parameters_whose_writes_nobody_counts_are_stepped_as_ever(make: Make) -> None:
    with torch.inference_mode():
        params = parameters()
        optimizer = make(params)
        move(optimizer, params)
        before = master(optimizer, params[0]).clone()
        stay(optimizer, params)
        assert torch.equal(master(optimizer, params[0]), before)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [adamw, muon])
def test_a_captured_step_begins_with_what_was_written(make: Make) -> None:
    """A warm-up is undone before the capture."""
    params = parameters(2)
    optimizer = make(params)
    for group in optimizer.param_groups:
        group["capturable"] = True
    before = [param.detach().clone() for param in params]
    for _ in range(3):
        move(optimizer, params)
    for param, value in zip(params, before):
        write(param, value)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(2):
        graph.replay()
    for param, value in zip(params, before):
        assert torch.equal(param, value)
        torch.testing.assert_close(master(optimizer, param), value.float(), rtol=2**-8, atol=0.0)


def test_asking_for_parameters_one_by_one_does_not_look_at_all_of_them_each_time() -> None:
    """As optimizers of many ranks ask: saving took time with the square of the number of parameters."""

    class Counted(list[Tensor]):
        rounds = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.rounds += 1
            return super().__iter__()

    params, writes = Counted(torch.zeros(2) for _ in range(20)), FollowedWrites()
    for _ in range(2):
        writes.note(params)
        params[3].add_(1)
        params.rounds = 0
        assert [p is params[3] for p in [*params] if writes.written([p])] == [True]
        assert params.rounds <= 3
        writes.note_step(params)
        assert not writes.written(params)
        params[5].add_(1)
        assert writes.written([params[5]])


def _write_to_a_dtensor(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    param = nn.Parameter(distribute_tensor(torch.randn(8, 6).bfloat16(), mesh, [Shard(0)]))
    optimizer = TritonAdamW([param], weight_decay=0.0, master_weights="fp32", impl="torch")
    move(optimizer, [param])
    value = -param.detach()
    write(param, value)
    assert torch.equal(local(optimizer.state_dict()["state"][0]["master"]), local(value).float())
    stay(optimizer, [param])
    assert torch.equal(local(param), local(value))
    assert torch.equal(local(master(optimizer, param)), local(value).float())


def test_dtensors_are_followed_shard_by_shard() -> None:
    run_ranks(_write_to_a_dtensor, 2)
