"""Laws of the plan, without a process group: every element has one place and one owner, and loads are even."""

import json
import os
import subprocess
import sys
from collections import Counter
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim_dist import make_plan
from optim_dist.__main__ import main
from optim_dist.__main__ import plan_of as plan_of_model
from optim_dist._dealing import newton_schulz_flops
from optim_dist.plan import MATRIX_ALIGNMENT, ParameterSpec
from optim_dist.planning import plan_parameters

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=12)


def plan_of(shapes, world_size, bucket_mb=None, dtype=torch.float32):
    named = {f"w{number}": shape for number, shape in enumerate(shapes)}
    matrices = [name for name, shape in named.items() if len(shape) >= 2 and int(name[1:]) % 2 == 0]
    groups = [
        {"kind": "muon", "params": matrices},
        {"kind": "adamw", "params": [name for name in named if name not in matrices]},
    ]
    return make_plan(named, groups, world_size, dtype=dtype, bucket_mb=bucket_mb)


@settings(max_examples=150, deadline=None)
@given(SHAPES, st.integers(1, 9), st.sampled_from([None, 1e-5, 1e-3]))
def test_every_element_has_one_place_and_one_owner(shapes, world_size, bucket_mb):
    plan = plan_of(shapes, world_size, bucket_mb)
    seen = Counter()
    for bucket in plan.buckets:
        assert bucket.chunk % 128 == 0
        taken = torch.zeros(bucket.numel, dtype=torch.int32)
        for piece in bucket.pieces():
            spec = plan.parameters[piece.parameter]
            taken[piece.offset : piece.offset + piece.stop - piece.start] += 1
            seen[spec.name] += piece.stop - piece.start
            if piece.start < piece.stop:
                # inside the chunk of its owner
                assert piece.offset // bucket.chunk == piece.rank
                assert (piece.offset + piece.stop - piece.start - 1) // bucket.chunk == piece.rank
            if bucket.route == "muon":
                assert (piece.start, piece.stop) == (0, spec.numel), "a matrix was cut"
                assert piece.offset * spec.dtype.itemsize % MATRIX_ALIGNMENT == 0 or spec.numel == 0
        assert taken.max().item() <= 1
        assert int((taken == 0).sum()) == bucket.padding
        for rank in range(world_size):
            assert list(bucket.pieces(rank)) == [piece for piece in bucket.pieces() if piece.rank == rank]
    assert sum(plan.loads()) == sum(spec.cost for spec in plan.parameters)
    assert seen == Counter({f"w{number}": prod(shape) for number, shape in enumerate(shapes)})
    for index, spec in enumerate(plan.parameters):
        ends = [end for piece in plan.ranges(index) for end in (piece.start, piece.stop)]
        assert ends[0] == 0
        assert ends[-1] == spec.numel
        assert ends[1:-1:2] == ends[2:-1:2], "pieces have gaps"


@settings(max_examples=30, deadline=None)
@given(SHAPES, st.integers(2, 5))
def test_the_plan_is_deterministic_and_its_hash_sees_the_structure(shapes, world_size):
    plan = plan_of(shapes, world_size)
    assert plan.hash == plan_of(shapes, world_size).hash
    assert plan.hash != plan_of([*shapes, (3,)], world_size).hash
    assert plan.hash != plan_of(shapes, world_size + 1).hash
    assert plan.hash != plan_of(shapes, world_size, dtype=torch.bfloat16).hash


