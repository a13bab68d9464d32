"""Follow a step function through its units and its glue; capture and replay share this.

A step is plain Python. Two hooks see everything that matters: the calls of modules (``nn.Module.__call__``) and,
outside of units, the torch functions (a ``TorchFunctionMode``). Inside a unit both are off, so a unit runs at its usual
speed.

A tensor is *known* as a value if it came out of a node. An operation is a node if it touches a known tensor or a
parameter; everything else is free, including operations that only ask a parameter for its description. Capture and
replay decide this by the same rule, in the same order, so nodes can be matched by counting them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from lightning_avgpipe.capture.units import tensors_of
from lightning_avgpipe.errors import AvgPipeError, CaptureError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import visiting
from lightning_avgpipe.utils.output import muted
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import KnownTensors, tensor_arguments
from lightning_avgpipe.utils.torch_compat import (
    CHECKPOINT_BRACKET,
    disabling,
    disabling_others,
    num_modes,
    operation_modes,
)

_NOTHING = contextlib.nullcontext()

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


def _functions(attributes: Iterable[str], methods: Iterable[str]) -> frozenset[Any]:
    """Return the functions that a ``TorchFunctionMode`` sees for these attributes and methods, if torch has them."""
    read: Iterable[Any] = (getattr(Tensor, name, None) for name in attributes)
    called: Iterable[Any] = (getattr(Tensor, name) for name in methods if hasattr(Tensor, name))
    return frozenset((*(attribute.__get__ for attribute in read if hasattr(attribute, "__get__")), *called))


# Functions that read a tensor's description, never its numbers: absent values can answer them.
METADATA: frozenset[Any] = frozenset(
    (
        *_functions(_METADATA_ATTRIBUTES, _METADATA_METHODS),
        *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
    )
)
# Descriptions of a value that are unknown, or may differ, on a stage that receives the value or does not have it.
STAGE_DEPENDENT_METADATA = METADATA.intersection(
    _functions(
        ("output_nr", "is_leaf", "grad_fn", "retains_grad", "_version", "_backward_hooks"),
        ("stride", "storage_offset", "dim_order", "is_contiguous", "is_conj", "is_neg", "is_inference", "is_shared"),
    )
)
# Functions that return the device of a tensor.
DEVICE_METADATA = _functions(("device", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta"), ("get_device",))


# Marks a sparse tensor as coalesced. Graph libraries call it for every sparse tensor that they get.
_COALESCING: Any = Tensor._coalesced_

_FREEZING = frozenset((Tensor.requires_grad.__set__, Tensor.requires_grad_))  # type: ignore[attr-defined]

# Each comparison, and the one to use when both sides are exchanged.
_EXCHANGED = {
    getattr(Tensor, f"{underscores}{one}{underscores}"): getattr(Tensor, f"{underscores}{other}{underscores}")
    for one, other in (("eq", "eq"), ("ne", "ne"), ("lt", "gt"), ("gt", "lt"), ("le", "ge"), ("ge", "le"))
    for underscores in ("", "__")
}

# Functions that make a tensor with the description of another. (Random ones are nodes, on the stage of the other one.)
LIKE = _functions((), ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")) | {
    torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like
}  # fmt: skip


def function_name(func: Any) -> str:
    """Return a name for a torch function that is the same in every process."""
    name: str = getattr(func, "__name__", type(func).__name__)
    if name in ("__get__", "__set__", "__delete__"):
        return f"{getattr(func.__self__, '__name__', '?')}.{name}"
    return name


class CallWatcher:
    """A base class for watchers of module calls, also inside units; by default it does nothing.

    Attributes:
        only: ids of the modules whose calls are watched; None: all.
    """

    only: Container[int] | None = None

    def enter(self, module: nn.Module) -> bool:
        """Watch the beginning of a module's call; return whether its end is to be watched too."""
        return True

    def leave(self, module: nn.Module) -> None:
        """Watch the end of a module's call, which may be by an error."""

    def opaque(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a custom autograd function that is called inside a unit.

        All its draws must come from one stream: its backward may call modules again, starting from a random state that
        its forward has saved.
        """
        return run(*args, **kwargs)

    def repeatable(self, function: Callable[..., Any], calls_before: int) -> Callable[..., Any]:
        """Return a replacement for a checkpointed function; after ``calls_before`` calls, backwards call it again."""
        return function


class _Following(threading.local):
    tracer: StepTracer | None = None
    watcher: CallWatcher | None = None


_following = _Following()


class StepTracer(TorchFunctionMode):
    """A tracer of one execution of a step function; subclasses say what happens at a node.

    Args:
        units: ``id(module) -> path`` of the submodules that are never split.
        owned: ``id -> full name`` of the tensors whose use makes a node: parameters, and buffers that glue changes.
        place: device on which the step computes; None: where its parameters are.
        offloaded: ids of the tensors that are moved to this device only while something uses them.

    Attributes:
        known: tensors that came out of nodes, with their values.
        is_dry_run: whether this execution only gathers information about the step, and trains nothing.
        has_left: whether a stage has left the step before its end.
    """

    is_dry_run = False

    def __init__(
        self,
        units: Mapping[int, str],
        owned: Mapping[int, str],
        place: torch.device | None = None,
        offloaded: Container[int] = (),
    ) -> None:
        super().__init__()
        self._place = place
        self._offloaded = offloaded
        self._units = units
        self._owned = owned
        self._inside = False  # whether a unit or the work of a node is running, so that nothing is followed
        self.known = KnownTensors[int]()
        self.has_left = False
        self._bare = False  # whether this mode is off the stack of modes
        self._eager: contextlib.AbstractContextManager[Any] | None = None  # the context that is left while a unit runs
        self._modes: frozenset[int] = frozenset()  # ids of the modes that were entered before the step
        self._depth = (0, 0)  # numbers of function and dispatch modes while the step has entered none itself
        self._raised: AvgPipeError | None = None  # the first error of ours, which the step may have caught
        self._frozen: dict[int, tuple[Tensor, bool, str]] = {}  # parameter, requires_grad before the step set it, line

    @property
    def mutes(self) -> bool:
        """Whether the step's output (prints, warnings, logs) is ever muted, since another execution shows it too."""
        return self.is_dry_run

    def is_muted(self) -> bool:
        """Return whether output is muted now."""
        return True

    # -- what subclasses decide; while they do, nothing is followed ---------------------------------------------------

    @abstractmethod
    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle a call of a unit; ``run(*args, **kwargs)`` executes it."""

    @abstractmethod
    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Handle a call of a torch function outside of any unit."""

    @abstractmethod
    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle a region that is checkpointed in one piece (reentrantly); the units that it calls are not followed."""

    def region(self, generator: Iterator[Any]) -> Iterator[Any]:
        """Return a generator that brackets a checkpointed region in which calls and glue are followed."""
        return generator

    @abstractmethod
    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Handle a call that only looks at values (``self.log``, a metric); ``run`` executes it."""

    def visiting(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Move all tensors of a module but those that are ``offloaded`` to the step's device within this context."""
        return visiting([t for t in tensors_of(module) if id(t) not in self._offloaded], self._place)

    def observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Let ``run(*args, **kwargs)`` look at values of the step."""
        args, kwargs = self.with_state_copied((args, kwargs))
        with self.paused():
            return self.on_observe(run, args, kwargs)

    def with_state_copied(self, values: Any) -> Any:
        """Return what the step logs or returns, with copies of the parameters and buffers in it.

        Returning a parameter is a use of it, but only torch functions are seen as uses. The copy makes one, so that the
        last stage, which may not hold the parameter, is known to need it.
        """
        if not any(map(self.is_lasting, tree.tensors(values))):
            return values
        return tree.map_tensors(lambda tensor: tensor.clone() if self.is_lasting(tensor) else tensor, values)

    def is_lasting(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, or a buffer that the step changes."""
        return id(tensor) in self._owned

    @classmethod
    def current(cls) -> StepTracer | None:
        """Return the tracer that follows this thread's step; None if there is none, or if a unit is running."""
        tracer = _following.tracer
        return None if tracer is None or tracer._inside else tracer

    @staticmethod
    def in_dry_run() -> bool:
        """Return whether this thread's step only runs to gather information, even while a unit is running."""
        tracer = _following.tracer
        return tracer is not None and tracer.is_dry_run

    def is_inside(self) -> bool:
        """Return whether a unit or the work of a node is running, so that nothing is followed."""
        return self._inside

    def answer(self, module: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
        """Return the result of a module's call if it is known without running it; otherwise None."""
        return None

    def on_assign(self, module: nn.Module, name: str) -> None:
        """Note that code between units is about to assign an attribute."""
        return

    def unit(self, module: nn.Module) -> str | None:
        """Return the path of a called module if it is a unit; None if it is followed."""
        return self._units.get(id(module))

    # -- the two hooks ----------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside or func in METADATA:
            if (
                not self._inside
                and self._place is not None
                and func in DEVICE_METADATA
                and id(args[0]) in self._offloaded
            ):
                args = (torch.empty(0, device=self._place),)  # answers with the device on which the step computes
            return func(*args, **(kwargs or {}))
        if func is _COALESCING and args[1:] == (args[0].is_coalesced(),):  # would count as a change, but is none
            return args[0]
        if func in _FREEZING and id(args[0]) in self._owned:  # no node: each stage does it to its own parameter
            self._frozen.setdefault(id(args[0]), (args[0], args[0].requires_grad, source_line()))
            return func(*args, **(kwargs or {}))
        if func in LIKE and self._is_parameter(args, kwargs):
            return self._like(func, args, kwargs or {})
        if func in _EXCHANGED and len(args) == 2 and self._is_exchanged(*args):
            func, args = _EXCHANGED[func], args[::-1]
        self._inside = True  # the mode itself is off the stack while it handles a function
        try:
            return self.on_glue(func, args, kwargs or {})
        except AvgPipeError as error:
            self.note(error)
            raise
        finally:
            self._inside = False

    def _is_exchanged(self, one: Any, other: Any) -> bool:
        """Return whether the sides of a comparison must be exchanged, for the order that all stages use.

        This order is: tensors that are no values, then values by number. Python may exchange the sides: it calls the
        reflected method of a stand-in on the right first, since its class is a subclass of the other's.
        """
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
            return False
        first, second = self.known.value_of(one), self.known.value_of(other)
        return first is not None and (second is None or second < first)

    def note(self, error: AvgPipeError) -> None:
        """Remember an error of ours, which the user's code may catch (``except Exception``) and ignore."""
        self._raised = self._raised or error

    def _is_parameter(self, args: Any, kwargs: Any) -> bool:
        """Return whether a parameter is the only tensor among the arguments."""
        given = tensor_arguments(args, kwargs)
        return len(given) == 1 and isinstance(given[0], nn.Parameter) and id(given[0]) in self._owned

    def _like(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Make a tensor like a parameter, which may be without contents here, or on another device at the moment."""
        if self._place is not None and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self._place}
        return func(*args, **kwargs)

    @contextlib.contextmanager
    def following(self, compiled: bool = False) -> Iterator[None]:
        """Follow this thread's step within this context.

        Code that ``torch.compile`` has compiled cannot be followed, so it runs uncompiled.

        Args:
            compiled: whether units that run within :meth:`executing` stay compiled; their inner calls are not watched.
        Raises:
            AvgPipeError: one was raised within the step, even if the step has caught it.
        """
        eager = uncompiled()
        with intercepting(), eager, muted(self.is_muted) if self.mutes else _NOTHING:
            self._eager = eager if compiled else None
            outer, _following.tracer = _following.tracer, self
            self._modes, (functions, dispatches) = frozenset(map(id, operation_modes())), num_modes()
            self._depth = functions + 1, dispatches  # including this mode
            try:
                with self:
                    yield
            finally:
                _following.tracer = outer
                error = sys.exc_info()[1]
                if not isinstance(error, Exception):
                    self._set_back_frozen()
                if self._raised not in (None, error):
                    raise self._raised  # type: ignore[misc]

    def _set_back_frozen(self) -> None:
        """Restore each requires_grad that the step has left changed; note an error if the whole step has run."""
        for parameter, before, line in self._frozen.values():
            if parameter.requires_grad == before:
                continue
            parameter.requires_grad_(before)
            if not self.has_left:
                self.note(
                    CaptureError(
                        f"the step sets requires_grad of '{self._owned[id(parameter)]}' at {line} to {not before}, and "
                        "leaves it so, but not all stages execute this line; freeze and unfreeze in a hook "
                        "(on_train_batch_start) or a callback"
                    )
                )

    def mode(self) -> str | None:
        """Return the name of a mode that the step has entered and that sees the operations of nodes, or None.

        Such a mode may count or change what it sees, but on each stage it sees only the nodes that run there.
        """
        functions, dispatches = num_modes()
        if (functions + self._bare, dispatches) == self._depth:  # a quick check for the common case
            return None
        strange = (m for m in operation_modes() if m is not self and id(m) not in self._modes)
        return next((type(m).__qualname__ for m in strange), None)

    def paused(self) -> _Aside:
        """Follow nothing within this context: a unit, or one glue operation, runs as usual."""
        return _Aside(self)

    def executing(self) -> contextlib.AbstractContextManager[None]:
        """Run a unit within this context, inside of :meth:`paused`, compiled if :meth:`following` allows that."""
        return _NOTHING if self._eager is None or not self._bare else self._executing(self._eager)

    @contextlib.contextmanager
    def _executing(self, eager: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
        eager.__exit__(None, None, None)
        try:
            yield
        finally:
            eager.__enter__()


class _Aside:
    """A context in which nothing is followed.

    It is entered at every call of a unit. A context manager made of a generator would cost as much as the rest of the
    call.
    """

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
            tracer._bare = True

    def __exit__(self, *error: object) -> None:
        tracer = self._tracer
        if isinstance(error[1], AvgPipeError):
            tracer.note(error[1])
        if self._on_top:
            tracer._bare = False
            TorchFunctionMode.__enter__(tracer)
        tracer._inside = False


class uncompiled:
    """A context in which nothing runs compiled; if the compiler was never imported, nothing is compiled anyway.

    All threads share the compiler's stance, so the first one that enters sets it, and the last one that leaves restores
    it.
    """

    __slots__ = ("_is_counted",)

    def __enter__(self) -> None:
        global _uncompiled, _stance
        self._is_counted = "torch._dynamo" in sys.modules
        if self._is_counted:
            with _lock:
                _uncompiled += 1
                if _uncompiled == 1:
                    _stance = torch.compiler.set_stance("force_eager")
                    _stance.__enter__()

    def __exit__(self, *error: object) -> None:
        global _uncompiled
        if self._is_counted:
            with _lock:
                _uncompiled -= 1
                if not _uncompiled:
                    _stance.__exit__(None, None, None)


class watching:
    """A context in which a watcher sees the module calls of this thread."""

    __slots__ = ("_before", "_watcher")

    def __init__(self, watcher: CallWatcher) -> None:
        self._watcher = watcher

    def __enter__(self) -> None:
        intercepting().__enter__()
        self._before, _following.watcher = _following.watcher, self._watcher

    def __exit__(self, *error: object) -> None:
        _following.watcher = self._before
        intercepting().__exit__()


class intercepting:
    """A context in which calls of modules and autograd functions can be followed.

    A tracer enters it by itself. Code that often follows steps stays in it all the time, since each change of
    ``nn.Module`` empties Python's method caches for all modules.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        global _interceptions
        with _lock:
            if _interceptions == 0:
                for owner, name, _, ours in _INTERCEPTED:
                    setattr(owner, name, ours)
            _interceptions += 1

    def __exit__(self, *error: object) -> None:
        global _interceptions
        with _lock:
            _interceptions -= 1
            if _interceptions == 0:
                for owner, name, theirs, _ in _INTERCEPTED:
                    setattr(owner, name, theirs)


_lock = threading.Lock()
_interceptions = 0
_uncompiled = 0  # contexts in which nothing runs compiled
_stance: Any = None  # the stance that these contexts share
call_module: Callable[..., Any] = nn.Module.__call__
_assign_attribute: Callable[..., None] = nn.Module.__setattr__
_is_compiling = torch.compiler.is_compiling
_apply_function = torch.autograd.Function.__dict__["apply"]
_script_function = torch.jit.ScriptFunction.__call__
_checkpointing_generator: Callable[..., Iterator[Any]] = getattr(checkpoint, CHECKPOINT_BRACKET)
_keeping_inputs = getattr(checkpoint, "_NoopSaveInputs", None)  # how older versions of torch keep a region's inputs


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Every call of a module passes through here, so the cheap cases come first.
    if _is_compiling():  # a unit that runs compiled
        return call_module(module, *args, **kwargs)
    watcher, tracer = _following.watcher, _following.tracer
    follow = call_module
    if tracer is not None and not tracer._inside:
        known = tracer.answer(module, args, kwargs)
        if known is not None:
            return known
        follow = partial(_follow, tracer)
    if watcher is None or (watcher.only is not None and id(module) not in watcher.only) or not watcher.enter(module):
        return follow(module, *args, **kwargs)
    try:
        return follow(module, *args, **kwargs)
    finally:
        watcher.leave(module)


def _assign(module: nn.Module, name: str, value: Any) -> None:
    tracer = _following.tracer
    if tracer is not None and not tracer._inside and not _is_compiling():
        tracer.on_assign(module, name)
    _assign_attribute(module, name, value)


def _follow(tracer: StepTracer, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    path = tracer.unit(module)
    if path is None:
        return call_module(module, *args, **kwargs)
    if module._forward_hooks:
        return _call_with_hooks(tracer, module, path, args, kwargs)
    with tracer.paused():
        return tracer.on_call(module, path, partial(call_module, module), args, kwargs)


def _call_with_hooks(tracer: StepTracer, module: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    """Call a unit with forward hooks. The hooks run as glue, so one that collects outputs does so on every stage."""
    forward = module.forward

    def unit(*inner_args: Any, **inner_kwargs: Any) -> Any:
        with tracer.paused():
            return tracer.on_call(module, path, forward, inner_args, inner_kwargs)

    with replaced(module, "forward", unit):
        return call_module(module, *args, **kwargs)


def _apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    # ``apply`` is no torch function: the mode would follow the operations in its forward, and lose its backward.
    tracer, watcher = _following.tracer, _following.watcher
    run = _apply_function.__get__(None, function)
    if function is _keeping_inputs:
        with contextlib.nullcontext() if tracer is None or tracer._inside else tracer.paused():
            return run(*args, **kwargs)
    checkpoints = function is checkpoint.CheckpointFunction
    if checkpoints and watcher is not None:
        args = (watcher.repeatable(args[0], calls_before=1), *args[1:])
    if tracer is None or tracer._inside:
        return run(*args, **kwargs) if checkpoints or watcher is None else watcher.opaque(run, args, kwargs)
    with tracer.paused():
        if checkpoints:
            return tracer.on_region(run, args, kwargs)
        with tracer.executing():
            return tracer.on_glue(_named(run, f"{function.__name__}.apply"), args, kwargs)


def _call_script(function: torch.jit.ScriptFunction, *args: Any, **kwargs: Any) -> Any:
    # Python does not call the operations of a script function one by one, so the mode would not see them.
    tracer, run = _following.tracer, partial(_script_function, function)
    if tracer is None or tracer._inside:
        return run(*args, **kwargs)  # type: ignore[call-arg]
    with tracer.paused(), tracer.executing():
        return tracer.on_glue(_named(run, str(function.name)), args, kwargs)


def _checkpointing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Bracket a non-reentrantly checkpointed region; backwards call ``function`` again."""
    tracer, watcher = _following.tracer, _following.watcher
    if watcher is not None:
        function = watcher.repeatable(function, calls_before=0)
    generator = _checkpointing_generator(function, *args, **kwargs)
    return generator if tracer is None or tracer._inside else tracer.region(generator)


# What is intercepted: owner, name, torch's own function, and its replacement.
_INTERCEPTED: tuple[tuple[Any, str, Any, Any], ...] = (
    (nn.Module, "__call__", call_module, _call),
    (nn.Module, "__setattr__", _assign_attribute, _assign),
    (torch.autograd.Function, "apply", _apply_function, classmethod(_apply)),  # type: ignore[arg-type]
    (torch.jit.ScriptFunction, "__call__", _script_function, _call_script),
    (checkpoint, CHECKPOINT_BRACKET, _checkpointing_generator, _checkpointing),
    (torch.autograd.graph, "disable_saved_tensors_hooks", disabling, disabling_others),
)


def _named(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    function.__name__ = name
    return function


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has compiled a module."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
