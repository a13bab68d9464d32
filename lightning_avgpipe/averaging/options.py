"""Options: what a user may set about parallel models and their reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from lightning_avgpipe.capture.wire_format import Format
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.utils.allowed import (
    Allowed,
    Count,
    check,
    choice,
    flag,
    has_options,
    number,
    optional,
    whole,
)

# A function that makes the optimizer of the reference model from its parameters.
OuterOptimizer = Callable[[Iterable[Any]], Optimizer]

ALLOWED = {
    "alpha": optional(number(0, 1, 0.5, least=True), "1/N or 1"),
    "outer_lr": number(0, 1000, 1.0, "auto"),
    "outer_optimizer": optional(
        Allowed(
            "a function that makes an optimizer from parameters",
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)",
            callable,
        ),
        "outer_lr",
    ),
    "every": whole(1, 1_000_000, 4),
    "fragments": whole(1, 1_000_000, 4),
    "delay": whole(0, 1_000_000, 2),
    "wire": optional(choice("bf16", "int8"), "full precision"),
    "rolling": flag("auto"),
    "split_batches": flag(),
    "groups": optional(whole(1, 1024, 2), "processes_per_device"),
    "processes_per_device": whole(1, 64, 2),
    "streams": flag(),
    "save_models": flag(),
    "on_nonfinite": optional(choice("auto", "raise", "skip"), "no check"),
}


@has_options(ALLOWED)
@dataclass(frozen=True, kw_only=True)
class Averaging:
    """Elastic averaging of N parallel models: ``AvgPipeStrategy(num_pipelines=2, averaging=Averaging(...))``.

    Args:
        alpha: fraction of its distance to the mean that a parallel model moves at each averaging, from 0 (none) to 1
            (all models become equal). None: 1/N, or 1 with ``split_batches``.
        outer_lr: step of the reference at each averaging, as a multiple of the mean of the models' updates. ``"auto"``:
            the square root of the number of batches in a step (N, or 1 with ``split_batches``), for learning rates that
            suit a single model. With 1 (the mean), N models learn from N batches about as much as one model from a
            single batch of N times the size. With N (the sum), they may learn as much as one model from N batches one
            after the other, but only where a single model would also tolerate a higher learning rate. See
            ``benchmarks/statistical_efficiency.py``.
        outer_optimizer: function that makes the optimizer of the reference model from its parameters:
            ``partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)``. The gradient of the reference is the
            negative mean update. It replaces ``outer_lr``.
        every: number of optimizer steps from one averaging to the next. In between the reference does not change, and
            evaluation and checkpoints use it as it is. Training ends with an averaging, so the final module includes
            all updates. A resumed run continues as if training had not ended.
        fragments: number of parts of the parameters, of about equal size, that are averaged one after the other, spread
            evenly over the ``every`` steps. Groups then exchange one part at a time.
        delay: number of optimizer steps from when updates are sent to the other groups until they are averaged; less
            than ``every``. Meanwhile the models train on, and what they learn counts at the next averaging. The step is
            fixed, so that results do not depend on the timing. Takes memory for one more copy of each model, in parts.
        wire: format in which updates travel between groups. None: at least single precision. ``"bf16"``, ``"int8"``: as
            in :class:`Links`, rounded once; each process receives those of all other groups. All groups average the
            same rounded numbers.
        rolling: whether a pipeline begins its next batch as soon as its own model has stepped, while other pipelines
            are still at the last batch. The pipelines then never drain together, and two pipelines fill each other's
            idle time almost completely. Each model is averaged with the reference by itself, after its own step, in a
            fixed order. So results do not depend on the timing, but they differ from those without rolling. The batches
            of one iteration are read ahead. Hooks, logs, schedulers and checkpoints come as without rolling; before a
            validation, a checkpoint every n steps and the end of an epoch the pipelines drain. A hook must not change
            between two batches what a step reads. With one pipeline it has no effect. ``"auto"``: rolling, unless the
            first batch shows something that rolling refuses; then a line in the log says why, and anything found later
            is an error. With :class:`AvgPipeTuner`, it is also used only if it is predicted to shorten the time to a
            goal.
        split_batches: whether the N pipelines of a group divide each batch among themselves, so that a step trains on
            one batch, as with a single model. A micro-batch is then an (N M)th of a batch. Otherwise each pipeline
            reads its own batches, and N batches make a step. The models become equal at each averaging. Steps and
            schedulers stay those of a single model, and so, roughly, does the number of samples to a goal. It saves
            time only with ``rolling``.
        groups: number of groups of processes, each with all stages and parallel models of its own: ``devices=8``,
            ``num_stages=4``, ``groups=2`` train two models (or twice ``num_pipelines``) with slow links between the
            groups. Each group trains on its own part of the data, by a distributed sampler as with ddp, and evaluates
            on all of it; rank 0 is in group 0. N counts the models of all groups. None: one group, or
            ``processes_per_device`` groups.
        processes_per_device: number of groups that share the same devices, each with its own processes: ``devices=2``,
            ``processes_per_device=2`` are four processes, two groups of two stages. Results are the same as with as
            many pipelines in one process; this is the arrangement of the AvgPipe paper. It helps if kernels are too
            small for one process to keep a device busy. On CUDA start NVIDIA's MPS, or kernels of different
            processes take turns. Each process has a context on the device, and the reference is averaged over the host,
            since NCCL cannot connect a device with itself. A launcher (torchrun, SLURM) must start this many processes
            for each device.
        streams: whether each of several pipelines puts its work on its own stream, so that the ready work of one never
            queues behind a message for which another waits, and kernels of several pipelines share an accelerator;
            otherwise pipelines take turns on one stream. Streams are used from the second batch on, because a step may
            create objects in the first one that it keeps. They are not used if the step changes attributes, which
            pipelines share. Memory of one stream cannot be reused by others. On the CPU this has no effect.
        save_models: whether checkpoints hold the parallel models and their optimizers, so that a resumed run continues
            bit for bit. Without them, or with another N, the models start from the reference.
        on_nonfinite: what to do before a step in which a model's gradient is infinite or NaN: ``"raise"`` ends training
            with the name of the tensor; ``"skip"`` leaves that model out of the step and of the averaging, and resets
            it to the reference, and ``avgpipe/skipped_models`` counts this; None checks nothing. ``"auto"``:
            ``"raise"`` for parallel models, because one of them would spoil their reference, and None for a single one,
            as with any strategy. A loss scaler (``precision="16-mixed"``) skips such steps of all models by itself.
    Raises:
        ConfigurationError: an option has a value that cannot work.

    Source: AvgPipe, Chen et al., PPoPP 2023, section 3; elastic averaging, Zhang et al., NeurIPS 2015.
    """

    alpha: float | None = None
    outer_lr: float | Literal["auto"] = "auto"
    outer_optimizer: OuterOptimizer | None = None
    every: Count = 1
    fragments: Count = 1
    delay: int = 0
    wire: Format | None = None
    rolling: bool | Literal["auto"] = False
    split_batches: bool = False
    groups: Count | None = None
    processes_per_device: Count = 1
    streams: bool = True
    save_models: bool = True
    on_nonfinite: Literal["auto", "raise", "skip"] | None = "auto"

    def __post_init__(self) -> None:
        check(ALLOWED, vars(self), "Averaging")
        if self.outer_optimizer is not None:
            if self.outer_lr != "auto":
                raise ConfigurationError(
                    f"Averaging(outer_lr={self.outer_lr}) and an outer_optimizer: both move the reference; give the "
                    "optimizer its own lr and leave outer_lr='auto'"
                )
            _try_outer(self.outer_optimizer)
        for name, needed in {"fragments": self.fragments, "delay": self.delay + 1}.items():
            if needed > self.every:
                raise ConfigurationError(
                    f"Averaging({name}={getattr(self, name)}, every={self.every}): each part of the parameters is "
                    f"averaged once in {self.every} steps; use every={needed} or more, or a smaller {name}"
                )
        if self.num_groups % self.processes_per_device:
            raise ConfigurationError(
                f"Averaging(groups={self.groups}, processes_per_device={self.processes_per_device}): the processes "
                "that share a device are of different groups; give a multiple of processes_per_device as groups, or "
                "leave groups out"
            )

    @property
    def num_groups(self) -> int:
        """The number of groups of processes with models of their own."""
        return self.processes_per_device if self.groups is None else self.groups

    def dilution(self, num_models: int) -> float:
        """Return alpha for N models."""
        if self.alpha is not None:
            return self.alpha
        return 1.0 if self.split_batches else 1.0 / num_models

    def rate(self, num_models: int, num_pipelines: int) -> float:
        """Return outer_lr for N models.

        ``"auto"``: the square root of the number of batches, which is between the mean of the updates and their sum.

        Args:
            num_models: number of models of all groups.
            num_pipelines: number of models of one group.
        """
        if self.outer_lr != "auto":
            return float(self.outer_lr)
        return math.sqrt(max(1.0, num_models / num_pipelines) if self.split_batches else num_models)


def _try_outer(outer_optimizer: Any) -> None:
    """Check that an outer optimizer can be made and can step, on a parameter of its own."""
    parameter = torch.nn.Parameter(torch.zeros(2, 2, device="cpu"))
    parameter.grad = torch.zeros(2, 2, device="cpu")
    asked = "it must make an optimizer from parameters whose step() needs no closure, such as SGD"
    try:
        made = outer_optimizer([parameter])
        if isinstance(made, Optimizer):
            made.step()
    except Exception as error:
        raise ConfigurationError(
            f"Averaging(outer_optimizer={outer_optimizer!r}): {asked}; tried with one parameter it says "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(made, Optimizer):
        raise ConfigurationError(
            f"Averaging(outer_optimizer={outer_optimizer!r}): {asked}; it made a {type(made).__name__}"
        )
