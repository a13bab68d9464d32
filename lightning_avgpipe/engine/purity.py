"""Check whether the Python of a step has side effects besides what it computes with tensors.

A step whose Python only calls units and torch functions, and packs and unpacks values, may run once for several
micro-batches. One that counts, steps a scheduler, reads a clock or writes a file may not. Since no list of side effects
can be complete, the check allows only what is known to have none.

While the step is followed once, each function that runs outside of units is checked: no instruction may store into an
object or a global variable, and it may call only C functions that do nothing but read their arguments. Two more kinds
of functions are checked: hooks on gradients, which run between micro-batches and may change what the step reads next,
and methods that Python calls implicitly, such as ``__enter__``, of objects that a function refers to. Code of models
from installed libraries is trusted, since its changes of modules and objects were seen when the step was captured.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.state.outside import name_instructions, user_classes
from lightning_avgpipe.state.snapshot import reachable
from lightning_avgpipe.utils.source import LIGHTNING_FOLDERS, PACKAGE, is_installed, is_standard
from lightning_avgpipe.utils.torch_compat import GRADIENT_HOOKS, untraced

_TORCH = str(Path(torch.__file__).parent)
# Files whose functions only wrap operations and calls of modules, so they are not checked.
_NEUTRAL = (
    PACKAGE,
    *(
        os.path.join(_TORCH, part)
        for part in ("nn", "_", "functional.py", "overrides.py", "autograd", "utils/_", "amp", "fx", "compiler")
    ),
    *(
        os.path.join(sysconfig.get_path("stdlib"), part)
        for part in ("contextlib.py", "typing.py", "enum.py", "inspect.py")
    ),
)
_CALLS = nn.Module.__call__.__code__.co_filename
# fmt: off
_STORES = frozenset((
    "STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME",
    "DELETE_ATTR", "DELETE_SUBSCR", "DELETE_GLOBAL", "DELETE_DEREF",
))
_STORING = frozenset((
    "__setattr__", "__setitem__", "__delattr__", "__delitem__", "__dict__", "__iadd__", "__next__",
))
_ALLOWED = frozenset((  # what only reads its arguments, or makes something new of them
    "isinstance", "issubclass", "len", "getattr", "hasattr", "callable", "id", "hash", "repr", "format",
    "super", "__new__", "__enter__", "__exit__", "abs", "min", "max", "sum", "round", "divmod", "pow", "any", "all",
    "sorted", "get", "items", "keys", "values", "copy", "count", "index", "union", "intersection",
    "startswith", "endswith", "split", "join", "lower", "upper", "strip", "replace", "partition", "rpartition",
    "removeprefix", "removesuffix", "is_integer", "bit_length",
    "sqrt", "log", "exp", "floor", "ceil", "prod", "isclose", "tanh", "sin", "cos",
))
# Methods that change their object. Code that merely refers to one is refused: calls of those of modules are not seen,
# since they are in neutral files, and calls of others are not seen in a branch that is not taken.
_CHANGING = frozenset((
    "train", "eval", "requires_grad_", "load_state_dict", "add_module", "append", "extend", "setdefault", "setattr",
    "pop", "popitem", "popleft", "appendleft", "extendleft", "insert", "remove", "discard", "clear",
    "write", "writelines", "writerow", "writerows", "put",
    *(name for name in dir(nn.Module) if name.startswith("register_")),
))
# fmt: on
_CHANGING_DICTS = ("update", "add", "subtract")  # of dicts and sets only: metrics and torch have these names, too
# Methods that no operator or statement of a step calls, and those that make an object.
_NOT_OF_STEPS = frozenset((
    "__init__", "__new__", "__post_init__", "__init_subclass__", "__setattr__", "__delattr__", "__del__", "__repr__",
    "__str__", "__eq__", "__hash__", "__getstate__", "__setstate__", "__reduce__", "__deepcopy__", "__copy__",
))  # fmt: skip
_MOST = 1000  # containers with more items are not searched
_IMMUTABLE = (str, bytes, int, float, complex, tuple, frozenset, bool)


@functools.lru_cache(4096)
def stores(code: types.CodeType) -> str | None:
    """Return a description of the first instruction that stores into something besides local variables, or None."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _STORES:
            return f"line {code.co_firstlineno} of {Path(code.co_filename).name} has a function that stores something"
    if not _STORING.isdisjoint(code.co_names):
        return f"line {code.co_firstlineno} of {Path(code.co_filename).name} has a function that may store something"
    return None


