"""Fragments of the models that meet rarely and late: local SGD and streaming DiLoCo, written once more by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_avgpipe import Averaging, AvgPipeStrategy
from lightning_avgpipe.errors import ConfigurationError
from tests import processes
from tests.averaging.models import Models, Net, assert_equal, state, train
from tests.averaging.test_equations import doubled, of
from tests.averaging.test_groups import share, trained
from tests.commands import run
from tests.models import MLP, loader
from tests.strategy.test_resume import ResumableLoader
from tests.trainers import pipeline

NESTEROV = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
LATE = Averaging(every=3, outer_optimizer=NESTEROV, alpha=1.0, fragments=2, delay=2)


class ByHand:
    """N models in one process, whose fragments are sent after a step and averaged some steps later."""

    def __init__(
        self, module: L.LightningModule, count: int, every: int, fragments: int, delay: int, alpha: float, outer: Any
    ) -> None:
        self.models = [copy.deepcopy(module) for _ in range(count)]
        self.optimizers: list[Any] = [model.configure_optimizers() for model in self.models]
        self.reference = {name: p.detach().clone() for name, p in module.named_parameters()}
        self.outer = None if outer is None else outer(list(self.reference.values()))
        self.every, self.delay, self.alpha = every, delay, alpha
        self.fragments: list[list[str]] = [[] for _ in range(fragments)]
        for name in self.reference:
            sizes = [sum(self.reference[n].numel() for n in names) for names in self.fragments]
            self.fragments[sizes.index(min(sizes))].append(name)
        self.steps, self.trained = 0, [0] * fragments
        self.under_way: list[tuple[int, list[str], list[dict[str, Tensor]]]] = []

    def step(self, batches: Sequence[Any], clip: float | None) -> None:
        self.arrive()
        for model, optimizer, batch in zip(self.models, self.optimizers, batches, strict=True):
            optimizer.zero_grad()
            model.loss(batch).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        self.steps += 1
        for i, names in enumerate(self.fragments):
            self.trained[i] += 1
            if self.steps % self.every == self.every * (i + 1) // len(self.fragments) % self.every:
                self.send(i, names, self.delay)
        if not self.delay:
            self.arrive()

    def send(self, i: int, names: list[str], delay: int) -> None:
        self.trained[i] = 0
        sent = [{name: model.get_parameter(name).detach().clone() for name in names} for model in self.models]
        self.under_way.append((self.steps + delay, names, sent))

    @torch.no_grad()
    def arrive(self) -> None:
        while self.under_way and self.under_way[0][0] <= self.steps:
            _, names, sent = self.under_way.pop(0)
            means = {name: torch.stack([y[name] for y in sent]).mean(0) for name in names}
            before = {name: self.reference[name].clone() for name in names}
            for name in names:
                self.reference[name].grad = before[name] - means[name]
            if self.outer is None:
                for name in names:
                    self.reference[name] -= self.reference[name].grad
            else:
                self.outer.step()
            for name in names:
                self.reference[name].grad = None
                for y, model in zip(sent, self.models, strict=True):
                    since = model.get_parameter(name) - y[name]
                    pulled = self.reference[name] + (1 - self.alpha) * (y[name] - means[name])
                    model.get_parameter(name).copy_(pulled + since)

    def end(self) -> None:
        self.under_way = [(self.steps, names, sent) for _, names, sent in self.under_way]
        self.arrive()
        for i, names in enumerate(self.fragments):
            if self.trained[i]:
                self.send(i, names, 0)
                self.arrive()


@pytest.mark.parametrize(
    ("options", "clip"),
    [
        ({"every": 3}, None),  # local SGD
        ({"every": 3, "fragments": 3, "delay": 2}, None),
        ({"every": 4, "outer": NESTEROV}, None),  # DiLoCo
        ({"every": 4, "outer": NESTEROV, "delay": 3}, 0.05),
        ({"every": 4, "outer": NESTEROV, "fragments": 3}, None),  # streaming DiLoCo
        ({"every": 4, "outer": NESTEROV, "fragments": 2, "delay": 1}, None),
        ({"every": 5, "outer": NESTEROV, "fragments": 4, "delay": 3, "alpha": 0.3}, None),
    ],
    ids=str,
)
def test_models_and_reference_are_those_of_diloco_by_hand(options: dict[str, Any], clip: float | None) -> None:
    torch.manual_seed(3)
    module = MLP("momentum").double()
    given = {"fragments": 1, "delay": 0, "alpha": 1.0, "outer": None, **options}
    expected = ByHand(module, 2, **given)
    batches = [doubled(batch) for batch in of(176)]
    for i in range(0, len(batches), 2):  # eleven steps: training ends between meetings
        expected.step(batches[i : i + 2], clip)
    outer = given.pop("outer")
    moved = {"outer_lr": 1.0} if outer is None else {"outer_optimizer": outer}
    found = train(
        module, loader(MLP, 176, 8), num_stages=2, averaging=Averaging(**given, **moved),
        trainer={"precision": "64-true", "gradient_clip_val": clip},
    )  # fmt: skip
    assert found.trainer.global_step == expected.steps == 11
    expected.arrive()
    for model, other in zip(found.models, expected.models, strict=True):
        for name, tensor in other.named_parameters():
            torch.testing.assert_close(model[name], tensor.detach(), rtol=0, atol=1e-12)
    expected.end()
    for name, tensor in expected.reference.items():
        torch.testing.assert_close(module.get_parameter(name).detach(), tensor, rtol=0, atol=1e-12)


# -- checkpoints, and other stages -------------------------------------------------------------------------------------


class Moves(L.Callback):
    """Asks for other stages while fragments are under way."""

    def __init__(self, **stages: Any) -> None:
        self.stages = stages

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3 and self.stages:
            trainer.strategy.reconfigure(**self.stages)


def fit(
    num_stages: int, seed: int = 4, path: Path | None = None, folder: Path | None = None, devices: int = 1, **moves: Any
) -> Any:
    """Two epochs of seven batches: with two pipelines four iterations each, the last of which is ragged."""
    torch.manual_seed(seed)
    model, models = Net("adamw", warm_up=True), Models()
    callbacks: list[Any] = [models, Moves(**moves)]
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1))
    strategy = {"num_pipelines": 2, "num_microbatches": 2, "averaging": LATE}
    strategy |= {"split_points": ["lstm"]} if moves else {}
    runner = pipeline(num_stages, devices, strategy, callbacks=callbacks, enable_checkpointing=folder is not None)
    runner.fit(model, ResumableLoader(Net, 56, 8), ckpt_path=path)
    return state(model), models.models


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("through")
    torch.set_num_threads(1)
    return fit(2, folder=folder), folder


@pytest.mark.parametrize(("step", "num_stages"), [(1, 2), (2, 1), (3, 2), (4, 3), (6, 2)])
def test_a_resume_while_fragments_are_under_way_is_bitwise(never_stopped: Any, step: int, num_stages: int) -> None:
    (left, models), folder = never_stopped
    saved = torch.load(folder / f"step={step}.ckpt", weights_only=True)["AvgPipeStrategy"]["ensemble"]
    assert saved["late"]
    found = fit(num_stages, 99, folder / f"step={step}.ckpt")
    assert_equal(found[0], left)
    for one, other in zip(found[1], models, strict=True):
        assert_equal(one, other)


def moving(rank: int) -> Any:
    torch.set_num_threads(1)
    return fit(2, devices=2, split_points=["last"])


def test_stages_that_move_while_fragments_are_under_way_change_no_bit(never_stopped: Any, tmp_path: Path) -> None:
    (left, _), _ = never_stopped
    for found, _ in processes.results(processes.run(2, moving, folder=tmp_path)):
        assert_equal(found, left)


# -- several processes -------------------------------------------------------------------------------------------------


def of_groups(folder: Path, groups: int, rank: int, path: Path | None = None, **options: Any) -> Any:
    torch.manual_seed(4 if path is None else 99)
    model, seen = Net("adamw"), Models()
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    averaging = Averaging(groups=groups, every=3, outer_optimizer=NESTEROV, fragments=2, delay=2, **options)
    strategy = {"num_microbatches": 2, "num_pipelines": 2 // groups, "averaging": averaging}
    runner = pipeline(
        1, groups, strategy, callbacks=[seen, saving], enable_checkpointing=True, use_distributed_sampler=False,
        gradient_clip_val=0.5,
    )  # fmt: skip
    runner.fit(model, share(groups, rank, 2), ckpt_path=path)
    return seen.models, state(model)


def two_groups(rank: int, folder: Path) -> Any:
    torch.set_num_threads(1)
    through = of_groups(folder / "two", 2, rank)
    again = of_groups(folder / "again", 2, rank, folder / "one" / "step=4.ckpt")
    rounded = [of_groups(folder / name, 2, rank, wire="int8") for name in ("int8", "repeated")]
    return through, again, rounded


@pytest.mark.slow
def test_two_groups_are_two_pipelines_also_if_they_resume_or_round(tmp_path: Path) -> None:
    expected = of_groups(tmp_path / "one", 1, 0)
    results = processes.results(processes.run(2, two_groups, tmp_path, folder=tmp_path))
    for g, (*found, (rounded, repeated)) in enumerate(results):
        for models, left in found:
            assert_equal(trained(models[0]), trained(expected[0][g]))
            assert_equal(trained(left), trained(expected[1]))
        assert_equal(rounded[1], results[0][2][0][1])  # the same in both groups
        assert_equal(rounded[1], repeated[1])
        far = {name: (tensor - expected[1][name]).abs().max() for name, tensor in trained(rounded[1]).items()}
        assert 0 < max(far.values()) < 0.02
    again = of_groups(tmp_path / "back", 1, 0, tmp_path / "two" / "step=4.ckpt")
    assert_equal(trained(again[1]), trained(expected[1]))


class AsManager:
    """What torchft's DiLoCo asks of its manager, if nobody dies."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.committed = 0

    def allreduce(self, tensor: Tensor, should_quantize: bool) -> Any:
        torch.distributed.all_reduce(tensor)
        tensor /= 2
        return torch.distributed.all_reduce(torch.zeros(1), async_op=True)

    def should_commit(self) -> bool:
        self.committed += 1
        return True

    def current_step(self) -> int:
        return self.committed

    def nothing(self, *args: Any) -> None:
        pass

    start_quorum = register_state_dict_fn = allow_state_dict_read = disallow_state_dict_read = nothing


