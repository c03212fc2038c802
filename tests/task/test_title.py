"""The name of a task's process in `ps` and `top`."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from trainer.task.title import set_title
set_title("worker:0", sys.argv[1])
sys.stdout.buffer.write(open("/proc/self/comm", "rb").read() + open("/proc/self/cmdline", "rb").read().strip(b"\\0"))
"""


def shown(text: bytes) -> bytes:
    """What `top` and `ps` show, a line each."""
    return subprocess.run([sys.executable, "-c", PROGRAM, text], capture_output=True, check=True).stdout


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names to set")
@pytest.mark.parametrize("path", [b"runs/mine", b"runs/\xff", "runs/größe".encode()])
def test_top_and_ps_show_the_task(path):
    assert shown(b"trainer worker:0 of " + path) == b"worker:0\ntrainer worker:0 of " + path


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names to set")
def test_a_long_text_is_cut():
    before = len(sys.executable) + len(PROGRAM)
    title = shown(b"x" * 100_000).splitlines()[1]
    assert before < len(title) < 120_000 + before
    assert set(title) == set(b"x")
