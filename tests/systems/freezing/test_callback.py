"""The callback that freezes layers: how many, which, and that training stays what it is on one device."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import AdaptiveFreezing
from lightning_avgpipe.errors import ConfigurationError, VerificationError
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Conditions, Planner
from lightning_avgpipe.schedule import build
from lightning_avgpipe.systems.freezing.kept_outputs import KeptOutputs, KeptOutputsSource, digests
from lightning_avgpipe.systems.freezing.order import by_gradient_norms, by_schedule, repeated_blocks
from tests.commands import LIMIT_S, started
from tests.comparing import assert_equal
from tests.models import MLP, CountingLinear, Regression, loader
from tests.planning.test_planner import Net
from tests.trainers import BATCH, MICROBATCHES, loaders, pipeline, single, staged

EPOCHS = 3


class Counted(nn.Linear):
    """Counts the samples that all of them see."""

    rows = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.rows += len(x)
        return super().forward(x)


class FineTuned(Regression):
    """An embedding that is tied to nothing, five blocks, and a head."""

    first: Any = Counted
    norm: Any = nn.BatchNorm1d

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = self.first(8, 8)
        self.encoder = nn.Module()
        self.encoder.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), self.norm(8), nn.Dropout(dropout), nn.Tanh()) for _ in range(5)
        )
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.encoder.blocks:
            x = block(x)
        return self.head(x)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.encoder.parameters()},
            {"params": [*self.embed.parameters(), *self.head.parameters()]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize(
    ("layers", "alpha", "expected"),
    [
        (12, 1 / 5, [3, 5, 6, 8, 9, 9, 10, 10]),
        (12, 1 / 3, [4, 7, 9, 10, 11, 11, 12, 12]),
        (12, 1 / 2, [6, 9, 11, 12, 12, 12, 12, 12]),
        (24, 1 / 3, [8, 14, 17, 20, 21, 22, 23, 24]),
    ],
)
def test_the_schedule_is_that_of_the_paper(layers: int, alpha: float, expected: list[int]) -> None:
    assert [by_schedule(layers, alpha, step) for step in range(1, 9)] == expected
    assert by_schedule(layers, alpha, 0) == 0


def test_no_layer_behind_that_with_the_smallest_gradient_is_frozen() -> None:
    norms = [0.1, 0.4, 0.3, 0.2, 0.5, 0.6]
    assert by_gradient_norms(0, 0.5, norms) == 1  # the first is the smallest
    assert by_gradient_norms(1, 0.5, norms) == 4  # 1 + 5/2, and the fourth is the smallest of the others
    assert by_gradient_norms(1, 1 / 5, norms) == 2  # alpha allows no more
    assert by_gradient_norms(6, 0.5, norms) == 6


@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_norms_of_gradients_do_not_grow_with_the_number_of_models(num_pipelines: int) -> None:
    torch.manual_seed(3)
    module, callback = FineTuned(), AdaptiveFreezing(mode="gradient_norm")
    x, y = FineTuned.example(BATCH)
    batches = DataLoader(TensorDataset(x.repeat(num_pipelines, 1), y.repeat(num_pipelines, 1)), BATCH)
    options = {"num_microbatches": MICROBATCHES, "num_pipelines": num_pipelines}
    pipeline(2, strategy=options, max_epochs=1, callbacks=[callback]).fit(module, batches)
    torch.manual_seed(3)
    plainly, alone = FineTuned(), AdaptiveFreezing(mode="gradient_norm")
    runner = single(max_epochs=1, callbacks=[alone])
    runner.fit(plainly, DataLoader(TensorDataset(x, y), BATCH // MICROBATCHES))
    assert callback.state_dict()["norms"] == pytest.approx(alone.state_dict()["norms"])
    assert min(alone.state_dict()["norms"]) > 0


class Words(FineTuned):
    """Begins with an embedding of words, whose gradients may be sparse."""

    norm = nn.LayerNorm

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 8, sparse=sparse)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((batch[0].abs().long().clamp(max=4)[:, 0], batch[1]), batch_idx)


def test_norms_of_sparse_gradients_are_those_of_dense_ones() -> None:
    found = []
    for sparse in (True, False):
        torch.manual_seed(3)
        callback = AdaptiveFreezing(mode="gradient_norm")
        pipeline(2, max_epochs=1, callbacks=[callback]).fit(Words(sparse), loader(MLP, 16, 8))
        found.append(callback.state_dict()["norms"])
    assert found[0] == pytest.approx(found[1])


def test_the_layers_are_the_longest_row_of_one_type() -> None:
    assert repeated_blocks(FineTuned()) == tuple(f"encoder.blocks.{i}" for i in range(5))
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))) == ()


def fit(
    make: Any = staged, freezing: dict[str, Any] | None = None, path: Path | None = None, **options: Any
) -> tuple[FineTuned, AdaptiveFreezing]:
    torch.manual_seed(3)
    module, callback = FineTuned(), AdaptiveFreezing(**{"alpha": 0.4, **(freezing or {})})
    batches, resumed = loaders(FineTuned, 2 * BATCH)[make is staged], options.pop("ckpt_path", None)
    runner = make(**{"max_epochs": EPOCHS, "callbacks": [callback], **options})
    runner.fit(module, batches, loader(FineTuned, BATCH, BATCH), ckpt_path=resumed)
    if path is not None:
        runner.save_checkpoint(path)
    return module, callback


@pytest.mark.parametrize("mode", [pytest.param("schedule", marks=pytest.mark.slow), "gradient_norm"])
def test_what_is_frozen_in_stages_is_what_is_frozen_on_one_device(mode: str) -> None:
    expected, plainly = fit(make=single, freezing={"mode": mode})
    found, callback = fit(num_stages=3, freezing={"mode": mode, "replan": True})
    assert callback.num_frozen == plainly.num_frozen > 0
    assert_equal(expected, found)
    frozen = [name for name, p in found.named_parameters() if not p.requires_grad]
    assert frozen == [name for name, p in expected.named_parameters() if not p.requires_grad]
    assert (
        frozen[:2] == ["embed.weight", "embed.bias"] and f"encoder.blocks.{callback.num_frozen - 1}.0.weight" in frozen
    )
    if mode == "schedule":
        assert callback.num_frozen == by_schedule(5, 0.4, EPOCHS - 1)


@pytest.mark.parametrize("stages", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_kept_outputs_of_frozen_layers_change_no_bit(stages: int) -> None:
    def begin(*_: Any) -> None:
        Counted.rows = 0

    rows, found = list[int](), {}  # how many samples the first layer sees in each epoch
    noting = LambdaCallback(on_train_epoch_start=begin, on_train_epoch_end=lambda *_: rows.append(Counted.rows))
    for cache in (None, "1MB"):
        torch.manual_seed(3)
        rows.clear()
        module = FineTuned(dropout=0.1)
        callback = AdaptiveFreezing(alpha=0.4, every_n_epochs=2, replan=True, cache=cache)
        batches = loader(FineTuned, 3 * BATCH, BATCH, shuffle=True)
        strategy = {"num_microbatches": MICROBATCHES}
        runner = pipeline(stages, strategy=strategy, max_epochs=4, callbacks=[callback, noting])
        runner.fit(module, batches)
        found[cache] = module.state_dict()
        # layers are frozen in epoch 2; the first of the three batches of epoch 3 is computed, and compared
        assert rows[3] == (3 * BATCH if cache is None else BATCH)
    assert_equal(found[None], found["1MB"])


@pytest.mark.parametrize(
    ("strategy", "freezing"),
    [
        ({"num_pipelines": 2}, {}),
        ({"recompute": True}, {}),
        ({"split_points": ["head"]}, {}),
        ({"replicas": [1]}, {}),
        ({}, {"freed": "replicas"}),
    ],
    ids=str,
)
def test_a_cache_that_cannot_work_is_refused(strategy: dict[str, Any], freezing: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"AdaptiveFreezing.*{next(iter(strategy | freezing))}"):
        fit(num_stages=1 if "replicas" in strategy else 2, freezing={"cache": "1MB", **freezing}, strategy=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("freezing", [{"mode": "gradient_norm"}, {"every_n_epochs": 3, "cache": "1MB"}], ids=str)
def test_a_script_freezes_as_one_process_does(freezing: dict[str, Any], tmp_path: Path) -> None:
    """With the default launcher, measured costs, shuffled data and a plan for each step of freezing."""
    options = {"alpha": 0.4, "replan": True, **freezing}
    given = {
        "devices": 2,
        "model": "FineTuned",
        "epochs": EPOCHS + 2,
        "costs": "measured",
        "microbatches": MICROBATCHES,
    }
    script = str(Path(__file__).parent / "script.py")
    with started(([script, str(tmp_path), json.dumps({**given, "freezing": options})], {})) as (process,):
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
    torch.manual_seed(5)
    module, callback = FineTuned(), AdaptiveFreezing(**{**options, "replan": False, "cache": None})
    batches = loader(FineTuned, 24, 8, shuffle=True)
    runner = pipeline(1, strategy={"num_microbatches": MICROBATCHES}, max_epochs=EPOCHS + 2, callbacks=[callback])
    runner.fit(module, batches)
    assert callback.num_frozen > 0
    for rank in range(2):
        assert_equal(module.state_dict(), torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True))


@pytest.mark.parametrize("mode", [pytest.param("schedule", marks=pytest.mark.slow), "gradient_norm"])
def test_a_run_that_resumes_goes_on_with_the_same_bits(mode: str, tmp_path: Path) -> None:
    whole, callback = fit(freezing={"mode": mode})
    fit(freezing={"mode": mode}, path=tmp_path / "half.ckpt", max_epochs=2)
    resumed, other = fit(freezing={"mode": mode}, ckpt_path=tmp_path / "half.ckpt")
    assert other.num_frozen == callback.num_frozen > 0
    assert_equal(whole, resumed)


def test_frozen_layers_are_in_eval_mode_also_after_a_validation() -> None:
    seen: list[list[bool]] = []

    def look(trainer: Any, module: Any, *_: Any) -> None:
        seen.append([block[1].training for block in module.encoder.blocks])

    callbacks = [AdaptiveFreezing(alpha=0.4), LambdaCallback(on_train_batch_end=look)]
    runner = pipeline(2, callbacks=callbacks, max_epochs=2, val_check_interval=1)
    runner.fit(FineTuned(dropout=0.5), loader(FineTuned, 2 * BATCH, BATCH), loader(FineTuned, BATCH, BATCH))
    assert seen == [[True] * 5] * 2 + [[False] * 2 + [True] * 3] * 2


class Tied(FineTuned):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def test_a_tied_parameter_stays_trained() -> None:
    module = Tied()
    pipeline(2, callbacks=[AdaptiveFreezing(alpha=0.4)]).fit(module, loader(FineTuned, BATCH, BATCH))
    assert module.embed.weight.requires_grad and not module.embed.bias.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0}, "alpha=0: must be a number above 0, at most 1"),
        ({"mode": "never"}, "mode='never': must be one of 'schedule', 'gradient_norm'"),
        (
            {"layers": ["encoder.blocs.*"]},
            r"layers: 'encoder.blocs.\*' fits nothing in FineTuned; did you mean 'encoder",
        ),
        ({"layers": ["embed", "encoder", "head"]}, "frozen nothing of FineTuned would be trained"),
    ],
)
def test_what_cannot_work_is_refused_before_training(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        fit(freezing=options)


@pytest.mark.parametrize("asked", [{"replan": True}, {"cache": "1 GiB"}])
def test_fixed_stages_cannot_be_planned_again(asked: dict[str, Any]) -> None:
    ((name, value),) = asked.items()
    message = (
        rf"AdaptiveFreezing\({name}={value!r}\) with split_points=\['encoder.blocks.2'\]: stages will begin elsewhere"
    )
    with pytest.raises(ConfigurationError, match=message):
        fit(freezing=asked, strategy={"split_points": ["encoder.blocks.2"]})


def test_a_config_may_name_it() -> None:
    callbacks = [{"class_path": "lightning_avgpipe.AdaptiveFreezing", "init_args": {"alpha": 0.2, "replan": True}}]
    args = {"trainer": {"strategy": "avgpipe", "accelerator": "cpu", "devices": 1, "callbacks": callbacks}}
    cli = LightningCLI(FineTuned, run=False, save_config_callback=None, args=args)
    assert any(isinstance(callback, AdaptiveFreezing) for callback in cli.trainer.callbacks)


# -- outputs of frozen layers: told apart by sample, the same bits again, and given up where they may differ ---------


HOST = torch.device("cpu")
X = torch.arange(24.0).reshape(8, 3)


def keeping(limit: float = math.inf) -> KeptOutputs:
    unused: Any = None
    return KeptOutputs(limit, 3, unused, unused, unused, 1)


def epoch(kept: KeptOutputs, order: list[int], make: Any = lambda x: (x * 2, x.sum(1).to(torch.int16))) -> list[Any]:
    """Micro-batches of two samples; returns what was read, and None for what was computed."""
    kept.begin_epoch()
    found: list[Any] = []
    for rows in (order[i : i + 2] for i in range(0, len(order), 2)):
        if kept.look_up({0: digests((X[rows], 0), len(rows), None)}):
            found.append(kept.read(0, HOST, 1).tensors)
            continue
        if kept.wants(0):
            kept.fill(0, make(X[rows]), ("entry",))
        found.append(None)
    return found


def test_a_sample_is_known_by_its_content_whatever_is_beside_it() -> None:
    both = digests({"x": X[:2], "y": torch.zeros(2)}, 2, None)
    assert digests({"x": X[:1], "y": torch.zeros(1)}, 1, None) == both[:1]
    assert len({*both, *digests({"x": X[:1] + 1e-7, "y": torch.zeros(1)}, 1, None)}) == 2 + bool(X[0, 0] + 1e-7)
    assert digests({"x": X[:2], "y": torch.ones(2)}, 2, {"['x']"}) == digests(
        {"x": X[:2], "y": torch.zeros(2)}, 2, {"['x']"}
    )
    assert digests((X[:2], "de"), 2, None) != digests((X[:2], "en"), 2, None)  # what is not a tensor counts for all
    edges, others = torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()  # nor is a sparse one
    assert digests((X[:2], edges), 2, None) == digests((X[:2], edges.clone()), 2, None)
    assert digests((X[:2], edges), 2, None) != digests((X[:2], others), 2, None)


def test_what_is_read_has_the_bits_that_were_given() -> None:
    kept = keeping()
    assert epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7]) == [None] * 4
    first, *rest = epoch(kept, [5, 2, 7, 0, 1, 3, 6, 4])
    assert first is None  # computed, and compared
    for rows, (doubled, sums) in zip(([7, 0], [1, 3], [6, 4]), rest, strict=True):
        assert torch.equal(doubled, X[rows] * 2) and torch.equal(sums, X[rows].sum(1).to(torch.int16))


def test_tensors_lie_in_memory_as_they_were_given() -> None:
    def transposed(x: Tensor) -> tuple[Tensor, ...]:
        return (x[:, :, None].expand(2, 3, 4).contiguous().transpose(1, 2).contiguous().transpose(1, 2),)

    kept = keeping()
    epoch(kept, [0, 1, 2, 3], transposed)
    _, (read,) = epoch(kept, [2, 0, 3, 1], transposed)
    assert read.stride() == transposed(X[:2])[0].stride() and torch.equal(read, transposed(X[[3, 1]])[0])


def test_what_depends_on_others_of_the_micro_batch_is_not_kept() -> None:
    kept = keeping()
    normalised = lambda x: (x - x.mean(0),)  # noqa: E731
    epoch(kept, [0, 1, 2, 3], normalised)
    assert epoch(kept, [0, 2, 1, 3], normalised) == [None, None]
    assert "depends on more than the sample" in kept.why_not


def test_a_tensor_without_samples_must_be_the_same_for_all() -> None:
    kept = keeping()
    epoch(kept, [0, 1, 2, 3], lambda x: (x, x.sum()))
    assert "shape ()" in kept.why_not
    kept = keeping()
    constant = lambda x: (x, torch.ones(5))  # noqa: E731
    epoch(kept, [0, 1, 2, 3], constant)
    assert torch.equal(epoch(kept, [2, 0, 3, 1], constant)[1][1], torch.ones(5))


def test_frozen_weights_that_change_once_their_outputs_were_used_are_an_error() -> None:
    kept = keeping()
    epoch(kept, [0, 1, 2, 3])
    assert epoch(kept, [2, 0, 3, 1])[1] is not None
    with pytest.raises(VerificationError, match="frozen weights have changed"):
        epoch(kept, [0, 1, 2, 3], lambda x: (x * 3, x.sum(1).to(torch.int16)))


def test_what_differs_while_something_is_about_to_be_read_is_an_error() -> None:
    kept, make = keeping(), lambda x: (x * 2,)
    epoch(kept, [0, 1, 2, 3], make)
    epoch(kept, [0, 1], make)  # compared
    assert kept.look_up({0: digests((X[[0, 4]], 0), 2, None), 1: digests((X[[2, 3]], 0), 2, None)}) == {1}
    with pytest.raises(VerificationError, match="are used by now"):
        kept.fill(0, (X[[0, 4]] + 1,), ("entry",))


def test_data_that_is_augmented_is_given_up_after_an_epoch() -> None:
    kept = keeping()
    for number in range(4):
        kept.begin_epoch()
        for rows in ([0, 1], [2, 3]):
            assert not kept.look_up({0: digests(X[rows] + number, 2, None)})
            if kept.wants(0):
                kept.fill(0, (X[rows],), ())
    assert "augments at random" in kept.why_not


def test_without_room_training_goes_on_without_more_of_it() -> None:
    kept = keeping(60)  # four samples of 14 bytes
    epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7])
    read = [found is not None for found in epoch(kept, [0, 1, 2, 3, 4, 5, 6, 7])]
    assert read == [False, True, False, False]  # compared, read, and no room


def test_what_was_stopped_keeps_nothing_more() -> None:
    kept = keeping()
    epoch(kept, [0, 1, 2, 3])
    kept.stop("two pipelines train")
    assert epoch(kept, [0, 1, 2, 3]) == epoch(kept, [0, 1, 2, 3]) == [None, None]
    assert not kept.wants(0) and kept.why_not == "two pipelines train"


# -- plans -----------------------------------------------------------------------------------------------------------


def test_it_is_logged_why_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.blocks[0].parts[0] = nn.Dropout(0.5)
    net.blocks[0].requires_grad_(False)
    planner = Planner(Divisible(net), 2, source=KeptOutputsSource())
    step = Step("training_step", net.training_step, (torch.randn(2, 8), 0))
    assert planner.plan(step, Conditions(build("1f1b", 2, 1))).kept == 0
    assert "outputs of frozen layers are not kept" in caplog.text and "draws random numbers" in caplog.text


def test_what_counts_its_calls_is_called() -> None:
    net = Net()
    net.blocks[1].parts[1] = CountingLinear(8, 8)
    net.blocks[:2].requires_grad_(False)
    plan = Planner(Divisible(net), 2, source=KeptOutputsSource()).plan(
        Step("training_step", net.training_step, (torch.randn(2, 8), 0)), Conditions(build("1f1b", 2, 1))
    )
    assert [node.name for node in plan.graph.nodes[: plan.kept]] == ["blocks.0", "blocks.1.parts.0"]
