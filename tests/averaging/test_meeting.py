"""Groups of processes average in the background, and nobody sees a model before that has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_avgpipe.averaging.averager import Averager
from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.options import Averaging
from lightning_avgpipe.comm.control import ControlChannel
from lightning_avgpipe.strategy.pipeline_run import PipelineOptimization
from tests import processes
from tests.averaging.models import Batches, Net, assert_equal, state
from tests.models import loader
from tests.trainers import pipeline


class Twins:
    """Siblings of a group that always has what this one has, and says when sums begin and end."""

    number, count, present = 0, 2, 2

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.members = self

    def broadcast(self, item: Any) -> Any:
        return item

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """They are the same."""

    def settle(self) -> bool:
        """Nobody leaves."""
        return True

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        self.begun += 1

        def end() -> None:
            self.ended += 1
            torch._foreach_mul_(list(tensors), 2)

        return end

    def begin_choice(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        return lambda: None

    def sum(self, tensors: Sequence[Tensor]) -> None:
        self.begin_sum(tensors)()


def stepped(averaging_group: Any, **options: Any) -> Ensemble:
    """A model whose local step is done, and the ensemble of which it is one."""
    torch.manual_seed(0)
    model = Net()
    optimizer: Any = model.configure_optimizers()
    ensemble = Ensemble(model, lambda: [optimizer], Averaging(**options), averaging_group=averaging_group)
    ensemble.place(0)
    torch._foreach_add_([p.detach() for p in model.parameters()], 0.1)
    model.first[1].running_mean.add_(1.0)
    ensemble.averager.stepped(1)
    return ensemble


@pytest.mark.parametrize(
    "look",
    [
        lambda ensemble: ensemble.place(0),
        lambda ensemble: ensemble.show_reference(True),
        lambda ensemble: ensemble.tensors(0),
        lambda ensemble: ensemble.load(0, {}),
        lambda ensemble: ensemble.follow(2),
        lambda ensemble: ensemble.follow(1),
        lambda ensemble: ensemble.dissolve(),
        lambda ensemble: ensemble.averager.outer,
    ],
    ids=["place", "show_reference", "tensors", "load", "resize", "follow", "dissolve", "outer"],
)
def test_whoever_looks_waits_for_the_other_groups(look: Callable[[Ensemble], Any]) -> None:
    averaging_group = Twins()
    ensemble = stepped(averaging_group)
    begun = averaging_group.begun
    assert ensemble.averager.is_under_way
    assert averaging_group.ended == 0 < begun
    look(ensemble)
    assert averaging_group.ended >= begun


class Watching(L.Callback):
    """Might look at the weights after each batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        pass


def events_of(rank: int, callbacks: list[L.Callback], patch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Tensor]]:
    """What happens in a group of one process, in order, and with which weights it ends."""
    events: list[str] = []
    settle, relay, run = Averager.finish, ControlChannel.relay, PipelineOptimization.run

    def settling(averager: Averager) -> None:
        events.extend(["met"] * averager.is_under_way)
        settle(averager)

    def relaying(news: ControlChannel, *args: Any) -> Any:
        events.append("news")
        return relay(news, *args)

    def running(loop: PipelineOptimization, *args: Any) -> Any:
        events.append("step")
        return run(loop, *args)

    patch.setattr(Averager, "finish", settling)
    patch.setattr(ControlChannel, "relay", relaying)
    patch.setattr(PipelineOptimization, "run", running)
    torch.manual_seed(4)
    model = Net("adamw")
    batches = Batches(list(loader(Net, 24, 4))[rank::2])
    strategy = {"num_microbatches": 2, "averaging": Averaging(groups=2)}
    runner = pipeline(1, 2, strategy, callbacks=callbacks, max_epochs=1, use_distributed_sampler=False)
    runner.fit(model, batches)
    return events, state(model)


def both_ways(rank: int) -> Any:
    found = []
    for callbacks in ([], [Watching()], [LambdaCallback(on_train_batch_end=lambda *_: None)]):
        with pytest.MonkeyPatch.context() as patch:
            found.append(events_of(rank, callbacks, patch))
    return found


def test_the_next_step_waits_for_the_other_groups_unless_a_hook_may_look_before(tmp_path: Path) -> None:
    for unwatched, *others in processes.results(processes.run(2, both_ways, folder=tmp_path)):
        assert unwatched[0][:8] == ["step", "news", *["step", "met", "news"] * 2]
        assert unwatched[0][-1] == "met"
        for watched in others:
            assert watched[0][:9] == ["step", "news", "met"] * 3
            assert_equal(unwatched[1], watched[1])
