"""The memory of the stages of a model without weights: ``python -m lightning_avgpipe advise --meta config.json``.

The model is built from its configuration with tensors that have shapes and no contents, and its step is followed once:
what each layer would keep for its backward is counted as the step asks for it. So a model of any size takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from lightning_avgpipe.advise.ways import even
from lightning_avgpipe.capture.flop_counter import Flops
from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.costs import UnitCosts
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.schedule import build, peak_stash
from lightning_avgpipe.utils import tree
from lightning_avgpipe.utils.names import table
from lightning_avgpipe.utils.script import at_least_one

METHODS = ("full", "lora", "4bit")
_ADAM = 2  # states of the size of a parameter
# Bytes of a weight by bitsandbytes: half of one, a scale of 8 bits for 64 weights, and one of 32 bits for 256 scales.
_FOUR_BITS = 1 / 2 + 1 / 64 + 4 / (64 * 256)


@dataclass(eq=False)
class Unit:
    """A part of a model that is never divided, for one micro-batch.

    Attributes:
        weights: bytes of each parameter that it uses, by the parameter.
        trained: bytes of those that are trained.
        stash: bytes that it keeps for its backward.
        given: bytes that a layer is given, which are all that it keeps if it is computed again.
        flops: operations of its forward.
    """

    weights: dict[int, float] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)
    stash: int = 0
    given: int = 0
    flops: float = 0


@dataclass(frozen=True)
class StageBytes:
    """The bytes that one stage holds.

    Attributes:
        units: numbers of its units, ``a .. b-1``.
        weights: bytes of parameters.
        gradients: bytes of gradients.
        states: bytes of the states of AdamW.
        activations: bytes that the micro-batches in flight keep for their backwards.
    """

    units: tuple[int, int]
    weights: int
    gradients: int
    states: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all bytes."""
        return self.weights + self.gradients + self.states + self.activations


@dataclass(frozen=True)
class Question:
    """A way to train a model, of which the memory is asked.

    Attributes:
        config: file with the configuration of the model, or its folder.
        dtype: dtype of the weights.
        rank: rank of the adapters of LoRA.
        targets: names of the modules that have adapters, as peft takes them.
        batch: samples of a micro-batch.
        length: tokens of a sample.
        checkpointing: whether each layer is computed again in its backward.
    """

    config: str
    dtype: torch.dtype = torch.bfloat16
    rank: int = 16
    targets: Sequence[str] | str = "all-linear"
    batch: int = 1
    length: int = 2048
    checkpointing: bool = False


