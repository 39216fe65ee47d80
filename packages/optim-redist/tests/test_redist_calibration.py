"""Latency and bandwidth out of measured times, and bounds on time that no plan is predicted to beat."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_redist import CommModel, Layout, Mesh, Topology, plan
from optim_redist._machine.curves import interpolate, latency_and_bandwidth
from optim_redist.calibration import SIZES, _model

RANKS = 8


def measured(latency: float, bandwidth: float, noise: float, seed: int = 0) -> dict[str, list[tuple[float, float]]]:
    """Times of an exchange, each too long by up to a share of itself."""
    rng = random.Random(seed)
    received = [size * (RANKS - 1) / RANKS for size in SIZES]
    return {"all_to_all": [(b, (latency + b / bandwidth) * (1 + rng.uniform(0, noise))) for b in received]}


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.1])
@pytest.mark.parametrize(("latency", "bandwidth"), [(30e-6, 300e9), (200e-6, 2e9), (5e-6, 50e9)])
def test_latency_and_bandwidth_of_an_exchange_are_recovered(latency: float, bandwidth: float, noise: float) -> None:
    for seed in range(20):
        topology = _model(measured(latency, bandwidth, noise, seed), RANKS, "nccl", 1e12).topology
        # a line under all times is between the true one and the one with all noise
        assert topology.latency == pytest.approx(latency, rel=1.5 * noise + 1e-6)
        assert topology.rank_bandwidth == pytest.approx(bandwidth, rel=1.5 * noise + 1e-6)


def test_plans_name_a_measured_model_by_its_own_id() -> None:
    curves = measured(30e-6, 300e9, 0.1)
    # quicker than the exchange for few bytes, and for many
    curves["all_gather"] = [(b, 0.7 * s) for b, s in curves["all_to_all"][:3]]
    curves["send_recv"] = [(b, 0.9 * s) for b, s in curves["all_to_all"][-3:]]
    model = _model(curves, RANKS, "gloo", 1e12)
    made = plan((64, 64), "bf16", Layout(Mesh(RANKS), [0, None]), Layout(Mesh(RANKS), [None, 0]), cost_model=model)
    assert made.model == model.id == CommModel.from_json(model.to_json()).id
    latency, bandwidth = model.topology.latency, model.topology.rank_bandwidth
    assert all(latency + b / bandwidth <= s for curve in model.curves.values() for b, s in curve)


def test_a_machine_without_latency_and_one_measured_size() -> None:
    assert latency_and_bandwidth(((1000, 2.0), (2000, 4.0))) == pytest.approx((0, 500))
    assert latency_and_bandwidth(((1000, 2.0),)) == pytest.approx((0, 500))
    # all times alike: only what bytes take at least is known
    assert latency_and_bandwidth(((1000, 2.0), (2000, 2.0))) == pytest.approx((0, 1000))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e3)), min_size=1, max_size=9), st.floats(1, 1e12))
def test_no_interpolated_time_is_below_the_line(points: list[tuple[float, float]], size: float) -> None:
    curve = _model({"all_to_all": points}, RANKS, "gloo", 1e12).curves["all_to_all"]
    latency, bandwidth = latency_and_bandwidth(curve)
    for num_bytes in (size, *(b for b, _ in curve)):
        assert latency + num_bytes / bandwidth <= interpolate(curve, num_bytes)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_no_plan_is_predicted_below_its_bound(noise: float) -> None:
    # 300 GB/s only for large messages, and 15 times that time for small ones
    slow = [(b, s * (15 if b < 2**20 else 1)) for b, s in measured(30e-6, 300e9, noise)["all_to_all"]]
    models = [
        _model(measured(30e-6, 300e9, noise), RANKS, "nccl", 3e15),
        _model({"all_to_all": slow}, RANKS, "nccl", 3e15),
        *map(CommModel.preset, ("h200x4", "h200x8", "flat")),
    ]
    mesh = Mesh((RANKS,))
    for model in models:
        for power in range(3, 16):
            made = plan(
                (2**power, 2**power), "bfloat16", Layout(mesh, [0, None]), Layout(mesh, [None, 0]), cost_model=model
            )
            assert made.gap >= 0, (model.id, power)
            assert "time" in str(made)
            assert "-" not in str(made).split("time")[-1].split("above")[0]
    assert models[0].topology != Topology.flat(RANKS)
