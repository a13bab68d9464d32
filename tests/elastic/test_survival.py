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
@pytest.mark.parametrize(("rank", "phase"), [(3, "forward"), (2, "sum"), (0, "writing")])
def test_the_other_group_trains_as_if_it_had_been_alone_from_there_on(rank: int, phase: str, tmp_path: Path) -> None:
    seconds, _ = check(Death(rank, phase), tmp_path)
    assert seconds < 20


@pytest.mark.slow
def test_what_was_stopped_while_it_wrote_does_not_replace_what_others_have_written_since(tmp_path: Path) -> None:
    check(Death(0, "writing", "SIGSTOP"), tmp_path, pipelines=2, timeout_s=8.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "ends_with", "says"),
    [
        (1, 1, r"group 0 has left: rank 1 \(stage 0 of group 0\) was killed by SIGKILL\. .* rank 2 logs and saves now"),
        (0, -9, r"group 0 has left: rank \d .* rank 2 logs and saves now"),
    ],
)
def test_a_script_goes_on_without_the_group_of_its_own_process(
    victim: int, ends_with: int, says: str, tmp_path: Path
) -> None:
    given = {"devices": 4, "epochs": 3, "timeout_s": 1800, "dies": ["SIGKILL", "training"], "victim": victim}
    with started(([str(SCRIPT), str(tmp_path), json.dumps({**given, "min_groups": 1})], {})) as (process,):
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == ends_with, errors
    assert re.search(says, errors, re.DOTALL), errors
    assert {path.name for path in tmp_path.glob("weights-*")} == {"weights-2.pt", "weights-3.pt"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_groups": 1, "rolling": True}, "min_groups=1 with rolling=True: groups that die leave others with sums"),
        ({"min_groups": 1, "replicas": 2}, "one model without one of them"),
        ({"min_groups": 1, "start_method": "fork"}, "all processes are ended when one dies"),
        ({"min_groups": 0}, "min_groups=0: must be an integer from 1"),
    ],
)
def test_what_groups_need_each_other_for_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pipeline(2, 4, options)
