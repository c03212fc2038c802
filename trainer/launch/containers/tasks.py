"""The tasks of a run as containers: start them, signal them, hear of their ends."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import docker
import docker.errors
from docker.models.containers import Container as EngineContainer
from docker.types import DeviceRequest, LogConfig
from docker.types import Mount as EngineMount

from trainer.launch.containers.docker_errors import EngineError, told
from trainer.launch.containers.owners import give_back, lend, user_of_tasks
from trainer.launch.containers.spec import (
    ENTRYPOINT,
    GPU_SHARED_MIB,
    NETWORK_OPTIONS,
    RUN_LABEL,
    SECURITY,
    TASK_LABEL,
    Container,
    project_of,
)
from trainer.observe.peers import UNIX
from trainer.plan.environment import LAUNCHER

SOCKETS = "/trainer/sockets"  # in a container
SOCKETS_LABEL = "trainer.sockets"  # path on the host, to be removed with the container
LOG_SECS = 5.0  # to write down the end of a log when its task has ended
SIGNALLED = 128  # and the number of the signal: the code of a process that it ended
OUT_OF_MEMORY = "out of memory: it reached its limit (container.memory_mib), so the kernel killed it"


class Containers:
    """The containers of one run, made as they are started. Leaving the block removes them, and all that is theirs."""

    def __init__(self, client: docker.DockerClient, containers: Sequence[Container], run: str) -> None:
        """Takes them as they should be; nothing is made yet.

        Args:
            run: the run directory, on this host.
        """
        self._client, self._run, self._project = client, run, project_of(run)
        self._specs = {container.task: container for container in containers}
        self._made: dict[str, EngineContainer] = {}
        self._lives: dict[int, str] = {}  # task by the number of a start, which stands for a process id
        self._logs: dict[int, threading.Thread] = {}
        self._news: queue.SimpleQueue[dict[str, Any] | Exception] = queue.SimpleQueue()
        # What is asked of one container happens in order; containers do not wait for each other.
        self._hands = {task: ThreadPoolExecutor(1, thread_name_prefix=task) for task in self._specs}
        self._newest: dict[str, int] = {}  # number of a task's last start
        self._cleanup = ExitStack()
        self._is_prepared = False
        self.sockets = Path(tempfile.mkdtemp(prefix="trainer-"))  # short: a socket's path has 107 bytes at most

    def control(self, task: str) -> str:
        """Where the launcher reads a task's status page: it has no address on the tasks' network."""
        return f"{UNIX}{self.sockets}/{self._specs[task].service}/page"

    def __enter__(self) -> Containers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hands in self._hands.values():
            hands.shutdown(wait=True, cancel_futures=True)
        self._cleanup.close()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def start(self, name: str, *, run: str, environment: Mapping[str, str], log: str) -> None:
        """Starts a task's container, for the first time or again; an event tells the number of the start."""
        if not self._is_prepared:
            self._prepare()
        number = len(self._lives) + 1
        self._lives[number], self._newest[name] = name, number
        self._do(name, number, lambda: self._start(name, number, log))

    def signal(self, pid: int, number: int) -> None:
        """Sends a signal to the task of a start, unless it has ended."""
        name = self._lives[pid]
        if self._newest[name] == pid:
            self._do(name, pid, lambda: self._signal(name, number))

    def events(self, timeout_secs: float) -> list[dict[str, Any]]:
        """What happened: {"event": "started" | "exited", "name", "pid", "code"}; waits for news at most so long.

        Raises:
            EngineError: if the engine does not do what was asked, or is gone.
        """
        with contextlib.suppress(queue.Empty):
            news = [self._news.get(timeout=timeout_secs)]
            while not self._news.empty():
                news.append(self._news.get_nowait())
            for item in news:
                if isinstance(item, Exception):
                    raise item
            return [item for item in news if not isinstance(item, Exception)]
        return []

    def _prepare(self) -> None:
        """Removes what a launcher that was killed has left of this run, and makes its network."""
        self._is_prepared = True
        owner = os.stat(self._run)
        with told():
            remove(self._client, f"{RUN_LABEL}={self._run}")
            self._cleanup.callback(give_back, self._run, (owner.st_uid, owner.st_gid))
            lend(self._run)
            self._cleanup.callback(self._remove)
            labels = {RUN_LABEL: self._run, SOCKETS_LABEL: str(self.sockets)}
            self._client.networks.create(
                self._project, driver="bridge", internal=True, options=NETWORK_OPTIONS, labels=labels
            )
            listening = self._client.events(
                decode=True, filters={"label": f"{RUN_LABEL}={self._run}", "event": ["die"]}
            )
            self._cleanup.callback(listening.close)
        threading.Thread(target=self._listen, args=(listening,), name="engine", daemon=True).start()

    def _remove(self) -> None:
        """Removes everything; how the run ended counts for more than a failure here, which is only told."""
        try:
            with told():
                remove(self._client, f"{RUN_LABEL}={self._run}")
        except EngineError as error:
            print(f"trainer: something is left of {self._run}: {error}", file=sys.stderr)

    def _do(self, name: str, number: int, work: Callable[[], None]) -> None:
        def done() -> None:
            try:
                with told(self._specs[name].image):
                    work()
            except EngineError as error:
                self._news.put(EngineError(f"{name}: {error}"))
            except Exception as error:
                self._news.put(error)

        self._hands[name].submit(done)

    def _start(self, name: str, number: int, log: str) -> None:
        try:
            container = self._made.get(name) or self._create(self._specs[name])
            output = container.attach(stream=True, logs=False)  # before it starts, so that nothing is missed
        except docker.errors.NotFound:
            if name not in self._made:
                raise
            container = self._create(self._specs[name])  # somebody has removed it
            output = container.attach(stream=True, logs=False)
        self._made[name] = container
        self._logs[number] = threading.Thread(
            target=_write_down, args=(output, log), name=f"log of {name}", daemon=True
        )
        self._logs[number].start()
        self._news.put({"event": "started", "name": name, "pid": number})
        container.start()

    def _create(self, spec: Container) -> EngineContainer:
        sockets = self.sockets / spec.service
        sockets.mkdir(exist_ok=True)
        user, group = user_of_tasks()
        os.chown(sockets, user, group)
        mounts = [EngineMount(m.target, m.source, type="bind", read_only=not m.is_writable) for m in spec.mounts]
        mounts.append(EngineMount(SOCKETS, str(sockets), type="bind"))
        alias = self._client.api.create_endpoint_config(aliases=[spec.service])
        gpus = DeviceRequest(driver="nvidia", device_ids=[str(gpu) for gpu in spec.gpus], capabilities=[["gpu"]])
        memory = None if spec.memory_mib is None else f"{spec.memory_mib}m"
        return self._client.containers.create(
            spec.image,
            list(spec.arguments),
            entrypoint=list(ENTRYPOINT),
            name=f"{self._project}-{spec.service}",
            environment={**spec.environment, LAUNCHER: f"{SOCKETS}/page"},
            labels={RUN_LABEL: self._run, TASK_LABEL: spec.task, SOCKETS_LABEL: str(self.sockets)},
            user=f"{user}:{group}",
            init=True,
            read_only=True,
            cap_drop=["ALL"],
            security_opt=list(SECURITY),
            tmpfs={"/tmp": f"size={spec.tmp_mib}m,mode=1777"},
            mounts=mounts,
            network=self._project,
            networking_config={self._project: alias},
            device_requests=[gpus] if spec.gpus else None,
            shm_size=f"{GPU_SHARED_MIB}m" if spec.gpus else None,
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=None if spec.cpus is None else int(spec.cpus * 1e9),
            pids_limit=spec.pids,
            log_config=LogConfig(type="none"),  # it is attached to
        )

    def _signal(self, name: str, number: int) -> None:
        with contextlib.suppress(docker.errors.NotFound):
            try:
                self._made[name].kill(number)
            except docker.errors.APIError as error:
                if error.status_code != 409:  # it does not run
                    raise

    def _listen(self, listening: Any) -> None:
        """Passes on the ends of containers, each after the end of its log was written."""
        try:
            for event in listening:
                name = event["Actor"]["Attributes"][TASK_LABEL]
                number, code = self._newest[name], int(event["Actor"]["Attributes"]["exitCode"])
                self._logs[number].join(LOG_SECS)
                told_of = {"event": "exited", "name": name, "pid": number, "code": _as_process(code)}
                if code == SIGNALLED + signal.SIGKILL and self._is_out_of_memory(name):
                    told_of["why"] = OUT_OF_MEMORY
                self._news.put(told_of)
        except Exception as error:  # the stream breaks in many ways
            self._news.put(EngineError(f"the Docker engine does not answer any more ({error})"))
        else:
            self._news.put(EngineError("the Docker engine has left"))

    def _is_out_of_memory(self, name: str) -> bool:
        container = self._made[name]
        try:
            container.reload()
        except docker.errors.NotFound:  # somebody has removed it
            return False
        return bool(container.attrs["State"]["OOMKilled"])


