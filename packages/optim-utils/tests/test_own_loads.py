"""A refused load changes nothing, and objects that load in their own way are a part of the check."""

import copy
import logging
import pickle
import threading

import pytest
import torch
from stateful_bag import Bag, same

from optim_utils import OptimizerModule, StateLoadError, update_param_state_dict_object
from optim_utils.low_bit import INT8, LowBitTensor, quantize, to_plain


def test_a_refused_load_changes_nothing_and_reports_every_problem():
    def make(value: float) -> Bag:
        entries = {f"t{i}": torch.full((3,), value) for i in range(49)}
        return Bag(number=value, listed=[value, value], **entries, last=torch.full((3,), value))

    live, other = make(1.0), make(2.0)
    before = copy.deepcopy(live)
    state = other.state_dict()
    state["last"] = torch.zeros(4)
    for strict in (False, True):
        with pytest.raises(StateLoadError) as error:
            live.load_state_dict(state, strict=strict)
        assert same(before, live)
    del state["t3"]
    state["t5"] = "text"
    state["more"] = 1
    with pytest.raises(StateLoadError) as error:
        live.load_state_dict(state, strict=True)
    report = error.value.report
    assert {issue.path: issue.kind for issue in report.problems} == {
        '["last"]': "shape",
        '["t3"]': "missing",
        '["t5"]': "type",
        '["more"]': "unexpected",
    }
    assert same(before, live)
    assert str(report) in str(error.value)
    assert pickle.loads(pickle.dumps(error.value)).report == report


def test_a_value_that_cannot_be_copied_changes_nothing():
    class Uncopyable:
        def __deepcopy__(self, memo: object) -> object:
            raise RuntimeError("no copies")

    bag = Bag(t=torch.zeros(1), u=Uncopyable())
    with pytest.raises(RuntimeError, match="no copies") as error:
        bag.load_state_dict({"t": torch.ones(1), "u": Uncopyable()})
    assert error.value.__notes__ == ['raised while the value loaded for ["u"] was copied']
    assert bag.t == 0
    with pytest.raises(RuntimeError, match="no copies") as error:
        update_param_state_dict_object({"t": bag.t, "d": {"u": 1}}, {"t": torch.ones(1), "d": {"u": Uncopyable()}})
    assert error.value.__notes__ == ['raised while the value loaded for ["d", "u"] was copied']
    assert bag.t == 0


def test_a_subclass_may_load_in_its_own_way():
    class Own(OptimizerModule):
        def __init__(self) -> None:
            self.value = 0

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state_dict):
            self.value = state_dict["value"] * 10

    bag = Bag(own=Own(), t=torch.zeros(1))
    assert bag.state_dict()["own"] == {"value": 0}
    bag.load_state_dict({"own": {"value": 4}, "t": torch.ones(1)})
    assert bag.own.value == 40
    with pytest.raises(StateLoadError):
        bag.load_state_dict({"own": {"value": 5}, "t": torch.ones(2)})
    assert bag.own.value == 40
    update_param_state_dict_object({"own": bag.own}, {"own": {"value": 6}})
    assert bag.own.value == 60


class Renamed(Bag):
    """The usual override: mend what is old, then load as the others do."""

    def load_state_dict(self, state_dict, *args, **options):
        if "old" in state_dict:
            state_dict["v"] = state_dict.pop("old")
        return super().load_state_dict(state_dict, *args, **options)


def test_an_own_load_is_a_part_of_the_check():
    outer = Bag(a=torch.zeros(2), inner=Renamed(v=torch.zeros(2), deeper=[Renamed(v=torch.zeros(1))]))
    deeper = {0: {"v": torch.ones(1)}}
    cases = [
        ({"zzz": 1, "deeper": deeper}, True, {'["inner", "v"]': "missing", '["inner", "zzz"]': "unexpected"}),
        ({"v": torch.ones(5), "deeper": deeper}, False, {'["inner", "v"]': "shape"}),
        ({"v": torch.ones(2), "deeper": {0: {"v": 1}}}, True, {'["inner", "deeper", 0, "v"]': "type"}),
        (5, True, {'["inner"]': "type"}),
    ]
    before = copy.deepcopy(outer)
    for inner, strict, problems in cases:
        with pytest.raises(StateLoadError) as error:
            outer.load_state_dict({"a": torch.ones(2), "inner": inner}, strict=strict)
        assert {issue.path: issue.kind for issue in error.value.report.problems} == problems
        assert same(outer.state_dict(), before.state_dict())
    # the old form is no problem of the new one, and the caller's is mended once
    kept = outer.inner.v
    state = {"a": torch.ones(2), "inner": {"old": torch.full((2,), 3.0), "deeper": deeper}}
    assert outer.load_state_dict(state, strict=True).ok
    assert outer.inner.v is kept
    assert torch.equal(kept, torch.full((2,), 3.0))
    assert outer.inner.deeper[0].v == 1


