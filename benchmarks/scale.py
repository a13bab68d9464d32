"""Should I use this? Simulated training of GPT models on 8 to 1,024 devices that one kind of link joins.

    python benchmarks/scale.py                                   # some minutes; no torch, no device
    python benchmarks/scale.py --models 6.7B --json scale.json --picture scale.png

For each model, number of devices and link the fastest way of each kind that fits the memory:

- ``ddp``: a replica on each device, whose all-reduce runs beside the backward of the last micro-batch;
- ``fsdp``: everything sharded over all devices; weights are gathered twice and gradients scattered once in each
  micro-batch, beside the computing;
- ``1f1b`` and ``advance``: K stages times r replicas, 1F1B or the advance that is fastest; each stage is all-reduced;
- ``avgpipe``: the same with two parallel models in the stages, each on batches of its own.

Time counts per batch; parallel models need more samples to the same loss, and their time is multiplied by
``--samples-factor`` (1.2; 0.9 to 1.6 were measured with two small models, see docs/parallel_pipelines.md).

Models are those of Brown et al., 2020, Table 2.1, with 2,048 tokens. A layer of width h takes ``24 s h^2 + 4 s^2 h``
operations forwards and twice as many backwards, and once more forwards where only its input is kept (Narayanan et al.,
SC 2021). A device reaches 140 of 312 Tflop/s and has 80 GB; weights, gradients and states of Adam in mixed precision
take 16 bytes a parameter, values and gradients on links 2. Every device has a link of its own in each direction.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_avgpipe.schedule import Schedule, StageCosts, build, simulate

FLOPS, MEMORY, TOKENS, VOCABULARY = 140e12, 80e9, 2048, 50_257
STATE_BYTES, VALUE_BYTES, KEPT_BYTES = 16, 2, 34  # a parameter; an entry; and of a layer's activations per entry
LATENCY_S = 20e-6
DEVICES = tuple(8 * 2**i for i in range(8))
LINKS = {"1 Gbit/s": 1, "10 Gbit/s": 10, "25 Gbit/s": 25, "100 Gbit/s": 100, "PCIe": 200, "400 Gbit/s": 400,
         "NVLink": 2400}  # fmt: skip
KINDS = ("ddp", "fsdp", "1f1b", "advance", "avgpipe")
_OTHERS = ("ddp", "fsdp", "1f1b")  # what users have without this package
_ADVANCES = (0, 1, 3)


@dataclass(frozen=True)
class Model:
    """A GPT, and the sequences of a batch."""

    name: str
    layers: int
    width: int
    batch: int

    @property
    def parameters(self) -> float:
        """Of the layers and the embedding."""
        return 12 * self.layers * self.width**2 + VOCABULARY * self.width

    def forward_s(self, layers: float, sequences: int) -> float:
        """Of so many layers on one device."""
        s, h = TOKENS, self.width
        return sequences * layers * (24 * s * h**2 + 4 * s**2 * h) / FLOPS


MODELS = (
    Model("1.3B", 24, 2048, 512), Model("2.7B", 32, 2560, 512), Model("6.7B", 32, 4096, 1024),
    Model("13B", 40, 5120, 1024), Model("175B", 96, 12288, 1536),
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        kind: of ``KINDS``.
        stages: K.
        replicas: r.
        sequences: of a micro-batch.
        advance: h.
        batch_s: seconds of a batch.
        bytes: on the device that holds most.
    """

    kind: str
    stages: int
    replicas: int
    sequences: int
    advance: int
    batch_s: float
    bytes: float


def ways(model: Model, devices: int, gbit: float) -> Iterator[Way]:
    """All that fit the memory."""
    for stages in (k for k in (1, 2, 4, 8, 16, 32, 48) if k <= devices and model.layers % k == 0):
        replicas = devices // stages
        for sequences in (1, 2, 4) if stages > 1 else (1, 2, 4, 8, 16):
            count = model.batch // (replicas * sequences)
            if count < 1 or count * replicas * sequences != model.batch:
                continue
            for kind in KINDS[:2] if stages == 1 else KINDS[2:]:
                for advance in _ADVANCES if kind in ("advance", "avgpipe") else (0,):
                    models = 2 if kind == "avgpipe" else 1
                    shards = devices if kind == "fsdp" else 1
                    used = _bytes(model, stages, sequences, count, advance, models, shards)
                    if used <= MEMORY:
                        if kind == "fsdp":
                            batch_s = _sharded_s(model, devices, sequences, count, gbit)
                        else:
                            batch_s = _batch_s(model, stages, replicas, sequences, count, advance, models, gbit)
                        yield Way(kind, stages, replicas, sequences, advance, batch_s, used)


def _bytes(model: Model, stages: int, sequences: int, count: int, advance: int, models: int, shards: int) -> float:
    """On the first stage: its share of the models and their reference, inputs of layers, and what one layer keeps."""
    share, entries = model.parameters / stages, sequences * TOKENS * model.width
    stash = min(count, 1 + (stages - 1) * (1 + advance))
    kept = stash * model.layers / stages * entries * VALUE_BYTES
    reference = share * 4 if models > 1 else 0.0
    return models * (share * STATE_BYTES / shards + kept) + reference + KEPT_BYTES * entries


def _sharded_s(model: Model, devices: int, sequences: int, count: int, gbit: float) -> float:
    """Seconds of a batch of fsdp: of computing or of messages, whichever take longer."""
    messages_s = 3 * (devices - 1) / devices * model.parameters * VALUE_BYTES / (gbit * 1e9 / 8)
    return count * max(4 * model.forward_s(model.layers, sequences), messages_s)