def nanochat(layers, width):
    shapes = [(65536, width)]
    for _ in range(layers):
        shapes += [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    return [*shapes, (65536, width)]


def model_plan(shapes, world_size):
    named = {f"w{number}": shape for number, shape in enumerate(shapes)}
    edges = ["w0", f"w{len(shapes) - 1}"]
    inner = [name for name, shape in named.items() if name not in edges and len(shape) == 2]
    rest = [name for name in named if name not in inner]
    return make_plan(named, [{"kind": "muon", "params": inner}, {"kind": "adamw", "params": rest}], world_size)


@pytest.mark.parametrize(("layers", "width"), [(20, 1280), (32, 2048)])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_nanochat_models_are_dealt_evenly_without_padding(layers, width, world_size):
    plan = model_plan(nanochat(layers, width), world_size)
    assert plan.imbalance <= 1.02
    assert plan.padding <= 0.001
    assert len(plan.buckets) >= 4


def test_gpt2_on_eight_ranks():
    shapes = [(50304, 768)]
    for _ in range(12):
        shapes += [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)]
        shapes += [(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)]
    plan = model_plan([*shapes, (1024, 768)], 8)
    assert plan.imbalance <= 1.025
    assert plan.padding <= 0.03


def test_equal_shapes_are_not_dealt_in_turn_where_others_weigh_more():
    named = {"a": (16, 16), "b": (16, 16), "both": (2, 16, 16)}
    assert make_plan(named, [{"kind": "muon", "params": [*named]}], 2).imbalance == 1.0


def test_d20_on_sixteen_ranks():
    plan = model_plan(nanochat(20, 1280), 16)
    assert plan.imbalance <= 1.045


@pytest.mark.parametrize(("model", "world_size", "options", "expected"), [
    ("gpt2", 3, {"mode": "muon"}, "ae772abd114e"),
    ("gpt2", 8, {"mode": "muon", "bucket_mb": 16}, "1be1d903017c"),
    ("d20", 7, {"mode": "adamw", "state_dtype": "int8"}, "b0f0f56fa312"),
    ("d32", 6, {"mode": "muon"}, "1d35ae0187e7"),
    ("llama-7b", 48, {"mode": "muon"}, "659a7c5d5e13"),
])  # fmt: skip
def test_plans_are_those_under_which_states_were_saved_before(model, world_size, options, expected):
    plan = plan_of_model(model, world_size, dtype=torch.bfloat16, **options)
    assert plan.hash.startswith(expected), "ranks refuse a state_dict() of another plan"


@pytest.mark.parametrize(("shape", "flops"), [((6, 4), 1760), ((3, 4, 6), 5280), ((5, 2, 1, 7), 1100)], ids=str)
def test_the_cost_of_newton_schulz(shape, flops):
    assert newton_schulz_flops(shape) == flops


def test_ranges_cut_anywhere_and_wire_is_two_f_p():
    plan = make_plan({"w": (1000, 1001)}, [{"kind": "adamw", "params": ["w"]}], 3, dtype=torch.float32)
    assert [piece.rank for piece in plan.ranges(0)] == [0, 1, 2]
    assert plan.ranges(0)[0].stop % 1001, "this cut goes through a row"
    assert plan.wire_bytes == pytest.approx(2 * 2 / 3 * 4 * 1001000, rel=1e-3)


def test_what_makes_no_plan_is_refused():
    with pytest.raises(ValueError, match="which named_shapes does not have"):
        make_plan({"w": (2,)}, [{"kind": "adamw", "params": ["v"]}], 2)
    with pytest.raises(ValueError, match="give it to AdamW"):
        make_plan({"w": (2,)}, [{"kind": "muon", "params": ["w"]}], 2)
    with pytest.raises(ValueError, match="kind must be"):
        make_plan({"w": (2,)}, [{"kind": "sgd", "params": ["w"]}], 2)
    with pytest.raises(ValueError, match="w: kind must be 'adamw' or 'muon', got None"):
        make_plan({"w": (2,)}, [{"params": ["w"]}], 2)
    with pytest.raises(ValueError, match=r"w: a shape lists whole numbers of at least 0, got \(2, -3\)"):
        make_plan({"w": (2, -3)}, [{"kind": "adamw", "params": ["w"]}], 2)
    with pytest.raises(ValueError, match=r"w: a shape lists whole numbers of at least 0, got \(2\.5,\)"):
        make_plan({"w": (2.5,)}, [{"kind": "adamw", "params": ["w"]}], 2)
    for option in ("dtype", "grad_dtype", "reduce_dtype"):
        with pytest.raises(ValueError, match=f"^{option} must be one of .*, got 'bf16'"):
            make_plan({"w": (2,)}, [{"kind": "adamw", "params": ["w"]}], 2, **{option: "bf16"})
    with pytest.raises(ValueError, match="world_size"):
        plan_parameters([ParameterSpec("w", (2,), (1,), torch.float32, "adamw")], 0)
    with pytest.raises(ValueError, match=r"world_size must be a whole number of at least 1, got 2\.5"):
        make_plan({"w": (2,)}, [{"kind": "adamw", "params": ["w"]}], 2.5)
    with pytest.raises(ValueError, match="group 1 lists 'w', which group 0 has already"):
        make_plan({"w": (2,)}, [{"kind": "adamw", "params": ["w"]}, {"kind": "adamw", "params": ["w"]}], 2)


