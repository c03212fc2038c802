"""Serves the metrics of a whole run at one port of the launcher, and writes its address for Prometheus."""

import hashlib
import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.config.schema import PrometheusConfig
from trainer.config.versions import VERSION
from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.launch.attempts import Attempts, PlannedRun
from trainer.launch.restarts import Restarts
from trainer.observe.page_server import METRICS_TYPE, PageServer, PageServer6, handler
from trainer.observe.peers import UNIX
from trainer.storage import checkpoint
from trainer.storage.atomic import write_atomically
from trainer.storage.run_directory import RunDirectory


class EndpointError(TrainerError):
    """The port for metrics cannot be used."""

    exit_code = exit_codes.UNAVAILABLE


class MetricsEndpoint:
    """Answers /metrics while a run lasts, if the config asks for it."""

    def __init__(self, planned: PlannedRun, attempts: Attempts, restarts: Restarts) -> None:
        """Listens from now on.

        Raises:
            EndpointError: if the port is taken.
        """
        config, plan, directory, _ = planned
        self._attempts, self._restarts, self._directory = attempts, restarts, directory
        of_plan = {"cluster": plan.cluster, "strategy": plan.strategy}
        self._facts = {**of_plan, "model": config.model.name, "data": config.data.name, "version": VERSION}
        section = config.prometheus
        self._server = None if section.port is None else _listen(section, self._text)
        own = None if self._server is None else _target(section.host, self._server.server_address[1])
        targets = [own] if own else [task.control for task in plan.tasks if not task.control.startswith(UNIX)]
        self._files = _files(section, directory)
        self._forget()
        if targets:
            for file in self._files:
                with suppress(OSError):  # a full disk; the run continues, but Prometheus cannot find it
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(file, json.dumps([{"targets": targets}], indent=1) + "\n")

    def _text(self) -> bytes:
        from trainer.observe import metrics  # imports prometheus_client: most runs are never asked

        pages = [attempt.page for attempt in self._attempts if attempt.page]
        saved = checkpoint.finished(self._directory.checkpoints)
        last = int(saved[-1].name) if saved else None
        run = str(self._directory.path)
        return metrics.text(pages, metrics.RunMetrics(run, self._facts, dict(self._restarts.reasons), last))

    def close(self) -> None:
        """Stops answering, and removes the files by which Prometheus finds the run."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._forget()

    def _forget(self) -> None:
        for file in self._files:
            with suppress(OSError):
                file.unlink()


def _files(config: PrometheusConfig, directory: RunDirectory) -> list[Path]:
    """Returns the files by which Prometheus finds the run. Its patterns match files of one folder, not folders."""
    own = directory.path / "prometheus.json"
    if config.discovery is None:
        return [own]
    digest = hashlib.sha256(os.fsencode(directory.path)).hexdigest()[:8]  # another folder may have a run of that name
    return [own, Path(config.discovery) / f"{directory.path.name}-{digest}.json"]


def _listen(config: PrometheusConfig, text: Any) -> PageServer:
    kind = PageServer6 if ":" in config.host else PageServer
    answer = handler({"/metrics": (METRICS_TYPE, text)}, [config.host])
    try:
        server = kind((config.host, config.port or 0), answer)
    except OSError as error:
        remedy = "prometheus.port=0 takes a free one"
        raise EndpointError(f"prometheus.port: {config.host}:{config.port}: {error.strerror}; {remedy}") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return server


def _target(host: str, port: int) -> str:
    """Returns the address that Prometheus reads; of a server on all interfaces, this machine's name."""
    name = socket.gethostname() if host in ("0.0.0.0", "::", "") else host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
