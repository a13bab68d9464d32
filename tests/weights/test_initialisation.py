"""Modules built on the meta device: every process gets its own stages only; the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from benchmarks import memory
from lightning_avgpipe.errors import ConfigurationError, StageError
from lightning_avgpipe.strategy.checkpoint_files import load_shards
from lightning_avgpipe.weights.initialisation import Origin, on_meta
from tests.comparing import assert_equal, assert_same_parameters
from tests.models import MLP, Regression, TinyTransformer, loader
from tests.processes import num_processes, two_and_one
from tests.trainers import SavesAtStart, pipeline


class Mixed(Regression):
    """Built in configure_model on meta: normalisation with buffers, attention, a tied embedding, a recurrent layer."""

    def __init__(self, optimizer: str = "adamw", meta: bool = True, tied: bool = True) -> None:
        super().__init__(optimizer)
        self.meta = meta
        self.tied = tied
        self.embed: nn.Module | None = None

    def configure_model(self) -> None:
        if self.embed is not None:
            return
        with torch.device("meta" if self.meta else "cpu"):
            self.embed = nn.Embedding(11, 8)
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.norm = nn.BatchNorm1d(8)
            self.head = nn.Linear(8, 11)
        if self.tied:
            self.head.weight = self.embed.weight

    example = TinyTransformer.example

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.lstm(self.embed(tokens))[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for layer in self.layers:
            x = x + torch.tanh(layer(x)).to(self.head.weight.device)
        return self.head(self.norm(x.flatten(0, 1)))

    def loss(self, batch: Any) -> Tensor:
        tokens, targets = batch
        return F.cross_entropy(self(tokens), targets.flatten())


def trained(num_stages: int, tied: bool = False, **options: Any) -> Mixed:
    torch.manual_seed(5)
    model = Mixed(tied=tied)
    strategy = {"num_microbatches": 4}
    pipeline(num_stages, strategy=strategy, max_epochs=1, **options).fit(
        model, loader(Mixed, 16, 8), loader(Mixed, 8, 8)
    )
    return model


def test_weights_and_training_do_not_depend_on_the_number_of_stages() -> None:
    whole = trained(1)
    assert not on_meta(whole)
    assert_equal(whole, trained(3))


def test_a_module_is_initialised_as_its_constructor_would() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 2), "norm": nn.BatchNorm1d(3)})
        module["linear"] = nn.Linear(256, 64)
    origin = Origin(module, 1, torch.device("cpu"))
    origin.fill_buffers()
    names = [name for name, _ in module.named_parameters()]
    found = origin.tensors(names)
    assert found.keys() == set(names)
    assert not found["attention.out_proj.bias"].any()
    assert not found["attention.in_proj_bias"].any()
    assert found["attention.in_proj_weight"].std().item() == pytest.approx((6 / 256) ** 0.5 / 3**0.5, rel=0.1)
    assert found["linear.weight"].abs().max() <= 256**-0.5
    assert torch.equal(found["norm.weight"], torch.ones(3))
    assert torch.equal(module["norm"].running_var, torch.ones(3))
    assert int(module["norm"].num_batches_tracked) == 0
    assert torch.equal(origin.tensors(["linear.bias"])["linear.bias"], found["linear.bias"])
    assert all(p.is_meta for p in module.parameters())


class Above(nn.Module):
    """Initialises what is in it, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.25)
        elif module is self or isinstance(module, Above):
            nn.init.constant_(module.scale, 2.0)


def test_a_module_above_may_initialise() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"above": Above()})
    found = Origin(module, 1, torch.device("cpu")).tensors([name for name, _ in module.named_parameters()])
    assert torch.equal(found["above.inner.0.weight"], torch.full((4, 4), 0.25))
    assert torch.equal(found["above.inner.1.weight"], torch.ones(4))
    assert torch.equal(found["above.scale"], torch.full((3,), 2.0))


class Helpless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Forgetful(Helpless):
    def reset_parameters(self) -> None:
        """Forgets to."""


