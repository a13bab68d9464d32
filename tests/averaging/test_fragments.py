"""Groups of processes that meet rarely and late, a fragment of their models at a time."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_avgpipe import Averaging
from lightning_avgpipe.training.group_traffic import traffic_lines
from tests import processes
from tests.averaging.models import Models, Net, train
from tests.averaging.test_equations import NESTEROV, ByHand, doubled, of
from tests.averaging.test_groups import share, trained
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, loader
from tests.trainers import pipeline


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


def measured() -> str:
    """What the plan says of groups of two stages, by the links between them."""
    averaging = Averaging(groups=2, every=4, fragments=2, delay=2, alpha=1.0, outer_optimizer=NESTEROV, wire="bf16")
    strategy = {"split_points": ["layers.4"], "num_microbatches": 2, "averaging": averaging}
    runner = pipeline(2, 2, {**strategy, "costs": "measured", "costs_cache": None}, max_epochs=1)
    runner.fit(MLP("adamw"), loader(MLP, 96, 8))
    assert runner.global_step == 6
    return str(runner.strategy.plan)


def two_groups(rank: int, folder: Path) -> Any:
    through = of_groups(folder / "two", 2, rank)
    again = of_groups(folder / "again", 2, rank, folder / "one" / "step=4.ckpt")
    rounded = [of_groups(folder / name, 2, rank, wire="int8") for name in ("int8", "repeated")]
    return through, again, rounded, measured()


@pytest.mark.slow
def test_two_groups_are_two_pipelines_also_if_they_resume_or_round(tmp_path: Path) -> None:
    expected = of_groups(tmp_path / "one", 1, 0)
    results = processes.each(2, two_groups, tmp_path, folder=tmp_path)
    for g, (*found, (rounded, repeated), plan) in enumerate(results):
        for models, left in found:
            assert_equal(trained(models[0]), trained(expected[0][g]))
            assert_equal(trained(left), trained(expected[1]))
        assert_equal(rounded[1], results[0][2][0][1])  # the same in both groups
        assert_equal(rounded[1], repeated[1])
        far = {name: (tensor - expected[1][name]).abs().max() for name, tensor in trained(rounded[1]).items()}
        assert 0 < max(far.values()) < 0.02
        assert "groups exchange 320 B of stage 0, 480 B of stage 1 in 4 steps (1/2 of it every 2), as bf16" in plan
        assert "on the link between groups, behind 2 steps: a step waits for" in plan
    again = of_groups(tmp_path / "back", 1, 0, tmp_path / "two" / "step=4.ckpt")
    assert_equal(trained(again[1]), trained(expected[1]))


def test_how_long_a_step_waits_is_not_said_of_sums_between_devices() -> None:
    """Only the links between hosts are measured, and these sums do not travel over them."""
    module, stage = MLP(), SimpleNamespace(index=0, parameters=("layers.0.weight",))
    plan: Any = SimpleNamespace(stages=[stage], num_stages=1, measured=True, forecast=SimpleNamespace())
    group = SimpleNamespace(count=2, on_host=False)  # whose members have no connections of hosts to measure
    cluster: Any = SimpleNamespace(averaging_group=group, device=torch.device("meta"))
    (line,) = traffic_lines(plan, module, cluster, Averaging(groups=2))
    assert line.startswith("groups exchange")


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
    parts: list[list[str]] = ByHand(module, 1, Averaging(every=4, fragments=2)).fragments
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


def test_there_may_be_more_fragments_than_weights() -> None:
    found = []
    for fragments in (2, 4):
        torch.manual_seed(3)
        module = MLP()
        module.layers[2:].requires_grad_(False)
        averaging = Averaging(every=4, fragments=fragments, alpha=1.0, outer_optimizer=NESTEROV)
        found.append(train(module, loader(MLP, 64, 8), averaging=averaging).models[0])
    assert_equal(found[0]["layers.2.weight"], found[1]["layers.2.weight"])
    assert (found[0]["layers.0.weight"] - found[1]["layers.0.weight"]).abs().max() < 1


def test_without_a_delay_torchft_does_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="pip install torchft")
    torch.manual_seed(3)
    module = MLP("momentum").double()
    found = train(
        module, loader(MLP, 128, 8), num_stages=2, trainer={"precision": "64-true"},
        averaging=Averaging(every=4, fragments=2, alpha=1.0, outer_optimizer=NESTEROV),
    )  # fmt: skip
    assert_close(found.models, processes.each(2, by_torchft, folder=tmp_path), rtol=0, atol=1e-12)
