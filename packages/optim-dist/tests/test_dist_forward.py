"""Gathers that run into the next forward pass: no parameter is read before its gather is finished.

Gathers are made late: what arrives is held back until somebody waits, so that a read without a wait sees old values and
training differs from that with ``overlap=False``. All scenarios run in one launch of ranks.
"""

import copy
import gc
import pickle
import sys
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch
from dist_cases import Scenarios, device_of, normal
from dist_loops import delay_gathers
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from optim_dist import TritonDistAdamW, TritonDistMuonAdamW
from optim_dist._reduction.compiled import inside_regions
from optim_dist._reduction.storage import ParameterBucket

scenario = Scenarios()


class Block(nn.Module):
    """A linear layer by its forward, and the projection of an attention, which torch uses without its forward."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x + self.attention(x, x, x, need_weights=False)[0]))


class Net(nn.Module):
    def __init__(self, device, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.5 * normal(tuple(parameter.shape), 31, number))
        self.to(device)

    def forward(self, tokens):
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight).square().mean()  # tied


def tokens(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, 9, (2, 4), generator=generator).to(device_of(rank))


def optimizer_of(net, **options):
    return TritonDistAdamW(net.named_parameters(), lr=0.1, model=net, reducer="exact", bucket_mb=2e-4, **options)


def losses(rank, net, optimizer, run=None, steps=4, between=lambda step: None):
    found = []
    for step in range(steps):
        loss = (net if run is None else run)(tokens(rank, step))
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        between(step)
    return found


def expected(rank, **options):
    net = Net(device_of(rank))
    return losses(rank, net, optimizer_of(net, overlap=False, **options))


@scenario(2)
def training_never_sees_old_values(rank, world_size):
    for options in ({}, {"accumulation_steps": 1}):
        net = Net(device_of(rank))
        optimizer = optimizer_of(net, **options)
        delay_gathers(optimizer)
        in_flight = []

        def note(step, optimizer=optimizer, in_flight=in_flight):
            in_flight.append(sum(bucket.gathering is not None for bucket in optimizer._bucketed.buckets))

        assert losses(rank, net, optimizer, between=note) == expected(rank)
        assert all(number > 0 for number in in_flight), "nothing ran into the next forward pass"
        # the projections of the attentions lie in some of the buckets
        assert 0 < in_flight[-1] < len(optimizer._bucketed.buckets)
        phase = optimizer.explain().data["phases"]["gather under forward"]
        assert "on: modules wait" in phase
        assert "without their module's forward" in phase


def _with_hooks_that_read_parameters(device):
    """Weights that pre-hooks of their modules make: a spectral norm and pruning."""
    net = Net(device)
    torch.manual_seed(0)  # of the first singular vectors
    nn.utils.spectral_norm(net.blocks[0].linear)
    for block in net.blocks[1:]:
        prune.l1_unstructured(block.linear, "weight", 0.3)
    return net


@scenario(2)
def hooks_of_modules_read_parameters_that_have_arrived(rank, world_size):
    net, twin = (_with_hooks_that_read_parameters(device_of(rank)) for _ in range(2))
    optimizer = optimizer_of(net)
    delay_gathers(optimizer)
    assert losses(rank, net, optimizer) == losses(rank, twin, optimizer_of(twin, overlap=False))


@scenario(2)
def the_fault_that_is_injected_is_seen(rank, world_size):
    """Without hooks late gathers do make a difference: the test above can fail."""
    net = Net(device_of(rank))
    optimizer = optimizer_of(net)
    delay_gathers(optimizer)
    for handle in optimizer._bucketed._gathers._handles:
        handle.remove()
    optimizer._bucketed._gathers.check = lambda: None
    assert losses(rank, net, optimizer) != expected(rank)


class Early(nn.Module):
    """A model that may use the weight of its last module before that module runs."""

    def __init__(self, device, reads=lambda net, x: F.linear(x, net.head.weight)):
        super().__init__()
        self.body, self.head, self.reads = nn.Linear(6, 6), nn.Linear(6, 6), reads
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.5 * normal(tuple(parameter.shape), 32, number))
        self.to(device)

    def forward(self, x):
        return self.head(torch.tanh(self.body(self.reads(self, x)))).square().mean()


def early_losses(rank, net, optimizer, steps=4, between=lambda step: None):
    found = []
    for step in range(steps):
        between(step)
        loss = net(normal((4, 6), 33, 10 * step + rank).to(device_of(rank)))
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def early_optimizer(net, **options):
    return TritonDistAdamW(net.named_parameters(), lr=0.1, model=net, reducer="exact", bucket_mb=1e-4, **options)


class _ByWeight(nn.Module):
    """Holds a module of whose weight it makes use itself."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return F.linear(x, self.inner.weight)


