"""Newton–Schulz in a memory of limited size: matrices in parts that follow one another, with the same results."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from random_tensors import assert_same_bits, give_gradients, random_parameters
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from optim_kernels import NSConfig, TritonMuon, TritonMuonAdamW
from optim_kernels.muon_groups import MuonPlanner, ns_config_of

pytest.importorskip("triton")
from optim_kernels._newton_schulz.chain import Chain
from optim_kernels._newton_schulz.chain_jobs import MatrixGroup, jobs_of
from optim_kernels._newton_schulz.int8_start import nbytes_of_first_step
from optim_kernels._newton_schulz.tiles import cdiv
from optim_kernels.functional._muon_batch_plan import MuonBatchPlan, workspace_of
from optim_kernels.functional._muon_families import PANEL
from optim_kernels.functional._muon_matrices import MuonTensors
from optim_kernels.functional._muon_workspace import nbytes_of_factors, nbytes_of_x
from optim_kernels.reference.muon import MuonRule

SHAPES = ((16, 40), (40, 16), (24, 24), (16, 40), (24, 24), (8, 16))
# three steps of Newton–Schulz, as the Gram iteration restarts behind the second
EXACT: dict[str, Any] = {"ns_dtype": torch.float32, "ns_steps": 3, "impl": "triton", "lr": 0.1}
MB = 2**20


def nbytes_of(m: int, n: int, ns: NSConfig, dtype: torch.dtype) -> int:
    """What a matrix takes whose X moves."""
    return nbytes_of_x(m, n, dtype, moves=True) + nbytes_of_factors(m, n, ns, dtype)


LARGEST = nbytes_of(24, 24, NSConfig(dtype=torch.float32), torch.float32)

parameters = partial(random_parameters, scale=0.1)


def step(optimizer: TritonMuon | TritonMuonAdamW, params: list[nn.Parameter], seed: int) -> None:
    give_gradients(*params, seed=seed)
    optimizer.step()


def trained(limit: int | None, steps: int = 2, **options: Any) -> tuple[TritonMuon, list[nn.Parameter]]:
    """With a limit in bytes."""
    params = parameters(*SHAPES)
    optimizer = TritonMuon(params, **{**EXACT, **options}, ns_workspace_mb=None if limit is None else limit / MB)
    for seed in range(steps):
        step(optimizer, params, seed)
    return optimizer, params


def room_of(optimizer: TritonMuon | TritonMuonAdamW) -> Tensor:
    workspace = optimizer._planner._workspace
    assert workspace is not None
    (room,) = workspace._rooms.values()
    return room


def rooms_of(plans: Iterable[MuonBatchPlan]) -> set[int]:
    """Where all X of plans are."""
    batches = [batch for plan in plans for family in plan._launches._families for batch in family]
    return {x.untyped_storage().data_ptr() for batch in batches for x in (batch.x, batch.other)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"beta2": 0.9, "row_equilibrate": True}, {"renormalize": True}, {"ns_method": "gram"}],
    ids=str,
)
def test_results_do_not_depend_on_it(options: dict[str, Any]) -> None:
    alone, expected = trained(None, **options)
    assert len(alone.plans()) == 1
    for limit, least, most in ((1, len(SHAPES), len(SHAPES)), (2 * LARGEST, 2, len(SHAPES) - 1), (MB, 1, 1)):
        optimizer, params = trained(limit, **options)
        assert_same_bits(params, expected)
        assert least <= len(optimizer.plans()) <= most
        assert limit == 1 or room_of(optimizer).numel() <= limit


def test_rows_that_end_anywhere() -> None:
    """Tiles are read with what lies beyond these, which nobody may have written."""
    runs = []
    for limit in (None, 1):
        params = parameters((24, 24), (16, 33), (9, 130), (24, 24))
        optimizer = TritonMuon(params, **EXACT, ns_workspace_mb=limit)
        for seed in range(3):
            if limit and seed:
                room_of(optimizer).fill_(0xFF)
            step(optimizer, params, seed)
        runs.append(params)
    for p, q in zip(*runs, strict=True):
        # whether X is stored before parameters are updated by it depends on what a plan has
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


def test_all_plans_have_x_in_one_room() -> None:
    """Whatever the order of their sizes, and wherever rows end."""
    params = parameters(*[(16, 9 + 7 * i) for i in range(8)])
    optimizer = TritonMuon(params, **EXACT, ns_workspace_mb=1 / MB)
    step(optimizer, params, 0)
    assert len(optimizer.plans()) == len(params)
    assert rooms_of(optimizer.plans()) == {room_of(optimizer).data_ptr()}


@pytest.mark.slow
def test_a_room_that_is_too_small_goes() -> None:
    """For plans of every planner, and before there is a larger one."""
    optimizer, params = trained(LARGEST)
    _, expected = trained(None, steps=4)
    planner = optimizer._planner
    assert planner._workspace is not None
    small = weakref.ref(room_of(optimizer).untyped_storage())
    other = parameters((48, 48))
    beside = TritonMuon(other, **EXACT)
    beside._planner = MuonPlanner(workspace=planner._workspace)
    step(beside, other, 5)
    gc.collect()  # of what is interpreted
    assert small() is None
    for seed in (2, 3):
        step(optimizer, params, seed)
    assert rooms_of([*optimizer.plans(), *beside.plans()]) == {room_of(optimizer).data_ptr()}
    assert_same_bits(params, expected)


def test_parts_that_are_no_more_are_given_up() -> None:
    optimizer, params = trained(1)
    plans = [weakref.ref(plan) for plan in optimizer.plans()]
    assert len(plans) == len(params)
    optimizer.zero_grad()
    step(optimizer, params[:2], 2)
    gc.collect()
    assert sum(plan() is not None for plan in plans) <= len(optimizer.plans()) == 2


class Allocations(TorchDispatchMode):
    """The most bytes of matrices that were there at a time, of those that were made meanwhile, ``room`` apart."""

    def __init__(self, room: Tensor) -> None:
        super().__init__()
        self.most = self.now = 0
        self._known = {room.untyped_storage()._cdata}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.new_empty.default:
            gc.collect()  # what is interpreted refers to itself
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.ndim == 3:
            storage = result.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        return result

    def _forget(self, place: int, nbytes: int) -> None:
        self._known.remove(place)
        self.now -= nbytes


@pytest.mark.parametrize(
    ("variance", "stochastic_rounding", "num_x"), [(False, False, 1), (True, False, 2), (False, True, 2)]
)
def test_long_matrices_take_one_x(
    monkeypatch: pytest.MonkeyPatch, variance: bool, stochastic_rounding: bool, num_x: int
) -> None:
    """Unless the last one is stored, as it is for all of a plan if one of them needs it."""
    monkeypatch.setattr("optim_kernels.functional._muon_batch_plan.steps_in_factors", lambda m, n, *_: n > 2 * m)
    of_step = {"variance": variance, "stochastic_rounding": stochastic_rounding}

    def num_x_of(*shapes: tuple[int, int]) -> list[float]:
        made = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes]
        found = workspace_of(
            [MuonTensors(t, t, t) for t in made], rule=MuonRule(), ns=NSConfig(dtype=torch.float16), **of_step
        )
        return [x / (2 * t.numel()) for (x, _), t in zip(found, made, strict=True)]

    assert num_x_of((768, 3072), (3072, 768), (768, 1024)) == [num_x, num_x, 2]
    assert num_x_of((768, 3072), (257, 1023))[0] == 2


@pytest.mark.parametrize(
    ("options", "num_products"),
    [({"steps": 1}, 1), ({"steps": 3, "method": "gram", "restarts": ()}, 1), ({}, 5)],
    ids=str,
)
@pytest.mark.parametrize("variance", [False, True])
def test_a_single_product_with_x_moves_it_only_if_it_is_stored(
    options: dict[str, Any], num_products: int, variance: bool
) -> None:
    param, moment = (torch.empty(shape, device="meta") for shape in ((16, 24), (24,)))
    tensors, ns = [MuonTensors(param, param, param, moment)], NSConfig(dtype=torch.float16, **options)
    common: dict[str, Any] = {"rule": MuonRule(), "ns": ns, "variance": variance, "stochastic_rounding": False}
    plan = MuonBatchPlan(tensors, **common)
    ((batch,),) = plan._launches._families
    assert batch.num_moves == num_products
    assert (batch.x is not batch.other) == (variance or num_products > 1)
    ((of_x, _),) = workspace_of(tensors, **common)
    assert of_x == nbytes_of_x(16, 24, torch.float16, moves=batch.x is not batch.other)


def test_diagonals_that_are_kept_apart_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain has them of all matrices of its plan that come before its own, too."""
    monkeypatch.setattr("optim_kernels.functional._muon_batch_plan.steps_in_factors", lambda m, n, *_: n > 2 * m)
    ns, num_small, (m, n) = NSConfig(dtype=torch.float16), 500, (260, 1040)
    made = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in [*[(8, 8)] * num_small, (m, n)]]
    common: dict[str, Any] = {"rule": MuonRule(), "ns": ns, "variance": False, "stochastic_rounding": False}
    said = sum(factors for _, factors in workspace_of([MuonTensors(t, t, t) for t in made], **common))
    group = MatrixGroup(tuple(jobs_of(ns, m, n, in_factors=True)), num_small, 1, n, cdiv(n, PANEL))
    chain = Chain.of([group], m, torch.device("cpu"), in_panels=True)
    assert chain.has_diagonals
    # fp32 numbers for each row of its tiles
    assert 2 * chain.num_squares * m * 264 + 4 * chain.num_matrices * 384 <= said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"ns_method": "gram"}, {"ns_coefficients": "aol4", "ns_steps": 4}, {"ns_coefficients": (1.5, -0.5, 0.0)}],
    ids=str,
)
def test_a_matrix_takes_no_more_than_is_said(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], dtype: torch.dtype
) -> None:
    params = parameters((17, 128))
    optimizer = TritonMuon(params, **{**EXACT, **options, "ns_dtype": dtype}, ns_workspace_mb=1)
    step(optimizer, params, 0)
    (plan,) = optimizer.plans()
    orthogonalize, allocations = plan._launches._orthogonalize, Allocations(room_of(optimizer))

    def watched(*args: Any) -> None:
        with allocations:
            orthogonalize(*args)

    monkeypatch.setattr(plan._launches, "_orthogonalize", watched)
    gc.freeze()  # for collections to be quick
    step(optimizer, params, 1)
    gc.unfreeze()
    assert allocations.most > 0
    said = nbytes_of(17, 128, ns_config_of(optimizer.param_groups[0]), dtype)
    assert room_of(optimizer).numel() + allocations.most <= said


