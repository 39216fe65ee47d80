"""An object for tests of state, what of one a load changes, and whether two hold the same."""

import torch

from optim_utils import OptimizerModule


class Bag(OptimizerModule):
    """An object with the attributes that it is given."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


def load_into(live: object, loaded: object, **options: object) -> object:
    """What the attribute ``a`` is after ``{"a": loaded}`` was loaded strictly."""
    bag = Bag(a=live)
    bag.load_state_dict({"a": loaded}, strict=True, **options)
    return bag.a


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Bag):
        return type(b) is Bag and same(a.__dict__, b.__dict__)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
