"""Replay: execute the whole step function, of which only one stage's part happens.

::

    stage 1 of 3:     embed   block0 | block1   block2 | block3   head   loss
                      skipped        | executed        | not reached
    values:           absent or      | real            | the step ends with an exception
                      received       |                 |

Nodes of earlier stages give back the values that were received, or absent ones. The nodes of this stage run. Before
the first node of a later stage the step is left. Free glue runs wherever it stands. A micro-batch with which the step
does something else takes a detour.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import Node
from lightning_avgpipe.capture.tracer import StepTracer, function_name, tensor_arguments, watching
from lightning_avgpipe.engine.compiling import Compiler
from lightning_avgpipe.engine.detour import Detour
from lightning_avgpipe.engine.operation import Around, Operation, Repeat, Runner
from lightning_avgpipe.engine.path import Entry, Path, Step
from lightning_avgpipe.engine.randomness import Drawing, Draws
from lightning_avgpipe.engine.stand_ins import StandIns
from lightning_avgpipe.errors import AbsentValueError, StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.parcel import Packer
from lightning_avgpipe.utils.placeholder import Absent, TensorMeta
from lightning_avgpipe.utils.random_streams import RandomKey, host_stream, stream
from lightning_avgpipe.utils.source import source_line

Observe = Callable[[Callable[..., Any], Any, Any], Any]


Tapped = tuple[tuple[Tensor, ...], tuple[Entry, ...]]


@dataclass(frozen=True)
class Replayed:
    """What a stage made of one micro-batch.

    Attributes:
        result: of the step function; None unless this is the last stage.
        sent: the values that the program sends, in its order; or those of a detour.
        entries: what the nodes up to the end of this stage returned, or their path.
        tapped: by position where that was asked for, and where the step came: copies of the values that are alive, and
            what the nodes before it returned.
    """

    result: Any
    sent: tuple[Tensor, ...]
    entries: tuple[Entry, ...] | Path
    tapped: Mapping[int, Tapped]


@dataclass(frozen=True)
class Ground:
    """What the replays of a stage have in common.

    Attributes:
        units: ``id(module) -> path``.
        owned: ``id -> full name`` of parameters, and of buffers that glue changes.
        drawing: the modules that draw; None: nothing does.
        device: of the stage.
        packer: of the module; None if no unit writes into objects.
        compiler: of units; None: they run as they are.
    """

    units: Mapping[int, str]
    owned: Mapping[int, str]
    drawing: Drawing | None = None
    device: torch.device = torch.device("cpu")  # noqa: RUF009
    packer: Packer | None = None
    compiler: Compiler | None = None


_NOTHING = contextlib.nullcontext()


class _StageEnd(BaseException):
    """Leaves the step function; no error, so not an Exception that user code might catch."""


def replay(
    program: StageProgram,
    ground: Ground,
    run: Callable[..., Any],
    args: Sequence[Any],
    received: Sequence[Tensor] = (),
    entries: tuple[Entry, ...] | Path = (),
    key: RandomKey | None = None,
    observe: Observe | None = None,
    repeat: Repeat | None = None,
    taps: frozenset[int] = frozenset(),
    around: Around | None = None,
) -> Replayed:
    """Execute one stage's part of a step on one micro-batch.

    Args:
        program: what to do.
        ground: of the stage.
        run: executes the step function.
        args: its arguments, the micro-batch first.
        received: tensors for ``program.receives``, in its order; or for the values of a path.
        entries: what the nodes of earlier stages returned; fewer if the step returned None on one of them. Or the path
            that they took.
        key: names this execution, for random numbers.
        observe: calls ``self.log`` and metrics on the last stage; None: as they are.
        repeat: makes what executes a unit into what keeps less for the backward.
        taps: positions where values are copied, those behind the start of the program.
        around: context within which each node runs.
    Raises:
        StepChangedError: the step did something else than when it was captured.
        AbsentValueError: the step needs a value that was not sent.
    """
    key, drawing, device = key or RandomKey(0), ground.drawing, ground.device
    draws = None if drawing is None else Draws(drawing, key, device)
    runner = Runner(draws, repeat, ground.packer, around, ground.compiler)
    replayer = _Replayer(program, ground, received, entries, observe, runner, taps)
    # Stages of one process share the batch, and the step may change it: its containers, or even its tensors.
    args = tree.map_tensors(torch.clone if program.graph.batch_writes else _same, tuple(args))
    with (
        _NOTHING if draws is None else stream(key.derive("step"), device),
        _NOTHING if draws is None else watching(draws),
        _NOTHING if draws is None else host_stream(key.derive("host")),
        replayer.following(compiled=ground.compiler is not None or drawing is None or not drawing.seen),
    ):
        try:
            result = run(*args)
        except _StageEnd:
            result = None
        except AbsentValueError as error:
            replayer.explain(error)
            raise
        else:
            replayer.check_finished(result)
        finally:
            replayer.stand_ins.restore()
    return Replayed(result, replayer.sent(), replayer.entries(), replayer.tapped)


@dataclass
class _Trail:
    """What nodes have returned so far.

    Attributes:
        before: of earlier stages; fewer if the step ended on one of them.
        start: where this stage begins.
        ended: where the step has ended on an earlier stage; None: it has not.
        own: of this stage.
    """

    before: tuple[Entry | Step, ...]
    start: int
    ended: int | None
    own: list[Entry] = field(default_factory=list)

    @classmethod
    def of(cls, path: tuple[Entry, ...] | Path, program: StageProgram) -> _Trail:
        """Of earlier stages, which went the captured way or another."""
        if isinstance(path, Path):
            return cls(path.entries, len(path.entries), len(path.entries) if path.ended else None)
        return cls(path, program.start, len(path) if len(path) < program.start else None)

    @property
    def entries(self) -> tuple[Any, ...]:
        """Of all nodes; steps among them if an earlier stage went another way."""
        return (*self.before, *self.own) if self.own else self.before


@dataclass
class _Taps:
    """Positions at which values are copied that are alive, and those that have been."""

    positions: frozenset[int]
    found: dict[int, Tapped] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = max(self.positions, default=0)


class _Sending:
    """Values that will be sent, as far as they have been made here.

    Args:
        program: of the stage.
        taps: positions at which values are copied as well.
        stand_ins: for what was received.
        device: of the stage.

    Attributes:
        device: the same.
    """

    def __init__(self, program: StageProgram, taps: frozenset[int], stand_ins: StandIns, device: torch.device) -> None:
        self._wanted = frozenset(program.sends).union(*map(program.graph.live, taps))
        self._made: dict[int, Tensor] = {}
        self._stand_ins = stand_ins
        self.device = device

    def made(self, tensor: Tensor, value: int) -> None:
        """A node of this stage gave a value."""
        if value in self._wanted:
            self._made[value] = tensor

    def tensor(self, value: int) -> Tensor:
        """What is sent for it; an empty one for what was not made because the step ended before."""
        tensor = self._made.get(value)
        if tensor is None:
            tensor = self._stand_ins.of(value)
        return torch.empty(0, device=self.device) if tensor is None else tensor


class _Replayer(StepTracer):
    """Where a replay stands in the graph; arguments are those of :func:`replay`."""

    def __init__(
        self,
        program: StageProgram,
        ground: Ground,
        received: Sequence[Tensor],
        path: tuple[Entry, ...] | Path,
        observe: Observe | None,
        runner: Runner,
        taps: frozenset[int],
    ) -> None:
        super().__init__(ground.units, ground.owned, ground.device)
        self._program = program
        self._runner = runner
        self._observe = observe
        self._observed: list[Tensor] = []  # what the last stage will look at
        self._trail = _Trail.of(path, program)
        # if the step is off the captured path
        self._detour = self._new_detour(path.shared) if isinstance(path, Path) else None
        values = path.values if isinstance(path, Path) else program.receives
        given = dict(zip(values, received, strict=True))
        self.stand_ins = StandIns(program, given, self.known, ground.device, ground.packer)
        self._taps = _Taps(taps)
        self._sending = _Sending(program, taps, self.stand_ins, ground.device)
        self._position = 0

    def on_call(self, module: nn.Module, path: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors = tree.tensors((args, kwargs))
        alike = path not in self._program.graph.resident and all(self.known.value_of(t) is None for t in tensors)
        # one that was not called when the step was captured may have weights, which one stage must train
        if alike and not any(True for _ in module.parameters()):
            return run(*args, **kwargs)
        return self._at_node(Operation("call", path, run, args, kwargs, tensors, module))

    def on_glue(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors, name = tensor_arguments(args, kwargs), function_name(func)
        if self._runner.draws is not None:
            self._runner.draws.function(name)
        for tensor in tensors:
            if id(tensor) in self._owned or self.known.value_of(tensor) is not None:
                return self._at_node(Operation("glue", name, func, args, kwargs, tensors))
        return func(*args, **kwargs)

    def on_region(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._at_node(Operation("region", "", run, args, kwargs, tensor_arguments(args, kwargs)))

    def on_observe(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not self._program.is_last:
            self._observed += tree.tensors((args, kwargs))
            return Absent(TensorMeta((), torch.get_default_dtype(), False, False), self._sending.device, "a metric")
        return run(*args, **kwargs) if self._observe is None else self._observe(run, args, kwargs)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _at_node(self, operation: Operation) -> Any:
        """The step has come to its next node: leave it out, execute it, or leave the step."""
        position, start = self._position, self._trail.start
        if position > start and position in self._taps.positions and self._detour is None:
            values = tuple(self._sending.tensor(v).detach().clone() for v in self._program.graph.live(position))
            self._taps.found[position] = values, self._trail.entries
        if position == self._trail.ended:
            raise self._changed(operation, None)
        node, entry = self._expected(position)
        if position >= start:
            if not operation.matches(node):
                return self._off_path(operation, node)
            if position == self._program.end:
                raise _StageEnd
            if entry is not None and not self._program.is_last:
                self._trail.own.append(entry)
        elif not operation.matches(node):
            raise self._changed(operation, node)
        assert node is not None
        self._position += 1
        return self._execute(operation, node) if entry is None else self._skip(operation, node, entry)

    def _expected(self, position: int) -> tuple[Node | None, Entry | None]:
        """The node that comes now, if that is known, and what it gives if it is not executed here."""
        nodes, program = self._program.graph.nodes, self._program
        entry = program.elsewhere.get(position)
        if position < self._trail.start:
            before = self._trail.before[position]
            if isinstance(before, Step):
                return before
            return nodes[position], before if entry is None and position not in program.upkeep else entry
        if self._detour is not None or position >= len(nodes):
            return None, None
        return nodes[position], entry

    def _skip(self, operation: Operation, node: Node, entry: Entry) -> Any:
        if self._runner.draws is not None and node.drawn:
            self._runner.draws.skip(node.drawn)
        return self.stand_ins.result(node, entry, *operation.opened(node))

    def _execute(self, operation: Operation, node: Node) -> Any:
        taken, objects = operation.opened(node)
        outcome = self._runner.run(operation, node, objects)
        if not outcome.is_as_captured(node, taken, self.known):
            is_here = node.index >= self._trail.start and node.index not in self._program.upkeep
            detour = self._new_detour()
            detour.begin(node, outcome, taken, is_here)
            self._detour = detour
            return outcome.result
        if objects is None:
            outcome = outcome.apart(node, taken)
        for value, tensor in zip(node.outputs, outcome.tensors, strict=True):
            if value >= 0:
                self._learn(tensor, value)
        for i, value, of_base in node.writes:
            target = taken[i]._base if of_base else taken[i]
            if target is not None:
                self._learn(target, value)
        if (not self._program.is_last or node.index < self._taps.last) and node.index >= self._trail.start:
            self._trail.own.append(outcome.entry)
        return outcome.result

    def _learn(self, tensor: Tensor, value: int) -> None:
        self.known.learn(tensor, value)
        self._sending.made(tensor, value)

    def explain(self, error: AbsentValueError) -> None:
        """Say so if the step does something else than when it was captured, here or on a stage before."""
        if self._detour is not None:
            error.add_note(
                f"With this micro-batch {self._program.graph.step} does something else than with the first one, by "
                "which it was divided. What only that needs in a later stage must be in a local variable there"
            )

    # -- detours ----------------------------------------------------------------------------------------------------

    def _new_detour(self, shared: frozenset[int] = frozenset()) -> Detour:
        return Detour(self._program, self.known, self._owned, self._trail.before, shared)

    def _off_path(self, operation: Operation, expected: Node | None) -> Any:
        """A node that was not there when the step was captured."""
        detour, names = self._detour or self._new_detour(), operation.uses(self._owned)
        is_later = detour.is_later(names)
        if not (is_later or detour.may_run(operation.kind, names)):
            raise self._changed(operation, expected)
        self._detour = detour
        if is_later:
            detour.leave(names, [*operation.tensors, *self._observed, *_variables()])
            raise _StageEnd
        self._position += 1
        return detour.run(operation, self._position - 1, self._runner)

    # -- the end ----------------------------------------------------------------------------------------------------

    def sent(self) -> tuple[Tensor, ...]:
        """Tensors for ``program.sends``."""
        if self._detour is not None:
            return self._detour.sent
        return tuple(map(self._sending.tensor, self._program.sends))

    @property
    def tapped(self) -> Mapping[int, Tapped]:
        """By position."""
        return self._taps.found

    def entries(self) -> tuple[Entry, ...] | Path:
        """What all nodes up to the end of this stage returned."""
        entries = self._trail.entries
        return entries if self._detour is None else self._detour.path(entries)

    def check_finished(self, result: Any) -> None:
        """The step must have come as far as it did when it was captured, or have returned None, and on all stages."""
        position, program, trail = self._position, self._program, self._trail
        expected = trail.start if program.is_last else program.end
        if trail.start <= position <= program.end < len(program.graph.nodes) and result is not None:
            self._detour = self._detour or self._new_detour()  # there was more when it was captured
        if self._detour is not None and not program.is_last and position != trail.ended:
            self._detour.leave(set(), [*tree.tensors(result), *self._observed], ended=result is None)
            return
        if position < expected and (result is not None or position != (trail.ended or position)):
            raise self._changed(None, program.graph.nodes[position])

    def _changed(self, operation: Operation | None, node: Node | None) -> StepChangedError:
        now = "it ended" if operation is None else f"it came to {operation} at {source_line()}"
        then = "it ended" if node is None else f"it came to {node}"
        return StepChangedError(
            f"{self._program.graph.step} does not do what it did when it was captured: after {self._position} nodes "
            f"{then} then, {now} now (stage {self._program.stage}). What a step calls must not depend on the batch, "
            "the time or chance, unless its units come in the order of the stages; move the difference into one unit, "
            "or keep it on the last stage with split_points. If it has changed for good, as from some epoch on, a run "
            "that resumes from a checkpoint follows it as it is then"
        )


def _variables() -> list[Tensor]:
    """Tensors in the local variables of the functions that the step is in, which it may use further on."""
    found: list[Tensor] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not replay.__code__:
        if frame.f_globals is not globals():
            found += tensor_arguments(*frame.f_locals.values())
        frame = frame.f_back
    return found


def _same(tensor: Tensor) -> Tensor:
    return tensor
