"""Several groups of processes train the parallel models of one group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests import processes
from tests.elastic.models import Batches, Models, Net, assert_equal, state
from tests.models import loader
from tests.trainers import pipeline


def share(groups: int, group: int, samples: int = 64) -> Batches:
    """The batches of one group: of eight, so four iterations an epoch."""
    return Batches(list(loader(Net, samples, 8))[group::groups])


def fit(folder: Path, groups: int, rank: int = 0, path: Path | None = None, stages: int = 1, **strategy: Any) -> Any:
    torch.manual_seed(4 if path is None else 99)
    model, models = Net("adamw", warm_up=True), Models()
    torch.manual_seed(4)
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    options = {"num_microbatches": 2, "num_pipelines": 2 // groups, **strategy}
    runner = pipeline(
        stages, groups * stages, options, callbacks=[models, saving], enable_checkpointing=True,
        use_distributed_sampler=False, gradient_clip_val=0.5,
    )  # fmt: skip
    runner.fit(model, share(groups, rank // stages), loader(Net, 16, 8), ckpt_path=path)
    validated = runner.validate(model, loader(Net, 20, 8), verbose=False)
    return {
        "models": models.models,
        "left": state(model),
        "metrics": {name: value.item() for name, value in runner.callback_metrics.items()},
        "validated": validated,
        "steps": runner.global_step,
    }


def both(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    through = fit(folder / "two", 2, rank)
    return through


def parameters(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if "running" not in name}


def test_two_groups_train_the_models_of_two_pipelines(tmp_path: Path) -> None:
    expected = fit(tmp_path / "one", 1)
    results = processes.results(processes.run(2, both, tmp_path, folder=tmp_path))
    for g, found in enumerate(results):
        assert_equal(parameters(found["models"][0]), parameters(expected["models"][g]))
        assert_equal(parameters(found["left"]), parameters(expected["left"]))
        assert found["steps"] == expected["steps"]
        assert found["metrics"] == expected["metrics"], (found["metrics"], expected["metrics"])
    assert_equal(results[0]["left"], results[1]["left"])
