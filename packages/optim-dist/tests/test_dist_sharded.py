"""DTensor parameters (FSDP2, HSDP, tensor parallel) train as plain ones on one rank do, to the last bit.

The oracle on every rank is the same optimizer over a group of one, on whole parameters, fed with the DTensors' whole
gradients: what differs is only where elements lie. All scenarios of a number of ranks run in one launch. Matrices go by
``impl="torch"`` here, which is what a CPU has anyway: the kernels fuse multiplications with additions, and where a
16-bit rounding falls otherwise Newton–Schulz makes more of it; one scenario says how much.
"""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dist_cases import Scenarios, alone, device_of, mesh_of, normal
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from optim_dist import TritonDistAdamW, TritonDistMuon, TritonDistMuonAdamW, clip_grad_norm_
from optim_dist._optimizers.layouts import local
from optim_utils.param_groups import MatrixView

scenario = Scenarios()
SHAPES = ((7, 5), (8, 8), (1, 6), (12, 5), (16, 3))
# options that groups have, not constructors
OF_GROUP = {"master_weights", "stochastic_rounding", "momentum_dtype"}


def muon(parameters, **options):
    return TritonDistMuon([{"params": parameters, "impl": "torch"}], **options)


def placed(shapes, mesh, placements, dtype=torch.float32):
    """DTensor parameters, each with its own placements, and plain twins."""
    device = mesh.device_type
    whole = [normal(shape, 3, number).to(device, dtype) for number, shape in enumerate(shapes)]
    cut = [nn.Parameter(distribute_tensor(value, mesh, each)) for value, each in zip(whole, placements)]
    return cut, [nn.Parameter(value.clone()) for value in whole]


def give_gradients(cut, twins, step, absent=()):
    for number, (parameter, twin) in enumerate(zip(cut, twins)):
        gradient = normal(tuple(twin.shape), 5, number, step).to(twin)
        missing = number in absent
        twin.grad = None if missing else gradient
        parameter.grad = None if missing else distribute_tensor(gradient, parameter.device_mesh, parameter.placements)


def assert_equal(cut, twins, what=""):
    for number, (parameter, twin) in enumerate(zip(cut, twins)):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        assert torch.equal(whole, twin), f"{what}: parameter {number} {tuple(twin.shape)}"


def train(rank, mesh, placements, build, shapes=SHAPES, dtype=torch.float32, steps=3, absent=lambda step: ()):
    """Both optimizers after some steps, parameters compared after each."""
    cut, twins = placed(shapes, mesh, placements, dtype)
    optimizer, oracle = build(cut), build(twins, process_group=alone(rank))
    for step in range(steps):
        give_gradients(cut, twins, step, absent(step))
        norms = [each.clip_grad_norm_(1.5) for each in (optimizer, oracle)]
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0.0)
        # clipped by the same number: the two norms are sums in different orders
        for each in (optimizer, oracle):
            each.clip_with(torch.full_like(norms[0], 0.5), norms[0])
            each.step()
            each.zero_grad()
        assert_equal(cut, twins, f"{placements}, step {step}")
    return optimizer, oracle


def layouts(rank, world_size):
    """Meshes, and placements on them."""
    line = mesh_of(world_size)
    yield line, [(Shard(0),), (Shard(1),), (Replicate(),)]
    if world_size == 4:
        grid = mesh_of(2, 2)
        yield grid, [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Shard(0)), (Replicate(), Replicate())]
        yield grid, [(Shard(0), Shard(0)), (Shard(1), Replicate())]


@scenario(2, 3, 4)
def adamw_in_every_layout(rank, world_size):
    shapes = (*SHAPES, (3,), (5, 2, 3))
    for mesh, found in layouts(rank, world_size):
        for each in found:
            fitting = [[Shard(0) if isinstance(p, Shard) and p.dim >= len(s) else p for p in each] for s in shapes]
            train(rank, mesh, fitting, partial(TritonDistAdamW, lr=0.03, amsgrad=True), shapes)


