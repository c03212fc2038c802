"""Failpoints: what can be set, what each does to a real process, and what they leave of a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forks import Forks

from trainer.faults import failpoints
from trainer.faults.failpoints import Failpoint
from trainer.storage import checkpoint, checkpoint_writer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

WALK = """
import time
from trainer.faults.failpoints import reach
for step in range(5):
    reach("apply", step)
    reach("push", step)
    print(step, flush=True)
print("walked", flush=True)
"""

IN_A_GRAPH = """
import tensorflow as tf
from trainer.engine.instruments import failpoint
v1 = tf.compat.v1
with tf.Graph().as_default() as graph, v1.Session() as session:
    step = v1.placeholder(tf.int64, [])
    assert failpoint("apply", step) == []
    assert len(graph.get_operations()) == 1
    with tf.control_dependencies(failpoint("push", step)):
        after = tf.identity(step)
    for at in range(5):
        print(session.run(after, {step: at}), flush=True)
"""

SAVE_TWICE = """
import sys
from pathlib import Path
import numpy as np
from trainer.storage import checkpoint, checkpoint_writer
for step in (1, 2):
    checkpoint_writer.write(Path(sys.argv[1]), step, 0, {}, {"parameters/a": np.full(1000, step, np.float32)}, keep=9)
"""


def run(code: str, failpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | {failpoints.VARIABLE: failpoint},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# ---- what can be set


def test_a_failpoint_names_place_action_and_step():
    assert failpoints.parse("push:kill@40") == [Failpoint("push", "kill", 40)]


def test_several_are_joined_by_semicolons():
    assert failpoints.parse("push:sleep=0.5@40; save-data:stop@0") == [
        Failpoint("push", "sleep=0.5", 40, secs=0.5),
        Failpoint("save-data", "stop", 0),
    ]


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_sets_none(text):
    assert failpoints.parse(text) == []


@pytest.mark.parametrize(
    "text",
    ["push", "push:kill", "push:kill@", "push:kill@-1", "pusch:kill@1", "push:die@1", "push:sleep@1", "push:sleep=x@1",
     "push:kill=3@1", "push:kill@1.5"],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_all_that_is_allowed(text):
    allowed = re.escape(", ".join(failpoints.NAMES))
    wanted = (
        f"TRAINER_FAILPOINT: '{re.escape(text)}' is not NAME:ACTION@STEP, .* names are {allowed}; actions are kill,"
    )
    with pytest.raises(ValueError, match=wanted):
        failpoints.parse(text)


def test_only_the_part_that_cannot_be_read_is_named():
    with pytest.raises(ValueError, match="TRAINER_FAILPOINT: 'take:kil@2' is not"):
        failpoints.parse("push:kill@1;take:kil@2")


def test_the_docstring_tells_every_place():
    table = failpoints.__doc__.partition("what is done")[2]
    assert re.findall(rf"({'|'.join(failpoints.NAMES)})  +(?:the|a) ", table) == list(failpoints.NAMES)


# ---- what they do


def test_kill_ends_the_process_at_the_place():
    ended = run(WALK, "push:kill@2")
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "0\n1\n"
    assert ended.stderr == "failpoint push:kill@2 reached at step 2\n"


def test_raise_raises_an_error_that_names_the_failpoint():
    ended = run(WALK, "push:raise@2")
    assert ended.returncode == 1
    assert "RuntimeError: failpoint push:raise@2 reached at step 2" in ended.stderr


def test_stop_freezes_the_process_until_it_is_continued():
    with subprocess.Popen(
        [sys.executable, "-c", WALK],
        cwd=ROOT,
        env=os.environ | {failpoints.VARIABLE: "push:stop@2"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=30)[0].endswith("walked\n")
    assert process.returncode == 0


def test_sleep_goes_on_later():
    began = time.monotonic()
    ended = run(WALK, "push:sleep=1.5@2")
    assert ended.stdout.endswith("walked\n")
    assert time.monotonic() - began > 1.5


def test_each_acts_once_in_a_process():
    ended = run(WALK, "push:sleep=0@2;push:sleep=0@3;apply:sleep=0@1")
    acted = [line for line in ended.stderr.splitlines() if line.startswith("failpoint")]
    assert [line.partition(" reached ")[2] for line in acted] == ["at step 1", "at step 2", "at step 3"]


def test_the_first_step_seen_may_be_later_than_the_one_that_was_set():
    ended = run(WALK.replace("range(5)", "range(30, 35)"), "push:kill@2")
    assert ended.stderr.endswith("failpoint push:kill@2 reached at step 30\n")


def test_an_unreadable_variable_is_an_error_at_the_first_place(snapshot):
    ended = run(WALK, "push=kill")
    assert ended.stderr.splitlines()[-1] == snapshot


def test_a_forked_task_reads_its_own_environment():
    code = """
