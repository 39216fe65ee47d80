"""The command line: what it prints, its JSON, its exit status, and the commands that measure running ranks."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stderr, redirect_stdout
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _world

from optim_redist import (
    CommModel,
    Cyclic,
    Layout,
    LayoutError,
    Mesh,
    MultiAxisDist,
    Plan,
    RedistError,
    Topology,
    UnsupportedError,
    calibrate,
    parse_layout,
    plan,
)
from optim_redist._machine.curves import curve_from_bus_rates
from optim_redist._tools.progress import progress
from optim_redist.benchmarking import matrix_shape
from optim_redist.cli import _parser, _topology, joined_ranks, main
from optim_redist.plan_text import crossings, traffic, worst_cut
from optim_redist.units import format_bytes, format_seconds
from optim_utils.testing import run_ranks

EXAMPLES = Path(__file__).parent / "redist_examples.json"
THIRD = [
    "--shape", "8,8,8,4", "--mesh", "4,2,4", "--src", "D_[4,2,4]_|_{(0,1),-,-,-}(1,-,-,-)", "--dst", "[-,1~4,0~2,-]",
    "--topology", "nodes:axis0", "--dtype", "bf16",
]  # fmt: skip
SWAP = ["--shape", "65536,65536", "--mesh", "dp=2,tp=4", "--src", "S(0),S(1)", "--dst", "S(1),S(0)"]
XLA = ["--shape", "16,16,16", "--mesh", "x=4,y=2", "--src", "P('y',None,'x')", "--dst", "P(None,('x','y'),None)"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_plan_prints_a_table_with_the_bounds(capsys):
    text = run(capsys, "plan", *THIRD)
    assert "8×8×8×4 bfloat16, 32 ranks" in text
    assert "no plan moves less than 224 elements, 448 B (receive)" in text
    assert "[-, 1~4, 0~2, -]" in text
    assert "receives" in text.splitlines()[3]
    # 384 elements must enter each node of eight
    assert "at least 768 B" in text


def test_help_says_what_every_option_is_and_names_every_model():
    with pytest.raises(RedistError) as refused:
        CommModel.preset("?")
    *presets, _ = re.findall(r"'([\w-]+|\?)'", str(refused.value))
    commands = next(action.choices for action in _parser()._actions if action.choices)
    assert list(commands) == ["plan", "explain", "bound", "verify", "calibrate", "bench"]
    for parser in commands.values():
        for action in parser._actions:
            assert action.help, action.option_strings
            if "--model" in action.option_strings:
                assert all(name in action.help for name in presets)
            if "--topology" in action.option_strings:
                with pytest.raises(RedistError) as refused:
                    _topology("?", Mesh(4))
                assert all(form in action.help for form in re.findall(r"flat|nodes:[\w:]+", str(refused.value)))


def test_plan_as_json_reads_back(capsys):
    data = json.loads(run(capsys, "plan", *THIRD, "--json"))
    made = Plan.from_json(data)
    assert data["format"] == "optim-redist.plan/1"
    assert json.loads(json.dumps(made.to_json())) == data
    assert made.bounds.lb == 224
    assert made.src == MultiAxisDist((4, 2, 4), ((0, 1), (), (), ()), 1).to_layout()


def test_explain_says_why(capsys):
    text = run(capsys, "explain", *SWAP, "--model", "h200x8", "--memory-limit", "40GiB")
    for heading in ("What no plan can beat", "What decides the time", "Why this one"):
        assert heading in text
    assert "receive on the busiest rank" in text
    assert "limit 40 GiB" in text
    small = run(capsys, "explain", "--shape", "64,64", *SWAP[2:])
    assert "latency: 1 step(s) of 1 KiB each are too small to fill the wire" in small
    # every rank of a node gathers across its border for itself: 1 GiB by 4 GB/s, where 256 MiB must
    rows, whole = (Layout(Mesh(8), dims) for dims in ([0, None], [None, None]))
    nodes = Topology.nodes(4, bandwidth=1e9)
    made = plan((65536, 4096), "bf16", rows, whole, topology=nodes, planners=["direct"])
    assert "the border of a group: crossing it takes 268 ms" in made.explain()


def test_memory_decides_where_a_quicker_plan_takes_more_of_it():
    def decides(shape, sizes, src, dst, limit=None, **options):
        mesh = Mesh(sizes)
        made = plan(shape, "bf16", Layout(mesh, src), Layout(mesh, dst), memory_limit=limit, **options)
        lines = made.explain().splitlines()
        return made, lines[lines.index("What decides the time") + 1]

    swap = (4096, 4096), (2, 4), [1, None], [None, 1]
    free, why = decides(*swap)
    assert "receive on the busiest rank: 6 MiB" in why
    # a limit that leaves the plan as it is does not decide
    assert decides(*swap, free.peak_bytes)[1] == why
    rounds, why = decides(*swap, free.peak_bytes - 1)
    assert [step.rounds for step in rounds.steps] == [2]
    assert "memory: the plan takes" in why
    # gathering fits in no number of rounds
    made, why = decides((24, 16), (2, 3, 2), [0, (1, 2)], [(1, 2), None], 460)
    assert (made.planner, {step.rounds for step in made.steps}) == ("spread", {1})
    assert "memory: the plan takes" in why
    assert "  naive: takes 40 µs, and its peak of 2.32 KiB is 1.87 KiB above the limit\n" in made.explain()
    _, why = decides((24, 16), (2, 3, 2), [0, (1, 2)], [(1, 2), None], planners=["spread"])
    assert "latency: 2 step(s) of 72 B at most are too small" in why


def test_plans_that_are_as_good_as_the_chosen_one_are_said_to_be():
    mesh = Mesh(4)
    task = (8, 8), "bf16", Layout(mesh, [0, None]), Layout(mesh, [None, 0])
    made = plan(*task, planners=["direct", "collectives", "naive"])
    found = {other.planner: other.reason for other in made.alternatives}
    assert (made.planner, made.peak_bytes) == ("collectives", 112)
    assert found["direct"] == "as fast as collectives, which is as good in all else"


def test_bound_of_the_public_case(capsys):
    assert "together: 448 elements" in run(capsys, "bound", *XLA)
    data = json.loads(run(capsys, "bound", *XLA, "--json"))
    assert (data["lb"], data["lb_kind"], data["itemsize"]) == (448, "receive", 2)
    assert json.loads(run(capsys, "bound", *XLA, "--json", "--topology", "nodes:2"))["cuts"]


@pytest.mark.parametrize(
    "topology", [[], ["--topology", "nodes:4"], ["--topology", "flat"]], ids=["own", "nodes", "flat"]
)
@pytest.mark.parametrize("rank_bandwidth", [1e9, 1e12], ids=["curve-quicker", "curve-slower"])
def test_the_bound_on_time_is_that_of_plans_by_the_same_model(capsys, tmp_path, topology, rank_bandwidth):
    quick = CommModel("quick", Topology.flat(bandwidth=rank_bandwidth), {"all_to_all": ((1e3, 1e-8), (1e6, 1e-6))})
    quick.save(tmp_path / "quick.json")
    swap = ["--shape", "4096,4096", "--mesh", "2,4", "--src", "S(0),S(1)", "--dst", "S(1),S(0)"]
    swap += ["--model", str(tmp_path / "quick.json"), *topology, "--json"]
    made = json.loads(run(capsys, "plan", *swap))
    found = json.loads(run(capsys, "bound", *swap))
    assert found["seconds"] == made["bounds"]["seconds"] <= made["time"]


def test_meshes_may_differ(capsys):
    arguments = ["--shape", "12", "--mesh", "4", "--dst-mesh", "6", "--src", "[0]", "--dst", "[0]"]
    data = json.loads(run(capsys, "plan", *arguments, "--json"))
    assert len(data["dst"]["mesh"]["sizes"]) == 1
    assert "source of ranks" in run(capsys, "bound", *arguments) or "target of ranks" in run(
        capsys, "bound", *arguments
    )


@pytest.mark.parametrize("mesh", [[], ["--mesh", "4,2"], ["--mesh", "8"]], ids=["none", "4,2", "8"])
def test_layouts_of_the_notebook_bring_their_meshes(capsys, mesh):
    src = "[0,-]" if "8" in mesh else "D_[4,2]_|_{(0,1),-}(1,-)"
    text = run(capsys, "plan", "--shape", "8,8", *mesh, "--src", src, "--dst", "D_[2,4]_|_{0,1}(4,2)")
    assert f"on [{'8' if '8' in mesh else '4,2'}]\n  to    [0~4, 1~2] on [2,4]\n" in text


def test_a_target_on_the_mesh_of_the_source_shows_its_names(capsys):
    task = ["--shape", "8,8", "--mesh", "x=4,y=2", "--src", "[x,y]"]
    assert "[y~4, x~2] on [x=4,y=2]" in run(capsys, "plan", *task, "--dst", "D_[4,2]_|_{1,0}(4,2)")
    assert main(["plan", *task, "--dst", "D_[4,2]_|_{1,0}(4,2)", "--dst-mesh", "2,4"]) == 2
    assert "on a mesh of sizes [4, 2], the mesh given has [2, 4]" in capsys.readouterr().err
    assert main(["plan", *task[:-1], "D_[2,4]_|_{0,1}(4,2)", "--dst", "[x,y]"]) == 2
    assert "on a mesh of sizes [2, 4], the mesh given has [4, 2]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["plan", *SWAP, "--memory-limit", "1GiB"], "memory_limit"),
        (["plan", *SWAP[:-1], "S(9),R"], "--dst: S(9) on axis 0: the tensor has"),
        (["plan", *SWAP[:-3], "S(0)", *SWAP[-2:]], "--src: a mesh of 2 axes needs as many placements, got 1"),
        (["plan", "--shape", "8", "--src", "[0]", "--dst", "[0]"], "pass mesh"),
        (["plan", *SWAP, "--topology", "ring"], "--topology"),
        (["plan", *SWAP, "--model", "abacus"], "presets"),
        (["verify", "/nowhere.json"], "nowhere"),
        (["bench"], "torchrun"),
        (["verify", str(EXAMPLES), "--limit", "-1"], "from 1 on"),
        (["verify", str(EXAMPLES), "--limit", "1", "--execute", "gloo:0"], "gloo:8"),
        (["bench", "--sizes", "0"], "sizes are of 1 byte or more, got '0'"),
        (["calibrate", "--sizes=-4KiB"], "sizes are of 1 byte or more, got '-4KiB'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_requests_that_make_no_sense_exit_with_2_and_say_why(capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("RANK", raising=False)
    try:
        status = main(arguments)
    except SystemExit as stopped:  # argparse has found it
        status = stopped.code
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", [["--shape", "8,x"], ["--memory-limit", "9 feet"], ["--memory-limit", "inf"], ["--mesh", "x=4,2"]]
)
def test_options_that_cannot_be_read(capsys, option):
    with pytest.raises(SystemExit):
        main(["plan", *SWAP, *option])
    assert option[1] in capsys.readouterr().err


def test_verify_proves_and_simulates_the_examples(capsys):
    text = run(capsys, "verify", str(EXAMPLES), "--execute", "simulate", "--limit", "12")
    assert text.startswith("12 redistributions proven, 12 executed, 0 wrong")
    data = json.loads(run(capsys, "verify", str(EXAMPLES), "--json"))
    assert (data["checked"], data["failed"]) == (74, 0)
    assert all(row["volume_ratio"] >= 1 for row in data["results"])


@pytest.mark.parametrize("dtype", ["bf16", "bool", "complex128", "float8_e5m2", "uint16"])
def test_plans_of_every_type_are_executed(capsys, tmp_path, dtype):
    path = tmp_path / "plan.json"
    task = ["--shape", "5,3", "--mesh", "4", "--src", "S(0)", "--dst", "S(1)", "--dtype", dtype]
    path.write_text(run(capsys, "plan", *task, "--json"))
    # of five ranks one is not needed
    for how in ("simulate", "gloo:5")[: 1 + (dtype == "bf16")]:
        text = run(capsys, "verify", str(path), "--execute", how)
        assert text == "1 redistributions proven, 1 executed, 0 wrong\n"


def test_only_ranks_that_have_something_to_run_are_started(capsys, monkeypatch):
    started = []

    def run_ranks(function, world_size, tasks, **options):
        started.append((world_size, len(tasks)))
        return [[] for _ in range(world_size)]

    monkeypatch.setattr("optim_utils.testing.run_ranks", run_ranks)
    rows = json.loads(EXAMPLES.read_text())["redistributions"][:20]
    widest = max(map(_ranks, rows))
    run(capsys, "verify", str(EXAMPLES), "--execute", "gloo:99999999", "--limit", "20")
    assert started == [(widest, 20)]
    text = run(capsys, "verify", str(EXAMPLES), "--execute", "gloo:1", "--limit", "20")
    assert text.startswith("20 redistributions proven, 0 executed, 0 wrong")
    assert len(started) == 1


def test_how_to_execute_is_refused_before_anything_is_proven(capsys):
    assert main(["verify", str(EXAMPLES), "--execute", "nccl:4"]) == 2
    # no progress bar before it
    assert capsys.readouterr().err == "optim-redist: --execute is simulate or gloo:8, got 'nccl:4'\n"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--topology", "nodes:{}"], "--topology is flat, nodes:8"),
        (["--topology", "nodes:axis{}"], "the mesh has no axis '999"),
        (["--src", "[0~{}]"], "block lengths are whole numbers"),
        (["--shape", "{}"], "a shape is written 8,8,4"),
    ],
    ids=["nodes", "axis", "block", "shape"],
)
def test_numbers_of_any_length_are_refused_in_a_line(capsys, option, words):
    name, value = option[0], option[1].format("9" * 5000)
    task = {"--shape": "8", "--mesh": "4", "--src": "S(0)", "--dst": "R", name: value}
    try:
        status = main(["bound", *chain.from_iterable(task.items())])
    except SystemExit as refused:
        status = refused.code
    assert status == 2
    assert words in capsys.readouterr().err
    assert main(["verify", str(EXAMPLES), "--execute", f"gloo:{'9' * 5000}"]) == 2


def test_plans_that_were_not_executed_are_named(capsys, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(run(capsys, "plan", "--shape", "8", "--mesh", "4", "--src", "Partial(sum)", "--dst", "R", "--json"))
    assert "not executed: 1, wrong, with pending" in run(capsys, "verify", str(path), "--execute", "simulate")


@pytest.mark.slow
def test_verify_runs_on_ranks(capsys):
    text = run(capsys, "verify", str(EXAMPLES), "--execute", "gloo:4", "--limit", "20")
    executed = sum(
        len(row["mesh"]) and _ranks(row) <= 4 for row in json.loads(EXAMPLES.read_text())["redistributions"][:20]
    )
    assert executed
    assert text.startswith(f"20 redistributions proven, {executed} executed, 0 wrong")


def _ranks(row) -> int:
    total = 1
    for size in row["mesh"]:
        total *= size
    return total


def test_verify_finds_what_is_wrong(capsys, tmp_path):
    data = json.loads(EXAMPLES.read_text())
    data["redistributions"] = data["redistributions"][:1]
    data["redistributions"][0]["bounds"]["lower_bound"] += 1
    data["named"] = []
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    assert main(["verify", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "C000: the bound is 128 elements here and 129 in the file" in shown
    assert "0 redistributions proven, 0 executed, 1 wrong" in shown
    made = plan((8, 8), "int32", parse_layout("[0,-]", "4"), parse_layout("[-,0]", "4"))
    path.write_text(json.dumps(made.to_json()))
    assert main(["verify", str(path), "--execute", "simulate"]) == 0
    wrong = made.to_json()
    wrong["dst"] = parse_layout("[-,-]", "4").to_json()
    path.write_text(json.dumps(wrong))
    assert main(["verify", str(path)]) == 1
    assert "another layout than its target" in capsys.readouterr().out
    # what is wrong is not run: there, copies would read what the source has not
    wrong = made.to_json()
    wrong["stages"][0]["src"] = parse_layout("[-,-]", "4").to_json()
    path.write_text(json.dumps(wrong))
    for how in ("simulate", "gloo:4"):
        assert main(["verify", str(path), "--execute", how]) == 1
        shown = capsys.readouterr().out
        assert "another layout than its source" in shown
        assert "0 redistributions proven, 0 executed, 1 wrong\nnot executed: 1, wrong" in shown
    path.write_text("{}")
    assert main(["verify", str(path)]) == 2


def _measure(rank: int, world_size: int, port: int, folder: str) -> list[int]:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    costs, rows = f"{folder}/costs.json", f"{folder}/rows.json"
    sizes = ["--sizes", "4KiB,64KiB,256KiB"]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        first = main(["calibrate", "--out", costs, "--seconds", "0.5", *sizes, "--mesh", "a=2,b=2"])
        os.environ["MASTER_PORT"] = str(port + 1)
        second = main(["bench", "--sizes", "64KiB", "--repeats", "1", "--model", costs, "--out", rows])
    return [first, second]


def _free_port() -> int:
    """The lower of two ports next to each other that nobody listens on."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.mark.slow
