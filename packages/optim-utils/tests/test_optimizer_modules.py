"""What an object's state is, what a load changes, and how it reports."""

import copy
import logging
import pickle
import re
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stateful_bag import Bag, load_into, same
from yardsticks import times_as_long

from optim_utils import BlockInfo, LoadIssue, LoadReport, OptimizerModule, StateLoadError
from optim_utils.low_bit import INT8, UINT8_AFFINE, LowBitTensor, quantize, to_plain

# shared machines stall: time says nothing about these
law = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


Point = namedtuple("Point", "x y")


def test_every_kind_of_attribute():
    t, p = torch.ones(2), torch.nn.Parameter(torch.ones(3))
    inner = Bag(t=t)
    bag = Bag(
        tensor=p,
        module=inner,
        mapping=defaultdict(list, {1: t, "k": 2}),
        listed=[t, 5],
        tupled=(t, inner),
        named=Point(1, t),
        size=torch.Size((2, 3)),
        queue=deque([1.0], maxlen=3),
        numbers={7},
        text="x",
        nothing=None,
        function=len,
        layer=torch.nn.Linear(1, 1),
        optimizer=torch.optim.SGD([p]),
        generator=torch.Generator(),
        block=BlockInfo(p, (0, "a")),
    )
    state = bag.state_dict()
    assert state.keys() == {
        *("tensor", "module", "mapping", "listed", "tupled", "named", "size", "queue", "numbers", "text", "nothing")
    }
    assert state["tensor"].data_ptr() == p.data_ptr()
    assert not state["tensor"].requires_grad
    assert state["module"] == {"t": state["module"]["t"]}
    assert type(state["mapping"]) is dict
    assert state["listed"][1] == 5
    assert state["tupled"][1].keys() == {"t"}
    assert state["named"][0] == 1
    assert state["size"] == {0: 2, 1: 3}
    assert (state["queue"], state["numbers"]) == ({0: 1.0}, {0: 7})


def test_what_is_not_stored_leaves_a_gap():
    t = torch.zeros(1)
    state = Bag(a=[[5], t], b=[5, t], c=[len, 3], d=5).state_dict(store_non_tensors=False)
    assert state == {"a": {0: {}, 1: state["a"][1]}, "b": {1: state["b"][1]}, "c": {}}
    assert Bag(c=[len, 3]).state_dict() == {"c": {1: 3}}


def test_destination_and_keep_vars():
    p = torch.nn.Parameter(torch.ones(1))
    destination = {"old": 1, "p": 2}
    state = Bag(p=p, inner=Bag(ps=[p])).state_dict(destination, keep_vars=True)
    assert state is destination
    assert state["old"] == 1
    assert state["p"] is p
    assert state["inner"]["ps"][0] is p


def test_slots_and_excluded_names():
    class Base(OptimizerModule):
        __slots__ = ("__hidden", "b")

        def __init__(self) -> None:
            self.__hidden = torch.ones(1)

    class Child(Base):
        __slots__ = "c"
        non_state_attributes = ("cache",)

        def __init__(self) -> None:
            super().__init__()
            self.c = 3
            self.cache = torch.ones(1)
            self.plain = 1

    module = Child()
    assert list(module.state_dict()) == ["plain", "_Base__hidden", "c"]
    other = Child()
    other.c = 5
    report = module.load_state_dict({**other.state_dict(), "cache": 1})
    assert module.c == 5
    assert [issue.path for issue in report.unexpected] == ['["cache"]']

    class Mixin:
        __slots__ = ("__dict__", "__weakref__", "d")

    class Both(Mixin, OptimizerModule):
        pass

    both = Both()
    both.a, both.d = 1, 2
    assert both.state_dict() == {"a": 1, "d": 2}


def test_sparse_tensors():
    sparse = torch.eye(3).to_sparse()
    live = torch.zeros(3, 3).to_sparse()
    restored = load_into(live, Bag(a=sparse).state_dict()["a"])
    assert restored is live
    assert torch.equal(restored.to_dense(), torch.eye(3))


