"""What a trace of torch's profiler says about the forwards of stages."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from lightning_avgpipe.engine.recording import KernelTrace
from tests.models import MLP, loader
from tests.trainers import pipeline


def test_forwards_of_several_stages_of_one_process_are_told_apart(tmp_path: Path) -> None:
    runner = pipeline(num_stages=3, strategy={"num_microbatches": 2}, max_epochs=1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        runner.fit(MLP(), loader(MLP, 8, 8))
    names = Counter(event.name for event in profiler.events() if event.name.startswith("avgpipe::"))
    assert set(names.values()) == {1}
    # on a CUDA device each name is also written beside the kernels that were launched within it
    events = [{"cat": "gpu_user_annotation", "name": name, "ts": 1e6 * at, "dur": 1.0} for at, name in enumerate(names)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = KernelTrace()
    trace.read(path)
    assert trace.forwards_s.keys() == {(stage, i) for stage in range(3) for i in range(2)}
    assert len(set(trace.forwards_s.values())) == 6
