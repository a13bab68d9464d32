"""Common writes: what code for a micro-batch does to what all micro-batches share, they do together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_avgpipe.capture.tracer import function_name, tensor_arguments
from lightning_avgpipe.engine.common_gradients import CommonGradients
from lightning_avgpipe.utils.torch_compat import address

_Tensor: Any = Tensor  # whose descriptors are not typed
_READ = _Tensor.grad.__get__
_WRITES = frozenset((
    _Tensor.grad.__set__, _Tensor.grad.__delete__, _Tensor.data.__set__, _Tensor.requires_grad.__set__,
    _Tensor.register_hook, _Tensor.register_post_accumulate_grad_hook,
))  # fmt: skip


class CommonWrites(TorchFunctionMode):
    """Within this context, in the thread of a micro-batch, writes to parameters and their gradients are meetings.

    So a gradient is read when it is that of the whole batch, and a target network follows once. Buffers are each
    micro-batch's to change, as statistics are.

    Args:
        common: gradients.
        module: whose parameters they are.
    """

    def __init__(self, common: CommonGradients, module: nn.Module) -> None:
        super().__init__()
        self._common = common
        self._parameters = {id(p): (p, name) for name, p in module.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}

        def run() -> Any:
            return func(*args, **kwargs)

        if self._common.abreast.index is None:
            return run()
        if func == _READ or func in _WRITES:
            known = self._parameters.get(id(args[0]))
            if known is None:
                return run()
            what = f"{function_name(func).partition('.')[0]} of '{known[1]}'"
            return self._common.read(what, run) if func == _READ else self._common.meet(what, run, args[1:])
        names = self._names(tensor_arguments(*_written(func, args, kwargs)))
        if not names:
            return run()
        return self._common.meet(f"{function_name(func)} of {names[0]}", run, (args, kwargs))

    def _names(self, tensors: Sequence[Tensor]) -> list[str]:
        if not tensors:
            return []
        places = {address(tensor) for tensor in tensors}
        found = [f"'{name}'" for p, name in self._parameters.values() if address(p) in places]
        gradients = [(p.grad, name) for p, name in self._parameters.values() if p.grad is not None]
        return found + [f"the gradient of '{name}'" for g, name in gradients if address(g) in places]


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments of a torch function that it writes into."""
    out = [kwargs["out"]] if kwargs.get("out") is not None else []
    if func in (F.embedding, F.embedding_bag) and (args[3:4] or (kwargs.get("max_norm"),))[0] is not None:
        return [args[1]]
    return [*args[:1], *out] if _is_in_place(func) else out


def _is_in_place(func: Any) -> bool:
    name = function_name(func)
    if name.startswith("__") and name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__invert__", "__int__"))
    return name.endswith("_")
