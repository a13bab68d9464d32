"""Measure what each part of PipeTransformer gives when a model is fine-tuned and its layers freeze, in two processes.

    python benchmarks/freezing.py             # examples/finetune.py, several seeds
    python benchmarks/freezing.py --quick     # fewer pictures, one seed

The variants take turns, each in a run of its own. Seconds are those of ``trainer.fit`` from the first batch on, with
all planning. CPU seconds are those of both processes; other work on the machine disturbs them less. The accuracy is
that of the validation at the end. Variants that freeze must end with the same weights.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "examples")]

from finetune import FineTuning, Stripes  # noqa: E402

from benchmarks.harness import launch, parser, quiet_trainer, table, write  # noqa: E402
from lightning_avgpipe import AdaptiveFreezing, AvgPipeStrategy  # noqa: E402

# options of the callback; None: no layer is frozen
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain pipeline": None,
    "freezing alone": {},
    "and planned again": {"replan": True},
    "and freed devices": {"freed": "replicas"},
    "kept outputs": {"cache": "1GB"},
}
PROCESSES, SEEDS = 2, 3
FULL = {"epochs": 12, "layers": 8, "pictures": 512, "pretraining": 200}
QUICK = {"epochs": 8, "layers": 4, "pictures": 128, "pretraining": 10}
_ROUNDING = 1e-4  # of the sum of all weights
PAPER = (
    "PipeTransformer (He et al., ICML 2021): freezing alone 0.95x, without AutoDP 1.26x, without the cache 2.27x, all "
    "of it 2.83x. AutoPipe (fewer stages) and AutoDP (freed devices become replicas) are here 'and freed devices'."
)


class Clock(L.Callback):
    """Seconds of training, of this process's work, and of each epoch."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.begin, self.cpu, self.epochs = time.perf_counter(), time.process_time(), []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.epoch = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs.append(time.perf_counter() - self.epoch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.seconds, self.cpu = time.perf_counter() - self.begin, time.process_time() - self.cpu


def train(variant: str, seed: int, epochs: int, layers: int, pictures: int, pretraining: int) -> dict[str, Any]:
    """In each process: train a variant."""
    L.seed_everything(seed, verbose=False)
    options, clock = VARIANTS[variant], Clock()
    callbacks: list[L.Callback] = [clock]
    if options is not None:
        callbacks.append(AdaptiveFreezing(alpha=1 / 3, every_n_epochs=1, **options))
    trainer = quiet_trainer(
        strategy=AvgPipeStrategy(num_microbatches=4), devices=PROCESSES, max_epochs=epochs,
        check_val_every_n_epoch=epochs, num_sanity_val_steps=0, callbacks=callbacks,
    )  # fmt: skip
    model = FineTuning(layers=layers, width=96, pretraining_steps=pretraining)
    trainer.fit(model, Stripes(train=pictures, val=pictures // 2, batch_size=32))
    accuracy = trainer.callback_metrics.get("val_accuracy")
    return {
        "seconds": clock.seconds, "cpu": clock.cpu, "epochs": clock.epochs,
        "accuracy": None if accuracy is None else float(accuracy),
        "weights": sum(float(p.detach().double().abs().sum()) for p in model.parameters()),
    }  # fmt: skip


def measure(variant: str, seed: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Run a variant in processes of its own."""
    first, second = launch(train, (variant, seed, *sizes.values()), PROCESSES, limit_s=1800.0)
    return {**first, "cpu": first["cpu"] + second["cpu"], "variant": variant, "seed": seed}


def compared(rows: list[dict[str, Any]]) -> str:
    """The variants, beside the first."""
    seeds = sorted({row["seed"] for row in rows})
    by = {(row["variant"], row["seed"]): row for row in rows}
    lines = []
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own, plain = [by[variant, s] for s in seeds], [by[rows[0]["variant"], s] for s in seeds]
        cells = []
        for key in ("seconds", "cpu"):
            gain = statistics.median(p[key] / o[key] for p, o in zip(plain, own, strict=True))
            cells += [f"{statistics.median(o[key] for o in own):.1f}", f"{gain:.2f}x"]
        last = statistics.median(o["epochs"][-1] for o in own)
        lines.append((variant, *cells, f"{last:.2f} s", " ".join(f"{o['accuracy']:.3f}" for o in own)))
    return table(["", "seconds", "gain", "CPU seconds", "gain of CPU", "last epoch", "accuracy"], lines)


def check(rows: list[dict[str, Any]]) -> None:
    """Check the weights of variants with the same seed.

    Raises:
        SystemExit: variants that freeze the same end with other weights.
    """
    how = {row["variant"]: VARIANTS[row["variant"]] for row in rows}
    frozen = [row["weights"] for row in rows if (given := how[row["variant"]]) is not None and "freed" not in given]
    shared = [row["weights"] for row in rows if "freed" in (how[row["variant"]] or {})]
    # replicas sum gradients in another order
    if len({*frozen}) != 1 or max(abs(weights / frozen[0] - 1) for weights in shared) > _ROUNDING:
        raise SystemExit(f"variants that freeze the same end with other weights: {frozen}, {shared}")


def main() -> None:
    options = parser(__doc__, quick="fewer pictures, one seed").parse_args()
    sizes, seeds = (QUICK, 1) if options.quick else (FULL, SEEDS)
    rows = []
    for seed in range(seeds):
        for variant in VARIANTS:
            rows.append(measure(variant, seed, sizes))
            print(f"seed {seed}: {variant}: {rows[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
        check([row for row in rows if row["seed"] == seed])
    print(f"{compared(rows)}\n\n{PAPER}")
    write(options, rows)


if __name__ == "__main__":
    main()