def test_calibrate_and_bench_on_ranks(tmp_path):
    assert run_ranks(_measure, 4, _free_port(), str(tmp_path), init_process_group=False) == [[0, 0]] * 4
    model = CommModel.load(tmp_path / "costs.json")
    assert set(model.curves) == {"all_to_all", "all_gather", "reduce_scatter", "all_reduce", "send_recv"}
    assert all(b0 < b1 and s0 <= s1 for curve in model.curves.values() for (b0, s0), (b1, s1) in pairwise(curve))
    measured = json.loads((tmp_path / "costs.json").read_text())["measured"]
    assert (measured["world"], measured["backend"], set(measured["groups"])) == (4, "gloo", {"a", "b"})
    bench = json.loads((tmp_path / "rows.json").read_text())
    assert len(bench["rows"]) == 19
    assert all(row["same"] and row["ours_ms"] > 0 and row["dtensor_ms"] > 0 for row in bench["rows"])


def test_threads_let_go_of_tensors_before_the_process_group_ends(monkeypatch):
    freed, said = threading.Semaphore(0), []
    thread = threading.Thread(target=lambda: (freed.acquire(), said.append("let go")))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: said.append("end"))
    thread.start()
    interval = sys.getswitchinterval()
    # nobody is given Python's lock who is not waited for
    sys.setswitchinterval(100)
    try:
        with joined_ranks():
            freed.release()
        assert said == ["let go", "end"]
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_calibrate_needs_ranks():
    with pytest.raises(UnsupportedError, match="init_process_group"):
        calibrate(out=None)


