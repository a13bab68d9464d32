"""``python -m lightning_avgpipe.advise``: a script is asked as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_avgpipe.advise.__main__ import main

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
    assert main(["--devices", "2", "4", "--", "train.py", argument]) == code
    assert said in "".join(capfd.readouterr())
    trained = argument == "whole"
    assert Path("checkpoints").exists() == Path("trained").exists() == trained