def _batch_s(
    model: Model, stages: int, replicas: int, sequences: int, count: int, advance: int, models: int, gbit: float
) -> float:
    """Seconds of a batch: those of an iteration over the number of models that it trains."""
    rate = gbit * 1e9 / 8
    forward_s = model.forward_s(model.layers / stages, sequences)
    send_s = sequences * TOKENS * model.width * VALUE_BYTES / rate
    iteration_s = forward_s * _pipeline(stages, count, advance, models, _rounded(send_s / forward_s))
    reduce_s = 2 * (replicas - 1) / replicas * model.parameters / stages * VALUE_BYTES / rate
    if stages == 1:  # beside the last backward, with its forward once more
        reduce_s = max(0.0, reduce_s - 3 * forward_s)
    return (iteration_s + models * reduce_s) / models


def _rounded(ratio: float) -> float:
    """To 5%: one simulation serves many settings."""
    return 0.0 if ratio < 1e-3 else math.exp(round(math.log(ratio) / 0.05) * 0.05)


@functools.cache
def _pipeline(stages: int, count: int, advance: int, models: int, ratio: float) -> float:
    """Of an iteration, in forwards of a stage; a long one is continued from two shorter ones."""
    short, long = 4 * stages, 8 * stages
    if count > long:
        first, second = (_pipeline(stages, n, advance, models, ratio) for n in (short, long))
        return second + (count - long) * (second - first) / (long - short)
    costs = StageCosts.uniform(stages, 1.0, 3.0, ratio, LATENCY_S)
    return simulate([_schedule(stages, count, advance)] * models, costs).iteration_s


@functools.cache
def _schedule(stages: int, count: int, advance: int) -> Schedule:
    return build("advance_forward", stages, count, advance=advance)


def table(model: Model, devices: Sequence[int], factor: float) -> list[dict[str, object]]:
    """A row for each number of devices and link: the fastest of each kind; the lead over what others have."""
    rows = []
    for count, (link, gbit) in itertools.product(devices, LINKS.items()):
        best: dict[str, Way] = {}
        for way in ways(model, count, gbit):
            if way.kind not in best or way.batch_s < best[way.kind].batch_s:
                best[way.kind] = way
        seconds = {kind: way.batch_s * (factor if kind == "avgpipe" else 1.0) for kind, way in best.items()}
        order = sorted(seconds, key=seconds.__getitem__)
        others = [kind for kind in order[1:] if kind in _OTHERS]
        rows.append({
            "model": model.name, "devices": count, "link": link, "best": order[0] if order else None,
            "lead": seconds[others[0]] / seconds[order[0]] if others else None,
            "seconds": seconds, "ways": {kind: asdict(way) for kind, way in best.items()},
        })  # fmt: skip
    return rows


def draw(rows: Sequence[dict], path: Path) -> None:
    """Who is fastest: a panel for each model, links by devices, with the lead over what others have."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = {
        "ddp": "#bdbdbd",
        "fsdp": "#8d6e63",
        "1f1b": "#90caf9",
        "advance": "#1e88e5",
        "avgpipe": "#43a047",
        None: "#ffffff",
    }
    models = list(dict.fromkeys(row["model"] for row in rows))
    devices = list(dict.fromkeys(row["devices"] for row in rows))
    figure, axes = plt.subplots(1, len(models), figsize=(3.1 * len(models) + 1, 4.2), sharey=True, squeeze=False)
    for panel, model in zip(axes[0], models, strict=True):
        for row in (row for row in rows if row["model"] == model):
            x, y = list(LINKS).index(row["link"]), devices.index(row["devices"])
            panel.add_patch(plt.Rectangle((x, y), 1, 1, facecolor=colours.get(row["best"], "white"), edgecolor="white"))
            text = "-" if row["best"] is None else f"{row['lead']:.1f}" if row["lead"] else "only"
            panel.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=7)
        panel.set(xlim=(0, len(LINKS)), ylim=(0, len(devices)), title=f"GPT {model}")
        panel.set_xticks([i + 0.5 for i in range(len(LINKS))], LINKS, rotation=60, ha="right", fontsize=7)
        panel.set_yticks([i + 0.5 for i in range(len(devices))], map(str, devices), fontsize=7)
    axes[0][0].set_ylabel("devices")
    names = {
        "ddp": "ddp",
        "fsdp": "fsdp",
        "1f1b": "1F1B",
        "advance": "advance forward",
        "avgpipe": "two parallel models",
    }
    figure.legend(
        handles=[plt.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in KINDS],
        labels=[names[kind] for kind in KINDS], loc="upper center", ncols=len(KINDS), fontsize=8, frameon=False,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    figure.savefig(path, dpi=110)


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--devices", type=int, nargs="+", default=list(DEVICES))
    parser.add_argument("--samples-factor", type=float, default=1.2, help="of two parallel models")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'model':6} {'devices':>7} {'link':>10}  {'best':8} {'lead':>5}   seconds of a batch")
    for model in (model for model in MODELS if model.name in options.models):
        for row in table(model, options.devices, options.samples_factor):
            rows.append(row)
            seconds = "  ".join(f"{kind} {s:.3g}" for kind, s in row["seconds"].items())
            lead = "" if row["lead"] is None else f"{row['lead']:.2f}"
            print(
                f"{model.name:6} {row['devices']:7} {row['link']:>10}  {row['best'] or 'none':8} {lead:>5}   {seconds}"
            )
    if options.json:
        options.json.write_text(json.dumps({"samples_factor": options.samples_factor, "rows": rows}))
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
