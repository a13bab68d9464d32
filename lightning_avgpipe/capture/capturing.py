"""Capture: run a step function on one micro-batch and record its call graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.calls import watching_seeds
from lightning_avgpipe.capture.draft import END_OF_STEP
from lightning_avgpipe.capture.effects import Iterators
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.named_state import trained_parameters
from lightning_avgpipe.capture.recorder import Preview, StepRecorder
from lightning_avgpipe.capture.tracer import intercepting, watching
from lightning_avgpipe.capture.units import neighbours
from lightning_avgpipe.errors import CaptureError, SkippedStepError
from lightning_avgpipe.state.snapshot import Snapshot
from lightning_avgpipe.state.untouched import untouched
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.tensors import INSTEAD_OF_NESTED
from lightning_avgpipe.utils.torch_compat import version_of


def capture(
    step: str,
    run: Callable[..., Any],
    args: Sequence[Any],
    module: nn.Module,
    units: Sequence[str],
    device: torch.device | None = None,
    ignore: Collection[nn.Module] = (),
    changing: set[int] | None = None,
) -> CallGraph:
    """Record the call graph of ``run(*args)`` on the units of ``module``. All changes of the execution are undone.

    Args:
        step: name of the step function, for messages.
        run: executes the step, with the module's own grad mode and precision.
        args: arguments of the step, the micro-batch first.
        module: module whose submodules are called.
        units: paths of the submodules that are never split; other modules that are called outside of these are units
            too.
        device: device to compute on; parameters that are elsewhere are moved there one unit at a time.
        ignore: modules that only observe, such as metrics.
        changing: ids of objects that earlier captures have seen change while the step runs. They are watched from the
            start, so that the step need not run again. Ids that this capture finds are added.

    Raises:
        SkippedStepError: the step returned None in training.
        OnlyInUnitsError: code between units does what only the inside of a unit may do.
        CaptureError: the step returned no loss in training, is given nested tensors, or assigns submodules.
    """
    if any(tensor.is_nested for tensor in tree.tensors(args)):
        raise CaptureError(f"the batch of {step} holds a nested tensor, which cannot be followed; {INSTEAD_OF_NESTED}")
    changing = set() if changing is None else changing
    preview = Preview(mutable=frozenset(changing))
    while True:
        batch = tree.map_tensors(torch.clone, tuple(args))  # a step may change its batch
        make = partial(StepRecorder, module, units, device, preview, ignore)
        with contextlib.closing(make([*tree.tensors(batch), *Snapshot(batch).tensors])) as recorder:
            try:
                graph = _graph(recorder, make, module, step, run, batch)
            except Exception as error:
                error.add_note(f"while {step} was followed on a first micro-batch, to learn what it calls")
                raise
            before, preview = preview, recorder.preview
        # A run may find facts that must be known from its start, such as which buffers glue changes. Then run again.
        if preview == before:
            changing |= preview.mutable
            return graph


def _graph(
    recorder: StepRecorder, make: Callable[[Sequence[Tensor]], StepRecorder], module: nn.Module, step: str,
    run: Callable[..., Any], args: Sequence[Any],
) -> CallGraph:  # fmt: skip
    """Run a step under a recorder, undo its changes, and make the call graph of what was recorded."""
    draft, effects, calls = recorder.draft, recorder.effects, recorder.calls
    trained, spare = trained_parameters(module), tree.map_tensors(torch.clone, tuple(args))
    names = {id(p): name for name, p in module.named_parameters()}
    batch = [(leaf, version_of(leaf)) for leaf in tree.tensors(args)]
    if args:
        recorder.batch.begin(args[0])
    iterators = Iterators(effects.held)
    put_back = Snapshot(args, opaque=True).restored()
    # intercepting() replaces nn.Module.__setattr__, so it must come before watched(), which wraps it
    with untouched(module), put_back, recorder.visiting(module), recorder.state, intercepting():
        with (
            effects.watched(), recorder.following(), watching(calls),
            watching_seeds(calls.note_seed),
        ):  # fmt: skip
            result = recorder.with_state_copied(run(*args))
        _check_submodules(step, names, module)
        recorder.finish(result)
        if taken := iterators.advanced():
            draft.pin(
                0, END_OF_STEP, f"{step} takes items from the iterator '{taken}', which nobody can put back: each "
                "stage would take others. Make it a part of the batch (CombinedLoader), or count in an attribute",
            )  # fmt: skip
        # look at the changes of the step before they are undone
        finite = step != "training_step" or bool(_loss(result).isfinite().all())
        carried = _find_what_lasts(recorder, make, run, spare)
        constants, held_iterators = tuple(effects.attributes.pinned_by_constants()), iterators.leads()
    graph = replace(
        _recorded(step, recorder, module), trained=trained, carried=carried, finite=finite,
        iterators=held_iterators, pinned=(*draft.pinned, *constants),
        batch_writes=any(version_of(leaf) != version for leaf, version in batch),
    )  # fmt: skip
    if constants and None not in graph.obstacles[1:-1]:  # the step may be divided if nothing else forbids it
        return replace(graph, pinned=tuple(draft.pinned))
    return graph


def _recorded(step: str, recorder: StepRecorder, module: nn.Module) -> CallGraph:
    """Return the call graph of what a recorder has noted."""
    draft, effects, calls = recorder.draft, recorder.effects, recorder.calls
    holders = effects.holders()
    drawing = calls.drawing | calls.host_drawing
    return CallGraph(
        step=step,
        nodes=tuple(replace(node, drawn=tuple(filter(drawing.__contains__, node.drawn))) for node in draft.nodes),
        values=tuple(replace(value, is_saved=value.storage in draft.saved) for value in draft.values),
        observed=frozenset(draft.observed),
        units=recorder.units.found(),
        resident=frozenset(draft.resident),
        drawing=frozenset(calls.drawing),
        host_drawing=frozenset(calls.host_drawing),
        seeding=frozenset(calls.seeding),
        from_entropy=calls.from_entropy,
        leaves=recorder.batch.leaves(),
        glue_states=frozenset(recorder.state.by_glue),
        rewritten=frozenset(recorder.state.rewritten),
        assigned_between=effects.assigned,
        set_back=tuple(sorted(effects.set_back)),
        mutated_between=holders,
        changed_by_units={key: effects.last_change(key) for key in sorted(effects.changed_by_units - holders.keys())},
        parts_changed=effects.parts(),
        made_by_units={key: effects.last_change(key) for key in sorted(effects.changed_once_by_units - holders.keys())},
        written_tensors=effects.written(recorder.state.unnamed),
        reads=dict(effects.attributes.first_reads),
        read_between=dict(effects.attributes.read_between),
        buffers_read=dict(recorder.buffers_read),
        leaking=frozenset(recorder.hidden.leaking),
        followed_calls=tuple(calls.ended),
        generators=effects.generators.uses(),
        uncalled=frozenset(path for path, _ in module.named_modules() if path).difference(calls.calls),
        inner_flops=dict(calls.inner_flops),
        neighbours=tuple(neighbours(module, calls.calls, {name for n in draft.nodes for name in n.parameters})),
    )


def _check_submodules(step: str, names: Mapping[int, str], module: nn.Module) -> None:
    """Check that a step has assigned no submodule, so that each parameter still has the name that it had before."""
    for name, parameter in module.named_parameters():
        if names.get(id(parameter), name) != name:
            raise CaptureError(
                f"{step} assigns a submodule, so that the parameter '{names[id(parameter)]}' is '{name}' now; "
                "choose between modules without assigning one, or assign it in a hook or before training"
            )


def _find_what_lasts(
    recorder: StepRecorder,
    make: Callable[[Sequence[Tensor]], StepRecorder],
    run: Callable[..., Any],
    args: Sequence[Any],
) -> tuple[str, ...]:
    """Run the step once more to find out which of its changes are made only once.

    Changes that are made only once (hooks, tables), and the objects that are made along with them, are shared by all
    stages of a process. If each stage had its own copy, each would make them again.

    Returns:
        full names of the attributes whose tensors go from one micro-batch to the next. For an attribute that was empty
        before the first run, only the second run shows it.
    """
    mutated = recorder.effects.holders()
    carried = [*recorder.effects.attributes.carried(mutated)]
    with contextlib.ExitStack() as stack:
        again = None
        if recorder.effects.may_last or recorder.hidden.own:
            again = stack.enter_context(contextlib.closing(make(tree.tensors(args))))
            again.hidden.follow(recorder.hidden)
            try:
                with again.state, again.effects.attributes.watched(), again.following(), watching(again.calls):
                    again.with_state_copied(run(*args))
            except Exception:  # any error of the user's code is ignored here; training will show it
                again = None
        recorder.draft.pinned += recorder.hidden.compare_with_repeat(None if again is None else again.hidden)
        if again is not None:
            carried += again.effects.attributes.carried(mutated)
            recorder.effects.repeated(again.effects)
    recorder.draft.pinned += recorder.effects.pinned(recorder.draft.nodes)
    return tuple(dict.fromkeys(carried))


def _loss(result: Any) -> Tensor:
    if result is None:
        raise SkippedStepError("training_step returned None, so it has not shown what leads to a loss")
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise CaptureError(
            f"training_step returned {type(result).__name__} instead of a loss; return a tensor, or a dict with the "
            "key 'loss', or None to skip a micro-batch"
        )
    return loss
