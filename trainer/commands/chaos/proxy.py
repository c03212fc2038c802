"""Disturbs links between tasks: each has a TCP proxy in front of the ports of the task it leads to.

A link is directed from the task that connects. All proxies are served by one process, in the network of the tasks.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Coroutine
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from trainer.config.command_line import typed
from trainer.launch.processes import isolation
from trainer.observe.page_server import short_name
from trainer.observe.peers import UNIX
from trainer.plan.addresses import host_of
from trainer.plan.environment import LINKS
from trainer.plan.plan import Plan

CHUNK_BYTES = 16384
CHUNKS_ON_THE_WAY = 256  # of one direction of a connection; then the sender must wait, as for a full pipe
LINGER_NOT = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends a reset

Link = tuple[str, str]  # from a task, to a task


@dataclass(frozen=True)
class Condition:
    """The disturbance of a link."""

    is_cut: bool = False  # forwards nothing, and drops nothing: what is sent meanwhile arrives afterwards
    is_reset: bool = False  # tears down every connection, new ones too
    delay_ms: float = 0.0
    jitter_ms: float = 0.0  # around the delay; the order is kept
    bytes_per_sec: float | None = None  # of each direction of a connection


GOOD = Condition()


class Links:
    """The proxied links of a run."""

    def __init__(self, plan: Plan, links: Collection[Link], *, network_of: Callable[[], int] = lambda: 0) -> None:
        """Opens the proxies; they listen when this returns.

        Args:
            network_of: returns a process in the network of isolated tasks.
        """
        tasks = {task.name: task for task in plan.tasks}
        targets = [
            (link, kind, address)
            for link in links
            for kind, address in (("address", tasks[link[1]].address), ("control", tasks[link[1]].control))
            if address
        ]
        self._proxied = [(link, kind) for link, kind, _ in targets]  # as the proxies are numbered
        self._addresses: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        if targets:
            is_isolated = any(task.control.startswith(UNIX) for task in plan.tasks)
            self._process = _start_process(network_of() if is_isolated else 0)
            self._addresses = self._ask([address for _, _, address in targets])

    def _ask(self, request: Any) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def environment(self, task: str) -> dict[str, str]:
        """Returns the environment that leads a task to the proxies of its links."""
        found: dict[str, dict[str, str]] = {}
        for ((source, target), kind), address in zip(self._proxied, self._addresses, strict=True):
            if source == task:
                found.setdefault(target, {})[kind] = address
        return {LINKS: json.dumps(found)} if found else {}

    def set(self, link: Link, condition: Condition) -> None:
        numbers = [number for number, (proxied, _) in enumerate(self._proxied) if proxied == link]
        self._ask([numbers, asdict(condition)])

    def close(self) -> None:
        """Ends the proxies and their connections."""
        if self._process is not None:
            self._process.communicate()


def _start_process(network_of: int) -> subprocess.Popen[str]:
    """Starts a process that serves proxies: the launcher cannot be inside the network of its tasks and outside it."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.commands.chaos.proxy", str(network_of)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the launcher alone
    )


async def _serve() -> None:
    """Answers requests (JSON lines) until they end: the first has the targets, the others new conditions."""
    requests = asyncio.StreamReader(limit=2**24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), sys.stdin)
    proxies = [Proxy(target) for target in json.loads(await requests.readline())]
    for proxy in proxies:
        await proxy.open()
    print(json.dumps([proxy.address for proxy in proxies]), flush=True)
    while line := await requests.readline():
        numbers, condition = json.loads(line)
        for number in numbers:
            proxies[number].set(Condition(**condition))
        print("null", flush=True)


class Proxy:
    """Accepts connections in place of one address, "host:port" or "unix:PATH"."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._condition = GOOD
        self._is_open = asyncio.Event()  # not while it is cut
        self._is_open.set()
        self._random = Random(0)
        self._connections: set[_Connection] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def set(self, condition: Condition) -> None:
        self._condition = condition
        (self._is_open.clear if condition.is_cut else self._is_open.set)()
        if condition.is_reset:
            for connection in self._connections:
                connection.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(task, [writer])
        self._connections.add(connection)
        try:
            if not self._condition.is_reset:
                await self._connect(reader, connection)
                connection.close()
        except (OSError, asyncio.CancelledError):
            pass  # one end was reset, refused or is not wanted any more: so is the other
        finally:
            connection.reset()
            self._connections.discard(connection)

    async def _connect(self, requests: asyncio.StreamReader, connection: _Connection) -> None:
        await self._is_open.wait()  # also a refusal must not get across
        if self._target.startswith(UNIX):
            with short_name(self._target.removeprefix(UNIX)) as name:
                answers, target = await asyncio.open_unix_connection(name)
        else:
            answers, target = await asyncio.open_connection(host_of(self._target), int(self._target.rpartition(":")[2]))
        connection.writers.append(target)
        await _all(self._carry(requests, target), self._carry(answers, connection.writers[0]))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one direction of a connection until it ends."""
        on_the_way: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(CHUNKS_ON_THE_WAY)
        now = asyncio.get_running_loop().time

        async def take() -> None:
            chunk: bytes | None = b"?"
            arrives = 0.0
            while chunk:
                try:
                    chunk = await reader.read(CHUNK_BYTES)
                except OSError:
                    chunk = None  # a reset takes the same way
                arrives = max(arrives, now() + self._delay_secs())
                await on_the_way.put((arrives, chunk))

        async def give() -> None:
            while True:
                arrives, chunk = await on_the_way.get()
                await asyncio.sleep(arrives - now())
                await self._is_open.wait()
                if chunk is None:
                    raise ConnectionResetError
                if not chunk:
                    writer.write_eof()
                    return
                writer.write(chunk)
                await writer.drain()
                if self._condition.bytes_per_sec:
                    await asyncio.sleep(len(chunk) / self._condition.bytes_per_sec)

        await _all(take(), give())

    def _delay_secs(self) -> float:
        condition = self._condition
        return (condition.delay_ms + self._random.uniform(-1, 1) * condition.jitter_ms) / 1000


async def _all(*work: Coroutine[Any, Any, None]) -> None:
    """Runs coroutines concurrently; the first that fails cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@dataclass(eq=False)
class _Connection:
    task: asyncio.Task[Any]
    writers: list[asyncio.StreamWriter]  # to the client, then to the target

    def close(self) -> None:
        """Ends both sides once the data sent to them has arrived."""
        for writer in self.writers:
            writer.close()

    def reset(self) -> None:
        """Ends both sides with a reset, unless they are ending."""
        for writer in self.writers:
            if not writer.is_closing():
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
                writer.transport.abort()


if __name__ == "__main__":
    if network := int(typed()[0]):
        isolation.join(network)
    asyncio.run(_serve())