def by_torchft(rank: int) -> dict[str, Tensor]:
    from torchft.local_sgd import DiLoCo

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(3)
    module = MLP("momentum").double()
    parts: list[list[str]] = ByHand(module, 1, 4, 2, 0, 1.0, None).fragments
    fragments = []
    for names in parts:
        fragments.append(torch.nn.Module())
        for name in names:
            fragments[-1].register_parameter(name.replace(".", "_"), module.get_parameter(name))
    optimizer: Any = module.configure_optimizers()
    outer = [NESTEROV(list(fragment.parameters())) for fragment in fragments]
    with DiLoCo(AsManager(), fragments, optimizer, outer, sync_every=4):
        for batch in [doubled(batch) for batch in of(128)][rank::2]:
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
    return state(module)


def test_without_a_delay_torchft_does_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="pip install torchft")
    torch.manual_seed(3)
    module = MLP("momentum").double()
    found = train(
        module, loader(MLP, 128, 8), num_stages=2, trainer={"precision": "64-true"},
        averaging=Averaging(every=4, fragments=2, alpha=1.0, outer_optimizer=NESTEROV),
    )  # fmt: skip
    for model, other in zip(
        found.models, processes.results(processes.run(2, by_torchft, folder=tmp_path)), strict=True
    ):
        for name, tensor in other.items():
            torch.testing.assert_close(model[name], tensor, rtol=0, atol=1e-12)


