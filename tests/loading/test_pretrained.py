"""Models of transformers of which each process reads its own stages: the numbers are those of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_avgpipe import AvgPipeStrategy, from_pretrained
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.weights.initialisation import Origin
from tests import processes
from tests.trainers import trainer

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip


def saved(folder: Path, model: Any = None, **changes: Any) -> Path:
    """A small Llama in several files, and an index; or another model."""
    torch.manual_seed(1)
    model = model or transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG | changes))
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


class Tuning(L.LightningModule):
    """What anybody would write around a language model, with files that are read as transformers reads them, or here.

    Args:
        folder: of the files.
        stagewise: whether each process reads its own stages only.
        way: "full", "lora" or "qlora".
    """

    def __init__(self, folder: Path, stagewise: bool, way: str = "full") -> None:
        super().__init__()
        self.folder, self.stagewise, self.way = folder, stagewise, way
        self.strict_loading = way == "full"
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        kind, options = transformers.AutoModelForCausalLM, {}
        if self.way == "qlora":
            bits = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
            options = {"quantization_config": bits, "dtype": torch.float32}
        model = (
            from_pretrained(kind, self.folder, **options)
            if self.stagewise
            else kind.from_pretrained(self.folder, **options)
        )
        if self.way != "full":
            import peft

            torch.manual_seed(7)
            model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        self.model = model.train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """With adapters only these are saved."""
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        state = super().state_dict(*args, **kwargs)
        return state if self.way == "full" else {name: value for name, value in state.items() if name in trained}


def tokens() -> DataLoader[Any]:
    return DataLoader(torch.randint(0, 64, (12, 9), generator=torch.Generator().manual_seed(0)), batch_size=4)


def plain(folder: Path, way: str, max_epochs: int = 2) -> tuple[dict[str, Tensor], float]:
    """Weights and loss after training in one process, without stages."""
    torch.manual_seed(3)
    model, alone = Tuning(folder, False, way), trainer(max_epochs=max_epochs)
    alone.fit(model, tokens())
    return {name: p.detach() for name, p in model.named_parameters()}, float(alone.callback_metrics["loss"])


def divided(rank: int, folder: Path, way: str, resumed: bool = False) -> dict[str, Any]:
    """Train in two processes; with what a process holds afterwards."""
    torch.manual_seed(3)

    def runner(max_epochs: int) -> L.Trainer:
        return trainer(devices=2, strategy=AvgPipeStrategy(num_microbatches=1, verify=False), max_epochs=max_epochs)

    model, run = Tuning(folder, True, way), runner(1 if resumed else 2)
    run.fit(model, tokens())
    if resumed:
        run.save_checkpoint(folder / "half.ckpt")
        model, run = Tuning(folder, True, way), runner(2)
        run.fit(model, tokens(), ckpt_path=folder / "half.ckpt")
    held = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    return {"held": held, "loss": float(run.callback_metrics["loss"]), "plan": str(run.strategy.plan)}


def needs(way: str) -> None:
    for package in {"full": [], "lora": ["peft"], "qlora": ["peft", "bitsandbytes", "accelerate"]}[way]:
        pytest.importorskip(package)


def assert_equal_to_one_process(two: list[dict[str, Any]], one: tuple[dict[str, Tensor], float]) -> None:
    """Losses and weights, bit for bit; together the processes hold everything."""
    weights, loss = one
    assert two[0]["loss"] == two[1]["loss"] == loss
    assert two[0]["held"].keys() | two[1]["held"].keys() == weights.keys()
    for process in two:
        for name, value in process["held"].items():
            assert torch.equal(value.data, weights[name].data), name


@pytest.mark.parametrize("way", ["full", pytest.param("qlora", marks=pytest.mark.slow)])
def test_training_equals_that_of_one_process_which_reads_everything(way: str, tmp_path: Path) -> None:
    needs(way)
    two = processes.results(processes.run(2, divided, saved(tmp_path), way, folder=tmp_path))
    assert_equal_to_one_process(two, plain(tmp_path, way))
    assert "copied" not in two[0]["plan"]
    last, first = (
        {name for name in process["held"] if "lora" not in name and "inv_freq" not in name} for process in two
    )
    assert len(last) > 10 and len(first) > 10 and not last & first


def test_tied_weights_are_on_the_first_and_the_last_stage(tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    two = processes.results(processes.run(2, divided, tmp_path, "full", folder=tmp_path))
    assert_equal_to_one_process(two, plain(tmp_path, "full"))
    assert two[0]["held"].keys() & two[1]["held"].keys() == {"model.model.embed_tokens.weight"}


def test_adapters_train_as_in_one_process_and_a_checkpoint_of_them_alone_resumes(tmp_path: Path) -> None:
    needs("lora")
    saved(tmp_path)
    two = processes.results(processes.run(2, divided, tmp_path, "lora", True, folder=tmp_path))
    assert_equal_to_one_process(two, plain(tmp_path, "lora"))
    state = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert len(state) == 4 * 2 * 2 and all("lora" in name for name in state)


# -- what transformers does while it loads ----------------------------------------------------------------------------


def assert_read_as_transformers_reads(folder: Path, kind: Any, **options: Any) -> None:
    """Dtypes, ties and contents of all parameters and buffers."""
    wanted, model = kind.from_pretrained(folder, **options), from_pretrained(kind, folder, **options)
    names = [name for name, _ in wanted.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    origin = Origin(model, 0, torch.device("cpu"))
    origin.fill_buffers()
    for name in names:
        found = origin.tensors([name])[name]
        assert model.get_parameter(name).is_meta
        assert found.dtype == model.get_parameter(name).dtype and torch.equal(found, wanted.get_parameter(name)), name
    for (name, found), other in zip(model.named_buffers(), wanted.buffers(), strict=True):
        assert torch.equal(found, other), name


def mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**CONFIG, num_local_experts=4, num_experts_per_tok=2)
    )


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    )


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("make", [mixtral, gpt2, t5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_read_as_transformers_reads_it(make: Callable[[], Any], dtype: torch.dtype, tmp_path: Path) -> None:
    model = make()
    saved(tmp_path, model)
    assert_read_as_transformers_reads(tmp_path, type(model), dtype=dtype)


@pytest.mark.parametrize("equal", [True, False])
def test_tied_weights_that_are_in_the_files_twice_are_tied_if_they_are_equal(equal: bool, tmp_path: Path) -> None:
    saved(tmp_path, tie_word_embeddings=True)
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    tensors: dict[str, Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        tensors |= safetensors.load_file(path)
        path.unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0.0 if equal else 1.0)
    safetensors.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_read_as_transformers_reads(tmp_path, transformers.LlamaForCausalLM)


# -- errors ------------------------------------------------------------------------------------------------------------


def file_of(folder: Path, key: str) -> Path:
    return next(path for path in folder.glob("*.safetensors") if key in safetensors.load_file(path))


def rewritten(folder: Path, key: str, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """The file that holds a tensor, with other contents."""
    path = file_of(folder, key)
    tensors = safetensors.load_file(path)
    change(tensors)
    safetensors.save_file(tensors, path, {"format": "pt"})
    return path


KEY = "model.layers.2.mlp.up_proj.weight"


def test_a_tensor_that_is_in_no_file_is_named(tmp_path: Path) -> None:
    rewritten(saved(tmp_path), KEY, lambda tensors: tensors.pop(KEY))
    with pytest.raises(ConfigurationError, match=rf"'{KEY}' of LlamaForCausalLM: in no file.*initialised"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    model = from_pretrained(transformers.LlamaForCausalLM, tmp_path, initialised=["model.layers.2"])
    assert not model.get_parameter(KEY).is_meta


def test_a_new_head_is_initialised_by_transformers(tmp_path: Path) -> None:
    saved(tmp_path)
    kind = transformers.AutoModelForSequenceClassification
    with pytest.raises(ConfigurationError, match=r"'score.weight'"):
        from_pretrained(kind, tmp_path)
    model = from_pretrained(kind, tmp_path, num_labels=3, initialised=["score"])
    assert not model.score.weight.is_meta and 0 < model.score.weight.std() < 1
    assert model.model.embed_tokens.weight.is_meta


def test_another_shape_is_named_with_its_file(tmp_path: Path) -> None:
    path = rewritten(saved(tmp_path), KEY, lambda tensors: tensors.update({KEY: torch.zeros(3, 5)}))
    with pytest.raises(ConfigurationError, match=rf"'{KEY}'.*\(64, 32\).*{path.name}.*\(3, 5\)"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = file_of(saved(tmp_path), KEY)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ConfigurationError, match=rf"{path.name} is damaged"):
        from_pretrained(transformers.LlamaForCausalLM, tmp_path)


@pytest.mark.parametrize("how", ["written", "removed"])
def test_a_file_that_changes_before_it_is_read_is_named(how: str, tmp_path: Path) -> None:
    model = from_pretrained(transformers.LlamaForCausalLM, saved(tmp_path))
    path = file_of(tmp_path, KEY)
    if how == "removed":
        path.unlink()
    else:
        rewritten(tmp_path, KEY, lambda tensors: tensors[KEY].zero_())
        os.utime(path, (0, 0))
    with pytest.raises(ConfigurationError, match=rf"{path.name} (has changed|cannot be read)"):
        Origin(model, 0, torch.device("cpu")).tensors([KEY])


def test_what_is_in_the_files_and_not_in_the_model_is_told(tmp_path: Path, caplog: Any) -> None:
    rewritten(saved(tmp_path), KEY, lambda tensors: tensors.update({"more.weight": torch.zeros(2)}))
    transformers.utils.logging.enable_propagation()
    try:
        from_pretrained(transformers.LlamaForCausalLM, tmp_path)
    finally:
        transformers.utils.logging.disable_propagation()
    assert "more.weight" in caplog.text and "UNEXPECTED" in caplog.text


def test_what_takes_the_place_of_a_parameter_in_files_is_not_initialised_silently(tmp_path: Path) -> None:
    model = from_pretrained(transformers.LlamaForCausalLM, saved(tmp_path))
    with torch.device("meta"):
        model.lm_head = torch.nn.Linear(32, 64, bias=False)
    with pytest.raises(ConfigurationError, match=r"'lm_head.weight' is on the meta device and in no file"):
        Origin(model, 0, torch.device("cpu"))


@pytest.mark.parametrize("option", [{"device_map": "auto"}, {"state_dict": {}}])
def test_options_that_place_a_model_are_refused(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(option))):
        from_pretrained(transformers.LlamaForCausalLM, saved(tmp_path), **option)


def test_adapters_that_depend_on_absent_weights_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = from_pretrained(transformers.LlamaForCausalLM, saved(tmp_path))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="pissa")
    with pytest.raises(ConfigurationError, match=r"init_lora_weights=True"):
        peft.get_peft_model(model, config)


def test_a_quantizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    needs("qlora")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ConfigurationError, match=r"load_in_4bit=True"):
        from_pretrained(transformers.LlamaForCausalLM, saved(tmp_path), quantization_config=config)
