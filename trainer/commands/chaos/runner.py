"""trainer chaos: trains while tasks are killed, frozen and cut off, and compares the results with an unbroken run."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from random import Random

from trainer.commands.chaos import random_faults, report, schedule
from trainer.commands.chaos.check import adapted
from trainer.commands.chaos.injector import FaultInjector, Scheduled
from trainer.commands.chaos.report import FaultOutcome, RecoveryBudget
from trainer.commands.chaos.schedule import Fault, FaultTargets
from trainer.commands.chaos.soak import Resources, Timed
from trainer.commands.check.claims import examine
from trainer.config.schema import RunConfig
from trainer.config.typed import ChaosConfig
from trainer.config.words import count
from trainer.faults import exit_codes
from trainer.launch.attempts import PlannedRun
from trainer.launch.planning import announce
from trainer.launch.processes import launcher
from trainer.launch.processes.tasks import ProcessTasks
from trainer.plan.plan import Plan
from trainer.storage.atomic import write_atomically
from trainer.storage.run_directory import RunDirectory, choose, description_folder

UNBROKEN = "unbroken"
NOT_AS_PROMISED = 1  # exit code
PIPE_COLUMNS = 110  # of the table, where no terminal says how wide it is
STOPPED = (exit_codes.INTERRUPTED, exit_codes.TERMINATED)


def run(config: RunConfig, chaos: ChaosConfig) -> int:
    """Makes all runs, prints a line for each and a table at the end, and writes both into the run directory.

    Returns:
        0 if every run under faults finished as promised.
    """
    with ProcessTasks() as tasks, description_folder() as described:  # one for all runs
        config, plan = announce(adapted(config, chaos), described, tasks)
        path = choose(config).path
        runner = _ChaosRunner(config, chaos, plan, path, described, tasks)
        print(path, flush=True)
        code = runner.soak() if chaos.minutes else runner.compare()
        return code or runner.show()


class _ChaosRunner:
    """The runs of one command, one after the other."""

    def __init__(
        self, config: RunConfig, chaos: ChaosConfig, plan: Plan, path: Path, described: Path, tasks: ProcessTasks
    ) -> None:
        self._config, self._chaos, self._plan, self._path, self._tasks = config, chaos, plan, path, tasks
        self._described = described
        self._crew = FaultTargets.of(config.cluster, config.strategy, config.train.steps)
        self._budget = RecoveryBudget(self._crew, config.restart, config.timeouts)
        self._outcomes: list[FaultOutcome] = []

    def compare(self) -> int:
        """Makes an unbroken run, then those with faults; returns the exit code that ended them early, or 0."""
        code = self._run(UNBROKEN, None)
        print(f"{UNBROKEN}: {exit_codes.meaning(code) if code else 'done'}", flush=True)
        if code:
            print(f"the unbroken run failed, so nothing can be compared; see {self._path / UNBROKEN / 'launcher.log'}")
            return code
        for kind, name, faults in self._wanted():
            code = self._break(kind, name, faults)
            if code in STOPPED:
                self.show()
                return code
        return exit_codes.OK

    def _wanted(self) -> Iterator[tuple[str, str, list[Fault]]]:
        """Returns the kind, name and faults of each run."""
        chaos = self._chaos
        if chaos.schedule:
            yield "schedule", "schedule", schedule.parse(chaos.schedule, self._crew)
            return
        for kind in self._kinds():
            for number, fault in enumerate(random_faults.random_faults(kind, chaos.random, chaos.seed, self._crew), 1):
                yield kind, f"{kind}-{number:02}", [fault]

    def _break(self, kind: str, name: str, faults: Sequence[Fault]) -> int:
        injector = FaultInjector(
            Scheduled(faults),
            failpoints=[fault for fault in faults if fault.place],
            links=[fault.link for fault in faults if fault.link],
            network_of=self._tasks.isolated_pid,
        )
        code = self._run(name, injector)
        stops = sum(fault.action == "term" for fault in faults)
        while code == exit_codes.TERMINATED and stops > 0:  # they asked for it; so the run is continued
            code, stops = self._run(name, injector), stops - 1
        if code in STOPPED:
            return code
        recoveries = report.with_steps_lost(injector.recoveries(), self._path / name)
        problems = report.judge(code, faults, recoveries, self._budget)
        problems += self._broken_promises(name) if code == exit_codes.OK else []
        is_identical = None
        if code == exit_codes.OK and self._plan.effective_strategy.is_exact:
            found = report.differences(self._path / UNBROKEN, self._path / name)
            is_identical, problems = not found, [*problems, *found]
        text = "; ".join(map(str, faults))
        repeat, has_finished = f"{schedule.typed(text)} chaos.random=0", code == exit_codes.OK
        self._report(
            FaultOutcome(kind, name, text, repeat, has_finished, is_identical, tuple(recoveries), tuple(problems))
        )
        return code

    def soak(self) -> int:
        """Makes one long run; returns the exit code that ended it early, or 0."""
        chaos, out = self._chaos, sys.stdout
        random, can = Random(f"{chaos.seed} soak"), self._kinds()
        timed = Timed(
            lambda step: random_faults.draw(random.choice(can), random, self._crew, step),
            self._crew.job("worker")[-1],
            every_secs=chaos.every_secs,
            secs=60 * chaos.minutes,
        )
        resources = Resources()
        injector = FaultInjector(
            timed,
            links=random_faults.links(self._crew) if "cut-link" in can else (),
            network_of=self._tasks.isolated_pid,
            watch=resources.poll,
            report=lambda recovery: print(report.fault_line(recovery), file=out, flush=True),
        )
        code = self._run("soak", injector)
        if code in STOPPED and not timed.has_ended:
            return code  # the user did
        recoveries = [m for m in injector.recoveries() if m.fault.action != "term"]
        problems = report.judge(code, [], recoveries, self._budget, finished=exit_codes.TERMINATED) + resources.growth()
        if code == exit_codes.TERMINATED:
            problems += self._broken_promises("soak")
        repeat = f"chaos.minutes={chaos.minutes:g} chaos.every_secs={chaos.every_secs:g} chaos.seed={chaos.seed}"
        has_finished = code == exit_codes.TERMINATED
        text = count(len(recoveries), "random fault")
        self._report(FaultOutcome("soak", "soak", text, repeat, has_finished, None, tuple(recoveries), tuple(problems)))
        return exit_codes.OK

    def _kinds(self) -> list[str]:
        """Returns the kinds of random faults, and prints which are left out."""
        chaos = self._chaos
        can, left_out = random_faults.possible(chaos.kinds, self._crew, by_time=bool(chaos.minutes))
        for text in left_out:
            print(text, flush=True)
        return can

    def _broken_promises(self, name: str) -> list[str]:
        """Returns the problems that `trainer check` finds in a run."""
        claims = examine(RunDirectory(self._path / name))
        return [problem for claim in claims for problem in claim.problems]

    def _run(self, name: str, injector: FaultInjector | None) -> int:
        """Trains in a folder of its own; the launcher's output goes to a file there."""
        directory = RunDirectory(self._path / name, self._described)
        directory.path.mkdir(parents=True, exist_ok=True)
        config = replace(self._config, run=str(directory.path))
        with open(directory.path / "launcher.log", "a") as log, redirect_stdout(log):
            return launcher.run(PlannedRun(config, self._plan, directory, time.time()), self._tasks, faults=injector)

    def _report(self, outcome: FaultOutcome) -> None:
        self._outcomes.append(outcome)
        print(report.line(outcome), flush=True)

    def show(self) -> int:
        """Prints and writes the results; returns the exit code."""
        from trainer.config.output import Output  # imports rich

        rows = report.rows(self._outcomes, self._budget)
        write_atomically(self._path / "chaos.json", json.dumps(report.to_json(self._outcomes, rows), indent=1))
        write_atomically(self._path / "chaos.md", report.markdown(rows))
        Output(PIPE_COLUMNS).print(report.table(rows))
        failed = report.failures(self._outcomes, self._path)
        print("\n".join([*failed, str(self._path / "chaos.md")]), flush=True)
        return NOT_AS_PROMISED if failed else exit_codes.OK
