"""What capture and replay share: to follow a step function through its units and its glue.

A step is plain Python. Two hooks see everything that matters: the calls of modules (``nn.Module.__call__``) and,
outside of units, the torch functions (a ``TorchFunctionMode``). Inside a unit both step aside, so a unit runs at the
speed at which it always ran.

A tensor is *known* as a value if it came out of a node. An operation is a node if it touches a known tensor or a
parameter; everything else is free, also what only asks a parameter for its description. Capture and replay decide this
by the same rule, in the same order, which is why nodes can be matched by counting them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from lightning_avgpipe.capture.known_tensors import KnownTensors
from lightning_avgpipe.utils.saved_hooks import disabling, disabling_others
from lightning_avgpipe.utils.torch_compat import CHECKPOINT_BRACKET, is_transformed, untransformed

# fmt: off
_METADATA_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "names", "name", "output_nr", "requires_grad",
    "is_leaf", "grad_fn", "retains_grad", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta", "is_sparse",
    "is_quantized", "is_nested", "is_mkldnn", "_version", "_backward_hooks",
)
_METADATA_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device",
    "dim_order", "is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_conj", "is_neg", "is_inference",
    "is_shared", "is_pinned", "has_names", "__len__", "__hash__", "__repr__", "__dir__",
)
# fmt: on


def _metadata_functions() -> frozenset[Any]:
    """Functions that read a tensor's description, never its numbers: absent values can answer them."""
    found: set[Any] = set()
    for name in _METADATA_ATTRIBUTES:
        attribute = getattr(Tensor, name, None)
        if attribute is not None and hasattr(attribute, "__get__"):
            found.add(attribute.__get__)
    for name in _METADATA_METHODS:
        method = getattr(Tensor, name, None)
        if method is not None:
            found.add(method)
    found.update((torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor))
    return frozenset(found)


