"""Every error that this package raises on purpose: what was found, what is needed, what to do."""


class AvgPipeError(RuntimeError):
    """Base of all errors of lightning_avgpipe."""


class ConfigurationError(AvgPipeError, ValueError):
    """An option, or a combination of options, that cannot work; raised before training starts."""


class BatchError(AvgPipeError, ValueError):
    """A batch that cannot be split into micro-batches."""


class CheckpointError(AvgPipeError):
    """A checkpoint that cannot be written or read; the one before it is as it was."""


class CaptureError(AvgPipeError):
    """A step function that cannot be followed, or that cannot be pipelined at all."""


class SkippedStepError(CaptureError):
    """A training step returned None for the micro-batch that it was to be followed on; another one may do."""


class MicroBatchError(CaptureError):
    """A step function that cannot be followed on a part of a batch; the whole batch may do. All processes raise it."""


class PartitionError(AvgPipeError, ValueError):
    """A model that cannot be divided into the wanted stages."""


class StepOrderError(PartitionError):
    """A step function that goes back to a stage which another step function of the module puts first."""


class ScheduleError(AvgPipeError, ValueError):
    """A schedule that is not one: wrong sizes, missing or repeated actions."""


class DeadlockError(ScheduleError):
    """A schedule in which a stage waits for something that never comes."""


class TuningError(AvgPipeError, ValueError):
    """A profile that cannot be used, or one for which no setting fits the memory."""


class MemoryShortage(AvgPipeError):
    """A trial iteration that did not fit the memory of some process; all processes raise it together."""


class StepChangedError(AvgPipeError):
    """A step function did something else than when it was captured."""


class VerificationError(AvgPipeError):
    """An iteration is not what a plain run of the same micro-batches computes; names the first difference."""


class AbsentValueError(AvgPipeError):
    """Code of one stage computes with a value that lives on another stage."""


class StageError(AvgPipeError):
    """User code left an action by StopIteration; any other exception comes as it is, with a note of where."""


class NonFiniteError(AvgPipeError, ArithmeticError):
    """A gradient is infinite or no number; nothing has stepped with it."""


class PeerError(AvgPipeError):
    """Another process of the pipeline failed or is gone; carries what it reported, if it could."""


def described(error: BaseException) -> str:
    """Its type and text, whatever the text is: user code may raise what cannot be printed."""
    try:
        text = str(error)
    except Exception as unprintable:
        text = f"(str() of it raises {type(unprintable).__name__})"
    return f"{type(error).__name__}: {text}".rstrip(": ")
