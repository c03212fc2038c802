"""Waits until the shard hosts reach this task, which may have come back at another address than they remember."""

import logging
import time

import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.faults.exit_codes import UNAVAILABLE, TrainerError
from trainer.task.context import Context

RETRY_SECS = 1.0

_log = logging.getLogger(__name__)
v1 = tf.compat.v1


class UnreachableError(TrainerError):
    """A shard host does not find this task."""

    exit_code = UNAVAILABLE


def wait_until_reached(context: Context) -> None:
    """Has every shard host fetch a number from this task, until it succeeds.

    A host's connection to the task's last attempt may wait for minutes before it asks for the address again. Until then
    every call that has it fetch a tensor from here fails.

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
    session = v1.Session(context.server.target, graph=graph, config=context.session_config(hosts))
    context.keep_open.append(session)
    deadline, last = time.monotonic() + context.config.timeouts.roll_call_secs, ""
    while True:
        try:
            session.run(fetched, {number: 0.0})
            return
        except tf.errors.UnavailableError as error:
            lines = error.message.splitlines()
            reason = next((line for line in lines if "connect" in line), lines[0])
            if time.monotonic() > deadline:
                raise UnreachableError(f"a shard host does not reach this task: {reason}") from error
            if reason != last:
                _log.info("a shard host does not reach this task yet: %s", reason)
                last = reason
            time.sleep(RETRY_SECS)
