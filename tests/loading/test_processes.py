"""Models of transformers of which each process reads its own stages: numbers and files are those of one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_avgpipe import AvgPipeStrategy, save_pretrained
from lightning_avgpipe.errors import AvgPipeError
from tests import processes
from tests.comparing import assert_equal
from tests.loading.languages import (
    Tuning,
    assert_same_files,
    contents,
    llama,
    needs,
    safetensors,
    saved,
    tied_llama,
    tokens,
    transformers,
)
from tests.trainers import trainer

WAYS = {"full": llama, "tied": tied_llama, "lora": llama}
SHARD = "30KB"  # of a file that is written


class Saves(Tuning):
    """Also in a hook, while training runs."""

    def on_train_end(self) -> None:
        save_pretrained(self.model, self.folder / "hook", self.trainer, max_shard_size=SHARD)


class Fails(Tuning):
    """The folder in which rank 0 is to write is a file."""

    def on_train_end(self) -> None:
        (self.folder / "taken").write_text("no folder") if self.global_rank == 0 else None
        save_pretrained(self.model, self.folder / "taken" / "below", self.trainer)


def in_stages(max_epochs: int) -> L.Trainer:
    return trainer(devices=2, strategy=AvgPipeStrategy(num_microbatches=1, verify=False), max_epochs=max_epochs)


class Trained(NamedTuple):
    """What a process holds after two epochs, the loss, and the plan."""

    held: dict[str, Tensor]
    loss: float
    plan: str


def trained(folder: Path, way: str, kind: type[Tuning] = Saves) -> Trained:
    """Train in this one of two processes, with adapters from a checkpoint after the first epoch."""
    torch.manual_seed(3)
    model, run = kind(folder, True, way), in_stages(1 if way == "lora" else 2)
    run.fit(model, tokens())
    if way == "lora":
        run.save_checkpoint(folder / "half.ckpt")
        in_stages(1).fit(model, tokens())  # goes on with what the processes hold
        model, run = kind(folder, True, way), in_stages(2)
        run.fit(model, tokens(), ckpt_path=folder / "half.ckpt")
    held = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    if kind is Saves:
        for name, options in (("after", {}), *([("merged", {"merge": True})] if way == "lora" else [])):
            save_pretrained(model.model, folder / name, run, max_shard_size=SHARD, **options)
    return Trained(held, float(run.callback_metrics["loss"]), str(run.strategy.plan))


def work(folder: Path, ways: list[str]) -> tuple[dict[str, Trained], str]:
    """Train and write in all ways; and what is said where rank 0 cannot write."""
    found = {way: trained(folder / way, way) for way in ways}
    try:
        in_stages(1).fit(Fails(folder / "full", True), tokens())
    except (OSError, AvgPipeError) as error:
        return found, f"{type(error).__name__}: {error}"
    return found, "nothing"


@pytest.fixture(scope="module")
def in_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A folder for each way to tune, and what two processes have made of them."""
    folder = tmp_path_factory.mktemp("two")
    ways = [way for way in WAYS if way != "lora" or find_spec("peft")]
    for way in ways:
        saved(folder / way, WAYS[way])
    return folder, processes.everywhere(2, work, folder, ways, folder=folder)


def plain(folder: Path, way: str) -> tuple[Any, float]:
    """What one process trains without stages, and writes with transformers and peft alone; and the loss."""
    torch.set_num_threads(1)  # a fixture of a module comes before that of each test
    torch.manual_seed(3)
    model, alone = Tuning(folder, False, way), trainer(max_epochs=2)
    alone.fit(model, tokens())
    model.model.save_pretrained(folder / "plain")
    return model, float(alone.callback_metrics["loss"])


def assert_equal_to_one_process(two: list[Trained], model: Tuning, loss: float) -> None:
    """Losses and weights, bit for bit; together the processes hold everything."""
    weights = dict(model.named_parameters())
    assert two[0].loss == two[1].loss == loss
    assert two[0].held.keys() | two[1].held.keys() == weights.keys()
    for process in two:
        assert_equal(process.held, {name: weights[name] for name in process.held})


@pytest.mark.parametrize("way", WAYS)
def test_training_and_files_are_those_of_one_process_which_reads_everything(way: str, in_two: Any) -> None:
    needs(way)
    folder, two = in_two
    model, loss = plain(folder / way, way)
    assert_equal_to_one_process([found[way] for found, _ in two], model, loss)
    for name in ("hook", "after"):
        assert_same_files(folder / way / name, folder / way / "plain")
    if way == "lora":
        model.model.merge_and_unload().save_pretrained(folder / way / "plainly merged")
        assert_same_files(folder / way / "merged", folder / way / "plainly merged")


def test_no_process_holds_what_the_other_one_trains_but_for_tied_weights(in_two: Any) -> None:
    _, ((last, _), (first, _)) = in_two
    names = [{name for name in found["full"].held if "inv_freq" not in name} for found in (last, first)]
    assert all(len(found) > 10 for found in names) and not names[0] & names[1]
    assert "copied" not in last["full"].plan
    assert last["tied"].held.keys() & first["tied"].held.keys() == {"model.model.embed_tokens.weight"}


def test_files_are_small_have_an_index_and_hold_tied_weights_once(in_two: Any) -> None:
    folder, _ = in_two
    for name in ("hook", "after"):
        files = list((folder / "full" / name).glob("*.safetensors"))
        assert len(files) > 4 and (folder / "full" / name / "model.safetensors.index.json").exists()
        assert all(sum(t.nbytes for t in safetensors.load_file(file).values()) <= 30_000 for file in files)
    again = transformers.AutoModelForCausalLM.from_pretrained(folder / "full" / "after")
    assert torch.equal(again.lm_head.weight, contents(folder / "full" / "after")["lm_head.weight"])
    for name in ("hook", "after"):
        assert "lm_head.weight" not in contents(folder / "tied" / name)


def test_a_checkpoint_of_adapters_holds_nothing_else(in_two: Any) -> None:
    needs("lora")
    state = torch.load(in_two[0] / "lora" / "half.ckpt", weights_only=True)["state_dict"]
    assert len(state) == 4 * 2 * 2 and all("lora" in name for name in state)


def test_all_processes_end_if_the_files_cannot_be_written(in_two: Any) -> None:
    _, ((_, first), (_, second)) = in_two
    assert first.startswith("NotADirectoryError") and "NotADirectoryError" in second and "rank 0" in second


@pytest.mark.slow
def test_weights_in_four_bits_train_as_in_one_process(tmp_path: Path) -> None:
    needs("qlora")
    two = processes.everywhere(2, trained, saved(tmp_path), "qlora", Tuning, folder=tmp_path)
    assert_equal_to_one_process(two, *plain(tmp_path, "qlora"))
    names = [{name for name in process.held if "lora" not in name and "inv_freq" not in name} for process in two]
    assert all(len(found) > 10 for found in names) and not names[0] & names[1]
