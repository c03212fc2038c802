"""What the launcher knows about the attempts of its tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pages import page

from trainer.faults import exit_codes
from trainer.launch.attempts import Attempts
from trainer.launch.messages import Exited, Started, TaskEvent
from trainer.plan.environment import FINISHED
from trainer.plan.plan import Task
from trainer.storage.run_directory import RunDirectory

WORKER = Task("worker", 1, "", "", (), None, 1, 2)
LOG = """\
12:00:00.000 worker:1 INFO  started: worker:1 of /run, pid 1: sync
12:00:01.000 worker:1 ERROR failed: RuntimeError: the first attempt
12:00:02.000 worker:1 INFO  started: worker:1 of /run, pid 2: sync
12:00:03.000 worker:1 ERROR failed: RuntimeError: the second attempt
"""


def test_a_failure_shows_the_log_of_the_last_attempt_alone(tmp_path: Path):
    log = tmp_path / WORKER.log
    log.parent.mkdir()
    log.write_text(LOG)
    starter: Any = None
    attempts = Attempts([WORKER], RunDirectory(tmp_path), starter)
    attempts.current["worker:1"].code = 70
    assert attempts.failure_of(attempts.current["worker:1"]).tail == LOG.splitlines()[2:]


def test_a_page_of_the_earlier_attempt_is_not_the_new_ones(tmp_path: Path):
    class Starter:
        def start(self, name: str, **options: Any) -> None: ...

    starter: Any = Starter()
    attempts = Attempts([WORKER], RunDirectory(tmp_path), starter)
    first = attempts.current["worker:1"]
    first.page = page(pid=7, started_at=1.0)
    attempts.start("worker:1", 1, {})
    attempts.start("worker:1", 2, {})  # the attempt between them never showed a page
    second = attempts.current["worker:1"]
    assert not second.is_mine(page(pid=7, started_at=1.0))
    assert second.is_mine(page(pid=7, started_at=2.0))


@pytest.mark.parametrize(("code", "becomes"), [(FINISHED, 0), (0, exit_codes.BAD_DATA), (3, 3), (-9, -9)])
def test_a_task_that_leaves_with_0_was_ended_by_the_users_code(tmp_path: Path, code: int, becomes: int):
    class Starter:
        def events(self, timeout_secs: float) -> list[TaskEvent]:
            return [Started("worker:1", 7), Exited("worker:1", 7, code)]

    starter: Any = Starter()
    attempts = Attempts([WORKER], RunDirectory(tmp_path), starter)
    attempts.poll(0)
    assert attempts.current["worker:1"].code == becomes
    assert attempts.current["worker:1"].has_failed == (becomes != 0)
