"""``python -m lightning_avgpipe advise``: ways to train, predicted from the costs of units, for a script as it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_avgpipe.__main__ import COMMANDS, main
from lightning_avgpipe.advise.predictions import advice, alternatives
from lightning_avgpipe.planning.costs import UnitCosts
from lightning_avgpipe.planning.memory import nbytes
from tests.commands import LIMIT_S, started
from tests.models import Regression, loader
from tests.trainers import pipeline


def units(message_bytes: float, parameter_bytes: float) -> UnitCosts:
    """Eight equal ones."""
    between = (message_bytes,) * 7
    return UnitCosts((0.01,) * 8, (0.02,) * 8, between, between, (parameter_bytes,) * 8)


def seconds(found: list, text: str) -> float:
    return next(way.batch_s for way in found if text in way.strategy)


def test_on_free_links_ddp_splits_the_work_and_1f1b_is_idle_at_its_ends() -> None:
    found = alternatives(units(0, 0), 8, 4, 1000)
    assert seconds(found, '"ddp"') == pytest.approx(8 * 8 * 0.03 / 4)
    assert seconds(found, 'num_stages=4, schedule="1f1b"') == pytest.approx((8 + 3) * 2 * 0.03)
    assert found[0].strategy == '"ddp"'


def test_on_a_slow_link_with_heavy_weights_ddp_is_last_and_parallel_models_pay_for_their_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = alternatives(units(10_000, 50e6), 8, 4, 100)
    assert found[-1].strategy == '"ddp"'
    with_factor = seconds(found, "num_pipelines=2, schedule")
    monkeypatch.setattr("lightning_avgpipe.advise.predictions.samples_at", lambda factor, models, **how: 1.0)
    without = seconds(alternatives(units(10_000, 50e6), 8, 4, 100), "num_pipelines=2, schedule")
    assert with_factor == pytest.approx(1.2 * without)


def test_models_that_divide_batches_and_roll_are_hardly_idle() -> None:
    found = alternatives(units(0, 0), 8, 4, 1000)
    least_s = 8 * 2 * 0.03  # the work of a stage
    dividing_s = seconds(found, "num_pipelines=2, averaging=Averaging(rolling=True, split_batches=True)")
    assert least_s <= dividing_s < 1.2 * least_s < seconds(found, 'num_stages=4, schedule="1f1b"')
    assert not any("split" in way.strategy for way in alternatives(units(0, 0), 7, 4, 1000))


def test_pipelines_have_copies_where_devices_and_micro_batches_divide() -> None:
    names = [way.strategy for way in alternatives(units(0, 0), 6, 4, 1000)]
    assert any("num_stages=2, replicas=2" in name for name in names)
    assert not any("replicas" in way.strategy for way in alternatives(units(0, 0), 5, 4, 1000))


def test_the_table_has_the_fastest_of_each_kind() -> None:
    lines = advice(units(10_000, 1e6), 8, (2, 4), (100, 1000)).splitlines()
    assert len(lines) == 1 + 2 * 2 * 3
    assert sum('"ddp"' in line for line in lines) == sum("num_pipelines" in line for line in lines) == 4


def test_where_a_parameter_is_used_at_both_ends_it_is_said_that_no_pipeline_is_predicted() -> None:
    one = UnitCosts((0.01,), (0.02,), (), (), (1e6,))
    assert "pipelines are not predicted: no cut leaves" in advice(one, 8, (2,), (100,)).splitlines()[-1]


SCRIPT = """
import sys
from pathlib import Path

import lightning as L

from lightning_avgpipe import AvgPipeStrategy
from tests.models import MLP, loader

if "fails" in sys.argv:
    raise ValueError("of the script")
stages = 1 if "whole" in sys.argv else 2
strategy = AvgPipeStrategy(num_stages=stages)
L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, logger=False).fit(MLP(), loader(MLP, 24, 8))
Path("trained").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "code", "said"),
    [("stages", 0, "num_pipelines=2"), ("whole", 1, "num_stages above 1"), ("fails", 1, "exit status 1")],
)
def test_a_script_is_asked_and_ends_after_its_first_batch(
    argument: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    assert main(["advise", "--devices", "2", "4", "train.py", argument]) == code
    assert said in "".join(capfd.readouterr())
    trained = argument == "whole"
    assert Path("checkpoints").exists() == Path("trained").exists() == trained


class Attending(Regression):
    """Has values of more than a mebibyte, random numbers, and a layer that is computed again in its backward."""

    def __init__(self, on_meta: bool) -> None:
        super().__init__()
        self.on_meta = on_meta

    def configure_model(self) -> None:
        with torch.device("meta" if self.on_meta else "cpu"):
            self.embed = nn.Linear(8, 128)
            self.layers = nn.ModuleList(nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in range(4))
            self.head = nn.Linear(128, 8)
        self.layers.requires_grad_(False)

    @staticmethod
    def example(size: int) -> Any:
        return torch.randn(size, 700, 8), torch.randn(size, 700, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers[:3]:
            x = layer(x)
        return self.head(checkpoint(self.layers[3], x, use_reentrant=False))


@pytest.mark.parametrize("stages", [2, 3])
def test_memory_without_weights_is_that_of_the_plan_with_weights(
    stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"strategy": {"num_microbatches": 2, "schedule": "1f1b"}, "max_steps": 1}
    runner = pipeline(stages, **options)
    runner.fit(Attending(False), loader(Attending, 4, 4))
    expected = [stage.memory for stage in runner.strategy.plan.stages]

    report, module = tmp_path / "report.txt", Attending(True)
    asked = {"devices": [stages], "megabits": [100], "meta": True, "report": str(report)}
    monkeypatch.setenv("AVGPIPE_ADVISE", json.dumps(asked))
    with pytest.raises(SystemExit) as ended:
        pipeline(2, **options).fit(module, loader(Attending, 4, 4))
    assert ended.value.code == 0
    assert all(p.is_meta for p in module.parameters())  # nobody has made them
    lines = report.read_text().splitlines()
    assert lines[0] == "memory of each device, for 2 micro-batches of 2 samples (1F1B):"
    shown = [re.split(" {2,}", line)[-3:] for line in lines[3 : 3 + stages]]
    needed = [(need.persistent, need.stash + need.boundary, need.total) for need in expected]
    assert shown == [[*map(nbytes, row)] for row in needed]


def test_a_command_that_is_stopped_leaves_no_script_behind(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import signal; print('begun', flush=True); signal.pause()")
    with started((("-m", "lightning_avgpipe", "advise", "train.py"), {}), folder=tmp_path) as (command,):
        assert command.stdout is not None and command.stdout.readline() == "begun\n"
        command.terminate()
        assert command.wait(timeout=LIMIT_S) == 1


def test_commands_are_listed_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert main(["train"]) == main([]) == 2
    assert main(["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]) == 0
    assert "stage 0 | F0 F1 B0 B1" in capsys.readouterr().out
