"""The progress of a run: lines, the line that lives on a terminal, and the table that fits below it."""

from __future__ import annotations

import io
import json
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pages import page
from rich.console import Console

from trainer.launch import progress, screen, view
from trainer.launch.view import Course, Standing, StepRate, TaskView
from trainer.observe.task_page import TaskState
from trainer.storage.history import History


def task(
    name: str, state: str = "training", *, silent_secs: float = 0.0, code: int | None = None, **told: Any
) -> TaskView:
    """A task that answers; at step 40, unless its page tells something else."""
    shown = page(name, state, **{"step": 40, "wait_fraction": 0.5, "memory_bytes": 300 * 2**20, **told})
    return TaskView(name, shown.state, shown, silent_secs, code)


def cluster(ps: int, workers: int) -> list[TaskView]:
    """A cluster that trains: each worker at step 41 with 1,000 examples/s."""
    trains: dict[str, Any] = {"step": 41, "examples_per_second": 1000.0, "loss": 0.12345}
    return [
        *(task(f"ps:{i}", "serving") for i in range(ps)),
        *(task(f"worker:{i}", wait_fraction=0.3 + i / 100, **trains) for i in range(workers)),
    ]


TASKS = [
    task("ps:0", "serving"),
    task("worker:0", step=41, examples_per_second=1500.0, wait_fraction=0.3, loss=0.12345),
    task("worker:1", step=40, examples_per_second=1000.4, wait_fraction=0.04, loss=0.12345),
]


def stands(tasks: Sequence[TaskView], course: Course) -> Standing:
    return view.standing(tasks, course, elapsed_secs=21.0, rate=StepRate(), now=0.0)


def line(tasks: Sequence[TaskView], *, start: int = 0) -> str:
    course = Course(300, start)
    return view.line(tasks, course, stands(tasks, course))


def drawn(
    tasks: Sequence[TaskView],
    width: int = 100,
    height: int = 24,
    *,
    left_secs: float | None = None,
    colours: bool = False,
    encoding: str = "utf-8",
    **options: Any,
) -> list[str]:
    """The lines of a terminal of this size."""
    file = io.TextIOWrapper(io.BytesIO(), encoding, newline="")
    console = Console(
        file=file, width=width, height=height, force_terminal=colours, color_system="standard" if colours else None
    )
    course = Course(300, epoch_steps=31.25)
    where = stands(tasks, course)
    console.print(screen.draw(tasks, course, Standing(**vars(where) | {"left_secs": left_secs}), console, **options))
    file.seek(0)
    return [text.rstrip() for text in file.read().splitlines()]


# Lines


def test_a_line_shows_step_loss_rate_and_the_slowest_worker():
    assert line(TASKS) == "step 41/300, loss 0.1235, 2,500 examples/s, slowest worker:1 (waits 4%)"


def test_a_line_shows_three_metrics_and_the_time_left_if_they_are_known():
    metrics = {"accuracy": 0.96875, "auc": 0.5, "top": 1.0, "fourth": 4.0}
    alone = [task("worker:0", step=150, loss=0.5, metrics=metrics, examples_per_second=1500.0)]
    rate = StepRate()
    rate.poll(100, now=10.0)
    where = view.standing(alone, Course(300), elapsed_secs=60.0, rate=rate, now=20.0)
    assert view.line(alone, Course(300), where) == (
        "step 150/300, loss 0.5000, accuracy 0.9688, auc 0.5000, top 1.0000, 1,500 examples/s, 0:30 left"
    )


def test_a_line_shows_a_learning_rate_that_varies():
    alone = [task("worker:0", loss=0.5, learning_rate=0.000125, examples_per_second=1500.0)]
    assert line(alone) == "step 40/300, loss 0.5000, rate 0.000125, 1,500 examples/s"


