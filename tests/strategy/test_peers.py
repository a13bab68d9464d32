"""With several groups of processes, hooks gather over those that train on other data, as over processes of ddp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_avgpipe import Averaging
from lightning_avgpipe.errors import AvgPipeError
from tests import processes
from tests.models import MLP, loader
from tests.trainers import pipeline


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
