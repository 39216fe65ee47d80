"""Flat forms that come back exactly, states with objects in them, and updates that are checked first."""

import json
import logging
import math
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yardsticks import times_as_long

from optim_utils import (
    OptimizerModule,
    StateLoadError,
    extract_state_dict_content,
    flatten,
    from_dotted,
    to_dotted,
    unflatten,
    update_param_state_dict_object,
)
from optim_utils.low_bit import INT8, quantize

# shared machines stall: time says nothing about these
law = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_the_key_is_the_json_of_the_path():
    leaf = torch.zeros(1)
    flat = flatten({"bar": {"_thl": {0: leaf}}, "ü": 1})
    assert list(flat) == ['["bar", "_thl", 0]', '["\\u00fc"]']
    assert flat['["bar", "_thl", 0]'] is leaf
    assert flatten({}) == {}
    assert unflatten({}) == {}


def test_keys_keep_their_types():
    nested = {7: "int", "7": "str", 2.0: "float", "2.0": "s", True: {"x": 0}, None: "none", "null": "n", math.inf: 1}
    nested = {"k": nested, "e": {"empty": {}, "also": {}}}
    flat = flatten(nested)
    assert list(flat)[:5] == ['["k", 7]', '["k", "7"]', '["k", 2.0]', '["k", "2.0"]', '["k", true, "x"]']
    restored = unflatten(flat)
    assert restored == nested
    assert [*map(type, restored["k"])] == [*map(type, nested["k"])]
    assert unflatten(flatten({"a": {True: 1, 3: 2}}))["a"].keys() == {True, 3}


def test_sequences_are_leaves_unless_asked_for():
    Pair = torch.Size
    nested = {"a": [1, (2, {"b": [3]}), []], "c": (), "d": Pair((4, 5))}
    assert list(flatten(nested)) == ['["a"]', '["c"]', '["d"]']
    flat = flatten(nested, sequences=True)
    assert flat == {
        '["a", ["l", 0]]': 1,
        '["a", ["l", 1], ["t", 0]]': 2,
        '["a", ["l", 1], ["t", 1], "b", ["l", 0]]': 3,
        '["a", ["l", 2]]': [],
        '["c"]': (),
        '["d"]': nested["d"],
    }
    restored = unflatten(flat)
    assert restored == nested
    assert isinstance(restored["a"][1], tuple)
    assert restored["d"] is nested["d"]


OTHER_KEYS = [(1, 2), ("l", 0), ("t", 0), ("t", "x"), b"x", 1j, frozenset(), torch.zeros(2), "\ud83d\ude00"]


@pytest.mark.parametrize("key", OTHER_KEYS, ids=repr)
@pytest.mark.parametrize("function", [flatten, to_dotted], ids=["flatten", "to_dotted"])
def test_other_keys_are_refused_with_their_path(function, key):
    with pytest.raises(TypeError) as error:
        function({"a": {key: 1}})
    # of a tensor no contents
    assert (f"Tensor of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)) in str(error.value)
    assert "tensor(" not in str(error.value)
    assert '["a", ' in str(error.value)
    with pytest.raises(TypeError):
        function({key: 1})


@pytest.mark.parametrize("key", ["\ud83d", "\ude00\ud83d", "\U0001f600", "é", '"\\\n\0'], ids=ascii)
def test_keys_of_any_characters_come_back(key):
    nested = {key: {key + "x": 1}}
    assert unflatten(flatten(nested)) == nested


def test_a_tuple_for_a_key_is_no_item_of_a_sequence():
    with pytest.raises(TypeError, match=r"\('l', 0\) \(tuple\)"):
        flatten({"a": [{("l", 0): 1}]}, sequences=True)
    assert from_dotted({"a": 1}, {"a": ("a", ("l", 0))}) == {"a": {("l", 0): 1}}


def test_flatten_refuses_cycles_and_what_is_no_dict():
    cyclic: dict[str, object] = {"a": {}}
    cyclic["a"]["b"] = cyclic
    with pytest.raises(ValueError, match=r'\["a", "b"\]'):
        flatten(cyclic)
    with pytest.raises(TypeError, match="input_dict has to be a dict, got a list"):
        flatten([1])
    shared = {"x": 1}
    assert len(flatten({"a": shared, "b": shared})) == 2


@pytest.mark.parametrize(
    "key",
    ["[]", "x", "", '"a"', '{"a": 1}', "3", "[[1]]", '[["x", 1]]', '[{"a": 1}]', 3, "[" * 9999],
    ids=lambda key: repr(key)[:9],
)
def test_unflatten_refuses_what_is_no_path(key):
    with pytest.raises(ValueError, match="flattened"):
        unflatten({key: 1})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('["a"]', '["a", "b"]'),
        ('["a", "b"]', '["a"]'),
        ('["a", "b", "c"]', '["a", "b"]'),
        ('["a"]', '[ "a"]'),
        ('["a", ["l", 0]]', '["a", "b"]'),
        ('["a", "b"]', '["a", ["t", 0]]'),
    ],
)
@pytest.mark.parametrize("leaf", [1, {}], ids=["leaf", "empty dict"])
def test_unflatten_names_both_of_two_keys_in_conflict(first, second, leaf):
    with pytest.raises(ValueError) as error:
        unflatten({first: leaf, second: 2})
    for key in (first, second):
        assert key in str(error.value)


@pytest.mark.parametrize("path", [(), "ab", 3], ids=str)
def test_from_dotted_refuses_what_is_no_path(path):
    with pytest.raises(ValueError, match=f"path of the name 'a' has to be a tuple of at least one key, got {path!r}"):
        from_dotted({"a": 1}, {"a": path})


def test_what_is_no_dict_is_refused_by_name():
    for name, function in (
        ("flattened_dict", unflatten),
        ("dotted", lambda wrong: from_dotted(wrong, {})),
        ("mapping", lambda wrong: from_dotted({"a": 1}, wrong)),
    ):
        with pytest.raises(TypeError, match=f"{name} has to be a dict, got a list"):
            function([("a", 1)])
    with pytest.raises(TypeError, match="input_dict has to be a dict or an OptimizerModule, got a list"):
        extract_state_dict_content([OptimizerModule()])
    for current in (5, [torch.zeros(1)], None):
        with pytest.raises(TypeError, match=r"has to be a dict or an OptimizerModule, got a (int|list|NoneType)$"):
            update_param_state_dict_object(current, {"a": 1})
    assert update_param_state_dict_object(OptimizerModule(), {}).ok


def test_unflatten_refuses_gaps_in_a_sequence():
    with pytest.raises(ValueError, match="gaps"):
        unflatten({'["a", ["l", 1]]': 1})
    with pytest.raises(ValueError):
        unflatten({'[["l", 0]]': 1})


def test_keys_that_only_their_identity_tells_apart_have_one_path():
    with pytest.raises(ValueError, match=r"two keys have the path \[NaN\]"):
        flatten({float("nan"): 1, float("nan"): 2})
    # each would be found under the other
    for transform in (flatten, to_dotted):
        with pytest.raises(ValueError, match=r"two keys have the path \[\"a\", NaN\]"):
            transform({"a": {float("nan"): {"b": 1}, 0: {}, float("nan"): {"c": 2}}})
    shared = {float("nan"): {"b": 1}}
    assert list(flatten({"a": shared, "b": shared})) == ['["a", NaN, "b"]', '["b", NaN, "b"]']


keys = st.one_of(st.text(max_size=4), st.integers(), st.floats(allow_nan=False), st.booleans(), st.none())
nested_dicts = st.recursive(
    st.dictionaries(keys, st.one_of(st.integers(), st.just({})), max_size=4),
    lambda inner: st.dictionaries(keys, inner, max_size=4),
    max_leaves=20,
)


def types_of_keys(nested: object) -> object:
    return [(type(key), types_of_keys(item)) for key, item in nested.items()] if isinstance(nested, dict) else None


@law
@given(nested_dicts)
def test_unflatten_undoes_flatten(nested):
    flat = flatten(nested)
    restored = unflatten(flat)
    assert restored == nested
    assert types_of_keys(restored) == types_of_keys(nested)
    assert flatten(restored) == flat