def test_a_line_of_one_worker_names_no_slowest_and_one_without_a_loss_shows_none():
    assert line([TASKS[1]]) == "step 41/300, loss 0.1235, 1,500 examples/s"
    assert line([task("worker:0", examples_per_second=1500.0)]) == "step 40/300, 1,500 examples/s"


def test_a_line_names_an_evaluator_with_its_step():
    assert line([TASKS[1], task("evaluator:0", "waiting", step=20)]).endswith("examples/s, evaluator:0 at step 20")


@pytest.mark.parametrize("step", [0, 232])
def test_a_line_before_the_first_step_of_this_launch_shows_the_state_of_each_task(step):
    tasks = [TaskView("ps:0", TaskState.starting), task("worker:0", "roll call", step=step)]
    assert line(tasks, start=step) == "starting: ps:0 starting, worker:0 roll call"


def test_a_line_before_the_first_step_counts_the_tasks_of_a_large_cluster_by_state():
    tasks = [
        *(TaskView(f"ps:{i}", TaskState.waiting) for i in range(4)),
        *(TaskView(f"worker:{i}", TaskState.starting) for i in range(16)),
    ]
    tasks[-1] = TaskView("worker:15", TaskState.roll_call)
    assert line(tasks) == "starting: ps 4 waiting; worker 15 starting, 1 roll call"


@pytest.mark.parametrize(
    ("secs", "text"), [(0, "0:00"), (7.9, "0:07"), (750, "12:30"), (11100, "3:05:00"), (183900, "2 d 03:05")]
)
def test_durations(secs, text):
    assert view.duration(secs) == text


def test_the_time_left_follows_the_last_half_minute_and_begins_anew_where_the_step_goes_back():
    rate = StepRate()
    for second in range(100):
        rate.poll(second if second < 50 else 50 + 2 * (second - 50), now=float(second))
    assert rate.left_secs(248, now=99.0) == pytest.approx(50.0)
    rate.poll(60, now=100.0)
    assert rate.left_secs(248, now=100.0) is None


# The line that lives, and its table


def test_the_live_line_shows_bar_steps_times_loss_metrics_rate_and_epoch():
    tasks = [task("worker:0", step=150, loss=0.5, metrics={"accuracy": 0.96875}, examples_per_second=1500.0)]
    assert drawn(tasks, 120, left_secs=20.4) == [
        "━━━━━━━━━━━━━━━━─────────────────  150/300  50%  0:21 < 0:20  "
        "loss 0.5000  accuracy 0.9688  1,500 examples/s  epoch 4.80",
        "task      state     step  examples/s  wait   memory",
        "worker:0  training   150       1,500   50%  300 MiB",
    ]


@pytest.mark.parametrize(
    ("step", "epoch"), [(1, "1/5"), (31, "1/5"), (32, "2/5"), (62, "2/5"), (63, "3/5"), (156, "5/5"), (157, "5/5")]
)
def test_the_epoch_is_shown_where_epochs_were_asked_for(step, epoch):
    course = Course(157, epoch_steps=31.25, epochs=5)
    where = Standing(step, 1.0, loss=0.5)
    assert f"step {step}/157, epoch {epoch}, " in view.line(TASKS, course, where)
    assert f"epoch {epoch}" in "\n".join(text.plain for text in screen.header(TASKS, course, where, 120))


def test_the_live_line_takes_two_lines_of_a_narrow_terminal_and_a_table_fewer_columns():
    assert drawn(TASKS, 60, left_secs=130.0)[:3] == [
        "━━━━──────────────────────────────  41/300  14%  0:21 < 2:10",
        "loss 0.1235  2,500 examples/s  epoch 1.31",
        "task      state     step  examples/s  wait",
    ]
    assert drawn(TASKS, 40)[:4] == [
        "━━───────────────────  41/300  14%  0:21",
        "loss 0.1235  2,500 examples/s  epoch 1.3",
        "task      state     step",
        "ps:0      serving     40",
    ]


