"""Options are checked when they are given and when they change, and change all at once or not at all."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import docstring_parser
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

import lightning_avgpipe
from lightning_avgpipe import AdaptiveFreezing, Averaging, AvgPipeStrategy, AvgPipeTuner, Links, PipelineTimeline
from lightning_avgpipe.averaging import options as averaging
from lightning_avgpipe.comm import options as links
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError, PartitionError
from lightning_avgpipe.strategy.options import ALLOWED, Options
from lightning_avgpipe.utils.allowed import duration
from tests import processes
from tests.models import MLP, loader
from tests.strategy.test_cli import LIGHTNINGS
from tests.trainers import pipeline, trainer


def test_every_option_of_the_strategy_is_there_and_its_defaults_stand_in_one_place() -> None:
    fields = dataclasses.fields(Options)
    assert {field.name for field in fields} == inspect.signature(AvgPipeStrategy).parameters.keys() - LIGHTNINGS
    assert all(field.default is dataclasses.MISSING for field in fields)
    assert ALLOWED.keys() == {field.name for field in fields}


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"num_pipelines": 2, "num_microbatches": 0}, "num_microbatches=0: must be 'auto' or an integer from 1"),
        ({"num_pipelines": 2.0}, r"num_pipelines=2\.0: must be an integer"),
        ({"num_microbatches": 8, "advance": 1}, "advance=1 has no meaning for schedule='1f1b'"),
    ],
)
def test_what_cannot_work_changes_nothing(wanted: dict[str, Any], message: str) -> None:
    strategy = AvgPipeStrategy(num_stages=2, num_microbatches=4, schedule="1f1b")
    with pytest.raises(ConfigurationError, match=message):
        strategy.reconfigure(**wanted)
    assert strategy.options.overrides == {"num_microbatches": 4}
    assert strategy.num_pipelines == 1


@pytest.mark.parametrize("again", [copy.deepcopy, lambda strategy: pickle.loads(pickle.dumps(strategy))])
def test_a_copied_strategy_has_the_same_options(again: Any) -> None:
    strategy = AvgPipeStrategy(num_stages=3, averaging=Averaging(alpha=0.5, save_models=False, processes_per_device=2))
    strategy.reconfigure(num_pipelines=2)
    copied = again(strategy)
    assert (copied.num_stages, copied.num_pipelines) == (3, 2)
    assert copied.options == strategy.options
    assert copied.options.averaging.processes_per_device == 2 and not copied.options.averaging.save_models
    copied.reconfigure(num_pipelines=4)
    assert strategy.num_pipelines == 2


@pytest.mark.parametrize("kind", [AvgPipeStrategy, Averaging, Links, AvgPipeTuner, PipelineTimeline, AdaptiveFreezing])
def test_the_help_of_each_option_says_what_is_allowed(kind: Any) -> None:
    helps = {p.arg_name: p.description for p in docstring_parser.parse(kind.__doc__).params}
    own = inspect.signature(kind).parameters.keys() - LIGHTNINGS
    assert all(f"for example ``{name}=" in helps[name] and "Allowed: " in helps[name] for name in own)
    assert len([line for line in kind.__doc__.splitlines() if "Allowed: " in line]) == len(own)


def test_examples_of_options_are_allowed() -> None:
    known = {
        "functools": functools,
        "torch": torch,
        "my_split": lambda batch, count: [batch],
        **{name: getattr(lightning_avgpipe, name) for name in lightning_avgpipe.__all__},
    }
    tables = ALLOWED, averaging.ALLOWED, links.ALLOWED
    for name, allowed in [item for table in tables for item in table.items()]:
        example = eval(allowed.example, known)
        assert allowed.accepts(duration(example) if name == "timeout" else example), name


@pytest.mark.parametrize(("given", "seconds"), [(0.5, 0.5), ("30s", 30), ("1.5 h", 5400), ("0:02:00", 120)])
def test_a_timeout_may_be_a_number_of_seconds_or_a_string(given: Any, seconds: float) -> None:
    strategy = AvgPipeStrategy(num_stages=2, timeout=given)
    assert strategy.options.timeout == timedelta(seconds=seconds)


def test_models_are_shown_while_there_are_some() -> None:
    strategy = AvgPipeStrategy(num_stages=2, num_pipelines=2)
    with (
        pytest.raises(ConfigurationError, match=r"reference\(\): there is no model before trainer.fit"),
        strategy.reference(),
    ):
        pass
    with pytest.raises(ConfigurationError, match=r"parallel_model\(5\): there is no"), strategy.parallel_model(5):
        pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"averaging": Averaging(alpha=0.5, every=2)},
            "Averaging(alpha=0.5, every=2) without effect: there is one pipeline, and",
        ),
        ({"num_stages": 1, "num_microbatches": 2, "advance": 1}, "advance=1 without effect: there is one stage, and"),
        (
            {"num_microbatches": 16},
            "num_microbatches=16 without effect: the first batch of the train data holds 4 samples, and makes 4 micro",
        ),
    ],
)
def test_options_without_effect_are_said_to_have_none(given: dict[str, Any], said: str) -> None:
    model = MLP()
    with pytest.warns(UserWarning) as found:
        pipeline(strategy=given, max_epochs=1).fit(model, loader(MLP, 8, 4))
    texts = [str(warning.message) for warning in found if "without effect" in str(warning.message)]
    assert len(texts) == 1 and texts[0].startswith(f"AvgPipeStrategy: {said}")


def test_a_small_number_for_memory_is_said_to_be_bytes() -> None:
    with (
        pytest.warns(UserWarning, match=r"memory_limit=2 is a number of bytes.* Use a size such as '10GB'"),
        pytest.raises(PartitionError, match="memory_limit=2 B"),
    ):
        pipeline(strategy={"memory_limit": 2}).fit(MLP(), loader(MLP, 8, 4))


def asking_alone(rank: int) -> str:
    def ask(trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            trainer.strategy.reconfigure(num_microbatches=2)

    with pytest.raises(AvgPipeError, match="num_microbatches is 2 on rank 0, but 4 on rank 1; give"):
        pipeline(2, 2, {"num_microbatches": 2 + 2 * rank}).fit(MLP(), loader(MLP, 32, 8))
    with pytest.raises(AvgPipeError) as raised:
        asks = LambdaCallback(on_train_batch_end=ask)
        pipeline(2, 2, {"timeout": 6}, callbacks=[asks]).fit(MLP(), loader(MLP, 32, 8))
    return f"{type(raised.value).__name__}: {raised.value}"


def test_what_one_rank_alone_asks_for_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = processes.each(2, asking_alone, folder=tmp_path)
    message = "reconfigure(num_microbatches=2) was called on rank 0 (stage 1), but not on rank 1 (stage 0) within 3 s"
    assert first.startswith(f"ConfigurationError: {message}; every rank must call it: in a hook of a callback")
    assert second.startswith("PeerError")
    assert message in second


@pytest.mark.parametrize(
    ("given", "replicas", "models"),
    [
        ({}, 1, 1),
        ({"num_stages": 2}, 2, 1),
        ({"num_stages": 2, "averaging": Averaging(groups=2)}, 1, 2),
        ({"num_stages": 1, "averaging": Averaging(groups=2)}, 2, 2),
        ({"replicas": 2}, 2, 1),
    ],
)
def test_fewer_stages_than_devices_are_replicas_unless_groups_are_asked_for(
    given: dict[str, Any], replicas: int, models: int
) -> None:
    strategy = trainer(strategy=AvgPipeStrategy(**given), devices=4).strategy
    assert (strategy.replicas, strategy.num_models) == (replicas, models)
    assert strategy.num_stages * replicas * models == 4