def test_tensors_are_filled_in_place():
    p = torch.nn.Parameter(torch.zeros(2))
    pointer = p.data_ptr()
    assert load_into(p, torch.ones(2, dtype=torch.float64)) is p
    assert p.data_ptr() == pointer
    assert p.is_leaf
    assert p.requires_grad
    assert p.dtype == torch.float32
    assert torch.equal(p.detach(), torch.ones(2))


CONTAINERS = [
    ([1, 2], {0: 3, 1: 4}, [3, 4]),
    ([1, 2], {"0": 3, "1": 4}, [3, 4]),
    ([1, 2], [3, 4], [3, 4]),
    ((1, 2), (3, 4), (3, 4)),
    ([1, 2], {0: 5}, [5]),
    ([], {0: 1, 1: 2}, [1, 2]),
    ([1], {}, []),
    ({1}, {0: 7, 1: 8}, {7, 8}),
    (Point(1, 2), {0: 3, 1: 4}, Point(3, 4)),
    (torch.Size((1, 2)), {0: 3, 1: 4}, torch.Size((3, 4))),
    (deque([1], maxlen=2), {0: 3, 1: 4}, deque([3, 4], maxlen=2)),
    ({"a": 1}, {"b": 2.0}, {"b": 2.0}),
    ({0: 1}, {"0": 2}, {0: 2}),
    (OrderedDict(a=1), {"a": 2}, OrderedDict(a=2)),
    ([[1], [2]], {0: {0: 3, 1: 4}, 1: {}}, [[3, 4], []]),
]


@pytest.mark.parametrize(("live", "loaded", "expected"), CONTAINERS, ids=repr)
def test_plain_containers_take_over_contents_and_length(live, loaded, expected):
    result = load_into(copy.deepcopy(live), loaded)
    assert result == expected
    assert type(result) is type(live)
    assert getattr(result, "maxlen", None) == getattr(live, "maxlen", None)


def test_containers_with_tensors_are_walked():
    t = torch.zeros(2)
    result = load_into((t, 5, {3: t}), {"0": torch.ones(2), "1": torch.tensor(6), "2": {"3": torch.ones(2)}})
    assert result[0] is t
    assert result[1] == 6
    assert type(result) is tuple


def test_what_a_list_lacks_does_not_move_the_rest():
    bag = Bag(a=[1, 2, 3])
    report = bag.load_state_dict({"a": {"0": 4, "2": 6}})
    assert (bag.a, [issue.path for issue in report.missing]) == ([4, 2, 6], ['["a", 1]'])


def test_a_dict_keeps_its_identity_and_type():
    t, mapping = torch.zeros(1), defaultdict(list)
    mapping.update({1: t, "n": 4})
    assert load_into(mapping, {"1": torch.ones(1), "n": 5}) is mapping
    assert mapping == {1: t, "n": 5}
    assert mapping["new"] == []


def test_the_string_form_of_a_key_wins_over_the_int():
    # torch.distributed.checkpoint puts what it loaded under "0", beside the old 0
    assert load_into([1], {0: 1, "0": 2}) == [2]
    assert load_into({0: 1}, {0: 1, "0": 2}) == {0: 2}
    assert load_into({0: 1, "0": 5}, {0: 3, "0": 4}) == {0: 3, "0": 4}
    assert load_into([1], {"0": 2, 0: 1}) == [2]
    assert load_into([[1, 2]], {"0": {"0": 5}, 0: {0: 3, 1: 4}}) == [[5, 4]]
    # the order is that of what was loaded
    assert list(load_into(OrderedDict(), {"b": 1})) == ["b"]
    assert list(load_into(OrderedDict({3: 1, "a": 1}), {"3": 2, "a": 2})) == [3, "a"]


