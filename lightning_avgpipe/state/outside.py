"""Find the variables outside of modules that user code may change: globals, closures, class attributes."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import sys
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from lightning_avgpipe.state.objects import ATOMS, Variable, is_restorable
from lightning_avgpipe.state.snapshot import is_open, reachable
from lightning_avgpipe.utils.source import PACKAGE, is_installed, is_standard
from lightning_avgpipe.utils.torch_compat import REGISTRIES

KINDS = ("global ", "class ", "enclosed ", "function ")  # prefixes of full names
_MOST = 1000  # containers with more items are not searched for functions
_CODE = (types.FunctionType, types.MethodType, type, types.ModuleType, nn.Module)


def outside_variables(module: nn.Module) -> dict[str, Variable]:
    """Return the variables that a module's code refers to, directly or through the functions and classes that it uses.

    The searched code is that of the classes of the module and its submodules, and of the functions and objects in their
    attributes. Code of installed packages is not searched.

    Returns:
        The variables by full name, such as ``global mine.CALLS`` or ``class mine.Net.calls``. They are cached.
    """
    return _reached(*_code_of(module)).variables


def forget() -> None:
    """Clear the cache of searched code, which may keep whole models alive."""
    _reached.cache_clear()


def user_classes(module: nn.Module) -> tuple[type, ...]:
    """Return the user's classes among those of a module, its submodules, and the objects that they hold."""
    return _code_of(module)[0]


def variable(module: nn.Module, path: str, name: str) -> Variable:
    """Return one variable: an attribute of a submodule, or a variable outside of modules.

    Args:
        module: the whole module.
        path: path of the submodule; "" for a variable outside of modules.
        name: name of the attribute, or full name of the variable as in :func:`outside_variables`.
    Raises:
        KeyError: the module's code refers to no such variable.
    """
    return variables(module, [(path, name)])[path, name]


def variables(module: nn.Module, keys: Collection[tuple[str, str]]) -> dict[tuple[str, str], Variable]:
    """Return the result of :func:`variable` for each ``(path, name)``; the code is searched only once."""
    named = outside_variables(module) if any(name.startswith(KINDS) for _, name in keys) else {}
    return {
        (path, name): named[name] if name.startswith(KINDS) else Variable(vars(module.get_submodule(path)), name)
        for path, name in keys
    }


def names_in(functions: Iterable[Callable[..., Any]], classes: Sequence[type]) -> frozenset[str]:
    """Return the names of attributes and variables in the code that :func:`users_code` yields."""
    return frozenset(name for code in users_code(functions, classes) for name in (*code.co_names, *code.co_freevars))


def assigned_names(classes: Iterable[type]) -> frozenset[str]:
    """Return the names of attributes and global variables to which methods of module classes assign.

    ``__init__`` and other methods that set up a module or a class are not searched.
    """
    bases = dict.fromkeys(base for kind in classes for base in kind.__mro__)
    own = (base for base in bases if base is not nn.Module and issubclass(base, nn.Module))
    found = (
        method.__code__ for base in own for name, method in vars(base).items()
        if isinstance(method, types.FunctionType) and name not in ("__init__", "__setstate__", "__init_subclass__")
    )  # fmt: skip
    named = (entry for outer in found for code in nested_code(outer) for entry in name_instructions(code))
    return frozenset(name for operation, name, *_ in named if operation in ("STORE_ATTR", "STORE_GLOBAL"))


def users_code(functions: Iterable[Callable[..., Any]], classes: Sequence[type]) -> Iterator[types.CodeType]:
    """Yield the code of functions, and of the user's functions that they call.

    Args:
        functions: functions to begin with.
        classes: classes whose methods they may call by name.
    """
    waiting: list[Any] = list(functions)
    seen = set[types.CodeType]()
    while waiting:
        function = _bare(waiting.pop())
        if callable(wrapped := inspect.getattr_static(function, "__wrapped__", None)):
            waiting.append(wrapped)
        if not isinstance(function, types.FunctionType) or function.__code__ in seen or not _is_users(function):
            continue
        for code in nested_code(function.__code__):
            seen.add(code)
            yield code
            for name in code.co_names:
                waiting += function.__globals__.get(name), *(getattr(kind, name, None) for kind in classes)


