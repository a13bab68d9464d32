"""Comeback: a group whose processes were started anew goes on, from the beginning of an epoch, where the others are.

It is told what a run knows that resumes from a checkpoint without parallel models, and besides what the others have
found out: stages and graphs, metrics, versions of loggers, and what their steps keep in attributes. Its models start
from the reference. Who takes part is for ``comm/returns.py``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.returns import Invitation, Returns
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.strategy.batch_splitter import BatchSplitter
from lightning_avgpipe.strategy.checkpoint_state import DividedState
from lightning_avgpipe.strategy.configuration import Configuration
from lightning_avgpipe.strategy.survivors import Survivors
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.parent import needing_starter
from lightning_avgpipe.weights.initialisation import on_meta


@dataclass(frozen=True)
class Beside:
    """What a module has that no checkpoint holds, on one process.

    Attributes:
        buffers: that are not persistent.
        attributes: numbers and texts that steps assign, by the path of a module and name.
    """

    buffers: Mapping[str, Tensor]
    attributes: Mapping[tuple[str, str], Any]

    @classmethod
    def of(cls, module: nn.Module, graphs: Sequence[CallGraph]) -> Beside:
        """That of a module whose steps have these graphs."""
        saved = module.state_dict().keys()
        keys = {key for graph in graphs for key in (*graph.attributes, *graph.of_units)}
        found = {key: vars(module.get_submodule(key[0])).get(key[1]) for key in sorted(keys)}
        return cls(
            {name: buffer for name, buffer in module.named_buffers() if name not in saved and not buffer.is_meta},
            {key: value for key, value in found.items() if isinstance(value, (int, float, str))},
        )

    @torch.no_grad()
    def put_into(self, module: nn.Module) -> None:
        """Let a module have it."""
        for name, buffer in module.named_buffers():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])
        for (path, name), value in self.attributes.items():
            setattr(module.get_submodule(path), name, value)


@dataclass(frozen=True)
class Legacy:
    """What the new processes of a group are told.

    Attributes:
        options: of the strategy, that must be the same.
        checkpoint: without parallel models.
        trained: name -> whether a parameter is.
        plan: of the stages.
        graphs: of the steps that run.
        kept_whole: stages of the run in which batches are not split.
        metrics: that callbacks monitor.
        versions: of the loggers that write into folders.
        validates: whether there are dataloaders of validation.
        beside: what no checkpoint has, of each process of a group.
    """

    options: Mapping[str, Any]
    checkpoint: dict[str, Any]
    trained: Mapping[str, bool]
    plan: Plan
    graphs: Sequence[CallGraph]
    kept_whole: frozenset[Any]
    metrics: Mapping[str, Any]
    versions: Sequence[Any]
    validates: bool
    beside: Sequence[Beside]


@dataclass(frozen=True)
class Comeback:
    """Of a run of the trainer; either side.

    Attributes:
        trainer: of the run.
        cluster: of the processes.
        configuration: of the strategy.
        deployment: of the module on processes.
        state: of the run.
        splitter: of batches.
        survivors: who goes on when a group leaves.
        announce: called when there is a plan that stays.
        trained: name -> whether a parameter is, as training began.
    """

    trainer: pl.Trainer
    cluster: Cluster
    configuration: Configuration
    deployment: Deployment
    state: DividedState
    splitter: BatchSplitter
    survivors: Survivors
    announce: Callable[[], None]
    trained: Mapping[str, bool]

    def begin_epoch(self) -> None:
        """An epoch is about to begin. Every process calls it."""
        returns = self.cluster.channels.returns
        if returns is None:
            return
        if self.cluster.apart:
            self._come_back(returns)
        elif returns.missing:
            self._look(returns)

    def end(self) -> None:
        """Training is over. Every process calls it."""
        if self.cluster.channels.returns is not None and self.cluster.leads:
            self.cluster.channels.returns.end()

    # -- the others --------------------------------------------------------------------------------------------------

    def _look(self, returns: Returns) -> None:
        """Whether a group asks to come back; if one does, let it."""
        cluster, data = self.cluster, self.survivors.dealing.why_not()
        invitation, told = None, list[str]()
        if cluster.leads:
            invitation, told = returns.look(lambda group: self._why_not(group) or data)
        for line in told:
            rank_zero_warn(line)
        invitation = cluster.world.broadcast(invitation)
        if invitation is None:
            return
        returns.prepare()
        legacy, failed = self._legacy(), "the process that told it where the others are has left"
        if cluster.world.ranks[cluster.world.rank] == invitation.leader:
            failed = returns.send(invitation, tree.map_tensors(Tensor.cpu, vars(legacy)))
        failed = cluster.world.broadcast(failed)
        if not failed and not returns.admit(invitation):
            failed = "another group has left meanwhile"
        if not failed:
            self._count_in(invitation)
        elif cluster.leads:
            returns.refuse(invitation, failed)
            rank_zero_warn(f"group {invitation.group} does not come back: {failed}. The others go on without it")
        returns.part()

    def _why_not(self, group: int) -> str:
        """Why a group cannot come back to this run; empty if it can."""
        trainer, options = self.trainer, self.configuration.options
        if group < (first := self.survivors.first):
            return f"it comes before group {first}, which logs and saves now"
        if trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            return "dataloaders are loaded anew (reload_dataloaders_every_n_epochs)"
        if not isinstance(options.schedule, str) or options.schedule in ("auto", "broadcast"):
            return f"schedule={options.schedule!r} is chosen, or made, while training runs"
        if options.elasticity.outer_optimizer is not None:
            return "the state of outer_optimizer is not given along"
        if any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            return "StochasticWeightAveraging keeps weights that are not given along"
        if self.trained != trained_in(trainer.lightning_module):
            return "parameters were frozen, or began to train, since training began"
        if self.configuration.asked:
            return "the stages have changed since training began, or are about to"
        return self.deployment.why_not_given()

    def _legacy(self) -> Legacy:
        """Every process gathers it, those of all groups; the first one sends it."""
        trainer, ensemble = self.trainer, self.deployment.models.ensemble
        if ensemble is not None and ensemble.averager.steps:  # the new models could not catch up with these
            ensemble.show_reference(False)
            ensemble.averager.begin()
            ensemble.averager.finish()
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self.state.complete(checkpoint, models=False)
        with self.deployment.models.showing_reference():
            beside = Beside.of(trainer.lightning_module, self.deployment.graphs)
            beside = replace(beside, buffers={name: b.detach().cpu().clone() for name, b in beside.buffers.items()})
        plan = self.deployment.plan
        assert plan is not None
        return Legacy(
            options=self.configuration.options.shared,
            checkpoint=checkpoint,
            trained=self.trained,
            plan=plan,
            graphs=self.deployment.graphs,
            kept_whole=frozenset(self.splitter.kept_whole),
            metrics=dict(trainer.callback_metrics),
            versions=self.survivors.succession.versions,
            validates=trainer.fit_loop.epoch_loop.val_loop._combined_loader is not None,
            beside=self.cluster.group.gather_objects(beside),
        )

    # -- the new processes -------------------------------------------------------------------------------------------

    def _come_back(self, returns: Returns) -> None:
        """Ask, take over what the others send, and be one of them."""
        if on_meta(self.trainer.lightning_module):
            raise ConfigurationError(
                f"rank {self.trainer.global_rank} was started anew, but its group cannot come back: the module has "
                "parameters on the meta device, whose contents the others do not give along. They go on without it"
            )
        with needing_starter(f"rank {self.trainer.global_rank}"):
            invitation: Invitation = returns.ask(self.cluster.world.broadcast(uuid.uuid4().hex))
        told, ready = returns.receive(invitation)
        self._take(Legacy(**told))
        ready()
        returns.join(invitation)
        self._count_in(invitation)
        returns.part()

    def _count_in(self, invitation: Invitation) -> None:
        """All agree that the group has come back. Every process calls it, those of the group too."""
        self._meet()
        self.survivors.count_in(invitation.group, self.configuration.num_pipelines)

    def _meet(self) -> None:
        """Connect all that meet, now that all of them are there.

        So whoever dies afterwards breaks a connection, and nobody waits for one that will not come. If the group leaves
        meanwhile, it does so for what follows.
        """
        what, sums = "the return of a group", self.cluster.replica_group
        self.cluster.world.barrier(what)
        self.cluster.leaders.barrier(what)
        assert sums is not None
        sums.begin_sum([torch.zeros(1, device=self.cluster.device)])
        sums.settle()

    def _take(self, legacy: Legacy) -> None:
        """Go on from where the others are, as far as this group does so alone."""
        own = self.configuration.options.shared
        for name in (name for name in own if own[name] != legacy.options[name]):
            raise ConfigurationError(
                f"{name} is {own[name]!r} for this process, which was started anew, but {legacy.options[name]!r} for "
                "the others; give AvgPipeStrategy the same options in all processes"
            )
        if self.trained != legacy.trained:
            raise ConfigurationError("the others train other parameters than this process, which was started anew")
        self._have_validation(legacy.validates)
        self._restore(legacy.checkpoint)
        legacy.beside[self.cluster.rank].put_into(self.trainer.lightning_module)
        self.splitter.kept_whole |= legacy.kept_whole
        self.trainer._logger_connector._callback_metrics.update(
            tree.map_tensors(lambda t: t.to(self.cluster.device), dict(legacy.metrics))
        )
        self.survivors.succession.take_versions(legacy.versions)
        self.deployment.adopt(legacy.plan, legacy.graphs)
        self.announce()
        if self.configuration.num_pipelines > 1:  # where others would have to take part in it later
            self.deployment.models.train(self.configuration.num_pipelines)

    def _have_validation(self, validates: bool) -> None:
        """Dataloaders of validation are made together; the others have done so, or will."""
        trainer, loop = self.trainer, self.trainer.fit_loop.epoch_loop.val_loop
        if validates and loop._combined_loader is None:
            trainer.validating = True
            loop.setup_data()
            trainer.training = True
        elif not validates and loop._combined_loader is not None:
            raise ConfigurationError(
                "this group, which was started anew, has dataloaders of validation, and the others have none yet; give "
                "all processes the same ckpt_path and options of the trainer"
            )

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        """As Lightning restores a checkpoint, but that of an epoch that is over: it is no restart."""
        trainer, connector = self.trainer, self.trainer._checkpoint_connector
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelCheckpoint) and callback.state_key in checkpoint["callbacks"]:
                callback.dirpath = checkpoint["callbacks"][callback.state_key].get("dirpath", callback.dirpath)
        connector._loaded_checkpoint = checkpoint
        try:
            connector.restore_datamodule()
            connector.restore_model()
            connector.restore_callbacks()
            connector.restore_training_state()
        finally:
            connector._loaded_checkpoint = {}
        _go_on(trainer.fit_loop)


def trained_in(module: nn.Module) -> dict[str, bool]:
    """Name -> whether a parameter is trained."""
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def _go_on(loop: _Loop) -> None:
    """The loop, and those in it, do not restart."""
    loop.on_iteration_done()
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            _go_on(inner)