def _calibrated(rank: int, world_size: int) -> None:
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        with pytest.raises(UnsupportedError, match=r"none of the sizes \[1073741824\] \(bytes\) fits"):
            calibrate(sizes=[2**30], out=None)
        for wrong in (-1, float("nan"), "60"):
            with pytest.raises(RedistError, match="seconds must be a number, 0 or more, got "):
                calibrate(seconds=wrong, out=None)
        with pytest.raises(RedistError, match="sizes must be integers, got '4KiB'"):
            calibrate(sizes=["4KiB"], out=None)
        # only rank 0 writes, and every rank says that it cannot, before anything is measured
        here = os.path.dirname(__file__)
        for out in (f"{here}/missing/costs.json" if rank == 0 else f"{here}/costs.json", here):
            with pytest.raises(RedistError, match=r"cannot be written: it is a folder, or its folder is missing"):
                calibrate(out=out)
        mesh = init_device_mesh("cpu", (2, 2))
        before = len(_world.pg_map)
        calibrate(mesh=mesh, sizes=[4096], seconds=0, out=None)
        assert len(_world.pg_map) == before


def _mesh_of_other_ranks(rank: int, world_size: int, port: int) -> int:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        return main(["calibrate", "--mesh", "7", "--sizes", "4KiB"])


