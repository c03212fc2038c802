"""Runs without a launcher: a scheduler starts each task with its TF_CONFIG, and starts again what ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import Run, free_ports, wait_until

from trainer.observe.peers import read_status

pytestmark = pytest.mark.cluster

STEPS, FAULT_AT = 60, 25
EXACT = [
    *("model=mlp", "model.options.width=256", "seed=4", "train.batch_size=48", f"train.steps={STEPS}"),
    *("checkpoint.every=10", "history.every=1", "device.intra_op_threads={ps:1,worker:1}"),
]
LONG = [*EXACT, "train.steps=100000", "checkpoint.every=0"]
MOVED = (69, 75, 143)  # codes of tasks that are started again
TASKS = ("ps:0", "worker:0", "worker:1")


class Address:
    """An address that leads to one server, and then to another one, as those of pods do."""

    def __init__(self, host: str, port: int) -> None:
        self.leads_to = ("127.0.0.1", port)
        self._listener = socket.socket()
        self._listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEPORT, 1
        )  # TensorFlow's servers listen on every address
        self._listener.bind((host, port))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # nobody listens there
                client, _ = self._listener.accept()
                with contextlib.ExitStack() as closing:
                    closing.callback(client.close)
                    server = socket.create_connection(self.leads_to)
                    closing.pop_all()
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                target.sendall(received)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Pods:
    """The tasks of 1ps2w, each a process of its own."""

    def __init__(self, start: Callable[..., Run], *overrides: str, last_host: str = "localhost") -> None:
        """`last_host` is that of worker:1."""
        self.ports = dict(zip(TASKS, free_ports(3), strict=True))
        ps, chief, worker = self.ports.values()
        workers = [f"localhost:{chief}", f"{last_host}:{worker}"]
        self._cluster = {"ps": [f"localhost:{ps}"], "worker": workers}
        self._start, self._overrides = start, overrides
        self.current = {task: self.start(task) for task in TASKS}
        self.ended: list[tuple[str, int, str]] = []  # what ended with an error: task, code and output

    @property
    def chief(self) -> Run:
        return self.current["worker:0"]

    def start(self, task: str) -> Run:
        job, _, index = task.partition(":")
        role = {"cluster": self._cluster, "task": {"type": job, "index": int(index)}}
        environment = {"TF_CONFIG": json.dumps(role), "TF_GRPC_REUSE_PORT": "1"}
        return self._start(*self._overrides, "run=scheduled", environment=environment)

    def signal(self, number: int, *tasks: str) -> None:
        for task in tasks:
            os.kill(self.current[task].process.pid, number)

    def wait_for_end_of(self, task: str) -> tuple[int, str]:
        """Starts again what ends with an error, until this task does; returns its code and its output."""
        self._keep(lambda: any(ended == task for ended, *_ in self.ended))
        return next((code, output) for ended, code, output in self.ended if ended == task)

    def finish(self) -> None:
        """Starts again what ends with an error, until all have ended with 0."""
        self._keep(lambda: all(pod.process.poll() == 0 for pod in self.current.values()))

    def _keep(self, until: Callable[[], bool], at_most: int = 6) -> None:
        def is_so() -> bool:
            for task in [task for task, pod in self.current.items() if pod.process.poll()]:
                code = self.current[task].wait()
                self.ended.append((task, code, self.current[task].output))
                assert code in (-signal.SIGKILL, *MOVED), self.ended[-1]
                assert len(self.ended) <= at_most, self.ended
                self.current[task] = self.start(task)
            return until()

        wait_until(is_so, progress=self.progress, explain=self.explain, poll_secs=0.1)

    def progress(self) -> object:
        return len(self.ended), self.chief.progress()

    def wait_for_ends(self) -> dict[str, int]:
        return {task: pod.wait() for task, pod in self.current.items()}

    def explain(self) -> str:
        return "\n".join(pod.kill_and_explain() for pod in self.current.values())


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run([*EXACT, "cluster=1ps2w"], tmp_path_factory.mktemp("unbroken"), {})
    assert run.wait() == 0, run.output
    yield run
    run.end()


def result(run: Run) -> tuple[str, list[float]]:
    return run.summary()["params_sha256"], [line["loss"] for line in run.history()]


@pytest.mark.long
@pytest.mark.parametrize("killed", ["worker:1", "worker:0", "ps:0"])
def test_a_scheduler_that_starts_killed_tasks_again_finishes_the_run(start, unbroken: Run, killed: str):
    pods = Pods(start, *EXACT)
    pods.chief.wait_for_step(FAULT_AT)
    pods.signal(signal.SIGKILL, killed)
    pods.finish()
    assert result(pods.chief) == result(unbroken)


@pytest.mark.long
def test_a_worker_that_is_evicted_leaves_alone_and_a_ps_after_a_save(start, unbroken: Run):
    pods = Pods(start, *LONG)
    pods.chief.wait_for_step(FAULT_AT)
    pods.signal(signal.SIGTERM, "worker:1")
    evicted = pods.current["worker:1"]
    assert evicted.wait() == 143
    assert "exiting; the others" in evicted.output
    assert [pods.current[task].process.poll() for task in ("ps:0", "worker:0")] == [None, None]
    pods.current["worker:1"] = pods.start("worker:1")
    pods.chief.wait_for_step(len(pods.chief.history()) + 20)
    pods.signal(signal.SIGTERM, "ps:0")
    assert pods.wait_for_ends() == dict.fromkeys(TASKS, 143)
    assert "ps:0 was asked" in pods.chief.output
    history = pods.chief.history()
    assert [line["step"] for line in history] == list(range(1, len(history) + 1))
    assert [line["loss"] for line in history[:STEPS]] == result(unbroken)[1]
    assert (pods.chief.directory / f"checkpoints/{len(history):09d}/manifest.json").exists()


@pytest.mark.long
def test_nobody_waits_for_a_worker_that_is_evicted_when_another_can_stand_in(start, tmp_path):
    pods = Pods(start, *LONG, "restart.stand_in_secs=0")
    pods.chief.wait_for_step(FAULT_AT)
    chief = next(task["control"] for task in pods.chief.plan()["tasks"] if task["job"] == "worker")
    wait_until(lambda: read_status(chief, timeout_secs=5).can_stand_in_for == ["worker:1"], explain=pods.explain)
    pods.signal(signal.SIGTERM, "worker:1")
    assert pods.current["worker:1"].wait() == 143
    pods.chief.wait_for_step(len(pods.chief.history()) + 20)
    pods.current["worker:1"] = pods.start("worker:1")
    wait_until(lambda: read_status(chief, timeout_secs=5).places == {"worker:1": "worker:1"}, explain=pods.explain)
    pods.chief.wait_for_step(len(pods.chief.history()) + 20)
    pods.signal(signal.SIGTERM, *TASKS)
    assert pods.wait_for_ends() == dict.fromkeys(TASKS, 143)
    summary = pods.chief.summary()
    whole = start(*EXACT, f"train.steps={summary['steps']}", "cluster=1ps2w", f"run={tmp_path / 'unbroken'}")
    assert whole.wait() == 0, whole.output
    assert result(pods.chief) == result(whole)


@pytest.mark.long
def test_sigterm_to_all_saves(start):
    pods = Pods(start, *LONG)
    pods.chief.wait_for_step(FAULT_AT)
    pods.signal(signal.SIGTERM, *TASKS)
    assert pods.wait_for_ends() == dict.fromkeys(TASKS, 143)
    saved = [int(path.name) for path in (pods.chief.directory / "checkpoints").glob("0*")]
    assert saved == [pods.chief.history()[-1]["step"]]


@pytest.mark.long
def test_a_ps_does_not_outlive_a_chief_that_stays_away(start):
    pods = Pods(start, *LONG, "timeouts.roll_call_secs=8")
    pods.chief.wait_for_step(FAULT_AT)
    pods.signal(signal.SIGKILL, "worker:0", "worker:1")
    assert pods.current["ps:0"].wait() == 69
    assert "worker:0 at localhost:" in pods.current["ps:0"].output
    assert "not answered for 8 s" in pods.current["ps:0"].output


@pytest.mark.long
def test_a_ps_that_takes_another_task_for_a_worker_starts_again(start, unbroken: Run):
    """The address of worker:1 leads to the chief after a kill, and connections to it hold."""
    pods = Pods(start, *EXACT, last_host="127.0.0.2")
    address = Address("127.0.0.2", pods.ports["worker:1"])
    pods.chief.wait_for_step(FAULT_AT)
    address.leads_to = ("127.0.0.1", pods.ports["worker:0"])
    pods.signal(signal.SIGKILL, "worker:1")
    assert pods.current["worker:1"].wait() == -signal.SIGKILL
    pods.current["worker:1"] = pods.start("worker:1")
    code, output = pods.wait_for_end_of("ps:0")
    assert code == 75
    assert "instead of worker:1" in output
    address.leads_to = ("127.0.0.1", pods.ports["worker:1"])
    pods.finish()
    of_worker = [output for task, _, output in pods.ended if task == "worker:1"]
    assert any("yet: worker:0 answers" in output for output in of_worker)
    assert result(pods.chief) == result(unbroken)


@pytest.mark.long
def test_a_finished_run_leaves_no_noise_of_tensorflow(start, unbroken: Run, tmp_path: Path):
    pods = Pods(start, *EXACT)
    assert pods.wait_for_ends() == dict.fromkeys(TASKS, 0)
    assert result(pods.chief) == result(unbroken)
    for pod in pods.current.values():
        assert "Cleanup partition error" not in pod.output
        assert "local_rendezvous" not in pod.output
