"""LightningModules of all sorts and stock models of transformers train and validate as a pipeline, unmodified."""

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

from tests.driver import Engine, assert_same_parameters
from tests.models import Regression
from tests.trainers import pipeline
from tests.zoo import own_models, transformers_models
from tests.zoo.comparison import check
from tests.zoo.transformers_models import HuggingFace


# torch says so of a reentrant checkpoint in a validation
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("num_stages", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", own_models.MODELS, ids=lambda model: model.__name__)
def test_stages_equal_a_module_bitwise(model: type[Regression], num_stages: int) -> None:
    # another length, and a last batch of which one micro-batch is smaller
    check(model(), [model.example(6, 6), model.example(6, 9), model.example(5, 5)], num_stages)


FAST = ("bert", "gpt2", "bart")  # with three stages


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        pytest.param(name, n, marks=() if n == 3 and name in FAST else pytest.mark.slow)
        for name in transformers_models.MODELS
        for n in (3, 4)
    ],
)
def test_stages_equal_a_model_of_transformers_bitwise(name: str, num_stages: int) -> None:
    build, batch = transformers_models.MODELS[name]
    # another length, and a last batch of which one micro-batch is smaller
    check(HuggingFace(build()), [batch(6, 6), batch(6, 9), batch(5, 5)], num_stages)


STEPS = 3
DRAWING: dict[str, tuple[Callable[[], L.LightningModule], Callable[[int, int], Any]]] = {
    **{model.__name__: (model, model.example) for model in own_models.DRAWING},
    **{
        name: (lambda build=build: HuggingFace(build()), batch)
        for name, (build, batch) in transformers_models.DRAWING.items()
    },
}


def trained(module: L.LightningModule, batches: list[Any], num_stages: int) -> dict[str, Any]:
    """Parameters after some steps, and gradients of the last one."""
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = Engine(module, num_stages, batches[0])
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        engine.train(copy.deepcopy(batch), iteration=i)
        optimizer.step()
    return {name: (p.detach(), p.grad) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in transformers_models.DRAWING else ()) for n in DRAWING]
)
def test_dropout_does_not_depend_on_the_number_of_stages(name: str) -> None:
    build, example = DRAWING[name]
    module = build()
    batches = [example(4, 5 + i) for i in range(STEPS)]
    expected = trained(copy.deepcopy(module), batches, 1)
    for num_stages in (2, 3, 4):
        found = trained(copy.deepcopy(module), batches, num_stages)
        for parameter, pair in expected.items():
            assert all(torch.equal(a, b) for a, b in zip(pair, found[parameter], strict=True)), (num_stages, parameter)


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


def fitted(net: nn.Module, batch: dict[str, Tensor], num_stages: int, **strategy: Any) -> Net:
    module = Net(copy.deepcopy(net))
    torch.manual_seed(4)
    batches: Any = DataLoader([batch] * 4, batch_size=None)  # type: ignore[arg-type]
    pipeline(num_stages, strategy={"num_microbatches": 4, **strategy}, max_epochs=2).fit(module, batches)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("model", [bart, wav2vec2])
def test_every_number_of_stages_leaves_out_the_same(model: Callable[[], tuple[nn.Module, dict[str, Tensor]]]) -> None:
    net, batch = model()
    whole = fitted(net, batch, 1)
    assert_same_parameters(whole, fitted(net, batch, 2), exact=False)
    assert_same_parameters(whole, fitted(net, batch, 3, verify=2), exact=False)
