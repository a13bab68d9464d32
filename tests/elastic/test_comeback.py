"""A group that has died and is started anew comes back."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comeback import (
    AFTER,
    JOINS,
    NOBODY,
    Plan,
    Story,
    again,
    check,
    check_alike,
    check_data,
    check_reference,
    tell,
)
from tests.commands import LIMIT_S, started
from tests.elastic.models import assert_equal
from tests.processes import free_port, results
from tests.survival import Death

SCRIPT = Path(__file__).parents[1] / "returning.py"


def those_that_train(story: Story) -> list[dict[str, Any]]:
    """The results of all that have ended well, by rank."""
    return [outcome.result for outcome in [*story.first, *story.later[-1]] if outcome.exit_code == 0]


def said(story: Story) -> str:
    """What the first process that is left has warned of."""
    return "\n".join(next(found["warned"] for found in those_that_train(story) if found["leads"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "rank"),
    [
        (Plan(), 3),
        (Plan(size=1, validates=False, tests=True), 1),
        (Plan(size=1, groups=3, optimizer="sgd", strategy=(("alpha", 1.0),)), 1),
        (Plan(pipelines=2, optimizer="sgd", strategy=(("alpha", 1.0),)), 2),
    ],
    ids=["two stages", "one stage", "three groups", "two pipelines"],
)
def test_it_trains_on_as_if_all_had_begun_with_the_checkpoint_of_that_epoch(
    plan: Plan, rank: int, tmp_path: Path
) -> None:
    story = tell(tmp_path, plan, Death(rank, "forward"), NOBODY)
    found = those_that_train(story)
    end = found[0]["epochs"]
    assert len(found) == plan.world_size
    assert [process["epochs"] for process in found] == [end] * plan.world_size
    assert [process["leads"] for process in found] == [True, *[False] * (plan.world_size - 1)]
    assert {(process["folder"], process["rate"], process["tested"]) for process in found} == {
        (found[0]["folder"], found[0]["rate"], found[0]["tested"])
    }
    for epoch in range(end - AFTER, end):
        if plan.pipelines == 1:  # else callbacks see the batches of one
            check_data(found, epoch)
    order = sorted(range(plan.groups), key=lambda group: group == rank // plan.size)  # the group has come last
    by_rank = dict(zip([r for group in order for r in plan.group(group)], found, strict=True))
    ranked = [by_rank[r] for r in sorted(by_rank)]
    check_reference(ranked, plan.size)
    check_alike(ranked, again(tmp_path, replace(plan, tests=False), end - AFTER - 1, end), plan)


@pytest.mark.slow
def test_it_may_die_and_come_back_again_and_has_what_no_checkpoint_has(tmp_path: Path) -> None:
    plan, death = Plan(plateau=True, keeps=True), Death(3, "forward")
    story = tell(tmp_path, plan, death, death, NOBODY)
    found = those_that_train(story)
    assert len(found) == 4
    told = {f"{process['rate']} {process['folder']} {process['kept']}" for process in found}
    assert len(told) == 1 and found[0]["kept"][0] < 0.8
    check_reference(found, 2)
    assert [outcome.exit_code for outcome in story.later[0]] == [1, -9]
    assert len(re.findall("group 1 has come back: ranks 2, 3", said(story))) == 2
    assert len(re.findall("group 1 has left", said(story))) == 2
    for epoch in range(found[0]["epochs"] - AFTER, found[0]["epochs"]):
        check_data(found, epoch)


@pytest.mark.slow
def test_if_it_dies_while_it_joins_the_others_go_on_and_it_may_come_back_again(tmp_path: Path) -> None:
    story = tell(tmp_path, Plan(), Death(3, "forward"), Death(3, JOINS), NOBODY)
    found = those_that_train(story)
    assert len(found) == 4
    assert [outcome.exit_code for outcome in story.later[0]] == [1, -9]
    assert "group 1 does not come back: it has failed meanwhile" in said(story)
    assert len(re.findall("group 1 has come back", said(story))) == 1
    end = found[0]["epochs"]
    check_alike(found, again(tmp_path, Plan(), end - AFTER - 1, end), Plan())


@pytest.mark.slow
def test_all_groups_but_one_may_die_together_and_come_back(tmp_path: Path) -> None:
    plan = Plan(size=1, groups=3, optimizer="sgd", strategy=(("alpha", 1.0),))
    seconds, _ = check(Death(2, "between"), tmp_path, plan, beside=[1])
    assert seconds < 60


@pytest.mark.slow
def test_if_it_is_late_the_others_go_on_without_it(tmp_path: Path) -> None:
    plan = Plan(timeout_s=8.0, until=tmp_path / "anew-0" / "struck")
    story = tell(tmp_path, plan, Death(3, "forward"), Death(3, JOINS, "SIGSTOP"))
    found = results(story.first[:2])
    assert [process["iterations"][-1][1] for process in found] == [1, 1]
    assert "group 1 does not come back: it was not ready within 4 s" in said(story)
    assert [outcome.exit_code for outcome in story.later[0]] == [1, 1]


@pytest.mark.slow
def test_it_logs_and_saves_when_those_before_it_die(tmp_path: Path) -> None:
    plan = Plan(then=1)
    story = tell(tmp_path, plan, Death(3, "forward"), NOBODY)
    found = results(story.later[0])
    assert [outcome.exit_code for outcome in story.first] == [1, -9, 1, -9]
    assert [process["leads"] for process in found] == [True, False]
    assert "group 0 has left" in said(story) and "rank 2 logs and saves now" in said(story)
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert len(logs) == 2 and logs[0] == "version_0" and logs[1].startswith("version_0-from-step-")
    assert {path.name for path in (tmp_path / "saved").iterdir()} >= {
        f"epoch={epoch}.ckpt" for epoch in range(found[0]["epochs"])
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "death", "why"),
    [
        ({"strategy": (("schedule", "auto"),)}, Death(3, "forward"), "schedule='auto' is chosen, or made, while"),
        ({"trainer": (("reload_dataloaders_every_n_epochs", 1),)}, Death(3, "forward"), "dataloaders are loaded anew"),
        ({"trainer": (("limit_train_batches", 0.5),)}, Death(3, "forward"), "a fraction as limit_train_batches"),
        ({}, Death(1, "forward"), "group 0 has left, or is about to, and does not come back"),
    ],
    ids=["schedule", "dataloaders", "fraction", "group 0"],
)
def test_what_cannot_be_is_refused_by_name(changes: Any, death: Death, why: str, tmp_path: Path) -> None:
    plan = Plan(**changes, until=tmp_path / "anew-0" / "ended")
    story = tell(tmp_path, plan, death, NOBODY)
    group = death.rank // 2
    others = results([outcome for rank, outcome in enumerate(story.first) if rank // 2 != group])
    assert [process["iterations"][-1][1] for process in others] == [1, 1]
    first, second = story.later[0]
    assert why in str(second.error) and second.exit_code == 1
    assert (why in str(first.error)) if group else re.search(r"keep the store at port \d+ ended", str(first.error))


@pytest.mark.slow
def test_a_script_that_is_started_anew_by_hand_comes_back(tmp_path: Path) -> None:
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with started(([SCRIPT, tmp_path], common)) as (script,):
        deadline = time.monotonic() + LIMIT_S
        while not (tmp_path / "struck").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        anew = [([SCRIPT, tmp_path], {**common, "NODE_RANK": "0", "LOCAL_RANK": f"{rank}"}) for rank in (2, 3)]
        with started(*anew) as processes:
            _, errors = script.communicate(timeout=LIMIT_S)
            assert script.returncode == 0, errors
            for process in processes:
                _, own = process.communicate(timeout=LIMIT_S)
                assert process.returncode == 0, own
    assert "group 1 has come back: ranks 2, 3 were started anew" in errors
    weights = [torch.load(tmp_path / f"weights-{rank}.pt") for rank in range(4)]
    for other in weights[1:]:
        assert_equal(weights[0], other)
