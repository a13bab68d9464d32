"""Hooks that run on rank 0 only, since they need results of steps or all weights; other ranks apply their changes.

An example is a temperature that ``on_train_epoch_end`` lowers, and that stages on other processes read.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.capture.reads import Key
from lightning_avgpipe.comm.alone import alone, in_hook
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.state.objects import ATOMS, CALLED_HOOKS
from lightning_avgpipe.state.outside import outside_variables
from lightning_avgpipe.state.snapshot import Snapshot, keys_leading_to
from lightning_avgpipe.state.writes import Writes
from lightning_avgpipe.strategy.context import RunContext
from lightning_avgpipe.strategy.hooks import WITH_RESULTS
from lightning_avgpipe.strategy.metric_objects import metrics_of
from lightning_avgpipe.strategy.state_of_stages import LARGEST, AttributePacker, Gone
from lightning_avgpipe.training.deployment import Deployment
from lightning_avgpipe.utils.lightning import OF_EVERY_LIGHTNING_MODULE, is_overridden, pl
from lightning_avgpipe.utils.names import is_within, joined, listed
from lightning_avgpipe.utils.patching import Replacement, all_replaced
from lightning_avgpipe.utils.torch_compat import GRADIENT_HOOKS, version_of

_LARGE = 2**16  # bytes; larger values of attributes that no step reads elsewhere are not sent: they may grow
_MISSING = object()
_OPTIMIZER = "optimizer"


def hooks_with_results(context: RunContext, deployment: Deployment) -> Iterator[Replacement]:
    """Yield replacements for the user's hooks that need results of steps or all weights.

    Rank 0 of a group runs such a hook, and the other ranks apply its changes.
    """
    module, hooks = context.module, _Hooks(context, deployment)
    # rank 0 has all weights of a checkpoint and writes it, unless each process writes its own part
    in_shards = context.configuration.options.save_distributed_checkpoint
    for name in WITH_RESULTS if in_shards else (*WITH_RESULTS, "on_save_checkpoint"):
        if name in vars(module) or is_overridden(name, module):
            yield module, name, hooks.around(name, getattr(module, name))


class _Hooks:
    """Runs hooks on rank 0, and applies their changes on the other ranks."""

    def __init__(self, context: RunContext, deployment: Deployment) -> None:
        self._trainer, self._connection, self._cluster = context.trainer, context.connection, context.cluster
        self._deployment = deployment
        self._module = module = context.module
        # metric objects are left out: their states stay on rank 0
        ignored = {id(m) for metric in metrics_of(module) for m in metric.modules()}
        self._modules = {path: m for path, m in module.named_modules() if id(m) not in ignored}
        self._packer = AttributePacker(module, self._cluster.device)
        loop = context.trainer.fit_loop
        self._with_settings = {"trainer": context.trainer, "fit_loop": loop, "epoch_loop": loop.epoch_loop}

    def around(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that every process calls: rank 0 runs the user's hook, the others wait for its changes.

        When user code calls it, and not Lightning, the user's hook runs as it is, in every process that calls it.
        """

        @functools.wraps(hook)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._module._current_fx_name != name:
                return hook(*args, **kwargs)
            if self._cluster.rank == 0:
                return self._lead(name, lambda: hook(*args, **kwargs))
            return self._follow()

        return run

    def _lead(self, name: str, hook: Callable[[], Any]) -> Any:
        """Run a hook, send its changes to the other processes, and return its result.

        Raises:
            StepChangedError: it has changed something of other processes that cannot be sent.
        """
        before = _Attributes(self._modules, self._packer)
        optimization, settings = _optimization(self._trainer), self._settings()
        structure = _structure(self._modules, self._trainer.optimizers)
        one = alone() if self._cluster.leaders.world_size == 1 else contextlib.nullcontext()
        with Writes(self._module) as writes, self._leading(), one, in_hook():
            result = hook()
        _check_writes(name, writes.written & self._kept_elsewhere())
        now = _structure(self._modules, self._trainer.optimizers)
        changed = (part for part, objects in structure.items() if not _is_same(objects, now.get(part, [])))
        _check_structure(name, [part for part in changed if self._is_elsewhere(part)])
        news = before.news(name, self._needed_elsewhere(), writes.written)
        after = _optimization(self._trainer)
        set_now = {key: value for key, value in self._settings().items() if settings.get(key, _MISSING) != value}
        self._cluster.control.broadcast((news, after if after != optimization else None, set_now))
        return result

    def _leading(self) -> AbstractContextManager[None]:
        """Return a context for a hook on rank 0. Collectives in it do not wait for the other ranks of the group.

        If the hook saves a checkpoint, the other ranks are asked to take part.
        """
        save = self._trainer.save_checkpoint

        def save_together(*args: Any, **kwargs: Any) -> None:
            self._cluster.control.broadcast(_Save(args, kwargs))
            with all_replaced([(self._connection, "is_leading", False), (self._trainer, "save_checkpoint", save)]):
                save(*args, **kwargs)

        return all_replaced([(self._connection, "is_leading", True), (self._trainer, "save_checkpoint", save_together)])

    def _settings(self) -> dict[tuple[str, str], Any]:
        """Return the attributes of the trainer and its loops that are plain values, such as ``should_stop``."""
        owners = self._with_settings.items()
        return {(owner, name): v for owner, holder in owners for name, v in vars(holder).items() if type(v) in ATOMS}

    def _needed_elsewhere(self) -> frozenset[Key]:
        """Return the attributes that steps read on other processes, and the buffers that other processes hold."""
        holdings = self._deployment.holdings
        owned = (name.rpartition(".") for name in filter(holdings.is_owned_elsewhere, holdings.owner_of))
        return self._deployment.pipeline.read_elsewhere() | {(path, name) for path, _, name in owned}

    def _is_elsewhere(self, name: str) -> bool:
        """Return whether other processes use a module or parameter, anything in it, or a module that contains it.

        Before there is a plan they may use anything.
        """
        plan, ranks, here = self._deployment.plan, self._cluster.stage_map.ranks, (self._cluster.rank,)
        if plan is None or not name or name.startswith(f"{_OPTIMIZER} "):  # the whole module, or an optimizer
            return True
        used = (stages for part, stages in plan.stages_of.items() if is_within(part, name) or is_within(name, part))
        return any(ranks(stage) != here for stages in used for stage in stages)

    def _kept_elsewhere(self) -> frozenset[str]:
        """Return the full names of parameters that other processes hold, and of buffers that their steps change.

        Before there is a plan each process holds all parameters.
        """
        deployment, cluster = self._deployment, self._cluster
        here = dict(self._module.named_parameters())
        if deployment.plan is None:
            return frozenset(here)
        pipeline, used, ranks = deployment.pipeline, deployment.plan.stages_of, cluster.stage_map.ranks
        others = {name for name in here if any(ranks(k) != (cluster.rank,) for k in used.get(name, ()))}
        changed = frozenset().union(*(pipeline.graph(step).changed for step in pipeline.steps))
        return frozenset(filter(deployment.holdings.is_owned_elsewhere, changed - here.keys())) | others

    def _follow(self) -> None:
        """Take part in the checkpoints that rank 0's hook saves, then apply the changes that it has made."""
        message: Any = self._cluster.control.broadcast()
        while isinstance(message, _Save):
            self._trainer.save_checkpoint(*message.args, **message.kwargs)
            message = self._cluster.control.broadcast()
        news, optimization, settings = message
        for (owner, name), value in settings.items():
            vars(self._with_settings[owner])[name] = value
        for (path, attribute), *content in news:
            self._packer.accept((path, attribute), self._packer.unpack(content))
        if optimization is not None:
            _accept_optimization(self._trainer, optimization)