READ_EARLY = r"head.weight has been read before the forward pass of its module.*prefetch"


@scenario(2)
def a_parameter_that_is_read_before_its_module_is_found_by_debugging(rank, world_size):
    net = Early(device_of(rank))
    right = early_losses(rank, net, early_optimizer(net, overlap=False))
    net = Early(device_of(rank))
    optimizer = early_optimizer(net)
    delay_gathers(optimizer)
    assert early_losses(rank, net, optimizer) != right
    net = Early(device_of(rank))
    optimizer = early_optimizer(net, debug=True)
    with pytest.raises(RuntimeError, match=READ_EARLY):
        early_losses(rank, net, optimizer)


@scenario(2)
def a_parameter_that_is_read_early_from_some_step_on_is_found(rank, world_size):
    net = Early(device_of(rank), reads=_as_it_is)
    optimizer = early_optimizer(net, debug=True)
    early_losses(rank, net, optimizer, steps=2)
    net.reads = lambda net, x: F.linear(x, weight=net.head.weight.T)
    with pytest.raises(RuntimeError, match=READ_EARLY):
        early_losses(rank, net, optimizer, steps=1)
    # nothing is watched after the error
    assert not torch.overrides._get_current_function_mode_stack()
    # prefetched, it may be read
    net.reads = lambda net, x: optimizer.prefetch(net.head) or F.linear(x, net.head.weight)
    early_losses(rank, net, optimizer, steps=2)


@scenario(2)
def what_is_prefetched_or_used_without_its_module_is_no_early_read(rank, world_size):
    net = Early(device_of(rank))
    optimizer = early_optimizer(net, debug=True)
    net.reads = lambda net, x: optimizer.prefetch(net.head) or F.linear(x, net.head.weight)
    early_losses(rank, net, optimizer)
    net = Net(device_of(rank))
    optimizer = optimizer_of(net, debug=True)
    assert losses(rank, net, optimizer) == expected(rank)
    assert "without their module's forward" in optimizer.explain().data["phases"]["gather under forward"]


@scenario(2)
def a_module_that_runs_without_gradients_first_reads_nothing_early(rank, world_size):
    def reentrant(net, x):
        return checkpoint(net.inner, x.requires_grad_(), use_reentrant=True)

    def as_target(net, x):
        with torch.no_grad():
            target = net.inner(x)
        return net.inner(x) - target

    def by_weight(net, x):
        with torch.no_grad():
            return net.target(x)

    for reads in (reentrant, as_target, by_weight):
        net, twin = (Early(device_of(rank), reads) for _ in range(2))
        for each in (net, twin):
            each.inner = nn.Linear(6, 6).to(device_of(rank))
            nn.init.eye_(each.inner.weight)
            each.inner.bias.data.zero_()
            each.target = _ByWeight(each.head)
        right = early_losses(rank, twin, early_optimizer(twin, overlap=False))
        optimizer = early_optimizer(net, debug=True)
        assert early_losses(rank, net, optimizer) == right
        # an evaluation in between hides nothing
        with torch.no_grad():
            net(normal((4, 6), 36, rank).to(device_of(rank)))
        net.reads = lambda net, x: F.linear(x, net.head.weight)
        with pytest.raises(RuntimeError, match=READ_EARLY):
            net(normal((4, 6), 36, rank).to(device_of(rank)))


@scenario(2)
def the_form_of_a_parameter_may_be_asked_for_while_it_is_gathered(rank, world_size):
    def reads(net, x):
        weight = net.head.weight
        assert weight.shape == (6, weight.size(1))
        assert weight.requires_grad
        assert weight.is_contiguous()
        return x.to(weight.dtype).to(weight.device)

    net = Early(device_of(rank), reads)
    optimizer = early_optimizer(net, debug=True)
    early_losses(rank, net, optimizer)
    with torch.no_grad():
        net.reads = lambda net, x: F.linear(x, net.head.weight.T)
        net(normal((4, 6), 34, rank).to(device_of(rank)))


