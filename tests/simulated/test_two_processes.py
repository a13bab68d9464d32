"""Two processes, each with a simulated device: the host's weights, no race, nothing freed early, few streams."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback

from lightning_avgpipe import Averaging, AvgPipeTuner
from lightning_avgpipe.comm.codec import Packet
from lightning_avgpipe.comm.line import Pair, Wire
from lightning_avgpipe.comm.process_groups import ProcessGroups
from lightning_avgpipe.comm.topology import Party
from lightning_avgpipe.comm.transfer import Arrivals
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.patching import replaced
from tests.comm.test_alone import Gathers
from tests.models import MLP, loader
from tests.processes import free_port
from tests.simulated import communicator, device
from tests.simulated.accelerator import SimulatedAccelerator
from tests.simulated.process import SimulatedProcess
from tests.simulated.test_training import Asking, Manual, fit, waits
from tests.trainers import pipeline

AHEAD = "engine/pipeline.py", "_wait_for_device"  # for the end of the iteration before the last


@pytest.fixture(scope="module")
def pair(library: Path) -> Iterator[list[SimulatedProcess]]:
    processes = [SimulatedProcess(library) for _ in range(2)]
    yield processes
    for process in processes:
        process.close()


def both(processes: list[SimulatedProcess], function: Any, *args: Any) -> list[Any]:
    """What a function gives in each."""
    port = str(free_port())
    for rank, process in enumerate(processes):
        process.begin(
            function, *args, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, LOCAL_RANK=str(rank), NODE_RANK="0",
            WORLD_SIZE=str(len(processes)), GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip
    return [process.end() for process in processes]


class Tied(MLP):
    """The first and the last layer share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[8].weight = self.layers[0].weight


def fitted(
    strategy: dict[str, Any], kind: type = MLP, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[str, list[float]], list[str], tuple[int, int]]:
    """Numbers of the weights, what was found, and how many streams of each priority were taken."""
    before = latest_streams()
    with device.reported() as report:
        weights = fit(True, kind, {"num_microbatches": 4, **strategy}, dict(options), 8, devices=2)
    taken = [(after - first) % 32 for first, after in zip(before, latest_streams(), strict=True)]
    # tensors would be shared with the test's process, which has no such device
    return {name: tensor.tolist() for name, tensor in weights.items()}, list(report.errors), (taken[0], taken[1])


def latest_streams() -> list[int]:
    """One of each priority, which takes it."""
    return [torch.Stream(device=f"{device.NAME}:{device._index()}", priority=p).stream_id for p in (0, -1)]


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ({"num_pipelines": 2, "recompute": True}, Asking),
        ({"num_stages": 4}, Asking),
        ({"num_pipelines": 2, "averaging": Averaging(rolling=True)}, MLP),  # metric objects would see batches mixed
        ({"num_pipelines": 2}, Asking),
        ({"num_pipelines": 2, "averaging": Averaging(streams=False)}, Asking),
        ({"weight_policy": "stash"}, Asking),
        ({}, Gathers),  # in a backward too, which is in a thread of autograd
    ],
    ids=str,
)
def test_weights_are_those_of_the_host(pair: list[SimulatedProcess], strategy: dict[str, Any], kind: type) -> None:
    expected = fit(False, kind, {"num_microbatches": 4, **strategy}, {}, 8)
    for weights, errors, _ in both(pair, fitted, strategy, kind):
        assert not errors
        assert [name for name, tensor in expected.items() if tensor.tolist() != weights[name]] == []


def evaluated(kind: type, on_device: bool) -> dict[str, float]:
    """What validations of several batches have logged, in training and after it."""
    torch.manual_seed(4)
    accelerator: Any = SimulatedAccelerator() if on_device else "cpu"
    module, validation = kind(), loader(kind, 24, 8)
    runner = pipeline(devices=2 if on_device else 1, accelerator=accelerator, max_epochs=1)
    runner.fit(module, loader(kind, 16, 8), validation)
    logged = dict(runner.callback_metrics)
    runner.validate(module, validation, verbose=False)
    return {name: float(value) for name, value in {**logged, **runner.callback_metrics}.items() if "val" in name}


