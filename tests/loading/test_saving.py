"""A trained model whose parts are on several processes is written as one process writes the whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

import lightning_avgpipe
from lightning_avgpipe import AvgPipeStrategy, from_pretrained
from lightning_avgpipe.errors import AvgPipeError, ConfigurationError
from tests import processes
from tests.loading.test_pretrained import CONFIG, Tuning, gpt2, mixtral, needs, saved, tokens
from tests.trainers import trainer

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def contents(folder: Path) -> dict[str, Tensor]:
    """What all safetensors files of a folder hold."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= safetensors.load_file(path)
    return found


def assert_same_files(found: Path, wanted: Path) -> None:
    """The same tensors, bit for bit, and the same configurations."""
    ours, theirs = contents(found), contents(wanted)
    assert ours.keys() == theirs.keys() and ours
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and torch.equal(ours[name], value), name
    for path in wanted.glob("*config.json"):
        assert json.loads((found / path.name).read_text()) == json.loads(path.read_text()), path.name


class Saves(Tuning):
    """Also in a hook, while training runs."""

    def on_train_end(self) -> None:
        lightning_avgpipe.save_pretrained(self.model, self.folder / "hook", self.trainer, max_shard_size="30KB")


def run(strategy: Any, devices: int, folder: Path, way: str) -> None:
    """Train, and write the model in all ways that there are."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model, runner = Saves(folder, devices > 1, way), trainer(devices=devices, strategy=strategy, max_epochs=1)
    runner.fit(model, tokens())
    lightning_avgpipe.save_pretrained(model.model, folder / "after", runner, max_shard_size="30KB")
    if way != "full":
        lightning_avgpipe.save_pretrained(model.model, folder / "merged", runner, merge=True, max_shard_size="30KB")


def divided(rank: int, folder: Path, way: str) -> None:
    run(AvgPipeStrategy(num_microbatches=1, verify=False), 2, folder, way)


def whole(folder: Path, way: str) -> Any:
    """The model that one process trains, and writes with transformers and peft alone."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = Tuning(folder, False, way)
    trainer(max_epochs=1).fit(model, tokens())
    model.model.save_pretrained(folder / "plain")
    return model.model


def test_two_processes_write_what_one_writes(tmp_path: Path) -> None:
    processes.results(processes.run(2, divided, saved(tmp_path), "full", folder=tmp_path))
    whole(tmp_path, "full")
    for name in ("hook", "after"):
        assert_same_files(tmp_path / name, tmp_path / "plain")
        files = list((tmp_path / name).glob("*.safetensors"))
        assert len(files) > 4 and (tmp_path / name / "model.safetensors.index.json").exists()
        assert all(sum(t.nbytes for t in safetensors.load_file(file).values()) <= 30_000 for file in files)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert torch.equal(again.lm_head.weight, contents(tmp_path / "plain")["lm_head.weight"])


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    processes.results(processes.run(2, divided, tmp_path, "full", folder=tmp_path))
    whole(tmp_path, "full")
    assert_same_files(tmp_path / "after", tmp_path / "plain")
    assert "lm_head.weight" not in contents(tmp_path / "after")


def test_adapters_are_written_alone_or_merged(tmp_path: Path) -> None:
    needs("lora")
    processes.results(processes.run(2, divided, saved(tmp_path), "lora", folder=tmp_path))
    adapted = whole(tmp_path, "lora")
    for name in ("hook", "after"):
        assert_same_files(tmp_path / name, tmp_path / "plain")
    adapted.merge_and_unload().save_pretrained(tmp_path / "plainly merged")
    assert_same_files(tmp_path / "merged", tmp_path / "plainly merged")


class Fails(Tuning):
    def on_train_end(self) -> None:
        (self.folder / "taken").write_text("no folder") if self.global_rank == 0 else None
        lightning_avgpipe.save_pretrained(self.model, self.folder / "taken" / "below", self.trainer)


def failing(rank: int, folder: Path) -> str:
    runner = trainer(devices=2, strategy=AvgPipeStrategy(num_microbatches=1, verify=False), max_epochs=1)
    try:
        runner.fit(Fails(folder, True), tokens())
    except (OSError, AvgPipeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_all_processes_end_if_the_files_cannot_be_written(tmp_path: Path) -> None:
    first, second = processes.results(processes.run(2, failing, saved(tmp_path), folder=tmp_path))
    assert first.startswith("NotADirectoryError") and "NotADirectoryError" in second and "rank 0" in second


# -- without processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mixtral, gpt2])
def test_a_model_in_files_is_copied_as_it_was_written(make: Any, tmp_path: Path) -> None:
    """Also where transformers fuses weights when it reads them: those of Mixtral's experts."""
    kind = type(make())
    model = from_pretrained(kind, saved(tmp_path / "old", make()))
    lightning_avgpipe.save_pretrained(model, tmp_path / "new", max_shard_size="20KB")
    assert_same_files(tmp_path / "new", tmp_path / "old")
    assert all(parameter.is_meta for parameter in model.parameters())


def adapted(folder: Path, **options: Any) -> tuple[Any, Path]:
    """A Llama with trained adapters in a folder of their own."""
    import peft

    plain = transformers.LlamaForCausalLM.from_pretrained(saved(folder / "model", **options))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = peft.get_peft_model(plain, config)
        for name, parameter in model.named_parameters():
            if "lora" in name:
                torch.nn.init.normal_(parameter)
    model.save_pretrained(folder / "adapters")
    return model, folder / "adapters"


def test_adapters_in_files_are_merged_into_a_model_that_nobody_has_read(tmp_path: Path) -> None:
    needs("lora")
    import peft

    plain, adapters = adapted(tmp_path)
    model = from_pretrained(transformers.LlamaForCausalLM, tmp_path / "model")
    model = peft.PeftModel.from_pretrained(model, adapters)
    before = {name: p for name, p in model.named_parameters() if not p.is_meta}
    before = {name: p.detach().clone() for name, p in before.items()}
    lightning_avgpipe.save_pretrained(model, tmp_path / "merged", merge=True, max_shard_size="20KB")
    for name, value in before.items():
        assert torch.equal(model.get_parameter(name), value), name
    plain.merge_and_unload().save_pretrained(tmp_path / "plainly merged")
    assert_same_files(tmp_path / "merged", tmp_path / "plainly merged")


# -- errors ------------------------------------------------------------------------------------------------------------


def test_what_has_no_contents_anywhere_is_named(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    with pytest.raises(ConfigurationError, match=r"'lm_head.weight' is on the meta device"):
        lightning_avgpipe.save_pretrained(model, tmp_path)


def test_weights_in_four_bits_are_not_written(tmp_path: Path) -> None:
    needs("qlora")
    model = Tuning(saved(tmp_path), True, "qlora")
    model.configure_model()
    with pytest.raises(ConfigurationError, match=r"q_proj.*4 bits.*without quantization_config.*merge=True"):
        lightning_avgpipe.save_pretrained(model.model, tmp_path / "new", merge=True)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (L.LightningModule(), {}, "not a model of transformers"),
        (None, {"merge": True}, "no adapters to merge"),
        (None, {"state_dict": {}}, "state_dict: rank 0 writes"),
    ],
)
def test_what_cannot_be_written_is_refused(model: Any, options: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = model or transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))
    with pytest.raises(ConfigurationError, match=said):
        lightning_avgpipe.save_pretrained(model, tmp_path, **options)
