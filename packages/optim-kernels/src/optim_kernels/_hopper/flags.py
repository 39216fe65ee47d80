"""The compile-time arguments of the kernels, by name: their functions pass them on as one.

A kernel makes them with the function below the class, in the order of the names; each is a ``constexpr``. What follows
from them is computed there and not in the class, which Triton's cache of compiled kernels does not look into.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class ProductFlags(NamedTuple):
    """Of `ping_pong_kernels` and `update_kernel`."""

    symmetric: Any
    same: Any
    has_c: Any
    has_q: Any
    has_scale: Any
    group: Any
    depth: Any
    stages: Any


@gluon.constexpr_function
def product_flags(*values: Any) -> ProductFlags:
    return ProductFlags(*map(gl.constexpr, values))


class UpdateFlags(NamedTuple):
    """Of the update of a parameter (`update_kernel`)."""

    p_dtype: Any
    master_kind: Any
    cautious: Any


@gluon.constexpr_function
def update_flags(*values: Any) -> UpdateFlags:
    return UpdateFlags(*map(gl.constexpr, values))


class WideFlags(NamedTuple):
    """Of `wide_kernel`."""

    symmetric: Any
    has_c: Any
    has_scale: Any
    apart: Any
    group: Any
    depth: Any
    stages: Any


@gluon.constexpr_function
def wide_flags(*values: Any) -> WideFlags:
    return WideFlags(*map(gl.constexpr, values))


class LoneFlags(NamedTuple):
    """Of `lone_kernel`."""

    symmetric: Any
    same: Any
    has_c: Any
    has_q: Any
    has_scale: Any
    low: Any
    apart: Any
    banded: Any
    parts: Any
    adds_eps: Any
    ahead: Any
    late: Any
    in_eights: Any
    stages: Any
    tall: Any
    broad: Any
    overlap: Any
    early: Any
    # blocks along K of one step of the ring; whether tiles are halves of symmetric ones, or shifted by a block
    deep: Any = None
    halved: Any = None
    shifted: Any = None


@gluon.constexpr_function
def lone_flags(*values: Any) -> LoneFlags:
    given = LoneFlags(*map(gl.constexpr, values))
    deep = 2 if given.tall == 1 else 1
    halved = given.symmetric and given.tall < given.broad
    shifted = given.banded and not given.same
    return given._replace(deep=gl.constexpr(deep), halved=gl.constexpr(halved), shifted=gl.constexpr(shifted))


class Int8Flags(NamedTuple):
    """Of `int8_kernel`."""

    kind: Any
    has_scale: Any
    group: Any
    depth: Any
    stages: Any


@gluon.constexpr_function
def int8_flags(*values: Any) -> Int8Flags:
    return Int8Flags(*map(gl.constexpr, values))


class ChainFlags(NamedTuple):
    """Of `chain_kernel`."""

    depth: Any
    stages: Any
    panels: Any
    ending: Any


@gluon.constexpr_function
def chain_flags(*values: Any) -> ChainFlags:
    return ChainFlags(*map(gl.constexpr, values))
