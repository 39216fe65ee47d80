"""What closed forms say of exchanges between groups of ranks, against the transfers that such plans make."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from redist_cases import FAMILIES, Case, random_case

from optim_redist import CommModel, Layout, Mesh, Plan, Ragged, Topology, bounds, plan, plan_text, verify
from optim_redist._methods.borders import crossings, volumes_of
from optim_redist._methods.direct import direct_phases
from optim_redist._methods.hierarchical import hierarchical_phases
from optim_redist._methods.node_volumes import node_volumes
from optim_redist.cost import Level
from optim_redist.moves import Volumes
from optim_redist.plan_text import traffic
from optim_redist.problem import Problem


def _topologies(case: Case, seed: int) -> list[Topology]:
    """Nodes of consecutive ranks, nodes along a mesh axis, pairs inside fours."""
    rng = random.Random(seed)
    pairs, fours = Topology.nodes(2).levels[0], Topology.nodes(4).levels[0]
    found = [Topology.nodes(rng.choice([2, 3, 4, 8])), Topology(levels=(pairs, replace(fours, name="rack")))]
    if case.src.mesh == case.dst.mesh:
        found.append(Topology.from_mesh_axis(case.src.mesh, rng.randrange(case.src.mesh.num_axes)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "P"])
def test_one_exchange_crosses_what_its_transfers_cross(family: str) -> None:
    for seed in range(30):
        case = random_case(seed, family)
        problem, limits = Problem(*case), bounds(*case)
        for topology in _topologies(case, seed):
            for nearest in (False, True):
                (phase,) = direct_phases(problem, topology, nearest=nearest)
                moved = volumes_of(phase, topology)
                borders, busiest = crossings(problem, topology, None if nearest else limits.direct_send)
                assert borders == moved.borders
                assert max(busiest, limits.direct_send) == max(moved.sent.values(), default=0)
                assert limits.direct_recv == max(moved.received.values(), default=0)


def test_nearest_holders_send_what_is_asked() -> None:
    for seed in range(60):
        case = random_case(seed)
        problem = Problem(*case)
        for topology in _topologies(case, seed) if problem.src_replicas > 1 else ():
            (phase,) = direct_phases(problem, topology, nearest=True)
            for transfer in phase.transfers:
                holders = problem.holders[problem.src_points[transfer.sender], max(transfer.contribution, 0)]
                least = min(topology.distance(holder, transfer.receiver) for holder in holders)
                assert topology.distance(transfer.sender, transfer.receiver) == least


def test_near_holders_are_found_without_measuring_all_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, group_of = [], Level.group_of

    def counting(level: Level, rank: int) -> int:
        asked.append(rank)
        return group_of(level, rank)

    monkeypatch.setattr(Level, "group_of", counting)
    mesh = Mesh((16, 16))
    problem = Problem((256, 256), Layout(mesh, [0, None]), Layout(mesh, [None, 1]))
    direct_phases(problem, Topology.nodes(8))
    # each holder, and each receiver, of every part; pairs of these would be 122,880
    assert len(asked) <= 16 * 256 * 2


@pytest.mark.slow
def test_hierarchical_volumes_are_those_of_its_transfers() -> None:
    said = left_to_lists = 0
    for seed in range(250):
        case = random_case(seed)
        problem, lb = Problem(*case), bounds(*case).lb
        if problem.num_contributions > 1:
            continue
        for topology in _topologies(case, seed):
            nodes = node_volumes(problem, topology, lb)
            if nodes is None:
                left_to_lists += 1
                continue
            phases = [volumes_of(phase, topology) for phase in hierarchical_phases(problem, topology)]
            assert [_rank_by_rank(moved) for moved in nodes.exchanges] == [_rank_by_rank(moved) for moved in phases]
            said += 1
    assert said > 300
    assert left_to_lists < 300


@pytest.mark.slow
def test_what_a_plan_brings_across_borders_is_what_its_transfers_do() -> None:
    compared = dict.fromkeys(("direct", "nearest", "relay", "hierarchical", "forward"), 0)
    for seed in range(300):
        case = random_case(seed, FAMILIES + "P")
        for topology in _topologies(case, seed):
            made = plan(case.shape, "bf16", case.src, case.dst, topology=topology)
            pairs = traffic(made)
            for cut, inbound, outbound in plan_text.crossings(made, made.bounds.cuts):
                group = set(cut.ranks)
                assert inbound == sum(n for (a, b), n in pairs.items() if b in group and a not in group)
                assert outbound == sum(n for (a, b), n in pairs.items() if a in group and b not in group)
                for stage in made.stages:
                    compared[stage.method] += 1
    assert all(compared[method] > 100 for method in ("direct", "hierarchical")), compared


@pytest.mark.timing
@pytest.mark.parametrize("replicated", [False, True])
def test_plans_of_a_thousand_ranks_are_explained_without_their_transfers(replicated: bool) -> None:
    mesh = Mesh((128, 8))
    src, dst = (Layout(mesh, dims) for dims in ([(0, 1), None], [None, None if replicated else (0, 1)]))
    made = plan((8192, 8192), "bf16", src, dst, topology=Topology.nodes(8))
    start = time.process_time()
    assert "the node of ranks 0–7" in made.explain()
    # each pair of ranks for each node took a minute
    assert time.process_time() - start < 2


def _rank_by_rank(moved: Volumes) -> Volumes:
    sent, received = ({rank: n for rank, n in counts.items() if n} for counts in (moved.sent, moved.received))
    return moved._replace(sent=sent, received=received)


def test_ranks_that_share_a_node_with_a_holder_are_not_served_from_outside() -> None:
    # of two holders in each node one is asked by five ranks of its node: balanced, one of them would be served
    # from another node
    case = random_case(680, "COBURIEKMP")
    nodes = Topology.from_mesh_axis(case.src.mesh, 0)
    made = plan(case.shape, "bf16", case.src, case.dst, topology=nodes)
    verify(made)
    assert made.planner == "nearest"
    assert made.stages[0].method == "nearest"
    direct = plan(case.shape, "bf16", case.src, case.dst, topology=nodes, planners=["direct"])
    assert direct.time - made.time > 9e-6
    assert max(made.steps[0].send, made.steps[0].recv) >= direct.bounds.single_hop


def test_sharing_inside_pays_for_large_tensors() -> None:
    mesh = Mesh((4, 8))
    src, dst = Layout(mesh, [(0, 1), None]), Layout(mesh, [None, 0])
    small, large = (plan((n, n), "bf16", src, dst, cost_model=CommModel.preset("nodes-400g")) for n in (64, 16384))
    assert (small.planner, large.planner) == ("direct", "hierarchical")
    assert [step.op for step in large.steps] == ["fetch", "share"]
    for made in (small, large):
        verify(made)
    assert {other.planner for other in large.alternatives} == {"direct", "collectives", "naive"}


def test_a_plan_between_nodes_says_why_a_rank_moves_more_than_the_bound() -> None:
    def text(shape: tuple[int, ...], src: Layout, dst: Layout) -> tuple[Plan, str]:
        nodes = Topology.from_mesh_axis(src.mesh, 0)
        made = plan(shape, "bf16", src, dst, topology=nodes, planners=["hierarchical"])
        return made, made.explain()

    mesh = Mesh((3, 2))
    made, why = text((7, 8, 11, 9), Layout(mesh, [0, None, None, 1]), Layout(mesh, [None, 0, None, None]))
    assert ([step.op for step in made.steps], 1 < made.volume_ratio < 1.25) == (["fetch", "share"], True)
    assert "as everything enters a node once, ranks that fetch it send it on to others in theirs" in why
    # nobody sends anything on: the one holder sends half of it to each of three others
    mesh = Mesh((2, 2))
    made, why = text((8,), Layout(mesh, [((0, 1), Ragged([0, 8, 8, 8, 8]))]), Layout(mesh, [1]))
    assert ([step.op for step in made.steps], made.volume_ratio) == (["fetch"], 1.5)
    assert "send it on" not in why
    assert "in one step, straight from holders, the busiest rank moves 12: several ranks need what one has" in why