def test_the_table_has_a_row_for_each_task_if_they_fit():
    assert drawn(TASKS)[1:] == [
        "task      state     step  examples/s  wait   memory",
        "ps:0      serving     40               50%  300 MiB",
        "worker:0  training    41       1,500   30%  300 MiB",
        "worker:1  training    40       1,000    4%  300 MiB",
    ]


def test_twenty_tasks_fit_a_terminal_of_24_lines():
    lines = drawn(cluster(4, 16))
    assert len(lines) < 24
    assert [text.split()[0] for text in lines[2:]] == [
        *(f"ps:{i}" for i in range(4)),
        *(f"worker:{i}" for i in range(16)),
    ]


def test_of_a_cluster_that_does_not_fit_jobs_and_tasks_that_need_attention_are_shown():
    tasks = cluster(4, 32)
    tasks[7] = TaskView("worker:3", TaskState.restarting)
    tasks[8] = task("worker:4", step=41, silent_secs=7.0)
    tasks[9] = TaskView("worker:5", TaskState.ended, tasks[9].page, code=70)
    tasks[10] = task("worker:6", "starting", step=0)
    tasks[0] = task("ps:0", "serving", missing=["worker:7"], stalled_secs=12.0)
    assert [re.split("  +", text) for text in drawn(tasks)[2:]] == [
        ["4 ps", "4 serving", "40", "50%", "1,200 MiB"],
        ["32 workers", "29 training, 1 restarting, 1 ended (70), 1 starting", "0-41", "29,000", "47%", "9,300 MiB"],
        ["worker:5", "ended (70)", "41", "1,000", "35%", "300 MiB"],
        ["worker:3", "restarting"],
        ["worker:4", "training, silent 0:07", "41", "0", "50%", "300 MiB"],
        ["worker:6", "starting", "0", "0", "50%", "300 MiB"],
        ["worker:7", "training, late 0:12", "41", "1,000", "37%", "300 MiB"],
    ]


def test_of_a_cluster_without_trouble_that_does_not_fit_the_slowest_worker_is_shown():
    assert [text.split("  ")[0] for text in drawn(cluster(4, 32))[2:]] == ["4 ps", "32 workers", "worker:0"]


@pytest.mark.parametrize("height", [3, 5, 8, 12])
@pytest.mark.parametrize("width", [20, 40, 200])
def test_whatever_the_size_of_a_terminal_no_more_is_drawn_and_what_is_not_shown_is_counted(width, height):
    tasks = [task(f"worker:{i}", step=41, loss=0.5, silent_secs=9.0) for i in range(40)]
    lines = drawn(tasks, width, height)
    assert len(lines) < height
    assert max(map(len, lines)) <= width
    if height >= 8:
        named = [text for text in lines if text.startswith("worker:")]
        assert lines[-1].startswith(f"{40 - len(named)} more")


def test_while_a_cluster_starts_each_job_has_a_row_and_those_that_are_awaited_are_named():
    tasks = [
        *(task(f"ps:{i}", "waiting", step=0) for i in range(4)),
        *(task(f"worker:{i}", "roll call", step=0, silent_secs=7.0) for i in range(15)),  # each imports, or compiles
    ]
    lines = drawn([*tasks, TaskView("worker:15", TaskState.starting)])
    assert lines[0] == "starting  0:21  waiting for worker:15"
    assert [re.split("  +", text)[:2] for text in lines[2:]] == [
        ["4 ps", "4 waiting"],
        ["16 workers", "15 roll call, 1 starting"],
    ]


def test_a_run_whose_workers_compute_their_first_step_says_so():
    assert drawn([task("ps:0", "serving", step=0), task("worker:0", step=0)])[0] == "starting  0:21  first step"


def test_a_chief_that_evaluates_and_a_run_that_stops_say_so():
    tasks = [task("worker:0", "evaluating", step=300, loss=0.5), TaskView("worker:1", TaskState.done, TASKS[2].page)]
    assert "  300/300  100%  0:21  evaluating  loss 0.5000" in drawn(tasks)[0]
    assert "  stopping  loss" in drawn([task("worker:0", step=300, loss=0.5, is_stopping=True)])[0]