METADATA = _metadata_functions()
# What a tensor says of its place.
DEVICE_QUESTIONS = frozenset(
    (
        *(getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta")),
        Tensor.get_device,
    )
)


# Says of a sparse tensor that each of its indices is there once. Libraries of graphs say so whenever they see one.
_FLAG: Any = Tensor._coalesced_

# New tensors like another one, of which only the description matters. (Random ones are drawn where that one is.)
_LIKE = frozenset(
    (
        *(getattr(Tensor, name) for name in ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")),
        *(torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like),
    )
)


def function_name(func: Any) -> str:
    """A name for a torch function that is the same in every process."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        return f"{getattr(func.__self__, '__name__', '?')}.{name}"
    return name


def tensor_arguments(*arguments: Any) -> list[Tensor]:
    """Tensors in nested lists, tuples and dicts of arguments, in order; also those that torch.func has wrapped."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
            if is_transformed(argument):
                found.append(untransformed(argument))
        elif isinstance(argument, (list, tuple)):
            if argument:
                found.extend(tensor_arguments(*argument))
        elif isinstance(argument, dict) and argument:
            found.extend(tensor_arguments(*argument.values()))
    return found


class CallWatcher:
    """Sees calls of modules, also inside units; what it does by default is nothing.

    Attributes:
        only: ids of the modules whose calls it sees; None: of all.
    """

    only: Container[int] | None = None

    def enter(self, module: nn.Module) -> None:
        """A module is called."""

    def leave(self, module: nn.Module) -> None:
        """The call has ended, perhaps by an error."""

    def opaque(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A custom autograd function is called inside a unit."""
        return run(*args, **kwargs)

    def repeatable(self, function: Callable[..., Any], calls_before: int) -> Callable[..., Any]:
        """A checkpointed function, which a backward calls again after its first ``calls_before`` calls."""
        return function


class _Following(threading.local):
    tracer: StepTracer | None = None
    watcher: CallWatcher | None = None


_following = _Following()


class StepTracer(TorchFunctionMode):
    """Follows one execution of a step function; subclasses say what happens at a node.

    Args:
        units: ``id(module) -> path`` of the submodules that are never split.
        owned: ``id -> full name`` of the tensors whose use makes a node: parameters, and buffers that glue changes.
        place: where the step computes; None: where its parameters are.

    Attributes:
        known: tensors that came out of nodes, and their values.
        rehearses: whether the step runs to learn something of it, and once more for good.
    """

    rehearses = False

    def __init__(self, units: Mapping[int, str], owned: Mapping[int, str], place: torch.device | None = None) -> None:
        super().__init__()
        self._place = place
        self._units = units
        self._owned = owned
        self._inside = False  # a unit, or a node's own work, is running: nothing is a node now
        self.known = KnownTensors()
        self._eager: contextlib.AbstractContextManager[Any] | None = None  # left while a unit runs, and entered again

    # -- what subclasses decide; while they do, nothing is followed ---------------------------------------------------

    @abstractmethod
    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A unit is called; ``run(*args, **kwargs)`` executes it."""

    @abstractmethod
    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A torch function is called outside of any unit."""

    @abstractmethod
    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A region is checkpointed in one piece (reentrantly), whatever units it calls."""

    def region(self, generator: Iterator[Any]) -> Iterator[Any]:
        """A region is checkpointed in which calls and glue are followed; the generator brackets it."""
        return generator

    @abstractmethod
    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Something that only looks at values (``self.log``, a metric) is called; ``run`` executes it."""

    def observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Let ``run(*args, **kwargs)`` look at values of the step."""
        with self.aside():
            return self.on_observe(run, args, kwargs)

    @classmethod
    def current(cls) -> StepTracer | None:
        """The tracer that follows this thread's step, if one does and is not inside a unit."""
        tracer = _following.tracer
        return None if tracer is None or tracer._inside else tracer

    def unit(self, module: nn.Module) -> str | None:
        """The path of a unit; None for a module that is followed. Asked when it is called."""
        return self._units.get(id(module))

    # -- the two hooks ----------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside or func in METADATA:
            return func(*args, **(kwargs or {}))
        if func is _FLAG and args[1:] == (args[0].is_coalesced(),):  # which would count as a change of the tensor
            return args[0]
        if func in _LIKE and self._is_parameter(args, kwargs):
            return self._like(func, args, kwargs or {})
        self._inside = True  # the mode itself is off the stack while it handles a function
        try:
            return self.on_glue(func, args, kwargs or {})
        finally:
            self._inside = False

    def _is_parameter(self, args: Any, kwargs: Any) -> bool:
        """Whether a parameter is all that a function is given of tensors."""
        given = tensor_arguments(args, kwargs)
        return len(given) == 1 and isinstance(given[0], nn.Parameter) and id(given[0]) in self._owned

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A new tensor like a parameter, which may have no contents here, or lie elsewhere now."""
        if self._place is not None and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self._place}
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def following(self, compiled: bool = False) -> Iterator[None]:
        """Within this context this thread's step is followed.

        Nobody can follow what ``torch.compile`` has compiled, so that runs uncompiled.

        Args:
            compiled: whether units do not. What is compiled cannot be watched either.
        """
        eager = uncompiled()
        with intercepting(), eager:
            self._eager = eager if compiled else None
            _following.tracer = self
            try:
                with self:
                    yield
            finally:
                _following.tracer = None

    def aside(self) -> _Aside:
        """Within this context nothing is followed: a unit, or one glue operation, runs as it always does."""
        return _Aside(self)


class _Aside:
    """Entered at every call of a unit, so a class: a generator would cost as much as the rest of the call."""

    __slots__ = ("_on_top", "_tracer")

    def __init__(self, tracer: StepTracer) -> None:
        self._tracer = tracer
        self._on_top = False

    def __enter__(self) -> None:
        tracer = self._tracer
        tracer._inside = True
        # Off the stack the mode costs a unit nothing. If the user has put a mode of his own on top of ours
        # (``with torch.device(...)``), it stays and only passes operations through.
        self._on_top = torch.overrides._get_current_function_mode() is tracer
        if self._on_top:
            TorchFunctionMode.__exit__(tracer, None, None, None)
            if tracer._eager is not None:
                tracer._eager.__exit__(None, None, None)

    def __exit__(self, *error: object) -> None:
        tracer = self._tracer
        if self._on_top:
            if tracer._eager is not None:
                tracer._eager.__enter__()
            TorchFunctionMode.__enter__(tracer)
        tracer._inside = False


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Within this context nothing runs compiled; nothing can where the compiler has not even been imported."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextlib.contextmanager
def watching(watcher: CallWatcher) -> Iterator[None]:
    """Within this context a watcher sees the calls of modules of this thread."""
    with intercepting():
        before, _following.watcher = _following.watcher, watcher
        try:
            yield
        finally:
            _following.watcher = before


class intercepting:
    """Within this context calls of modules and autograd functions can be followed.

    Following turns it on by itself. Since a change of ``nn.Module`` empties Python's method caches for all modules,
    whoever follows often keeps it on.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        global _interceptions
        with _lock:
            if _interceptions == 0:
                nn.Module.__call__ = _call  # type: ignore[method-assign, assignment]
                torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment, arg-type]
                setattr(checkpoint, CHECKPOINT_BRACKET, _checkpointing)
                torch.autograd.graph.disable_saved_tensors_hooks = disabling_others  # type: ignore[assignment]
            _interceptions += 1

    def __exit__(self, *error: object) -> None:
        global _interceptions
        with _lock:
            _interceptions -= 1
            if _interceptions == 0:
                nn.Module.__call__ = _call_module  # type: ignore[method-assign]
                torch.autograd.Function.apply = _apply_function  # type: ignore[method-assign]
                setattr(checkpoint, CHECKPOINT_BRACKET, _checkpointing_generator)
                torch.autograd.graph.disable_saved_tensors_hooks = disabling


_lock = threading.Lock()
_interceptions = 0
_call_module: Callable[..., Any] = nn.Module.__call__
_apply_function = torch.autograd.Function.__dict__["apply"]
_checkpointing_generator: Callable[..., Iterator[Any]] = getattr(checkpoint, CHECKPOINT_BRACKET)
_keeping_inputs = getattr(checkpoint, "_NoopSaveInputs", None)  # how older versions of torch keep a region's inputs


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # every call of a module comes here, so what is not followed leaves at once
    if torch.compiler.is_compiling():  # a unit that runs compiled
        return _call_module(module, *args, **kwargs)
    watcher, tracer = _following.watcher, _following.tracer
    if watcher is None or (watcher.only is not None and id(module) not in watcher.only):
        if tracer is None or tracer._inside:
            return _call_module(module, *args, **kwargs)
        return _follow(module, args, kwargs)
    watcher.enter(module)
    try:
        return _follow(module, args, kwargs)
    finally:
        watcher.leave(module)


def _follow(module: nn.Module, args: Any, kwargs: Any) -> Any:
    tracer = _following.tracer
    if tracer is None or tracer._inside:
        return _call_module(module, *args, **kwargs)
    path = tracer.unit(module)
    if path is None:
        return _call_module(module, *args, **kwargs)
    if module._forward_hooks:
        return _call_with_hooks(tracer, module, path, args, kwargs)
    with tracer.aside():
        return tracer.on_call(module, path, partial(_call_module, module), args, kwargs)


def _call_with_hooks(tracer: StepTracer, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    """Forward hooks are glue: one that collects outputs (router logits, attention maps) does so on every stage."""
    forward = module.forward

    def unit(*inner_args: Any, **inner_kwargs: Any) -> Any:
        with tracer.aside():
            return tracer.on_call(module, path, forward, inner_args, inner_kwargs)

    attributes = vars(module)
    before = attributes.get("forward")
    attributes["forward"] = unit
    try:
        return _call_module(module, *args, **kwargs)
    finally:
        if before is None:
            del attributes["forward"]
        else:
            attributes["forward"] = before


def _apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    # Not a torch function: the mode would see the inside of its forward, and its backward would be lost.
    tracer, watcher = _following.tracer, _following.watcher
    run = _apply_function.__get__(None, function)
    if function is _keeping_inputs:
        with contextlib.nullcontext() if tracer is None else tracer.aside():
            return run(*args, **kwargs)
    checkpoints = function is checkpoint.CheckpointFunction
    if checkpoints and watcher is not None:
        args = (watcher.repeatable(args[0], calls_before=1), *args[1:])
    if tracer is None or tracer._inside:
        return run(*args, **kwargs) if checkpoints or watcher is None else watcher.opaque(run, args, kwargs)
    with tracer.aside():
        if checkpoints:
            return tracer.on_region(run, args, kwargs)
        return tracer.on_glue(_named(run, f"{function.__name__}.apply"), args, kwargs)


def _checkpointing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Brackets a region that is checkpointed without reentrance; ``function`` is what backwards call again."""
    tracer, watcher = _following.tracer, _following.watcher
    if watcher is not None:
        function = watcher.repeatable(function, calls_before=0)
    generator = _checkpointing_generator(function, *args, **kwargs)
    return generator if tracer is None or tracer._inside else tracer.region(generator)


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    function.__name__ = name
    return function
