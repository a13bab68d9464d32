"""Survival as a user asks for it: what is refused, and a script that starts its groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightning_avgpipe import Averaging, AvgPipeStrategy, Survival
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.systems.survival.groups import GroupsLauncher
from lightning_avgpipe.utils.patching import replaced
from tests import processes
from tests.comparing import assert_equal
from tests.models import MLP, loader
from tests.processes import free_port, until
from tests.trainers import trainer

LIMIT_S = 100.0
HERE = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHFT_LIGHTHOUSE", "REPLICA_GROUP_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_policy": "stash"}, "weight_policy='stash'"),
        ({"replicas": 2}, "replicas=2"),
        ({"verify": True}, "verify=True"),
        ({"start_method": "fork"}, "start_method='fork'"),
        ({"shard": "optimizer", "replicas": "auto"}, "shard='optimizer'"),
        ({"averaging": Averaging(groups=2)}, r"Averaging\(groups=2\)"),
        ({"averaging": Averaging(rolling="auto")}, r"Averaging\(rolling='auto'\)"),
        ({"averaging": Averaging(every=2, delay=1)}, r"Averaging\(delay=1\)"),
    ],
)
def test_what_groups_that_may_be_gone_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AvgPipeStrategy(system=Survival(groups=2), **options)


def test_without_torchft_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install -e '\.\[survival\]'"):
        Survival(groups=2)


def test_groups_share_devices_equally() -> None:
    with pytest.raises(ConfigurationError, match=r"devices=3: .*use devices=2"):
        trainer(strategy=AvgPipeStrategy(system=Survival(groups=2)), devices=3)


def test_a_group_needs_a_number_and_a_lighthouse(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="has no lighthouse: start one"):
        trainer(strategy=AvgPipeStrategy(system=Survival(groups=2, group=1)), devices=2)
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:1")
    with pytest.raises(ConfigurationError, match="set REPLICA_GROUP_ID"):
        trainer(strategy=AvgPipeStrategy(system=Survival(groups=2)), devices=1)
    monkeypatch.setenv("REPLICA_GROUP_ID", "2")
    with pytest.raises(ConfigurationError, match="numbered from 0 to 1"):
        Survival(groups=2)


def test_a_lighthouse_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://localhost:{free_port()}"
    survival = Survival(groups=2, group=1, lighthouse=address, sum_timeout=0.5)
    runner = trainer(strategy=AvgPipeStrategy(num_stages=1, system=survival, timeout=5))
    with pytest.raises(Exception, match=f"group 1 connects to the lighthouse at {address}"):
        runner.fit(MLP(), loader(MLP, 8, 4))


STARTED_S = 4.0  # how long a process would run that is not told to stop


def stopped_while_it_starts(rank: int, signum: signal.Signals, starts: Path) -> None:
    """Launch two groups of two processes, and get a signal when the first process has been started."""

    class Started(subprocess.Popen[bytes]):
        def __init__(self, command: Any, **options: Any) -> None:
            waits = [sys.executable, "-c", f"import select; select.select([], [], [], {STARTED_S})"]
            super().__init__(waits, stderr=subprocess.DEVNULL, **options)
            with starts.open("a") as file:
                file.write(".")
            if len(starts.read_text()) == 1:
                os.kill(os.getpid(), signum)

    with replaced(subprocess, "Popen", Started):
        GroupsLauncher(Survival(groups=2), 2).launch(print)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_a_group_starts_reaches_it_and_no_further_one_starts(
    signum: signal.Signals, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    (outcome,) = processes.run(1, stopped_while_it_starts, signum, starts, folder=tmp_path)
    assert starts.read_text() == ".."
    assert outcome.exit_code == 1, "a group has run to its end"


def while_it_runs(script: subprocess.Popen[str], seen: Callable[[], Any]) -> None:
    until(lambda: script.poll() is not None or seen(), "a step", LIMIT_S)
    assert script.poll() is None, "the script has ended"


def steps_of(folder: Path, group: int, without: frozenset[str] = frozenset()) -> dict[str, list[int]]:
    """The steps of each process of a group, by the name of its file."""
    files = [path for path in folder.glob(f"steps-{group}-*") if path.name not in without]
    return {path.name: [int(line.split()[1]) for line in path.read_text().splitlines()] for path in files}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_script_starts_its_groups_and_a_dead_one_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.systems.survival.script", str(tmp_path)]
    variables = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    script = subprocess.Popen(command, cwd=HERE, env=variables, text=True, stderr=subprocess.PIPE)
    try:
        while_it_runs(script, lambda: len(steps_of(tmp_path, 0)) == len(steps_of(tmp_path, 1)) == 2)
        before = frozenset(steps_of(tmp_path, 0))
        os.kill(int(next(name for name in before if name.startswith("steps-0-1")).rpartition("-")[2]), signal.SIGKILL)
        while_it_runs(script, lambda: len(steps_of(tmp_path, 0, before)) == 2)
        reached = max(max(steps, default=0) for steps in steps_of(tmp_path, 1).values())
        (tmp_path / "new").write_text(str(reached + 60))
        (tmp_path / "new").rename(tmp_path / "last")
        _, said = script.communicate(timeout=LIMIT_S)
    finally:
        for process in (*psutil.Process(script.pid).children(recursive=True), script) if script.poll() is None else ():
            process.kill()
        script.wait(LIMIT_S)
    assert script.returncode == 0, said
    assert "group 0 has died (rank 1 was killed by SIGKILL); it may start again 3 times" in said
    left = [torch.load(path) for path in sorted(tmp_path.glob("left-*.pt"))]
    assert len(left) == 4
    assert_equal(left, [left[0]] * 4)
    for steps in (*steps_of(tmp_path, 1).values(), *steps_of(tmp_path, 0, before).values()):
        assert steps == list(range(steps[0], steps[-1] + 1))
    assert (tmp_path / "saved" / "last.ckpt").exists()
