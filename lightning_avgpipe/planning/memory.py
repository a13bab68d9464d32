"""Memory: how much a stage may use, is expected to need when it is planned, and holds when it runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.capture.costs import Link
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.recompute_policy import repeated
from lightning_avgpipe.schedule import Schedule, in_turn, peak_stash
from lightning_avgpipe.schedule.policies import WeightPolicy
from lightning_avgpipe.schedule.rules import trains
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.tensors import tensor_bytes

if TYPE_CHECKING:
    from lightning_avgpipe.planning.plan import Plan

MemoryLimit = str | int | float | None
_PREFIXES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_UNKNOWN_COPIES = 2  # assumed for an unknown optimizer, as for Adam
_SINGLE_BYTES = 4


def parse_limit(limit: MemoryLimit) -> float:
    """Parse a limit into a number of bytes, or a fraction of the device's memory if it is at most 1; None: infinite.

    Raises:
        ConfigurationError: the limit is not a number of bytes, a size such as "10GB", or a fraction.
    """
    if limit is None:
        return math.inf
    number = -1.0
    if isinstance(limit, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B\s*", limit, re.IGNORECASE)
        if found is not None:
            base = 1024 if found.group(3) else 1000
            number = float(found.group(1)) * base ** _PREFIXES[found.group(2).upper()]
    elif isinstance(limit, (int, float)) and not isinstance(limit, bool):
        number = float(limit)
    if not 0 < number < math.inf:
        raise ConfigurationError(
            f"memory_limit={limit!r}: must be a size such as '10GB' or '512MiB', a number of bytes, or a fraction of "
            "the device's memory between 0 and 1"
        )
    return number


def limit_of(limit: MemoryLimit, device: torch.device, sharing: int) -> float:
    """Return the bytes that one stage may use.

    Args:
        limit: limit as the user gave it: bytes for each stage, or a fraction of the device for all of its stages.
        device: device that hosts the stage.
        sharing: number of stages that share the device.
    """
    number = parse_limit(limit)
    return number * port_of(device).total_bytes() / sharing if number <= 1 else number


@dataclass(frozen=True)
class Flow:
    """The tensors that a stage keeps at a time, as counts and bytes.

    Attributes:
        in_flight: largest number of micro-batches in flight, whose received values are kept.
        stashed: largest number of micro-batches that are stashed.
        repeats: whether the stage repeats its forwards. Then it has one stash at a time.
        extra: number of weight versions besides the current one, or fraction of the sharded optimizer states.
    """

    in_flight: int = 1
    stashed: int = 1
    repeats: bool = False
    extra: float = 0.0


@dataclass(frozen=True)
class Memory:
    """The sizes and limits of memory that a partition depends on.

    Attributes:
        limit: bytes that each stage may use; infinite by default.
        weights: full name of each parameter or buffer -> its bytes, which cross a link once per iteration if several
            stages use it; empty: this traffic is not counted.
        persistent: full name -> bytes that a stage which uses it holds for it: weight, gradient, optimizer state.
        flows: what each stage keeps, shape ``(K,)``; empty: one micro-batch on every stage.
        num_microbatches: M, number of micro-batches, over which costs that arise once per iteration are spread.
        extra_bytes: full name -> bytes of one further weight version, or of optimizer states that are sharded over
            processes.
        double_stages: stages that also run the forwards of the stage before them.
        double_bytes: full name of each parameter or buffer -> bytes that the stages in ``double_stages`` hold for it,
            if the stage before uses it.
    """

    limit: float = math.inf
    weights: Mapping[str, int] = field(default_factory=dict)
    persistent: Mapping[str, int] = field(default_factory=dict)
    flows: tuple[Flow, ...] = ()
    num_microbatches: int = 1
    extra_bytes: Mapping[str, int] = field(default_factory=dict)
    double_stages: frozenset[int] = frozenset()
    double_bytes: Mapping[str, int] = field(default_factory=dict)

    def flow(self, stage: int) -> Flow:
        """Return what a stage keeps at a time."""
        return self.flows[stage] if self.flows else Flow()


@dataclass(frozen=True)
class Need:
    """The estimated bytes that one stage needs.

    Attributes:
        persistent: bytes of weights, gradients and optimizer states.
        stash: bytes that all stashed micro-batches keep for their backwards.
        boundary: bytes of the values received for all micro-batches in flight.
    """

    persistent: int
    stash: int
    boundary: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.persistent + self.stash + self.boundary


def nbytes(number: float) -> str:
    """Format a number of bytes for messages, such as ``2.0 KiB``."""
    for suffix in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {suffix}" if suffix == "B" else f"{number:.1f} {suffix}"
        number /= 1024
    return f"{number:.1f} GiB"


@dataclass(frozen=True)
class Holding:
    """The memory that a stage holds independently of its stash, in bytes.

    Attributes:
        model: bytes of each model: trained parameters, their gradients and optimizer states, changed buffers, a batch.
        reference: bytes of the reference that all models share if there are several models or groups.
        shared: bytes of the frozen parameters, which all models share.
        further: bytes of further weight versions, of further copies of rolling models, and of doubles.
        num_models: number of models in the process.
        unallocated: part of all this that is not allocated yet, such as optimizer states before the first step.
    """

    model: int
    reference: int
    shared: int
    further: int
    num_models: int
    unallocated: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.shared + self.num_models * self.model + self.reference + self.further


@dataclass(frozen=True)
class UpdateScheme:
    """The way in which stages are updated, which decides what they hold besides weights and activations.

    Attributes:
        policy: weight policy, which says which weights actions use.
        num_shards: number of replicas of the pipeline that shard the optimizer states of each stage; 0: no sharding.
        rolling: whether parallel pipelines go on without waiting for each other.
        delayed_averaging: whether models go on while they are averaged, which needs a copy of each model as it was
            before.
    """

    policy: WeightPolicy = WeightPolicy()  # noqa: RUF009
    num_shards: int = 0
    rolling: bool = False
    delayed_averaging: bool = False


@dataclass(frozen=True)
class Conditions:
    """What a plan has to fit: schedule, links, parallel models and processes.

    Attributes:
        schedule: schedule of the step.
        links: one link for each hop; empty: messages take no time.
        state_copies: size of the optimizer state of each trained parameter, in multiples of the parameter.
        num_pipelines: N, number of parallel models.
        num_groups: number of process groups, each with N pipelines.
        owners: rank of the process of each stage, shape ``(K,)``; empty: one process per stage, or as ``turns`` says.
    """

    schedule: Schedule
    links: tuple[Link, ...] = ()
    state_copies: int = 2
    num_pipelines: int = 1
    num_groups: int = 1
    owners: tuple[int, ...] = ()


def state_copies(optimizers: Sequence[Optimizer]) -> int:
    """Return how many tensors of a parameter's size the optimizers keep for it; 2, as for Adam, if unknown."""
    return max(map(_copies, optimizers), default=_UNKNOWN_COPIES)


