"""Tables of private names of other packages that this package uses; those of torch, and functions that use them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from torch import Tensor
from torch.autograd import graph
from torch.utils import checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# The function that brackets a region in torch.utils.checkpoint, which has another name in newer versions of torch.
CHECKPOINT_BRACKET = "_checkpoint_without_reentrant_generator"
CHECKPOINT_BRACKET += "_impl" if hasattr(checkpoint, f"{CHECKPOINT_BRACKET}_impl") else ""
GRADIENT_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor
REGISTRIES = ("_parameters", "_buffers", "_modules")  # of a module


@dataclass(frozen=True)
class Private:
    """A name of another package that is private, or that this package replaces.

    Attributes:
        name: full name, as ``package.module.Class.attribute``.
        why: what it is used for, or what replaces it.
        takes: names of the arguments that this package passes or receives, in order; others must have defaults. None:
            it is not called, or has no signature.
        versions: versions of the package that have the name; "": all that this package works with.
    """

    name: str
    why: str
    takes: str | None = None
    versions: str = ""


def problem(entry: Private) -> str | None:
    """Return how a name differs from its entry; None if it does not."""
    try:
        found = _find(entry.name)
    except AttributeError:
        return "does not exist"
    if entry.takes is None:
        return None
    if not callable(found):
        return "is not a function"
    wanted, given = entry.takes.split(), inspect.signature(found).parameters
    needed = {n for n, p in given.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if [n for n in given if n in wanted] == wanted and needed <= {"self", *wanted}:
        return None
    return f"takes ({', '.join(given)}) instead of ({', '.join(wanted)})"


def check_names(table: Iterable[Private], package: str, version: str) -> None:
    """Warn about names that differ from their entries, since code that needs them may fail or have no effect."""
    for entry in table:
        if SpecifierSet(entry.versions).contains(version, prereleases=True) and (found := problem(entry)) is not None:
            warnings.warn(
                f"{entry.name}, which lightning_avgpipe needs ({entry.why}), {found} in {package} {version}. Install a "
                "version that the package is tested with; with this one what needs it may go wrong",
                stacklevel=2,
            )


def _find(name: str) -> Any:
    """Return the object of a name; None for an attribute that only instances of a class have."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 1):
        if not hasattr(found, part):
            if isinstance(found, type) and any(part in _assigned(base) for base in found.__mro__):
                return None
            if hasattr(found, "__path__") and importlib.util.find_spec(".".join(parts[: i + 1])) is not None:
                importlib.import_module(".".join(parts[: i + 1]))
        found = getattr(found, part)
    return found


def _assigned(kind: type) -> set[str]:
    """Return the attributes of instances that a class declares, or that its methods use."""
    methods = [inspect.unwrap(member) for member in vars(kind).values() if isinstance(member, FunctionType)]
    return set(vars(kind).get("__annotations__", ())).union(*(method.__code__.co_names for method in methods))


