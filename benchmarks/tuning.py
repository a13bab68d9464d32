"""Does the tuner find the fastest setting, and how much sooner than trying them all? Predictors and rules of thumb.

    python benchmarks/tuning.py                             # a quarter of an hour on two idle cores; links need root
    python benchmarks/tuning.py --workloads lstm --megabits 0

Three models, each trained in two processes over links of two rates. In one run, ``AvgPipeTuner`` first profiles as it
always does. Then the traversal: every setting (M, N, advance) that fits the memory trains for about ten batches after
one iteration that is not counted, in several rounds, each in another order. What a round takes is what a traversal
costs; the best setting is the one with the shortest median over the rounds.

From the profile the tuner's predictor, a simulator, chooses; so do the equations of AvgPipe's paper as printed, and
two rules of thumb, with 1F1B: ``max-num``, as many pipelines as the memory allows at the default number of
micro-batches, and ``max-size``, micro-batches as large as the memory allows and then as many pipelines. Regret is
how much longer than the best setting's the measured time per batch of the choice is; rank correlation (Spearman) is
that of all predictions with the measurements. The memory is a share of what the hungriest setting needs, so that not
everything fits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import harness
from benchmarks.harness import TIMEOUT, launch, quiet_trainer
from benchmarks.models import LanguageModel, Size, loss_of
from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner
from lightning_avgpipe.tuning.predictors import Predictor, memory_at
from lightning_avgpipe.tuning.profile import Profile, Setting, to_json
from lightning_avgpipe.tuning.search import candidates

NUM_STAGES = 2
FREE = 0  # megabits per second of loopback: no limit
BATCH_SIZE = 32
ADVANCES, ROUNDS = (0, 2), 2  # every h; visits of each setting
_TRAVERSED = 10  # batches of each setting


# -- models ----------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    """Convolutions: large messages for their arithmetic."""

    def __init__(self, width: int = 24, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = x + F.relu(block(x))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class Recurrent(nn.Module):
    """A language model of two LSTMs: many small operations, one after another."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        logits: Tensor = self.head(x)
        return logits


def _tokens(length: int) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (torch.randint(256, (length,)), torch.randint(256, (length,)))


@dataclass(frozen=True)
class Workload:
    """A model, where its last stage begins, and one sample."""

    model: Callable[[], nn.Module]
    split_point: str
    sample: Callable[[], tuple[Tensor, Tensor]]


WORKLOADS = {
    "transformer": Workload(
        lambda: LanguageModel(Size(width=96, layers=4, samples=1, length=32)), "blocks.2", _tokens(32)
    ),
    "lstm": Workload(Recurrent, "layers.1", _tokens(32)),
    "convolution": Workload(Classifier, "blocks.4", lambda: (torch.randn(3, 16, 16), torch.randint(10, ()))),
}


