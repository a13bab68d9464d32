"""Tied parameters: if several stages use the same parameter, each has a copy, and their gradients are summed.

::

    stage 0   embed.weight ──┐            grad 0 ──┐
    stage 2   head.weight  ──┴ same values  grad 2 ──┴─ summed in the order of stages, before clipping and stepping

Every holder of a copy then takes the same optimizer step with the same gradient, so the copies stay equal bit for bit.
Each replica of a stage, which takes its micro-batches in turns, is a holder with a gradient of its own.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_avgpipe.comm.cluster import Cluster
from lightning_avgpipe.comm.collectives import BUCKET_BYTES, buckets, sum_in_order
from lightning_avgpipe.comm.topology import subsets
from lightning_avgpipe.comm.waits import Running
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.program import StageProgram
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.torch_compat import GRADIENT_HOOKS
from lightning_avgpipe.weights.slots import Slot, slots_for, swapped

_Gradients = Sequence[Tensor | None]  # one for each parameter


def parameters_of(program: StageProgram) -> tuple[str, ...]:
    """Return the names of the parameters that a stage uses."""
    return tuple(dict.fromkeys(name for node in program.nodes for name in node.parameters))


def users_of_parameters(programs: Sequence[StageProgram]) -> dict[str, tuple[int, ...]]:
    """Return the stages, ascending, that use each parameter."""
    users: dict[str, list[int]] = defaultdict(list)
    for program in programs:
        for name in parameters_of(program):
            users[name].append(program.stage)
    return {name: tuple(stages) for name, stages in users.items()}


@dataclass(frozen=True)
class _Copy:
    """A stage's copy of a parameter, in a process that hosts several stages that use the parameter.

    Attributes:
        parameter: parameter of the module.
        stand_in: leaf that shares the memory of the parameter, but has the gradient of this stage only.
        slots: places where the module holds the parameter.
    """

    parameter: nn.Parameter
    stand_in: nn.Parameter
    slots: Sequence[Slot]


class TiedParameters:
    """The parameters of a step function that several stages use, or that replicas of a stage have.

    Args:
        module: whole module.
        cluster: cluster whose processes host the stages.
        users: stages that use each parameter, by name; the same on every process.
    """

    constant = True  # the weights do not change within an iteration

    def __init__(self, module: nn.Module, cluster: Cluster, users: Mapping[str, tuple[int, ...]]) -> None:
        self._cluster = cluster
        hosts = cluster.stage_map.ranks
        known = sorted(users.items())
        self._copied = {name: stages for name, stages in known if len(stages) > 1}
        self._replicated = {name: stages for name, stages in known if len(stages) == 1 < len(hosts(stages[0]))}
        held = self._copied.keys() | self._replicated.keys()
        self._parameters = {name: p for name, p in module.named_parameters() if name in held}
        for name, stages in self._copied.items():
            if any(getattr(self._parameters[name], hooks, None) for hooks in GRADIENT_HOOKS):
                raise ConfigurationError(
                    f"'{name}' has a hook on its gradient and is used on the stages "
                    f"{', '.join(map(str, stages))}, of which none has the whole gradient; keep its uses on one "
                    "stage with split_points, or change gradients in on_before_optimizer_step"
                )
        self._stand_ins: dict[int, dict[str, _Copy]] = {k: {} for k in cluster.stages}
        here = {name: [k for k in stages if k in self._stand_ins] for name, stages in self._copied.items()}
        slots = slots_for(module, [self._parameters[name] for name, mine in here.items() if len(mine) > 1])
        for name, mine in here.items():
            parameter = self._parameters[name]
            for k in mine if len(mine) > 1 else ():
                leaf = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
                self._stand_ins[k][name] = _Copy(parameter, leaf, slots[id(parameter)])

    def swaps(self, stage: int) -> bool:
        """Return whether :meth:`placed` changes anything in the module for a stage."""
        return bool(self._stand_ins[stage])

    @contextlib.contextmanager
    def placed(self, stage: int) -> Iterator[dict[int, str]]:
        """Put this stage's copies into the module within this context; yield ``id -> name`` of the copies."""
        copies = self._stand_ins[stage]
        for copy in copies.values():
            if copy.stand_in.data_ptr() != copy.parameter.data_ptr():  # the parameter has moved, or was filled again
                copy.stand_in.data = copy.parameter.data
            copy.stand_in.requires_grad_(copy.parameter.requires_grad)
        with swapped([(slot, copy.stand_in) for copy in copies.values() for slot in copy.slots]):
            yield {id(copy.stand_in): name for name, copy in copies.items()}

    @property
    def names(self) -> Collection[str]:
        """The names of the parameters that several stages use."""
        return self._copied.keys()

    # -- gradients ---------------------------------------------------------------------------------------------------

    def begin_sum(self, replicas: bool = False) -> GradientSum:
        """Start to sum the gradients of all copies of each parameter. Every process calls it before optimizers step.

        Stages are added in ascending order, so the sum depends neither on the schedule nor on the placement of stages.
        Nothing may use the gradients until the sum has finished, which gives it to every copy.

        Args:
            replicas: whether gradients of parameters that a single stage uses are also summed over its replicas.
        Raises:
            ConfigurationError: a gradient is sparse.
        """
        together: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, stages in (self._copied | self._replicated if replicas else self._copied).items():
            together[stages].append(name)
        sums: list[tuple[list[nn.Parameter], Callable[[], _Gradients]]] = []
        between: list[str] = []
        found = GradientSum()
        for stages, names in together.items():
            ranks = sorted({rank for k in stages for rank in self._cluster.stage_map.ranks(k)})
            holders = [(k, rank) for k in stages for rank in self._cluster.stage_map.ranks(k)]
            parties, what = subsets(self._cluster.stage_map, ranks), f"ranks {', '.join(map(str, ranks))}"
            group = self._cluster.connect(parties, what) if len(ranks) > 1 else None
            if self._cluster.rank in ranks:
                parameters = [self._parameters[name] for name in names]
                mine = [self._take(stage, names) for stage, rank in holders if rank == self._cluster.rank]
                if group is None:
                    sums.append((parameters, partial(_summed, mine)))
                    continue
                between.append(", ".join(map(str, stages)))
                over = partial(self._summed_over, holders, mine, parameters, group.process_group)
                sums.append((parameters, over))

        def run() -> None:  # one after the other, because two sums may have processes in common
            for parameters, summed in sums:
                found.sums += zip(parameters, summed(), strict=True)

        if not between:
            run()
            return found
        what = f"the summing of gradients of stages {' and '.join(between)}"
        found.running = self._cluster.group.begin(what, run)
        if not port_of(self._cluster.device).is_host:  # one thread issues the transfers of an accelerator
            found.running.finish()
        return found

    def count_once(self) -> None:
        """Keep the last sum in one copy only, so that the next sum, which adds later batches, contains it once."""
        for name, stages in self._copied.items():
            if self._cluster.rank != self._cluster.stage_map.ranks(stages[0])[0]:
                self._parameters[name].grad = None

    def _take(self, stage: int, names: Sequence[str]) -> _Gradients:
        """Return and clear the gradients of a stage in this process."""
        found: list[Tensor | None] = []
        for name in names:
            gradient, parameter = None, self._parameters[name]
            copy = self._stand_ins[stage].get(name)
            # the parameter itself also has a gradient if the step reads it from elsewhere than a slot, say a closure
            for leaf in (parameter,) if copy is None else (parameter, copy.stand_in):
                if leaf.grad is not None:
                    gradient = leaf.grad if gradient is None else gradient + leaf.grad
                leaf.grad = None
            if gradient is not None and gradient.is_sparse:
                raise ConfigurationError(
                    f"the gradient of '{name}' is sparse, and several stages or replicas of one use this parameter; "
                    "build its embedding with sparse=False"
                )
            found.append(gradient)
        return found

    def _summed_over(
        self,
        holders: Sequence[tuple[int, int]],
        mine: Sequence[_Gradients],
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
    ) -> _Gradients:
        """Return the sums over all holders, exchanged in few large messages. Missing gradients add nothing."""
        sources = [dist.get_group_rank(group, self._cluster.group.ranks[rank]) for _, rank in holders]
        exists = torch.tensor(
            [any(g[i] is not None for g in mine) for i in range(len(parameters))], dtype=torch.uint8, device="cpu"
        )
        dist.all_reduce(exists, dist.ReduceOp.MAX, group)
        sums: list[Tensor | None] = [None] * len(parameters)
        present = sorted(exists.nonzero().flatten().tolist(), key=lambda i: str(parameters[i].dtype))
        numbers = iter(present)
        for bucket in buckets([parameters[i] for i in present], BUCKET_BYTES):
            chosen = list(islice(numbers, len(bucket)))
            terms = [_flat([gradients[i] for i in chosen], bucket) for gradients in mine]
            total = sum_in_order(terms, sources, group)
            for i, part in zip(chosen, total.split([p.numel() for p in bucket]), strict=True):
                sums[i] = part.view_as(parameters[i])
        return sums