@pytest.mark.parametrize("kind", [Asking, Manual])
def test_evaluation_logs_what_it_does_on_the_host(pair: list[SimulatedProcess], kind: type) -> None:
    expected = evaluated(kind, False)
    assert "val_loss" in expected
    for logged in both(pair, evaluated, kind, True):
        assert logged == pytest.approx(expected)


@pytest.fixture(scope="module")
def four(library: Path) -> Iterator[list[SimulatedProcess]]:
    processes = [SimulatedProcess(library) for _ in range(4)]
    yield processes
    for process in processes:
        process.close()


def begun_with_a_validation(strategy: dict[str, Any]) -> tuple[float, float]:
    """What the sanity check logs, for which a process has the other stages on its host, and what training ends with."""
    module, validation, checked = MLP(), loader(MLP, 8, 4), []
    note = LambdaCallback(on_sanity_check_end=lambda trainer, _: checked.append(trainer.callback_metrics["val_loss"]))
    runner = pipeline(
        devices=4, strategy=strategy, accelerator=SimulatedAccelerator(), max_epochs=1, callbacks=[note]
    )  # fmt: skip
    runner.fit(module, loader(MLP, 16, 4), validation)
    return float(checked[0]), float(runner.callback_metrics["val_loss"])


@pytest.mark.parametrize("strategy", [{}, {"averaging": Averaging(groups=2)}], ids=str)
def test_groups_of_several_stages_begin_with_a_validation(
    four: list[SimulatedProcess], strategy: dict[str, Any]
) -> None:
    assert len({*both(four, begun_with_a_validation, strategy)}) == 1


@pytest.mark.parametrize("count", [1, 2])
def test_tied_weights_that_are_clipped_are_those_of_the_host(pair: list[SimulatedProcess], count: int) -> None:
    strategy, clips = {"num_pipelines": count}, {"gradient_clip_val": 0.1}
    expected = fit(False, Tied, {"num_microbatches": 4, **strategy}, clips, 8)
    for weights, errors, _ in both(pair, fitted, strategy, Tied, clips):
        assert not errors
        for name, tensor in expected.items():  # sums over processes round otherwise than those within one
            torch.testing.assert_close(torch.tensor(weights[name]), tensor)


def tuned_alike() -> list[list[float]]:
    """The weights of a replica that begins with its own, after trials that come before the first plan."""
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    module, tuner = MLP(), AvgPipeTuner(microbatch_candidates=[4])
    strategy = {"replicas": 2, "schedule": "1f1b"}
    runner = pipeline(
        1, 2, strategy, accelerator=SimulatedAccelerator(), max_epochs=1, callbacks=[tuner], num_sanity_val_steps=0
    )
    runner.fit(module, loader(MLP, 32, 8))
    return [tensor.tolist() for tensor in module.state_dict().values()]


def test_replicas_that_were_tuned_train_the_same_weights(pair: list[SimulatedProcess]) -> None:
    one, other = both(pair, tuned_alike)
    assert one == other


class Ends(Asking):
    """Its hook at the end uses all layers of each model where self.device says they are."""

    def on_train_end(self) -> None:
        strategy: Any = self.trainer.strategy
        shown = [strategy.reference(), *(strategy.parallel_model(n) for n in range(strategy.num_models))]
        self.ends = []
        for context in shown if len(shown) > 2 else [contextlib.nullcontext(self)]:
            with context as model, torch.no_grad():
                output = model.layers(torch.ones(2, 8, device=self.device))
                places = {str(tensor.device) for tensor in (*self.parameters(), *self.buffers(), output)}
                self.ends.append((output.tolist(), places, str(self.device)))


def ended(on_device: bool, strategy: dict[str, Any]) -> tuple[Any, list[list[float]]]:
    """What the hook has found, and the weights after training."""
    torch.manual_seed(4)
    module, accelerator = Ends(), SimulatedAccelerator() if on_device else "cpu"
    runner = pipeline(devices=2 if on_device else 1, strategy=strategy, accelerator=accelerator, max_epochs=1)
    runner.fit(module, loader(Ends, 16, 8))
    return module.ends, [tensor.tolist() for tensor in module.state_dict().values()]


