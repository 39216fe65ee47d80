"""States that an optimizer cannot go on with are refused when they are loaded, before anything is written.

Hooks of the user's on ``state_dict()`` and ``load_state_dict()`` have the last word on what is saved, and the first on
what is loaded; other forms of the state know nothing of them.
"""

import copy
import io
import math
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, device_of, mesh_of, normal
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, checkpoint
from optim_utils import attach_state_dict_hooks
from optim_utils.param_groups import MatrixView

scenario = Scenarios()
ROWS, TWICE = [Replicate(), Shard(0)], [Shard(0), Replicate()]
# by what is put into a state or group, what the error says of it
OF_STATES = {
    "sparse": ("exp_avg", lambda value: value.to_sparse(), r"exp_avg of w must be dense numbers"),
    "complex": ("exp_avg", lambda value: value.to(torch.complex64), r"exp_avg of w must be dense numbers"),
    "no tensor": ("exp_avg_sq", lambda value: None, r"exp_avg_sq of w must be a tensor, got a NoneType"),
    "no values": ("exp_avg", lambda value: value.to("meta"), r"exp_avg of w has no values"),
    "several counts": ("step", lambda value: torch.ones(2), r"step of w must be a 0-d tensor that counts steps"),
    "text": ("step", lambda value: "3", r"step of w must be a 0-d tensor that counts steps, got '3'"),
    "no count": ("step", lambda value: torch.tensor(-1.0), r"step of w must be a number of steps, got -1\.0"),
}
OF_GROUPS = {
    "lr": ("1e-3", "lr must be a number or a 1-element tensor, got '1e-3'"),
    "weight_decay": (None, "weight_decay must be a number or a 1-element tensor, got None"),
    "betas": ((0.9,), r"betas must be a pair, got \(0\.9,\)"),
    "maximize": ("no", "maximize must be True or False, got 'no'"),
}
# views of what was saved without, and whether its second moments fit
SPLIT_SINCE = [
    (MatrixView(shape=(24, 16), split=(16, 4, 4)), False),
    (MatrixView(shape=(8, 24), split=(8, 8, 8), split_dim=-1), False),  # as many, but of rows
    (MatrixView(shape=(8, 24), split=(8, 8, 8), split_dim=-1, transposed=True), True),
    (MatrixView(shape=(24, 8), split=(8, 8, 8)), True),
    (MatrixView(shape=(24, 16), transposed=True), True),
]
CLASSES = {
    "AdamW": lambda p: TritonDistAdamW([("w", p)]),
    "Muon": lambda p: TritonDistMuon([("w", p)]),
    "adamw": lambda p: TritonDistMuonAdamW([{"kind": "adamw", "params": [("w", p)]}]),
    "muon": lambda p: TritonDistMuonAdamW([{"kind": "muon", "params": [("w", p)]}]),
}


def stepped(build, p):
    optimizer = build(p)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@scenario(4)
def dtensors_that_lie_otherwise_are_refused(rank, world_size):
    """Also where the local shapes are the same, so that a step would mix up elements."""
    mesh, value = mesh_of(2, 2, names=("a", "b")), normal((8, 8), 5).to(device_of(rank))
    for name in ("AdamW", "Muon"):
        states = {}
        for placements in (ROWS, TWICE, [Replicate(), Replicate()], [Shard(0), Shard(1)]):
            p = nn.Parameter(distribute_tensor(value, mesh, placements))
            states[tuple(placements)] = copy.deepcopy(stepped(CLASSES[name], p).state_dict())
        for wanted in states:
            q = nn.Parameter(distribute_tensor(value, mesh, wanted))
            optimizer = CLASSES[name](q)
            for placements, state in states.items():
                if placements == wanted:
                    continue
                with pytest.raises(ValueError, match=r"to load of w lies as .*, its parameter as .*load any layout"):
                    optimizer.load_state_dict(state)
            assert not any(optimizer.kept_state(shard) for shard in optimizer.shards())
            optimizer.load_state_dict(states[wanted])
        # another mesh that says the same
        again = nn.Parameter(distribute_tensor(value, mesh_of(2, 2, names=("c", "d")), ROWS))
        CLASSES[name](again).load_state_dict(states[tuple(ROWS)])


