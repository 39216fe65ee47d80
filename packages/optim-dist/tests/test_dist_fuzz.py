"""Random parameter sets over 1 to 5 ranks equal one process, bit for bit in exact mode."""

import random

import pytest
import torch
from dist_cases import Case, Tensors, assert_equal, assert_same_state, train_each

from optim_utils.testing import run_ranks


def random_case(rng, world_size):
    kind = rng.choice(["adamw", "muon", "muon_adamw"])
    steps = rng.choice([1, 2, 3])
    where = [(step, rank) for step in range(steps) for rank in (-1, *range(world_size))]
    groups = {
        "adamw": ({"lr": 0.01}, {"lr": 0.1, "amsgrad": True, "maximize": True}),
        "muon": ({}, {"variant": rng.choice(["torch", "keller", "nanochat-2026-03", "nanochat-2026-07"])}),
        "muon_adamw": ({"kind": "muon", "weight_decay": 0.1}, {"kind": "adamw", "weight_decay": 0.1}),
    }[kind]
    tensors = []
    for number in range(rng.randint(2, 9)):
        group = number if number < 2 else rng.randint(0, 1)
        matrices = kind == "muon" or (kind == "muon_adamw" and group == 0)
        ndim = rng.choice([2, 2, 3]) if matrices else rng.choice([0, 1, 2, 3])
        shape = tuple(rng.choice([1, 2, 3, 5, 7, 13] if matrices else [0, 1, 2, 5, 13, 31]) for _ in range(ndim))
        tensors.append(
            Tensors(
                shape,
                rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float64]),
                group,
                transposed=ndim == 2 and rng.random() < 0.3,
                frozen=number >= 2 and rng.random() < 0.1,
                absent=frozenset(rng.sample(where, rng.choice([0, 0, 1, 2]) % (len(where) + 1))),
            )
        )
    return Case(kind, tuple(tensors), groups, steps=steps)


def random_options(rng):
    options = {"reducer": "exact", "bucket_mb": rng.choice([1e-5, 1e-4, None])}
    return {**options, "gradients": "streamed", "accumulation_steps": 1} if rng.random() < 0.4 else options


def check(world_size, seeds):
    cases = [random_case(random.Random(f"{world_size}-{seed}"), world_size) for seed in seeds]
    options = [random_options(random.Random(seed)) for seed in seeds]
    results = run_ranks(
        train_each, world_size, [(case, 0, chosen) for case, chosen in zip(cases, options)], timeout=500
    )
    oracle = run_ranks(train_each, 1, [(case, world_size) for case in cases], timeout=500)[0]
    for number, (seed, expected) in enumerate(zip(seeds, oracle)):
        for rank, result in enumerate(results):
            what = f"seed {seed}, rank {rank} of {world_size}: {cases[number]}"
            assert_equal(result[number]["parameters"], expected["parameters"], what)
        state = results[0][number]["state"]
        for index in set(state["state"]) - set(expected["state"]["state"]):
            assert not any(value.any() for value in state["state"].pop(index).values()), what
        assert_same_state(state, expected["state"])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_random_parameter_sets(world_size):
    check(world_size, range(20))


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7])
def test_three_hundred_random_parameter_sets(world_size):
    check(world_size, range(1000, 1300))
