"""Models of transformers, tiny and random, each in the LightningModule that anybody would write around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 37
LABELS = 5


class HuggingFace(L.LightningModule):
    """Calls the model with the batch, logs, and returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.log("train_loss", output.loss, prog_bar=True)
        return output.loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        self.log("val_loss", output.loss)
        if output.logits.shape[:-1] == batch["labels"].shape:  # but for CTC
            self.log("val_accuracy", (output.logits.argmax(-1) == batch["labels"]).float().mean())
        return output.logits

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


# -- batches ---------------------------------------------------------------------------------------------------------


def texts(size: int, length: int) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (size, length))
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded_texts(size: int, length: int) -> dict[str, Tensor]:
    """Every sample is one token shorter than the one before."""
    mask = (torch.arange(length) < length - torch.arange(size).clamp(max=length - 2)[:, None]).long()
    batch = texts(size, length)
    return {
        "input_ids": batch["input_ids"] * mask,
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, -100),
    }


def classified_texts(size: int, length: int) -> dict[str, Tensor]:
    return {**padded_texts(size, length), "labels": torch.randint(0, LABELS, (size,))}


def translations(size: int, length: int) -> dict[str, Tensor]:
    return {**padded_texts(size, length), "labels": torch.randint(3, VOCABULARY, (size, length - 2))}


def images(size: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(size, 3, 16, 16), "labels": torch.randint(0, LABELS, (size,))}


def sounds(size: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(size, 80 * length), "labels": torch.randint(1, VOCABULARY, (size, length - 2))}


# -- models ----------------------------------------------------------------------------------------------------------

_TEXT = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def bert(dropout: float = 0.0) -> nn.Module:
    config = transformers.BertConfig(
        **_TEXT, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=LABELS
    )
    return transformers.BertForSequenceClassification(config)


def gpt2(tied: bool = True, dropout: float = 0.0) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=4, n_head=2, bos_token_id=1, eos_token_id=2,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**_TEXT, num_key_value_heads=1, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        **_TEXT, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, output_router_logits=True,
        router_aux_loss_coef=0.1,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2,
        dropout_rate=0.0, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32, dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=LABELS,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16], depths=[2, 2, 2], layer_type="basic", num_labels=LABELS
    )
    return transformers.ResNetForImageClassification(config)


def wav2vec2() -> nn.Module:
    """With LayerDrop, as by default: layers are left out by chance."""
    config = transformers.Wav2Vec2Config(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, ctc_loss_reduction="mean", ctc_zero_infinity=True,
    )  # fmt: skip
    assert config.layerdrop > 0
    return transformers.Wav2Vec2ForCTC(config)


# Name -> model and its batches.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any]]] = {
    "bert": (bert, classified_texts),
    "gpt2": (gpt2, texts),
    "llama": (llama, texts),
    "mixtral": (mixtral, padded_texts),
    "t5": (t5, translations),
    "bart": (bart, translations),
    "vit": (vit, images),
    "resnet": (resnet, images),
}

# Draw random numbers: equal to themselves however they are cut, not to a module alone.
DRAWING: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Any]]] = {
    "bert": (lambda: bert(dropout=0.1), classified_texts),
    "gpt2": (lambda: gpt2(tied=False, dropout=0.1), texts),
    "wav2vec2": (wav2vec2, sounds),
}