@pytest.mark.parametrize("count", [1, 2])
def test_at_the_end_a_hook_finds_all_weights_on_the_device_that_self_device_says(
    pair: list[SimulatedProcess], count: int
) -> None:
    strategy = {"num_pipelines": count, "num_microbatches": 4}
    expected = ended(False, strategy)
    assert [places for _, places, _ in expected[0]] == [{"cpu"}] * (1 if count == 1 else 1 + count)
    assert both(pair, ended, True, strategy) == [expected] * 2


def counted(count: int, strategy: dict[str, Any], options: dict[str, Any]) -> dict[tuple[str, str], int]:
    """How often the main thread waits in so many iterations; see :func:`waits`."""
    return dict(waits(count, MLP, strategy, options, devices=2))


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({}, {("training/stepping.py", "global_norm"): 1, AHEAD: 1}),
        # each model is clipped for itself
        (
            {"num_pipelines": 2},
            {("strategy/gradient_check.py", "_check"): 1, ("training/stepping.py", "global_norm"): 2, AHEAD: 2},
        ),
    ],
    ids=str,
)
def test_no_wait_per_micro_batch_where_gradients_are_clipped(
    pair: list[SimulatedProcess], strategy: dict[str, Any], expected: dict[tuple[str, str], int]
) -> None:
    iterations = 4 // strategy.get("num_pipelines", 1)
    for count in (2, 8):
        given = {"num_microbatches": count, **strategy}, {"gradient_clip_val": 0.1}
        few, many = (both(pair, counted, batches, *given) for batches in (8, 12))
        for less, more in zip(few, many, strict=True):
            assert {place: (n - less[place]) / iterations for place, n in more.items() if n != less[place]} == expected


@pytest.mark.parametrize("streams", [True, False])
def test_each_of_several_pipelines_takes_a_stream_unless_they_share_one(
    pair: list[SimulatedProcess], streams: bool
) -> None:
    """There are 32; of those that share one each would wait for what the others wait for."""
    four = both(pair, fitted, {"num_pipelines": 4, "averaging": Averaging(streams=streams)})
    one = both(pair, fitted, {"num_pipelines": 1})
    assert [taken for *_, taken in four] == [(normal + 4 * streams, first) for *_, (normal, first) in one]


def initialized_in_the_end(times: int) -> list[bool]:
    """Whether torch's group of all processes is there after some trainings, and after what the script does at exit."""
    if dist.is_initialized():  # by another test
        dist.destroy_process_group()
    at_exit: list[Any] = []
    with replaced(atexit, "register", lambda function, *args: at_exit.append(partial(function, *args))):
        for _ in range(times):
            fit(True, MLP, {"num_microbatches": 4}, {}, 1, devices=2)
    found = [dist.is_initialized()]
    for function in reversed(at_exit):
        function()
        found.append(dist.is_initialized())
    return found


def test_connections_of_devices_are_closed_when_the_script_ends(pair: list[SimulatedProcess]) -> None:
    assert both(pair, initialized_in_the_end, 2) == [[True, False]] * 2


def given_up() -> list[float]:
    """What is on a device whose stream waits for a message that never comes, once the connections are given up."""
    rank, limit = int(os.environ["LOCAL_RANK"]), timedelta(seconds=60)
    if dist.is_initialized():  # by a trainer, which leaves it
        dist.destroy_process_group()
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=limit)
    place = torch.device(device.NAME, rank)
    port, network = port_of(place), ProcessGroups(rank, place, limit, communicator.NAME)
    port.enter_thread()
    party = Party("devices", (0, 1), on_host=False)
    try:
        network.open()
        network.join(party)
        numbers, pair = torch.ones(4, device=place), Pair(network.group(party), 1 - rank)
        wire = Wire(1 - rank, pair, place, pair, Arrivals())
        if rank == 1:
            wire.finish_receive(wire.post(Packet((), 16, on_host=False)))
            with port.on_stream(wire.stream):
                arrived = port.event()
            port.current_stream().wait_event(arrived)
        network.disconnect()
        dist.monitored_barrier()  # nobody's connection breaks because the other one has ended
        return numbers.tolist()
    finally:
        network.close()
        dist.destroy_process_group()


def test_a_device_waits_no_longer_for_a_message_when_connections_are_given_up(pair: list[SimulatedProcess]) -> None:
    assert both(pair, given_up) == [[1.0] * 4, [1.0] * 4]