def test_calibrate_refuses_a_mesh_of_other_ranks():
    assert run_ranks(_mesh_of_other_ranks, 2, _free_port(), init_process_group=False) == [2, 2]


def test_calibrate_leaves_no_groups_behind_and_says_that_nothing_fits():
    run_ranks(_calibrated, 4)


def test_the_module_runs_without_torch_for_planning():
    code = (
        "import sys; from optim_redist.cli import main; "
        f"main({['bound', *XLA]!r}); main({['plan', *SWAP]!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "448 elements" in done.stdout


def test_a_reader_that_goes_away_is_no_error():
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "optim_redist", "plan", *SWAP]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert done.stderr == ""


def test_text_and_pictures_where_the_encoding_lacks_signs(tmp_path):
    picture = tmp_path / "plan.svg"
    command = ["-m", "optim_redist", "plan", *SWAP, "--picture", str(picture)]
    for encoding in ("ascii", "utf-8"):
        # python's mode of UTF-8 would hide a locale without it
        environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        done = subprocess.run(
            [sys.executable, *command], capture_output=True, check=False, env={**environment, "LC_ALL": "C"}
        )
        assert done.returncode == 0, done.stderr
        assert b"65536" in done.stdout
        assert ("×" in done.stdout.decode(encoding)) == (encoding == "utf-8")
        ElementTree.fromstring(picture.read_bytes())