class Purity:
    """A context that checks the Python functions that a step calls in this thread.

    Functions that its code refers to, but does not call since it takes another branch, are checked too.

    Args:
        within: returns whether a unit is running. Functions in units are not checked.
        module: module that has the step; functions of its submodules' classes are found by their names.
        refuse: called at the end of the context with a description of a possible side effect, if there is one.
    """

    def __init__(self, within: Callable[[], bool], module: nn.Module, refuse: Callable[[str], None]) -> None:
        self._why_not: str | None = "its Python was not seen"  # None: no side effect was found
        self._refuse = refuse
        self._module = module
        self._classes = list(dict.fromkeys((*map(type, module.modules()), *user_classes(module))))
        self._package = type(module).__module__.partition(".")[0]  # the user's own, even if it is installed
        self._known: set[types.CodeType] = set()
        self._within = within
        self._looks = False
        self._step: types.FrameType | None = None
        self._ended = False

    def __enter__(self) -> None:
        self._looks = sys.getprofile() is None
        if self._looks:
            sys.setprofile(self._look)
        else:
            self._why_not = "a profiler runs, so that its Python cannot be checked"

    def __exit__(self, *error: object) -> None:
        if self._looks:
            sys.setprofile(None)
        self._step = None
        for hook in _gradient_hooks(self._module) if self._why_not is None else ():
            if self._is_users(hook):
                self._why_not = self._why_not or self._stores(hook.__code__, hook.__globals__)
        if self._why_not is not None:
            self._refuse(self._why_not)

    def _look(self, frame: types.FrameType, event: str, function: Any) -> None:
        if self._ended or self._within():
            return
        if self._step is None:  # the step begins with the first function that is neither Lightning's nor ours
            if event == "call" and not _origin(frame).startswith((*_NEUTRAL, *LIGHTNING_FOLDERS)):
                self._step, self._why_not = frame, self._stores(frame.f_code, frame.f_globals)
        elif event == "return":
            self._ended = frame is self._step
        elif self._why_not is None and event in ("call", "c_call"):
            self._judge(frame, event, function)

    def _judge(self, frame: types.FrameType, event: str, function: Any) -> None:
        code, path = frame.f_code, _origin(frame)
        logs = code.co_name == "log_dict" and path.startswith(LIGHTNING_FOLDERS)  # it only calls self.log
        if path.startswith(_NEUTRAL) or logs or self._is_of_library(frame):
            return
        if event == "call":
            self._why_not = self._stores(code, frame.f_globals)
        elif not _is_allowed(function):
            name = getattr(function, "__qualname__", str(function))
            self._why_not = f"{Path(code.co_filename).name}:{frame.f_lineno} calls {name}()"

    def _stores(self, code: types.CodeType, names: Mapping[str, Any]) -> str | None:
        """Return a description of the first store in a function, or in one that it may call, or None."""
        if code in self._known:
            return None
        self._known.add(code)
        if (why := stores(code)) is not None:
            return why
        if changing := _CHANGING.intersection(code.co_names).union(self._changing_dicts(code, names)):
            return f"line {code.co_firstlineno} of {Path(code.co_filename).name} may call {min(changing)}()"
        inner = [(part, names) for part in code.co_consts if isinstance(part, types.CodeType)]
        for name in code.co_names:
            own, held = (getattr(kind, name, None) for kind in self._classes), [*self._held(name, names)]
            for found in (*own, *held, *_implicit(held)):
                if isinstance(found, types.FunctionType) and self._is_users(found):
                    inner.append((found.__code__, found.__globals__))
        return next((why for part in inner if (why := self._stores(*part)) is not None), None)

    def _changing_dicts(self, code: types.CodeType, names: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of changing methods that code calls on a name that holds a dict or set."""
        for (_, name, *_), (_, method, _, follows) in pairwise(name_instructions(code)):
            if follows and method in _CHANGING_DICTS:
                yield from (method for held in self._held(name, names) if isinstance(held, (dict, set)))

    def _held(self, name: str, names: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the objects in the global variable and the attributes of modules that have this name."""
        yield names.get(name)
        yield from (vars(module)[name] for module in self._module.modules() if name in vars(module))

    def _is_users(self, function: types.FunctionType) -> bool:
        path = function.__code__.co_filename
        if path.startswith(_NEUTRAL) or is_standard(path):
            return False
        return not is_installed(path) or str(function.__module__).partition(".")[0] == self._package

    def _is_of_library(self, frame: types.FrameType) -> bool:
        """Return whether a frame is a library's, and runs in the forward of a module of an installed library.

        The innermost module decides, since an ``nn.Sequential`` may hold modules of the user.
        """
        now: types.FrameType | None = frame if _is_of_library(_origin(frame)) else None
        while now is not None and now.f_back is not None and now is not self._step:
            if now.f_back.f_code.co_filename == _CALLS != now.f_code.co_filename:
                return is_installed(now.f_code.co_filename)
            now = now.f_back
        return False


def _gradient_hooks(module: nn.Module) -> Iterator[types.FunctionType]:
    """Yield the functions of backward hooks of modules, and of gradient hooks of parameters."""
    with untraced():
        registries = [getattr(p, name, None) for p in module.parameters() for name in GRADIENT_HOOKS]
    for inner in module.modules():
        registries += inner._backward_hooks, inner._backward_pre_hooks
    for hook in (hook for registry in registries for hook in (registry or {}).values()):
        while isinstance(hook, functools.partial):
            hook = hook.func
        function = getattr(hook, "__func__", hook if isinstance(hook, types.FunctionType) else type(hook).__call__)
        if isinstance(function, types.FunctionType):
            yield function


def _implicit(held: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Yield the functions reachable from these objects, and the methods that Python may call implicitly."""
    reached = reachable(held, _MOST)
    yield from (found for found in reached if isinstance(found, types.FunctionType))
    for base in dict.fromkeys(base for obj in reached for base in type(obj).__mro__):
        for name, method in vars(base).items():
            is_implicit = name.startswith("__") and name.endswith("__") and name not in _NOT_OF_STEPS
            if is_implicit and isinstance(method, types.FunctionType):
                yield method


def _is_of_library(path: str) -> bool:
    return is_installed(path) or is_standard(path)


def _origin(frame: types.FrameType) -> str:
    """Return the file of a function; generated code, such as a dataclass's ``__init__``, has the file of its caller."""
    now = frame
    while now.f_code.co_filename.startswith("<") and now.f_back is not None:
        now = now.f_back
    return now.f_code.co_filename


def _is_allowed(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or ""
    if isinstance(owner, torch.Tensor) or module.startswith("torch") or type(owner).__module__.startswith("torch"):
        return True
    if owner is torch._C or getattr(owner, "__name__", "").startswith("torch"):
        return True
    return function.__name__ in _ALLOWED or isinstance(owner, _IMMUTABLE)
