"""Lightning's own tests as the measure of the strategy: they run by default, and with the strategy swapped in.

    git clone --depth 1 --branch 2.6.6 https://github.com/Lightning-AI/pytorch-lightning ../lightning
    python tests/conformance.py ../lightning                        # strategy="avgpipe" on one device
    python tests/conformance.py ../lightning --mode engine          # the same, but through the engine: K=1, M=1
    python tests/conformance.py ../lightning --mode stages loops    # K=2 in one process, where a model has two layers

Wherever Lightning would choose its strategy for one CPU device, the Trainer gets ``AvgPipeStrategy`` instead. The table
shows the outcomes both ways, then every test that differs. The exit status is 1 if a test that passes by default does
not with the strategy, unless ``EXPECTED`` has a reason for it. Outcomes are kept in ``--results``, and a suite that is
there by default is not run again. Lightning's tests need what its ``requirements/pytorch/test.txt`` names.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

SUITES = ("loops", "trainer/logging_", "models/test_hooks.py", "callbacks", "checkpointing", "tuner")
MODES = ("plain", "engine", "stages")
_ROOT = Path(__file__).parents[1]
_MODE, _OUTCOMES = "AVGPIPE_CONFORMANCE_MODE", "AVGPIPE_CONFORMANCE_OUTCOMES"

# Tests of other strategies say nothing of ours, and take most of the time.
_OURS = (
    "not ddp and not spawn and not fork and not fsdp and not sync_dist and not multi_process"
    " and not spike_detection_integration"
)

# pattern of a test with its error -> why it may fail
_ALWAYS = {
    "*test_skip_training_step_not_allowed*": "it sets strategy.world_size, a property of every parallel strategy",
    "*test_trainer_save_checkpoint_storage_options*": "it mocks Lightning's writer of files, and we have one",
}
_ENGINE = {
    **_ALWAYS,
    "*instead of a loss*": "refused in our words, where Lightning has its own",
    "*test_trainer_model_hook_system*": "it lists all calls: a pipeline calls no backward(), its checkpoints hold more",
    "*test_swa_*: assert 0 == *": "it counts calls of strategy.backward(); a pipeline calls none, and all else holds",
    "*test_top_k*: assert *": "it counts calls of torch.save; pickling a batch for verification makes one",
    "*test_timer_stops_training*": "it measures batches per second of wall time",
    "*test_training_step_no_return_when_even*": "it goes on with the loop after the run has ended",
    "*test_training_starts_with_seed[[]True[]]*": "each run begins with the seed, as with ddp",
}
_STAGES = {
    **_ENGINE,
    "*cuts are legal*": "the module has two layers, but the step calls one: there is nothing to cut",
    "*test_eval_mode_warning*": "as above",
}
EXPECTED = {"plain": _ALWAYS, "engine": _ENGINE, "stages": _STAGES}


# -- as a plugin of pytest, in a process per suite -------------------------------------------------------------------


def pytest_configure() -> None:
    """Swap the strategy, in the process that runs Lightning's tests."""
    if os.environ.get(_MODE) in MODES:
        _swap(os.environ[_MODE])


def pytest_runtest_logreport(report: Any) -> None:
    """Write down what came of each phase of a test."""
    if _OUTCOMES in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message.partition("\n")[0] if report.failed and crash is not None else ""
        with Path(os.environ[_OUTCOMES]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.outcome, why]) + "\n")


def _swap(mode: str) -> None:
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer.connectors import accelerator_connector

    from lightning_avgpipe import AvgPipeStrategy

    connector = accelerator_connector._AcceleratorConnector
    choose = connector._choose_strategy

    @functools.wraps(choose)
    def swapped(self: Any) -> Any:
        found = choose(self)
        if type(found) is not SingleDeviceStrategy or found.root_device.type != "cpu":
            return found
        return AvgPipeStrategy(num_microbatches="auto" if mode == "plain" else 1, costs="flops")

    connector._choose_strategy = swapped
    if mode != "plain":
        AvgPipeStrategy._undivided = False  # the engine, although there is nothing to pipeline
    if mode == "stages":
        set_up = AvgPipeStrategy.setup_environment

        def num_stages(self: Any) -> int:
            if self.run is not None:  # layers that come with configure_model do not count
                return int(self.cluster.stage_map.num_stages)
            modules = [] if self.lightning_module is None else self.lightning_module.modules()
            layers = [m for m in modules if not list(m.children()) and list(m.parameters())]
            return min(2, max(1, len(layers)))

        @functools.wraps(set_up)
        def with_stages(self: Any) -> None:
            connection = self._connection
            if connection.cluster is not None and connection.cluster.stage_map.num_stages != self.num_stages:
                connection.cluster = None  # of another module
            set_up(self)

        AvgPipeStrategy.num_stages = property(num_stages)
        AvgPipeStrategy.setup_environment = with_stages


