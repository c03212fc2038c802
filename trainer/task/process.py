"""The life of a task's process, from its run directory, job and index to its exit code."""

import faulthandler
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.observe import status as status_page
from trainer.observe.machine import is_local
from trainer.observe.peers import UNIX, PeerError
from trainer.observe.profile.record import Recorder
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan import addresses
from trainer.plan.environment import FINISHED, LAUNCHER, LINKS, SUPERVISED
from trainer.plan.fingerprint import digest
from trainer.plan.plan import Plan, Task
from trainer.storage.journal import Journal
from trainer.storage.rollbacks import count_rollbacks
from trainer.storage.run_directory import RunDirectory, config_hash
from trainer.task import hosting, log, worker
from trainer.task.evaluator import life
from trainer.task.leave import leave, log_failure
from trainer.task.other_tasks import roll_call
from trainer.task.request_ids import make_unique
from trainer.task.runtime import TaskRuntime
from trainer.task.server import can_fuse, configure_eager, start_server
from trainer.task.signals import StopRequest
from trainer.task.spec import TaskSpec
from trainer.task.title import set_title
from trainer.task.unsupervised import leave_unless_all_stop

Role = Callable[[TaskSpec, TaskRuntime], bool]  # returns whether the run was stopped before its last step

ROLES: dict[str, Role] = {"ps": hosting.run, "worker": worker.run, "evaluator": life.run}

_log = logging.getLogger(__name__)


def main(run: str, job: str, index: int, config: RunConfig | None = None) -> NoReturn:
    """Runs a task of a run that a launcher prepared; `config` is the run's, if it was read already."""
    directory = RunDirectory(Path(run))
    links = json.loads(os.environ.get(LINKS, "{}"))
    run_task(config or directory.read_config(), directory.read_plan().reached_by(links), directory, job, index)


def run_task(config: RunConfig, plan: Plan, directory: RunDirectory, job: str, index: int) -> NoReturn:
    """Runs a task and ends the process; an error is logged, and the exit code tells its kind."""
    faulthandler.enable()
    task = plan.task(job, index)
    log.set_up(task.name)
    make_unique()
    set_title(task.name, f"trainer {task.name} of {directory.path}")
    _log.info("%s%s of %s, pid %d: %s", log.STARTED, task.name, directory.path, os.getpid(), plan.describe())
    try:
        _run(TaskSpec(config, plan, directory, task, count_rollbacks(directory.rollbacks)))
    except Exception as error:
        leave(log_failure(error))  # within the block, as long as the traceback holds the sessions: see `_run`


def _run(spec: TaskSpec) -> NoReturn:
    task = spec.task
    if spec.config.device.deterministic:
        tf.config.experimental.enable_op_determinism()  # of the process: before it builds a graph
    runtime = _make_runtime(spec)
    status = runtime.status
    _serve_status(task, status)
    if task.job != "evaluator":
        runtime.target = _make_devices(spec, runtime.keep_open)
        status.is_listening = True
        if spec.plan.has_shard_hosts and not task.is_chief and spec.is_unsupervised:
            roll_call(spec, status, [spec.chief.name], until="is_listening")  # no other task would notice its absence
    stopped = ROLES[task.job](spec, runtime)
    status.state = TaskState.done
    _log.info("done at step %d", status.step)
    # Not after a return: it would release the runtime, and so close its sessions, which can wait for ever for a peer.
    finished = FINISHED if SUPERVISED in os.environ else exit_codes.OK
    leave(exit_codes.TERMINATED if stopped or runtime.stop.requested else finished)


def _make_runtime(spec: TaskSpec) -> TaskRuntime:
    config, plan, directory, task = spec.config, spec.plan, spec.directory, spec.task
    status = TaskPage(
        task.job,
        task.index,
        str(directory.path),
        config_hash(config),
        tensorflow=tf.version.VERSION,
        frozen=plan.frozen.sha256,
        data=digest(plan.fingerprint),
        launch="" if spec.is_unsupervised else str(directory.path),
    )

    def on_stop() -> bool:
        status.is_stopping = True
        if spec.stops_alone:
            threading.Thread(
                target=leave_unless_all_stop, args=[spec.chief, stop], name="eviction", daemon=True
            ).start()
        return not spec.stops_alone

    def log_state() -> None:  # follows the stacks that `kill -USR1 PID` writes
        _log.info("state: %s", json.dumps(status.as_of_now().to_json()))

    stop = StopRequest(on_stop=on_stop, on_state_request=log_state)
    # A task that a scheduler started has no run directory; that of a container may be for reading only.
    may_write = directory.plan.exists() and os.access(directory.path, os.W_OK)
    journal = Journal(directory.journal / f"{task.job}-{task.index}.jsonl" if may_write else None)
    return TaskRuntime(status, stop, journal, Recorder(directory, task, spec.chief) if config.profile else None)


def _serve_status(task: Task, status: TaskPage) -> None:
    """Serves the task's status page, for its peers and for the launcher."""
    if task.control.startswith(UNIX):
        status_page.serve_at(status, task.control.removeprefix(UNIX))
        return
    host, port = addresses.host_of(task.control), int(task.control.rpartition(":")[2])
    launcher = os.environ.get(LAUNCHER)
    try:
        # A name may be a scheduler's, of an address that only others reach this task by.
        alone = _stop_without_launcher if launcher == "" else None
        status_page.serve(status, host if is_local(host) else "", port, names=[host], alone=alone)
    except OSError as error:
        raise PeerError(f"{task.control} is taken ({error.strerror}); stop the program that listens there") from error
    if launcher:
        status_page.serve_at(status, launcher, alone=_stop_without_launcher)


def _stop_without_launcher() -> None:
    """Ends this task after its launcher was killed and can no longer ask for that."""
    _log.warning("the launcher has died; saving and stopping")
    os.kill(os.getpid(), signal.SIGTERM)


def _make_devices(spec: TaskSpec, keep_open: list[Any]) -> str:
    """Makes this process's devices and thread pools; whatever makes them first decides their size for all.

    Returns:
        The target of sessions: the task's server, where it has one.
    """
    if spec.plan.effective_strategy.is_one_process:
        keep_open.append(tf.compat.v1.Session(graph=tf.Graph(), config=spec.session_config()))
        return ""
    if spec.plan.effective_strategy.has_ring:  # its strategy starts the server, when the other workers are up
        configure_eager(spec.task, fuses=can_fuse(spec.config.train))
        return ""
    try:
        server = start_server(spec.plan, spec.task)
    except tf.errors.UnknownError as error:
        raise PeerError(f"cannot listen on {spec.task.address}: {error.message}") from error
    keep_open.append(server)
    return str(server.target)