class Positions(Forgetful):
    """Has a buffer of integers, and on request initialises it."""

    def __init__(self, knows: bool = False) -> None:
        super().__init__()
        self.knows = knows
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("none", torch.arange(0))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        if self.knows:
            torch.arange(4, out=self.positions)


class ByData(Positions):
    def reset_parameters(self) -> None:
        self.scale.data.fill_(1)
        self.positions.data.copy_(torch.arange(4))


class Masked(Forgetful):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).tril())

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


@pytest.mark.parametrize(("kind", "leaf"), [(Positions, "positions"), (Masked, "mask")])
def test_integers_and_flags_that_nothing_initialises_are_named(kind: type[nn.Module], leaf: str) -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"inner": kind()})
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__} 'inner' left numbers in '{leaf}' unset"):
        Origin(module, 1, torch.device("cpu")).fill_buffers()


def test_integers_are_initialised_or_loaded_or_have_contents() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"initialised": Positions(knows=True), "loaded": Masked(), "here": Positions()})
        module["by_data"] = ByData()
    module["here"].positions = torch.arange(4)
    mask = torch.eye(4, dtype=torch.bool)
    origin = Origin(module, 1, torch.device("cpu"), {"loaded.mask": mask})
    origin.fill_buffers()
    assert torch.equal(module["initialised"].positions, torch.arange(4))
    assert torch.equal(module["by_data"].positions, torch.arange(4))
    assert torch.equal(module["loaded"].mask, mask)
    scales = origin.tensors([f"{name}.scale" for name in module])
    assert all(torch.equal(scale, torch.ones(8)) for scale in scales.values())


@pytest.mark.parametrize("kind", [Helpless, Forgetful])
def test_a_module_that_cannot_be_initialised_is_named(kind: type[Helpless]) -> None:
    model = MLP()
    with torch.device("meta"):
        model.layers.append(kind())
    with pytest.raises((ConfigurationError, StageError), match=rf"{kind.__name__}.*reset_parameters"):
        pipeline(2, max_epochs=1).fit(model, loader(MLP, 8, 8))


def with_helpless() -> MLP:
    model = MLP("adamw")
    model.layers.append(Helpless())
    return model


def assert_resumes(
    make: Callable[[], Any], data: Any, folder: Path, strategy: dict[str, Any], on_meta: bool = True, **options: Any
) -> None:
    """Train two epochs, and the second one from a checkpoint, in another number of stages: the weights are the same.

    Args:
        make: makes the module.
        data: batches.
        folder: for checkpoints.
        strategy: its options.
        on_meta: whether the module that resumes is built on meta from the outside.
        options: of the trainer that resumes.
    """
    torch.manual_seed(3)
    through, strategy = make(), {"num_microbatches": 4, **strategy}
    saving = {"callbacks": [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)], "enable_checkpointing": True}
    pipeline(2, strategy=strategy, **saving).fit(through, data)
    with torch.device("meta") if on_meta else nullcontext():
        resumed = make()
    pipeline(3, strategy=strategy, **options).fit(resumed, data, ckpt_path=folder / "epoch=0.ckpt")
    assert_same_parameters(through, resumed)


def test_a_checkpoint_needs_no_initialisation(tmp_path: Path) -> None:
    assert_resumes(with_helpless, loader(MLP, 16, 8), tmp_path, {})


class Renamed(MLP):
    """Loads checkpoints in which its first layer has another name, and numbers twice as large."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0]._register_load_state_dict_pre_hook(self.convert)

    @staticmethod
    def convert(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}kernel" in state_dict:
            state_dict[f"{prefix}weight"] = state_dict.pop(f"{prefix}kernel") / 2


class RenamedByOverride(MLP):
    """Loads checkpoints with its parts under other names."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        renamed = {name.replace("kernel", "weight"): value for name, value in state_dict.items()}
        first = renamed["layers.0.weight"]
        renamed["layers.0.weight"] = first / 2
        own = {name.removeprefix("layers."): value for name, value in renamed.items()}
        return self.layers.load_state_dict(own, strict, assign)