@pytest.mark.parametrize("size", [0, -1.0, float("nan"), float("inf"), "64"], ids=repr)
def test_sizes_of_buckets_that_make_no_plan_are_refused(size):
    with pytest.raises(ValueError, match=f"bucket_mb must be positive and finite, got {size!r}"):
        make_plan({"w": (2,)}, [{"kind": "adamw", "params": ["w"]}], 2, bucket_mb=size)


@pytest.mark.parametrize(("model", "count", "elements"), [
    ("gpt2", 148, 124_475_904),
    ("d20", 122, 560_988_160),
    ("d32", 194, 1_879_048_192),
    ("llama-7b", 291, 6_738_415_616),
])  # fmt: skip
def test_command_line_knows_the_models(model, count, elements, capsys):
    main(["plan", "--model", model, "--world", "8", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert len(data["parameters"]) == count
    assert sum(prod(entry["shape"]) for entry in data["parameters"]) == elements
    assert data["imbalance"] <= 1.025
    assert data["padding"] <= 0.03
    main(["plan", "--model", model, "--world", "4", "--mode", "adamw"])
    text = capsys.readouterr().out
    assert "4 ranks" in text
    assert "muon" not in text


def test_command_line_names_equal_loads_once(capsys):
    main(["plan", "--model", "gpt2", "--world", "1000"])
    work = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Newton–Schulz TFLOP by rank"))
    assert work == "Newton–Schulz TFLOP by rank: 24 × 0.0294, 12 × 0.0226, 12 × 0.00906, 952 × 0; imbalance 27.083"


@pytest.mark.parametrize(("wrong", "message"), [
    (["--world", "0"], "world_size must be a whole number of at least 1, got 0"),
    (["--world", "8", "--bucket-mb", "-1"], "bucket_mb must be positive and finite, got -1.0"),
], ids=["world", "bucket-mb"])  # fmt: skip
def test_command_line_says_what_is_wrong(wrong, message, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt2", *wrong])
    assert message in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error():
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-W", "ignore", "-m", "optim_dist", "plan", "--model", "gpt2", "--world", "8"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert done.stderr == ""


def test_command_line_cuts_between_blocks_for_8_bit_states(capsys):
    cuts = []
    for more in ([], ["--state-dtype", "int8"]):
        main(["plan", "--model", "gpt2", "--world", "7", "--json", *more])
        entries = json.loads(capsys.readouterr().out)["parameters"]
        is_small = [prod(entry["shape"]) < 4096 for entry in entries]
        assert all(entry["block"] == 1 for entry, small in zip(entries, is_small, strict=True) if small)
        cuts.append({start % 256 for entry in entries if entry["name"] == "wte" for _, start, _ in entry["ranges"]})
    assert cuts == [{0, 128}, {0}]
    with pytest.raises(SystemExit):
        main(["plan", "--model", "gpt2", "--world", "7", "--state-dtype", "int4"])
    assert "--state-dtype" in capsys.readouterr().err
