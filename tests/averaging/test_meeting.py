"""Groups of processes average in the background, and nobody sees a model before that has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_avgpipe import Averaging
from lightning_avgpipe.averaging.ensemble import Ensemble
from lightning_avgpipe.averaging.optimizers import load_states, states_of_group_0
from lightning_avgpipe.training.group_traffic import traffic_lines
from lightning_avgpipe.utils import tree
from tests import processes
from tests.averaging.models import Models, Net, train
from tests.averaging.test_equations import NESTEROV, ByHand, doubled, of
from tests.averaging.test_groups import share, trained
from tests.comparing import assert_close, assert_equal, state
from tests.models import MLP, loader
from tests.trainers import pipeline


class Twins:
    """Siblings of a group that always has what this one has, and says when sums begin and end."""

    group_number, count, present = 0, 2, 2

    def __init__(self) -> None:
        self.begun = self.ended = 0
        self.members = self

    def broadcast(self, item: Any) -> Any:
        return item

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """They are the same."""

    def settle(self) -> bool:
        """Nobody leaves."""
        return True

    def begin_sum(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        self.begun += 1

        def end() -> None:
            self.ended += 1
            torch._foreach_mul_(list(tensors), 2)

        return end

    def begin_choice(self, tensors: Sequence[Tensor]) -> Callable[[], None]:
        return lambda: None

    def sum(self, tensors: Sequence[Tensor]) -> None:
        self.begin_sum(tensors)()


def stepped(averaging_group: Any, **options: Any) -> Ensemble:
    """A model whose local step is done, and the ensemble of which it is one."""
    torch.manual_seed(0)
    model = Net()
    optimizer: Any = model.configure_optimizers()
    ensemble = Ensemble(model, lambda: [optimizer], Averaging(**options), averaging_group=averaging_group)
    ensemble.place(0)
    torch._foreach_add_([p.detach() for p in model.parameters()], 0.1)
    model.first[1].running_mean.add_(1.0)
    ensemble.averager.stepped(1)
    return ensemble


@pytest.mark.parametrize(
    "look",
    [
        lambda ensemble: ensemble.place(0),
        lambda ensemble: ensemble.show_reference(True),
        lambda ensemble: ensemble.tensors(0),
        lambda ensemble: ensemble.load(0, {}),
        lambda ensemble: ensemble.follow(2),
        lambda ensemble: ensemble.follow(1),
        lambda ensemble: ensemble.dissolve(),
        lambda ensemble: ensemble.averager.outer,
    ],
    ids=["place", "show_reference", "tensors", "load", "resize", "follow", "dissolve", "outer"],
)
def test_whoever_looks_waits_for_the_other_groups(look: Callable[[Ensemble], Any]) -> None:
    averaging_group = Twins()
    ensemble = stepped(averaging_group)
    begun = averaging_group.begun
    assert ensemble.averager.is_under_way
    assert averaging_group.ended == 0 < begun
    look(ensemble)
    assert averaging_group.ended >= begun


# -- optimizers of all groups begin with what group 0's have --------------------------------------------------------


class Sibling:
    """One of two groups: group 0 says what it sends, group 1 gets that."""

    def __init__(self, group_number: int, sent: list[Any]) -> None:
        self.group_number, self._sent = group_number, sent
        self.members = self

    def broadcast(self, item: Any) -> Any:
        if self.group_number == 0:
            self._sent.append(item)
        return item if self.group_number == 0 else self._sent.pop(0)

    def copy(self, tensors: Sequence[Tensor]) -> None:
        if self.group_number == 0:
            self._sent.append([tensor.clone() for tensor in tensors])
        else:
            for tensor, sent in zip(tensors, self._sent.pop(0), strict=True):
                tensor.copy_(sent)


def made_of(kind: Any, gradients: Sequence[float | None], **options: Any) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(size)) for size in (2, 3, 4)]
    optimizer: torch.optim.Optimizer = kind(parameters, **options)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.full_like(parameter, gradient)
    optimizer.step()
    return optimizer


class Nested(torch.optim.SGD):
    """Keeps lists and dictionaries of tensors, as SOAP does."""

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if (g := parameter.grad) is not None:
                self.state[parameter] = {"factors": [g.outer(g), None], "of": {0: (g.clone(), 1.5)}}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (Nested, {"lr": 0.1}),
    ],
)
def test_states_are_those_of_group_0_even_where_others_have_more_or_fewer(kind: Any, options: Any) -> None:
    first = made_of(kind, (1.0, None, 2.0), **options)
    second = made_of(kind, (3.0, 4.0, None), **options)
    sent: list[Any] = []
    groups: list[Any] = [Sibling(0, sent), Sibling(1, sent)]
    found = [states_of_group_0([mine], sibling)[0] for mine, sibling in zip((first, second), groups, strict=True)]
    assert sent == []
    made = made_of(kind, (None, None, None), **options)
    for states in found:
        load_states(made, states)
        assert made.state.keys() == {made.param_groups[0]["params"][i] for i in (0, 2)}
        for i in (0, 2):
            mine, theirs = (o.state[o.param_groups[0]["params"][i]] for o in (made, first))
            assert_equal(mine, theirs)
            assert not {*map(id, tree.tensors(mine))} & {*map(id, tree.tensors(theirs))}


# -- groups meet rarely and late, a fragment of their models at a time -----------------------------------------------


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
