"""Concrete subclasses in the order of their definition, and batches."""

import gc
import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass

import pytest

from optim_utils import batched, get_all_non_abstract_subclasses


def test_subclasses_are_listed_depth_first_each_once_where_first_met():
    class Root:
        pass

    class A(Root):
        pass

    class B(Root):
        pass

    class AB(A, B):
        pass

    class BB(B):
        pass

    assert get_all_non_abstract_subclasses(Root) == [Root, A, AB, B, BB]
    assert get_all_non_abstract_subclasses(cls=B) == [B, AB, BB]


def test_abstract_classes_are_left_out_but_their_children_are_not():
    class Root(ABC):
        @abstractmethod
        def f(self) -> None: ...

    class Partial(Root):
        pass

    class Done(Partial):
        def f(self) -> None: ...

    class Marked(Done, ABC):
        pass

    class Leaf(Marked):
        pass

    assert get_all_non_abstract_subclasses(Root) == [Done, Leaf]


def test_only_live_classes_count():
    class Root:
        pass

    def define() -> None:
        class Gone(Root):
            pass

    define()
    gc.collect()
    assert get_all_non_abstract_subclasses(Root) == [Root]


def test_a_class_that_slots_replaced_is_not_listed_beside_its_replacement():
    class Root:
        pass

    gc.disable()  # the class that a decorator was given lives until the next collection
    try:

        @dataclass(slots=True)
        class First(Root):
            x: int = 1

        @dataclass(slots=True)
        class Second(First):
            y: int = 2

        @dataclass
        class Third(First):
            pass

        assert get_all_non_abstract_subclasses(Root) == [Root, First, Second, Third]
    finally:
        gc.enable()


def test_deep_hierarchies_and_metaclasses():
    class Meta(type):
        pass

    class SubMeta(Meta):
        pass

    assert get_all_non_abstract_subclasses(Meta) == [Meta, SubMeta]
    classes = [type("C0", (), {})]
    for number in range(1, 1500):
        classes.append(type(f"C{number}", (classes[-1],), {}) if number % 40 else type(f"C{number}", (classes[0],), {}))
    assert set(get_all_non_abstract_subclasses(classes[0])) == set(classes)


@pytest.mark.parametrize("value", [object, type, 3, "SGD", list[int], None], ids=repr)
def test_what_is_no_class_of_ours_is_refused(value):
    with pytest.raises(TypeError, match="cls has to be a class") as error:
        get_all_non_abstract_subclasses(value)
    assert repr(value) in str(error.value)


def test_batches_are_lazy():
    assert list(batched("abcd", 2)) == [("a", "b"), ("c", "d")]
    assert list(batched([], 2)) == []
    assert list(itertools.islice(batched(itertools.count(), 2), 2)) == [(0, 1), (2, 3)]


@pytest.mark.parametrize("n", [0, -1])
def test_batch_size_is_checked_at_the_first_next(n):
    batches = batched("abc", n)
    with pytest.raises(ValueError) as error:
        next(batches)
    assert str(error.value) == f"n={n} must be at least one"


@pytest.mark.parametrize("n", [2.0, "2", None])
def test_batch_size_must_be_an_integer(n):
    with pytest.raises(ValueError, match="must be an integer"):
        next(batched("abc", n))


def test_what_cannot_be_iterated_over_is_refused_by_name():
    with pytest.raises(TypeError, match="iterable has to be iterable, got a int"):
        next(batched(5, 2))


def test_strict_batches():
    assert list(batched("abcd", 2, strict=True)) == [("a", "b"), ("c", "d")]
    batches = batched("abc", 2, strict=True)
    assert next(batches) == ("a", "b")
    with pytest.raises(ValueError, match="1 items instead of n=2"):
        next(batches)