@scenario(1, 2)
def states_of_another_kind_of_optimizer_are_refused(rank, world_size):
    shape, device = (16, 8), device_of(rank)
    for saved, build in CLASSES.items():
        full = [stepped(build, nn.Parameter(torch.ones(shape, device=device))).full_state_dict()]
        if world_size > 1:
            dist.broadcast_object_list(full, src=0)
        for loading, other in CLASSES.items():
            optimizer = other(nn.Parameter(torch.ones(shape, device=device)))
            if saved.lower() == loading.lower():
                optimizer.load_full_state_dict(full[0])
                continue
            match = r"to load of w has .*, but (AdamW|Muon) needs .*; load the state of|group 0 was saved with kind="
            with pytest.raises(ValueError, match=match):
                optimizer.load_full_state_dict(full[0])


@scenario(1, 2)
def what_no_step_can_go_on_with_is_refused(rank, world_size):
    """Nothing has changed then: state and groups are those from before."""
    device = device_of(rank)
    for name in ("AdamW", "adamw"):
        p = nn.Parameter(torch.ones(16, 8, device=device))
        optimizer = stepped(CLASSES[name], p)
        before = [optimizer.full_state_dict()]
        if world_size > 1:
            dist.broadcast_object_list(before, src=0)

        def check_refused(full, match, optimizer=optimizer, before=before):
            with pytest.raises(ValueError, match=match):
                optimizer.load_full_state_dict(full)
            if world_size == 1:
                with pytest.raises(ValueError, match=match):
                    optimizer.load_state_dict(full)
            after = optimizer.full_state_dict()
            if rank == 0:
                assert str(after) == str(before[0])

        for key, change, message in OF_STATES.values():
            full = copy.deepcopy(before[0])
            full["state"][0][key] = change(full["state"][0][key])
            check_refused(full, f"the loaded {message}")
        for key, (value, message) in OF_GROUPS.items():
            full = copy.deepcopy(before[0])
            full["param_groups"][0][key] = value
            check_refused(full, f"group 0 cannot be taken over: {message}")
        optimizer.load_full_state_dict(before[0])


@scenario(1, 2)
def second_moments_of_other_matrices_are_refused(rank, world_size):
    """Groups without views do not tell how their matrices were read, and the owner's step alone would fail."""

    def build(shape, **options):
        # two of them, so that each of two ranks owns one
        pairs = [(name, nn.Parameter(normal(shape, 1).to(device_of(rank)))) for name in "wu"]
        return TritonDistMuonAdamW([{"kind": "muon", "params": pairs, **options}])

    def step(optimizer):
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for number, (view, fits) in enumerate(SPLIT_SINCE):
            saved, optimizer = build(view.shape), build(view.shape, views=[view, view])
            step(saved)
            full = [saved.full_state_dict()]
            dist.broadcast_object_list(full)
            path = checkpoint.save(Path(folder[0], str(number)), None, saved)
            loads = partial(optimizer.load_full_state_dict, full[0]), partial(checkpoint.load, path, None, optimizer)
            for load in loads:
                if fits:
                    load()
                    continue
                refusal = r"second_momentum_buffer of w has shape .* saved with other views"
                with pytest.raises((ValueError, checkpoint.CheckpointError), match=refusal):
                    load()
                assert not any(optimizer.kept_state(shard) for shard in optimizer.shards())
            step(optimizer)
            optimizer.close()
            # a rank's own file has of what others own neither numbers nor shape
            file, again = io.BytesIO(), build(view.shape)
            torch.save(saved.state_dict(), file)
            file.seek(0)
            again.load_state_dict(torch.load(file, weights_only=True))
            assert equal_state(again, saved)


