"""Names of torch, Lightning and torchmetrics that the package relies on although they are private, or replaces.

Each name has an entry, and tests look for each of them upstream.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from packaging.specifiers import SpecifierSet

from lightning_avgpipe.utils.lightning import fabric, pl
from lightning_avgpipe.utils.torch_compat import CHECKPOINT_BRACKET, REGISTRIES


@dataclass(frozen=True)
class Private:
    """A name of another package that is private, or that this package replaces.

    Attributes:
        name: full name, as ``package.module.Class.attribute``.
        why: what it is used for, or what replaces it.
        takes: names of the arguments that this package passes or receives, in order; others must have defaults. None:
            it is not called, or has no signature.
        versions: versions of the package that have the name; "": all that this package works with.
    """

    name: str
    why: str
    takes: str | None = None
    versions: str = ""


def problem(entry: Private) -> str | None:
    """Return how a name differs from its entry; None if it does not."""
    try:
        found = _find(entry.name)
    except AttributeError:
        return "does not exist"
    if entry.takes is None:
        return None
    if not callable(found):
        return "is not a function"
    wanted, given = entry.takes.split(), inspect.signature(found).parameters
    needed = {n for n, p in given.items() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    if [n for n in given if n in wanted] == wanted and needed <= {"self", *wanted}:
        return None
    return f"takes ({', '.join(given)}) instead of ({', '.join(wanted)})"


def _find(name: str) -> Any:
    """Return the object of a name; None for an attribute that only instances of a class have."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 1):
        if not hasattr(found, part):
            if isinstance(found, type) and any(part in _assigned(base) for base in found.__mro__):
                return None
            if hasattr(found, "__path__") and importlib.util.find_spec(".".join(parts[: i + 1])) is not None:
                importlib.import_module(".".join(parts[: i + 1]))
        found = getattr(found, part)
    return found


def _assigned(kind: type) -> set[str]:
    """Return the attributes of instances that a class declares, or that its methods use."""
    methods = [inspect.unwrap(member) for member in vars(kind).values() if isinstance(member, FunctionType)]
    return set(vars(kind).get("__annotations__", ())).union(*(method.__code__.co_names for method in methods))


def expected(table: Iterable[Private], version: str) -> list[Private]:
    """Return the entries of the names that a version of their package has."""
    return [entry for entry in table if SpecifierSet(entry.versions).contains(version, prereleases=True)]


# -- torch -------------------------------------------------------------------------------------------------------------

