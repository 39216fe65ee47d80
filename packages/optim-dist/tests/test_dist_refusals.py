"""What no optimizer is built over, and which parameters no step takes: an error on every rank, with what to do.

All scenarios of a backend run in one launch of ranks, each with its own optimizer; a test looks at what its scenario
raised.
"""

import copy
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, device_of, mesh_of
from dist_loops import Net, assert_same, batch, build, values
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.two_tensor import TwoTensor

from optim_dist import Options, TritonDistAdamW, TritonDistMuon
from optim_dist._optimizers import before_building, parameter_checks
from optim_dist._optimizers.layouts import local

scenario = Scenarios()


@scenario(2)
def parameters_are_those_of_the_first_rank(rank, world_size):
    parameter = nn.Parameter(torch.full((5,), float(rank), device=device_of(rank)))
    with pytest.raises(RuntimeError, match="parameters differ from rank 0"):
        TritonDistAdamW([("w", parameter)], sync_params="check")
    TritonDistAdamW([("w", parameter)])
    assert torch.equal(parameter, torch.zeros_like(parameter))


@scenario(2)
def unequal_parameter_lists_are_refused_on_every_rank(rank, world_size):
    shapes = [(3,), (4,) if rank == 0 else (5,), (6,)]
    named = [(f"w{i}", nn.Parameter(torch.ones(shape, device=device_of(rank)))) for i, shape in enumerate(shapes)]
    with pytest.raises(RuntimeError, match=r"number 1: rank 0 has w1 \(4,\).*rank 1 has w1 \(5,\)"):
        TritonDistAdamW(named)


@scenario(2)
def what_alone_tells_parameters_of_two_ranks_apart_is_named(rank, world_size):
    square, mesh = torch.ones(4, 4, device=device_of(rank)), mesh_of(world_size)
    across, rows, columns = square.t(), *(distribute_tensor(square, mesh, [Shard(dim)]) for dim in (0, 1))
    for of_value, first, second, here, there in (
        (adamw_over, square, across, "strides (4, 1)", "strides (1, 4)"),
        (adamw_over, rows, columns, "a DTensor, S(0) over 2 ranks", "a DTensor, S(1) over 2 ranks"),
        (muon_over, None, 2, "read as it is", "read as (2, 2, 4)"),
    ):
        pattern = rf"rank 0 has w \(4, 4\).*, {re.escape(here)}\), rank 1 has w \(4, 4\).*, {re.escape(there)}\)"
        with pytest.raises(RuntimeError, match=pattern):
            of_value(second if rank else first)


def adamw_over(value, **options):
    return TritonDistAdamW([("w", nn.Parameter(value))], **options)


def muon_over(split_rows):
    w = nn.Parameter(torch.ones(4, 4, device=device_of(dist.get_rank())))
    return TritonDistMuon([{"params": [("w", w)], "split_rows": split_rows}])


@scenario(2)
def hyperparameters_in_tensors_are_compared_to_their_last_digit(rank, world_size):
    device = device_of(rank)
    parameter, betas = nn.Parameter(torch.ones(3, device=device)), torch.tensor([0.9, 0.9 + 1e-6 * rank], device=device)
    with pytest.raises(RuntimeError, match=r"betas of group 0 is \(0\.8999\d*, 0\.8999\d*\) on rank 0, \(0\.8999"):
        TritonDistAdamW([parameter], betas=tuple(betas))
    # tensors on a device of each rank's own are the same numbers
    TritonDistAdamW([parameter], betas=(betas[0], betas[0].clone()))