def _check_writes(hook: str, lost: Collection[str]) -> None:
    """Check that a hook has written into no tensor that other processes hold.

    Args:
        hook: name of the hook.
        lost: full names of the tensors that it has written into and that other processes hold.
    Raises:
        StepChangedError: there are such tensors.
    """
    if not lost:
        return
    names = [repr(name) for name in sorted(lost)]
    raise StepChangedError(
        f"{hook}() runs on rank 0 only and changes {listed(names)}, which other "
        "processes hold, so that it would not change there. Change weights, and buffers that a step changes, in a "
        "hook that every process runs: on_train_batch_start, on_before_zero_grad, or one of a Callback"
    )


def _structure(modules: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, list[Any]]:
    """Return the objects that training depends on, as opposed to their values, by full name of a module or parameter.

    They are the module or parameter itself, a replaced ``forward``, and the hooks of modules and of gradients. For an
    optimizer (by number) they are its parameters and state.
    """
    found = {f"{_OPTIMIZER} {i}": _kept_by(optimizer) for i, optimizer in enumerate(optimizers)}
    found |= {path: [] for path in modules}
    for path, module in modules.items():
        own = vars(module)
        found[path] += own.get("forward"), *(hook for name in CALLED_HOOKS for hook in own[name].values())
        for name, child in module._modules.items():
            found.setdefault(joined(path, name), []).append(child)
        for name, parameter in module._parameters.items():
            registries = (getattr(parameter, hooks, None) or {} for hooks in GRADIENT_HOOKS)
            found[joined(path, name)] = [parameter, *(hook for registry in registries for hook in registry.values())]
    return found