def test_parts_are_alike() -> None:
    """No part is left with what does not fill a chip, and matrices of one shape are together."""
    params = parameters(*[(16, 40), (24, 24)] * 8)
    sizes = [nbytes_of(16, 40, NSConfig(dtype=torch.float32), torch.float32), LARGEST]
    optimizer = TritonMuon(params, **EXACT, ns_workspace_mb=0.45 * 8 * sum(sizes) / MB)
    step(optimizer, params, 0)
    plans = optimizer.plans()
    parts = [[tuple(p.shape) for p in params if id(p) in plan.tiles] for plan in plans]
    assert sorted(shape for part in parts for shape in part) == sorted(tuple(p.shape) for p in params)
    bytes_of = [sum(sizes[shape == (24, 24)] for shape in part) for part in parts]
    assert len(parts) == 3
    assert max(bytes_of) <= 1.2 * min(bytes_of)
    assert sum(len(set(part)) for part in parts) <= len(parts) + 1


@pytest.mark.slow
def test_what_others_have_left_there_is_not_computed_with() -> None:
    """Between two steps the room may hold anything."""
    (_, expected), (optimizer, params) = trained(None, steps=4), trained(LARGEST)
    for seed in (2, 3):
        room_of(optimizer).fill_(0xFF)  # NaN, in every dtype
        step(optimizer, params, seed)
    assert_same_bits(params, expected)


