"""The examples, their configs and the notebook run as a user runs them, only shorter."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import run
from tests.comparing import assert_close

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = EXAMPLES.parent / "configs" / "language_model.yaml"
FINE_TUNING = CONFIG.with_name("finetune.yaml")


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


WORDS = "model reads batch while stages wait for every link slow busy".split()  # noqa: SIM905


def sentence(index: int) -> str:
    return " ".join(WORDS[(index * step + step) % len(WORDS)] for step in range(1, 6 + index % 5))


def corpora(folder: Path) -> None:
    """All that the examples read: texts of made-up sentences."""
    for part, count in (("train", 96), ("valid", 24)):
        lines = [sentence(index) for index in range(count)]
        rows = [f"{line}\t{sentence(index * 3)}\t{index % 2}" for index, line in enumerate(lines)]
        texts = {"en": lines, "de": [line.upper() for line in lines], "txt": lines}
        for suffix, text in {**texts, "tsv": ["sentence1\tsentence2\tlabel", *rows]}.items():
            (folder / f"{part}.{suffix}").write_text("\n".join(text) + "\n")


SMALLER = {
    "awd_lstm": ["--model.hidden=16", "--data.batch_size=4", "--data.steps=8", "--data.vocabulary=64"],
    "bert": ["--model.layers=2", "--data.batch_size=8", "--data.vocabulary=200"],
    "gnmt": ["--model.layers=3", "--data.batch_size=8", "--data.vocabulary=300"],
}


@pytest.mark.slow
@pytest.mark.timeout(240)  # two commands, three processes
@pytest.mark.parametrize("name", SMALLER)
def test_an_example_trains_over_two_processes_to_the_weights_of_one(name: str, tmp_path: Path) -> None:
    corpora(tmp_path)

    def weights(folder: str, *options: str) -> dict[str, torch.Tensor]:
        out = run(
            tmp_path, EXAMPLES / f"{name}.py", "fit", "--config", CONFIG.parent / f"{name}.yaml", *SMALLER[name],
            f"--data.dir={tmp_path}", f"--trainer.default_root_dir={tmp_path / folder}", "--model.width=16",
            "--trainer.max_steps=4", "--trainer.val_check_interval=4", "--trainer.precision=64-true",
            "--trainer.strategy.num_microbatches=4", *options,
        )  # fmt: skip
        assert "`max_steps=4` reached" in out
        assert ("2 stages on 2 processes" in out) == (folder == "piped")
        (checkpoint,) = (tmp_path / folder).rglob("*.ckpt")
        return torch.load(checkpoint, weights_only=False)["state_dict"]

    plain = weights("plain", "--trainer.devices=1", "--trainer.strategy.num_stages=1")
    assert_close(weights("piped", "--trainer.devices=2"), plain, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_fine_tuning_freezes_layers_through_lightning_cli(tmp_path: Path) -> None:
    out = run(
        tmp_path, EXAMPLES / "finetune.py", "fit", "--config", FINE_TUNING, "--trainer.max_epochs", 3,
        "--model.layers", 3, "--model.width", 32, "--model.pretraining_steps", 2, "--data.train", 32, "--data.val", 32,
        "--data.batch_size", 16, "--trainer.strategy.costs", "flops", COLUMNS="120",
    )  # fmt: skip
    assert "2 stages on 2 processes" in out
    assert "from epoch 2 on 2 of 3 layers are frozen, up to 'net.vit.layers.1'" in out
    assert "`max_epochs=3` reached" in out


LARGE = (EXAMPLES.parent / "docs" / "large_models.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("command", re.findall(r"^python (examples/finetune_llm.py .*)$", LARGE, re.MULTILINE))
def test_a_language_model_is_fine_tuned_as_its_page_says(command: str, tmp_path: Path) -> None:
    for package in ("peft", "bitsandbytes", "accelerate"):
        pytest.importorskip(package)
    words = [EXAMPLES.parent / word if "/" in word else word for word in command.split()]
    out = run(tmp_path, *words, "--trainer.max_steps", 2, COLUMNS="120")
    assert "2 stages on 2 processes" in out
    assert "`max_steps=2` reached" in out
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert all("lora" in name for name in torch.load(checkpoint, weights_only=False)["state_dict"])


NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples" / "notebook.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs_in_the_repository() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in CELLS:
        exec("".join(cell["source"]), names)
    out = capsys.readouterr().out
    assert "<td>layers.0 .. " in names["strategy"].plan._repr_html_()
    assert "micro-batches" in out  # the tuner's table
    written = {path.name for path in (tmp_path / "notebook").iterdir()}
    assert written >= {"trace_step=000010.png", "simulated.png", "avgpipe_tuning.png"}
    for curve in names["losses"].curves.values():
        assert len(curve) == 80
        assert curve[-1] < 0.7 * curve[0]
    names["plt"].close("all")
