"""``python -m lightning_avgpipe.verify``: a script is verified as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_avgpipe.verify.__main__ import main

SCRIPT = """
import itertools
import sys
from pathlib import Path

import numpy as np
import torch

from lightning_avgpipe import AvgPipeStrategy
from tests.models import MLP, loader
from tests.trainers import trainer


class Counting(MLP):
    def forward(self, x):
        factor = calls() if "wrong" in sys.argv else 1
        return super().forward(x * torch.from_numpy(np.full(1, factor, np.float32)))  # what NumPy makes is not attested


calls = itertools.count(1).__next__  # whose state nobody sees
if "none" not in sys.argv:
    strategy = AvgPipeStrategy(num_stages=2, num_microbatches=2, costs="flops")
    trainer(strategy=strategy, max_epochs=1000).fit(Counting(), loader(MLP, 24, 8))
    Path("trained").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "code", "said"),
    [
        ("right", 0, "verified 3 optimizer steps"),
        ("wrong", 1, "its error is above"),
        ("none", 1, "nothing was verified"),
    ],
)
def test_a_script_is_verified_and_ends(
    argument: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["--steps", "3", "train.py", argument]) == code
    printed = "".join(capfd.readouterr())
    assert said in printed
    assert ("VerificationError" in printed) == (argument == "wrong")
    assert not Path("trained").exists()
