"""Which memory a load writes, casts or takes over, and which it refuses to touch."""

import warnings
from types import MappingProxyType

import pytest
import torch
from stateful_bag import Bag, load_into

from optim_utils import StateLoadError, extract_state_dict_content, update_param_state_dict_object
from optim_utils.low_bit import INT8, LowBitTensor, quantize, to_plain


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("live", "loaded", "kind"),
    [
        (torch.zeros(3), torch.zeros(1), "shape"),
        (torch.zeros(()), torch.zeros(1), "shape"),
        (torch.zeros(2, device="meta"), torch.zeros(2), "device"),
        (torch.zeros(2), torch.zeros(2, device="meta"), "device"),
    ],
    ids=["broadcast", "0-dim", "meta live", "meta loaded"],
)
def test_shapes_and_missing_memory_are_refused_in_both_modes(live, loaded, kind, strict):
    with pytest.raises(StateLoadError) as error:
        Bag(a=live).load_state_dict({"a": loaded}, strict=strict)
    assert [issue.kind for issue in error.value.report.mismatched] == [kind]


def inference_tensor(*shape: int) -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(shape)


def sparse(layout: torch.layout, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that hold different numbers of values."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: support of these layouts is in beta state
        live, loaded = (x.to_sparse(layout=layout, **options) for x in (torch.eye(4), torch.ones(4, 4)))
    return live, loaded


def expanded_codes() -> LowBitTensor:
    q = quantize(torch.zeros(128), INT8)
    return LowBitTensor(q.codes, q.scale[:1].expand(2), None, INT8, (128,))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("live", "loaded", "reason"),
    [
        (torch.zeros(1).expand(3), torch.ones(3), "expanded"),
        (torch.zeros(2, 1).expand(2, 3), torch.ones(2, 3), "expanded"),
        (inference_tensor(3), torch.ones(3), "inference"),
        (*sparse(torch.sparse_csr), "memory for values of shape (4,), got (16,)"),
        (*sparse(torch.sparse_bsr, blocksize=(2, 2)), "memory for values of shape (2, 2, 2), got (4, 2, 2)"),
        (expanded_codes(), quantize(torch.ones(128), INT8), "expanded"),
    ],
    ids=["expanded", "partly expanded", "inference", "csr", "bsr", "expanded scales"],
)
def test_memory_that_cannot_be_written_is_refused_in_both_modes(live, loaded, reason, strict):
    bag = Bag(first=torch.zeros(1), a=live)
    with pytest.raises(StateLoadError) as error:
        bag.load_state_dict({"first": torch.ones(1), "a": loaded}, strict=strict)
    (issue,) = error.value.report.mismatched
    assert (issue.path, issue.kind) == ('["a"]', "memory")
    assert reason in issue.found
    assert bag.first == 0


def test_memory_that_looks_so_but_can_be_written():
    with torch.inference_mode():
        live = inference_tensor(2)
        assert torch.equal(load_into(live, torch.ones(2)), torch.ones(2))
    one = torch.zeros(3, 1).expand(3, 1)
    assert load_into(one, torch.ones(3, 1)) is one
    empty = torch.zeros(1, 0).expand(3, 0)
    assert load_into(empty, torch.ones(3, 0)) is empty
    no_columns = quantize(torch.zeros(3, 0), INT8.with_(layout="rows"))
    assert load_into(no_columns, to_plain(no_columns)) is no_columns
    live, _ = sparse(torch.sparse_csr)
    assert torch.equal(load_into(live, 2 * live).to_dense(), 2 * torch.eye(4))


