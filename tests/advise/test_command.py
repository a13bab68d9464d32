"""``python -m lightning_avgpipe.advise``: a script is asked as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_avgpipe.__main__ import COMMANDS, main

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


def test_commands_are_listed_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert main(["train"]) == main([]) == 2
    assert main(["schedule", "1f1b", "--stages", "2", "--microbatches", "2"]) == 0
    assert "stage 0 | F0 F1 B0 B1" in capsys.readouterr().out
