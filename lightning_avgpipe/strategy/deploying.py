"""The deployment that a run of the trainer begins with, by the strategy's options."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torchmetrics import Metric

from lightning_avgpipe.comm.bandwidth import measure_bandwidth
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.elastic.optimizer_clone import unwrapped
from lightning_avgpipe.engine.compiling import Compiler
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.costing import Costing
from lightning_avgpipe.planning.divisible import Divisible
from lightning_avgpipe.planning.memory_limit import limit_of
from lightning_avgpipe.planning.model_memory import Updates
from lightning_avgpipe.planning.network import Matrix
from lightning_avgpipe.planning.planner import Planner
from lightning_avgpipe.planning.recompute_policy import chosen
from lightning_avgpipe.strategy.checkpoint_state import DividedState, take_origin
from lightning_avgpipe.strategy.connection import Connection
from lightning_avgpipe.strategy.options import Options
from lightning_avgpipe.strategy.surroundings import Surroundings
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.weights.initialisation import on_meta
from lightning_avgpipe.weights.store import WeightStore

_USELESS = 0.9  # a stage with more of the time leaves nothing to gain from the others


def deploy(around: Surroundings) -> Deployment:
    """The deployment of the trainer's module, not planned yet; the run has a seed. Every process calls it."""
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
        costing=Costing("flops" if on_meta(module) else options.costs, options.cache),  # no contents: nothing to time
        recompute=recompute,
        replicas=options.stage_replicas,
        updates=Updates(
            policy,
            cluster.stage_map.replicas * options.shard_optimizer_states,
            around.fitting and around.configuration.rolls,
        ),
        **planned(around),
    )
    origin = take_origin(module, cluster, seed, around.before)
    parts = module, cluster, planner, lambda: trainer.optimizers, origin, options.elasticity, metrics, weights
    place_by = partial(_bandwidth, cluster, options, around.fitting)
    compiler = None if options.compile is False else Compiler({} if options.compile is True else options.compile)
    return Deployment(*parts, place_by, options.shard_optimizer_states, compiler, options.pipeline_streams)


def _bandwidth(cluster: Cluster, options: Options, trains: bool) -> Matrix | None:
    """Between processes, if stages are placed by it. Every process calls it."""
    if options.planner != "spp" or not trains:
        return None
    if isinstance(options.bandwidth, str):
        if not port_of(cluster.device).is_host:
            raise ConfigurationError(
                f"planner='spp' with bandwidth='measured' measures links between hosts, not between {cluster.device} "
                "and others; give a matrix of bytes per second, one row per process"
            )
        return measure_bandwidth(cluster.group)
    if len(options.bandwidth) != cluster.group.world_size:
        raise ConfigurationError(
            f"bandwidth has {len(options.bandwidth)} rows, but there are {cluster.group.world_size} processes; give a "
            "row, and an entry in each, for every process"
        )
    return options.bandwidth


def planned(around: Surroundings) -> dict[str, Any]:
    """What a planner is told that may change while training runs."""
    cluster, options = around.cluster, around.configuration.options
    now = cluster.stage_map.given_stages
    num_stages = now if options.num_stages == "auto" else options.num_stages
    limit = limit_of(options.memory_limit, cluster.device, around.sharing_stages * num_stages // now)
    return {"num_stages": num_stages, "split_points": options.split_points, "memory_limit": limit}


def give_back(deployment: Deployment, connection: Connection, state: DividedState) -> None:
    """A run ends: every process holds the whole module again, unless it began on meta, or the run has failed."""
    try:
        if connection.failed:
            deployment.abandon()
        else:
            deployment.restore()
    finally:
        state.end()


def announce(plan: Plan, cluster: Cluster, shards: bool = False) -> None:
    """Show a plan on rank 0, and whether replicas share optimizer states."""
    stage_map = cluster.stage_map
    groups = f", {stage_map.replicas} replicas" if stage_map.replicas > 1 else ""
    groups += f", {stage_map.num_teams} groups of them" if stage_map.num_teams > 1 else ""
    if any(count > 1 for count in stage_map.stage_replicas):
        groups += f", {' + '.join(map(str, stage_map.stage_replicas))}"
    groups += ", each with a part of the optimizer states" * shards
    size = cluster.group.world_size
    processes = "one process" if size == 1 else f"{size} processes"
    stages = "one stage" if plan.num_stages == 1 else f"{plan.num_stages} stages"
    rank_zero_info(f"\n{stages} on {processes}{groups}:\n{plan}")
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
