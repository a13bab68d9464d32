"""The memory of this process's stages in a run: what they hold in any case, and meters for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_avgpipe.engine.accounting import DeviceMeter, Footprint, HostMeter, Meter
from lightning_avgpipe.engine.microbatch import MicroBatch
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.memory import holdings, with_doubles
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.strategy.surroundings import Surroundings
from lightning_avgpipe.training.parallel_pipelines import ParallelPipelines
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.device import port_of


@dataclass(frozen=True)
class RunHoldings:
    """The memory of stages in a run of the trainer.

    Attributes:
        around: trainer, connection and options of the run.
        models: models that are trained.
    """

    around: Surroundings
    models: ParallelPipelines

    def meter(self, task: Task, plan: Plan, works: Sequence[Sequence[MicroBatch]] = ()) -> Meter | None:
        """Return a meter for the memory of an iteration; None where it cannot be measured.

        On the host that is a plan without measured costs, since its step may not bear being measured.

        Args:
            task: task of pipeline 0.
            plan: plan of the step.
            works: micro-batches of every pipeline; given where each pipeline has a model of its own.
        """
        device, module = self.around.cluster.device, self.around.trainer.lightning_module
        if port_of(device).memory.is_counted:
            return DeviceMeter(device)
        if not plan.measured:
            return None
        ensemble = self.models.ensemble if works else None
        others = range(1, 1 if ensemble is None else ensemble.models.size)
        beside = [] if ensemble is None else [t for n in others for t in ensemble.tensors(n).values()]
        batches = tree.tensors((tuple(map(tuple, task.args)), [part.data for parts in works for part in parts]))
        return HostMeter([*module.parameters(), *module.buffers(), *beside, *batches])

    def footprints(
        self, meter: Meter, plan: Plan, schedule: Schedule, num_microbatches: int, num_pipelines: int
    ) -> dict[int, Footprint]:
        """Return what each stage has kept in an iteration, given what it holds for all parallel models."""
        trainer, cluster, configuration = self.around.trainer, self.around.cluster, self.around.configuration
        module, rolls, ensemble = trainer.lightning_module, configuration.rolls, self.models.ensemble
        held = holdings(
            plan, cluster.stages, module, trainer.optimizers, num_microbatches, num_pipelines,
            cluster.stage_map.num_teams, configuration.options.policy, rolling=rolls,
            meeting=rolls and ensemble is not None and ensemble.averager.turns.are_there,
        )  # fmt: skip
        return meter.finish(with_doubles(held, plan, schedule, module, num_pipelines))
