"""Does the tuner find the fastest setting, and how much sooner than trying them all? Predictors and rules of thumb.

    python benchmarks/tuning.py                             # a quarter of an hour on two idle cores; links need root
    python benchmarks/tuning.py --workloads lstm --megabits 0 --json lstm.json
    python benchmarks/tuning.py --show lstm.json --picture lstm.png

Three models, each trained in two processes over links of two rates. In one run, ``AvgPipeTuner`` first profiles as it
always does. Then the traversal: every setting (M, N, advance) that fits the memory trains for about ten batches after
one iteration that is not counted, in several rounds, each in another order. What a round takes is what a traversal
costs; the best setting is the one with the shortest median over the rounds.

From the profile each predictor chooses; so do two rules of thumb, with 1F1B: ``max-num``, as many pipelines as the
memory allows at the default number of micro-batches, and ``max-size``, micro-batches as large as the memory allows and
then as many pipelines. Regret is how much longer than the best setting's the measured time per batch of the choice is;
rank correlation (Spearman) is that of all predictions with the measurements. The memory is a share of what the
hungriest setting needs, so that not everything fits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
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

from benchmarks import network
from benchmarks.harness import TIMEOUT, add_options, launch, quiet_trainer, write
from benchmarks.models import LanguageModel, Size, loss_of
from lightning_avgpipe import AvgPipeStrategy, AvgPipeTuner
from lightning_avgpipe.tuning import PREDICTORS, Profile, Setting, candidates, search
from lightning_avgpipe.tuning.predictors import calibrated
from lightning_avgpipe.tuning.scaling import memory_at

NUM_STAGES = 2
FREE = 0  # megabits per second of loopback: no limit
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
        search_s: seconds of all predictions; None for a rule.
    """

    by: str
    setting: Setting
    regret: float
    rank_correlation: float | None = None
    mean_error: float | None = None
    search_s: float | None = None


def within(profile: Profile, settings: Sequence[Setting], share: float) -> list[Setting]:
    """Settings whose fullest stage needs at most this share of what the hungriest one's does."""
    needs = [max(needed.total for needed in memory_at(profile, setting)) for setting in settings]
    return [setting for setting, need in zip(settings, needs, strict=True) if need <= share * max(needs)]


def choices(profile: Profile, measured: dict[Setting, float]) -> list[Choice]:
    """Of all predictors and rules.

    Args:
        profile: that they know.
        measured: seconds per batch of all settings that fit.
    """
    best, settings = min(measured.values()), list(measured)
    found = []
    for predictor in PREDICTORS.values():
        begin = time.perf_counter()
        chosen = search(profile, settings, None, predictor).choice.setting
        search_s = time.perf_counter() - begin
        known = calibrated(predictor, profile)
        predicted = [known.predict(profile, setting).per_batch_s for setting in settings]
        correlation = statistics.correlation(ranks(predicted), ranks(list(measured.values())))
        errors = [abs(p / measured[s] - 1) for p, s in zip(predicted, settings, strict=True)]
        regret = measured[chosen] / best - 1
        found.append(Choice(predictor.name, chosen, regret, correlation, statistics.mean(errors), search_s))
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
    """

    def __init__(self, tuner: AvgPipeTuner, options: argparse.Namespace) -> None:
        self.tuner, self.options = tuner, options
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
            if len(self.rounds_s) > self.options.rounds:
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
        profile = self.tuner.result.profile
        settings = candidates(profile, self.options.pipelines, self.options.microbatches, self.options.advances)
        fitting = within(profile, settings, self.options.memory_share)
        return random.Random(len(self.rounds_s)).sample(fitting, len(fitting))


def work(options: argparse.Namespace) -> None:
    """What each process does; rank 0 writes the results."""
    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "TORCHELASTIC_RUN_ID": "benchmark"}  # who starts processes: not us
    torch.manual_seed(0)
    workload = WORKLOADS[options.workloads[0]]
    with tempfile.TemporaryDirectory() as folder:
        tuner = AvgPipeTuner(options.pipelines, options.microbatches, samples_factor=1, dirpath=folder)
        traversal = Traversal(tuner, options)
        trainer = quiet_trainer(
            devices=NUM_STAGES,
            callbacks=[tuner, traversal],
            strategy=AvgPipeStrategy(split_points=[f"model.{workload.split_point}"], timeout=TIMEOUT),
        )
        trainer.fit(Module(workload), DataLoader(Repeated(workload, options.batch_size), batch_size=None))
    if trainer.global_rank == 0:
        options.result.write_text(json.dumps(found_by(traversal)))


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
        "profile": json.loads(profile.to_json()),
    }


# -- the parent ------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per workload and link, then a line per choice."""
    lines = []
    for row in rows:
        best = min(row["settings"], key=lambda s: s["per_batch_s"])
        link = f"{row['megabits']} Mbit/s" if row["megabits"] != FREE else "free links"
        lines.append(
            f"{row['workload']}, {link}: best of {len(row['settings'])} {_name(best)} with "
            f"{best['per_batch_s'] * 1e3:.1f} ms a batch; traversal {row['traversal_s']:.0f} s, "
            f"tuning {row['tuning_s']:.1f} s ({row['tuning_s'] / row['traversal_s']:.1%})"
        )
        lines.append("  chosen by                        M  N  h   regret   rank correlation   error   search")
        for choice in row["choices"]:
            setting = choice["setting"]
            lines.append(
                f"  {choice['by']:31s} {setting['num_microbatches']:2d} {setting['num_pipelines']:2d} "
                f"{setting['advance']:2d} {choice['regret']:8.1%}" + _quality(choice)
            )
    return "\n".join(lines)


