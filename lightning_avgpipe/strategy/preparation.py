"""The preparation of a step: captures it and makes its stages before it runs, and checks what all processes train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.errors import AvgPipeError, MicroBatchError, StepChangedError
from lightning_avgpipe.planning.trained import Freezing
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.strategy.batch_splitter import BatchSplitter
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.plan_maker import Examples
from lightning_avgpipe.utils.lightning import TrainerFn, pl

_SHOWN = 3  # names in a message

Works = Sequence[Sequence[MicroBatch]]  # micro-batches, by pipeline


@dataclass(kw_only=True)
class Preparation:
    """The preparation of steps in one run of the trainer.

    Attributes:
        trainer: trainer of the run.
        cluster: the connected processes.
        deployment: deployment of the module on processes.
        splitter: splits batches.
        replanned: called when the stages have changed, with whether there is a plan that stays.
    """

    trainer: pl.Trainer
    cluster: Cluster
    deployment: Deployment
    splitter: BatchSplitter
    replanned: Callable[[bool], None]
    _agreed_in: int | None = None  # epoch of the last agreement

    def prepare(
        self, step: str, run: Callable[..., Any], works: Works, rest: Sequence[Any], schedule: Schedule, trains: int
    ) -> bool:
        """Make the stages of a step, if there are none; return whether there are any now. Every process calls it.

        Args:
            step: name of the step function.
            run: calls the step function, given the numbers of a pipeline and a micro-batch, and its arguments.
            works: micro-batches of the iteration, by pipeline.
            rest: other arguments of the step.
            schedule: schedule of pipeline 0.
            trains: number of pipelines that will train.
        Raises:
            MicroBatchError: the step cannot be captured on a micro-batch; whole batches can be tried.
        """
        decides = step == "training_step" or self.trainer.state.fn != TrainerFn.FITTING
        size, total = works[0][0].size, sum(part.size for part in works[0])
        optional = len(works[0]) > 1 and self.splitter.chooses
        args = [(part.data, *rest) for parts in works for part in parts]
        examples = Examples(step, partial(run, 0, 0), args, optional)
        stages = self.cluster.stage_map.num_stages
        try:
            made = self.deployment.prepare(examples, decides, schedule, trains)
        except MicroBatchError as error:
            raise MicroBatchError(
                f"{step} fails on {size} of the {total} samples of a batch: {error}"
            ) from error.__cause__
        except Exception as error:
            if size < total and not isinstance(error, AvgPipeError):  # an error of the user's code
                error.add_note(
                    f"it was given {size} of the {total} samples of a batch; a step that needs all of them at once "
                    "trains with num_microbatches=1"
                )
            raise
        if made or self.cluster.stage_map.num_stages != stages:
            self.replanned(made)
        if step not in self.deployment.pipeline.steps:
            return False
        graph = self.deployment.pipeline.graph(step)
        if optional and graph.carried:
            kept = graph.carried[0]
            raise MicroBatchError(
                f"'{kept}', which {step} keeps for the next time, would go to other samples of the same batch"
            )
        if optional and not graph.finite:
            raise MicroBatchError(f"its loss is no finite number on {size} of the {total} samples of a batch")
        return True

    def agree_on_trained(self) -> Freezing:
        """Return what training trains and freezes now; check once per epoch that it is the same on all processes.

        Every process calls it.

        Raises:
            StepChangedError: processes differ; the error names some of the parameters.
        """
        step, epoch = self.deployment.pipeline.steps["training_step"], self.trainer.current_epoch
        freezing = step.freezing
        if epoch != self._agreed_in:
            _compare([*self.cluster.world.exchange_objects(freezing.trained)])
            self._agreed_in = epoch
            if step.shortcut is not None:
                step.shortcut.begin_epoch()
        return freezing


def _compare(trained: Sequence[frozenset[str]]) -> None:
    """Check that all processes train the same parameters.

    Args:
        trained: names of the parameters that each rank trains.
    """
    differing = sorted(frozenset.union(*trained) - frozenset.intersection(*trained))
    if not differing:
        return
    ranks = [rank for rank, names in enumerate(trained) if differing[0] in names]
    more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
    raise StepChangedError(
        f"{', '.join(map(repr, differing[:_SHOWN]))}{more}: requires_grad differs between processes, the first is "
        f"trained on rank {', '.join(map(str, ranks))} of {len(trained)} only. Freeze and unfreeze on every process: "
        "in a hook of a callback, not only if is_global_zero, and by what is the same everywhere"
    )
