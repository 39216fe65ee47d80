"""`Rule`: what a user says about parameters by name, instead of or on top of the defaults."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

__all__ = ["RESERVED_OPTIONS", "Kind", "Role", "Rule"]

Kind = Literal["muon", "adamw", "frozen"]
Role = Literal["matrix", "embedding", "head", "vector", "frozen"]

# Keys of a group that the table writes itself.
RESERVED_OPTIONS = frozenset({"params", "param_names", "kind", "role", "views"})


@dataclass(frozen=True, repr=False)
class Rule:
    """What to do with the parameters whose full name matches ``pattern``; of several rules the first match wins.

    Args:
        pattern: a glob on the whole name (``"*.attn.qkv.weight"``; ``*`` crosses dots), or ``"re:"`` and a regular
            expression for the whole name. Prefixes of wrappers (DDP, FSDP1, compile) may be left out.
        to: "muon", "adamw", or "frozen" (in no group). If left out, it follows from ``role``; without a role it is
            "muon" if an argument about matrices is given; otherwise the defaults choose, and the rule only adds
            ``options``.
        role: "matrix", "embedding", "head" or "vector"; the parameter takes the options of this role.
        split: sizes of fused parts (``(q, k, v)``), or the number of equal parts.
        split_dim: the dimension of the stored tensor along which the parts lie; by default the one that fits.
        num_heads: cuts rows into one matrix per head: either the number of heads of the first part (heads of the other
            parts have the same size), or one number per part.
        batched: for three and more dimensions: True for one matrix per leading index, False to flatten all dimensions
            but the first.
        transposed: whether matrices are stored (in, out), as transformers' ``Conv1D`` does.
        options: hyperparameters for these parameters alone, which then get a group of their own.
    """

    pattern: str
    to: Kind | None = None
    _: KW_ONLY
    role: Role | None = None
    split: int | Sequence[int] | None = None
    split_dim: int | None = None
    num_heads: int | Sequence[int] | None = None
    batched: bool | None = None
    transposed: bool | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(f"Rule: pattern has to be a string, got a {type(self.pattern).__name__}")
        if self.to is not None and self.to not in get_args(Kind):
            raise ValueError(f"{self}: to has to be one of {', '.join(get_args(Kind))}")
        if self.role is not None and self.role not in get_args(Role):
            raise ValueError(f"{self}: role has to be one of {', '.join(get_args(Role))}")
        if self.role == "frozen" and self.to not in (None, "frozen"):
            raise ValueError(f"{self}: role 'frozen' is updated by no optimizer; drop role or to")
        if self.to == "muon" and self.role not in (None, "matrix"):
            raise ValueError(f"{self}: role {self.role!r} is updated by AdamW; drop role or to")
        if self.describes_matrices and self.kind != "muon":
            raise ValueError(
                f"{self}: split, split_dim, num_heads, batched and transposed speak of matrices, which only Muon sees"
            )
        for name in ("batched", "transposed"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"{self}: {name} has to be True or False")
        if isinstance(self.split_dim, bool) or not isinstance(self.split_dim, int | None):
            raise TypeError(f"{self}: split_dim has to be an integer")
        for name in ("split", "num_heads"):
            _check_sizes(f"{self}: {name}", getattr(self, name))
        if not isinstance(self.options, Mapping | None):
            raise TypeError(f"{self}: options has to be a mapping, got a {type(self.options).__name__}")
        if reserved := RESERVED_OPTIONS.intersection(self.options or ()):
            raise ValueError(f"{self}: {sorted(reserved)} are written by the routing itself and cannot be options")
        try:
            _pattern(self.pattern)
        except re.error as error:
            raise ValueError(f"{self}: not a regular expression: {error}") from error

    @property
    def describes_matrices(self) -> bool:
        """Whether the rule says how matrices lie in the tensor."""
        about = (self.split, self.split_dim, self.num_heads, self.batched, self.transposed)
        return any(value is not None for value in about)

    @property
    def kind(self) -> Kind | None:
        """The destination that the rule decides; None if it leaves the destination to the defaults."""
        if self.to is not None:
            return self.to
        if self.role is not None:
            return "muon" if self.role == "matrix" else "frozen" if self.role == "frozen" else "adamw"
        return "muon" if self.describes_matrices else None

    def matches(self, name: str) -> bool:
        """Whether ``pattern`` equals ``name`` literally, even with glob characters in it, or matches all of it."""
        return name == self.pattern or _pattern(self.pattern).match(name) is not None

    def __repr__(self) -> str:
        pattern, *options = [f"{name}={value!r}" for name, value in vars(self).items() if value is not None]
        return f"Rule({', '.join([pattern.removeprefix('pattern='), *options])})"


def _check_sizes(name: str, sizes: int | Sequence[int] | None) -> None:
    """Raise ValueError unless ``sizes`` is None, an integer or a non-empty sequence of them, each at least 1."""
    if sizes is None:
        return
    listed = [sizes] if isinstance(sizes, int) else list(sizes) if isinstance(sizes, Sequence) else []
    # True is an int and would mean one part, but whoever writes it may mean that there are several
    if not listed or not all(isinstance(size, int) and size >= 1 and size is not True for size in listed):
        raise ValueError(f"{name} has to be an integer or a sequence of integers, each at least 1, got {sizes!r}")


@lru_cache(maxsize=1024)
def _pattern(pattern: str) -> re.Pattern[str]:
    if pattern.startswith("re:"):
        return re.compile(rf"(?:{pattern[3:]})\Z")
    return re.compile(fnmatch.translate(pattern))
