"""A module as pipeline against the same module alone: losses, gradients, buffers, logged numbers, results.

Two pipelines are compared. In *one process* all stages share the module. *Apart*, each stage has a copy without the
parameters of the others, and messages are pickled: what happens between processes, without processes.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.engine.microbatch import MicroBatch, split, split_with
from lightning_avgpipe.engine.pipeline import Pipeline, run_together
from lightning_avgpipe.engine.stage import Stage
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan, cut_like
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.planning.program import stage_programs
from lightning_avgpipe.schedule import BACKWARD, FORWARD, Action, build
from lightning_avgpipe.strategy.log import StepLog
from lightning_avgpipe.strategy.metric_objects import local_metrics
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.random_streams import RandomKey
from lightning_avgpipe.weights.ownership import give_up
from lightning_avgpipe.weights.tied import TiedParameters
from tests import threads

TRAINING, VALIDATION = "training_step", "validation_step"


@dataclass(frozen=True)
class Outcome:
    """What training on some batches and then validating on them leaves behind."""

    losses: list[Any]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    results: list[Any]
    logged: list[tuple[str, Any]]


class Subject:
    """A LightningModule without a trainer, and the ways to run it.

    Args:
        module: copied, so that all subjects of a test start alike.
        num_microbatches: M.
    """

    def __init__(self, module: L.LightningModule, num_microbatches: int) -> None:
        self.module = copy.deepcopy(module)
        self.num_microbatches = num_microbatches
        self.logged: list[tuple[str, Any]] = []
        results = SimpleNamespace(log=lambda _, name, value, **options: self.logged.append((name, value)))
        self.trainer = SimpleNamespace(barebones=True, current_epoch=0, global_step=0, _results=results)
        self.module.trainer = self.trainer
        # what Lightning's does in the end
        self.module.log = lambda name, value, **options: results.log("", name, value, **options)  # type: ignore
        self.leaders = SimpleNamespace(world_size=1)
        self.log = StepLog(self.module, torch.device("cpu"), self.leaders)
        self.module.log = self.log  # type: ignore[method-assign]
        self.metrics = [m for m in self.module.modules() if isinstance(m, Metric)]

    def parts(self, batch: Any) -> list[MicroBatch]:
        splitter, batch = getattr(self.module, "split_batch", None), copy.deepcopy(batch)
        if splitter is None:
            return split(batch, self.num_microbatches)
        return split_with(splitter, batch, self.num_microbatches)

    def call(self, step: str, part: MicroBatch, *args: Any) -> Any:
        alone = local_metrics(self.metrics, self.log.batch_values, self.leaders, lambda: True)
        with alone, self.log.micro_batch(part.size), mode(step):
            return getattr(self.module, step)(*args)

    def task(self, step: str, parts: Sequence[MicroBatch], iteration: int) -> Task:
        return Task(
            lambda i, *args: self.call(step, parts[i], *args),
            [(part.data, 0) for part in parts],
            (lambda i, result: loss_of(result) * parts[i].weight) if step == TRAINING else None,
            RandomKey(0, iteration),
        )

    def outcome(self, run: Callable[[str, Any, int], Iterable[Any]], batches: Sequence[Any]) -> Outcome:
        """Train on the batches, then validate on them; ``run(step, batch, iteration)`` does one."""
        self.module.train()
        losses = []
        for i, batch in enumerate(batches):
            self.log.begin(len(self.parts(batch)))
            losses += [tree.map_tensors(Tensor.detach, result) for result in run(TRAINING, batch, i)]
            self.log.issue()
        self.module.eval()
        results: list[Any] = []
        for i, batch in enumerate(batches):
            self.log.begin(len(self.parts(batch)))
            results += run(VALIDATION, batch, i)
            self.log.issue()
        self.logged += [(type(metric).__name__, metric.compute()) for metric in self.metrics]
        gradients = {name: p.grad for name, p in self.module.named_parameters()}
        return Outcome(losses, gradients, dict(self.module.named_buffers()), results, self.logged)


def loss_of(result: Any) -> Tensor:
    """What training_step may return: the loss, or a dict with it."""
    return result["loss"] if isinstance(result, dict) else result


def mode(step: str) -> AbstractContextManager[Any]:
    """How Lightning calls a step."""
    return torch.inference_mode() if step == VALIDATION else nullcontext()


def alone(module: L.LightningModule, num_microbatches: int, batches: Sequence[Any]) -> Outcome:
    """What one process does: the micro-batches in order, each loss weighted by its share of the batch."""
    subject = Subject(module, num_microbatches)

    def run(step: str, batch: Any, iteration: int) -> Iterable[Any]:
        for part in subject.parts(batch):
            result = subject.call(step, part, part.data, 0)
            if step == TRAINING:
                (loss_of(result) * part.weight).backward()
            yield result

    return subject.outcome(run, batches)


def planned(
    module: L.LightningModule, num_stages: int, num_microbatches: int, batch: Any, split_points: Sequence[str] | None
) -> tuple[Plan, Any]:
    """The plan for ``training_step``, and graph and cuts of ``validation_step`` that fit it."""
    subject = Subject(module, num_microbatches)
    part = subject.parts(batch)[0]
    planner = Planner(Divisible(subject.module, None, subject.metrics), num_stages, split_points)
    plan = planner.plan(
        Step(TRAINING, lambda *args: subject.call(TRAINING, part, *args), (part.data, 0)),
        Conditions(build("1f1b", num_stages, num_microbatches)),
    )
    subject.module.eval()
    graph = planner.subject.capture(
        Step(VALIDATION, lambda *args: subject.call(VALIDATION, part, *args), (part.data, 0)), plan.graph.units
    )
    return plan, (graph, cut_like(graph, plan.stages_of, num_stages))


def in_one_process(
    module: L.LightningModule, plan: Plan, validation: Any, num_microbatches: int, batches: Sequence[Any]
) -> Outcome:
    """The stages of a plan, which share the module."""
    subject = Subject(module, num_microbatches)
    cluster = threads.alone(plan.num_stages)
    cluster.open()
    pipeline = Pipeline(cluster, subject.module)
    pipeline.load(plan.graph, plan.cuts)
    pipeline.load(*validation)

    def run(step: str, batch: Any, iteration: int) -> Iterable[Any]:
        parts = subject.parts(batch)
        schedule = build("1f1b" if step == TRAINING else "forward", plan.num_stages, len(parts))
        with mode(step):
            tasks = [subject.task(step, parts, iteration)]
            results = run_together([pipeline], step, [schedule], tasks)[0].results
        if step == TRAINING:
            pipeline.steps[TRAINING].copies.begin_sum().finish()
        assert results is not None
        return results

    return subject.outcome(run, batches)


def apart(
    module: L.LightningModule, plan: Plan, validation: Any, num_microbatches: int, batches: Sequence[Any]
) -> Outcome:
    """The stages of a plan, each with a module of its own."""
    subjects = [Subject(module, num_microbatches) for _ in plan.stages]
    programs = {TRAINING: stage_programs(plan.graph, plan.cuts), VALIDATION: stage_programs(*validation)}
    used = {name for stage in plan.stages for name in stage.parameters}
    for subject, stage in zip(subjects, plan.stages, strict=True):
        give_up(subject.module, used.difference(stage.parameters))
    cluster = threads.alone(plan.num_stages)

    def run(step: str, batch: Any, iteration: int) -> Iterable[Any]:
        stages = [
            Stage(program, subject.module, cluster.device, TiedParameters(subject.module, cluster, {}))
            for program, subject in zip(programs[step], subjects, strict=True)
        ]
        parts = subjects[0].parts(batch)
        tasks = [subject.task(step, subject.parts(batch), iteration) for subject in subjects]
        for i in range(len(parts)):
            message = None
            for stage, task in zip(stages, tasks, strict=True):
                message = travelled(stage.perform(Action(FORWARD, i), task, message))
        if step == TRAINING:
            for i in range(len(parts)):
                message = None
                for stage, task in zip(reversed(stages), reversed(tasks), strict=True):
                    message = travelled(stage.perform(Action(BACKWARD, i), task, message))
        return [stages[-1].results[i] for i in range(len(parts))]

    last = subjects[-1]
    for subject in subjects:
        subject.module.train()
    result = last.outcome(lambda *args: _with_all(subjects, run, *args), batches)
    for subject, stage in zip(subjects, plan.stages, strict=True):
        trained = {name for name, p in subject.module.named_parameters() if p.grad is not None}
        assert trained <= set(stage.parameters), f"stage {stage.index} trains what it does not own"
    gradients = {name: summed([s.module.get_parameter(name).grad for s in subjects]) for name in result.gradients}
    changed = {name: stage.index for stage in plan.stages for name in stage.states}
    buffers = {
        name: subjects[changed.get(name, plan.num_stages - 1)].module.get_buffer(name) for name in result.buffers
    }
    assert all(not subject.logged for subject in subjects[:-1])
    return replace(result, gradients=gradients, buffers=buffers)


def _with_all(subjects: Sequence[Subject], run: Callable[..., Any], step: str, batch: Any, iteration: int) -> Any:
    for subject in subjects:
        subject.module.train(step == TRAINING)
    with mode(step):
        return run(step, batch, iteration)


def travelled(message: Message | None) -> Message | None:
    """The message as it arrives in another process."""
    return None if message is None else pickle.loads(pickle.dumps(message))


def summed(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """One gradient of the copies of a parameter."""
    found = [tensor for tensor in tensors if tensor is not None]
    return sum(found[1:], found[0]) if found else None


# -- comparing -------------------------------------------------------------------------------------------------------


def assert_same(expected: Outcome, found: Outcome, shared: Iterable[str] = ()) -> None:
    """Bit for bit, by name. Gradients of ``shared`` parameters are sums over stages, whose order is not that of one
    process: they are compared to rounding.
    """
    _assert_equal("loss", expected.losses, found.losses)
    _assert_equal("result", expected.results, found.results)
    assert [name for name, _ in expected.logged] == [name for name, _ in found.logged]
    for (name, one), (_, other) in zip(expected.logged, found.logged, strict=True):
        _assert_equal(name, one, other)
    for name, one in expected.buffers.items():
        _assert_equal(name, one, found.buffers[name])
    assert any(gradient is not None for gradient in expected.gradients.values())
    for name, one in expected.gradients.items():
        other = found.gradients[name]
        assert (one is None) == (other is None), f"only one of the gradients of {name} exists"
        if one is not None and name in shared:
            torch.testing.assert_close(one, other, msg=f"the gradients of {name} differ")
        elif one is not None:
            _assert_equal(f"gradient of {name}", one, other)


def _assert_equal(what: str, one: Any, other: Any) -> None:
    ones, spec = tree.flatten(one)
    others, other_spec = tree.flatten(other)
    assert spec == other_spec, f"{what} differs in structure"
    for a, b in zip(ones, others, strict=True):
        same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
        assert same, f"{what} differs: {a} and {b}"


def check(
    module: L.LightningModule,
    batches: Sequence[Any],
    num_stages: int,
    num_microbatches: int = 2,
    split_points: Sequence[str] | None = None,
) -> Plan:
    """Train and validate alone, as a pipeline in one process, and apart: all must be the same."""
    plan, validation = planned(module, num_stages, num_microbatches, batches[0], split_points)
    expected = alone(module, num_microbatches, batches)
    for pipeline in (in_one_process, apart):
        assert_same(expected, pipeline(module, plan, validation, num_microbatches, batches), plan.copied)
    return plan
