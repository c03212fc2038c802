"""The messages between a launcher and the processes that start its tasks: lines of JSON, each with its kind."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from trainer.plan.description import ModelProbe, ProbeResult
from trainer.plan.serialize import from_json, to_json

# Events: what has happened.


@dataclass(frozen=True)
class HostFacts:
    """The facts that a host reports first."""

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
    """Later tasks run in an isolated network, which contains a process."""

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


# Requests: what to do.


@dataclass(frozen=True)
class StartTask:
    """Asks to start a task."""

    name: str
    run: str  # path of the run directory
    log: str  # path
    environment: dict[str, str]  # beside that of the process that starts it


@dataclass(frozen=True)
class SignalTask:
    """Asks to send a signal to a task, unless it has ended."""

    pid: int
    number: int


@dataclass(frozen=True)
class DescribeModel:
    """Asks to describe a model, in a process of this name."""

    name: str
    question: ModelProbe


@dataclass(frozen=True)
class IsolateTasks:
    """Asks to start later tasks in an isolated network."""


@dataclass(frozen=True)
class Stay:
    """Says that the launcher is alive, and asks for `Here`."""


@dataclass(frozen=True)
class NurseryOrder:
    """The settings of a host's nursery."""

    host: str  # its name in the config
    run: str  # directory of the run
    token: str  # text of the file TOKEN there, which every host must see
    ports: int = 0  # how many free ones to hold
    held: tuple[int, ...] = ()  # or these, where the tasks of this launch listen already


TOKEN = Path("hosts/token")  # below the run directory; beside it, who each host's nursery is


TaskEvent = Started | Exited
Event = HostFacts | Here | Isolated | Started | Exited | Describing | Described
Request = StartTask | SignalTask | DescribeModel | IsolateTasks | Stay

KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*get_args(Event), *get_args(Request))}


def encode(message: Event | Request) -> bytes:
    """Encodes a message as a line."""
    return json.dumps({"kind": type(message).__name__} | to_json(message)).encode() + b"\n"


def decode(line: bytes) -> Any:
    """Decodes the message in a line.

    Raises:
        KeyError, ValueError: if it is of another kind, or no message.
    """
    value = json.loads(line)
    return from_json(KINDS[value["kind"]], value)
