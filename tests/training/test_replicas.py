"""Replicas of pipelines train as one: as ddp does, and as one process that has all their batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.capture.graph import CallGraph, Node
from lightning_avgpipe.comm.topology import StageMap
from lightning_avgpipe.engine.microbatch import split
from lightning_avgpipe.errors import ConfigurationError, PartitionError, PeerError
from lightning_avgpipe.training.replicas import check_shared
from tests import processes
from tests.averaging.models import Batches, Models, Net
from tests.averaging.test_groups import Bomb
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, Regression, loader
from tests.trainers import pipeline, trainer

REPLICAS = 2


def fit(model: Any, batches: Sequence[Any], replica: int | None, devices: int = REPLICAS, **strategy: Any) -> Any:
    """Train two stages with a replica's batches, or in one process: with all batches, each two of which are one."""
    options = {"max_epochs": 1, "use_distributed_sampler": False, **strategy.pop("trainer", {})}
    if replica is not None:
        strategy, data = {"replicas": REPLICAS, **strategy}, batches[replica::REPLICAS]
    else:
        data = [joined(batches[i : i + REPLICAS]) for i in range(0, len(batches), REPLICAS)]
        strategy["num_microbatches"] *= REPLICAS
    path = options.pop("ckpt_path", None)
    runner = pipeline(2, 1 if replica is None else devices, strategy, **options)
    runner.fit(model, Batches(data), ckpt_path=path)
    return runner


def joined(batches: Sequence[Any]) -> Any:
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


# -- as ddp ----------------------------------------------------------------------------------------------------------


def numbered(count: int) -> DataLoader[Any]:
    torch.manual_seed(7)
    return DataLoader(TensorDataset(torch.randn(count, 8), torch.randn(count, 8)), batch_size=4, shuffle=True)


def with_sampler(runner: L.Trainer) -> dict[str, Tensor]:
    L.seed_everything(3)
    model = Net("adamw", dropout=0.0, warm_up=True)
    runner.fit(model, numbered(48))
    return state(model)


def as_ddp() -> Any:
    options = {"max_epochs": 2, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    ours = with_sampler(pipeline(1, REPLICAS, {"replicas": REPLICAS}, **options))
    return ours, with_sampler(trainer(devices=REPLICAS, strategy="ddp", **options))


# -- as one process --------------------------------------------------------------------------------------------------


def unequal() -> list[Any]:
    """Batches of replica 0 and 1 in turns, of which those of replica 1 are smaller."""
    torch.manual_seed(7)
    return [Net.example(6 if i % REPLICAS else 8) for i in range(8)]


def by_slices(model: Any, batches: Sequence[Any], num_microbatches: int, clip: float) -> None:
    """Plain training: gradients of each replica's micro-batches, their sum, one step; buffers of replica 0."""
    model.log = lambda *args, **kwargs: None  # no trainer here
    optimizer = model.configure_optimizers()
    for i in range(0, len(batches), REPLICAS):
        together, sums = batches[i : i + REPLICAS], []
        samples = sum(len(batch[0]) for batch in together)
        for batch in together:
            model.zero_grad()
            before = [buffer.clone() for buffer in model.buffers()]
            for part in split(batch, num_microbatches):
                (model.training_step(part.data, 0) * (part.size / samples)).backward()
            sums.append([p.grad for p in model.parameters()])
            if batch is not together[0]:
                for buffer, value in zip(model.buffers(), before, strict=True):
                    buffer.copy_(value)
        for parameter, *gradients in zip(model.parameters(), *sums, strict=True):
            parameter.grad = gradients[0] + gradients[1]
        torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)
        optimizer.step()


class Tokens(Regression):
    """A mean over targets that are not ignored; the embedding has gradients for few rows; one batch has no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8, sparse=True)
        self.out = nn.Linear(8, 40)

    @staticmethod
    def example(size: int) -> Any:
        tokens = torch.randint(0, 40, (size, 5))
        return tokens, torch.where(torch.rand(size, 5) < 0.6, -100, tokens)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if int(batch[0][0, 0]) == 39:
            return None
        loss = F.cross_entropy(self.out(self.embed(batch[0])).flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def tokens(replica: int | None) -> Any:
    torch.manual_seed(5)
    batches = list(loader(Tokens, 32, 4))
    for batch in batches:
        batch[0].remainder_(39)
    batches[3][0][:, 0], batches[3][1][:] = 39, -100  # all of replica 1's second batch
    model = Tokens()
    runner = fit(model, batches, replica, num_microbatches=2, loss_weight="1", split_points=["out"])
    return state(model), {name: float(value) for name, value in runner.callback_metrics.items()}


class Keeps(MLP):
    """Accumulates by hand, and computes gradients by which no optimizer steps, so that nobody clears them."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)
        self.norms += [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers[2:].parameters(), lr=0.1)


