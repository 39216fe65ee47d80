"""Plans proven symbolically: every planner, every family, memory limits, determinism, JSON."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redist_cases import FAMILIES, Case, busiest, example_cases, random_case, replicated_contributions

from optim_redist import (
    CommModel,
    Layout,
    LayoutError,
    Mesh,
    Plan,
    PlanInfeasibleError,
    Ragged,
    RedistError,
    RepeatedExchange,
    Topology,
    bounds,
    compile,
    explain,
    plan,
    same_ownership,
    simulate,
    verify,
)
from optim_redist._methods.borders import border_volumes
from optim_redist._methods.candidates import phases_of
from optim_redist._methods.hierarchical import hierarchical_phases
from optim_redist._methods.own import own_phases
from optim_redist._methods.relabel import _assign
from optim_redist._methods.relay import relay_phases
from optim_redist.moves import FINISHED, Phase, Stage, Transfer
from optim_redist.planners import best_relay
from optim_redist.planning import clear_cache
from optim_redist.problem import Problem
from optim_redist.verification import _verify_stage

CHUNK = 64 * 1024
NAMED = example_cases()


@pytest.mark.parametrize("case", [n[2] for n in NAMED], ids=[n[0] for n in NAMED])
def test_examples_are_planned_in_one_exchange_at_the_bound(case: Case) -> None:
    shape, src, dst = case
    made = plan(shape, "bf16", src, dst)
    proven = verify(made)
    assert len(made.steps) == 1
    assert max((*proven.received.values(), *proven.sent.values()), default=0) == made.bounds.single_hop
    assert made.volume_ratio == 1.0 or made.bounds.single_hop > made.bounds.lb
    if made.bounds.lb == 0:
        assert not made.communicates
        assert made.planner == "local"


def test_relays_beat_the_single_hop_bound() -> None:
    shape, src, dst = next(case for name, _, case in NAMED if name == "U030")
    made = plan(shape, "bf16", src, dst, planners=["forward"])
    proven = verify(made)
    assert max((*proven.received.values(), *proven.sent.values())) == made.bounds.lb == 1248
    # large enough, two hops at the bound beat one above it
    large = tuple(n * 64 for n in shape)
    sizes = Layout(src.mesh, src.dims), Layout(dst.mesh, dst.dims)
    dims = (
        [None if s is None else s.axes for s in sizes[0].dims],
        [None if s is None else s.axes for s in sizes[1].dims],
    )
    chosen = plan(large, "bf16", Layout(src.mesh, dims[0]), Layout(dst.mesh, dims[1]))
    assert chosen.planner in ("direct", "forward")
    assert {other.planner for other in chosen.alternatives} >= {"naive", "collectives"}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "P"])
def test_random_plans_are_right(family: str) -> None:
    for seed in range(25):
        _prove(seed, family)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 100_000, 5_000))
def test_a_hundred_thousand_plans_are_right(first: int) -> None:
    for seed in range(first, first + 5_000):
        shape, src, dst = random_case(seed, FAMILIES + "P")
        made = plan(shape, "bf16", src, dst)
        verify(made)
        if made.bounds.single_hop > made.bounds.lb:
            relay, _ = best_relay(Problem(shape, src, dst), made.bounds)
            verify(plan(shape, "bf16", src, dst, planners=[relay]))


def _prove(seed: int, family: str) -> None:
    shape, src, dst = random_case(seed, family)
    verify(plan(shape, "bf16", src, dst))
    for planner in ("direct", "spread", "forward", "relay", "scatter", "naive"):
        try:
            made = plan(shape, "bf16", src, dst, planners=[planner])
        except PlanInfeasibleError:
            raise
        except RedistError:
            # that planner has nothing to offer for this case
            continue
        verify(made)
    if src.mesh.num_axes > 1 and set(dst.mesh.ranks) <= set(src.mesh.ranks):
        nodes = Topology.from_mesh_axis(src.mesh, 0)
        verify(plan(shape, "bf16", src, dst, topology=nodes))
        if src.partial:
            return
        made = plan(shape, "bf16", src, dst, topology=nodes, planners=["hierarchical"])
        verify(made)


@pytest.mark.parametrize("family", list("COBURIEK"))
def test_what_enters_a_node_is_the_cut_and_no_rank_receives_more_than_it_needs(family: str) -> None:
    for seed in range(20):
        shape, src, dst = random_case(seed, family)
        if src.mesh.num_axes < 2:
            continue
        problem, nodes = Problem(shape, src, dst), Topology.from_mesh_axis(src.mesh, 0)
        phases = hierarchical_phases(problem, nodes)
        entered: dict[int, int] = {}
        received: dict[int, int] = {}
        for phase in phases:
            for (_, group), (inbound, _) in border_volumes(phase, nodes).items():
                entered[group] = entered.get(group, 0) + inbound
            for rank, count in phase.received().items():
                received[rank] = received.get(rank, 0) + count
        for cut in bounds(shape, src, dst, nodes).cuts:
            assert entered.get(nodes.levels[0].group_of(cut.ranks[0]), 0) == cut.inbound
        for rank, point in problem.dst_points.items():
            assert received.get(rank, 0) == problem.num_needed(point) - problem.num_kept[rank]


def test_nested_levels_fetch_once_at_every_level() -> None:
    mesh = Mesh((2, 2, 2, 2))
    src, dst = Layout(mesh, [(0, 1, 2, 3), None]), Layout(mesh, [None, 3])
    pairs, quads = Topology.nodes(2).levels[0], Topology.nodes(4).levels[0]
    eights = Topology.nodes(8).levels[0]
    tree = Topology(levels=(pairs, replace(quads, name="rack"), replace(eights, name="row")))
    made = plan((32, 16), "bf16", src, dst, topology=tree, planners=["hierarchical"])
    verify(made)
    ((problem, phases),) = made.phases
    assert len(phases) > 1
    entered: dict[tuple[str, int], int] = {}
    for phase in phases:
        for group, (inbound, _) in border_volumes(phase, tree).items():
            entered[group] = entered.get(group, 0) + inbound
    for cut in made.bounds.cuts:
        level = next(v for v in tree.levels if v.name == cut.level)
        assert entered[cut.level, level.group_of(cut.ranks[0])] == cut.inbound
    assert problem.num_elements == 512


def test_the_notebooks_example_between_nodes() -> None:
    mesh = Mesh((4, 2, 4))
    src = Layout.from_json(_third("src", mesh))
    dst = Layout.from_json(_third("dst", mesh))
    nodes = Topology.from_mesh_axis(mesh, 0)
    volumes = {}
    for planner in ("direct", "hierarchical"):
        made = plan((8, 8, 8, 4), "bf16", src, dst, topology=nodes, planners=[planner])
        verify(made)
        volumes[planner] = max(_entered(made, nodes).values())
    # what nearby holders spare, and the bound
    assert volumes["hierarchical"] == 384
    assert volumes["direct"] == 1536


def _third(side: str, mesh: Mesh) -> dict[str, Any]:
    cyclic = {"src": [([0, 1], 1), None, None, None], "dst": [None, ([1], 4), ([0], 2), None]}[side]
    dims = [None if item is None else {"axes": item[0], "kind": "cyclic", "block": item[1]} for item in cyclic]
    return {"format": "optim-redist.layout/1", "mesh": mesh.to_json(), "dims": dims, "partial": {}}


def _entered(made: Plan, topology: Topology) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for _, phases in made.phases:
        for phase in phases:
            for group, (inbound, _) in border_volumes(phase, topology).items():
                found[group] = found.get(group, 0) + inbound
    return found


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
@example(seed=154)
def test_memory_limits_are_kept_or_proven_too_small(seed: int) -> None:
    shape, src, dst = random_case(seed, FAMILIES)
    free = plan(shape, "bf16", src, dst, planners=["direct"])
    if src.partial or not free.communicates:
        return
    stored = free.bounds.memory * 2
    for limit in (stored + CHUNK, stored + (free.peak_bytes - stored) // 3 + 64):
        if limit < stored + CHUNK:
            try:
                made = plan(shape, "bf16", src, dst, memory_limit=limit)
            except PlanInfeasibleError:
                continue
        else:
            made = plan(shape, "bf16", src, dst, memory_limit=limit)
        assert verify(made).peak * 2 <= made.peak_bytes <= limit
    # a part that stays as it is counts once
    (problem,) = free.problems
    held = [max(both) if problem.stays_whole(rank) else sum(both) for rank, both in problem.num_stored.items()]
    needed = max(held) * 2
    with pytest.raises(PlanInfeasibleError, match="no method can stay below it") as caught:
        plan(shape, "bf16", src, dst, memory_limit=needed - 1)
    assert caught.value.proven
    assert sum(caught.value.terms.values()) == needed
    assert caught.value.limit == needed - 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_a_limit_that_an_error_asks_for_is_enough_and_no_more_than_without_limits(seed: int, donate: bool) -> None:
    shape, src, dst = random_case(seed, FAMILIES)
    free = plan(shape, "bf16", src, dst, donate=donate)
    if not free.peak_bytes:
        return
    with pytest.raises(PlanInfeasibleError) as caught:
        plan(shape, "bf16", src, dst, memory_limit=0, donate=donate)
    least = sum(caught.value.terms.values())
    try:
        made = plan(shape, "bf16", src, dst, memory_limit=least, donate=donate)
    except PlanInfeasibleError as error:
        asked = sum(error.terms.values())
        assert least < asked <= max(least + CHUNK, free.peak_bytes)
        if free.peak_bytes <= least + CHUNK:
            assert asked <= free.peak_bytes
        made = plan(shape, "bf16", src, dst, memory_limit=asked, donate=donate)
        assert made.peak_bytes <= asked
    else:
        assert made.peak_bytes <= least


def test_large_tensors_under_a_small_staging_limit() -> None:
    mesh = Mesh((2, 4))
    src, dst = Layout(mesh, [0, 1]), Layout(mesh, [1, 0])
    stored = 2 * 2 * 8192 * 8192 // 8
    made = plan((8192, 8192), "bf16", src, dst, memory_limit=stored + 4 * 2**20)
    assert made.steps[0].rounds == 8
    assert stored < made.peak_bytes <= stored + 4 * 2**20
    verify(made)


def test_plans_are_deterministic_across_hash_seeds() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from redist_cases import random_case; from optim_redist import plan, Topology;"
        "cases = [random_case(s) for s in range(40)];"
        "print([plan(c.shape, 'bf16', c.src, c.dst).hash for c in cases]);"
        "c = random_case(7, 'B', [(4, 2)]);"
        "p = plan(c.shape, 'bf16', c.src, c.dst, topology=Topology.nodes(2), planners=['hierarchical']);"
        "print(p.hash, p.phases[0][1])"
    )
    here = os.path.dirname(__file__)
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, here],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (0, 1)
    }
    assert len(outputs) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_json_round_trip(seed: int) -> None:
    shape, src, dst = random_case(seed, FAMILIES + "P")
    made = plan(shape, "float32", src, dst, cost_model=CommModel.preset("nodes-400g"))
    again = Plan.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert again.hash == made.hash
    verify(again)


def test_newer_plans_are_refused_by_name() -> None:
    made = plan((4,), "int8", Layout(Mesh(2), [0]), Layout(Mesh(2), [None]))
    with pytest.raises(RedistError, match=r"optim-redist\.plan/2"):
        Plan.from_json({**made.to_json(), "format": "optim-redist.plan/2"})


@pytest.mark.parametrize("damage", [None, "x", 3, [{}], {}], ids=repr)
def test_json_that_somebody_damaged_says_what_it_is_of(damage: Any) -> None:
    made = plan((8,), "int8", Layout(Mesh(4), [0]), Layout(Mesh(4), [None]), topology=Topology.nodes(2))
    for whole, read in (
        (made.to_json(), Plan.from_json),
        (made.src.to_json(), Layout.from_json),
        (made.src.mesh.to_json(), Mesh.from_json),
        (made.topology.to_json(), Topology.from_json),
        (CommModel.preset("h200x4").to_json(), CommModel.from_json),
    ):
        for field in whole:
            # a RedistError, unless the field may be anything, or these
            with suppress(RedistError):
                read({**whole, field: damage})
            with suppress(RedistError):
                read({name: value for name, value in whole.items() if name != field})
    for read in (Plan.from_json, Layout.from_json, CommModel.from_json):
        if damage != {}:
            with pytest.raises(RedistError, match=r"is made of a dict, as json\.loads makes it of a text, got"):
                read(damage)
    with pytest.raises(LayoutError, match="the JSON of a layout is damaged: KeyError: 'dims'"):
        Layout.from_json({})


def test_the_cache_returns_the_same_plan() -> None:
    mesh = Mesh(4)
    args = (8, 8), "bf16", Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    assert plan(*args) is plan((8, 8), "bfloat16", Layout(Mesh(4), [0, None]), args[3])
    assert plan(*args) is not plan(*args, memory_limit=2**30)


@pytest.mark.parametrize("partial", [None, {2: "sum"}], ids=["", "sum"])
def test_plans_show_the_names_of_their_own_axes(partial: dict[int, str] | None) -> None:
    made = []
    for names in [("a", "b", "c"), ("dp", "tp", "pp"), None]:
        mesh = Mesh((2, 4, 2), names=names)
        src, dst = Layout(mesh, [0, 1], partial), Layout(mesh, [1, 0])
        found = plan((8, 8), "float32", src, dst, planners=["direct"])
        for layout in (found.src, found.dst, *[layout for stage in found.stages for layout in (stage.src, stage.dst)]):
            assert layout.mesh.names == names
        assert found.steps[-1].layout == str(dst)
        assert f"from  {src} on {mesh}" in str(found)
        assert plan((8, 8), "float32", src, dst, planners=["direct"]) is found
        made.append(found)
    assert len({each.hash for each in made}) == 1


def test_the_certificate_travels() -> None:
    error = PlanInfeasibleError(1, {"source": 8, "target": 4}, 6, proven=True)
    error.add_note("rank 3 raised it")
    for copied in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert (str(copied), vars(copied)) == (str(error), vars(error))


@pytest.mark.slow
@pytest.mark.parametrize("topology", [Topology(), Topology.nodes(2)], ids=["flat", "nodes"])
@pytest.mark.parametrize("family", FAMILIES + "P")
def test_what_one_rank_takes_part_in_is_its_part_of_the_phases(family: str, topology: Topology) -> None:
    compared = 0
    for seed in range(20):
        problem = Problem(*random_case(seed, family))
        methods = [("direct", 1), ("nearest", 1), ("direct", 2), ("direct", 5)]
        if problem.num_contributions > 1:
            methods += [("relay", 1), ("relay", 3)]
        for method, rounds in methods:
            stage = Stage(method, method, problem.src, problem.dst, rounds)
            phases = phases_of(problem, stage, topology)
            for rank in problem.ranks:
                own = own_phases(problem, stage, topology, rank)
                if own is None:
                    assert problem.src_replicas > 1
                    assert method != "relay"
                    assert topology.levels or rounds > 1
                    continue
                for part, reduces, phase in zip(*own, phases, strict=True):
                    assert reduces or all(t.contribution == FINISHED for t in phase.transfers)
                    assert part.transfers == tuple(t for t in phase.transfers if rank in (t.sender, t.receiver))
                    compared += len(part.transfers)
    assert compared > 50


@pytest.mark.parametrize("rounds", [1, 3])
def test_what_one_rank_relays_where_several_hold_each_contribution(rounds: int) -> None:
    for case in replicated_contributions():
        problem = Problem(*case)
        stage = Stage("relay", "relay", problem.src, problem.dst, rounds)
        phases = phases_of(problem, stage, Topology())
        for rank in problem.ranks:
            own = own_phases(problem, stage, Topology(), rank)
            assert own is not None
            for part, phase in zip(own[0], phases, strict=True):
                assert part.transfers == tuple(t for t in phase.transfers if rank in (t.sender, t.receiver))


@pytest.mark.timing
def test_relays_of_contributions_that_many_ranks_hold_are_planned_without_their_transfers() -> None:
    mesh = Mesh((32, 32))
    src, dst = Layout(mesh, [None, None], {0: "sum"}), Layout(mesh, [0, None])
    start = time.process_time()
    made = plan((8192, 8192), "bfloat16", src, dst, planners=["relay"])
    own_phases(made.problems[0], made.stages[0], made.topology, 5)
    # two lists of a million transfers each took a minute
    assert time.process_time() - start < 3


def test_unknown_choices_are_refused() -> None:
    args = (8,), "bf16", Layout(Mesh(4), [0]), Layout(Mesh(4), [None])
    with pytest.raises(RedistError, match="planners are"):
        plan(*args, planners=["magic"])
    with pytest.raises(RedistError, match="dtype"):
        plan((8,), "float5", args[2], args[3])
    with pytest.raises(RedistError, match=r"cannot start a pending sum of float8_e8m0fnu: .* has no zero"):
        plan((8,), "float8_e8m0fnu", args[3], Layout(Mesh(4), [None], {0: "sum"}))
    with pytest.raises(RedistError, match=r"sizes are not negative, got shape \(-8,\)"):
        plan((-8,), "bf16", args[2], args[3])
    with pytest.raises(RedistError, match="presets are"):
        CommModel.preset("abacus")
    with pytest.raises(RedistError, match="no group with rank 2"):
        plan(*args, topology=Topology.from_mesh_axis(Mesh(2), 0))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("cost_model", "h200x8", "cost_model must be a CommModel, got 'h200x8'"),
        ("topology", 4, "topology must be a Topology, got 4"),
        ("memory_limit", "1GiB", "memory_limit must be a number of bytes, got '1GiB'"),
        ("memory_limit", float("nan"), "memory_limit must be a number of bytes, got nan"),
        ("planners", "direct", "planners is 'direct'; give a list"),
        ("planners", 4, "planners is 4; give a list"),
        ("planners", [["direct"]], r"planners cannot be \(\['direct'\],\)"),
        ("cost_model", {"latency": 1}, "cost_model must be a CommModel, got {'latency': 1}"),
        ("memory_limit", [2**20], r"memory_limit cannot be \[1048576\]"),
        ("partial_init", ["divide"], r"partial_init cannot be \['divide'\]"),
        ("donate", [], r"donate cannot be \[\]"),
        ("donate", "no", "donate is True or False, got 'no'"),
        ("relabel", 1.5, "relabel is True or False, got 1.5"),
        ("deterministic", None, "deterministic is True or False, got None"),
        ("budget", "9", "budget must be a whole number of states, 0 or more, got '9'"),
        ("budget", -1, "budget must be a whole number of states, 0 or more, got -1"),
        ("memory_limit", float("-inf"), "memory_limit must be a number of bytes, got -inf"),
        ("memory_limit", True, "memory_limit must be a number of bytes, got True"),
        ("shape", 8, "shape must be a sequence of sizes, got 8"),
        ("shape", [[8]], r"shape cannot be \(\[8\],\)"),
        ("src", ["S(0)"], r"src must be a Layout, got \['S\(0\)'\]"),
    ],
    ids=str,
)
def test_options_of_another_type_are_refused_by_name(option: str, value: Any, words: str) -> None:
    task = {"shape": (8,), "dtype": "bf16", "src": Layout(Mesh(4), [0]), "dst": Layout(Mesh(4), [None])}
    with pytest.raises(RedistError, match=words):
        plan(**{**task, option: value})
    if option in ("topology", "shape"):
        with pytest.raises(RedistError, match=words if value != [[8]] else "sizes must be integers"):
            bounds(**{"shape": (8,), "src": task["src"], "dst": task["dst"], option: value})


@pytest.mark.parametrize("limit", [np.int64(1000), Fraction(2001, 2), 1000.5], ids=str)
def test_memory_limits_of_other_types_are_whole_bytes_in_the_plan(limit: Any) -> None:
    task = (8, 8), "bf16", Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0])
    clear_cache()
    made = plan(*task, memory_limit=limit)
    assert type(made.memory_limit) is int
    assert made.hash == plan(*task, memory_limit=1000).hash
    assert plan(*task, memory_limit=float("inf")) == plan(*task)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [int, Fraction, np.int64, np.float32], ids=lambda number: number.__name__)
def test_rates_of_other_types_are_floats_in_the_plan(number: Any) -> None:
    def made(of: Callable[[float], Any]) -> Plan:
        nodes = Topology.nodes(2, bandwidth=of(2.0**35), rank_bandwidth=of(2.0**38), latency=of(1.0))
        curves = {"all_to_all": ((of(1024.0), of(2.0)), (of(4096.0), of(4.0)))}
        model = CommModel("of numbers", nodes, curves, of(2.0**40), of(1.0))
        clear_cache()
        return plan((8, 8), "bf16", Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0]), cost_model=model)

    assert made(number) == made(float)
    assert made(number).hash == made(float).hash


@pytest.mark.parametrize("size", [0, -2, 1.5, "2", None], ids=repr)
def test_a_bound_in_seconds_is_for_elements_of_some_bytes(size: Any) -> None:
    layouts = Layout(Mesh(4), [0]), Layout(Mesh(4), [None])
    with pytest.raises(RedistError, match="itemsize must be a whole number of bytes, at least 1, got"):
        bounds((8,), *layouts, Topology.flat(), itemsize=size)


def test_texts_are_no_layouts() -> None:
    layout: Any = Layout(Mesh(4), [0])
    text: Any = "S(0)"
    nothing: Any = None
    with pytest.raises(LayoutError, match=r"src must be a Layout, got 'S\(0\)'; parse_layout"):
        plan((8,), "bf16", text, layout)
    with pytest.raises(LayoutError, match="dst must be a Layout, got None"):
        bounds((8,), layout, nothing)
    with pytest.raises(LayoutError, match="b must be a Layout, got None"):
        same_ownership(layout, nothing, (8,))


@pytest.mark.parametrize(
    "call",
    [
        compile,
        explain,
        verify,
        lambda given: simulate(given, []),
        lambda given: RepeatedExchange([given], torch.device("cpu")),
    ],
)
@pytest.mark.parametrize("given", [None, "plan.json", 3], ids=str)
def test_what_is_no_plan_is_refused_by_name(call: Any, given: Any) -> None:
    with pytest.raises(RedistError, match=f"plan must be a Plan, got {given!r}; optim_redist.plan"):
        call(given)


# -- the verifier finds what is wrong


def _broken(change: Any) -> str:
    mesh = Mesh(4)
    problem = Problem((8, 8), Layout(mesh, [0, None]), Layout(mesh, [None, 0]))
    made = plan((8, 8), "bf16", problem.src, problem.dst)
    ((_, (phase,)),) = made.phases
    moving = [t for t in phase.transfers if t.sender != t.receiver]
    staying = [t for t in phase.transfers if t.sender == t.receiver]
    with pytest.raises(RedistError) as caught:
        _verify_stage(problem, [Phase.of("exchange", staying + change(moving))])
    return str(caught.value)


def test_the_verifier_finds_faults() -> None:
    def replaced(**changes: Any) -> Any:
        return lambda moving: [replace(moving[0], **changes), *moving[1:]]

    assert "which it does not hold" in _broken(replaced(sender=3))
    assert "which does not need it" in _broken(replaced(receiver=2))
    assert "a second time" in _broken(lambda moving: [*moving, moving[0]])
    assert "ends with 12 of the 16 elements" in _broken(lambda moving: moving[1:])
    assert "which has not arrived there" in _broken(replaced(read="dst"))
    assert "as contribution 1" in _broken(replaced(contribution=1))


def test_contributions_that_come_in_different_steps_are_not_combined() -> None:
    mesh = Mesh(2)
    problem = Problem((2,), Layout(mesh, [None], {0: "sum"}), Layout(mesh, [None]))
    reduce, share = relay_phases(problem)
    _verify_stage(problem, [reduce, share])
    late = next(t for t in reduce.transfers if t.contribution == 1)
    others = [t for t in reduce.transfers if t is not late]
    with pytest.raises(RedistError, match="combines different elements of contributions 0 and 1"):
        _verify_stage(problem, [Phase.of("reduce", others), Phase.of("share", [*share.transfers, late])])
    again = [replace(t, contribution=0) for t in share.transfers]
    with pytest.raises(RedistError, match="as a contribution, though it is finished"):
        _verify_stage(problem, [reduce, Phase.of("share", again)])


def test_plans_of_more_elements_than_floats_count_are_proven() -> None:
    # three quarters of these are no whole multiple of 2^8, as floats of this size are
    shape = (2**60 + 4, 12)
    src, dst = Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, None])
    made = plan(shape, "bf16", src, dst)
    assert made.bounds.lb == 9 * (2**60 + 4)
    assert verify(made).received[0] == made.bounds.lb
    with pytest.raises(RedistError, match="the plan claims nan ×"):
        verify(replace(made, volume_ratio=float("nan")))


def test_the_verifier_checks_claims() -> None:
    made = plan((8, 8), "bf16", Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0]))
    for changes, message in (
        ({"recv": 11}, "claims to receive 11"),
        ({"bytes": 7}, "claims 7 bytes"),
    ):
        with pytest.raises(RedistError, match=message):
            verify(replace(made, steps=(made.steps[0]._replace(**changes),)))
    with pytest.raises(RedistError, match="claims a peak of 3"):
        verify(replace(made, peak_bytes=3))
    with pytest.raises(RedistError, match="its limit is 100"):
        verify(replace(made, memory_limit=100))
    with pytest.raises(RedistError, match=r"the plan claims .*lb=11"):
        verify(replace(made, bounds=made.bounds._replace(lb=11)))
    with pytest.raises(RedistError, match=r"moves 12 elements, the plan claims 0\.5 ×"):
        verify(replace(made, volume_ratio=0.5))
    with pytest.raises(RedistError, match="ends at another layout"):
        verify(replace(made, dst=made.src))
    with pytest.raises(RedistError, match="1 more steps"):
        verify(replace(made, steps=made.steps * 2))
    with pytest.raises(RedistError, match="lists 0 steps, its stages have more"):
        verify(replace(made, steps=()))
    with pytest.raises(RedistError, match="no stages"):
        verify(replace(made, stages=()))
    with pytest.raises(RedistError, match="starts at another layout"):
        verify(replace(made, src=made.dst))
    with pytest.raises(RedistError, match="stage 1 starts where stage 0 does not end"):
        verify(replace(made, stages=made.stages * 2, src=made.src, dst=made.dst))
    with pytest.raises(RedistError, match="does not know the method 'magic'"):
        verify(replace(made, stages=(made.stages[0]._replace(method="magic"),)))
    with pytest.raises(RedistError, match="only a donated source is packed"):
        verify(replace(made, stages=(made.stages[0]._replace(method="packed"),)))


@pytest.mark.parametrize("method", ["forward", "hierarchical"])
def test_contributions_are_not_moved_as_finished_values(method: str) -> None:
    made = plan((8,), "bf16", Layout(Mesh(4), [None], {0: "sum"}), Layout(Mesh(4), [None]), planners=["direct"])
    damaged = replace(made, stages=(made.stages[0]._replace(method=method),))
    with pytest.raises(RedistError, match=f"the method '{method}' of the plan moves finished values"):
        damaged.phases


def test_reductions_reach_the_bound() -> None:
    mesh = Mesh((2, 2))
    all_reduce = Layout(mesh, [None, None], {0: "sum", 1: "sum"}), Layout(mesh, [None, None])
    scatter = Layout(mesh, [1, None], {0: "sum"}), Layout(mesh, [0, None])
    for src, dst in (all_reduce, scatter):
        made = plan((64, 64), "float32", src, dst, planners=["relay"])
        verify(made)
        assert busiest([phase for _, phases in made.phases for phase in phases]) == made.bounds.lb
        assert [step.op for step in made.steps] == ["reduce", "share"]


def test_transfer_and_step_volumes() -> None:
    mesh = Mesh(2)
    problem = Problem((4,), Layout(mesh, [0]), Layout(mesh, [None]))
    box = problem.common((0,), (0,))
    assert box is not None
    phase = Phase.of("exchange", [Transfer(0, 1, box), Transfer(0, 0, box)])
    assert (phase.sent(), phase.received()) == ({0: 2}, {1: 2})


def test_relabelling_keeps_most_data_where_it_is() -> None:
    mesh = Mesh((2, 2))
    src = Layout(mesh, [(0, 1), None])
    turned = Layout(Mesh((2, 2), ranks=[3, 2, 1, 0]), [(0, 1), None])
    made = plan((8, 8), "bf16", src, turned, relabel=True)
    assert not made.communicates
    assert made.dst.mesh.ranks == (0, 1, 2, 3)
    verify(made)
    # so many that the largest gains are taken one after the other; rank 200 has to play what is left, the last part
    src = Layout(Mesh(200), [0])
    turned = Layout(Mesh(200, ranks=[*range(200, 0, -1)]), [0])
    made = plan((200,), "bf16", src, turned, relabel=True)
    assert made.dst.mesh.ranks == (200, *range(1, 200))
    verify(made)
    for seed in range(60):
        shape, src, dst = random_case(seed, FAMILIES)
        kept, renamed = plan(shape, "bf16", src, dst), plan(shape, "bf16", src, dst, relabel=True)
        verify(renamed)
        assert sorted(renamed.dst.mesh.ranks) == sorted(dst.mesh.ranks)
        before, after = (sum(Problem(shape, src, p.dst).num_kept.values()) for p in (kept, renamed))
        assert after >= before


def test_where_renumbered_ranks_exceed_the_limit_they_keep_their_numbers() -> None:
    src, dst = (Layout(Mesh(2), [(0, Ragged(cuts))]) for cuts in ((0, 5, 6), (0, 1, 6)))
    made = plan((6,), "int64", src, dst, relabel=True)
    assert made.dst.mesh.ranks == (1, 0)
    # renumbered, rank 0 holds five elements of the source and five of the target
    limit = 8 * 8
    made = plan((6,), "int64", src, dst, relabel=True, memory_limit=limit)
    assert made == plan((6,), "int64", src, dst, memory_limit=limit)
    with pytest.raises(PlanInfeasibleError, match="source 40 \\+ target 8 = 48 bytes; no method"):
        plan((6,), "int64", src, dst, relabel=True, memory_limit=40)


def test_where_all_numbers_exceed_the_limit_the_error_is_of_those_that_take_less() -> None:
    # renumbered, every rank keeps its part, which is its own target
    src, dst = (Layout(Mesh(2, ranks=ranks), [(0, Ragged((0, 5, 6)))]) for ranks in ([0, 1], [1, 0]))
    assert plan((6,), "int64", src, dst, relabel=True, memory_limit=40).dst == src
    with pytest.raises(PlanInfeasibleError, match="larger of source and target 40 = 40 bytes; no method"):
        plan((6,), "int64", src, dst, relabel=True, memory_limit=39)
    # no renumbered rank can hold its parts, but with their own numbers ranks lack room for buffers only
    src, dst = (Layout(Mesh(2), [(0, Ragged(cuts))]) for cuts in ((0, 5, 6), (0, 1, 6)))
    with pytest.raises(PlanInfeasibleError, match=r"source 40 \+ target 8 \+ buffers 64 = 112 bytes; none of"):
        plan((6,), "int64", src, dst, relabel=True, memory_limit=48)


def test_a_reduction_of_no_elements_is_local() -> None:
    src, dst = (Layout(Mesh(4), [None, None], {0: op} if op else {}) for op in ("sum", None))
    made = plan((8, 0), "bf16", src, dst)
    # a relay, for example, does not take the time of two exchanges
    assert (made.planner, made.alternatives) == ("local", ())
    verify(made)
    assert all(part is not None for part in simulate(made, [torch.empty(8, 0, dtype=torch.bfloat16)] * 4).values())


def test_the_assignment_is_the_best_of_all() -> None:
    rng = random.Random(0)
    for _ in range(100):
        n = rng.randint(1, 5)
        gain = [[rng.choice([0, rng.randint(0, 9)]) for _ in range(n)] for _ in range(n)]
        found = _assign(gain)
        best = max(sum(gain[k][p[k]] for k in range(n)) for p in permutations(range(n)))
        assert sorted(found) == list(range(n))
        assert sum(gain[k][found[k]] for k in range(n)) == best


@pytest.mark.parametrize("size", [8.0, True, "8", None], ids=repr)
def test_sizes_are_integers(size: Any) -> None:
    layout = Layout(Mesh(2), [0])
    for call in (lambda: plan((size,), "int8", layout, layout), lambda: bounds((size,), layout, layout)):
        with pytest.raises(LayoutError, match="sizes must be integers, got"):
            call()
