"""Who asks for verification: the option ``verify``, or the command ``python -m lightning_avgpipe.verify``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lightning.pytorch.utilities.exceptions import _TunerExitException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_avgpipe.errors import ConfigurationError
from lightning_avgpipe.planning.memory import nbytes
from lightning_avgpipe.utils.device import port_of
from lightning_avgpipe.utils.patching import nothing
from lightning_avgpipe.utils.tensors import tensor_bytes
from lightning_avgpipe.verify.subject import Subject
from lightning_avgpipe.verify.verifier import Verifier

STEPS = "AVGPIPE_VERIFY"  # of the environment: optimizer steps, and the run ends after them
REPORT = "AVGPIPE_VERIFY_REPORT"  # the file that gets the verdict

_DEFAULT = 2
_COPIES = 4  # of the weights, while a step is compared: weights, gradients, and two states of an optimizer


def verifier(subject: Subject, verify: bool | int) -> Verifier | None:
    """What verifies a run of the trainer that fits; None if nobody asks for it.

    Raises:
        ConfigurationError: the whole model does not fit the process that would run it.
    """
    commanded = int(os.environ.get(STEPS, 0))
    steps = commanded or (_DEFAULT if verify is True else int(verify))
    if not steps:
        return None
    _check_memory(subject)
    return Verifier(subject, steps, _end(subject) if commanded else nothing)


def nothing_to_verify(verify: bool | int) -> None:
    """Say so where a run has one stage and one micro-batch."""
    if verify or STEPS in os.environ:
        text = (
            "verify: there is nothing to compare, since here steps run whole, in one process, as with strategy='auto'"
        )
        rank_zero_info(text)
        _report(text)


def refuse(verify: bool | int, reason: str) -> None:
    """Raise if somebody asks for what cannot be had.

    Raises:
        ConfigurationError: verification is asked for.
    """
    if verify or STEPS in os.environ:
        raise ConfigurationError(f"verify compares micro-batches with plain ones, but {reason}; use verify=False")


def end_of_run(verifier: Verifier | None) -> None:
    """After a run has been torn down that the command asked for: the script ends here."""
    if STEPS in os.environ and verifier is not None and verifier.succeeded:
        raise SystemExit(0)


def _end(subject: Subject) -> Callable[[str], None]:
    def end(text: str) -> None:
        if subject.cluster.leads:
            _report(text)
        subject.cluster.world.barrier("the end of verification")
        raise _TunerExitException  # in all processes: Lightning ends the run as if it were done

    return end


def _report(text: str) -> None:
    path = os.environ.get(REPORT)
    if path:
        Path(path).write_text(text)


def _check_memory(subject: Subject) -> None:
    module, device = subject.module, subject.cluster.device
    size = sum(map(tensor_bytes, (*module.parameters(), *module.buffers())))
    needed, free = _COPIES * size, port_of(device).memory.free_bytes()
    if subject.cluster.rank == 0 and needed > free:
        raise ConfigurationError(
            f"verify runs the whole model on rank 0, which takes {nbytes(needed)} ({_COPIES} times its {nbytes(size)} "
            f"of weights), but {nbytes(free)} are free on {device}; verify a model with fewer of the "
            "same layers, or use verify=False"
        )
