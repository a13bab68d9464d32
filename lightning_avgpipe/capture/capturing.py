"""Capture: run a step function once on one micro-batch and write down its call graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_avgpipe.capture.draft import ANYWHERE
from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.capture.iterators import Iterators, Key
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
                trained = trained_parameters(module)
                followed = _followed(recorder, make, module, step, run, batch)
                graph = _graph(recorder, module, step, trained, followed)
            except Exception as error:
                error.add_note(f"while {step} was followed on a first micro-batch, to learn what it calls")
                raise
            before, foresight = foresight, recorder.foresight
        # whether an operation on a tensor changes state must be known before the tensor is first changed
        if foresight == before:
            return graph


class _Followed(NamedTuple):
    """What is known when a step has run; its changes are undone by then.

    Attributes:
        iterators: what leads to any.
        carried: full names of tensors that go from one micro-batch to the next.
        loss: of a training step.
        holders: what leads to objects that change, and before which node they first do.
        batch_writes: whether it changed tensors of its batch.
    """

    iterators: tuple[Key, ...]
    carried: tuple[str, ...]
    loss: Tensor | None
    holders: tuple[tuple[Key, int], ...]
    batch_writes: bool


def _followed(
    recorder: Recorder, make: Callable[[Sequence[Tensor]], Recorder], module: nn.Module, step: str,
    run: Callable[..., Any], args: Sequence[Any],
) -> _Followed:  # fmt: skip
    """Let a recorder follow a step."""
    spare = tree.map_tensors(torch.clone, tuple(args))
    batch = [(leaf, version_of(leaf)) for leaf in tree.tensors(args)]
    if args:
        recorder.batch.begin(args[0])
    iterators = Iterators(recorder.unnamed.mutations.attributes)
    with untouched(module), Objects(args, opaque=True).restored(), recorder.visiting(module), recorder.state.changes:
        with recorder.unnamed.watched(), recorder.following(), watching(recorder.calls):
            result = run(*args)
        recorder.finish(result)
        if taken := iterators.advanced():
            recorder.draft.pin(
                0, ANYWHERE, f"{step} takes items from the iterator '{taken}', which nobody can put back: each stage "
                "would take others. Make it a part of the batch (CombinedLoader), or count in an attribute",
            )  # fmt: skip
        carried = tuple(recorder.unnamed.assignments.carried())
        loss = _loss(result) if step == "training_step" else None
        _find_what_lasts(recorder, make, run, spare)
        holders = tuple(recorder.unnamed.mutations.holders().items())
    writes = any(version_of(leaf) != version for leaf, version in batch)
    return _Followed(iterators.leads(), carried, loss, holders, writes)


def _graph(recorder: Recorder, module: nn.Module, step: str, trained: frozenset[str], followed: _Followed) -> CallGraph:
    """What was recorded."""
    draft, unnamed, draws = recorder.draft, recorder.unnamed, recorder.calls.watch
    drawing = draws.drawing | draws.host_drawing
    return CallGraph(
        step=step,
        nodes=tuple(replace(node, drawn=tuple(filter(drawing.__contains__, node.drawn))) for node in draft.nodes),
        values=tuple(draft.values.all),
        kept=frozenset(draft.kept),
        units=recorder.units.found(),
        resident=frozenset(draft.resident),
        drawing=frozenset(draws.drawing),
        host_drawing=frozenset(draws.host_drawing),
        leaves=recorder.batch.leaves(),
        batch_writes=followed.batch_writes,
        glue_states=frozenset(recorder.uses.by_glue),
        rewritten=frozenset(recorder.state.rewritten),
        attributes=unnamed.assigned,
        carried=followed.carried,
        holders=followed.holders,
        of_units=tuple(sorted(unnamed.of_units - dict(followed.holders).keys())),
        written=unnamed.mutations.written(recorder.state.changes.nameless),
        reads=tuple(unnamed.assignments.reads.items()),
        pinned=tuple(draft.pinned),
        leaving=frozenset(recorder.hidden.leaving),
        opened=tuple(recorder.calls.ended),
        trained=trained,
        finite=followed.loss is None or bool(followed.loss.isfinite().all()),
        generators=unnamed.generators.uses(),
        iterators=followed.iterators,
        uncalled=frozenset(path for path, _ in module.named_modules() if path).difference(draws.calls),
        beside=tuple(neighbours(module, draws.calls)),
    )


def _find_what_lasts(
    recorder: Recorder, make: Callable[[Sequence[Tensor]], Recorder], run: Callable[..., Any], args: Sequence[Any]
) -> None:
    """Find out what of what the step changes it changes again when it runs once more.

    The rest it has made for good. All stages of a process share that and what was made with it (hooks, tables): a stage
    of its own mind would make everything once more.
    """
    with contextlib.ExitStack() as stack:
        again = None
        if recorder.unnamed.may_last or recorder.hidden.own:
            again = stack.enter_context(contextlib.closing(make(tree.tensors(args))))
            again.hidden.own.follow(recorder.hidden.own)
            try:
                with again.state.changes, again.unnamed.assignments.watched(), again.following(), watching(again.calls):
                    run(*args)
            except Exception:  # of any type: it is the user's code, which training will run again
                again = None
        recorder.draft.pinned += recorder.hidden.settle(None if again is None else again.hidden)
        if again is not None:
            recorder.unnamed.repeated(again.unnamed)
    recorder.draft.pinned += recorder.unnamed.pinned(recorder.draft.nodes)


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
