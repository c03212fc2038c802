"""Starts the tasks of a run as containers, signals them and reports their ends."""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import docker
import docker.errors
from docker.models.containers import Container as DockerContainer
from docker.types import DeviceRequest, LogConfig
from docker.types import Mount as DockerMount

from trainer.launch.containers.docker_errors import DockerError, explain_errors
from trainer.launch.containers.owners import lend, user_of_tasks
from trainer.launch.containers.removal import SOCKETS_LABEL, remove
from trainer.launch.containers.spec import (
    ENTRYPOINT,
    GPU_SHARED_MIB,
    NETWORK_OPTIONS,
    RUN_LABEL,
    SECURITY,
    TASK_LABEL,
    ContainerSpec,
    project_of,
)
from trainer.launch.messages import Exited, Started, TaskEvent
from trainer.observe.peers import UNIX
from trainer.plan.environment import LAUNCHER, SUPERVISED

SOCKETS = "/trainer/sockets"  # in a container
LOG_SECS = 5.0  # to write the end of a log after its task has ended
SIGNALLED = 128  # plus a signal's number: the exit code of a process that the signal ended
OUT_OF_MEMORY = "out of memory: it reached its limit (container.memory_mib), so the kernel killed it"


class ContainerTasks:
    """The containers of one run, created at their first start; leaving the block removes them and their network."""

    def __init__(
        self,
        client: docker.DockerClient,
        containers: Sequence[ContainerSpec],
        run: str,
        *,
        report: Callable[[TaskEvent | Exception], None] | None = None,
        numbers: Iterator[int] | None = None,
    ) -> None:
        """Creates nothing yet.

        Args:
            run: path of the run directory on the engine's host.
            report: receives each event, in place of `events`; called in other threads.
            numbers: of the starts.
        """
        self._client, self._run, self._project = client, run, project_of(run)
        self._specs = {container.task: container for container in containers}
        self._containers: dict[str, DockerContainer] = {}
        self._tasks: dict[int, str] = {}  # task by the number of a start, which stands for a process id
        self._logs: dict[int, threading.Thread] = {}
        self._numbers = numbers or count(1)
        self._news: queue.SimpleQueue[TaskEvent | Exception] = queue.SimpleQueue()
        self._report = report or self._news.put
        # Requests to one container are handled in order; containers do not wait for each other.
        self._executors = {task: ThreadPoolExecutor(1, thread_name_prefix=task) for task in self._specs}
        self._newest: dict[str, int] = {}  # number of a task's last start
        self._cleanup = ExitStack()
        self._is_prepared = False
        self._are_elsewhere = any(container.host for container in containers)
        self.sockets = Path(tempfile.mkdtemp(prefix="trainer-"))  # short: a socket's path has 107 bytes at most

    def control(self, task: str) -> str:
        """Returns where the launcher reads a task's status page: it has no address on the tasks' network."""
        return f"{UNIX}{self.sockets}/{self._specs[task].service}/page"

    def __enter__(self) -> ContainerTasks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes everything that was created."""
        for executor in self._executors.values():
            executor.shutdown(wait=True, cancel_futures=True)
        self._cleanup.close()
        shutil.rmtree(self.sockets, ignore_errors=True)

    def abandon(self) -> None:
        """Leaves everything in place, because its engine no longer answers."""
        for executor in self._executors.values():
            executor.shutdown(wait=False, cancel_futures=True)
        shutil.rmtree(self.sockets, ignore_errors=True)

    def start(self, name: str, *, run: str, environment: Mapping[str, str], log: str) -> int:
        """Starts or restarts a task's container; returns the start's number, which its events have."""
        if not self._is_prepared:
            self._prepare()
        number = next(self._numbers)
        self._tasks[number], self._newest[name] = name, number
        self._do(name, lambda: self._start(name, number, log))
        return number

    def signal(self, pid: int, number: int) -> None:
        """Sends a signal to the task of a start, unless it has ended."""
        name = self._tasks[pid]
        if self._newest[name] == pid:
            self._do(name, lambda: self._signal(name, number))

    def events(self, timeout_secs: float) -> list[TaskEvent]:
        """Returns the events, waiting at most this long.

        Raises:
            DockerError: if Docker refuses a request, or has stopped.
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
        """Removes the remains of a killed launcher of this run, and creates its network."""
        self._is_prepared = True
        with explain_errors():
            remove(self._client, f"{RUN_LABEL}={self._run}")
            lend(self._run)
            self._cleanup.callback(self._remove)
            if not self._are_elsewhere:
                labels = {RUN_LABEL: self._run, SOCKETS_LABEL: str(self.sockets)}
                self._client.networks.create(
                    self._project, driver="bridge", internal=True, options=NETWORK_OPTIONS, labels=labels
                )
            stream = self._client.events(decode=True, filters={"label": f"{RUN_LABEL}={self._run}", "event": ["die"]})
            self._cleanup.callback(stream.close)
        threading.Thread(target=self._listen, args=(stream,), name="docker events", daemon=True).start()

    def _remove(self) -> None:
        """Removes everything; a failure is only printed, because the outcome of the run matters more."""
        try:
            with explain_errors():
                remove(self._client, f"{RUN_LABEL}={self._run}")
        except DockerError as error:
            print(f"trainer: containers of {self._run} could not be removed: {error}", file=sys.stderr)

    def _do(self, name: str, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                with explain_errors(self._specs[name].image):
                    work()
            except DockerError as error:
                self._report(DockerError(f"{name}: {error}"))
            except Exception as error:
                self._report(error)

        self._executors[name].submit(run)

    def _start(self, name: str, number: int, log: str) -> None:
        try:
            container = self._containers.get(name) or self._create(self._specs[name])
            output = container.attach(stream=True, logs=False)  # before it starts, so that no output is lost
        except docker.errors.NotFound:
            if name not in self._containers:
                raise
            container = self._create(self._specs[name])  # removed by someone else
            output = container.attach(stream=True, logs=False)
        self._containers[name] = container
        self._logs[number] = threading.Thread(target=_write_log, args=(output, log), name=f"log of {name}", daemon=True)
        self._logs[number].start()
        self._report(Started(name, number))
        container.start()

    def _create(self, spec: ContainerSpec) -> DockerContainer:
        user, group = user_of_tasks()
        gpus = DeviceRequest(driver="nvidia", device_ids=[str(gpu) for gpu in spec.gpus], capabilities=[["gpu"]])
        memory = None if spec.memory_mib is None else f"{spec.memory_mib}m"
        return self._client.containers.create(
            spec.image,
            list(spec.arguments),
            entrypoint=list(ENTRYPOINT),
            name=f"{self._project}-{spec.service}",
            labels={RUN_LABEL: self._run, TASK_LABEL: spec.task, SOCKETS_LABEL: str(self.sockets)},
            user=f"{user}:{group}",
            init=True,
            read_only=True,
            cap_drop=["ALL"],
            security_opt=list(SECURITY),
            tmpfs={"/tmp": f"size={spec.tmp_mib}m,mode=1777"},
            **(self._of_host(spec) if self._are_elsewhere else self._of_run(spec)),
            device_requests=[gpus] if spec.gpus else None,
            shm_size=f"{GPU_SHARED_MIB}m" if spec.gpus else None,
            mem_limit=memory,
            memswap_limit=memory,
            nano_cpus=None if spec.cpus is None else int(spec.cpus * 1e9),
            pids_limit=spec.pids,
            log_config=LogConfig(type="none"),  # its output is read by `_write_log`
        )

    def _of_run(self, spec: ContainerSpec) -> dict[str, Any]:
        """Returns the run's network, and a socket by which the launcher, outside it, reads the task's status page."""
        sockets = self.sockets / spec.service
        sockets.mkdir(exist_ok=True)
        os.chown(sockets, *user_of_tasks())
        alias = self._client.api.create_endpoint_config(aliases=[spec.service])
        return {
            "environment": {**spec.environment, SUPERVISED: "1", LAUNCHER: f"{SOCKETS}/page"},
            "mounts": [*_mounts(spec), DockerMount(SOCKETS, str(sockets), type="bind")],
            "network": self._project,
            "networking_config": {self._project: alias},
        }

    def _of_host(self, spec: ContainerSpec) -> dict[str, Any]:
        """Returns the network of the host, where the launcher reads the page at the task's address."""
        environment = {**spec.environment, SUPERVISED: "1", LAUNCHER: ""}
        return {"environment": environment, "mounts": _mounts(spec), "network_mode": "host"}

    def _signal(self, name: str, number: int) -> None:
        with contextlib.suppress(docker.errors.NotFound):
            try:
                self._containers[name].kill(number)
            except docker.errors.APIError as error:
                if error.status_code != 409:  # it is not running
                    raise

    def _listen(self, stream: Any) -> None:
        """Reports the end of each container, after the end of its log is written."""
        try:
            for event in stream:
                name = event["Actor"]["Attributes"][TASK_LABEL]
                number, code = self._newest[name], int(event["Actor"]["Attributes"]["exitCode"])
                self._logs[number].join(LOG_SECS)
                had_too_little = code == SIGNALLED + signal.SIGKILL and self._is_out_of_memory(name)
                self._report(Exited(name, number, _as_process(code), OUT_OF_MEMORY if had_too_little else None))
        except Exception as error:  # the stream breaks in many ways
            self._report(DockerError(f"the Docker engine stopped answering ({error})"))
        else:
            self._report(DockerError("the Docker engine has stopped"))

    def _is_out_of_memory(self, name: str) -> bool:
        container = self._containers[name]
        try:
            container.reload()
        except docker.errors.NotFound:  # removed by someone else
            return False
        return bool(container.attrs["State"]["OOMKilled"])


def _mounts(spec: ContainerSpec) -> list[DockerMount]:
    return [DockerMount(m.target, m.source, type="bind", read_only=not m.is_writable) for m in spec.mounts]


def _as_process(code: int) -> int:
    """Converts a container's exit code to that of a process: negative if a signal ended it."""
    deadly = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
    return SIGNALLED - code if code - SIGNALLED in deadly else code


def _write_log(output: Any, log: str) -> None:
    with open(log, "ab", buffering=0) as file, contextlib.suppress(Exception):  # the stream breaks with the engine
        for chunk in output:
            with contextlib.suppress(OSError):  # a full disk; not reading on would block the task
                file.write(chunk)