@law
@given(
    st.recursive(
        st.one_of(st.integers(), st.text(max_size=2)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(keys, inner, max_size=3),
        ),
        max_leaves=15,
    )
)
def test_unflatten_undoes_flatten_with_sequences(value):
    restored = unflatten(flatten({"root": value}, sequences=True))
    assert restored == {"root": value}
    assert repr(restored) == repr({"root": value})


def has_one_name_each(nested: dict) -> bool:
    names = []

    def walk(value: object, name: str) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(item, f"{name}.{key}")
        else:
            names.append(name)

    walk(nested, "")
    return len(names) == len(set(names)) or not nested


@law
@given(nested_dicts)
def test_from_dotted_undoes_to_dotted(nested):
    if has_one_name_each(nested):
        dotted, mapping = to_dotted(nested)
        assert from_dotted(dotted, mapping) == nested
        assert types_of_keys(from_dotted(dotted, mapping)) == types_of_keys(nested)
    else:
        with pytest.raises(ValueError, match="same name"):
            to_dotted(nested)


@pytest.mark.parametrize(
    ("state", "paths"),
    [
        ({"a": {0: 1, "0": 2}}, ['["a", 0]', '["a", "0"]']),
        ({"a.b": 1, "a": {"b": 2}}, ['["a.b"]', '["a", "b"]']),
        ({None: 1, "None": 2}, ["[null]", '["None"]']),
    ],
    ids=str,
)
def test_to_dotted_names_both_paths_of_a_collision(state, paths):
    with pytest.raises(ValueError) as error:
        to_dotted(state)
    for path in paths:
        assert path in str(error.value)


def test_dotted_names_are_those_of_distributed_checkpoint():
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    module = Accumulator()
    state = {"state": {0: {"pre": module.state_dict(), "step": 3}}}
    dotted, mapping = to_dotted(state)
    assert list(dotted) == list(flatten_state_dict(state)[0])
    assert mapping["state.0.pre.listed.0"] == ("state", 0, "pre", "listed", 0)
    with pytest.raises(ValueError, match="'other'"):
        from_dotted({"other": 1}, mapping)


@pytest.mark.timing
def test_a_hundred_thousand_leaves_and_ten_thousand_levels():
    wide = {f"layer{i}": {j: {"weight": i, "bias": j} for j in range(100)} for i in range(500)}
    flat = flatten(wide)
    assert len(flat) == 100_000
    assert unflatten(flat) == wide
    paths = list(map(json.loads, flat))
    # 0.7 and 2.5 times as long as json needs for the paths alone
    assert times_as_long(lambda: flatten(wide), lambda: list(map(json.dumps, paths))) < 2.5
    assert times_as_long(lambda: unflatten(flat), lambda: list(map(json.loads, flat))) < 8
    chain: dict[str, object] = {}
    for level in range(10_000):
        chain = {f"level{level}": chain}
    start = time.perf_counter()
    (key,) = flatten(chain)
    node = unflatten({key: 1})
    assert time.perf_counter() - start < 2.0
    for level in reversed(range(10_000)):
        node = node[f"level{level}"]
    assert node == 1


def test_every_level_of_a_deep_chain_may_have_a_leaf():
    chain: dict[str, object] = {}
    for level in range(1_000):
        chain = {"leaf": level, "next": chain}
    node = unflatten(flatten(chain))
    for level in reversed(range(1_000)):
        assert node["leaf"] == level
        node = node["next"]


class Accumulator(OptimizerModule):
    def __init__(self, value: float = 0.0) -> None:
        self.total = torch.full((3,), value)
        self.listed = [torch.full((2,), value)]
        self.steps = int(value)


def test_extract_of_what_contains_itself():
    shared = {"x": 1}
    state = {"a": shared, "b": {"c": shared}}
    assert extract_state_dict_content(state) == state
    state["b"]["back"] = state
    with pytest.raises(ValueError, match="the dict under 'back' contains itself"):
        extract_state_dict_content(state)


def test_an_update_of_what_contains_itself():
    current, loaded = {"t": torch.zeros(2)}, {"t": torch.ones(2)}
    current["again"], loaded["again"] = current, loaded
    with pytest.raises(ValueError, match=r'a dict leads back to it by \["again"\]'):
        update_param_state_dict_object(current, loaded)
    assert not current["t"].any()


