"""The planning figures: DTensor's planners are counted as in the worked examples, and ours never do worse."""

from __future__ import annotations

import pytest

from benchmarks import redist_benchmark, redist_planning, redist_planning_times

CASES = redist_planning.load_cases()


def test_dtensors_plans_count_what_the_examples_say() -> None:
    compared = 0
    for name, row, case in CASES.example_cases():
        theirs = row.get("dtensor_recv") or {}
        named = row.get("dtensor") or {}
        for planner in ("greedy", "graph"):
            expected = theirs.get(planner, (named.get(planner) or {}).get("recv"))
            if expected is None:
                continue
            found = redist_planning.dtensor_plan(case, graph=planner == "graph")
            assert found is not None, (name, planner)
            assert found.recv == expected, (name, planner)
            if named:
                assert found.live == named[planner]["max_live"], (name, planner)
            compared += 1
    assert compared >= 80


def test_figures_of_a_few_cases() -> None:
    rows = {(row["goal"], row["planner"]): row for row in redist_planning.rows_of(12)}
    coverage = rows["coverage, all families", "ours"]
    assert coverage["cases"] == coverage["planned"] == coverage["proven"] == 86
    assert coverage["bound_0"] == coverage["of_those_silent"]
    assert rows["flat volume / best single hop", "ours, one hop"]["max"] == 1
    assert rows["flat volume / LB", "ours, forwarded where one hop is above"]["max"] == 1
    assert rows["into nodes / cut", "ours"]["max"] == 1
    exhaustive = rows["collectives: equal to exhaustive search", "ours"]
    assert exhaustive["cases"] == exhaustive["count"] == 52
    greedy, ours = (rows["flat volume / LB", planner]["geomean"] for planner in ("DTensor greedy", "ours, one hop"))
    assert greedy > ours
    for row in rows.values():
        assert row.get("met", "yes") in ("yes", "no")
    for planner in ("NaiveGathererRedist", "MemoryConstrainedRedist", "OptimalRedist"):
        assert rows["time to search, notebook", planner]["cases"] > 60
    assert rows["collectives: holds more than max(src, dst)", "ours"]["count"] == 0


def test_cases_that_dtensor_cannot_say_are_left_out() -> None:
    uneven = CASES.random_case(3, families="R")
    assert redist_planning.dtensor_plan(uneven, graph=True) is None


def test_spread_and_percentiles() -> None:
    assert redist_planning.geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert redist_planning._spread([1.0, 1.0, 4.0]) == {
        "cases": 3,
        "geomean": 1.5874,
        "above_%": 58.74,
        "at_bound_%": 66.7,
        "max": 4.0,
    }
    assert redist_planning_times.required({"max": 4.0}, max=4)["met"] == "yes"
    assert redist_planning_times.required({"max": 4.0}, max=3.9) == {"max": 4.0, "required": "max <= 3.9", "met": "no"}
    assert redist_planning._spread([]) == {"cases": 0}
    assert redist_planning_times.percentiles([k * 1e-6 for k in range(100)])["p99_us"] == 99.0


def test_the_script_writes_its_rows(tmp_path, capsys) -> None:
    out = tmp_path / "rows.json"
    assert redist_benchmark.main(["--planning", "--cases", "2", "--json", str(out)]) == 0
    assert "flat volume / LB" in capsys.readouterr().out
    assert '"goal": "coverage, all families"' in out.read_text()
