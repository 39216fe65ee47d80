"""The notebook's redistributors: its cells and printed tables, optimality by exhaustion, and what it got wrong."""

import json
import time
from math import inf
from pathlib import Path

import pytest
import torch
from redist_notebook_pairs import cheapest_by_exhaustion, random_pairs

import optim_redist as tc
from optim_redist import Cost, CostModel, IdealLowerBoundsCM, MultiAxisDist, OptimalRedist, TextbookCM
from optim_redist._multi_axis.straight import StraightPath

EXAMPLES = json.loads((Path(__file__).parent / "redist_examples.json").read_text(encoding="utf-8"))
NOTEBOOK = EXAMPLES["notebook"]


def printed(sequence):
    return [[name, str(dist), str(cost)] for name, dist, cost in sequence]


def test_cells_of_the_notebook():
    # manual redistribution
    shape, mesh = torch.Size([8, 8, 8, 4]), torch.Size([4, 2, 4])
    dist = tc.dist.MultiAxisDist(mesh, ((0, 1), (), (), ()), 1)
    assert dist.compatible(shape)
    step, volume, n_procs = dist.alltoall(shape, 0, 1, minor=True)
    step, volume, n_procs = step.alltoall(shape, 0, 2)
    assert (str(step), volume, n_procs) == ("D_[4,2,4]⊥{∅,1,0,∅}(∅,1,2,∅)", 256, 4)

    # gather, then split
    facts = NOTEBOOK["naive_gather"]
    shape, mesh = torch.Size([50, 50]), torch.Size([2, 4])
    dist = tc.dist.MultiAxisDist(mesh, ((0,), ()), (10, 10))
    target = tc.dist.MultiAxisDist(mesh, ((), (0,)), (10, 10))
    naive = tc.optim.NaiveGathererRedist(tc.optim.IdealLowerBoundsCM())
    sequence, cost = naive.redistribute(shape, dist, target)
    assert printed(sequence) == facts["rows"]
    assert cost == facts["total"]

    # within the memory of start and target
    facts = NOTEBOOK["memory_constrained_1"]
    dist = tc.dist.MultiAxisDist(mesh, ((0,), ()), 2)
    target = tc.dist.MultiAxisDist(mesh, ((), (0,)), 2)
    constrained = tc.optim.MemoryConstrainedRedist(tc.optim.IdealLowerBoundsCM())
    sequence, cost = constrained.redistribute(shape, dist, target)
    assert printed(sequence) == facts["rows"]
    assert cost == facts["total"]

    # the third example
    facts = NOTEBOOK["memory_constrained_2"]
    shape, mesh = torch.Size([8, 8, 8, 4]), torch.Size([4, 2, 4])
    dist = tc.dist.MultiAxisDist(mesh, ((0, 1), (), (), ()), 1)
    target = tc.dist.MultiAxisDist(mesh, ((), (1,), (0,), ()), (-1, 4, 2, -1))
    assert [str(dist), str(target)] == [facts["src"], facts["dst"]]
    sequence, cost = constrained.redistribute(shape, dist, target)
    assert cost <= facts["accept_total_at_most"]
    assert len(sequence) <= 6
    assert max(step.maxNumElements(shape) for _, step, _ in sequence) <= 256
    check_sequence(shape, sequence, cost, IdealLowerBoundsCM(), target)
    table = "\n".join(
        f"{i:<8}{name:<16}{step!s:<31}{step.latexStr()}{cost}" for i, (name, step, cost) in enumerate(sequence)
    )
    assert table.startswith("0                       D_[4,2,4]⊥{(0,1),∅,∅,∅}(1,∅,∅,∅)")


def check_sequence(shape, sequence, total, cost_model: CostModel, target):
    """Replay every row by its name and recompute every cost."""
    assert sequence[0][0] == ""
    assert sequence[0][2] == Cost()
    summed, before = Cost(), sequence[0][1]
    for name, dist, cost in sequence[1:]:
        result, volume, n_procs = before.apply(shape, name, target)
        assert result == dist
        if name.startswith("split"):
            expected = Cost(max_memory_delta=dist.maxNumElements(shape) - before.maxNumElements(shape))
        else:
            collective = name.split("_")[0]
            collective = "alltoall" if collective in ("changeBlockSize", "exchange") else collective
            expected = getattr(cost_model, collective)(n_procs, volume)
        assert cost == expected
        summed, before = summed + cost, dist
    assert before == target
    assert total == summed.scalar(epsilon=0)


