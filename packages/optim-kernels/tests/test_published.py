"""What is taken over from others, or promised to them: arguments, options, coefficients, names. Nothing is computed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import optim_kernels
from optim_kernels import COEFFICIENTS, VARIANTS, TritonAdamW, TritonMuon, TritonMuonAdamW

NAMES = (
    "TritonAdamW TritonMuon TritonMuonAdamW clip_grad_norm_ compute_global_grad_norm get_total_norm "
    "clip_grads_with_norm_ clip_factor sum_of_squares newton_schulz NSConfig COEFFICIENTS VARIANTS functional reference"
)


def test_names_of_the_package() -> None:
    assert sorted(optim_kernels.__all__) == sorted(NAMES.split())


@pytest.mark.parametrize(("ours", "theirs"), [(TritonAdamW, torch.optim.AdamW), (TritonMuon, torch.optim.Muon)])
def test_torchs_arguments_come_first(ours: Any, theirs: Any) -> None:
    def arguments(cls: Any) -> list[tuple[str, Any, Any]]:
        return [(each.name, each.kind, each.default) for each in inspect.signature(cls).parameters.values()]

    expected, found = arguments(theirs), arguments(ours)
    assert found[: len(expected)] == expected
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in found[len(expected) :])


# In what each differs from torch.optim.Muon.
OF_NANOCHAT = {"lr": 0.02, "weight_decay": 0.0, "eps_mode": "add", "missing_grad": "raise"}
OF_2026 = {**OF_NANOCHAT, "ns_coefficients": "polar_express", "eps": 1e-6, "beta2": 0.95, "cautious": True}
PUBLISHED: dict[str, dict[str, Any]] = {
    "torch": {},
    "keller": {
        "lr": 0.02,
        "weight_decay": 0.0,
        "eps_mode": "add",
        "adjust_lr_fn": "keller",
        "nd": "convolution",
        "missing_grad": "zero",
    },
    "nanochat-2025": OF_NANOCHAT,
    "nanochat-2026-01": {**OF_2026, "norm_scale": 1.02},
    "nanochat-2026-03": {**OF_2026, "norm_scale": 1.01},
    "nanochat-2026-07": {**OF_2026, "norm_scale": 1.01, "beta2": 0.9, "row_equilibrate": True, "renormalize": True},
}


def test_options_of_the_variants() -> None:
    of_torch = VARIANTS["torch"]
    differences = {
        name: {key: value for key, value in options.items() if value != of_torch[key]}
        for name, options in VARIANTS.items()
    }
    assert differences == PUBLISHED
    assert of_torch.items() >= torch.optim.Muon([nn.Parameter(torch.zeros(2, 2))]).defaults.items()


def test_groups_of_nanochat_have_its_defaults() -> None:
    muon, adamw = ({"kind": kind, "params": [nn.Parameter(torch.zeros(2, 2))]} for kind in ("muon", "adamw"))
    muon, adamw = TritonMuonAdamW([muon, adamw]).param_groups
    # a parameter without a gradient is an error there, and is skipped here
    expected = VARIANTS["nanochat-2026-07"] | {"missing_grad": "skip"}
    assert {key: muon[key] for key in expected} == expected
    expected = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    assert {key: adamw[key] for key in expected} == expected


TRIPLES: dict[str, list[float]] = {
    "keller": [3.4445, -4.7750, 2.0315],
    "you": [
        *(4.0848, -6.8946, 2.9270),
        *(3.9505, -6.3029, 2.6377),
        *(3.7418, -5.5913, 2.3037),
        *(2.8769, -3.1427, 1.2046),
        *(2.8366, -3.0525, 1.2012),
    ],
    "polar_express": [
        *(8.156554524902461, -22.48329292557795, 15.878769915207462),
        *(4.042929935166739, -2.808917465908714, 0.5000178451051316),
        *(3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        *(3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        *(2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ],
    # with arguments up to 1.05 too large
    "polar_express_gram": [
        *(8.28721201814563 / 1.05, -23.595886519098837 / 1.05**3, 17.300387312530933 / 1.05**5),
        *(4.107059111542203 / 1.05, -2.9478499167379106 / 1.05**3, 0.5448431082926601 / 1.05**5),
        *(3.9486908534822946 / 1.05, -2.908902115962949 / 1.05**3, 0.5518191394370137 / 1.05**5),
        *(3.3184196573706015 / 1.05, -2.488488024314874 / 1.05**3, 0.51004894012372 / 1.05**5),
        *(2.300652019954817 / 1.05, -1.6689039845747493 / 1.05**3, 0.4188073119525673 / 1.05**5),
    ],
    "cans": [
        *(8.4703, -25.1081, 18.6293),
        *(4.1828, -3.1087, 0.5806),
        *(3.9619, -2.9541, 0.5630),
        *(3.2866, -2.4647, 0.5074),
        *(2.2737, -1.6447, 0.4162),
    ],
    "cubic5": [
        *(3.3656576, -3.3420992, 0.0),
        *(2.5744352, -1.4957376, 0.0),
        *(2.5368962, -1.4312570, 0.0),
        *(2.4418906, -1.2764040, 0.0),
        *(2.2230472, -0.9630650, 0.0),
    ],
    "aol4": [
        *(4.6051, -9.6552, 5.6769),
        *(4.7505, -6.0861, 2.1790),
        *(2.7763, -2.3190, 0.5523),
        *(2.4231, -2.2861, 0.8193),
    ],
}


def test_coefficients_to_the_last_digit() -> None:
    assert {name: [number for triple in set_ for number in triple] for name, set_ in COEFFICIENTS.items()} == TRIPLES