@scenario(2, 3, 4)
def muon_in_every_layout(rank, world_size):
    for variant in ("nanochat-2025", "nanochat-2026-07"):
        build = partial(muon, variant=variant, weight_decay=0.1, bucket_mb=2e-4)
        for mesh, found in layouts(rank, world_size):
            # neighbours lie differently
            train(rank, mesh, [found[number % len(found)] for number in range(len(SHAPES))], build)


@scenario(2, 3)
def launches_for_all_shards_have_the_same_bits(rank, world_size):
    """Of the same steps once the elementwise parts are the kernels', interpreted on a CPU, and once plain torch's."""
    mesh = mesh_of(world_size)
    cases = [
        (torch.float32, {"variant": "nanochat-2026-07", "weight_decay": 0.1, "bucket_mb": 2e-4}, (0, 1)),
        (torch.bfloat16, {"variant": "keller", "weight_decay": 0.5}, (1, 0)),
        (torch.bfloat16, {"master_weights": "split16", "weight_decay": 0.1, "maximize": True}, (0, 1)),
        (torch.bfloat16, {"stochastic_rounding": True, "weight_decay": 0.1, "momentum_dtype": torch.float32}, (0, 0)),
    ]
    for dtype, options, dims in cases:
        of_group = {key: options.pop(key) for key in OF_GROUP & options.keys()}
        placements = [(Shard(dims[number % 2]),) for number in range(len(SHAPES))]
        cut, twins = placed(SHAPES, mesh, placements, dtype)
        other, _ = placed(SHAPES, mesh, placements, dtype)
        launching, plain = (
            TritonDistMuon([{"params": each, "impl": "torch", **of_group}], **options) for each in (cut, other)
        )
        for step in range(3):
            for each in (cut, other):
                give_gradients(each, twins, step, absent=(step,))
            for optimizer in (launching, plain):
                optimizer.param_groups[0]["lr"] *= 0.9
                optimizer.clip_with(
                    torch.full((), 0.5, device=mesh.device_type), torch.ones((), device=mesh.device_type)
                )
            with mock.patch("optim_dist._muon.launches._why_plain_torch", return_value=None):
                launching.step()
            plain.step()
            for number, (left, right) in enumerate(zip(cut, other, strict=True)):
                what = f"{dtype}, {of_group}, step {step}, parameter {number}"
                assert torch.equal(left.to_local(), right.to_local()), what
                for key, value in plain.state[right].items():
                    found = launching.state[left][key]
                    assert torch.equal(*(local(tensor) for tensor in (found, value))), f"{what}, {key}"
        assert "plain torch" not in launching.explain()
        for optimizer, count in ((launching, 1), (plain, 0)):
            for batch in optimizer._unbucketed._muon._batches:
                assert len(batch._momenta.sorter.launches) == len(batch._updates.sorter.launches) == count


@scenario(2)
def gradients_may_be_on_their_way_from_other_ranks(rank, world_size):
    """In some steps alone; what stands for them has no memory of its own."""
    mesh = mesh_of(world_size)
    (launching,), (plain,) = (placed(SHAPES[:1], mesh, [(Shard(0),)])[0] for _ in range(2))
    optimizers = [muon([parameter]) for parameter in (launching, plain)]
    for step in range(4):
        gradient = normal(SHAPES[0], 5, step).to(mesh.device_type)
        plain.grad = distribute_tensor(gradient, mesh, plain.placements)
        launching.grad = distribute_tensor(gradient, mesh, plain.placements)
        if step % 2:
            pending = DTensor.from_local(gradient / world_size, mesh, [Partial()])
            launching.grad = pending.redistribute(placements=plain.placements, async_op=True)
            assert isinstance(launching.grad._local_tensor, AsyncCollectiveTensor)
        with mock.patch("optim_dist._muon.launches._why_plain_torch", return_value=None):
            optimizers[0].step()
        optimizers[1].step()
        assert torch.equal(launching.to_local(), plain.to_local()), step
        assert "plain torch" not in optimizers[0].explain()