@scenario(2)
def what_one_rank_finds_wrong_with_dtensors_is_an_error_on_all(rank, world_size):
    """The others would wait for it until the timeout."""
    square, mesh = torch.ones(4, 4, device=device_of(rank)), mesh_of(world_size)
    whole, rows, columns = (distribute_tensor(square, mesh, [each]) for each in (Replicate(), Shard(0), Shard(1)))
    for first, second, options, refused in (
        (square, whole, {}, "w: a DTensor on rank 1, a plain tensor on rank 0; call fully_shard or parallelize_module"),
        (rows, square, {}, "w: a DTensor on rank 0, a plain tensor on rank 1; call fully_shard or parallelize_module"),
        (rows, columns, {"stochastic_rounding": True}, "numbers elements row by row, but w is cut otherwise"),
    ):
        with pytest.raises(ValueError, match=refused):
            adamw_over(second if rank else first, **options)


@scenario(2)
def unequal_options_are_refused_on_every_rank(rank, world_size):
    parameter = nn.Parameter(torch.ones(3, device=device_of(rank)))
    for name, first, second in (
        ("average", True, False),
        ("reducer", "rs", "exact"),
        ("reduce_dtype", None, torch.bfloat16),
        ("bucket_mb", 1.0, 2.0),
    ):
        with pytest.raises(RuntimeError, match=f"{name} is {first} on rank 0, {second} on rank 1"):
            TritonDistAdamW([parameter], **{name: second if rank else first})


@scenario(3)
def ranks_of_a_part_of_the_world_are_named_as_the_world_does(rank, world_size):
    """As errors that a rank has alone name them, and torchrun's logs."""
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    first, second = (nn.Parameter(torch.full((n,), float(rank), device=device_of(rank))) for n in (3, rank))
    for given, options, refused in (
        (first, {"average": rank == 1}, "average is True on rank 1, False on rank 2"),
        (first, {"lr": 0.1 * rank}, r"lr of group 0 is 0\.1 on rank 1, 0\.2 on rank 2"),
        (second, {}, r"rank 1 has w \(1,\).*rank 2 has w \(2,\)"),
        (first, {"sync_params": "check"}, r"differ from rank 1's: w \(rank 2\)"),
    ):
        with pytest.raises(RuntimeError, match=refused):
            TritonDistAdamW([("w", given)], process_group=group, **options)


@scenario(2)
def unequal_hyperparameters_are_refused_on_every_rank(rank, world_size):
    parameter = nn.Parameter(torch.ones(3, device=device_of(rank)))
    for name, first, second in (
        ("lr", 0.1, 0.2),
        ("lr", torch.tensor(0.5), torch.tensor(0.25)),
        ("betas", (0.9, 0.99), (0.9, 0.95)),
        ("betas", [0.9, 0.99], [0.9, 0.95]),
        ("amsgrad", True, False),
    ):
        with pytest.raises(RuntimeError, match=f"different options: {name} of group 0 is .* on rank 0, .* on rank 1"):
            TritonDistAdamW([parameter], **{name: second if rank else first})
    optimizer = TritonDistAdamW([parameter])
    with pytest.raises(RuntimeError, match=r"weight_decay of group 1 is 0\.0 on rank 0, 1\.0 on rank 1"):
        optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(2, device=device_of(rank)))], "weight_decay": float(rank)}
        )
    # what is no plain value looks different on every rank
    TritonDistAdamW([{"params": [parameter], "notes": [object()], "more": (object(),)}]).close()
    with pytest.raises(RuntimeError, match="note of group 1 is not given on rank 0, x on rank 1"):
        optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(2, device=device_of(rank)))], **({"note": "x"} if rank else {})}
        )
    assert len(optimizer.param_groups) == 1


@scenario(2)
def parameters_of_fsdp1_are_refused(rank, world_size):
    device = device_of(rank)
    for use_orig_params in (False, True):
        linear = nn.Linear(8, 8, bias=False).to(device)
        model = FullyShardedDataParallel(linear, use_orig_params=use_orig_params, device_id=device)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises(ValueError, match=r"0\.0: a parameter of FullyShardedDataParallel.*use fully_shard"):
            TritonDistAdamW(model.parameters())
        assert_same(list(model.parameters()), before)


