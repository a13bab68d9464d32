"""With one device, one stage and one micro-batch the strategy is Lightning's for one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeStrategy, PipelineTimeline
from tests.averaging.models import assert_equal
from tests.driver import assert_same_parameters
from tests.manual_models import Gan
from tests.models import MLP, loader
from tests.trainers import pipeline, trainer, twins


class Noisy(MLP):
    """Draws random numbers, in a layer and in the order of its data."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(nn.functional.dropout(x, 0.2, self.training))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class OwnBackward(MLP):
    def backward(self, loss: Tensor) -> None:
        (2 * loss).backward()


class Skips(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return self.loss(batch) if batch_idx else None


class Lbfgs(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


def both(module: Any, **options: Any) -> list[L.Trainer]:
    """Train it on one device, and its twin under the strategy."""
    runners = []
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PL_GLOBAL_SEED", "7")
        for each, strategy in zip(twins(module), ("auto", "avgpipe"), strict=True):
            runners.append(trainer(strategy=strategy, **copy.deepcopy(options)))
            torch.manual_seed(7)
            torch.rand(3)  # a run does not begin where the seed was set
            runners[-1].fit(each, loader(MLP, 20, 8), loader(MLP, 8, 4, seed=1))
    return runners


def test_checkpoints_equal_those_of_one_device_with_progress_and_random_numbers(tmp_path: Path) -> None:
    plain, ours = both(Noisy)
    for runner, name in ((plain, "plain"), (ours, "ours")):
        runner.save_checkpoint(tmp_path / name)
    expected, found = (torch.load(tmp_path / name, weights_only=False) for name in ("plain", "ours"))
    assert expected["loops"] and expected["optimizer_states"][0]["state"]
    assert_equal(expected, found)
    assert_equal(dict(plain.callback_metrics), dict(ours.callback_metrics))


@pytest.mark.parametrize("module", [Gan, OwnBackward, Skips, Lbfgs])
def test_what_a_pipeline_refuses_works(module: type[MLP]) -> None:
    plain, ours = both(module)
    assert_same_parameters(plain.lightning_module, ours.lightning_module)
    assert ours.global_step == plain.global_step > 0


@pytest.mark.parametrize(
    ("options", "plain"),
    [({}, True), ({"num_microbatches": 1}, True), ({"num_microbatches": 2}, False), ({"num_stages": 2}, False)],
)
def test_only_what_cannot_be_pipelined_is_plain(options: dict[str, int], plain: bool) -> None:
    runner = trainer(strategy=AvgPipeStrategy(costs="flops", **options), max_steps=1)
    runner.fit(MLP(), loader(MLP, 8, 8))
    assert (runner.strategy.plan is None) is plain is runner.strategy.passthrough


def test_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        runner = trainer(strategy="avgpipe", max_steps=1)
        for run in (runner.fit, runner.validate):
            run(MLP(), loader(MLP, 8, 8))
    assert caplog.text.count("there is nothing to pipeline") == 1


def test_a_module_on_meta_gets_its_contents() -> None:
    class Large(MLP):
        def configure_model(self) -> None:
            with torch.device("meta"):
                self.layers = MLP().layers

    found = []
    piped = pipeline(2, strategy={"num_microbatches": 1}, max_epochs=1)
    for runner in (trainer(strategy="avgpipe", max_epochs=1), piped):
        torch.manual_seed(5)
        found.append(Large())
        runner.fit(found[-1], loader(MLP, 8, 8))
    assert_same_parameters(*found)


def test_a_pipeline_and_one_device_resume_from_each_other(tmp_path: Path) -> None:
    class Adam(MLP):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def plain(**options: Any) -> L.Trainer:
        return trainer(strategy=AvgPipeStrategy(save_distributed_checkpoint=True), **options)

    def piped(**options: Any) -> L.Trainer:
        return pipeline(2, strategy={"num_microbatches": 1, "save_distributed_checkpoint": False}, **options)

    def run(*makers: Callable[..., L.Trainer]) -> MLP:
        torch.manual_seed(3)
        for epoch, make in enumerate(makers, start=1):
            module, runner = Adam(), make(max_epochs=epoch)
            last = tmp_path / f"{epoch - 1}" if epoch > 1 else None
            runner.fit(module, loader(MLP, 16, 8, shuffle=False), ckpt_path=last, weights_only=False)
            runner.save_checkpoint(tmp_path / f"{epoch}")
        return module

    expected = run(plain, plain, plain)
    assert_same_parameters(expected, run(plain, piped, plain), exact=False)
    assert_same_parameters(expected, run(piped, plain, piped), exact=False)


def test_a_timeline_of_no_pipeline_is_not_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = PipelineTimeline(every_n_steps=1, dirpath=tmp_path / "timelines")
    with pytest.warns(UserWarning, match="PipelineTimeline writes nothing"):
        trainer(strategy="avgpipe", max_steps=2, callbacks=[timeline]).fit(MLP(), loader(MLP, 16, 8))
    assert not (tmp_path / "timelines").exists()