@scenario(2)
def a_model_that_is_watched_is_copied(rank, world_size):
    net = Early(device_of(rank), reads=_as_it_is)
    optimizer = early_optimizer(net, debug=True)
    early_losses(rank, net, optimizer, steps=1)
    twin = copy.deepcopy(net)
    optimizer.wait()
    again = pickle.loads(pickle.dumps(net))
    x = normal((4, 6), 35, rank).to(device_of(rank))
    for other in (twin, again):
        other.reads = lambda net, x: F.linear(x, net.head.weight)
        other(x).backward()
        assert not torch.overrides._get_current_function_mode_stack()


def _as_it_is(net, x):
    return x


@scenario(2)
def gathers_follow_the_order_of_forward(rank, world_size):
    net = Net(device_of(rank))
    optimizer = optimizer_of(net, accumulation_steps=1)
    order = []
    gather = optimizer.communicator.all_gather_
    starts = {b.values.data_ptr(): min(m.index for m in b.members) for b in optimizer._bucketed.buckets}

    def noted(flat):
        order.append(starts.get(flat.data_ptr()))
        return gather(flat)

    optimizer.communicator.all_gather_ = noted
    losses(rank, net, optimizer, steps=1)
    gathered = [start for start in order if start is not None]
    assert len(gathered) > 3
    assert gathered == sorted(gathered)


@scenario(2)
def evaluation_and_state_wait(rank, world_size):
    net = Net(device_of(rank))
    optimizer = optimizer_of(net)
    delay_gathers(optimizer)
    twin = Net(device_of(rank))
    twin_optimizer = optimizer_of(twin, overlap=False)
    for step in range(3):
        losses(rank, net, optimizer, steps=1)
        losses(rank, twin, twin_optimizer, steps=1)
        if step == 0:
            with torch.no_grad():
                # the weight of the last linear layer without its module, behind the forward of another
                found = [F.linear(m.embed(tokens(rank, 9)), m.blocks[2].linear.weight) for m in (net, twin)]
        elif step == 1:
            found = [m.blocks[2].linear.state_dict()["weight"] for m in (net, twin)]
        else:
            optimizer.wait()
            found = [m.blocks[2].linear.weight for m in (net, twin)]
        assert torch.equal(*found)


@scenario(2)
def an_evaluation_may_read_parameters_before_any_module_that_holds_them(rank, world_size):
    net, twin = (Early(device_of(rank), reads=_as_it_is) for _ in range(2))
    optimizer = early_optimizer(net)
    delay_gathers(optimizer)
    x = normal((4, 6), 37, rank).to(device_of(rank))
    early_losses(rank, net, optimizer)
    early_losses(rank, twin, early_optimizer(twin, overlap=False))
    for each in (net, twin):
        each.reads = lambda net, x: F.linear(x, net.head.weight)
    with torch.no_grad():
        assert torch.equal(net(x), twin(x))


@scenario(2)
def loading_is_not_overwritten_by_a_gather(rank, world_size):
    net, other = Net(device_of(rank)), Net(device_of(rank))
    optimizer = optimizer_of(net)
    delay_gathers(optimizer)
    losses(rank, net, optimizer, steps=2)
    saved = {key: value.clone() for key, value in other.state_dict().items()}
    net.load_state_dict(saved)
    optimizer.wait()
    for key, value in net.state_dict().items():
        assert torch.equal(value, saved[key])


class Late(nn.Module):
    """From the second step on a weight is used without its module."""

    def __init__(self, device):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20, bias=False), nn.Linear(20, 20, bias=False)
        self.to(device)

    def forward(self, x, functional):
        x = self.first(x)
        return (F.linear(x, self.second.weight) if functional else self.second(x)).sum()


