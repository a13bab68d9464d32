"""Several groups of processes train the parallel models of one group."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import Averaging
from lightning_avgpipe.averaging.averager import Averager
from lightning_avgpipe.comm.control import ControlChannel
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError, PeerError
from lightning_avgpipe.strategy.pipeline_run import PipelineOptimization
from tests import processes
from tests.averaging.models import Batches, Net, Skips, Unsized
from tests.averaging.test_lightning import Explodes
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, loader
from tests.strategy.test_precision import half_mixed
from tests.trainers import Reconfigures, pipeline
from tests.weights.test_initialisation import Mixed


def share(groups: int, group: int, models: int) -> Batches:
    """The batches that a group's models have in one process: of eight in all."""
    batches = list(loader(Net, 64, 8))
    return Batches([batch for i, batch in enumerate(batches) if i % models * groups // models == group])


def trained(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All but running means, which groups sum in another order."""
    return {name: tensor for name, tensor in tensors.items() if "running" not in name}


class Seen(L.Callback):
    """Which samples come to training and to validation here; tells the process to stop at a batch."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.trained: list[float] = []
        self.validated: list[float] = []
        self.stop_at = stop_at

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.trained += batch[0][:, 0].tolist()
        if batch_idx == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.validated += batch[0][:, 0].tolist()


def numbered(count: int, **options: Any) -> DataLoader[Any]:
    inputs = torch.arange(count, dtype=torch.float32)[:, None].expand(-1, 8) / count
    return DataLoader(TensorDataset(inputs, torch.zeros(count, 8)), batch_size=4, **options)


class Bomb:
    """Raises after some calls."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, *_: Any) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise ValueError("one group has failed")


class Planned(MLP):
    """A module that asks how many steps there will be, as for a schedule."""

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


def divided(rank: int) -> Any:
    options = {"num_microbatches": 2, "averaging": Averaging(groups=2), "timeout": timedelta(seconds=30)}
    torch.manual_seed(rank)  # so the groups' modules differ until training begins
    model, seen = Planned(), Seen()
    runner = pipeline(1, 2, options, callbacks=[seen], max_epochs=1, num_sanity_val_steps=0)
    runner.fit(model, numbered(24, shuffle=True), numbered(8))
    assert model.steps == runner.global_step
    steps = [runner.global_step]
    left = state(model)

    endless = pipeline(1, 2, options, max_epochs=1)
    with pytest.warns(UserWarning, match="group_number") if rank == 0 else contextlib.nullcontext():
        endless.fit(MLP(), DataLoader(Unsized([MLP.example(4)] * (3 + 2 * rank)), batch_size=None))
    steps.append(endless.global_step)

    stopped = pipeline(1, 2, options, callbacks=[Seen(stop_at=1 if rank else None)], max_epochs=1)
    with pytest.raises(SystemExit):
        stopped.fit(MLP(), numbered(80_000))  # long enough for any machine: the groups tell each other now and then
    steps.append(stopped.global_step)

    averages = pipeline(1, 2, options, callbacks=[StochasticWeightAveraging(0.1)])
    with pytest.raises(ConfigurationError, match=r"averages the weights of one model, but 2 groups .* use one group"):
        averages.fit(MLP(), numbered(24))

    with pytest.raises(ConfigurationError, match=r"dataloaders of 2, 3 batches"):
        pipeline(1, 2, options).fit(MLP(), Batches([MLP.example(4)] * (2 + rank)))

    failing = MLP()
    if rank == 1:
        failing.register_forward_pre_hook(Bomb(3))
    with pytest.raises((ValueError, PeerError), match="one group has failed") as caught:
        pipeline(1, 2, options).fit(failing, loader(MLP, 64, 8))
    return left, seen.trained, seen.validated, steps, f"{type(caught.value).__name__}: {caught.value}"


class Watching(L.Callback):
    """Might look at the weights after each batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def events_of(rank: int, callbacks: list[L.Callback], patch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Tensor]]:
    """What happens in a group of one process, in order, and with which weights it ends."""
    events: list[str] = []
    settle, relay, run = Averager.finish, ControlChannel.relay, PipelineOptimization.run

    def settling(averager: Averager) -> None:
        events.extend(["met"] * averager.is_under_way)
        settle(averager)

    def relaying(news: ControlChannel, *args: Any) -> Any:
        events.append("news")
        return relay(news, *args)

    def running(loop: PipelineOptimization, *args: Any) -> Any:
        events.append("step")
        return run(loop, *args)

    patch.setattr(Averager, "finish", settling)
    patch.setattr(ControlChannel, "relay", relaying)
    patch.setattr(PipelineOptimization, "run", running)
    torch.manual_seed(4)
    model = Net("adamw")
    batches = Batches(list(loader(Net, 24, 4))[rank::2])
    strategy = {"num_microbatches": 2, "averaging": Averaging(groups=2)}
    runner = pipeline(1, 2, strategy, callbacks=callbacks, max_epochs=1, use_distributed_sampler=False)
    runner.fit(model, batches)
    return events, state(model)


def in_order(rank: int) -> Any:
    found = []
    for callbacks in ([], [Watching()], [LambdaCallback(on_train_batch_end=lambda *_: None)]):
        with pytest.MonkeyPatch.context() as patch:
            found.append(events_of(rank, callbacks, patch))
    return found


found = processes.shared(2, lambda rank: (in_order(rank), divided(rank)))


def test_the_next_step_waits_for_the_other_groups_unless_a_hook_may_look_before(found: list[Any]) -> None:
    for (unwatched, *others), _ in found:
        assert unwatched[0][:8] == ["step", "news", *["step", "met", "news"] * 2]
        assert unwatched[0][-1] == "met"
        for watched in others:
            assert watched[0][:9] == ["step", "news", "met"] * 3
            assert_equal(unwatched[1], watched[1])


def test_groups_divide_training_and_end_together(found: list[Any]) -> None:
    (_, here), (_, there) = found
    left, trained_here, validated, steps, survivor = here
    other, trained_there, validated_there, steps_there, failed = there
    assert_equal(left, other)
    assert failed.startswith("ValueError: one group has failed")
    assert "rank 1 (stage 0 of group 1)" in survivor and "ValueError: one group has failed" in survivor
    assert sorted(trained_here + trained_there) == pytest.approx([n / 24 for n in range(24)])
    assert validated == validated_there == pytest.approx([n / 8 for n in range(8)])
    assert steps == steps_there
    assert steps[:2] == [3, 3]  # 24 samples in two groups; the shorter of two streams
    assert 1 <= steps[2] < 10_000  # a signal to one group stops both in their first epoch


# -- with a loss scaler, numbers of pipelines that change, and modules on meta ---------------------------------------

GROUPS = 2


def fit(group: int | None, model: Any, batches: Sequence[Any], devices: int = 1, **options: Any) -> Any:
    """Train two models in two stages: as two pipelines of one process, or in one of two groups that share devices."""
    models = {"num_pipelines": 2} if group is None else {"averaging": Averaging(processes_per_device=GROUPS)}
    path = options.pop("ckpt_path", None)
    options = {"max_epochs": 1, "use_distributed_sampler": False, **options}
    runner = pipeline(2, devices, {"num_microbatches": 2, **models}, **options)
    runner.fit(model, Batches(batches), ckpt_path=path)
    return runner


def scaled(group: int | None) -> Any:
    """With a loss scaler; the second of the models meets an infinite gradient in the second of four iterations."""
    batches = list(loader(Net, 64, 8))
    batches[3][0][0, 0] = 7
    torch.manual_seed(4)
    model, plugin = Explodes("adam", dropout=0.0), half_mixed()
    model.at = 7
    fit(group, model, batches if group is None else batches[group::GROUPS], plugins=[plugin])
    return state(model), plugin.scaler.get_scale()


def skipping(group: int | None) -> Any:
    """With a loss scaler; each of the models has no loss in one of four iterations."""
    batches = list(loader(Net, 64, 8))
    for i in (2, 7):
        batches[i][0].zero_()
    torch.manual_seed(4)
    model, plugin = Skips("adam", dropout=0.0), half_mixed()
    fit(group, model, batches if group is None else batches[group::GROUPS], plugins=[plugin])
    return trained(state(model)), plugin.scaler.get_scale()


def test_a_group_without_a_loss_agrees_on_the_loss_scale(tmp_path: Path) -> None:
    expected = skipping(None)
    assert expected[1] == 2.0**12
    for found in processes.each(GROUPS, skipping, folder=tmp_path):
        assert_close(found, expected)


def reconfigured(group: int | None) -> Any:
    """Two models, for an iteration four, then two again; each reads the same batches in whatever group it is."""
    batches = list(loader(Net, 80, 8))
    if group is not None:
        batches = [batches[i + group] for i in (0, 2, 4, 6, 8)]  # 4 and 6 in one iteration
    torch.manual_seed(4)
    groups = 1 if group is None else GROUPS
    settings = {batch: {"num_pipelines": models // groups} for batch, models in ((1, 4), (2, 2))}
    model, changes = Net("momentum", dropout=0.0), Reconfigures(settings)
    runner = fit(group, model, batches, callbacks=[changes])
    return state(model), changes.models, runner.global_step


def begun_on_meta(group: int | None, folder: Path, devices: int = 1) -> set[str]:
    """Train what was built on meta, save, and resume; which parameters are held at the end."""
    batches = list(loader(Mixed, 32, 4))
    here = batches if group is None else batches[group::GROUPS]
    torch.manual_seed(5 + (group or 0))  # group 0's seed is that of all
    fit(group, Mixed(tied=False), here, devices).save_checkpoint(folder / "first.ckpt")
    torch.manual_seed(9)  # what is loaded does not depend on it
    model = Mixed(tied=False)
    fit(group, model, here, devices, max_epochs=2, ckpt_path=folder / "first.ckpt").save_checkpoint(
        folder / "last.ckpt"
    )
    return {name for name, parameter in model.named_parameters() if not parameter.is_meta}


def assert_same_checkpoints(found: Path, expected: Path) -> None:
    for name in ("first.ckpt", "last.ckpt"):
        theirs, ours = (torch.load(folder / name, weights_only=True) for folder in (found, expected))
        assert_close(theirs["state_dict"], ours["state_dict"])


def all_of_it(rank: int, folder: Path) -> Any:
    return scaled(rank), reconfigured(rank), begun_on_meta(rank, folder)


@pytest.mark.slow
def test_two_groups_scale_reconfigure_and_begin_on_meta_as_two_pipelines(tmp_path: Path) -> None:
    groups, one = tmp_path / "groups", tmp_path / "one"
    results = processes.each(GROUPS, all_of_it, groups, folder=tmp_path)
    weights, scale = scaled(None)
    left, numbers, steps = reconfigured(None)
    held = begun_on_meta(None, one)
    assert scale == 2.0**10  # halved once, grown once
    assert numbers == [2, 2, 4, 2]
    for (found_weights, found_scale), (found, *counts), found_held in results:
        assert found_scale == scale
        assert counts == [numbers, steps]
        assert found_held == held
        assert_close(found_weights, weights)
        assert_close(found, left)
    assert_same_checkpoints(groups, one)


# -- hooks gather over those that train on other data, as over processes of ddp --------------------------------------


class Gathers(MLP):
    """Asks for the values of all groups in hooks of the module, which rank 0 of each group runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.found["in validation"] = self.all_gather(torch.tensor(1.0)).tolist()

    def on_train_epoch_end(self) -> None:
        number = float(self.trainer.strategy.group_number + 1)
        for reduction in ("sum", "mean", "MAX", min):
            self.log(str(reduction), number, sync_dist=True, reduce_fx=reduction)
        self.log("own", number)
        self.found["in the module"] = self.all_gather({"n": number})["n"].tolist()


class Asks(L.Callback):
    """Asks in hooks that every process runs."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        strategy, mine = trainer.strategy, torch.tensor([trainer.global_rank, 7])
        self.found["in a callback"] = pl_module.all_gather(mine)[:, 0].tolist()
        self.found["the sum"] = strategy.reduce(mine, reduce_op=torch.distributed.ReduceOp.SUM).tolist()
        self.found["the mean"] = strategy.reduce(mine).tolist()


class GathersInStep(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.all_gather(self.loss(batch)).mean()


def gathered(num_stages: int, replicas: int) -> dict[str, Any]:
    torch.manual_seed(3)
    module, callback = Gathers(), Asks()
    strategy = {"replicas": replicas, "averaging": Averaging(groups=2 // replicas)}
    runner = pipeline(num_stages, 2 * num_stages, strategy, callbacks=[callback], max_epochs=1)
    runner.fit(module, loader(MLP, 16, 4), loader(MLP, 8, 4))
    logged = {name: float(value) for name, value in runner.callback_metrics.items() if "loss" not in name}
    with pytest.raises(AvgPipeError) as refused:
        pipeline(num_stages, 2 * num_stages, strategy, max_epochs=1).fit(GathersInStep(), loader(MLP, 16, 4))
    return {**module.found, **callback.found, "logged": logged, "refused": str(refused.value)}


@pytest.mark.parametrize(("num_stages", "replicas"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_hooks_gather_over_groups_and_replicas_and_a_training_step_does_not(
    num_stages: int, replicas: int, tmp_path: Path
) -> None:
    found = processes.everywhere(2 * num_stages, gathered, num_stages, replicas, folder=tmp_path)
    for rank, values in enumerate(found):
        peers = [rank % num_stages, rank % num_stages + num_stages]
        assert values["in a callback"] == peers
        assert values["the sum"] == [sum(peers), 14]
        assert values["the mean"] == [sum(peers) / 2, 7]
        assert values["logged"] == {"sum": 3, "mean": 1.5, "MAX": 2, str(min): 1, "own": 1}
        if rank % num_stages == 0:  # where the results are
            assert values["in the module"] == [1, 2]
            assert values["in validation"] == 1  # each group has all data
            assert "GathersInStep.training_step calls all_gather, and 2 groups of processes" in values["refused"]
