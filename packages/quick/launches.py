"""Launches of Triton's interpreter without what each looks for anew: signatures, ``tl``'s functions, other memory."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from quick.functions import quick_function, quick_method
from quick.operators import quick_operator

__all__ = ["install_launches"]

_InterpretedFunction, _GridExecutor = interpreter.InterpretedFunction, interpreter.GridExecutor
_patch_lang, _patch_builtin = interpreter._patch_lang, interpreter._patch_builtin
_call_function = _InterpretedFunction.__call__
_init_args_hst, _restore_args_dev = _GridExecutor._init_args_hst, _GridExecutor._restore_args_dev
_builtins: dict[Any, list[str]] = {}
_calls: dict[tuple[Any, str, Any, Any], Any] = {}
_langs: dict[Any, list[Any]] = {}
_specs: dict[Any, inspect.FullArgSpec] = {}
_TENSORS = {torch.Tensor, torch.nn.Parameter}
_PLAIN = {int, float, bool, str, type(None), tl.dtype, tl.constexpr}


def builtins_of(pkg: Any) -> list[str]:
    if pkg not in _builtins:
        _builtins[pkg] = [name for name, member in inspect.getmembers(pkg) if tl.core.is_builtin(member)]
    return _builtins[pkg]


def patch_builtins(pkg: Any, builder: Any, scope: Any) -> None:
    """By names that were looked for once; what is patched already is no builtin now."""
    for name in builtins_of(pkg):
        member = getattr(pkg, name)
        if tl.core.is_builtin(member):
            key = pkg, name, member, builder
            if key not in _calls:
                _calls[key] = _patched(*key)
            scope.set_attr(pkg, name, _calls[key])


def _patched(pkg: Any, name: str, member: Any, builder: Any) -> Callable[..., Any]:
    called = _called_by(TritonSemantic(builder), getattr(member, "__wrapped__", member))
    if pkg is tl.tensor:
        return quick_method(name, quick_operator(name, called))
    return quick_function(name, called) if pkg in (tl, tl.core) else called


def _called_by(semantic: Any, member: Any) -> Any:
    """What is called so needs no test that it was."""

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    return call


def _is_patched(fn: Any) -> bool:
    """Whether a device function finds ``tl`` as the kernel that calls it has patched it."""
    if fn not in _langs:
        modules = filter(inspect.ismodule, fn.__globals__.values())
        _langs[fn] = [module for module in modules if module in (tl, tl.core)]
    return not any(tl.core.is_builtin(lang.load) for lang in _langs[fn])


def _patch_lang_once(fn: Any) -> Any:
    return interpreter._LangPatchScope() if _is_patched(fn) else _patch_lang(fn)


def _call_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a device function, for which nothing is left to patch."""
    if not _is_patched(self.fn):
        return _call_function(self, *args, **kwargs)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


class _Inspect:
    """Python's ``inspect``, which looks at a kernel's signature once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    @staticmethod
    def getfullargspec(fn: Any) -> inspect.FullArgSpec:
        if fn not in _specs:
            _specs[fn] = inspect.getfullargspec(fn)
        return _specs[fn]

    @staticmethod
    def getcallargs(fn: Any, /, *args: Any, **kwargs: Any) -> dict[str, Any]:
        names = _Inspect.getfullargspec(fn).args
        if len(args) + len(kwargs) == len(names):
            found = dict(zip(names, args)) | kwargs
            if found.keys() == set(names):
                return found
        return inspect.getcallargs(fn, *args, **kwargs)


def _is_host(arg: Any) -> bool:
    if arg.__class__ is tuple:
        return all(map(_is_host, arg))
    return arg.__class__ in _PLAIN or (arg.__class__ in _TENSORS and arg.is_cpu)


def _host_args(self: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What lies on the host is taken as it is, and not another tensor of the same memory."""
    if _is_host(args) and all(map(_is_host, kwargs.values())):
        return args, kwargs
    return _init_args_hst(self, args, kwargs)


def _restore_args(self: Any, args: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
    if args_hst is not args:
        _restore_args_dev(self, args, args_hst, kwargs, kwargs_hst)


def install_launches() -> None:
    # now: device functions leave most of ``tl.core`` patched, and kernels its reductions alone as they were
    for pkg in (tl, tl.core, tl.tensor, tl.math):
        builtins_of(pkg)
    interpreter._patch_lang = _patch_lang_once
    interpreter._patch_builtin = patch_builtins
    interpreter.inspect = _Inspect()
    _InterpretedFunction.__call__ = _call_patched
    _GridExecutor._init_args_hst = _host_args
    _GridExecutor._restore_args_dev = _restore_args
