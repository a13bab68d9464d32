"""The device port: what is asked of the host, what of an accelerator, and that nothing else asks."""

from __future__ import annotations

import ast
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_avgpipe.capture import calls
from lightning_avgpipe.state.untouched import random_state
from lightning_avgpipe.utils.device import (
    AcceleratorPort,
    DeviceClock,
    Stopwatch,
    all_generators,
    has_passed,
    is_out_of_memory,
    port_of,
    seconds_between,
    set_environment,
    urgent_options,
)  # fmt: skip

PACKAGE = Path(__file__).parents[2] / "lightning_avgpipe"
HOST = torch.device("cpu")
CUDA = torch.device("cuda", 0)
# Names of a library, and of values that an option has.
NAMES = {
    "state/snapshot.py": {"torch.cuda"}, "comm/options.py": {"'cpu:gloo,cuda:nccl'"},
}  # fmt: skip

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def names_of_devices(path: Path) -> list[str]:
    """Where a module asks by itself which kind of device there is."""
    tree, found = ast.parse(path.read_text()), []
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
            found.append("torch.cuda")
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "type":
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Constant) and node not in texts and isinstance(node.value, str):
            found += [node.value] if "cuda" in node.value and node.value != "is_cuda" else []
    return sorted(set(found) - NAMES.get(str(path.relative_to(PACKAGE)), set()))


def test_only_the_port_knows_kinds_of_devices() -> None:
    port = PACKAGE / "utils" / "device.py"
    assert names_of_devices(port)
    asking = {str(p.relative_to(PACKAGE)): names_of_devices(p) for p in PACKAGE.rglob("*.py") if p != port}
    assert not {file: names for file, names in asking.items() if names}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there it is known that a thread waits")
def test_on_one_thread_work_that_waits_takes_as_long_as_it_waits() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert port_of(HOST).timed(lambda: time.sleep(0.01))[1] >= 0.01
    finally:
        torch.set_num_threads(before)


def test_transfers_between_cuda_devices_occupy_few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace(max_ctas=None)

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    options = urgent_options("nccl", timedelta(seconds=5))
    assert options.is_high_priority_stream and options.config.max_ctas == 4
    assert urgent_options("gloo", timedelta(seconds=5)) is None


