"""Old checkpoints: the newest stay, and nothing goes that is not a complete checkpoint of this package."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from optim_dist import TritonDistAdamW, checkpoint, elastic
from optim_dist._checkpoint import manifest, removal, saving, writing
from optim_utils.testing import RankFailure, run_ranks


def build():
    return TritonDistAdamW([("w", nn.Parameter(torch.ones(100)))], timeout=20)


def save(folder, **options):
    saving = checkpoint.save(folder, None, build(), **options)
    if options.get("async_"):
        saving.wait()


def names(folder):
    return sorted(os.listdir(folder))


def test_all_stay_unless_asked(tmp_path):
    for number in range(5):
        save(tmp_path / str(number))
    assert names(tmp_path) == [*"01234", "latest"]


@pytest.mark.parametrize("async_", [False, True])
def test_the_newest_stay(tmp_path, async_):
    # of what was finished, not by name
    for name in ("c", "a", "b"):
        save(tmp_path / name)
    save(tmp_path / "d", keep=3, async_=async_)
    assert names(tmp_path) == ["a", "b", "d", "latest"]
    save(tmp_path / "0", keep=1, async_=async_)
    assert names(tmp_path) == ["0", "latest"]
    save(tmp_path / "e", keep=9, async_=async_)
    assert names(tmp_path) == ["0", "e", "latest"]
    checkpoint.load(tmp_path / "0", None, build())


def test_the_one_just_written_stays_whatever_clocks_say(tmp_path):
    for name in ("a", "b"):
        save(tmp_path / name)
        os.utime(tmp_path / name / manifest.MANIFEST, (4e9, 4e9))  # in a hundred years
    save(tmp_path / "c", keep=1)
    assert names(tmp_path) == ["c", "latest"]


def test_only_complete_checkpoints_go(tmp_path):
    for name in ("old", "damaged", "unfinished", "foreign", "linked"):
        save(tmp_path / name)
    (tmp_path / "linked").rename(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    (tmp_path / "linked").symlink_to(tmp_path.parent / f"{tmp_path.name}-elsewhere")
    (tmp_path / "unfinished" / manifest.MANIFEST).unlink()
    (tmp_path / "foreign" / manifest.MANIFEST).write_text(json.dumps({"format": "somebody else's"}))
    content = (tmp_path / "damaged" / manifest.MANIFEST).read_text()
    (tmp_path / "damaged" / manifest.MANIFEST).write_text(content.replace('"w"', '"v"'))
    others = ["data", ".hidden", ".other.0123456789ab.tmp"]
    for name in others:
        (tmp_path / name).mkdir()
    shutil.copytree(tmp_path / "old", tmp_path / ".copy")
    (tmp_path / "notes").write_text("")
    save(tmp_path / "new", keep=1)
    others += [".copy", "notes", "damaged", "unfinished", "foreign", "linked", "new", "latest"]
    assert names(tmp_path) == sorted(others)
    assert names(tmp_path / "linked") == ["common.pt", "manifest.json", "rank-00000.pt"]


def test_what_a_killed_removal_leaves_is_no_checkpoint_and_goes_with_the_next_save(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(killed_in_removal, 2, str(tmp_path))
    (left,) = [name for name in names(tmp_path) if name.endswith(".removed")]
    assert left.startswith(".a.")
    assert names(tmp_path) == [left, "b", "latest"]
    assert checkpoint.latest(tmp_path) == tmp_path / "b"
    (tmp_path / checkpoint.LATEST).unlink()
    assert checkpoint.latest(tmp_path) == tmp_path / "b"
    save(tmp_path / "c")
    assert names(tmp_path) == ["b", "c", "latest"]


def test_what_another_process_still_writes_gets_no_name_once_its_removal_has_begun(tmp_path, monkeypatch):
    save(tmp_path / "whole")
    unfinished, unlink, outcomes = tmp_path / ".a.0123456789ab.tmp", os.unlink, []
    (tmp_path / "whole").rename(unfinished)

    def unlink_late(*args, **options):
        """As if the other process were done just now."""
        if not outcomes:
            try:
                unfinished.rename(tmp_path / "a")
                outcomes.append("has a name, and loses its files")
            except FileNotFoundError:
                outcomes.append("gone")
        unlink(*args, **options)

    monkeypatch.setattr(os, "unlink", unlink_late)
    save(tmp_path / "a")
    assert outcomes == ["gone"]
    assert names(tmp_path) == ["a", "latest"]
    checkpoint.load(tmp_path / "a", None, build())


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("file", ["rank-00000.pt", "common.pt", "manifest.json", "latest"])
def test_two_processes_that_save_to_one_path_are_told_so(tmp_path, monkeypatch, file, async_):
    write = manifest.write_durably

    def write_late(path, content):
        """As if another process saved meanwhile."""
        if path.name == file:
            monkeypatch.undo()
            writing.write(*theirs)
        return write(path, content)

    theirs = []
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write", lambda *given: theirs.extend(given))
        save(tmp_path / "a")
    monkeypatch.setattr(manifest, "write_durably", write_late)
    with pytest.raises(RuntimeError) as raised:
        save(tmp_path / "a", async_=async_)
    text = str(raised.value)
    assert text.startswith(f"checkpoint {tmp_path}/a was not saved:\n  rank 0: FileNotFoundError: {tmp_path}/.a.")
    assert text.endswith(
        ".tmp is gone: it was removed by another process that saves to the same path, say; give every job a "
        "directory of its own"
    )
    assert names(tmp_path) == ["a", "latest"]
    checkpoint.load(tmp_path / "a", None, build())


def lose_the_folder_between_two_ranks(rank, world_size, folder):
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(Path, "touch", lambda *_, **__: None)  # as if it were removed, and made again by rank 1
        with pytest.raises(RuntimeError) as raised:
            save(f"{folder}/a")
    return str(raised.value)


def test_ranks_whose_folder_another_process_removes_meanwhile_are_told_so(tmp_path):
    for text in run_ranks(lose_the_folder_between_two_ranks, 2, str(tmp_path)):
        assert text.startswith(f"checkpoint {tmp_path}/a was not saved:\n  rank 0: FileNotFoundError: {tmp_path}/.a.")
        assert ".tmp is gone: it was removed by another process" in text
    assert names(tmp_path) == []


def test_a_path_that_another_process_has_saved_to_meanwhile_is_refused(tmp_path, monkeypatch):
    write = saving.write

    def write_late(*given):
        monkeypatch.undo()
        save(tmp_path / "a")
        write(*given)

    monkeypatch.setattr(saving, "write", write_late)
    refused = f"{tmp_path}/a exists by now: another process has saved to the same path; give every job a directory"
    with pytest.raises(RuntimeError, match=f"rank 0: FileExistsError: {refused} of its own$"):
        save(tmp_path / "a")
    assert names(tmp_path) == ["a", "latest"]
    checkpoint.load(tmp_path / "a", None, build())


def killed_in_removal(rank, world_size, folder):
    shutil.rmtree = lambda path, ignore_errors=False: ignore_errors or os.kill(os.getpid(), signal.SIGKILL)
    save(f"{folder}/b", keep=1)


def fail_to_remove(rank, world_size, folder):
    def fail(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError("not yours")

    for name in ("a", "b"):
        save(f"{folder}/{name}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", fail)
        texts = []
        for number, is_async in enumerate((False, True)):
            with pytest.raises(RuntimeError) as raised:
                save(f"{folder}/c{number}", keep=1, async_=is_async)
            texts.append(str(raised.value))
    return texts


def test_what_cannot_be_removed_is_an_error_on_all_and_the_new_one_is_complete(tmp_path):
    for texts in run_ranks(fail_to_remove, 2, str(tmp_path)):
        for number, text in enumerate(texts):
            assert text.startswith(f"checkpoint {tmp_path}/c{number} is complete, but older ones were not removed:\n")
            assert text.endswith("rank 0: PermissionError: not yours")
    assert checkpoint.latest(tmp_path) == tmp_path / "c1"
    checkpoint.load(tmp_path / "c0", None, build())


def test_what_another_process_removes_first_is_gone_all_the_same(tmp_path, monkeypatch):
    rmtree, read = shutil.rmtree, manifest.read_manifest

    def remove_twice(path, ignore_errors=False):
        rmtree(path, ignore_errors)
        rmtree(path, ignore_errors)

    for name in ("a", "b"):
        save(tmp_path / name)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", remove_twice)
        save(tmp_path / "c", keep=2)
    assert names(tmp_path) == ["b", "c", "latest"]

    def read_and_lose(folder):
        found = read(folder)
        if folder.name == "b":
            folder.rename(folder.with_name(".b.0123456789ab.removed"))
        return found

    monkeypatch.setattr(removal, "read_manifest", read_and_lose)
    save(tmp_path / "d", keep=1)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["d", "latest"]
    monkeypatch.setattr(removal, "complete_beside", lambda folder: [tmp_path / "lost", folder])
    save(tmp_path / "e", keep=1)


def test_folders_that_cannot_be_looked_into_stay(tmp_path, monkeypatch):
    """As the ``lost+found`` of a disk, which is its owner's alone."""
    save(tmp_path / "a")
    for name in ("lost+found", "locked"):
        (tmp_path / name).mkdir()
    (tmp_path / "locked" / manifest.MANIFEST).write_text("")
    is_file, read_bytes = type(tmp_path).is_file, type(tmp_path).read_bytes

    def refuse(path):
        if "lost+found" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    def refuse_to_read(path):
        if "locked" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(type(tmp_path), "is_file", refuse)
    monkeypatch.setattr(type(tmp_path), "read_bytes", refuse_to_read)
    save(tmp_path / "b", keep=1)
    assert names(tmp_path) == ["b", "latest", "locked", "lost+found"]


@pytest.mark.parametrize("keep", [0, -1, 1.5, "3", True])
def test_numbers_below_one_are_refused(tmp_path, keep):
    with pytest.raises(RuntimeError, match=f"keep must be at least 1, or None to keep all checkpoints, got {keep!r}"):
        save(tmp_path / "a", keep=keep)
    assert names(tmp_path) == []


def test_what_is_no_bool_does_not_save_in_the_background(tmp_path):
    with pytest.raises(RuntimeError, match="async_ must be True or False, got 'no'"):
        save(tmp_path / "a", async_="no")
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="async_ must be True or False, got 'no'"):
        elastic.run(lambda run: None, tmp_path, every=1, async_="no")