def _copies(optimizer: Optimizer) -> int:
    options = optimizer.defaults
    if "betas" in options:
        return 2 + bool(options.get("amsgrad"))
    if isinstance(optimizer, torch.optim.SGD):
        return int(bool(options["momentum"]))
    return _UNKNOWN_COPIES


def memory_of(
    module: nn.Module,
    conditions: Conditions,
    updates: UpdateScheme,
    limit: float,
    recompute: bool = False,
    replicas: Sequence[int] = (),
) -> Memory:
    """Return the sizes of weights, and the number of micro-batches that each stage has in flight.

    Each parallel model has trained parameters of its own, and all share one reference.

    Args:
        module: module that is divided.
        conditions: schedule, parallel models and optimizer states.
        updates: how stages are updated.
        limit: bytes that each stage may use.
        recompute: whether stages repeat their forwards.
        replicas: number of replicas of each stage, which take its micro-batches in turns; empty: one of each.
    """
    schedule, num_pipelines = conditions.schedule, conditions.num_pipelines
    rows, relays, num_stages = schedule.rows, schedule.relays, schedule.num_stages
    turns = [in_turn(row, 0, count) for row, count in zip(rows, replicas, strict=True)] if replicas else ()
    peaks = [num_pipelines * max(1, count) for count in peak_stash(turns or schedule)]
    repeats = [recompute and bool(repeated(row, k == num_stages - 1)) for k, row in enumerate(rows)]
    training, rolling = trains(rows[-1]), updates.rolling or updates.delayed_averaging
    versioned = training and not updates.policy.drains and num_stages > 1
    flows = []
    for k, again in enumerate(repeats):
        # a relay keeps as many values as the stage before it has sent
        in_flight, stashed = (num_stages - k,) * 2 if versioned else (peaks[k - (k in relays)], peaks[k])
        flows.append(Flow(in_flight, 1 if again else stashed, again))
    weights, held = {}, {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        weights[name] = tensor_bytes(tensor)
        held[name] = _held_bytes(tensor, conditions, training, rolling)
    trained = {n: weights[n] for n, p in module.named_parameters() if p.requires_grad} if training else {}
    extra: dict[str, int] = {}
    if versioned:
        extra, copies = trained, updates.policy.copies(num_stages, schedule.num_microbatches)
        flows = [replace(flow, extra=count - 1) for flow, count in zip(flows, copies, strict=True)]
    if training and updates.num_shards:
        extra = {name: conditions.state_copies * size for name, size in trained.items()}
        held = {name: size - extra.get(name, 0) for name, size in held.items()}
        counts = replicas or (1,) * num_stages
        flows = [replace(f, extra=1 / (updates.num_shards * count)) for f, count in zip(flows, counts, strict=True)]
    doubles = frozenset(k + 1 for k in relays)
    of_doubles = {name: num_pipelines * size for name, size in weights.items()} if relays else {}
    return Memory(limit, weights, held, tuple(flows), schedule.num_microbatches, extra, doubles, of_doubles)


def _held_bytes(tensor: Tensor, conditions: Conditions, training: bool, rolling: bool) -> int:
    """Return the bytes that all parallel models on a stage hold for a parameter or buffer, with their reference."""
    models = conditions.num_pipelines, conditions.num_groups
    if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:  # frozen: the models share it
        return tensor_bytes(tensor)
    each = 2 + conditions.state_copies if training and tensor.requires_grad else 1
    further = _rolling_bytes(tensor, *models) if rolling and tensor.requires_grad else 0
    return conditions.num_pipelines * each * tensor_bytes(tensor) + _reference_bytes(tensor, *models) + further


def _reference_bytes(tensor: Tensor, num_pipelines: int, num_groups: int) -> int:
    """Return the bytes that parallel models share for a parameter: the reference, and with groups a float32 sum."""
    if num_pipelines * num_groups == 1:
        return 0
    widened = max(1, _SINGLE_BYTES // tensor.element_size())
    return tensor_bytes(tensor) * (1 + widened if num_groups > 1 else 1)


def _rolling_bytes(tensor: Tensor, num_pipelines: int, num_groups: int) -> int:
    """Return the further bytes for a parameter if rolling models are averaged one at a time.

    These hold the start values of each model, the previous reference, and with groups a further float32 sum.
    """
    if num_pipelines * num_groups == 1:
        return 0
    widened = max(1, _SINGLE_BYTES // tensor.element_size()) if num_groups > 1 else 0
    return tensor_bytes(tensor) * (num_pipelines + 1 + widened)


def holdings(
    plan: Plan,
    stages: Sequence[int],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    num_microbatches: int,
    num_pipelines: int = 1,
    num_groups: int = 1,
    policy: WeightPolicy = WeightPolicy(),  # noqa: B008
    rolling: bool = False,
    meeting: bool = False,
) -> dict[int, Holding]:
    """Return the memory of each stage of this process without its stash, but with future optimizer states.

    Sizes of models are those of pipeline 0. One model has the weight versions of its policy; several have further
    copies if they roll.

    Args:
        plan: plan of the module.
        stages: stages whose parameters are in this process.
        module: module that is divided.
        optimizers: optimizers of the module. For a parameter without a state yet, the usual size is assumed.
        num_microbatches: M, number of micro-batches of a batch.
        num_pipelines: N, number of parallel models.
        num_groups: number of process groups.
        policy: weight policy.
        rolling: whether models roll, or go on while they are averaged.
        meeting: whether the further copies of rolling models are already allocated.
    """
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    models, copies = (num_pipelines, num_groups), state_copies(optimizers)
    versions = policy.copies(plan.num_stages, num_microbatches) if models == (1, 1) else [1] * plan.num_stages

    def state_of(parameter: Tensor) -> tuple[int, int]:
        for optimizer in optimizers:
            if state := optimizer.state.get(parameter):
                return sum(value.nbytes for value in state.values() if isinstance(value, Tensor)), 0
        return 0, copies * parameter.nbytes

    found = {}
    for k in stages:
        stage = plan.stages[k]
        held = [tensors[name] for name in {*stage.parameters, *stage.states} if name in tensors]
        trained = [tensor for tensor in held if tensor.requires_grad]
        states = [state_of(tensor) for tensor in trained]
        frozen = sum(p.nbytes for name in stage.parameters if not (p := tensors[name]).requires_grad)
        batch, coming = num_microbatches * sum(leaf.nbytes for leaf in stage.leaves), sum(more for _, more in states)
        weights = sum(map(tensor_bytes, held)) + sum(map(tensor_bytes, trained)) - frozen
        further = (versions[k] - 1) * sum(p.nbytes for p in trained)
        further += sum(_rolling_bytes(p, *models) for p in trained) if rolling else 0
        found[k] = Holding(
            model=weights + sum(map(sum, states)) + batch,
            reference=sum(_reference_bytes(p, *models) for p in trained),
            shared=frozen,
            further=further,
            num_models=num_pipelines,
            unallocated=num_pipelines * coming + (0 if meeting else further),
        )
    return found


def with_doubles(
    found: Mapping[int, Holding], plan: Plan, schedule: Schedule, module: nn.Module, num_pipelines: int
) -> dict[int, Holding]:
    """Add the memory of relays for the values they keep, and of the stage after each for its copy of their weights."""
    tensors, peaks = dict([*module.named_parameters(), *module.named_buffers()]), peak_stash(schedule)
    result = dict(found)
    for relay in schedule.relays:
        stage = plan.stages[relay]
        waiting = (peaks[relay - 1] - 1) * plan.stages[relay - 1].boundary_bytes
        weights = sum(tensor_bytes(tensors[name]) for name in {*stage.parameters, *stage.states} if name in tensors)
        for k, number in ((relay, waiting), (relay + 1, weights)):
            if k in result:
                held, more = result[k], num_pipelines * number
                result[k] = replace(held, further=held.further + more, unallocated=held.unallocated + more)
    return result
