"""What a run tells while it goes: status pages, the roll call, history and events."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pages import page

from trainer.faults.exit_codes import TrainerError
from trainer.launch.processes.ports import HeldPorts
from trainer.observe import status as status_page
from trainer.observe.peers import UNIX, PeerError, read_status, roll_call
from trainer.observe.task_page import TaskPage
from trainer.plan.plan import Task
from trainer.storage.history import History
from trainer.task.tensorboard import Events


@pytest.fixture
def held() -> Iterator[Callable[[], int]]:
    """held() -> a port of this machine that only a status page of this test listens on."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(HeldPorts(1)).ports[0]


@pytest.fixture
def serve(held: Callable[[], int]) -> Callable[[TaskPage], str]:
    """serve(status) -> "host:port" of its page."""

    def serve_one(status: TaskPage) -> str:
        port = held()
        status_page.serve(status, "127.0.0.1", port)
        return f"127.0.0.1:{port}"

    return serve_one


def worker(index: int, **told: Any) -> TaskPage:
    return page(f"worker:{index}", tensorflow="2.21.0", **told)


def peer(index: int, control: str) -> Task:
    return Task("worker", index, "", control, (), None, 1, 2)


def get(control: str, path: str) -> tuple[int, str, str]:
    """(HTTP status, content type, body) of a page."""
    connection = http.client.HTTPConnection(control, timeout=5)
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, response.getheader("Content-Type", ""), body


# Status page


def test_the_status_page_describes_the_task_in_json(serve):
    control = serve(worker(1, state="training", step=7, loss=0.25, wait_fraction=0.5, started_at=1767225590.5))
    code, kind, body = get(control, "/status")
    told = json.loads(body)
    assert (code, kind) == (200, "application/json")
    assert told.pop("memory_bytes") > 2**20
    assert told.pop("cpu_secs") > 0
    assert told.pop("now") > 1767225590.5
    assert told == {
        "job": "worker",
        "index": 1,
        "run": "runs/x",
        "config_hash": "c0ffee",
        "tensorflow": "2.21.0",
        "frozen": "",
        "launch": "",
        "state": "training",
        "is_listening": False,
        "is_stopping": False,
        "is_replaced": False,
        "ended_early": None,
        "is_ready": False,
        "waits_for_place": False,
        "computes_for": [],
        "can_stand_in_for": [],
        "places": None,
        "generation": 0,
        "step": 7,
        "steps": 0,
        "examples": 0,
        "data": "",
        "missing": [],
        "stalled_secs": 0.0,
        "stuck": [],
        "evaluated": 0,
        "data_secs": 0.0,
        "step_secs": 0.0,
        "wait_secs": 0.0,
        "compute_secs": 0.0,
        "step_buckets": [0] * 16,
        "examples_per_second": 0.0,
        "wait_fraction": 0.5,
        "loss": 0.25,
        "metrics": {},
        "learning_rate": None,
        "contributions": {},
        "dropped_as": "",
        "started_at": 1767225590.5,
        "first_step_at": None,
        "pid": os.getpid(),
    }


def test_the_page_follows_the_task(serve):
    status = worker(0, step=1)
    control = serve(status)
    status.step = 2
    assert read_status(control, timeout_secs=5).step == 2


def test_another_path_is_not_found_and_names_those_that_exist(serve):
    code, _, body = get(serve(worker(0)), "/")
    assert (code, "only /status and /metrics exist" in body) == (404, True)


@pytest.mark.parametrize("path", ["/status", "/metrics", "/environ", "/status?x=${SECRET}"])
def test_no_page_shows_the_environment(serve, monkeypatch, path):
    monkeypatch.setenv("SECRET", "hunter2")
    assert "hunter2" not in get(serve(worker(0)), path)[2]


