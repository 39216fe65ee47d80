"""Rows of named iterables, and every way in which their lengths can disagree."""

import copy
import operator
import pickle
from collections import deque

import pytest
import torch
from yardsticks import times_as_long

from optim_utils import DictZipIterator


def test_rows_and_the_iterator_protocol():
    rows = DictZipIterator({"x": [1, 2], "y": "ab"})
    assert iter(rows) is rows
    assert next(rows) == {"x": 1, "y": "a"}
    assert list(rows) == [{"x": 2, "y": "b"}]
    with pytest.raises(StopIteration):
        next(rows)


def test_nothing_ends_at_once():
    assert list(DictZipIterator({})) == []
    assert list(DictZipIterator({"a": [], "b": ()})) == []


LENGTHS = "Iterators have different lengths. Exhausted: ['c'], Still active: ['a', 'b']"


def test_lengths_are_checked_when_one_ends_and_every_iterator_is_asked():
    asked = []

    def items(key: str, count: int):
        for i in range(count):
            asked.append(key)
            yield i

    rows = DictZipIterator({"a": items("a", 3), "b": items("b", 2), "c": items("c", 1)})
    assert next(rows) == {"a": 0, "b": 0, "c": 0}
    with pytest.raises(ValueError) as error:
        next(rows)
    assert str(error.value) == LENGTHS
    assert asked == ["a", "b", "c", "a", "b"]
    with pytest.raises(StopIteration):
        next(rows)


def test_exhausted_ones_are_named_in_key_order():
    rows = DictZipIterator({"a": [], "b": [1], "c": [], "d": [1]})
    with pytest.raises(ValueError) as error:
        next(rows)
    assert str(error.value) == "Iterators have different lengths. Exhausted: ['a', 'c'], Still active: ['b', 'd']"


def test_eager_compares_sized_values_at_construction():
    with pytest.raises(ValueError) as error:
        DictZipIterator({"a": [1, 2], "b": [1, 2, 3], "c": [1]}, eager=True)
    assert str(error.value) == LENGTHS
    rows = DictZipIterator({"a": [1, 2], "b": iter([3])}, eager=True)
    assert next(rows) == {"a": 1, "b": 3}


def test_values_are_iterated_and_keys_captured_at_construction():
    with pytest.raises(TypeError, match="not iterable") as error:
        DictZipIterator({"a": [1], "b": 5})
    assert any("'b'" in note for note in error.value.__notes__)
    data = {"a": [1]}
    rows = DictZipIterator(data)
    data["b"] = [2]
    assert list(rows) == [{"a": 1}]


class _Counting:
    """An iterable whose class has a length, but which has none itself: torch's loaders of streams, progress bars."""

    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __iter__(self):
        return iter(range(2))

    def __len__(self) -> int:
        raise self.error("of a stream")


@pytest.mark.parametrize("error", [TypeError, NotImplementedError, OverflowError])
@pytest.mark.parametrize("eager", [False, True])
def test_a_class_with_lengths_whose_object_has_none(eager: bool, error: type[Exception]):
    rows = DictZipIterator({"a": _Counting(error), "b": [1, 2]}, eager=eager)
    assert operator.length_hint(rows, 99) == 99
    assert list(rows) == [{"a": 0, "b": 1}, {"a": 1, "b": 2}]


def test_a_length_that_fails_is_an_error():
    with pytest.raises(RuntimeError):
        DictZipIterator({"a": _Counting(RuntimeError), "b": [1, 2]})


def test_a_number_in_a_tensor_is_refused_by_name():
    with pytest.raises(TypeError, match="0-d") as error:
        DictZipIterator({"a": [1], "b": torch.tensor(5)})
    assert any("'b'" in note for note in error.value.__notes__)


def test_iterables_without_names_are_refused():
    with pytest.raises(TypeError, match="data has to be a mapping of names to iterables, got a list"):
        DictZipIterator([[1, 2], [3, 4]])


def test_one_iterator_under_two_keys_is_refused():
    shared = iter([1, 2])
    with pytest.raises(ValueError, match="'a' and 'c'"):
        DictZipIterator({"a": shared, "b": [1, 2], "c": shared})
    same_list = [1, 2]
    assert list(DictZipIterator({"a": same_list, "b": same_list})) == [{"a": 1, "b": 1}, {"a": 2, "b": 2}]


def test_an_exception_of_an_iterable_ends_the_iteration():
    def failing():
        yield 1
        raise RuntimeError("disk gone")

    rows = DictZipIterator({"a": [1, 2, 3], "b": failing()})
    next(rows)
    with pytest.raises(RuntimeError, match="disk gone"):
        next(rows)
    assert list(rows) == []


def test_length_hint():
    rows = DictZipIterator({"a": [1, 2, 3], "b": (4, 5, 6)})
    assert operator.length_hint(rows, 99) == 3
    next(rows)
    assert operator.length_hint(rows, 99) == 2
    assert operator.length_hint(DictZipIterator({"a": iter([1, 2])}), 99) == 99
    assert len(list(rows)) == 2
    assert operator.length_hint(rows, 99) == 0


def test_tensors_are_never_compared():
    rows = DictZipIterator({"a": torch.arange(3), "b": [torch.ones(2)] * 3})
    assert [row["a"].item() for row in rows] == [0, 1, 2]


def test_copies_go_on_from_the_same_row():
    rows = DictZipIterator({"a": [1, 2, 3]})
    next(rows)
    for twin in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert list(twin) == [{"a": 2}, {"a": 3}]


@pytest.mark.timing
def test_speed():
    data = {key: range(100_000) for key in "abcd"}

    def make_rows_by_hand() -> None:
        iterators = [(key, iter(values)) for key, values in data.items()]
        for _ in range(100_000):
            row = {}
            for key, iterator in iterators:
                row[key] = next(iterator)

    ratio = times_as_long(lambda: deque(DictZipIterator(data), maxlen=0), make_rows_by_hand)
    assert ratio < 4  # it is 1.4