@scenario(2)
def a_use_that_turns_up_late_is_an_error(rank, world_size):
    net = Late(device_of(rank))
    optimizer = TritonDistAdamW(net.named_parameters(), model=net, bucket_mb=1e-4)
    x = torch.ones(1, 20, device=device_of(rank))
    net(x, False).backward()
    optimizer.step()
    optimizer.zero_grad()
    net(x, True).backward()
    with pytest.raises(RuntimeError, match=r"second\.weight was used outside the forward pass of its module.*wait\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    # now it is known; or the caller waits
    net(x, False).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.wait()
    net(x, True).backward()
    optimizer.step()


@scenario(2)
def an_evaluation_before_training_does_not_hide_a_use(rank, world_size):
    net = Late(device_of(rank))
    optimizer = TritonDistAdamW(net.named_parameters(), model=net, bucket_mb=1e-4)
    twin = Late(device_of(rank))
    twin.load_state_dict(net.state_dict())
    plain = TritonDistAdamW(twin.named_parameters(), overlap=False)
    delay_gathers(optimizer)
    x = torch.ones(1, 20, device=device_of(rank))
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(net(x, False), twin(x, False))
        for model, its in ((net, optimizer), (twin, plain)):
            model(x, True).backward()
            its.step()
            its.zero_grad()


@scenario(2)
def what_no_module_holds_may_be_used_from_some_step_on(rank, world_size):
    net = Late(device_of(rank))
    scale = nn.Parameter(torch.ones(20, device=device_of(rank)))
    optimizer = TritonDistAdamW([*net.named_parameters(), ("scale", scale)], model=net, bucket_mb=1e-4)
    delay_gathers(optimizer)
    x = torch.ones(1, 20, device=device_of(rank))
    for step in range(4):
        (net(x, False) + (scale.sum() if step > 1 else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # two steps of Adam's with equal gradients
    expected = torch.ones(20, device=device_of(rank))
    for _ in range(2):
        expected = expected * (1 - 1e-3 * 1e-2) - 1e-3
    torch.testing.assert_close(scale.detach(), expected)


@scenario(2)
def a_model_whose_optimizer_is_gone_is_whole(rank, world_size):
    """Where parameters are read at once, without any forward pass that could wait."""
    net, twin = (Net(device_of(rank)) for _ in range(2))
    optimizer = optimizer_of(net)
    delay_gathers(optimizer)
    losses(rank, net, optimizer, steps=2)
    losses(rank, twin, optimizer_of(twin, overlap=False), steps=2)
    assert any(bucket.gathering is not None for bucket in optimizer._bucketed.buckets)
    del optimizer
    gc.collect()
    for (name, found), wanted in zip(net.named_parameters(), twin.parameters()):
        assert torch.equal(found, wanted), name
    assert torch.equal(net(tokens(rank, 0)), twin(tokens(rank, 0)))


@scenario(2)
def prefetch_waits_for_one_module(rank, world_size):
    net = Net(device_of(rank))
    optimizer = optimizer_of(net)
    delay_gathers(optimizer)
    twin = Net(device_of(rank))
    losses(rank, net, optimizer, steps=2)
    losses(rank, twin, optimizer_of(twin, overlap=False), steps=2)
    assert net.blocks[1].linear.weight.data_ptr() in {
        m.address for b in optimizer._bucketed.buckets if b.gathering is not None for m in b.members
    }
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer.prefetch(net.blocks[1].linear)
    here = {id(m.parameter) for b in optimizer._bucketed.buckets if b.gathering is None for m in b.members}
    found, late = dict(net.named_parameters()), 0
    for name, wanted in twin.named_parameters():
        if id(found[name]) in here:
            assert torch.equal(found[name], wanted), name
        late += id(found[name]) not in here and torch.equal(found[name], before[name])
    assert {"blocks.1.linear.weight", "blocks.1.linear.bias"} <= {n for n, p in found.items() if id(p) in here}
    assert late > 0
    # it may be used without its module's forward from now on, in this step
    linear = net.blocks[1].linear
    for step, is_announced in enumerate((True, True, False)):
        if is_announced:
            optimizer.prefetch(linear)
        F.linear(net.embed(tokens(rank, step)), linear.weight, linear.bias).square().mean().backward()
        if is_announced:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match=r"outside the forward pass of its module.*call prefetch\(module\)"):
                optimizer.step()
        optimizer.zero_grad()


@scenario(1, 2)
def prefetch_of_what_is_not_in_flight_does_nothing(rank, world_size):
    net = Net(device_of(rank))
    optimizer = TritonDistAdamW(net.named_parameters())
    losses(rank, net, optimizer, steps=1)
    optimizer.prefetch(net)
    optimizer.prefetch(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"prefetch takes a module, got Parameter; wait\(\) is for all"):
        optimizer.prefetch(net.scale)


@scenario(2)
def compiled_before_the_first_step(rank, world_size):
    how = {"backend": "eager", "fullgraph": True}
    for options, compiled in product(({}, {"debug": True}), ("model", "model in place", "blocks")):
        torch._dynamo.reset()
        net = Net(device_of(rank))
        if compiled == "blocks":
            net.blocks = nn.ModuleList(torch.compile(block, **how) for block in net.blocks)
        elif compiled == "model in place":
            net.compile(**how)
        optimizer = optimizer_of(net, **options)
        delay_gathers(optimizer)
        called = torch.compile(net, **how) if compiled == "model" else net
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert losses(rank, net, optimizer, called) == expected(rank), compiled


@scenario(2)
def originals_of_compiled_modules_wait_when_they_are_evaluated(rank, world_size):
    found = []
    for compiled in ("model", "block"):
        torch._dynamo.reset()
        net, twin = Net(device_of(rank)), Net(device_of(rank))
        block, model = net.blocks[1], net
        if compiled == "block":
            net.blocks[1] = torch.compile(block, backend="eager")
        else:
            model = torch.compile(net, backend="eager")
        optimizer, twin_optimizer = optimizer_of(model), optimizer_of(twin, overlap=False)
        delay_gathers(optimizer)
        x = torch.ones(2, 4, 6, device=device_of(rank))
        calls = [(block, twin.blocks[1], x), (block.linear, twin.blocks[1].linear, x)]
        calls += [(net, twin, tokens(rank, 9))] if compiled == "model" else []
        for original, other, given in calls:
            losses(rank, model, optimizer, steps=2)
            losses(rank, twin, twin_optimizer, steps=2)
            assert optimizer._bucketed._gathers.in_flight
            with torch.no_grad():
                found.append(torch.equal(original(given), other(given)))
    assert all(found), found


@scenario(2)
def compiled_in_place_without_a_break(rank, world_size):
    for options in ({"accumulation_steps": 1}, {"debug": True}):
        for is_first in (True, False):
            torch._dynamo.reset()
            net = Net(device_of(rank))
            for block in net.blocks if is_first else ():
                block.compile(backend="eager", fullgraph=True)
            optimizer = optimizer_of(net, **options)
            delay_gathers(optimizer)
            for block in () if is_first else net.blocks:
                block.compile(backend="eager", fullgraph=True)
            # equal blocks are compiled once
            with torch._dynamo.config.patch(error_on_recompile=True):
                assert losses(rank, net, optimizer) == expected(rank)
            if is_first:
                x = torch.ones(2, 4, 6, device=device_of(rank))
                assert optimizer._bucketed._gathers.in_flight == ("debug" not in options)
                with torch.no_grad():
                    evaluated = net.blocks[0](x)  # is whole, too, whatever else is in flight
                optimizer.wait()
                assert torch.equal(pickle.loads(pickle.dumps(net)).blocks[0](x), evaluated)


@scenario(2)
def compiled_after_the_first_step(rank, world_size):
    torch._dynamo.reset()
    net = Net(device_of(rank))
    optimizer = optimizer_of(net)
    delay_gathers(optimizer)
    found = losses(rank, net, optimizer, steps=2)
    called = torch.compile(net, backend="eager")
    for step in range(2, 4):
        loss = called(tokens(rank, step))
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found == expected(rank)


@scenario(1, 2)
def steps_inside_of_compiled_regions_are_not_compiled(rank, world_size):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, examples):
        graphs.append(graph)
        return graph

    net, twin = Net(device_of(rank)), Net(device_of(rank))
    optimizer, twin_optimizer = optimizer_of(net), optimizer_of(twin)

    def update():
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(update, backend=backend)
    for step in range(3):
        net(tokens(rank, step)).backward()
        compiled()
        twin(tokens(rank, step)).backward()
        twin_optimizer.clip_grad_norm_(0.1)
        twin_optimizer.step()
        twin_optimizer.zero_grad()
    assert not graphs
    twin.state_dict()
    for name, value in net.state_dict().items():
        assert torch.equal(value, twin.get_parameter(name))


@scenario(2)
def closing_removes_the_hooks(rank, world_size):
    net = Net(device_of(rank))
    optimizer = optimizer_of(net)
    losses(rank, net, optimizer, steps=2)
    optimizer.close()
    for module in net.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_pre_hooks


@scenario(2)
def copies_of_a_model_are_new_and_wait_for_nothing(rank, world_size):
    net = Net(device_of(rank))
    optimizer = optimizer_of(net)
    before = copy.deepcopy(net)
    delay_gathers(optimizer)
    losses(rank, net, optimizer, steps=2)
    assert optimizer._bucketed._gathers.in_flight
    after = copy.deepcopy(net)
    losses(rank, net, optimizer, steps=1)
    averaged = AveragedModel(net).module
    losses(rank, net, optimizer, steps=1)
    with pytest.raises(RuntimeError, match="wait"):
        pickle.dumps(net)
    optimizer.wait()
    assert b"optim_dist" not in pickle.dumps(net)
    assert b"optim_dist" not in pickle.dumps(after)
    unpickled = pickle.loads(pickle.dumps(net))
    reference = Net(device_of(rank))
    reference_optimizer = optimizer_of(reference, overlap=False)
    for copied, steps in ((before, 0), (after, 2), (averaged, 1), (unpickled, 1)):
        losses(rank, reference, reference_optimizer, steps=steps)
        assert_same_parameters(copied, reference)
        hooks = [hook for module in copied.modules() for hook in module._forward_pre_hooks.values()]
        assert hooks
        assert all(not getattr(getattr(hook, "func", hook).__self__, "_buckets", ()) for hook in hooks)
        copied(tokens(rank, 0)).backward()
        assert not optimizer._bucketed.reduction.has_gradients


def assert_same_parameters(left, right):
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


@scenario(2)
def groups_added_later_and_muon(rank, world_size):
    def run(**options):
        net = Net(device_of(rank))
        inside = [p for p in net.blocks.parameters() if p.ndim == 2]
        rest = [p for p in net.blocks.parameters() if p.ndim == 1]
        groups = [{"kind": "muon", "params": inside}, {"kind": "adamw", "params": rest, "lr": 0.1}]
        optimizer = TritonDistMuonAdamW(groups, model=net, reducer="exact", bucket_mb=2e-4, **options)
        if not options:
            delay_gathers(optimizer)
        net.embed.requires_grad_(False)
        net.scale.requires_grad_(False)
        found = losses(rank, net, optimizer, steps=2)
        net.scale.requires_grad_(True)
        optimizer.add_param_group({"kind": "adamw", "params": [net.scale], "lr": 0.1})
        return found + losses(rank, net, optimizer, steps=2)

    assert run() == run(overlap=False)


class Stream:
    """A stream that notes what it waits for; so does the event that it records."""

    def __init__(self):
        self.behind = []

    def wait_event(self, event):
        self.behind += event.behind


class Event:
    def record(self, stream):
        self.behind, self.is_over = list(stream.behind), False

    def query(self):
        return self.is_over


def test_each_stream_waits_for_a_gather(monkeypatch):
    """Stand-ins for streams: that one of them has waited says nothing of the others."""
    streams = [Stream() for _ in range(4)]
    now = {"stream": streams[0], "captures": False}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now["stream"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["captures"])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    bucket = ParameterBucket(plan=None, rank=0, values=SimpleNamespace(is_cuda=True, device="cuda:0"), members=[])

    def finish(stream, captures=False):
        now.update(stream=stream, captures=captures)
        bucket.finish_gathering()

    for name in ("first", "second"):
        for stream in streams:
            stream.behind.clear()
        bucket.gathering = SimpleNamespace(wait=lambda name=name: now["stream"].behind.append(name))
        finish(streams[0])
        finish(streams[1])
        finish(streams[2], captures=True)
        assert bucket.gathered is not None
        bucket.gathered.is_over = True
        finish(streams[3])
        assert [stream.behind for stream in streams] == [[name], [name], [], []]
        assert bucket.gathered is None


@pytest.mark.gpu
def test_two_streams_wait_for_a_gather():
    bucket = ParameterBucket(plan=None, rank=0, values=torch.zeros(1000, device="cuda"), members=[])

    class Late:
        def wait(self):
            torch.cuda._sleep(200_000_000)
            bucket.values.fill_(1.0)

    torch.cuda.synchronize()
    bucket.gathering = Late()
    with torch.cuda.stream(torch.cuda.Stream()):
        bucket.finish_gathering()
    bucket.finish_gathering()
    assert bucket.values.sum().item() == 1000
    bucket.finish_gathering()
    assert bucket.gathered is None


@scenario.parametrize()
def test_forward(backend, world_size, name):
    scenario.check(backend, world_size, name)


def test_a_thread_that_imports_dynamo_disturbs_no_other(monkeypatch):
    # as it is while the import goes on
    monkeypatch.setitem(sys.modules, "torch._dynamo", ModuleType("torch._dynamo"))
    assert not inside_regions(nn.Sequential(nn.Linear(2, 2)))
