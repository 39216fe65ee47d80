"""One hop, two hops, and hops between groups: against the bounds, against brute force, and in the cost of a node."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations
from math import ceil, exp, log, prod
from typing import Any

import pytest
import torch
from redist_cases import FAMILIES, Case, busiest, example_cases, part_of, random_case

from optim_redist import CommModel, Cyclic, Layout, Mesh, Ragged, RedistError, Topology, bounds, plan, simulate, verify
from optim_redist._methods import flow
from optim_redist._methods.flow import Network, add_edge, saturate
from optim_redist._methods.forward import forward_phases
from optim_redist._methods.hierarchical import hierarchical_phases
from optim_redist.lower_bounds import bounds_of, crossing, least_inside_groups
from optim_redist.moves import Request
from optim_redist.planners import _PLANNERS, best_relay
from optim_redist.problem import Problem

NAMED = example_cases()
# how many of each family the example file was drawn from
MIX = "C" * 15 + "O" * 6 + "B" * 7 + "U" * 4


def _ratios(cases: list[Case]) -> list[float]:
    found = [bounds(*case) for case in cases]
    return [limits.single_hop / limits.lb for limits in found if limits.lb]


def _geometric_mean(ratios: list[float]) -> float:
    return exp(sum(map(log, ratios)) / len(ratios))


def test_volume_of_one_step_over_the_bound() -> None:
    mixed = _ratios([case for _, _, case in NAMED] + [random_case(seed, MIX) for seed in range(600)])
    assert sum(ratio == 1.0 for ratio in mixed) / len(mixed) >= 0.97
    assert _geometric_mean(mixed) < 1.0035
    assert max(_ratios([random_case(seed, "CO") for seed in range(200)])) == 1.0


def test_forwarding_reaches_the_bound_wherever_one_step_does_not() -> None:
    found = 0
    for seed in range(700):
        case = random_case(seed, "BU")
        limits = bounds(*case)
        if limits.single_hop > limits.lb:
            assert busiest(forward_phases(Problem(*case), limits.lb)) == limits.lb, seed
            found += 1
    assert found > 30


@pytest.mark.slow
def test_relays_close_half_of_every_gap_or_say_why_none_can() -> None:
    found = halved = 0
    for seed in range(500):
        case = random_case(seed)
        limits = bounds(*case)
        if limits.single_hop > limits.lb:
            name, moved = best_relay(Problem(*case), limits)
            text = plan(case.shape, "float32", case.src, case.dst).explain()
            assert f"{name} would move {moved}" in text
            if 2 * (limits.single_hop - moved) >= limits.single_hop - limits.lb:
                halved += 1
            else:
                assert case.src.partial
                assert "no closer, since" in text
            found += 1
    assert found > 60
    assert halved > 0.98 * found


def test_tiny_boxes_travel_along_trees() -> None:
    # three elements, all needed by eight ranks: one holder each, which may send three transfers at most
    case = random_case(729, "E")
    limits = bounds(*case)
    assert (limits.lb, limits.single_hop) == (3, 7)
    made = plan(case.shape, "bf16", case.src, case.dst, planners=["forward"])
    assert busiest([phase for _, phases in made.phases for phase in phases]) == 3
    assert max(verify(made).sent.values()) == 3


def test_forwarding_that_cannot_reach_the_bound_goes_as_low_as_it_can() -> None:
    # the four ranks that hold nothing could forward just enough, were the two needers of every element among them
    case = random_case(86, "P")
    limits = bounds(*case)
    assert (limits.lb, limits.single_hop) == (216, 288)
    made = plan(case.shape, "bf16", case.src, case.dst, planners=["forward"])
    assert 216 < max(verify(made).sent.values()) <= 234


@pytest.mark.parametrize(("here", "there"), [(1, 3), (2, 4), (3, 8), (4, 6)])
def test_replicas_that_grow_in_number_get_a_part_each_first(here: int, there: int) -> None:
    # so large that a second exchange is worth its latency: on GPUs 8192² is quicker by one of them from 2 ranks to 4
    shape, model = (16384, 16384), CommModel.preset("h200x8")
    src, dst = Layout(Mesh(here), [0, None]), Layout(Mesh(there), [None, None])
    made = plan(shape, "bf16", src, dst, cost_model=model)
    assert (made.planner, [step.op for step in made.steps]) == ("spread", ["exchange", "all_gather"])
    # what two plans by hand take, through rows on the target's ranks
    rows = Layout(Mesh(there), [0, None])
    by_hand = sum(plan(shape, "bf16", *pair, cost_model=model).time for pair in ((src, rows), (rows, dst)))
    assert made.time <= 1.001 * by_hand
    moved = verify(made)
    assert max(moved.received.values()) == made.bounds.lb
    # short messages go in one exchange
    assert plan((64, 64), "bf16", src, dst, cost_model=model).planner == "direct"


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [2, 0, 1, 3], [3, 2, 1, 0]], ids=str)
def test_holders_get_parts_of_what_they_have_when_replicas_grow_in_number(ranks: list[int]) -> None:
    made = plan((8192, 8192), "bf16", Layout(Mesh(2), [0, None]), Layout(Mesh(4, ranks=ranks), [None, None]))
    assert made.planner == "spread"
    # of its half each holder keeps a quarter, sends the other, and gathers what it lacks
    moved = verify(made)
    assert made.volume_ratio == 1.0
    assert max(moved.sent.values()) == max(moved.received.values()) == made.bounds.lb


def test_any_replicas_may_get_parts_first() -> None:
    moved = 0
    cases = [
        # replicas of rows, of an uneven dimension, and of what only the last dimension can be divided over
        ((12, 6), Layout(Mesh(2), [0, None]), Layout(Mesh((3, 2)), [0, None])),
        ((7, 5), Layout(Mesh(2), [0, None]), Layout(Mesh(6), [None, None])),
        ((4, 6), Layout(Mesh(2), [None, 0]), Layout(Mesh((2, 3)), [(0, Cyclic(1)), None])),
        *(random_case(seed, FAMILIES) for seed in range(300)),
    ]
    for shape, src, dst in cases:
        try:
            made = plan(shape, "int32", src, dst, planners=["spread"])
        except RedistError:
            # nothing is replicated, or no part can be divided
            continue
        verify(made)
        full = torch.arange(prod(shape), dtype=torch.int32).reshape(shape)
        found = simulate(made, {rank: part_of(full, src, rank) for rank in src.mesh.ranks})
        assert all(torch.equal(found[rank], part_of(full, dst, rank)) for rank in dst.mesh.ranks)
        moved += made.communicates
    assert moved > 5


def test_reductions_are_scattered_over_their_contributors() -> None:
    # four contributions to all of 1296 elements, of which the six needers have few themselves
    mesh = Mesh((2, 4))
    src, dst = Layout(mesh, [None, 0, None, None], {1: "sum"}), Layout(mesh, [None, None, (0, 1), None])
    direct, made = (plan((6, 6, 6, 6), "float32", src, dst, planners=[name]) for name in ("direct", "scatter"))
    assert (direct.volume_ratio * 648, made.bounds.lb) == (756, 648)
    assert [(step.op, step.recv) for step in made.steps] == [("reduce", 486), ("exchange", 189)]
    verify(made)


def test_reductions_are_scattered_evenly_first_and_then_near_to_where_they_are_needed() -> None:
    # divided as in the target, in which one rank needs all, that rank would combine all
    src, dst = Layout(Mesh(6), [None, None, None], {0: "sum"}), Layout(Mesh(6), [None, 0, None])
    made = plan((6, 1, 4), "float32", src, dst, planners=["scatter"])
    assert [(step.op, step.recv) for step in made.steps] == [("reduce", 20), ("exchange", 20)]


def test_scattered_reductions_leave_contributions_what_they_are_where_the_target_keeps_them() -> None:
    # the target keeps the four that the first axis counts, and not half of them or none
    mesh = Mesh((4, 3))
    src, dst = Layout(mesh, [None, None], {0: "max", 1: "max"}), Layout(mesh, [None, None], {0: "max"})
    made = plan((14, 15), "int64", src, dst, planners=["scatter"])
    assert [step.layout for step in made.steps] == ["[-, 1/]+max(0)", "[-, -]+max(0)"]
    verify(made)
    # in the default choice, under a limit that leaves rounds of a direct exchange slower
    assert plan((14, 15), "int64", src, dst, memory_limit=5400).planner == "scatter"
    verify(plan((14, 15), "int64", src, dst, memory_limit=5400))
    # what is reduced is cut into factors all the same
    mesh = Mesh((2, 6))
    src, dst = Layout(mesh, [None, None], {0: "sum", 1: "sum"}), Layout(mesh, [None, None], {0: "sum"})
    made = plan((3, 8), "int16", src, dst, planners=["scatter"])
    assert [step.layout for step in made.steps] == ["[2/, 1/]+sum(0)", "[-, -]+sum(0)"]
    verify(made)


def test_holders_of_one_part_share_what_only_they_have() -> None:
    # four ranks hold each part and need none of it: together they send it once, 624 elements
    mesh = Mesh((4, 2, 4))
    found = bounds((32, 10, 13), Layout(mesh, [1, 2, None]), Layout(mesh, [(2, 1, 0), None, None]))
    assert (found.recv, found.send, found.lb_kind, found.single_hop) == (130, 156, "send", 156)


def test_holders_ask_nothing_of_others_in_their_node() -> None:
    pairs = Layout(Mesh((2, 2)), [1])
    assert least_inside_groups(Problem((8,), pairs, pairs), lambda rank: rank % 2) == 0
    # in each node one of two ranks has what the other needs as well
    assert least_inside_groups(Problem((8,), pairs, Layout(Mesh(4), [None])), lambda rank: rank // 2) == 4


def test_no_set_of_ranks_gives_a_larger_bound() -> None:
    for seed in range(60):
        case = random_case(seed, "COBUR", [(4,), (2, 2), (3, 2)])
        problem, limits = Problem(*case), bounds(*case)
        groups = chain.from_iterable(combinations(problem.ranks, size) for size in range(1, len(problem.ranks)))
        assert limits.lb == max(ceil(max(crossing(problem, group)) / len(group)) for group in groups)


def _least_cut(network: Network, nodes: list[Any]) -> int:
    """The least capacity out of any set that holds the source and not the sink."""
    inner = [node for node in nodes if node not in ("s", "t")]
    cuts = []
    for size in range(len(inner) + 1):
        for chosen in combinations(inner, size):
            side = {"s", *chosen}
            cuts.append(sum(room for a in side for b, room in network.get(a, {}).items() if b not in side))
    return min(cuts)


def test_the_largest_flow_is_the_least_cut() -> None:
    rng = random.Random(0)
    for _ in range(150):
        nodes: list[Any] = ["s", "t", *range(rng.randint(1, 5))]
        network: Network = {}
        for a in nodes:
            for b in nodes:
                if a != b and rng.random() < 0.5:
                    add_edge(network, a, b, rng.randint(0, 9))
        expected = _least_cut(network, nodes)
        assert saturate(network, "s", "t") == expected


def test_an_edge_with_room_left_is_tried_again_by_the_next_path(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    monkeypatch.setattr(flow, "_levels", lambda *args, levels=flow._levels: searches.append(0) or levels(*args))
    network: Network = {}
    for k in range(50):
        add_edge(network, "s", k, 1)
        add_edge(network, k, "all", 1)
    add_edge(network, "all", "t", 100)
    assert saturate(network, "s", "t") == 50
    # one for all paths of three edges, one that finds no other
    assert len(searches) == 2


@pytest.mark.slow
def test_what_a_node_has_is_shared_inside_without_a_rank_that_does_it_all() -> None:
    compared = above = 0
    for seed in range(250):
        case = random_case(seed, "COBU")
        if case.src.mesh.num_axes > 1:
            problem, nodes = Problem(*case), Topology.from_mesh_axis(case.src.mesh, 0)
            least = max(bounds(*case).lb, least_inside_groups(problem, nodes.levels[0].group_of))
            above += busiest(hierarchical_phases(problem, nodes)) > 1.5 * least
            compared += least > 0
    assert above <= compared // 100


def test_a_lone_holder_in_a_node_leaves_the_rest_to_those_who_need_the_same() -> None:
    # in every node one rank of each pair of columns has the two rows that the other three need
    mesh = Mesh((4, 2, 4))
    src, dst = Layout(mesh, [2, 1]), Layout(mesh, [0, 1])
    made = plan((24, 2), "bf16", src, dst, topology=Topology.from_mesh_axis(mesh, 0), planners=["hierarchical"])
    proven = verify(made)
    assert max(proven.sent.values()) == made.bounds.lb == 6
    assert [(step.op, step.layout) for step in made.steps] == [("fetch", "on the way"), ("share", "[0, 1]")]


@pytest.mark.parametrize("planner", ["naive", "collectives", "scatter", "hierarchical"])
def test_plans_of_several_stages_say_exactly_what_the_busiest_rank_moves(planner: str) -> None:
    # different ranks are busiest in the two stages
    ragged = Layout(Mesh((4, 2)), [(1, Ragged((0, 188, 384))), None], {0: "avg"}), Layout(Mesh(2), [None, None])
    cases = [((384, 8), *ragged), *(random_case(seed, FAMILIES + "PP") for seed in range(60))]
    compared = 0
    for case in cases:
        for topology in (Topology(), Topology.nodes(3)):
            try:
                made = plan(case[0], "bf16", *case[1:], topology=topology, planners=[planner])
            except RedistError:
                continue
            if len(made.stages) > 1 and made.bounds.lb:
                found = verify(made)
                most = max((*found.received.values(), *found.sent.values()))
                replicas = any(problem.src_replicas > 1 for problem in made.problems)
                # where holders are asked by nearness, the busiest ranks of the stages are added
                assert made.volume_ratio == most / made.bounds.lb or (replicas and topology.levels)
                with pytest.raises(RedistError, match="the plan claims"):
                    verify(replace(made, volume_ratio=0.99 * most / made.bounds.lb))
                if not (replicas and topology.levels):
                    with pytest.raises(RedistError, match="the plan claims"):
                        verify(replace(made, volume_ratio=made.volume_ratio + 0.01))
                compared += 1
    assert compared > 2


def test_no_planner_takes_less_than_a_plan_says_that_it_takes_at_least() -> None:
    # small messages are quick, so that rounds are quicker than one exchange; the library has no curve of its own
    bent = {"all_to_all": ((64.0, 1e-5), (4096.0, 1e-3))}
    models = [CommModel.preset("flat"), CommModel.preset("h200x4")]
    models += [CommModel("bent", Topology(), bent, has_library=library) for library in (False, True)]
    compared = 0
    for seed in range(700):
        case, rng = random_case(seed, FAMILIES + "P"), random.Random(seed)
        num_ranks = 1 + max(*case.src.mesh.ranks, *case.dst.mesh.ranks)
        hosts = Topology.from_hosts([rng.choice("abc") for _ in range(num_ranks)])
        options = {"cost_model": rng.choice(models), "topology": rng.choice([None, Topology.nodes(2), hosts])}
        if rng.random() < 0.3:
            options["memory_limit"] = 3 * bounds(*case).memory + 4096
        made = plan(case.shape, "bf16", case.src, case.dst, **options)
        for other in made.alternatives:
            if "takes at least" in other.reason:
                try:
                    asked = plan(case.shape, "bf16", case.src, case.dst, planners=[other.planner], **options)
                except RedistError:
                    continue  # it has no plan
                assert asked.time >= other.seconds * (1 - 1e-12), (seed, other)
                compared += 1
    assert compared > 500


@pytest.mark.parametrize("seed", [1101, 1200, 1392, 2053])
def test_by_curves_that_fall_more_bytes_take_no_less(seed: int) -> None:
    # as a noisy machine measures them
    falling = CommModel("falling", Topology(), {"all_to_all": ((16.0, 1e-3), (2048.0, 1e-6))})
    assert falling.curves["all_to_all"] == ((16.0, 1e-3), (2048.0, 1e-3))
    case = random_case(seed, FAMILIES + "P")
    made = plan(case.shape, "bf16", case.src, case.dst, cost_model=falling)
    (said,) = [other.seconds for other in made.alternatives if other.planner == "naive"]
    asked = plan(case.shape, "bf16", case.src, case.dst, cost_model=falling, planners=["naive"])
    assert asked.time >= said * (1 - 1e-12)


def test_the_least_seconds_of_every_planner_hold_for_its_candidates() -> None:
    bent = {"all_to_all": ((64.0, 1e-5), (4096.0, 1e-3))}
    models = [CommModel("bent", Topology(), bent, call_seconds=1e-2, has_library=library) for library in (False, True)]
    models += [CommModel.preset("flat"), CommModel.preset("nccl")]
    compared = 0
    for seed in range(800):
        case, rng = random_case(seed, "CUMPPP"), random.Random(seed)
        nodes = Topology.nodes(rng.choice([2, 4]), bandwidth=rng.choice([1e7, 1e12]), latency=rng.choice([0.0, 1e-4]))
        model = rng.choice(models).in_groups_of(rng.choice([None, nodes]))
        problem = Problem(*case)
        limits = bounds_of(problem, model.topology)
        request = Request(problem, 2, model)
        if limits.lb:
            for name in ("spread", "forward", "relay", "scatter", "hierarchical"):
                planner = _PLANNERS[name]
                made = planner.make(request, limits) if planner.applies(request, limits) else None
                if made is not None:
                    assert made.seconds >= planner.least_seconds(request, limits) * (1 - 1e-12), (seed, name)
                    compared += 1
    assert compared > 500


def test_where_needers_have_no_room_to_forward_sharing_takes_one_exchange() -> None:
    mesh = Mesh((3, 4))
    nodes = Topology.from_hosts(["a" if rank in (0, 1, 5, 10, 11) else "b" for rank in range(12)])
    task = (12, 4), "bf16", Layout(mesh, [0, None]), Layout(mesh, [1, None])
    asked = plan(*task, topology=nodes, planners=["hierarchical"])
    assert (len(asked.steps), asked.volume_ratio) == (1, 4 / 3)
    made = plan(*task, topology=nodes)
    said = {other.planner: other.seconds for other in made.alternatives}
    assert said.get("hierarchical", made.time) <= asked.time


def test_where_relays_move_no_less_explain_names_none() -> None:
    mesh = Mesh((2, 3, 2))
    made = plan((24, 24, 12), "bf16", Layout(mesh, [None, None, 2], {1: "sum"}), Layout(mesh, [None, 2, (0, 1)]))
    limits = made.bounds
    assert best_relay(Problem(made.shape, made.src, made.dst), limits) == ("direct", limits.single_hop)
    assert "no relay would move less; no closer, since contributions have to meet" in made.explain()


def test_what_two_exchanges_divide_may_be_quicker_by_a_measured_curve() -> None:
    # each of the two moves half of what one of them would, where the curve bends
    mesh = Mesh(4)
    pending, whole = Layout(mesh, [None] * 3, {0: "max"}), Layout(mesh, [None] * 3)
    made = plan((192,) * 3, "bf16", pending, whole, cost_model=CommModel.preset("h200x8"))
    direct = plan((192,) * 3, "bf16", pending, whole, cost_model=CommModel.preset("h200x8"), planners=["direct"])
    assert (made.planner, made.time < direct.time) == ("relay", True)
