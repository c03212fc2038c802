"""Fault injection: schedules, links, when a run has recovered, and reports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import random

import pytest
import quick_config
from pages import page

from trainer.commands.chaos import check, random_faults, report
from trainer.commands.chaos.injector import FaultInjector, Recovery, Scheduled
from trainer.commands.chaos.proxy import GOOD, Condition, Links
from trainer.commands.chaos.report import FaultOutcome
from trainer.commands.chaos.schedule import Fault, FaultTargets, parse, typed
from trainer.commands.chaos.soak import Resources, Timed
from trainer.config.schema import RunConfig
from trainer.faults.problems import ConfigError
from trainer.launch.fault_hooks import RunView
from trainer.observe.task_page import TaskPage
from trainer.plan.plan import Plan, Task

pytestmark = pytest.mark.slow

CLUSTER = FaultTargets(
    ("ps:0", "ps:1", "worker:0", "worker:1", "worker:2"), holders=("ps:0", "ps:1"), is_sharded=True, steps=150
)
WORKERS = FaultTargets(("worker:0", "worker:1"), holders=("worker:0", "worker:1"), is_sharded=True, steps=150)
LOCAL = FaultTargets(("worker:0",), holders=("worker:0",), is_sharded=False, steps=150)


def load(*overrides: str) -> RunConfig:
    return quick_config.load(overrides)


def targets_of(config: RunConfig) -> FaultTargets:
    return FaultTargets.of(config.cluster, config.strategy, config.train.steps)


def budget_of(*overrides: str) -> report.RecoveryBudget:
    config = load(*overrides)
    return report.RecoveryBudget(targets_of(config), config.restart, config.timeouts)


def fault(text: str) -> Fault:
    (one,) = parse(text, CLUSTER)
    return one


# The schedule


def test_a_schedule_is_read_fault_by_fault():
    assert parse(
        "kill worker:2 @40; stop ps:0 @80 for 15s;kill  chief @120 ; cut worker:1 -> ps:0 @60 for 1.5s;", CLUSTER
    ) == [
        Fault("kill", "worker:2", ("worker:2",), 40),
        Fault("stop", "ps:0", ("ps:0",), 80, secs=15),
        Fault("kill", "chief", ("worker:0",), 120),
        Fault("cut", "worker:1->ps:0", ("worker:1", "ps:0"), 60, secs=1.5),
    ]


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("kill ps @60", ("ps:0", "ps:1")),
        ("kill all @60", CLUSTER.tasks),
        ("term worker @60", ("worker:0", "worker:1", "worker:2")),
    ],
)
def test_a_word_can_mean_several_tasks(text, tasks):
    assert fault(text).tasks == tasks


@pytest.mark.parametrize(
    "text",
    [
        "kill worker:1 @40",
        "kill worker:1 in push @40",
        "kill ps:0 in apply @40",
        "kill chief in save-data @40",
        "term worker:1 @50",
        "stop worker:1 @50",
        "stop ps @80 for 15s",
        "cut worker:1->ps:0 @60 for 1.5s",
        "delay worker:1->ps:0 50ms @20 for 10s",
        "delay worker:1->ps:0 50+-25ms @20 for 10s",
        "throttle ps:1->worker:2 64KiB/s @20 for 10s",
        "reset worker:1->ps:0 @60",
    ],
)
def test_a_fault_is_shown_as_it_is_typed(text):
    assert str(fault(text)) == text


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("kil worker:1 @40", "chaos.schedule/unknown-choice"),
        ("kill worker:1", "chaos.schedule/malformed"),
        ("cut worker:1 @4 for 5s", "chaos.schedule/malformed"),
        ("kill worker:7 @40", "chaos.schedule/unknown-choice"),
        ("kill worker:-1 @40", "chaos.schedule/unknown-choice"),
        ("cut worker:1->ps:4 @4 for 5s", "chaos.schedule/unknown-choice"),
        ("cut ps->worker:1 @4 for 5s", "chaos.schedule/unknown-choice"),
        ("reset ps:0->ps:0 @4", "chaos.schedule/unknown-choice"),
        ("kill chief @151", "chaos.schedule/out-of-range"),
        ("kill ps:0 in push @40", "chaos.schedule/no-match"),
        ("kill worker:1 in rename @40", "chaos.schedule/no-match"),
        ("kill chief in nowhere @40", "chaos.schedule/no-match"),
    ],
)
def test_a_fault_that_cannot_be_read_is_refused_with_a_remedy(refused, text, codes):
    refused(codes, parse, text, CLUSTER)


def test_all_bad_faults_are_reported_in_one_pass():
    with pytest.raises(ConfigError) as error:
        parse("kill worker:9 @4; kill chief @9; burn ps:0 @4; kill chief @999", CLUSTER)
    assert len(error.value.problems) == 3


@pytest.mark.parametrize("text", ["kill worker:1 in push @40; kill chief @120", "cut worker:1->ps:0 @60 for 15s"])
def test_the_override_of_a_schedule_can_be_pasted(text):
    assert quick_config.invoke(["cluster=2ps3w", typed(text).strip("'")]).typed.chaos.schedule == text


def test_without_shards_no_task_reaches_a_push(raises):
    with raises(ConfigError):
        parse("kill chief in push @40", LOCAL)


def test_without_a_second_task_there_is_no_link():
    with pytest.raises(ConfigError, match="type cluster=1ps2w"):
        parse("reset worker:0->worker:0 @4", LOCAL)


@pytest.mark.parametrize(
    ("overrides", "targets"),
    [
        (["cluster=2ps3w", "train.steps=150"], CLUSTER),
        (["cluster=2w", "train.steps=150"], WORKERS),
        (["train.steps=150"], LOCAL),
    ],
    ids=["ps", "workers", "local"],
)
def test_the_tasks_and_who_holds_state_follow_from_the_config(overrides, targets):
    assert targets_of(load(*overrides)) == targets


# Random faults


def test_random_faults_are_a_function_of_the_seed():
    drawn = random_faults.random_faults("kill-worker", 20, 0, CLUSTER)
    assert drawn == random_faults.random_faults("kill-worker", 20, 0, CLUSTER)
    assert drawn != random_faults.random_faults("kill-worker", 20, 1, CLUSTER)
    assert {f.tasks for f in drawn} == {("worker:1",), ("worker:2",)}
    assert all(5 <= f.step <= 140 for f in drawn)
    assert len({f.step for f in drawn}) > 10


@pytest.mark.parametrize("kind", random_faults.KINDS)
def test_every_kind_can_be_drawn_and_repeated_from_its_text(kind):
    for drawn in random_faults.random_faults(kind, 10, 0, CLUSTER):
        assert parse(str(drawn), CLUSTER) == [drawn]


@pytest.mark.parametrize("targets", [CLUSTER, WORKERS], ids=["ps", "workers"])
def test_kinds_that_a_cluster_cannot_have_are_left_out_with_the_reason(targets, snapshot):
    can, reasons = random_faults.possible([], targets, by_time=False)
    assert reasons == snapshot
    assert len(can) + len(reasons) == len(random_faults.KINDS)


def test_one_process_can_only_be_killed():
    assert random_faults.possible([], LOCAL, by_time=False)[0] == ["kill-chief", "kill-all", "kill-in-save"]


def test_a_soak_has_no_faults_at_a_place(snapshot):
    can, reasons = random_faults.possible(["kill-chief", "kill-in-save"], CLUSTER, by_time=True)
    assert can == ["kill-chief"]
    assert reasons == snapshot


# The config


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        ([], "chaos/conflict"),
        (["chaos.random=1", "chaos.minutes=1"], "chaos/conflict"),
        (["chaos.random=1", "train.steps=34"], "train.steps/out-of-range"),
        (["chaos.random=1", "chaos.kinds=[kill-al]"], "chaos.kinds/unknown-choice"),
        (["chaos.random=1", "chaos.kinds=[kill-ps]"], "chaos.kinds/no-match"),
        (["chaos.minutes=1", "chaos.kinds=[kill-in-save]"], "chaos.kinds/no-match"),
        (['chaos.schedule="kill ps:0 @40"'], "chaos.schedule/unknown-choice"),
        (["chaos.random=1", "job=worker", "task=0"], "mode/conflict"),
    ],
)
def test_a_config_that_makes_no_faults_is_a_problem(refused, overrides, codes):
    given = quick_config.invoke(["mode=chaos", "cluster=2w", *overrides])
    refused(codes, check.check, given.config, given.typed.chaos)


def test_a_directory_that_holds_a_run_is_not_used_again(tmp_path: Path, snapshot):
    (tmp_path / "unbroken").mkdir()
    given = quick_config.invoke(["mode=chaos", "chaos.random=1", f"run={tmp_path}"])
    (problem,) = check.check(given.config, given.typed.chaos)
    assert problem.message == snapshot


def test_a_soak_has_no_last_step_and_a_budget_for_each_fault():
    given = quick_config.invoke(["mode=chaos", "chaos.minutes=1", "chaos.every_secs=20"])
    config = check.adapted(given.config, given.typed.chaos)
    assert config.train.steps == 10**9
    assert config.restart.window_secs == 20


# Links


def echo(listening: socket.socket) -> None:
    """Sends back what comes, on every connection."""

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                while received := connection.recv(65536):
                    connection.sendall(received)
            except OSError:
                pass

    while True:
        try:
            connection, _ = listening.accept()
        except OSError:  # the test is over
            return
        threading.Thread(target=answer, args=(connection,), daemon=True).start()


@pytest.fixture
def target() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=echo, args=(listening,), daemon=True).start()
        yield listening
        with contextlib.suppress(OSError):  # a test was first
            listening.shutdown(socket.SHUT_RDWR)


def task_at(name: str, port: int) -> Task:
    job, index = name.split(":")
    return Task(job, int(index), f"127.0.0.1:{port}", "127.0.0.1:1", (), None, 1, 1)


def plan_of(*tasks: Task) -> Plan:
    return Plan("1ps1w", "sync", 10, 8, tasks, (), 100, ())


@pytest.fixture
def links(target: socket.socket) -> Iterator[Links]:
    port = target.getsockname()[1]
    opened = Links(plan_of(task_at("ps:0", port), task_at("worker:0", 2)), [("worker:0", "ps:0")])
    yield opened
    opened.close()


@pytest.fixture
def connect(links: Links) -> Iterator[Callable[[], socket.socket]]:
    """connect() -> a client of the link worker:0->ps:0."""
    clients = []

    def connect_one() -> socket.socket:
        host, port = json.loads(links.environment("worker:0")["TRAINER_LINKS"])["ps:0"]["address"].split(":")
        clients.append(socket.create_connection((host, int(port)), timeout=10))
        return clients[-1]

    yield connect_one
    for client in clients:
        client.close()


def receive(client: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        chunk = client.recv(nbytes - len(received))
        assert chunk, "the connection ended"
        received += chunk
    return received


LINK = ("worker:0", "ps:0")


def test_only_the_task_at_the_start_of_a_link_gets_its_address(links: Links):
    assert list(json.loads(links.environment("worker:0")["TRAINER_LINKS"])["ps:0"]) == ["address", "control"]
    assert links.environment("ps:0") == {}


def test_a_good_link_passes_everything_on(connect):
    sent = bytes(range(256)) * 8192  # 2 MiB
    client = connect()
    threading.Thread(target=client.sendall, args=(sent,)).start()
    assert receive(client, len(sent)) == sent


def test_the_end_of_a_connection_passes_too(connect):
    client = connect()
    client.sendall(b"last words")
    client.shutdown(socket.SHUT_WR)
    assert receive(client, 10) == b"last words"
    assert client.recv(1) == b""


def test_a_cut_link_keeps_connections_and_delivers_everything_later(links: Links, connect):
    client = connect()
    client.sendall(b"before")
    assert receive(client, 6) == b"before"
    links.set(LINK, Condition(is_cut=True))
    client.sendall(b"during")
    late = connect()
    late.sendall(b"new")
    for silent in (client, late):
        silent.settimeout(0.3)
        with pytest.raises(TimeoutError):
            silent.recv(1)
        silent.settimeout(10)
    links.set(LINK, GOOD)
    assert receive(client, 6) == b"during"
    assert receive(late, 3) == b"new"


def test_a_cut_link_hides_that_the_other_end_has_closed(links: Links, connect, target: socket.socket):
    client = connect()
    client.sendall(b"x")
    assert receive(client, 1) == b"x"
    links.set(LINK, Condition(is_cut=True))
    target.shutdown(socket.SHUT_RDWR)
    refused = connect()
    refused.settimeout(0.3)
    with pytest.raises(TimeoutError):
        refused.recv(1)
    links.set(LINK, GOOD)
    refused.settimeout(10)
    with pytest.raises(ConnectionResetError):
        refused.recv(1)


def test_a_delay_holds_both_directions_and_keeps_the_order(links: Links, connect):
    client = connect()
    links.set(LINK, Condition(delay_ms=100, jitter_ms=50))
    began = time.monotonic()
    client.sendall(b"1")
    assert receive(client, 1) == b"1"
    assert time.monotonic() - began >= 0.1
    sent = bytes(range(200))
    for number in sent:
        client.sendall(bytes([number]))
    assert receive(client, 200) == sent


def test_a_reset_link_tears_connections_down_until_it_is_good_again(links: Links, connect):
    client = connect()
    client.sendall(b"x")
    assert receive(client, 1) == b"x"
    links.set(LINK, Condition(is_reset=True))
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with pytest.raises(ConnectionResetError):
        connect().recv(1)
    links.set(LINK, GOOD)
    again = connect()
    again.sendall(b"y")
    assert receive(again, 1) == b"y"


def test_a_throttled_link_is_slow(links: Links, connect):
    client = connect()
    links.set(LINK, Condition(bytes_per_sec=1_000_000))
    began = time.monotonic()
    threading.Thread(target=client.sendall, args=(bytes(400_000),)).start()
    receive(client, 400_000)
    assert time.monotonic() - began >= 0.3


def test_a_target_that_resets_resets_its_clients(connect, target: socket.socket, links: Links):
    with socket.create_server(("127.0.0.1", 0)) as other:
        opened = Links(plan_of(task_at("ps:0", other.getsockname()[1]), task_at("worker:0", 2)), [LINK])
        try:
            host, port = json.loads(opened.environment("worker:0")["TRAINER_LINKS"])["ps:0"]["address"].split(":")
            with socket.create_connection((host, int(port)), timeout=10) as client:
                accepted, _ = other.accept()
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                accepted.close()
                with pytest.raises(ConnectionResetError):
                    client.recv(1)
        finally:
            opened.close()


# The injector


class Cluster:
    """What an injector sees, made by hand: three workers and two ps at work."""

    def __init__(self) -> None:
        self.now = 100.0
        self.signals: list[tuple[str, int]] = []
        self.pids = {name: pid for pid, name in enumerate(CLUSTER.tasks, 1)}
        self.pages: dict[str, TaskPage] = {}
        self.lives = dict.fromkeys(self.pids, 0)
        self.step(0)

    def step(self, step: int, *, generation: int = 1) -> None:
        """All tasks that are alive are at a step."""
        for name in self.pids:
            self.pages[name] = page(name, "training", step=step, generation=generation, memory_bytes=2**20)

    def end(self, *names: str) -> None:
        for name in names:
            del self.pids[name], self.pages[name]

    def start(self, *names: str) -> None:
        for name in names:
            self.lives[name] += 1
            self.pids[name] = 100 * self.lives[name] + CLUSTER.tasks.index(name)
            self.pages[name] = page(name, "roll call", memory_bytes=2**20)

    def shown_to(self, injector: FaultInjector, *, after: float = 1.0) -> None:
        self.now += after
        pages = {name: dataclasses.replace(page) for name, page in self.pages.items()}
        injector.act(RunView(self.now, pages, dict(self.pids), lambda *sent: self.signals.append(sent)))


def injector_of(text: str) -> FaultInjector:
    faults = parse(text, CLUSTER)
    return FaultInjector(Scheduled(faults), failpoints=[f for f in faults if f.place])


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_fault_acts_when_its_step_is_seen(cluster: Cluster):
    injector = injector_of("kill worker:2 @40; kill ps @60")
    cluster.step(39)
    cluster.shown_to(injector)
    assert cluster.signals == []
    cluster.step(42)
    cluster.shown_to(injector)
    assert cluster.signals == [("worker:2", signal.SIGKILL)]
    cluster.step(60)
    cluster.shown_to(injector)
    assert cluster.signals[1:] == [("ps:0", signal.SIGKILL), ("ps:1", signal.SIGKILL)]


def test_a_fault_waits_until_its_task_is_alive(cluster: Cluster):
    injector = injector_of("kill worker:2 @40")
    cluster.step(50)
    cluster.end("worker:2")
    cluster.shown_to(injector)
    assert cluster.signals == []
    cluster.start("worker:2")
    cluster.shown_to(injector)
    assert cluster.signals == [("worker:2", signal.SIGKILL)]


def test_a_killed_worker_has_recovered_at_the_first_step_with_its_new_attempt(cluster: Cluster):
    injector = injector_of("kill worker:2 @40")
    cluster.step(40)
    cluster.shown_to(injector)  # killed at 101 s
    cluster.step(41)
    cluster.shown_to(injector)  # the signal is on its way
    cluster.end("worker:2")
    cluster.shown_to(injector)
    cluster.start("worker:2")
    cluster.shown_to(injector)
    cluster.step(41)
    cluster.shown_to(injector)  # all take part, and no step was made yet
    assert injector.recoveries() == [Recovery(fault("kill worker:2 @40"), 40, None, 0)]
    cluster.step(42)
    cluster.shown_to(injector)
    assert injector.recoveries() == [Recovery(fault("kill worker:2 @40"), 40, 5.0, 0)]


def test_steps_are_lost_if_a_later_generation_begins_before_the_fault(cluster: Cluster):
    injector = injector_of("kill ps:0 @50")
    cluster.step(53)
    cluster.shown_to(injector)
    cluster.end(*CLUSTER.tasks)
    cluster.shown_to(injector)
    cluster.start(*CLUSTER.tasks)
    cluster.shown_to(injector)
    cluster.step(40, generation=2)
    cluster.shown_to(injector)
    cluster.step(41, generation=2)
    cluster.shown_to(injector)
    cluster.step(90, generation=2)
    cluster.shown_to(injector)
    assert injector.recoveries() == [Recovery(fault("kill ps:0 @50"), 53, 4.0, 13)]


def test_a_page_from_before_the_fault_loses_no_steps(cluster: Cluster):
    injector = injector_of("kill worker:2 @50")
    cluster.step(50)
    cluster.pages["worker:1"].step = 48
    cluster.shown_to(injector)
    cluster.shown_to(injector)
    assert injector.recoveries()[0].steps_lost == 0


def test_a_paused_task_is_continued_and_the_run_has_recovered_with_the_next_step(cluster: Cluster):
    injector = injector_of("stop worker:1 @40 for 3s")
    cluster.step(40)
    cluster.shown_to(injector)
    cluster.step(41)
    cluster.shown_to(injector, after=2.9)
    assert cluster.signals == [("worker:1", signal.SIGSTOP)]
    cluster.shown_to(injector, after=0.2)
    assert cluster.signals[1:] == [("worker:1", signal.SIGCONT)]
    assert injector.recoveries()[0].recover_secs is None
    cluster.step(42)
    cluster.shown_to(injector, after=0.9)
    assert injector.recoveries()[0].recover_secs == pytest.approx(4.0)


def test_a_fault_that_ends_does_not_end_a_later_one(cluster: Cluster, monkeypatch):
    conditions: list[Condition] = []
    monkeypatch.setattr(Links, "set", lambda links, link, condition: conditions.append(condition))
    link = "worker:1->ps:0"
    injector = injector_of(
        f"delay {link} 20ms @10 for 2s; cut {link} @40 for 3s; stop worker:2 @10 for 2s; stop worker:2 @40 for 3s"
    )
    injector.begin(plan_of())
    cluster.step(10)
    cluster.shown_to(injector)
    cluster.step(40)
    cluster.shown_to(injector, after=1.5)
    cluster.shown_to(injector, after=1.0)
    assert [condition.is_cut for condition in conditions] == [False, True, True]
    assert cluster.signals == [("worker:2", signal.SIGSTOP)] * 2
    cluster.shown_to(injector, after=2.5)
    assert conditions[3:] == [GOOD]
    assert cluster.signals[2:] == [("worker:2", signal.SIGCONT)]
    injector.end()


def test_a_stopped_task_that_was_killed_meanwhile_is_not_continued_in_its_new_attempt(cluster: Cluster):
    injector = injector_of("stop ps:0 @40 for 15s")
    cluster.step(40)
    cluster.shown_to(injector)
    cluster.end(*CLUSTER.tasks)
    cluster.shown_to(injector, after=10)
    cluster.start(*CLUSTER.tasks)
    cluster.step(20, generation=2)
    cluster.shown_to(injector, after=2)
    cluster.step(21, generation=2)
    cluster.shown_to(injector, after=1)
    cluster.shown_to(injector, after=10)
    assert cluster.signals == [("ps:0", signal.SIGSTOP)]
    assert injector.recoveries()[0] == Recovery(fault("stop ps:0 @40 for 15s"), 40, 13.0, 20)


def test_a_run_whose_last_steps_were_not_seen_has_recovered_at_its_end(cluster: Cluster):
    injector = injector_of("stop worker:1 @40 for 3s; kill worker:2 @40")
    injector.begin(plan_of())
    cluster.step(40)
    cluster.shown_to(injector)
    cluster.end("worker:2")
    cluster.shown_to(injector, after=3)
    cluster.start("worker:2")
    injector.end()
    assert [m.recover_secs for m in injector.recoveries()] == [None, None]  # worker:2 did not come back
    injector.begin(plan_of())
    cluster.step(41)
    cluster.shown_to(injector)
    injector.end()
    assert [m.recover_secs for m in injector.recoveries()] == [4.0, 4.0]


def test_an_injector_sets_failpoints_until_they_have_been_reached(cluster: Cluster, links: Links):
    injector = injector_of("kill worker:1 in push @40; kill worker:1 in push @80; kill chief in rename @20")
    injector.begin(plan_of())
    assert injector.environment("worker:1") == {"TRAINER_FAILPOINT": "push:kill@40;push:kill@80"}
    assert injector.environment("worker:2") == {}
    cluster.step(38)
    cluster.shown_to(injector)
    cluster.end("worker:1")
    cluster.shown_to(injector)
    assert injector.environment("worker:1") == {"TRAINER_FAILPOINT": "push:kill@80"}
    assert injector.environment("worker:0") == {"TRAINER_FAILPOINT": "rename:kill@20"}
    assert [str(m.fault) for m in injector.recoveries()] == ["kill worker:1 in push @40"]
    injector.end()


def test_an_exit_explained_by_another_fault_is_not_counted_for_a_failpoint(cluster: Cluster):
    injector = injector_of("kill ps:0 @40; kill worker:1 in push @80")
    injector.begin(plan_of())
    cluster.step(40)
    cluster.shown_to(injector)
    cluster.end(*CLUSTER.tasks)
    cluster.shown_to(injector)
    assert injector.environment("worker:1") == {"TRAINER_FAILPOINT": "push:kill@80"}
    injector.end()


def test_a_cut_link_heals_and_the_run_has_recovered_with_the_next_step(cluster: Cluster, target, monkeypatch):
    cut = fault("cut worker:1->ps:0 @40 for 15s")
    injector = FaultInjector(Scheduled([cut]), links=[("worker:1", "ps:0")])
    port = target.getsockname()[1]
    injector.begin(plan_of(task_at("ps:0", port), task_at("worker:1", 2)))
    set_conditions = []
    monkeypatch.setattr(Links, "set", lambda self, *given: set_conditions.append(given))
    assert list(json.loads(injector.environment("worker:1")["TRAINER_LINKS"])) == ["ps:0"]
    cluster.step(40)
    cluster.shown_to(injector)
    cluster.step(41)
    cluster.shown_to(injector, after=14)
    assert set_conditions == [(("worker:1", "ps:0"), Condition(is_cut=True))]
    cluster.shown_to(injector, after=1.5)
    assert set_conditions[1:] == [(("worker:1", "ps:0"), GOOD)]
    cluster.step(42)
    cluster.shown_to(injector, after=0.5)
    assert injector.recoveries() == [Recovery(cut, 40, 16.0, 0)]
    injector.end()


# A soak


def timed(draw: Callable[[int], Fault]) -> Timed:
    return Timed(draw, "worker:2", every_secs=60, secs=300)


def test_a_soak_injects_faults_at_intervals_once_the_run_has_recovered():
    source = timed(lambda step: Fault("kill", "chief", ("worker:0",), step))
    assert source.due(0, 1000, is_quiet=True) == []
    assert source.due(1, 1010, is_quiet=True) == []  # it begins with the first step
    assert source.due(99, 1069, is_quiet=True) == []
    assert source.due(100, 1070, is_quiet=True) == [Fault("kill", "chief", ("worker:0",), 100)]
    assert source.due(150, 1130, is_quiet=False) == []
    assert source.due(160, 1140, is_quiet=True) != []
    assert source.due(170, 1199, is_quiet=True) == []


def test_a_soak_ends_with_a_sigterm_to_one_task():
    source = timed(lambda step: pytest.fail("too late"))
    source.due(1, 1000, is_quiet=True)
    assert source.due(500, 1300, is_quiet=False) == []
    assert not source.has_ended
    assert source.due(510, 1301, is_quiet=True) == [Fault("term", "worker:2", ("worker:2",), 510)]
    assert source.has_ended
    assert source.due(511, 1302, is_quiet=True) == []


def test_a_soak_that_does_not_recover_ends_too():
    source = timed(lambda step: pytest.fail("too late"))
    source.due(1, 1000, is_quiet=True)
    assert [f.action for f in source.due(500, 1421, is_quiet=False)] == ["term"]


def samples(
    cluster: Cluster, memory: Callable[[int], float], files: Callable[[int], int], seconds: int = 90
) -> list[str]:
    """The tasks that have grown, after a number of seconds."""
    second = 0
    resources = Resources(count_files=lambda pid: files(second))
    for second in range(seconds):
        cluster.pages["worker:1"].memory_bytes = int(memory(second) * 2**20)
        cluster.now += 1
        resources.poll(RunView(cluster.now, cluster.pages, cluster.pids, lambda *sent: None))
    return resources.growth()


def test_a_task_that_keeps_its_memory_and_files_has_not_grown(cluster: Cluster):
    assert samples(cluster, lambda second: 300 + second % 20, lambda second: 40 + second % 3) == []


def test_a_task_that_grows_is_named(cluster: Cluster):
    assert samples(cluster, lambda second: 300 + second, lambda second: 40) == [
        "worker:1 grew from 314.5 MiB to 374.5 MiB within 90 s"
    ]


def test_a_task_that_leaves_files_open_is_named(cluster: Cluster, snapshot):
    growth = samples(cluster, lambda second: 300, lambda second: 40 + second)
    assert growth == snapshot


def test_a_short_attempt_is_not_checked_for_growth(cluster: Cluster):
    assert samples(cluster, lambda second: 300 + 50 * second, lambda second: 40, seconds=20) == []


# The report


@pytest.mark.parametrize(
    ("text", "secs"),
    [
        ("kill worker:1 @40", 13),
        ("kill chief @40", 13),
        ("kill worker:1 in push @40", 13),
        ("kill ps:0 @40", 14),
        ("kill all @40", 14),
        ("stop worker:1 @40", 23),
        ("stop ps:0 @40 for 15s", 24),
        ("stop worker:1 @40 for 3s", 5),
        ("cut worker:1->ps:0 @40 for 15s", 28),
        ("delay worker:1->ps:0 50ms @40 for 10s", 12),
        ("reset worker:1->ps:0 @40", 13),
        ("term worker:1 @40", 43),
    ],
)
def test_the_allowed_recovery_time_follows_from_the_timeouts(text, secs):
    assert budget_of("cluster=2ps3w").allowed_secs(fault(text)) == secs


def test_losing_a_worker_that_holds_a_shard_is_losing_the_shard():
    assert budget_of("cluster=4w").allowed_secs(fault("kill worker:1 @40")) == 14


KILL = Fault("kill", "worker:1", ("worker:1",), 40)


@pytest.mark.parametrize(
    ("code", "measured"),
    [
        (0, [Recovery(KILL, 40, 25.9, 0)]),
        (0, [Recovery(KILL, 40, None, 0)]),
        (0, [Recovery(KILL, 40, 26.1, 0)]),
        (0, []),
        (69, [Recovery(KILL, 40, 3.0, 0)]),
    ],
    ids=["in time", "at the end", "too slow", "no fault", "failed"],
)
def test_a_run_is_judged_by_its_code_and_its_recoveries(code, measured, snapshot):
    assert report.judge(code, [KILL], measured, budget_of("cluster=2ps3w")) == snapshot


def test_a_run_may_end_while_a_link_is_slow():
    slow = fault("delay worker:1->ps:0 50ms @40 for 10s")
    assert report.judge(0, [slow], [Recovery(slow, 40, None, 0)], budget_of("cluster=2ps3w")) == []


def leave_run(folder: Path, digest: str, losses: list[float], accuracies: Sequence[float] = ()) -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"params_sha256": digest}))
    measured = [{"accuracy": value} for value in accuracies] or [{}] * len(losses)
    rows = [
        {"step": step, "loss": loss, **more} for step, (loss, more) in enumerate(zip(losses, measured, strict=True), 1)
    ]
    for name, of_machine in (("history.jsonl", "examples_per_second"), ("evaluations.jsonl", "seconds")):
        (folder / name).write_text("".join(f"{json.dumps({**row, of_machine: random()})}\n" for row in rows))
    return folder


def test_runs_with_the_same_bits_do_not_differ(tmp_path: Path):
    one, other = (leave_run(tmp_path / name, "c0ffee", [0.3, 0.2]) for name in "ab")
    assert report.differences(one, other) == []


@pytest.mark.parametrize(
    ("digest", "losses", "accuracies"),
    [
        ("decaf", [0.3, 0.2], [0.4, 0.5]),
        ("c0ffee", [0.3, 0.20000001], [0.4, 0.5]),
        ("c0ffee", [0.3, 0.2], [0.0, 0.5]),
        ("c0ffee", [0.3], [0.4]),
    ],
    ids=["parameters", "a loss", "a metric", "a line is missing"],
)
def test_the_difference_of_two_runs_is_named(digest, losses, accuracies, tmp_path: Path, snapshot):
    unbroken = leave_run(tmp_path / "unbroken", "c0ffee", [0.3, 0.2], [0.4, 0.5])
    assert report.differences(unbroken, leave_run(tmp_path / "other", digest, losses, accuracies)) == snapshot


def test_a_step_that_was_reported_twice_is_a_difference(tmp_path: Path, snapshot):
    one, other = (leave_run(tmp_path / name, "c0ffee", [0.3, 0.2]) for name in "ab")
    with (other / "history.jsonl").open("a") as file:
        file.write('{"step": 2, "loss": 0.2}\n')
    assert report.differences(one, other) == snapshot


def outcome(kind: str, number: int, measured: list[Recovery], problems: tuple[str, ...] = ()) -> FaultOutcome:
    text = "kill worker:1 @40"
    name = f"{kind}-{number:02}"
    return FaultOutcome(kind, name, text, typed(text), True, not problems, tuple(measured), problems)


OUTCOMES = [
    outcome("kill-worker", 1, [Recovery(KILL, 41, 2.0, 0)]),
    outcome("kill-worker", 2, [Recovery(KILL, 42, 4.0, 0)]),
    outcome("kill-all", 1, [Recovery(fault("kill all @40"), 40, 6.25, 17)], ("params_sha256 differs",)),
]


def test_the_table_has_a_row_for_each_kind():
    assert report.markdown(report.rows(OUTCOMES, budget_of("cluster=2ps3w"))) == (
        "| kind | runs | finished | identical | recover p50 s | max s | allowed s | steps lost max |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| kill-worker | 2 | 2 | 2 | 3.0 | 4.0 | 13.0 | 0 |\n"
        "| kill-all | 1 | 1 | 0 | 6.25 | 6.25 | 14.0 | 17 |\n"
    )


def test_a_failed_run_is_reported_with_its_folder_and_how_to_repeat_it():
    assert report.failures(OUTCOMES, Path("/runs/x")) == [
        "/runs/x/kill-all-01: params_sha256 differs; to repeat it: 'chaos.schedule=\"kill worker:1 @40\"'"
    ]


def test_a_run_is_reported_on_one_line():
    assert [report.line(outcome) for outcome in OUTCOMES] == [
        "kill-worker-01: kill worker:1 @40: identical, recovered in 2.0 s",
        "kill-worker-02: kill worker:1 @40: identical, recovered in 4.0 s",
        "kill-all-01: kill worker:1 @40: params_sha256 differs",
    ]