class RenamedByLayer(MLP):
    """A layer converts what it loads, and hands it on by keywords."""

    class Layer(nn.Linear):
        def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
            Renamed.convert(state_dict, prefix)
            names = ("strict", "missing_keys", "unexpected_keys", "error_msgs")
            given = {"state_dict": state_dict, "prefix": prefix, "local_metadata": local_metadata}
            super()._load_from_state_dict(**given, **dict(zip(names, args, strict=True)))

    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = self.Layer(8, 8)


def with_kernel(state: dict[str, Tensor]) -> None:
    state["layers.0.kernel"] = state.pop("layers.0.weight") * 2


class Shared(MLP):
    """Has one layer under two names."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.again = self.layers[0]


def with_one_name(state: dict[str, Tensor]) -> None:
    for name in ("again.weight", "again.bias"):
        del state[name]


@pytest.mark.parametrize(
    ("saves", "loads", "change"),
    [
        *((MLP, kind, with_kernel) for kind in (Renamed, RenamedByOverride, RenamedByLayer)),
        (Shared, Shared, with_one_name),
    ],
)
def test_a_module_on_meta_loads_what_its_hooks_and_names_make_of_a_checkpoint(
    saves: type[MLP], loads: type[MLP], change: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    saved, path = saves(), tmp_path / "some.ckpt"
    runner = pipeline(2, max_epochs=1)
    runner.fit(saved, loader(MLP, 8, 8))
    runner.save_checkpoint(path, weights_only=True)
    checkpoint = torch.load(path)
    change(checkpoint["state_dict"])
    torch.save(checkpoint, path)
    with torch.device("meta"):
        model = loads()
    pipeline(2).validate(model, loader(MLP, 8, 8), ckpt_path=path, verbose=False)
    assert_same_parameters(saved, model)


class Packs(torch.optim.AdamW):
    """Has its averages in one entry of checkpoints, as optimizers in 8 bits of bitsandbytes do."""

    def state_dict(self) -> dict[str, Any]:
        whole = super().state_dict()
        packed = {n: {"step": s["step"], "packed": [s["exp_avg"], s["exp_avg_sq"]]} for n, s in whole["state"].items()}
        return {**whole, "state": packed}

    def load_state_dict(self, state_dict: Any) -> None:
        states = {}
        for number, state in state_dict["state"].items():
            first, second = state["packed"]
            states[number] = {"step": state["step"], "exp_avg": first, "exp_avg_sq": second}
        super().load_state_dict({**state_dict, "state": states})


class Wraps(torch.optim.Optimizer):
    """Steps by another optimizer, whose groups and states are its own."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.base = torch.optim.AdamW(parameters, lr)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.base.param_groups, self.base.state = self.param_groups, self.state

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups, self.state = self.base.param_groups, self.base.state