@scenario(1)
def dtensors_on_one_rank_are_whole(rank, world_size):
    """What was trained under FSDP2 on one rank goes on without it, and the other way round."""

    def parameters():
        value = normal((8, 6), 1).to(device_of(rank))
        return nn.Parameter(distribute_tensor(value, mesh_of(1), [Shard(0)])), nn.Parameter(value.clone())

    def whole(p):
        return p.detach().to_local() if isinstance(p, DTensor) else p.detach()

    for build in CLASSES.values():
        for first, second in (parameters(), parameters()[::-1]):
            optimizer, other = stepped(build, first), build(second)
            whole(second).copy_(whole(first))
            other.load_state_dict(optimizer.state_dict())
            for p, each in ((first, optimizer), (second, other)):
                p.grad = torch.full_like(p, 0.5)
                each.step()
            assert torch.equal(whole(first), whole(second))


@scenario(1, 2)
def clipping_that_a_loaded_state_asks_for_is_not_lost(rank, world_size):
    """Groups of the optimizers for one device have ``max_norm``; here the optimizer has it."""
    device = device_of(rank)
    saved = stepped(CLASSES["AdamW"], nn.Parameter(torch.ones(16, 8, device=device)))
    full = [saved.full_state_dict()]
    if world_size > 1:
        dist.broadcast_object_list(full, src=0)
    full[0]["param_groups"][0]["max_norm"] = saved.param_groups[0]["max_norm"] = 1.0
    folder = [tempfile.mkdtemp()]
    if world_size > 1:
        dist.broadcast_object_list(folder, src=0)
    # as before groups with it were refused
    checkpoint.save(f"{folder[0]}/clipped", None, saved)
    parts = copy.deepcopy(saved.state_dict())

    def loads(optimizer):
        yield lambda: optimizer.load_full_state_dict(full[0])
        yield lambda: optimizer.load_state_dict(parts)
        yield lambda: checkpoint.load(f"{folder[0]}/clipped", None, optimizer)

    for load in loads(CLASSES["AdamW"](nn.Parameter(torch.ones(16, 8, device=device)))):
        with pytest.raises((ValueError, checkpoint.CheckpointError), match=r"group 0 was clipped .* max_norm=1\.0"):
            load()
    clipping = TritonDistAdamW([("w", nn.Parameter(torch.ones(16, 8, device=device)))], max_norm=2.0)
    for load in loads(clipping):
        load()
        assert clipping.param_groups[0].get("max_norm") is None


@scenario(1, 2)
def a_loaded_state_that_nothing_was_clipped_by_is_taken(rank, world_size):
    device = device_of(rank)
    saved = stepped(CLASSES["AdamW"], nn.Parameter(torch.ones(16, 8, device=device)))
    for max_norm in (math.inf, torch.tensor(math.inf)):
        state = copy.deepcopy(saved.state_dict())
        state["param_groups"][0]["max_norm"] = max_norm
        optimizer = CLASSES["AdamW"](nn.Parameter(torch.ones(16, 8, device=device)))
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0].get("max_norm") is None


@scenario(1, 2)
def states_that_are_no_dicts_are_refused(rank, world_size):
    optimizer = CLASSES["AdamW"](nn.Parameter(torch.ones(3, device=device_of(rank))))
    groups = [{"lr": 0.1, "params": [0]}]
    with pytest.raises(ValueError, match=r"the loaded state of w must be a dict, got \[\]"):
        optimizer.load_full_state_dict({"state": {0: []}, "param_groups": groups})


def equal_state(optimizer, other):
    """Whether both have the same whole state of their parameters; asks all ranks."""
    states = [each.full_state_dict().get("state", {}) for each in (optimizer, other)]
    left, right = ({number: sorted(state.items()) for number, state in each.items()} for each in states)
    return str(left) == str(right)


def wrap(optimizer):
    optimizer.register_state_dict_post_hook(lambda _, content: {"optimizer": content})
    optimizer.register_load_state_dict_pre_hook(lambda _, content: content["optimizer"])