def _quality(choice: dict[str, Any]) -> str:
    if choice["rank_correlation"] is None:
        return ""
    return f"{choice['rank_correlation']:+19.2f} {choice['mean_error']:7.0%} {choice['search_s']:6.2f} s"


def _name(setting: dict[str, Any]) -> str:
    return f"M={setting['num_microbatches']} N={setting['num_pipelines']} h={setting['advance']}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Over all workloads and links."""
    lines = ["over all                         mean regret    worst   mean rank correlation"]
    for by in dict.fromkeys(choice["by"] for row in rows for choice in row["choices"]):
        here = [choice for row in rows for choice in row["choices"] if choice["by"] == by]
        regrets = [choice["regret"] for choice in here]
        known = [choice["rank_correlation"] for choice in here if choice["rank_correlation"] is not None]
        correlation = f"{statistics.mean(known):+23.2f}" if known else ""
        lines.append(f"{by:31s} {statistics.mean(regrets):12.1%} {max(regrets):8.1%} {correlation}")
    shares = [row["tuning_s"] / row["traversal_s"] for row in rows]
    lines.append(f"tuning takes {min(shares):.1%} to {max(shares):.1%} of a traversal")
    return "\n".join(lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel per workload and link: predicted over measured milliseconds per batch, and what was chosen."""
    from matplotlib.figure import Figure

    columns = min(len(rows), 3)
    height = math.ceil(len(rows) / columns)
    figure = Figure(figsize=(4.2 * columns, 3.8 * height), layout="constrained")
    for axes, row in zip(figure.subplots(height, columns, squeeze=False).flat, rows, strict=False):
        profile = Profile.from_json(json.dumps(row["profile"]))
        measured = {_setting(s): s["per_batch_s"] * 1e3 for s in row["settings"]}
        for name, colour in (("paper", "#c0504d"), ("corrected", "#5fa65a"), ("simulator", "#4c84c4")):
            known = calibrated(PREDICTORS[name], profile)
            predicted = [known.predict(profile, s).per_batch_s * 1e3 for s in measured]
            axes.scatter(measured.values(), predicted, s=9, color=colour, label=name, alpha=0.7)
        for choice, marker in (("max-num", "^"), ("max-size", "v")):
            (found,) = (c["setting"] for c in row["choices"] if c["by"] == choice)
            axes.axvline(measured[_setting(found)], color="grey", linewidth=0.8, linestyle=":")
            axes.plot(measured[_setting(found)], axes.get_ylim()[0], marker, color="grey", label=choice)
        axes.axline((min(measured.values()),) * 2, slope=1, color="black", linewidth=0.6)
        axes.set_title(f"{row['workload']}, {row['megabits'] or 'free'}{' Mbit/s' * bool(row['megabits'])}")
        axes.set_xlabel("measured ms per batch")
        axes.set_ylabel("predicted ms per batch")
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def _setting(row: dict[str, Any]) -> Setting:
    return Setting(**{name: row[name] for name in ("num_microbatches", "num_pipelines", "advance", "schedule")})


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    result.add_argument("--workloads", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS))
    result.add_argument("--megabits", type=int, nargs="+", default=[FREE, 100], help="of each link; 0: not limited")
    result.add_argument("--batch-size", type=int, default=32)
    result.add_argument("--pipelines", type=int, default=4, help="largest N")
    result.add_argument("--microbatches", type=int, nargs="+", help="every M; default: as the tuner's")
    result.add_argument("--advances", type=int, nargs="+", default=[0, 2], help="every h")
    result.add_argument("--memory-share", type=float, default=0.3, help="of what the hungriest setting needs")
    result.add_argument("--rounds", type=int, default=2, help="visits of each setting")
    result.add_argument("--show", type=Path, nargs="+", metavar="JSON", help="measure nothing: results of earlier runs")
    result.add_argument("--picture", type=Path)
    add_options(result, 900.0, "workload and link")
    return result


def main(arguments: Sequence[str]) -> None:
    options = parser().parse_args(arguments)
    if options.result is not None:
        work(options)
        return
    if options.show is not None:
        rows = [row for path in options.show for row in json.loads(path.read_text())["rows"]]
        print(table(rows))
    else:
        rows = measure(arguments, options)
    print(summary(rows))
    if options.picture is not None:
        draw(rows, options.picture)


def measure(arguments: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row per workload and link."""
    if any(megabits != FREE for megabits in options.megabits) and not network.available():
        raise SystemExit("slow links are network namespaces, which need root, ip and tc; --megabits 0 goes without")
    rows = []
    for workload, megabits in itertools.product(options.workloads, options.megabits):
        more = ["--workloads", workload]
        found = launch(__file__, [*arguments, *more], NUM_STAGES, megabits or None, options.limit_s)
        rows.append({"workload": workload, "megabits": megabits, **found})
        print(table(rows[-1:]), flush=True)
        about = {"cores": os.cpu_count(), "torch": torch.__version__, "batch_size": options.batch_size}
        write(options, {**about, "rows": rows})
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