# -- words and pictures


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (999.4 * 2**10, "999 KiB"),
        (999.5 * 2**10, "0.976 MiB"),
        (3 * 2**30, "3 GiB"),
        (2**50, "1.02e+03 TiB"),
    ],
)
def test_bytes_in_words(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0 µs"),
        (1.5e-5, "15 µs"),
        (9.996e-4, "1 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (2.0, "2 s"),
        (1234.5, "1234 s"),
    ],
)
def test_seconds_in_words(seconds, text):
    assert format_seconds(seconds) == text


def test_traffic_of_a_plan_adds_up_to_its_volumes():
    src, dst = parse_layout("[0,-]", "4"), parse_layout("[-,0]", "4")
    made = plan((8, 8), "bf16", src, dst)
    pairs = traffic(made)
    assert len(pairs) == 12
    assert set(pairs.values()) == {4}
    assert sum(size for (_, receiver), size in pairs.items() if receiver == 0) == made.steps[0].recv == made.bounds.lb


def test_worst_cut_compares_with_what_must_cross():
    start = MultiAxisDist((4, 2, 4), ((0, 1), (), (), ()), 1).to_layout()
    target = MultiAxisDist((4, 2, 4), ((), (1,), (0,), ()), (-1, 4, 2, -1)).to_layout()
    from optim_redist import Topology

    topology = Topology.from_mesh_axis(Mesh((4, 2, 4)), 0)
    direct = plan((8, 8, 8, 4), "bf16", start, target, topology=topology, planners=["direct"])
    assert {inbound for _, inbound, _ in crossings(direct, direct.bounds.cuts)} == {1536}
    assert worst_cut(crossings(direct, direct.bounds.cuts))[1] == 4.0


def test_the_worst_cut_is_told_in_the_direction_that_most_goes():
    train, serve = Layout(Mesh(4), [0, None]), Layout(Mesh(4, ranks=[4, 5, 6, 7]), [None, 0])
    there, back = (plan((64, 64), "bf16", *sides) for sides in ((train, serve), (serve, train)))
    assert "out of the source of ranks 0–3 go at least 8 KiB; this plan crosses its border 1.00 ×" in str(there)
    assert "out of the source of ranks 4–7 go at least 8 KiB; this plan crosses its border 1.00 ×" in str(back)
    gathered = plan((64, 64), "bf16", train, Layout(Mesh(4), [None, None]), topology=Topology.nodes(2))
    assert "into the node of ranks 0, 1 go at least 4 KiB" in str(gathered)


def test_memory_of_what_stays_and_of_what_moves():
    rows, columns = Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0])
    assert "memory 2 KiB at peak; a part that stays is source and target at once\n" in str(
        plan((64, 64), "bf16", rows, rows)
    )
    moved = str(plan((64, 64), "bf16", rows, columns))
    assert "memory 7 KiB at peak; source and target alone take 4 KiB\n" in moved