def kept(replica: int | None) -> Any:
    torch.manual_seed(5)
    model = Keeps()
    fit(model, list(loader(MLP, 32, 4)), replica, num_microbatches=2)
    return state(model), model.norms


def everything(rank: int) -> Any:
    torch.manual_seed(4 + rank)  # so modules differ until training begins
    model = Net("momentum", dropout=0.0)
    fit(model, unequal(), rank, num_microbatches=2, trainer={"gradient_clip_val": 0.1})
    return state(model), tokens(rank), kept(rank), as_ddp()


in_two = processes.shared(REPLICAS, everything)


def test_one_stage_with_replicas_gives_the_numbers_of_ddp(in_two: list[Any]) -> None:
    (ours, theirs), (others, _) = (found for *_, found in in_two)
    assert_equal(ours, others)
    assert_close(ours, theirs)


def test_replicas_train_as_one_process_with_all_batches(in_two: list[Any]) -> None:
    torch.manual_seed(4)
    plain = Net("momentum", dropout=0.0)
    by_slices(plain, unequal(), 2, clip=0.1)
    of_tokens, metrics = tokens(None)
    for exact, (found, found_metrics), *_ in in_two:
        assert_equal(exact, state(plain))
        assert_close(found, of_tokens)
        assert found_metrics == pytest.approx(metrics, rel=1e-5)
    assert_equal(in_two[0][1][0], in_two[1][1][0])


def test_gradients_that_nobody_clears_are_summed_once(in_two: list[Any]) -> None:
    expected, norms = kept(None)
    assert len(norms) == 4 * len(expected)
    for *_, (found, found_norms), _ in in_two:
        assert_close(found, expected)
        assert found_norms == pytest.approx(norms, rel=1e-5)


def test_parallel_models_refuse_a_module_that_accumulates_by_hand() -> None:
    with pytest.raises(ConfigurationError, match=r"optimizer_zero_grad keeps the gradient of 'layers\.2\.weight'"):
        pipeline(2, 1, {"num_pipelines": 2}, max_epochs=1).fit(Keeps(), loader(MLP, 32, 4))


def elastic(replica: int | None, folder: Path, devices: int = REPLICAS, **trainer: Any) -> Any:
    """Two parallel models of tied layers, dropout; the second epoch is resumed."""
    torch.manual_seed(5)
    batches = list(loader(Tied, 64, 8))
    saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    states = []
    for epochs in (1, 2):
        torch.manual_seed(5)
        model, seen = Tied(), Models()
        options = {
            "max_epochs": epochs, "callbacks": [saving, seen], "enable_checkpointing": True,
            "accumulate_grad_batches": 2, "gradient_clip_val": 0.5,
            "ckpt_path": folder / "epoch=0.ckpt" if epochs == 2 else None, **trainer,
        }  # fmt: skip
        fit(model, batches, replica, devices, num_microbatches=2, num_pipelines=2, recompute=True, trainer=options)
        states.append([state(model), *seen.models])
    return states


