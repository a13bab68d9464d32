"""Options are checked when they are given and when they change, and change all at once or not at all."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from typing import Any

import pytest

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.options import Options
from tests.test_cli import LIGHTNINGS


def test_every_option_of_the_strategy_is_there_and_its_defaults_stand_in_one_place() -> None:
    fields = dataclasses.fields(Options)
    assert {field.name for field in fields} == inspect.signature(AvgPipeStrategy).parameters.keys() - LIGHTNINGS
    assert all(field.default is dataclasses.MISSING for field in fields)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"num_pipelines": 2, "num_microbatches": 0}, "num_microbatches=0: must be 'auto' or an integer of at least 1"),
        ({"num_pipelines": 2.0}, r"num_pipelines=2\.0: must be an integer"),
        ({"num_microbatches": 8, "advance": 1}, "advance=1 has no meaning for schedule='1f1b'"),
    ],
)
def test_what_cannot_work_changes_nothing(wanted: dict[str, Any], message: str) -> None:
    strategy = AvgPipeStrategy(num_stages=2, num_microbatches=4, schedule="1f1b")
    with pytest.raises(ConfigurationError, match=message):
        strategy.reconfigure(**wanted)
    assert strategy.given == {"num_microbatches": 4}
    assert strategy.num_pipelines == 1


def test_what_is_reconfigured_is_what_was_given() -> None:
    strategy = AvgPipeStrategy(num_stages=2)
    assert strategy.given == {}
    strategy.reconfigure(num_pipelines=3, advance=1)
    strategy.reconfigure(num_microbatches=6)
    assert strategy.given == {"num_pipelines": 3, "num_microbatches": 6, "advance": 1}
    strategy.reconfigure(num_pipelines=1, num_microbatches="auto")
    assert strategy.given == {"advance": 1}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_a_copied_strategy_has_the_same_options(again: Any) -> None:
    strategy = AvgPipeStrategy(num_stages=3, alpha=0.5, save_replicas=False, processes_per_device=2)
    strategy.reconfigure(num_pipelines=2)
    copied = again(strategy)
    assert (copied.num_stages, copied.num_pipelines, copied.processes_per_device) == (3, 2, 2)
    assert not copied.save_replicas
    copied.reconfigure(num_pipelines=4)
    assert strategy.num_pipelines == 2
