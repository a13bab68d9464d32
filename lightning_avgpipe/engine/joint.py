"""Run units jointly in processes that run the same program: one process runs a unit, and all get its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.codec import TensorForm, as_bytes
from lightning_avgpipe.comm.message import Message, pack, unpack
from lightning_avgpipe.comm.topology import subsets
from lightning_avgpipe.errors import CaptureError, StepChangedError, UnsendableError
from lightning_avgpipe.state.objects import BASE_MODULE_ATTRIBUTES, ITEMS
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.random_streams import RandomState
from lightning_avgpipe.utils.source import source_line
from lightning_avgpipe.utils.tensors import leaves_of, nodes_of
from lightning_avgpipe.utils.torch_compat import version_of


class Exchange:
    """A connection of processes that run the same program and share values at the same places in it.

    Before they send anything, the processes compare where they are. If they have diverged, all of them raise an error,
    and none waits for a value that is never sent.

    Args:
        cluster: cluster of the processes. Every process must construct the exchange at the same time.

    Attributes:
        rank: rank of this process in its group.
        device: device of this process.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.rank, self.device = cluster.rank, cluster.device
        self._cluster = cluster
        self._number = 0
        ranks = range(cluster.group.world_size)
        connected = cluster.connect(subsets(cluster.stage_map, ranks), "once more for values of steps")
        assert connected is not None
        self._group = connected.process_group

    def broadcast(self, what: str, source: int, item: Any = None) -> Any:
        """Send the source's item, with tensors detached, to every process, and return it. Every process must call this.

        Args:
            what: description of the place, equal on every process that has not diverged.
            source: rank of the sender in the group.
            item: any tree of tensors and picklable leaves; used only on the source.
        Raises:
            StepChangedError: the processes are at different places.
        """
        self._number += 1
        cluster, place = self._cluster, f"{self._number} {what} {source}"
        mine = source == cluster.rank
        message = pack(item) if mine else Message(0, ())
        tensors = tree.tensors(message.tensors)
        forms = [TensorForm.of(tensor) for tensor in tensors]
        told = cluster.group.exchange_objects((place, forms, message.descriptions), what)
        if any(other != place for other, *_ in told):
            self._refuse(what)
        _, forms, descriptions = told[source]
        arrived: list[Tensor] = []
        if forms:
            cluster.group.together(what, lambda: arrived.extend(self._broadcast(source, forms, tensors)))
        return item if mine else unpack(Message(0, tuple(arrived), (), descriptions))

    def _broadcast(self, source: int, forms: Sequence[TensorForm], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """Send the tensors of the source to every process, and yield them."""
        cluster = self._cluster
        for i, form in enumerate(forms):
            if source == cluster.rank:
                wired = form.on_wire(tensors[i]).contiguous()
            else:
                device = "cpu" if form.on_host else cluster.device
                wired = torch.empty(form.wire_shape, dtype=form.dtype, device=device)
            if not form.is_empty:
                dist.broadcast(as_bytes(wired), cluster.group.ranks[source], group=self._group)
            yield form.from_wire(wired)

    def _refuse(self, what: str) -> None:
        places = self._cluster.group.exchange_objects(f"{what} (number {self._number}) at {source_line()}")
        ways = "; ".join(f"rank {self._cluster.group.ranks[r]} came to {place}" for r, place in enumerate(places))
        raise StepChangedError(
            f"the processes have taken different ways: {ways}. All of them run the same steps and hooks, and must call "
            "the same submodules: no condition may depend on the rank, the time or a random generator of the user's"
        )


@dataclass
class UnitCall:
    """A call of a submodule that one process runs. Only this process has leaves and outputs, which are of its graph.

    Attributes:
        module: the submodule, on every process; its parameters have contents only where it runs.
        path: path of the submodule.
        owner: rank of the process that runs it.
        parameters: its trained parameters.
        held: for each of these parameters, whether only the owner holds it.
        leaves: leaves inside of the unit that stand for the tensors that it took.
        outputs: tensors that the unit made.
        shares_graph: whether gradients of gradients use the same graph, so that each backward must retain it.
    """

    module: nn.Module
    path: str
    owner: int
    parameters: Sequence[nn.Parameter]
    held: Sequence[bool]
    leaves: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    shares_graph: bool = False


class _Place:
    """A placeholder for a tensor in a result: the argument of this index or, if None, a tensor that the unit made."""

    def __init__(self, argument: int | None) -> None:
        self.argument = argument


class Joint:
    """A runner of units for a group of processes.

    Args:
        exchange: exchange of values between the processes.

    Attributes:
        runs: whether a unit is running here while the other processes wait for its results.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.runs = False
        self._inspected: set[str] = set()

    def call(self, call: UnitCall, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a unit, and return its result. Every process must call this, and has the same random state afterwards.

        Args:
            call: the call, which has not run yet.
            run: executes the unit.
            args: positional arguments, whose tensors have the same contents on every process.
            kwargs: keyword arguments, likewise.
        """
        device, mine = self.exchange.device, call.owner == self.exchange.rank
        before = RandomState(device)
        hidden = _hidden(call.module)
        inputs = [*tree.tensors((args, kwargs)), *(tensor for _, _, tensor in hidden)]
        traced = torch.is_grad_enabled() and (bool(call.parameters) or any(t.requires_grad for t in inputs))
        announced = None
        if mine:
            given, now = self._run(call, run, args, kwargs, hidden, traced), RandomState(device)
            announced = given, None if now.is_same(before) else now
        what = f"unit '{call.path}'"
        try:
            (structure, written, changed, tensors, wants, idle), drawn = self.exchange.broadcast(
                what, call.owner, announced
            )
        except UnsendableError as error:
            error.add_note(f"{what} returned, or keeps in an attribute, something that cannot go to other processes")
            raise
        taken = [tensor for i, tensor in enumerate(inputs) if i not in idle]
        pieces = iter(self._joined(call, tensors, wants, taken))
        result = tree.unflatten([_filled(leaf, pieces, inputs) for leaf in structure[0]], structure[1])
        for i in written:
            inputs[i].copy_(next(pieces))
        for path, name, leaves, spec in changed:
            value = tree.unflatten([_filled(leaf, pieces, inputs) for leaf in leaves], spec)
            setattr(call.module.get_submodule(path), name, value)
        if drawn is not None and not mine:
            drawn.restore(device)
        return result

    def _joined(
        self, call: UnitCall, tensors: Sequence[Tensor], wants: Sequence[bool], inputs: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the tensors of a call as outputs of one autograd function of its inputs and parameters."""
        if not any(wants):
            return tensors
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        made: Sequence[Tensor] = _Joined.apply(self, call, tensors, wants, anchor, *inputs, *call.parameters)
        return made

    def _run(
        self,
        call: UnitCall,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        hidden: Sequence[tuple[nn.Module, str, Tensor]],
        traced: bool,
    ) -> Any:
        """Execute the unit in a graph of its own; return the data that is shared with the other processes."""
        module, path = call.module, call.path
        writes = any(getattr(inner, "inplace", False) is True for inner in module.modules())
        begin = torch.zeros((), requires_grad=True, device="cpu").view(()) if traced else None
        entered = _Entered(traced, writes)
        own_args, own_kwargs = tree.map_tensors(entered.enter, (args, kwargs))
        call.leaves = entered.leaves
        before, num_arguments = Snapshot((), module.modules()), len(entered.tensors)
        with replaced(self, "runs", True), entered.lent(hidden):
            result = run(*own_args, **own_kwargs)
        written = [i for i in range(num_arguments) if entered.is_written(i)]
        if written and not writes:
            raise CaptureError(
                f"unit '{path}', called at {source_line()}, changes its argument in place, which other processes would "
                "not see; compute out of place, or set an attribute 'inplace = True' on the submodule that does it"
            )
        made: list[Tensor] = []
        structure = _split_tensors(result, made, entered.numbers)
        made += [entered.tensors[i] for i in written]
        changed = [(*key, *_split_tensors(value, made, entered.numbers)) for *key, value in _changes(module, before)]
        if begin is not None and path not in self._inspected:
            self._inspected.add(path)
            _refuse_outer(call, made, begin)
        # an unused tensor in an attribute may belong to an earlier graph
        idle = entered.unused(made, num_arguments) if traced and hidden else []
        call.leaves = [leaf for i, leaf in enumerate(call.leaves) if i not in idle]
        call.outputs = made if traced else []
        return structure, written, changed, [t.detach() for t in made], [traced and t.requires_grad for t in made], idle

    def backward(
        self, call: UnitCall, gradients: Sequence[Tensor | None], inputs: Callable[[], Sequence[Tensor]]
    ) -> list[Tensor | None]:
        """Compute the gradients of a call's inputs and parameters. Every process must call this, within a backward."""
        mine = call.owner == self.exchange.rank
        accumulates = torch.autograd.Variable._execution_engine.is_checkpoint_valid()  # type: ignore[attr-defined]
        if torch.is_grad_enabled():
            if accumulates:
                raise CaptureError(
                    f"a backward with create_graph=True reaches unit '{call.path}': the gradients of parameters would "
                    "be in a graph that one process has; use torch.autograd.grad(loss, inputs, create_graph=True)"
                )
            found = self._differentiable(call, gradients, inputs())
            return [*found, *(None for _ in call.parameters)]
        keep = torch._C._autograd._get_current_graph_task_keep_graph() or call.shares_graph
        answer = None
        if mine:
            own = [*call.leaves, *call.parameters]
            found = _gradients(call.outputs, gradients, own, retain_graph=keep)
            of_parameters = found[len(call.leaves) :]
            answer = (
                found[: len(call.leaves)],
                [g if not held else g is not None for g, held in zip(of_parameters, call.held, strict=True)],
            )
        shared = self.exchange.broadcast(f"the backward of unit '{call.path}'", call.owner, answer)
        if mine:
            return found
        of_inputs, of_parameters = shared
        rest: list[Tensor | None] = []
        for gradient, held, parameter in zip(of_parameters, call.held, call.parameters, strict=True):
            if not held:
                rest.append(gradient)
            else:  # autograd.grad needs a gradient for each input, and an empty one serves
                rest.append(torch.empty_like(parameter) if gradient and not accumulates else None)
        return [*of_inputs, *rest]

    def _differentiable(
        self, call: UnitCall, gradients: Sequence[Tensor | None], taken: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Return the gradients of a call's inputs, in a graph of these inputs and ``gradients`` on every process."""
        given, answer = [g for g in gradients if g is not None], None
        call.shares_graph = True
        inner = replace(call, leaves=[], outputs=[])
        if call.owner == self.exchange.rank:
            entered = iter([g.detach().requires_grad_() for g in given])
            own = [None if g is None else next(entered) for g in gradients]
            found = _gradients(call.outputs, own, call.leaves, create_graph=True)
            inner.leaves = [*call.leaves, *(g for g in own if g is not None)]
            inner.outputs = [g for g in found if g is not None]
            answer = (
                [g is not None for g in found], [g.detach() for g in inner.outputs],
                [g.requires_grad for g in inner.outputs],
            )  # fmt: skip
        there, tensors, wants = self.exchange.broadcast(
            f"the gradients of unit '{call.path}' in a graph", call.owner, answer
        )
        pieces = iter(self._joined(inner, tensors, wants, [*taken, *given]))
        return [next(pieces) if exists else None for exists in there]


class _Joined(torch.autograd.Function):
    """A call of a unit as one autograd function, which is at the same place in the graph of every process."""

    @staticmethod
    def forward(
        ctx: Any,
        joint: Joint,
        call: UnitCall,
        tensors: Sequence[Tensor],
        wants: Sequence[bool],
        anchor: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.joint, ctx.call = joint, call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*rest[: len(rest) - len(call.parameters)])
        made = tuple(tensor.detach() for tensor in tensors)
        ctx.mark_non_differentiable(*(t for t, wanted in zip(made, wants, strict=True) if not wanted))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        inputs = partial(getattr, ctx, "saved_tensors")  # read late: fails if changed in place
        return (*[None] * 5, *ctx.joint.backward(ctx.call, gradients, inputs))


def _gradients(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    wanted: Sequence[Tensor],
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Return a gradient, or None, for each wanted tensor."""
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    needing = [tensor for tensor in wanted if tensor.requires_grad]
    if not pairs or not needing:
        return [None] * len(wanted)
    roots, seeds = [o for o, _ in pairs], [g for _, g in pairs]
    with torch.set_grad_enabled(create_graph):
        found = iter(
            torch.autograd.grad(
                roots, needing, seeds, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
            )
        )
    return [next(found) if tensor.requires_grad else None for tensor in wanted]


class _Entered:
    """The arguments of a unit in a graph of its own.

    Args:
        traced: whether the arguments become leaves of a graph.
        clones: whether the unit may write into its arguments, so that it gets clones.

    Attributes:
        leaves: leaves of the graph, if ``traced``.
        tensors: tensors that the unit gets.
    """

    def __init__(self, traced: bool, clones: bool) -> None:
        self.leaves: list[Tensor] = []
        self.tensors: list[Tensor] = []
        self._traced = traced
        self._clones = clones
        self._versions: list[int] = []

    @property
    def numbers(self) -> dict[int, int]:
        """The index of each tensor that the unit gets, by the ``id`` of the tensor."""
        return {id(tensor): i for i, tensor in enumerate(self.tensors)}

    def enter(self, tensor: Tensor) -> Tensor:
        """Return the tensor that the unit gets in place of this one."""
        inside = tensor
        if self._traced:
            inside = tensor.detach().requires_grad_(tensor.requires_grad)
            self.leaves.append(inside)
        self.tensors.append(inside.clone() if self._clones else inside)
        self._versions.append(version_of(self.tensors[-1]))
        return self.tensors[-1]

    @contextlib.contextmanager
    def lent(self, hidden: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
        """Put tensors of this graph into attributes of modules within this context, unless the unit assigns others.

        Args:
            hidden: module, name of the attribute, and the tensor that it holds.
        """
        for owner, name, tensor in hidden:
            vars(owner)[name] = self.enter(tensor)
        try:
            yield
        finally:
            numbers = self.numbers
            for owner, name, tensor in hidden:
                if id(vars(owner).get(name)) in numbers:
                    vars(owner)[name] = tensor

    def is_written(self, number: int) -> bool:
        """Return whether the unit has written into a tensor."""
        return version_of(self.tensors[number]) != self._versions[number]

    def unused(self, made: Sequence[Tensor], first: int) -> list[int]:
        """Return the indices, from ``first`` on, of leaves on which no output depends."""
        used = {id(leaf) for leaf in leaves_of(made)}
        return [i for i in range(first, len(self.leaves)) if id(self.leaves[i]) not in used]


# -- tensors in results and in attributes of modules -----------------------------------------------------------------


def _split_tensors(value: Any, made: list[Tensor], inside: dict[int, int]) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, with placeholders instead of tensors, and its structure.

    Tensors that the unit made are appended to ``made``.
    """
    leaves, spec = tree.flatten(value)
    made += [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in inside]
    return [_Place(inside.get(id(leaf))) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def _filled(leaf: Any, pieces: Any, inputs: Sequence[Tensor]) -> Any:
    if not isinstance(leaf, _Place):
        return leaf
    return next(pieces) if leaf.argument is None else inputs[leaf.argument]


def _hidden(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Return the tensors that require gradients in attributes of submodules: the unit may use them like arguments."""
    return [
        (inner, name, value)
        for inner in module.modules()
        for name, value in vars(inner).items()
        if isinstance(value, Tensor) and value.requires_grad and name not in BASE_MODULE_ATTRIBUTES
    ]


def _changes(module: nn.Module, before: Snapshot) -> list[tuple[str, str, Any]]:
    """Return ``(path, name, value)`` of the attributes that hold another object than before, or a changed container."""
    changed = {id(obj): names for obj, names in before.differences()}
    return [
        (path, name, value)
        for path, inner in module.named_modules()
        for name, value in vars(inner).items()
        if name not in BASE_MODULE_ATTRIBUTES and name not in ("training", "forward")
        if name in (changed.get(id(inner)) or ()) or (id(value) in changed and isinstance(value, ITEMS))
    ]


def _refuse_outer(call: UnitCall, made: Sequence[Tensor], begin: Tensor) -> None:
    """Check that a unit's graph ends at its arguments and parameters, since other tensors would get no gradient."""
    assert begin.grad_fn is not None
    first = begin.grad_fn._sequence_nr()
    known = {id(t) for t in (*call.leaves, *call.module.parameters())}
    for node in nodes_of(made):
        variable = getattr(node, "variable", None)
        strange = id(variable) not in known if variable is not None else node._sequence_nr() < first
        if strange:
            shape = "" if variable is None else f" of shape {tuple(variable.shape)}"
            raise CaptureError(
                f"unit '{call.path}', called at {source_line()}, uses a tensor{shape} that is trained and neither an "
                "argument nor its own; other processes cannot send it a gradient. Pass it as an argument, or use one "
                "process (devices=1)"
            )