def test_loaded_values_are_copies():
    value = {"x": [1]}
    bag = Bag(a="text", b=value, c=[1])
    state = {"a": "other", "b": {"x": [2]}, "c": [[3]]}
    bag.load_state_dict(state)
    assert bag.b is value
    assert bag.b["x"] is not state["b"]["x"]


@pytest.mark.parametrize(
    ("live", "loaded", "expected"),
    [
        (3, torch.tensor(5), 5),
        (3, torch.tensor(5.0), 5),
        (3.0, torch.tensor(5), 5.0),
        (3.0, torch.tensor(0.1, dtype=torch.float64), 0.1),
        (3.0, torch.tensor(float("inf")), float("inf")),
        (1 << 62, torch.tensor((1 << 62) + 1), (1 << 62) + 1),
    ],
    ids=str,
)
def test_numbers_take_exact_0_dim_tensors(live, loaded, expected):
    result = load_into(live, loaded)
    assert result == expected
    assert type(result) is type(live)


@pytest.mark.parametrize(
    ("live", "loaded"),
    [
        (3, torch.tensor(5.5)),
        (3, torch.tensor([5])),
        (3, torch.tensor(True)),
        (3, torch.tensor(float("nan"))),
        (3, torch.tensor(float("inf"))),
        (3.0, torch.tensor(1j)),
        (3.0, torch.tensor((1 << 53) + 1)),
        (3, torch.tensor(5, device="meta")),
        (True, 1),
        (1, True),
        (1, 1.0),
        (None, 1),
        ("a", None),
        (torch.zeros(()), 3.0),
        ([1], 3),
        ({"a": 1}, [1]),
        (Point(1, 2), {0: 1}),
        (torch.Size((1,)), {0: "x"}),
    ],
    ids=repr,
)
def test_another_type_keeps_the_old_value(live, loaded, caplog):
    bag = Bag(a=copy.deepcopy(live))
    with caplog.at_level(logging.WARNING, logger="optim_utils.optimizer_modules"):
        report = bag.load_state_dict({"a": loaded})
    assert type(bag.a) is type(live)
    assert bag.a == live
    assert [(issue.path, issue.kind) for issue in report.mismatched] == [('["a"]', "type")]
    assert len(caplog.records) == 1
    assert not caplog.records[0].args
    with pytest.raises(StateLoadError):
        bag.load_state_dict({"a": loaded}, strict=True)


def test_missing_and_unexpected_entries_are_skipped_with_a_warning_each(caplog):
    bag = Bag(a=torch.zeros(1), b={"c": torch.zeros(1)}, n=None, f=len, empty=[{}, []])
    with caplog.at_level(logging.WARNING):
        report = bag.load_state_dict({"b": {"d": 1}, "x": 2, "f": 3})
    assert [issue.path for issue in report.missing] == ['["a"]', '["b", "c"]']
    assert [issue.path for issue in report.unexpected] == ['["b", "d"]', '["f"]', '["x"]']
    assert len(caplog.records) == 5
    assert not report.ok


def test_containers_that_a_format_drops_because_they_are_empty_are_not_missing():
    bag = Bag(a=[], b={"c": {}, "d": ()}, m=Bag(), f=[len], t=torch.zeros(1))
    assert bag.load_state_dict({"t": torch.ones(1)}, strict=True).ok
    numbers = Bag(a=[1, 2], n=5, t=torch.zeros(1))
    assert numbers.load_state_dict({"t": torch.ones(1)}, store_non_tensors=False, strict=True).ok
    assert numbers.a == [1, 2]


