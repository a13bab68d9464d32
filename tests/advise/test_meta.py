"""The memory table of a model without weights: what processes hold when they train that model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.advise.meta import METHODS, Question, stages_of, units_of
from lightning_avgpipe.errors import ConfigurationError
from tests import processes
from tests.loading.test_pretrained import Tuning, needs, saved, tokens
from tests.trainers import trainer

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]


def trained(rank: int, folder: Path, way: str, second: str) -> float:
    """The most bytes that a process has held while it trained, as the strategy counts them."""
    torch.set_num_threads(1)
    strategy = AvgPipeStrategy(num_microbatches=2, schedule="1f1b", verify=False, split_points=[second])
    trainer(devices=2, strategy=strategy, max_epochs=1).fit(Tuning(folder, False, way), tokens())
    (peak,) = strategy.peak_memory_bytes.values()
    return peak


@pytest.mark.parametrize("way", ["full", "lora"])
def test_the_table_says_what_processes_hold(way: str, tmp_path: Path) -> None:
    needs(way)
    question = Question(str(saved(tmp_path)), torch.float32, rank=2, targets=("q_proj", "v_proj"), batch=2, length=9)
    stages = stages_of(units_of(question, way), 2, question, 2)
    path = "model." if way == "full" else "model.base_model.model."
    second = f"{path}model.layers.{stages[1].units[0] - 1}"
    last, first = processes.results(processes.run(2, trained, tmp_path, way, second, folder=tmp_path))
    for found, stage in zip((first, last), stages, strict=True):
        assert stage.total == pytest.approx(found, rel=0.05)


def test_adapters_and_four_bits_take_less_and_a_layer_that_is_computed_again_keeps_its_input(tmp_path: Path) -> None:
    needs("lora")
    question = Question(str(saved(tmp_path)), torch.float32, rank=2, length=32)
    full, lora, bits = (sum(s.weights for s in stages_of(units_of(question, m), 2, question, 8)) for m in METHODS)
    assert full < lora < 1.2 * full and bits < 0.6 * full
    units = units_of(question, "full")
    kept, again = (
        stages_of(units, 2, Question(str(tmp_path), length=32, checkpointing=checkpointing), 8)[0].activations
        for checkpointing in (False, True)
    )
    assert again < 0.6 * kept


def test_a_model_without_layers_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, num_hidden_layers=1)
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has no list of layers"):
        units_of(Question(str(tmp_path)), "full")