@pytest.mark.parametrize(
    "live",
    [
        torch.arange(3.0)[:, None].expand(3, 2),
        torch.inference_mode()(torch.zeros)(3, 2),
        LowBitTensor(
            torch.zeros(3, 2, dtype=torch.uint8), torch.zeros(1).expand(2), None, INT8.with_(block_size=4), (3, 2)
        ),
    ],
    ids=["expanded", "inference", "expanded scales"],
)
def test_memory_that_an_own_load_cannot_write_is_found_before_anything_is_written(live):
    values = []

    class Reads(Bag):
        def load_state_dict(self, state_dict, strict=False):
            values.append(self.v)
            return super().load_state_dict(state_dict, strict=strict)

    loaded = torch.ones(3, 2) if not isinstance(live, LowBitTensor) else to_plain(quantize(torch.ones(3, 2), live.fmt))
    bag = Bag(t=torch.zeros(1), reads=Reads(v=live))
    with pytest.raises(StateLoadError, match="nothing was changed") as error:
        bag.load_state_dict({"t": torch.ones(1), "reads": {"v": loaded}})
    assert [(issue.path, issue.kind) for issue in error.value.report.mismatched] == [('["reads", "v"]', "memory")]
    assert bag.t == 0
    (copied,) = values
    assert copied is not live
    assert torch.equal(*(v.dequantize() if isinstance(v, LowBitTensor) else v for v in (copied, live)))


def test_an_own_load_gets_the_options_that_it_takes(caplog):
    received = []

    class Strict(Bag):
        def load_state_dict(self, state_dict, strict=True):
            received.append((strict, self.module))
            return super().load_state_dict(state_dict, strict=strict)

    module = torch.nn.Linear(2, 1)
    bag = Bag(any=Renamed(v=torch.zeros(2), n=None), strict=Strict(v=torch.zeros(1), module=module))
    state = {"any": {"v": torch.ones(2).double(), "n": torch.ones(1)}, "strict": {}}
    with caplog.at_level(logging.WARNING):
        report = bag.load_state_dict(state, assign=True)
    # tried on a copy first, which has what belongs to the process from the object itself
    assert received == [(False, module)] * 2
    assert bag.any.n is state["any"]["n"]
    assert [issue.path for issue in report.cast] == ['["any", "v"]']
    # said once, by the load of the whole
    assert [record.msg for record in caplog.records] == [
        'Bag: missing ["strict", "v"]: expected Tensor (1,) float32, found nothing'
    ]
    with pytest.raises(StateLoadError, match=r'\["any", "v"\] +dtype'):
        bag.load_state_dict(state, strict=True, cast=False)


def test_an_own_load_that_raises_does_so_before_anything_is_written():
    class Raises(Bag):
        def load_state_dict(self, state_dict):
            self.v.fill_(7)
            self.listed.append(7)
            self.n = state_dict["n"]

    bag = Bag(t=torch.zeros(1), raises=Raises(v=torch.zeros(1), listed=[], n=0, lock=threading.Lock()))
    with pytest.raises(KeyError) as error:
        bag.load_state_dict({"t": torch.ones(1), "raises": {"m": 1}})
    assert 'Raises at ["raises"]' in error.value.__notes__[0]
    assert (bag.t, bag.raises.v, bag.raises.listed) == (0, 0, [])
    bag.load_state_dict({"t": torch.ones(1), "raises": {"n": 1}})
    assert (bag.t, bag.raises.v, bag.raises.listed, bag.raises.n) == (1, 7, [7], 1)


def test_a_refusal_that_comes_too_late_does_not_say_that_nothing_was_changed():
    calls = []

    class Fickle(Bag):
        def load_state_dict(self, state_dict):
            calls.append(self)
            return super().load_state_dict(state_dict if len(calls) == 1 else {"v": torch.zeros(9)})

    bag = Bag(t=torch.zeros(1), fickle=Fickle(v=torch.zeros(1)))
    with pytest.raises(StateLoadError) as error:
        bag.load_state_dict({"t": torch.ones(1), "fickle": {"v": torch.ones(1)}})
    assert "nothing was changed" not in str(error.value)
    assert 'the object at ["fickle"] refused its state after others had been written' in str(error.value)
