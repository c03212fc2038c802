"""Maps each mode to a function that passes the parts of the config that its command needs.

Each function imports its own command, so that `trainer runs` does not wait for the libraries of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.compose import Invocation
from trainer.config.typed import Mode
from trainer.faults import exit_codes

if TYPE_CHECKING:
    from trainer.commands.start import Start
    from trainer.storage.run_directory import RunDirectory


def _train(given: Invocation, start: Start) -> int:
    from trainer.commands import train

    return train.run(given.config, start, write_plan_to=given.typed.plan.write_to)


def _selftest(given: Invocation, start: Start) -> int:
    from trainer.commands import selftest

    return selftest.run(given.config, start)


def _continue(given: Invocation, start: Start) -> int:
    from trainer.commands.runs import continue_run

    return continue_run.run(given.config, start, write_plan_to=given.typed.plan.write_to)


def _directory(given: Invocation) -> RunDirectory:
    from trainer.commands.runs.named import directory_of

    return directory_of(given.config.run)


def _status(given: Invocation) -> int:
    from trainer.commands.runs import status

    status.show(_directory(given), as_json=given.typed.json)
    return exit_codes.OK


def _stop(given: Invocation) -> int:
    from trainer.commands.runs import stop

    return stop.run(_directory(given), as_json=given.typed.json)


def _save(given: Invocation) -> int:
    from trainer.commands.runs import save

    return save.run(_directory(given), as_json=given.typed.json)


def _attach(given: Invocation) -> int:
    from trainer.commands.runs import attach

    return attach.run(_directory(given), given.typed.attach, as_json=given.typed.json)


def _report(given: Invocation) -> int:
    from trainer.commands.runs import report

    return report.run(_directory(given), given.typed.report)


def _export(given: Invocation) -> int:
    from trainer.commands.runs import export

    return export.run(_directory(given), given.typed.export)


def _evaluate(given: Invocation) -> int:
    from trainer.commands.runs import evaluate

    return evaluate.run(given.config, given.typed.export.checkpoint, _directory(given), as_json=given.typed.json)


def _predict(given: Invocation) -> int:
    from trainer.commands.runs import predict

    return predict.run(given.config, given.typed.export, _directory(given), as_json=given.typed.json)


def _log(given: Invocation) -> int:
    from trainer.commands.runs import log

    return log.run(_directory(given), given.config.loggers)


def _check(given: Invocation) -> int:
    from trainer.commands.check import claims

    assert given.config.run is not None  # it was checked
    return claims.run(Path(given.config.run))


def _runs(given: Invocation) -> int:
    from trainer.commands.runs import table

    return table.run(given.typed.runs, as_json=given.typed.json)


def _console(given: Invocation) -> int:
    from trainer.commands.console import server

    return server.run(given.typed.console, Path(given.typed.runs.folder))


def _plan(given: Invocation) -> int:
    from trainer.commands import plan

    return plan.run(given.config, given.typed.plan.write_to)


def _sweep(given: Invocation) -> int:
    from trainer.commands.sweep import command

    return command.run(given.config, given.typed.sweep)


def _chaos(given: Invocation) -> int:
    from trainer.commands.chaos import runner

    return runner.run(given.config, given.typed.chaos)


def _render(given: Invocation) -> int:
    from trainer.commands import render

    return render.run(given.config, given.typed.target, given.typed.kubernetes)


def _doctor(given: Invocation) -> int:
    from trainer.commands.doctor import probe

    return probe.run(given.config)


def _init(given: Invocation) -> int:
    from trainer.commands.init import project

    assert given.typed.project is not None  # it was checked
    return project.run(given.typed.project)


def _clean(given: Invocation) -> int:
    from trainer.commands import clean

    return clean.run()


def _schema(given: Invocation) -> int:
    from trainer.commands import schema

    return schema.run()


TRAINING: Mapping[Mode, Callable[[Invocation, Start], int]] = {  # these take over the nursery that was started early
    Mode.train: _train,
    Mode.selftest: _selftest,
    Mode["continue"]: _continue,
}
COMMANDS: Mapping[Mode, Callable[[Invocation], int]] = {
    Mode.status: _status,
    Mode.stop: _stop,
    Mode.save: _save,
    Mode.attach: _attach,
    Mode.report: _report,
    Mode.export: _export,
    Mode.evaluate: _evaluate,
    Mode.predict: _predict,
    Mode.log: _log,
    Mode.check: _check,
    Mode.runs: _runs,
    Mode.console: _console,
    Mode.doctor: _doctor,
    Mode.clean: _clean,
    Mode.init: _init,
    Mode.schema: _schema,
    Mode.plan: _plan,
    Mode.sweep: _sweep,
    Mode.chaos: _chaos,
    Mode.render: _render,
}
