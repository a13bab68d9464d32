"""Devices that freezing frees become replicas of fewer stages; training stays what it is in one process."""

from __future__ import annotations

import inspect
import math
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import psutil
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError

from lightning_avgpipe import AdaptiveFreezing, AvgPipeStrategy, PipelineTimeline
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import DeviceLayout, Party, StageMap
from lightning_avgpipe.errors import ConfigurationError, PartitionError
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import build
from lightning_avgpipe.strategy.options import Options
from lightning_avgpipe.systems.freezing.callback import check_sharing_later
from lightning_avgpipe.systems.freezing.halving import Halving
from tests import processes
from tests.comparing import assert_close, assert_equal, state
from tests.models import loader
from tests.systems.freezing.test_callback import FineTuned
from tests.trainers import pipeline, trainer

SIZE, MICRO_BATCHES, EPOCHS = 512, 4, 4  # so large that sums of gradients take little beside computing


class Layered(FineTuned):
    """Without statistics and counts, of which replicas would have each their own."""

    first, norm = nn.Linear, nn.LayerNorm


class Layouts(L.Callback):
    """Notes which processes host the stages, and at the end what is open after one change of stages and after five."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.opened: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        stage_map = trainer.strategy.cluster.stage_map
        hosts = [stage_map.ranks(stage) for stage in range(stage_map.num_stages)]
        if hosts not in self.seen[-1:]:
            self.seen.append(hosts)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        cluster, me = trainer.strategy.cluster, psutil.Process()
        if len(self.seen) > 1 and cluster.world.world_size > 1:
            shared = cluster.stage_map
            alone = shared.placed([(rank,) for rank in reversed(range(cluster.world.world_size))])
            for _ in range(5):
                cluster.rearrange(alone)
                cluster.rearrange(shared)
                threads = [thread for thread in threading.enumerate() if thread.name.startswith("avgpipe")]
                for thread in threads:
                    thread.join(0.2)  # one that has connected processes is about to end
                self.opened.append((me.num_fds(), sum(thread.is_alive() for thread in threads)))


def fit(
    devices: int = 1,
    folder: Path | None = None,
    model: Any = Layered,
    strategy: dict[str, Any] | None = None,
    freezing: dict[str, Any] | None = None,
    make: Any = pipeline,
    stages: int | None = None,
    **options: Any,
) -> Any:
    """Train in stages, or with plain accumulation of the same micro-batches."""
    torch.manual_seed(3)
    module, layouts, size = model(), Layouts(), SIZE
    callback = AdaptiveFreezing(**{"alpha": 0.4, "freed": "replicas", **(freezing or {})})
    options = {"max_epochs": EPOCHS, "callbacks": [callback, layouts], "precision": "64-true", **options}
    if make is pipeline:
        options |= {"num_stages": stages or devices, "devices": devices}
        options["strategy"] = {"num_microbatches": MICRO_BATCHES, **(strategy or {})}
    else:
        size = SIZE // MICRO_BATCHES
        options |= {"accumulate_grad_batches": MICRO_BATCHES, "callbacks": [callback]}
    path = options.pop("ckpt_path", None)
    runner = make(**options)
    runner.fit(module, loader(model, 2 * SIZE, size), loader(model, SIZE, SIZE), ckpt_path=path)
    if folder is not None:
        runner.save_checkpoint(folder / f"{runner.current_epoch}.ckpt")
    value = float(runner.validate(module, loader(model, SIZE, SIZE), verbose=False)[0]["val_loss"])
    assert make is trainer or runner.strategy.num_stages == runner.strategy.cluster.stage_map.num_stages == (
        stages or devices
    )
    return state(module), layouts, value, callback.num_frozen


EXACT = {"rtol": 0, "atol": 1e-12}


def test_freed_devices_become_replicas_and_training_goes_on_as_in_one_process(tmp_path: Path) -> None:
    expected, _, value, frozen = fit(make=trainer)
    for weights, layouts, *others in processes.everywhere(2, fit, 2, tmp_path, folder=tmp_path):
        assert layouts.seen == [[(1,), (0,)], [(0, 1)]]
        assert layouts.opened[0] == layouts.opened[-1], "each change leaves something open"
        assert_close(weights, expected, **EXACT)
        assert others == [pytest.approx(value, abs=1e-12), frozen]
    assert_close(torch.load(tmp_path / f"{EPOCHS}.ckpt", weights_only=True)["state_dict"], expected, **EXACT)


def with_large_values() -> Any:
    """What travels in training differs from what travels in validation, and is too large for a frame."""
    torch.manual_seed(3)
    module, layouts = Layered(), Layouts()
    strategy = {"num_microbatches": 2, "costs": "measured", "costs_cache": None, "timeout": 20.0}
    callbacks = [AdaptiveFreezing(alpha=0.4, freed="replicas"), layouts]
    runner = pipeline(2, 2, strategy, max_epochs=3, callbacks=callbacks)
    for epochs in (3, 4):  # the second run has the connections of the first
        runner.fit_loop.max_epochs = epochs
        runner.fit(module, loader(FineTuned, 2 * 8192, 8192), loader(FineTuned, 2 * 4096, 4096))
    return layouts.seen


def killed(rank: int) -> Any:
    join = ProcessGroups.join

    def die(self: ProcessGroups, party: Party) -> None:
        if rank == 1 and party.what == "replicas":
            os.kill(os.getpid(), signal.SIGKILL)
        join(self, party)

    with mock.patch.object(ProcessGroups, "join", die):
        return fit(2, strategy={"timeout": 8.0})


@pytest.mark.slow
def test_a_process_that_is_killed_while_stages_become_shared_is_named(tmp_path: Path) -> None:
    survivor, _ = processes.run(2, killed, folder=tmp_path)
    assert survivor.error is not None
    assert "PeerError" in survivor.error and "rank 1 (stage 0, replica 1) does not answer" in survivor.error


def resumed(folder: Path) -> Any:
    single: dict[str, Any] = {"precision": 32}  # as which Lightning loads weights, before it makes doubles of them
    fit(2, folder, max_epochs=2, **single)
    return fit(2, **single), fit(2, ckpt_path=folder / "2.ckpt", **single)


def in_four() -> Any:
    """A stage with everything fits when most is frozen; micro-batches are as many as for four stages."""
    return fit(4)[1].seen, fit(4, strategy={"num_microbatches": "auto", "memory_limit": 25_000})


@pytest.mark.slow
def test_stages_are_halved_as_far_as_memory_allows(tmp_path: Path) -> None:
    expected = fit(strategy={"num_microbatches": 16})[0]
    alone, halved, together = [(3,), (2,), (1,), (0,)], [(2, 3), (0, 1)], [(0, 1, 2, 3)]
    for most, (weights, layouts, *_) in processes.everywhere(4, in_four, folder=tmp_path):
        assert most == [alone, together]
        assert layouts.seen == [alone, halved, together]
        assert_close(weights, expected, **EXACT)


def test_devices_become_nothing_but_replicas() -> None:
    with pytest.raises(ConfigurationError, match="freed='devices': must be one of 'replicas', or None"):
        AdaptiveFreezing(freed="devices")  # type: ignore[arg-type]


def test_a_timeline_of_stages_that_will_be_shared_is_refused(tmp_path: Path) -> None:
    callbacks = [AdaptiveFreezing(freed="replicas"), PipelineTimeline(dirpath=tmp_path)]
    with pytest.raises(ConfigurationError, match=r"freed='replicas'.*PipelineTimeline.*one process of each stage"):
        fit(callbacks=callbacks)


def test_layers_of_doubles_are_frozen_by_the_norms_of_their_gradients() -> None:
    assert fit(freezing={"mode": "gradient_norm"}, max_epochs=2)[3] > 0


def options_of(**given: Any) -> Options:
    """As a strategy has them."""
    defaults = inspect.signature(AvgPipeStrategy).parameters
    return Options(**{**{field.name: defaults[field.name].default for field in fields(Options)}, **given})


@pytest.mark.parametrize(
    ("options", "stages", "message"),
    [
        ({"replicas": 2}, 2, "replicas=2 needs none at first"),
        ({"num_pipelines": 2}, 2, "num_pipelines=2 needs one model"),
        ({"num_stages": 4}, 4, "num_stages=4 needs one stage on each of 2 devices"),
        ({"verify": True}, 2, "verify=True needs no verification"),
        ({"schedule": "zb_h1"}, 2, "makes replicas of single stages later: replicas=.* and schedule='zb_h1'"),
        ({"weight_policy": "stash"}, 2, "later: weight_policy='stash' with replicas"),
    ],
)
def test_options_that_do_not_go_with_sharing_later_are_refused_by_name(options: Any, stages: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"freed='replicas'.*{message}"):
        check_sharing_later(options_of(**options), StageMap.on(DeviceLayout(2), stages))


def test_devices_in_several_groups_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs all devices in one group; use num_stages=4"):
        check_sharing_later(options_of(), StageMap.on(DeviceLayout(4), 2))


class Measured(Layered):
    """With a metric object that training updates."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        self.error.update(outputs.detach(), batch[1])
        return nn.functional.mse_loss(outputs, batch[1])


