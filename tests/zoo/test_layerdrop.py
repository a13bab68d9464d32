"""LayerDrop: layers that a library leaves out by chance, at its defaults, are left out on all stages alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.driver import assert_same_parameters
from tests.trainers import pipeline

VOCABULARY = 24


class Net(L.LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def bart() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=16, encoder_layers=4, decoder_layers=4, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
        encoder_layerdrop=0.3, decoder_layerdrop=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    texts = torch.randint(3, VOCABULARY, (8, 6))
    return transformers.BartForConditionalGeneration(config), {"input_ids": texts, "labels": texts}


def wav2vec2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.Wav2Vec2Config(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, ctc_loss_reduction="mean", ctc_zero_infinity=True,
    )  # fmt: skip
    assert config.layerdrop > 0
    return transformers.Wav2Vec2ForCTC(config), {
        "input_values": torch.randn(8, 400), "labels": torch.randint(1, VOCABULARY, (8, 4))
    }  # fmt: skip


def trained(net: nn.Module, batch: dict[str, Tensor], num_stages: int, **strategy: Any) -> Net:
    module = Net(copy.deepcopy(net))
    torch.manual_seed(4)
    batches: Any = DataLoader([batch] * 4, batch_size=None)  # type: ignore[arg-type]
    pipeline(num_stages, strategy={"num_microbatches": 4, **strategy}, max_epochs=2).fit(module, batches)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("model", [bart, wav2vec2])
def test_every_number_of_stages_leaves_out_the_same(model: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    net, batch = model()
    whole = trained(net, batch, 1)
    assert_same_parameters(whole, trained(net, batch, 2), exact=False)
    assert_same_parameters(whole, trained(net, batch, 3, verify=2), exact=False)
