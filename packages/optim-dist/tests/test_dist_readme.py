"""The examples of the README run: those for one process here, those that need ranks on three of them."""

import os
import re
from pathlib import Path

import pytest
import torch

from optim_dist import TritonDistMuonAdamW
from optim_utils.testing import run_ranks
from optim_utils.testing.readme import run_readme

pytestmark = pytest.mark.installed

README = Path(__file__).parents[1] / "README.md"


def test_readme_examples_run():
    assert run_readme(README) == 6


def on_every_rank(rank, world_size, folder, blocks):
    os.chdir(folder)
    names = {"torch": torch, "TritonDistMuonAdamW": TritonDistMuonAdamW}
    for block in blocks:
        exec(block, names)
    return type(names["model"]).__name__, names["opt"].param_groups[0]["kind"]


def test_examples_for_several_ranks_run(tmp_path):
    blocks = re.findall(r"```python skip\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 6
    assert run_ranks(on_every_rank, 3, str(tmp_path), blocks) == [("FSDPSequential", "muon")] * 3
