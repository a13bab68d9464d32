"""Replicas that divide optimizer states among them step as if each had all, and save the same checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_avgpipe import AvgPipeStrategy
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.training.stepping import check_separable
from tests import processes
from tests.averaging.models import Batches
from tests.averaging.test_lightning import TwoKinds
from tests.comparing import assert_equal, state
from tests.models import MLP, Regression, loader
from tests.trainers import pipeline, trainer


class Uneven(Regression):
    """A matrix at both ends, two groups of parameters, and one that never has a gradient."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.first, self.between, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.unused = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.between(self.first(x))))

    def configure_optimizers(self) -> Any:
        biases = [p for p in self.parameters() if p.ndim == 1]
        others = [p for p in self.parameters() if p.ndim > 1]
        made = torch.optim.AdamW([{"params": others, "weight_decay": 0.1}, {"params": biases}], lr=1e-2)
        return [made], [torch.optim.lr_scheduler.StepLR(made, 2)]


def state_bytes(runner: L.Trainer) -> int:
    """Of the moments that this process keeps."""
    states = runner.optimizers[0].state.values()
    return sum(value.nbytes for state in states for name, value in state.items() if name != "step")


def fit(rank: int, path: Path, devices: int, load: Path | None = None, epochs: int = 1, **options: Any) -> Any:
    torch.manual_seed(5)
    model, strategy = Uneven(), AvgPipeStrategy(num_microbatches=4, **options)
    batches = list(loader(Uneven, 64, 8))
    group = rank // (devices // options["replicas"]) if isinstance(options["replicas"], int) else None
    data = Batches(batches if group is None else batches[group :: options["replicas"]])
    settings: dict[str, Any] = {"gradient_clip_val": 0.1, "use_distributed_sampler": False, "max_epochs": epochs}
    runner = trainer(devices=devices, strategy=strategy, enable_checkpointing=True, **settings)
    runner.fit(model, data, ckpt_path=load)
    held = state_bytes(runner)
    runner.save_checkpoint(path)
    return state(model), held, strategy.plan.stages[0].memory.persistent


def sharded(rank: int, folder: Path) -> Any:
    """Two replicas of a pipeline of one stage, whose checkpoint two replicas of a stage resume."""
    found = {}
    for shard in (False, True):
        options: dict[str, Any] = {"shard": "optimizer" if shard else None}
        first = fit(rank, folder / f"{shard}.ckpt", 2, replicas=2, **options)
        resumed = fit(rank, folder / f"{shard}3.ckpt", 2, folder / f"{shard}.ckpt", 2, replicas=[2], **options)
        found[shard] = first, resumed
    return found


def test_sharded_replicas_give_the_same_bits_with_half_of_the_states(tmp_path: Path) -> None:
    results = processes.each(2, sharded, tmp_path, folder=tmp_path)
    for found in results:
        for run in (0, 1):
            assert_equal(found[True][run][0], found[False][run][0])
    whole = results[0][False][0][1]
    for run in (0, 1):
        parts = [found[True][run][1] for found in results]
        assert sum(parts) == whole and max(parts) <= 0.6 * whole
        # as planned: of the weights, their gradients and two moments half of the moments
        assert results[0][True][run][2] == pytest.approx(0.75 * results[0][False][run][2], rel=0.05)
    for name in ("", "3"):
        one, other = (torch.load(tmp_path / f"{shard}{name}.ckpt", weights_only=False) for shard in (False, True))
        assert_equal(one["state_dict"], other["state_dict"])
        states = one["optimizer_states"][0]["state"], other["optimizer_states"][0]["state"]
        assert_equal(*states)


def of_stages(rank: int, folder: Path) -> Any:
    options = {"replicas": [2, 1], "split_points": ["between"]}
    return [
        fit(rank, folder / f"{shard}.ckpt", 3, shard="optimizer" if shard else None, **options)  # type: ignore[arg-type]
        for shard in (False, True)
    ]


@pytest.mark.slow
def test_replicas_of_a_stage_share_its_states(tmp_path: Path) -> None:
    results = processes.each(3, of_stages, tmp_path, folder=tmp_path)
    for (whole, held, _), (divided, part, _) in results:
        assert_equal(whole, divided)
        assert part <= held
    assert sum(part for _, (_, part, _) in results[1:]) == results[1][0][1]  # of the stage with two


class Coupled(torch.optim.SGD):
    """All parameters step by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(gradients, torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
        return super().step(closure)


KINDS = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("kind", KINDS.split())
def test_optimizers_that_treat_each_parameter_by_itself_may_be_divided(kind: str, sharded: bool) -> None:
    model = MLP()
    before, drawn = state(model), torch.get_rng_state()
    layers = model.layers[:4].parameters(), model.layers[4:].parameters()
    made = getattr(torch.optim, kind)([{"params": layers[0], "lr": 0.01}, {"params": layers[1]}], lr=0.1)
    states = len(made.state)  # a few make them at once
    check_separable(made, sharded)
    assert len(made.state) == states
    assert_equal([state(model), torch.get_rng_state()], [before, drawn])


class Noisy(torch.optim.SGD):
    """Adds noise to each parameter that it steps."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        return result


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.AdamW, fused=True),
        partial(torch.optim.AdamW, foreach=True),
        partial(torch.optim.AdamW, capturable=True),  # cannot be tried on the host
        partial(torch.optim.SGD, momentum=0.9, nesterov=True, differentiable=True),
        torch.optim.SparseAdam,
        Noisy,
    ],
)
def test_stages_refuse_no_optimizer_that_is_not_found_to_couple_parameters(make: Any) -> None:
    check_separable(make(MLP().parameters(), lr=0.1), sharded=False)


@pytest.mark.parametrize("first", [1.0, 0.0])
@pytest.mark.parametrize(("sharded", "named"), [(True, "shard='optimizer'"), (False, "stages on several processes")])
def test_an_optimizer_that_couples_parameters_is_refused_by_name(sharded: bool, named: str, first: float) -> None:
    """Also if a scheduler begins at a rate of 0."""
    made = Coupled(MLP().parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: first)
    with pytest.raises(ConfigurationError, match=f"{named} with Coupled, which makes the step of a parameter depend"):
        check_separable(made, sharded)


def test_an_optimizer_that_holds_weights_of_two_kinds_is_not_divided_among_replicas() -> None:
    made = TwoKinds(MLP().parameters(), lr=0.1)
    check_separable(made, sharded=False)
    with pytest.raises(ConfigurationError, match="shard='optimizer' with TwoKinds, which has a method eval"):
        check_separable(made, sharded=True)


class Untrained(MLP):
    """Trains nothing."""

    def configure_optimizers(self) -> None:
        return None


def test_several_models_may_have_no_optimizer() -> None:
    pipeline(2, strategy={"num_pipelines": 2}, max_steps=1).fit(Untrained(), loader(MLP, 16, 8))


class OfCoupled(MLP):
    def configure_optimizers(self) -> Any:
        return Coupled(self.parameters(), lr=0.1)


def coupled(rank: int) -> None:
    pipeline(2, 2, {"verify": False}).fit(OfCoupled(), loader(MLP, 16, 8))


def test_so_it_is_before_stages_on_several_processes_train(tmp_path: Path) -> None:
    for outcome in processes.run(2, coupled, folder=tmp_path):
        assert outcome.error is not None and "stages on several processes with Coupled" in outcome.error
