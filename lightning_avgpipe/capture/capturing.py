"""Capture: run a step function once on one micro-batch and write down its call graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.named_state import trained_parameters
from lightning_avgpipe.capture.neighbours import neighbours
from lightning_avgpipe.capture.recorder import Foresight, Recorder
from lightning_avgpipe.capture.snapshot import untouched
from lightning_avgpipe.capture.tracer import watching
from lightning_avgpipe.errors import CaptureError, SkippedStepError
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.objects import Objects
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
) -> CallGraph:
    """Record what ``run(*args)`` does with the units of ``module``. Nothing remains of the execution.

    Args:
        step: name of the step function, for messages.
        run: executes the step, with the module's own grad mode and precision.
        args: arguments of the step, the micro-batch first.
        module: whose submodules are called.
        units: paths of the submodules that are never split; what else the step calls, outside of them, is a unit too.
        device: where to compute; parameters that are elsewhere visit it one unit at a time.
        ignore: modules that only observe.

    Raises:
        SkippedStepError: the step returned None in training.
        CaptureError: the step returned no loss in training, or is given nested tensors.
    """
    if any(tensor.is_nested for tensor in tree.tensors(args)):
        raise CaptureError(f"the batch of {step} holds a nested tensor, which cannot be followed; {INSTEAD_OF_NESTED}")
    foresight = Foresight()
    while True:
        batch = tree.map_tensors(torch.clone, tuple(args))  # a step may change its batch
        make = partial(Recorder, module, units, device, foresight, ignore)
        with contextlib.closing(make([*tree.tensors(batch), *Objects(batch).tensors])) as recorder:
            try:
                graph = _record(recorder, make, step, run, batch)
            except Exception as error:
                error.add_note(f"while {step} was followed on a first micro-batch, to learn what it calls")
                raise
            before, foresight = foresight, recorder.foresight
        # whether an operation on a tensor changes state must be known before the tensor is first changed
        if foresight == before:
            return graph


def _record(
    recorder: Recorder,
    make: Callable[[Sequence[Tensor]], Recorder],
    step: str,
    run: Callable[..., Any],
    args: Sequence[Any],
) -> CallGraph:
    module = recorder.module
    spare = tree.map_tensors(torch.clone, tuple(args))
    trained = trained_parameters(module)
    batch = [(leaf, version_of(leaf)) for leaf in tree.tensors(args)]
    if args:
        recorder.batch.begin(args[0])
    with untouched(module), Objects(args, opaque=True).restored(), recorder.visiting(), recorder.state.changes:
        with recorder.assignments.watched(), recorder.shared.watched(), recorder.following(), watching(recorder.calls):
            result = run(*args)
        attributes, carried = recorder.finish(result)
        loss = _loss(result) if step == "training_step" else None
        attributes, of_units = _lasting(recorder, attributes, make, run, spare)
        holders = tuple(recorder.mutations.holders().items())
    return CallGraph(
        step=step,
        nodes=tuple(recorder.drawn(node) for node in recorder.nodes),
        values=tuple(recorder.values.all),
        kept=frozenset(recorder.kept),
        units=recorder.units.found(),
        resident=frozenset(recorder.resident),
        drawing=frozenset(recorder.watch.drawing),
        host_drawing=frozenset(recorder.watch.host_drawing),
        leaves=recorder.batch.leaves(),
        batch_writes=any(version_of(leaf) != version for leaf, version in batch),
        glue_states=frozenset(recorder.uses.by_glue),
        rewritten=frozenset(recorder.state.rewritten),
        attributes=attributes,
        carried=carried,
        holders=holders,
        of_units=tuple(sorted(of_units - dict(holders).keys())),
        written=recorder.mutations.written(recorder.state.changes.nameless),
        reads=tuple(recorder.assignments.reads.items()),
        pinned=tuple(recorder.pinned),
        leaving=frozenset(recorder.hidden.leaving),
        opened=tuple(recorder.calls.ended),
        trained=trained,
        finite=loss is None or bool(loss.isfinite().all()),
        generators=recorder.generators.uses(),
        uncalled=frozenset(path for path, _ in module.named_modules() if path).difference(recorder.watch.calls),
        beside=tuple(neighbours(module, recorder.watch.calls)),
    )


def _lasting(
    recorder: Recorder,
    attributes: tuple[Any, ...],
    make: Callable[[Sequence[Tensor]], Recorder],
    run: Callable[..., Any],
    spare: Sequence[Any],
) -> tuple[tuple[Any, ...], set[Any]]:
    """Of the attributes that the step changes those that it changes again, and those that units change."""
    of_units = set(recorder.mutations.of_units()).difference(attributes)
    lasts = recorder.assignments.created() or recorder.mutations.holders() or of_units or recorder.hidden.keeps
    lasts = lasts or recorder.freely or recorder.generators.in_use
    again = _once_more(recorder, make, run, spare) if lasts else None
    recorder.pinned += recorder.hidden.settle(None if again is None else again.hidden)
    if again is not None:
        with contextlib.closing(again):
            of_units &= set(again.mutations.of_units())
            attributes += tuple(sorted(recorder.freely & again.freely))
            made = recorder.assignments.created() - again.assignments.assigned()
            attributes = tuple(key for key in attributes if key not in made)
            recorder.mutations.keep(again.mutations.found())
            recorder.pinned += recorder.generators.settle(again.generators)
    recorder.pinned += recorder.mutations.pinned(recorder.assignments)
    recorder.pinned += recorder.shared.pinned(recorder.mutations.once)
    recorder.pinned += recorder.generators.pinned(recorder.nodes)
    return attributes, of_units


def _once_more(
    recorder: Recorder, make: Callable[[Sequence[Tensor]], Recorder], run: Callable[..., Any], args: Sequence[Any]
) -> Recorder | None:
    """What the step changes again when it runs once more; None if it cannot, which training will say.

    The rest it has made for good. All stages of a process share that and what was made with it (hooks, tables): a stage
    of its own mind would make everything once more.
    """
    again = make(tree.tensors(args))
    again.hidden.follow(recorder.hidden)
    try:
        with again.state.changes, again.assignments.watched(), again.following(), watching(again.calls):
            run(*args)
    except Exception:  # of any type: it is the user's code
        again.close()
        return None
    return again


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