class Module(L.LightningModule):
    """A workload as a user writes it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        logits = self.model(inputs)
        return loss_of(logits, targets) if logits.dim() == 3 else F.cross_entropy(logits, targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Repeated(IterableDataset):
    """The same batch for ever."""

    def __init__(self, workload: Workload, batch_size: int) -> None:
        generated = [workload.sample() for _ in range(batch_size)]
        self.batch = tuple(torch.stack(parts) for parts in zip(*generated, strict=True))

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.batch


# -- the paper's equations -------------------------------------------------------------------------------------------


def printed_per_batch_s(profile: Profile, setting: Setting) -> float:
    """Equations 2, 4, 6 and 7 of the paper as printed, for the slowest stage.

    These equations have errors. Equation 2 gives the computation of one batch and equation 4 the communication of an
    iteration with N batches, so that communication per batch grows with N, and both are added. The schedule has no
    influence, and forwards and backwards are not distinguished, nor are both directions of a link. The time of a link
    includes the latency of every message, though latencies overlap. The end of an iteration is left out. As equation 2
    is for a batch, the sum is taken as the time per batch.

    Source: Chen et al., AvgPipe, PPoPP 2023, section 5.
    """
    m, stages = setting.num_microbatches, range(profile.num_stages)
    compute = [_printed_compute_s(profile, k, setting) for k in stages]
    messages = [setting.num_pipelines * _printed_communication_s(profile, k) for k in stages]
    each = [(g + c) / m for g, c in zip(compute, messages, strict=True)]
    exposed = [c / m + (m - 1) / m * max(c - g, 0.0) for g, c in zip(compute, messages, strict=True)]
    return max(compute[k] + exposed[k] + sum(each[:k]) + sum(each[k + 1 :]) for k in stages)


def _printed_compute_s(profile: Profile, stage: int, setting: Setting) -> float:
    """The computation of a batch by equation 2, with forward and backward as one curve."""
    demand = profile.num_microbatches * setting.num_pipelines / setting.num_microbatches
    curves = profile.stages[stage].forward, profile.stages[stage].backward
    return profile.num_microbatches / demand * sum(curve.stretched(demand).total_s for curve in curves)


def _printed_communication_s(profile: Profile, stage: int) -> float:
    """What a stage sends in an iteration of the profile, by equation 4."""
    seconds = 0.0
    if stage < profile.num_stages - 1:
        hop = profile.hops[stage]
        seconds += hop.forward_bytes * hop.link.per_byte + hop.link.latency
    if stage > 0:
        hop = profile.hops[stage - 1]
        seconds += hop.backward_bytes * hop.link.per_byte + hop.link.latency
    return profile.num_microbatches * seconds


# -- rules and choices -------------------------------------------------------------------------------------------------


def default_microbatches(batch_size: int) -> int:
    """What the strategy takes without being told."""
    return min(4 * NUM_STAGES, batch_size)


def max_num(fitting: Sequence[Setting], batch_size: int) -> Setting:
    """As many pipelines as fit, at the default M or the one next to it that fits."""
    default = math.log(default_microbatches(batch_size))
    nearest = min({s.num_microbatches for s in fitting}, key=lambda m: abs(math.log(m) - default))
    return max((s for s in fitting if s.num_microbatches == nearest), key=lambda s: (s.num_pipelines, -s.advance))


def max_size(fitting: Sequence[Setting]) -> Setting:
    """Micro-batches as large as fit, then as many pipelines."""
    return min(fitting, key=lambda s: (s.num_microbatches, -s.num_pipelines, s.advance))


@dataclass(frozen=True)
class Choice:
    """What a predictor or a rule chooses, and how good that is.

    Attributes:
        by: its name.
        setting: M, N, advance.
        regret: measured time per batch over that of the best setting, minus 1.
        rank_correlation: of all predictions; None for a rule.
        mean_error: of all predictions, relative; None for a rule.
        seconds: seconds of all predictions; None for a rule.
    """

    by: str
    setting: Setting
    regret: float
    rank_correlation: float | None = None
    mean_error: float | None = None
    seconds: float | None = None


def within(profile: Profile, settings: Sequence[Setting], share: float) -> list[Setting]:
    """Settings whose fullest stage needs at most this share of what the hungriest one's does."""
    needs = [max(needed.total for needed in memory_at(profile, setting)) for setting in settings]
    return [setting for setting, need in zip(settings, needs, strict=True) if need <= share * max(needs)]


def choices(profile: Profile, measured: dict[Setting, float]) -> list[Choice]:
    """Of the predictor, the paper's equations and the rules.

    Args:
        profile: that they know.
        measured: seconds per batch of all settings that fit.
    """
    best, settings = min(measured.values()), list(measured)
    found = []
    predictor = Predictor(profile)
    ways: dict[str, Callable[[Setting], float]] = {
        "paper": lambda setting: printed_per_batch_s(profile, setting),
        "simulator": lambda setting: predictor.predict(setting).per_batch_s,
    }
    for name, per_batch_s in ways.items():
        begin = time.perf_counter()
        predicted = list(map(per_batch_s, settings))
        took_s = time.perf_counter() - begin
        chosen = settings[predicted.index(min(predicted))]
        correlation = statistics.correlation(ranks(predicted), ranks(list(measured.values())))
        errors = [abs(p / measured[s] - 1) for p, s in zip(predicted, settings, strict=True)]
        found.append(Choice(name, chosen, measured[chosen] / best - 1, correlation, statistics.mean(errors), took_s))
    for name, setting in (("max-num", max_num(settings, profile.batch_size)), ("max-size", max_size(settings))):
        found.append(Choice(name, setting, measured[setting] / best - 1))
    return found


