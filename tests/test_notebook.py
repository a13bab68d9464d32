"""The notebook's cells run from the first to the last, and show what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples" / "notebook.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs_in_the_repository() -> None:
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in CELLS:
        exec("".join(cell["source"]), names)
    out = capsys.readouterr().out
    assert re.search(r"^0 +layers\.0 ", out, re.MULTILINE)  # the plan
    assert "micro-batches" in out  # the tuner's table
    written = {path.name for path in (tmp_path / "notebook").iterdir()}
    assert written >= {"trace_step=000010.png", "simulated.png", "avgpipe_tuning.png"}
    for curve in names["losses"].curves.values():
        assert len(curve) == 80
        assert curve[-1] < 0.7 * curve[0]
    names["plt"].close("all")
