"""Seeds defects, one at a time, into a copy of this checkout, and shows which tests find them.

    .venv/bin/python tests/defects.py [NAME ...]       all of them, or those whose names contain a NAME

A defect is an operator, a constant or a branch that somebody might get wrong. It is met by the tests of its own folder,
then by all: those of `make test-fast`, then those that `make test` has besides, then the rest. Exits with 1 if one
survives, or if `make test` finds fewer than 21.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOUND_BY_TEST = 21  # at least
TIERS = {  # of each make target, the tests that those before it do not have
    "test-fast": "not cluster and not slow",
    "test": "not long and (cluster or slow)",
    "test-all": "long",
}


class Defect(NamedTuple):
    """A place in the code, and what is wrong there."""

    name: str
    file: str
    right: str
    wrong: str


DEFECTS = (
    # engine/
    Defect(
        "a message of another step counts",
        "engine/sharded/sync_host.py",
        "return tf.reduce_any(tf.not_equal(",
        "return tf.reduce_all(tf.not_equal(",
    ),
    Defect(
        "epsilon within adam's root",
        "engine/optimizers.py",
        "(tf.sqrt(velocity) + config.epsilon)",
        "tf.sqrt(velocity + config.epsilon)",
    ),
    Defect(
        "short gradients are clipped too",
        "engine/optimizers.py",
        "config.clip_norm / tf.maximum(norm, config.clip_norm)",
        "config.clip_norm / norm",
    ),
    Defect(
        "gradients of the greatest staleness are dropped",
        "engine/sharded/async_host.py",
        "steps > self._max_staleness",
        "steps >= self._max_staleness",
    ),
    Defect(
        "a worker counts twice in a quorum",
        "engine/sharded/backup_host.py",
        "if arrival.step != self.step or arrival.worker in self._chosen:",
        "if arrival.step != self.step:",
    ),
    Defect(
        "a request to stop is forgotten by the next update",
        "engine/update.py",
        "stop = tf.maximum(before[STOP] + tf.sign(before[STOP]), now[STOP])",
        "stop = now[STOP]",
    ),
    # plan/
    Defect("hosts may be out of balance", "plan/placement.py", "BALANCED = 1.1 ", "BALANCED = 1.5 "),
    Defect(
        "the smallest parameter is placed first",
        "plan/placement.py",
        "key=lambda p: -p.padded",
        "key=lambda p: p.padded",
    ),
    Defect(
        "memory in MiB is not added to fractions",
        "plan/checks/gpu_memory.py",
        "if sum(fractions) + of_mibs <= FITS:",
        "if sum(fractions) <= FITS:",
    ),
    Defect(
        "a batch need not be divisible by accumulated parts",
        "plan/checks/strategy.py",
        "return count_replicas(cluster, device, train) * train.accumulate",
        "return count_replicas(cluster, device, train)",
    ),
    Defect(
        "a step is said to take half as long as its bytes do",
        "plan/page.py",
        "least_ms = 1000 * 8 * each_way",
        "least_ms = 1000 * 4 * each_way",
    ),
    Defect(
        "a quorum of all is refused",
        "plan/checks/strategy.py",
        "not 1 <= quorum <= replicas",
        "not 1 <= quorum < replicas",
    ),
    # storage/
    Defect(
        "one checkpoint too many is kept",
        "storage/checkpoint_writer.py",
        "len(older) - (keep - 1)",
        "len(older) - keep",
    ),
    Defect(
        "a checkpoint is taken without its checksum", "storage/checkpoint.py", "            verify(checkpoint)\n", ""
    ),
    Defect(
        "the line of the step that a run starts from is lost",
        "storage/history.py",
        'values["step"] <= start',
        'values["step"] < start',
    ),
    Defect(
        "a checkpoint of the last step is refused", "storage/resume.py", "source.step > steps", "source.step >= steps"
    ),
    Defect(
        "a later checkpoint of the same accuracy is the best",
        "storage/evaluations.py",
        "else new > old",
        "else new >= old",
    ),
    Defect(
        "folders that another process is filling are removed",
        "storage/atomic.py",
        "int(writer[1]) == os.getpid() or not _is_alive(int(writer[1]))",
        "int(writer[1]) == os.getpid() or _is_alive(int(writer[1]))",
    ),
    # launch/ and task/
    Defect(
        "one restart too many",
        "launch/restarts.py",
        "if len(recent) >= self.allowed(task):",
        "if len(recent) > self.allowed(task):",
    ),
    Defect(
        "who left is blamed before who held state",
        "launch/restarts.py",
        "(codes[task] in LEFT_BEHIND, not holds_state(plan, task))",
        "(codes[task] in LEFT_BEHIND, holds_state(plan, task))",
    ),
    Defect(
        "a task that starts must answer at once",
        "launch/silence.py",
        "max(limit, self._timeouts.roll_call_secs)",
        "min(limit, self._timeouts.roll_call_secs)",
    ),
    Defect(
        "an interval has passed twice",
        "task/pace.py",
        "step // self._interval <= self._passed",
        "step // self._interval < self._passed",
    ),
    Defect(
        "a run goes back once too often",
        "task/not_finite.py",
        "rollbacks < ROLLBACKS_AT_MOST",
        "rollbacks <= ROLLBACKS_AT_MOST",
    ),
    Defect(
        "a task that fails before any step is restarted",
        "launch/restarts.py",
        "code not in LASTING and (has_stepped or code not in AFTER_A_STEP)",
        "code not in LASTING",
    ),
)


def seed(defect: Defect, copy: Path) -> None:
    file = copy / "trainer" / defect.file
    text = file.read_text()
    assert text.count(defect.right) == 1, f"{defect.file} does not have {defect.right!r} once"
    file.write_text(text.replace(defect.right, defect.wrong))


def find(defect: Defect, copy: Path) -> tuple[str, str] | None:
    """Returns the first target that finds a defect, and which test; all tests of the defect's own folder run first."""
    for folder in (f"tests/{defect.file.partition('/')[0]}", "tests"):
        for target, marks in TIERS.items():
            if (test := first_failure(copy, folder, marks)) is not None:
                return target, test
    return None


def first_failure(copy: Path, folder: str, marks: str) -> str | None:
    command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", "-q", "-x", "-m", marks, folder]
    command.append("--ignore=tests/test_defects.py")  # which shows that a defect can be seeded, once
    environment = os.environ | {"PYTHONPATH": str(copy)}
    ended = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode in (0, 5):  # 5: no test has these marks
        return None
    failed = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else ended.stdout[-500:] + ended.stderr[-500:]


def copies() -> Iterator[Path]:
    """Fresh copies of what is committed, one after the other."""
    while True:
        with tempfile.TemporaryDirectory(prefix="defects-") as folder:
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
            yield Path(folder)


def main(names: list[str]) -> int:
    chosen = [defect for defect in DEFECTS if not names or any(name in defect.name for name in names)]
    found: dict[str, int] = dict.fromkeys(TIERS, 0)
    for defect, copy in zip(chosen, copies(), strict=False):
        began = time.monotonic()
        seed(defect, copy)
        answer = find(defect, copy)
        target, test = answer or ("nothing", "")
        if answer:
            found[target] += 1
        secs = time.monotonic() - began
        print(f"{defect.file}: {defect.name}: found by {target} {test} ({secs:.0f} s)", flush=True)
    survived = len(chosen) - sum(found.values())
    print(", ".join(f"{target}: {count}" for target, count in found.items()) + f", survived: {survived}")
    by_test = found["test-fast"] + found["test"]
    return 1 if survived or by_test < len(chosen) - (len(DEFECTS) - FOUND_BY_TEST) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