class Stepping(MLP):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.save_hyperparameters(ignore="kind")

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=1e-2)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *((kind, strategy) for kind in (Packs, Wraps) for strategy in ({}, {"num_pipelines": 2})),
        (torch.optim.SGD, {"save_distributed_checkpoint": True}),  # has none
    ],
)
def test_an_optimizer_resumes_with_its_states(kind: Any, strategy: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes(partial(Stepping, kind), loader(MLP, 64, 8), tmp_path, strategy)


def work(folder: Path) -> dict[str, Any]:
    """Train, save, test, predict, train on and resume, with a module that no process ever holds as a whole."""
    torch.manual_seed(5)
    model = Mixed()
    data, more = loader(Mixed, 16, 8), loader(Mixed, 8, 8, seed=1)
    strategy, world_size = {"num_microbatches": 4}, num_processes()

    def runner(**options: Any) -> Any:
        return pipeline(2, world_size, strategy, **options)

    first = runner(max_epochs=1, callbacks=[SavesAtStart(folder / "initial.ckpt")])
    first.fit(model, data, more)
    held = {name for name, p in model.named_parameters() if not p.is_meta}
    first.save_checkpoint(folder / "first.ckpt")
    tested = first.test(model, more, verbose=False)
    predicted = first.predict(model, more)
    again = runner(max_epochs=1, callbacks=[SavesAtStart(folder / "before_again.ckpt")])
    again.fit(model, data)
    again.save_checkpoint(folder / "again.ckpt")
    torch.manual_seed(9)  # what is loaded must not depend on it
    resumed = Mixed()
    last = runner(max_epochs=2, callbacks=[SavesAtStart(folder / "before_resumed.ckpt")])
    torch.manual_seed(5)
    last.fit(resumed, data, ckpt_path=folder / "first.ckpt")
    last.save_checkpoint(folder / "resumed.ckpt")
    alone = runner().validate(Mixed(), more, verbose=False)
    return {"held": held, "tested": tested, "predicted": predicted, "alone": alone}


def test_a_module_without_contents_resumes_from_a_distributed_checkpoint(tmp_path: Path) -> None:
    sharded, saving = {"save_distributed_checkpoint": True}, SavesAtStart(tmp_path / "before")
    make, data = partial(Mixed, tied=False), loader(Mixed, 16, 8)
    assert_resumes(make, data, tmp_path, sharded, on_meta=False, callbacks=[saving])
    first, before = (load_shards(tmp_path / name, True, None) for name in ("epoch=0.ckpt", "before"))
    for name in ("state_dict", "optimizer_states"):
        assert_equal(before[name], first[name])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, *two_and_one(work, folder)


def test_no_process_holds_the_stages_of_others(runs: Any) -> None:
    _, (last, first), one = runs
    assert first["held"] | last["held"] == one["held"] == {name for name, _ in built().named_parameters()}
    assert first["held"] & last["held"] <= {"embed.weight"}  # both use it
    assert first["held"] - last["held"] and last["held"] - first["held"]


def built() -> Mixed:
    model = Mixed(meta=False)
    model.configure_model()
    return model


@pytest.mark.parametrize("name", ["initial", "first", "before_again", "again", "resumed"])
def test_checkpoints_are_ordinary_and_equal_those_of_one_process(runs: Any, name: str) -> None:
    folder, _, _ = runs
    two, one = (torch.load(folder / sub / f"{name}.ckpt", weights_only=True) for sub in ("two", "one"))
    assert_equal(two["state_dict"], one["state_dict"])
    assert_equal(two["optimizer_states"][0]["state"], one["optimizer_states"][0]["state"])
    assert bool(one["optimizer_states"][0]["state"]) == (not name.startswith(("initial", "before")))
    model = built()
    model.load_state_dict(two["state_dict"])


@pytest.mark.parametrize("sub", ["two", "one"])
def test_a_checkpoint_before_the_first_batch_has_what_training_begins_with(runs: Any, sub: str) -> None:
    resumed, first, again = (
        torch.load(runs[0] / sub / f"{name}.ckpt", weights_only=True)
        for name in ("before_resumed", "first", "before_again")
    )
    for name in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(resumed[name], first[name], rtol=0, atol=0)
    torch.testing.assert_close(again["state_dict"], first["state_dict"], rtol=0, atol=0)


def test_evaluation_after_training_and_alone_equals_one_process(runs: Any) -> None:
    _, two, one = runs
    for rank in two:
        assert rank["tested"] == one["tested"]
        # of a value that crosses processes the strides may differ, and with them the kernel
        assert rank["alone"] == [pytest.approx(metrics, rel=1e-6) for metrics in one["alone"]]
    torch.testing.assert_close(two[0]["predicted"], one["predicted"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_no_process_ever_holds_more_than_its_share_and_one_unit() -> None:
    layers, unit = memory.LAYERS, 4.0  # MiB
    for row in memory.run(meta=True):
        assert row["before"] < 10
        assert row["peak"] < row["share"] * 1.3 + unit
    for row in memory.run(meta=False):
        assert row["before"] > layers * unit * 0.95
        assert row["after"] < row["share"] * 1.1 + unit
