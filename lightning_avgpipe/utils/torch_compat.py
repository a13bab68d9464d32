"""Functions around parts of torch that are not stable: private names, and differences between versions."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import graph
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# The function of torch.utils.checkpoint that brackets a region; newer versions of torch have another name for it.
CHECKPOINT_BRACKET = "_checkpoint_without_reentrant_generator"
CHECKPOINT_BRACKET += "_impl" if hasattr(checkpoint, f"{CHECKPOINT_BRACKET}_impl") else ""
GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor
REGISTRIES = ("_parameters", "_buffers", "_modules")  # of a module

_COALESCED = torch.ops.aten._coalesced_.default  # sets the flag that each index of a sparse tensor occurs once

untraced = torch._C.DisableTorchFunction  # a context in which torch function modes do not see calls


def share_gradient_hooks(parameter: torch.Tensor, leaf: torch.Tensor) -> None:
    """Make the hooks on a parameter's gradient act on the gradient of another leaf as well."""
    for name in GRADIENT_HOOKS:
        hooks = getattr(parameter, name, None)
        if hooks and getattr(leaf, name, None) is not hooks:
            setattr(leaf, name, hooks)


def compiled_graphs() -> int:
    """Return how many graphs ``torch.compile`` has compiled in this process, including those of libraries."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def forget_compiled() -> None:
    """Drop everything that ``torch.compile`` has compiled in this process, so that it is compiled anew."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def is_of_compiler(error: Exception) -> bool:
    """Return whether an error was raised by ``torch.compile`` itself, not by the compiled code."""
    return "torch._dynamo" in sys.modules and isinstance(error, torch._dynamo.exc.TorchDynamoException)


def modes(device: torch.device) -> tuple[Any, ...]:
    """Return the modes of this thread and process that, like its arguments, decide how an operation runs."""
    kernels = torch.backends.cuda
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", device.type)),
        torch.get_default_dtype(),
        (kernels.math_sdp_enabled(), kernels.flash_sdp_enabled(), kernels.mem_efficient_sdp_enabled()),
        num_modes(),
        hooks(True),
    )


def num_modes() -> tuple[int, int]:
    """Return the numbers of modes of this thread that see torch functions, and that see dispatched operations."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def operation_modes() -> list[Any]:
    """Return the modes of this thread that see each operation, such as ``FlopCounterMode``.

    Modes of torch that only choose a device, or what a checkpointed region keeps, are left out.
    """
    found = [*torch.overrides._get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [mode for mode in found if type(mode).__module__ not in ("torch.utils._device", "torch.utils.checkpoint")]


def version_of(tensor: Tensor | None) -> int:
    """Return how often a tensor, including its views and base, was changed in place."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def is_transformed(tensor: Tensor) -> bool:
    """Return whether a tensor is a wrapper of ``torch.vmap`` or ``torch.func``, which is valid only within them."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_transforming() -> bool:
    """Return whether ``torch.vmap`` or a transform of ``torch.func`` is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def untransformed(tensor: Tensor) -> Tensor:
    """Return the tensor that ``torch.vmap`` or ``torch.func`` has wrapped."""
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of the memory that a tensor shares with its views."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse tensors and the like have none
        return id(tensor)


def address(tensor: Tensor) -> int:
    """Return :func:`storage_id` of the tensor itself, even where a mode would replace it by a stand-in."""
    with untraced():
        return storage_id(tensor)


def is_mutable(func: Any) -> bool:
    """Return whether an operation, as seen by a dispatch mode, writes values into its arguments."""
    return bool(func._schema.is_mutable) and func is not _COALESCED


def targets(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors into which an operation writes."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        for tensor in given if isinstance(given, (list, tuple)) else (given,):
            if isinstance(tensor, Tensor):
                yield tensor


def default_store() -> dist.Store:
    """Return the store of the default process group of ``torch.distributed``."""
    return dist.distributed_c10d._get_default_store()


# -- saved-tensor hooks, which are removed while torch allows none -----------------------------------------------------
#
# ``torch.func.grad``, ``jacrev`` and similar functions raise an error if saved-tensor hooks are active. A model that
# calls them has not set such hooks itself, so the hooks of this package are removed while these functions compute.


class _Active(threading.local):
    def __init__(self) -> None:
        self.hooks: list[SavedHooks] = []


_active = _Active()
disabling = graph.disable_saved_tensors_hooks


class SavedHooks(graph.saved_tensors_hooks):
    """Saved-tensor hooks like torch's class, with the same arguments, that do nothing where hooks are not allowed."""

    def __enter__(self) -> None:
        self._acts = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        if self._acts:
            super().__enter__()
            _active.hooks.append(self)

    def __exit__(self, *error: object) -> None:
        if self._acts:
            _active.hooks.pop()
            super().__exit__(*error)


def innermost_hooks() -> SavedHooks | None:
    """Return the hooks of this package that were entered last in this thread; None if there are none."""
    return _active.hooks[-1] if _active.hooks else None


@contextlib.contextmanager
def disabling_others(error_message: str) -> Iterator[None]:
    """Replace torch's ``disable_saved_tensors_hooks``: remove this package's hooks; other hooks stay an error."""
    aside: list[SavedHooks] = []
    with contextlib.ExitStack() as back:
        while _active.hooks and _is_on_top(_active.hooks[-1]):
            aside.append(_active.hooks[-1])
            aside[-1].__exit__()
            back.callback(aside[-1].__enter__)
        with disabling(error_message):
            yield


def _is_on_top(hooks: SavedHooks) -> bool:
    newest = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # missing in torch 2.6 and 2.7
    top = None if newest is None else newest(False)
    return top is not None and top[0] == hooks.pack_hook