SCRIPT = """
import sys
import torch
from functools import partial
from lightning_avgpipe import Averaging, AvgPipeStrategy
from tests.models import MLP, loader
from tests.trainers import trainer

torch.manual_seed(3)
nesterov = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
averaging = Averaging(groups=2, every=4, fragments=2, delay=2, alpha=1.0, outer_optimizer=nesterov, wire="bf16")
strategy = AvgPipeStrategy(
    split_points=["layers.4"], num_stages=2, num_microbatches=2, averaging=averaging, costs_cache=None
)
model = MLP("adamw")
runner = trainer(strategy=strategy, devices=2, max_epochs=1)
runner.fit(model, loader(MLP, 96, 8))
runner.save_checkpoint(sys.argv[1])
"""


@pytest.mark.slow  # the launcher: tests/strategy/test_launch.py
def test_a_script_with_the_default_launcher_trains_and_its_plan_says_what_groups_exchange(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    said = run(tmp_path, script, tmp_path / "ended.ckpt")
    assert "groups exchange 320 B of stage 0, 480 B of stage 1 in 4 steps (1/2 of it every 2), as bf16" in said
    assert "on the link between groups, behind 2 steps: a step waits for" in said
    saved = torch.load(tmp_path / "ended.ckpt", weights_only=True)
    assert saved["global_step"] == 6


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Averaging(every=4, fragments=5),
            r"fragments=5, every=4\).*use every=5 or more, or a smaller fragments",
        ),
        (lambda: Averaging(every=4, delay=4), r"delay=4, every=4\).*use every=5 or more, or a smaller delay"),
        (lambda: Averaging(every=4, wire="int4"), "int8"),
        (
            lambda: AvgPipeStrategy(num_pipelines=2, averaging=Averaging(every=4, delay=1, on_nonfinite="skip")),
            r"Averaging\(delay=1\) with Averaging\(on_nonfinite='skip'\): a model starts again",
        ),
        (
            lambda: AvgPipeStrategy(num_pipelines=2, averaging=Averaging(groups=2, wire="int8", rolling=True)),
            r"Averaging\(rolling=True\) with Averaging\(wire='int8'\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        make()