_TORCH_TENSORS = (
    Private("torch.Tensor._version", "counts changes in place"),
    Private("torch.Tensor._base", "the tensor that a view is of"),
    Private("torch.UntypedStorage._cdata", "tells memory apart, also where it has no address"),
    Private("torch.Tensor._backward_hooks", "hooks on gradients: parallel models share them, tied copies bear none"),
    Private("torch.Tensor._post_accumulate_grad_hooks", "the same"),
    Private("torch.Tensor._indices", "of a sparse tensor, also where some are there twice: to send and compare it"),
    Private("torch.Tensor._values", "the same"),
    Private("torch.Tensor._coalesced_", "changes no number, but counts as a change in place"),
    Private("torch.Tensor._make_wrapper_subclass", "absent values: a shape and a type without memory"),
    Private("torch._C._disabled_torch_function_impl", "absent values: what torch does of itself with subclasses"),
    Private("torch._C._swap_tensor_impl", "gives up and takes back parameters, which stay the same objects"),
    *(
        Private(f"torch._foreach_{name}", "one kernel for many tensors: averaging and norms")
        for name in ("add", "add_", "copy_", "div_", "lerp", "mul_", "norm", "sub", "zero_")
    ),
)
_TORCH_MODULES = (
    *(Private(f"torch.nn.Module.{name}", "where a module's own tensors and parts lie") for name in REGISTRIES),
    Private("torch.nn.Module._non_persistent_buffers_set", "is not an attribute that a step assigns"),
    Private("torch.nn.Module._forward_hooks", "a unit with hooks is followed from within"),
    Private("torch.nn.Module._forward_pre_hooks", "the same"),
    Private(
        "torch.nn.Module._load_from_state_dict",
        "replaced while weights for tensors on meta are loaded",
        "self state_dict prefix local_metadata strict missing_keys unexpected_keys error_msgs",
    ),
    Private("torch.nn.Module._compiled_call_impl", "whether a module is compiled, and must not be watched"),
    Private("torch.nn.Module.__call__", "replaced while calls of units are followed", "self"),
    Private("torch.nn.Module.__setattr__", "replaced while assignments of attributes are watched", "self name value"),
    Private("torch.nn.Linear.forward", "replaced in mixed precision: uses its weight and bias once", "self input"),
    Private("torch.nn.modules.dropout._DropoutNd", "draws in training, also if it is in evaluation mode now"),
    Private("torch.nn.modules.batchnorm._BatchNorm", "what depends on how a batch is split"),
    Private("torch.nn.RNNBase._flat_weights", "a list of parameters that recurrent layers build anew by themselves"),
    Private("torch.nn.RNNBase._flat_weight_refs", "references to them, the same"),
    Private("torch.nn.MultiheadAttention._reset_parameters", "initialises what has no reset_parameters", "self"),
)
_TORCH_STEPS = (
    Private("torch._C.DisableTorchFunction", "what we do to tensors ourselves is not followed"),
    Private("torch.overrides._get_current_function_mode", "whether our mode is on top", ""),
    Private("torch.utils._python_dispatch.TorchDispatchMode", "sees operations inside of units"),
    Private("torch.utils._python_dispatch._disable_current_modes", "what fetches parameters is no part of a step", ""),
    Private("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "which modes a step has entered", ""),
    Private("torch.overrides._get_current_function_mode_stack", "the same", ""),
    Private("torch._ops.OpOverload._schema", "says what an operation writes into"),
    Private("torch.ops.aten._to_copy", "hands numbers on without looking at them"),
    Private("torch.ops.aten._unsafe_view", "the same"),
    Private("torch.random.default_generator", "where torch.manual_seed and its kind look for it: replaced"),
    Private("torch._standard_gamma", "draws random numbers"),
    Private("torch._sample_dirichlet", "the same"),
    Private("torch.utils._pytree.tree_flatten", "trees of batches, outputs and states", "tree is_leaf"),
    Private("torch.utils._pytree.register_pytree_node", "classes of batches", "cls flatten_fn unflatten_fn"),
    Private("torch.utils._pytree.SUPPORTED_NODES", "which classes it knows"),
)
_TORCH_BACKWARDS = (
    Private("torch.autograd.Function.apply", "replaced while a step is followed: no torch function, so not seen else"),
    Private(f"torch.utils.checkpoint.{CHECKPOINT_BRACKET}", "replaced: regions are called again", "fn args kwargs"),
    Private("torch.utils.checkpoint._NoopSaveInputs", "how it keeps a region's inputs", versions="<2.9"),
    Private("torch.autograd.Variable._execution_engine", "whether a backward accumulates gradients; many backwards"),
    Private("torch._C._autograd._get_current_graph_task_keep_graph", "whether a backward retains its graph"),
    Private("torch._C._current_graph_task_id", "whether a backward runs"),
    Private("torch.autograd.graph.Node._input_metadata", "how many gradients come into a node"),
    Private("torch.autograd.graph.Node._sequence_nr", "what was computed before a unit's arguments"),
    Private("torch.autograd.graph.disable_saved_tensors_hooks", "replaced: hooks of ours step aside", "error_message"),
    Private("torch._C._autograd._top_saved_tensors_default_hooks", "whether hooks are ours", versions=">=2.8"),
    Private("torch._C._autograd._saved_tensors_hooks_is_enabled", "whether hooks are allowed"),
    Private("torch._C._len_torch_function_stack", "whether a mode of the user's is on"),
    Private("torch._C._len_torch_dispatch_stack", "the same"),
    Private("torch._C._functorch.is_functorch_wrapped_tensor", "what torch.func computes with"),
    Private("torch._C._functorch.get_unwrapped", "what it was given"),
    Private("torch._C._functorch.peek_interpreter_stack", "whether it computes"),
    Private("torch.autograd._profiler_enabled", "names actions only for a profiler that looks"),
)
_TORCH_OPTIMIZERS = (
    Private("torch.optim.Optimizer._optimizer_step_pre_hooks", "do not run while steps are timed"),
    Private("torch.optim.Optimizer._optimizer_step_post_hooks", "the same"),
    Private(
        "torch.nn.utils.clip_grad._get_total_norm", "replaced by the norm over all stages",
        "tensors norm_type error_if_nonfinite foreach",
    ),
    Private("torch.utils._foreach_utils", "has the next one"),
    Private(
        "torch.utils._foreach_utils._group_tensors_by_device_and_dtype", "the order of torch's norm of norms",
        "tensorlistlist with_indices",
    ),
    Private("torch.amp.GradScaler._scale", "whether it knows its device"),
    Private("torch.amp.GradScaler._lazy_init_scale_growth_tracker", "tells it its device", "dev"),
    Private(
        "torch.amp.GradScaler._unscale_grads_", "replaced by one that all stages agree on",
        "optimizer inv_scale found_inf allow_fp16",
    ),
)  # fmt: skip
_TORCH_DISTRIBUTED = (
    Private("torch.distributed.distributed_c10d._get_default_store", "where processes meet", ""),
    Private("torch.distributed.distributed_c10d._get_default_group", "replaced: in a step a process is alone", ""),
    Private("torch.distributed.distributed_c10d._rank_not_in_group", "replaced: the same", "group"),
    Private(
        "torch.distributed.distributed_c10d._process_group_name", "replaced: groups of a step have names of their own",
        "ranks use_hashed_name",
    ),
    Private("torch.distributed.distributed_c10d._world", "the same: its entries of groups"),
    Private("torch.distributed.distributed_c10d._World.pg_map", "the same"),
    Private("torch.distributed.distributed_c10d._World.pg_group_ranks", "the same"),
    Private("torch.distributed.ProcessGroup._get_backend", "network interfaces of torch's own group; what is aborted"),
    Private("torch.distributed.ProcessGroupGloo._Options", "pairs of processes that share one listening socket"),
    Private("torch.distributed.ProcessGroupGloo._Options._devices", "the same"),
    Private("torch.distributed.ProcessGroupGloo._Options._threads", "the same"),
    Private("torch.distributed.ProcessGroupGloo._set_default_timeout", "collectives have no limit of their own"),
    Private(
        "torch.distributed.checkpoint.state_dict_loader._load_state_dict", "reads shards in one process",
        "state_dict storage_reader no_dist planner",
    ),
    Private("torch.distributed.checkpoint.default_planner._EmptyStateDictLoadPlanner", "some of them", "keys"),
)  # fmt: skip

_TORCH_DATA = (
    Private("torch.utils.data.dataloader._BaseDataLoaderIter", "whether a step takes batches by itself", "loader"),
)

_TORCH_COMPILER = (
    Private("torch._dynamo.OptimizedModule._orig_mod", "whether a module is compiled"),
    Private("torch._dynamo.utils.counters", "whether anything was compiled"),
    Private("torch._dynamo.exc.TorchDynamoException", "whether an error is the compiler's or the user's"),
)

TORCH = (
    *_TORCH_TENSORS, *_TORCH_MODULES, *_TORCH_STEPS, *_TORCH_BACKWARDS, *_TORCH_OPTIMIZERS, *_TORCH_DISTRIBUTED,
    *_TORCH_DATA, *_TORCH_COMPILER,
)  # fmt: skip


# -- Lightning and torchmetrics ----------------------------------------------------------------------------------------

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
    Private(f"{_CALLBACKS}.ModelCheckpoint._train_time_interval", "whether one may come at any time"),
    Private(
        f"{_CALLBACKS}.ModelCheckpoint._should_save_on_exception", "replaced: only what is whole", "trainer", ">=2.6"
    ),
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
    Private(f"{_TRAINER}.trainer.Trainer._checkpoint_connector", "its restore() is replaced: not after a failure"),
    Private(f"{_SIGNALS}._sigterm_notifier_fn", "replaced: all processes stop at the same batch", "signum _"),
    Private(f"{_SIGNALS}._slurm_sigusr_handler_fn", "replaced: the same, before a batch", "signum _"),
    Private(f"{_EVALUATION}._evaluation_step", "replaced: the same, behind a batch"),
    Private(f"{_LOOPS}.prediction_loop._PredictionLoop._predict_step", "replaced: the same"),
    Private(f"{_EPOCH}._broadcast_sigterm_tensor", "replaced by nothing: no message is needed", "", ">=2.5.2"),
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
    Private(f"{_DISTRIBUTED}._destroy_dist_connection", "called at exit", ""),
    Private(f"{_DISTRIBUTED}._all_gather_ddp_if_available", "user groups", "tensor group sync_grads"),
    Private(f"{_DISTRIBUTED}._sync_ddp_if_available", "user groups", "result group reduce_op"),
    Private(f"{_FABRIC}.imports._IS_INTERACTIVE", "whether a notebook runs"),
    Private(f"{_CALLBACKS}.BaseFinetuning.filter_on_optimizer", "replaced: not by contents", "optimizer params"),
    Private(f"{_CALLBACKS}.StochasticWeightAveraging._average_model", "is divided as the weights are"),
    Private(f"{_CALLBACKS}.StochasticWeightAveraging._avg_fn", "replaced: not of what is on meta"),
    Private(f"{_CALLBACKS}.ThroughputMonitor._throughputs", "count groups"),
    Private(f"{_AVERAGES}._average_model", "the same", versions=">=2.6"),
    Private(f"{_AVERAGES}._swap_models", "replaced: the same", "pl_module", ">=2.6"),
    Private(f"{_AVERAGES}._copy_average_to_current", "replaced: the same", "pl_module", ">=2.6"),
)  # fmt: skip

LIGHTNING = (*_STEPS, *_LOGS, *_BATCHES, *_RUNS)