def loads_of(module: nn.Module, names: Collection[str]) -> dict[types.CodeType, dict[int, list[str]]]:
    """Return the instructions of the module's code that may load some variables.

    Args:
        module: the module.
        names: full names of the variables. Only their last parts are compared, so loads of other attributes with the
            same last part are found as well.
    Returns:
        Code object -> offset of the instruction -> full names of the variables that it may load.
    """
    loads = _reached(*_code_of(module)).loads
    found: dict[types.CodeType, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        last = next(part for part in reversed(name.split(".")) if not part.isdecimal())
        for code, offset in loads[last]:
            found[code][offset].append(name)
    return {code: dict(offsets) for code, offsets in found.items()}


class _Function:
    """The code and global variables of a function in an attribute, used as a key of the cache.

    The function itself is not kept, since its closure may hold a whole model. Objects in the closure are found through
    the attribute.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self.code, self.namespace = function.__code__, function.__globals__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and self.code is other.code and self.namespace is other.namespace

    def __hash__(self) -> int:
        return id(self.code)


def _code_of(module: nn.Module) -> tuple[tuple[type, ...], tuple[_Function, ...]]:
    """Return the user's classes, as :func:`user_classes` does, and the user's functions in attributes."""
    modules = list(module.modules())
    held = [h for m in modules for name, h in vars(m).items() if name not in REGISTRIES]
    reached = reachable(held, _MOST)
    functions = (_Function(f) for f in reached if isinstance(f, types.FunctionType) and _is_users(f))
    classes = map(type, (*modules, *held, *reached))
    return tuple(filter(_is_users, dict.fromkeys(classes))), tuple(dict.fromkeys(functions))


@functools.lru_cache(maxsize=64)
def _reached(classes: tuple[type, ...], functions: tuple[_Function, ...]) -> _Reached:
    reached = _Reached()
    for kind in classes:
        reached.enter(kind)
    for function in functions:
        reached.read(function.code, function.namespace)
    return reached


class _Reached:
    """The variables that the searched code refers to, and the instructions that load them."""

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self._beginnings: Counter[str] = Counter()  # leading parts of a name -> number of names
        self.loads: dict[str, set[tuple[types.CodeType, int]]] = defaultdict(set)  # last part of a name -> code, offset
        self._seen: set[Any] = set()  # ids of what was searched

    def enter(self, thing: Any) -> None:
        """Search a function or a class. Whatever the object is, also search what its ``__wrapped__`` holds."""
        thing = _bare(thing)
        if id(thing) in self._seen:
            return
        self._seen.add(id(thing))
        if callable(wrapped := inspect.getattr_static(thing, "__wrapped__", None)):
            self.enter(wrapped)
        if not isinstance(thing, (types.FunctionType, type)) or not _is_users(thing):
            return
        if isinstance(thing, types.FunctionType):
            for name in vars(thing).keys() - {"__wrapped__"}:
                self._of_function(thing, name)
            for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
                self._enclosed(thing, name, cell)
            names, defaults = thing.__code__.co_varnames[: thing.__code__.co_argcount], thing.__defaults__ or ()
            for name, held in (*zip(names[::-1], defaults[::-1], strict=False), *(thing.__kwdefaults__ or {}).items()):
                self._default(thing, name, held)
            self.read(thing.__code__, thing.__globals__)
        else:
            for kind in filter(_is_users, thing.__mro__):
                for name, held in list(vars(kind).items()):
                    self._attribute(kind, name, held)

    def _attribute(self, kind: type, name: str, held: Any) -> None:
        if isinstance(held, property):
            for function in (held.fget, held.fset):
                self.enter(function)
        elif isinstance(held, (staticmethod, classmethod, *_CODE)):
            self.enter(held)
        elif not name.startswith("__") and (_is_users(type(held)) or not hasattr(type(held), "__get__")):
            self._variable(f"class {_full_name(kind)}", kind, name)
            self.enter(held)  # it may be a decorator
            self.enter(type(held))

    def _enclosed(self, function: types.FunctionType, name: str, cell: types.CellType) -> None:
        variable = Variable(cell, name)
        held = variable.state().get("value")
        if isinstance(held, _CODE):
            self.enter(held)
        elif id(cell) not in self._seen:
            self._seen.add(id(cell))
            self._numbered(f"enclosed {_full_name(function)}.{name}", variable)

    def _of_function(self, function: types.FunctionType, name: str) -> None:
        if (id(function), name) not in self._seen:
            self._seen.add((id(function), name))
            self._numbered(f"function {_full_name(function)}.{name}", Variable(vars(function), name))

    def _numbered(self, name: str, variable: Variable) -> None:
        """Add a variable, with a number if its name is taken: inner functions of a decorator have one full name."""
        same = self._beginnings[name]
        self._add(f"{name}.{same}" if same else name, variable)

    def _add(self, name: str, variable: Variable) -> None:
        self.variables[name] = variable
        self._beginnings.update(itertools.accumulate(name.split("."), lambda one, other: f"{one}.{other}"))

    def _default(self, function: types.FunctionType, name: str, held: Any) -> None:
        if isinstance(held, _CODE):
            self.enter(held)
        elif type(held) not in ATOMS and (is_open(type(held)) or is_restorable(held)):
            self._variable(f"enclosed {_full_name(function)}", {name: held}, name)

    def read(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Search a code object, and the code of functions inside of it, with its global variables."""
        for part in nested_code(code):
            self._read(part, namespace)

    def _read(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        before: Any = None  # what the last instruction loaded, whose attribute the next may access
        for operation, name, offset, follows in name_instructions(code):
            module, before = before if follows else None, None
            if operation.startswith("LOAD_"):
                self.loads[name].add((code, offset))
            if operation in _OF_GLOBALS:
                before = self._loaded(namespace, name)
                if operation == "STORE_GLOBAL":  # it may not exist yet
                    self._variable(f"global {namespace.get('__name__')}", namespace, name)
            elif operation in _OF_ATTRIBUTES:
                if isinstance(module, types.ModuleType) and _is_users(module):
                    before = self._loaded(vars(module), name)
                elif isinstance(module, types.FunctionType) and _is_users(module) and operation == "STORE_ATTR":
                    self._of_function(module, name)  # it may not exist yet

    def _loaded(self, namespace: dict[str, Any], name: str) -> Any:
        """Note that code loads a name, search the object that the name refers to, and return the object."""
        held = namespace.get(name)
        if isinstance(held, _CODE) or callable(inspect.getattr_static(held, "__wrapped__", None)):
            self.enter(held)
        elif name in namespace:
            self._variable(f"global {namespace.get('__name__')}", namespace, name)
            self.enter(type(held))
        return held

    def _variable(self, owner: str, namespace: Any, name: str) -> None:
        if f"{owner}.{name}" not in self.variables:
            self._add(f"{owner}.{name}", Variable(namespace, name))


_OF_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")
_OF_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR")
_OF_ENCLOSED = ("LOAD_DEREF", "STORE_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")


@functools.cache
def name_instructions(code: types.CodeType) -> tuple[tuple[str, str, int, bool], ...]:
    """Return the instructions that refer to a name: operation, name, offset, and whether one is directly before it.

    The result is cached: disassembling takes most of the time of a search, and each step searches the same code.
    """
    found, last = [], -2
    for i, instruction in enumerate(dis.get_instructions(code)):
        if instruction.opname in (*_OF_GLOBALS, *_OF_ATTRIBUTES, *_OF_ENCLOSED):
            found.append((instruction.opname, instruction.argval, instruction.offset, i == last + 1))
            last = i
    return tuple(found)


def _bare(thing: Any) -> Any:
    """Return the function of a method, and anything else unchanged."""
    return thing.__func__ if isinstance(thing, (staticmethod, classmethod, types.MethodType)) else thing


def nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those that are nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested_code(constant)


def _full_name(thing: type | types.FunctionType) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def _is_users(thing: Any) -> bool:
    """Return whether a function, class or Python module is the user's, not of an installed package."""
    if isinstance(thing, types.FunctionType):  # functools.wraps copies __module__
        name = thing.__globals__.get("__name__")
    else:
        name = thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None)
    if isinstance(thing, nn.Module) or not isinstance(name, str):
        return False
    return _is_users_module(name)


@functools.cache
def _is_users_module(name: str) -> bool:
    """Return whether a Python module is the user's: not built in, installed, or a part of this package."""
    module = sys.modules.get(name)
    if module is None or name in sys.builtin_module_names:
        return False
    file = getattr(module, "__file__", None)
    return file is None or not (file.startswith(PACKAGE) or is_standard(file) or is_installed(file))