def units_of(question: Question, method: str) -> list[Unit]:
    """Return the units of a causal language model: what comes before its layers, each layer, and what comes after.

    Args:
        question: the model, and the size of a micro-batch.
        method: one of ``METHODS``: all weights are trained; or adapters; or adapters of a model in 4 bits.
    Raises:
        ConfigurationError: transformers or peft is missing, or the model has no list of layers.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigurationError(f"--meta needs {error.name}: pip install 'lightning_avgpipe[large]'") from error

    config = transformers.AutoConfig.from_pretrained(question.config)
    config.use_cache = False
    with FakeTensorMode():
        with torch.random.fork_rng(devices=[]):
            model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=question.dtype)
        linear = {id(m.weight) for m in _layers(model).modules() if isinstance(m, nn.Linear)}
        if method != "full":
            model = _adapted(model, question)
        followed = _Followed(model.train())
        with followed.following():
            tokens = torch.ones(question.batch, question.length, dtype=torch.long)
            model(input_ids=tokens, labels=tokens)
    for unit, parameters in zip(followed.units, followed.parameters, strict=True):
        for key, parameter in parameters.items():
            size = _FOUR_BITS if method == "4bit" and key in linear else parameter.element_size()
            unit.weights[key] = parameter.numel() * size
            unit.trained[key] = parameter.nbytes * parameter.requires_grad
    return followed.units


def _layers(model: nn.Module) -> nn.ModuleList:
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    if not found:
        raise ConfigurationError(
            f"{type(model).__name__} has no list of layers to divide; train a script on it, which prints its plan"
        )
    return max(found, key=len)


def _adapted(model: Any, question: Question) -> nn.Module:
    try:
        import peft
    except ImportError as error:
        raise ConfigurationError(f"adapters need {error.name}: pip install 'lightning_avgpipe[large]'") from error
    targets = question.targets if isinstance(question.targets, str) else [*question.targets]
    return peft.get_peft_model(model, peft.LoraConfig(r=question.rank, target_modules=targets, task_type="CAUSAL_LM"))


class _Followed:
    """A step that is followed through the units of a model.

    Args:
        model: model with tensors without contents.

    Attributes:
        units: units, in the order in which they run.
        parameters: parameters that each of them uses, by their ids.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._layers = model, _layers(model)
        self.units = [Unit() for _ in range(len(self._layers) + 2)]
        self.parameters: list[dict[int, nn.Parameter]] = [{} for _ in self.units]
        self._now = 0
        self._owned = {p.untyped_storage()._cdata for p in model.parameters()}
        self._kept: dict[int, Tensor] = {}  # by their memory; they stay, so that nothing else gets the same

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Within this context note what is called, and what is kept for backwards."""
        with contextlib.ExitStack() as undo:
            for module in self._model.modules():
                undo.callback(module.register_forward_pre_hook(self._called).remove)
            for i, layer in enumerate(self._layers):
                begin = layer.register_forward_pre_hook(self._entered(i + 1), with_kwargs=True, prepend=True)
                undo.callback(begin.remove)
                undo.callback(layer.register_forward_hook(self._left(i + 2)).remove)
            undo.enter_context(saved_tensors_hooks(self._keep, lambda tensor: tensor))
            self._flops = undo.enter_context(Flops())
            yield
            self._count()

    def _entered(self, number: int) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._count()
            self._now = number
            self.units[number].given = tree.tensors((args, kwargs))[0].nbytes  # the rest is the same for all layers

        return enter

    def _left(self, number: int) -> Any:
        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self._count()
            self._now = number

        return leave

    def _count(self) -> None:
        self.units[self._now].flops += self._flops.get_total_flops() - sum(unit.flops for unit in self.units)

    def _called(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            self.parameters[self._now][id(parameter)] = parameter

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._kept and storage._cdata not in self._owned:
            self._kept[storage._cdata] = tensor
            self.units[self._now].stash += storage.nbytes()
        return tensor


def stages_of(units: Sequence[Unit], num_stages: int, question: Question, num_microbatches: int) -> list[StageBytes]:
    """Return the bytes of each stage, of about equal numbers of operations, with the schedule 1F1B.

    Args:
        units: units of the model.
        num_stages: K, number of stages.
        question: whether layers are computed again.
        num_microbatches: M, number of micro-batches of a batch.
    """
    seconds = tuple(unit.flops for unit in units)
    none = (0.0,) * (len(units) - 1)
    bounds = even(UnitCosts(seconds, seconds, none, none, (0.0,) * len(units)), num_stages)
    found = []
    for (a, b), flights in zip(bounds, peak_stash(build("1f1b", num_stages, num_microbatches)), strict=True):
        own = units[a:b]
        layers = [unit for unit in own if unit.given and question.checkpointing]
        kept = sum(unit.given if unit in layers else unit.stash for unit in own)
        again = max((unit.stash - unit.given for unit in layers), default=0)  # of one layer, while its backward runs
        weights = sum({key: size for unit in own for key, size in unit.weights.items()}.values())
        trained = sum({key: size for unit in own for key, size in unit.trained.items()}.values())
        found.append(StageBytes((a, b), int(weights), trained, _ADAM * trained, flights * kept + again))
    return found


def memory_table(
    question: Question, stages: Sequence[int], methods: Sequence[str], num_microbatches: int | None = None
) -> str:
    """Return a table of the bytes of each stage, for each number of stages and way to train.

    Args:
        question: the model, and the size of a micro-batch.
        stages: numbers of stages.
        methods: ways to train.
        num_microbatches: M; None: four per stage.
    """
    rows: list[Sequence[str]] = [
        ("stages", "training", "stage", "layers", "weights", "gradients", "states", "activations", "together")
    ]
    for method in methods:
        units = units_of(question, method)
        for count in stages:
            found = stages_of(units, count, question, num_microbatches or 4 * count)
            for k, stage in enumerate(found):
                a, b = stage.units
                layers = min(b, len(units) - 1) - max(a, 1)
                parts = (stage.weights, stage.gradients, stage.states, stage.activations, stage.total)
                rows.append((str(count), method, str(k), str(layers), *map(nbytes, parts)))
    return "\n".join(table(rows))


def main(arguments: Sequence[str]) -> int:
    """Print the memory of the stages of a model; returns the exit status."""
    options = _parser().parse_args(arguments)
    question = Question(
        options.meta, getattr(torch, options.dtype), options.rank, options.targets or "all-linear", options.batch,
        options.length, options.checkpointing,
    )  # fmt: skip
    print(memory_table(question, options.stages, options.training, options.microbatches))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lightning_avgpipe advise --meta",
        description="Print what each stage of a causal language model of transformers holds, with AdamW and the "
        "schedule 1F1B, from the model's configuration alone. What operations need for an instant is not counted.",
    )
    parser.add_argument("--meta", required=True, metavar="CONFIG", help="the configuration, or the folder that has it")
    parser.add_argument("--stages", type=at_least_one, nargs="+", default=[2, 4], help="how many (default: 2 4)")
    parser.add_argument("--training", choices=METHODS, nargs="+", default=METHODS, help="(default: all)")
    parser.add_argument("--microbatches", type=at_least_one, help="of a batch (default: four per stage)")
    parser.add_argument("--batch", type=at_least_one, default=1, help="samples of a micro-batch (default: 1)")
    parser.add_argument("--length", type=at_least_one, default=2048, help="tokens of a sample (default: 2048)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--rank", type=at_least_one, default=16, help="of LoRA's adapters (default: 16)")
    parser.add_argument("--targets", nargs="+", help="modules that have adapters (default: all linear layers)")
    parser.add_argument("--checkpointing", action="store_true", help="each layer is computed again in its backward")
    return parser