@scenario(2)
def kernels_agree_to_the_rounding_of_the_iteration(rank, world_size):
    mesh, lr = mesh_of(world_size), 0.02
    cut, twins = placed(SHAPES, mesh, [(Shard(number % 2),) for number in range(len(SHAPES))])
    start = [twin.detach().clone() for twin in twins]
    optimizer, oracle = TritonDistMuon(cut, lr=lr), TritonDistMuon(twins, lr=lr, process_group=alone(rank))
    give_gradients(cut, twins, 0)
    optimizer.step()
    oracle.step()
    for parameter, twin, before in zip(cut, twins, start):
        difference = torch.linalg.vector_norm(parameter.full_tensor() - twin)
        # Newton–Schulz in 16 bits is off by a few percent at most (tiny singular values), by 0.2 % as a rule
        assert difference <= 0.03 * torch.linalg.vector_norm(twin - before), tuple(twin.shape)


@scenario(2)
def bf16_with_masters_and_rounding_at_random(rank, world_size):
    mesh = mesh_of(world_size)
    for options in ({"master_weights": "fp32"}, {"master_weights": "split16"}, {"stochastic_rounding": True}):
        cut, twins = placed(SHAPES, mesh, [(Shard(0),)] * len(SHAPES), torch.bfloat16)
        optimizer = TritonDistMuon([{"params": cut, "impl": "torch", **options}])
        oracle = TritonDistMuon([{"params": twins, "impl": "torch", **options}], process_group=alone(rank))
        for step in range(3):
            give_gradients(cut, twins, step)
            optimizer.step()
            oracle.step()
        for parameter, twin in zip(cut, twins):
            # momentum and update travel in bf16: each is off by 2^-9 of its size, updates are of size lr = 0.02
            torch.testing.assert_close(parameter.full_tensor(), twin, rtol=2**-7, atol=3 * 0.02 * 2**-6)
            assert not torch.equal(twin, torch.zeros_like(twin))


@scenario(2)
def rounding_at_random_needs_rows(rank, world_size):
    cut, twins = placed([(4, 4)], mesh_of(world_size), [(Shard(1),)], torch.bfloat16)
    for kind in ("muon", "adamw"):
        with pytest.raises(ValueError, match=r"0\.0 is cut otherwise; shard it along its first dimension"):
            TritonDistMuonAdamW([{"kind": kind, "params": cut, "stochastic_rounding": True}])
        # some step later, before anything has moved
        plain = nn.Parameter(torch.ones(4, 4, device=device_of(rank)))
        optimizer = TritonDistMuonAdamW([{"kind": kind, "params": [plain]}, {"kind": kind, "params": cut}])
        before = [value.clone() for value in (plain.detach(), local(cut[0]))]
        give_gradients(cut, twins, 0)
        plain.grad = torch.ones_like(plain)
        optimizer.param_groups[1]["stochastic_rounding"] = True
        with pytest.raises(ValueError, match=r"1\.0 is cut otherwise; shard it along its first dimension"):
            optimizer.step()
        assert all(map(torch.equal, before, (plain.detach(), local(cut[0]))))
        # which the loop may put right
        optimizer.param_groups[1]["stochastic_rounding"] = False
        optimizer.step()
        assert not torch.equal(plain, before[0])


@scenario(2, 3)
def missing_gradients_leave_matrices_alone(rank, world_size):
    mesh = mesh_of(world_size)
    placements = [(Shard(0),)] * len(SHAPES)
    build = partial(muon, variant="nanochat-2026-07")
    optimizer, oracle = train(rank, mesh, placements, build, absent=lambda step: (1, 3) if step != 1 else (0,))
    full = optimizer.full_state_dict()
    if rank == 0:
        wanted = oracle.full_state_dict()["state"]
        for number, state in full["state"].items():
            for key, value in state.items():
                assert torch.equal(value, wanted[number][key].cpu()), (number, key)
    zero = partial(muon, variant="keller", weight_decay=0.5)
    train(rank, mesh, placements, zero, absent=lambda step: (0, 1, 2) if step else ())