def test_borders_that_nothing_has_to_cross_are_not_the_worst():
    mesh, nodes = Mesh((2, 4)), Topology.nodes(4)
    # both nodes hold everything, so neither has to send, but together they do
    served = plan(
        (64, 64), "bf16", Layout(mesh, [None, 1]), Layout(Mesh(4, ranks=range(8, 12)), [0, None]), topology=nodes
    )
    assert "into the node of ranks 8–11 go at least 8 KiB; this plan crosses its border 1.00 ×" in str(served)
    shared = plan((64, 64), "bf16", Layout(mesh, [None, 1]), Layout(mesh, [None, None]), topology=nodes)
    assert "\nnothing has to go into the node of ranks 0–3, and nothing does\n" in str(shared)
    gathered = plan(
        (64, 64), "bf16", Layout(mesh, [0, 1]), Layout(mesh, [(0, 1), None]), topology=nodes, planners=["naive"]
    )
    assert "nothing has to go into the node of ranks 0–3; this plan crosses its border nevertheless" in str(gathered)


def test_borders_are_not_spoken_of_where_nothing_is_sent():
    kept = plan((64, 64), "bf16", Layout(Mesh((2, 4)), [None, 1]), Layout(Mesh(4), [None, 0]))
    assert "no rank lacks anything, so nothing is sent\nmemory" in str(kept)
    assert "must enter" not in kept.explain()


def test_planners_that_are_not_asked_are_told_from_those_that_lose():
    made = plan((64, 64), "bf16", Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0]))
    naive = next(other.reason for other in made.alternatives if other.planner == "naive")
    assert naive == "not tried, as it takes at least 40 µs and 30 µs is possible"
    assert naive in made.explain()


def test_why_another_plan_lost_is_written_in_the_units_of_the_table():
    swap = (32768, 32768), "bf16", Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0])
    made = plan(*swap, planners=["direct", "naive"])
    assert made.alternatives[0].reason == "takes 5.77 ms, 4.13 ms more than direct"
    naive = "\n  naive: not tried, as it takes at least 5.41 ms and 1.64 ms is possible"
    assert naive in plan(*swap).explain()


def test_ascii_pictures():
    mesh = Mesh((2, 2))
    assert Layout(mesh, [0, 1]).picture((4, 2)) == (
        "       0   1\n"
        "     +---+---+\n"
        "0..1 | 0 | 1 |\n"
        "     +---+---+\n"
        "2..3 | 2 | 3 |\n"
        "     +---+---+"
    )  # fmt: skip
    assert Layout(mesh, [(0, Cyclic(1)), None, 1]).picture((2, 1, 4)).startswith("dim 2 = 0..1:")
    assert Layout(mesh, [(0, Cyclic(1)), None, 1]).picture((2, 1, 4), dims=(0, 2)).count("dim 1") == 1
    assert "0-3" in Layout(mesh, []).picture(())
    # of owners that do not follow each other, six
    assert "| 0,2,4,6,8,10 |" in Layout(Mesh((6, 2)), [1]).picture((2,))
    assert "| 0,2,4,6,8,10,… |" in Layout(Mesh((7, 2)), [1]).picture((2,))
    with pytest.raises(LayoutError, match="too large"):
        Layout(Mesh(128), [0]).picture((128,))
    with pytest.raises(LayoutError, match="536870912 pieces on one rank of dimension 0 is too large"):
        Layout(mesh, [((0, 1), Cyclic(1))]).picture((2**31,))
    for shape in ((0, 2), (4, 0), (0, 0)):
        for fmt in ("ascii", "svg"):
            with pytest.raises(LayoutError, match="no elements to draw"):
                Layout(mesh, [0, 1]).picture(shape, fmt=fmt)
    for dims in ((0, 0), (0, 2), (-1, 0), (0,), (0, 1, 2), (0, "1")):
        with pytest.raises(LayoutError, match="dims"):
            Layout(mesh, [0, 1]).picture((4, 2), dims=dims)
    assert Layout(mesh, [0]).picture((4,), dims=(1, 0)) == Layout(mesh, [0]).picture((4,))
    with pytest.raises(LayoutError, match="fmt"):
        Layout(mesh, [0, 1]).picture((4, 2), fmt="crayon")


def test_every_cell_of_a_picture_names_its_owners():
    from optim_redist._drawing.grids import grids_of

    layout, shape = Layout(Mesh((2, 3)), [((1, 0), Cyclic(1)), None, None]), (7, 3, 2)
    for grid in grids_of(layout, shape):
        for cell in grid.cells:
            owners = [r for r in range(6) if cell.rows[0] in _indices(layout, shape, r)]
            assert list(cell.ranks) == owners


def _indices(layout, shape, rank):
    from optim_redist.index_sets import elements

    return elements(layout.indices(shape, rank)[0])


def test_svg_is_well_formed_and_shows_every_message():
    made = plan((8, 8), "bf16", parse_layout("[0,-]", "4"), parse_layout("[-,0]", "4"))
    root = ElementTree.fromstring(made.picture("svg"))
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert len(root.findall(f"{space}line")) == 12
    titles = [title.text for title in root.iter(f"{space}title")]
    assert "0 → 1: 8 B" in titles
    ElementTree.fromstring(Layout(Mesh(3), [0, None, None]).picture((7, 2, 2), fmt="svg"))