class Validated(Measured):
    training_step = Layered.training_step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.error.update(self(batch[0]), batch[1])
        self.log("val_loss", self.error)


class Normed(Layered):
    norm = nn.BatchNorm1d


def with_objects() -> list[Any]:
    return [fit(2, model=model, max_epochs=3)[1].seen for model in (Measured, Validated, Normed)]


in_two = processes.shared(2, lambda rank: (with_objects(), resumed(Path.cwd()), with_large_values()))
ALONE, SHARED = [(1,), (0,)], [(0, 1)]


@pytest.mark.slow
def test_stages_that_replicas_would_not_do_right_stay_alone(in_two: list[Any]) -> None:
    for seen, *_ in in_two:
        assert seen == [[ALONE], [ALONE, SHARED], [ALONE]]


@pytest.mark.slow
def test_a_run_that_resumes_shares_stages_again_and_has_the_same_bits(in_two: list[Any]) -> None:
    for _, (whole, again), _ in in_two:
        assert again[1].seen == [SHARED]
        assert_equal(again[0], whole[0])


@pytest.mark.slow
def test_links_are_measured_again_on_connections_that_training_and_validation_have_used(in_two: list[Any]) -> None:
    for *_, seen in in_two:
        assert seen[0] == ALONE


# -- fewer stages with several processes each: where they fit, may be shared, and are faster -------------------------