@scenario(2)
def frozen_matrices_stay_whatever_a_missing_gradient_means(rank, world_size):
    for missing_grad in ("zero", "raise"):
        cut, twins = placed(SHAPES, mesh_of(world_size), [(Shard(0),)] * len(SHAPES))
        groups = [[{"params": each, "impl": "torch", "missing_grad": missing_grad}] for each in (cut, twins)]
        optimizer = TritonDistMuon(groups[0], weight_decay=0.5)
        oracle = TritonDistMuon(groups[1], weight_decay=0.5, process_group=alone(rank))
        for step in range(3):
            for parameter in (cut[1], twins[1]):
                parameter.requires_grad_(step != 1)
            give_gradients(cut, twins, step, absent=(1,) if step == 1 else ())
            kept = cut[1].full_tensor()
            optimizer.step()
            oracle.step()
            assert_equal(cut, twins, f"{missing_grad}, step {step}")
            assert torch.equal(cut[1].full_tensor(), kept) == (step == 1)


@scenario(2)
def views_into_fused_and_convolutional_weights(rank, world_size):
    shapes = ((12, 4), (4, 2, 3, 3), (6, 4))
    views = [
        MatrixView(shape=(12, 4), split=(8, 4)),
        MatrixView(shape=(4, 2, 3, 3), order=(0, 2, 3, 1), matrix_shape=(4, 18)),
        MatrixView(shape=(6, 4), transposed=True),
    ]
    mesh = mesh_of(world_size)
    cut, twins = placed(shapes, mesh, [(Shard(0),), (Shard(1),), (Shard(1),)])
    twins[1].data = twins[1].data.contiguous(memory_format=torch.channels_last)
    optimizer = TritonDistMuon([{"params": cut, "views": views, "impl": "torch"}])
    oracle = TritonDistMuon([{"params": twins, "views": views, "impl": "torch"}], process_group=alone(rank))
    for step in range(2):
        give_gradients(cut, twins, step)
        twins[1].grad = twins[1].grad.contiguous(memory_format=torch.channels_last)
        optimizer.step()
        oracle.step()
    for parameter, twin in zip(cut, twins):
        torch.testing.assert_close(parameter.full_tensor(), twin)


def give_pending_sums(cut, twins, rank, world_size, step):
    for number, (parameter, twin) in enumerate(zip(cut, twins)):
        each = [normal(tuple(twin.shape), 8, number, r, step).to(twin) for r in range(world_size)]
        parameter.grad = DTensor.from_local(each[rank], parameter.device_mesh, [Partial()])
        twin.grad = sum(each)


@scenario(2, 3)
def pending_sums_of_gradients_are_summed(rank, world_size):
    mesh = mesh_of(world_size)
    shapes = ((6, 4), (5,), (), (3, 3), (0, 2))
    cut, twins = placed(shapes, mesh, [(Shard(0),), *[(Replicate(),)] * 4])
    optimizer, oracle = TritonDistAdamW(cut), TritonDistAdamW(twins, process_group=alone(rank))
    for step in range(2):
        give_pending_sums(cut, twins, rank, world_size, step)
        norms = [each.clip_grad_norm_(1e9) for each in (optimizer, oracle)]
        torch.testing.assert_close(*norms)
        optimizer.step()
        oracle.step()
        for parameter, twin in zip(cut, twins):
            torch.testing.assert_close(parameter.full_tensor(), twin)
        # all but one by one all-reduce of all, and nothing twice
    with CommDebugMode() as communication:
        give_pending_sums(cut, twins, rank, world_size, 2)
        optimizer.clip_grad_norm_(1e9)
        optimizer.step()
    assert sum(count for name, count in communication.get_comm_counts().items() if "reduce" in str(name)) == 2