def ranks(values: Sequence[float]) -> list[float]:
    """Mean rank among equals; Python 3.11 has no rank correlation."""
    return [sum(v < value for v in values) + sum(v == value for v in values) / 2 for value in values]


# -- one process per stage -------------------------------------------------------------------------------------------


@dataclass
class Visit:
    """Of a setting: when its iterations ended, and how many are wanted; the first one is not counted."""

    setting: Setting
    ends_s: list[float] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return len(self.ends_s) > math.ceil(_TRAVERSED / self.setting.num_pipelines)

    @property
    def per_batch_s(self) -> float:
        return (self.ends_s[-1] - self.ends_s[0]) / (len(self.ends_s) - 1) / self.setting.num_pipelines


class Traversal(Callback):
    """After the tuner, trains with every setting.

    Attributes:
        tuning_s: from the beginning of training until its first batch.
        rounds_s: what each round took.
        visits: all of them.

    Args:
        tuner: the tuner.
        rounds: how often each setting is visited.
        settings: function that returns the settings for the tuner's profile.
    """

    def __init__(self, tuner: AvgPipeTuner, rounds: int, settings: Callable[[Profile], Sequence[Setting]]) -> None:
        self.tuner, self.rounds, self.settings = tuner, rounds, settings
        self.tuning_s, self.rounds_s = math.nan, []  # type: ignore[var-annotated]
        self.visits: list[Visit] = []
        self._begin = 0.0
        self._left: list[Setting] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.tuning_s = time.perf_counter() - self._begin

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self.visits:
            self.visits[-1].ends_s.append(now)
            if not self.visits[-1].is_over:
                return
        if not self._left:
            self.rounds_s.append(now - self._begin)
            self._begin = now
            if len(self.rounds_s) > self.rounds:
                trainer.should_stop = True
                return
            self._left = self._order()
        setting = self._left.pop()
        self.visits.append(Visit(setting))
        assert isinstance(trainer.strategy, AvgPipeStrategy)
        trainer.strategy.reconfigure(setting.num_pipelines, setting.num_microbatches, setting.advance)

    def _order(self) -> list[Setting]:
        """The settings of a round, in an order of its own, which is the same on every rank."""
        assert self.tuner.result is not None
        settings = self.settings(self.tuner.result.profile)
        return random.Random(len(self.rounds_s)).sample(settings, len(settings))


