"""Handle tensors that a step changes in place, and detect those that it takes from another model.

A single process finishes each backward before the next forward. In a pipeline, several forwards come first::

    one process     F0: w changes   B0 uses w        F1: w changes   B1 uses w
    a stage         F0: w changes   F1: w changes    B0 uses a copy of w after F0

So autograd saves copies of such tensors as they are at the end of their forward. A backward in a single process finds
the same contents: a write through ``.data`` changes what autograd has saved, and any other write after the save is an
error. A tensor that did not change when the step was captured is not copied. If a backward finds it changed, it raises
an error that names the tensor.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.errors import ConfigurationError, StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.outside import variables
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.placeholder import has_memory
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import leaves_of, tensor_arguments
from lightning_avgpipe.utils.torch_compat import SavedHooks, address, storage_id, version_of

# Given the names of the buffers that a step changes, returns these and the parameters of other models, by name.
ForeignTensors = Callable[[Collection[str]], Mapping[str, Sequence[Tensor]]]

_MODIFIED = re.compile(r"modified by an inplace operation.*?Tensor \[([\d, ]*)\]\].*? is at version (\d+)", re.DOTALL)


# For each full name of a parameter or buffer, the module's dict that holds it and its name there.
Registers = Mapping[str, tuple[dict[str, Any], str]]


def registers_of(module: nn.Module, names: Iterable[str]) -> Registers:
    """Return the registers of the parameters and buffers with these full names."""
    found: dict[str, tuple[Any, str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        found[name] = (owner._parameters if leaf in owner._parameters else owner._buffers), leaf
    return found


def held_in(registers: Registers) -> dict[str, Tensor]:
    """Return the tensors that these registers hold now, by name: a step may have put others there."""
    found = {name: register.get(leaf) for name, (register, leaf) in registers.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def states_of(registers: Registers) -> dict[str, tuple[int, int]]:
    """Return identity and version of the tensors in these registers, by name."""
    return {name: (id(tensor), version_of(tensor)) for name, tensor in held_in(registers).items()}


class Lasting:
    """The tensors that outlive a micro-batch and that the forwards of a stage change.

    A message may leave only after the next forward has run, so it must not contain views of such tensors::

        F0    self.mean.lerp_(..)    sends self.mean[None] of micro-batch 0: a copy, since F1 writes into self.mean
    """

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        names = dict.fromkeys(name for node in program.nodes for name in node.changes)
        self._registers = registers_of(module, names)
        self._holders = list(variables(module, program.graph.written_tensors).values())  # of tensors without a name

    def apart(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return tensors detached, and cloned if they share memory with the tensors that forwards change.

        The weights and attributes of the stage must be in the module.
        """
        found = tuple([tensor.detach() for tensor in tensors])
        if not (self._registers or self._holders):
            return found
        held = held_in(self._registers).values()
        memory = set(map(storage_id, (*held, *(Snapshot(self._holders).tensors if self._holders else ()))))
        return tuple([tensor.clone() if storage_id(tensor) in memory else tensor for tensor in found])


