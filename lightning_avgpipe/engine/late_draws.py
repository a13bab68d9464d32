"""Detect draws from random generators of the model that a step begins to make after it was captured.

The draws in the captured step are known, and the cuts allow for them. Code between units runs on every stage that gets
that far, so several stages would make draws that it begins to make later; only the last stage runs all of it. A unit
runs on one stage, so it may begin to draw, unless units of other stages may draw from the same generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_avgpipe.capture.graph import GeneratorUse, Node
from lightning_avgpipe.capture.operation import Operation
from lightning_avgpipe.engine.late_effects import LateEffects
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.state.objects import Variable, is_generator
from lightning_avgpipe.state.outside import outside_variables, variable
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.utils.names import is_within, joined, listed

_PLAIN = frozenset((Tensor, nn.Parameter, type(None), bool, int, float, str))
_NOTHING = contextlib.nullcontext()


class LateDraws(LateEffects):
    """A check for late draws from random generators that the model holds, or that the step makes."""

    grace_period = "nothing"

    def __init__(self, program: StageProgram, module: nn.Module, repeats: bool) -> None:
        super().__init__(program, module, repeats)
        self._uses = program.graph.generators if program.num_stages > 1 else ()
        self._roots: dict[tuple[str, str], Variable] = {}  # cached: to find variables takes long
        self._own = program.own - program.called_elsewhere
        self._units = [_reaching(use, program, module) for use in self._uses]
        self._found: dict[int, tuple[Any, int]] = {}  # id of a generator -> the generator, and the index of its use
        self._before = Snapshot(())
        self._position = -1  # code between nodes was checked up to this position

    def begin(self) -> None:
        self._position, self._found = -1, {}
        for number, use in enumerate(self._uses):
            one = self._generator(use)
            if one is not None:
                self._found[id(one)] = one, number
        self._before = Snapshot((one for one, _ in self._found.values()), opaque="generators")

    def end(self) -> str | None:
        late = self._between(self._program.end)
        self._found = {}
        return late

    def _generator(self, use: GeneratorUse) -> Any:
        """Return the generator of a use; None if it cannot be reached here, as where only rank 0 has the objects."""
        for path, name, number in use.leads:
            with contextlib.suppress(KeyError, IndexError, AttributeError):
                if (path, name) not in self._roots:
                    self._roots[path, name] = variable(self._module, path, name)
                return Snapshot([self._roots[path, name]], opaque="generators").opaque[number]
        return None

    def node(self, operation: Operation, node: Node) -> contextlib.AbstractContextManager[None]:
        """Run a node of this stage within this context, and check its draws."""
        made = self._made(operation, node)
        return _NOTHING if made is None and not self._uses else self._node(node, made)

    @contextlib.contextmanager
    def _node(self, node: Node, made: Snapshot | None) -> Iterator[None]:
        self.check(self._between(node.index))
        yield
        for one in self._changed():
            self.check(self._in_node(self._uses[one], self._units[one], node))
        if made is not None and any(id(one) not in self._found for one in made.changed() if is_generator(one)):
            self.check(self._draws(f"a generator that the step makes, in {node}"))

    def _made(self, operation: Operation, node: Node) -> Snapshot | None:
        """Return generators in the arguments, which the step may have made and does not send; None if none matter."""
        given = (*operation.args, *operation.kwargs.values())
        if self._program.is_last or node.generators or _PLAIN.issuperset(map(type, given)):
            return None
        return Snapshot(given, opaque="generators")

    def _changed(self) -> list[int]:
        """Return the indices of the uses whose generators have drawn since the last call."""
        changed = self._before.changed() if self._found else []
        self._before.update(changed)
        return [self._found[id(one)][1] for one in changed if id(one) in self._found]

    def _in_node(self, use: GeneratorUse, units: frozenset[str], node: Node) -> str | None:
        """Return a description of a node's draws if other stages may draw from the same generator; else None."""
        program = self._program
        if use.nodes:
            allowed = program.start <= use.nodes[0] < program.end
        elif use.between is not None:
            allowed = program.is_last and use.between > program.start
        else:
            allowed = units <= self._own and node.name in units
        if allowed:
            return None
        others = [repr(path) for path in sorted(units) if path != node.name]
        beside = f", which others may draw from too ({listed(others)})" if others else ""
        return self._draws(f"{self._name(use)} in {node}{beside}")

    def _between(self, position: int) -> str | None:
        """Return a description of draws by code between nodes, up to here, if other stages would make them too."""
        program, before, self._position = self._program, self._position, position
        for number in self._changed():
            use = self._uses[number]
            if use.renewed and (not use.nodes or before < program.start):
                allowed = True
            elif use.nodes:
                allowed = program.is_last and use.nodes[0] >= program.start
            elif use.between is None:
                allowed = program.is_last and self._units[number] <= self._own
            elif program.stage == 0 or use.between > program.start:  # no earlier stage reaches it
                allowed = program.is_last or use.between <= program.end
            else:
                allowed = before < program.start
            if not allowed:
                return self._draws(f"{self._name(use)} between submodules")
        return None

    def _name(self, use: GeneratorUse) -> str:
        path, name, _ = use.leads[0]
        held = variable(self._module, path, name).state().get("value")
        return f"'{joined(path, name)}'" if is_generator(held) else f"a generator in '{joined(path, name)}'"

    def _draws(self, where: str) -> str:
        return (
            f"draws random numbers from {where}, and did not when it was captured, so each stage would draw different "
            f"ones (stage {self._program.stage}); draw from it in the first step too, so that no cut lies before the "
            "last draw, or draw from torch's, Python's or NumPy's global generator, which gives all stages the same"
        )


def _reaching(use: GeneratorUse, program: StageProgram, module: nn.Module) -> frozenset[str]:
    """Return the units that may draw from a generator: they hold it, refer to it, or got it as an argument."""
    found = set(use.given)
    for path, name, _ in use.leads:
        for unit in program.graph.units:
            if (path and is_within(path, unit)) or (
                not path and " " in name and name in outside_variables(module.get_submodule(unit))
            ):
                found.add(unit)
    return frozenset(found)
