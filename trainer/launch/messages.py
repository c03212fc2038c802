"""What a launcher and the processes that start tasks for it say to each other: lines of JSON, each with its kind."""

import json
from dataclasses import dataclass
from typing import Any, get_args

from trainer.plan.description import ModelProbe, ProbeResult
from trainer.plan.serialize import from_json, to_json

# Events: what has happened.


@dataclass(frozen=True)
class HostFacts:
    """What a host says of itself, before anything else."""

    version: str  # of the trainer, Python and the libraries
    code: str  # a digest of the trainer's modules
    cores: int
    gpus: int
    sees_run: bool
    ports: tuple[int, ...]


@dataclass(frozen=True)
class Here:
    """The answer to `Stay`."""


@dataclass(frozen=True)
class Isolated:
    """The tasks that start from now on have a network of their own, which a process is in."""

    pid: int


@dataclass(frozen=True)
class Started:
    """A task has started."""

    name: str
    pid: int  # its process id, or what stands for it


@dataclass(frozen=True)
class Exited:
    """A task, or a process that describes a model, has ended."""

    name: str
    pid: int | None  # none: it could not be started
    code: int  # exit code; negative: the signal that ended it
    why: str | None = None  # where the code does not say it


@dataclass(frozen=True)
class Describing:
    """A process is still describing a model."""

    name: str
    secs: float  # that it has run
    line: str  # of the user's code that is running; empty: none is


@dataclass(frozen=True)
class Described:
    """A model has been described."""

    name: str
    answer: ProbeResult


# Requests: what is to be done.


@dataclass(frozen=True)
class StartTask:
    """Start a task."""

    name: str
    run: str  # path of the run directory
    log: str  # path
    environment: dict[str, str]  # beside that of the process that starts it


@dataclass(frozen=True)
class SignalTask:
    """Send a signal to a task, unless it has ended."""

    pid: int
    number: int


@dataclass(frozen=True)
class DescribeModel:
    """Describe a model, in a process of this name."""

    name: str
    question: ModelProbe


@dataclass(frozen=True)
class IsolateTasks:
    """Give the tasks that start from now on a network of their own."""


@dataclass(frozen=True)
class Stay:
    """The launcher lives; answer with `Here`."""


TaskEvent = Started | Exited
Event = HostFacts | Here | Isolated | Started | Exited | Describing | Described
Request = StartTask | SignalTask | DescribeModel | IsolateTasks | Stay

KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*get_args(Event), *get_args(Request))}


def encode(message: Event | Request) -> bytes:
    """Returns a message as a line."""
    return json.dumps({"kind": type(message).__name__} | to_json(message)).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Returns the message that a line has.

    Raises:
        KeyError, ValueError: if it is of another kind, or no message.
    """
    value = json.loads(line)
    return from_json(KINDS[value["kind"]], value)
