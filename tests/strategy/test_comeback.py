"""A group that cannot come back is told so, and why; the others go on without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from lightning_avgpipe.comm.returns import Invitation
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.strategy.comeback import Comeback
from lightning_avgpipe.weights.initialisation import on_meta

INVITATION = Invitation(1, (1,), leader=0, changes=1, ticket="ticket")


class Returning:
    """What becomes of the asking: nobody is invited, or everybody is."""

    missing = (1,)

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told
        self.asked = self.ready = False

    def look(self, why_not: Callable[[int], str]) -> tuple[None, list[str]]:
        return None, [why_not(1)] if why_not(1) else []

    def ask(self, ticket: str) -> Invitation:
        self.asked = True
        return INVITATION

    def receive(self, invitation: Invitation) -> tuple[dict[str, Any], Callable[[], None]]:
        return self._told, lambda: setattr(self, "ready", True)


def comeback(apart: bool = False, told: Any = None, **changes: Any) -> Any:
    """Of a run in which a group may come back, unless something is changed: as ``trainer__callbacks``."""
    module = nn.Linear(2, 2)
    val_loop = SimpleNamespace(_combined_loader=None)
    found = SimpleNamespace(
        trainer=SimpleNamespace(
            lightning_module=module, reload_dataloaders_every_n_epochs=0, callbacks=[], global_rank=1,
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=val_loop)),
        ),
        cluster=SimpleNamespace(
            apart=apart, leads=not apart, channels=SimpleNamespace(returns=Returning(told)),
            world=SimpleNamespace(broadcast=lambda item: item),
        ),
        configuration=SimpleNamespace(
            options=SimpleNamespace(
                schedule="1f1b", elasticity=SimpleNamespace(outer_optimizer=None), shared={"advance": 1, "seed": 0}
            ),
            asked=False,
        ),
        deployment=SimpleNamespace(why_not_given=lambda: ""),
        survivors=SimpleNamespace(first=0, dealing=SimpleNamespace(why_not=lambda: "")),
        trained={"weight": True, "bias": True},
    )  # fmt: skip
    for path, value in changes.items():
        *owners, name = path.split("__")
        place = found
        for owner in owners:
            place = getattr(place, owner)
        setattr(place, name, value)
    return Comeback(state=None, splitter=None, announce=lambda: None, **vars(found))  # type: ignore[arg-type]


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "another leads": ({"survivors__first": 2}, "it comes before group 2, which logs and saves now"),
    "dataloaders": ({"trainer__reload_dataloaders_every_n_epochs": 1}, "dataloaders are loaded anew"),
    "own schedule": ({"configuration__options__schedule": print}, "is chosen, or made, while training runs"),
    "broadcast": ({"configuration__options__schedule": "broadcast"}, "schedule='broadcast' is chosen, or made"),
    "auto": ({"configuration__options__schedule": "auto"}, "schedule='auto' is chosen, or made"),
    "outer optimizer": (
        {"configuration__options__elasticity__outer_optimizer": "adam"},
        "the state of outer_opt",
    ),
    "averaged weights": ({"trainer__callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging keeps"),
    "frozen since": ({"trained": {"weight": False, "bias": True}}, "parameters were frozen, or began to train"),
    "reconfigured": ({"configuration__asked": True}, "the stages have changed since training began, or are about to"),
    "deployment": ({"deployment__why_not_given": lambda: "outputs are kept"}, "outputs are kept"),
    "data": ({"survivors__dealing__why_not": lambda: "its data are not divided"}, "its data are not divided"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_others_say_why_a_group_cannot_come_back(reason: str) -> None:
    changes, why = REASONS[reason]
    with pytest.warns(UserWarning, match=why):
        comeback(**changes).begin_epoch()


def test_a_group_may_come_back_to_a_run_in_which_nothing_prevents_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        comeback().begin_epoch()


TOLD: dict[str, Any] = {
    "options": {"advance": 1, "seed": 0}, "checkpoint": {}, "trained": {"weight": True, "bias": True}, "plan": None,
    "graphs": (), "kept_whole": frozenset(), "metrics": {}, "versions": (), "validates": False, "beside": (),
}  # fmt: skip


@pytest.mark.parametrize(
    ("told", "changes", "why"),
    [
        ({"options": {"advance": 2, "seed": 0}}, {}, "advance is 1 for this process, .* but 2 for the others"),
        ({"trained": {"weight": False, "bias": True}}, {}, "the others train other parameters than this process"),
        (
            {}, {"trainer__fit_loop__epoch_loop__val_loop___combined_loader": []},
            "this group, which was started anew, has dataloaders of validation, and the others have none yet",
        ),
    ],
    ids=["options", "parameters", "validation"],
)  # fmt: skip
def test_new_processes_are_not_ready_where_they_differ(told: Any, changes: Any, why: str) -> None:
    new = comeback(apart=True, told={**TOLD, **told}, **changes)
    with pytest.raises(ConfigurationError, match=why):
        new.begin_epoch()
    assert not new.cluster.channels.returns.ready


def test_new_processes_do_not_ask_with_a_module_whose_contents_they_would_not_get() -> None:
    module = nn.Linear(2, 2, device="meta")
    assert on_meta(module)
    new = comeback(apart=True, told=TOLD, trainer__lightning_module=module)
    with pytest.raises(ConfigurationError, match=r"rank 1 was started anew, .* parameters on the meta device"):
        new.begin_epoch()
    assert not new.cluster.channels.returns.asked