@pytest.mark.slow
def test_groups_keep_their_hyperparameters() -> None:
    runs = []
    for limit in (None, LARGEST / MB):
        params = parameters(*SHAPES)
        groups = [{"params": params[i::3], "lr": 0.1 * (i + 1), "weight_decay": 0.1 * i} for i in range(3)]
        optimizer = TritonMuon(groups, **EXACT, ns_workspace_mb=limit)
        for seed in range(4):
            optimizer.param_groups[seed % 3]["lr"] *= 0.5
            step(optimizer, params, seed)
        runs.append(params)
    assert_same_bits(*runs)


@pytest.mark.slow
def test_missing_gradients_come_and_go() -> None:
    runs = []
    for limit in (None, LARGEST):
        optimizer, params = trained(limit)
        for seed in range(2, 6):
            give_gradients(*params, seed=seed)
            params[seed % len(params)].grad = None
            optimizer.step()
        runs.append(params)
    assert_same_bits(*runs)


@pytest.mark.slow
def test_planners_may_share_one() -> None:
    """As those of several buckets do: the second is done when the first begins again."""
    optimizer, params = trained(LARGEST)
    _, expected = trained(None, steps=3)
    workspace = optimizer._planner._workspace
    assert workspace is not None
    other = parameters((24, 24), (16, 40))
    give_gradients(*other, seed=5)
    beside = TritonMuon(other, **EXACT)
    beside._planner = MuonPlanner(workspace=workspace)
    before = room_of(optimizer).data_ptr()
    beside.step()
    assert room_of(optimizer).data_ptr() == before
    step(optimizer, params, 2)
    assert_same_bits(params, expected)