@scenario(1, 2)
def hooks_of_the_users_have_the_last_word(rank, world_size):
    saved_by_hook = []
    for name, build in CLASSES.items():
        first, second = (nn.Parameter(torch.ones(16, 8, device=device_of(rank))) for _ in range(2))
        optimizer, other = stepped(build, first), build(second)
        expected = copy.deepcopy(optimizer.state_dict())
        for each in (optimizer, other):
            wrap(each)
            each.register_load_state_dict_post_hook(lambda loaded: saved_by_hook.append(loaded.state_dict()))
        saved = copy.deepcopy(optimizer.state_dict())
        assert saved.keys() == {"optimizer"}, name
        assert str(saved["optimizer"]) == str(expected), name
        other.load_state_dict(saved)
        assert equal_state(other, optimizer), name
        # the state is complete when hooks look at it
        assert str(saved_by_hook.pop()["optimizer"]["state"]) == str(expected["state"]), name
        optimizer.consolidate_state_dict()
        whole = [optimizer.state_dict()]
        dist.broadcast_object_list(whole)
        other.state.clear()
        other.load_state_dict(whole[0])
        assert equal_state(other, optimizer), name


@scenario(1, 2)
def states_of_one_process_are_refused_where_groups_were_listed_otherwise(rank, world_size):
    """Parameters are told apart by their places, and shapes alone need not tell that they are others."""

    def parameters(prefix=""):
        return [(prefix + name, nn.Parameter(normal((4, 4), 1).to(device_of(rank)))) for name in ("a", "b", "c")]

    def saved(groups):
        theirs = torch.optim.AdamW([{"params": group} for group in groups])
        for number, p in enumerate(p for group in theirs.param_groups for p in group["params"]):
            p.grad = torch.full_like(p, number)
        theirs.step()
        return theirs.state_dict()

    def named(state, names):
        """As torch's get_optimizer_state_dict gives a whole state."""
        (group,) = state["param_groups"]
        group = {key: value for key, value in group.items() if key != "param_names"} | {"params": [*names]}
        return {"state": {names[number]: each for number, each in state["state"].items()}, "param_groups": [group]}

    listed = parameters()
    listed[1][1].requires_grad_(False)
    ours = TritonDistAdamW(listed)
    a, b, c = parameters("module.")
    for groups, refusal in (
        ([[a], [b, c]], r"groups of 1, 2 parameters, this optimizer of 3"),
        ([[a, c]], r"groups of 2 parameters, this optimizer of 3 \(those that are frozen included\)"),
        ([[c, b, a]], r"module\.c at place 0, where this optimizer has a: list"),
    ):
        with pytest.raises(ValueError, match=refusal):
            ours.load_full_state_dict(saved(groups))
    assert not any(ours.state.values())
    renamed = [("x", a[1]), ("y", b[1]), ("a", c[1])]
    by_number = [saved([group]) for group in ([a, b, c], [p for _, p in (a, b, c)], renamed)]
    for state in (*by_number, named(by_number[0], "abc"), named(by_number[0], "xya")):
        ours.load_full_state_dict(state)
        found = ours.full_state_dict()
        assert rank or torch.equal(found["state"][2]["exp_avg"], by_number[0]["state"][2]["exp_avg"].cpu())
    with pytest.raises(ValueError, match=r"has c at place 0, where this optimizer has a: list"):
        ours.load_full_state_dict(named(by_number[0], "cba"))
    ours.close()


