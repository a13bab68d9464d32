"""The verifier: forked children repeat the first iterations plainly, and the first difference is an error."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.averaging.optimizers import parameters_in, unwrapped
from lightning_avgpipe.engine.loss import loss_in
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import ConfigurationError, VerificationError
from lightning_avgpipe.utils import forked, tree
from lightning_avgpipe.utils.forked import ForkError
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.verify.between_steps import BetweenSteps
from lightning_avgpipe.verify.comparison import Comparison, PipelineResults, UnclearDifference, compare_whole
from lightning_avgpipe.verify.fingerprint import fingerprint
from lightning_avgpipe.verify.plain import Batch, OnePiece, PlainTraining, Traces, after_step, counted_in, place
from lightning_avgpipe.verify.report import key_of
from lightning_avgpipe.verify.runs import PlainRuns
from lightning_avgpipe.verify.state import attributes
from lightning_avgpipe.verify.subject import Subject

_log = logging.getLogger(__name__)

_PATIENCE_S = 2.0  # longest total time that training waits for the children, if verification was not requested
_AT_END_S = 10.0  # the same at the end of a run that is so short that they have not finished

Finish = Callable[[int, int, Any], Tensor | None]


class Verifier:
    """Compares the first iterations of one run of the trainer with what forked children compute without a pipeline.

    A child is a copy of the process that has the loss, forked before the first step is captured: the whole model, its
    optimizer, and all Python objects that the user's code sees. The child trains on the same micro-batches, one after
    the other, while the pipeline runs. So nothing that user code can change is left out, and nothing has to be copied
    or restored here. If it contradicts the pipeline, a second child decides, which was forked at the same moment and
    has waited: what differs between the two plain runs differs by nature, and is not compared.

    Every process of the group calls the methods at the same points of an iteration: :meth:`fork`,
    :meth:`begin_iteration`, :meth:`begin`, the wrapped ``finish``, :meth:`compare`, and :meth:`stepping` around the
    optimizer's step.

    Args:
        subject: run of training to verify.
        iterations: number of optimizer steps to verify.
        asked: whether the user has requested it. Otherwise training waits for the children only shortly, and goes on
            without a comparison if none is possible.
        done: called on every process when the requested steps have been compared, with a text that says what was
            compared on rank 0, and an empty text on others.

    Attributes:
        succeeded: whether the requested steps have been compared, and everything is equal.
    """

    def __init__(self, subject: Subject, iterations: int, asked: bool, done: Callable[[str], None]) -> None:
        self._subject = subject
        self._left = self._wanted = iterations
        self._asked = asked
        self._done = done
        self._comparison = Comparison(subject)
        self._between = BetweenSteps(subject)
        self._runs: list[PlainRuns] = []  # by pipeline
        self._begun = False  # whether an iteration that is compared has begun
        self._steps = False  # whether the optimizers step after this iteration
        self._evaluation = 0  # how often the optimizer has called its closure before, within this step
        self._batch = -1  # number of the batch of this step
        self._now: list[PipelineResults] = []  # results of this iteration, by pipeline
        # on the process that compares, by pipeline: iterations that are not compared yet
        self._waiting: list[list[PipelineResults]] = []
        # the file whose existence says that this training was found equal; it has the losses that a warning repeats
        self._verdict: Path | None = None
        self._patience_s = _PATIENCE_S
        self.succeeded = False

    @property
    def active(self) -> bool:
        """Whether the next batch is verified."""
        return self._left > 0

    # -- an iteration --------------------------------------------------------------------------------------------------

    def fork(self) -> None:
        """Fork the children before the first iteration. Every process calls it before each iteration.

        It must come before optimizers and hooks run in a step, since the children run these as well. After a batch that
        is skipped as a whole, which children do not run, they are forked again.

        Raises:
            ConfigurationError: the user has requested a verification that is not possible.
        """
        subject = self._subject
        if self.active:
            self._between.before_step()
        if self._begun or not self.active:
            return
        self._give_up()
        # buffers may differ between processes, since a validation before training changes them on their stage only
        buffers, group = subject.module.named_buffers(), subject.cluster.group
        why = group.broadcast(
            self._why_not(group.exchange_objects({n: fingerprint(b) for n, b in buffers if not b.is_meta}))
        )
        if why is not None:
            _log.info("the first steps are not compared with plain ones: %s", why)
            self._left = 0
            return
        if subject.num_models > 1 or subject.has_replicas:  # after the first step a model depends on other batches
            self._wanted = self._left = 1
        if subject.compares:
            self._begin_runs(subject.num_pipelines() if self._asked else 1)

    def _begin_runs(self, number: int) -> None:
        """Fork the children of this number of pipelines; if that fails, raise if verification was requested."""
        try:
            for _ in range(number):
                self._runs.append(PlainRuns(self._play, self._subject.why_not_again))
        except ForkError as error:
            self._give_up()
            if self._asked:
                raise _impossible(str(error)) from error
            _log.info("the first steps are not compared with plain ones: %s", error)
        self._waiting = [[] for _ in self._runs]

    def begin_iteration(self) -> None:
        """Begin an iteration; stop comparing if hooks have changed something since the last one.

        An optimizer that calls its closure several times begins as many iterations within one step.
        """
        batch = self._subject.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if self._now and batch == self._batch:
            self._evaluation += 1
            return
        if self._now:  # user code has not let the optimizer step
            self._stepped()
        self._evaluation, self._batch = 0, batch
        if not (self._begun and self.active):
            self._between.begin()
        elif self._between.has_changed():
            self._wanted -= self._left
            self._left = 0
            what = "hooks have changed something, or a scheduler that monitors a value has"
            level = logging.WARNING if self._asked and self._subject.compares else logging.INFO
            _log.log(level, "steps from number %d on are not compared: %s", self._wanted + 1, what)
            self._compare_so_far()

    def _why_not(self, buffers: Sequence[Mapping[str, Any]]) -> str | None:
        """Return, on the process that compares, why the first steps cannot be compared; None if they can.

        Args:
            buffers: fingerprints of the buffers of each process.
        """
        subject = self._subject
        if not subject.compares:
            return None
        why = subject.why_not()
        if any(other.get(name, found) != found for other in buffers for name, found in buffers[0].items()):
            why = why or (
                "buffers differ between processes: a validation has changed them (use num_sanity_val_steps=0), or each "
                "process has drawn its own (use seed_everything)"
            )
        if why is not None and self._asked:
            raise _impossible(why)
        return why

    def _play(self, delay_s: float, connection: Connection) -> None:
        """Train plainly in a child, from ``delay_s`` after the arrival of the first batch until the child is ended."""
        subject, first = self._subject, forked.receive(connection)
        time.sleep(delay_s)
        batches = itertools.chain([first], iter(partial(forked.receive, connection), None))
        subject.undo_changes()
        plain = PlainTraining(subject.trainer, subject.loss_is_mean, subject.loss_weight(), subject.cluster.device)
        while True:
            forked.send(connection, plain.iterate(batches.__next__))

    def begin(
        self,
        works: Sequence[Sequence[MicroBatch]],
        rest: Sequence[Any],
        iteration: int,
        finish: Finish,
        whole: Any,
        divided: bool,
    ) -> Finish:
        """Send the batches of an iteration to the children, once the stages are ready.

        Args:
            works: micro-batches of each pipeline.
            rest: further arguments of the step.
            iteration: number of the iteration, on which random numbers depend.
            finish: function that the last stage calls with the result of a micro-batch.
            whole: the batch of the first pipeline, in one piece. The first one is compared with its micro-batches.
            divided: whether the pipelines divide a batch among them.
        Returns:
            A function that does what ``finish`` does, and records the losses.
        """
        subject, fit_loop = self._subject, self._subject.trainer.fit_loop
        if not self.active:
            return finish
        first, self._begun = not self._begun, True
        assert subject.plan is not None
        why = ""
        if subject.cluster.stage_map.stage_replicas:  # the planner has replicated stages, so each has a part of a batch
            why = "devices that others do not need share stages"
        elif subject.plan.graph.from_entropy:
            modules = ", ".join(f"'{path}'" for path in sorted(subject.plan.graph.seeding))
            why = f"{modules} may seed random numbers unpredictably (torch.seed)"
        elif first and not self._asked and self._is_known():
            why = "they were equal in an earlier run of the same code"
        if why:
            self.close()
            if self._asked and not subject.cluster.stage_map.stage_replicas:
                raise ConfigurationError(f"verify compares with a plain run, but {why}; use verify=False")
            _log.info("the first steps are not compared with plain ones: %s", why)
            self._now = []
            return finish
        self._steps, again = not fit_loop._should_accumulate(), self._evaluation > 0
        if not again:
            self._now = [PipelineResults(Traces(), subject.held(n, attributes), self._steps) for n in range(len(works))]
        if subject.compares:
            subject.step_log.listener = self._now[0].traces.logged.__setitem__
            draws = subject.plan.graph.drawing or subject.plan.graph.host_drawing
            if not (first and subject.loss_is_mean) or draws:  # random numbers would differ for the whole batch
                whole = None
            self._send(works, rest, iteration, whole, divided)

        def noted(n: int, i: int, result: Any) -> Tensor | None:
            loss = finish(n, i, result)  # raises if the result has no loss
            if result is not None:
                self._now[n].traces.losses[place(i, self._evaluation)] = float(loss_in(result).detach())
            return loss

        return noted

    def _send(
        self, works: Sequence[Sequence[MicroBatch]], rest: Sequence[Any], iteration: int, whole: Any, divided: bool
    ) -> None:
        """Send each child the micro-batches of its pipeline; for the arguments see :meth:`begin`."""
        subject, plan = self._subject, self._subject.plan
        assert plan is not None
        progress = subject.trainer.fit_loop.epoch_loop.batch_progress.state_dict()
        shares, total = 1, None
        if divided:
            counted = [sum(counted_in(parts, subject.loss_weight())) for parts in works]
            shares, total = len(works), sum(counted)
            if shares * counted[0] != total:  # unequal shares: the first one counts otherwise than as a batch alone
                whole = None
        for n, (runs, parts) in enumerate(zip(self._runs, works, strict=False)):
            key = subject.seed(), iteration, subject.first_pipeline + n
            # cloned, since a view would be sent with all of its storage
            own = [replace(part, data=tree.map_tensors(torch.clone, part.data)) for part in parts]
            asked = whole if n == 0 and len(parts) > 1 else None
            # without an optimizer step there are no gradients to compare with
            gradients = asked is not None and self._steps and subject.could_keep(len(parts))
            message = Batch(
                own, rest, key, plan.graph, self._steps, progress, asked, gradients, self._evaluation, shares, total
            )
            with contextlib.suppress(ForkError):  # receiving from the child will report why it has ended
                runs.send(message)

    def _is_known(self) -> bool:
        """Return whether the same training was found equal in an earlier run. Every process calls it."""
        subject, found = self._subject, False
        if subject.compares and subject.verdicts is not None:
            assert subject.plan is not None
            cluster = subject.cluster
            key = key_of(subject.module, subject.options, cluster.world.world_size, subject.plan, cluster.device)
            self._verdict = subject.verdicts / f"verified-{key}"
            found = self._repeats_verdict()
        return subject.cluster.group.broadcast(found)

    def _repeats_verdict(self) -> bool:
        """Return whether there is a verdict of an earlier run, and repeat its warning."""
        assert self._verdict is not None
        try:
            kept = json.loads(self._verdict.read_text())
            whole = OnePiece(**kept) if kept else None
        except (OSError, ValueError, TypeError):  # there is none, or it was written in part: compare again
            return False
        if whole is not None:
            compare_whole(whole, "as in an earlier run of the same code, ")
        return True

    def compare(self) -> None:
        """Record gradients, buffers and attributes after all backwards, and compare what the children have sent so far.

        Raises:
            VerificationError: something differs.
        """
        subject = self._subject
        subject.step_log.listener = None
        for n, traces in enumerate(iteration.traces for iteration in self._now):
            if self._steps:
                with subject.model(n):
                    traces.gradients.update(
                        (name, None if p.grad is None else fingerprint(p.grad))
                        for name, p in subject.module.named_parameters()
                        if subject.is_mine(name) and not p.is_meta
                    )
            traces.buffers.update(subject.held(n, lambda module: dict(module.named_buffers())))
            traces.attributes.update(subject.held(n, attributes))
            self._now[n].of_other_stages.update(subject.changed_on_other_stages(n))
        self._wait()
        if self._now and not self._steps:
            self._collect()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Let the optimizers of all models step within this context, and compare the weights after it.

        Raises:
            VerificationError: something differs.
        """
        if not self.active:
            yield
            return
        subject, precision = self._subject, self._subject.trainer.precision_plugin
        module = subject.module
        after_closure, stepped = precision._after_closure, 0

        def noting(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal stepped
            result = after_closure(model, optimizer, *args, **kwargs)
            known = {id(p) for p in module.parameters()}
            if stepped < len(self._now) and all(id(p) in known for p in parameters_in(unwrapped(optimizer))):
                handles.callback(after_step(optimizer, module, self._now[stepped].traces.weights))
                stepped += 1
            return result

        with contextlib.ExitStack() as handles, replaced(precision, "_after_closure", noting):
            yield
        if self._now:  # empty if the whole batch was skipped
            self._stepped()

    def _stepped(self) -> None:
        """Finish a step, and compare the results that have arrived. Every process calls it."""
        self._left -= 1
        if self.active:
            self._between.after_step()
        self._collect()
        self._compare_so_far()

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Gather the traces of all processes for this iteration. Every process calls it."""
        subject, now = self._subject, self._now
        mine = [
            (t.gradients, t.buffers, t.attributes, {k: w for k, w in t.weights.items() if subject.is_mine(k)}, i.before)
            for i, t in ((iteration, iteration.traces) for iteration in now)
        ]
        everywhere = subject.cluster.group.gather_objects(mine)
        for others in everywhere[1:] if subject.compares else ():
            for iteration, (gradients, buffers, held, weights, before) in zip(now, others, strict=True):
                iteration.traces.gradients.update(gradients)
                iteration.traces.buffers.update(buffers)
                iteration.traces.attributes.update(held)
                iteration.traces.weights.update(weights)
                iteration.before.update(before)
        for waiting, iteration in zip(self._waiting, now, strict=False):
            waiting.append(iteration)
        self._now = []

    def _compare_so_far(self) -> None:
        """Compare the results that have arrived; after the last iteration, all of them if verification was requested.

        Every process calls it.
        """
        ends = self._asked and not self.active
        text = self._compare_arrived(None if ends else 0.0)
        if ends:
            self.succeeded = True
            self._done(text)

    def _wait(self) -> None:
        """Wait for the children: without limit if the user has requested verification, else while patience lasts."""
        begin = time.monotonic()
        self._compare_arrived(None if self._asked else self._patience_s)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - begin))

    def _compare_arrived(self, timeout_s: float | None) -> str:
        """Compare the results that the children send within a time.

        Args:
            timeout_s: seconds to wait; None waits for everything that is due.
        Returns:
            A text that says what was compared; empty if more is to come, or nothing is compared.
        Raises:
            VerificationError: something differs, or the plain run of a requested verification has failed.
        """
        try:
            for n, (runs, waiting) in enumerate(zip(self._runs, self._waiting, strict=True)):
                while waiting:
                    expected = runs.expected(timeout_s)
                    if expected.compiled and not self._asked:
                        _log.info(
                            "the first steps are not compared: something in them is compiled, and rounds differently"
                        )
                        self._give_up()
                        return ""
                    hooks_have_run, repeated = self._between.hooks_have_run, partial(runs.repeated, timeout_s)
                    self._comparison.check(n, expected, waiting[0], hooks_have_run, repeated)
                    waiting.pop(0)
                    runs.next_iteration()
        except TimeoutError:
            return ""
        except UnclearDifference:
            self._wanted = self._comparison.steps
            return self._finish()
        except VerificationError:
            self.close()
            raise
        except Exception as error:
            if self._asked:
                raise VerificationError(
                    f"the plain run of the same micro-batches failed: {type(error).__name__}: {error}"
                ) from error
            _log.warning(
                "the first steps are not compared with plain ones: the plain run failed with %s: %s",
                type(error).__name__, error,
            )  # fmt: skip
            self._give_up()
            return ""
        return self._finish() if self._runs and not self.active else ""

    def _finish(self) -> str:
        text = self._comparison.summary(self._wanted)
        self._give_up()
        all_equal = self._comparison.covers_all_results and not self._between.hooks_have_run
        if all_equal and not self._asked and self._verdict is not None:  # so that the next run need not compare
            try:
                self._verdict.parent.mkdir(parents=True, exist_ok=True)
                whole = self._comparison.whole
                self._verdict.write_text(json.dumps(None if whole is None else asdict(whole)))
            except OSError as error:  # a full or read-only disk: the next run compares again
                _log.info("cannot note that the first steps were equal to plain ones: %s", error)
        if not self._asked:
            _log.info(text)
        return text

    def finish_run(self) -> None:
        """Wait shortly for results of the children when the run ends, compare these, and end the children.

        Raises:
            VerificationError: something differs.
        """
        self._patience_s = max(self._patience_s, _AT_END_S)
        self._wait()
        if self._runs:
            _log.info("the first steps are not compared with plain ones, which took longer than the training")
        self.close()

    def close(self) -> None:
        """End the children, and compare nothing more."""
        self._give_up()
        self._left = 0

    def _give_up(self) -> None:
        """End the children of this process.

        Collective calls go on, since the other processes do not know that there are no children any more.
        """
        for runs in self._runs:
            runs.close()
        self._runs, self._waiting = [], []


def _impossible(why: str) -> ConfigurationError:
    return ConfigurationError(f"verify trains the whole model on rank 0 as well, but {why}; use verify=False")