def test_extract():
    module, t = Accumulator(), torch.zeros(1)
    nested = {"m": module, "d": {"m": module, "t": t, "l": [module]}, "e": {}}
    content = extract_state_dict_content(nested)
    assert list(content) == ["m", "d", "e"]
    assert content["m"].keys() == module.state_dict().keys()
    assert content["d"]["t"] is t
    assert content["d"]["l"] is nested["d"]["l"]
    assert content["e"] is not nested["e"]
    assert extract_state_dict_content(module).keys() == module.state_dict().keys()
    deep: dict[str, object] = {"m": module}
    for _ in range(5000):
        deep = {"k": deep}
    extract_state_dict_content(deep)


def test_every_kind_of_value_is_updated():
    class Loads:
        def load_state_dict(self, state: object) -> None:
            self.state = state

    t, module, loads, listed = torch.zeros(2), Accumulator(), Loads(), [1]
    q = quantize(torch.zeros(64), INT8)
    current = {"t": t, "n": torch.zeros(()), "m": module, "own": loads, "d": {3: 1}, "l": listed, "s": "a", "q": q}
    inner = current["d"]
    new_list = [1, [2]]
    saved = quantize(torch.randn(64), INT8)
    report = update_param_state_dict_object(
        current,
        {
            "t": torch.ones(2, dtype=torch.float64),
            "n": 5,
            "m": Accumulator(4.0).state_dict(),
            "own": {"x": 1},
            "d": {"3": 2},
            "l": new_list,
            "s": 7,
            "q": extract_state_dict_content(WithLowBit(saved))["q"],
            "extra": 1,
        },
    )
    assert current["t"] is t
    assert torch.equal(t, torch.ones(2))
    assert current["n"] == 5
    assert module.steps == 4
    assert torch.equal(module.listed[0], torch.full((2,), 4.0))
    assert loads.state == {"x": 1}
    assert current["d"] is inner
    assert inner == {3: 2}
    assert current["l"] == new_list
    assert current["l"][1] is not new_list[1]
    assert current["s"] == 7
    assert torch.equal(q.codes, saved.codes)
    assert [issue.path for issue in report.unexpected] == ['["extra"]']
    assert [issue.path for issue in report.cast] == ['["t"]']


class WithLowBit(OptimizerModule):
    def __init__(self, q: object) -> None:
        self.q = q


def test_a_missing_key_is_an_error_with_the_exact_text():
    current = {"foo": torch.zeros(1), "x": {"bar": torch.zeros(1)}}
    with pytest.raises(KeyError) as error:
        update_param_state_dict_object(current, {"foo": torch.ones(1), "x": {}})
    assert str(error.value) == "Key bar not found in state dict to load."
    assert '["x", "bar"]' in "".join(error.value.__notes__)
    assert current["foo"] == 0


def test_a_missing_key_is_a_warning_without_the_check(caplog):
    current = {"foo": torch.zeros(1), "bar": 1}
    with caplog.at_level(logging.WARNING, logger="optim_utils.shampoo_checkpoint_utils"):
        report = update_param_state_dict_object(current, {"foo": torch.ones(1)}, enable_missing_key_check=False)
    assert [record.msg for record in caplog.records] == ["Key bar not found in state dict to load."]
    assert current == {"foo": torch.ones(1), "bar": 1}
    assert [issue.path for issue in report.missing] == ['["bar"]']


def test_a_container_with_nothing_to_fill_is_never_missing():
    class Empty(OptimizerModule):
        pass

    current = {"a": {}, "b": {"c": {}, "d": []}, "m": Empty(), "e": {}, "t": torch.zeros(1)}
    report = update_param_state_dict_object(current, {"t": torch.ones(1), "e": {}})
    assert report.ok
    with pytest.raises(KeyError, match="Key layer not found"):
        update_param_state_dict_object({"layer": torch.nn.Linear(1, 1)}, {})


