"""`python -m trainer.launch.hosts.host_nursery ORDER`: the nursery of a host, served over stdin and stdout.

    launcher  --requests, JSON lines-->  ssh HOST ...  --stdin-->   nursery  --fork-->  task
              <--events, JSON lines---                 <--stdout--

First it reports the facts of this host, before it imports TensorFlow, and holds the ports that the
tasks will listen on. It ends its tasks and itself when stdin ends, or when the launcher has been silent for long: a
machine that loses its power closes no connection. ORDER is the JSON of a `NurseryOrder`.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from trainer.config import versions
from trainer.config.command_line import typed
from trainer.launch.messages import TOKEN, HostFacts, NurseryOrder, encode
from trainer.launch.processes import nursery
from trainer.launch.processes.ports import HeldPorts
from trainer.observe.machine import read, this_machine
from trainer.plan.environment import VISIBLE

SILENT_SECS = 60.0  # without a request; the launcher sends one every few seconds
FENCE_SECS = 10.0  # for an earlier nursery of this run to end


class Pipes:
    """Standard input and output, with the methods of a socket that a nursery uses."""

    def __init__(self) -> None:
        """Takes over both; later output of this process goes to stderr."""
        self._input, self._output = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)

    def fileno(self) -> int:
        return self._input

    def has_ended(self) -> bool:
        """Whether the launcher has closed its end; what it has sent before may be unread."""
        watched = select.poll()
        watched.register(self._input, select.POLLHUP)
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in watched.poll(0))

    def recv(self, size: int) -> bytes:
        return os.read(self._input, size)

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._output, data) :]


def main() -> None:
    """Answers the order in the first argument, imports TensorFlow, and serves the launcher until it has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to all processes of a job, they are for the tasks
    given = json.loads(typed()[0])
    order = NurseryOrder(**{**given, "held": tuple(given["held"])})
    pipes, record = Pipes(), _fence(order)
    try:
        with HeldPorts(order.ports) as ports:
            for port in order.held:
                _hold(ports, port)
            answer = _describe(order, [*ports.ports, *order.held])
            pipes.sendall(encode(answer))
            if pipes.has_ended():  # another host cannot be reached
                return
            allotted, os.environ[VISIBLE] = os.environ.get(VISIBLE, ""), "-1"  # TensorFlow must not touch a GPU here
            nursery.import_everything()
            nursery.serve(pipes, can_fork=True, silent_secs=SILENT_SECS, allotted=allotted)
    except OSError as error:
        sys.exit(f"{error.strerror or error}")
    finally:
        record.unlink(missing_ok=True)


def _hold(ports: HeldPorts, port: int) -> None:
    """Holds a port as soon as the task that used it has ended; raises an OSError if another program uses it."""
    deadline = time.monotonic() + FENCE_SECS
    while True:
        try:
            return ports.hold(port)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _describe(order: NurseryOrder, ports: list[int]) -> HostFacts:
    machine = this_machine()
    return HostFacts(
        version=versions.describe(),
        code=versions.code_hash(),
        cores=machine.cores,
        gpus=machine.gpus,
        sees_run=read(Path(order.run) / TOKEN) == order.token,
        ports=tuple(ports),
    )


def _fence(order: NurseryOrder) -> Path:
    """Ends the nursery that an earlier launch, or a lost connection, left on this host: its tasks end with it.

    Returns:
        The file that identifies this host's nursery, which is now this process.
    """
    path = Path(order.run) / TOKEN.parent / f"{order.host}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        with contextlib.suppress(OSError, ValueError, KeyError):
            before = json.loads(path.read_text())
            deadline = time.monotonic() + FENCE_SECS
            while _identity(before["pid"]) == before["identity"] and time.monotonic() < deadline:
                os.kill(before["pid"], signal.SIGKILL)
                time.sleep(0.02)
        path.write_text(json.dumps({"pid": os.getpid(), "identity": _identity(os.getpid())}))
    return path


def _identity(pid: int) -> str:
    """Returns boot and start time of a process, which identify it; empty if it does not exist."""
    with contextlib.suppress(OSError, IndexError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if started[0] == "Z" else f"{boot} {started[19]}"
    return ""


if __name__ == "__main__":
    main()
