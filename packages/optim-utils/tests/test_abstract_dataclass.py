"""What makes a configuration abstract or concrete, and what dataclasses can do that derive from the bases."""

from abc import abstractmethod
from dataclasses import FrozenInstanceError, dataclass, fields

import pytest

from optim_utils import AbstractDataclass, FrozenAbstractDataclass


@pytest.mark.parametrize("base", [AbstractDataclass, FrozenAbstractDataclass])
def test_the_bases_are_abstract_and_have_no_fields(base):
    with pytest.raises(TypeError, match=f"Can't instantiate abstract class {base.__name__} "):
        base()
    assert fields(base) == ()


def test_a_child_without_init_is_abstract():
    @dataclass(init=False)
    class Child(AbstractDataclass):
        lr: float = 0.1

    class Undecorated(AbstractDataclass):
        pass

    for cls in (Child, Undecorated):
        with pytest.raises(TypeError, match=f"Can't instantiate abstract class {cls.__name__} "):
            cls()


def test_plain_dataclass_makes_a_child_concrete_even_without_fields():
    @dataclass
    class Empty(AbstractDataclass):
        pass

    assert Empty() == Empty()


def test_a_hand_written_init_is_enough_and_wins_over_the_generated_one():
    class Undecorated(AbstractDataclass):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.lr = lr

    @dataclass
    class Decorated(AbstractDataclass):
        lr: float = 0.1

        def __init__(self) -> None:
            self.lr = 0.7

    assert Undecorated(3.0).lr == 3.0
    assert Decorated().lr == 0.7


def test_inheritance_of_fields_eq_repr_kw_only_and_slots():
    @dataclass
    class Base(AbstractDataclass):
        lr: float = 0.1

    @dataclass(kw_only=True)
    class Child(Base):
        beta: float

    @dataclass(slots=True)
    class Slotted(AbstractDataclass):
        lr: float = 0.1

    child = Child(0.2, beta=0.9)
    assert [field.name for field in fields(Child)] == ["lr", "beta"]
    assert child == Child(0.2, beta=0.9)
    assert child != Child(0.2, beta=0.8)
    assert repr(child).endswith("Child(lr=0.2, beta=0.9)")
    with pytest.raises(TypeError):
        Child(0.2, 0.9)
    assert not hasattr(Slotted(), "__dict__")


def test_frozen_children_need_the_frozen_base():
    with pytest.raises(TypeError, match="cannot inherit frozen dataclass from a non-frozen one"):

        @dataclass(frozen=True)
        class Wrong(AbstractDataclass):
            lr: float = 0.1

    @dataclass(frozen=True)
    class Right(FrozenAbstractDataclass):
        lr: float = 0.1

    assert hash(Right()) == hash(Right())
    with pytest.raises(FrozenInstanceError):
        Right().lr = 0.2


def test_other_abstract_methods_keep_a_child_abstract():
    @dataclass
    class Named(AbstractDataclass):
        @abstractmethod
        def name(self) -> str: ...

    with pytest.raises(TypeError, match="abstract"):
        Named()
