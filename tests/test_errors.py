"""What cannot work is said before training: what was found, what is needed, what to do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_avgpipe import (
    AdaptiveFreezing,
    Averaging,
    AvgPipeStrategy,
    AvgPipeTuner,
    Broadcast,
    Links,
    PipelineTimeline,
    PipeOptim,
    Survival,
)
from lightning_avgpipe.errors import AvgPipeError, BatchError, ConfigurationError, PartitionError
from lightning_avgpipe.strategy import checks
from tests.models import MLP, loader
from tests.trainers import pipeline

ROLLING = r"Averaging\(rolling=True\) with"


def parallel(**averaging: Any) -> dict[str, Any]:
    return {"num_pipelines": 2, "averaging": Averaging(**averaging)}


OF_STRATEGY: list[tuple[dict[str, Any], str]] = [
    ({"num_microbatches": 0}, "num_microbatches=0: must be 'auto' or an integer from 1"),
    ({"num_stages": 0}, "num_stages=0: must be 'auto' or an integer from 1 to 1024; for example num_stages=4"),
    ({"replicas": 0}, "replicas=0: must be"),
    ({"num_pipelines": 0}, "num_pipelines=0: must be an integer from 1"),
    (
        {"schedule": "zigzag"},
        "'zigzag': must be one of 'advance_forward', '1f1b', 'afab', .*'broadcast', .*'auto', or a function",
    ),
    ({"advance": -1}, "advance=-1: must be 'auto' or an integer from 0"),
    ({"schedule": "1f1b", "advance": 1}, "advance=1 has no meaning for schedule='1f1b'"),
    ({"num_stages": 3, "split_points": ["a"]}, "split_points names 1 units, but num_stages=3 needs 2"),
    ({"split_points": "layers.2"}, r"use split_points=\['layers.2'\]"),
    ({"loss_reduction": "max"}, "loss_reduction='max': must be one of 'mean', 'sum'"),
    ({"start_method": "rsh"}, "start_method='rsh'"),
    ({"memory_limit": "10"}, "memory_limit='10': must be a size such as '10GB'"),
    ({"num_stages": 10**6}, "num_stages=1000000: must be 'auto' or an integer from 1 to 1024"),
    ({"split_points": 5}, r"split_points=5: must be a list of names of submodules, or None .*\['layers.4'\]"),
    ({"split_points": [3]}, r"split_points=\[3\]: must be a list of names"),
    ({"split_batch": "rows"}, r"split_batch='rows': must be a function \(batch, num_microbatches\)"),
    ({"timeout": 0}, r"timeout=datetime.timedelta\(0\): must be a timedelta, a number of seconds, or a string"),
    ({"timeout": timedelta(seconds=-1)}, "timeout=.*: must be a timedelta.* from 1 ms to 365 days"),
    ({"timeout": float("nan")}, "timeout=nan: must be"),
    ({"timeout": "soon"}, "timeout='soon': must be .* for example timeout='5min'"),
    ({"costs": "guessed"}, "costs='guessed': must be one of 'measured', 'flops'"),
    ({"costs_cache": False}, "costs_cache=False: must be 'auto' or the path of a directory"),
    *(({"recompute": value}, "recompute=") for value in ("blocks", 1, [], [1], None)),
    ({"compile": {"backend": "unheard of"}}, "torch.compile does not take that"),
    ({"compile": {"fast": True}}, "compile=.*must be True or False, or a dict of arguments of torch.compile"),
    ({"compile": {"mode": "reduce-overhead"}}, "several micro-batches under way; use .*max-autotune-no-cudagraphs"),
    ({"compile": {"options": {"triton.cudagraphs": True}}}, "its CUDA graphs keep the values of one call"),
    # what does not go together
    ({"compile": True, "schedule": "zb_h1"}, "the backward of a compiled unit cannot be split"),
    ({"compile": True, "verify": True}, "verify once without compile"),
    ({"loss_weight": "labels", "loss_reduction": "sum"}, "loss_reduction='sum'"),
    ({"shard": "optimizer", "replicas": 1}, "replicas=1: it needs replicas"),
    ({"shard": "optimizer", "replicas": 2, "num_pipelines": 2}, "num_pipelines=2: it needs one pipeline"),
    ({"shard": "optimizer", "replicas": 2, "save_distributed_checkpoint": True}, "it needs one file"),
    (parallel(split_batches=True) | {"loss_reduction": "sum"}, r"split_batches=True\) with loss_reduction='sum'"),
    (
        parallel(every=4, delay=1, on_nonfinite="skip"),
        r"Averaging\(delay=1\) with Averaging\(on_nonfinite='skip'\): a model starts again",
    ),
    (parallel(rolling=True, groups=2, wire="int8"), rf"{ROLLING} Averaging\(wire='int8'\)"),
    (parallel(rolling=True, every=2), rf"{ROLLING} Averaging\(every="),
    (parallel(rolling=True, outer_optimizer=torch.optim.SGD), rf"{ROLLING} Averaging\(outer_optimizer="),
    (parallel(rolling=True, on_nonfinite="skip"), rf"{ROLLING} Averaging\(on_nonfinite="),
    (parallel(rolling=True) | {"verify": True}, f"{ROLLING} verify="),
    (parallel(rolling=True) | {"links": Links(reader="first")}, rf"{ROLLING} Links\(reader="),
    # where it is, or what may be meant
    ({"rolling": True}, r"has no option 'rolling': use averaging=Averaging\(rolling=True\)"),
    ({"reader": "first"}, r"has no option 'reader': use links=Links\(reader='first'\)"),
    ({"num_stage": 2}, "has no option 'num_stage': did you mean 'num_stages'"),
    ({"averaging": {"rolling": True}}, "must be an Averaging; for example averaging=Averaging"),
]


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        *((AvgPipeStrategy, options, message) for options, message in OF_STRATEGY),
        (Averaging, {"processes_per_device": 0}, "processes_per_device=0: must be an integer from 1"),
        (Averaging, {"alpha": 1.5}, r"alpha=1.5: must be a number from 0 to 1, or None for 1/N"),
        (Averaging, {"outer_lr": 0}, "outer_lr=0: must be 'auto' or a number above 0"),
        (Averaging, {"outer_optimizer": "SGD"}, "outer_optimizer='SGD': must be a function that makes an optimizer"),
        (Averaging, {"outer_optimizer": torch.optim.SGD, "outer_lr": 1.0}, "both move the reference"),
        (Averaging, {"every": 0}, "every=0: must be an integer from 1"),
        (
            Averaging,
            {"outer_optimizer": torch.optim.LBFGS},
            "LBFGS.*needs no closure.*missing 1 required positional argument",
        ),
        (Averaging, {"outer_optimizer": lambda parameters: None}, "must make an optimizer .* it made a NoneType"),
        (Averaging, {"outer_lr": float("inf")}, "outer_lr=inf: must be 'auto' or a number above 0, at most 1000"),
        (Averaging, {"save_models": "no"}, "save_models='no': must be True or False"),
        (Links, {"backend": "glo"}, "backend='glo': must be a backend that torch.distributed"),
        (Averaging, {"every": 10**9}, "every=1000000000: must be an integer from 1 to 1000000"),
        (Links, {"reader": torch.zeros(2)}, "reader=tensor"),
        (Averaging, {"groups": 3, "processes_per_device": 2}, "a multiple of processes_per_device as groups"),
        (Averaging, {"every": 4, "fragments": 5}, r"fragments=5, every=4\).*every=5 or more, or a smaller fragments"),
        (Averaging, {"every": 4, "delay": 4}, r"delay=4, every=4\).*use every=5 or more, or a smaller delay"),
        (Averaging, {"every": 4, "wire": "int4"}, "int8"),
        (Links, {"wire": "fp8"}, "wire='fp8'"),
        (AvgPipeTuner, {"max_num_pipelines": 0}, "AvgPipeTuner: max_num_pipelines=0: must be an integer from 1"),
        (AvgPipeTuner, {"max_num_pipelines": True}, "max_num_pipelines=True"),
        (AvgPipeTuner, {"microbatch_candidates": []}, r"microbatch_candidates=\[\]: must be a list of numbers"),
        (AvgPipeTuner, {"microbatch_candidates": [4, 0]}, r"microbatch_candidates=\[4, 0\]"),
        (AvgPipeTuner, {"microbatch_candidates": 8}, "microbatch_candidates=8"),
        (AvgPipeTuner, {"memory_limit": "much"}, "memory_limit='much'"),
        (AvgPipeTuner, {"profile_batches": 3}, "profile_batches=3: must be an integer from 4"),
        (AvgPipeTuner, {"dirpath": 3}, "dirpath=3: must be the path of a directory"),
        (
            AvgPipeTuner,
            {"samples_factor": 0},
            "samples_factor=0: must be a number from 0.01 to 100, or such numbers by",
        ),
        (AvgPipeTuner, {"samples_factor": {0: 1.0}}, r"samples_factor=\{0: 1.0\}: must be"),
        (AvgPipeTuner, {"max_pipelines": 2}, "AvgPipeTuner has no option .* did you mean 'max_num_pipelines'"),
        (PipelineTimeline, {"every_n_step": 2}, "PipelineTimeline has no option .* did you mean 'every_n_steps'"),
        (AdaptiveFreezing, {"alfa": 0.5}, "AdaptiveFreezing has no option .* did you mean 'alpha'"),
        (Broadcast, {"segment": 2}, "Broadcast has no option .* did you mean 'segments'"),
        (PipeOptim, {"stale": "exact"}, "PipeOptim has no option .* did you mean 'staleness'"),
        (Survival, {"grups": 2}, "Survival has no option .* did you mean 'groups'"),
        (AvgPipeTuner, {"samples_factor": {2: "x"}}, r"samples_factor=\{2: 'x'\}: must be"),
    ],
)
def test_a_wrong_option_is_refused_at_once(kind: type, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("num_stages", "devices", "strategy", "message"),
    [
        (2, 3, {}, "num_stages=2, replicas=1, groups=1 take 2 processes, but there are 3 .*use devices=2"),
        (3, 2, {}, "num_stages=3 on 2 devices: .* use num_stages=2 or 4"),
        ("auto", 3, {"replicas": 2}, r"replicas=2, groups=1 take 2 processes, but there are 3 .*use devices=2"),
        (3, 4, {"replicas": 2}, "num_stages=3 on 2 devices of each replica"),
        (
            "auto",
            4,
            {"links": Links(bandwidth=[[1.0]])},
            r"Links\(bandwidth=...\) has no use with planner='balanced'; use planner='spp', or leave it",
        ),
        ("auto", 4, {"replicas": [3, 1], "schedule": "zb_h1"}, r"replicas=\[3, 1\] and schedule='zb_h1'"),
        (
            "auto",
            8,
            {"replicas": [3, 1], "num_pipelines": 2, "averaging": Averaging(rolling=True, groups=2)},
            r"replicas=\[3, 1\] and .*rolling=True.*one group",
        ),
    ],
)
def test_devices_must_fit_the_stages_and_their_replicas(
    num_stages: Any, devices: int, strategy: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pipeline(num_stages, devices, strategy)


class Closure(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Lookahead(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {"fast_state": {}, "slow_state": {}, "param_groups": []}


class LooksAhead(MLP):
    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters())


class GradientInside(MLP):
    def loss(self, batch: Any) -> Tensor:
        x = batch[0].requires_grad_()
        return torch.autograd.grad(self(x).sum(), x, create_graph=True)[0].square().mean()


class Lazy(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = torch.nn.LazyLinear(8)


class Disagreeing(MLP):
    def train_dataloader(self) -> Any:
        return DataLoader([(torch.randn(4, 8), torch.randn(3, 8))], batch_size=None)  # type: ignore[arg-type]


class Unused(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 8)


def at(*names: str) -> dict[str, Any]:
    return {"split_points": list(names)}


NO_ROOM = r"does not fit into num_stages=2 stages with memory_limit=1\.0 KiB: .*"


@pytest.mark.parametrize(
    ("model", "num_stages", "strategy", "kind", "message"),
    [
        (Closure, 2, {}, ConfigurationError, "Closure.configure_optimizers returns LBFGS"),
        (
            LooksAhead,
            2,
            {"num_pipelines": 2},
            ConfigurationError,
            r"Lookahead\.state_dict\(\) has 'fast_state', 'slow_state', .* are made of 'state'",
        ),
        (Lazy, 2, {}, ConfigurationError, r"'layers\.0\.weight' of Lazy has no shape before its first forward"),
        (
            lambda: MLP(depth=2),
            4,
            {},
            PartitionError,
            "num_stages=4 needs 3 cuts, but 2 cuts are legal in training_step",
        ),
        (GradientInside, 2, {}, PartitionError, r"the step calls grad\(\) itself at test_errors\.py"),
        (Disagreeing, 2, {"num_microbatches": 2}, BatchError, r"\[0\].*4.*\[1\].*3.*split_batch"),
        (MLP, 2, {"costs": "measured", "memory_limit": "1KiB"}, PartitionError, NO_ROOM),
        (MLP, 2, {"costs": "flops", "memory_limit": "1KiB"}, PartitionError, NO_ROOM),
        (MLP, 2, at("layers.3.wieght"), PartitionError, "'layers.3.wieght' is not a submodule of MLP; did you mean"),
        (MLP, 2, at("layers.0"), PartitionError, "'layers.0' is the first call of training_step; stage 0 would be"),
        (MLP, 2, at("layers"), PartitionError, "split point 'layers' is the first call of training_step"),
        (MLP, 3, at("layers.6", "layers.2"), PartitionError, "name split points in the order of their calls"),
        (Unused, 2, at("unused"), PartitionError, "'unused' is never called by training_step; it calls: layers"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: Callable[[], MLP], num_stages: int, strategy: dict[str, Any], kind: type[AvgPipeError], message: str
) -> None:
    runner, module = pipeline(num_stages, strategy=strategy, max_steps=1, num_sanity_val_steps=0), model()
    with pytest.raises(kind, match=message):
        runner.fit(module, None if isinstance(module, Disagreeing) else loader(MLP, 8, 8))
    assert runner.global_step == 0


class Distributed(MLP):
    def configure_model(self) -> None:
        fully_shard(self.layers[0], mesh=init_device_mesh("cpu", (1,)))


def test_parameters_that_are_distributed_already_are_named() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigurationError, match=r"'layers\.0\..*' of Distributed is a DTensor.*shard='optimizer'"):
            pipeline(2, max_steps=1).fit(Distributed(), loader(MLP, 8, 8))
    finally:
        dist.destroy_process_group()


def test_ranks_that_load_different_checkpoints_are_an_error() -> None:
    checks.same_on_all_ranks([("", {}, []), ("", {}, [])])
    checks.same_on_all_ranks([("a.ckpt", {}, []), ("a.ckpt", {}, [])])
    with pytest.raises(
        ConfigurationError, match=r"rank 0 has loaded last\.ckpt, rank 1 no checkpoint; put checkpoints"
    ):
        checks.same_on_all_ranks([("last.ckpt", {}, []), ("", {}, [])])


HOOK = "LogImages.on_train_epoch_end"


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [([HOOK], [], "1 {}, rank 1 none"), ([], [HOOK], "no {}, rank 1 1"), ([HOOK], [HOOK] * 2, "1 {}, rank 1 2")],
)
def test_a_callback_that_only_some_ranks_have_is_named(first: list[str], second: list[str], found: str) -> None:
    checks.same_on_all_ranks([("", {}, [HOOK, "Other.on_train_end"]), ("", {}, ["Other.on_train_end", HOOK])])
    with pytest.raises(ConfigurationError, match=f"rank 0 has {found.format(HOOK)}, .*give the callback to all"):
        checks.same_on_all_ranks([("", {}, first), ("", {}, second)])


def test_a_backend_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name in ("gloo", "mpi"))
    with pytest.raises(ConfigurationError, match=r"has no backend 'nccl' here, only gloo, mpi; leave backend out"):
        checks.backend("cpu:gloo,cuda:nccl", torch.device("cpu"))
    checks.backend("gloo", torch.device("cpu"))
