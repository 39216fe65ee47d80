"""Distributed equals single-device: bitwise in exact mode, within its bound with ``rs``, at every number of ranks."""

import pytest
import torch
from dist_cases import BACKENDS, Case, Tensors, assert_equal, assert_same_state, mesh_of, train, train_each, world_sizes
from torch.distributed.tensor import Shard, distribute_tensor

from optim_dist import TritonDistMuon
from optim_kernels import TritonMuon, TritonMuonAdamW
from optim_utils.testing import run_ranks

SOME = frozenset({(1, 0), (2, 1)})
NEVER = frozenset({(0, -1), (1, -1), (2, -1)})
LATE = frozenset({(0, -1)})

ELEMENTWISE = Case(
    "adamw",
    (
        Tensors((13, 5)),
        Tensors(()),
        Tensors((0,)),
        Tensors((1,), group=1),
        Tensors((64, 33), group=1, transposed=True),
        Tensors((127,), absent=SOME),
        Tensors((3, 4, 5), group=1, absent=LATE),
        Tensors((31,), absent=NEVER),
        Tensors((7, 3), frozen=True),
        Tensors((17, 9), dtype=torch.bfloat16),
        Tensors((5,), dtype=torch.bfloat16, group=1),
    ),
    ({"lr": 0.01}, {"lr": 0.03, "weight_decay": 0.2, "betas": (0.8, 0.95), "amsgrad": True}),
)
FEW_ELEMENTS = Case("adamw", (Tensors(()), Tensors((1,))))
MATRICES = Case(
    "muon",
    (
        *(Tensors((8, 8)) for _ in range(5)),
        Tensors((5, 7), group=1),
        Tensors((16, 4), transposed=True, group=1),
        Tensors((2, 6, 3)),
        Tensors((8, 8), absent=SOME),
        Tensors((8, 6), absent=LATE),
        Tensors((6, 8), absent=NEVER),
        Tensors((9, 4), dtype=torch.bfloat16, group=1),
    ),
    ({}, {"variant": "nanochat-2026-07", "lr": 0.1}),
)
WHOLE_MODEL = Case(
    "muon_adamw",
    (
        Tensors((50, 8), group=1),
        *(Tensors((8, 8)) for _ in range(4)),
        *(Tensors((8,), group=1) for _ in range(3)),
        Tensors((32, 8)),
        Tensors((8, 32)),
    ),
    ({"kind": "muon", "weight_decay": 0.1}, {"kind": "adamw"}),
)
# of which owners have different numbers, in tiles that hang on how many there are
MANY_MATRICES = Case(
    "muon_adamw",
    (
        *(Tensors((128, 128), dtype=torch.bfloat16) for _ in range(13)),
        *(Tensors((256, 256), group=1) for _ in range(5)),
        *(Tensors((256, 1024), group=1, dtype=torch.bfloat16) for _ in range(3)),
        Tensors((1024, 256), group=1, dtype=torch.bfloat16),
        Tensors((100, 60)),
        Tensors((3, 64, 96), group=1),
        Tensors((33, 128)),
        Tensors((1000,), group=2),
    ),
    ({"kind": "muon", "variant": "keller"}, {"kind": "muon"}, {"kind": "adamw"}),
    steps=2,
)
CASES = {"elementwise": ELEMENTWISE, "few elements": FEW_ELEMENTS, "matrices": MATRICES, "model": WHOLE_MODEL}


