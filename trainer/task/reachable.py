"""Waits until the shard hosts reach this task, which may have come back at another address than they remember."""

import logging
import re
import time

import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.faults.exit_codes import UNAVAILABLE, TrainerError
from trainer.task.context import Context

RETRY_SECS = 1.0
ANSWER_MS = 15_000  # for all hosts to answer
REPLACED_SECS = 5.0  # of answers from another task, after which the host will not find this one by itself

_log = logging.getLogger(__name__)
v1 = tf.compat.v1


class UnreachableError(TrainerError):
    """A shard host does not find this task."""

    exit_code = UNAVAILABLE


def answered_instead(message: str) -> str | None:
    """Returns the task that answered instead of this one, as TensorFlow's error names it; None for any other error."""
    found = re.search(r"different device incarnation.*?/job:(\w+)/replica:0/task:(\d+)", message, re.DOTALL)
    return f"{found[1]}:{found[2]}" if found else None


def wait_until_reached(context: Context) -> None:
    """Has every shard host fetch a number from this task, until it succeeds.

    A host's connection to the task's last attempt may wait for minutes before it asks for the address again. Until then
    every call that has it fetch a tensor from here fails. If another task listens at the old address by then, the host
    stays connected to that one; this task then says so on its page, and the host leaves, to be started again.

    Raises:
        UnreachableError: if that takes longer than `timeouts.roll_call_secs`.
    """
    hosts = [name for name in context.plan.hosts if name != context.task.name]
    with tf.Graph().as_default() as graph:
        with tf.device(device_of(context.task.name)):
            number = v1.placeholder(tf.float32, [])
        fetched = []
        for host in hosts:
            with tf.device(device_of(host)):
                fetched.append(number + 1.0)
    config = context.session_config(hosts)
    config.operation_timeout_in_ms = ANSWER_MS
    session = v1.Session(context.server.target, graph=graph, config=config)
    context.keep_open.append(session)
    began, replaced_since, last = time.monotonic(), None, ""
    while True:
        try:
            session.run(fetched, {number: 0.0})
            context.status.is_replaced = False
            return
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError) as error:
            other = answered_instead(error.message)
            if isinstance(error, tf.errors.AbortedError) and other in (None, context.task.name):
                raise
            reason = f"{other} answers" if other else _reason(error.message)
            now = time.monotonic()
            replaced_since = (replaced_since or now) if other else None
            context.status.is_replaced = replaced_since is not None and now - replaced_since > REPLACED_SECS
            if now - began > context.config.timeouts.roll_call_secs:
                raise UnreachableError(f"a shard host does not reach this task: {reason}") from error
            if reason != last:
                _log.info("a shard host does not reach this task yet: %s", reason)
                last = reason
            time.sleep(RETRY_SECS)


def _reason(message: str) -> str:
    """Returns the line of TensorFlow's error that says what went wrong."""
    lines = [
        line for line in message.splitlines() if line and not line.startswith(("Graph execution error", "From /job"))
    ]
    return next((line for line in lines if "connect" in line), lines[0] if lines else message)
