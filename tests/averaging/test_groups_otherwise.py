"""Groups of processes with a loss scaler, with numbers of pipelines that change, and with modules on meta."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_avgpipe import Averaging
from tests import processes
from tests.averaging.models import Batches, Net, state
from tests.models import loader
from tests.trainers import pipeline
from tests.weights.test_initialisation import Mixed

GROUPS = 2


def fit(group: int | None, model: Any, batches: Sequence[Any], devices: int = 1, **options: Any) -> Any:
    """Train two models in two stages: as two pipelines of one process, or in one of two groups that share devices."""
    models = {"num_pipelines": 2} if group is None else {"averaging": Averaging(processes_per_device=GROUPS)}
    path = options.pop("ckpt_path", None)
    options = {"max_epochs": 1, "use_distributed_sampler": False, **options}
    runner = pipeline(2, devices, {"num_microbatches": 2, **models}, **options)
    runner.fit(model, Batches(batches), ckpt_path=path)
    return runner


class Explodes(Net):
    """One batch has an infinite gradient."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * torch.where(batch[0][0, 0] == 7, torch.inf, 1.0)


def scaled(group: int | None) -> Any:
    """With a loss scaler; the second of the models meets an infinite gradient in the second of four iterations."""
    batches = list(loader(Net, 64, 8))
    batches[3][0][0, 0] = 7
    torch.manual_seed(4)
    model = Explodes("adam", dropout=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fit(group, model, batches if group is None else batches[group::GROUPS], plugins=[plugin])
    return state(model), scaler.get_scale()


class Changes(L.Callback):
    """After some iterations there are to be other numbers of models; notes how many there were."""

    def __init__(self, wanted: dict[int, int]) -> None:
        self.wanted = wanted
        self.models: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = trainer.strategy
        self.models.append(strategy.num_models)
        if batch_idx in self.wanted:
            strategy.reconfigure(num_pipelines=self.wanted[batch_idx] // strategy.num_groups)


def reconfigured(group: int | None) -> Any:
    """Two models, for an iteration four, then two again; each reads the same batches in whatever group it is."""
    batches = list(loader(Net, 80, 8))
    if group is not None:
        batches = [batches[i + group] for i in (0, 2, 4, 6, 8)]  # 4 and 6 in one iteration
    torch.manual_seed(4)
    model, changes = Net("momentum", dropout=0.0), Changes({1: 4, 2: 2})
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
        assert theirs["state_dict"].keys() == ours["state_dict"].keys()
        for key, tensor in ours["state_dict"].items():
            torch.testing.assert_close(theirs["state_dict"][key], tensor, msg=f"{key} of {name}")


def all_of_it(rank: int, folder: Path) -> Any:
    return scaled(rank), reconfigured(rank), begun_on_meta(rank, folder)


@pytest.mark.slow
def test_two_groups_scale_reconfigure_and_begin_on_meta_as_two_pipelines(tmp_path: Path) -> None:
    groups, one = tmp_path / "groups", tmp_path / "one"
    results = processes.results(processes.run(GROUPS, all_of_it, groups, folder=tmp_path))
    weights, scale = scaled(None)
    left, numbers, steps = reconfigured(None)
    held = begun_on_meta(None, one)
    assert scale == 2.0**10  # halved once, grown once
    assert numbers == [2, 2, 4, 2]
    for (found_weights, found_scale), (found, *counts), found_held in results:
        assert found_scale == scale
        assert counts == [numbers, steps]
        assert found_held == held
        for name, tensor in weights.items():
            torch.testing.assert_close(found_weights[name], tensor, msg=name)
        for name, tensor in left.items():
            torch.testing.assert_close(found[name], tensor, msg=name)
    assert_same_checkpoints(groups, one)
