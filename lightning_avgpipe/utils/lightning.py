"""The only import of Lightning in this package, from ``lightning.pytorch`` or from ``pytorch_lightning``.

The two packages have the same names and the same code, but the classes of one are unknown to the other. So this package
works with one of them in a process, :data:`~lightning_avgpipe.utils.versions.PACKAGE`. Objects of the other package are
refused with :func:`refuse_other`.

Below is the table of what is used of Lightning and torchmetrics although it is not public.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils import torch_compat
from lightning_avgpipe.utils.torch_compat import Private
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
TQDMProgressBar = pl.callbacks.TQDMProgressBar
convert_inf = pl.callbacks.progress.tqdm_progress.convert_inf
TensorBoardLogger = pl.loggers.TensorBoardLogger
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
    """Check that an object is not from the package of Lightning that this package does not work with.

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


# -- what is used although it is not public ----------------------------------------------------------------------------


_TRAINER, _LOOPS, _FABRIC = f"{pl.__name__}.trainer", f"{pl.__name__}.loops", f"{fabric.__name__}.utilities"
_DISTRIBUTED = f"{_FABRIC}.distributed"
_LOGGING = f"{_TRAINER}.connectors.logger_connector.logger_connector._LoggerConnector"
_RESULT = f"{_TRAINER}.connectors.logger_connector.result"
_DATA = f"{_TRAINER}.connectors.data_connector"
_SIGNALS = f"{_TRAINER}.connectors.signal_connector._SignalConnector"
_FIT, _EPOCH = f"{_LOOPS}.fit_loop._FitLoop", f"{_LOOPS}.training_epoch_loop._TrainingEpochLoop"
_OPTIMIZATION = f"{_LOOPS}.optimization.automatic._AutomaticOptimization"
_EVALUATION = f"{_LOOPS}.evaluation_loop._EvaluationLoop"
_LAUNCHERS = f"{pl.__name__}.strategies.launchers"
_SCRIPT = f"{_LAUNCHERS}._SubprocessScriptLauncher"
_CALLBACKS, _MODULE = f"{pl.__name__}.callbacks", f"{pl.__name__}.LightningModule"
_AVERAGES = f"{_CALLBACKS}.weight_averaging.WeightAveraging"

