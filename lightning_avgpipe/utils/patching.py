"""Temporary replacement of attributes, and patching of a module as soon as it is imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, MethodType, ModuleType
from typing import Any

Replacement = tuple[Any, str, Any]  # an object, the name of one of its attributes, and the replacement for that


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute of one object or class within this context.

    If a method is replaced by a function, copies of the object that are made within this context, by ``copy`` or
    ``pickle``, have the original method. Other replacements are copied as usual.

    Raises:
        AttributeError: the object has no such attribute, so that replacing it would have no effect.
    """
    getattr(owner, name)
    # attributes of a class must be set by setattr; for an object, a __setattr__ of its class must not run
    put, remove = (setattr, delattr) if isinstance(owner, type) else (_put, _remove)
    had, before = name in vars(owner), vars(owner).get(name)
    if isinstance(replacement, (FunctionType, MethodType, partial)) and not isinstance(owner, type):
        replacement = _Method(replacement, *((itself, before) if had else (getattr, owner, name)))
    put(owner, name, replacement)
    try:
        yield
    finally:
        if had:
            put(owner, name, before)
        else:
            remove(owner, name)


@contextlib.contextmanager
def all_replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace attributes one after the other within this context; see :func:`replaced`."""
    with contextlib.ExitStack() as undo:
        for replacement in replacements:
            undo.enter_context(replaced(*replacement))
        yield


def _put(owner: Any, name: str, value: Any) -> None:
    vars(owner)[name] = value


def _remove(owner: Any, name: str) -> None:
    vars(owner).pop(name, None)


class _Method:
    """A replacement for a method in an object's attributes; in copies of the object, something else replaces it.

    Args:
        function: function to call.
        make: called when the object is copied, with copies of ``args``; returns the attribute of the copy.
        args: arguments of ``make``.
    """

    def __init__(self, function: Callable[..., Any], make: Callable[..., Any], *args: Any) -> None:
        vars(self).update(getattr(function, "__dict__", {}))  # torch's schedulers look for a mark on optimizer.step
        self.function, self._made_by = function, (make, args)
        # Lightning uses this attribute to find out whether a method is overridden
        self.__wrapped__ = getattr(function, "__wrapped__", getattr(function, "func", function))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._made_by


def itself(value: Any) -> Any:
    """Return the argument."""
    return value


def noop(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a replacement for functions that must not run."""


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call a function now if a module has been imported, otherwise as soon as it is imported."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Awaiting(name, then))


class _Awaiting(MetaPathFinder):
    """An import finder that finds one module by the finders after it, and calls a function when it was executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        # only the finders after this one: another one that awaits the same module would ask this one again
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        others = (finder for finder in behind if hasattr(finder, "find_spec"))
        spec = next((found for finder in others if (found := finder.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then(module: ModuleType) -> None:
                execute(module)
                self._then()

            spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec
