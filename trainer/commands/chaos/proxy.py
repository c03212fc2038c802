"""Links between tasks that can be bad: a TCP proxy for each, in front of the ports of the task it leads to.

A link is directed by who connects. All proxies are served by one thread of the launcher's process.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

from trainer.plan.addresses import host_of
from trainer.plan.environment import LINKS
from trainer.plan.plan import Plan

CHUNK_BYTES = 16384
CHUNKS_ON_THE_WAY = 256  # of one direction of a connection; then the sender must wait, as for a full pipe
LINGER_NOT = struct.pack("ii", 1, 0)  # SO_LINGER of 0 s: closing sends a reset

Link = tuple[str, str]  # from a task, to a task


@dataclass(frozen=True)
class Condition:
    """What a link does to what crosses it."""

    is_cut: bool = False  # forwards nothing, and drops nothing: what is sent meanwhile arrives afterwards
    is_reset: bool = False  # tears down every connection, new ones too
    delay_ms: float = 0.0
    jitter_ms: float = 0.0  # around the delay; the order is kept
    bytes_per_sec: float | None = None  # of each direction of a connection


GOOD = Condition()


class Links:
    """The proxied links of a run."""

    def __init__(self, plan: Plan, links: Collection[Link]) -> None:
        """Opens the proxies; they listen when this returns."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        tasks = {task.name: task for task in plan.tasks}
        self._proxies = {
            (source, target): {
                kind: self._open(address)
                for kind, address in (("address", tasks[target].address), ("control", tasks[target].control))
                if address
            }
            for source, target in links
        }

    def _open(self, address: str) -> Proxy:
        async def opened() -> Proxy:
            proxy = Proxy(host_of(address), int(address.rpartition(":")[2]))
            await proxy.open()
            return proxy

        return asyncio.run_coroutine_threadsafe(opened(), self._loop).result()

    def environment(self, task: str) -> dict[str, str]:
        """Where a task finds the peers to which its links lead."""
        found = {
            target: {kind: proxy.address for kind, proxy in proxies.items()}
            for (source, target), proxies in self._proxies.items()
            if source == task
        }
        return {LINKS: json.dumps(found)} if found else {}

    def set(self, link: Link, condition: Condition) -> None:
        for proxy in self._proxies[link].values():
            self._loop.call_soon_threadsafe(proxy.set, condition)

    def close(self) -> None:
        """Ends the connections, the proxies and their thread."""

        async def close() -> None:
            for proxies in self._proxies.values():
                for proxy in proxies.values():
                    await proxy.close()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Proxy:
    """Takes connections in the place of one address. Lives in one event loop."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
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

    async def close(self) -> None:
        self._server.close()
        tasks = [connection.task for connection in self._connections]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        answers, target = await asyncio.open_connection(self._host, self._port)
        connection.writers.append(target)
        await _all(self._carry(requests, target), self._carry(answers, connection.writers[0]))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Brings one direction across, to its end."""
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
    """Runs them side by side; the first that fails ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@dataclass(eq=False)
class _Connection:
    task: asyncio.Task[Any]
    writers: list[asyncio.StreamWriter]  # to whoever connected, then to the target

    def close(self) -> None:
        """Ends both sides when what was sent to them has arrived."""
        for writer in self.writers:
            writer.close()

    def reset(self) -> None:
        """Ends both sides with a reset, unless they are ending."""
        for writer in self.writers:
            if not writer.is_closing():
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
                writer.transport.abort()
