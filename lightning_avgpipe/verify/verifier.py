"""Verification: the first iterations of training run plainly as well, and the first difference is an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_avgpipe.capture.outside import outside
from lightning_avgpipe.elastic.optimizer_clone import parameters_in, unwrapped
from lightning_avgpipe.engine.loss import loss_in
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import VerificationError
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.torch_compat import has_compiled
from lightning_avgpipe.verify.advice import advice
from lightning_avgpipe.verify.comparison import Difference, first_difference, how_different, usual_size
from lightning_avgpipe.verify.duplicate import duplicate, named_instead
from lightning_avgpipe.verify.plain import Outcome, PlainRun, notify_zero_grad
from lightning_avgpipe.verify.plain_draws import Captured
from lightning_avgpipe.verify.state import aliases, clone, put
from lightning_avgpipe.verify.stepped import Clipping, PlainStep, StepNotes, scales
from lightning_avgpipe.verify.subject import Subject
from lightning_avgpipe.verify.tally import Tally

Finish = Callable[[int, int, Any], Tensor | None]


class Verifier:
    """Compares the first iterations of one run of the trainer with a plain run on the process of the loss.

    Every process calls its methods, at the same points of an iteration: :meth:`watch`, :meth:`begin`, the wrapped
    ``finish``, :meth:`compare`, and :meth:`stepping` around the optimizer's step.

    Args:
        subject: that is verified.
        iterations: optimizer steps that are.
        done: called after the last of them.
    """

    def __init__(self, subject: Subject, iterations: int, done: Callable[[str], None]) -> None:
        self._subject = subject
        self._left = self._wanted = iterations
        self._done = done
        self._tally = Tally()
        self._begun = False
        self._pipelines: list[_Pipeline] = []
        self._before: Outcome | None = None

    @property
    def succeeded(self) -> bool:
        """Whether all that was to be verified has been, and is equal."""
        return self._left == 0

    @property
    def active(self) -> bool:
        """Whether the next batch is verified."""
        return self._left > 0

    # -- an iteration --------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """An iteration begins; the step may have to be captured first, of which nothing may remain."""
        first = self._subject.leads and self._subject.plan is None and self._subject.num_models == 1
        self._before = self._subject.state() if first else None

    def begin(
        self,
        works: Sequence[Sequence[MicroBatch]],
        rest: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
        iteration: int,
        finish: Finish,
    ) -> Finish:
        """The stages are ready: run plainly what they will run.

        Args:
            works: micro-batches of each pipeline.
            rest: further arguments of the step.
            context: in which steps run.
            iteration: of the random numbers.
            finish: what the last stage does with a result.
        Returns:
            What does the same, and takes note of losses.
        """
        subject, cluster = self._subject, self._subject.cluster
        self._begun = True
        clears = subject.clears_gradients()
        carried = [{} for _ in works] if clears else [pipeline.expected.gradients for pipeline in self._pipelines]
        self._pipelines = [_Pipeline() for _ in works]
        first = cluster.group_number // cluster.stage_map.replicas * subject.num_pipelines()
        for n, (parts, pipeline) in enumerate(zip(works, self._pipelines, strict=True)):
            with subject.model(n):
                state = subject.collected()
                if subject.leads:
                    self._check_capture(state)
                    pipeline.attributes = dict(state.attributes)
                    clear = self._clear if clears and n == 0 else None
                    with cluster.channels.monitor.during("runs the step plainly, to verify it"):
                        key = subject.seed(), iteration, first + n
                        pipeline.expected = self._plain(key, parts, rest, context, state, carried[n], clear)
        subject.step_log.listener = self._pipelines[0].found.logged.__setitem__

        def noted(n: int, i: int, result: Any) -> Tensor | None:
            if result is not None:
                self._pipelines[n].found.losses[f"micro-batch {i}"] = loss_in(result).detach().clone()
            return finish(n, i, result)

        return noted

    def _plain(
        self,
        key: tuple[int, int, int],
        parts: Sequence[MicroBatch],
        rest: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
        state: Outcome,
        carried: Mapping[str, Tensor | None],
        clear: Callable[[pl.LightningModule], None] | None,
    ) -> Outcome:
        subject, trainer, module = self._subject, self._subject.trainer, self._subject.module
        assert subject.plan is not None
        shared = [trainer, trainer.strategy, subject.step_log, trainer.datamodule, *trainer.callbacks, *trainer.loggers]  # type: ignore[attr-defined]
        twin = duplicate(module, {**state.parameters, **state.buffers}, [x for x in shared if x is not None])
        put(twin, state.attributes)  # what units have changed on other processes
        twin.to(subject.cluster.device)
        run = PlainRun(
            trainer, trainer.precision_plugin, context, key, Captured.of(subject.plan.graph, module),
            trainer.accumulate_grad_batches, subject.loss_is_mean, subject.loss_weight(), subject.cluster.device,
        )  # fmt: skip
        with (
            Objects(outside(module).values(), opaque=True).restored(),  # which the twin shares
            named_instead(module, twin),
        ):
            return run.run(twin, parts, rest, carried, clear)

    def _clear(self, module: pl.LightningModule) -> None:
        notify_zero_grad(module, self._subject.trainer.optimizers[0])

    def compare(self) -> None:
        """All backwards are done, and nothing else: compare what there is now.

        Raises:
            VerificationError: something differs.
        """
        subject = self._subject
        subject.step_log.listener = None
        ends = not subject.trainer.fit_loop._should_accumulate()
        for n, pipeline in enumerate(self._pipelines):
            with subject.model(n):
                state = subject.collected()
            if subject.leads:
                self._compare(n, pipeline, state, ends)

    def _compare(self, n: int, pipeline: _Pipeline, state: Outcome, ends: bool) -> None:
        found, expected, plan, tally = pipeline.found, pipeline.expected, self._subject.plan, self._tally
        assert plan is not None
        same = partial(self._same, n)
        same("the loss", expected.losses, found.losses)
        tally.losses += len(expected.losses)
        if ends:
            downstream = [name for stage in reversed(plan.stages) for name in reversed(stage.parameters)]
            held = {name: g for name, g in expected.gradients.items() if name in state.gradients}
            tied = plan.copied
            scale = usual_size(held.values())
            same("the gradient", held, state.gradients, tied.__contains__, downstream, scale)
            tally.names["tied gradients"].update(name for name in held if name in tied)
            tally.names["gradients"].update(name for name, g in held.items() if g is not None and name not in tied)
        same("the weight before any optimizer step", expected.parameters, state.parameters)
        same("the buffer", expected.buffers, state.buffers)
        tally.names["buffers"].update(expected.buffers)
        attributes = self._shared(expected.attributes, state.attributes, pipeline.attributes)
        one, other = _comparable(expected.attributes, attributes), _comparable(attributes, expected.attributes)
        same("the attribute", one, other)
        if n == 0 and self._subject.num_models == 1:
            mine = {name: torch.as_tensor(v).detach() for name, v in found.logged.items() if _is_number(v)}
            logged = {
                name: value.to(mine[name]) if name in mine else value
                for name, value in expected.logged.items()
                if value is not None
            }
            mine = {name: value for name, value in mine.items() if name in logged}
            same("the logged value", logged, mine, lambda name: True)
            tally.names["logged values"].update(logged)

    def _shared(
        self, expected: Mapping[str, Any], found: Mapping[str, Any], before: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What was found, of objects that modules on several processes hold what the one that changes it has.

        Each process has an object of its own: where no code of the step ran that changes it, it is as before.
        """
        result = dict(found)
        for names in aliases(self._subject.module):
            right = {name for name in names if _equal(expected, found, name)}
            for name in names if right else ():
                if name not in right and _equal(before, found, name):
                    result.pop(name, None)
                    result.update({name: expected[name]} if name in expected else {})
        return result

    def _check_capture(self, after: Outcome) -> None:
        """The first batch was captured, on this process: the state is still that of before."""
        before, self._before = self._before, None
        if before is not None:
            for kind in ("parameters", "buffers", "attributes"):
                one, other = getattr(before, kind), getattr(after, kind)
                both = one.keys() & other.keys() if kind != "attributes" else one.keys() | other.keys()
                one, other = ({name: held[name] for name in held if name in both} for held in (one, other))
                self._same(0, f"what the capture of the step leaves in the {kind[:-1]}", one, other)

    # -- the optimizer's step ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """An optimizer steps within this context, and those of parallel models after it.

        Raises:
            VerificationError: something differs.
        """
        if not self.active:
            yield
            return
        subject, precision = self._subject, self._subject.trainer.precision_plugin
        seen: list[StepNotes] = []
        plain: list[PlainStep] = []
        after_closure = precision._after_closure

        def noting(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            notes = StepNotes(unclipped=subject.gradients())
            result = after_closure(model, optimizer, *args, **kwargs)
            inner = unwrapped(optimizer)
            names = {id(p): name for name, p in subject.module.named_parameters()}
            mine = subject.parameters()
            notes.clipped, notes.before = subject.gradients(), {k: clone(p) for k, p in mine.items()}
            notes.see_states(inner, {id(p): name for name, p in mine.items()})
            if all(id(p) in names for p in parameters_in(inner)):
                seen.append(notes)
                if subject.leads:
                    plain.append(PlainStep(inner, names, subject.cluster.device))
                hooks.enter_context(notes.after_step(inner, mine))
            return result

        with contextlib.ExitStack() as hooks, replaced(precision, "_after_closure", noting):
            yield
        for n, (notes, step) in enumerate(zip_longest(seen, plain)):
            self._compare_step(n, notes, step)
        if self._begun:  # not, if all was skipped
            self._begun = False
            self._left -= 1
            if not self.active:
                self._finish()

    def _compare_step(self, number: int, notes: StepNotes, plain: PlainStep | None) -> None:
        """Compare an optimizer's step with the same one made plainly on rank 0, elsewhere None."""
        others = self._subject.cluster.group.gather_objects(notes)
        if plain is None:
            return
        for other in others[1:]:
            notes.join(other)
        clipping = Clipping.of(self._subject.trainer)
        if clipping is None:
            self._tally.omitted.add("what hooks of yours do to gradients")
        for difference in plain.check(notes, clipping, scales(self._subject.trainer)):
            self._check(number, difference)
        self._tally.names["weights"].update(notes.before)

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _same(self, n: int, what: str, *compared: Any) -> None:
        """Compare what a pipeline has, as :func:`first_difference` does."""
        self._check(n, first_difference(what, *compared))

    def _check(self, n: int, difference: Difference | None) -> None:
        if difference is not None:
            raise VerificationError(self._message(n, difference))

    def _message(self, n: int, difference: Difference) -> str:
        subject = self._subject
        stages = subject.stages_of(difference.name) or (
            (subject.cluster.stage_map.num_stages - 1,) if "loss" in difference.kind else ()
        )
        where = [f"stage {', '.join(map(str, stages))}"] if stages else []
        if subject.num_models > 1:
            where.append(f"pipeline {n}")
        number = self._wanted - self._left + 1
        place = f" ({', '.join(where)})" if where else ""
        return (
            f"iteration {number} is not what a plain run of the same micro-batches computes: {difference}{place}. "
            f"{advice(difference.kind, has_compiled())}"
        )

    def _finish(self) -> None:
        if self._subject.num_models > 1:
            self._tally.omitted |= {"averaging", "logged values"}
        text = f"verified {self._wanted} optimizer steps: {self._tally}"
        if self._subject.leads:
            rank_zero_info(text)
        self._done(text)


@dataclass
class _Pipeline:
    """One pipeline in one iteration.

    Attributes:
        expected: what a plain run leaves behind, on the process that runs it.
        found: losses and logged values of the pipeline itself.
        attributes: before the iteration.
    """

    expected: Outcome = field(default_factory=Outcome)
    found: Outcome = field(default_factory=Outcome)
    attributes: dict[str, Any] = field(default_factory=dict)


def _comparable(these: Mapping[str, Any], those: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes without those that hold placeholders on either side."""
    return {k: v for k, v in these.items() if v is not ... and those.get(k) is not ...}


def _equal(these: Mapping[str, Any], those: Mapping[str, Any], name: str) -> bool:
    if name not in these or name not in those:
        return name not in these and name not in those
    return how_different(these[name], those[name]) is None


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, Tensor))