PROCESSES, COUNT = 4, 8
MANY, FEW = 1024, 1  # samples of a micro-batch: with few of them sums of gradients take longer than anything else


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.blocks[:3].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.norm(self.blocks(batch)).sum()


def may_be_shared(plan: Plan, counts: Sequence[int]) -> None:
    """Nothing is against it."""


def planned(rows: int, limit: float = math.inf, check: Any = may_be_shared, norm: bool = False) -> Plan:
    module = Net(norm)
    schedule = build("1f1b", PROCESSES, COUNT)
    planner = Planner(Divisible(module), PROCESSES, source=Halving(PROCESSES, limit, check))
    return planner.plan(Step("training_step", module.training_step, (torch.ones(rows, 8), 0)), Conditions(schedule))


def test_all_processes_share_one_stage_where_that_is_fastest() -> None:
    plan = planned(MANY)
    assert plan.num_stages == 1 and plan.devices == ((0, 1, 2, 3),)
    assert plan.forecast is not None and plan.forecast.num_microbatches == COUNT


def test_a_stage_that_does_not_fit_is_divided() -> None:
    most = max(stage.memory.total for stage in planned(MANY).stages)
    plan = planned(MANY, limit=most - 1)
    assert plan.num_stages == 2 and plan.devices == ((2, 3), (0, 1))
    assert all(stage.memory.total < most for stage in plan.stages)


def test_what_is_slower_stays_as_it_was() -> None:
    plan = planned(FEW)
    assert plan.num_stages == PROCESSES and plan.devices == ()


def test_what_replicas_cannot_share_stays_as_it_was() -> None:
    def refuse(plan: Plan, counts: Sequence[int]) -> None:
        if len(counts) == 1:
            raise PartitionError("not by all of them")

    assert planned(MANY, check=refuse).num_stages == 2
    assert planned(MANY, norm=True).num_stages == PROCESSES  # whose running means each replica would have of its own
