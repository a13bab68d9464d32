"""Fine-tune a Llama with LoRA in two processes, and compare a pipeline with torch's FSDP2 and DDP on limited links.

The model is random and small (34 M parameters). Arithmetic and messages are real, with one thread per process.

- DDP holds the whole model in each process, and sends gradients of adapters only.
- FSDP2 (``fully_shard`` of each layer) holds a half of each weight, and gathers the other half in each forward and
  backward.
- The pipeline holds a half of the layers, and sends the values between them.

All three train the same model with the same batches, as their losses show. They take turns, each in processes of its
own. On real devices FSDP2 waits longer: a device computes a hundred times as fast as a core, on the same links.

    python benchmarks/finetune.py                 # some minutes; limited links need root
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.harness import MIB, Clock, Resident, check_equal, in_turns, launch, parser, quiet_trainer, table, write
from lightning_avgpipe import AvgPipeStrategy

BATCH = 8
_EDGE = 2  # steps that are not timed
_NEAR = 1e-3  # of losses


@dataclass(frozen=True)
class Size:
    """Sizes of the model, and of a sample in tokens."""

    layers: int = 8
    width: int = 512
    vocabulary: int = 8192
    length: int = 128


QUICK = Size(2, 64, 256, 16)


def llama(size: Size) -> nn.Module:
    """A random Llama with adapters, the same in every process."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.width, intermediate_size=11 * size.width // 4,
        num_hidden_layers=size.layers, num_attention_heads=8, use_cache=False,
    )  # fmt: skip
    made: nn.Module = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules="all-linear"))
    return made


def batches(size: Size, count: int) -> Tensor:
    """Tokens of so many batches of all processes."""
    return torch.randint(size.vocabulary, (count, BATCH, size.length), generator=torch.Generator().manual_seed(1))


class FineTuning(L.LightningModule):
    """The model as a LightningModule."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = llama(size)

    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Steps(Clock):
    """Seconds and losses of steps, and the memory from the third one on."""

    def __init__(self, base_mib: Callable[[], float]) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.of_stages: dict[str, Any] = {}
        self._base = base_mib
        self._before, self._during = 0.0, Resident()

    def ended(self, loss: float) -> None:
        """Note the end of a step."""
        super().on_train_batch_end()
        self.losses.append(loss)
        if len(self.ends) == _EDGE:
            self._during.peak()
            self._before, self._during = self._base(), Resident()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.ended(float(outputs["loss"]) if outputs else float("nan"))

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.of_stages = self.found(module)  # before hooks at the end of training find all weights

    def found(self, module: nn.Module) -> dict[str, Any]:
        """What was measured; ``held`` are MiB of weights of this process, ``peak`` of all that it had in a step."""
        own = [p.to_local() if isinstance(p, DTensor) else p for p in module.parameters()]
        return {
            "step_s": statistics.median(self.seconds(_EDGE)),
            "held": sum(p.nbytes for p in own if not p.is_meta) / MIB,
            "peak": self._before + self._during.peak(),
            "losses": self.losses,
        }  # fmt: skip


def by_torch(side: str, size: Size, count: int) -> dict[str, Any]:
    """In each process: train with DDP or FSDP2."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    resident = Resident()
    model: Any = llama(size)
    if side == "ddp":
        shown = model
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mesh=mesh)
        shown = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    steps = Steps(resident.now)
    for tokens in batches(size, count):
        mine = tokens.chunk(world_size)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        steps.ended(mean.item() / world_size)
    found = steps.found(shown)
    dist.barrier()
    dist.destroy_process_group()
    return found


def by_stages(size: Size, count: int) -> dict[str, Any]:
    """In each process: train a pipeline of as many stages as there are processes."""
    resident = Resident()
    steps = Steps(resident.now)
    module = FineTuning(size)
    strategy = AvgPipeStrategy(costs_cache=None, verify=False)
    trainer = quiet_trainer(strategy=strategy, devices=2, callbacks=[steps], max_steps=count, max_epochs=-1)
    trainer.fit(module, DataLoader(batches(size, count), batch_size=None))
    return steps.of_stages


SIDES: dict[str, Callable[[Size, int], dict[str, Any]]] = {
    "ddp": partial(by_torch, "ddp"),
    "fsdp2": partial(by_torch, "fsdp2"),
    "avgpipe": by_stages,
}


def measure(side: str, size: Size, steps: int) -> dict[str, Any]:
    """In each process: train as one of the sides does."""
    return SIDES[side](size, steps + _EDGE)


def compared(found: dict[str, dict[str, list[Any]]]) -> str:
    """One line per side and link."""
    rows = []
    for link, sides in found.items():
        medians = {side: statistics.median(run[0]["step_s"] for run in runs) for side, runs in sides.items()}
        for side, runs in sides.items():
            weights, peaks = ("/".join(f"{rank[what]:.0f}" for rank in runs[-1]) for what in ("held", "peak"))
            ratio = f"{medians['fsdp2'] / medians[side]:.2f}x"
            rows.append((link, side, weights, peaks, f"{medians[side]:.2f}", ratio))
    return table(
        ["Mbit/s", "trained by", "weights, MiB", "peak, MiB", "seconds a step", "times as fast as FSDP2"], rows
    )


def main() -> None:
    options = parser(__doc__, quick="a model of two small layers on free links, once").parse_args()
    size, links, steps, rounds = (QUICK, [0], 1, 1) if options.quick else (Size(), [1000, 100], 3, 3)
    found: dict[str, dict[str, list[Any]]] = {}
    for link in links:
        sides = found[str(link)] = {side: [] for side in SIDES}
        for side in in_turns(list(SIDES), rounds):
            sides[side].append(launch(measure, (side, size, steps), 2, link or None))
            ranks = [{name: value for name, value in rank.items() if name != "losses"} for rank in sides[side][-1]]
            print(f"{link} Mbit/s, {side}: {ranks}", flush=True)
        check_equal({side: runs[0][0]["losses"] for side, runs in sides.items()}, _NEAR)
    print(compared(found))
    write(options, found)


if __name__ == "__main__":
    main()