@scenario(2)
def whole_parameters_that_fsdp2_has_put_in_place_of_cut_ones_are_refused(rank, world_size):
    """Their gradients go to the cut ones, so that an optimizer would step neither."""
    mesh = mesh_of(1, 2, names=("data", "tensor"))
    for are_dtensors in (False, True):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device_of(rank))
        if are_dtensors:
            parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"] if are_dtensors else mesh["tensor"])
        optimizer = TritonDistAdamW([("first", net[0].weight)])
        with torch.no_grad():
            net(torch.ones(2, 4, device=device_of(rank)))  # FSDP2 cuts the root again only in backward
        assert isinstance(net[1].weight, DTensor) is are_dtensors
        words = "a parameter that FSDP2 has put in place of the one that is trained, .* call reshard"
        with pytest.raises(ValueError, match=rf"1\.weight: {words}"):
            TritonDistAdamW(net.named_parameters())
        with pytest.raises(ValueError, match=f"second: {words}"):
            optimizer.add_param_group({"params": [("second", net[1].weight)]})
        net.reshard()
        optimizer.add_param_group({"params": [("second", net[1].weight)]})
        TritonDistAdamW(net.named_parameters())


@scenario(4)
def parameters_that_fsdp2_has_cut_otherwise_for_backward_are_refused(rank, world_size):
    """They are replicas on pairs of ranks; their gradients go to the ones that it cuts over all four."""
    mesh = mesh_of(4)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device_of(rank))
    for module in (*net, net):
        fully_shard(module, mesh=mesh, reshard_after_forward=2)
    with torch.no_grad():
        net(torch.ones(2, 4, device=device_of(rank)))
    assert net[0].weight.device_mesh.shape == (2, 2)
    with pytest.raises(ValueError, match=r"0\.weight: a parameter that FSDP2 has put in place of .* call reshard"):
        TritonDistAdamW(net.named_parameters())
    for module in net:
        module.reshard()
    TritonDistAdamW(net.named_parameters())


@scenario(2)
def what_has_no_place_in_a_bucket_is_refused(rank, world_size):
    device = device_of(rank)
    one = nn.Parameter(torch.ones(4, 4, device=device))
    overlapping = nn.Parameter(one.data[1:])
    expanded = nn.Parameter(torch.ones(1, device=device).expand(3))
    complex_valued = nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))
    with pytest.raises(ValueError, match="overlap in memory"):
        TritonDistAdamW([("a", one), ("b", overlapping)])
    with pytest.raises(ValueError, match="a: two parameters have this name"):
        TritonDistAdamW([{"params": [("a", nn.Parameter(one.detach().clone()))]}, {"params": [("a", one)]}])
    with pytest.raises(ValueError, match="leave gaps or overlap"):
        TritonDistAdamW([("a", expanded)])
    with pytest.raises(ValueError, match="only dense real"):
        TritonDistAdamW([("a", complex_valued)])
    codes = nn.Parameter(torch.ones(2, device=device).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"a: torch\.float8_e4m3fn, but parameters are updated in one of .*; freeze"):
        TritonDistAdamW([("a", codes)])
    with pytest.raises(ValueError, match=r"0\.weight: its shape is not known yet; run its lazy module first"):
        TritonDistAdamW(nn.Sequential(nn.LazyLinear(2, device=device)).named_parameters())
    with pytest.raises(ValueError, match="give it to AdamW"):
        TritonDistMuon([("bias", nn.Parameter(torch.ones(3, device=device)))])
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to(device))
    with pytest.raises(ValueError, match="reduced twice"):
        TritonDistAdamW(wrapped.parameters(), model=wrapped)


