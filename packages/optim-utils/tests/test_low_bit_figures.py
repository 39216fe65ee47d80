"""The README's figures of low-bit storage that need no GPU: errors of Shampoo's roots, lost numbers, memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optim_utils import DYNAMIC8, FP8_E4M3, INT4, INT8, dequantize, multi_dim_split, quantize

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TEXT = " ".join(README.split())  # without its line breaks
DAMPING = (1e-8, 1e-4, 1e-2)
FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "bf16": lambda x: x.bfloat16().double(),
    "INT8": lambda x: dequantize(quantize(x.float(), INT8)).double(),
    "DYNAMIC8": lambda x: dequantize(quantize(x.float(), DYNAMIC8)).double(),
}


def percent(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item() * 100


@pytest.fixture(scope="module")
def factor() -> Tensor:
    """512 × 512, eigenvalues evenly spaced in logarithms from 1 to 1e-6."""
    torch.manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(512, 512, dtype=torch.float64))
    return (basis * torch.logspace(0, -6, 512, dtype=torch.float64)) @ basis.mT


def inverse_fourth_root(symmetric: Tensor, epsilon: float) -> Tensor:
    values, vectors = torch.linalg.eigh((symmetric + symmetric.mT) / 2)
    return (vectors * (values - values.min().clamp(max=0) + epsilon) ** -0.25) @ vectors.mT


def numbers_of_row(start: str) -> list[list[float]]:
    """The figures of a row of the README's table: a list for each column."""
    (row,) = re.findall(rf"^\| {start}.*?\|(.*)\|$", README, re.MULTILINE)
    return [[float(number) for number in re.findall(r"[0-9.]+", cell)] for cell in row.split("|")]


def test_errors_of_roots_are_those_of_the_table(factor: Tensor) -> None:
    factors, roots = numbers_of_row("the factor is stored"), numbers_of_row("the root itself")
    for epsilon, of_factor, of_root in zip(DAMPING, factors, roots, strict=True):
        root = inverse_fourth_root(factor, epsilon)
        for store, first, second in zip(FORMATS.values(), of_factor, of_root, strict=True):
            assert percent(inverse_fourth_root(store(factor), epsilon), root) == pytest.approx(first, rel=0.05)
            assert percent(store(root), root) == pytest.approx(second, abs=0.06)


def test_an_exact_diagonal_helps_roots_more_than_factors(factor: Tensor) -> None:
    def with_diagonal(x: Tensor) -> Tensor:
        diagonal = torch.diag(x.diag())
        return FORMATS["INT8"](x - diagonal) + diagonal

    (of_roots, of_factors) = re.findall(r"such roots \((.*?) %\), factors little \((.*?) %\)", TEXT)[0]
    limits = [[float(number) for number in re.findall(r"[0-9.]+", text)] for text in (of_roots, of_factors)]
    for epsilon, of_root, of_factor in zip(DAMPING, *limits, strict=True):
        root = inverse_fourth_root(factor, epsilon)
        assert percent(with_diagonal(root), root) == pytest.approx(of_root, abs=0.02)
        assert percent(inverse_fourth_root(with_diagonal(factor), epsilon), root) == pytest.approx(of_factor, rel=0.05)


def test_errors_of_eigenvectors() -> None:
    torch.manual_seed(0)
    vectors, _ = torch.linalg.qr(torch.randn(1024, 1024))
    for fmt, expected in ((INT8, 0.6), (DYNAMIC8, 1.1), (FP8_E4M3, 2.6)):
        assert percent(dequantize(quantize(vectors, fmt)), vectors) == pytest.approx(expected, abs=0.05)
    assert "Eigenvectors (1024): `INT8` 0.6 %, `DYNAMIC8` 1.1 %, `FP8_E4M3` 2.6 %." in TEXT


def test_fp16_loses_small_second_moments() -> None:
    torch.manual_seed(0)
    sample = torch.exp(3 * torch.randn(1024, 1024) - 12)
    assert (sample.half() == 0).double().mean().item() == pytest.approx(0.038, abs=5e-4)
    assert "3.8 % of a log-normal sample" in TEXT


def gpt2() -> list[tuple[int, ...]]:
    """GPT-2 124M: matrices as they are stored, and vectors."""
    d = 768
    layer = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,), (d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *layer * 12, (d,), (d,)]


def llama_7b() -> list[tuple[int, ...]]:
    d, hidden = 4096, 11008
    layer = [(d, d)] * 4 + [(hidden, d)] * 2 + [(d, hidden), (d,), (d,)]
    return [(32000, d), *layer * 32, (d,), (32000, d)]


def test_memory_of_factors_and_roots() -> None:
    found = {}
    for name, shapes in (("GPT-2 124M", gpt2()), ("Llama-7B", llama_7b())):
        blocks = [b.shape for shape in shapes for b in multi_dim_split(torch.empty(shape, device="meta"), 1024)]
        sizes = [size for block in blocks for size in block]
        elements, packed = 2 * sum(n * n for n in sizes), 2 * sum(n * (n + 1) // 2 for n in sizes)
        each = [4, 2, INT8.bytes_per_element, INT4.bytes_per_element]
        found[name] = [elements * size / 2**30 for size in each] + [4 * packed / 2**30]
    gib = found["GPT-2 124M"]
    assert f"GPT-2 124M {gib[0]:.2f} GiB in fp32, {gib[2]:.2f} in `INT8`; Llama-7B" in TEXT
    gib = found["Llama-7B"]
    sentence = (
        f"Llama-7B {gib[0]:.1f} GiB in fp32, {gib[1]:.1f} in bf16, {gib[2]:.1f} in `INT8`, {gib[3]:.1f} in `INT4`."
    )
    assert f"{sentence} Packing triangles (`pack_upper_triangular`) halves fp32 ({gib[4]:.1f})" in TEXT
    assert sum(map(prod, gpt2())) == 124_439_808
