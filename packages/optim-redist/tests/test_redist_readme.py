"""The README: every python block runs, and so does every command that needs no other machine."""

import re
import shlex
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import optim_redist as redist
from optim_redist.cli import main
from optim_utils.testing import run_ranks, run_readme

pytestmark = pytest.mark.installed

README = Path(__file__).parents[1] / "README.md"


def test_python_blocks_run(capsys):
    assert run_readme(README) >= 6
    shown = capsys.readouterr().out
    assert "no plan moves less than 512 elements" in shown
    assert "split_2_2_2" in shown


def on_every_rank(rank: int, world_size: int, blocks: list[str]) -> None:
    """Run the README's blocks about ranks with what they speak of: a part, a DTensor, another mesh."""
    full = torch.arange(64 * 64.0).view(64, 64)
    mesh = redist.Mesh((2, 4), names=("dp", "tp"))
    names = {
        "torch": torch,
        "redist": redist,
        "src": redist.Layout(mesh, ["dp", "tp"]),
        "dst": redist.Layout(mesh, ["tp", "dp"]),
        "local": full[32 * (rank // 4) :, 16 * (rank % 4) :][:32, :16].contiguous(),
        "dtensor": distribute_tensor(full, init_device_mesh("cpu", (2, 4)), [Shard(0), Shard(1)]),
        "inference_mesh": init_device_mesh("cpu", (4, 2)),
        "Shard": Shard,
        "Replicate": Replicate,
    }
    before = names["part"] = names["local"]
    names["shard"] = before.clone().requires_grad_()
    names["batch"] = full[rank : rank + 1]
    names["replicated"] = redist.Layout(mesh, [None, None])
    for code in blocks:
        exec(code, names)
    assert torch.equal(names["local"], full[16 * (rank % 4) :, 32 * (rank // 4) :][:16, :32])
    assert torch.equal(names["handle"].wait(), before)
    assert torch.equal(names["weight"].to_local(), full[16 * (rank // 2) :][:16])
    assert torch.equal(names["moved"]["weight"], names["local"])
    summed = full[:8].sum(0)[32 * (rank // 4) :][:32]
    assert torch.equal(names["shard"].grad, summed[:, None].expand(32, 16))
    assert names["largest"] == names["local"].max() + 2


def test_blocks_about_ranks_run_on_ranks():
    blocks = re.findall(r"^```python skip\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    run_ranks(on_every_rank, 8, blocks)


def test_commands_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = re.findall(
        r"^optim-redist +((?:plan|explain|bound|verify) .*)$", README.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(commands) == 6
    shown = ""
    for command in commands:
        call, _, file = command.partition(" > ")
        words = shlex.split(call, comments=True)
        assert main(words) == 0, command
        text = capsys.readouterr().out
        if file:
            Path(file).write_text(text)
        elif words[0] != "verify":
            assert main([*words, "--json"]) == 0, command
            capsys.readouterr()
        shown += text
    assert "together: 448 elements" in shown
    assert "1 redistributions proven, 1 executed, 0 wrong" in shown
