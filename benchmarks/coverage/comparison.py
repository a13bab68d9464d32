"""One model without stages and with them: losses, weights and buffers after a few steps."""

from __future__ import annotations

import copy
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from benchmarks.coverage.case import Case
from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.engine.microbatch import split

__all__ = ["compare"]

STEPS, RATE, SEED = 3, 0.05, 1
# Gradients of tied parameters are summed in another order, so weights may differ by rounding; the rest is exact.
MOVED, ROUNDING, SMALL = 1e-3, 1e-6, 1e-7


class Subject(L.LightningModule):
    """What anybody would write around a model."""

    def __init__(self, model: nn.Module, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(self.model(**batch))
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


def compare(case: Case, stages: Sequence[int], costs: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Train without stages, then with each number of stages.

    Yields:
        A number of stages and what was found: ``status`` (``works``, ``wrong``, ``refused``, or ``plain``: it does not
        train without stages) and ``reason``; of what trained, ``exact``: bit for bit, and ``seconds``.
    """
    warnings.simplefilter("ignore")
    subject, batch, size, expected, reason = None, {}, 0, {}, ""
    for candidate in case.candidates:
        torch.manual_seed(SEED)
        try:
            model, batch = candidate()
            size = batch_size(batch)
            subject = Subject(model, case.loss)
            expected = plain(copy.deepcopy(subject), batch, size, 0)
            break
        except Exception as error:
            subject, reason = None, reason or f"{type(error).__name__}: {error}"
    if subject is None:
        yield from ((number, {"status": "plain", "reason": shortened(reason)}) for number in stages)
        return
    begun = state_of(subject, torch.zeros(STEPS))
    draws = different(begun, expected, plain(copy.deepcopy(subject), batch, size, 1), exact=True) != ""
    with tempfile.TemporaryDirectory() as folder:
        if draws:  # random numbers of layers are those of seed, micro-batch and layer: the same with other stages
            expected = with_stages(copy.deepcopy(subject), batch, size, 2 if stages[0] != 2 else 3, costs, folder)
            if not torch.isfinite(expected["loss"]).all():
                reason = "with other random numbers the loss is not finite"
                yield from ((number, {"status": "plain", "reason": reason}) for number in stages)
                return
        for number in stages:
            yield number, compared(subject, batch, size, number, costs, folder, begun, expected, draws)


def compared(
    subject: Subject,
    batch: dict[str, Any],
    size: int,
    number: int,
    costs: str,
    folder: str,
    begun: dict[str, Tensor],
    expected: dict[str, Tensor],
    draws: bool,
) -> dict[str, Any]:
    """What was found with one number of stages."""
    begin = time.perf_counter()
    row: dict[str, Any] = {"status": "works", "draws": draws}
    try:
        found = with_stages(copy.deepcopy(subject), batch, size, number, costs, folder)
        wrong = different(begun, expected, found, exact=False)
        if wrong:
            row |= {"status": "wrong", "reason": wrong}
        row["exact"] = not different(begun, expected, found, exact=True)
    except Exception as error:
        row |= {"status": "refused", "reason": shortened(f"{type(error).__name__}: {error}")}
        row["traceback"] = traceback.format_exc()[-3000:]
    return {**row, "seconds": round(time.perf_counter() - begin, 1)}


def batch_size(batch: dict[str, Any]) -> int:
    """Of all tensors."""
    return int(next(t.shape[0] for t in batch.values() if isinstance(t, Tensor)))


def plain(subject: Subject, batch: dict[str, Any], parts: int, seed: int) -> dict[str, Tensor]:
    """Accumulate micro-batches in order; raise if nothing learns."""
    subject.train()
    optimizer = subject.configure_optimizers()
    losses = []
    before = {name: p.detach().clone() for name, p in subject.named_parameters()}
    torch.manual_seed(seed)
    for _ in range(STEPS):
        total = torch.zeros(())
        for part in split(copy.deepcopy(batch), parts):
            loss = subject.loss(subject.model(**part.data))
            (loss * part.weight).backward()
            total += loss.detach().float() * part.weight
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    if not torch.isfinite(torch.stack(losses)).all():
        raise ValueError("the loss is not finite")
    if all(torch.equal(p, before[name]) for name, p in subject.named_parameters()):
        raise ValueError("no parameter learns")
    return state_of(subject, torch.stack(losses))


def with_stages(
    subject: Subject, batch: dict[str, Any], parts: int, number: int, costs: Any, folder: str
) -> dict[str, Tensor]:
    """Train with a Trainer, with all defaults but the number of stages; measured costs are kept in the folder."""
    size = batch_size(batch)
    data = [
        {key: value[i] if isinstance(value, Tensor) else value for key, value in batch.items()} for i in range(size)
    ]
    loader = torch.utils.data.DataLoader(data * STEPS, batch_size=size)
    strategy = AvgPipeStrategy(num_stages=number, num_microbatches=parts, costs=costs, costs_cache=folder)
    trainer = L.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=1, default_root_dir=folder,
    )  # fmt: skip
    L.seed_everything(0, verbose=False)
    trainer.fit(subject, loader)
    return state_of(subject, torch.tensor(subject.losses))


def state_of(subject: Subject, losses: Tensor) -> dict[str, Tensor]:
    """Losses, and all weights and buffers by name."""
    return {"loss": losses, **{name: t.detach().clone() for name, t in subject.state_dict().items()}}


def different(begun: dict[str, Tensor], expected: dict[str, Tensor], found: dict[str, Tensor], exact: bool) -> str:
    """What differs, or nothing; rounding is weighed against how far training moved a tensor."""
    if expected.keys() != found.keys():
        return f"other names: {sorted(expected.keys() ^ found.keys())[:4]}"
    for name, one in expected.items():
        other = found[name]
        if one.shape != other.shape:
            return f"the shape of {name}"
        if name != "loss" and exact and not torch.equal(one, other):
            return name
        one, other, zero = one.double(), other.double(), begun[name].double()
        if one.numel() == 0 or torch.equal(one, other):
            continue
        error, moved = (float((t - one).abs().max()) for t in (other, zero))
        if not error <= MOVED * moved + ROUNDING * float(one.abs().max()) + SMALL:
            return f"{name} by {error:.1e}; training moved it by {moved:.1e}"
    return ""


def shortened(text: str) -> str:
    """On one line."""
    return " ".join(text.split())[:400]


os.environ.setdefault("HF_HUB_OFFLINE", "1")
