"""The life of a task's process, from its run directory, job and index to its exit code."""

import faulthandler
import json
import logging
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

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
from trainer.task.assemble import open_tables, open_wire
from trainer.task.context import Context
from trainer.task.evaluator import life
from trainer.task.leave import leave, log_failure
from trainer.task.request_ids import make_unique
from trainer.task.server import can_fuse, configure_eager, start_server
from trainer.task.signals import StopRequest
from trainer.task.title import set_title
from trainer.task.unsupervised import leave_unless_all_stop, stops_alone

Role = Callable[[Context], bool]  # returns whether the run was stopped before its last step

ROLES: dict[str, Role] = {"ps": hosting.run, "worker": worker.run, "evaluator": life.run}

_log = logging.getLogger(__name__)


def main(run: str, job: str, index: int, config: RunConfig | None = None) -> NoReturn:
    """Runs a task of a run that a launcher prepared; `config` is the run's, if it was read already."""
    directory = RunDirectory(Path(run))
    links = json.loads(os.environ.get(LINKS, "{}"))
    run_task(config or directory.read_config(), directory.read_plan().reached_by(links), directory, job, index)


def run_task(config: RunConfig, plan: Plan, directory: RunDirectory, job: str, index: int) -> NoReturn:
    """Runs a task and ends the process; an error is logged, and the exit code says of which kind it was."""
    faulthandler.enable()
    task = plan.task(job, index)
    log.set_up(task.name)
    make_unique()
    set_title(task.name, f"trainer {task.name} of {directory.path}")
    _log.info("%s%s of %s, pid %d: %s", log.STARTED, task.name, directory.path, os.getpid(), plan.describe())
    try:
        _run(config, plan, directory, task)
    except Exception as error:
        leave(log_failure(error))  # within the block, as long as the traceback holds the sessions: see `_run`


def _run(config: RunConfig, plan: Plan, directory: RunDirectory, task: Task) -> NoReturn:
    if config.device.deterministic:
        tf.config.experimental.enable_op_determinism()  # of the process: before it builds a graph
    context = _make_context(config, plan, directory, task)
    _serve_status(context)
    if task.job != "evaluator":
        _make_devices(context)
        context.wire = open_wire(plan)
        context.tables = open_tables(plan)
        context.status.is_listening = True
        if plan.has_shard_hosts and not task.is_chief and not context.status.launch:
            context.roll_call(["worker:0"], until="is_listening")  # without a launcher nobody would miss it
    stopped = ROLES[task.job](context)
    context.status.state = TaskState.done
    _log.info("done at step %d", context.status.step)
    # Not after a return: it would release the context, and so close its sessions, which can wait for ever for a peer.
    finished = FINISHED if SUPERVISED in os.environ else exit_codes.OK
    leave(exit_codes.TERMINATED if stopped or context.stop.requested else finished)


def _make_context(config: RunConfig, plan: Plan, directory: RunDirectory, task: Task) -> Context:
    run = str(directory.path)
    status = TaskPage(
        task.job,
        task.index,
        run,
        config_hash(config),
        tensorflow=tf.version.VERSION,
        frozen=plan.frozen.sha256,
        data=digest(plan.fingerprint),
    )
    if config.job is None:
        status.launch = run

    def on_stop() -> bool:
        status.is_stopping = True
        if not stops_alone(context):
            return True
        threading.Thread(target=leave_unless_all_stop, args=[context], name="eviction", daemon=True).start()
        return False

    def log_state() -> None:  # follows the stacks that `kill -USR1 PID` writes
        _log.info("state: %s", json.dumps(status.as_of_now().to_json()))

    # A task that a scheduler started has no run directory; that of a container may be for reading only.
    may_write = directory.plan.exists() and os.access(directory.path, os.W_OK)
    context = Context(
        config,
        plan,
        directory,
        task,
        status,
        StopRequest(on_stop=on_stop, on_state_request=log_state),
        Journal(directory.journal / f"{task.job}-{task.index}.jsonl" if may_write else None),
        Recorder(directory, task, plan.task("worker", 0)) if config.profile else None,
        count_rollbacks(directory.rollbacks),
    )
    return context


def _serve_status(context: Context) -> None:
    """Serves the task's status page, for its peers and for the launcher."""
    task, status = context.task, context.status
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
    """Does what a launcher that was killed cannot ask for any more."""
    _log.warning("the launcher has died; saving and stopping")
    os.kill(os.getpid(), signal.SIGTERM)


def _make_devices(context: Context) -> None:
    """Makes this process's devices and thread pools; whatever makes them first decides their size for all."""
    if context.plan.effective_strategy.is_one_process:
        context.keep_open.append(tf.compat.v1.Session(graph=tf.Graph(), config=context.session_config([])))
        return
    if context.plan.effective_strategy.has_ring:  # its strategy starts the server, when the other workers are up
        configure_eager(context.task, fuses=can_fuse(context.config.train))
        return
    try:
        context.server = start_server(context.plan, context.task)
    except tf.errors.UnknownError as error:
        raise PeerError(f"cannot listen on {context.task.address}: {error.message}") from error