@scenario(1, 2)
def what_has_no_memory_that_could_lie_in_a_bucket_is_refused(rank, world_size):
    """As torchao's tensors, which a step of several ranks would never write to."""
    for options in ({}, {"reducer": "exact", "gradients": "streamed", "order": "tree", "accumulation_steps": 1}):
        half = torch.ones(4, device=device_of(rank))
        wrapper = nn.Parameter(TwoTensor(half, half.clone()))
        if world_size == 1 and not options:
            TritonDistAdamW([("wrapper", wrapper)], lr=0.5, weight_decay=0.0)
            continue
        with pytest.raises(ValueError, match=r"wrapper: a TwoTensor, which has no memory of its own.*fully_shard"):
            TritonDistAdamW([("wrapper", wrapper)], **options)


@scenario(2)
def meshes_that_do_not_say_which_ranks_share_are_refused(rank, world_size):
    parameter, mesh = nn.Parameter(torch.ones(3, device=device_of(rank))), mesh_of(2)
    with pytest.raises(ValueError, match="give mesh or process_group, not both"):
        TritonDistAdamW([parameter], mesh=mesh, process_group=mesh.get_group())
    with pytest.raises(ValueError, match=r"one dimension, or two \(replicate, shard\), got 3; pass mesh\['dp'\]"):
        TritonDistAdamW([parameter], mesh=mesh_of(1, 1, 2))
    TritonDistAdamW([parameter], mesh=mesh)


@scenario(2)
def parameters_where_the_group_has_no_collectives_are_refused(rank, world_size):
    there = nn.Parameter(torch.ones(3, device=device_of(rank)))
    nowhere = nn.Parameter(torch.ones(3, device="meta"))
    advice = r"move the model to (cpu|cuda), by to_empty\(\), and give it numbers before"
    with pytest.raises(ValueError, match=f"no collectives for parameters on meta; {advice}"):
        TritonDistAdamW([nowhere])
    with pytest.raises((ValueError, RuntimeError), match="no collectives for parameters on meta"):
        TritonDistAdamW([nowhere if rank else there])
    # of a mesh the dimension that has several ranks is asked
    with pytest.raises(ValueError, match="no collectives for parameters on meta; move the model to c"):
        TritonDistAdamW([nowhere], mesh=mesh_of(1, 2))
    # behind one that the group has collectives for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameter_checks, "device_types", lambda group: ["tpu"])
        with pytest.raises(ValueError, match=f"b: on {there.device}, for which the process group has no collectives"):
            TritonDistAdamW([("b", there)])
    with pytest.raises(ValueError, match="1: on meta, and what gives it numbers makes another parameter of it"):
        TritonDistAdamW([there, nowhere])
    # without a parameter from whose device one could tell
    with pytest.raises(ValueError, match="empty parameter list"):
        TritonDistAdamW(iter(()))


