"""The reference is torch's AdamW in fp64, and its parts do what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from optim_kernels import reference


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.0, 0.5)}], ids=str)
def test_fp64_trajectory_is_torchs(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(40, 3, dtype=torch.float64, generator=generator)
    q = torch.nn.Parameter(p.clone())
    optimizer = torch.optim.AdamW([q], lr=1e-2, weight_decay=0.1, foreach=False, **options)
    m, v, w = (torch.zeros_like(p) for _ in range(3))
    steps = torch.zeros(())
    for _ in range(20):
        q.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
        optimizer.step()
        reference.adamw_(
            [p],
            [q.grad],
            [m],
            [v],
            steps=steps,
            lr=1e-2,
            betas=options.get("betas", (0.9, 0.999)),
            eps=1e-8,
            weight_decay=0.1,
            max_exp_avg_sqs=[w] if "amsgrad" in options else None,
            maximize="maximize" in options,
        )
    torch.testing.assert_close(p, q.detach(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(m, optimizer.state[q]["exp_avg"], rtol=1e-12, atol=1e-14)
    assert int(steps) == 20


def test_slices_are_summed_in_order_in_fp32() -> None:
    pieces = torch.tensor([[1.0], [2.0**-9], [2.0**-9]], dtype=torch.bfloat16)
    m = torch.zeros(1)
    options: dict[str, Any] = {"lr": 0.0, "betas": (0.0, 0.0), "eps": 1.0, "weight_decay": 0.0}
    reference.adamw_([torch.zeros(1)], [pieces], [m], [torch.zeros(1)], steps=torch.zeros(()), **options)
    # in bf16 the two small ones would be lost, one by one
    assert m.item() == 1 + 2.0**-8


def test_bias_corrections_keep_their_digits() -> None:
    """1 − β2^t of a β2 near one is formed in fp64: an fp32 β2 = 0.999 would be 1.3e-5 off."""
    p = torch.zeros(1)
    options: dict[str, Any] = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 0.0, "weight_decay": 0.0}
    reference.adamw_([p], [torch.ones(1)], [torch.zeros(1)], [torch.zeros(1)], steps=torch.zeros(()), **options)
    torch.testing.assert_close(p, -torch.ones(1), rtol=2e-7, atol=0)


def test_norms_of_several_dtypes() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16), torch.zeros(0)]
    assert reference.total_norm(tensors).item() == 5
    assert reference.total_norm(tensors, float("inf")).item() == 4
    assert reference.total_norm(tensors, 1.0).item() == 7
    assert reference.clip_factor(torch.tensor(0.5), 1.0).item() == 1
    assert reference.clip_factor(torch.tensor(float("nan")), 1.0).isnan()
