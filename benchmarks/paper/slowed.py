"""Emulate devices that are a given number of times as slow as a core, so that two cores stand for six of them.

Whatever a device computes runs as it is, and then its process sleeps until that has taken ``factor`` times the seconds
of CPU time that it used. Messages, Python between actions, and the loading of data are not slowed. With six devices and
a factor of six, all of them together keep at most one core busy.

The same wrapper slows every system: actions of stages of this engine, of ``torch.distributed.pipelining`` and of
DeepSpeed, forwards and backwards of data parallelism, and all optimizer steps.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

__all__ = ["SlowDevice"]


class SlowDevice:
    """The device of this process.

    Args:
        factor: seconds that it takes for a second of a core's work; 1: it is as fast as the core.

    Attributes:
        busy_s: seconds for which it has computed; without those in which a backward waits for others' gradients.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.busy_s = 0.0
        self._running = threading.local()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Compute something within this context, which lasts as long as it would take this device; may be nested."""
        if getattr(self._running, "begin", None) is not None:
            yield
            return
        self._running.begin = begin = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self._running.begin = None
            end = begin[0] + self.factor * (time.thread_time() - begin[1])
            _sleep_until(end)
            self.busy_s += end - begin[0]

    def slowed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that takes as long as it would take this device."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.computing():
                return function(*args, **kwargs)

        return run

    def take(self, owner: Any, *names: str) -> None:
        """Slow methods of a class, or functions of a module or object."""
        for name in names:
            setattr(owner, name, self.slowed(getattr(owner, name)))

    def take_optimizers(self) -> list[RemovableHandle]:
        """Slow the steps of all optimizers, but not the closures within which Lightning runs forwards and backwards.

        Returns:
            Handles whose ``remove()`` ends it.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        entered = contextlib.ExitStack()

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            owner, *rest = args
            given = {**dict(zip(("closure",), rest, strict=False)), **kwargs}
            closure = given.get("closure")

            def run() -> Any:
                result = closure()
                entered.enter_context(self.computing())
                return result

            if closure is None:
                entered.enter_context(self.computing())
                return args, kwargs
            return (owner,), {**given, "closure": run}

        return [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(lambda *_: entered.close()),
        ]

    def take_engine(self) -> None:
        """Slow the stages of this engine, and let its planner know how long they take."""
        from lightning_avgpipe.capture import measure
        from lightning_avgpipe.engine.stage import Stage

        self.take(Stage, "perform")
        original = measure.measure

        def measured(*args: Any, **kwargs: Any) -> Any:
            costs, factor = original(*args, **kwargs), self.factor
            forward, backward = (tuple(factor * s for s in each) for each in (costs.forward, costs.backward))
            return replace(costs, forward=forward, backward=backward)

        for module in list(sys.modules.values()):
            if module.__name__.startswith("lightning_avgpipe.") and vars(module).get("measure") is original:
                module.measure = measured  # type: ignore[attr-defined]

    def take_torch(self) -> None:
        """Slow the stages of ``torch.distributed.pipelining``."""
        from torch.distributed.pipelining import PipelineStage

        self.take(PipelineStage, "forward_one_chunk", "backward_one_chunk")

    def take_deepspeed(self) -> None:
        """Slow the stages of DeepSpeed."""
        from deepspeed.runtime.pipe.engine import PipelineEngine

        # its table of instructions holds these functions
        for kind, function in list(PipelineEngine._INSTRUCTION_MAP.items()):
            if function.__name__ in ("_exec_forward_pass", "_exec_backward_pass"):
                PipelineEngine._INSTRUCTION_MAP[kind] = self.slowed(function)

    def take_ddp(self) -> dict[str, Any]:
        """Slow forwards and backwards of Lightning's ddp; return the options that its strategy needs for this."""
        from lightning.pytorch.strategies import DDPStrategy

        self.take(DDPStrategy, "training_step", "backward")
        return {"ddp_comm_hook": self._average, "ddp_comm_state": ThreadPoolExecutor(1)}

    def _average(self, worker: ThreadPoolExecutor, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket of gradients when this device would have it.

        A backward sleeps behind its arithmetic, so a bucket is there too early; it is summed, beside that sleep, from
        the moment on at which a slow device would have come to it.
        """
        begin, used = self._running.begin
        ready = begin + self.factor * (time.thread_time() - used)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def run() -> None:
            try:
                _sleep_until(ready)
                tensor = bucket.buffer()
                dist.all_reduce(tensor)
                done.set_result(tensor.div_(dist.get_world_size()))
            except Exception as error:
                done.set_exception(error)

        worker.submit(run)
        return done


def _sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)
