"""Runs containers on the Docker engines of several hosts, each reached through ssh."""

from __future__ import annotations

import contextlib
import queue
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path

import docker

from trainer.config.schema import ClusterConfig, LaunchConfig
from trainer.faults import exit_codes
from trainer.launch import ssh
from trainer.launch.containers.docker_errors import DockerError, explain_errors
from trainer.launch.containers.spec import ContainerSpec, Mount
from trainer.launch.containers.tasks import ContainerTasks
from trainer.launch.containers.tunnel import Tunnel
from trainer.launch.messages import Exited, TaskEvent
from trainer.observe.machine import this_machine
from trainer.plan.devices import Machine
from trainer.plan.hosts import host_by_task

MARK = "/trainer/mark"  # in a container: a file of the run directory that this launch made


@dataclass(eq=False)
class DockerEngine:
    """A host's Docker engine."""

    tunnel: Tunnel
    client: docker.DockerClient

    @classmethod
    def connect(cls, command: Sequence[str], there: str, folder: Path, host: str) -> DockerEngine:
        """Reaches a host's engine; sockets of this machine are put into `folder`.

        Raises:
            DockerError: if the host or its engine does not answer.
        """
        tunnel = Tunnel(command, host, here=folder / secrets.token_hex(4), there=there)
        try:
            with explain_errors():
                client = docker.DockerClient(base_url=f"unix://{tunnel.socket}")
                client.ping()
                return cls(tunnel, client)
        except DockerError as error:
            said = tunnel.last_words
            tunnel.close()
            raise DockerError(f"{host}: {error}{f' (ssh says: {said})' if said else ''}") from error

    @property
    def answers(self) -> bool:
        with contextlib.suppress(Exception):
            return self.tunnel.is_open and bool(self.client.ping())
        return False

    def close(self) -> None:
        self.tunnel.close()
        self.client.close()


class Engines:
    """The engines of a cluster's hosts, by host; leaving the block ends all connections."""

    def __init__(self, launch: LaunchConfig, cluster: ClusterConfig) -> None:
        """Takes the hosts; connects to nothing yet."""
        self.by_host: dict[str, DockerEngine] = {}
        self._command, self._there = ssh.command(launch.ssh), launch.docker_socket
        self._hosts = list(dict.fromkeys(host_by_task(cluster).values()))
        self._folder = Path(tempfile.mkdtemp(prefix="trainer-"))  # short: a socket's path has 107 bytes at most
        self._made: list[DockerEngine] = []

    def __enter__(self) -> Engines:
        """Connects to the engine of every host.

        Raises:
            DockerError: if one does not answer.
        """
        try:
            with ThreadPoolExecutor(len(self._hosts)) as pool:
                for host, engine in [(host, pool.submit(self.connect, host)) for host in self._hosts]:
                    self.by_host[host] = engine.result()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._made:
            engine.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def connect(self, host: str) -> DockerEngine:
        """Returns a new connection to a host's engine; raises as `DockerEngine.connect` does."""
        engine = DockerEngine.connect(self._command, self._there, self._folder, host)
        self._made.append(engine)
        return engine

    def machine(self) -> Machine:
        """Returns the resources that the tasks share."""
        with explain_errors():
            cores_of = {host: int(engine.client.info()["NCPU"]) for host, engine in self.by_host.items()}
        return replace(this_machine(), cores=min(cores_of.values()), cores_of=cores_of)


@contextlib.contextmanager
def marked(specs: Sequence[ContainerSpec], run: str) -> Iterator[list[ContainerSpec]]:
    """Mounts a file of this launch into every container: none starts on a host with another run directory."""
    mark = Path(run) / f".launch-{secrets.token_hex(4)}"
    mark.touch()
    try:
        yield [replace(spec, mounts=(*spec.mounts, Mount(str(mark), MARK))) for spec in specs]
    finally:
        mark.unlink(missing_ok=True)


