"""Common writes: what code for a micro-batch does to what all micro-batches share, they do together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.capture.tracer import CallWatcher, function_name, tensor_arguments, watching
from lightning_avgpipe.engine.common_gradients import CommonGradients
from lightning_avgpipe.engine.common_tensors import CommonTensors

_Tensor: Any = Tensor  # whose descriptors are not typed
_READ = _Tensor.grad.__get__
_WRITES = frozenset((
    _Tensor.grad.__set__, _Tensor.grad.__delete__, _Tensor.data.__set__, _Tensor.requires_grad.__set__,
    _Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook,
))  # fmt: skip


class CommonWrites(TorchFunctionMode, CallWatcher):
    """In the thread of a micro-batch writes to common tensors are meetings.

    So a gradient is read when it is that of the whole batch, and a target network follows once. What submodules do to
    their buffers when they are called each micro-batch does for itself, as statistics are.

    Args:
        common: gradients.
        tensors: that micro-batches have in common.
        root: the module whose step runs; its calls are no submodule's.
    """

    def __init__(self, common: CommonGradients, tensors: CommonTensors, root: nn.Module) -> None:
        super().__init__()
        self._common = common
        self._tensors = tensors
        self._root = root
        self._depth = 0  # of calls of submodules

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context, of the thread."""
        with watching(self), self:
            yield

    def enter(self, module: nn.Module) -> None:
        self._depth += module is not self._root

    def leave(self, module: nn.Module) -> None:
        self._depth -= module is not self._root

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def run() -> Any:
            return func(*args, **kwargs)

        if self._common.abreast.index is None:
            return run()
        if func == _READ or func in _WRITES:
            known = self._tensors.parameters.get(id(args[0]))
            if known is None:
                return run()
            what = f"{function_name(func).partition('.')[0]} of {known[1]}"
            if func == _READ:
                return self._common.read(what, run)
            written = self._common.meet(what, run, args[1:])
            self._tensors.moved()
            return written
        name = self._tensors.name(tensor_arguments(*_written(func, args, kwargs)), parameters_only=self._depth > 0)
        if name is None:
            return run()
        return self._common.meet(f"{function_name(func)} of {name}", run, (args, kwargs))


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments of a torch function that it writes into."""
    out = [kwargs["out"]] if kwargs.get("out") is not None else []
    if func in (F.embedding, F.embedding_bag) and (args[3:4] or (kwargs.get("max_norm"),))[0] is not None:
        return [args[1]]
    return [*args[:1], *out] if _is_in_place(func) else out


def _is_in_place(func: Any) -> bool:
    name = function_name(func)
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__invert__", "__int__"))
    return name.endswith("_")
