"""`python -m bench`: measures all rows and writes the results after each."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from omegaconf import OmegaConf

from bench import facts, plot, report, startup
from bench.config import BenchConfig, parse
from bench.contestants import CONTESTANTS, ROWS, Row, select
from bench.ratios import paired, ratio
from bench.running import ContestantError, Running
from bench.windows import alternate
from trainer.faults import exit_codes
from trainer.faults.problems import ConfigError, Problem
from trainer.observe.machine import this_machine


def main(arguments: Sequence[str]) -> int:
    """Runs what the arguments ask for; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(f"python -m bench [key=value ...]\n\n{OmegaConf.to_yaml(OmegaConf.structured(BenchConfig))}", end="")
        return exit_codes.OK
    try:
        return run(parse(arguments))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return exit_codes.CONFIG


def run(options: BenchConfig) -> int:
    """Measures all rows; returns the exit code.

    Raises:
        ConfigError: if the results cannot be written to their folder.
    """
    folder = Path(options.results)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            [Problem("results", "unreadable", f"{folder}: {error.strerror}", "name another folder")]
        ) from error
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # through the blocks that end contestants
    with TemporaryDirectory(prefix="trainer-bench-") as scratch:
        results = _Bench(options, Path(scratch), folder).run()
    for line in report.summary(results):
        print(line)
    if (why := plot.write(results.to_json(), folder / "results.svg")) is not None:
        print(why)
    print(folder / "results.md", flush=True)
    return exit_codes.OK


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


class _Bench:
    """The rows of one command, one after the other."""

    def __init__(self, options: BenchConfig, scratch: Path, folder: Path) -> None:
        self._options, self._scratch, self._folder = options, scratch, folder
        self._cores = this_machine().cores
        self._began = time.monotonic()
        self._running: dict[tuple[str, int], Running] = {}  # by name, and 1 for the second of an A/A row
        self._starts = 0
        self._results = report.Results(facts.of_machine(), report.options_of(options))

    def run(self) -> report.Results:
        try:
            if self._options.starts:
                self._measure_starts()
            for workload in self._options.workloads:
                self._measure_rows(workload)
        finally:
            self._end_all_but([])
        self._results.finish(facts.load())
        self._write()
        return self._results

    def _measure_rows(self, workload: str) -> None:
        rows = [row for row in select(ROWS, self._options.rows) if row.is_of(workload)]
        for row, following in zip(rows, [*rows[1:], None], strict=True):
            if self._is_late():
                why = f"left out: {self._options.minutes:g} minutes were over"
                self._results.add_failure(row, workload, why, [])
            else:
                self._measure_row(row, workload)
            self._end_all_but(_keys(following) if following else [])
            self._write()

    def _measure_row(self, row: Row, workload: str) -> None:
        try:
            ours, other = (self._get(name, twin, workload) for name, twin in _keys(row))
            of_ours, of_other = alternate(ours, other, rounds=self._options.rounds, secs=self._options.window_secs)
        except ContestantError as error:
            self._results.add_failure(row, workload, str(error), error.log)
            self._end_all_but([key for key, running in self._running.items() if running.pid != error.pid])
        else:
            pairs = paired(*([window.examples_per_sec for window in windows] for windows in (of_ours, of_other)))
            self._results.add_row(row, workload, pairs, ratio(pairs))
            for running, windows in ((ours, of_ours), (other, of_other)):
                self._results.add_windows(running, windows)
        print(self._results.last_line(), flush=True)

    def _get(self, name: str, twin: int, workload: str) -> Running:
        """Returns a warm and paused contestant, starting it if needed."""
        if (name, twin) not in self._running:
            running = self._running[name, twin] = self._start(name, workload)
            running.wait_for_first_step(self._options.start_secs)
            time.sleep(self._options.warm_up_secs)
            running.check()
            running.pause()
        return self._running[name, twin]

    def _start(self, name: str, workload: str) -> Running:
        return Running(CONTESTANTS[name], workload, self._new_directory(), cores=self._cores)

    def _new_directory(self) -> Path:
        self._starts += 1
        path = self._scratch / str(self._starts)
        path.mkdir()
        return path

    def _end_all_but(self, wanted: list[tuple[str, int]]) -> None:
        for key in [key for key in self._running if key not in wanted]:
            self._running.pop(key).end()

    def _is_late(self) -> bool:
        minutes = self._options.minutes
        return minutes > 0 and time.monotonic() - self._began > 60 * minutes

    def _measure_starts(self) -> None:
        for cluster in startup.CLUSTERS:
            for _ in range(self._options.starts):
                self._results.add_start(startup.measure(cluster, self._new_directory(), self._options, self._cores))
            print(self._results.start_line(cluster), flush=True)
        self._write()

    def _write(self) -> None:
        self._results.write(self._folder)


def _keys(row: Row) -> list[tuple[str, int]]:
    """Returns the two contestants of a row; of A/A, the second is another instance."""
    return [(row.ours, 0), (row.other, int(row.other == row.ours))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