@pytest.mark.parametrize("rows", ["rows_printed_by_the_notebook", "rows_of_a_453_plan"])
def test_textbook_costs_of_the_two_known_plans(rows):
    facts = NOTEBOOK["memory_constrained_2"]
    shape, total, ideal = facts["shape"], Cost(), Cost()
    before = MultiAxisDist(facts["mesh"], ((0, 1), (), (), ()), 1)
    for name, text, cost in facts[rows][1:]:
        after, volume, n_procs = before.apply(shape, name)
        assert str(after) == text
        if not name.startswith("split"):
            collective = name.split("_")[0]
            ideal_step = getattr(IdealLowerBoundsCM, collective)(n_procs, volume)
            assert cost in (str(ideal_step), ideal_step.scalar())
            ideal += ideal_step
            total += getattr(TextbookCM, collective)(n_procs, volume)
        before = after
    known = "notebook_plan" if rows.startswith("rows_printed") else "plan_453"
    assert total.scalar() == facts["textbook_cost"][known]
    assert ideal.scalar() == {"notebook_plan": 645.0, "plan_453": 453.0}[known]


def test_costs_of_the_models():
    assert str(Cost()) == "Cost(latency=0, bandwidth=0, computation=0, max_memory_delta=0)"
    assert Cost(1, 2, 3, 4) + Cost(10, 20, 30, -5) == Cost(11, 22, 33, 4)
    assert Cost(1, 2, 3, 4).scalar(1000, 100, 10, 1) == 1234.0
    assert isinstance(Cost(1).scalar(), float)
    for model in (IdealLowerBoundsCM, TextbookCM):
        for collective in ("allgather", "permute", "allreduce", "reduce_scatter", "alltoall"):
            assert getattr(model, collective)(1, 100).scalar() == 0
            assert isinstance(getattr(model, collective)(5, 100).latency, int)
            assert isinstance(getattr(model, collective)(5, 100).bandwidth, float)
    assert IdealLowerBoundsCM.allgather(5, 100) == IdealLowerBoundsCM.alltoall(5, 100) == Cost(3, 400.0)
    assert IdealLowerBoundsCM.permute(2, 100) == Cost(1, 200.0)
    assert IdealLowerBoundsCM.reduce_scatter(4, 100) == Cost(2, 300.0, 75.0)
    assert IdealLowerBoundsCM.allreduce(4, 100) == Cost(2, 600.0, 300.0)
    assert TextbookCM.alltoall(4, 100) == Cost(2, 75.0)
    assert TextbookCM.permute(2, 100) == Cost(1, 100.0)
    assert TextbookCM.reduce_scatter(4, 100).bandwidth == 75.0
    assert TextbookCM.allreduce(4, 100).bandwidth == 150.0
    with pytest.raises(TypeError):
        CostModel()


# -- what the ancestor got wrong


def test_start_equal_to_target_is_one_row():
    dist = MultiAxisDist((2, 2), ((0,), (1,)), 2)
    for redistributor in (tc.NaiveGathererRedist, tc.MemoryConstrainedRedist, OptimalRedist):
        assert redistributor(IdealLowerBoundsCM()).redistribute((4, 4), dist, dist) == ([("", dist, Cost())], 0.0)


@pytest.mark.parametrize("redistributor", [tc.MemoryConstrainedRedist, OptimalRedist])
def test_a_swap_of_two_axes_is_one_permutation(redistributor):
    start, target = MultiAxisDist((2, 2), ((0,), (1,)), 2), MultiAxisDist((2, 2), ((1,), (0,)), 2)
    sequence, cost = redistributor(TextbookCM()).redistribute((4, 4), start, target)
    assert [name for name, *_ in sequence] == ["", "permute_0_1"]
    assert cost == 5.0


def test_a_replicated_start_skips_the_gather():
    start, target = MultiAxisDist(4, ((), ())), MultiAxisDist(4, ((0,), ()), 1)
    sequence, cost = tc.NaiveGathererRedist(IdealLowerBoundsCM()).redistribute((4, 4), start, target)
    assert [name for name, *_ in sequence] == ["", "split_*"]
    assert cost == 0.0
    back, _ = tc.NaiveGathererRedist(IdealLowerBoundsCM()).redistribute((4, 4), target, start)
    assert [name for name, *_ in back] == ["", "allgather_*"]


@pytest.mark.parametrize(
    "shape, target",
    [((4,), None), ((3, 4), None), ((4, 4), MultiAxisDist((2, 2), ((), (0,)), 1)), ((4, 4), "text")],
    ids=["order", "too small", "mesh", "type"],
)
@pytest.mark.parametrize("redistributor", [tc.NaiveGathererRedist, tc.MemoryConstrainedRedist, OptimalRedist])
def test_incompatible_arguments(redistributor, shape, target):
    start = MultiAxisDist(4, ((0,), ()), 1)
    with pytest.raises(ValueError, match="Incompatible arguments"):
        redistributor(IdealLowerBoundsCM()).redistribute(shape, start, target or MultiAxisDist(4, ((), (0,)), 1))