class GradientSum:
    """A sum of the gradients of copies, which may run in a background thread.

    Attributes:
        running: function that runs in the thread; None if nothing runs.
        sums: pairs of a parameter and the sum of its gradients, or None.
    """

    def __init__(self) -> None:
        self.running: Running | None = None
        self.sums: list[tuple[nn.Parameter, Tensor | None]] = []

    def is_over(self) -> bool:
        """Return whether :meth:`finish` would not wait."""
        return self.running is None or self.running.over.is_set()

    def finish(self) -> None:
        """Wait for the sums, and set the gradients of this process's parameters to them."""
        if self.running is not None:
            self.running.finish()
        for parameter, gradient in self.sums:
            parameter.grad = gradient


def _summed(terms: Iterable[_Gradients]) -> _Gradients:
    """Return the sum of each parameter's gradients, over stages in their order; None if no stage has one."""
    totals: list[Tensor | None] = []
    for gradients in zip(*terms, strict=True):
        found = [gradient for gradient in gradients if gradient is not None]
        totals.append(reduce(torch.add, found) if found else None)
    return totals


def _flat(gradients: _Gradients, parameters: Sequence[Tensor]) -> Tensor:
    """Concatenate gradients. A missing one becomes -0.0, which changes no sum, not even the sign of a zero."""
    return torch.cat(
        [
            torch.full_like(parameter, -0.0).flatten() if gradient is None else gradient.flatten()
            for gradient, parameter in zip(gradients, parameters, strict=True)
        ]
    )