def test_one_for_a_whole_model() -> None:
    runs = []
    for limit in (None, LARGEST / MB):
        params = parameters(*SHAPES, (7,))
        groups = [
            {"params": params[:-1], "kind": "muon", "variant": "keller", "ns_dtype": torch.float32, "impl": "triton"},
            {"params": params[-1:], "kind": "adamw"},
        ]
        optimizer = TritonMuonAdamW(groups, ns_workspace_mb=limit)
        for seed in range(2):
            step(optimizer, params, seed)
        runs.append((params, len(optimizer.plans())))
    (expected, one), (ours, several) = runs
    assert one == 1 < several
    assert_same_bits(ours, expected)


def test_copies_and_checkpoints() -> None:
    """It belongs to the optimizer, as other choices of how to compute do: copied and pickled with it, not saved."""
    optimizer, _ = trained(LARGEST)
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        other_params = [p for group in other.param_groups for p in group["params"]]
        step(other, other_params, 2)
        assert len(other.plans()) == len(optimizer.plans()) > 1
        assert room_of(other).data_ptr() != room_of(optimizer).data_ptr()
    assert "workspace" not in str(optimizer.state_dict()["param_groups"])
    for method in (TritonMuon.keller, TritonMuon.nanochat):
        assert method(parameters((8, 8)), ns_workspace_mb=64)._ns_workspace_mb == 64


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        (0, ValueError, "ns_workspace_mb must be positive, or None for no limit, got 0"),
        (-1.5, ValueError, "ns_workspace_mb must be positive, or None for no limit, got -1.5"),
        (float("nan"), ValueError, "ns_workspace_mb must be positive, or None for no limit, got nan"),
        ("512", TypeError, "ns_workspace_mb must be a number of 2.20 bytes, or None, got '512'"),
        (True, TypeError, "ns_workspace_mb must be a number of 2.20 bytes, or None, got True"),
    ],
)
def test_wrong_limits_are_refused(given: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        TritonMuon(parameters((8, 8)), ns_workspace_mb=given)
    with pytest.raises(error, match=match):
        TritonMuonAdamW([{"params": parameters((8, 8)), "kind": "adamw"}], ns_workspace_mb=given)


def test_infinity_is_no_limit() -> None:
    params = parameters(*SHAPES)
    optimizer = TritonMuon(params, **EXACT, ns_workspace_mb=float("inf"))
    step(optimizer, params, 0)
    assert len(optimizer.plans()) == 1


def test_a_first_step_in_int8_is_counted_beside_the_others() -> None:
    """A pool keeps what it allocates apart from the factors of several matrices."""
    m, n = 3584, 4096
    in_int8, in_fp16 = (
        nbytes_of_factors(m, n, NSConfig(dtype=dtype), torch.float16) for dtype in (None, torch.float16)
    )
    assert in_fp16 == 2 * 2 * m * m
    assert in_int8 == in_fp16 + nbytes_of_first_step(m, n)


def pools_of_graphs() -> dict[int, int]:
    """The size of each part of recorded graphs' memory, by its address; other tests' graphs may be kept."""
    parts = (part for part in torch.cuda.memory_snapshot() if part["segment_pool_id"] != (0, 0))
    return {part["address"]: part["total_size"] for part in parts}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(768, 768), (768, 3072), (1000, 1000), (3584, 3584)], ids=str)
