"""Fine-tune a causal language model that no process reads as a whole, with LoRA if wanted, on a file of text.

    python examples/finetune_llm.py fit --config configs/finetune_llm.yaml
    python examples/finetune_llm.py fit --config configs/finetune_llm_4bit.yaml

Without `--model.path` a small random Llama is written to a temporary folder first, so that the example runs anywhere.
"""

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from lightning_avgpipe import from_pretrained

ROOT = Path(__file__).parents[1]


@functools.cache
def small_llama() -> str:
    """The folder of a random Llama that reads bytes, the same on every process; it is gone in the end."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder.name, max_shard_size="1MB")
    return folder.name


class FineTuning(L.LightningModule):
    """Any causal language model of transformers.

    Args:
        path: folder with its safetensors files and its configuration; None: a small random Llama.
        dtype: of the weights.
        bits: 4 quantizes the linear layers with bitsandbytes (NF4) while they are read.
        rank: of LoRA's adapters on all linear layers; 0 trains the model itself.
        gradient_checkpointing: whether each layer is computed again in its backward.
        learning_rate: AdamW's.
    """

    def __init__(
        self,
        path: str | None = None,
        dtype: Literal["float32", "bfloat16"] = "float32",
        bits: Literal[4, 16] = 16,
        rank: int = 8,
        gradient_checkpointing: bool = False,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        if bits == 4 and not rank:
            raise ValueError("bits=4 but rank=0: weights in 4 bits are not trained; give adapters a rank, such as 8")
        self.path = path or small_llama()
        self.strict_loading = not rank  # checkpoints hold adapters only
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        options = self.hparams
        dtype = getattr(torch, options.dtype)
        quantized = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        model = from_pretrained(
            AutoModelForCausalLM, self.path, dtype=dtype,
            quantization_config=quantized if options.bits == 4 else None,
        )  # fmt: skip
        model.config.use_cache = False
        if options.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        if options.rank:
            model = get_peft_model(
                model, LoraConfig(r=options.rank, target_modules="all-linear", task_type="CAUSAL_LM")
            )
        self.model = model.train()

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=self.hparams.learning_rate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What is trained: the rest lies in the files that it came from."""
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in trained}


class TextFile(L.LightningDataModule):
    """A text in pieces of equal length.

    Args:
        file: of text; None: the README of this project.
        model: folder of the model, whose tokenizer is used; None: tokens are bytes.
        length: tokens in a piece.
        batch_size: pieces in a batch.
    """

    def __init__(
        self, file: str | None = None, model: str | None = None, length: int = 64, batch_size: int = 8
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        options = self.hparams
        text = Path(options.file or ROOT / "README.md").read_text(encoding="utf-8")
        if options.model is None:
            tokens = torch.tensor(list(text.encode()))
        else:
            tokens = torch.tensor(AutoTokenizer.from_pretrained(options.model)(text)["input_ids"])
        pieces = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
        return DataLoader(list(pieces), batch_size=options.batch_size, shuffle=True)


class CLI(LightningCLI):
    """The model's tokenizer makes tokens."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.path", "data.model")


if __name__ == "__main__":
    CLI(FineTuning, TextFile)