def _kept_by(optimizer: Optimizer) -> list[Any]:
    """Return the parameters of an optimizer, and the values in its state, tensors with their version."""
    found: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for kept in optimizer.state.values():
        for value in kept.values() if isinstance(kept, dict) else (kept,):
            found += (value, version_of(value)) if isinstance(value, Tensor) else (value,)
    return found


def _is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two lists hold the same objects; integers are compared by value."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a is b or (type(a) is int and a == b) for a, b in pairs)


def _check_structure(hook: str, lost: Sequence[str]) -> None:
    """Check that a hook has replaced no modules or parameters, and registered no hooks, on rank 0 alone.

    Args:
        hook: name of the hook.
        lost: full names of changed modules and parameters that other processes use.
    Raises:
        StepChangedError: there are such names.
    """
    if lost:
        names = [repr(name) if name else "the LightningModule" for name in sorted(lost)]
        raise StepChangedError(
            f"{hook}() runs on rank 0 only and changes what other processes use, and would go on to use as it was: "
            f"{listed(names)} (replaced, or by a hook, another forward, or an optimizer's groups or states). Do so in "
            "a hook that every process runs: on_train_batch_start, on_train_epoch_start, or one of a Callback"
        )


class _Save(NamedTuple):
    """A message to the other ranks that a hook on rank 0 calls ``save_checkpoint`` with these arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Attributes:
    """The state before a hook: attributes, buffers, ``requires_grad`` of parameters, and variables outside modules."""

    def __init__(self, modules: dict[str, nn.Module], packer: AttributePacker) -> None:
        self._modules, self._packer = modules, packer
        self._variables = outside_variables(modules[""])
        self._held = self._holds()
        self._objects = Snapshot((*self._held.values(),), opaque=True)

    def _holds(self) -> dict[Key, Any]:
        found = {("", name): held for name, v in self._variables.items() for held in v.state().values()}
        return found | {
            (path, name): held
            for path, module in self._modules.items()
            for name, held in (*vars(module).items(), *module._buffers.items(), *_trained(module).items())
            if name not in OF_EVERY_LIGHTNING_MODULE
        }

    def news(self, hook: str, needed: Collection[Key], written: Collection[str]) -> list[tuple[Any, ...]]:
        """Return the keys and packed values of what has changed since this was constructed.

        Args:
            hook: name of the hook that has run.
            needed: attributes that steps read on other processes, and buffers that these hold.
            written: full names of buffers that were written into.
        Raises:
            StepChangedError: an attribute in ``needed`` has changed and cannot be sent.
        """
        now, changed = self._holds(), {id(obj) for obj in self._objects.changed()}
        found = []
        for key in {**self._held, **now}:
            value = now.get(key, _MISSING)
            before = self._held.get(key, _MISSING)
            reaches = keys_leading_to({key: value}, changed)
            if before is value and not reaches and joined(*key) not in written:
                continue
            must = key in needed
            try:
                content = self._packer.pack(Gone() if value is _MISSING else value, LARGEST if must else _LARGE)
            except Exception as error:  # pickling runs code of the objects, which may raise any error
                if not must:
                    continue  # no other process reads the attribute
                raise StepChangedError(
                    f"{hook}() runs on rank 0 only and changes '{joined(*key)}', which steps "
                    f"read on other processes too, but it cannot be sent there: {error}. Change it in a hook that "
                    "every process runs, such as on_train_epoch_start or on_train_batch_start"
                ) from error
            found.append((key, *content))
        return found


def _trained(module: nn.Module) -> dict[str, bool]:
    """Return ``requires_grad`` of each of a module's own parameters, by name."""
    return {name: p.requires_grad for name, p in module._parameters.items() if p is not None}


# -- optimizers and schedulers, which exist on every process ----------------------------------------------------------


def _optimization(trainer: pl.Trainer) -> bytes:
    """Return the hyper-parameters of optimizers, their plain attributes, and the states of schedulers, pickled."""
    groups = [
        [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]
    own = [{name: value for name, value in vars(one).items() if type(value) in ATOMS} for one in trainer.optimizers]
    return pickle.dumps((groups, own, [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]))


def _accept_optimization(trainer: pl.Trainer, content: bytes) -> None:
    groups, attributes, schedulers = pickle.loads(content)
    optimizer: Optimizer
    for optimizer, values, own in zip(trainer.optimizers, groups, attributes, strict=True):
        vars(optimizer).update(own)
        for group, value in zip(optimizer.param_groups, values, strict=True):
            group.update(value)
    for config, state in zip(trainer.lr_scheduler_configs, schedulers, strict=True):
        config.scheduler.load_state_dict(state)
