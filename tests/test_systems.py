"""Systems can be taken away: no other file needs them, and without their folder one trains with what is left."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.commands import run
from tests.test_house import PACKAGE, imports, modules, nodes, part

SYSTEMS = f"{PACKAGE.name}.systems"

TRAINING = """
import lightning as L
import torch
from torch import nn

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.errors import ConfigurationError


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(**options):
    L.seed_everything(0)
    module, data = Net(), torch.utils.data.DataLoader(torch.randn(16, 4), 8)
    flags = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    L.Trainer(**flags, **options, enable_progress_bar=False).fit(module, data)
    return module.state_dict()


plain = trained()
found = trained(strategy=AvgPipeStrategy(num_stages=2, num_microbatches=1, schedule="1f1b"))
assert all(torch.equal(tensor, found[name]) for name, tensor in plain.items())
for option, value in {"schedule": "zb_h1", "weight_policy": "stash"}.items():
    try:
        AvgPipeStrategy(**{option: value})
    except ConfigurationError as error:
        print(error)
"""


def test_no_other_file_imports_a_system() -> None:
    for path in modules():
        if part(path) != "systems" and path != PACKAGE / "__init__.py":
            assert not any(name.startswith(SYSTEMS) for name in imports(path)), path


def test_no_other_file_has_a_system_in_its_strings() -> None:
    for path in modules():
        if part(path) == "systems" or path == PACKAGE / "__init__.py":
            continue
        for node in nodes(path):
            assert not (isinstance(node, ast.Constant) and SYSTEMS in str(node.value)), path


@pytest.mark.slow
def test_without_systems_one_trains_and_is_told_what_there_is(tmp_path: Path) -> None:
    there = tmp_path / PACKAGE.name
    shutil.copytree(PACKAGE, there, ignore=shutil.ignore_patterns("systems", "__pycache__"))
    (tmp_path / "script.py").write_text(TRAINING)
    printed = run(tmp_path, "script.py", PYTHONPATH=str(tmp_path))
    schedules = "one of 'advance_forward', '1f1b', 'afab', 'interleaved', 'bfs', 'auto'"
    assert f"schedule='zb_h1': must be {schedules}" in printed
    assert "weight_policy='stash': must be one of 'flush';" in printed


@pytest.mark.parametrize("name", sorted(path.parent.name for path in (PACKAGE / "systems").glob("*/__init__.py")))
def test_a_system_needs_no_other_system(name: str) -> None:
    for path in (PACKAGE / "systems" / name).rglob("*.py"):
        own = f"{SYSTEMS}.{name}"
        assert all(found.startswith(own) for found in imports(path) if found.startswith(SYSTEMS)), path
