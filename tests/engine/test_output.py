"""What a step prints, warns and logs is heard once, as in one process that accumulates the micro-batches."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from tests.commands import run
from tests.models import Regression, loader
from tests.trainers import pipeline

SCRIPT = """
import logging, sys, warnings
import lightning as L, torch
from torch import nn
import lightning_avgpipe

logging.basicConfig(stream=sys.stdout, format="%(message)s")
warnings.simplefilter("always")

class Speaking(nn.Linear):
    def forward(self, x):
        print(f"unit {x.shape[1]}")
        return super().forward(x)

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Speaking(6, 5), Speaking(5, 4), nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        print("begins")
        h = self.a(batch[0])
        warnings.warn("between")
        logging.getLogger("mine").warning("logged")
        h = self.b(h)
        print("to stderr", file=sys.stderr)
        return self.c(h).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12, 6)), batch_size=4)
    strategy = lightning_avgpipe.AvgPipeStrategy(num_microbatches=2, costs_cache=None)
    L.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=3, logger=False, enable_checkpointing=False,
              enable_progress_bar=False).fit(Net(), data)
"""


@pytest.mark.slow
def test_two_processes_say_what_one_would_from_the_first_batch_on(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = run(tmp_path, script)
    # occurrences, not lines: without a buffer two processes write between a text and its end of line
    said = {text: output.count(text) for text in ("begins", "unit 6", "unit 5", "logged", "to stderr")}
    assert set(said.values()) == {6}, said
    assert output.count("UserWarning: between") == 6
    assert "No handlers" not in output


def by_print(text: str) -> None:
    print(text)


def by_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def by_warning(text: str) -> None:
    warnings.warn(text, stacklevel=1)


def by_logger(text: str) -> None:
    logging.getLogger("tests.speaking").warning(text)


class Speaks(Regression):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__("sgd")
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.say = say

    def forward(self, x: Tensor) -> Tensor:
        self.say("first")
        for layer in self.layers:
            x = layer(x)
        self.say("last")
        return x


def heard(module: Regression, **options: Any) -> Counter[str]:
    """What is said in two batches of four micro-batches, on three stages."""
    out, handler = io.StringIO(), logging.StreamHandler()
    handler.setStream(out)
    logger = logging.getLogger("tests.speaking")
    logger.addHandler(handler)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(message)
        warnings.simplefilter("always")
        options = {"num_microbatches": 4, **options}
        pipeline(3, strategy=options, max_epochs=1).fit(module, loader(type(module), 16, 8))
    logger.removeHandler(handler)
    return Counter(out.getvalue().splitlines())


@pytest.mark.parametrize(
    ("say", "options"),
    [(by_print, {}), (by_stderr, {"verify": 1}), (by_warning, {"recompute": True}), (by_logger, {"verify": 1})],
)
def test_each_micro_batch_is_heard_once(say: Callable[[str], None], options: dict[str, Any]) -> None:
    lines = heard(Speaks(say), **options)
    assert (lines["first"], lines["last"]) == (8, 8)
