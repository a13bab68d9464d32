"""Find the stages of a plan that cannot split their backwards, by running the forward of each once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.capture.recorder import owned_tensors
from lightning_avgpipe.capture.tracer import is_compiled, uncompiled
from lightning_avgpipe.capture.units import tensors_of
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.part import Part, ReplayContext
from lightning_avgpipe.engine.randomness import Drawing
from lightning_avgpipe.engine.recompute import UnitRepeater
from lightning_avgpipe.engine.replay import replay
from lightning_avgpipe.engine.task import entered
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.program import StageProgram, stage_programs
from lightning_avgpipe.planning.recompute_policy import Recompute, repeated
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.state.parcel import Packer
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.state.untouched import untouched
from lightning_avgpipe.systems.zero_bubble.halves import GraphWatch, why_whole
from lightning_avgpipe.systems.zero_bubble.schedules import INPUT_GRADIENT
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import visiting


def whole_backwards(
    plan: Plan,
    schedule: Schedule,
    module: nn.Module,
    run: Callable[..., Any],
    args: Sequence[Any],
    device: torch.device,
    recompute: Recompute,
) -> dict[int, str]:
    """Return stage -> reason, for stages that are to split their backwards and cannot. Nothing else remains.

    Args:
        plan: plan of the stages.
        schedule: schedule that they will run.
        module: module whose step it is; its parameters are moved to the device stage by stage.
        run: executes the step, with the module's own grad mode and precision.
        args: arguments of one micro-batch.
        device: device to compute on.
        recompute: options that choose what is repeated.
    """
    graph, found = plan.graph, dict[int, str]()
    if not any(action.kind is INPUT_GRADIENT for row in schedule for action in row):
        return found
    units = {id(module.get_submodule(path)): path for path in graph.units}
    drawing = Drawing.of(module, graph)
    repeat = UnitRepeater(module, recompute, device) if recompute.modules else None
    batch, message = tree.map_tensors(torch.clone, tuple(args)), Message(0, ())
    with untouched(module, graph.changed), Snapshot(batch, opaque=True).restored(), uncompiled():
        for program in stage_programs(graph, plan.cuts):
            gates, values = entered(message, program.receives, True, frozenset())
            context = ReplayContext(units, owned_tensors(module, graph.glue_states), drawing, device, Packer(module))
            part = Part(program, run, batch, values, message.entries, repeat=repeat)
            watch = GraphWatch()
            with visiting(_needed(program, module), device), watch:
                replayed = replay(part, context)
            roots = [t for t in (*replayed.sent, *tree.tensors(replayed.result)) if t.requires_grad]
            repeats = recompute.stages and repeated(schedule[program.stage], program.is_last)
            why = "recompute" if repeats else watch.found or why_whole(roots, [gate.leaf for gate in gates])
            inner = (m for name in program.own & set(graph.units) for m in module.get_submodule(name).modules())
            if not drawing.seen and any(map(is_compiled, inner)):  # units that draw run uncompiled
                why = why or "a compiled module"
            if why and roots:
                found[program.stage] = why
            flags = tuple(tensor.requires_grad for tensor in replayed.sent)
            message = Message(0, tuple(t.detach() for t in replayed.sent), flags, replayed.entries)
    return found


def remarks(plan: Plan, schedule: Schedule, *rest: Any) -> Iterator[str]:
    """Yield a line for a plan for each stage that cannot split its backwards; arguments as :func:`whole_backwards`."""
    for stage, why in whole_backwards(plan, schedule, *rest).items():
        yield f"stage {stage} runs its backwards whole: there is {why}"


def _needed(program: StageProgram, module: nn.Module) -> list[torch.Tensor]:
    """Return the tensors of a stage's units, and those outside of all units."""
    units = {name: tensors_of(module.get_submodule(name)) for name in program.graph.units}
    mine = {id(t) for name, tensors in units.items() if name in program.own for t in tensors}
    others = {id(t) for tensors in units.values() for t in tensors} - mine
    return [t for t in tensors_of(module) if id(t) not in others]
