"""Run whole steps in all processes in lockstep, where the owner of a submodule's parameters runs the submodule.

::

    rank 1 (stage 0)   z = randn()   x = generator(z)    loss = bce(disc(x), ...)    loss.backward()      step()
    rank 0 (stage 1)   z = randn()   x = generator(z)    loss = bce(disc(x), ...)    loss.backward()      step()
                       same numbers  rank 1 runs it,     rank 0 runs it,             each unit where      each its
                                     both have x         both have the loss          it ran, backwards    parameters

A step that calls backward and optimizers itself may do so in any order and under any condition, and may call submodules
in any order. So it cannot be divided into stages that run one after the other. Instead, every process executes all of
the user's code, glue included. Only the inside of a *unit*, a submodule whose parameters are all in one process, is
executed by this process alone, its owner, and all processes get the results. For autograd, a unit is one function at
the same place in the graph of every process. So backwards reach the units in the same order everywhere. The owner
computes the gradients of the unit's inputs, and all processes get them. Tensors that only one process holds (parameters
and buffers of units, and their gradients) are sent to all when glue reads them, and changed by their owner when glue
writes them. All processes start with rank 0's random state, and take over the owner's after a unit that draws. So they
draw the numbers that a single process would have drawn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_avgpipe.capture.tracer import StepTracer, function_name
from lightning_avgpipe.engine.joint import Exchange, Joint, UnitCall
from lightning_avgpipe.errors import CaptureError, StepChangedError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.random_streams import RandomState
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import tensor_arguments

_Tensor: Any = Tensor  # whose descriptors are not typed
_READ_GRADIENT = _Tensor.grad.__get__
# Functions that each process applies to its own tensor, without communication.
_LOCAL = frozenset((
    _Tensor.requires_grad.__set__, _Tensor.requires_grad_, _Tensor.register_hook,
    _Tensor.register_post_accumulate_grad_hook, _Tensor.retain_grad,
))  # fmt: skip
_WRITES = frozenset((_Tensor.grad.__set__, _Tensor.data.__set__))
_RTOL, _ATOL = 1e-3, 1e-5  # devices may sum in different orders


class Lockstep(StepTracer):
    """A tracer that follows whole steps of a module in all processes of a group.

    Args:
        module: the divided module; parameters of other processes are on the meta device.
        exchange: exchange of values between the processes.
        owner: full name of each parameter or buffer that one process holds -> its rank. All processes hold the others.
        observers: modules that only look at values (metrics); all processes run them.
    """

    def __init__(
        self,
        module: nn.Module,
        exchange: Exchange,
        owner: Mapping[str, int],
        observers: Collection[nn.Module],
    ) -> None:
        super().__init__({}, {})
        self.exchange = exchange
        self.joint = Joint(exchange)
        self._module = module
        self._owner = owner
        self._observers = {id(observer) for observer in observers}
        self._rank_of: dict[str, int] = {}
        self._names: dict[int, tuple[Tensor, str]] = {}  # id -> tensor, kept so that the id stays valid, and name
        self._runs = False
        self._shows_output = True

    # -- when it follows -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def running(self, what: str, shows_output: bool = True) -> Iterator[None]:
        """Run the same user code in all processes within this context. Every process must enter it.

        Args:
            what: name of the step or hook, the same on every process.
            shows_output: whether each process shows prints, warnings and logs from outside of units; else only rank 0
                does.
        """
        if self._runs:
            with self.in_lockstep():
                yield
            return
        self._look_up()
        drawn = self.exchange.broadcast(f"the random state of {what}", 0, RandomState(self.exchange.device))
        drawn.restore(self.exchange.device)
        self._shows_output = shows_output or self.exchange.rank == 0
        with replaced(self, "_runs", True), self.following():
            yield

    @property
    def mutes(self) -> bool:
        return not self._shows_output

    def is_muted(self) -> bool:
        return not self._inside

    @property
    def follows(self) -> bool:
        """Whether all processes are running the same code now."""
        return self._runs and not self._inside

    def per_process(self) -> contextlib.AbstractContextManager[None]:
        """Run code within this context that each process runs on its own (optimizers, logging)."""
        return self.paused() if self.follows else contextlib.nullcontext()  # type: ignore[return-value]

    @contextlib.contextmanager
    def in_lockstep(self) -> Iterator[None]:
        """Inside of :meth:`per_process`, run the same code in all processes again within this context."""
        if not self._runs or not self._inside:
            yield
            return
        with replaced(self, "_inside", False), self:
            yield

    def _look_up(self) -> None:
        parameters = dict(self._module.named_parameters())
        self._names = {id(t): (t, name) for name, t in parameters.items() if name in self._owner}
        self._names |= {id(b): (b, name) for name, b in self._module.named_buffers() if name in self._owner}
        units: dict[int, str] = {}
        self._rank_of = {}
        for path, part in self._module.named_modules():
            tensors = [*part.parameters(), *part.buffers()]
            ranks = {self._owner[self._names[id(t)][1]] if id(t) in self._names else None for t in tensors}
            if path and len(ranks) == 1 and None not in ranks and not self._is_open(part):
                units[id(part)] = path
                self._rank_of[path] = ranks.pop()  # type: ignore[assignment]
        self._units = units

    def _is_open(self, part: nn.Module) -> bool:
        """Return whether hooks or observers inside of a module see what happens there, so that it is not a unit."""
        inner = [module for module in part.modules() if module is not part]
        return any(m._forward_hooks or m._forward_pre_hooks or id(m) in self._observers for m in inner)

    # -- units -----------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._may_differentiate(module, args, kwargs):
            with self.in_lockstep():  # so its inner modules are the units
                return run(*args, **kwargs)
        owner = self._rank_of[path]
        args, kwargs = tree.map_tensors(self.contents, (args, kwargs))
        parameters = [p for p in module.parameters() if p.requires_grad]
        call = UnitCall(module, path, owner, parameters, [id(p) in self._names for p in parameters])
        result = self.joint.call(call, run, args, kwargs)
        if owner == self.exchange.rank:
            for name, buffer in module.named_buffers(path):
                if name in self._owner:
                    self._names[id(buffer)] = (buffer, name)
        return result

    def _may_differentiate(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Return whether a unit may ask for gradients with respect to a trained parameter of another one."""
        given = [t for t in tree.tensors((args, kwargs)) if isinstance(t, nn.Parameter) and t.requires_grad]
        if not given or isinstance(module, torch.jit.ScriptModule):  # the latter cannot be followed inside
            return False
        own = set(map(id, module.parameters()))
        return any(id(t) in self._names and id(t) not in own for t in given)

    # -- glue ------------------------------------------------------------------------------------------------------

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _LOCAL:
            return func(*args, **kwargs)
        name = function_name(func)
        if name == "backward":
            return self._backward(func, args, kwargs)
        if func is torch.autograd.grad:
            return self._gradients(func, args, kwargs)
        held = {id(t): t for t in tensor_arguments(args, kwargs) if id(t) in self._names}
        if not held:
            return func(*args, **kwargs)
        if func in _WRITES and id(args[0]) in held:
            if self._is_mine(args[0]):
                func(*args, **kwargs)
            return None
        if func == _READ_GRADIENT:
            return self._from_owner(args[0], "the gradient of", args[0].grad)
        stand_ins = {key: self.contents(tensor) for key, tensor in held.items()}
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: stand_ins.get(id(t), t), (args, kwargs))
        result = func(*args, **kwargs)
        # an operation in place returns its argument
        originals = {id(stand_in): held[key] for key, stand_in in stand_ins.items()}
        return pytree.tree_map_only(Tensor, lambda t: originals.get(id(t), t), result)

    def contents(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the contents that its owner holds. Every process must call this."""
        if id(tensor) not in self._names:
            return tensor
        found: Tensor = self._from_owner(tensor, "the contents of", tensor)
        return found.requires_grad_(tensor.requires_grad)

    def agree_on_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace gradients of parameters that all processes hold with rank 0's. Every process must call this."""
        common = [p for p in parameters if id(p) not in self._names and p.grad is not None]
        if not common:
            return
        found = self.exchange.broadcast("gradients that all have", 0, [p.grad for p in common])
        if self.exchange.rank:
            for parameter, gradient in zip(common, found, strict=True):
                assert parameter.grad is not None
                parameter.grad.copy_(gradient)

    def _from_owner(self, tensor: Tensor, what: str, own: Any) -> Any:
        """Return the owner's ``own`` on every process; ``what`` describes what it is of the tensor."""
        name = self._names[id(tensor)][1]
        found = self.exchange.broadcast(f"{what} '{name}'", self._owner[name], [own])
        return own if self._is_mine(tensor) else found[0]

    def _is_mine(self, tensor: Tensor) -> bool:
        return self._owner[self._names[id(tensor)][1]] == self.exchange.rank

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._agree(_argument(args, kwargs, 0, "tensors"))
        func(*args, **kwargs)
        for tensor, _ in self._names.values():
            if tensor.is_meta:  # a gradient that ``inputs`` has asked for
                tensor.grad = None

    def _gradients(self, func: Any, args: Any, kwargs: Any) -> Any:
        outputs, inputs = _argument(args, kwargs, 0, "outputs"), _argument(args, kwargs, 1, "inputs")
        self._agree(outputs)
        single = isinstance(inputs, Tensor)
        wanted = [inputs] if single else list(inputs)
        held = [id(tensor) in self._names for tensor in wanted]
        if any(held) and kwargs.get("create_graph", False):
            name = self._names[id(wanted[held.index(True)])][1]
            raise CaptureError(
                f"torch.autograd.grad(..., create_graph=True) at {source_line()} asks for the gradient of '{name}', "
                "which one process holds, in order to go on with it in a graph that all build; use one process "
                "(devices=1)"
            )
        found = list(func(*args, **kwargs))
        for i, tensor in enumerate(wanted):
            if held[i]:
                found[i] = self._from_owner(tensor, "a gradient of", found[i])
        return tuple(found)

    def _agree(self, outputs: Any) -> None:
        """Check that a backward begins from the same numbers in all processes."""
        own = [tensor.detach() for tensor in tensor_arguments([outputs])]
        first = self.exchange.broadcast("a backward", 0, own)
        if not all(map(_is_close, own, first)):
            raise StepChangedError(
                f"the loss of the backward at {source_line()} is {own} on rank {self.exchange.rank} and {first} on "
                "rank 0: the step depends on something that only one process has, such as a list outside of the "
                "module that a submodule appends to; return it instead"
            )

    # -- regions and observers -------------------------------------------------------------------------------------

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.in_lockstep():
            return args[0](*args[2:])  # args[1] says whether the checkpoint keeps the random state

    def region(self, generator: Iterator[Any]) -> Iterator[Any]:
        generator.close()  # type: ignore[attr-defined]
        yield

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.in_lockstep():
            return run(*args, **kwargs)


def _is_close(one: Tensor, other: Tensor) -> bool:
    same_kind = one.shape == other.shape and one.dtype == other.dtype
    return same_kind and torch.allclose(one, other, rtol=_RTOL, atol=_ATOL, equal_nan=True)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs[name]