class Rewritten:
    """The parameters and buffers that a stage changes in place."""

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        names = [name for name in program.states if name in program.graph.rewritten]
        self._registers = registers_of(module, names)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters among them."""
        return [tensor for tensor in held_in(self._registers).values() if isinstance(tensor, nn.Parameter)]

    def saved(self, trains: bool) -> AbstractContextManager[Any]:
        """Run a forward within this context; if it trains, autograd saves copies of these tensors."""
        return self._copied() if self._registers and trains else nullcontext()

    @contextlib.contextmanager
    def _copied(self) -> Iterator[None]:
        copies: list[_Copy] = []

        def pack(tensor: Tensor) -> Tensor | _Copy:
            # looked up each time, since a step may give a parameter other memory, or parametrize it for a while
            if address(tensor) not in map(address, held_in(self._registers).values()):
                return tensor
            copies.append(_Copy(tensor.detach()))
            return copies[-1]

        with SavedHooks(pack, lambda saved: saved.tensor if type(saved) is _Copy else saved):
            yield
        with torch.no_grad():
            for copy in copies:
                copy.tensor = copy.tensor.clone()


class _Copy:
    """What autograd saves for a rewritten tensor: the tensor itself, replaced by a copy when the forward ends."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def explain_overwritten(error: RuntimeError, program: StageProgram, module: nn.Module) -> None:
    """Explain an error of a stage's backward if it is about a buffer that was changed in place.

    Raises:
        StepChangedError: the backward needs contents of a buffer that a later micro-batch has overwritten.
    """
    if names := _named(error, program, module):
        raise StepChangedError(
            f"{program.graph.step} seems to change the buffer {' or '.join(map(repr, names))} in place, which it did "
            "not do when it was captured, and a backward needs what was there in an earlier micro-batch (stage "
            f"{program.stage}). Compute with a clone() of the buffer, or write into it with every micro-batch (by "
            f"nothing, if need be), so that copies are kept. ({str(error).partition(' Hint')[0]})"
        ) from None  # quoted above; autograd names no tensor, so it may mean another one of this shape


def _named(error: RuntimeError, program: StageProgram, module: nn.Module) -> list[str]:
    """Return the buffers that an error of autograd may be about, by the shape and version of the changed tensor."""
    found = _MODIFIED.search(str(error))
    if found is None:
        return []
    buffers = module.named_buffers()
    alike = [name for name, b in buffers if f"{version_of(b)} {list(b.shape)}" == f"{found[2]} [{found[1]}]"]
    return [name for name in alike if name not in program.graph.rewritten]


class Inspection(TorchDispatchMode):
    """A context that detects operations that take tensors of other models.

    ::

        module.layer._parameters["weight"]      the placed model's, whichever pipeline runs
        lambda x: x @ weight                    pipeline 0's for ever: a closure, a partial, a plain object, a global

    A model is placed into parameters, buffers and plain attributes of modules. Tensors that user code holds elsewhere
    cannot be exchanged, and training would continue with wrong gradients and no error. So the first forward of each
    stage and pipeline, before any optimizer step, is inspected: the tensors that its operations take and, since
    compiled code and C++ may hide operations, the leaves to which its gradients would go.

    Args:
        foreign_tensors: tensors of other models, by name. Memory is compared, so views and aliases are found too.
        pipeline: number of the pipeline that runs.
    Raises:
        ConfigurationError: there was such an operation; the message names parameters or buffers, and where they were
            used. It replaces any other error, which may be a consequence.
    """

    def __init__(self, foreign_tensors: Mapping[str, Sequence[Tensor]], pipeline: int) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._names = {
            storage_id(tensor): name
            for name, tensors in foreign_tensors.items()
            for tensor in tensors
            if has_memory(tensor)
        }
        self._found: dict[str, str] = {}  # name -> where

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled code runs as usual."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensor_arguments(args, kwargs):
            self._look(tensor, source_line)
        return func(*args, **kwargs)

    def follow_gradients(self, outputs: Iterable[Tensor]) -> None:
        """Look at the leaves to which the gradients of a forward's outputs go."""
        for leaf in leaves_of(outputs):
            self._look(leaf, lambda: "compiled code or a library")

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self._found:
            return
        places = listed([f"'{name}' (at {place})" for name, place in self._found.items()])
        raise ConfigurationError(
            f"while pipeline {self._pipeline} ran, training_step used {places} of another parallel model. Each has "
            "parameters and buffers of its own, which are put where modules register them, and into their attributes, "
            "lists, tuples and dicts; a closure, a functools.partial, a global, an optimizer or an object that is no "
            "nn.Module keeps those of one model. Get them from the module whenever they are used (self.layer.weight), "
            "or use num_pipelines=1"
        )

    def _look(self, tensor: Tensor, place: Callable[[], str]) -> None:
        if has_memory(tensor):
            name = self._names.get(storage_id(tensor))
            if name is not None and name not in self._found:
                self._found[name] = place()
