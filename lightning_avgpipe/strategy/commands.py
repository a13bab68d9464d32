"""The strategy's side of the commands ``verify`` and ``advise``, which run an unchanged training script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from lightning_avgpipe.advise.predictions import MEMORY_SCHEDULE, advice, memory_table
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.schedule import build
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.plan_maker import Examples
from lightning_avgpipe.utils.lightning import Callback, _TunerExitException, pl, rank_zero_info
from lightning_avgpipe.utils.script import asked_by
from lightning_avgpipe.verify import Subject, Verifier

_STEPS = 2  # optimizer steps that are verified by default

Verify = bool | int | Literal["auto"]


def verifier(subject: Subject, verify: Verify) -> Verifier | None:
    """Return a verifier for a training run; None if neither a command nor the option asks for verification."""
    command = asked_by("verify")
    if command is not None:
        return Verifier(subject, command["steps"], True, _end(subject.cluster, command["report"]))
    steps = verify if isinstance(verify, int) and verify is not True else _STEPS
    return Verifier(subject, steps, verify != "auto", rank_zero_info) if steps else None


def begin_script(trainer: pl.Trainer) -> None:
    """Prepare a trainer for a command: LightningCLI must not save its configuration, which it refuses to overwrite."""
    if asked_by("verify") is not None or asked_by("advise") is not None:
        trainer.callbacks = [  # type: ignore[attr-defined]
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if all(kind.__name__ != "SaveConfigCallback" for kind in type(callback).__mro__)
        ]
    if wants_plans_only():
        trainer.num_sanity_val_steps = 0  # validation would need the weights


def nothing_to_verify(verify: Verify) -> None:
    """Report, if verification is asked for, that a run with one stage and one micro-batch has nothing to compare."""
    text = "verify: there is nothing to compare, since here steps run whole, in one process, as with strategy='auto'"
    if _wants_verification(verify):
        rank_zero_info(text)
    if (command := asked_by("verify")) is not None:
        Path(command["report"]).write_text(text)


def refuse_to_verify(verify: Verify, reason: str) -> None:
    """Refuse verification in a run in which it is not possible.

    Raises:
        ConfigurationError: verification is asked for.
    """
    if _wants_verification(verify):
        raise ConfigurationError(f"verify compares micro-batches with plain ones, but {reason}; use verify=False")


def _wants_verification(verify: Verify) -> bool:
    return asked_by("verify") is not None or bool(verify and verify != "auto")


def _end(cluster: Cluster, report: str) -> Callable[[str], None]:
    """Return a function that writes a report on rank 0, and then ends the run in all processes."""

    def end(text: str) -> None:
        if cluster.world.rank == 0 and text:
            Path(report).write_text(text)
        cluster.world.barrier("the end of a command")
        raise _TunerExitException  # Lightning ends the run as if it had completed

    return end


def advise(trainer: pl.Trainer, cluster: Cluster) -> None:
    """If the command ``advise`` runs the script, add a callback that gives advice and ends the run after one batch."""
    command = asked_by("advise")
    if command is not None:
        advisor = Advisor(command["devices"], command["megabits"], _end(cluster, command["report"]))
        trainer.callbacks.append(advisor)  # type: ignore[attr-defined]


def wants_plans_only() -> bool:
    """Return whether a command asks only for the memory of stages, so that nothing trains."""
    command = asked_by("advise")
    return command is not None and bool(command["meta"])


def advisor_of(trainer: pl.Trainer) -> Advisor | None:
    """Return the callback that needs the first batch before it trains, to advise on memory; None if there is none."""
    found = (callback for callback in trainer.callbacks if isinstance(callback, Advisor))  # type: ignore[attr-defined]
    return next(found, None) if wants_plans_only() else None


class Advisor(Callback):
    """A callback that gives advice on speed after the first batch of training, or on memory before it.

    Args:
        devices: numbers of devices for which to predict.
        megabits: rates of the links between devices, in megabits per second.
        end: called with the advice, empty if there is none; ends the run.

    Attributes:
        done: whether the advice has been given.
    """

    def __init__(self, devices: list[int], megabits: list[float], end: Callable[[str], None]) -> None:
        self._devices, self._megabits, self._end = devices, megabits, end
        self.done = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Give the advice, and end the run."""
        plan: Plan = trainer.strategy.plan
        self.done, found = True, ""
        if plan.units is not None and plan.forecast is not None:
            found = advice(plan.units, plan.forecast.num_microbatches, self._devices, self._megabits)
        self._end(found)

    def advise_on_memory(
        self, deployment: Deployment, examples: Examples, num_microbatches: int, samples: int, models: int
    ) -> None:
        """Report the memory of stages and end the run, unless the step returns None for all examples.

        Args:
            deployment: deployment without a plan.
            examples: example arguments of the step.
            num_microbatches: M, number of micro-batches of a batch.
            samples: number of samples of a micro-batch.
            models: N, number of parallel models.
        """
        schedules = [build(MEMORY_SCHEDULE, stages, num_microbatches) for stages in self._devices]
        plans = deployment.sketches(examples, schedules, models)
        if plans:
            self.done = True
            self._end(memory_table(plans, num_microbatches, samples, models))


def end_script(trainer: pl.Trainer, verifier: Verifier | None) -> None:
    """Exit the script after the run that a command needs: a successful verification, or advice."""
    verified = asked_by("verify") is not None and verifier is not None and verifier.succeeded
    if verified or any(isinstance(c, Advisor) and c.done for c in trainer.callbacks):  # type: ignore[attr-defined]
        raise SystemExit(0)
