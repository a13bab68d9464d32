"""The only import of Lightning in this package, from ``lightning.pytorch`` or from ``pytorch_lightning``.

The two packages have the same names and the same code, but do not recognise each other's classes. So in a process this
package works with only one of them, :data:`~lightning_avgpipe.utils.versions.PACKAGE`. :func:`refuse_other` refuses
objects of the other one.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.versions import OTHER, PACKAGE

if TYPE_CHECKING:
    import lightning.fabric as fabric
    import lightning.pytorch as pl

    # type checkers do not find these as attributes
    from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO as _WrappingCheckpointIO
    from lightning.pytorch.strategies.strategy import TBroadcast as TBroadcast
    from lightning.pytorch.trainer import call as call
    from lightning.pytorch.trainer.connectors.logger_connector import result as result
    from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import (
        _LoggerConnector as _LoggerConnector,
    )
else:
    pl = importlib.import_module(PACKAGE)
    fabric = importlib.import_module("lightning.fabric" if PACKAGE == "lightning.pytorch" else "lightning_fabric")
    _WrappingCheckpointIO = pl.plugins.io.wrapper._WrappingCheckpointIO
    TBroadcast = pl.strategies.strategy.TBroadcast
    call, result = pl.trainer.call, pl.trainer.connectors.logger_connector.result
    _LoggerConnector = pl.trainer.connectors.logger_connector.logger_connector._LoggerConnector

LIGHTNING = ("lightning", "lightning_fabric", "pytorch_lightning")  # packages whose code is Lightning's, not the user's

CheckpointIO = fabric.plugins.CheckpointIO
ClusterEnvironment = fabric.plugins.ClusterEnvironment
TorchCheckpointIO = fabric.plugins.TorchCheckpointIO
move_data_to_device = fabric.utilities.apply_func.move_data_to_device
find_free_network_port = fabric.plugins.environments.lightning.find_free_network_port
get_filesystem = fabric.utilities.cloud_io.get_filesystem
sized_len = fabric.utilities.data.sized_len
_all_gather_ddp_if_available = fabric.utilities.distributed._all_gather_ddp_if_available
_destroy_dist_connection = fabric.utilities.distributed._destroy_dist_connection
_init_dist_connection = fabric.utilities.distributed._init_dist_connection
_set_num_threads_if_needed = fabric.utilities.distributed._set_num_threads_if_needed
_sync_ddp_if_available = fabric.utilities.distributed._sync_ddp_if_available
_IS_INTERACTIVE = fabric.utilities.imports._IS_INTERACTIVE
reset_seed = fabric.utilities.seed.reset_seed
_Stateful = fabric.utilities.types._Stateful

BaseFinetuning = pl.callbacks.BaseFinetuning
BasePredictionWriter = pl.callbacks.BasePredictionWriter
BatchSizeFinder = pl.callbacks.BatchSizeFinder
Callback = pl.callbacks.Callback
GradientAccumulationScheduler = pl.callbacks.GradientAccumulationScheduler
LambdaCallback = pl.callbacks.LambdaCallback
ModelCheckpoint = pl.callbacks.ModelCheckpoint
ModelPruning = pl.callbacks.ModelPruning
ProgressBar = pl.callbacks.ProgressBar
RichProgressBar = pl.callbacks.RichProgressBar
StochasticWeightAveraging = pl.callbacks.StochasticWeightAveraging
ThroughputMonitor = pl.callbacks.ThroughputMonitor
TQDMProgressBar = pl.callbacks.TQDMProgressBar
# The type of callback that keeps an average of the weights, as a tuple; empty before Lightning 2.6, which has none.
WEIGHT_AVERAGING = (pl.callbacks.WeightAveraging,) if hasattr(pl.callbacks, "WeightAveraging") else ()
convert_inf = pl.callbacks.progress.tqdm_progress.convert_inf
TensorBoardLogger = pl.loggers.TensorBoardLogger
WandbLogger = pl.loggers.WandbLogger
DummyLogger = pl.loggers.logger.DummyLogger
Closure = pl.loops.optimization.automatic.Closure
ClosureResult = pl.loops.optimization.automatic.ClosureResult
_AutomaticOptimization = pl.loops.optimization.automatic._AutomaticOptimization
Precision = pl.plugins.precision.Precision
PassThroughProfiler = pl.profilers.PassThroughProfiler
ParallelStrategy = pl.strategies.ParallelStrategy
SingleDeviceStrategy = pl.strategies.SingleDeviceStrategy
_MultiProcessingLauncher = pl.strategies.launchers._MultiProcessingLauncher
_SubprocessScriptLauncher = pl.strategies.launchers._SubprocessScriptLauncher
_basic_subprocess_cmd = fabric.strategies.launchers.subprocess_script._basic_subprocess_cmd
_Launcher = pl.strategies.launchers.launcher._Launcher
RunningStage = pl.trainer.states.RunningStage
TrainerFn = pl.trainer.states.TrainerFn
TrainerStatus = pl.trainer.states.TrainerStatus
grad_norm = pl.utilities.grad_norm
CombinedLoader = pl.utilities.combined_loader.CombinedLoader
SIGTERMException = pl.utilities.exceptions.SIGTERMException
_TunerExitException = pl.utilities.exceptions._TunerExitException
is_overridden = pl.utilities.model_helpers.is_overridden
rank_zero_info = pl.utilities.rank_zero.rank_zero_info
rank_zero_only = pl.utilities.rank_zero.rank_zero_only
OF_EVERY_LIGHTNING_MODULE = frozenset(vars(pl.LightningModule())) - {"training"}  # attributes
rank_zero_warn = pl.utilities.rank_zero.rank_zero_warn
is_param_in_hook_signature = pl.utilities.signature_utils.is_param_in_hook_signature

_FOREIGN = ("lightning.",) if OTHER == "lightning.pytorch" else ("pytorch_lightning.", "lightning_fabric.")


def refuse_other(name: str, thing: object) -> None:
    """Check that an object is not from the package of Lightning with which this process does not work.

    Args:
        name: name of the object, for the error.
        thing: a trainer, or an object that was given to one.

    Raises:
        ConfigurationError: the object's class, or a base of it, is from the other package.
    """
    # a callback that is derived only from Callback works in every Trainer
    if any(base.__module__.startswith(_FOREIGN) and base.__name__ != "Callback" for base in type(thing).__mro__):
        alone = ", and lightning.pytorch only after it" if OTHER == "pytorch_lightning" else ""
        raise ConfigurationError(
            f"{name} is from {OTHER}, but lightning_avgpipe was imported for {PACKAGE}: use that of {PACKAGE}, or "
            f"import {OTHER} before lightning_avgpipe{alone}"
        )