@pytest.mark.parametrize(
    ("host", "code"),
    [
        *[
            (name, 200)
            for name in ("127.0.0.1:80", "[::1]:80", "localhost", "LOCALHOST:1", "ps-0:3222", socket.gethostname())
        ],
        *[(name, 421) for name in ("evil.example", "127.0.0.1.evil.example:80", "localhost.evil.example", "")],
    ],
)
def test_a_name_that_somebody_has_pointed_at_this_machine_is_refused(held, host, code):
    port = held()
    status_page.serve(worker(0), "127.0.0.1", port, names=["ps-0"])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/status", headers={"Host": host})
    assert connection.getresponse().status == code
    connection.close()


def test_a_silent_client_does_not_block_the_page(serve):
    control = serve(worker(0))
    host, _, port = control.rpartition(":")
    with socket.create_connection((host, int(port))):
        assert read_status(control, timeout_secs=2).index == 0


def test_a_taken_port_is_an_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="already in use"):
            status_page.serve(worker(0), "127.0.0.1", taken.getsockname()[1])


# Roll call


class Clock:
    """A clock that moves by `tick` seconds each time it is read; `at` it, something happens."""

    def __init__(self, tick: float, at: dict[float, Callable[[], None]] | None = None) -> None:
        self.time, self.tick, self.at = 0.0, tick, at or {}

    def __call__(self) -> float:
        self.time += self.tick
        for due in [moment for moment in self.at if moment <= self.time]:
            self.at.pop(due)()
        return self.time