class Tied(Regression):
    """One matrix at both ends."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


def teams(rank: int | None) -> Any:
    """Two teams of two replicas, or two pipelines of one process that read the batches of replicas as one."""
    torch.manual_seed(5)
    batches, model = list(loader(Tied, 64, 8)), Tied()
    if rank is None:
        fit(model, batches, None, num_microbatches=2, num_pipelines=2)
    else:
        team, replica = divmod(rank, REPLICAS)
        options = {"num_microbatches": 2, "replicas": REPLICAS, "averaging": Averaging(groups=2)}
        runner = pipeline(1, 4, options, max_epochs=1, use_distributed_sampler=False)
        runner.fit(model, Batches([batches[2 * team + replica], batches[4 + 2 * team + replica]]))
        assert runner.strategy.num_models == 2
    return state(model)


def four_processes(rank: int, folder: Path) -> Any:
    replica, devices = rank // 2, 2 * REPLICAS
    half = elastic(replica, folder / "half", devices, precision="bf16-mixed")
    return elastic(replica, folder / "single", devices), half, teams(rank)


@pytest.mark.slow
def test_replicas_train_parallel_models_resume_and_are_averaged(tmp_path: Path) -> None:
    results = processes.each(2 * REPLICAS, four_processes, tmp_path / "four", folder=tmp_path)
    single, half = elastic(None, tmp_path / "one"), elastic(None, tmp_path / "1", precision="bf16-mixed")
    averaged = teams(None)
    for found in results:
        for kind, expected, tolerance in ((found[0], single, 1e-5), (found[1], half, 3e-2)):
            for models, others in zip(kind, expected, strict=True):
                for one, other in zip(models, others, strict=True):
                    here = {name: tensor for name, tensor in one.items() if not tensor.is_meta}  # on this stage
                    assert_close(here, {name: other[name] for name in here}, tolerance, tolerance)
        assert_close(found[2], averaged)


# -- of single stages ------------------------------------------------------------------------------------------------


def in_turns(model: Any, batches: Sequence[Any], num_microbatches: int, replicas: int, first: Sequence[str]) -> None:
    """Plain training; gradients of the first stage are added up by replica, whose micro-batches come in turns."""
    model.log = lambda *args, **kwargs: None  # no trainer here
    optimizer = model.configure_optimizers()
    for batch in batches:
        sums: list[dict[str, Tensor]] = [{} for _ in range(replicas)]
        for part in split(batch, num_microbatches):
            model.zero_grad()
            (model.training_step(part.data, 0) * part.weight).backward()
            for name, parameter in model.named_parameters():
                held = sums[part.index % replicas if name in first else 0]
                held[name] = held[name] + parameter.grad if name in held else parameter.grad
        for name, parameter in model.named_parameters():
            gradients = [held[name] for held in sums if name in held]
            parameter.grad = gradients[0] if len(gradients) == 1 else gradients[0] + gradients[1]
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 0.1)
        optimizer.step()


class Rolling(Tied):
    """Every third batch has no loss, and hooks see what the step returned for model 0's share of a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else {"loss": loss, "outputs": self(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if outputs:
            self.log("sum", outputs["outputs"].sum(), on_step=False, on_epoch=True)


