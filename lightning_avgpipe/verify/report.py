"""The report of a verification: what was compared, likely causes of a difference, and the key of a stored verdict."""

from __future__ import annotations

import hashlib
import itertools
import sys
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_avgpipe.capture.cost_cache import fingerprint
from lightning_avgpipe.planning import Plan
from lightning_avgpipe.state.objects import ATOMS
from lightning_avgpipe.state.outside import nested_code, users_code
from lightning_avgpipe.utils.lightning import pl
from lightning_avgpipe.utils.names import listed
from lightning_avgpipe.verify.state import attributes

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_avgpipe", "torchmetrics", "builtins", "abc")


def key_of(module: nn.Module, options: Mapping[str, Any], processes: int, plan: Plan, device: torch.device) -> str:
    """Return a digest of what decides whether a pipeline trains as a plain run does.

    The digest covers what the step does with its first micro-batch and how it is divided; the code of the module's
    classes outside of installed libraries, and of the user's functions that it calls; the structure of the module, and
    its attributes that are numbers or text; the strategy's options, the number of processes, and versions. Data and
    contents of weights are left out.
    """
    digest = hashlib.blake2b(digest_size=12)
    step, _ = fingerprint(plan.graph, module, device)
    plain = sorted((name, value) for name, value in attributes(module).items() if type(value) in ATOMS)
    kinds = dict.fromkeys(kind for m in module.modules() for kind in type(m).__mro__)
    roots = sorted({kind.__module__.partition(".")[0] for kind in kinds})
    versions = [(root, getattr(sys.modules.get(root), "__version__", "")) for root in roots]
    facts = torch.__version__, pl.__version__, versions, processes, sorted((k, repr(v)) for k, v in options.items())
    for part in (facts, step, plan.cuts, sorted(plan.copied), repr(module), plain):
        digest.update(repr(part).encode())
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in _LIBRARIES]
    functions = [(name, function) for kind in own for name, function in _functions(kind)]
    of_classes = ((name, code) for name, function in functions for code in nested_code(function.__code__))
    called = (("", code) for code in users_code([function for _, function in functions], ()))
    for name, code in itertools.chain(of_classes, called):
        constants = [constant for constant in code.co_consts if not isinstance(constant, types.CodeType)]
        digest.update(code.co_code + repr((name, code.co_names, code.co_varnames, constants)).encode())
    return digest.hexdigest()


def _functions(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    for name, member in vars(kind).items():
        function = getattr(member, "__func__", getattr(member, "fget", member))
        function = getattr(function, "__wrapped__", function)
        if isinstance(function, types.FunctionType):
            yield name, function


# -- what was compared -------------------------------------------------------------------------------------------------


_SHOWN = 5  # names in the text


@dataclass
class Tally:
    """Counts of what has been compared.

    Attributes:
        losses: number of losses.
        names: kind, such as "gradients" -> names of the tensors that are equal.
        omitted: kinds that are not compared.
        unknown: names of attributes with values that cannot be compared.
        rounds: whether results are equal only up to rounding, see :attr:`Subject.rounds`.
    """

    losses: int = 0
    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    omitted: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    rounds: bool = False

    def __str__(self) -> str:
        numbers = {what: len(names) for what, names in self.names.items() if names}
        exact = [f"{self.losses} losses"]
        exact += [f"{numbers[what]} {what}" for what in ("gradients", "weights", "buffers") if what in numbers]
        rounded = [
            f"{numbers[what]} {what}" for what in ("logged values", "tied gradients", "later losses") if what in numbers
        ]
        text = f"{', '.join(exact)} equal {'up to rounding' if self.rounds else 'bit for bit'}"
        text += f"; {' and '.join(rounded)} up to rounding" if rounded else ""
        omitted = sorted(self.omitted)
        if self.unknown:
            omitted.append(f"{len(self.unknown)} attributes ({listed([*map(repr, sorted(self.unknown))], _SHOWN)})")
        return text + (f"; not compared: {', '.join(omitted)}" if omitted else "")


# -- likely causes -----------------------------------------------------------------------------------------------------


_STATE = (
    "the step reads or changes something outside of parameters, buffers and attributes (a global, a list or object "
    "that was made elsewhere)"
)
_CAUSES = {
    "the loss": f"{_STATE}, or draws random numbers in an unknown way; or a stage received a wrong value; in a later "
    "call of a closure, the optimizer may look at all parameters at once, of which each process has a part",
    "the gradient": "a gradient was lost, counted twice or given a wrong weight on its way through the stages; or a "
    "tensor hook did not run, ran on another stage, or reads what the forwards of later micro-batches change",
    "the weight after the optimizer step": "the optimizer looks at all parameters at once (a norm over the model), of "
    "which each process has a part; or something else changes weights",
    "the buffer": "code between submodules changes it on several stages or on none",
    "the attribute": "code between submodules changes it on several stages or on none, since such code runs on every "
    "stage; or a backward hook changes it, which runs on the process of its stage only",
    "the logged value": "it was logged with a different weight, or not by every micro-batch",
}
_WHAT_TO_DO = (
    "What to do: use split_points to keep the named submodule, and those that it works with, on one stage; register "
    "what changes as a buffer of the submodule that changes it; or train with strategy='auto' meanwhile, and report "
    "this message. verify=False turns this check off."
)


_COMPILED = (
    "Something ran compiled by torch.compile, perhaps within a library: the pipeline runs it uncompiled where it is "
    "part of a module that was cut or draws random numbers, and the compiler rounds differently. If the difference is "
    "that small, verify again with TORCH_COMPILE_DISABLE=1 in the environment, so that nothing is compiled. "
)


def advice(kind: str, compiled: bool = False) -> str:
    """Return a text with the likely causes of a difference, and what to do.

    Args:
        kind: kind of the difference, such as "the gradient".
        compiled: whether anything ran compiled by torch.compile.
    """
    cause = _CAUSES.get(kind, f"{_STATE}, or the effects of capturing it were not undone completely")
    return f"Likely: {cause}. {_COMPILED if compiled else ''}{_WHAT_TO_DO}"
