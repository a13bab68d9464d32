"""The deployment with which a run of the trainer begins, made from the strategy's options."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torchmetrics import Metric

from lightning_avgpipe.averaging.optimizer_clone import unwrapped
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.engine.compiling import Compiler, Execution
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.costs import Costing
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.planning.memory import Updates, limit_of
from lightning_avgpipe.planning.plan import format_seconds
from lightning_avgpipe.planning.planner import SOURCES, Planner, PlanSource
from lightning_avgpipe.planning.recompute_policy import chosen
from lightning_avgpipe.strategy.checkpoint_state import DividedState, take_origin
from lightning_avgpipe.strategy.connection import Connection
from lightning_avgpipe.strategy.surroundings import Surroundings
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils.lightning import rank_zero_info, rank_zero_warn
from lightning_avgpipe.weights.initialisation import on_meta
from lightning_avgpipe.weights.store import WeightStore

_PAYS = 0.9  # largest share of the time on one device with which pipelining pays
_USELESS = 0.9  # share of the time above which one stage leaves nothing to gain from the others


def deploy(around: Surroundings) -> Deployment:
    """Return the deployment of the trainer's module, not planned yet, and set the seed. Every process calls it."""
    trainer, cluster, options = around.trainer, around.cluster, around.configuration.options
    module = trainer.lightning_module
    seed = around.configuration.seed = cluster.world.broadcast(torch.initial_seed())  # that of rank 0
    policy, recompute = options.policy, chosen(module, options.recompute)
    weights = None
    if not policy.drains:
        weights = WeightStore(module, policy, lambda: [unwrapped(optimizer) for optimizer in trainer.optimizers])
        recompute = replace(recompute, stages=recompute.stages or policy.backward is not None)
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    planner = Planner(
        Divisible(module, cluster.device, metrics),
        # on meta there are no contents, and nothing to time
        costing=Costing("flops" if on_meta(module) else options.costs, options.cache),
        recompute=recompute,
        replicas=options.stage_replicas,
        updates=Updates(
            policy,
            cluster.stage_map.replicas * (options.shard is not None),
            around.fitting and around.configuration.rolls,
        ),
        wire=options.links.wire if cluster.group.world_size > 1 else None,
        source=SOURCES[options.planner](options.links.bandwidth) if around.fitting else PlanSource(),
        **planned(around),
    )
    origin = take_origin(module, cluster, seed, around.before)
    parts = module, cluster, planner, lambda: trainer.optimizers, origin, options.averaging, metrics, weights
    compiler = None if options.compile is False else Compiler({} if options.compile is True else options.compile)
    execution = Execution(recompute, compiler, options.averaging.streams, options.static_step)
    return Deployment(*parts, options.shard is not None, execution)


def planned(around: Surroundings) -> dict[str, Any]:
    """Return the attributes of a planner that may change while training runs."""
    cluster, options = around.cluster, around.configuration.options
    now = cluster.stage_map.given_stages
    num_stages = now if options.num_stages == "auto" else options.num_stages
    limit = limit_of(options.memory_limit, cluster.device, around.sharing_stages * num_stages // now)
    return {"num_stages": num_stages, "split_points": options.split_points, "memory_limit": limit}


def give_back(deployment: Deployment, connection: Connection, state: DividedState) -> None:
    """Give every process the whole module at the end of a run, unless it began on meta or the run has failed."""
    try:
        if connection.failed:
            deployment.abandon()
        else:
            deployment.restore()
    finally:
        state.end()


def announce(plan: Plan, cluster: Cluster, shards: bool = False) -> None:
    """Print a plan on rank 0, with hints where pipelining does not pay or a step may fail.

    Args:
        plan: the plan.
        cluster: the connected processes.
        shards: whether replicas divide the optimizer states.
    """
    stage_map = cluster.stage_map
    groups = f", {stage_map.replicas} replicas" if stage_map.replicas > 1 else ""
    groups += f", {stage_map.num_teams} groups of them" if stage_map.num_teams > 1 else ""
    if any(count > 1 for count in stage_map.stage_replicas):
        groups += f", {' + '.join(map(str, stage_map.stage_replicas))}"
    groups += ", each with a part of the optimizer states" * shards
    size = cluster.group.world_size
    processes = "one process" if size == 1 else f"{size} processes"
    stages = "one stage" if plan.num_stages == 1 else f"{plan.num_stages} stages"
    if size > 1 and not plan.devices:
        plan = replace(plan, devices=tuple(tuple(stage_map.ranks(k)) for k in range(plan.num_stages)))
    rank_zero_info(f"\n{stages} on {processes}{groups}:\n{plan}")
    alone_s = plan.in_turns_s
    if size > 1 and alone_s is not None and plan.forecast is not None and plan.forecast.iteration_s > _PAYS * alone_s:
        rank_zero_info(
            f"Pipelining does not pay here: one device would take {format_seconds(alone_s)} for these micro-batches. "
            "Stages are too small for these links, or too few micro-batches fill them; use larger batches, or a larger "
            "model, or one device"
        )
    if plan.note:
        tell = rank_zero_warn if plan.slowest.share > _USELESS else rank_zero_info
        tell(plan.note)
    deciding = {plan.graph.deciding[cut] for cut in plan.cuts} - {None}
    for path in sorted(filter(None, deciding)) or [""] * bool(deciding):
        what = f"'{path}'" if path else plan.graph.step
        rank_zero_warn(
            f"{what} reads numbers of values and is divided between stages. Training ends with an error when a "
            "micro-batch makes it call units of an earlier stage again, or some that the first micro-batch did not "
            "reach; to be sure of it, keep what it calls on one stage, with split_points or a smaller num_stages"
        )
