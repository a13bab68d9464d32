"""Groups that train elastically averaged models, one process each: what they learn, and what is left without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler

from lightning_avgpipe import Averaging, Survival
from tests import processes
from tests.averaging.models import Models, Net, assert_equal, state
from tests.models import MLP, loader
from tests.systems.survival.runs import Told, running
from tests.trainers import pipeline

EPOCHS = 2


def fit(
    tell: Any, who: Any, kind: type = MLP, models: int = 1, system: bool = True, ckpt_path: Any = None, **options: Any
) -> Any:
    """Train as a group; gives what is left in the module, and the models before."""
    seen = Models()
    strategy: dict[str, Any] = {"num_microbatches": 2, "num_pipelines": models}
    strategy |= {"system": Survival(groups=2)} if system else {"averaging": Averaging(groups=2)}
    torch.manual_seed(4 + who[0])  # all begin with the weights of one group
    model = kind("adamw")
    torch.manual_seed(4)
    callbacks = [seen, Told(tell), *options.pop("callbacks", ())]
    runner = pipeline(1, 1 if system else 2, strategy, callbacks=callbacks, max_epochs=EPOCHS, **options)
    runner.fit(model, loader(kind, 32, 4), loader(kind, 8, 4), ckpt_path=ckpt_path)
    metrics = {name: value.item() for name, value in runner.callback_metrics.items()}
    return {"left": state(model), "models": seen.models, "reference": seen.reference, "metrics": metrics}


def of_core(rank: int, kind: type, models: int) -> Any:
    return fit(lambda *args, **facts: None, (0, rank, 0), kind, models, system=False)


def by_hand(groups: int = 2) -> Any:
    """Elastic averaging of two models in plain PyTorch: alpha = 1/2, and the reference goes sqrt(2) mean updates."""
    torch.manual_seed(4)
    models = [MLP("adamw")]
    models += [MLP("adamw")]
    models[1].load_state_dict(models[0].state_dict())
    optimizers: Any = [model.configure_optimizers() for model in models]
    reference = {name: p.detach().clone() for name, p in models[0].named_parameters()}
    torch.manual_seed(4)
    inputs, targets = (torch.stack(column) for column in zip(*loader(MLP, 32, 4).dataset, strict=True))
    shares = [DistributedSampler(range(32), 2, group) for group in (0, 1)]
    for epoch in range(EPOCHS):
        for share in shares:
            share.set_epoch(epoch)
        for step in range(4):
            for model, optimizer, share in zip(models, optimizers, shares, strict=True):
                mine = list(share)[4 * step : 4 * step + 4]
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs[mine]), targets[mine]).backward()
                optimizer.step()
            each = [dict(model.named_parameters()) for model in models]
            with torch.no_grad():
                for name, z in reference.items():
                    mean = (each[0][name] + each[1][name]) / 2
                    further = z + 2**0.5 * (mean - z)
                    for parameters in each:
                        parameters[name].copy_(further + 0.5 * (parameters[name] - mean))
                    z.copy_(further)
    return reference, [{name: p.detach() for name, p in model.named_parameters()} for model in models]


def both(folder: Path, **arguments: Any) -> list[Any]:
    with running(fit, folder) as run:
        for group in (0, 1):
            run.start(group, **arguments)
        return [run.ends(group) for group in (0, 1)]


def test_two_groups_learn_what_elastic_averaging_by_hand_does(tmp_path: Path) -> None:
    found = both(tmp_path)
    reference, models = by_hand()
    for g, result in enumerate(found):
        for name, tensor in result["left"].items():
            torch.testing.assert_close(tensor, reference[name], rtol=1e-5, atol=1e-6)
        for name, tensor in result["models"][0].items():
            torch.testing.assert_close(tensor, models[g][name], rtol=1e-5, atol=1e-6)
    assert_equal(found[0]["left"], found[1]["left"])
    assert found[0]["metrics"]["val_loss"] == found[1]["metrics"]["val_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("models", [1, 2])
def test_two_groups_learn_what_groups_of_one_world_do(tmp_path: Path, models: int) -> None:
    found = both(tmp_path, kind=Net, models=models)
    expected = processes.results(processes.run(2, of_core, Net, models, folder=tmp_path))
    for one, other in zip(found, expected, strict=True):
        assert_equal(one["left"], other["left"])
        assert_equal(one["models"], other["models"])
        assert_equal(one["reference"], other["reference"])
