"""Weight policies at work: every stage's gradients are those of the versions that the policy says."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_avgpipe.engine.execution import Execution
from lightning_avgpipe.engine.observer import Observer
from lightning_avgpipe.engine.pipeline import Pipeline
from lightning_avgpipe.engine.task import Task
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.divisible import Divisible, Step
from lightning_avgpipe.planning.planner import Planner
from lightning_avgpipe.planning.recompute_policy import Recompute
from lightning_avgpipe.systems.asynchronous.store import WeightStore
from lightning_avgpipe.systems.asynchronous.stream import Stream
from lightning_avgpipe.systems.asynchronous.versions import POLICIES, PipeOptim, Place, VersionPolicy
from lightning_avgpipe.utils.random_streams import RandomKey
from tests.systems.asynchronous.policies import Attention, play
from tests.threads import alone

K = 3


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Attention() for _ in range(K))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, target = batch
        for part in self.parts:
            x = part(x)
        return F.mse_loss(x, target)


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.parts[2].layer = self.parts[0].layer


class Run:
    """A chain in this process, one part per stage, under a policy."""

    def __init__(self, module: Chain, policy: VersionPolicy, num_microbatches: int, make: Any) -> None:
        self.num_microbatches = num_microbatches
        sample = samples(1)[0]
        planner = Planner(Divisible(module), K, ["parts.1", "parts.2"])
        plan = planner.plan(Step("training_step", lambda *args: module.training_step(*args), (sample, 0)))
        cluster = alone(K)
        cluster.open()
        self.optimizers = [make(part.parameters()) for part in module.parts]
        self.weights = WeightStore(module, policy, lambda: self.optimizers)
        recompute = Recompute(stages=policy.backward is not None)
        self.cluster = cluster
        self.pipeline = Pipeline(cluster, module, Execution(recompute), weights={"training_step": self.weights})
        self.pipeline.load(plan.graph, plan.cuts)
        self.module = module
        self.most = [0] * K

    def step(self) -> None:
        self.weights.keep()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.weights.stepped()

    def task(self, parts: list[Any]) -> Task:
        return Task(
            lambda i, *args: self.module.training_step(*args),
            [(part, 0) for part in parts],
            lambda i, loss: loss / self.num_microbatches,
            RandomKey(0, 0),
        )

    def perform(self, parts: list[Any]) -> None:
        """From one drain to the next."""
        size = self.num_microbatches
        batches = [parts[i : i + size] for i in range(0, len(parts), size)]
        self.weights.begin(size)
        stream = Stream(self.pipeline, "training_step", self.weights, size)
        for _ in range(len(batches)):
            while batches and stream.known <= stream.batch + Place(0, K, size).batches_ahead:
                stream.take(self.task(batches.pop(0)))
            assert stream.run([Held(self)]).results is not None
            self.step()
        stream.end()


class Held(Observer):
    """Counts copies."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def perform(self, work: Any, do: Any) -> Any:
        message = do()
        self.run.most[work.stage] = max(self.run.most[work.stage], self.run.weights.held(work.stage))
        return message


def samples(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = torch.randn(count, 2, 2, 4, 6, generator=generator)
    return [(x, target) for x, target in made]


MOMENTUM = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.05)
CASES = [(policy, 1) for policy in POLICIES.values() if policy.name != "2bw"]
CASES += [(POLICIES["2bw"], 3), (POLICIES["stash"], 2), (PipeOptim(delta="increment").policy, 2)]
CASES += [(PipeOptim(exact_backward=False).policy, 1)]


@pytest.mark.parametrize(("policy", "num_microbatches"), CASES, ids=lambda case: getattr(case, "name", case))
def test_weights_and_copies_are_those_of_a_pipeline_that_keeps_all_versions(
    policy: VersionPolicy, num_microbatches: int
) -> None:
    torch.manual_seed(0)
    module = Chain()
    make = ADAMW if policy.name == "spectrain" else MOMENTUM
    parts = samples(6 * num_microbatches)
    expected = play(copy.deepcopy(module).parts, make, policy, parts, F.mse_loss, num_microbatches)
    run = Run(module, policy, num_microbatches, make)
    run.perform(parts)
    for part, stage in zip(module.parts, expected, strict=True):
        for (name, found), wanted in zip(part.named_parameters(), stage.module.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6, msg=name)
            assert found.grad is None
    buffers = policy.backward is not None  # one that all actions share, and that is empty between them
    for k, most in enumerate(run.most):
        assert most == policy.held(Place(k, K, num_microbatches)) - (buffers and any_prediction(policy, k))


def any_prediction(policy: VersionPolicy, stage: int) -> bool:
    return any(use.ahead for i in range(9) for use in policy.uses(Place(stage, K), i))


def test_hooks_on_gradients_act_on_those_of_all_versions() -> None:
    torch.manual_seed(0)
    module = Chain()
    weight = module.parts[0].layer.linear1.weight
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    before = weight.detach().clone()
    run = Run(module, POLICIES["stash"], 1, MOMENTUM)
    run.perform(samples(4))
    assert len(seen) == 4
    assert module.parts[0].layer.linear1.weight is weight
    assert not torch.equal(weight, before)


def test_a_parameter_of_two_stages_is_refused_by_name() -> None:
    run = Run(Tied(), POLICIES["stash"], 1, lambda p: torch.optim.SGD(p, lr=0.1))
    with pytest.raises(ConfigurationError, match=r"parts.0.layer.*stages 0 and 2"):
        run.perform(samples(2))