def _as_process(code: int) -> int:
    """A container's exit code as a process's: negative where a signal ended it before it could choose a code."""
    deadly = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
    return SIGNALLED - code if code - SIGNALLED in deadly else code


def _write_down(output: Any, log: str) -> None:
    with open(log, "ab", buffering=0) as file, contextlib.suppress(Exception):  # the stream breaks with the engine
        for chunk in output:
            with contextlib.suppress(OSError):  # a full disk; who does not read on would block the task
                file.write(chunk)


def remove(client: docker.DockerClient, label: str) -> list[str]:
    """Removes all containers and networks with a label, and their sockets; returns what they were called."""
    containers = client.containers.list(all=True, filters={"label": label}, ignore_removed=True)
    networks = client.networks.list(filters={"label": label})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_remove_container, containers))
    for network in networks:
        with contextlib.suppress(docker.errors.NotFound):
            network.remove()
    for labels in [*(container.labels for container in containers), *(network.attrs["Labels"] for network in networks)]:
        folder = Path(labels.get(SOCKETS_LABEL, ""))
        if folder.name.startswith("trainer-") and folder.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(folder, ignore_errors=True)
    return [str(container.name) for container in containers] + [str(network.name) for network in networks]


def _remove_container(container: EngineContainer) -> None:
    try:
        container.remove(force=True, v=True)
    except docker.errors.APIError as error:
        if error.status_code not in (404, 409):  # gone, or being removed
            raise