def test_what_cuda_and_nccl_read_at_their_start_is_set_unless_the_user_has() -> None:
    ours, theirs = {}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "LAZY"}
    for environment in (ours, theirs):
        set_environment(CUDA, environment, several=True)
        set_environment(HOST, environment, several=True)
    # 2: communicators are aborted after an error, and the process is not
    nccl = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
    assert ours == {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER", **nccl}
    assert theirs == {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "CUDA_MODULE_LOADING": "LAZY", **nccl}
    alone: dict[str, str] = {}
    set_environment(CUDA, alone, several=False)
    assert alone == {"CUDA_DEVICE_MAX_CONNECTIONS": "32", **nccl}


def test_what_raises_without_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as host:
        torch.empty(2**62, dtype=torch.uint8)
    assert all(map(is_out_of_memory, (host.value, MemoryError(), torch.OutOfMemoryError())))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


def test_random_state_is_put_back_for_every_generator() -> None:
    assert torch.default_generator in all_generators()
    with random_state():
        first = torch.rand(4)
    assert torch.equal(torch.rand(4), first)


def test_looking_whether_generators_have_moved_is_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two of them, as on an accelerator: a tensor made in a unit would count as one that the unit keeps."""
    own = torch.Generator()
    monkeypatch.setattr(calls, "generators", lambda device: (torch.default_generator, own))
    done: list[str] = []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            done.append(str(func))
            return func(*args, **(kwargs or {}))

    watch = calls.Calls(nn.Identity(), None, lambda: 0)
    torch.rand(1, generator=own)
    with Operations():
        watch.look()
        same = watch.generator_states() == watch.generator_states()
    assert same and not done
    assert watch.drawing == {""}


def test_an_accelerator_is_asked_through_torchs_module_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    second = torch.device("cuda", 1)
    module, generator, event = mock.MagicMock(), torch.Generator(), mock.Mock()
    module.default_generators = (torch.Generator(), generator)
    module.mem_get_info.return_value = (30, 100)
    module.memory_reserved.return_value = 50
    module.max_memory_allocated.return_value = 60
    event.elapsed_time.return_value = 250.0
    event.query.return_value = False
    module.Event.return_value = event
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    port = AcceleratorPort(second)
    assert port.generators == (torch.default_generator, generator)
    assert (port.free_bytes(), port.other_bytes()) == (30, 20)
    module.memory_stats.return_value = {"active_bytes.all.peak": 70}
    assert port.peak_bytes() == 70
    module.memory_stats.return_value = {}
    assert port.peak_bytes() == 60
    assert seconds_between(port.moment(), port.moment()) == 0.25
    event.synchronize.assert_called_once_with()
    event.record.assert_called_with(module.current_stream.return_value)
    assert port.timed(lambda: "done") == ("done", 0.25)
    port.enter_thread()
    for asked in (module.current_stream, module.mem_get_info, module.memory_reserved, module.synchronize,
                  module.set_device):  # fmt: skip
        asked.assert_called_with(second)


# -- with CUDA -------------------------------------------------------------------------------------------------------


@cuda
def test_on_cuda_the_host_waits_for_events_only_when_it_reads_them() -> None:
    port = port_of(CUDA)
    assert port.runs_ahead and port.counts_memory and not port.is_host
    port.enter_thread()
    x = torch.randn(512, 512, device=CUDA)
    begin = port.moment()
    y = x @ x
    end = port.moment()
    assert seconds_between(begin, end) > 0
    assert has_passed(end)
    result, seconds = port.timed(lambda: x @ x)
    assert torch.equal(result, y)
    assert seconds > 0


@cuda
def test_on_cuda_a_stream_waits_for_an_event_of_another() -> None:
    port = port_of(CUDA)
    stream = port.new_stream()
    assert stream != port.current_stream()
    x = torch.ones(1024, device=CUDA)
    ready = port.event()
    with port.on_stream(stream):
        assert port.current_stream() == stream
        stream.wait_event(ready)
        y = x + 1
    port.synchronize()
    assert float(y.sum()) == 2048


@cuda
def test_on_cuda_the_allocator_is_asked() -> None:
    port = port_of(CUDA)
    port.reset_peak()
    before = port.allocated_bytes()
    x = torch.empty(2**20, device=CUDA)
    assert port.allocated_bytes() - before == x.nbytes
    del x
    assert port.peak_bytes() - before == 2**22
    assert 0 < port.free_bytes() < port.total_bytes()
    assert port.other_bytes() > 0
    assert port.name == torch.cuda.get_device_name(CUDA)
    with pytest.raises(torch.OutOfMemoryError) as error:
        torch.empty(2 * port.total_bytes(), dtype=torch.uint8, device=CUDA)
    assert is_out_of_memory(error.value)


@cuda
def test_on_cuda_draws_are_those_of_the_ports_generators() -> None:
    _, generator = port_of(CUDA).generators
    assert generator in all_generators()
    with random_state():
        first = torch.rand(4, device=CUDA)
    state = generator.get_state()
    assert torch.equal(torch.rand(4, device=CUDA), first)
    assert not torch.equal(generator.get_state(), state)


@cuda
def test_on_cuda_clocks_agree_with_the_hosts() -> None:
    clock, watch = DeviceClock(CUDA), Stopwatch(CUDA)
    begin = time.perf_counter()
    with watch.lap(0):
        torch.randn(1024, 1024, device=CUDA) @ torch.randn(1024, 1024, device=CUDA)
    at = clock.seconds(clock.now())
    assert begin - 0.01 <= at <= time.perf_counter() + 0.01
    assert [number for number, _ in watch.finished()] == [0]
