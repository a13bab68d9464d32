"""Check that stages do not begin to draw from generators of the model, of which each process has a copy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.capture.graph import GeneratorUse, Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.capture.outside import outside, variable
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils import opaque, tree
from lightning_avgpipe.utils.objects import Objects

_PLAIN = frozenset((Tensor, nn.Parameter, type(None), bool, int, float, str))
_NOTHING = contextlib.nullcontext()


class OwnGenerators:
    """A check for stages that begin to draw from a random generator that the model holds.

    The draws in the captured step are known, and the cuts allow for them. Code between units runs on every stage that
    gets that far, so draws that it begins later would be made by several stages; only the last stage runs all of it. A
    unit runs on one stage and may begin to draw, unless other units may draw from the same generator.

    Args:
        program: program of the stage.
        module: the whole module.
    """

    def __init__(self, program: StageProgram, module: nn.Module) -> None:
        self._program = program
        self._module = module
        self._uses = program.graph.generators if program.num_stages > 1 else ()
        nodes = program.graph.nodes
        called = {node.name for node in (*nodes[: program.start], *nodes[program.end :]) if node.kind == "call"}
        self._own = program.own - called
        self._units = [_reaching(use, program, module) for use in self._uses]
        self._found: dict[int, tuple[Any, int]] = {}  # id of a generator -> the generator, and the index of its use
        self._before = Objects(())
        self._position = -1  # position up to which code between nodes was checked

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Run a forward within this context, and check the draws in it.

        Raises:
            StepChangedError: this stage has made a draw that other stages do not take into account.
        """
        return self._watched() if self._uses else _NOTHING

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._position = -1
        for number, use in enumerate(self._uses):
            one = self._generator(use)
            if one is not None:
                self._found[id(one)] = one, number
        self._before = Objects((one for one, _ in self._found.values()), opaque="generators")
        yield
        self._look(self._program.end)
        self._found = {}

    def _generator(self, use: GeneratorUse) -> Any:
        """Return the generator of a use; None if only rank 0 holds what leads to it."""
        for path, name, number in use.leads:
            with contextlib.suppress(KeyError, IndexError, AttributeError):
                return Objects([variable(self._module, path, name)], opaque="generators").opaque[number]
        return None

    def node(self, operation: Operation, node: Node) -> contextlib.AbstractContextManager[None]:
        """Run a node of this stage within this context, and check its draws."""
        made = self._made(operation, node)
        return _NOTHING if made is None and not self._uses else self._node(node, made)

    @contextlib.contextmanager
    def _node(self, node: Node, made: Objects | None) -> Iterator[None]:
        self._look(node.index)
        yield
        for one in self._changed():
            self._check_node(self._uses[one], self._units[one], node)
        if made is not None and any(id(one) not in self._found for one in made.changed() if opaque.is_generator(one)):
            self._refuse(f"a generator that the step makes, in {node}")

    def _made(self, operation: Operation, node: Node) -> Objects | None:
        """Return generators that the step may have made and that are not sent with the micro-batch; None if none."""
        given = (*operation.args, *operation.kwargs.values())
        if self._program.is_last or node.generators or _PLAIN.issuperset(map(type, given)):
            return None
        return Objects(given, opaque="generators")

    def _changed(self) -> list[int]:
        """Return the indices of the uses whose generators have drawn since the last call."""
        changed = self._before.changed() if self._found else []
        self._before.follow(changed)
        return [self._found[id(one)][1] for one in changed if id(one) in self._found]

    def _check_node(self, use: GeneratorUse, units: frozenset[str], node: Node) -> None:
        """Check that all draws from a generator are on this stage, after a node of it has drawn."""
        program = self._program
        if use.nodes:
            allowed = program.start <= use.nodes[0] < program.end
        elif use.between is not None:
            allowed = program.is_last and use.between > program.start
        else:
            allowed = units <= self._own and node.name in units
        if not allowed:
            others = [path for path in sorted(units) if path != node.name]
            beside = f", which others may draw from too ({_listed(others)})" if others else ""
            self._refuse(f"{self._name(use)} in {node}{beside}")

    def _look(self, position: int) -> None:
        """Check the draws of code between nodes up to this position."""
        program, before, self._position = self._program, self._position, position
        for number in self._changed():
            use = self._uses[number]
            if use.renewed and (not use.nodes or before < program.start):
                allowed = True
            elif use.nodes:
                allowed = program.is_last and use.nodes[0] >= program.start
            elif use.between is None:
                allowed = program.is_last and self._units[number] <= self._own
            elif program.stage == 0 or use.between > program.start:  # no stage before comes to it
                allowed = program.is_last or use.between <= program.end
            else:
                allowed = before < program.start
            if not allowed:
                self._refuse(f"{self._name(use)} between submodules")

    def _name(self, use: GeneratorUse) -> str:
        path, name, _ = use.leads[0]
        held, full = variable(self._module, path, name).state().get("value"), f"{path}.{name}" if path else name
        return f"'{full}'" if opaque.is_generator(held) else f"a generator in '{full}'"

    def _refuse(self, where: str) -> None:
        raise StepChangedError(
            f"{self._program.graph.step} draws random numbers from {where}, and did not when it was followed to be "
            f"divided, so each stage would draw its own (stage {self._program.stage}); draw from it in the first step "
            "too, so that no cut lies before the last draw, or draw from torch's, Python's or NumPy's common "
            "generator, which gives all stages the same"
        )


def unmoved(args: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
    """Restore generators in a micro-batch after this context, since stages of one process share the micro-batch."""
    found = [leaf for leaf in tree.leaves(tuple(args)) if opaque.is_generator(leaf)]
    return Objects(found, opaque="generators").restored() if found else _NOTHING


def _reaching(use: GeneratorUse, program: StageProgram, module: nn.Module) -> frozenset[str]:
    """Return the units that may draw from a generator: those that hold it, name it, or were given it."""
    found = set(use.given)
    for path, name, _ in use.leads:
        for unit in program.graph.units:
            holds = bool(path) and f"{path}.".startswith(f"{unit}.")
            if holds or (not path and " " in name and name in outside(module.get_submodule(unit))):
                found.add(unit)
    return frozenset(found)


def _listed(names: list[str], most: int = 3) -> str:
    return ", ".join(f"'{name}'" for name in names[:most]) + (", ..." if len(names) > most else "")