@scenario(2)
def a_pending_sum_that_changes_is_summed_again(rank, world_size):
    cut, twins = placed(((5,),), mesh_of(world_size), [(Replicate(),)])
    optimizer, oracle = TritonDistAdamW(cut, lr=0.1), TritonDistAdamW(twins, lr=0.1, process_group=alone(rank))
    give_pending_sums(cut, twins, rank, world_size, 0)
    first = optimizer.clip_grad_norm_(1e9)
    for parameter in (*cut, *twins):
        parameter.grad.mul_(-2)
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), 2 * first)
    optimizer.clip_with(torch.ones_like(first), first)
    optimizer.step()
    oracle.step()
    assert_equal(cut, twins)


class Net(nn.Module):
    def __init__(self, width=6, hidden=9):
        super().__init__()
        self.sizes = width, hidden
        self.embed = nn.Embedding(11, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, 11, bias=False)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(0.3 * normal(tuple(parameter.shape), 13, number))
        self.to(device_of(dist.get_rank()))

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(torch.tanh(self.up(x)))).square().mean()


def routed(named, **options):
    """Matrices of the MLP to Muon, the rest to AdamW."""
    groups = [
        {"kind": "muon", "params": [], "weight_decay": 0.1, "impl": "torch"},
        {"kind": "adamw", "params": [], "lr": 0.01},
    ]
    for name, parameter in named:
        inside = name.startswith(("up", "down")) and parameter.ndim == 2
        groups[0 if inside else 1]["params"].append((name, parameter))
    return TritonDistMuonAdamW(groups, **options)


def follow(rank, net, data, steps=3):
    """Train ``net`` on batches of seed ``data`` and, by its whole gradients, a plain twin; the optimizer."""
    twin = Net(*net.sizes)
    optimizer = routed(net.named_parameters())
    oracle = routed(twin.named_parameters(), process_group=alone(rank))
    for step in range(steps):
        tokens = torch.randint(0, 11, (4,), generator=torch.Generator().manual_seed(10 * step + data))
        tokens = tokens.to(device_of(rank))
        net(tokens).backward()
        for parameter, other in zip(net.parameters(), twin.parameters()):
            other.grad = parameter.grad.full_tensor() if isinstance(parameter, DTensor) else parameter.grad.clone()
        norm = clip_grad_norm_(net.parameters(), 1.0)
        torch.testing.assert_close(norm, clip_grad_norm_(oracle, 1.0), rtol=1e-6, atol=0.0)
        for each in (optimizer, oracle):
            each.clip_with(torch.full_like(norm, 0.5), norm)
            each.step()
            each.zero_grad()
        assert_equal(net.parameters(), twin.parameters(), f"step {step}")
    return optimizer


@scenario(2, 3, 4)
def fully_sharded(rank, world_size):
    net = Net()
    mesh = mesh_of(world_size)
    for part in (net.up, net.down):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = follow(rank, net, data=rank)
    sharded = optimizer.explain().data["sharded"]
    assert [entry["name"] for entry in sharded if entry["owner"] is not None] == ["up.weight", "down.weight"]
    assert "orthogonalized by" in optimizer.explain()
    assert "momentum and update in plain torch, impl='torch': up.weight, down.weight" in optimizer.explain()
    # states lie as parameters do
    for parameter in net.parameters():
        for key in ("exp_avg", "momentum_buffer"):
            if key in optimizer.state[parameter]:
                assert optimizer.state[parameter][key].placements == parameter.placements


@scenario(4)
def hybrid_sharded(rank, world_size):
    net = Net()
    fully_shard(net, mesh=mesh_of(2, 2, names=("replicate", "shard")))
    follow(rank, net, data=rank)


