"""Hooks on processes that have a part of the weights: what needs the other weights raises, and is never left out.

A weight of another stage is on the meta device: it has no numbers, and most operations that need them raise an error.
These would fail silently, so within hooks they

- raise: to write into a tensor from one without numbers, which torch skips (``teacher.add_(student)``); to draw random
  numbers for a weight after one without numbers, which has not drawn its own; to save or send a tensor without numbers;
  to show one in TensorBoard, which would get a random number;
- work: a gradient of another stage exists, without numbers, since None would look as if nothing used the weight; and
  tensors that are made on the device of a weight (``next(self.parameters()).device``) are on this process's device.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.capture.tracer import StepTracer
from lightning_avgpipe.errors import AbsentValueError
from lightning_avgpipe.strategy import hooks
from lightning_avgpipe.strategy.state_of_stages import StateOfSteps
from lightning_avgpipe.utils.device import all_generators
from lightning_avgpipe.utils.lightning import is_overridden, pl
from lightning_avgpipe.utils.patching import Replacement, all_replaced, replaced
from lightning_avgpipe.utils.source import raising_line, source_line
from lightning_avgpipe.utils.tensors import tensor_arguments
from lightning_avgpipe.utils.torch_compat import is_mutable, targets

_META = torch.device("meta")
_SHOWING = ("torch.utils.tensorboard.summary", "torch.utils.tensorboard.writer")


class AbsentWeights:
    """Wraps the user's hooks of one run.

    Args:
        trainer: trainer of the module that has the hooks.
        state: sends what the code of a step changes before a hook reads it; None: every process has it anyway.
    """

    def __init__(self, trainer: pl.Trainer, state: StateOfSteps | None) -> None:
        self._trainer, self._state = trainer, state
        self._running: tuple[Any, str] | None = None  # owner and name of the hook that runs
        self._mode: _NoSilentWrites | None = None  # None outside of hooks
        self._gradients: dict[int, Tensor] = {}  # gradients without numbers, by identity of the parameter
        self._shown: list[torch.nn.Parameter] = []  # parameters that have one now

    def replacements(self) -> Iterator[Replacement]:
        """Yield the wrapped hooks of the module, and of callbacks that are not Lightning's."""
        of_schedulers = self._trainer.lightning_module, "lr_scheduler_step"  # may call functions of the user
        found = (*hooks.users_hooks(self._trainer, hooks.SEEING_WEIGHTS), of_schedulers)
        # by identity, since a callback that is a data class has no hash
        for owner, name in {(id(owner), name): (owner, name) for owner, name in found}.values():
            base = pl.Callback if isinstance(owner, pl.Callback) else pl.LightningModule
            # Lightning would call a wrapped hook that is not overridden, since it looks through one wrapper only
            if is_overridden(name, owner, base) or name == "lr_scheduler_step":
                yield owner, name, self._around(owner, name)

    @contextlib.contextmanager
    def suspended(self) -> Iterator[bool]:
        """Run an iteration or optimizer step within this context as outside of hooks; give whether a hook called it."""
        mode, self._mode = self._mode, None
        self._hide()
        try:
            with contextlib.nullcontext() if mode is None else mode.lifted():
                yield mode is not None
        finally:
            self._mode = mode
        if self._running is not None and self._state is not None:
            self._state.send_changes(*self._running)

    def show_gradients(self) -> None:
        """Give the weights of other processes gradients without numbers."""
        for p in self._trainer.lightning_module.parameters():
            if p.is_meta and p.requires_grad and p.grad is None:
                p.grad = self._gradients.setdefault(id(p), torch.empty_like(p, requires_grad=False))
                self._shown.append(p)

    def _may_have_gradients(self) -> bool:
        """Return whether there may be gradients; a process without trained weights guesses from the step count."""
        own = [p for p in self._trainer.lightning_module.parameters() if p.requires_grad and not p.is_meta]
        return any(p.grad is not None for p in own) if own else self._trainer.global_step > 0

    def _hide(self) -> None:
        for p in self._shown:
            p.grad = None
        self._shown.clear()

    def _around(self, owner: Any, name: str) -> Callable[..., Any]:
        hook = getattr(owner, name)

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._mode is not None:
                return hook(*args, **kwargs)
            if StepTracer.current() is not None:  # steps run whole, and processes share the weights that hooks use
                with _refusing_exports():
                    return hook(*args, **kwargs)
            if self._state is not None:
                self._state.send_changes(owner, name)
            if name in hooks.GRADIENTS or (self._trainer.training and self._may_have_gradients()):
                self.show_gradients()
            optimizers = self._trainer.optimizers if name == "optimizer_step" or self._shown else ()
            around, self._running = self._running, (owner, name)
            self._mode = _NoSilentWrites(self._trainer.strategy.root_device)
            try:
                with contextlib.ExitStack() as undo:
                    undo.enter_context(self._mode)
                    undo.enter_context(_refusing_exports())
                    for optimizer in optimizers:  # must not step parameters without numbers
                        undo.callback(optimizer.register_step_pre_hook(lambda *_: self._hide()).remove)
                    return hook(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                if "meta" not in str(error) or isinstance(error, AbsentValueError):  # the latter explains itself
                    raise
                raise _absent(f"{type(owner).__name__}.{name} at {raising_line(error)} needs the numbers of") from error
            finally:
                self._mode, self._running = None, around
                self._hide()

        return run


class _NoSilentWrites(TorchDispatchMode):
    """A context that refuses operations that torch accepts although a tensor has no numbers.

    These write from it into another tensor, draw random numbers for another one that it should have drawn, or compute
    with it and another one: some operations then return uninitialised memory on the device of the other.

    Args:
        device: device for new tensors that were requested on the device of such a tensor.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._passed: dict[torch.Generator, Tensor] = {}  # states of generators that should have drawn for one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_taken = kwargs.get("device") == _META and torch.get_default_device() != _META
        if is_taken and not any(tensor.is_meta for tensor in tensor_arguments(args, kwargs)):
            kwargs = {**kwargs, "device": self._device}
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._check_draw(func, args, kwargs)
        if is_mutable(func) and _is_left_out(list(targets(func, args, kwargs)), (*args, *kwargs.values())):
            name = func._schema.name.removeprefix("aten::")
            raise _absent(f"{name}() at {source_line()} in a hook writes what it computes from")
        result = func(*args, **kwargs)
        if _is_made_up(func, tensor_arguments(args, kwargs), result):
            name = func._schema.name.removeprefix("aten::")
            raise _absent(f"{name}() at {source_line()} in a hook computes with")
        return result

    def _check_draw(self, func: Any, args: Any, kwargs: Any) -> None:
        given = kwargs.get("generator")
        generators = all_generators() if given is None else [given]
        tensors = tensor_arguments(args, kwargs)
        if any(tensor.is_meta for tensor in tensors):
            self._passed |= {generator: generator.get_state() for generator in generators}
        elif tensors and any(g in self._passed and torch.equal(self._passed[g], g.get_state()) for g in generators):
            name = func._schema.name.removeprefix("aten::")
            raise AbsentValueError(
                f"{name}() at {source_line()} in a hook draws random numbers that on one device a weight of another "
                "stage would have drawn before, which has no numbers on this process. Seed before each weight or "
                "module (torch.manual_seed), draw for weights in on_train_start, or give each a generator of its own"
            )

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Leave this mode, which must be the innermost one, within this context."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


@contextlib.contextmanager
def _refusing_exports() -> Iterator[None]:
    """Refuse, in this thread and context, to pickle (``torch.save``) or show (TensorBoard) a tensor without numbers."""
    reduce, thread = Tensor.__reduce_ex__, threading.get_ident()

    def reduce_ex(tensor: Tensor, protocol: Any) -> Any:
        if type(tensor) is Tensor and tensor.is_meta and threading.get_ident() == thread:
            raise AbsentValueError(
                f"a hook pickles, at {source_line()}, a weight of another stage, whose numbers this process does not "
                "have. Call trainer.save_checkpoint() on every process, which writes the weights of all stages, or "
                "save after trainer.fit() has returned, when every process has them"
            )
        return reduce(tensor, protocol)

    showing = filter(None, map(sys.modules.get, _SHOWING))
    shown = ((module, "make_np", _with_numbers(module.make_np)) for module in showing)
    with replaced(Tensor, "__reduce_ex__", reduce_ex), all_replaced(shown):
        yield


def _with_numbers(make_np: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(shown: Any) -> Any:
        if isinstance(shown, Tensor) and shown.is_meta:
            raise _absent(f"a hook shows in TensorBoard, at {source_line()},")
        return make_np(shown)

    return run


def _absent(what: str) -> AbsentValueError:
    return AbsentValueError(
        f"{what} a weight or gradient of another stage, which this process does not have. Skip tensors with is_meta if "
        "each can be treated by itself, and keep what is computed from one in a buffer of its own module (of other "
        "buffers and attributes, rank 0's are kept). For norms use torch.nn.utils.clip_grad_norm_ or Lightning's "
        "grad_norm, and for averages of weights its EMAWeightAveraging or WeightAveraging, which include all stages. "
        "Call the whole model in validation_step. Update weights from others (a teacher that follows a student) in "
        "training_step, or keep both on one stage with split_points"
    )


def _is_made_up(func: Any, given: list[Tensor], result: Any) -> bool:
    """Return whether an operation returns a new tensor with numbers, although one of its arguments has none.

    ``_foreach`` operations except norms never do: each item of the result depends on one item of the arguments.
    """
    schema, known = func._schema, {id(tensor) for tensor in given}
    if not any(tensor.is_meta for tensor in given) or (
        schema.name.startswith("aten::_foreach_") and schema.name != "aten::_foreach_norm"
    ):
        return False
    if any(argument.name == "device" for argument in schema.arguments):  # such as zeros_like(weight, device="cpu")
        return False
    return any(not tensor.is_meta and id(tensor) not in known for tensor in tensor_arguments(result))


def _is_left_out(written: list[Tensor], given: tuple[Any, ...]) -> bool:
    """Return whether a tensor with numbers would be written into from one without; lists are compared item by item."""
    for one in given:
        items = list(one) if isinstance(one, (list, tuple)) else [one] * len(written)
        pairs = zip(written, items, strict=False)
        if any(isinstance(item, Tensor) and item.is_meta and not target.is_meta for target, item in pairs):
            return True
    return False