_STEPS = (
    Private(_OPTIMIZATION, "the base of ours, which takes its place in the epoch loop", "trainer"),
    Private(f"{_OPTIMIZATION}._training_step", "replaced: all processes may skip a batch together", "kwargs"),
    Private(f"{_OPTIMIZATION}._make_closure", "replaced: they are mixed", "kwargs optimizer batch_idx"),
    Private(f"{_OPTIMIZATION}._make_step_fn", "what the closure runs", "kwargs"),
    Private(f"{_OPTIMIZATION}._optimizer_step", "steps in a plain run", "batch_idx train_step_and_backward_closure"),
    Private(f"{_OPTIMIZATION}._make_zero_grad_fn", "what clears gradients first", "batch_idx optimizer"),
    Private(f"{_OPTIMIZATION}._skip_backward", "whether the module wants none"),
    Private(f"{_LOOPS}.optimization.automatic.Closure._step_fn", "runs the pipeline"),
    Private(f"{_TRAINER}.call._call_strategy_hook", "calls training_step", "trainer hook_name args"),
    Private(f"{_FIT}._should_accumulate", "whether this iteration ends with a step", ""),
    Private(f"{_EPOCH}._num_ready_batches_reached", "whether the epoch ends, so that no batch is ahead", ""),
    Private(f"{_EPOCH}._should_check_val_fx", "whether a validation comes, the same", "data_fetcher"),
    Private(f"{_CALLBACKS}.ModelCheckpoint._every_n_train_steps", "whether a checkpoint comes, the same"),
    Private(f"{_EPOCH}._build_kwargs", "the arguments of a rehearsed training_step", "kwargs batch batch_idx"),
    Private(f"{_EPOCH}._batches_that_stepped", "the step that loggers see"),
    Private(f"{_EVALUATION}._on_evaluation_model_eval", "replaced: validation begins with the reference", ""),
    Private(f"{_EVALUATION}._on_evaluation_model_train", "replaced: it ends with the model", ""),
    Private(f"{pl.__name__}.core.optimizer.LightningOptimizer._optimizer", "the optimizer in the wrapper"),
    Private(f"{pl.__name__}.strategies.Strategy._lightning_optimizers", "the wrappers"),
    Private(f"{pl.__name__}.plugins.Precision._after_closure", "between backwards and step", "model optimizer"),
    Private(f"{_MODULE}._on_before_batch_transfer", "skipped where they arrive converted", "batch dataloader_idx"),
    Private(f"{_MODULE}._apply_batch_transfer_handler", "batches of other pipelines", "batch device dataloader_idx"),
    Private(f"{_MODULE}._current_fx_name", "which hook logs"),
    Private(f"{_MODULE}._device", "what self.device says, while weights are elsewhere"),
    Private(f"{_MODULE}._LightningModule__to_tensor", "replaced: a logged number stays on the host", "value name"),
    Private(f"{_MODULE}._trainer", "replaced by a view of the trainer while a step runs early"),
    Private(f"{pl.__name__}.utilities.grad_norm", "its code replaced: all stages", "module norm_type group_separator"),
    Private(f"{pl.__name__}.utilities.exceptions._TunerExitException", "ends a run as if it were done"),
)  # fmt: skip
_LOGS = (
    Private(_LOGGING, "the base of ours, which takes its place: rank 0's metrics are everybody's", "trainer"),
    Private(f"{_LOGGING}._callback_metrics", "what callbacks monitor"),
    Private(f"{_LOGGING}._logged_metrics", "what callbacks of the user look at"),
    Private(f"{_RESULT}._distributed_is_initialized", "replaced: only rank 0 logs, so nothing is recommended", ""),
    Private(f"{_TRAINER}.trainer.Trainer._logger_connector", "where it lies"),
    Private(f"{_TRAINER}.trainer.Trainer._results", "what log() has stored"),
    Private("torchmetrics.Metric._defaults", "names of the states"),
    Private("torchmetrics.Metric._forward_cache", "the value of a batch, which log() takes"),
    Private("torchmetrics.Metric._computed", "what compute() returned"),
    Private("torchmetrics.Metric._update_count", "how often it was updated"),
)  # fmt: skip
_BATCHES = (
    Private(f"{_TRAINER}.trainer.Trainer._active_loop", "the loop that runs"),
    Private(f"{_FIT}._data_source", "its dataloader is replaced: batches are read in bundles"),
    Private(f"{_FIT}._combined_loader", "the dataloaders"),
    Private(f"{_FIT}._data_fetcher", "learns that an epoch has another number of iterations"),
    Private(f"{_EVALUATION}._combined_loader", "the dataloaders"),
    Private(f"{_LOOPS}.prediction_loop._PredictionLoop._combined_loader", "the dataloaders"),
    Private(f"{pl.__name__}.utilities.combined_loader.CombinedLoader._mode", "whether they come one after the other"),
    Private(f"{pl.__name__}.utilities.combined_loader.CombinedLoader._iterator", "what it reads now, and its limits"),
    Private(f"{_DATA}._DataLoaderSource.dataloader", "replaced: bundles", ""),
    Private(f"{_TRAINER}.trainer.Trainer._data_connector", "prepares dataloaders"),
    Private(f"{_DATA}._DataConnector._prepare_dataloader", "replaced: by groups", "dataloader shuffle mode"),
    Private(f"{_DATA}._DataConnector._requires_distributed_sampler", "replaced: the same", "dataloader"),
    Private(f"{_TRAINER}.trainer.Trainer._accelerator_connector", "whether samplers are to be distributed"),
    Private(f"{_CALLBACKS}.TQDMProgressBar._train_progress_bar", "learns the length of an epoch"),
    Private(f"{_CALLBACKS}.ProgressBar._trainer", "whether it has begun"),
    Private(f"{_FABRIC}.types._Stateful", "what dataloaders of which a position is saved have"),
)  # fmt: skip
_RUNS = (
    Private(f"{_TRAINER}.trainer.Trainer._signal_connector", "handles signals"),
    Private(f"{_SIGNALS}._sigterm_notifier_fn", "replaced: all processes stop at the same batch", "signum _"),
    Private(f"{_SIGNALS}._slurm_sigusr_handler_fn", "replaced: the same", "signum _"),
    Private(f"{_EPOCH}._broadcast_sigterm_tensor", "replaced by our answer, which needs no message", "", ">=2.5.2"),
    Private(f"{_TRAINER}.setup._parse_time_interval_seconds", "makes a time interval, refused", versions=">=2.6"),
    Private(f"{pl.__name__}.strategies.ParallelStrategy._layer_sync", "says whether sync_batchnorm=True"),
    Private(f"{pl.__name__}.strategies.Strategy._checkpoint_io", "whether the user chose one"),
    Private(f"{pl.__name__}.strategies.Strategy._precision_plugin", "whether the user chose one"),
    Private(f"{pl.__name__}.plugins.io.wrapper._WrappingCheckpointIO", "what wraps one"),
    Private(f"{_LAUNCHERS}.launcher._Launcher", "what starts processes"),
    Private(f"{_LAUNCHERS}._MultiProcessingLauncher", "starts them by multiprocessing", "strategy start_method"),
    Private(_SCRIPT, "runs the script again", "cluster_environment num_processes num_nodes"),
    Private(f"{_SCRIPT}._call_children_scripts", "extended: they know who started them", ""),
    Private(f"{fabric.__name__}.strategies.launchers.subprocess_script._basic_subprocess_cmd", "runs the script", ""),
    Private(f"{_TRAINER}.call._call_callbacks_state_dict", "what a group that comes back takes over", "trainer"),
    Private(f"{_TRAINER}.call._call_callbacks_load_state_dict", "the same", "trainer checkpoint"),
    Private(f"{_DISTRIBUTED}._set_num_threads_if_needed", "after the start", "num_processes"),
    Private(f"{_DISTRIBUTED}._init_dist_connection", "joins them", "cluster_environment torch_distributed_backend"),
    Private(f"{_DISTRIBUTED}._all_gather_ddp_if_available", "user groups", "tensor group sync_grads"),
    Private(f"{_DISTRIBUTED}._sync_ddp_if_available", "user groups", "result group reduce_op"),
    Private(f"{_FABRIC}.imports._IS_INTERACTIVE", "whether a notebook runs"),
    Private(f"{_CALLBACKS}.BaseFinetuning.filter_on_optimizer", "replaced: not by contents", "optimizer params"),
    Private(f"{_CALLBACKS}.StochasticWeightAveraging._average_model", "is divided as the weights are"),
    Private(f"{_AVERAGES}._average_model", "the same", versions=">=2.6"),
    Private(f"{_AVERAGES}._swap_models", "replaced: the same", "pl_module", ">=2.6"),
    Private(f"{_AVERAGES}._copy_average_to_current", "replaced: the same", "pl_module", ">=2.6"),
)  # fmt: skip

NAMES = (*_STEPS, *_LOGS, *_BATCHES, *_RUNS)


def check_private_names() -> None:
    """Warn of the entries that the installed version of Lightning lacks, or has with another signature."""
    torch_compat.check_names(NAMES, pl.__name__, pl.__version__)