@pytest.mark.parametrize(
    ("live", "loaded", "kind"),
    [
        (torch.zeros(2), torch.zeros(3), "shape"),
        (torch.zeros(2), 5, "type"),
        (torch.zeros(2), "x", "type"),
        (torch.zeros(2), torch.ones(2).to_sparse(), "type"),
        (torch.zeros(2).to_sparse(), torch.ones(2), "type"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), "dtype"),
        (torch.zeros((), dtype=torch.int64), 2.5, "dtype"),
        (torch.zeros(()), 2j, "dtype"),
        (torch.tensor(0, dtype=torch.uint8), -1, "dtype"),
        (torch.tensor(0, dtype=torch.uint8), 300, "dtype"),
        (torch.tensor(0), 10**30, "dtype"),
        (torch.tensor(True), 5, "dtype"),
        # a number of a later kind, whatever its value
        (torch.tensor(0), 1.0, "dtype"),
        (torch.tensor(True), 1.0, "dtype"),
        (torch.zeros((), dtype=torch.float16), 1e9, "dtype"),
        (torch.zeros(()), 10**400, "dtype"),
        (torch.zeros((), dtype=torch.complex64), 1e300j, "dtype"),
        (torch.zeros(1).expand(3), torch.ones(3), "memory"),
        ({"k": 1}, 5, "type"),
        pytest.param(Accumulator(), 5, "type", id="number for an object"),
        pytest.param(Accumulator(), Accumulator(), "type", id="object for its state"),
        pytest.param(Accumulator(), {"total": torch.zeros(4)}, "shape", id="object"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_is_written(live, loaded, kind):
    current = {"first": torch.zeros(1), "list": [1], "bad": live}
    with pytest.raises(StateLoadError) as error:
        update_param_state_dict_object(current, {"first": torch.ones(1), "list": [2], "bad": loaded})
    assert [issue.kind for issue in error.value.report.mismatched] == [kind]
    assert current["first"] == 0
    assert current["list"] == [1]


@pytest.mark.parametrize(
    ("live", "number"),
    [
        (torch.tensor(0, dtype=torch.uint8), 255),
        (torch.tensor(0, dtype=torch.int64), True),
        (torch.tensor(True), 0),
        (torch.zeros(()), 10**30),
        (torch.zeros((), dtype=torch.bfloat16), 0.1),
        (torch.zeros((), dtype=torch.float16), math.inf),
        (torch.zeros((), dtype=torch.complex64), 2),
        (torch.zeros((), dtype=torch.complex64), 1 + 2j),
    ],
    ids=str,
)
def test_a_number_fills_a_0_dim_tensor_that_holds_it(live, number):
    assert update_param_state_dict_object({"n": live}, {"n": number}).ok
    assert live == torch.tensor(number, dtype=live.dtype)


@pytest.mark.parametrize("size", [3, 200])
def test_a_tensor_may_be_loaded_from_its_own_transpose(size):
    live = torch.randn(size, size)
    expected = live.t().clone()
    assert update_param_state_dict_object({"t": live}, {"t": live.t()}).ok
    assert torch.equal(live, expected)


def test_a_number_fills_a_tensor_whatever_the_default_device_is():
    live = torch.zeros(())
    with torch.device("meta"):
        assert update_param_state_dict_object({"n": live}, {"n": 3}).ok
    assert live.item() == 3


def test_an_object_loads_what_fits_and_the_rest_is_a_warning(caplog):
    module = Accumulator()
    with caplog.at_level(logging.WARNING):
        report = update_param_state_dict_object({"m": module}, {"m": {"total": torch.ones(3), "new": 1}})
    assert torch.equal(module.total, torch.ones(3))
    assert {issue.path for issue in report.problems} == {'["m", "listed"]', '["m", "steps"]', '["m", "new"]'}
    assert len(caplog.records) == 3


def test_objects_that_load_themselves_do_it_last():
    order = []

    class Loads:
        def __init__(self, t: torch.Tensor) -> None:
            self.t = t

        def load_state_dict(self, state: object) -> None:
            order.append(self.t.item())
            raise RuntimeError("half-way")

    t = torch.zeros(())
    with pytest.raises(RuntimeError, match="half-way"):
        update_param_state_dict_object({"own": Loads(t), "t": t}, {"own": 1, "t": torch.ones(())})
    assert order == [1.0]
