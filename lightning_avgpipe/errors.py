"""The errors that this package raises on purpose. A message says what was found, what is needed and what to do."""


class AvgPipeError(RuntimeError):
    """Base class of all errors of lightning_avgpipe."""


class ConfigurationError(AvgPipeError, ValueError):
    """An option, or a combination of options, that cannot work; raised before training starts."""


class BatchError(AvgPipeError, ValueError):
    """A batch that cannot be split into micro-batches."""


class CheckpointError(AvgPipeError):
    """A checkpoint that cannot be written or read. An earlier checkpoint file is left unchanged."""


class CaptureError(AvgPipeError):
    """A step function that cannot be traced, or that cannot be pipelined at all."""


class OnlyInUnitsError(CaptureError):
    """Code of a step function that runs between units does what only the inside of a unit may do.

    Attributes:
        module: path of the module whose code does it, which may be made a unit; "" for the code of the step itself.
        does: what it does, for messages.
    """

    def __init__(self, message: str, module: str = "", does: str = "") -> None:
        super().__init__(message)
        self.module, self.does = module, does


class SkippedStepError(CaptureError):
    """A training step returned None for the micro-batch on which it was traced. Another micro-batch may work."""


class MicroBatchError(CaptureError):
    """A step function that cannot be traced on a part of a batch. The whole batch may work; all processes raise it."""


class PartitionError(AvgPipeError, ValueError):
    """A model that cannot be divided into the wanted stages."""


class ScheduleError(AvgPipeError, ValueError):
    """An invalid schedule: wrong sizes, or missing or repeated actions."""


class DeadlockError(ScheduleError):
    """A schedule in which a stage waits for a message that is never sent."""


class TuningError(AvgPipeError, ValueError):
    """A profile that cannot be used, or one for which no setting fits the memory."""


class MemoryShortage(AvgPipeError):
    """A trial iteration that did not fit the memory of some process; all processes raise it together."""


class StepChangedError(AvgPipeError):
    """A step function did something else than when it was traced."""


class VerificationError(AvgPipeError):
    """An iteration differs from a plain run of the same micro-batches. The message names the first difference."""


class AbsentValueError(AvgPipeError):
    """Code of one stage computes with a value that lives on another stage."""


class UnsendableError(AvgPipeError, TypeError):
    """An object that has to be sent to another process cannot be pickled."""


class StageError(AvgPipeError):
    """User code raised StopIteration within an action. Any other exception is passed on, with a note of the action."""


class NonFiniteError(AvgPipeError, ArithmeticError):
    """A gradient is infinite or NaN. No optimizer has stepped with it."""


class PeerError(AvgPipeError):
    """Another process of the pipeline failed or is gone. The message contains its report, if there is one."""


def described(error: BaseException) -> str:
    """Return the type and text of an error, also of one whose ``str()`` raises."""
    try:
        text = str(error)
    except Exception as unprintable:
        text = f"(str() of it raises {type(unprintable).__name__})"
    return f"{type(error).__name__}: {text}".rstrip(": ")
