"""Compare one module without stages and with them: losses, weights and buffers after a few steps."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.coverage.case import STEPS, Case, Example
from benchmarks.harness import quiet_trainer
from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.errors import VerificationError
from lightning_avgpipe.utils.lightning import pl

__all__ = ["compare"]

SEED = 1
# Gradients of tied parameters are summed in another order, so weights may differ by rounding; the rest is exact.
MOVED, ROUNDING, SMALL = 1e-3, 1e-6, 1e-7


class Losses(pl.Callback):
    """What each batch, or micro-batch, had."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(outputs, dict) and isinstance(outputs.get("loss"), Tensor):
            self.found.append(outputs["loss"].detach().to("cpu", copy=True).float())


def compare(case: Case, stages: Sequence[int], costs: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Train without stages, then with each number of stages.

    Yields:
        A number of stages and what was found: ``status`` (``works``, ``wrong``, ``refused``, or ``plain``: it does not
        train without stages) and ``reason``; of what trained, ``exact``: bit for bit, and ``seconds``.
    """
    warnings.simplefilter("ignore")
    make, reason = None, ""
    expected, begun, draws = dict[str, Tensor](), dict[str, Tensor](), False
    with tempfile.TemporaryDirectory() as folder:
        for candidate in case.candidates:
            make = partial(_anew, candidate)
            try:
                expected = plain(make, folder, 0)
                begun = state_of(make().module, torch.zeros(len(expected["loss"])))
                draws = different(begun, expected, plain(make, folder, 1), exact=True) != ""
                break
            except Exception as error:
                make, reason = None, reason or f"{type(error).__name__}: {error}"
        if make is None:
            yield from ((number, {"status": "plain", "reason": shortened(reason)}) for number in stages)
            return
        for number in stages:
            yield number, compared(make, number, costs, folder, begun, expected, draws)


def _anew(candidate: Callable[[], Example]) -> Example:
    """The same each time; not every module can be copied."""
    torch.manual_seed(SEED)
    return candidate()


def compared(
    make: Callable[[], Example], number: int, costs: str, folder: str, begun: dict[str, Tensor],
    expected: dict[str, Tensor], draws: bool,
) -> dict[str, Any]:  # fmt: skip
    """What was found with one number of stages."""
    begin = time.perf_counter()
    row: dict[str, Any] = {"status": "works", "draws": draws}
    try:
        found = with_stages(make, number, costs, folder, verify=draws)
        if not draws:
            row["exact"] = not different(begun, expected, found, exact=True)
            if different(begun, expected, found, exact=False):
                with_stages(make, number, costs, folder, verify=True)  # training may make much of rounding
                row["chaotic"] = True
    except Exception as error:
        status = "wrong" if isinstance(error, VerificationError) else "refused"
        row |= {"status": status, "reason": shortened(f"{type(error).__name__}: {error}")}
        row["traceback"] = traceback.format_exc()[-3000:]
    return {**row, "seconds": round(time.perf_counter() - begin, 1)}


def plain(make: Callable[[], Example], folder: str, seed: int) -> dict[str, Tensor]:
    """Accumulate micro-batches in order; raise if nothing learns."""
    subject = make()
    parts, begun = subject.parts, state_of(subject.module, torch.zeros(0))
    trainer = quiet_trainer(devices=1, default_root_dir=folder, accumulate_grad_batches=parts)
    found = trained(subject, trainer, subject.size // parts, seed)
    if not torch.isfinite(found["loss"]).all():
        raise ValueError("the loss is not finite")
    if all(torch.equal(begun[name], found[name]) for name, _ in subject.module.named_parameters() if name in found):
        raise ValueError("no parameter learns")
    return found | {"loss": found["loss"].unflatten(0, (-1, parts)).sum(1) if parts > 1 else found["loss"]}


def with_stages(make: Callable[[], Example], number: int, costs: Any, folder: str, verify: bool) -> dict[str, Tensor]:
    """Train with all defaults but the number of stages; measured costs are kept in the folder.

    Args:
        verify: compare each step with the plain one, which draws the same random numbers.
    """
    subject = make()
    strategy = AvgPipeStrategy(
        num_stages=number, num_microbatches=subject.parts if subject.parts > 1 else "auto",
        costs=costs, costs_cache=folder, verify=STEPS if verify else False,
    )  # fmt: skip
    trainer = quiet_trainer(devices=1, default_root_dir=folder, strategy=strategy)
    return trained(subject, trainer, subject.size, 0)


def trained(subject: Example, trainer: Any, size: int, seed: int) -> dict[str, Tensor]:
    """What the module is after training."""
    module, losses = subject.module, Losses()
    trainer.callbacks.append(losses)
    pl.seed_everything(seed, verbose=False)
    trainer.fit(module, subject.data(size))
    return state_of(module, torch.stack(losses.found) if losses.found else torch.zeros(0))


def state_of(module: pl.LightningModule, losses: Tensor) -> dict[str, Tensor]:
    """Losses, and all weights and buffers by name."""
    tensors = {
        name: t.detach().to("cpu", copy=True) for name, t in module.state_dict().items() if isinstance(t, Tensor)
    }
    return {"loss": losses, **tensors}


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
        one, other = one.double(), other.double()
        if one.numel() == 0 or torch.equal(one, other):
            continue
        zero = begun[name].double() if name in begun and begun[name].shape == one.shape else torch.zeros_like(one)
        error, moved = (float((t - one).abs().max()) for t in (other, zero))
        if not error <= MOVED * moved + ROUNDING * float(one.abs().max()) + SMALL:
            return f"{name} by {error:.1e}; training moved it by {moved:.1e}"
    return ""


def shortened(text: str) -> str:
    """On one line."""
    return " ".join(text.split())[:400]


os.environ.setdefault("HF_HUB_OFFLINE", "1")