def test_ascii_picture_of_a_plan_has_the_traffic():
    made = plan((8, 8), "bf16", parse_layout("[0,-]", "4"), parse_layout("[-,0]", "4"))
    text = made.picture()
    assert "source [0, -]" in text
    assert "24 B" in text.splitlines()[-1]
    local = plan((8, 8), "bf16", parse_layout("[-,-]", "4"), parse_layout("[0,-]", "4"))
    assert "nothing goes from rank to rank" in local.picture()
    assert "nothing" in str(local) or "no rank lacks anything" in str(local)


def test_pictures_show_every_layout_on_the_way():
    made = plan((8, 8, 2), "bf16", parse_layout("[0,-,-]", "4"), parse_layout("[-,0,-]", "4"), planners=["naive"])
    for picture in (made.picture(), made.picture("svg")):
        places = [picture.index(title) for title in ("source [0, -, -]", "after all_gather", "target [-, 0, -]")]
        assert places == sorted(places)
    ElementTree.fromstring(made.picture("svg"))


def test_pictures_in_files(capsys, tmp_path):
    task = ["plan", "--shape", "8,8", "--mesh", "4", "--src", "[0,-]", "--dst", "[-,0]", "--picture"]
    assert main([*task, str(tmp_path / "plan.svg")]) == 0
    assert "plan.svg" in capsys.readouterr().out
    ElementTree.parse(tmp_path / "plan.svg")
    assert main([*task, "crayon"]) == 2
    assert "ascii, svg, or a file" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert main([*task, str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert main([*task, str(tmp_path / "plan.bmp")]) == 2
    shown = capsys.readouterr()
    assert ("pictures are written as" in shown.err, shown.out) == (True, "")
    # beside JSON
    assert main([*task, str(tmp_path / "other.svg"), "--json"]) == 0
    assert Plan.from_json(json.loads(capsys.readouterr().out)).shape == (8, 8)
    assert (tmp_path / "other.svg").read_bytes() == (tmp_path / "plan.svg").read_bytes()
    for how in ("ascii", "svg"):
        assert main([*task, how, "--json"]) == 2
        shown = capsys.readouterr()
        assert (f"--json and --picture {how} both print" in shown.err, shown.out) == (True, "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan", "is no JSON: Expecting value"),
        ("[]", "plan.json: an object of this package, got a JSON list"),
        (
            '{"format": "optim-redist.plan/1", "shape": [8]}',
            "plan.json: optim-redist.plan/1 has other fields: ['alternatives'",
        ),
        (
            '{"format": "optim-redist.examples/1", "redistributions": [{"shape": [2]}]}',
            "plan.json is damaged: KeyError: 'name'",
        ),
        (
            '{"format": "optim-redist.examples/1", "redistributions": [{"id": "one", "shape": [2], "mesh": "x", '
            '"src": {"map": [[0]], "block": [1]}}]}',
            "plan.json is damaged: ValueError: processor_mesh has whole numbers as sizes, got 'x'",
        ),
        (
            '{"format": "optim-redist.examples/1", "redistributions": [{"id": "one", "shape": [2, 2], "mesh": [2], '
            '"src": {"map": [[0]], "block": [1]}, "dst": {"map": [[0]], "block": [1]}, "bounds": {"lower_bound": 0}}]}',
            "plan.json: layout [0~1] is for 1 dimensions, the shape is (2, 2)",
        ),
    ],
    ids=["no JSON", "a list", "half a plan", "an example without its name", "an example on a text", "another shape"],
)
def test_files_that_hold_something_else(capsys, tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert main(["verify", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_that_somebody_damaged(capsys, tmp_path):
    made = plan((8, 8), "bf16", Layout(Mesh(4), [0, None]), Layout(Mesh(4), [None, 0])).to_json()
    stage, step, topology = made["stages"][0], made["steps"][0], Topology.nodes(2).to_json()
    path = tmp_path / "plan.json"
    for changes, message in (
        ({"dtype": "b16"}, "dtype 'b16' is unknown here"),
        ({"steps": [{"op": "exchange"}]}, "plan.json: the JSON of a plan is damaged: KeyError: 'ranks'"),
        ({"stages": None}, "plan.json: the JSON of a plan is damaged: TypeError"),
        ({"peak_bytes": "64"}, "Plan.peak_bytes is a whole number, got '64'"),
        ({"memory_limit": []}, "Plan.memory_limit is a whole number or null, got []"),
        ({"donate": "no"}, "Plan.donate is true or false, got 'no'"),
        ({"deterministic": None}, "Plan.deterministic is true or false, got None"),
        ({"planner": 3}, "Plan.planner is a text, got 3"),
        ({"shape": [8.0, 8]}, "sizes must be integers, got 8.0"),
        ({"stages": [{**stage, "rounds": 0}]}, "a stage runs in 1 to 65536 rounds, got 0"),
        ({"stages": [{**stage, "rounds": 10**30}]}, f"a stage runs in 1 to 65536 rounds, got {10**30}"),
        ({"stages": [{**stage, "op": None}]}, "Stage.op is a text, got None"),
        ({"steps": [{**step, "send": "24"}]}, "Step.send is a whole number, got '24'"),
        ({"steps": [{**step, "ranks": [0, True]}]}, "Step.ranks is a list of whole numbers, got (0, True)"),
        ({"bounds": {**made["bounds"], "memory": {}}}, "Bounds.memory is a whole number, got {}"),
        (
            {"alternatives": [{"planner": "naive", "seconds": None, "reason": ""}]},
            "Alternative.seconds is a number, got None",
        ),
        (
            {"stages": [{**stage, "src": {**stage["src"], "partial": {"a": "sum"}}}]},
            "plan.json: the JSON of a layout is damaged: ValueError",
        ),
        ({"topology": {**topology, "rank_bandwidth": 0}}, "a topology has a bandwidth above 0 bytes per second, got 0"),
        ({"topology": {**topology, "latency": None}}, "a topology has a finite latency of 0 seconds or more, got None"),
        (
            {"topology": {**topology, "levels": [{**topology["levels"][0], "size": 0}]}},
            "level 'node' has groups of a whole number of ranks, got 0",
        ),
        ({"topology": {**topology, "levels": [{**topology["levels"][0], "name": []}]}}, "has a name, got []"),
    ):
        path.write_text(json.dumps({**made, **changes}))
        assert main(["verify", str(path)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"curves": None}, "model.json: curves maps collectives to pairs of (bytes, seconds), got None"),
        ({"name": 5}, "model.json: a cost model has a name, got 5"),
        ({"topology": {}}, "model.json: the JSON of a topology is damaged: KeyError: 'levels'"),
        ({"format": "optim-redist.model/2"}, "expected a cost model of format optim-redist.model/1"),
        ({"pack_bandwidth": 0}, "a cost model has a bandwidth above 0 bytes per second, got 0"),
        ({"has_library": "no"}, "has_library is True or False, got 'no'"),
        ({"call_seconds": "1"}, "a cost model has a finite latency of 0 seconds or more, got '1'"),
        ({"curves": {"all_to_all": [[0, 1e-6], [1, 1e-6]]}}, "the curve of all_to_all is (bytes, seconds) above 0"),
        ({"curves": {"all_to_all": [[2, 1e-6], [1, 1e-6]]}}, "bytes ascending"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_cost_model_that_somebody_damaged(capsys, tmp_path, changes, message):
    path, model = tmp_path / "model.json", CommModel.preset("h200x4")
    model.save(path)
    assert CommModel.load(path) == model
    path.write_text(json.dumps({**CommModel.preset("nodes-400g").to_json(), **changes}))
    with pytest.raises(SystemExit):
        main(["plan", *SWAP, "--model", str(path)])
    # argparse breaks lines
    assert message in " ".join(capsys.readouterr().err.split())


def test_what_bus_rates_and_copies_mean_in_seconds():
    # three quarters of a buffer arrive from three of four ranks, in an all-reduce twice
    assert curve_from_bus_rates(4, {400: 300.0}) == ((300.0, 1.0),)
    assert curve_from_bus_rates(4, {400: 300.0}, reduces_twice=True) == ((600.0, 2.0),)
    # every byte is read and written
    assert CommModel("copies", Topology(), pack_bandwidth=200.0).pack_seconds(100) == 1.0


def test_a_model_is_read_from_a_file_of_any_name(capsys, tmp_path):
    known = CommModel.preset("h200x4")
    for name in ("costs.json", "costs"):
        known.save(tmp_path / name)
        assert f"model {known.id}" in run(capsys, "plan", *SWAP, "--model", str(tmp_path / name))


def test_nodes_have_ranks(capsys):
    task = ["plan", "--shape", "8,8", "--mesh", "4", "--src", "[0,-]", "--dst", "[-,0]"]
    assert main([*task, "--topology", "nodes:0"]) == 2
    assert "at least one, got ranks_per_node=0" in capsys.readouterr().err


def test_matplotlib_figures():
    pytest.importorskip("matplotlib")
    made = plan((8, 8), "bf16", parse_layout("[0,-]", "4"), parse_layout("[-,0]", "4"))
    figure = made.picture("matplotlib")
    assert [ax.get_title() for ax in figure.axes[:3]] == ["source [0, -]", "target [-, 0]", "bytes"]
    assert Layout(Mesh(4), [0, None]).picture((8, 8), fmt="matplotlib").axes


def test_progress_is_plain_lines_off_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("optim_redist._tools.progress._EVERY", 0.0)
    assert list(progress(range(3), "count")) == [0, 1, 2]
    shown = capsys.readouterr().err
    assert shown.count("\n") == 3
    assert "3/3" in shown.splitlines()[-1]


def test_matrix_shapes_of_the_benchmark():
    assert [matrix_shape(size) for size in (1, 2, 3, 4)] == [(1, 1), (1, 1), (1, 1), (2, 1)]
    assert matrix_shape(64 << 20) == (8192, 4096)
    assert matrix_shape(512 << 20) == (16384, 16384)
    assert matrix_shape(2 << 30) == (32768, 32768)