@scenario(4)
def sharded_behind_tensor_parallel(rank, world_size):
    net = Net(8, 12)
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # cut over dp and tp; the embedding and the head over dp alone, so that the two columns of tp hold replicas
    fully_shard(net, mesh=mesh["dp"])
    follow(rank, net, data=rank // 2)


@scenario(2, 4)
def tensor_parallel_beside_plain_parameters(rank, world_size):
    net = Net(8, 12)
    mesh = mesh_of(world_size)
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = follow(rank, net, data=0)
    assert {entry["name"] for entry in optimizer.explain().data["parameters"]} == {"embed.weight", "head.weight"}


@scenario(2, 3)
def whole_state_out_and_in(rank, world_size):
    mesh = mesh_of(world_size)
    build = partial(TritonDistMuonAdamW, variant="nanochat-2026-07")

    def groups(parameters):
        return [
            {"kind": "muon", "params": parameters[:3], "impl": "torch"},
            {"kind": "adamw", "params": parameters[3:]},
        ]

    def make(parameters, **options):
        return build(groups(parameters), **options)

    placements = [(Shard(0),), (Shard(1),), (Replicate(),), (Shard(0),), (Shard(1),)]
    optimizer, oracle = train(rank, mesh, placements, make)
    full, wanted = optimizer.full_state_dict(), oracle.full_state_dict()
    if rank == 0:
        for number, state in wanted["state"].items():
            for key, value in state.items():
                assert torch.equal(full["state"][number][key], value.cpu()), (number, key)
    else:
        assert full == {}
    cut, twins = placed(SHAPES, mesh, placements)
    restored, again = make(cut), make(twins, process_group=alone(rank))
    with pytest.raises(ValueError, match="is a plain tensor"):
        restored.load_state_dict(wanted)
    for each in (restored, again):
        each.load_full_state_dict(wanted)
    for parameter in cut:
        state = restored.state[parameter]
        assert all(value.placements == parameter.placements for value in state.values() if isinstance(value, DTensor))
    give_gradients(cut, twins, 9)
    restored.step()
    again.step()
    assert_equal(cut, twins)


@scenario(2)
def what_cannot_be_updated_is_refused(rank, world_size):
    mesh, device = mesh_of(world_size), device_of(rank)
    partly = DTensor.from_local(torch.ones(3, device=device), mesh, [Partial()])
    with pytest.raises(ValueError, match=r"w: a DTensor with pending sums"):
        TritonDistAdamW([("w", nn.Parameter(partly))])
    pair = [mesh_of(2, 1, names=("a", "b"))["b"], mesh]
    lonely = DTensor.from_local(torch.ones(3, device=device), pair[0], [Shard(0)])
    with pytest.raises(ValueError, match=r"w: a DTensor over ranks \[\d\], .* nobody would sum its gradient"):
        TritonDistAdamW([("w", nn.Parameter(lonely))])


@scenario(2)
def meshes_that_exchange_ranks_are_refused(rank, world_size):
    """Checkpoints had the parts of such a parameter in the other order, without a word."""
    mesh, device = DeviceMesh(device_of(rank).type, [1, 0]), device_of(rank)
    layer = nn.Linear(8, 8, device=device)
    fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match=r"weight: a DTensor over the mesh \[1, 0\], whose ranks do not ascend"):
        TritonDistAdamW(layer.named_parameters())
    # the order makes no difference to what is whole on every rank
    whole = distribute_tensor(torch.ones(3, device=device), mesh, [Replicate()])
    optimizer = TritonDistAdamW([("w", nn.Parameter(whole))])
    assert not optimizer.plan.buckets