@pytest.mark.parametrize("variant", ["keller", "nanochat-2026-07"])
def test_a_step_takes_no_more(shape: tuple[int, int], variant: str) -> None:
    """X and, in the pools of what has been recorded, factors."""
    gc.collect()  # of optimizers before
    torch.cuda.empty_cache()
    kept = pools_of_graphs()
    params = random_parameters(*[shape] * 48, dtype=torch.bfloat16, scale=0.1)
    give_gradients(*params, seed=0)
    # one of the largest is counted as 208
    limit = 128 if max(shape) < 3584 else 256
    optimizer = TritonMuonAdamW([{"params": params, "kind": "muon", "variant": variant}], ns_workspace_mb=limit)
    for _ in range(4):
        optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    pools = [size for place, size in pools_of_graphs().items() if place not in kept]
    assert len(optimizer.plans()) > len(pools) > 0
    assert room_of(optimizer).numel() + sum(pools) <= limit * MB


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_parts_agree_with_the_whole(dtype: torch.dtype) -> None:
    """Launched, recorded and replayed; tiles are chosen by what a part has, so that 16-bit products round otherwise."""
    shapes = [(768, 768)] * 24 + [(768, 3072)] * 12 + [(512, 700)] * 9
    runs = []
    for limit in (None, 96):
        params = random_parameters(*shapes, dtype=dtype, scale=0.1)
        optimizer = TritonMuon.keller(params, lr=0.1, ns_workspace_mb=limit)
        for seed in range(4):
            step(optimizer, params, seed)
        runs.append(params)
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q, atol=2e-3 if dtype == torch.bfloat16 else 2e-5, rtol=1e-2)


@pytest.mark.gpu
def test_captured_steps() -> None:
    (_, expected), (optimizer, params) = trained(None, steps=5, capturable=True), trained(LARGEST, capturable=True)
    for p in params:
        p.grad = torch.empty_like(p)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for seed in (2, 3, 4):
        fresh = parameters(*SHAPES)
        give_gradients(*fresh, seed=seed)
        for p, q in zip(params, fresh, strict=True):
            assert p.grad is not None
            assert q.grad is not None
            p.grad.copy_(q.grad)
        graph.replay()
    assert_same_bits(params, expected)
