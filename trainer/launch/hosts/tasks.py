"""Starts each task on its host, and reports the events of all hosts: the `Starter` of a run on several hosts."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from trainer.faults import exit_codes
from trainer.launch.hosts.connection import Connection
from trainer.launch.messages import Exited, HostFacts, NurseryOrder, SignalTask, Started, StartTask, Stay, TaskEvent
from trainer.observe.peers import PeerError

STAY_SECS = 5.0  # between two requests that tell a nursery that its launcher lives, and which it answers
HUNG_SECS = 60.0  # without an answer, after which a host is lost though the way to it is open
IMPORT_SECS = 600.0  # before the first answer: it imports TensorFlow, perhaps from a slow file server

Connect = Callable[[NurseryOrder], Connection]


class HostTasks:
    """The nurseries of all hosts; leaving the block ends them, and the tasks with them."""

    def __init__(self, orders: Sequence[NurseryOrder], connect: Connect) -> None:
        """Starts a nursery on every host, without waiting for them."""
        self._connect, self._orders = connect, {order.host: order for order in orders}
        self._host_of: Mapping[str, str] = {}  # by task
        self._selector = selectors.DefaultSelector()
        self._connections: dict[str, Connection] = {}
        self._places: dict[int, tuple[str, int]] = {}  # host and process id there, by the id that we hand out
        self._alive: dict[str, tuple[str, int | None]] = {}  # host and our id, by task
        self._stayed_at = time.monotonic()
        for host in self._orders:
            self._open(host)

    def __enter__(self) -> HostTasks:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections.values():
            connection.begin_close()
        for connection in self._connections.values():
            connection.close()
        self._selector.close()

    def hosts(self, deadline_secs: float) -> dict[str, HostFacts]:
        """Returns the facts of every host, by name, as soon as all have answered.

        Raises:
            PeerError: if one cannot be reached, or does not answer in time.
        """
        deadline = time.monotonic() + deadline_secs
        while any(one.answer is None for one in self._connections.values()):
            for connection in self._ready(max(0.0, deadline - time.monotonic())):
                if connection.read() is None:
                    raise PeerError(f"{connection.host} cannot be reached: {connection.why_ended()}")
            if time.monotonic() > deadline:
                silent = [name for name, one in self._connections.items() if one.answer is None]
                raise PeerError(f"{', '.join(silent)}: no answer within {deadline_secs:g} s")
        return {name: one.answer for name, one in self._connections.items() if one.answer is not None}

    def place(self, host_of: Mapping[str, str]) -> None:
        """Sets the host on which each task starts."""
        self._host_of = host_of
        for name, connection in self._connections.items():
            assert connection.answer is not None
            # A nursery that takes this one's place must hold the ports that the tasks' addresses have.
            self._orders[name] = replace(self._orders[name], ports=0, held=connection.answer.ports)

    def start(self, name: str, *, run: str, environment: Mapping[str, str], log: str) -> None:
        """Starts a task; if its host was lost, first starts a new nursery there."""
        host = self._host_of[name]
        if host not in self._connections:
            self._open(host)
        self._alive[name] = host, None
        self._connections[host].request(StartTask(name, run, log, dict(environment)))

    def signal(self, pid: int, number: int) -> None:
        """Sends a signal to a task, unless it has ended or its host is lost."""
        host, there = self._places[pid]
        if host in self._connections:
            self._connections[host].request(SignalTask(there, number))

    def events(self, timeout_secs: float) -> list[TaskEvent]:
        """Returns the events, like `ProcessTasks.events`; tasks of a lost host count as ended."""
        events: list[TaskEvent] = []
        for connection in self._stay():
            connection.kill()
            events += self._lost(connection, "it does not answer")
        for connection in self._ready(timeout_secs):
            received = connection.read()
            if received is None:
                events += self._lost(connection)
            else:
                events += [self._translated(connection.host, event) for event in received]
        return events

    def _open(self, host: str) -> None:
        connection = self._connections[host] = self._connect(self._orders[host])
        self._selector.register(connection, selectors.EVENT_READ, connection)

    def _ready(self, timeout_secs: float) -> list[Connection]:
        return [key.data for key, _ in self._selector.select(timeout_secs)]

    def _stay(self) -> list[Connection]:
        """Tells the nurseries that this process is alive, and sends what is left in buffers of slow links.

        Returns:
            The connections whose nurseries have not answered for long.
        """
        now = time.monotonic()
        if (since := now - self._stayed_at) < STAY_SECS:
            return []
        self._stayed_at = now
        for connection in self._connections.values():
            if since > 2 * STAY_SECS:  # this process was frozen itself, and neither asked nor read
                connection.heard_at = now
            connection.request(Stay())
        limits = {True: HUNG_SECS, False: IMPORT_SECS}
        return [one for one in self._connections.values() if now - one.heard_at > limits[one.serves]]

    def _translated(self, host: str, event: TaskEvent) -> TaskEvent:
        """Returns an event with our own process id, because ids of two hosts may be equal."""
        name, there = event.name, event.pid
        if isinstance(event, Started):
            ours = len(self._places) + 1
            self._places[ours] = host, event.pid
            self._alive[name] = host, ours
        else:
            ours = next(ours for ours, place in reversed(self._places.items()) if place == (host, there))
            self._alive.pop(name, None)
        return replace(event, pid=ours)

    def _lost(self, connection: Connection, why: str = "") -> list[TaskEvent]:
        """Returns the ends of a lost host's tasks; the reason defaults to the command's last words."""
        host = connection.host
        self._selector.unregister(connection)
        del self._connections[host]
        reason, was_there = why or connection.why_ended(), connection.answer is not None
        connection.close()
        why = f"{host} was lost: {reason}" if was_there else f"{host} cannot be reached: {reason}"
        code = -signal.SIGKILL if was_there else exit_codes.UNAVAILABLE
        ended = {name: ours for name, (place, ours) in self._alive.items() if place == host}
        for name in ended:
            del self._alive[name]
        return [Exited(name, ours, code, why) for name, ours in ended.items()]
