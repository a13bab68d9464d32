"""Small language models of transformers in files, and a LightningModule that tunes one of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_avgpipe import from_pretrained

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

CONFIG: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
PACKAGES = {"lora": ["peft"], "qlora": ["peft", "bitsandbytes", "accelerate"]}  # that a way to tune needs


def needs(way: str) -> None:
    """Skip a test if the packages are not installed."""
    for package in PACKAGES.get(way, []):
        pytest.importorskip(package)


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def tied_llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, tie_word_embeddings=True))


def mixtral() -> Any:
    config = transformers.MixtralConfig(**CONFIG, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def gpt2() -> Any:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def saved(folder: Path, make: Any = llama) -> Path:
    """A model in several files, and an index."""
    torch.manual_seed(1)
    make().save_pretrained(folder, max_shard_size="20KB")
    return folder


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


class Tuning(L.LightningModule):
    """What anybody would write around a language model, with files that are read as transformers reads them, or here.

    Args:
        folder: of the files.
        stagewise: whether each process reads its own stages only.
        way: "lora" or "qlora" with adapters; otherwise all weights are trained.
    """

    def __init__(self, folder: Path, stagewise: bool, way: str = "full") -> None:
        super().__init__()
        self.folder, self.stagewise, self.way = folder, stagewise, way
        self.has_adapters = way in PACKAGES
        self.strict_loading = not self.has_adapters
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
        if self.has_adapters:
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
        return {name: value for name, value in state.items() if name in trained or not self.has_adapters}


def tokens() -> DataLoader[Any]:
    return DataLoader(torch.randint(0, 64, (12, 9), generator=torch.Generator().manual_seed(0)), batch_size=4)
