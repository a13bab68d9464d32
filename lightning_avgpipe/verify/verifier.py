"""Verification: the first iterations of training run plainly as well, and the first difference is an error."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_avgpipe.capture.outside import outside
from lightning_avgpipe.elastic.optimizer_clone import parameters_in, unwrapped
from lightning_avgpipe.engine.loss import loss_in
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import VerificationError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.utils.objects import Objects
from lightning_avgpipe.utils.patching import replaced
from lightning_avgpipe.utils.torch_compat import has_compiled
from lightning_avgpipe.verify.advice import advice
from lightning_avgpipe.verify.comparison import Difference, first_difference, how_different, usual_size
from lightning_avgpipe.verify.duplicate import duplicate, named_instead
from lightning_avgpipe.verify.plain import Outcome, PlainRun, notify_zero_grad
from lightning_avgpipe.verify.plain_draws import Captured
from lightning_avgpipe.verify.state import aliases, attributes, clone, put
from lightning_avgpipe.verify.stepped import Clipping, PlainStep, StepNotes
from lightning_avgpipe.verify.subject import Subject

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
        self._losses = 0
        self._begun = False
        self._compared: dict[str, set[str]] = defaultdict(set)
        self._omitted: set[str] = set()
        self._expected: list[Outcome] = []
        self._attributes: list[dict[str, Any]] = []  # by pipeline, before the iteration
        self._found: list[Outcome] = []
        self._before: Outcome | None = None
        self._carried: list[dict[str, Tensor | None]] = []  # plain gradients of this step's earlier batches

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
        first = self._leads and self._subject.plan is None and self._subject.num_models == 1
        self._before = self._state() if first else None

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
        self._expected, self._found, self._attributes = [], [Outcome({}) for _ in works], []
        first = cluster.team[0] * subject.num_pipelines()
        clears = subject.clears_gradients()
        if clears:
            self._carried = [{} for _ in works]
        for n, parts in enumerate(works):
            with self._model(n):
                state = self._collected()
                if self._leads:
                    self._check_capture(state)
                    self._attributes.append(dict(state.attributes))
                    with cluster.monitor.during("runs the step plainly, to verify it"):
                        self._expected.append(self._plain(n, first + n, parts, rest, context, iteration, state, clears))
        self._carried = [dict(outcome.gradients) for outcome in self._expected]
        step_log = subject.step_log
        step_log.listener = self._found[0].logged.__setitem__

        def noted(n: int, i: int, result: Any) -> Tensor | None:
            if result is not None:
                self._found[n].losses[f"micro-batch {i}"] = loss_in(result).detach().clone()
            return finish(n, i, result)

        return noted

    def _plain(
        self,
        n: int,
        number: int,
        parts: Sequence[MicroBatch],
        rest: Sequence[Any],
        context: Callable[[], AbstractContextManager[Any]],
        iteration: int,
        state: Outcome,
        clears: bool,
    ) -> Outcome:
        subject, trainer = self._subject, self._trainer
        logged = subject.step_log
        shared = [trainer, trainer.strategy, logged, trainer.datamodule, *trainer.callbacks, *trainer.loggers]  # type: ignore[attr-defined]
        twin = duplicate(self._module, {**state.parameters, **state.buffers}, [x for x in shared if x is not None])
        put(twin, state.attributes)  # what units have changed on other processes
        twin.to(subject.cluster.device)
        run = PlainRun(
            trainer, trainer.precision_plugin, context, (subject.seed(), iteration, number),
            Captured.of(self._plan.graph, self._module),
            trainer.accumulate_grad_batches, subject.loss_is_mean, subject.loss_weight(), subject.cluster.device,
        )  # fmt: skip
        clear = None
        if clears and n == 0:
            clear = lambda module: notify_zero_grad(module, trainer.optimizers[0])  # noqa: E731
        with (
            Objects(outside(self._module).values(), opaque=True).restored(),  # which the twin shares
            named_instead(self._module, twin),
        ):
            return run.run(twin, parts, rest, self._carried[n], clear)

    def compare(self) -> None:
        """All backwards are done, and nothing else: compare what there is now.

        Raises:
            VerificationError: something differs.
        """
        self._subject.step_log.listener = None
        ends = not self._trainer.fit_loop._should_accumulate()
        for n in range(len(self._found)):
            with self._model(n):
                state = self._collected()
            if self._leads:
                self._compare(n, self._expected[n], state, ends)

    def _compare(self, n: int, expected: Outcome, state: Outcome, ends: bool) -> None:
        found, plan = self._found[n], self._plan
        self._check(n, first_difference("the loss", expected.losses, found.losses))
        self._losses += len(expected.losses)
        if ends:
            downstream = [name for stage in reversed(plan.stages) for name in reversed(stage.parameters)]
            held = {name: g for name, g in expected.gradients.items() if name in state.gradients}
            tied = plan.copied
            scale = usual_size(held.values())
            self._check(
                n, first_difference("the gradient", held, state.gradients, tied.__contains__, downstream, scale)
            )
            self._compared["tied gradients"].update(name for name in held if name in tied)
            self._compared["gradients"].update(name for name, g in held.items() if g is not None and name not in tied)
        self._check(n, first_difference("the weight before any optimizer step", expected.parameters, state.parameters))
        self._check(n, first_difference("the buffer", expected.buffers, state.buffers))
        self._compared["buffers"].update(expected.buffers)
        attributes = self._shared(expected.attributes, state.attributes, self._attributes[n])
        self._check(n, first_difference("the attribute", _comparable(expected.attributes, attributes),
                                        _comparable(attributes, expected.attributes)))  # fmt: skip
        if n == 0 and self._subject.num_models == 1:
            mine = {name: torch.as_tensor(v).detach() for name, v in found.logged.items() if _is_number(v)}
            logged = {
                name: value.to(mine[name]) if name in mine else value
                for name, value in expected.logged.items()
                if value is not None
            }
            mine = {name: value for name, value in mine.items() if name in logged}
            self._check(n, first_difference("the logged value", logged, mine, lambda name: True))
            self._compared["logged values"].update(logged)

    def _shared(
        self, expected: Mapping[str, Any], found: Mapping[str, Any], before: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What was found, of objects that modules on several processes hold what the one that changes it has.

        Each process has an object of its own: where no code of the step ran that changes it, it is as before.
        """
        result = dict(found)
        for names in aliases(self._module):
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
                self._check(0, first_difference(f"what the capture of the step leaves in the {kind[:-1]}", one, other))

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
        seen: list[StepNotes] = []
        plain: list[PlainStep] = []
        precision = self._trainer.precision_plugin
        after_closure = precision._after_closure

        def noting(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            notes = StepNotes(unclipped=self._gradients())
            result = after_closure(model, optimizer, *args, **kwargs)
            inner = unwrapped(optimizer)
            names = {id(p): name for name, p in self._module.named_parameters()}
            mine = self._parameters()
            notes.clipped, notes.before = self._gradients(), {k: clone(p) for k, p in mine.items()}
            notes.see_states(inner, {id(p): name for name, p in mine.items()})
            if all(id(p) in names for p in parameters_in(inner)):
                seen.append(notes)
                if self._leads:
                    plain.append(PlainStep(inner, names, self._subject.cluster.device))
                hooks.enter_context(self._note_after(inner, notes, mine))
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
        if self._clipping is None:
            self._omitted.add("what hooks of yours do to gradients")
        for difference in plain.check(notes, self._clipping, self._scaler is not None):
            self._check(number, difference)
        self._compared["weights"].update(notes.before)

    @staticmethod
    def _note_after(optimizer: Optimizer, notes: StepNotes, mine: Mapping[str, Tensor]) -> RemovableHandle:
        def note(*_: Any) -> None:
            notes.after = {name: clone(p) for name, p in mine.items()}  # last by the outermost class's step

        return optimizer.register_step_post_hook(note)

    @property
    def _scaler(self) -> GradScaler | None:
        found = (value for value in vars(self._trainer.precision_plugin).values() if isinstance(value, GradScaler))
        return next((scaler for scaler in found if scaler.is_enabled()), None)

    @property
    def _clipping(self) -> Clipping | None:
        """None if user code has a say."""
        trainer = self._trainer
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        hooks: list[tuple[type, type]] = [(type(self._module), pl.LightningModule)]
        hooks += [(type(callback), pl.Callback) for callback in callbacks]
        for kind, base in hooks:
            for name in ("configure_gradient_clipping", "on_before_optimizer_step"):
                if getattr(kind, name, None) is not getattr(base, name, None) and not _ours(kind):
                    return None
        return Clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm != "value")

    # -- what this process, and all of them, hold ----------------------------------------------------------------------

    @property
    def _leads(self) -> bool:
        return self._subject.cluster.rank == 0

    @property
    def _trainer(self) -> pl.Trainer:
        return self._subject.trainer

    @property
    def _module(self) -> pl.LightningModule:
        return self._subject.module

    @property
    def _plan(self) -> Plan:
        plan = self._subject.plan
        assert plan is not None
        return plan

    def _model(self, n: int) -> AbstractContextManager[Any]:
        """Within this context the module shows the model of a pipeline."""
        return self._subject.showing(n) if self._subject.num_models > 1 else contextlib.nullcontext()

    def _owner(self, name: str) -> int:
        """The rank that answers for a parameter, a buffer or an attribute."""
        stages = self._subject.stages_of(name)
        return self._subject.cluster.stage_map.owner(stages[0]) if stages else 0

    def _mine(self, name: str) -> bool:
        return self._owner(name) == self._subject.cluster.rank

    def _parameters(self) -> dict[str, Tensor]:
        return {name: p for name, p in self._module.named_parameters() if self._mine(name) and not p.is_meta}

    def _gradients(self) -> dict[str, Tensor | None]:
        return {name: None if p.grad is None else clone(p.grad) for name, p in self._parameters().items()}

    def _state(self) -> Outcome:
        """What this process answers for, copied."""
        module = self._module
        return Outcome(
            {},
            self._gradients(),
            {name: clone(p) for name, p in self._parameters().items()},
            {name: clone(b) for name, b in module.named_buffers() if self._mine(name) and not b.is_meta},
            {name: clone(v) for name, v in attributes(module).items() if self._mine(name)},
        )

    def _collected(self) -> Outcome:
        """On rank 0 what all processes answer for."""
        state = self._state()
        for other in self._subject.cluster.group.gather_objects(state)[1:]:
            for kind in ("gradients", "parameters", "buffers", "attributes"):
                getattr(state, kind).update(getattr(other, kind))
        return state

    # -- the verdict ---------------------------------------------------------------------------------------------------

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
        numbers = {what: len(names) for what, names in self._compared.items() if names}
        exact = [f"{self._losses} losses"]
        exact += [f"{numbers[what]} {what}" for what in ("gradients", "weights", "buffers") if what in numbers]
        rounded = [f"{numbers[what]} {what}" for what in ("logged values", "tied gradients") if what in numbers]
        if self._subject.num_models > 1:
            self._omitted |= {"averaging", "logged values"}
        text = f"verified {self._wanted} optimizer steps: {', '.join(exact)} equal bit for bit"
        text += f"; {' and '.join(rounded)} up to rounding" if rounded else ""
        text += f"; not compared: {', '.join(sorted(self._omitted))}" if self._omitted else ""
        if self._leads:
            rank_zero_info(text)
        self._done(text)


def _ours(kind: type) -> bool:
    return kind.__module__.startswith(("lightning_avgpipe.", f"{pl.__name__}.callbacks"))


def _comparable(these: Mapping[str, Any], those: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes without those that hold placeholders on either side."""
    return {k: v for k, v in these.items() if v is not ... and those.get(k) is not ...}


def _equal(these: Mapping[str, Any], those: Mapping[str, Any], name: str) -> bool:
    if name not in these or name not in those:
        return name not in these and name not in those
    return how_different(these[name], those[name]) is None


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, Tensor))
