"""Settings of every package's tests: the Triton interpreter where there is no GPU, and what ``gpu`` means."""

import gc
import os

import quick.imports  # noqa: F401 - before what takes long to import
import torch

# Kernels read this when they are defined, so it is set before any test module imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # What ranks need is imported once and not by each of them, which takes a tenth of a second for optim_redist, one
    # for Triton, and one for the sources of kernels; not where there is a GPU, which no process may touch before it
    # forks.
    preloaded = [
        "quick.imports",
        "pytest",
        "hypothesis",
        "optim_utils.testing",
        "optim_kernels.functional._muon_batch_plan",
        *(f"optim_redist.{name}" for name in ("redistribution", "many", "repeated", "verification")),
        "optim_dist",
        "quick.ranks",
    ]
    os.environ.setdefault("RANKS_PRELOAD", ",".join(preloaded))

import pytest


def _mend_interpreter() -> None:
    """Triton 3.5's interpreter asks of descriptors that strides are multiples of 16 elements; the rule is 16 bytes."""
    try:
        from triton.runtime import interpreter
    except ImportError:  # optim-utils and optim-redist need no Triton
        return
    import triton
    from quick.interpreter import install

    if triton.__version__.startswith("3.5."):
        interpreter.TensorDescHandle.validate = lambda self: None
    install()


_mend_interpreter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip ``gpu`` tests without a CUDA device, and ``nightly`` ones unless they are asked for by name."""
    markers = config.option.markexpr
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if "nightly" in item.keywords and "nightly" not in markers:
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with -m nightly"))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no collection of garbage has to look through it, which took a tenth of a second."""
    gc.freeze()
    gc.enable()