class Returning(MLP):
    """Hooks see what the step returned for the whole batch, and all that evaluation has collected."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        outputs = self(batch[0])
        loss = F.mse_loss(outputs, batch[1])
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return {"loss": loss, "outputs": outputs.detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.seen.append(loss)

    def on_validation_epoch_end(self) -> None:
        self.log("seen", torch.stack(self.seen).sum())
        self.seen.clear()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert len(outputs["outputs"]) == 10
        self.log("sum", outputs["outputs"].sum(), on_step=False, on_epoch=True)


class Case(NamedTuple):
    """A training in stages of which some have replicas."""

    replicas: list[int]
    make: Callable[[], Any]
    strategy: dict[str, Any]
    batches: tuple[int, int]  # samples, and how many are a batch
    runs: list[tuple[int, int]]  # epochs and parallel models; the second run resumes after the first epoch
    options: dict[str, Any] = {}
    exact: bool = False
    rel: float = 1e-5  # of what is logged


FIVE: dict[str, Any] = {"num_microbatches": 5, "split_points": ["between.1"]}
ROLLS: dict[str, Any] = {"num_microbatches": 2, "split_points": ["between.1"], "averaging": Averaging(rolling=True)}
DIVIDES = {**ROLLS, "averaging": Averaging(rolling=True, split_batches=True)}
UNTIED, CLIPS = partial(Rolling, tied=False), {"gradient_clip_val": 0.1}
# sums of two terms have the same bits in any order
ROLLING = Case([1, 2], UNTIED, DIVIDES, (36, 8), [(1, 2), (2, 2)], CLIPS, exact=True)
LAST = Case([1, 2], partial(Returning, "adamw"), {"num_microbatches": 5}, (30, 10), [(2, 1)], rel=1e-4)
# the last step of an epoch has a batch for one of two models only
RAGGED = Case([2, 1], partial(Tied, tied=False), ROLLS, (24, 8), [(2, 2)], {"accumulate_grad_batches": 2})
CASES = {
    "rolling models": ROLLING,
    "rolling models, between": ROLLING._replace(
        replicas=[1, 2, 1], strategy={**DIVIDES, "split_points": ["between.1", "last"]}
    ),
    "without a last batch": RAGGED,
    "more models": Case([2, 1], Tied, FIVE, (30, 10), [(1, 1), (2, 2)], CLIPS),
    "of the last stage": LAST,
    "of one stage": LAST._replace(replicas=[3]),
}


def trained(rank: int | None, case: Case, folder: Path) -> Any:
    """What each run leaves and logs, and predictions; in one process if there is no rank."""
    saving, found, replicas = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1), list[Any](), case.replicas
    for epochs, num_pipelines in case.runs:
        torch.manual_seed(9 if rank == 2 and replicas == [2, 1] else 5)  # replicas begin alike
        model = case.make()
        torch.manual_seed(5)
        strategy = {**case.strategy, "num_pipelines": num_pipelines, **({} if rank is None else {"replicas": replicas})}
        devices, options = 1 if rank is None else sum(replicas), {"max_epochs": epochs, "callbacks": [saving]}
        runner = pipeline(len(replicas), devices, strategy, enable_checkpointing=True, **options, **case.options)
        path = folder / "epoch=0.ckpt" if found else None
        runner.fit(model, loader(Tied, *case.batches), loader(Tied, 12, 6), ckpt_path=path)
        found.append((state(model), {name: float(value) for name, value in runner.callback_metrics.items()}))
    return found, runner.predict(model, loader(Tied, 12, 6))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("rolling models", "without a last batch") else pytest.mark.slow) for n in CASES],
)
def test_replicas_of_single_stages_train_resume_log_and_predict_as_one_process(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    expected, predicted = trained(None, case, tmp_path / "one")
    results = processes.each(sum(case.replicas), trained, case, tmp_path / "several", folder=tmp_path)
    for found, _ in results:
        for (weights, metrics), (others, other_metrics) in zip(found, expected, strict=True):
            (assert_equal if case.exact else assert_close)(weights, others)
            assert metrics == pytest.approx(other_metrics, rel=case.rel)
    torch.testing.assert_close(results[0][1], predicted)


def exactly(rank: int) -> Any:
    """The first stage has two replicas, of which one fails in the end."""
    torch.manual_seed(5)
    model, strategy = MLP(), AvgPipeStrategy(num_microbatches=5, replicas=[2, 1])  # else as by default
    trainer(devices=3, strategy=strategy, max_epochs=1, gradient_clip_val=0.1).fit(model, loader(MLP, 30, 10))
    failing = Tied(tied=False)
    if rank == 2:
        failing.first.register_forward_pre_hook(Bomb(3))
    options = {"replicas": [2, 1], "num_microbatches": 5, "split_points": ["between.1"], "timeout": 20}
    with pytest.raises((ValueError, PeerError), match="one group has failed") as caught:
        pipeline(2, 3, options).fit(failing, loader(Tied, 30, 10))
    return state(model), strategy.plan.stages[0].parameters, str(caught.value)


def test_replicas_of_a_stage_take_micro_batches_in_turns_and_a_failure_is_named(tmp_path: Path) -> None:
    results = processes.each(3, exactly, folder=tmp_path)
    torch.manual_seed(5)
    plain = MLP()
    in_turns(plain, list(loader(MLP, 30, 10)), 5, 2, results[0][1])
    for exact, *_ in results:
        assert_equal(exact, state(plain))
    for *_, survivor in results[:2]:
        assert "rank 2 (stage 0, replica 1)" in survivor


# -- and otherwise ---------------------------------------------------------------------------------------------------


def keeping(step: str, position: int) -> CallGraph:
    """A step of two units that adds to a list before a node."""
    nodes = tuple(Node(i, "call", unit, "") for i, unit in enumerate(("first", "last")))
    at = {("", "outputs"): position}
    return CallGraph(step, nodes, (), frozenset(), ("first", "last"), frozenset(), mutated_between=at, reads=at)


def shared(*replicas: int) -> StageMap:
    return StageMap(len(replicas), (tuple(range(sum(replicas))),), stage_replicas=replicas)


@pytest.mark.parametrize(
    ("step", "position", "cuts", "replicas", "is_refused"),
    [
        ("training_step", 2, (1,), (1, 2), True), ("training_step", 0, (1,), (2, 1), True),
        ("validation_step", 0, (1,), (2, 1), True),
        ("training_step", 2, (1,), (2, 1), False),  # one process runs that stage
        ("validation_step", 2, (1,), (1, 2), False),  # evaluation does not share the last stage
        ("validation_step", 0, (), (3,), False),
    ],
)  # fmt: skip
def test_what_a_shared_stage_keeps_for_the_next_micro_batch_is_refused(
    step: str, position: int, cuts: tuple[int, ...], replicas: tuple[int, ...], is_refused: bool
) -> None:
    message = f"{step} keeps 'outputs' for the next micro-batch"
    with pytest.raises(PartitionError, match=message) if is_refused else contextlib.nullcontext():
        check_shared(keeping(step, position), cuts, shared(*replicas))
