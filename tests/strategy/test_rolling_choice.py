"""Rolling where nothing stands against it: as if it had been asked for, or as without, and then it is said why."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_avgpipe import Averaging
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy.checks import can_roll
from lightning_avgpipe.strategy.combinations import Facts
from tests.averaging.models import Net, assert_equal, state, train
from tests.models import loader
from tests.strategy.test_resume import ResumableLoader
from tests.strategy.test_rolling import (
    Changing,
    Clears,
    Heated,
    Interrupts,
    Measured,
    Scaled,
    assert_same,
    run,
)
from tests.threads import alone
from tests.trainers import pipeline


def left_open(
    caplog: pytest.LogCaptureFixture, module: Any = Scaled, data: Any = None, **options: Any
) -> tuple[Any, str]:
    """The models of a run that may roll or not, and what it says about that."""
    torch.manual_seed(3)
    model, data = module(), loader(Net, 84, 8) if data is None else data()
    caplog.clear()
    with caplog.at_level(logging.INFO):
        models = train(model, data, 2, **{"averaging": Averaging(rolling="auto"), **options})
    return [*models.models, state(model)], "".join(r.message for r in caplog.records if "do not roll" in r.message)


def assert_drained(caplog: pytest.LogCaptureFixture, why: str, **options: Any) -> None:
    found, said = left_open(caplog, **options)
    averaging = replace(options.pop("averaging", Averaging()), rolling=False)
    expected, _ = left_open(caplog, **options, averaging=averaging)
    for a, b in zip(found, expected, strict=True):
        assert_equal(a, b)
    assert said.count("Averaging(rolling='auto'): pipelines do not roll: ") == 1 and why in said


def test_what_nothing_stands_against_rolls(caplog: pytest.LogCaptureFixture) -> None:
    found, said = left_open(caplog)
    expected, _ = left_open(caplog, averaging=Averaging(rolling=True))
    drained, _ = left_open(caplog, averaging=Averaging(rolling=False))
    for a, b in zip(found, expected, strict=True):
        assert_equal(a, b)
    assert not said and any(not torch.equal(t, drained[-1][name]) for name, t in found[-1].items())


@pytest.mark.parametrize(
    ("why", "options"),
    [
        (r"Averaging(every=2)", {"averaging": Averaging(rolling="auto", every=2)}),
        ("Clears.on_before_zero_grad", {"module": Clears}),
        ("weight_policy='stash'", {"weight_policy": "stash", "num_pipelines": 1}),
        # known with the first batch
        ("changes 'calls'", {"module": Changing}),
        ("the ResumableLoader saves its position", {"module": Net, "data": lambda: ResumableLoader(Net, 48, 8)}),
    ],
)
def test_what_would_be_refused_at_the_start_trains_as_without_rolling(
    why: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert_drained(caplog, why, **options)


class MeasuredLater(Measured):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) if batch_idx == 2 else Net.training_step(self, batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (Heated, "'temperature'"),
        (MeasuredLater, "updates the metric object 'mean'"),
    ],
)
def test_what_is_found_later_is_an_error_that_names_the_option(module: Any, named: str) -> None:
    with pytest.raises(ConfigurationError, match=named) as raised:
        run(module=module, strategy={"averaging": Averaging(rolling="auto")})
    assert "with Averaging(rolling='auto')" in str(raised.value)
    assert "use Averaging(rolling=False)" in str(raised.value)


def test_each_run_decides_anew() -> None:
    runner = pipeline(2, strategy={"num_pipelines": 2, "num_microbatches": 2, "averaging": Averaging(rolling="auto")})
    rolled = []
    for epochs, module in enumerate((Changing, Net, Measured, Net), 1):
        runner.fit_loop.max_epochs = epochs
        runner.fit(module(), loader(Net, 32, 8))
        rolled.append(runner.strategy.rolls)
        assert runner.global_step == 2 * epochs
    assert rolled == [False, True, False, True]


def test_more_pipelines_later_do_as_was_found_at_the_start() -> None:
    more = Interrupts(lambda trainer: trainer.strategy.reconfigure(num_pipelines=2), (1,))  # type: ignore[attr-defined]
    for module, rolls in ((Measured, False), (Changing, False), (Scaled, True)):
        found = [
            run([more], module=module, strategy={"num_pipelines": 1, "averaging": Averaging(rolling=rolling)})
            for rolling in ("auto", rolls)
        ]
        assert_same(*found)
        assert found[0][2].strategy.rolls == rolls
        with pytest.raises(ConfigurationError, match="set it before the first batch"):
            found[0][2].strategy.rolls = True


@pytest.mark.parametrize(
    ("tuned", "why"), [(False, ""), (True, "Averaging(rolling=True) with AvgPipeTuner in 2 groups of processes")]
)
def test_groups_roll_if_they_are_not_tuned(tuned: bool, why: str, caplog: pytest.LogCaptureFixture) -> None:
    runner = pipeline(1, strategy={"averaging": Averaging(rolling="auto"), "num_pipelines": 2})
    runner.strategy.connect(Net())
    with caplog.at_level(logging.INFO):
        assert can_roll(runner, runner.strategy.options, alone(1), Facts(2, 1, 2, 2, 1, tuned)) != tuned
    assert ("do not roll" in caplog.text) == tuned and why in caplog.text
