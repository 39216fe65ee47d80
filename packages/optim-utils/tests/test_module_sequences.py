"""Random sequences of what users do to objects with state: after each load as a plain loader, written here, says.

That loader writes as it goes, on a copy of the object. The real one must come to the same values and problems, keep
every tensor and dict where it is, and change nothing at all where it refuses. An operation is a method; one that makes
no sense at the moment returns False.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import pytest
import torch
from stateful_bag import Bag
from torch import Tensor, nn

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
from optim_utils._state.paths import decode_path, encode_path
from optim_utils.low_bit import INT8, NF4, UINT8_AFFINE, LowBitTensor, from_plain, quantize
from optim_utils.testing import run_ranks


@dataclass(eq=False)
class Slotted(OptimizerModule):
    """A dataclass whose attributes are slots."""

    __slots__ = ("a", "b")

    a: object
    b: object


@dataclass
class Config:
    """A plain value, as it is no `OptimizerModule`."""

    lr: float
    names: list[str]


class Point(NamedTuple):
    x: object
    y: object


SEQUENCES = (list, tuple, set, frozenset, deque)
FLOATS = (torch.float32, torch.float64, torch.bfloat16)
DTYPES = (*FLOATS, torch.float32, torch.int64, torch.bool, torch.complex64)
SHAPES = ((), (0,), (1,), (2,), (2, 3), (3, 2), (8,))
FORMATS = tuple(fmt.with_(block_size=4) for fmt in (INT8, UINT8_AFFINE, NF4))
# none beside its string, which would be one key after a checkpoint
KEYS = ("a", "b", "", "a.b", "x/y", '"', "0", "ä", 3, -1, 2.5, None, True, (1, 2))


# what is in an object, as values that can be compared


def bits(tensor: Tensor) -> object:
    if type(tensor).__name__ == "DTensor":
        return (bits(tensor.to_local()), tensor.placements, tuple(tensor.shape))
    if isinstance(tensor, LowBitTensor):
        return [None if part is None else bits(part) for part in tensor.parts]
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).flatten().view(torch.uint8).tolist()


def picture(value: Any, names: dict[int, int] | None = None) -> Any:
    """Types, values, order and which objects are the same one."""
    names = {} if names is None else names
    if isinstance(value, Tensor):
        name = names.setdefault(id(value), len(names))
        return (type(value), name, value.dtype, tuple(value.shape), value.requires_grad, bits(value))
    if isinstance(value, Bag | Slotted):
        name = names.setdefault(id(value), len(names))
        return (type(value), name, [(key, picture(item, names)) for key, item in attributes(value).items()])
    if isinstance(value, dict):
        name = names.setdefault(id(value), len(names))
        return (type(value), name, [(type(key), key, picture(item, names)) for key, item in value.items()])
    if isinstance(value, set | frozenset):
        return (type(value), sorted(map(repr, value)))
    if isinstance(value, SEQUENCES):
        return (type(value), getattr(value, "maxlen", None), [picture(item, names) for item in value])
    return (type(value), repr(value))


def attributes(live: Bag | Slotted) -> dict[str, Any]:
    if isinstance(live, Bag):
        return vars(live)
    return {**vars(live), **{name: getattr(live, name) for name in live.__slots__ if hasattr(live, name)}}


def inside(value: Any) -> Iterator[Any]:
    """The value and all that it holds."""
    yield value
    children: Any = ()
    if isinstance(value, Bag | Slotted):
        children = attributes(value).values()
    elif isinstance(value, dict):
        children = value.values()
    elif isinstance(value, SEQUENCES):
        children = value
    for child in children:
        yield from inside(child)


# the plain loader


@dataclass
class Loader:
    """Loads as it goes; what did not fit is in ``problems``, as (path, kind)."""

    numbers: bool
    cast: bool
    assign: bool
    problems: list[tuple[str, str]]

    def problem(self, path: tuple[Any, ...], kind: str) -> None:
        self.problems.append((encode_path(path), kind))

    def load(self, live: Any, loaded: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(live, LowBitTensor):
            self.load_low_bit(live, loaded, path)
        elif isinstance(live, Tensor):
            self.load_tensor(live, loaded, path)
        elif isinstance(live, Bag | Slotted):
            if isinstance(loaded, Mapping):
                self.load_entries(
                    attributes(live), dict(loaded), path, partial(setattr, live), lambda name: isinstance(name, str)
                )
            else:
                self.problem(path, "type")
        elif isinstance(live, dict):
            self.load_dict(live, loaded, path)
        elif isinstance(live, SEQUENCES):
            return self.load_sequence(live, loaded, path)
        elif callable(live):
            if self.counts(loaded):
                self.problem(path, "unexpected")
        elif self.numbers:
            return self.load_plain(live, loaded, path)
        return live

    def load_entries(
        self,
        old: dict[Any, Any],
        entries: dict[Any, Any],
        path: tuple[Any, ...],
        put: Callable[[Any, Any], None],
        can_name: Callable[[Any], bool],
    ) -> None:
        for key, value in list(old.items()):
            if key in entries:
                put(key, self.load(value, entries.pop(key), (*path, key)))
            elif self.misses(value):
                self.problem((*path, key), "missing")
        for key, value in entries.items():
            if self.assign and can_name(key) and (tensor := as_tensor(value)) is not None:
                put(key, tensor)
            elif self.counts(value):
                self.problem((*path, key), "unexpected")

    def load_dict(self, live: dict[Any, Any], loaded: Any, path: tuple[Any, ...]) -> None:
        if not isinstance(loaded, Mapping):
            return self.problem(path, "type")
        entries = with_int_keys(live, loaded)
        if all(map(is_plain, live.values())) and all(map(is_plain, entries.values())):
            if self.numbers:
                live.clear()
                live.update(copy.deepcopy(entries))
            return None
        return self.load_entries(live, entries, path, live.__setitem__, lambda key: True)

    def load_sequence(self, live: Any, loaded: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(loaded, Mapping):
            entries = {int(k) if isinstance(k, str) and k.isdecimal() else k: value for k, value in loaded.items()}
        elif isinstance(loaded, SEQUENCES):
            entries = dict(enumerate(loaded))
        else:
            self.problem(path, "type")
            return live
        items = dict(enumerate(live))
        is_whole = set(entries) == set(range(len(entries)))
        if is_whole and all(map(is_plain, items.values())) and all(map(is_plain, entries.values())):
            try:
                return made_like(live, [entries[i] for i in range(len(entries))]) if self.numbers else live
            except (TypeError, ValueError):
                self.problem(path, "type")
                return live
        # a history that was longer
        most = getattr(live, "maxlen", None) or len(items) + len(entries)
        grown: list[Tensor] = []
        while self.assign and type(live) in (list, tuple, deque) and len(items) + len(grown) < most:
            if (tensor := as_tensor(entries.get(len(items) + len(grown)))) is None:
                break
            del entries[len(items) + len(grown)]
            grown.append(tensor)
        self.load_entries(items, entries, path, items.__setitem__, lambda position: False)
        return made_like(live, [*items.values(), *grown])

    def load_plain(self, live: Any, loaded: Any, path: tuple[Any, ...]) -> Any:
        if type(live) is type(loaded):
            return copy.deepcopy(loaded)
        if type(live) in (int, float) and isinstance(loaded, Tensor) and loaded.ndim == 0 and not loaded.is_complex():
            value = loaded.item()
            if type(value) is not bool and (type(live)(value) == value if value == value else type(live) is float):
                return type(live)(value)
        if live is None and self.assign and (tensor := as_tensor(loaded)) is not None:
            return tensor
        self.problem(path, "type")
        return live

    def load_low_bit(self, live: LowBitTensor, loaded: Any, path: tuple[Any, ...]) -> None:
        form = as_tensor(loaded)
        fits = isinstance(form, LowBitTensor) and form.fmt == live.fmt
        # of a plain form the format is looked at first
        if isinstance(form, LowBitTensor) and form.shape != live.shape and (fits or form is loaded):
            self.problem(path, "shape")
        elif not fits:
            self.problem(path, "type")
        else:
            live.copy_(form)

    def load_tensor(self, live: Tensor, loaded: Any, path: tuple[Any, ...]) -> None:
        if not isinstance(loaded, Tensor) or isinstance(loaded, LowBitTensor):
            self.problem(path, "type")
        elif live.shape != loaded.shape:
            self.problem(path, "shape")
        elif live.dtype != loaded.dtype and not (self.cast and {live.dtype, loaded.dtype} <= set(FLOATS)):
            self.problem(path, "dtype")
        elif live.numel() and any(size > 1 and not stride for size, stride in zip(live.shape, live.stride())):
            self.problem(path, "memory")
        else:
            whole = loaded.full_tensor() if hasattr(loaded, "full_tensor") else loaded
            if hasattr(live, "full_tensor"):
                from torch.distributed.tensor import distribute_tensor

                whole = distribute_tensor(whole, live.device_mesh, live.placements).to_local()
                live = live.to_local()
            with torch.no_grad():
                live.copy_(whole)

    def misses(self, live: Any) -> bool:
        return has_content(live, self.numbers)

    def counts(self, loaded: Any) -> bool:
        return self.numbers or has_content(loaded, numbers=False)


@dataclass
class Updater(Loader):
    """Updates dicts; ``objects`` loads what is an object in them."""

    objects: Loader

    def load(self, live: Any, loaded: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(live, LowBitTensor):
            self.load_low_bit(live, loaded, path)
        elif isinstance(live, Tensor) and live.ndim == 0 and isinstance(loaded, Number):
            if can_hold(live.dtype, loaded):
                self.load_tensor(live, torch.tensor(loaded, dtype=live.dtype), path)
            else:
                self.problem(path, "dtype")
        elif isinstance(live, Tensor):
            self.load_tensor(live, loaded, path)
        elif isinstance(live, Bag | Slotted) and isinstance(loaded, Mapping):
            self.objects.load(live, loaded, path)
        elif not isinstance(live, dict | Bag | Slotted):
            return copy.deepcopy(loaded)
        elif isinstance(loaded, Mapping):
            self.load_entries(live, with_int_keys(live, loaded), path, live.__setitem__, lambda key: False)
        else:
            self.problem(path, "type")
        return live

    def misses(self, live: Any) -> bool:
        if isinstance(live, dict):
            return any(map(self.misses, live.values()))
        if isinstance(live, Bag | Slotted):
            return has_content(live, numbers=True)
        return not isinstance(live, SEQUENCES) or len(live) > 0


def can_hold(dtype: torch.dtype, number: Any) -> bool:
    if dtype.is_complex:
        return True
    if dtype.is_floating_point:
        finite = isinstance(number, int | float) and abs(number) <= torch.finfo(dtype).max
        return finite or (isinstance(number, float) and not abs(number) < float("inf"))
    limits = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return isinstance(number, int) and limits[0] <= number <= limits[1]


def with_int_keys(live: dict[Any, Any], loaded: Mapping[Any, Any]) -> dict[Any, Any]:
    ints = {str(key): key for key in live if type(key) is int and str(key) not in live}
    if live and all(type(key) is int for key in live) and all(type(key) is str for key in loaded):
        ints |= {key: int(key) for key in loaded if key.removeprefix("-").isdecimal()}
    return {ints.get(key, key): value for key, value in loaded.items()}


def is_plain(value: Any) -> bool:
    return not (isinstance(value, (Tensor, Bag, Slotted, dict, *SEQUENCES)) or callable(value))


def has_content(value: Any, numbers: bool) -> bool:
    if isinstance(value, (Bag, Slotted, dict, *SEQUENCES)):
        return any(has_content(item, numbers) for item in list(inside(value))[1:])
    return isinstance(value, Tensor) or (numbers and value is not None and not callable(value))


def as_tensor(value: Any) -> Tensor | None:
    """A tensor, or the plain form of one."""
    if isinstance(value, Mapping) and {"codes", "scale", "format"} <= value.keys():
        try:
            return from_plain(dict(value))
        except ValueError:
            return None
    return value if isinstance(value, Tensor) else None


def made_like(live: Any, items: list[Any]) -> Any:
    if isinstance(live, Point):
        return Point(*items)
    return deque(items, live.maxlen) if isinstance(live, deque) else type(live)(items)


# what users do


class Sequence:
    """Runs operations; with a mesh some of the tensors are DTensors."""

    def __init__(self, seed: int, mesh: Any = None) -> None:
        self.draw = random.Random(seed)
        self.mesh = mesh
        self.live = Bag()
        self.saved: list[tuple[Any, Bag, bool]] = []
        self.log: list[object] = [f"seed {seed}"]

    def run(self, length: int) -> None:
        done = 0
        while done < length:
            operation = self.draw.choice(OPERATIONS)
            self.log.append(operation.__name__)
            try:
                done += operation(self) is not False
            except Exception as error:
                error.add_note(f"after {self.log}")
                raise

    # values

    def tensor(self) -> Tensor:
        draw = self.draw
        shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
        value = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(draw.randrange(999)))).to(dtype)
        kind = draw.choice(["plain", "plain", "parameter", "transposed", "expanded", "low bit", "low bit", "dtensor"])
        if kind == "parameter" and (value.is_floating_point() or value.is_complex()):
            return nn.Parameter(value, requires_grad=draw.random() < 0.7)
        if kind == "transposed" and value.ndim == 2:
            return value.t()
        if kind == "expanded" and value.ndim:
            return value[:1].expand(value.shape[0], *value.shape[1:]) if value.numel() else value
        if kind == "low bit" and value.is_floating_point():
            return quantize(value, draw.choice(FORMATS))
        if kind == "dtensor" and self.mesh is not None:
            from torch.distributed.tensor import Replicate, Shard, distribute_tensor

            placements = [Replicate(), *map(Shard, range(value.ndim))]
            return distribute_tensor(value, self.mesh, [draw.choice(placements)])
        return value

    def plain(self) -> Any:
        draw = self.draw
        kinds = [3, -1, 2.5, float("inf"), float("nan"), "text", "", True, None, b"raw", 1 << 70, 1j, torch.bfloat16]
        return draw.choice([*kinds, draw.randrange(99), draw.random(), Config(draw.random(), ["w"]), len])

    def value(self, depth: int = 0) -> Any:
        draw = self.draw
        kind = draw.choice(["tensor", "plain"] if depth > 2 else ["tensor", "tensor", "plain", "dict", "list", "bag"])
        if kind == "tensor":
            return self.tensor()
        if kind == "plain":
            return self.plain()
        values = [self.value(depth + 1) for _ in range(draw.randrange(4))]
        if draw.random() < 0.2:
            values = [self.plain() for _ in values]
        if kind == "dict":
            entries = dict(zip(draw.sample(KEYS, len(values)), values))
            made = draw.choice([dict, OrderedDict, defaultdict])
            return defaultdict(list, entries) if made is defaultdict else made(entries)
        if kind == "bag":
            if len(values) == 2 and draw.random() < 0.5:
                return Slotted(*values)
            return Bag(**dict(zip(draw.sample("abcd", len(values)), values)))
        numbers = [draw.randrange(6) for _ in values]
        sequences = [values, values, tuple(values), deque(values, draw.choice([None, 3])), torch.Size(numbers)]
        if len(values) == 2:
            sequences.append(Point(*values))
        return draw.choice([*sequences, set(numbers), frozenset(numbers)])

    def holders(self) -> list[Any]:
        """Containers that can be changed."""
        return [each for each in inside(self.live) if isinstance(each, Bag | dict | list)]

    def put(self, value: Any) -> None:
        holder = self.draw.choice(self.holders())
        if isinstance(holder, Bag):
            setattr(holder, self.draw.choice("abcde"), value)
        elif isinstance(holder, dict):
            holder[self.draw.choice(KEYS)] = value
        elif holder and self.draw.random() < 0.5:
            holder[self.draw.randrange(len(holder))] = value
        else:
            holder.append(value)

    @property
    def is_shared(self) -> bool:
        """Whether a container is at two places, where the plain loader would see what it wrote at the first."""
        places = [id(each) for each in inside(self.live) if isinstance(each, Bag | Slotted | dict | list | deque)]
        return len(set(places)) < len(places)

    def tensors(self) -> list[Tensor]:
        return [each for each in inside(self.live) if isinstance(each, Tensor)]

    # operations

    def assign(self) -> None:
        self.put(self.value())

    def delete(self) -> bool | None:
        holder = self.draw.choice(self.holders())
        entries = attributes(holder) if isinstance(holder, Bag) else holder
        if not entries:
            return False
        if isinstance(entries, list):
            del entries[self.draw.randrange(len(entries))]
        else:
            del entries[self.draw.choice(list(entries))]
        return None

    def change_in_place(self) -> bool | None:
        tensors = [each for each in self.tensors() if each.is_contiguous() and 0 not in each.stride()]
        if not tensors:
            return False
        tensor = self.draw.choice(tensors)
        with torch.no_grad():
            tensor.copy_(torch.zeros_like(tensor) if isinstance(tensor, LowBitTensor) else tensor * 2)
        return None

    def share_a_tensor(self) -> bool | None:
        tensors = self.tensors()
        if not tensors:
            return False
        tensor = self.draw.choice(tensors)
        is_view = self.draw.random() < 0.3 and type(tensor) is Tensor and tensor.ndim > 0
        self.put(tensor.detach()[1:] if is_view else tensor)
        return None

    def share_a_container(self) -> bool | None:
        each = self.draw.choice(self.holders())
        below = {id(item) for item in inside(each)}
        holders = [holder for holder in self.holders() if isinstance(holder, Bag) and id(holder) not in below]
        if not holders:
            return False
        setattr(self.draw.choice(holders), self.draw.choice("abcde"), each)
        return None

    def copy(self) -> None:
        before = picture(self.live)
        self.live = copy.deepcopy(self.live)
        assert picture(self.live) == before

    def pickle(self) -> bool | None:
        if self.mesh is not None or any(each is not None and 0 in each.stride() for each in self.tensors()):
            return False  # meshes belong to their processes; what was expanded comes back dense
        before = picture(self.live)
        self.live = pickle.loads(pickle.dumps(self.live))
        assert picture(self.live) == before
        return None

    def save(self) -> None:
        before, numbers = picture(self.live), self.draw.random() < 0.8
        state = self.live.state_dict(store_non_tensors=numbers)
        assert picture(self.live) == before
        self.saved.append((self.through_a_file(state), copy.deepcopy(self.live), numbers))
        del self.saved[:-4]

    def through_a_file(self, state: Any) -> Any:
        ways = ["deepcopy", "flatten", "dotted", "strings"]
        way = self.draw.choice(ways if self.mesh is not None else [*ways, "pickle", "torch"])
        self.log.append(way)
        if way == "pickle":
            return pickle.loads(pickle.dumps(state))
        if way == "torch":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            with torch.serialization.safe_globals([Config]):
                return torch.load(file, weights_only=True)
        state = copy.deepcopy(state)
        if way == "strings":
            return with_string_keys(state)
        keys = [key for each in inside(state) if isinstance(each, dict) for key in each]
        if way in ("flatten", "dotted") and any(isinstance(key, tuple) for key in keys):
            with pytest.raises(TypeError, match=r"keys of a state have to be .*\(1, 2\)"):
                flatten(state)
        elif way == "flatten":
            return unflatten(flatten(state))
        elif way == "dotted":
            names = [".".join(map(str, decode_path(key))) for key in flatten(state)]
            if len(set(names)) == len(names):
                return from_dotted(*to_dotted(state))
            with pytest.raises(ValueError, match="have the same name"):
                to_dotted(state)
        return state

    def restore(self) -> bool | None:
        """Into an equal object with other values, which then has those that were saved."""
        if not self.saved:
            return False
        state, was, numbers = self.draw.choice(self.saved)
        if any(0 in each.stride() for each in inside(was) if isinstance(each, Tensor)):
            return False
        blank = copy.deepcopy(was)
        places = {id(each): each for each in inside(blank) if isinstance(each, Tensor | Bag | Slotted | dict)}
        for each in inside(blank):
            if isinstance(each, Tensor):
                with torch.no_grad():
                    each.copy_(torch.zeros_like(each))
            elif isinstance(each, Bag):
                for name, value in attributes(each).items():
                    if numbers and type(value) in (int, float, str):
                        setattr(each, name, type(value)())
        report = blank.load_state_dict(copy.deepcopy(state), numbers, strict=True)
        assert report.ok
        assert picture(blank) == picture(was)
        assert all(id(each) in places for each in inside(blank) if isinstance(each, Tensor | Bag | Slotted | dict))
        return None

    def load(self) -> bool | None:
        """What was saved, perhaps damaged since, into what the object has become."""
        if not self.saved or self.is_shared:
            return False
        state, _, numbers = self.draw.choice(self.saved)
        state = copy.deepcopy(state)
        for _ in range(self.draw.choice([0, 0, 1, 2, 5])):
            self.damage(state)
        strict, cast = self.draw.random() < 0.4, self.draw.random() < 0.7
        numbers, assign = numbers and self.draw.random() < 0.8, self.draw.random() < 0.3
        before, expected = picture(self.live), copy.deepcopy(self.live)
        places = {id(each) for each in self.tensors()}
        loader = Loader(numbers, cast, assign, [])
        # what is assigned is not copied: the loader shares nothing with the state
        loader.load(expected, copy.deepcopy(state), ())
        kinds = {kind for _, kind in loader.problems}
        is_refused = bool(kinds if strict else kinds & {"shape", "memory"})
        self.log.append(f"strict={strict} {numbers=} {cast=} {assign=} {loader.problems}")
        options = {"strict": strict, "cast": cast, "assign": assign}
        if is_refused:
            with pytest.raises(StateLoadError) as error:
                self.live.load_state_dict(state, numbers, **options)
            report = error.value.report
            assert picture(self.live) == before
        else:
            report = self.live.load_state_dict(state, numbers, **options)
            assert picture(self.live) == picture(expected)
            assert assign or all(id(each) in places for each in self.tensors())
        assert Counter((issue.path, issue.kind) for issue in report.problems) == Counter(loader.problems)
        return None

    def update(self) -> bool | None:
        """Nested dicts of objects and values, by what was extracted from others like them."""
        if self.is_shared:
            return False
        current: dict[Any, Any] = {"live": self.live, **{key: self.value() for key in self.draw.sample(KEYS, 3)}}
        state = copy.deepcopy(extract_state_dict_content(current))
        if self.draw.random() < 0.3:
            state = with_string_keys(state)
        for _ in range(self.draw.choice([0, 0, 1, 2, 5])):
            self.damage(state)
        before, expected, checks = picture(current), copy.deepcopy(current), self.draw.random() < 0.5
        updater = Updater(True, True, False, [], Loader(True, True, False, []))
        updater.load(expected, copy.deepcopy(state), ())
        kinds = [kind for _, kind in updater.problems]
        inner = {kind for _, kind in updater.objects.problems}
        self.log.append(f"{checks=} {updater.problems} {updater.objects.problems}")
        if "missing" in kinds and checks:
            with pytest.raises(KeyError, match="not found in state dict to load"):
                update_param_state_dict_object(current, state)
            assert picture(current) == before
        elif set(kinds) - {"missing", "unexpected"} or inner & {"shape", "memory"}:
            with pytest.raises(StateLoadError) as error:
                update_param_state_dict_object(current, state, checks)
            assert picture(current) == before
            found = Counter((issue.path, issue.kind) for issue in error.value.report.problems)
            assert found == Counter(updater.problems + updater.objects.problems)
        else:
            report = update_param_state_dict_object(current, state, checks)
            assert picture(current) == picture(expected)
            found = Counter((issue.path, issue.kind) for issue in report.problems)
            assert found == Counter(updater.problems + updater.objects.problems)
        return None

    def damage(self, state: dict[Any, Any]) -> None:
        draw = self.draw
        holder = draw.choice([each for each in inside(state) if isinstance(each, dict)])
        way = draw.choice(["delete", "replace", "add", "dtype", "shape", "number"])
        if way == "add" or not holder:
            holder[draw.choice(["new", "newer"])] = draw.choice([self.tensor, self.plain])()
            return
        key = draw.choice(list(holder))
        value = holder[key]
        if way == "delete":
            del holder[key]
        elif way == "replace":
            value = self.value(2)
            holder[key] = Bag(x=value).state_dict().get("x")
        elif type(value) is Tensor:
            if way == "dtype":
                holder[key] = value.to(draw.choice(DTYPES)) if not value.is_complex() else value.clone()
            elif way == "shape":
                holder[key] = value[None]
        elif way == "number" and type(value) in (int, float):
            holder[key] = torch.tensor(float(value), dtype=torch.float64)


def with_string_keys(state: Any) -> Any:
    """As ``torch.distributed.checkpoint`` gives back what has int keys."""
    if not isinstance(state, dict):
        return state
    return {str(key) if type(key) is int else key: with_string_keys(value) for key, value in state.items()}


OPERATIONS: list[Callable[[Sequence], bool | None]] = [
    *([Sequence.assign] * 3),
    Sequence.delete,
    Sequence.change_in_place,
    Sequence.share_a_tensor,
    Sequence.share_a_container,
    Sequence.copy,
    Sequence.pickle,
    *([Sequence.save] * 2),
    *([Sequence.restore] * 2),
    *([Sequence.load] * 4),
    *([Sequence.update] * 2),
]


@pytest.mark.slow
def test_sequences() -> None:
    for seed in range(60):
        Sequence(seed).run(30)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_many_sequences(part: int) -> None:
    for seed in range(200 * part, 200 * (part + 1)):
        Sequence(seed).run(60)


def sequences_of_ranks(rank: int, world_size: int, seeds: range) -> None:
    from torch.distributed.tensor import init_device_mesh

    mesh = init_device_mesh("cpu", (world_size,))
    for seed in seeds:
        Sequence(seed, mesh).run(30)


@pytest.mark.slow
def test_sequences_with_dtensors() -> None:
    run_ranks(sequences_of_ranks, 2, range(10))


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [2, 3])
def test_many_sequences_with_dtensors(world_size: int) -> None:
    run_ranks(sequences_of_ranks, world_size, range(100))