def call(
    peers: list[Task],
    *,
    until: str = "is_ready",
    deadline_secs: float = 60.0,
    now: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Holds the roll call of worker:0; returns its reports."""
    reports: list[str] = []
    roll_call(worker(0), peers, until=until, deadline_secs=deadline_secs, report=reports.append, now=now)
    return reports


def test_a_roll_call_ends_when_all_are_ready(serve):
    first, second = worker(1, is_ready=True), worker(2)
    clock = Clock(1.0, {30.0: lambda: setattr(second, "is_ready", True)})
    call([peer(1, serve(first)), peer(2, serve(second))], now=clock)
    assert clock.time >= 30.0


def test_a_roll_call_without_peers_ends_at_once():
    assert call([]) == []


def test_listening_peers_need_not_be_ready(serve):
    assert call([peer(1, serve(worker(1, is_listening=True)))], until="is_listening") == []


@pytest.mark.slow
def test_a_report_names_the_missing_every_ten_seconds(serve, held):
    status = worker(1, state="starting")
    control, gone = serve(status), f"127.0.0.1:{held()}"
    clock = Clock(0.5, {35.0: lambda: setattr(status, "is_ready", True)})
    reports = []
    with pytest.raises(PeerError):
        roll_call(
            worker(0),
            [peer(1, control), peer(2, gone)],
            until="is_ready",
            deadline_secs=45,
            report=reports.append,
            now=clock,
        )
    refused = f"worker:2 at {gone}: connection refused; it has not started or has died"
    assert [re.sub(r"^has waited \d+ s for ", "", text) for text in reports] == [
        f"worker:1 at {control}: starting (starting); {refused}",
        f"worker:1 at {control}: starting (starting); {refused}",
        f"worker:1 at {control}: starting (starting); {refused}",
        refused,
    ]
    waited = [int(re.findall(r"has waited (\d+) s", text)[0]) for text in reports]
    assert all(9 <= later - earlier <= 12 for earlier, later in zip([0, *waited], waited, strict=False))


def test_the_deadline_names_who_is_missing_and_how_long_they_were_waited_for(held):
    control = f"127.0.0.1:{held()}"
    with pytest.raises(PeerError, match=rf"missing after \d+ s: worker:1 at {control}: connection refused"):
        call([peer(1, control)], deadline_secs=5, now=Clock(4.0))


def test_a_peer_without_its_socket_has_not_started(tmp_path, raises):
    control = f"{UNIX}{tmp_path}/worker-1"
    with raises(PeerError):
        call([peer(1, control)], deadline_secs=5, now=Clock(4.0))


@pytest.mark.slow
def test_a_peer_that_never_answers_is_called_silent(raises):
    with socket.socket() as frozen:
        frozen.bind(("127.0.0.1", 0))
        frozen.listen()
        control = f"127.0.0.1:{frozen.getsockname()[1]}"
        with raises(PeerError):
            call([peer(1, control)], deadline_secs=1, now=Clock(4.0))


def test_a_name_that_does_not_resolve_is_said(raises):
    with raises(PeerError):
        call([peer(1, "no-such-host.invalid:2222")], deadline_secs=1, now=Clock(4.0))


@pytest.mark.parametrize(
    ("field", "mine", "theirs", "code"),
    [
        ("config_hash", "c0ffee", "decade", 69),
        ("launch", "/runs/mine", "/runs/other", 69),
        ("tensorflow", "2.21.0", "2.20.0", 69),
        ("frozen", "0a", "0b", 69),
        ("data", "0a", "0b", 65),
    ],
)
def test_a_peer_that_differs_ends_the_roll_call_at_once(serve, field, mine, theirs, code):
    me, other = worker(0), worker(1, is_ready=True)
    setattr(me, field, mine)
    setattr(other, field, theirs)
    with pytest.raises(TrainerError) as raised:
        roll_call(me, [peer(1, serve(other))], until="is_ready", deadline_secs=5, report=print)
    assert raised.value.exit_code == code
    assert all(text in str(raised.value) for text in ("worker:1", mine, theirs))


def test_another_task_at_the_address_is_waited_out_whatever_its_run_is(serve, raises):
    """Addresses are used again, and resolvers remember them for a while."""
    other = worker(2, is_ready=True, config_hash="decade")
    control = serve(other)
    with raises(PeerError):
        call([peer(1, control)], deadline_secs=1, now=Clock(4.0))
    other.index, other.config_hash = 1, "c0ffee"
    call([peer(1, control)])


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"<html>It works!</html>", id="html"),
        pytest.param(b'{"status": "ok"}', id="another JSON"),
        pytest.param(b"[1, 2]", id="a JSON list"),
        pytest.param(b"\xff\xfe", id="no text"),
    ],
)
def test_another_program_at_the_address_is_said(body):
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        with pytest.raises(PeerError, match="worker:1 at .*: another program answers"):
            call([peer(1, f"127.0.0.1:{other.server_port}")], deadline_secs=1, now=Clock(4.0))
        other.shutdown()


def test_a_program_that_speaks_no_http_is_said(raises):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        threading.Thread(target=answer, daemon=True).start()
        with raises(PeerError):
            call([peer(1, f"127.0.0.1:{other.getsockname()[1]}")], deadline_secs=1, now=Clock(4.0))


# History


def lines_of(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_on_disk_when_it_was_written(tmp_path):
    History(tmp_path / "history.jsonl", start=0).write(10, {"loss": 0.5})
    assert (tmp_path / "history.jsonl").read_text() == '{"step": 10, "loss": 0.5}\n'


def test_a_restart_takes_back_the_lines_after_its_step(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 0.5}}\n' for step in (10, 20, 30, 40)))
    history = History(path, start=20)
    history.write(30, {"loss": 0.25})
    history.close()
    assert lines_of(path) == [{"step": 10, "loss": 0.5}, {"step": 20, "loss": 0.5}, {"step": 30, "loss": 0.25}]


def test_a_restart_drops_a_line_that_was_cut_off(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 10, "loss": 0.5}\n{"step": 20, "lo')
    history = History(path, start=20)
    history.write(20, {"loss": 0.25})
    history.close()
    assert lines_of(path) == [{"step": 10, "loss": 0.5}, {"step": 20, "loss": 0.25}]


def test_a_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"step": 10, "loss": 0.5}')
    history = History(path, start=10)
    history.write(20, {"loss": 0.25})
    history.close()
    assert [line["step"] for line in lines_of(path)] == [10, 20]


# Events


def read_events(folder: Path) -> list[Any]:
    """All events of a folder, the oldest file first."""
    return [event for file in sorted(folder.iterdir()) for event in tf.compat.v1.train.summary_iterator(str(file))]


def values_of(folder: Path) -> dict[tuple[int, str], Any]:
    """What the events hold, by step and tag."""
    return {(event.step, value.tag): value for event in read_events(folder) for value in event.summary.value}


def test_tensorflow_reads_the_scalars(tmp_path):
    events = Events(tmp_path, start=0)
    events.scalars(10, {"loss": 0.5, "accuracy": 0.75})
    events.scalars(20, {"loss": 0.25})
    events.close()
    told = {key: value.simple_value for key, value in values_of(tmp_path).items()}
    assert told == {(10, "loss"): 0.5, (10, "accuracy"): 0.75, (20, "loss"): 0.25}


def test_flushed_events_can_be_read_while_the_run_goes_on(tmp_path):
    events = Events(tmp_path, start=0)
    events.scalars(10, {"loss": 0.5})
    events.flush()
    assert values_of(tmp_path)[10, "loss"].simple_value == 0.5


def test_a_histogram_holds_its_sums_and_counts(tmp_path):
    events = Events(tmp_path, start=0)
    events.histograms(10, {"kernel": np.float32([[-1, 0], [2, 3]])})
    events.close()
    histogram = values_of(tmp_path)[10, "kernel"].histo
    told = (histogram.min, histogram.max, histogram.num, histogram.sum, histogram.sum_squares)
    assert told == (-1.0, 3.0, 4.0, 4.0, 14.0)
    assert (sum(histogram.bucket), histogram.bucket_limit[-1]) == (4.0, 3.0)


def test_values_one_bit_apart_have_a_histogram(tmp_path):
    events = Events(tmp_path, start=0)
    events.histograms(10, {"scale": np.float32([1, 1.0000001])})
    events.close()
    assert values_of(tmp_path)[10, "scale"].histo.num == 2.0


def test_a_histogram_leaves_out_what_is_not_finite(tmp_path):
    events = Events(tmp_path, start=0)
    events.histograms(10, {"kernel": np.float32([1, np.nan, 2, np.inf]), "bias": np.float32([np.nan])})
    events.close()
    told = values_of(tmp_path)
    assert list(told) == [(10, "kernel")]
    assert (told[10, "kernel"].histo.num, told[10, "kernel"].histo.sum) == (2.0, 3.0)


def test_counts_are_a_histogram_of_the_numbers_that_were_counted(tmp_path):
    events = Events(tmp_path, start=0)
    events.counts(10, {"staleness": np.int64([0, 3, 0, 2, 0])})  # three times 1, twice 3
    events.close()
    histo = values_of(tmp_path)[10, "staleness"].histo
    assert (histo.min, histo.max, histo.num, histo.sum, histo.sum_squares) == (1.0, 3.0, 5.0, 9.0, 21.0)
    assert dict(zip(histo.bucket_limit, histo.bucket, strict=True)) == {0.5: 0, 1.5: 3, 2.5: 0, 3.5: 2, 4.5: 0}


def test_where_nothing_was_counted_there_is_nothing_to_show(tmp_path):
    events = Events(tmp_path, start=0)
    events.counts(10, {"worker:0": np.int64([2, 0]), "worker:1": np.int64([0, 0])})
    events.close()
    assert list(values_of(tmp_path)) == [(10, "worker:0")]


def test_the_graph_exists(tmp_path):
    with tf.Graph().as_default() as graph:
        tf.constant(1.0, name="one")
    events = Events(tmp_path, start=0)
    events.graph(graph)
    events.close()
    (written,) = [event.graph_def for event in read_events(tmp_path) if event.graph_def]
    assert [node.name for node in tf.compat.v1.GraphDef.FromString(written).node] == ["one"]


@pytest.mark.parametrize("start", [0, 20])
def test_a_restart_takes_back_what_older_files_say_of_later_steps(tmp_path, start):
    Events(tmp_path, start=0).close()
    Events(tmp_path, start=start).close()
    session_starts = [
        event.step for event in read_events(tmp_path) if event.session_log.status == tf.compat.v1.SessionLog.START
    ]
    assert session_starts[-1] == start + 1
