"""Estimates of memory for weights and optimizer states, also of several parallel models and weight versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_avgpipe.planning import Memory, Plan
from lightning_avgpipe.planning.recompute_policy import repeated
from lightning_avgpipe.schedule import Schedule, in_turn, peak_stash
from lightning_avgpipe.schedule.policies import WeightPolicy
from lightning_avgpipe.utils.tensors import tensor_bytes

_UNKNOWN_COPIES = 2  # as for Adam
_SINGLE_BYTES = 4


@dataclass(frozen=True)
class Holding:
    """The memory that a stage holds independently of its stash, in bytes.

    Attributes:
        total: bytes of weights, gradients, optimizer states and the batch.
        coming: the part of ``total`` that is not allocated yet, such as optimizer states before the first step.
    """

    total: int
    coming: int = 0


@dataclass(frozen=True)
class Updates:
    """The way in which stages are updated, which decides what they hold besides weights and activations.

    Attributes:
        policy: weight policy, which says which weights actions use.
        sharing: number of replicas of the pipeline that shard the optimizer states of each stage; 0: no sharding.
        rolling: whether parallel pipelines go on without waiting for each other.
    """

    policy: WeightPolicy = WeightPolicy()  # noqa: RUF009
    sharing: int = 0
    rolling: bool = False


def state_copies(optimizers: Sequence[Optimizer]) -> int:
    """Return how many tensors of its size the optimizers keep for a parameter; 2, as for Adam, where unknown."""
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
    schedule: Schedule | None,
    copies: int,
    limit: float,
    recompute: bool = False,
    num_pipelines: int = 1,
    num_groups: int = 1,
    replicas: Sequence[int] = (),
    rolling: bool = False,
) -> Memory:
    """Return the sizes of weights, and how many micro-batches each stage has in flight.

    Args:
        module: module that is divided.
        schedule: schedule of the step; None for one micro-batch without a backward.
        copies: size of the optimizer state of each trained parameter, in multiples of the parameter.
        limit: bytes that each stage may use.
        recompute: whether stages repeat their forwards.
        num_pipelines: N, number of parallel models. Each of several has its own trained parameters, and all share a
            reference.
        num_groups: number of process groups, each with N pipelines.
        replicas: number of replicas of each stage, which take its micro-batches in turns; empty: one of each.
        rolling: whether pipelines go on without waiting for each other.
    """
    flights: tuple[int, ...] = ()
    repeats: tuple[bool, ...] = ()
    relays: frozenset[int] = frozenset()
    if schedule is not None:
        turns = [in_turn(row, 0, count) for row, count in zip(schedule.rows, replicas, strict=True)] if replicas else ()
        flights = tuple(num_pipelines * max(1, count) for count in peak_stash(turns or schedule))
        relays = schedule.relays
        if recompute:
            rows = schedule.rows
            repeats = tuple(bool(repeated(row, k == len(rows) - 1)) for k, row in enumerate(rows))
    trains = schedule is not None and schedule.name != "forward"
    weights, held = {}, {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        weights[name] = tensor_bytes(tensor)
        each = 2 + copies if trains and tensor.requires_grad else 1
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        models = weights[name] * each * (1 if frozen else num_pipelines)
        held[name] = models + (0 if frozen else _reference_bytes(tensor, num_pipelines, num_groups))
        held[name] += _rolling_bytes(tensor, num_pipelines, num_groups) if rolling and tensor.requires_grad else 0
    memory = Memory(limit, weights, held, flights, schedule.num_microbatches if schedule is not None else 1, repeats)
    if not relays:
        return memory
    return replace(
        memory,
        in_flight=tuple(flights[k - (k in relays)] for k in range(len(flights))),  # a relay keeps all that was sent
        stashed=flights,
        doubles=frozenset(k + 1 for k in relays),
        doubled={name: num_pipelines * size for name, size in weights.items()},
    )


def with_versions(memory: Memory, module: nn.Module, policy: WeightPolicy, schedule: Schedule) -> Memory:
    """Return the memory under a weight policy: further versions of trained weights, and more forwards in flight."""
    stages = schedule.num_stages
    if policy.drains or stages == 1:
        return memory
    return replace(
        memory,
        in_flight=tuple(range(stages, 0, -1)),
        versioned={name: p.numel() * p.element_size() for name, p in module.named_parameters() if p.requires_grad},
        versions=tuple(count - 1 for count in policy.copies(stages, schedule.num_microbatches)),
    )


def with_shards(memory: Memory, module: nn.Module, copies: int, sharing: Sequence[int]) -> Memory:
    """Return the memory where ``sharing[k]`` processes shard the optimizer states of each stage k."""
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    states = {name: copies * memory.weights[name] for name in trained}
    held = {name: nbytes - states.get(name, 0) for name, nbytes in memory.held.items()}
    return replace(memory, held=held, versioned=states, versions=tuple(1 / count for count in sharing))


def _reference_bytes(tensor: Tensor, num_pipelines: int, num_groups: int) -> int:
    """Return the bytes of a parameter that parallel models share: the reference, and with groups a float32 sum."""
    if num_pipelines * num_groups == 1:
        return 0
    widened = max(1, _SINGLE_BYTES // tensor.element_size())
    return tensor_bytes(tensor) * (1 + widened if num_groups > 1 else 1)


def _rolling_bytes(tensor: Tensor, num_pipelines: int, num_groups: int) -> int:
    """Return the bytes of a parameter that rolling models need for averaging one at a time.

    These are the start values of each model, the previous reference, and with groups a further float32 sum.
    """
    if num_pipelines * num_groups == 1:
        return 0
    widened = max(1, _SINGLE_BYTES // tensor.element_size()) if num_groups > 1 else 0
    return tensor_bytes(tensor) * (num_pipelines + 1 + widened)


def holdings(
    plan: Plan, stages: Sequence[int], module: nn.Module, optimizers: Sequence[Optimizer], num_microbatches: int
) -> dict[int, Holding]:
    """Return the memory of stages of this process that does not depend on the stash, with future optimizer states.

    Args:
        plan: plan of the module.
        stages: stages whose parameters are in this process.
        module: module that is divided.
        optimizers: optimizers of the module. For parameters without a state yet, the usual size of it is assumed.
        num_microbatches: M, number of micro-batches of a batch.
    """
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    copies = state_copies(optimizers)

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
        batch = num_microbatches * sum(leaf.nbytes for leaf in stage.leaves)
        coming = sum(missing for _, missing in states)
        total = sum(map(tensor_bytes, held)) + sum(map(tensor_bytes, trained)) + sum(there for there, _ in states)
        found[k] = Holding(total + coming + batch, coming)
    return found


def holdings_of_models(
    plan: Plan,
    stages: Sequence[int],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    num_microbatches: int,
    num_pipelines: int,
    num_groups: int,
    policy: WeightPolicy = WeightPolicy(),  # noqa: B008
    rolling: bool = False,
    meeting: bool = False,
) -> dict[int, Holding]:
    """Return the memory of stages for N parallel models that does not depend on the stash.

    For several models it is ``shared + N model + reference``, where the sizes are those of pipeline 0, and further
    copies where pipelines roll. For one model it includes the weight versions of its policy. The other arguments are
    those of :func:`holdings` and :func:`memory_of`.

    Args:
        meeting: whether the further copies of rolling pipelines are already allocated.
    """
    own = holdings(plan, stages, module, optimizers, num_microbatches)
    if num_pipelines * num_groups == 1:
        copies, named = policy.copies(plan.num_stages, num_microbatches), dict(module.named_parameters())
        for k in stages:
            further = (copies[k] - 1) * sum(
                named[name].nbytes for name in plan.stages[k].parameters if named[name].requires_grad
            )
            own[k] = Holding(own[k].total + further, own[k].coming + further)
        return own
    models = model_bytes(plan, stages, module, optimizers, num_microbatches, num_groups)
    several, named = {}, dict(module.named_parameters())
    for k in stages:
        trained = [p for name in plan.stages[k].parameters if (p := named[name]).requires_grad]
        further = sum(_rolling_bytes(p, num_pipelines, num_groups) for p in trained) if rolling else 0
        total = models[k].shared + num_pipelines * models[k].model + models[k].reference + further
        several[k] = Holding(total, num_pipelines * own[k].coming + (0 if meeting else further))
    return several


def with_doubles(
    found: Mapping[int, Holding], plan: Plan, schedule: Schedule, module: nn.Module, num_pipelines: int
) -> dict[int, Holding]:
    """Add the memory of relays, which keep received values, and of the stages behind, which have their weights too."""
    tensors, peaks = dict([*module.named_parameters(), *module.named_buffers()]), peak_stash(schedule)
    further = dict.fromkeys(found, 0)
    for relay in schedule.relays:
        stage = plan.stages[relay]
        waiting = (peaks[relay - 1] - 1) * plan.stages[relay - 1].boundary_bytes
        weights = sum(tensor_bytes(tensors[name]) for name in {*stage.parameters, *stage.states} if name in tensors)
        for k, number in ((relay, waiting), (relay + 1, weights)):
            further[k] = further.get(k, 0) + num_pipelines * number
    return {k: Holding(h.total + further[k], h.coming + further[k]) for k, h in found.items()}


@dataclass(frozen=True)
class ModelBytes:
    """The bytes of the parallel models on a stage.

    Attributes:
        model: bytes of each model: trained parameters, their gradients and optimizer states, changed buffers, a batch.
        reference: bytes of the reference that all models share, where there are several models or groups.
        shared: bytes of the frozen parameters, which all models share.
    """

    model: int
    reference: int
    shared: int


def model_bytes(
    plan: Plan,
    stages: Sequence[int],
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    num_microbatches: int,
    num_groups: int = 1,
) -> dict[int, ModelBytes]:
    """Return the bytes of a model by stage; the arguments are those of :func:`holdings` and :func:`memory_of`."""
    parameters = dict(module.named_parameters())
    own = holdings(plan, stages, module, optimizers, num_microbatches)
    found = {}
    for k in stages:
        here = [parameters[name] for name in plan.stages[k].parameters]
        frozen = sum(p.nbytes for p in here if not p.requires_grad)
        several = 2  # any number above 1: the size of the reference does not depend on it
        reference = sum(_reference_bytes(p, several, num_groups) for p in here if p.requires_grad)
        found[k] = ModelBytes(own[k].total - frozen, reference, frozen)
    return found