# -- exactness and coverage


@pytest.mark.parametrize("cost_model", [IdealLowerBoundsCM(), TextbookCM()], ids=lambda model: type(model).__name__)
def test_every_random_pair_is_planned_and_no_dearer_than_gathering(cost_model):
    started = time.perf_counter()
    for shape, start, target in random_pairs(1, 60):
        constrained, constrained_cost = tc.MemoryConstrainedRedist(cost_model).redistribute(shape, start, target)
        check_sequence(shape, constrained, constrained_cost, cost_model, target)
        limit = max(start.maxNumElements(shape), target.maxNumElements(shape))
        assert all(dist.maxNumElements(shape) <= limit for _, dist, _ in constrained)
        assert len(constrained) <= 6
        best, cost = OptimalRedist(cost_model).redistribute(shape, start, target)
        check_sequence(shape, best, cost, cost_model, target)
        _, naive = tc.NaiveGathererRedist(cost_model, epsilon=0).redistribute(shape, start, target)
        assert cost <= constrained_cost
        assert cost <= naive
    print(f"{(time.perf_counter() - started) / 60 * 1e3:.1f} ms a pair for both planners")


@pytest.mark.parametrize("cost_model", [IdealLowerBoundsCM(), TextbookCM()], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("max_depth", [None, 3])
def test_the_search_finds_the_optimum(cost_model, max_depth):
    def price(name, n_procs, volume):
        collective = name.split("_")[0]
        collective = collective if collective in ("allgather", "permute") else "alltoall"
        return getattr(cost_model, collective)(n_procs, volume).scalar()

    meshes = [(4,), (2, 2), (2, 3), (3, 2), (4, 2)]
    for shape, start, target in random_pairs(2, 12, meshes, max_dims=2):
        _, cost = OptimalRedist(cost_model, max_depth=max_depth).redistribute(shape, start, target)
        expected = cheapest_by_exhaustion(shape, start, target, price, max_depth=max_depth)
        if expected < inf:
            assert cost == expected
        else:  # three moves do not lead there: one exchange does
            assert cost == price("exchange_*", start.numProcessors, start.maxNumElements(shape))


@pytest.mark.parametrize("cost_model", [IdealLowerBoundsCM(), TextbookCM()], ids=lambda model: type(model).__name__)
def test_a_straight_path_costs_what_the_search_finds(cost_model, monkeypatch):
    pairs = list(random_pairs(6, 80))
    redistributors = [
        OptimalRedist(cost_model),
        OptimalRedist(cost_model, alpha=1000.0, max_depth=3),
        OptimalRedist(cost_model, node_filter=lambda dist: dist.dimsMapping[0] != (0,)),
        tc.MemoryConstrainedRedist(cost_model),
    ]

    def costs():
        return [redistributor.redistribute(*pair)[1] for redistributor in redistributors for pair in pairs]

    paths, straight = [], StraightPath.find
    monkeypatch.setattr(StraightPath, "find", lambda self, *of: paths.append(straight(self, *of)) or paths[-1])
    with_paths = costs()
    monkeypatch.setattr(StraightPath, "find", lambda self, *of: [])
    assert with_paths == pytest.approx(costs(), rel=1e-12)
    assert sum(map(bool, paths)) > len(paths) // 3


def test_options_of_the_search():
    shape = (8, 8)
    start, target = MultiAxisDist((2, 4), ((0,), (1,)), (4, 2)), MultiAxisDist((2, 4), ((1,), (0,)), (2, 4))
    free, _ = OptimalRedist(TextbookCM()).redistribute(shape, start, target)
    seen = []

    def never(dist):
        seen.append(dist)
        return False

    # the notebook's model, under which an exchange is so dear that others are worth asking about
    sequence, cost = OptimalRedist(IdealLowerBoundsCM()).redistribute(shape, start, target)
    direct, direct_cost = OptimalRedist(IdealLowerBoundsCM(), node_filter=never).redistribute(shape, start, target)
    assert [name for name, *_ in direct] == ["", "exchange_*"]
    assert seen
    assert target not in seen
    assert len(sequence) > 2
    assert cost < direct_cost
    limited, _ = OptimalRedist(TextbookCM(), memory_limit=8).redistribute(shape, start, target)
    assert max(dist.maxNumElements(shape) for _, dist, _ in limited) <= 8
    with pytest.raises(ValueError, match="max_depth"):
        OptimalRedist(TextbookCM(), max_depth=0)
    weighted, _ = OptimalRedist(TextbookCM(), alpha=1e6).redistribute(shape, start, target)
    assert sum(not name.startswith("split") for name, *_ in weighted) == 2
    assert len(free) > 1