@scenario(2)
def ranks_with_parameters_on_other_devices_are_refused(rank, world_size):
    """As where one has not moved its model, and the group has collectives for both: they meet all the same."""
    there, nowhere = (nn.Parameter(torch.ones(3, device=device)) for device in (device_of(rank), "meta"))
    kind = there.device.type
    for its, on_one in (([nowhere], "meta"), ([{"params": []}], "not given")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(before_building, "device_types", lambda group: [kind, "meta"])
            refused = f"different options: the device of parameters is {kind} on rank 0, {on_one} on rank 1"
            with pytest.raises(RuntimeError, match=refused):
                TritonDistAdamW(its if rank else [there])


def test_parameters_without_numbers_are_refused_on_one_rank_too():
    with pytest.raises(ValueError, match="weight: on meta, and what gives it numbers makes another parameter of it"):
        TritonDistAdamW(nn.Linear(2, 2, device="meta").named_parameters())


@pytest.mark.parametrize(("device", "world_size", "options", "fault"), [
    ("cuda:0", 2, {}, ""),
    ("cuda:1", 2, {}, "where others are on cuda:0; move them to one device"),
    ("cuda:1", 2, {"transport": "symm"}, "where others are on cuda:0; transport='symm'"),
    ("cpu", 2, {}, ""),
    ("cpu", 2, {"transport": "symm"}, "where others are on cuda:0; transport='symm'"),
    ("cuda:1", 1, {"transport": "symm"}, ""),
], ids=str)  # fmt: skip
def test_what_a_bucket_would_take_to_another_device_is_refused(device, world_size, options, fault):
    parameter = SimpleNamespace(device=torch.device(device), is_meta=False)
    ranks = SimpleNamespace(device=torch.device("cuda:0"), world_size=world_size)
    said = parameter_checks._device_fault(parameter, ranks, Options(**options), [["cpu", "cuda"]])
    assert said.startswith(fault)
    assert bool(said) == bool(fault)


@scenario(2)
def parameters_on_several_gpus_of_one_rank_are_refused(rank, world_size):
    if not torch.cuda.is_available():
        return
    parameters = [nn.Parameter(torch.ones(3, device=f"cuda:{number}")) for number in (rank, 1 - rank)]
    with pytest.raises(ValueError, match=r"0\.1: on cuda:1, where others are on cuda:0; move them to one device"):
        TritonDistAdamW(parameters)
    optimizer = TritonDistAdamW(parameters[:1])
    with pytest.raises(ValueError, match=r"1\.0: on cuda:1, where others are on cuda:0; move them to one device"):
        optimizer.add_param_group({"params": parameters[1:]})


@scenario(2)
def who_is_not_in_the_group_is_told_so(rank, world_size):
    group = dist.new_group([0])
    if rank:
        with pytest.raises(ValueError, match="this rank is not a member of the optimizer's process group"):
            TritonDistAdamW([nn.Parameter(torch.ones(3, device=device_of(rank)))], process_group=group)


@scenario(2)
def a_parameter_that_left_its_bucket_is_refused(rank, world_size):
    net, optimizer = build(rank)
    net.layers[1].weight.data = net.layers[1].weight.data.clone()
    net(batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight is no longer a view of its bucket"):
        optimizer.step()


@scenario(1, 2)
def a_parameter_that_takes_the_place_of_another_is_refused(rank, world_size):
    """With ``model=``; it would never be stepped, and nobody would notice."""

    def assign(net):
        net.load_state_dict({name: value.clone() for name, value in net.state_dict().items()}, assign=True)

    def exchange_one(net):
        net.layers[0].bias = nn.Parameter(torch.zeros_like(net.layers[0].bias))

    def exchange_module(net):
        net.layers[0] = copy.deepcopy(net.layers[0])

    for exchange in (assign, exchange_one, exchange_module, *([fully_shard] if world_size > 1 else [])):
        net, optimizer = build(rank)
        net(batch(rank, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        exchange(net)
        refused = r"layers\.0\.(weight|bias) is another parameter than when the optimizer"
        with pytest.raises(RuntimeError, match=refused):
            optimizer.rebuild_plan()
        # which does not hide it
        optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(2, device=device_of(rank))))]})
        net(batch(rank, 1)).backward()
        with pytest.raises(RuntimeError, match=refused):
            optimizer.step()
        again = TritonDistAdamW(net.named_parameters(), lr=0.05, model=net)
        before = [*map(local, values(net))]
        again.step()
        assert not any(torch.equal(*pair) for pair in zip(before, map(local, values(net)), strict=True) if len(pair[0]))


@scenario(1, 2)
def what_another_optimizer_steps_or_nobody_needs_may_take_a_place(rank, world_size):
    net, optimizer = build(rank)
    head = TritonDistAdamW([("bias", nn.Parameter(torch.zeros_like(net.layers[0].bias)))], lr=0.05)
    net.layers[0].bias = head.param_groups[0]["params"][0]  # stepped by another
    net.layers[1].bias = net.layers[2].bias  # tied
    net.layers[3].bias = nn.Parameter(torch.zeros_like(net.layers[3].bias), requires_grad=False)
    del net.layers[2]
    net(batch(rank, 0)).backward()
    before = values(net)
    optimizer.step()
    head.step()
    moved = [not torch.equal(*pair) for pair in zip(before, values(net), strict=True)]
    assert moved == [name != "layers.2.bias" for name, _ in net.named_parameters()]