import os
from trainer.faults import failpoints
if (pid := os.fork()) == 0:
    os.environ[failpoints.VARIABLE] = "push:kill@0"
    failpoints.reach("push", 0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    assert run(code, "").stdout.splitlines()[-1] == "-9"


@pytest.mark.long
def test_an_operation_of_a_graph_reaches_its_place_when_it_runs(tensorflow_python: Forks):
    environment = {failpoints.VARIABLE: "push:kill@3"}
    ended = tensorflow_python.run("-c", IN_A_GRAPH, cwd=ROOT, environment=environment)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "0\n1\n2\n"
    assert ended.stderr.endswith("failpoint push:kill@3 reached at step 3\n")


def test_an_error_raised_in_a_graph_names_the_failpoint(tensorflow_python: Forks):
    environment = {failpoints.VARIABLE: "push:raise@3"}
    ended = tensorflow_python.run("-c", IN_A_GRAPH, cwd=ROOT, environment=environment)
    assert ended.stdout.splitlines()[:3] == ["0", "1", "2"]
    assert "failpoint push:raise@3 reached at step 3" in ended.stderr


def test_where_none_is_set_a_graph_gets_no_operation(tensorflow_python: Forks):
    code = """
import tensorflow as tf
from trainer.engine.instruments import failpoint
from trainer.faults import failpoints
with tf.Graph().as_default() as graph:
    step = tf.compat.v1.placeholder(tf.int64, [])
    operations = sum((failpoint(name, step) for name in failpoints.NAMES), [])
print(operations, len(graph.get_operations()))
"""
    assert tensorflow_python.run("-c", code, cwd=ROOT).stdout == "[] 1\n"


def test_importing_failpoints_imports_no_tensorflow():
    reached = "import sys, trainer.faults.failpoints as f; f.reach('step', 0)"
    code = f"{reached}; print({{'tensorflow', 'numpy'}} & set(sys.modules))"
    assert run(code, "").stdout == "set()\n"


# ---- what they leave of a checkpoint


@pytest.mark.parametrize(("place", "newest"), [("save-data", 1), ("save-manifest", 1), ("rename", 2)])
def test_a_writer_killed_at_a_place_leaves_a_checkpoint_whole_or_not_at_all(tmp_path, place, newest):
    assert run(SAVE_TWICE, f"{place}:kill@2", str(tmp_path)).returncode == -signal.SIGKILL
    found, skipped = checkpoint.newest_valid(tmp_path)
    assert (found.step, skipped) == (newest, [])
    assert (checkpoint.load(found)["parameters/a"] == newest).all()
    assert [path.name for path in checkpoint.finished(tmp_path)] == ["000000001", "000000002"][:newest]
    left = [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    assert len(left) == 2 - newest
    files = {"save-data": ["tensors.npz"], "save-manifest": ["manifest.json", "tensors.npz"], "rename": []}
    assert sorted(file.name for folder in left for file in folder.iterdir()) == files[place]

    checkpoint_writer.write(tmp_path, 3, 1, {}, {"parameters/a": np.full(1000, 3, np.float32)}, keep=9)
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "000000003"
    assert not list(tmp_path.glob(".*"))
    assert checkpoint.newest_valid(tmp_path)[0].step == 3


@pytest.mark.parametrize(("place", "newest"), [("save-data", 1), ("save-manifest", 1), ("rename", 2)])
def test_a_save_that_fails_at_a_place_leaves_nothing_temporary(tmp_path, place, newest):
    ended = run(SAVE_TWICE, f"{place}:raise@2", str(tmp_path))
    assert f"failpoint {place}:raise@2 reached at step 2" in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000001", "000000002"][:newest]
    assert checkpoint.newest_valid(tmp_path)[0].step == newest
