"""The log of a task: one format for every line."""

from __future__ import annotations

import re
import subprocess
import sys

CODE = """
import logging
from trainer.task import log

logging.basicConfig(format="of the launcher: %(message)s")
log.set_up("worker:1")
logging.getLogger("trainer.task.loop").info("step 40: checkpoint saved")
logging.getLogger("trainer.task.loop").warning("step 41 is not saved")
logging.getLogger("library").info("a detail")
logging.getLogger("library").error("a problem")
"""
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"


def test_every_line_has_its_time_task_and_level():
    output = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert output.stderr == ""
    lines = output.stdout.splitlines()
    assert [re.sub(f"^{TIME} ", "", line) for line in lines] == [
        "worker:1 INFO  step 40: checkpoint saved",
        "worker:1 WARN  step 41 is not saved",
        "worker:1 ERROR a problem",
    ]
    assert all(re.match(f"{TIME} ", line) for line in lines)
