"""Settings of every package's tests: the Triton interpreter where there is no GPU, and what ``gpu`` means."""

import os

import torch

# Kernels read this when they are defined, so it is set before any test module imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests without a CUDA device, and ``nightly`` ones unless they are asked for by name."""
    markers = config.option.markexpr
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "nightly" in item.keywords and "nightly" not in markers:
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with -m nightly"))
