"""Ownership: which processes hold a parameter or buffer, and how a process gives up its contents or gets them back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.errors import AvgPipeError, ConfigurationError
from lightning_avgpipe.utils.names import nearest

# Full name -> the ranks that hold it; the first one answers for it: its contents count, for example in checkpoints.
Owners = Mapping[str, tuple[int, ...]]

# Up to this size, memory is left to Python's own garbage collection: an explicit one takes a quarter of a second if
# much has been imported, which is as long as many steps of such a small model.
FEW_BYTES = 16 * 1024**2
# Parts of error messages: torch's for computing on the meta device, and Python's for a gradient that is None.
_SAID = ("meta", "'NoneType' object")


def owners_of(
    module: nn.Module, stages_of: Mapping[str, Sequence[int]], hosts: Callable[[int], Sequence[int]], world_size: int
) -> dict[str, tuple[int, ...]]:
    """Return which ranks are to hold each parameter, and the current contents of each buffer.

    A buffer that no step changes belongs to its unit, since hooks may change it there together with what the step
    changes (the loads of experts, and their biases).

    Args:
        module: whole module.
        stages_of: stages of each unit, parameter and changed buffer, the stage that answers for it first. All processes
            hold parameters that are missing, which no stage uses, and buffers that are missing and in no unit.
        hosts: returns the ranks that host a stage.
        world_size: number of processes.
    """
    everybody = tuple(range(world_size))
    found = {name: stages_of.get(name, ()) for name, _ in module.named_parameters()}
    found |= {name: stages_of.get(nearest(name, stages_of), ()) for name, _ in module.named_buffers()}
    ranks = {name: [rank for stage in stages for rank in hosts(stage)] for name, stages in found.items()}
    return {name: tuple(dict.fromkeys(ranks[name])) or everybody for name in found}


def owner_by_name(module: nn.Module, owners: Owners) -> dict[str, int]:
    """Return the rank that answers for each parameter and buffer with owners, by every name that the tensor has."""
    canonical = {id(p): name for name, p in module.named_parameters()}
    canonical |= {id(b): name for name, b in module.named_buffers()}
    everything = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    names = ((name, canonical[id(tensor)]) for name, tensor in everything)
    return {name: owners[own][0] for name, own in names if own in owners}


def nothing_to_save(name: str) -> ConfigurationError:
    """Return an error that says that no process has contents for a parameter yet."""
    return ConfigurationError(
        f"'{name}' is on the meta device on all ranks, so there is nothing to save; run a batch first"
    )


def give_up(module: nn.Module, names: Iterable[str]) -> None:
    """Move parameters to the meta device, without gradients. The objects stay, so optimizers still refer to them."""
    parameters = dict(module.named_parameters())
    chosen = {name: parameters[name] for name in names if not parameters[name].is_meta}
    much = sum(parameter.nbytes for parameter in chosen.values()) > FEW_BYTES
    if much:
        gc.collect()  # an autograd graph in a reference cycle would keep the contents
    for name, parameter in chosen.items():
        parameter.grad = None
        vacate(parameter)
        _register_in_script(module, name, parameter)
    if much:
        return_freed()


def fill_parameter(module: nn.Module, name: str, parameter: Tensor, contents: Tensor) -> None:
    """Give contents to a parameter of a module if it has none, without changing the object."""
    fill(parameter, contents)
    _register_in_script(module, name, parameter)


def _register_in_script(module: nn.Module, name: str, parameter: Tensor) -> None:
    """Register a parameter again if its module is of TorchScript, which refers to the contents and not to the object.

    Otherwise it would have its former contents, and further calls of ``named_parameters`` would return other objects.
    """
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(owner, torch.jit.ScriptModule):
        setattr(owner, leaf, parameter)


def fill(parameter: Tensor, contents: Tensor) -> None:
    """Give contents to a parameter or tensor that has none, without changing the object."""
    if parameter.is_meta:
        _replace(parameter, contents)


def vacate(tensor: Tensor) -> None:
    """Move a tensor to the meta device, without changing the object."""
    _replace(tensor, torch.empty_like(tensor, device="meta"))


def to_host(module: nn.Module) -> None:
    """Move parameters, gradients and buffers that have contents to the host."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_meta:
            _move(tensor, torch.device("cpu"))


@contextlib.contextmanager
def on_host(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Move parameters, gradients and buffers to the host within this context, and back to their devices after it."""
    moved = [(tensor, tensor.device) for tensor in tensors if not tensor.is_cpu and not tensor.is_meta]
    for tensor, _ in moved:
        _move(tensor, torch.device("cpu"))
    yield
    for tensor, device in moved:
        _move(tensor, device)


def _move(tensor: Tensor, device: torch.device) -> None:
    """Move a parameter or buffer with its gradient, without changing the object."""
    tensor.data = tensor.data.to(device)
    if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
        tensor.grad = tensor.grad.to(device)


def _replace(parameter: Tensor, tensor: Tensor) -> None:
    """Replace the contents of a parameter, which may be on another device.

    ``torch.utils.swap_tensors`` would also exchange the Python attributes, which must stay, and it refuses parameters
    that have weak references, such as those of recurrent layers.
    """
    new = tensor.detach().requires_grad_(parameter.requires_grad)
    torch._C._swap_tensor_impl(parameter, new)


def return_freed() -> None:
    """Return free memory of the heap to the system: glibc keeps free pages that lie below used ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:  # other C libraries have none
        trim(0)


def explain(error: BaseException, module: nn.Module | None) -> None:
    """Add a note to an error of user code that parameters without contents may have caused."""
    absent = [] if module is None else [name for name, p in module.named_parameters() if p.is_meta]
    said = isinstance(error, (RuntimeError, AttributeError)) and any(what in str(error) for what in _SAID)
    if not absent or not said or isinstance(error, AvgPipeError):
        return
    optimizer = _raised_by(error)
    note = (
        f"Parameters of other stages have no numbers and no gradient on this process, such as '{absent[0]}'. "
        "Code that looks at all of them in a hook can leave out those with is_meta"
        if optimizer is None
        else f"Each process holds the parameters of its own stages only, without '{absent[0]}' here, and "
        f"{type(optimizer).__name__} looks at all of them. Use an optimizer that treats each parameter by itself, such "
        "as SGD or AdamW, or one process (devices=1)"
    )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def _raised_by(error: BaseException) -> Optimizer | None:
    """Return the optimizer in whose own code an error was raised; None if it was raised elsewhere, as in a model."""
    own = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    for values in reversed(own):
        if isinstance(values.get("self"), Optimizer):
            found: Optimizer = getattr(values["self"], "_optimizer", values["self"])  # Lightning's wrapper is one too
            return found
        if any(isinstance(value, nn.Module) for value in values.values()):
            return None
    return None
