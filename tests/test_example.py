"""The example and its config run as a user runs them, only shorter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import run

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = EXAMPLES.parent / "configs" / "language_model.yaml"


@pytest.mark.slow  # as the README's first snippet: tests/test_readme.py
def test_the_example_trains_in_two_processes_and_writes_a_sample(tmp_path: Path) -> None:
    out = run(
        tmp_path, EXAMPLES / "language_model.py", "--max_steps", 20, "--layers", 2, "--width", 32,
        "--batch_size", 128, "--num_microbatches", 2, COLUMNS="120",
    )  # fmt: skip
    assert "2 stages on 2 processes" in out
    losses = [float(x) for x in out.split("val_loss:")[-1].split("\n")[0].split(" -> ")]
    assert losses[-1] < losses[0] - 0.5
    assert "checkpoint: " in out
    assert out.split("checkpoint: ")[-1].split("\n")[1].startswith("def ")


@pytest.mark.slow  # in one process: tests/strategy/test_cli.py
def test_the_config_trains_through_lightning_cli(tmp_path: Path) -> None:
    out = run(
        tmp_path, EXAMPLES / "cli.py", "fit", "--config", CONFIG, "--trainer.max_steps", 3,
        "--trainer.val_check_interval", 3, "--trainer.limit_val_batches", 2, "--model.layers", 2, "--model.width", 32,
        COLUMNS="120",
    )  # fmt: skip
    assert "2 stages on 2 processes" in out
    assert "`max_steps=3` reached" in out
    assert list(tmp_path.rglob("*.ckpt"))
