"""Execute units: compiled, with autocast's casts reused, and on a device stream of their pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.recompute_policy import Recompute
from lightning_avgpipe.utils.device import DevicePort
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.torch_compat import is_of_compiler, is_transforming, untraced, version_of

Looks = TypeVar("Looks", bound=Callable[..., Any])

_NOTHING = contextlib.nullcontext()
_SHOWN = 200  # characters of a compiler's message that are shown


class Compiler:
    """A cache of compiled units, which compiles each when it is first called.

    ::

        training_step            is followed as without a compiler: values are sent, logs are collected
          blocks.3(x)            a unit: its forward is compiled, with all that it calls
          x + residual           glue runs as it is

    Units of one class share compiled code, and so do parallel models, whose parameters are arguments of the code.

    Args:
        options: keyword arguments of ``torch.compile``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._forwards: dict[int, Callable[..., Any]] = {}

    def compiled(self, name: str, module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that executes a unit with its forward compiled and its hooks as they are.

        Args:
            name: path of the unit.
            module: the unit.
            run: executes the unit, with its hooks; only its forward if the unit has forward hooks.
        """
        if isinstance(module, torch.jit.ScriptModule):
            return run
        if module._forward_hooks:
            return self._forward(name, module, run)
        forward = self._forward(name, module, module.forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            with replaced(module, "forward", forward):
                return run(*args, **kwargs)

        return call

    def _forward(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        if id(module) not in self._forwards:
            compiled = torch.compile(forward, **self._options)

            def call(*args: Any, **kwargs: Any) -> Any:
                try:
                    with untraced():  # else other function modes on the stack would cause a recompilation
                        return compiled(*args, **kwargs)
                except Exception as error:
                    if not is_of_compiler(error):  # the user's own
                        raise
                    reason = " ".join(str(error).split())[:_SHOWN]
                    raise ConfigurationError(
                        f"the unit '{name}' cannot be compiled (compile={self._options or True!r}): {reason}. Use "
                        "another backend (compile={'backend': 'aot_eager'}), exclude the code that fails with "
                        "torch.compiler.disable, or use compile=False"
                    ) from error

            self._forwards[id(module)] = call
        return self._forwards[id(module)]


@dataclass(frozen=True)
class Execution:
    """Options for the execution of units by stages.

    Attributes:
        recompute: chooses the stages or units whose forward is repeated for the backward.
        compiler: compiler for units; None: units run uncompiled.
        streams: whether each of several pipelines has a device stream of its own.
        static: whether a micro-batch may run a flat program that was written while another one was followed:
            ``"auto"``: one of the same iteration, if the step has no side effects; ``True``: also one of an earlier
            iteration; ``False``: never.
        interrupted: whether hooks of the user, which may change weights, run between micro-batches.
    """

    recompute: Recompute = Recompute()  # noqa: RUF009
    compiler: Compiler | None = None
    streams: bool = False
    static: bool | Literal["auto"] = "auto"
    interrupted: bool = False


class _Cast(NamedTuple):
    """A weight, its memory and version when it was cast, and the result of the cast."""

    weight: Tensor
    memory: tuple[int, int]
    low: Tensor


class Casts:
    """A cache of autocast's casts of the weights of linear layers: one cast per iteration, not per micro-batch.

    ::

        autocast     W -> bf16 W -> F0      W -> bf16 W -> F1      each stash keeps a copy of its own
        here         W -> bf16 W -> F0, F1

    The cast is a node of autograd's graph that saves nothing. So the backwards of several micro-batches may run through
    it, and each passes its gradient on to the weight as usual. Within a forward, only the first use of a weight gets
    the kept cast: gradients of two uses of one cast would be summed in the lower precision. Autocast, whose cache
    Lightning turns off, casts at each use, so it sums them in the weight's precision. So gradients are bitwise equal to
    those without this cache.

    If the first forward of a step casts nothing, later ones are assumed to cast nothing. They run without this cache,
    since replacing ``nn.Linear.forward`` empties Python's method caches, which takes a tenth of a small stage's time.
    """

    def __init__(self) -> None:
        self._kept: dict[int, _Cast] = {}
        self._used: set[int] = set()  # weights that the running forward has used
        self._casting: bool | None = None  # whether forwards cast; None: none has run

    def reused(self) -> contextlib.AbstractContextManager[None]:
        """Run a forward that will have a backward within this context, in which linear layers reuse casts."""
        return _NOTHING if self._casting is False else self._reused()

    @contextlib.contextmanager
    def _reused(self) -> Iterator[None]:
        self._used.clear()
        as_written = nn.Linear.forward

        def forward(module: nn.Linear, x: Tensor) -> Tensor:
            kind = x.device.type
            casts = torch.is_autocast_enabled(kind) and not torch.is_autocast_cache_enabled()
            if not casts or not torch.is_grad_enabled() or is_transforming():
                return as_written(module, x)
            self._casting = True
            dtype = torch.get_autocast_dtype(kind)
            return F.linear(x, *(None if t is None else self._cast(t, dtype) for t in (module.weight, module.bias)))

        with replaced(nn.Linear, "forward", forward):
            yield
            self._casting = bool(self._casting)

    def _cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        single = type(weight) is nn.Parameter and weight.dtype is torch.float32 and weight.requires_grad
        if not single or id(weight) in self._used:
            return weight  # autocast casts it
        self._used.add(id(weight))
        memory = (weight.data_ptr(), version_of(weight))
        kept = self._kept.get(id(weight))
        if kept is None or kept.memory != memory or kept.low.dtype is not dtype:
            kept = self._kept[id(weight)] = _Cast(weight, memory, weight.to(dtype))
        return kept.low

    def clear(self) -> None:
        """Forget all casts, since the weights will change."""
        self._kept.clear()


def stays_on_stream(function: Looks) -> Looks:
    """Mark a function that steps call to look at values, since it uses nothing that pipelines share."""
    function.stays_on_stream = True  # type: ignore[attr-defined]
    return function


class OwnStream:
    """The device stream of one of several parallel pipelines, so that kernels of pipelines run concurrently.

    ::

        of the caller   batches, models -+                      metric +          +- optimizers, averaging
        of pipeline 0                    +- F0 F1 .......... F2 ......+- B0 B1 ---+
        of pipeline 1                    +- F0 F1 B0 F2 B1 B2 --------------------+

    A pipeline's stream starts after all work queued on the caller's stream, which waits for it when the iteration ends.
    Work that pipelines share, such as the update of a metric object, stays on the caller's stream.

    Args:
        port: port of the device, which must have streams.
    """

    def __init__(self, port: DevicePort) -> None:
        self._port = port
        self._stream = port.new_stream(urgent=False)
        self._callers: Any = None

    def begin(self) -> None:
        """Begin an iteration after the work queued on the caller's stream."""
        self._callers = self._port.current_stream()
        self._stream.wait_event(self._port.event())

    def entered(self) -> contextlib.AbstractContextManager[Any]:
        """Run work of the pipeline within this context."""
        return self._port.on_stream(self._stream)

    @contextlib.contextmanager
    def on_callers_stream(self) -> Iterator[None]:
        """Run work on the caller's stream within this context, between work of the pipeline."""
        if self._callers is None:  # the pipeline got its stream during an iteration
            yield
            return
        self._callers.wait_event(self._stream.record_event())
        with self._port.on_stream(self._callers):
            yield
        self._stream.wait_event(self._callers.record_event())

    def call(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that looks at values, on the caller's stream unless :func:`stays_on_stream` marks it."""
        with contextlib.nullcontext() if getattr(run, "stays_on_stream", False) else self.on_callers_stream():
            return run(*args, **kwargs)

    def end(self) -> None:
        """End the iteration: later work on the current stream waits for the pipeline."""
        self._port.current_stream().wait_event(self._stream.record_event())