def measure(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """In each process: tune and traverse the settings of a workload; on rank 0 what was found."""
    torch.manual_seed(0)
    workload, batch_size, rounds = WORKLOADS[name], *((4, 1) if options.quick else (BATCH_SIZE, ROUNDS))

    def settings(profile: Profile) -> list[Setting]:
        advances = (0,) if options.quick else ADVANCES
        every = candidates(profile, options.pipelines, options.microbatches, advances)
        return within(profile, every, options.memory_share)

    with tempfile.TemporaryDirectory() as folder:
        tuner = AvgPipeTuner(options.pipelines, options.microbatches, samples_factor=1, dirpath=folder)
        traversal = Traversal(tuner, rounds, settings)
        strategy = AvgPipeStrategy(split_points=[f"model.{workload.split_point}"], timeout=TIMEOUT)
        trainer = quiet_trainer(devices=NUM_STAGES, callbacks=[tuner, traversal], strategy=strategy)
        trainer.fit(Module(workload), DataLoader(Repeated(workload, batch_size), batch_size=None))
    return found_by(traversal) if trainer.global_rank == 0 else None


def found_by(traversal: Traversal) -> dict[str, Any]:
    """All that was measured, and who would have chosen what."""
    assert traversal.tuner.result is not None
    profile = traversal.tuner.result.profile
    rounds: dict[Setting, list[float]] = {}
    for visit in traversal.visits:
        rounds.setdefault(visit.setting, []).append(visit.per_batch_s)
    measured = {setting: statistics.median(seconds) for setting, seconds in sorted(rounds.items())}
    return {
        "tuning_s": traversal.tuning_s,
        "traversal_s": statistics.median(traversal.rounds_s[1:]),  # the first one ends when the tuner's choice has run
        "settings": [{**asdict(s), "per_batch_s": measured[s], "rounds_s": rounds[s]} for s in measured],
        "choices": [asdict(choice) for choice in choices(profile, measured)],
        "profile": json.loads(to_json(profile)),
    }


# -- the parent ------------------------------------------------------------------------------------------------------


def described(row: dict[str, Any]) -> str:
    """What was found of a workload on a link, with a line per choice."""
    best, seconds = min(row["settings"], key=lambda s: s["per_batch_s"]), row["traversal_s"]
    link = f"{row['megabits']} Mbit/s" if row["megabits"] != FREE else "free links"
    title = (
        f"{row['workload']}, {link}: best of {len(row['settings'])} {_name(best)} with "
        f"{best['per_batch_s'] * 1e3:.1f} ms a batch; traversal {seconds:.0f} s, tuning {row['tuning_s']:.1f} s "
        f"({row['tuning_s'] / seconds:.1%})"
    )
    lines = [
        (choice["by"], _name(choice["setting"]), f"{choice['regret']:.1%}", _shown(choice["rank_correlation"], "+.2f"),
         _shown(choice["mean_error"], ".0%"), _shown(choice["seconds"], ".2f"))
        for choice in row["choices"]
    ]  # fmt: skip
    head = ["chosen by", "setting", "regret", "rank correlation", "error", "seconds"]
    return f"{title}\n\n{harness.table(head, lines)}\n"


def _shown(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


def _name(setting: dict[str, Any]) -> str:
    return f"M={setting['num_microbatches']} N={setting['num_pipelines']} h={setting['advance']}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Over all workloads and links."""
    lines = []
    for by in dict.fromkeys(choice["by"] for row in rows for choice in row["choices"]):
        here = [choice for row in rows for choice in row["choices"] if choice["by"] == by]
        regrets = [choice["regret"] for choice in here]
        known = [choice["rank_correlation"] for choice in here if choice["rank_correlation"] is not None]
        correlation = _shown(statistics.mean(known) if known else None, "+.2f")
        lines.append((by, f"{statistics.mean(regrets):.1%}", f"{max(regrets):.1%}", correlation))
    shares = [row["tuning_s"] / row["traversal_s"] for row in rows]
    found = harness.table(["over all", "mean regret", "worst", "mean rank correlation"], lines)
    return f"{found}\n\ntuning takes {min(shares):.1%} to {max(shares):.1%} of a traversal"


def main() -> None:
    arguments = harness.parser(__doc__, quick="batches of four samples, no advance, one round")
    arguments.add_argument("--workloads", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS))
    arguments.add_argument("--megabits", type=int, nargs="+", default=[FREE, 100], help="of each link; 0: not limited")
    arguments.add_argument("--pipelines", type=int, default=4, help="largest N")
    arguments.add_argument("--microbatches", type=int, nargs="+", help="every M; default: as the tuner's")
    arguments.add_argument("--memory-share", type=float, default=0.3, help="of what the hungriest setting needs")
    options = arguments.parse_args()
    rows = []
    for workload, megabits in itertools.product(options.workloads, options.megabits):
        found = launch(measure, (workload, options), NUM_STAGES, megabits or None)[0]
        rows.append({"workload": workload, "megabits": megabits, **found})
        print(described(rows[-1]), flush=True)
        harness.write(options, {"rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
