"""How a task reacts to signals, and leaves, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

BUSY = """
import sys, threading
sys.setswitchinterval(0.0005)  # or the main thread waits 5 ms for each of the others
from trainer.task.signals import StopRequest


def deeper(depth):
    return depth and deeper(depth - 1)


def work():
    while True:
        deeper(50)



stop = StopRequest(on_state_request=lambda: print("asked", flush=True))
for _ in range(8):
    threading.Thread(target=work, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""
TIMES = 100


@pytest.mark.slow
def test_a_busy_task_survives_requests_for_its_stacks(tmp_path):
    with (
        (tmp_path / "stacks").open("w+") as stacks,
        subprocess.Popen(
            [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stacks, text=True
        ) as task,
    ):
        assert task.stdin is not None
        assert task.stdout is not None
        assert task.stdout.readline() == "ready\n"
        for _ in range(TIMES):
            task.send_signal(signal.SIGUSR1)
            assert task.stdout.readline() == "asked\n"
        task.stdin.close()
        assert task.wait(10) == 0
        stacks.seek(0)
        text = stacks.read()
    assert text.count("Current thread") == TIMES
    assert text.count("in deeper") > TIMES
    assert "read" in text  # the main thread, too


def test_a_task_leaves_with_its_code_when_the_disk_has_no_room_for_its_log():
    code = "from trainer.task.leave import leave\nprint('done')\nleave(75)"
    environment = os.environ | {"PYTHONUNBUFFERED": ""}  # text stays in the buffer until the process leaves
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, env=environment, check=False).returncode == 75