# -- as a script -----------------------------------------------------------------------------------------------------


def run(tests: Path, suite: str, mode: str, results: Path, options: list[str]) -> dict[str, tuple[str, str]]:
    """Run one suite of Lightning's in a process of its own; returns test -> (outcome, first line of the error)."""
    file = results / f"{mode}.{suite.replace('/', '.')}.jsonl"
    if mode != "default" or not file.exists():
        file.unlink(missing_ok=True)
        part = file.with_suffix(".part")
        part.unlink(missing_ok=True)
        environment = {
            **os.environ,
            _MODE: mode,
            _OUTCOMES: str(part),
            "PYTHONPATH": os.pathsep.join([str(_ROOT), str(tests), os.environ.get("PYTHONPATH", "")]),
        }
        with file.with_suffix(".log").open("w") as log:
            subprocess.run(
                [sys.executable, "-m", "pytest", f"tests_pytorch/{suite}", "-c", os.devnull, "--rootdir=.", "-q",
                 "-p", "tests.conformance", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short", "--timeout=100",
                 "-k", _OURS, *options],
                cwd=tests, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False,
            )  # fmt: skip
        part.rename(file)
    outcomes: dict[str, tuple[str, str]] = {}
    for line in file.read_text().splitlines():
        test, outcome, why = json.loads(line)
        if test not in outcomes or outcome == "failed" or outcomes[test][0] == "passed":
            outcomes[test] = (outcome, why)
    return outcomes


def reason(test: str, error: str, mode: str) -> str | None:
    """Why a test may fail."""
    what = f"{test} {error}"
    return next((why for pattern, why in EXPECTED[mode].items() if fnmatch.fnmatchcase(what, pattern)), None)


def main() -> int:
    """Run, compare, print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of Lightning's repository, at the version that is installed")
    parser.add_argument("suites", nargs="*", default=SUITES, help=f"below tests_pytorch; default: {' '.join(SUITES)}")
    parser.add_argument("--mode", choices=MODES, default="plain")
    parser.add_argument("--results", type=Path, default=Path("conformance"), help="folder of outcomes and logs")
    parser.add_argument("--pytest", default="", help="further options of pytest")
    arguments = parser.parse_intermixed_args()
    tests = arguments.checkout.resolve() / "tests"
    if not (tests / "tests_pytorch").is_dir():
        parser.error(f"{tests} has no folder tests_pytorch; is this a checkout of pytorch-lightning?")
    results = arguments.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    mode, differing, unexpected = arguments.mode, [], 0
    headings = f"{'passed':>8s}{'failed':>8s}{'skipped':>8s}"
    print(f"{'':28s} {'by default':^24s} {mode:^24s}\n{'suite':28s} {headings} {headings}")
    for suite in arguments.suites:
        before, after = (run(tests, suite, m, results, arguments.pytest.split()) for m in ("default", mode))
        counts = [Counter(outcome for outcome, _ in outcomes.values()) for outcomes in (before, after)]
        row = ("".join(f"{c[outcome]:8d}" for outcome in ("passed", "failed", "skipped")) for c in counts)
        print(f"{suite:28s} {' '.join(row)}", flush=True)
        for test in sorted({*before, *after}):
            was, now = before.get(test, ("absent", "")), after.get(test, ("absent", ""))
            if was[0] != now[0]:
                why = reason(test, now[1], mode)
                unexpected += was[0] == "passed" and why is None
                differing.append(f"{test}: {was[0]} -> {now[0]}: {f'expected: {why}' if why else now[1] or was[1]}")
    print("\n".join(["", *differing, "", f"{len(differing)} differ; {unexpected} passed and do not, without a reason"]))
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
