"""The main job at a tiny size: it trains, resumes to the same curve, and is the same on two ranks."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import train_gpt
from benchmarks.arguments import RequestError
from benchmarks.gpt import data
from benchmarks.gpt.data import load_corpus
from benchmarks.gpt.display import Display
from benchmarks.gpt.results import HEADER

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--model", "tiny", "--steps", "12", "--batch-size", "4", "--context", "32", "--eval-batches", "2"]


def run(out: Path, *arguments: str) -> dict:
    train_gpt.main([*TINY, "--device", "cpu", "--out", str(out), *arguments])
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return run(tmp_path_factory.mktemp("one"))


def losses(results: dict) -> dict[str, list[float]]:
    return {r["arm"]: r["train_loss"] for r in results["results"]}


def test_both_arms_learn_from_the_same_start(one_rank: dict) -> None:
    by_arm = losses(one_rank)
    assert set(by_arm) == {"muon", "adamw"}
    assert by_arm["muon"][0] == by_arm["adamw"][0] == pytest.approx(torch.tensor(256.0).log().item(), rel=1e-4)
    for curve in by_arm.values():
        assert len(curve) == 12
        assert curve[-1] < curve[0] - 0.5


def test_results_hold_what_the_table_shows(one_rank: dict) -> None:
    assert one_rank["format"] == "train_gpt/1"
    for result in one_rank["results"]:
        assert result["validation"][-1] == [12.0, result["final_validation_loss"]]
        assert 0 < result["optimizer_seconds"] < result["seconds"]
        assert result["peak_bytes"] > 1 << 20
    assert one_rank["versions"]["torch"] == torch.__version__


def test_table_bar_and_curves_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--arms", "muon")
    printed = capsys.readouterr().out
    assert "validation loss" in printed
    assert "tok/s" in printed
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("width", [140, 80, 40])
def test_narrow_terminals_show_every_word(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ["Muon + AdamW (this project)", "0.02", "2.441", "3.7 s", "59.61 ms", "32.2 %", "1028 MiB"]
    display = Display(enabled=True)
    monkeypatch.setattr(display._console, "_width", width)
    display.table(HEADER, [row])
    printed = capsys.readouterr().out
    assert {word for text in HEADER + row for word in text.split()} <= set(re.split(r"[\s,┃│]+", printed))
    assert width < 80 or {len(line) for line in printed.splitlines()} <= set(range(width + 1))


def test_resumed_run_gives_the_same_curve(tmp_path: Path, one_rank: dict, capsys: pytest.CaptureFixture[str]) -> None:
    train_gpt.main([*TINY, "--device", "cpu", "--out", str(tmp_path), "--stop-at", "5"])
    assert "stopped after step 5 of " in capsys.readouterr().out
    assert losses(run(tmp_path, "--resume")) == losses(one_rank)


def test_resuming_where_nothing_is_says_so_and_begins(
    tmp_path: Path, one_rank: dict, capsys: pytest.CaptureFixture[str]
) -> None:
    assert losses(run(tmp_path, "--resume", "--arms", "adamw"))["adamw"] == losses(one_rank)["adamw"]
    assert f"--resume found no checkpoints-adamw in {tmp_path}: begins at step 0 there\n" in capsys.readouterr().out
    assert losses(run(tmp_path, "--resume")) == losses(one_rank)
    assert f"--resume found no checkpoints-muon in {tmp_path}: begins at step 0 there\n" in capsys.readouterr().out
    run(tmp_path, "--resume")
    assert "--resume found" not in capsys.readouterr().out


def test_interrupted_run_resumes_from_nothing_of_an_earlier_one(
    tmp_path: Path, one_rank: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "--arms", "adamw", "--seed", "1")
    with monkeypatch.context() as patch:
        patch.setattr(train_gpt, "train", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    assert losses(run(tmp_path, "--resume")) == losses(one_rank)


def raise_interrupt(*arguments: object, **options: object) -> None:
    raise KeyboardInterrupt


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    train_gpt.main([*TINY, "--device", "cpu", "--out", str(tmp_path), "--stop-at", "2", "--arms", "adamw"])
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        run(tmp_path, "--resume", "--arms", "adamw", "--seed", "1")


def test_resuming_with_another_text_is_refused(tmp_path: Path) -> None:
    arguments = [*TINY, "--device", "cpu", "--out", str(tmp_path / "run"), "--arms", "adamw"]
    texts = [tmp_path / "first.txt", tmp_path / "second.txt"]
    for text, byte in zip(texts, b"ab", strict=True):
        text.write_bytes(bytes([byte, 10]) * 1000)
    train_gpt.main([*arguments, "--data", str(texts[0]), "--stop-at", "2"])
    with pytest.raises(ValueError, match=r"text was .*, now .*give the same settings"):
        train_gpt.main([*arguments, "--data", str(texts[1]), "--resume"])
    moved = texts[0].rename(tmp_path / "moved.txt")
    train_gpt.main([*arguments, "--data", str(moved), "--resume"])


@pytest.mark.parametrize("arm", ["muon", "adamw"])
def test_damaged_checkpoint_is_named_with_what_to_do(
    arm: str, tmp_path: Path, one_rank: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--arms", arm, "--save-every", "5", "--resume"]
    run(tmp_path, *arguments, "--stop-at", "5")
    run(tmp_path, *arguments, "--stop-at", "7")
    newest = tmp_path / f"checkpoints-{arm}" / "step-000007"
    for file in newest.iterdir() if newest.is_dir() else [newest]:
        file.write_bytes(b"damaged")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *TINY, "--device", "cpu", "--out", str(tmp_path), *arguments])
    with pytest.raises(
        SystemExit, match=f"(?s)error: checkpoint {newest} was not loaded:.*or remove {newest}, to go on"
    ):
        train_gpt._run_command()
    shutil.rmtree(newest) if newest.is_dir() else newest.unlink()
    assert losses(run(tmp_path, *arguments))[arm] == losses(one_rank)[arm]


def test_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    arguments = ["--arms", "adamw", "--stop-at", "2"]
    run(tmp_path, *arguments)
    path = tmp_path / "checkpoints-adamw" / "step-000002"
    content = torch.load(path)
    content["extra"]["history"]["later"] = 1
    torch.save(content, path)
    with pytest.raises(RequestError, match=r"step-000002 is not of this version .*'later'; leave out --resume"):
        run(tmp_path, *arguments, "--resume")


def test_folder_that_is_no_checkpoint_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints-muon" / "step-000100").mkdir(parents=True)
    run(tmp_path, "--resume", "--arms", "muon")
    assert f"--resume found no checkpoints-muon in {tmp_path}: begins at step 0 there\n" in capsys.readouterr().out


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    earlier = tmp_path / "checkpoints-muon"
    earlier.mkdir()
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(RequestError, match=f"another run is under way in --out {tmp_path}"):
        run(tmp_path)
    assert earlier.exists()
    os.close(other)
    run(tmp_path, "--arms", "adamw")


def test_finished_run_resumes_to_itself(tmp_path: Path, one_rank: dict) -> None:
    run(tmp_path)
    assert losses(run(tmp_path, "--resume")) == losses(one_rank)


@pytest.mark.slow
def test_two_ranks_agree_with_one_and_resume_on_one(tmp_path: Path, one_rank: dict) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "benchmarks/train_gpt.py"]
    common = [*launch, *TINY, "--device", "cpu", "--out", str(tmp_path)]
    subprocess.run([*common, "--stop-at", "6"], cwd=ROOT, check=True, timeout=300)
    halfway = run(tmp_path, "--resume", "--arms", "muon")
    subprocess.run(common, cwd=ROOT, check=True, timeout=300)
    two_ranks = json.loads((tmp_path / "results.json").read_text())
    assert two_ranks["world_size"] == 2
    for arm, curve in losses(one_rank).items():
        assert losses(two_ranks)[arm] == pytest.approx(curve, rel=2e-4)
    assert losses(halfway)["muon"] == pytest.approx(losses(one_rank)["muon"], rel=2e-4)


def test_given_text_replaces_the_library(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 40)
    corpus = load_corpus(text, context=32)
    assert len(corpus.train) == 9216
    assert len(corpus.validation) == 1024
    assert corpus.source == str(text)


def test_batches_depend_on_the_step_alone(tmp_path: Path) -> None:
    corpus = load_corpus(None, context=32)
    first = corpus.batch(3, batch_size=4, context=32, seed=0)
    again = corpus.batch(3, batch_size=4, context=32, seed=0)
    other = corpus.batch(4, batch_size=4, context=32, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no-such-file"], "no-such-file does not exist"),
        (["--steps", "0"], "--steps: expected a whole number from 1 on, got '0'"),
        (["--stop-at", "0"], "--stop-at: expected a whole number from 1 on, got '0'"),
        (["--lr", "nan"], "--lr must be positive, got nan"),
        (["--max-norm", "-1"], "--max-norm must be positive, got -1"),
        (["--seed", "-1"], "--seed must be between 0 and 4294967295, got -1"),
        (["--arms", "muon", "muon"], "--arms must differ, got muon muon"),
        (["--out", __file__], "test_train_gpt.py cannot be written to: File exists"),
    ],
    ids=["data", "steps", "stop-at", "lr", "max-norm", "seed", "arms", "out"],
)
def test_bad_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises((SystemExit, ValueError)) as failure:
        train_gpt.main([*TINY, "--device", "cpu", "--out", str(tmp_path), *arguments])
    assert message in capsys.readouterr().err + str(failure.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_gpt.main([*TINY, "--device", "cuda", "--out", str(tmp_path)])
    assert "--device cuda: torch finds no CUDA device here" in capsys.readouterr().err


def test_a_batch_that_ranks_cannot_share_removes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = tmp_path / "checkpoints-muon"
    earlier.mkdir()
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        train_gpt.main([*TINY, "--device", "cpu", "--out", str(tmp_path)])
    assert "--batch-size must be a multiple of the number of ranks, 3, got 4" in capsys.readouterr().err
    assert earlier.exists()


def test_what_draws_the_curves_is_missed_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_gpt, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        train_gpt.main([*TINY, "--device", "cpu", "--out", str(tmp_path)])
    assert "matplotlib, which is not installed" in capsys.readouterr().err


def test_few_files_have_text_on_both_sides(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 500)
    corpus = load_corpus(tmp_path, context=32)
    assert bytes(corpus.train) == b"a" * 500 + b"b" * 500 + b"c" * 350
    assert bytes(corpus.validation) == b"c" * 150


def test_text_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a" * 500)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(RequestError, match=f"--data {tmp_path} cannot be read: .*Permission denied"):
        load_corpus(tmp_path, context=32)


def refuse(*arguments: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_large_text_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_MAX_BYTES", 1000)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(name[0] * 900)
    assert bytes(load_corpus(tmp_path, context=32).train) == b"a" * 900
    (tmp_path / "a.txt").write_text("a" * 2000)
    assert len(load_corpus(tmp_path, context=32).train) == 900
    assert [len(text) for _, text in data._texts([tmp_path / "a.txt", tmp_path / "absent.txt"])] == [1000]


def test_too_little_text_is_named(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    with pytest.raises(ValueError, match="--context 32 needs at least 34"):
        load_corpus(short, context=32)