@scenario(4)
def experts_are_no_replicas(rank, world_size):
    """Muon gave the update of one expert to all, norms counted one alone, and checkpoints had no other."""
    line, grid = mesh_of(world_size), mesh_of(2, 2, names=("dp", "ep"))
    expert = grid["ep"].get_local_rank()

    def build(mesh_of_all, placements, differs):
        whole = torch.arange(24.0, device=device_of(rank)).view(6, 4)
        shared = distribute_tensor(whole, mesh_of_all, placements)
        own = distribute_tensor(whole + expert * differs, grid["dp"], [Shard(0)])
        parameters = [("shared", nn.Parameter(shared)), ("expert", nn.Parameter(own))]
        return parameters, [{"kind": "muon", "params": parameters}]

    _, groups = build(line, [Shard(0)], differs=False)
    with pytest.raises(ValueError, match=r"expert: a DTensor over ranks \[0, 2\], but the optimizer works on"):
        TritonDistMuonAdamW(groups)
    # where tensor parallelism leaves parameters whole along one dimension of a grid they look like these
    parameters, groups = build(grid, [Shard(0), Shard(1)], differs=True)
    optimizer = TritonDistMuonAdamW(groups)
    before = [local(p).clone() for _, p in parameters]
    for _, p in parameters:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"expert is a DTensor of which ranks 0 and 1 hold replicas, but they"):
            optimizer.step()
    assert all(torch.equal(local(p), then) for (_, p), then in zip(parameters, before))
    with torch.no_grad():
        parameters[1][1].sub_(expert)  # what is loaded after the optimizer was built
    optimizer.step()
    TritonDistMuonAdamW([{"kind": "muon", "params": parameters[:1]}])
    TritonDistMuonAdamW([{"kind": "muon", "params": parameters[1:]}], process_group=grid["dp"].get_group())


@scenario(4)
def replicas_that_differ_are_named_if_asked_for(rank, world_size):
    """Nobody broadcasts DTensors: with a seed for each rank every group of replicas trains another model."""
    mesh = mesh_of(2, 2, names=("replicate", "shard"))

    def step(seed, **options):
        torch.manual_seed(seed)
        layer = nn.Linear(8, 8, device=device_of(rank))
        fully_shard(layer, mesh=mesh)
        optimizer = TritonDistAdamW(layer.named_parameters(), **options)
        for number in range(2):
            layer(normal((2, 8), number).to(layer.weight.device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    for options in ({"sync_params": "check"}, {"debug": True}):
        step(0, **options)
        with pytest.raises(RuntimeError, match=r"weight is a DTensor of which ranks 0 and 2 hold replicas, but they"):
            step(mesh["replicate"].get_local_rank(), **options)
    step(rank)


@scenario(2)
def nothing_is_sent_by_an_elementwise_step(rank, world_size):
    mesh = mesh_of(world_size)
    cut, twins = placed(SHAPES, mesh, [(Shard(0),)] * len(SHAPES))
    optimizer = TritonDistAdamW(cut)
    before = optimizer.communicator.traffic.num_calls
    give_gradients(cut, twins, 0)
    optimizer.step()
    assert optimizer.communicator.traffic.num_calls == before
    assert optimizer.explain().data["bytes_exchanged"] == 0


@scenario(2, 4)
def explain_says_what_exchanged_matrices_send(rank, world_size):
    mesh, shapes = mesh_of(world_size), ((8, 4), (4, 8), (4, 12), (8, 8))
    cut, twins = placed([*shapes, (5,)], mesh, [(Shard(0),)] * 2 + [(Shard(1),)] * 2 + [(Replicate(),)])
    for beta2, of_moments in ((None, 0), (0.95, 4 * (8 + 8 + 12 + 8))):
        muon_group = {"kind": "muon", "params": cut[:-1], "impl": "torch", "beta2": beta2}
        optimizer = TritonDistMuonAdamW([muon_group, {"kind": "adamw", "params": cut[-1:]}])
        assert optimizer.explain().data["bytes_exchanged"] is None
        for step in range(2):
            before = optimizer.communicator.traffic.bytes_sent
            give_gradients(cut, twins, step)
            optimizer.step()
            sent = optimizer.communicator.traffic.bytes_sent - before
            explained = optimizer.explain()
            assert explained.data["bytes_exchanged"] == sent
            assert f"of DTensors this rank sends {sent} bytes a step" in explained
            assert "none, there are only DTensors" in explained
            # (W-1)/W of the matrices' bytes each way, and second moments to all
            total = sum(optimizer.communicator.gather_json(sent))
            nbytes = sum(4 * height * width for height, width in shapes)
            assert total == (world_size - 1) * (2 * nbytes / world_size + of_moments)
        optimizer.close()


@pytest.mark.slow
@scenario.parametrize()
def test_sharded(backend, world_size, name):
    scenario.check(backend, world_size, name)