EXACT = {"reducer": "exact"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_is_one_process_summing_in_rank_order(backend):
    sizes, cases = world_sizes(backend), list(CASES.items())
    oracle = iter(run_ranks(train_each, 1, [(case, size) for size in sizes for _, case in cases], backend=backend)[0])
    for world_size in sizes:
        results = run_ranks(train_each, world_size, [(case, 0, EXACT) for _, case in cases], backend=backend)
        for number, (name, _) in enumerate(cases):
            expected = next(oracle)
            if backend == "nccl" and name in ("matrices", "model"):
                # the grouped launches choose tiles by how many matrices an owner has, so that bits depend on W, unless
                # they are told to be deterministic
                for actual, wanted in zip(results[0][number]["parameters"], expected["parameters"]):
                    torch.testing.assert_close(actual, wanted, rtol=1e-2, atol=1e-3)
                continue
            for rank in range(world_size):
                what = f"{name}, rank {rank} of {world_size}"
                assert_equal(results[rank][number]["parameters"], expected["parameters"], what)
            state = results[0][number]["state"]
            # a parameter that never had a gradient has untouched state here and none in one process
            for index in set(state["state"]) - set(expected["state"]["state"]):
                assert not any(value.any() for value in state["state"].pop(index).values())
            assert_same_state(state, expected["state"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_muon_is_the_same_at_any_number_of_ranks(backend):
    sizes, options = world_sizes(backend), {**EXACT, "deterministic": True}
    oracle = run_ranks(train_each, 1, [(MANY_MATRICES, size, options) for size in sizes], backend=backend)[0]
    for world_size, expected in zip(sizes, oracle):
        results = run_ranks(train, world_size, MANY_MATRICES, 0, options, backend=backend)
        for rank, result in enumerate(results):
            what = f"rank {rank} of {world_size}"
            assert_equal(result["parameters"], expected["parameters"], what)
        assert_same_state(results[0]["state"], expected["state"])


def _planners(rank, world_size, options):
    """What the planners of Muon's kernels are told: of matrices that are whole here, and of an owner's."""
    value = torch.ones(4, 8)
    cut = distribute_tensor(value, mesh_of(world_size), [Shard(0)])
    parameters = [torch.nn.Parameter(value.clone()), torch.nn.Parameter(cut)]
    optimizer = TritonDistMuon(parameters, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    planners = [cache["planner"] for cache in optimizer._caches.values() if cache]
    if optimizer._unbucketed.layouts:
        planners += [batch._owner._planner for batch in optimizer._unbucketed._muon._batches]
    told = [(planner._tiles, planner._spare) for planner in planners]
    return told, "deterministic" in optimizer.explain()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_options_reach_every_planner(deterministic, overlap):
    options = {"deterministic": deterministic, "overlap": overlap}
    tiles = "shape" if deterministic else "auto"
    # on two ranks one of them owns the matrix that is in a bucket
    first, second = run_ranks(_planners, 2, options)
    assert (*first[0], *second[0]) == ((tiles, 16 if overlap else 0),) * 3
    assert first[1] == second[1] == deterministic
    # no collective runs beside one rank's
    assert run_ranks(_planners, 1, options) == [([(tiles, 0)], deterministic)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_rs_is_within_rounding_of_one_process(backend):
    for world_size in world_sizes(backend, (2, 3)):
        case = Case("adamw", tuple(Tensors((n,)) for n in (3, 50, 1000)), ({"lr": 0.01, "eps": 1e-3},))
        results = run_ranks(train, world_size, case, 0, {"reducer": "rs"}, backend=backend)
        expected = run_ranks(train, 1, case, world_size, backend=backend)[0]
        for result in results:
            assert_equal(result["parameters"], results[0]["parameters"], "replicas")
            for actual, wanted in zip(result["parameters"], expected["parameters"]):
                # fp32 sums differ by ulps, which eps=1e-3 keeps from being amplified
                torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", [ELEMENTWISE, MATRICES], ids=["elementwise", "matrices"])
def test_bucket_size_changes_no_bit(case):
    sizes = (1e-5, 1e-4, 1e-3, 1e-2, 1.0)
    results = run_ranks(train_each, 3, [(case, 0, {**EXACT, "bucket_mb": size}) for size in sizes])[1]
    for result, size in zip(results, sizes):
        assert_equal(result["parameters"], results[0]["parameters"], f"bucket_mb={size}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_clipping_uses_the_global_norm(backend):
    case = Case("adamw", ELEMENTWISE.tensors, ELEMENTWISE.groups, max_norm=0.5)
    for world_size in world_sizes(backend, (2, 3)):
        results = run_ranks(train, world_size, case, 0, {"reducer": "exact"}, backend=backend)
        expected = run_ranks(train, 1, case, world_size, backend=backend)[0]
        assert all(result["norms"] == results[0]["norms"] for result in results), "ranks disagree on the norm"
        assert results[0]["norms"] == pytest.approx(expected["norms"], rel=1e-6)
        for actual, wanted in zip(results[0]["parameters"], expected["parameters"]):
            torch.testing.assert_close(actual, wanted)


def test_one_rank_is_the_single_device_optimizer():
    matrices = Case("muon", MATRICES.tensors[:6], ({}, {"lr": 0.1}))
    for case in (matrices, WHOLE_MODEL):
        ours = run_ranks(train, 1, case)[0]
        theirs = run_ranks(_train_single_device, 1, case)[0]
        assert_equal(ours["parameters"], theirs["parameters"], case.kind)
        assert_same_state(ours["state"], theirs["state"])


def _train_single_device(rank, world_size, case):
    from dist_cases import gradient, make_parameters

    parameters = make_parameters(case, torch.device("cpu"))
    groups = [{**group, "params": []} for group in case.groups]
    for spec, parameter in zip(case.tensors, parameters):
        groups[spec.group]["params"].append(parameter)
    optimizer = TritonMuon.nanochat(groups) if case.kind == "muon" else TritonMuonAdamW(groups)
    for step in range(case.steps):
        for number, (spec, parameter) in enumerate(zip(case.tensors, parameters)):
            parameter.grad = gradient(spec, number, step, rank)
        optimizer.step()
    return {"parameters": [p.detach().clone() for p in parameters], "state": optimizer.state_dict()}


def test_triton_dist_adamw_matches_torch_distributed():
    """Two ranks against ``torch.optim.AdamW`` on averaged gradients, several steps."""
    case = Case("adamw", tuple(Tensors(shape) for shape in ((33, 7), (129,), (), (2, 3, 4))), steps=5)
    results = run_ranks(train, 2, case)
    expected = run_ranks(_train_torch_adamw, 1, case, 2)[0]
    for result in results:
        for actual, wanted in zip(result["parameters"], expected):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def _train_torch_adamw(rank, world_size, case, simulated):
    from dist_cases import gradient, make_parameters

    parameters = make_parameters(case, torch.device("cpu"))
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    for step in range(case.steps):
        for number, (spec, parameter) in enumerate(zip(case.tensors, parameters)):
            parameter.grad = sum(gradient(spec, number, step, r) for r in range(simulated)) / simulated
        optimizer.step()
    return [p.detach().clone() for p in parameters]