_TENSORS = (
    Private("torch.Tensor._version", "counts changes in place"),
    Private("torch.Tensor._base", "the tensor that a view is of"),
    Private("torch.UntypedStorage._cdata", "tells memory apart, also where it has no address"),
    Private("torch.Tensor._backward_hooks", "hooks on gradients: parallel models share them, tied copies bear none"),
    Private("torch.Tensor._post_accumulate_grad_hooks", "the same"),
    Private("torch.Tensor._indices", "of a sparse tensor, also where some are there twice: to send and compare it"),
    Private("torch.Tensor._values", "the same"),
    Private("torch.Tensor._coalesced_", "changes no number, but counts as a change in place"),
    Private("torch.Tensor._make_wrapper_subclass", "absent values: a shape and a type without memory"),
    Private("torch._C._disabled_torch_function_impl", "absent values: what torch does of itself with subclasses"),
    Private("torch._C._swap_tensor_impl", "gives up and takes back parameters, which stay the same objects"),
    *(
        Private(f"torch._foreach_{name}", "one kernel for many tensors: averaging and norms")
        for name in ("add", "add_", "copy_", "div_", "lerp", "mul_", "norm", "sub", "zero_")
    ),
)
_MODULES = (
    *(Private(f"torch.nn.Module.{name}", "where a module's own tensors and parts lie") for name in REGISTRIES),
    Private("torch.nn.Module._non_persistent_buffers_set", "is not an attribute that a step assigns"),
    Private("torch.nn.Module._forward_hooks", "a unit with hooks is followed from within"),
    Private("torch.nn.Module._forward_pre_hooks", "the same"),
    Private("torch.nn.Module._compiled_call_impl", "whether a module is compiled, and must not be watched"),
    Private("torch.nn.Module.__call__", "replaced while calls of units are followed", "self"),
    Private("torch.nn.Module.__setattr__", "replaced while assignments of attributes are watched", "self name value"),
    Private("torch.nn.Linear.forward", "replaced in mixed precision: uses its weight and bias once", "self input"),
    Private("torch.nn.modules.dropout._DropoutNd", "draws in training, also if it is in evaluation mode now"),
    Private("torch.nn.modules.batchnorm._BatchNorm", "what depends on how a batch is split"),
    Private("torch.nn.RNNBase._flat_weights", "a list of parameters that recurrent layers build anew by themselves"),
    Private("torch.nn.RNNBase._flat_weight_refs", "references to them, the same"),
    Private("torch.nn.MultiheadAttention._reset_parameters", "initialises what has no reset_parameters", "self"),
)
_STEPS = (
    Private("torch._C.DisableTorchFunction", "what we do to tensors ourselves is not followed"),
    Private("torch.overrides._get_current_function_mode", "whether our mode is on top", ""),
    Private("torch.utils._python_dispatch.TorchDispatchMode", "sees operations inside of units"),
    Private("torch.utils._python_dispatch._disable_current_modes", "what fetches parameters is no part of a step", ""),
    Private("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "which modes a step has entered", ""),
    Private("torch.overrides._get_current_function_mode_stack", "the same", ""),
    Private("torch._ops.OpOverload._schema", "says what an operation writes into"),
    Private("torch.ops.aten._to_copy", "hands numbers on without looking at them"),
    Private("torch.ops.aten._unsafe_view", "the same"),
    Private("torch.random.default_generator", "where torch.manual_seed and its kind look for it: replaced"),
    Private("torch._standard_gamma", "draws random numbers"),
    Private("torch._sample_dirichlet", "the same"),
    Private("torch.utils._pytree.tree_flatten", "trees of batches, outputs and states", "tree is_leaf"),
    Private("torch.utils._pytree.register_pytree_node", "classes of batches", "cls flatten_fn unflatten_fn"),
    Private("torch.utils._pytree.SUPPORTED_NODES", "which classes it knows"),
)
_BACKWARDS = (
    Private("torch.autograd.Function.apply", "replaced while a step is followed: no torch function, so not seen else"),
    Private(f"torch.utils.checkpoint.{CHECKPOINT_BRACKET}", "replaced: regions are called again", "fn args kwargs"),
    Private("torch.utils.checkpoint._NoopSaveInputs", "how it keeps a region's inputs", versions="<2.9"),
    Private("torch.autograd.Variable._execution_engine", "whether a backward accumulates gradients; many backwards"),
    Private("torch._C._autograd._get_current_graph_task_keep_graph", "whether a backward retains its graph"),
    Private("torch._C._current_graph_task_id", "whether a backward runs"),
    Private("torch.autograd.graph.Node._input_metadata", "how many gradients come into a node"),
    Private("torch.autograd.graph.Node._sequence_nr", "what was computed before a unit's arguments"),
    Private("torch.autograd.graph.disable_saved_tensors_hooks", "replaced: hooks of ours step aside", "error_message"),
    Private("torch._C._autograd._top_saved_tensors_default_hooks", "whether hooks are ours", versions=">=2.8"),
    Private("torch._C._autograd._saved_tensors_hooks_is_enabled", "whether hooks are allowed"),
    Private("torch._C._len_torch_function_stack", "whether a mode of the user's is on"),
    Private("torch._C._len_torch_dispatch_stack", "the same"),
    Private("torch._C._functorch.is_functorch_wrapped_tensor", "what torch.func computes with"),
    Private("torch._C._functorch.get_unwrapped", "what it was given"),
    Private("torch._C._functorch.peek_interpreter_stack", "whether it computes"),
    Private("torch.autograd._profiler_enabled", "names actions only for a profiler that looks"),
)
_OPTIMIZERS = (
    Private("torch.optim.Optimizer._optimizer_step_pre_hooks", "do not run while steps are timed"),
    Private("torch.optim.Optimizer._optimizer_step_post_hooks", "the same"),
    Private(
        "torch.nn.utils.clip_grad._get_total_norm", "replaced by the norm over all stages",
        "tensors norm_type error_if_nonfinite foreach",
    ),
    Private("torch.amp.GradScaler._scale", "whether it knows its device"),
    Private("torch.amp.GradScaler._lazy_init_scale_growth_tracker", "tells it its device", "dev"),
    Private(
        "torch.amp.GradScaler._unscale_grads_", "replaced by one that all stages agree on",
        "optimizer inv_scale found_inf allow_fp16",
    ),
)  # fmt: skip
_DISTRIBUTED = (
    Private("torch.distributed.distributed_c10d._get_default_store", "where processes meet", ""),
    Private("torch.distributed.distributed_c10d._get_default_group", "replaced: in a step a process is alone", ""),
    Private("torch.distributed.distributed_c10d._rank_not_in_group", "replaced: the same", "group"),
    Private("torch.distributed.distributed_c10d._world", "the same: its entries of groups"),
    Private("torch.distributed.distributed_c10d._World.pg_map", "the same"),
    Private("torch.distributed.distributed_c10d._World.pg_group_ranks", "the same"),
    Private("torch.distributed.ProcessGroup._get_backend", "network interfaces of torch's own group; what is aborted"),
    Private("torch.distributed.ProcessGroupGloo._Options", "pairs of processes that share one listening socket"),
    Private("torch.distributed.ProcessGroupGloo._Options._devices", "the same"),
    Private("torch.distributed.ProcessGroupGloo._Options._threads", "the same"),
    Private("torch.distributed.ProcessGroupGloo._set_default_timeout", "collectives have no limit of their own"),
    Private(
        "torch.distributed.checkpoint.state_dict_loader._load_state_dict", "reads shards in one process",
        "state_dict storage_reader no_dist planner",
    ),
    Private("torch.distributed.checkpoint.default_planner._EmptyStateDictLoadPlanner", "some of them", "keys"),
)  # fmt: skip

_DATA = (
    Private("torch.utils.data.dataloader._BaseDataLoaderIter", "whether a step takes batches by itself", "loader"),
)

_COMPILER = (
    Private("torch._dynamo.OptimizedModule._orig_mod", "whether a module is compiled"),
    Private("torch._dynamo.utils.counters", "whether anything was compiled"),
    Private("torch._dynamo.exc.TorchDynamoException", "whether an error is the compiler's or the user's"),
)

NAMES = (*_TENSORS, *_MODULES, *_STEPS, *_BACKWARDS, *_OPTIMIZERS, *_DISTRIBUTED, *_DATA, *_COMPILER)

_COALESCED = torch.ops.aten._coalesced_.default  # sets the flag that each index of a sparse tensor occurs once

untraced = torch._C.DisableTorchFunction  # the context in which torch functions are not followed


def check() -> None:
    """Warn about private names that this version of torch does not have, or has with other arguments."""
    later = () if "torch._dynamo" in sys.modules else _COMPILER  # importing torch._dynamo takes seconds
    check_names((name for name in NAMES if name not in later), "torch", torch.__version__)


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
    """Return whether an error is one of ``torch.compile`` itself, not of the compiled code."""
    return "torch._dynamo" in sys.modules and isinstance(error, torch._dynamo.exc.TorchDynamoException)


def modes(device: torch.device) -> tuple[Any, ...]:
    """Return the modes of this thread and process that decide, besides its arguments, how an operation runs."""
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

    Not among them are those of torch that only choose a device, or what a checkpointed region keeps.
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
    """Return :func:`storage_id` of a tensor itself, also where torch functions would see another one in its place."""
    with untraced():
        return storage_id(tensor)


def is_mutable(func: Any) -> bool:
    """Return whether an operation, as seen by a dispatch mode, writes values into its arguments."""
    return bool(func._schema.is_mutable) and func is not _COALESCED


def targets(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the tensors that an operation writes into."""
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
# ``torch.func.grad``, ``jacrev`` and similar functions refuse to work where saved-tensor hooks are active. A model that
# uses them inside its modules has set no hooks there, so the hooks of this package are removed while these functions
# compute.


class _Active(threading.local):
    def __init__(self) -> None:
        self.hooks: list[SavedHooks] = []


_active = _Active()
disabling = graph.disable_saved_tensors_hooks


class SavedHooks(graph.saved_tensors_hooks):
    """Saved-tensor hooks with the arguments of torch's class, which do nothing where hooks are not allowed."""

    def __enter__(self) -> None:
        self._acts = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        if self._acts:
            super().__enter__()
            _active.hooks.append(self)

    def __exit__(self, *error: object) -> None:
        if self._acts:
            _active.hooks.pop()
            super().__exit__(*error)


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