def test_a_task_that_is_done_shows_the_last_step_although_its_page_is_older():
    tasks = [task("worker:0", "done", step=300), task("worker:1", "done", step=291)]
    assert [text.split()[2] for text in drawn(tasks)[2:]] == ["300", "300"]


def test_of_a_run_that_is_over_only_what_went_wrong_stays():
    tasks = [task("worker:0", "done", step=300), TaskView("worker:1", TaskState.ended, code=70)]
    assert [text.split("  ")[0] for text in drawn(tasks, is_over=True)][1:] == ["task", "worker:1"]
    assert len(drawn(tasks[:1], is_over=True)) == 1


@pytest.mark.parametrize(
    ("state", "colour"),
    [("training", "32"), ("ended", "1;31"), ("restarting", "33"), ("evaluating", "36"), ("done", "2")],
)
def test_colours_have_a_meaning(state, colour):
    assert f"\x1b[{colour}m{state}" in drawn([TASKS[1], task("worker:1", state, code=70)], colours=True)[-1]


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in "\n".join(drawn(TASKS, colours=True))


def test_a_terminal_without_unicode_gets_a_bar_of_ascii():
    assert drawn(TASKS, encoding="ascii")[0].startswith("#####...")


# Where it is shown


def use_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)


@pytest.mark.parametrize(
    ("environment", "is_interactive"),
    [({}, True), ({"NO_COLOR": "1"}, True), ({"TERM": "dumb"}, False), ({"CI": "true"}, False), ({"CI": "0"}, True)],
)
def test_a_terminal_shows_the_table_unless_it_is_dumb_or_of_a_ci(monkeypatch, environment, is_interactive):
    use_a_terminal(monkeypatch)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert progress.is_interactive() is is_interactive


def test_without_a_terminal_a_line_without_control_codes_is_shown_every_five_seconds(monkeypatch, capsys):
    clock = iter([100.0, 100.0, 104.9, 105.0, 109.9])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress.make_progress(Course(300)) as lines:
        for at in ("104.9", "105.0", "109.9"):
            lines.show([TaskView(at, TaskState.starting)])
    assert capsys.readouterr().out == "starting: 105.0 starting\n"