class ContainersOnHosts:
    """Starts tasks on the engines of their hosts; tasks on a lost host count as ended, and may be restarted."""

    def __init__(self, engines: Engines, containers: Sequence[ContainerSpec], run: str) -> None:
        """Takes the parts of the run; creates nothing yet.

        Args:
            run: path of the run directory, which is the same on every host.
        """
        self._engines, self._run, self._numbers = engines, run, count(1)
        self._host_of = {spec.task: str(spec.host) for spec in containers}
        self._specs = containers
        self._tasks: dict[str, ContainerTasks] = {}  # by host that is reached
        self._alive: dict[str, int] = {}  # number of a task's start, until its end
        self._waiting: dict[str, dict[str, str]] = {}  # log by task to start, by host that is being reached again
        self._threads: list[threading.Thread] = []
        self._news: queue.SimpleQueue[Callable[[], list[TaskEvent]]] = queue.SimpleQueue()
        for host in engines.by_host:
            self._add(host)

    def __enter__(self) -> ContainersOnHosts:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join()
        with ThreadPoolExecutor(max(1, len(self._tasks))) as pool:
            list(pool.map(ContainerTasks.close, self._tasks.values()))

    def start(self, name: str, *, run: str, environment: Mapping[str, str], log: str) -> None:
        """Starts a task's container, first reconnecting to its host if it was lost."""
        host = self._host_of[name]
        if host in self._tasks:
            self._alive[name] = self._tasks[host].start(name, run=run, environment=environment, log=log)
            return
        is_being_reached = host in self._waiting
        self._waiting.setdefault(host, {})[name] = log
        if not is_being_reached:
            thread = threading.Thread(target=self._reach, args=[host], name=f"to {host}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def signal(self, pid: int, number: int) -> None:
        """Sends a signal to the task of a start, unless it has ended or its host is lost."""
        for name, started in self._alive.items():
            if started == pid and (tasks := self._tasks.get(self._host_of[name])):
                tasks.signal(pid, number)

    def events(self, timeout_secs: float) -> list[TaskEvent]:
        """Returns the events, like `ContainerTasks.events`.

        Raises:
            DockerError: if an engine that answers refuses a request.
        """
        events: list[TaskEvent] = []
        with contextlib.suppress(queue.Empty):
            events += self._news.get(timeout=timeout_secs)()
            while not self._news.empty():
                events += self._news.get_nowait()()
        return events

    def _add(self, host: str) -> ContainerTasks:
        engine, specs = self._engines.by_host[host], [spec for spec in self._specs if spec.host == host]

        def report(item: TaskEvent | Exception) -> None:
            self._news.put(partial(self._handle, host, engine, item))

        tasks = ContainerTasks(engine.client, specs, self._run, report=report, numbers=self._numbers)
        self._tasks[host] = tasks
        return tasks

    def _handle(self, host: str, engine: DockerEngine, item: TaskEvent | Exception) -> list[TaskEvent]:
        if self._engines.by_host.get(host) is not engine:
            return []  # of a connection that was lost since
        if isinstance(item, Exception):
            if engine.answers:
                raise DockerError(f"{host}: {item}") from item
            return self._lost(host, str(item))
        if isinstance(item, Exited) and self._alive.get(item.name) == item.pid:
            del self._alive[item.name]
        return [item]

    def _lost(self, host: str, why: str) -> list[TaskEvent]:
        """Returns the ends of a lost host's tasks; their containers are removed when it is reached again."""
        engine = self._engines.by_host.pop(host)
        reason = engine.tunnel.last_words if not engine.tunnel.is_open else why
        engine.close()
        self._tasks.pop(host).abandon()
        ended = {name: self._alive.pop(name) for name in list(self._alive) if self._host_of[name] == host}
        why = f"{host} was lost: {reason or why}"
        code = -signal.SIGKILL
        return [Exited(name, pid, code, why) for name, pid in ended.items()]

    def _reach(self, host: str) -> None:
        try:
            engine = self._engines.connect(host)
        except DockerError as error:
            self._news.put(partial(self._not_reached, host, error))
        else:
            self._news.put(partial(self._reached, host, engine))

    def _reached(self, host: str, engine: DockerEngine) -> list[TaskEvent]:
        self._engines.by_host[host] = engine
        tasks = self._add(host)
        try:
            for name, log in self._waiting[host].items():
                self._alive[name] = tasks.start(name, run=self._run, environment={}, log=log)
        except DockerError as error:
            if engine.answers:
                raise
            self._lost(host, str(error))
            return self._not_reached(host, error)
        del self._waiting[host]
        return []

    def _not_reached(self, host: str, error: DockerError) -> list[TaskEvent]:
        return [Exited(name, None, exit_codes.UNAVAILABLE, str(error)) for name in self._waiting.pop(host)]
