"""The benchmarks run, and say what they measured."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    depth,
    finetune,
    network,
    spp,
    statistical_efficiency,
    time_to_target,
    trained,
    tuning,
    weight_policies,
)
from benchmarks.engine import summary
from benchmarks.goal import reached
from benchmarks.harness import bars, launch
from benchmarks.paper import report
from benchmarks.paper.learning import algorithm_of
from benchmarks.paper.settings import fitting, memory_of
from benchmarks.paper.slowed import SlowDevice
from benchmarks.paper.stages import blocks, cut, tensors
from benchmarks.paper.workloads import WORKLOADS, awd_lstm, bert, gnmt
from benchmarks.pipedream import plan
from benchmarks.results import Results
from lightning_avgpipe.errors import PartitionError
from lightning_avgpipe.planning.costs import UnitCosts
from lightning_avgpipe.schedule import StageCosts, build, simulate
from lightning_avgpipe.tuning.predictors import Predictor, memory_at
from lightning_avgpipe.tuning.profile import Profile, Setting, from_json
from lightning_avgpipe.tuning.search import candidates
from tests import processes
from tests.commands import ROOT, run
from tests.profiles import random_profile

LIMITED_LINKS = pytest.mark.skipif(not network.available(), reason="limited links need root, ip and tc")


def measured(folder: Path, script: str, *arguments: object) -> Any:
    """What a benchmark writes as JSON."""
    run(folder, ROOT / "benchmarks" / script, *arguments, "--quick", "--json", folder / "found.json")
    return json.loads((folder / "found.json").read_text())


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run() -> None:
    with pytest.raises(SystemExit, match=r"int: the 2 processes ended with \[1, 1\]"):
        launch(int, ("no number",), 2)


def test_the_file_of_results_is_gone_on_with_and_only_what_it_lacks_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results = Results(path, resume=False)
    results.add("digits", None, "single", 0, {"samples": None})
    results.add("digits", None, "single", 1, {"failed": "ended with [1, 1]"})
    results = Results(path, resume=True)  # failures are tried again
    # a function that gives what it is told, and None for what cannot be measured
    found = ['{"samples": 0}', '{"samples": 100}', "null"]
    results.complete(json.loads, {("digits", None, "single", seed): (text,) for seed, text in enumerate(found)})
    assert Results(path, resume=True).samples("digits", "single", 2) == [math.inf, 100]
    assert results.find("digits", None, "single", 2) is None
    assert Results(path, resume=False).records == []


@LIMITED_LINKS
@pytest.mark.slow
def test_the_schedules_are_measured(tmp_path: Path) -> None:
    rows = measured(tmp_path, "schedules.py", "--parts", "links", "--picture", tmp_path / "picture.png")["rows"]
    assert [row["schedule"] for row in rows] == ["afab", "1f1b", "advance_forward"]
    # no action is shorter than its sleep, and none of them overlap on a stage
    assert all(row["seconds"] > 4 * 0.030 for row in rows)
    assert [row["peak_stash"] for row in rows] == [[4, 4], [2, 1], [rows[2]["advance"] + 2, 1]]
    assert (tmp_path / "picture.png").exists()


def test_plans_for_unequal_links_are_predicted_by_sleeps_and_rates_alone() -> None:
    setting = spp.SETTINGS["two pairs"]
    assert spp.strategies(setting)["pipedream"] == {"split_points": ["units.4"], "costs": "flops", "replicas": [2, 2]}
    alone_s = spp.UNITS * (spp.FORWARD_S + spp.BACKWARD_S) * spp.MICROBATCHES
    slowest, parameters = 12.5e6, spp.UNITS * spp.PARAMETER_BYTES
    reduced_s = 2 * 3 / 4 * parameters / slowest
    found = spp.predicted_s(setting, spp.costs(), [0], [[0, 1, 2, 3]], of_ddp=False)
    # the first bucket has five of eight units, and begins while the other three compute
    assert found == pytest.approx(alone_s / 4 - 3 * spp.BACKWARD_S + reduced_s)
    # that of ddp has one, and the second, of seven, begins after the backward
    found = spp.predicted_s(setting, spp.costs(), [0], [[0, 1, 2, 3]], of_ddp=True)
    assert found == pytest.approx(alone_s / 4 + reduced_s * 7 / 8)
    # without replicas it is the simulator of schedules
    begins, message_s = [0, 2, 4, 6], spp.MESSAGE_BYTES / 125e6
    costs = StageCosts.uniform(4, 2 * spp.FORWARD_S, 2 * spp.BACKWARD_S, message_s)
    equal = spp.predicted_s(
        replace(spp.SETTINGS["slow device"], slow=-1), spp.costs(), begins, [[3], [2], [1], [0]], of_ddp=False
    )
    schedule = build("advance_forward", 4, spp.MICROBATCHES, spp.ADVANCE)
    assert equal == pytest.approx(simulate(schedule, costs).iteration_s)


def test_the_engines_table_compares_round_by_round() -> None:
    seconds = {"avgpipe 1f1b": [1.0, 4.0, 2.0], "torch gpipe": [3.0, 9.0, 5.0], "torch 1f1b": [1.5, 4.0, 4.0]}
    bounds = {"avgpipe 1f1b": [0.5, 1.0, 1.6], "torch gpipe": [2.0, 2.0, 2.0], "torch 1f1b": [1.0, 1.0, 1.0]}
    found = summary({"seconds": seconds, "cpu_s": seconds, "bounds_s": bounds})
    assert found["best_peer"] == "torch 1f1b"
    assert found["rows"][0]["over_best_peer"] == 1.5  # of 1.5, 1.0 and 2.0, whatever the medians of the sides
    assert [row["of_bound"] for row in found["rows"]] == [2.0, 2.5, 4.0]


@pytest.mark.slow
def test_the_engine_is_measured_beside_torchs_pipelining(tmp_path: Path) -> None:
    # it fails if the sides do not compute the same losses
    found = measured(tmp_path, "engine.py", "--parts", "replay", "free")
    assert {row["units"] for row in found["replay"]} == {"planned", "leaves"}
    sides = {row["side"] for row in found["free"]["rows"]}
    assert sides >= {"avgpipe afab", "avgpipe 1f1b", "torch gpipe", "torch 1f1b"}
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in found["free"]["seconds"].values())


def test_depth_measures_three_sides_of_two_stages() -> None:
    found = depth.rows(1, rounds=1)
    assert [row["stage"] for row in found] == ["middle", "last"]
    assert all(row[side] > 0 for row in found for side in ("by_hand", "followed", "repeated"))
    assert len(depth.compared(found).splitlines()) == 4


@LIMITED_LINKS
@pytest.mark.slow
def test_parallel_pipelines_are_measured(tmp_path: Path) -> None:
    records = measured(tmp_path, "time_to_target.py", "--parts", "time", "--megabits", "100")["records"]
    assert [record["system"] for record in records] == ["GPipe", "1F1B", "advance", "N=2", "rolling N=2"]
    # no action is shorter than its sleep, and none of them overlap on a stage
    assert all(record["seconds"] > 2 * 0.015 for record in records)


def test_what_models_that_roll_can_gain_is_the_idle_time_of_one() -> None:
    costs = trained.Costs(2, 2, 20.0, 40.0, 500_000, 28)
    assert [*time_to_target.idle(costs, {100: {"1F1B": (0.24, 0.2)}})] == [
        "100 Mbit/s: 1F1B is idle for 50%, so models that roll are at most 2.00x as fast, and at most N times"
    ]


def test_predictors_and_rules_are_judged_by_what_was_measured() -> None:
    profile = random_profile(3)
    settings = candidates(profile, 3, [4, 8, 16], [0])
    predictor = Predictor(profile)
    measured = {s: predictor.predict(s).per_batch_s for s in settings}
    worst = max(measured, key=lambda s: measured[s])
    found = {choice.by: choice for choice in tuning.choices(profile, measured)}
    simulator = found["simulator"]
    assert (simulator.regret, simulator.rank_correlation, simulator.mean_error) == (0, 1, 0)
    assert found["paper"].regret == measured[found["paper"].setting] / min(measured.values()) - 1
    measured[worst] = min(measured.values()) / 4  # which nobody expects
    assert tuning.choices(profile, measured)[-3].regret >= 3
    assert found["max-num"].setting == Setting(8, 3) and found["max-size"].setting == Setting(4, 3)
    assert found["max-num"].rank_correlation is None


def test_rules_of_thumb_keep_within_the_memory() -> None:
    fitting = [Setting(2, 1), Setting(2, 1, 1), Setting(8, 1), Setting(8, 2), Setting(8, 2, 2), Setting(32, 4)]
    assert tuning.max_num(fitting, batch_size=32) == Setting(8, 2)
    assert tuning.max_num(fitting[:2], batch_size=32) == Setting(2, 1)
    assert tuning.max_size(fitting) == Setting(2, 1)
    profile = random_profile(3)
    settings = candidates(profile, 3, [4, 8, 16])
    assert tuning.within(profile, settings, 1.0) == list(settings)
    assert Setting(16, 1) in tuning.within(profile, settings, 0.5)
    assert Setting(4, 3, 1) not in tuning.within(profile, settings, 0.9)


@pytest.mark.slow
def test_the_tuner_is_measured_beside_a_traversal(tmp_path: Path) -> None:
    (row,) = measured(
        tmp_path, "tuning.py", "--workloads", "convolution", "--megabits", "0", "--pipelines", "2", "--microbatches",
        "2", "4", "--memory-share", "1",
    )["rows"]  # fmt: skip
    assert {(s["num_microbatches"], s["num_pipelines"]) for s in row["settings"]} == {(2, 1), (2, 2), (4, 1), (4, 2)}
    assert all(s["per_batch_s"] > 0 and len(s["rounds_s"]) == 1 for s in row["settings"])
    # the traversal trains ten batches with each setting, and one iteration more
    assert row["traversal_s"] > sum(10 * s["per_batch_s"] for s in row["settings"])
    assert row["tuning_s"] > 0
    assert from_json(Profile, json.dumps(row["profile"])).batch_size == 4
    assert [choice["by"] for choice in row["choices"]][-2:] == ["max-num", "max-size"]
    assert min(choice["regret"] for choice in row["choices"]) >= 0


def test_samples_to_a_goal_are_multiples_of_the_single_models_median() -> None:
    label = statistical_efficiency.Trial("digits", "adam", "elastic", 2, 2.0, 1.0, 0).label
    needed = {"single": (900, 1000, 5000), label: (1500, None, 1250)}
    records = [
        {"workload": "digits, adam", "system": system, "seed": seed, "samples": n}
        for system, each in needed.items()
        for seed, n in enumerate(each)
    ]
    assert statistical_efficiency.relative(records) == {("digits, adam", label): [1.25, 1.5, math.inf]}
    assert statistical_efficiency.table(records).splitlines()[-1] == "| elastic N=2, outer_lr=2 | 1.50 (1.25 - > 5) |"


@pytest.mark.slow
def test_parallel_models_learn_about_as_much_from_a_sample_as_one_also_without_a_barrier(tmp_path: Path) -> None:
    records = measured(
        tmp_path, "statistical_efficiency.py", "--without-barrier", "rolling", "groups", "--picture", tmp_path / "p.png"
    )["records"]
    samples = {record["system"]: record["samples"] for record in records}
    assert samples["elastic N=2, outer_lr=2"] < 2 * samples["single"]
    for rule in ("rolling", "groups"):
        assert samples[f"{rule} N=2, outer_lr=1"] < 1.5 * samples["elastic N=2, outer_lr=1"]
    assert (tmp_path / "p.png").exists()


def test_time_to_the_goal_is_samples_times_seconds() -> None:
    samples = {"digits, adam": {"flush": [1000.0, 2000.0, 4000.0], "stash": [2200.0, 1800.0, math.inf]}}
    seconds = {100: {"flush": (0.4, 0.4), "stash": (0.2, 0.25)}}
    (ratios,) = trained.sooner(seconds, samples, "flush").values()
    assert ratios == {"flush": [2.0, 1.0, 0.5], "stash": pytest.approx([2 / 1.1, 2 / 0.9, 0.0])}
    assert trained.compared(seconds, samples, "flush").splitlines()[2:] == [
        "| 100 Mbit/s: seconds a batch (simulated) | 0.400 (0.400) | 0.200 (0.250) |",
        "| as fast as flush | 1.00x | 2.00x |",
        "| digits, adam: samples (seeds) | 1.00 (0.50 - 2.00) | 1.10 (0.90 - inf) |",
        "| digits, adam, 100 Mbit/s: sooner | 1.00x | 1.82x |",
    ]
    assert len(trained.compared(seconds, {}, "flush").splitlines()) == 4
    assert len(trained.compared({}, samples, "flush").splitlines()) == 3


def test_elastic_averaging_is_sooner_at_a_goal_by_its_speed_over_its_samples(tmp_path: Path) -> None:
    seconds = {"GPipe": 0.5, "1F1B": 0.4, "advance": 0.4, "N=2": 0.3, "rolling N=2": 0.2}
    needed = {side: [0.9, 1.0, 1.2] for side in time_to_target.ONE}
    needed |= {"N=2": [1.2, 1.3, math.inf], "rolling N=2": [1.5, 1.25, 1.2]}
    of_sides = {side: (found, found) for side, found in seconds.items()}
    ratios = trained.sooner({100: of_sides}, {"digits, adam": needed}, "1F1B")
    medians = {side: statistics.median(each) for side, each in ratios["digits, adam, 100 Mbit/s"].items()}
    assert medians == pytest.approx({"GPipe": 0.8, "1F1B": 1.0, "advance": 1.0, "N=2": 4 / 3 / 1.3, "rolling N=2": 1.6})
    assert [*time_to_target.best(ratios)] == [
        "digits, adam, 100 Mbit/s: rolling N=2 is at the goal 1.60x sooner than 1F1B, 2.00x sooner than GPipe"
    ]
    bars(ratios, 3, "times sooner", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").exists()


def test_every_side_is_simulated() -> None:
    costs = trained.Costs(4, 4, 10.0, 20.0, 60_000, 12)
    expected = {side: trained.simulated(costs, 100, strategy) for side, strategy in weight_policies.SIDES.items()}
    assert max(expected, key=expected.__getitem__) == "flush"
    assert expected["stash"] < expected["pipeoptim"] < expected["advance"]


@pytest.mark.slow
def test_a_policy_trains_to_the_goal_and_stops_there() -> None:
    sides = ("flush", "stash")
    found = [weight_policies.train(side, "digits", "momentum", 4, 0, 6_000)["samples"] for side in sides]
    assert all(samples is not None and 500 < samples < 6_000 for samples in found)
    assert found[0] != found[1]


@pytest.mark.slow
def test_a_trainer_is_measured_beside_ddp_and_the_simulator(tmp_path: Path) -> None:
    found = measured(tmp_path, "trainer.py")
    assert [*found] == ["ddp", "N=1", "N=2", "rolling N=2"]
    for name, ((seconds, recorded, simulated),) in found.items():
        assert seconds > 0
        assert (simulated is not None) == (name in ("N=1", "N=2"))
        assert simulated is None or recorded > simulated > 0


@pytest.mark.slow
def test_a_divided_model_trains_on_one_device_as_an_undivided_one(tmp_path: Path) -> None:
    found = measured(tmp_path, "one_device.py")["tiny"]
    assert [*found] == ["Lightning", "1 stage", "4 stages", "4, 1f1b"]
    for ((total_s, host_s, is_equal),) in found.values():
        assert total_s >= host_s > 0
        assert is_equal


def as_rank(rank: int, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """What a function of a benchmark returns in a process that its launcher would have started."""
    os.environ["RANK"] = str(rank)
    return function(*arguments)


@pytest.mark.slow
def test_a_llama_is_tuned_alike_by_ddp_fsdp_and_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")

    def forked(function: Callable[..., Any], arguments: Sequence[Any], world_size: int, megabits: object) -> list[Any]:
        """The sides take turns in processes of their own, of which each would else import all libraries anew."""
        return processes.each(world_size, as_rank, function, arguments, folder=tmp_path)

    monkeypatch.setattr(finetune, "launch", forked)
    monkeypatch.setattr("sys.argv", ["finetune.py", "--quick", "--json", str(tmp_path / "found.json")])
    finetune.main()  # which compares the losses
    sides = json.loads((tmp_path / "found.json").read_text())["0"]
    whole, *halves = (sum(rank["held"] for rank in sides[side][0]) for side in ("ddp", "fsdp2", "avgpipe"))
    assert all(half == pytest.approx(whole / 2, rel=0.05) for half in halves)


# -- the paper's workloads: the parts compute the same, and the report says what it must -----------------------------


MODELS: dict[str, Any] = {
    "gnmt": lambda: gnmt.GNMT(vocabulary=40, width=8, layers=3),
    "bert": lambda: bert.SentencePairs(vocabulary=40, width=8, layers=2, heads=2),
    "awd_lstm": lambda: awd_lstm.AWDLSTM(vocabulary=40, streams=4, width=8, hidden=8),
}


def batch_of(name: str) -> Any:
    def words(length: int) -> torch.Tensor:
        return torch.randint(3, 40, (4, length))

    if name == "bert":
        return [words(6), torch.zeros(4, 6, dtype=torch.long), torch.tensor([0, 1, 1, 0])]
    if name == "gnmt":
        lengths = torch.tensor([5, 3, 5, 4])
        return {"source": words(5), "lengths": lengths, "target": words(7), "labels": words(7)}
    streams = torch.arange(4)
    return {"tokens": words(5), "targets": words(5), "streams": streams, "fresh": streams >= 0}


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("name", WORKLOADS)
def test_stages_written_by_hand_compute_the_loss_of_the_example(name: str, num_stages: int) -> None:
    model, batch = MODELS[name]().eval(), batch_of(name)
    model.log = lambda *args, **kwargs: None  # no trainer here
    given = tensors(name, batch)
    stages = cut(blocks(name, model), given, num_stages)
    values: Any = next(iter(given.values()))
    for stage in stages:
        values = stage(*(values if isinstance(values, tuple) else (values,)), **given)
    torch.testing.assert_close(values, model.training_step(batch, 0))
    assert {id(p) for part in stages for p in part.parameters()} == {id(p) for p in model.parameters()}


def test_epochs_to_a_target_are_interpolated() -> None:
    assert reached([(0.5, 4.0), (1.0, 2.0)], 3.0, falling=True) == 0.75
    assert reached([(0.5, 0.6), (1.0, 0.8)], 0.7, falling=False) == pytest.approx(0.75)
    assert reached([(0.5, 2.0)], 3.0, falling=True) == 0.5
    assert reached([(0.5, 4.0)], 3.0, falling=True) is None


def test_systems_that_compute_the_same_are_trained_once() -> None:
    systems = ("ddp", "torch 1f1b", "gpipe", "pipedream", "avgpipe M=4 N=1 h=1", "avgpipe M=4 N=2 h=0")
    assert [algorithm_of(s) for s in systems] == [*["synchronous"] * 3, "pipedream", "synchronous", "N=2"]
    assert algorithm_of("avgpipe M=4 N=2 h=0 rolling split") == "N=2 rolling split"


@pytest.mark.parametrize("bound", ["gpipe", "1f1b", "pipedream", "ddp"])
def test_avgpipe_stays_within_the_memory_of_what_it_is_compared_with(bound: str) -> None:
    profile, workload = random_profile(3), WORKLOADS["bert"]
    setting = fitting(bound, profile, workload, most=2)
    assert max(stage.total for stage in memory_at(profile, setting)) <= memory_of(bound, profile, workload)


def test_the_report_multiplies_time_and_epochs() -> None:
    slow, fast = [(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)], [(1.0, 3.0)]
    curves = {
        "synchronous": [(1.0, 4.0), (2.0, 3.0), (3.0, 2.0)], "pipedream": slow,
        "N=2 rolling split": slow, "N=2 rolling split, outer_lr=1.41": fast,
    }  # fmt: skip
    records = [
        {"workload": "gnmt", "link": None, "system": name, "seed": 0, "curve": curve, "batches": 10, "epochs": 3}
        for name, curve in curves.items()
    ]
    for seed, batch_s in enumerate((0.1, 0.3, 0.2)):
        for name in ("ddp", "pipedream", "avgpipe M=4 N=2 h=0 rolling split"):
            found = {"batch_s": batch_s, "memory": [10.0, 20.0]}
            records.append({"workload": "gnmt", "link": 100, "system": name, "seed": seed, **found})
    ddp, pipedream, *divided = report.rows(records)
    assert (ddp.epoch_s, ddp.memory, ddp.epochs, ddp.target_s) == (2.0, 20.0, 2.0, 4.0)
    assert (pipedream.epochs, pipedream.target_s) == (3.0, 6.0)
    assert [(row.system.rpartition("split")[2], row.epochs) for row in divided] == [("", 3.0), (", outer_lr=1.41", 1.0)]


def test_the_target_is_one_that_half_of_the_seeds_reach() -> None:
    def target(name: str, ends: list[float]) -> float | None:
        found = {"system": "synchronous", "link": None, "epochs": 3}
        return report.target_of(name, [{"workload": name, "curve": [(1.0, 0.0 if name == "bert" else 9.0), (2.0, end)],
                                        "seed": seed, **found} for seed, end in enumerate(ends)])  # fmt: skip

    assert target("gnmt", [3.0, 2.0]) == 3.0 and target("gnmt", [4.0, 3.0, 2.0]) == 3.0
    assert target("bert", [0.7, 0.8]) == 0.7 and target("bert", [0.7, 0.8, 0.9]) == 0.8


def test_a_slow_device_takes_its_factor_of_the_time_of_a_core() -> None:
    device, numbers = SlowDevice(20.0), torch.randn(400, 400)
    used: list[float] = []

    def work() -> None:
        begin = time.thread_time()
        for _ in range(5):
            numbers @ numbers
        used.append(time.thread_time() - begin)

    begin = time.perf_counter()
    device.slowed(work)()
    taken = time.perf_counter() - begin
    assert taken >= 20 * used[0] and device.busy_s == pytest.approx(taken, rel=0.1)


def test_forwards_and_backwards_within_an_optimizers_step_are_slowed_one_by_one() -> None:
    device, parameter = SlowDevice(2.0), torch.nn.Parameter(torch.ones(200_000))
    busy_s: list[float] = []

    def closure() -> torch.Tensor:
        for _ in range(2):
            with device.computing():
                loss = (parameter**2).sum()
                loss.backward()
            busy_s.append(device.busy_s)
        return loss

    handles = device.take_optimizers()
    try:
        torch.optim.SGD([parameter], 0.1).step(closure)
        before = device.busy_s
        torch.optim.SGD([parameter], 0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert 0 < busy_s[0] < busy_s[1] < before < device.busy_s


# -- PipeDream's planner: against brute force on one level, and on two levels by hand ---------------------------------


def random_costs(seed: int) -> UnitCosts:
    draw = random.Random(seed)
    units = draw.randint(1, 6)
    sizes = (units, units, units - 1, units - 1, units)
    return UnitCosts(*(tuple(draw.uniform(0, 2) for _ in range(size)) for size in sizes))


def bottleneck_s(costs: UnitCosts, bandwidth: float, stages: tuple[tuple[int, int, int], ...]) -> float:
    found = []
    for first, last, r in stages:
        units = range(first, last + 1)
        work = sum(costs.forward_s[u] + costs.backward_s[u] for u in units)
        found.append(max(work, 2 * (r - 1) * sum(costs.parameter_bytes[u] for u in units) / bandwidth) / r)
    found += [(costs.bytes_forward[last] + costs.bytes_backward[last]) / bandwidth for _, last, _ in stages[:-1]]
    return max(found)


@pytest.mark.parametrize("seed", range(40))
def test_on_one_level_no_plan_has_a_smaller_bottleneck(seed: int) -> None:
    costs, devices, bandwidth = random_costs(seed), 1 + seed % 5, 0.5 + seed % 3
    found = plan(costs, [devices], [bandwidth])
    best = min(
        bottleneck_s(costs, bandwidth, tuple((a, b - 1, j - i) for (a, b), (i, j) in zip(ends, places, strict=True)))
        for s in range(1, min(costs.num_units, devices) + 1)
        for cuts in combinations(range(1, costs.num_units), s - 1)
        for splits in combinations(range(1, devices), s - 1)
        for ends, places in [(list(pairwise((0, *cuts, costs.num_units))), list(pairwise((0, *splits, devices))))]
    )
    assert found.bottleneck_s == pytest.approx(best)
    assert bottleneck_s(costs, bandwidth, found.stages) == pytest.approx(best)


def test_between_slow_nodes_it_pipelines_and_within_them_it_replicates() -> None:
    costs = UnitCosts((1,) * 4, (2,) * 4, (0.1,) * 3, (0.1,) * 3, (3,) * 4)
    found = plan(costs, widths=[2, 2], bandwidths=[100, 0.2])
    assert found.stages == ((0, 1, 2), (2, 3, 2))
    assert found.bottleneck_s == pytest.approx(3)


def test_levels_without_bandwidth_are_refused() -> None:
    with pytest.raises(PartitionError, match="one entry per level"):
        plan(UnitCosts((1,), (1,), (), (), (1,)), [2, 2], [1])
