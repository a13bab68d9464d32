"""When one of several groups of processes dies, the others go on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_avgpipe.errors import ConfigurationError
from tests.commands import LIMIT_S, started
from tests.survival import Death, check
from tests.trainers import pipeline

SCRIPT = Path(__file__).parents[1] / "script.py"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "phase"), [(3, "forward"), (2, "sum")])
def test_the_other_group_trains_as_if_it_had_been_alone_from_there_on(rank: int, phase: str, tmp_path: Path) -> None:
    assert check(Death(rank, phase), tmp_path) < 20


@pytest.mark.slow
def test_a_script_goes_on_when_a_process_that_it_has_started_is_killed(tmp_path: Path) -> None:
    given = {"devices": 4, "epochs": 3, "timeout_s": 1800, "dies": ["SIGKILL", "training"], "victim": 3}
    with started(([str(SCRIPT), str(tmp_path), json.dumps({**given, "min_groups": 1})], {})) as (process,):
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
    assert re.search(r"group 1 has left: rank 3 \(stage 0 of group 1\) was killed by SIGKILL\. .* with 1 group", errors)
    assert {path.name for path in tmp_path.glob("weights-*")} == {"weights-0.pt", "weights-1.pt"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_groups": 1, "rolling": True}, "min_groups=1 with rolling=True: it is for one group"),
        ({"min_groups": 1, "replicas": 2}, "one model without one of them"),
        ({"min_groups": 1, "start_method": "fork"}, "all processes are ended when one dies"),
        ({"min_groups": 0}, "min_groups=0: must be an integer from 1"),
    ],
)
def test_what_groups_need_each_other_for_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pipeline(2, 4, options)