@pytest.mark.parametrize(
    ("live", "loaded", "fits"),
    [
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.float64, True),
        (torch.float32, torch.int64, False),
        (torch.uint8, torch.bfloat16, False),
        (torch.uint8, torch.int64, False),
        (torch.complex64, torch.float32, False),
    ],
    ids=str,
)
def test_only_floats_are_cast_to_floats(live, loaded, fits):
    bag = Bag(a=torch.zeros(2, dtype=live))
    report = bag.load_state_dict({"a": torch.ones(2, dtype=loaded)})
    assert bag.a.dtype == live
    assert bool(report.cast) == fits
    assert report.ok == fits
    assert bool(bag.a.real.sum() == 2) == fits
    with pytest.raises(StateLoadError) as error:
        bag.load_state_dict({"a": torch.ones(2, dtype=loaded)}, strict=True, cast=False)
    assert [issue.kind for issue in error.value.report.mismatched] == ["dtype"]


def test_assign_lets_what_has_no_memory_take_over_the_loaded_tensor():
    t, live = torch.ones(2), torch.zeros(2)
    bag = Bag(
        none=None, inner=Bag(), mapping={"x": torch.zeros(1)}, meta=torch.nn.Parameter(torch.zeros(2, device="meta"))
    )
    bag.live = live
    state = {"none": t, "inner": {"new": t}, "mapping": {"x": torch.ones(1), "y": t}, "meta": t, "live": t}
    report = bag.load_state_dict(state, assign=True, strict=True)
    assert report.ok
    assert bag.none is t
    assert bag.inner.new is t
    assert bag.mapping["y"] is t
    assert isinstance(bag.meta, torch.nn.Parameter)
    assert bag.meta.data_ptr() == t.data_ptr()
    assert bag.live is live
    assert torch.equal(live, t)


class Named(Bag):
    default = None
    __slots__ = ("empty_slot",)

    @property
    def root(self) -> int:
        return 1

    def compute(self) -> None: ...


@pytest.mark.parametrize("name", ["root", "compute", "state_dict", "__class__", "__dict__", "non_state_attributes"])
def test_assign_replaces_nothing_that_belongs_to_the_class(name):
    bag = Named(t=torch.zeros(1))
    report = bag.load_state_dict({"t": torch.ones(1), name: torch.ones(1)}, assign=True)
    assert [issue.path for issue in report.unexpected] == [f'["{name}"]']
    assert bag.t == 1
    assert list(bag.__dict__) == ["t"]


def test_assign_fills_defaults_and_slots():
    bag, t = Named(), torch.ones(1)
    assert bag.load_state_dict({"default": t, "empty_slot": t}, assign=True, strict=True).ok
    assert bag.default is bag.empty_slot is t


@pytest.mark.parametrize("parameter", [False, True], ids=["tensor", "parameter"])
@pytest.mark.parametrize(("dtype", "cast"), [(torch.int64, True), (torch.bfloat16, False)], ids=str)
def test_assign_does_not_change_the_kind_of_a_tensor(dtype, cast, parameter):
    meta = torch.zeros(2, device="meta")
    bag = Bag(t=torch.zeros(1), m=torch.nn.Parameter(meta) if parameter else meta)
    state = {"t": torch.ones(1), "m": torch.ones(2, dtype=dtype)}
    with pytest.raises(StateLoadError) as error:
        bag.load_state_dict(state, assign=True, cast=cast, strict=True)
    assert [(issue.path, issue.kind) for issue in error.value.report.mismatched] == [('["m"]', "dtype")]
    assert bag.t == 0
    assert not bag.load_state_dict(state, assign=True, cast=cast).ok
    assert (bag.t, bag.m.is_meta) == (1, True)


@pytest.mark.parametrize("plain", [False, True], ids=["tensor", "plain form"])
@pytest.mark.parametrize("assign", [False, True])
def test_low_bit_tensors_without_memory(assign, plain):
    q = quantize(torch.randn(256), INT8)

    def form(tensor: LowBitTensor) -> object:
        return to_plain(tensor) if plain else tensor

    for live, loaded in ((q.to("meta"), q), (q.clone(), q.to("meta"))):
        bag = Bag(a=torch.zeros(1), q=live)
        state = {"a": torch.ones(1), "q": form(loaded)}
        if assign and live.is_meta:
            assert bag.load_state_dict(state, strict=True, assign=True).ok
            assert torch.equal(bag.q.codes, q.codes)
            continue
        with pytest.raises(StateLoadError) as error:
            bag.load_state_dict(state, assign=assign)
        assert [(issue.path, issue.kind) for issue in error.value.report.mismatched] == [('["q"]', "device")]
        assert bag.a == 0
        assert bag.q is live


