"""Groups learn together, die wherever they are, and come back: the others lose no step, and all have one reference."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_avgpipe import Averaging, AvgPipeStrategy, Survival
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.systems.survival.groups import GroupsLauncher
from lightning_avgpipe.systems.survival.progress import load_optimizer_states, optimizer_states
from lightning_avgpipe.utils.patching import replaced
from tests import processes
from tests.averaging.models import Models, Net
from tests.comparing import assert_equal, state
from tests.models import MLP, loader
from tests.processes import free_port, until
from tests.systems.survival.runs import Event, Run, Told, running
from tests.trainers import pipeline, trainer

TIMEOUT_S = 20.0
SUM_S = 4.0
BATCHES = 100  # of an epoch, in each group


class Block(nn.Module):
    """A layer that may let something happen in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.then: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.then()
        return torch.tanh(self.linear(x))


class Fragile(MLP):
    """Two stages of a block each, and as many buffers that steps change."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.layers = nn.Sequential(Block(), nn.BatchNorm1d(8), Block(), nn.BatchNorm1d(8))


def strike(signum: int) -> None:
    os.kill(os.getpid(), signum)


def arm(model: Fragile, stages: int, rank: int, phase: str, at: int, signum: int) -> None:
    """Let this process get a signal in a phase of a step, once."""
    import torchft

    count = 0

    def then() -> None:
        nonlocal count
        count += 1
        if count == at:
            strike(signum)

    if phase == "forward":
        model.layers[2 * (stages - 1 - rank)].then = then
        return
    name = {"before a sum": "allreduce", "before a commit": "should_commit", "in a quorum": "start_quorum"}[phase]
    own = getattr(torchft.Manager, name)

    def struck(manager: Any, *args: Any, **kwargs: Any) -> Any:
        if manager.current_step():  # all are there
            then()
        return own(manager, *args, **kwargs)

    setattr(torchft.Manager, name, struck)


def live(
    tell: Any,
    who: tuple[int, int, int],
    stages: int = 2,
    steps: int = 100_000,
    phase: str = "",
    at: int = 0,
    rank: int = 0,
    signum: int = signal.SIGKILL,
    saves: Path | None = None,
    per_epoch: int = BATCHES,
    **options: Any,
) -> Any:
    """Train as a group of stages, in whose process something happens in a phase, unless that is empty."""
    log, handler = logging.getLogger("lightning_avgpipe.systems.survival"), logging.StreamHandler()
    log.setLevel(logging.INFO)  # pytest shows it if a test fails
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(message)s"))
    log.addHandler(handler)
    tell("ready")
    torch.manual_seed(who[0])
    model = Fragile()
    if phase and who[1:] == (rank, 0):
        arm(model, stages, rank, phase, at, signum)
    survival = Survival(groups=2, sum_timeout=SUM_S)
    strategy: dict[str, Any] = {"num_microbatches": 2, "system": survival, "timeout": TIMEOUT_S, **options}
    if stages > 1:
        strategy["split_points"] = ["layers.2"]
    callbacks: list[L.Callback] = [Told(tell)]
    if saves is not None:
        callbacks.append(ModelCheckpoint(saves, "{step}", every_n_train_steps=10, save_top_k=-1))
    runner = pipeline(
        stages, stages, strategy, callbacks=callbacks, max_epochs=-1, max_steps=steps,
        enable_checkpointing=saves is not None,
    )  # fmt: skip
    runner.fit(model, loader(Fragile, 2 * per_epoch * 4, 4), loader(Fragile, 8, 4))
    return {"left": state(model), "epoch": runner.current_epoch, "step": runner.global_step}


def fit(tell: Any, who: Any, models: int, system: bool = True) -> Any:
    """Train as a group; gives what is left in the module, and the models before."""
    seen = Models()
    strategy: dict[str, Any] = {"num_microbatches": 2, "num_pipelines": models}
    strategy |= {"system": Survival(groups=2)} if system else {"averaging": Averaging(groups=2)}
    torch.manual_seed(4 + who[0])  # all begin with the weights of one group
    model = Net("adamw")
    torch.manual_seed(4)
    runner = pipeline(1, 1 if system else 2, strategy, callbacks=[seen, Told(tell)], max_epochs=2)
    runner.fit(model, loader(Net, 32, 4), loader(Net, 8, 4))
    loss = runner.callback_metrics["val_loss"].item()
    return {"left": state(model), "models": seen.models, "reference": seen.reference, "loss": loss}


def of_core(rank: int, models: int) -> Any:
    return fit(lambda *args, **facts: None, (0, rank, 0), models, system=False)


@pytest.mark.parametrize("models", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_groups_learn_what_groups_of_one_world_do(tmp_path: Path, models: int) -> None:
    with running(fit, tmp_path) as run:
        for group in (0, 1):
            run.start(group, models=models)
        found = [run.ends(group) for group in (0, 1)]
    assert_equal(found, processes.each(2, of_core, models, folder=tmp_path))


def stepped(group: int, start: int = 0) -> Callable[[Event], bool]:
    return lambda event: (event.group, event.rank, event.start, event.what) == (group, 0, start, "step")


def check_all(run: Run, group: int, per_epoch: int = BATCHES) -> None:
    """Check that a group has made every step, at its place in the epochs."""
    steps = run.steps(group)
    assert [step for step, _, _ in steps] == list(range(1, len(steps) + 1))
    assert all((step - 1) == epoch * per_epoch + batch for step, epoch, batch in steps)


def dies_and_returns(run: Run, died: float, size: int = 2, limit_s: float = 60.0, **arguments: Any) -> None:
    """Group 1 has died: group 0 goes on, group 1 comes back, and both end with the same reference."""
    per_epoch = arguments.get("per_epoch", BATCHES) // arguments.get("num_pipelines", 1)
    on = run.until(stepped(0), after=died + 0.2, limit_s=limit_s)
    for rank in range(size):
        run.until(lambda e, rank=rank: (e.group, e.rank, e.what) == (1, rank, "gone"), limit_s=limit_s)
    run.start(1, size, stages=size, **arguments)
    back = run.until(stepped(1, 1))
    assert back.facts["step"] >= on.facts["step"]  # where group 0 is, not where training began
    run.stop(back.facts["step"] + 60)
    results = [run.ends(group) for group in (0, 1)]
    assert_equal(results[0]["left"], results[1]["left"])
    assert results[0]["step"] == results[1]["step"]
    assert results[0]["epoch"] == results[1]["epoch"]
    check_all(run, 0, per_epoch)
    steps = run.steps(1, start=1)
    assert [step for step, _, _ in steps] == list(range(steps[0][0], steps[-1][0] + 1))
    # its first batch was numbered before it knew where the others are
    assert all((step - 1) == epoch * per_epoch + batch for step, epoch, batch in steps[1:])


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "in a quorum", "before a sum", "before a commit"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_group_that_is_killed_comes_back(tmp_path: Path, phase: str, rank: int) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            fault = {"phase": phase, "at": 40, "rank": rank} if group == 1 else {}
            run.start(group, 2, **fault)
        died = run.until(lambda e: (e.group, e.rank, e.what) == (1, rank, "gone"))
        dies_and_returns(run, died.when)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {}, {"num_pipelines": 2}, {"averaging": Averaging(every=3)},
        {"per_epoch": 1}, {"per_epoch": 2},  # at the end of an epoch
    ],
)  # fmt: skip
def test_a_group_of_one_process_comes_back(tmp_path: Path, options: dict[str, Any]) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, stages=1, **options)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] >= 5)
        dies_and_returns(run, run.kill(1, [0]), 1, **options)


@pytest.mark.slow
def test_the_first_group_may_die_and_the_next_one_saves(tmp_path: Path) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, stages=1, saves=tmp_path / "saved")
        run.until(lambda e: stepped(0)(e) and e.facts["step"] >= 5)
        died = run.kill(0, [0])
        on = run.until(stepped(1), after=died + 0.2)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] > on.facts["step"] + 20)
        run.start(0, stages=1, saves=tmp_path / "saved")
        back = run.until(stepped(0, 1))
        run.stop(back.facts["step"] + 20)
        results = [run.ends(group) for group in (0, 1)]
    assert_equal(results[0]["left"], results[1]["left"])
    saved = {int(path.stem.partition("=")[2]) for path in (tmp_path / "saved").glob("step=*.ckpt")}
    assert {step for step in range(10, back.facts["step"], 10) if step > on.facts["step"]} <= saved


@pytest.mark.slow
def test_a_group_that_is_stopped_is_left_behind_and_comes_back_by_itself(tmp_path: Path) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, 2)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] >= 5)
        stopped = run.kill(1, [0, 1], signal.SIGSTOP)
        on = run.until(stepped(0), after=stopped + SUM_S + 1)
        run.until(lambda e: stepped(0)(e) and e.facts["step"] > on.facts["step"] + 5)
        woken = run.kill(1, [0, 1], signal.SIGCONT)
        back = run.until(lambda e: stepped(1)(e) and e.facts["step"] > on.facts["step"], after=woken)
        run.stop(back.facts["step"] + 40)
        results = [run.ends(group) for group in (0, 1)]
        assert abs(results[0]["step"] - results[1]["step"]) <= 1
        check_all(run, 0)


@pytest.mark.slow
def test_without_its_lighthouse_a_group_ends_and_names_it(tmp_path: Path) -> None:
    with running(live, tmp_path) as run:
        for group in (0, 1):
            run.start(group, stages=1)
        run.until(lambda e: stepped(1)(e) and e.facts["step"] >= 5)
        run.lose_lighthouse()
        for group in (0, 1):
            event = run.until(lambda e, group=group: (e.group, e.what) == (group, "error"))
            assert f"group {group} waits for the other groups" in event.facts["error"]
            assert "the lighthouse at http://localhost" in event.facts["error"]


# -- how far a group is: what another group gets of it ---------------------------------------------------------------


def optimizer_on(place: str, kind: Any, option: str) -> torch.optim.Optimizer:
    shapes: list[tuple[int, ...]] = [(3, 4), (4,), ()]
    made: torch.optim.Optimizer = kind([nn.Parameter(torch.ones(shape, device=place)) for shape in shapes])
    made.param_groups[0][option] = bool(option)  # its kernels count on the device
    return made


@pytest.mark.parametrize(
    ("kind", "option", "on_host"),
    [
        (torch.optim.AdamW, "", {"step"}),
        (torch.optim.NAdam, "", {"step", "mu_product"}),
        (torch.optim.AdamW, "fused", set()),
        (torch.optim.AdamW, "capturable", set()),
    ],
)
def test_states_of_another_group_go_to_the_device_but_counters_only_where_the_optimizer_has_them_there(
    kind: Any, option: str, on_host: set[str]
) -> None:
    theirs, own = optimizer_on("cpu", kind, ""), optimizer_on("meta", kind, option)
    for parameter in theirs.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    theirs.param_groups[0][option] = bool(option)
    load_optimizer_states([own], optimizer_states([theirs]))
    assert len(own.state) == 3
    left = {name for state in own.state.values() for name, value in state.items() if not value.is_meta}
    assert left == on_host


# -- as a user asks for it: what is refused, and a script that starts its groups -------------------------------------


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