class Clamped:
    """An attribute that is checked when it is set, and kept under its own name."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, instance, owner=None):
        return vars(instance)[self.name]

    def __set__(self, instance, value):
        assert value > 0
        vars(instance)[self.name] = min(value, 1.0)


class WithDescriptors(OptimizerModule):
    rate = Clamped()

    def __init__(self, rate, momentum):
        self.rate = rate
        self.buffer = torch.full((2,), momentum)
        vars(self)["momentum"] = momentum

    @property
    def momentum(self):
        return vars(self)["momentum"]


class WithDescriptorsAndOwnLoad(WithDescriptors):
    def load_state_dict(self, state_dict, store_non_tensors=True, **options):
        return super().load_state_dict(state_dict, store_non_tensors, **options)


@pytest.mark.parametrize("kind", [WithDescriptors, WithDescriptorsAndOwnLoad])
def test_attributes_with_the_name_of_a_property_or_descriptor_are_restored(kind):
    live = Bag(a=kind(0.5, 0.25))
    assert live.load_state_dict({"a": {"rate": -3.0, "buffer": torch.ones(2), "momentum": 1.0}}, strict=True).ok
    assert (live.a.rate, live.a.momentum) == (-3.0, 1.0)
    assert live.a.buffer.tolist() == [1, 1]


def test_numbers_stay_if_non_tensors_are_not_loaded():
    bag = Bag(a=1, b=[1, torch.zeros(1)], c={"k": 1})
    assert bag.load_state_dict(
        {"a": 2, "b": {0: 3, 1: torch.ones(1)}, "c": {"k": 5, "l": 6}}, store_non_tensors=False, strict=True
    ).ok
    assert (bag.a, bag.b, bag.c) == (1, [1, torch.ones(1)], {"k": 1})
    report = bag.load_state_dict({"b": {1: torch.ones(1)}, "x": 5, "y": torch.ones(1)}, store_non_tensors=False)
    assert [issue.path for issue in report.problems] == ['["y"]']


def test_names_that_are_no_state_are_not_the_letters_of_a_string():
    with pytest.raises(TypeError, match=r"non_state_attributes of Forgotten .* 'cache'; write \('cache',\)"):

        class Forgotten(OptimizerModule):
            non_state_attributes = "cache"


def test_a_state_is_put_into_a_dict():
    for wrong in ([], 3):
        with pytest.raises(TypeError, match=f"destination has to be a dict to fill, got a {type(wrong).__name__}"):
            Bag(t=torch.ones(1)).state_dict(destination=wrong)


def test_an_object_is_no_state():
    # with a warning only, it would have stayed as it was
    bag = Bag(t=torch.ones(1))
    for wrong in (Bag(t=torch.zeros(1)), None, [torch.zeros(1)]):
        with pytest.raises(TypeError, match=f"state_dict has to be a dict .*, got a {type(wrong).__name__}$"):
            bag.load_state_dict(wrong)


def test_what_contains_itself_is_refused_by_the_way_back():
    child = Bag(t=torch.ones(1))
    parent = Bag(children=[child])
    child.parent = parent
    way_back = re.escape('["children", 0, "parent"]') + "|" + re.escape('["parent", "children", 0]')
    with pytest.raises(ValueError, match=f"Bag leads back to it by ({way_back}).*non_state_attributes"):
        parent.state_dict()
    loop: dict[str, object] = {}
    loop["again"] = loop
    bag = Bag(loop=loop)
    with pytest.raises(ValueError, match=re.escape('"again"')):
        bag.state_dict()
    # the walk of a load follows the live object as far as the loaded state goes, and what is missing to its end
    with pytest.raises(ValueError, match="non_state_attributes"):
        bag.load_state_dict({})
    with pytest.raises(ValueError, match="non_state_attributes"):
        bag.load_state_dict({"loop": loop})
    # what is only deep has no way back
    deep: dict[str, object] = {}
    for _ in range(10_000):
        deep = {"k": deep}
    for use in (Bag(deep=deep).state_dict, lambda: Bag(deep=deep).load_state_dict({"deep": deep})):
        with pytest.raises(RecursionError):
            use()


@pytest.mark.parametrize(
    "live",
    [[torch.zeros(1)], [], (torch.zeros(1),), deque(maxlen=2), deque([torch.zeros(1)])],
    ids=lambda live: f"{type(live).__name__} of {len(live)}",
)
def test_tensors_behind_the_last_item_are_taken_over_only_if_asked(live):
    history = {0: torch.ones(1), "1": torch.full((2,), 2.0)}
    with pytest.raises(StateLoadError):
        load_into(copy.deepcopy(live), history)
    found = load_into(live, history, assign=True)
    assert type(found) is type(live)
    assert len(found) == 2
    assert found[1] is history["1"]
    assert found[0] is (live[0] if live else history[0])
    assert torch.equal(found[0], history[0])


@pytest.mark.parametrize(
    ("live", "loaded"),
    [
        # full, of fixed length, without order, with a gap, and no tensor
        (deque([torch.zeros(1)], maxlen=1), {0: torch.ones(1), 1: torch.ones(1)}),
        (Point(torch.zeros(1), 0), {0: torch.ones(1), 1: 0, 2: torch.ones(1)}),
        (set(), {0: torch.ones(1)}),
        ([torch.zeros(1)], {0: torch.ones(1), 2: torch.ones(1)}),
        ([torch.zeros(1)], {0: torch.ones(1), 1: 5}),
    ],
)
def test_what_has_no_place_behind_the_last_item_is_refused(live, loaded):
    with pytest.raises(StateLoadError, match=r'\["a", \d\] +unexpected'):
        load_into(live, loaded, assign=True)


def test_low_bit_tensors_are_stored_plain_and_restored_to_the_bit():
    x = torch.randn(300)
    live = Bag(q=quantize(torch.zeros(300), UINT8_AFFINE), l=[quantize(torch.zeros(4), INT8)])
    saved = Bag(q=quantize(x, UINT8_AFFINE), l=[quantize(x[:4], INT8)])
    state = saved.state_dict()
    assert state["q"].keys() == {"codes", "scale", "offset", "format"}
    assert state["q"]["codes"].data_ptr() == saved.q.codes.data_ptr()
    kept = live.q
    assert live.load_state_dict(state, strict=True).ok
    assert live.q is kept
    assert isinstance(live.l[0], LowBitTensor)
    for ours, theirs in ((live.q, saved.q), (live.l[0], saved.l[0])):
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.scale, theirs.scale)
    other = Bag(q=quantize(x, INT8), l=[]).state_dict()
    with pytest.raises(StateLoadError, match="another format"):
        live.load_state_dict(other, strict=True)
    cast = copy.deepcopy(state)
    cast["q"]["codes"] = cast["q"]["codes"].bfloat16()
    with pytest.raises(StateLoadError):
        live.load_state_dict(cast, strict=True)
    with pytest.raises(StateLoadError):
        live.load_state_dict({"q": Bag(q=quantize(x[:7], UINT8_AFFINE)).state_dict()["q"]})


def test_codes_for_numbers_are_of_another_type():
    bag = Bag(first=torch.zeros(1), a=torch.zeros(64))
    state = {"first": torch.ones(1), "a": quantize(torch.ones(64), INT8)}
    with pytest.raises(StateLoadError) as error:
        bag.load_state_dict(state, strict=True)
    assert [(issue.path, issue.kind) for issue in error.value.report.mismatched] == [('["a"]', "type")]
    assert bag.first == 0
    assert not bag.load_state_dict(state).ok
    assert (bag.first, bag.a.sum()) == (1, 0)


@pytest.mark.parametrize(
    "loaded",
    [
        quantize(torch.ones(64), INT8),
        quantize(torch.ones(64), replace(UINT8_AFFINE, block_size=64)),
        to_plain(quantize(torch.ones(64), INT8)),
        torch.ones(64),
        torch.ones(64, dtype=torch.uint8),
        [1.0],
        None,
    ],
    ids=["codes", "blocks", "plain form", "numbers", "bytes", "list", "nothing"],
)
def test_what_is_not_of_the_same_format_is_no_codes(loaded):
    """Of another type, whether loads are strict or not; what was there stays."""
    bag = Bag(first=torch.zeros(1), a=quantize(torch.zeros(64), UINT8_AFFINE))
    before = [part.clone() for part in bag.a.parts]
    state = {"first": torch.ones(1), "a": loaded}
    with pytest.raises(StateLoadError) as error:
        bag.load_state_dict(state, strict=True)
    assert [(issue.path, issue.kind) for issue in error.value.report.mismatched] == [('["a"]', "type")]
    assert bag.first == 0
    assert not bag.load_state_dict(state).ok
    assert bag.first == 1
    assert all(map(torch.equal, bag.a.parts, before))


def test_a_report_is_a_table():
    report = LoadReport(missing=(LoadIssue('["a", 0]', "missing", "Tensor (2,) float32", "nothing"),))
    assert str(report).splitlines() == [
        "0 loaded, 1 missing, 0 unexpected, 0 mismatched, 0 cast",
        "path      kind     expected             found",
        '["a", 0]  missing  Tensor (2,) float32  nothing',
    ]
    assert not report.ok
    assert LoadReport().ok
    assert str(LoadReport()) == "0 loaded, 0 missing, 0 unexpected, 0 mismatched, 0 cast"
    assert pickle.loads(pickle.dumps(report)) == report == copy.deepcopy(report)


def test_reports_never_show_contents():
    bag = Bag(a="secret", t=torch.tensor([12345.0]), by_tensor={torch.tensor([67890.0]): torch.zeros(1)})
    text = str(bag.load_state_dict({"a": torch.tensor([54321.0]), "t": "hidden", "by_tensor": {}}))
    for content in ("secret", "12345", "54321", "hidden", "67890"):
        assert content not in text


keys = st.one_of(st.text(max_size=3), st.integers(-3, 3))


leaves = st.one_of(
    st.integers(-5, 5),
    st.floats(allow_nan=False),
    st.none(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3).map(lambda shape: torch.randn(shape)),
)


values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text("abc", min_size=1, max_size=2), inner, max_size=3).map(lambda d: Bag(**d)),
    ),
    max_leaves=12,
)


@pytest.mark.slow
@law
@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), values, max_size=4))
def test_loading_the_own_state_changes_nothing(attributes):
    bag = Bag(**attributes)
    before = copy.deepcopy(bag)
    assert bag.load_state_dict(bag.state_dict(), strict=True).ok
    assert same(bag, before)


@law
@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), values, max_size=4), st.data())
def test_a_state_survives_being_loaded_into_an_equal_object(attributes, data):
    bag = Bag(**attributes, always=torch.ones(2))
    twin = copy.deepcopy(bag)
    for tensor in tensors_of(twin):
        tensor.fill_(7)
    assert twin.load_state_dict(copy.deepcopy(bag.state_dict()), strict=True).ok
    assert same(bag, twin)
    broken = copy.deepcopy(bag.state_dict())
    broken["always"] = torch.ones(3)
    with pytest.raises(StateLoadError):
        twin.load_state_dict(broken, strict=data.draw(st.booleans()))
    assert same(bag, twin)


def tensors_of(value: object):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Bag):
        yield from tensors_of(value.__dict__)
    elif isinstance(value, dict):
        yield from (tensor for item in value.values() for tensor in tensors_of(item))
    elif isinstance(value, (list, tuple)):
        yield from (tensor for item in value for tensor in tensors_of(item))


@pytest.mark.timing
def test_speed_of_ten_thousand_tensors():
    bag = Bag(tensors={f"layer{i}": [torch.zeros(4)] for i in range(10_000)})
    state = bag.state_dict()
    tensors = [tensor for (tensor,) in bag.tensors.values()]
    copies = [tensor.clone() for tensor in tensors]
    assert bag.load_state_dict(state, strict=True).ok
    # 5 to 8, and 20 to 30, times as long as torch needs for the tensors alone
    assert times_as_long(bag.state_dict, lambda: [tensor.detach() for tensor in tensors]) < 25
    load = times_as_long(
        lambda: bag.load_state_dict(state, strict=True),
        lambda: [tensor.copy_(other) for tensor, other in zip(tensors, copies)],
    )
    assert load < 100