def test_a_run_whose_output_nobody_reads_any_more_is_stopped_as_by_a_terminal_that_closes(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise BrokenPipeError

    received: list[int] = []
    monkeypatch.setattr(progress, "print", fail, raising=False)
    monkeypatch.setattr(progress, "discard_output", lambda: received.append(0))
    before = signal.signal(signal.SIGHUP, lambda number, _: received.append(number))
    try:
        progress.make_progress(Course(300)).say("step 1/300")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received == [0, signal.SIGHUP]


# Lines of the history


def history_line(step: int, loss: float = 0.4321, examples_per_second: float = 3456.0) -> str:
    return json.dumps({"step": step, "loss": loss, "examples_per_second": examples_per_second}) + "\n"


def test_a_line_of_the_history_shows_step_loss_rate_and_the_seconds_of_an_update():
    text = progress.history_line({"step": 120, "loss": 0.43214, "examples_per_second": 3456.0}, 1000, 400)
    assert text == "step 120/1000, loss 0.4321, 3,456 examples/s, 0.116 s/batch"


def test_a_line_of_the_history_shows_its_metrics_in_the_log_of_a_task_only():
    values = {"step": 120, "loss": 0.43214, "accuracy": 0.875, "learning_rate": 0.001, "examples_per_second": 3456.0}
    plain = "step 120/1000, loss 0.4321, 3,456 examples/s, 0.116 s/batch"
    assert progress.history_line(values, 1000, 400) == plain
    with_metrics = progress.history_line(values, 1000, 400, with_metrics=True)
    assert with_metrics == plain.replace("0.4321", "0.4321, accuracy 0.8750")


def test_a_rate_that_was_rounded_to_0_shows_no_seconds():
    text = progress.history_line({"step": 1, "loss": 2.3, "examples_per_second": 0.0}, 1000, 1)
    assert text == "step 1/1000, loss 2.3000, 0 examples/s"


def test_each_line_of_the_history_is_shown_once_and_when_it_is_whole(tmp_path):
    path = tmp_path / "history.jsonl"
    lines = progress.HistoryLines(path, start=0, steps=30, batch=400)
    first, second = history_line(10), history_line(20)
    steps = []
    for text in (None, "", first + second[:9], second[9:] + history_line(30), ""):
        if text is not None:
            with path.open("a") as file:
                file.write(text)
        steps.append([line.partition(",")[0] for line in lines.new()])
    assert steps == [[], [], ["step 10/30"], ["step 20/30", "step 30/30"], []]


def test_lines_of_an_earlier_run_are_not_shown(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text(history_line(10) + history_line(20))
    lines = progress.HistoryLines(path, start=10, steps=30, batch=400)
    assert lines.new() == []
    history = History(path, start=10)
    history.write(20, {"loss": 0.5, "examples_per_second": 4000.0})
    history.close()
    assert lines.new() == ["step 20/30, loss 0.5000, 4,000 examples/s, 0.100 s/batch"]


def test_lines_of_the_history_replace_those_of_every_few_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY_SECS", 0.0)
    show_two_lines(tmp_path / "history.jsonl")
    assert capsys.readouterr().out.splitlines() == [
        "starting: ps:0 serving",
        "step 10/300, loss 0.4321, 3,456 examples/s, 0.116 s/batch",
        "step 20/300, loss 0.4321, 3,456 examples/s, 0.116 s/batch",
    ]


def test_lines_of_the_history_are_printed_above_the_table_of_a_terminal(tmp_path, monkeypatch, capsys):
    use_a_terminal(monkeypatch)
    show_two_lines(tmp_path / "history.jsonl")
    out = capsys.readouterr().out
    assert -1 < out.find("step 10/300, loss 0.4321") < out.find("step 20/300, loss 0.4321") < out.rfind("41/300")


def show_two_lines(path: Path) -> None:
    history = progress.HistoryLines(path, start=0, steps=300, batch=400)
    with progress.make_progress(Course(300), history) as shown:
        shown.show([TaskView("ps:0", TaskState.serving)])
        for step in (10, 20):
            with path.open("a") as file:
                file.write(history_line(step))
            shown.show(TASKS)


def test_what_keeps_a_command_busy_is_said_early_and_then_ever_more_seldom(capsys):
    with progress.note("planning") as shown:
        for secs in range(100):
            shown.runs("mine.py, line 3", secs)
        for secs in range(12):
            shown.runs("", secs)
    said = capsys.readouterr().out.splitlines()
    assert [int(re.search(r" (\d+) s", text)[1]) for text in said if "mine.py, line 3" in text] == [2, 10, 40, 70]
    assert len(said) == 4  # the built-in models take seconds too


def test_a_line_says_what_a_run_waits_for_or_does_instead_of_training():
    chief, other = ({"step": 41, "examples_per_second": 1.0}, {"step": 41, "examples_per_second": 1.0})
    waiting = task("worker:1", "waiting for data", data_secs=72.0, **other)
    assert "worker:1 waiting for data (1:12)" in line([task("worker:0", **chief), waiting])
    evaluating = line([task("worker:0", "evaluating", evaluated=12_800, **chief), task("worker:1", **other)])
    assert "evaluating (12,800 examples)" in evaluating
    assert "examples/s" not in evaluating
    scored = line([task("worker:0", **chief), task("evaluator:0", "evaluating", evaluated=64)])
    assert "evaluator:0 at step 40, evaluating (64 examples)" in scored