@scenario(2)
def what_fsdp2_puts_in_place_of_its_parameters_is_not_refused(rank, world_size):
    net = nn.Sequential(nn.Linear(4, 4)).to(device_of(rank))
    fully_shard(net, mesh=mesh_of(2))
    optimizer = TritonDistAdamW(net.named_parameters(), model=net)
    x = torch.ones(2, 4, device=device_of(rank))
    net(x).sum().backward()
    with torch.no_grad():
        net(x)
    assert not isinstance(net[0].weight, DTensor)
    optimizer.step()


@scenario(1, 2)
def new_parameters_may_be_added_in_several_groups(rank, world_size):
    """As of a new head, whose matrix and bias have other hyperparameters."""
    net, optimizer = build(rank)
    net.layers[3] = nn.Linear(5, 5).to(device_of(rank))
    net.layers.append(nn.Linear(5, 5).to(device_of(rank)))
    for name, parameter in net.layers[3:].named_parameters():
        optimizer.add_param_group({"params": [(f"new.{name}", parameter)], "weight_decay": 0.1})
    before = values(net)
    net(batch(rank, 0)).backward()
    optimizer.step()
    assert not any(torch.equal(*pair) for pair in zip(before, values(net), strict=True))
    for place in (3, 4):
        bias = net.layers[place].bias
        net.layers[place].bias = nn.Parameter(bias.detach().clone())
        with pytest.raises(RuntimeError, match=rf"layers\.{place}\.bias is another parameter"):
            optimizer.step()
        net.layers[place].bias = bias


@scenario(1, 2)
def places_are_known_by_all_names_and_after_other_changes(rank, world_size):
    device = device_of(rank)

    def share(net):
        net.layers[0] = nn.Linear(5, 5).to(device)  # layers[1] was the same module

    def exchange_within(net):
        net.layers[2].bias = nn.Parameter(torch.zeros(5, device=device))

    def put_back(net):
        net.layers.append(nn.Linear(5, 5).to(device))

    def exchange_and_compile(net):
        net.layers[2] = torch.compile(nn.Linear(5, 5).to(device), backend="eager")

    for exchange in (share, exchange_within, put_back, exchange_and_compile):
        net = Net(device)
        net.layers[0] = net.layers[1]
        optimizer = TritonDistAdamW(net.named_parameters(), model=net)
        # the same parameters in another module, and one that is there no more
        net.layers[2] = copy.copy(net.layers[2])
        net.layers[2]._parameters = dict(net.layers[2]._parameters)
        del net.layers[3]
        net(batch(rank, 0)).backward()
        optimizer.step()
        exchange(net)
        with pytest.raises(RuntimeError, match="is another parameter"):
            optimizer.step()


@scenario(1)
def modules_may_be_wrapped_later(rank, world_size):
    """As by the compiler; a step after that does not look for all names again."""
    net, optimizer = build(rank)
    net.layers[0] = nn.Sequential(net.layers[0])
    with mock.patch.object(net, "named_modules", wraps=net.named_modules) as names:
        for step in range(3):
            net.layers[0](batch(rank, step)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert names.call_count == 1


@scenario(2)
def thawed_parameters_are_refused(rank, world_size):
    net = Net(device_of(rank))
    net.layers[2].requires_grad_(False)
    optimizer = TritonDistAdamW(net.named_parameters())
    net.layers[2].requires_grad_(True)
    net(batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"layers\.2\.weight of .* did not need one when.*call rebuild_plan"):
        optimizer.step()


@scenario.parametrize()
def test_refusals(backend, world_size, name):
    scenario.check(backend, world_size, name)
