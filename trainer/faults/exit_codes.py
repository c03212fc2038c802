"""Exit codes of a process, and the errors that carry them."""

OK = 0
CONFIG = 2
BAD_DATA = 65  # or a loss that is not finite, or an error in the user's file
INPUT_MISSING = 66
UNAVAILABLE = 69  # a peer, a port or Docker
INTERNAL = 70
RUN_IN_USE = 73
STORAGE = 74
INCOMPLETE = 75  # a part of the state is lost, or was rolled back: all tasks must restart from a checkpoint
CHECKPOINT = 76
INTERRUPTED = 130
TERMINATED = 143

MEANINGS = {
    CONFIG: "the config cannot run",
    BAD_DATA: "bad data, a loss that is not finite, or an error in the user's file",
    INPUT_MISSING: "an input file is missing",
    UNAVAILABLE: "a peer or a port is unavailable",
    INTERNAL: "an unexpected error",
    RUN_IN_USE: "the run directory is in use",
    STORAGE: "storage failed",
    INCOMPLETE: "all tasks must restart from a checkpoint",
    CHECKPOINT: "the checkpoint cannot be used",
    INTERRUPTED: "interrupted",
    TERMINATED: "terminated",
}

# By name, so that this module needs no TensorFlow: a peer that has died, or is about to.
TENSORFLOW_UNAVAILABLE = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")


class TrainerError(Exception):
    """An expected failure: its message is enough, without a traceback."""

    exit_code = INTERNAL


class RunInUseError(TrainerError):
    """Another run works in the directory."""

    exit_code = RUN_IN_USE


class IncompleteError(TrainerError):
    """A part of the cluster's state is lost, so no task can continue by itself."""

    exit_code = INCOMPLETE


class RollbackError(IncompleteError):
    """The update to `step` was skipped, and the run must return to its newest checkpoint."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class NotFiniteError(TrainerError, ValueError):
    """A loss or a gradient is NaN or infinite."""

    exit_code = BAD_DATA


def meaning(code: int) -> str:
    """Describes an exit code; a negative one is the signal that ended the process."""
    if code == -9:
        return "killed (SIGKILL)"
    return f"ended by signal {-code}" if code < 0 else MEANINGS.get(code, "an error")


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code for an error."""
    if isinstance(error, TrainerError):
        return error.exit_code
    if type(error).__name__ in TENSORFLOW_UNAVAILABLE:
        return UNAVAILABLE
    return STORAGE if isinstance(error, OSError) else INTERNAL
