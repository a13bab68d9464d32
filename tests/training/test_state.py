"""Checkpoints are ordinary: they open without stages, and training goes on under any number of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import processes
from tests.driver import assert_same_parameters
from tests.models import MLP, LSTMStack, Regression, TinyTransformer, loader
from tests.trainers import pipeline, trainer


def half(model: Regression, runner: Any, path: Path) -> None:
    """Train one of two epochs, and save."""
    runner.fit(model, loader(type(model), 16, 8))
    runner.save_checkpoint(path)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("model", [MLP, TinyTransformer, LSTMStack])
def test_training_resumes_bitwise_under_any_number_of_stages(
    model: type[Regression], before: int, after: int, tmp_path: Path
) -> None:
    torch.manual_seed(4)
    through = model("adamw")
    stopped = copy.deepcopy(through)
    resumed = copy.deepcopy(through)
    micro = {"num_microbatches": 4}
    pipeline(before, strategy=micro, max_epochs=2).fit(through, loader(model, 16, 8))
    half(stopped, pipeline(before, strategy=micro, max_epochs=1), tmp_path / "half.ckpt")
    pipeline(after, strategy=micro, max_epochs=2).fit(resumed, loader(model, 16, 8), ckpt_path=tmp_path / "half.ckpt")
    assert_same_parameters(through, resumed)


def test_a_checkpoint_opens_on_one_device(tmp_path: Path) -> None:
    model = TinyTransformer("adamw")
    half(model, pipeline(3, max_epochs=1), tmp_path / "half.ckpt")
    opened = TinyTransformer.load_from_checkpoint(tmp_path / "half.ckpt")
    assert_same_parameters(model, opened)
    trainer(max_epochs=2).fit(opened, loader(TinyTransformer, 16, 8), ckpt_path=tmp_path / "half.ckpt")
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert set(state["state_dict"]) == set(model.state_dict())
    assert len(state["optimizer_states"][0]["state"]) == len(list(model.parameters()))


def test_a_checkpoint_of_one_device_is_resumed_in_stages(tmp_path: Path) -> None:
    torch.manual_seed(4)
    plain = MLP("adamw")
    piped = copy.deepcopy(plain)
    half(copy.deepcopy(plain), trainer(max_epochs=1), tmp_path / "half.ckpt")
    trainer(max_epochs=2).fit(plain, loader(MLP, 16, 8), ckpt_path=tmp_path / "half.ckpt")
    pipeline(2, max_epochs=2).fit(piped, loader(MLP, 16, 8), ckpt_path=tmp_path / "half.ckpt")
    assert_same_parameters(plain, piped, exact=False)


def save_in_two(rank: int, path: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = MLP("adamw")
    half(model, pipeline(2, 2, {"num_microbatches": 4}, max_epochs=1), path)
    return model.state_dict()


def resume_in_two(rank: int, path: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(4)
    model = MLP("adamw")
    runner = pipeline(2, 2, {"num_microbatches": 4}, max_epochs=2)
    runner.fit(model, loader(MLP, 16, 8), ckpt_path=path)
    return model.state_dict()


def test_two_processes_save_and_resume_what_one_does(tmp_path: Path) -> None:
    processes.results(processes.run(2, save_in_two, tmp_path / "two.ckpt", folder=tmp_path))
    torch.manual_seed(4)
    model = MLP("adamw")
    half(model, pipeline(2, strategy={"num_microbatches": 4}, max_epochs=1), tmp_path / "one.ckpt")
    two, one = (torch.load(tmp_path / name, weights_only=True) for name in ("two.ckpt", "one.ckpt"))
    assert two.keys() == one.keys()
    for key, value in one["state_dict"].items():
        assert torch.equal(two["state_dict"][key], value), key
    for number, state in one["optimizer_states"][0]["state"].items():
        for name, value in state.items():
            assert torch.equal(two["optimizer_states"][0]["state"][number][name], value), (number, name)
    assert two["optimizer_states"][0]["param_groups"] == one["optimizer_states"][0]["param_groups"]
    assert two["loops"].keys() == one["loops"].keys()
    resumed = processes.results(processes.run(2, resume_in_two, tmp_path / "one.ckpt", folder=tmp_path))
    pipeline(2, strategy={"num_microbatches": 4}, max_epochs=2).fit(
        model, loader(MLP, 16, 8), ckpt_path=tmp_path / "two.ckpt"
    )
    for rank in resumed:
        assert all(torch.equal(rank[key], value) for key, value in model.state_dict().items())
