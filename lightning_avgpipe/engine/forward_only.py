"""Stages that run forwards only, since they have nothing to train: which these are now, and checks that it is true."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from lightning_avgpipe.capture.graph import CallGraph
from lightning_avgpipe.comm.message import Message
from lightning_avgpipe.errors import StepChangedError
from lightning_avgpipe.planning.freezing import num_frozen
from lightning_avgpipe.planning.program import StageProgram


class Freezing:
    """Follows which parameters of a step function are trained.

    Args:
        graph: of the step.
        cuts: K-1 positions.
        module: the whole module; parameters of other stages may be without contents.
    """

    def __init__(self, graph: CallGraph, cuts: Sequence[int], module: nn.Module) -> None:
        self._graph = graph
        self._cuts = cuts
        used = {name for node in graph.nodes for name in node.parameters}
        self._parameters = [(n, p) for n, p in module.named_parameters(remove_duplicate=False) if n in used]
        self._flags: tuple[bool, ...] | None = None
        self._stages = 0

    @property
    def stages(self) -> int:
        """How many stages, from the first, have nothing to train now."""
        flags = tuple(parameter.requires_grad for _, parameter in self._parameters)
        if flags != self._flags:
            self._flags, self._stages = flags, num_frozen(self._graph, self._cuts, self.trained)
        return self._stages

    @property
    def trained(self) -> frozenset[str]:
        """Full names of the parameters that the step uses and that are trained now."""
        return frozenset(name for name, parameter in self._parameters if parameter.requires_grad)


def check_same(message: Message | None, program: StageProgram, forward_only: int) -> None:
    """Check that a stage and the one before it know of the same stages that run forwards only.

    Args:
        message: of the stage before.
        program: of the stage.
        forward_only: how many stages, from the first, run forwards only as this one sees it.
    Raises:
        StepChangedError: they do not.
    """
    if message is not None and message.forward_only != forward_only:
        raise StepChangedError(
            f"of {program.num_stages} stages the first {message.forward_only} have nothing to train as stage "
            f"{program.stage - 1} sees it, and the first {forward_only} as stage {program.stage} sees it; freeze and "
            "unfreeze parameters on every process, not only if is_global_zero"
        )


def check_nothing_asks(sent: Iterable[Tensor], program: StageProgram) -> None:
    """Check that nothing that was computed with parameters waits for a gradient, which nobody will send.

    Raises:
        StepChangedError: something does.
    """
    # a leaf may ask for one: nothing was computed with parameters to get it
    if any(tensor.grad_fn is not None for tensor in sent):
        raise StepChangedError(
            f"stage {program.stage} has nothing to train by requires_grad of its parameters, and yet what it computes "
            f"asks for a gradient, which it did not when {program.graph.step} was captured: the step calls "
            "requires_grad_() in some batches only, or uses parameters that it did not use then. Set requires_grad of "
            "parameters before the step, and let the first batch do what all others do"
        )