def test_assign_lets_a_saved_low_bit_tensor_take_over_nothing():
    q = quantize(torch.randn(256), INT8)
    bag = Bag(none=None, inner=Bag(), mapping={"x": torch.zeros(1)})
    state = {"none": to_plain(q), "inner": {"new": to_plain(q)}, "mapping": {"x": torch.ones(1), "y": to_plain(q)}}
    assert not bag.load_state_dict(state).ok
    assert bag.none is None
    assert bag.load_state_dict(state, assign=True, strict=True).ok
    for tensor in (bag.none, bag.inner.new, bag.mapping["y"]):
        assert isinstance(tensor, LowBitTensor)
        assert torch.equal(tensor.codes, q.codes)
    state["none"] = {**to_plain(q), "codes": q.codes.bfloat16()}
    with pytest.raises(StateLoadError, match="type"):
        Bag(none=None).load_state_dict({"none": state["none"]}, assign=True, strict=True)


def test_the_own_tensors_may_come_back_in_another_order():
    buffer = torch.arange(6.0)
    bag = Bag(a=torch.ones(2), b=torch.zeros(2), low=buffer[:3], high=buffer[3:])
    a, b = bag.a, bag.b
    bag.load_state_dict({"a": b, "b": a, "low": bag.high, "high": bag.low}, strict=True)
    assert bag.a is a
    assert (a.tolist(), b.tolist()) == ([0, 0], [1, 1])
    assert buffer.tolist() == [3, 4, 5, 0, 1, 2]


class LoadsItself(Bag):
    def load_state_dict(self, state_dict, *args, **options):
        return super().load_state_dict(state_dict, *args, **options)


@pytest.mark.parametrize("kind", [Bag, LoadsItself])
@pytest.mark.parametrize("in_dict", [False, True], ids=["object", "dict"])
@pytest.mark.parametrize("mapping", [dict, MappingProxyType])
def test_the_tensors_of_parts_may_come_back_in_another_order(kind, in_dict, mapping):
    q = quantize(torch.full((64,), 3.0), INT8)
    live = {"t": torch.zeros(2), "x": kind(v=torch.ones(2), q=q), "y": kind(v=torch.full((2,), 2.0), q=q.clone())}
    live["y"].q.copy_(torch.full((64,), 4.0))
    saved = extract_state_dict_content(live)
    loaded = {"t": saved["x"]["v"], "x": {**saved["y"], "v": saved["t"]}, "y": {**saved["x"], "v": saved["y"]["v"]}}
    loaded = {**loaded, **{name: mapping(loaded[name]) for name in "xy"}}
    if in_dict:
        update_param_state_dict_object(live, loaded)
    else:
        Bag(**live).load_state_dict(loaded, strict=True)
    assert (live["t"].tolist(), live["x"].v.tolist(), live["y"].v.tolist()) == ([1, 1], [0, 0], [2, 2])
    assert [live[name].q.dequantize()[0] for name in "xy"] == [4, 3]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_the_own_sparse_tensors_may_come_back_in_another_order(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: support of these layouts is in beta state
        bag = Bag(**{name: (factor * torch.eye(3)).to_sparse(layout=layout) for name, factor in (("a", 1), ("b", 2))})
    state = bag.state_dict()
    bag.load_state_dict({"a": state["b"], "b": state["a"]}, strict=True)
    assert torch.equal(bag.a.to_dense(), 2 * torch.eye(3))
    assert torch.equal(bag.b.to_dense(), torch.eye(3))
