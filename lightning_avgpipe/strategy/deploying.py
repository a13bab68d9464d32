"""Creates the deployment of a run from the strategy's options, and its stages before a step first runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_avgpipe.averaging.optimizers import unwrapped
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.execution import Compiler, Execution
from lightning_avgpipe.errors import AvgPipeError, MicroBatchError, StepChangedError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.costs import Costing
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.planning.memory import UpdateScheme, limit_of
from lightning_avgpipe.planning.plan import format_seconds
from lightning_avgpipe.planning.planner import SOURCES, Planner, PlanSource
from lightning_avgpipe.planning.recompute_policy import chosen
from lightning_avgpipe.planning.trained import TrainedParameters
from lightning_avgpipe.schedule import Schedule
from lightning_avgpipe.schedule.recipes import RECIPES
from lightning_avgpipe.strategy import commands, hooks
from lightning_avgpipe.strategy.batch_splitter import BatchSplitter
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.strategy.iteration import STEP, Iteration
from lightning_avgpipe.strategy.metric_objects import metrics_of
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.training.plan_maker import Examples
from lightning_avgpipe.utils.lightning import TrainerFn, rank_zero_info, rank_zero_warn
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.weights.initialisation import on_meta

_PAYS = 0.9  # pipelining pays if it takes at most this fraction of the time on one device
_SMALL_LAYER_S = 5e-4  # below this, a layer's backward takes much longer in two halves
_DOMINATES = 0.9  # if one stage takes more than this share of the time, the other stages gain nothing


def deploy(context: RunContext) -> Deployment:
    """Return a deployment of the trainer's module, without a plan, and set the run's seed. Every process calls it."""
    trainer, cluster, options = context.trainer, context.cluster, context.configuration.options
    module = trainer.lightning_module
    seed = context.configuration.seed = cluster.world.broadcast(torch.initial_seed())  # that of rank 0
    policy, recompute = options.policy, chosen(module, options.recompute)
    weights = policy.store(module, lambda: [unwrapped(optimizer) for optimizer in trainer.optimizers])
    recompute = replace(recompute, stages=recompute.stages or policy.repeats)
    metrics = metrics_of(module)
    shows = trainer.progress_bar_callback is not None  # type: ignore[attr-defined]
    # a module on meta cannot be timed
    absent = on_meta(module) or commands.wants_plans_only()
    counts = absent or (options.system is not None and options.system.needs_equal_plans)
    planner = Planner(
        Divisible(module, cluster.device, metrics),
        costing=Costing("flops" if counts else options.costs, options.cache, shows=shows),
        recompute=recompute,
        replicas=options.stage_replicas,
        updates=UpdateScheme(
            policy,
            cluster.stage_map.replicas * (options.shard is not None),
            context.fitting and context.configuration.rolls,
            context.fitting and options.averaging.delay > 0,
        ),
        wire=options.links.wire if cluster.group.world_size > 1 else None,
        source=SOURCES[options.planner](options.links.bandwidth) if context.fitting else PlanSource(),
        **planned(context),
    )
    origin = context.state.take_origin(cluster, seed)
    compiler = None if options.compile is False else Compiler({} if options.compile is True else options.compile)
    static, interrupted = options.static_step, context.fitting and hooks.has_any(trainer, hooks.BETWEEN_MICRO_BATCHES)
    if static == "auto" and interrupted:
        static = False  # the step's Python may read, for the next micro-batch, what such a hook changes
    execution = Execution(recompute, compiler, options.averaging.streams, static, interrupted)
    return Deployment(
        module,
        cluster,
        planner,
        lambda: trainer.optimizers,
        origin=origin,
        averaging=options.averaging,
        observers=metrics,
        weights=weights,
        shards=options.shard is not None,
        execution=execution,
    )


def planned(context: RunContext) -> dict[str, Any]:
    """Return the planner's attributes that may change while training runs, by the options as they are now."""
    cluster, options = context.cluster, context.configuration.options
    now = cluster.stage_map.given_stages
    num_stages = now if options.num_stages == "auto" else options.num_stages
    limit = limit_of(options.memory_limit, cluster.device, context.sharing_stages * num_stages // now)
    return {"num_stages": num_stages, "split_points": options.split_points, "memory_limit": limit}


def give_back(context: RunContext, deployment: Deployment) -> None:
    """At the end of a run, give every process the whole module, unless it began on meta or the run has failed."""
    try:
        if context.connection.failed:
            deployment.parallel.abandon()
        else:
            deployment.restore()
    finally:
        context.state.end()


def announce(
    plan: Plan, cluster: Cluster, shards: bool = False, splitter: BatchSplitter | None = None, brief: bool = False
) -> None:
    """Log a plan on rank 0, with warnings of what may fail or differ from one device.

    Args:
        plan: the plan.
        cluster: the connected processes.
        shards: whether replicas divide the optimizer states.
        splitter: splits batches; None: they are not split.
        brief: whether to log one line, for evaluation, instead of a table.
    """
    stage_map = cluster.stage_map
    if cluster.group.world_size > 1 and not plan.devices:
        plan = replace(plan, devices=tuple(tuple(stage_map.ranks(k)) for k in range(plan.num_stages)))
    if brief:
        rank_zero_info(f"{plan.graph.step}: {plan.brief}")
    else:
        _show_table(plan, cluster, shards)
    _warn_of_decisions(plan)
    if splitter is not None and plan.graph.carried and splitter.count > 1 and not splitter.chooses:
        splitter.warn_once(
            f"'{plan.graph.carried[0]}', which {plan.graph.step} keeps for the next time, goes from micro-batch to "
            "micro-batch, that is to other samples of the same batch, and must fit each of them; with "
            "num_microbatches=1 it goes from batch to batch, as on one device"
        )
    _warn_of_replicas(plan, stage_map.stage_replicas)


def _show_table(plan: Plan, cluster: Cluster, shards: bool) -> None:
    """Log a plan as a table, and a hint if pipelining does not pay."""
    stage_map, size = cluster.stage_map, cluster.group.world_size
    groups = f", {stage_map.replicas} replicas" if stage_map.replicas > 1 else ""
    groups += f", {stage_map.num_teams} groups of them" if stage_map.num_teams > 1 else ""
    if any(count > 1 for count in stage_map.stage_replicas):
        groups += f", {' + '.join(map(str, stage_map.stage_replicas))}"
    groups += ", each with a part of the optimizer states" * shards
    processes = "one process" if size == 1 else f"{size} processes"
    stages = "one stage" if plan.num_stages == 1 else f"{plan.num_stages} stages"
    rank_zero_info(f"\n{stages} on {processes}{groups}:\n{plan}")
    alone_s = plan.serial_s
    if size > 1 and alone_s is not None and plan.forecast is not None and plan.forecast.iteration_s > _PAYS * alone_s:
        rank_zero_info(
            f"Pipelining does not pay here: one device would take {format_seconds(alone_s)} for these micro-batches. "
            "Stages are too small for these links, or too few micro-batches fill them; use larger batches, or a larger "
            "model, or one device"
        )
    if (recipe := RECIPES.get(plan.forecast.schedule if plan.forecast else "")) is not None and recipe.splits:
        _warn_of_halves(plan)
    if plan.note:
        tell = rank_zero_warn if plan.slowest.share > _DOMINATES else rank_zero_info
        tell(plan.note)


def _warn_of_halves(plan: Plan) -> None:
    """Say that splitting backwards costs more than the forecast counts, if layers are small."""
    count = sum(len(stage.parameters) for stage in plan.stages) or 1
    layer_s = 2 * sum(stage.backward for stage in plan.stages) / count  # most layers have a weight and a bias
    if plan.measured and plan.forecast is not None and layer_s < _SMALL_LAYER_S:
        rank_zero_info(
            f"schedule={plan.forecast.schedule!r} splits each backward in two. With layers of "
            f"{format_seconds(layer_s)}, both halves take about 1.5 times as long as a whole backward, which the "
            "expected time does not count. Compare it with schedule='1f1b'"
        )


def _warn_of_decisions(plan: Plan) -> None:
    """Warn of code that reads numbers of values, and so may choose which units it calls, and that a cut divides."""
    deciding = {plan.graph.data_dependent_modules[cut] for cut in plan.cuts} - {None}
    for path in sorted(filter(None, deciding)) or [""] * bool(deciding):
        what = f"'{path}'" if path else plan.graph.step
        rank_zero_warn(
            f"{what} reads numbers of values and is divided between stages. The run ends with an error when a "
            "micro-batch makes it call units of an earlier stage again, or units that the first micro-batch did not "
            "reach; to avoid this, keep what it calls on one stage, with split_points or a smaller num_stages"
        )


def _warn_of_replicas(plan: Plan, counts: Sequence[int]) -> None:
    """Warn of state that a step changes on stages with several replicas; ``counts`` has their number by stage."""
    shared = [n for k, stage in enumerate(plan.stages) if counts and counts[k] > 1 for n in stage.states]
    if shared:
        rank_zero_warn(
            f"{plan.graph.step} changes '{shared[0]}'"
            + (f" and {len(shared) - 1} other buffers" if len(shared) > 1 else "")
            + f" on stages with replicas={list(counts)}: each replica does so for its own micro-batches, and the "
            "values of the first replica are kept"
        )


class Preparation:
    """Prepares steps in one run of the trainer: captures them, and makes their stages."""

    def __init__(self, context: RunContext, deployment: Deployment, splitter: BatchSplitter) -> None:
        self._trainer, self._cluster = context.trainer, context.cluster
        self._deployment = deployment
        self._splitter = splitter
        self._agreed_in: int | None = None  # epoch in which processes last compared what they train
        self._known: tuple[Plan | None, dict[str, torch.nn.Parameter]] = (None, {})  # plan and parameters in that epoch

    def _optional(self, iteration: Iteration) -> bool:
        """Return whether a step that does not suit micro-batches may run on whole batches instead."""
        return len(iteration.micro_batches[0]) > 1 and self._splitter.chooses

    def prepare(self, iteration: Iteration, run: Callable[..., Any], schedule: Schedule, trained: int) -> bool:
        """Make the stages of a step, if it has none; return whether a new final plan was made.

        Every process calls it.

        Args:
            iteration: first iteration of the step.
            run: calls the step function as for the first micro-batch, with the given arguments.
            schedule: schedule of pipeline 0.
            trained: number of pipelines that will train.
        Raises:
            MicroBatchError: the step cannot be captured on a micro-batch; it may be retried on whole batches.
        """
        step, works = iteration.step, iteration.micro_batches
        decides = step == STEP or self._trainer.state.fn != TrainerFn.FITTING
        size, total = works[0][0].size, sum(part.size for part in works[0])
        args = [(part.data, *iteration.other_args) for parts in works for part in parts]
        examples = Examples(step, run, args, self._optional(iteration))
        advisor = commands.advisor_of(self._trainer) if step == STEP else None
        try:
            if advisor is not None:
                advisor.advise_on_memory(self._deployment, examples, schedule.num_microbatches, size, trained)
            return self._deployment.prepare(examples, decides, schedule, trained)
        except MicroBatchError as error:
            raise MicroBatchError(
                f"{step} fails on {size} of the {total} samples of a batch: {error}"
            ) from error.__cause__
        except Exception as error:
            if size < total and not isinstance(error, AvgPipeError):  # an error in the user's code
                error.add_note(
                    f"it was given {size} of the {total} samples of a batch; a step that needs all of them at once "
                    "trains with num_microbatches=1"
                )
            raise

    def check(self, iteration: Iteration) -> bool:
        """Return whether there are stages that can run a step.

        Raises:
            MicroBatchError: the captured step does not suit micro-batches; it may be retried on whole batches.
        """
        step, works = iteration.step, iteration.micro_batches
        if step not in self._deployment.pipeline.steps:
            return False
        graph = self._deployment.pipeline.graph(step)
        if self._optional(iteration) and graph.carried:
            raise MicroBatchError(
                f"'{graph.carried[0]}', which {step} keeps for the next time, would go to other samples of the same "
                "batch"
            )
        if self._optional(iteration) and not graph.finite:
            size, total = works[0][0].size, sum(part.size for part in works[0])
            raise MicroBatchError(f"its loss is not finite on {size} of the {total} samples of a batch")
        return True

    def agree_on_trained(self) -> TrainedParameters:
        """Return which parameters are trained now; check once per epoch that all processes train them alike.

        Every process calls it.

        Raises:
            StepChangedError: processes differ, or a hook has replaced parameters; the error names some of them.
        """
        step, epoch = self._deployment.pipeline.steps[STEP], self._trainer.current_epoch
        trained = step.trained
        if epoch != self._agreed_in:
            _compare([*self._cluster.world.exchange_objects(trained.names)])
            _compare_settings([*self._cluster.group.exchange_objects(_settings(self._trainer.optimizers))])
            self._check_parameters()
            self._agreed_in = epoch
            if step.shortcut is not None:
                step.shortcut.begin_epoch()
        return trained

    def _check_parameters(self) -> None:
        """Check, if there are several processes, that the module still has the parameters of which stages were made.

        Raises:
            StepChangedError: a parameter was added, removed or replaced.
        """
        plan, now = self._deployment.plan, dict(self._trainer.lightning_module.named_parameters())
        (planned, known), self._known = self._known, (plan, now)
        names = {**known, **now} if planned is plan and self._cluster.group.world_size > 1 else {}
        changed = [repr(name) for name in names if known.get(name) is not now.get(name)]
        if changed:
            raise StepChangedError(
                f"the module's parameters {listed(changed)} are not those for which its stages were made: a hook has "
                "replaced, added, parametrized or tied them, and processes would not train and save the same module. "
                "Do so before training, and resume from a checkpoint, or use one process (devices=1)"
            )


def _compare(trained: Sequence[frozenset[str]]) -> None:
    """Check that all processes train the same parameters.

    Args:
        trained: names of the parameters that each rank trains.
    Raises:
        StepChangedError: processes train different parameters.
    """
    differing = sorted(frozenset.union(*trained) - frozenset.intersection(*trained))
    if not differing:
        return
    ranks = [rank for rank, names in enumerate(trained) if differing[0] in names]
    raise StepChangedError(
        f"{listed([*map(repr, differing)])}: requires_grad differs between processes, the first is "
        f"trained only on rank {', '.join(map(str, ranks))} of {len(trained)}. Freeze and unfreeze on every process: "
        "in a hook of a callback, not only if is_global_zero, and by a condition that is the same on all of them"
    )


def _settings(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Return the hyper-parameters of optimizers that are numbers or words, by names for messages."""
    return {
        f"{name!r} of parameter group {j} of optimizer {i}": repr(value)
        for i, optimizer in enumerate(optimizers)
        for j, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if type(value) in (bool, int, float, str, tuple)
    }


def _compare_settings(settings: Sequence[Mapping[str, str]]) -> None:
    """Check that the optimizers of all processes have the same hyper-parameters.

    Args:
        settings: hyper-parameters of each rank.
    Raises:
        StepChangedError: they differ.
    """
    for name, first in settings[0].items():
        for rank, theirs in enumerate(settings):
            if theirs.get(name, first) != first:
                raise StepChangedError(
                    f"{name} is {first} on rank 0 and {theirs[name]} on rank {rank}, so stages train differently. "
                    "Callbacks run on every process: change it on all of them, not only if is_global_zero, and by "
                    "values that are the same on all of them. An optimizer that sets it from all parameters at once "
                    "cannot be used with several processes"
                )
