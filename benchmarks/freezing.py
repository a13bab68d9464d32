"""Fine-tuning with layers that freeze: what each part of PipeTransformer gives, in two processes.

    python benchmarks/freezing.py             # examples/finetune.py, several seeds
    python benchmarks/freezing.py --quick     # fewer pictures, one seed

Each variant is a run of its own, in turn, with the default launcher. Seconds are those of ``trainer.fit`` from the
first batch on, with all planning; CPU seconds are those of both processes, which other work on the machine disturbs
less. The accuracy is that of the validation at the end. Variants that freeze must end with the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "examples")]

from finetune import FineTuning, Stripes  # noqa: E402

from benchmarks.harness import quiet_trainer  # noqa: E402
from lightning_avgpipe import AdaptiveFreezing, AvgPipeStrategy  # noqa: E402

__all__ = ["VARIANTS", "table"]

# options of the callback; None: no layer is frozen
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain pipeline": None,
    "freezing alone": {},
    "and planned again": {"replan": True},
    "and freed devices": {"freed": "replicas"},
    "kept outputs": {"cache": "1GB"},
}
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


def train(args: argparse.Namespace) -> None:
    """One variant, in each of the processes that Lightning starts."""
    torch.set_num_threads(1)
    L.seed_everything(args.seed, verbose=False)
    options, clock = VARIANTS[args.variant], Clock()
    callbacks: list[L.Callback] = [clock]
    if options is not None:
        callbacks.append(AdaptiveFreezing(alpha=args.alpha, every_n_epochs=args.every, **options))
    trainer = quiet_trainer(
        strategy=AvgPipeStrategy(num_microbatches=args.microbatches),
        devices=2,
        max_epochs=args.epochs,
        check_val_every_n_epoch=args.epochs,
        num_sanity_val_steps=0,
        callbacks=callbacks,
    )
    model = FineTuning(layers=args.layers, width=args.width, pretraining_steps=args.pretraining)
    trainer.fit(model, Stripes(train=args.pictures, val=args.pictures // 2, batch_size=args.batch))
    accuracy = trainer.callback_metrics.get("val_accuracy")
    found = {
        "seconds": clock.seconds, "cpu": clock.cpu, "epochs": clock.epochs,
        "accuracy": None if accuracy is None else float(accuracy),
        "weights": sum(float(p.detach().double().abs().sum()) for p in model.parameters()),
    }  # fmt: skip
    Path(args.result, f"{trainer.global_rank}.json").write_text(json.dumps(found))


def measure(variant: str, seed: int, arguments: list[str], limit_s: float) -> dict[str, Any]:
    """Run a variant in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *arguments, "--variant", variant, "--seed", str(seed), "--result", folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, env=environment)
        if done.returncode:
            raise SystemExit(f"{variant} failed:\n{done.stderr[-4000:]}")
        first, second = (json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2))
    return {**first, "cpu": first["cpu"] + second["cpu"], "variant": variant, "seed": seed}


def table(rows: list[dict[str, Any]]) -> str:
    """The variants, beside the first."""
    seeds = sorted({row["seed"] for row in rows})
    by = {(row["variant"], row["seed"]): row for row in rows}
    lines = [f"{'':20}{'seconds':>9}{'':8}{'CPU s':>9}{'':8}{'last epoch':>12}  accuracy"]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        own, plain = [by[variant, s] for s in seeds], [by[rows[0]["variant"], s] for s in seeds]
        cells = ""
        for key in ("seconds", "cpu"):
            gain = statistics.median(p[key] / o[key] for p, o in zip(plain, own, strict=True))
            cells += f"{statistics.median(o[key] for o in own):9.1f}{gain:7.2f}x"
        last = statistics.median(o["epochs"][-1] for o in own)
        accuracies = " ".join(f"{o['accuracy']:.3f}" for o in own)
        lines.append(f"{variant:20}{cells}{last:11.2f}s  {accuracies}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--every", type=int, default=1, help="epochs from one step of freezing to the next")
    parser.add_argument("--alpha", type=float, default=1 / 3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--pictures", type=int, default=512)
    parser.add_argument("--pretraining", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=1800, help="for each run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.epochs, args.layers, args.pictures, args.pretraining = 1, 8, 4, 128, 10
    if args.variant:
        train(args)
        return
    rows = []
    arguments = [a for a in sys.argv[1:] if a != f"--json={args.json}"]
    for seed in range(args.seeds):
        for variant in VARIANTS:
            rows.append(measure(variant, seed, arguments, args.limit_s))
            print(f"seed {seed}: {variant}: {rows[-1]['seconds']:.1f} s", file=sys.stderr, flush=True)
        options = {row["variant"]: VARIANTS[row["variant"]] for row in rows}
        found = {row["variant"]: row["weights"] for row in rows if row["seed"] == seed}
        freed = {name: (given or {}).get("freed") for name, given in options.items() if given is not None}
        frozen = [found[name] for name, how in freed.items() if how is None]
        shared = [found[name] for name, how in freed.items() if how is not None]
        # replicas sum gradients in another order
        if len({*frozen}) != 1 or max(abs(weights / frozen[0] - 1) for weights in shared) > _ROUNDING:
            raise SystemExit(f"variants that freeze the same end with other weights: {frozen}, {shared}")
    print(table(rows))
    print(f"\n{PAPER}")
    if args.json is not None:
        args.json.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
