"""What a process's exit code says, and whether trying again makes sense."""

from __future__ import annotations

OK = 0
CONFIG = 2
BAD_DATA = 65  # or a loss that is not finite
INPUT_MISSING = 66
UNAVAILABLE = 69  # a peer, a port, or the engine that runs containers
INTERNAL = 70
RUN_IN_USE = 73
STORAGE = 74
INCOMPLETE = 75  # a part of the state is gone, or is not to be kept: all tasks must start again, from a checkpoint
CHECKPOINT = 76
INTERRUPTED = 130
TERMINATED = 143

MEANINGS = {
    CONFIG: "the config cannot run",
    BAD_DATA: "bad data, or a loss that is not finite",
    INPUT_MISSING: "an input file is missing",
    UNAVAILABLE: "a peer or a port is unavailable",
    INTERNAL: "an unexpected error",
    RUN_IN_USE: "the run directory is in use",
    STORAGE: "storage failed",
    INCOMPLETE: "all tasks must start again, from a checkpoint",
    CHECKPOINT: "the checkpoint cannot be used",
    INTERRUPTED: "interrupted",
    TERMINATED: "terminated",
}


class RunInUseError(RuntimeError):
    """Another run works in the directory."""


class IncompleteError(RuntimeError):
    """A part of the cluster's state is gone, so that no task alone can go on."""


class RollbackError(IncompleteError):
    """The update to `step` was left out, and the run is to go back to its newest checkpoint."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class NotFiniteError(ValueError):
    """A loss or a gradient is NaN or infinite."""


def meaning(code: int) -> str:
    """An exit code in words; a negative one is the signal that ended the process."""
    if code == -9:
        return "killed (SIGKILL)"
    return f"ended by signal {-code}" if code < 0 else MEANINGS.get(code, "an error")


def exit_code_of(error: BaseException) -> int:
    """The exit code for an error; TensorFlow's own are told apart by name, so that this module needs no TensorFlow."""
    from trainer.faults.problems import ConfigError
    from trainer.storage.checkpoint import CheckpointError
    from trainer.workload.data.examples import DataError, MissingInputError, find_data_error

    bad_data = error if isinstance(error, DataError) else find_data_error(error)
    if isinstance(bad_data, MissingInputError):
        return INPUT_MISSING
    if bad_data is not None or isinstance(error, NotFiniteError):
        return BAD_DATA
    if isinstance(error, CheckpointError):
        return CHECKPOINT
    if isinstance(error, ConfigError):
        return CONFIG
    if isinstance(error, RunInUseError):
        return RUN_IN_USE
    if isinstance(error, IncompleteError):
        return INCOMPLETE
    if type(error).__name__ in (
        "UnavailableError",
        "AbortedError",
        "CancelledError",
        "DeadlineExceededError",
        "PeerError",
        "EngineError",
    ):
        return UNAVAILABLE
    return STORAGE if isinstance(error, OSError) else INTERNAL
