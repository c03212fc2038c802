"""Defines comparisons: contestants, workloads and targets. Pure: commands are described here, not started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # of the checkout, where contestants start
CLICKS = "clicks"  # the workload with tables
WORKLOADS = ("noop", "cnn", "mlp40", "resnet20", "resnet50", CLICKS)
SHIPPED = ("cnn", "resnet20")  # models of the trainer; the others are in USER_FILE
USER_FILE = "bench/workloads.py"
WORKERS, REPLICA_BATCH = 2, 64
GLOBAL_BATCH = WORKERS * REPLICA_BATCH
CLICKS_ROWS, CLICKS_WIDTH = 1_000_000, 16  # of each of its 26 tables
CLICKS_TIMES = 32  # as many examples as with other workloads
LEARNING_RATE = 0.001
FOR_EVER = 100_000  # seconds; a paused task is silent, and must not be taken for one that failed


@dataclass(frozen=True)
class Contestant:
    """A program that trains, and counts its steps where the bench can read them."""

    name: str
    title: str
    examples: int  # of one step
    overrides: tuple[str, ...] = ()  # of one of our runs
    peer: str = ""  # module of bench.peers, of any other
    options: tuple[str, ...] = ()  # of the peer

    @property
    def is_ours(self) -> bool:
        return not self.peer

    def command(self, workload: str, directory: Path, cores: int) -> list[str]:
        """Arguments of Python.

        Args:
            directory: of its own, for everything that it writes.
            cores: of the machine, shared by its workers.
        """
        if self.is_ours:
            own = _clicks_overrides() if workload == CLICKS else _image_overrides(workload)
            return ["-m", "trainer", *own, *_our_overrides(directory), *self.overrides]
        given = [f"--workload={workload}", f"--directory={directory}", f"--cores={cores}"]
        return ["-m", f"bench.peers.{self.peer}", *given, *self.options]


def examples_of(contestant: Contestant, workload: str) -> int:
    """Returns the examples of one step."""
    return contestant.examples * (CLICKS_TIMES if workload == CLICKS else 1)


def model_overrides(workload: str) -> list[str]:
    return [f"model={workload}"] if workload in SHIPPED else [f"user={USER_FILE}", f"model={workload}"]


def _image_overrides(workload: str) -> list[str]:
    learning = ["optimizer=adam", f"optimizer.learning_rate={LEARNING_RATE}"]
    return [*model_overrides(workload), "data=mnist_10k", f"train.batch_size={GLOBAL_BATCH}", *learning]


def _clicks_overrides() -> list[str]:
    return [
        "experiment=clicks",
        f"data.options.rows={CLICKS_ROWS}",
        f"train.batch_size={CLICKS_TIMES * GLOBAL_BATCH}",
        "optimizer.learning_rate=0.02",
    ]


def _our_overrides(directory: Path) -> list[str]:
    return [
        "train.steps=1000000000",
        "checkpoint.every=0",
        "history.every=1000",
        f"timeouts.heartbeat_secs={FOR_EVER}",
        f"timeouts.step_secs={FOR_EVER}",
        "restart.max=0",
        f"run={directory}",
    ]


def _ours(name: str, title: str, *overrides: str, examples: int = GLOBAL_BATCH) -> Contestant:
    return Contestant(name, title, examples, overrides=overrides)


def _peer(name: str, title: str, peer: str, *options: str, examples: int = GLOBAL_BATCH) -> Contestant:
    return Contestant(name, title, examples, peer=peer, options=options)


CONTESTANTS: Mapping[str, Contestant] = {
    contestant.name: contestant
    for contestant in (
        _ours("sync", "sync, 1 ps", "cluster=1ps2w"),
        _ours("sync_f32", "sync, 1 ps, float32 messages", "cluster=1ps2w", "strategy=sync", "strategy.wire=float32"),
        _ours("sync_bf16", "sync, 1 ps, bfloat16 messages", "cluster=1ps2w", "strategy=sync", "strategy.wire=bfloat16"),
        _ours("sync_2w", "sync, shards on workers", "cluster=2w"),
        _ours("async", "async, 1 ps", "cluster=1ps2w", "strategy=async", examples=REPLICA_BATCH),
        _ours(
            "async_f32",
            "async, 1 ps, float32 messages",
            "cluster=1ps2w",
            "strategy=async",
            "strategy.wire=float32",
            examples=REPLICA_BATCH,
        ),
        _ours("all_reduce", "all_reduce", "cluster=2w", "strategy=all_reduce"),
        _ours("local", "local", "cluster=local"),
        _ours("local_jit", "local with XLA", "cluster=local", "train.jit=true"),
        _peer("sync_replicas", "SyncReplicasOptimizer, as written", "sync_replicas"),
        _peer("sync_replicas_tuned", "SyncReplicasOptimizer, tuned", "sync_replicas", "--tuned"),
        _peer("multi_worker", "MultiWorkerMirrored, as written", "multi_worker"),
        _peer("multi_worker_tuned", "MultiWorkerMirrored, tuned", "multi_worker", "--tuned"),
        _peer(
            "parameter_server_1",
            "ParameterServerStrategy, 1 step a closure",
            "parameter_server",
            "--steps-per-closure=1",
            examples=REPLICA_BATCH,
        ),
        _peer(
            "parameter_server_10",
            "ParameterServerStrategy, 10 steps a closure",
            "parameter_server",
            "--steps-per-closure=10",
            examples=REPLICA_BATCH,
        ),
        _peer(
            "parameter_server_tables", "ParameterServerStrategy, as written", "parameter_server", examples=REPLICA_BATCH
        ),
        _peer(
            "parameter_server_tuned",
            "ParameterServerStrategy, tuned",
            "parameter_server",
            "--steps-per-closure=10",
            "--tuned",
            examples=REPLICA_BATCH,
        ),
        _peer("keras_fit", "Keras fit, as written", "keras_fit"),
        _peer("keras_fit_xla", "Keras fit with XLA", "keras_fit", "--jit"),
    )
}


@dataclass(frozen=True)
class Row:
    """One comparison: `ours` against `other`; its ratio is that of their examples per second."""

    ours: str
    other: str
    targets: Mapping[str, float] = field(default_factory=dict)  # by workload; of the interval's lower end
    group: str = ""  # rows of a group share one target: `best` of them must reach it, or even the `worst`
    judged: str = "each"
    only: str = ""  # the one workload that it is measured with

    @property
    def name(self) -> str:
        return f"{self.ours}/{self.other}"

    @property
    def title(self) -> str:
        return f"{CONTESTANTS[self.ours].title} / {CONTESTANTS[self.other].title}"

    def is_of(self, workload: str) -> bool:
        """Whether it is measured with a workload; with clicks it is if it has a target."""
        return CLICKS in self.targets if workload == CLICKS else not self.only


def _targets(cnn: float, mlp40: float, resnet20: float, resnet50: float) -> dict[str, float]:
    return {"cnn": cnn, "mlp40": mlp40, "resnet20": resnet20, "resnet50": resnet50}


_SHARE_OF_LOCAL = _targets(0.70, 0.60, 0.75, 0.50)
_AGAINST_PARAMETER_SERVER = _targets(1.4, 3.0, 2.0, 1.1)


def _share(ours: str, **more: float) -> Row:
    return Row(
        ours, "local", _SHARE_OF_LOCAL | more, group="the best distributed one as a share of local", judged="best"
    )


def _against_parameter_server(steps: int) -> Row:
    group = "async against the better ParameterServerStrategy"
    return Row("async", f"parameter_server_{steps}", _AGAINST_PARAMETER_SERVER, group=group, judged="worst")


# In an order in which neighbours share a contestant, which then need not start again.
ROWS: tuple[Row, ...] = (
    Row("sync", "sync"),
    Row("sync", "sync_replicas_tuned", _targets(1.4, 3.0, 2.0, 1.25) | {CLICKS: 1.4}),
    Row("sync", "sync_replicas", {CLICKS: 1.8}),
    Row("sync_f32", "sync_replicas_tuned", {CLICKS: 1.2}),
    Row("sync_bf16", "sync_f32", {"cnn": 1.1}),
    Row("sync", "sync_f32"),
    _share("sync", clicks=0.7),
    _share("sync_2w"),
    Row("sync_2w", "multi_worker_tuned", _targets(1.5, 1.8, 1.5, 1.3)),
    Row("sync_2w", "multi_worker"),
    Row("all_reduce", "multi_worker_tuned"),
    _share("all_reduce"),
    _share("async"),
    Row("async", "async_f32"),
    _against_parameter_server(1),
    _against_parameter_server(10),
    Row("async", "parameter_server_tuned", {CLICKS: 1.4}, only=CLICKS),
    Row("async", "parameter_server_tables", {CLICKS: 1.8}, only=CLICKS),
    Row("sync", "keras_fit", {CLICKS: 9.0}, only=CLICKS),
    Row("local", "keras_fit"),
    Row("local", "keras_fit_xla"),
    Row("local_jit", "keras_fit_xla"),
)
QUICK_ROWS = (
    "sync/sync",
    "sync/sync_replicas_tuned",
    "sync_bf16/sync_f32",
    "sync/local",
    "sync_2w/local",
    "sync_2w/multi_worker_tuned",
    "async/parameter_server_10",
)


def select(rows: tuple[Row, ...], patterns: list[str]) -> list[Row]:
    """Returns the rows that a pattern names, such as sync/*; all if there is none."""
    return [row for row in rows if not patterns or any(fnmatchcase(row.name, pattern) for pattern in patterns)]
