"""Verification: forked children train the first iterations plainly, and the first difference is an error."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from lightning_avgpipe.averaging.optimizers import parameters_in, unwrapped
from lightning_avgpipe.engine.loss import loss_in
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import ConfigurationError, VerificationError
from lightning_avgpipe.utils import forked, tree
from lightning_avgpipe.utils.forked import ForkError
from lightning_avgpipe.utils.lightning import pl, rank_zero_warn
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.tensors import as_tensor
from lightning_avgpipe.verify.fingerprint import Difference, differences, fingerprint, usual_size
from lightning_avgpipe.verify.plain import Batch, OnePiece, PlainTraining, Traces, after_step, place, portable
from lightning_avgpipe.verify.plain_draws import Captured
from lightning_avgpipe.verify.report import Tally, advice, key_of
from lightning_avgpipe.verify.runs import KINDS, OF_USERS, Natural, PlainRuns, differing, equal, without
from lightning_avgpipe.verify.state import aliases, attributes, state_of
from lightning_avgpipe.verify.subject import Subject

_log = logging.getLogger(__name__)

_NEAR = 1e-3  # tolerance of losses, after weights have been rounded otherwise
_SAME_LOSS = 1e-2  # relative tolerance between the loss of a batch in one piece and the mean over its micro-batches
_NO_LOSS = 1e-6  # losses below this are equal
_SAME_GRADIENT = 5e-2  # likewise between the gradients, which numbers of less precision round
_PATIENCE_S = 2.0  # how long training waits, in total, for children that nobody has asked for
_AT_END_S = 10.0  # how long a run waits for them that ends so early that it has made few other steps
_SHOWN = 5  # names in a warning

Finish = Callable[[int, int, Any], Tensor | None]


class _Doubt(Exception):
    """Raised after a warning of a difference that hooks may explain: nothing more is compared."""


class Verifier:
    """Compares the first iterations of one run of the trainer with what forked children compute plainly.

    A child is a copy of the process that has the loss, forked before the first step is captured: the whole model, its
    optimizer, and whatever Python objects the user's code sees. The child trains on the same micro-batches, one after
    the other, while the pipeline runs. So nothing that user code can change is left out, and nothing has to be copied
    or restored here. Where it contradicts the pipeline, a second child decides, which was forked at the same moment and
    has waited: what differs between the two plain runs differs by nature, and is not compared.

    Every process of the group calls the methods at the same points of an iteration: :meth:`fork`, :meth:`watch`,
    :meth:`begin`, the wrapped ``finish``, :meth:`compare`, and :meth:`stepping` around the optimizer's step.

    Args:
        subject: run of training to verify.
        iterations: number of optimizer steps to verify.
        asked: whether the user has asked for it. Else training waits for the children only shortly, and goes on without
            a comparison where none is possible.
        done: called on every process when everything that the user has asked for is compared, with a text that says
            what was; empty on the others than rank 0.

    Attributes:
        succeeded: whether everything that was asked for has been compared, and is equal.
    """

    def __init__(self, subject: Subject, iterations: int, asked: bool, done: Callable[[str], None]) -> None:
        self._subject = subject
        self._left = self._wanted = iterations
        self._asked = asked
        self._done = done
        self._tally = Tally()
        self._runs: list[PlainRuns] = []  # by pipeline
        self._natural: Natural = {}
        self._begun = False  # whether an iteration has begun that is compared
        self._moment = 0, 0
        self._steps = False
        self._evaluation = 0  # how often the optimizer has called its closure before, within this step
        self._batch = -1  # number of the batch of this step
        # on the process that compares, by pipeline and iteration: traces, attributes before, whether optimizers step
        self._found: list[list[tuple[Traces, Mapping[str, Any], bool]]] = []
        self._now: list[Traces] = []  # traces of this iteration, by pipeline
        self._before: list[dict[str, Any]] = []  # attributes before this iteration, by pipeline
        self._held_then: dict[str, Any] = {}
        self._rates: list[float] = []  # learning rates before this step, and after the one before
        self._rates_then: list[float] = []
        self._doubtful = False  # whether hooks have run between the steps that are compared
        self._has_asked_for_whole = False  # whether the loss of a batch in one piece was asked for
        self._compiled = False
        self._key = ""
        self._patience_s = _PATIENCE_S
        self._compared = 0
        self.succeeded = False

    @property
    def active(self) -> bool:
        """Whether the next batch is verified."""
        return self._left > 0

    # -- an iteration --------------------------------------------------------------------------------------------------

    def fork(self) -> None:
        """Fork the children before the first iteration. Every process calls it before each one.

        No code of the user's optimizers and hooks that runs in a step has begun, since the children run it as well.
        Children that have waited while a batch was skipped whole, which they do not run, are forked anew.

        Raises:
            ConfigurationError: the user has asked for a verification that is not possible.
        """
        subject = self._subject
        if self.active:
            self._rates = self._rates_now()
        if self._begun or not self.active:
            return
        self._give_up()
        # a validation before training changes each buffer on the process of its stage only
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
        if subject.leads:
            number = subject.num_pipelines() if self._asked else 1
            self._runs = [PlainRuns(self._play, subject.why_not_again) for _ in range(number)]
            self._found = [[] for _ in self._runs]

    def _moment_now(self) -> tuple[int, int]:
        """Return numbers that change if more than training has run."""
        trainer = self._subject.trainer
        return trainer.current_epoch, trainer.fit_loop.epoch_loop.val_loop.batch_progress.total.ready

    def watch(self) -> None:
        """Begin an iteration; stop comparing if hooks have changed something since the last one.

        An optimizer that calls its closure several times begins as many iterations within one step.
        """
        subject = self._subject
        batch = subject.trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if self._now and batch == self._batch:
            self._evaluation += 1
            return
        if self._now:  # user code has not let the optimizer step
            self._stepped()
        self._evaluation, self._batch = 0, batch
        before, self._moment = self._moment, self._moment_now()
        if not (self._begun and self.active):
            self._rates_then = self._rates
            return
        same, mine = before == self._moment, self._rates_are_known()
        if subject.observed:
            self._doubtful = self._doubtful or same
            mine = mine and self._held_now() == self._held_then
        if same:
            same = all(subject.cluster.group.exchange_objects(mine))
        if not same:
            self._wanted -= self._left
            self._left = 0
            what = "hooks have changed something, or a scheduler that monitors a value has"
            _log.info("steps from number %d on are not compared: %s", self._wanted + 1, what)
            self._end()

    def _rates_now(self) -> list[float]:
        groups = (group for optimizer in self._subject.trainer.optimizers for group in optimizer.param_groups)
        return [float(group["lr"]) for group in groups if "lr" in group]

    def _rates_are_known(self) -> bool:
        """Return whether nothing but schedulers that the children step as well has changed learning rates."""
        configs = [config for config in self._subject.trainer.lr_scheduler_configs if config.interval == "step"]
        monitors = [config.reduce_on_plateau for config in configs]
        return self._rates == self._rates_then if all(monitors) else not any(monitors)

    def _why_not(self, buffers: Sequence[Mapping[str, Any]]) -> str | None:
        """Return why the first steps are not compared, on the process that would compare them; None if they are.

        Args:
            buffers: fingerprints of the buffers of each process.
        """
        subject = self._subject
        if not subject.leads:
            return None
        why = subject.why_not()
        if any(other.get(name, found) != found for other in buffers for name, found in buffers[0].items()):
            why = why or (
                "buffers differ between processes: a validation has changed them (use num_sanity_val_steps=0), or each "
                "process has drawn its own (use seed_everything)"
            )
        if why is not None and self._asked:
            raise ConfigurationError(f"verify trains the whole model on rank 0 as well, but {why}; use verify=False")
        return why

    def _play(self, delay_s: float, connection: Connection) -> None:
        """Train plainly in a child, so many seconds after the first batch has arrived, until the child is ended."""
        subject, first = self._subject, forked.receive(connection)
        time.sleep(delay_s)
        batches = itertools.chain([first], iter(partial(forked.receive, connection), None))
        subject.undo_changes()
        plain = PlainTraining(subject.trainer, subject.loss_is_mean, subject.loss_weight(), subject.cluster.device)
        while True:
            forked.send(connection, plain.iterate(batches.__next__))

    def begin(
        self, works: Sequence[Sequence[MicroBatch]], rest: Sequence[Any], iteration: int, finish: Finish, whole: Any
    ) -> Finish:
        """Send the batches of an iteration to the children, once the stages are ready.

        Args:
            works: micro-batches of each pipeline.
            rest: further arguments of the step.
            iteration: number of the iteration, on which random numbers depend.
            finish: function that the last stage calls with the result of a micro-batch.
            whole: the batch of the first pipeline, in one piece.
        Returns:
            A function that does what ``finish`` does, and notes the losses.
        """
        subject, fit_loop = self._subject, self._subject.trainer.fit_loop
        if not self.active:
            return finish
        first, self._begun = not self._begun, True
        assert subject.plan is not None
        why = ""
        if subject.cluster.stage_map.stage_replicas:  # the plan made replicas, which have a part of the batch each
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
            self._now = [Traces() for _ in works]
            self._before = [self._held(n, attributes) for n in range(len(works))]
        if subject.leads:
            subject.step_log.listener = self._now[0].logged.__setitem__
            captured = Captured.of(subject.plan.graph, subject.module)
            progress = fit_loop.epoch_loop.batch_progress.state_dict()
            for n, (runs, parts) in enumerate(zip(self._runs, works, strict=False)):
                key = subject.seed(), iteration, subject.first_pipeline + n
                # cloned, since a view would be sent with all of its storage
                own = [replace(part, data=tree.map_tensors(torch.clone, part.data)) for part in parts]
                asked = whole if n == 0 and len(parts) > 1 and self._asks_for_whole() else None
                # without an optimizer step there are no gradients to compare with
                gradients = asked is not None and self._steps and subject.could_keep(len(parts))
                message = Batch(own, rest, key, captured, self._steps, progress, asked, gradients, self._evaluation)
                with contextlib.suppress(ForkError):  # why the child has ended is told where its traces are awaited
                    runs.send(message)

        def noted(n: int, i: int, result: Any) -> Tensor | None:
            loss = finish(n, i, result)  # raises if the result has no loss
            if result is not None:
                self._now[n].losses[place(i, self._evaluation)] = float(loss_in(result).detach())
            return loss

        return noted

    def _is_known(self) -> bool:
        """Return whether the same training was equal in an earlier run. Every process calls it."""
        subject, found = self._subject, False
        if subject.leads:
            assert subject.plan is not None
            cluster = subject.cluster
            self._key = key_of(subject.module, subject.options, cluster.world.world_size, subject.plan, cluster.device)
            found = subject.verdicts.known(self._key)
        return subject.cluster.group.broadcast(found)

    def _asks_for_whole(self) -> bool:
        """Return whether to compare the loss of the first batch with the mean over its micro-batches.

        Not where the step draws random numbers, which would be others for the whole batch.
        """
        plan = self._subject.plan
        asked, self._has_asked_for_whole = self._has_asked_for_whole, True
        if asked or plan is None or not self._subject.loss_is_mean:
            return False
        return not (plan.graph.drawing or plan.graph.host_drawing)

    def _held_now(self) -> dict[str, Any]:
        """Return what hooks may change: weights, buffers and attributes of this process, and the state of callbacks."""
        weights = self._held(0, lambda module: {k: p for k, p in module.named_parameters() if not p.is_meta})
        buffers = self._held(0, lambda module: dict(module.named_buffers()))
        callbacks = dict(enumerate(self._subject.trainer.callbacks))  # type: ignore[attr-defined]
        return {**weights, **buffers, **self._held(0, attributes), **portable(state_of(callbacks, "callbacks"))}

    def _held(self, n: int, look: Callable[[pl.LightningModule], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the part of a pipeline's model that this process answers for.

        Args:
            n: number of the pipeline.
            look: function of the module that returns its parameters, buffers or attributes by name.
        """
        with self._subject.model(n):
            return portable({k: v for k, v in look(self._subject.module).items() if self._subject.is_mine(k)})

    def compare(self) -> None:
        """Note gradients, buffers and attributes after all backwards, and compare what the children have sent by now.

        Raises:
            VerificationError: something differs.
        """
        subject = self._subject
        subject.step_log.listener = None
        for n, traces in enumerate(self._now):
            if self._steps:
                with subject.model(n):
                    traces.gradients.update(
                        (name, None if p.grad is None else fingerprint(p.grad))
                        for name, p in subject.module.named_parameters()
                        if subject.is_mine(name) and not p.is_meta
                    )
            traces.buffers.update(self._held(n, lambda module: dict(module.named_buffers())))
            traces.attributes.update(self._held(n, attributes))
        self._wait()
        if self._now and not self._steps:
            self._collect()

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Within this context the optimizers of all models step; their weights are compared afterwards.

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
                handles.callback(after_step(optimizer, module, self._now[stepped].weights).remove)
                stepped += 1
            return result

        with contextlib.ExitStack() as handles, replaced(precision, "_after_closure", noting):
            yield
        if self._now:  # empty if the whole batch was skipped
            self._stepped()

    def _stepped(self) -> None:
        """Finish a step, and compare what has arrived. Every process calls it."""
        self._left -= 1
        self._rates_then = self._rates_now()
        if self.active and self._subject.observed:
            self._held_then = self._held_now()
        self._collect()
        if self.active:
            self._compare_arrived(0.0)
        else:
            self._end()

    # -- the verdict ---------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Bring together the traces of all processes for this iteration. Every process calls it."""
        subject, now = self._subject, self._now
        mine = [
            (t.gradients, t.buffers, t.attributes, {k: w for k, w in t.weights.items() if subject.is_mine(k)}, before)
            for t, before in zip(now, self._before, strict=True)
        ]
        everywhere = subject.cluster.group.gather_objects(mine)
        for others in everywhere[1:] if subject.leads else ():
            for traces, before, (gradients, buffers, held, weights, old) in zip(now, self._before, others, strict=True):
                traces.gradients.update(gradients)
                traces.buffers.update(buffers)
                traces.attributes.update(held)
                traces.weights.update(weights)
                before.update(old)
        for found, traces, before in zip(self._found, now, self._before, strict=False):
            found.append((traces, before, self._steps))
        self._now = []

    def _end(self) -> None:
        """Finish after the last iteration that is compared; wait for its comparison if the user has asked for it.

        Every process calls it.
        """
        if not self._asked:
            self._compare_arrived(0.0)
            return
        text = self._compare_arrived(None)
        self.succeeded = True
        self._done(text)

    def _wait(self) -> None:
        """Wait for the children: without limit if the user asked for verification, else as long as patience lasts."""
        begin = time.monotonic()
        self._compare_arrived(None if self._asked else self._patience_s)
        self._patience_s = max(0.0, self._patience_s - (time.monotonic() - begin))

    def _compare_arrived(self, timeout_s: float | None) -> str:
        """Compare what the children send within a time.

        Args:
            timeout_s: seconds to wait; None waits for everything that is due.
        Returns:
            A text that says what was compared; empty if more is to come, or nothing is compared.
        Raises:
            VerificationError: something differs.
        """
        try:
            for n, (runs, found) in enumerate(zip(self._runs, self._found, strict=True)):
                while found:
                    expected = runs.expected(timeout_s)
                    self._compiled |= expected.compiled
                    if self._compiled and not self._asked:
                        _log.info(
                            "the first steps are not compared: something in them is compiled, and rounds otherwise"
                        )
                        self._give_up()
                        return ""
                    self._compare(n, expected, *found[0], timeout_s)
                    found.pop(0)
                    runs.go_on()
        except TimeoutError:
            return ""
        except _Doubt:
            self._wanted = self._compared
            return self._finish()
        except VerificationError:
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

    def _compare(
        self, n: int, expected: Traces, found: Traces, before: Mapping[str, Any], steps: bool, timeout_s: float | None
    ) -> None:
        """Compare the next iteration of a pipeline; a second plain run decides where the first contradicts it.

        Raises:
            TimeoutError: the second run has not arrived within a time. It is asked again when this is called again.
            VerificationError: both plain runs contradict the pipeline.
        """
        one, other, old = self._comparable(expected, found, before)
        difference = next(self._differences(n, one, other, old, steps), None)
        if difference is not None:
            for key, name in differing(expected, self._repeated(n, difference, timeout_s)).items():
                self._natural.setdefault(key, name)
            one, other, old = self._comparable(expected, found, before)
            self._check(n, next(self._differences(n, one, other, old, steps), None))
        if expected.whole is not None and one.losses == expected.losses:
            _compare_whole(expected.whole)
        self._count(one, other, steps)
        self._compared += n == 0 and steps

    def _repeated(self, n: int, difference: Difference, timeout_s: float | None) -> Traces:
        """Return what the second plain run of a pipeline has found."""
        try:
            return self._runs[n].repeated(timeout_s)
        except TimeoutError:
            raise
        except Exception as error:
            raise ForkError(
                f"{self._message(n, difference)} But whether this differs by nature is not known, since the second "
                f"plain run has failed with {type(error).__name__}: {error}"
            ) from error

    def _comparable(
        self, expected: Traces, found: Traces, before: Mapping[str, Any]
    ) -> tuple[Traces, Traces, Mapping[str, Any]]:
        """Return results, and attributes before, without what differs by nature."""
        if not self._natural:
            return expected, found, before
        left: list[dict[str, Any]] = [
            {kind: without(self._natural, kind, getattr(traces, kind)) for kind in KINDS}
            for traces in (expected, found)
        ]
        one, other = replace(expected, **left[0]), replace(found, **left[1])
        return one, other, without(self._natural, "attributes", before)

    @property
    def _is_rounded(self) -> bool:
        """Whether weights may differ, since gradients of tied weights were summed in another order."""
        plan = self._subject.plan
        return plan is not None and bool(plan.copied) and self._compared > 0

    def _differences(
        self, n: int, expected: Traces, found: Traces, before: Mapping[str, Any], steps: bool
    ) -> Iterator[Difference]:
        """Yield what differs between a plain run and the pipeline, in the order in which it is told."""
        plan, subject = self._subject.plan, self._subject
        alone = not subject.has_replicas  # else gradients and steps are of more batches than this one
        assert plan is not None
        if self._is_rounded:
            for name, loss in expected.losses.items():
                if not math.isclose(loss, found.losses.get(name, math.nan), rel_tol=_NEAR, abs_tol=_NEAR):
                    yield Difference("the loss", name, f"{found.losses.get(name)}, and {loss} in the plain run")
            return
        tied, everywhere = plan.copied, [name for stage in reversed(plan.stages) for name in reversed(stage.parameters)]
        yield from differences("the loss", expected.losses, found.losses)
        if steps and alone:
            held = {name: g for name, g in expected.gradients.items() if name in found.gradients}
            size = usual_size(held.values())
            yield from differences("the gradient", held, found.gradients, tied.__contains__, everywhere, size)
        yield from differences("the buffer", expected.buffers, found.buffers)
        # several models all write to the same attributes, and user code in a step sees its own process only
        if subject.num_models == 1 and not (self._compared and subject.acting):
            there = self._shared(expected.attributes, found.attributes, before)
            one, other = _known(expected.attributes, there), _known(there, expected.attributes)
            yield from differences("the attribute", one, other)
        if alone and n == 0 and subject.num_models == 1:
            yield from _logged_differences(expected.logged, found.logged)
        if steps and alone and not tied:
            held = {name: w for name, w in expected.weights.items() if name in found.weights}
            yield from differences("the weight after the optimizer step", held, found.weights)

    def _count(self, expected: Traces, found: Traces, steps: bool) -> None:
        """Count what has been compared and is equal."""
        tally, plan, subject = self._tally, self._subject.plan, self._subject
        assert plan is not None
        if self._is_rounded:
            tally.names["later losses"].update(expected.losses)
            return
        alone, tied = not subject.has_replicas, plan.copied
        tally.losses += len(expected.losses)
        tally.names["buffers"].update(expected.buffers)
        if subject.num_models == 1 and not (self._compared and subject.acting):
            both = (*expected.attributes.items(), *found.attributes.items())
            tally.unknown.update(name for name, value in both if value is ...)
        if alone and subject.num_models == 1:
            tally.names["logged values"].update(name for name, v in expected.logged.items() if v is not None)
        if steps and alone:
            held = {name: g for name, g in expected.gradients.items() if name in found.gradients}
            tally.names["tied gradients"].update(name for name in held if name in tied)
            tally.names["gradients"].update(name for name, g in held.items() if g is not None and name not in tied)
            tally.names["weights"].update(w for w in expected.weights if w in found.weights and not tied)

    def _shared(
        self, expected: Mapping[str, Any], found: Mapping[str, Any], before: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the attributes that were found, corrected for objects that modules on several processes share.

        Each process has its own copy of such an object. A copy is as before where no code ran that changes it, so it
        counts as equal if the copy of another module has the right value.
        """
        result = dict(found)
        for names in aliases(self._subject.module):
            right = {name for name in names if equal(expected, found, name)}
            for name in names if right else ():
                if name not in right and equal(before, found, name):
                    result.pop(name, None)
                    result.update({name: expected[name]} if name in expected else {})
        return result

    def _check(self, n: int, difference: Difference | None) -> None:
        if difference is None:
            return
        why = "one of your hooks, which run between the steps, has changed what the step reads"
        if self._subject.has_replicas:
            why = "the step asks other replicas for values (all_gather), which a plain run has not"
        if self._subject.has_replicas or (self._doubtful and self._compared):
            rank_zero_warn(f"{self._message(n, difference)} Or {why}")
            raise _Doubt
        self.close()
        raise VerificationError(self._message(n, difference))

    def _message(self, n: int, difference: Difference) -> str:
        subject = self._subject
        stages = subject.stages_of(difference.name) or (
            (subject.cluster.stage_map.num_stages - 1,) if "loss" in difference.kind else ()
        )
        where = [f"stage {', '.join(map(str, stages))}"] if stages else []
        if subject.num_models > 1:
            where.append(f"pipeline {n}")
        place = f" ({', '.join(where)})" if where else ""
        return (
            f"optimizer step {self._compared + 1} is not what a plain run of the same micro-batches computes: "
            f"{difference}{place}. {advice(difference.kind, self._compiled)}"
        )

    def _finish(self) -> str:
        if self._subject.num_models > 1:
            self._tally.omitted |= {"averaging", "logged values"}
        if self._subject.has_replicas:
            self._tally.omitted |= {"gradients", "weights", "logged values"}
        if self._natural:
            named = listed([f"{KINDS[kind]} of '{name}'" for (kind, _), name in self._natural.items()], _SHOWN)
            self._tally.omitted.add(f"what differs between two plain runs ({named})")
            rank_zero_warn(
                f"not compared with a plain run: {named}. Two plain runs of the same micro-batches differ in that, as "
                "times, dates, memory, ids of processes and random numbers without a seed do. Such values need nothing "
                "to be done; if two runs should be alike in it, look for what the step reads that is not seeded"
            )
        text = f"verified {self._wanted} optimizer steps: {self._tally}"
        self._give_up()
        unknown = any(kind not in OF_USERS for kind, _ in self._natural)  # else the next run need not tell it again
        if not (self._asked or self._doubtful or unknown):
            self._subject.verdicts.keep(self._key)
        if not self._asked:
            _log.info(text)
        return text

    def leave(self) -> None:
        """Give the children a moment to send what is due when the run ends, then end them.

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

        Whatever all processes do together goes on, since the others do not know that there are no children any more.
        """
        for runs in self._runs:
            runs.close()
        self._runs, self._found = [], []


def _compare_whole(whole: OnePiece) -> None:
    """Warn if the loss of a batch in one piece, or its gradient, is not the mean over its micro-batches."""
    if math.isclose(whole.loss, whole.mean, rel_tol=_SAME_LOSS, abs_tol=_NO_LOSS):
        if whole.distance <= _SAME_GRADIENT:
            return
        found = (
            f"the gradient of the first batch in one piece differs by {whole.distance:.0%} from the mean over its "
            f"{whole.number} micro-batches, though their losses are alike"
        )
    else:
        found = (
            f"the loss of the first batch is {whole.loss:.4g} in one piece, and {whole.mean:.4g} as the mean over its "
            f"{whole.number} micro-batches"
        )
    rank_zero_warn(
        f"{found}: the step looks across the batch (a contrastive loss, batch normalisation), or its loss is a mean "
        "over something else than samples (a mask), for which there is loss_weight=.... Training goes on with "
        "micro-batches, as with accumulate_grad_batches"
    )


def _known(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that are placeholders on neither side."""
    return {name: v for name, v in one.items() if v is not ... and other.get(name) is not ...}


def _logged_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[Difference]:
    mine = {name: value for name, value in found.items() if _is_number(value)}
    for name, value in expected.items():
        if value is None:
            continue
        if name not in mine:
            yield Difference("the logged value", name, "it exists in the plain run only")
            continue
        number = as_tensor(mine[name]).detach()
        near = fingerprint(number).rounding
        if not math.isclose(float(number), value, rel_tol=near) and not (math.isnan(value) and math.isnan(number)):
            yield Difference("the logged value", name, f"{float(number)!r}, and {value!r} in the plain run")


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