@scenario(1, 2)
def hooks_of_the_users_do_not_touch_other_forms_of_the_state(rank, world_size):
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for name, attach in product(CLASSES, (wrap, attach_state_dict_hooks)):
            first, second = (nn.Parameter(torch.ones(16, 8, device=device_of(rank))) for _ in range(2))
            optimizer, other = stepped(CLASSES[name], first), CLASSES[name](second)
            attach(optimizer)
            attach(other)
            full = [optimizer.full_state_dict()]
            dist.broadcast_object_list(full)
            other.load_full_state_dict(full[0])
            assert equal_state(other, optimizer), name
            other.state.clear()
            path = checkpoint.save(Path(folder[0], name, attach.__name__), None, optimizer)
            checkpoint.load(path, None, other)
            assert equal_state(other, optimizer), name
            # nor have they gone
            content = copy.deepcopy(optimizer.state_dict())
            assert ("optimizer" in content) is (attach is wrap)
            other.state.clear()
            other.load_state_dict(content)
            assert equal_state(other, optimizer), name


def test_hooks_see_a_loaded_state_as_it_stays():
    """Not as torch has cast it to the parameter's dtype."""
    first, second = (nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16)) for _ in range(2))
    optimizer, other = (TritonDistAdamW([each], state_dtype=torch.float32) for each in (first, second))
    found = []
    other.register_load_state_dict_post_hook(lambda loaded: found.append(loaded.state[second]["exp_avg"].dtype))
    first.grad = torch.ones_like(first)
    optimizer.step()
    other.load_state_dict(optimizer.state_dict())
    assert found == [torch.float32]


@pytest.mark.parametrize("name", CLASSES)
def test_states_with_keys_that_are_no_texts_are_refused_by_name(name):
    optimizer = CLASSES[name](nn.Parameter(torch.ones(16, 8)))
    state = {**optimizer.state_dict(), "state": {0: {3: torch.ones(16, 8), "x": torch.ones(())}}}
    for load in (optimizer.load_state_dict, optimizer.load_full_state_dict):
        with pytest.raises(ValueError, match=r"state to load of w has 3, x, but (AdamW|Muon) needs "):
            load(state)


def test_flat_states_are_told_from_others():
    """As torch's get_optimizer_state_dict gives them with ``flatten_optimizer_state_dict=True``."""
    optimizer = stepped(CLASSES["AdamW"], nn.Parameter(torch.ones(3)))
    flat = {"state.w.step": torch.tensor(1.0), **{f"param_groups.w.{name}": 0.1 for name in ("lr", "eps", "amsgrad")}}
    for load in (optimizer.load_full_state_dict, optimizer.load_state_dict):
        with pytest.raises(ValueError, match=r"lacks 'state' and 'param_groups', and has state\.w\.step, .* 1 more; "):
            load(flat)


@pytest.mark.parametrize("name", ["AdamW", "adamw"])
def test_adams_groups_are_no_adamws(name):
    """They say so by an option, whose decay is part of the gradient; torch's AdamW puts it right in a load."""
    group = {"kind": "adamw", "params": [("w", nn.Parameter(torch.ones(3)))], "decoupled_weight_decay": False}
    with pytest.raises(ValueError, match="decoupled_weight_decay=False, as those of"):
        (TritonDistAdamW if name == "AdamW" else TritonDistMuonAdamW)([group])
    state = stepped(lambda p: torch.optim.Adam([p]), nn.Parameter(torch.ones(3))).state_dict()
    loads = "load_state_dict", "load_full_state_dict"
    for optimizer, load in product((CLASSES[name], lambda p: torch.optim.AdamW([p])), loads):
        made = optimizer(nn.Parameter(torch.ones(3)))
        getattr(made, load, made.load_state_dict)(copy.deepcopy(state))
        assert made.param_groups[0]["decoupled_weight_decay"] is True


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_states_of_other_shapes_are_refused(name):
    optimizer = CLASSES[name](nn.Parameter(torch.ones(3, 4)))
    state = stepped(CLASSES[name], nn.Parameter(torch.ones(4, 3))).state_dict()
    with pytest.raises(ValueError, match=r"to load of w has shape \(4, 3\), its parameter \(3, 4\)"):
        optimizer.load_state_dict(state)
    assert not optimizer.state


@scenario.parametrize()
def test_loaded_states(backend, world_size, name):
    scenario.check(backend, world_size, name)
