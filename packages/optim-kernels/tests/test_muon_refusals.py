"""What Muon refuses by name before anything moves: options, groups, parameters, and lists that do not fit a step."""

from typing import Any

import numpy as np
import pytest
import torch
from random_tensors import DEVICE, random_parameters
from torch import nn

from optim_kernels import NSConfig, TritonMuon
from optim_kernels.functional import apply_muon_update_, muon_, muon_update
from optim_utils.param_groups import MatrixView

ON_META = torch.tensor(0.5, device="meta")


def test_what_is_no_group_is_refused_in_torchs_words() -> None:
    p, q = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    with pytest.raises(TypeError, match="param_group must be a dict, but got"):
        TritonMuon([{"params": [p]}, q])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="param_group must be a dict, but got"):
        TritonMuon([p]).add_param_group(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grads": []}, "grads must have one entry for each of the 1 params, got 0"),
        ({"momentum_buffers": [torch.zeros(4, 6)] * 2}, "momentum_buffers must have one entry"),
        ({"momentum_buffers": [torch.zeros(6)]}, r"momentum_buffers\[0\] must have the shape of params\[0\], \(4, 6\)"),
        ({"grads": [torch.ones(1, 6)]}, r"grads\[0\] must have the shape of params\[0\], \(4, 6\), got \(1, 6\)"),
        ({"second_moments": []}, "second_moments must have one entry"),
        ({"views": [None, None]}, "views must have one entry"),
        ({"masters": []}, "masters must have one entry"),
        ({"steps": []}, "steps must have one entry"),
        ({"indices": [1, 2]}, "indices must have one entry"),
        ({"stochastic_rounding": True}, "stochastic_rounding=True needs steps"),
        ({"second_moments": [torch.zeros(1, 4)]}, r"second_moments\[0\] must have 6 elements .* got shape \(1, 4\)"),
        (
            {"masters": [torch.ones(4, 6, dtype=torch.int16)]},
            r"masters\[0\] must be torch.float32, .* but is torch.int16",
        ),
        ({"masters": [0.5]}, r"masters\[0\] must be a tensor or None, got 0.5"),
        (
            {"second_moments": [torch.zeros(3, 2).t()]},
            r"second_moments\[0\], .* on cpu, must be contiguous; give its",
        ),
        (
            {"second_moments": [torch.zeros(6, device="meta")]},
            r"second_moments\[0\] must be where grads\[0\] is",
        ),
        ({"steps": [torch.ones(2).int()]}, r"steps\[0\] must be an int, got tensor"),
        ({"grads": [torch.ones(4, 6, dtype=torch.complex64)]}, r"grads\[0\] must be of a real floating dtype"),
        ({"views": [MatrixView.identity((6, 4))]}, r"views\[0\] is of shape \(6, 4\), grads\[0\] \(4, 6\)"),
        ({"views": ["all"]}, r"views\[0\] must be a MatrixView or None, got 'all'"),
        ({"ns": "keller"}, "ns must be an NSConfig or None, got 'keller'"),
        ({"impl": "cuda"}, "impl must be one of .* got 'cuda'"),
        ({"lr": None}, "lr must be a number or a 1-element tensor, got None"),
        ({"lr": torch.ones(6)}, r"Tensor lr must be 1-element, got shape \(6,\)"),
        ({"lr": torch.tensor(0.1 + 0j)}, r"lr must be a real number, got torch\.complex64"),
        ({"weight_decay": [0.1]}, r"weight_decay must be a number or a 1-element tensor, got \[0.1\]"),
        ({"momentum": "0.9"}, "momentum must be a number or a 1-element tensor, got '0.9'"),
        ({"lr": ON_META}, "lr is on meta, and so has no value; give one on cpu"),
        ({"weight_decay": ON_META}, "weight_decay is on meta, and so has no value"),
        ({"momentum": ON_META}, "momentum is on meta, and so has no value"),
        ({"beta2": ON_META, "second_moments": [torch.zeros(6)]}, "beta2 is on meta, and so has no value"),
        ({"grad_scale": ON_META}, "grad_scale is on meta, and so has no value"),
        ({"found_inf": ON_META}, "found_inf is on meta, and so has no value"),
        ({"clip_factor": ON_META}, "clip_factor is on meta, and so has no value"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_refused_before_anything_moves(change: dict[str, Any], message: str) -> None:
    p, buffer = torch.ones(4, 6), torch.zeros(4, 6)
    arguments: dict[str, Any] = {"grads": [torch.ones(4, 6)], "momentum_buffers": [buffer], "lr": 0.1, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        muon_([p], **arguments)
    assert torch.equal(p, torch.ones(4, 6))
    assert not buffer.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_factor": torch.ones(6)}, r"clip_factor must be a 0-d tensor, one number for all .*, got shape \(6,\)"),
        ({"clip_factor": 0.5}, r"clip_factor must be a 0-d tensor, got 0.5; give torch.tensor\(0.5\)"),
        ({"rule": {"nesterov": True}}, r"rule must be a MuonRule or None, got \{'nesterov': True\}"),
        ({"momentum": ON_META}, "momentum is on meta, and so has no value; give one on cpu"),
        ({"clip_factor": ON_META}, "clip_factor is on meta, and so has no value; give one on cpu"),
    ],
    ids=["factors", "number", "rule", "momentum", "no factor"],
)
def test_what_does_not_fit_an_update_is_refused_before_momentum_moves(options: dict[str, Any], message: str) -> None:
    buffer = torch.zeros(4, 6)
    with pytest.raises((ValueError, TypeError), match=message):
        muon_update([torch.ones(4, 6)], [buffer], **options)
    assert not buffer.any()


@pytest.mark.parametrize("which", ["params", "momentum_buffers", "masters"])
def test_a_layout_that_allows_no_matrices_is_found_before_anything_moves(which: str) -> None:
    lists = {
        "params": [torch.ones(2, 3, 2, 2, dtype=torch.bfloat16)],
        "momentum_buffers": [torch.zeros(2, 3, 2, 2)],
        "masters": [torch.ones(2, 3, 2, 2)],
    }
    lists[which][0] = lists[which][0].to(memory_format=torch.channels_last)
    before = {name: each[0].clone() for name, each in lists.items()}
    view, grads = MatrixView(shape=(2, 3, 2, 2), matrix_shape=(2, 12)), [torch.ones(2, 3, 2, 2)]
    with pytest.raises(ValueError, match=rf"{which}\[0\] cannot be read as matrices: .* strides \(12, 1, 6, 3\)"):
        muon_(**lists, grads=grads, lr=0.1, views=[view])
    if which != "momentum_buffers":
        of_params = {name: lists[name] for name in ("params", "masters")}
        with pytest.raises(ValueError, match=rf"{which}\[0\] cannot be read as matrices"):
            apply_muon_update_(**of_params, updates=grads, lr=0.1, views=[view])
    assert all(torch.equal(each[0], before[name]) for name, each in lists.items())


def test_the_halves_of_a_step_refuse_what_does_not_fit() -> None:
    grads, buffers = [torch.ones(4, 6)] * 2, [torch.zeros(4, 6)]
    with pytest.raises(ValueError, match="momentum_buffers must have one entry for each of the 2 grads, got 1"):
        muon_update(grads, buffers)
    assert not buffers[0].any()
    params = [torch.ones(4, 6)]
    with pytest.raises(ValueError, match="updates must have one entry for each of the 1 params, got 2"):
        apply_muon_update_(params, grads, lr=0.1)
    with pytest.raises(ValueError, match=r"updates\[0\] must have the shape of params\[0\]"):
        apply_muon_update_(params, [torch.ones(6)], lr=0.1)
    with pytest.raises(ValueError, match=r"scale must be one of \('original', .* got 'spectral'"):
        apply_muon_update_(params, grads[:1], lr=0.1, scale="spectral")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"grads\[0\] must be matrices \[..., r, c\], got shape \(6,\)"):
        muon_update([torch.ones(6)], [torch.zeros(6)])
    with pytest.raises(ValueError, match="lr is on meta, and so has no value; give one on cpu"):
        apply_muon_update_(params, grads[:1], lr=ON_META)
    with pytest.raises(TypeError, match=r"bits\[1\] must be a Rounding or None, got 3"):
        apply_muon_update_(params * 2, grads, lr=0.1, bits=[None, 3])  # type: ignore[list-item]
    assert torch.equal(params[0], torch.ones(4, 6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ({"momentum": -0.1}, "momentum should be >= 0"),
        ({"weight_decay": -0.1}, "weight decay should be >= 0"),
        ({"adjust_lr_fn": "moonlight"}, r"moonlight is not supported; choose one of \(None, 'original', .*\)"),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"ns_steps": 100}, "steps"),
        ({"beta2": 1.0}, "beta2"),
        ({"nd": "conv"}, "nd must be"),
        ({"split_rows": 5}, "do not divide"),
        ({"split_rows": (1, 2)}, "add up"),
        ({"split_rows": (3, 0, 1)}, r"must be positive numbers that add up to the 4 rows of param_groups\[0\]"),
        ({"split_rows": True}, "split_rows must be None, .* got True for"),
        ({"split_rows": 3.0}, "split_rows must be None, .* got 3.0 for"),
        ({"split_rows": "ab"}, "split_rows must be None, .* got 'ab' for"),
        ({"split_rows": (2.0, 2.0)}, "split_rows must be None, .* got .2.0, 2.0. for"),
        ({"split_rows": torch.tensor(2)}, r"split_rows must be None, .* got tensor\(2\) for"),
        ({"split_rows": (n for n in (2, 2))}, "split_rows must be None, .* got <generator"),
        ({"missing_grad": "ignore"}, "missing_grad"),
        ({"missing_grad": np.ones(2)}, r"missing_grad must be one of .*, got array\(\[1., 1.\]\)"),
        ({"master_weights": np.ones(2)}, "master_weights must be None, 'fp32' or 'split16', got array"),
        ({"ns_method": np.ones(2)}, r"method must be one of .*, got array\(\[1., 1.\]\)"),
        ({"ns_steps": {}}, "steps must be an int from 0 to 99, got {}"),
        ({"master_weights": "fp32"}, "is for"),
        ({"master_weights": "bf16"}, "master_weights must be None, 'fp32' or 'split16', got 'bf16'"),
        ({"impl": "cuda"}, "impl must be"),
        ({"lr": None}, "lr must be a number or a 1-element tensor, got None"),
        ({"momentum": "0.9"}, "momentum must be a number or a 1-element tensor, got '0.9'"),
        ({"weight_decay": [0.1]}, r"weight_decay must be a number or a 1-element tensor, got \[0.1\]"),
        ({"lr": ON_META}, f"lr is on meta, and so has no value; give one on {DEVICE}"),
        ({"beta2": (0.9, 0.95)}, r"beta2 must be a number or a 1-element tensor, got \(0.9, 0.95\)"),
        ({"nesterov": "False"}, "nesterov must be True or False, got 'False'"),
        ({"cautious": None}, "cautious must be True or False, got None"),
        ({"maximize": []}, r"maximize must be True or False, got \[\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        TritonMuon(random_parameters((4, 6)), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": 3.0}, "views must be None or a list with a MatrixView or None for each parameter, got 3.0"),
        ({"views": "none"}, "views must be None or a list .*, got 'none'"),
        ({"variant": ["keller"]}, r"unknown variant \['keller'\]; choose one of"),
    ],
    ids=str,
)
def test_bad_options_of_groups(options: dict[str, Any], message: str) -> None:
    optimizer = TritonMuon(random_parameters((4, 6)))
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.add_param_group({"params": random_parameters((4, 6)), **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("options", [{}, {"ns_dtype": torch.float64}, {"momentum_dtype": torch.float64}], ids=str)
def test_kernels_that_are_asked_for_in_vain_are_refused_before_anything_moves(options: dict[str, Any]) -> None:
    last = torch.float32 if options else torch.float64
    params = [nn.Parameter(torch.ones(4, 6, device=DEVICE, dtype=dtype)) for dtype in (torch.float32, last)]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = TritonMuon([("first", params[0]), ("last", params[1])], impl="triton", **options)
    name = "first" if options else "last"
    with pytest.raises(
        RuntimeError, match=f"impl='triton' .* fp64, in which {name} is orthogonalized; use impl='auto'"
    ):
        optimizer.step()
    buffers = [torch.zeros_like(p) for p in params]
    config = NSConfig(dtype=options.get("ns_dtype"))
    if "momentum_dtype" in options:
        buffers = [buffer.double() for buffer in buffers]
    with pytest.raises(RuntimeError, match=r"impl='triton' .* fp64, in which grads\[[01]\] is orthogonalized"):
        muon_(params, [torch.ones_like(p) for p in params], buffers, lr=0.1, ns=config, impl="triton")
    moved = [*buffers, *(state["momentum_buffer"] for state in optimizer.state.values())]
    assert not any(map(torch.any, moved))
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)


def test_bad_parameters_are_named() -> None:
    with pytest.raises(ValueError, match=r"got norm\.weight of shape \(4,\); give it to AdamW"):
        TritonMuon([("norm.weight", nn.Parameter(torch.ones(4)))])
    with pytest.raises(ValueError, match="the shape of weight is not known yet; run its lazy module first"):
        TritonMuon(nn.LazyLinear(3, bias=False).named_parameters())
    with pytest.raises(RuntimeError, match=r"complex.*; give it to AdamW"):
        TritonMuon([nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))])
    nested = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(5, 4)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"but w is a nested tensor; give it each matrix as a parameter"):
        TritonMuon([("w", nn.Parameter(nested))])
    embedding = nn.Embedding(4, 3, sparse=True)
    optimizer = TritonMuon(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="densify"):
        optimizer.step()
    optimizer = TritonMuon(random_parameters((4, 6)))
    with pytest.raises(ValueError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1


def test_momentum_of_a_dtype_that_cannot_hold_it_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum_dtype must be None or one of"):
        TritonMuon(random_parameters((8, 16)), momentum_dtype=torch.int8)
