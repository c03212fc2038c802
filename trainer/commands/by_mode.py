"""What each mode does with a config: it takes the parts it needs and calls its command.

Each function imports its own command, so that `trainer runs` waits for no library of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.schema import Mode, RunConfig
from trainer.faults import exit_codes

if TYPE_CHECKING:
    from trainer.commands.start import Start
    from trainer.storage.run_directory import RunDirectory


def _train(config: RunConfig, start: Start) -> int:
    from trainer.commands import train

    return train.run(config, start)


def _selftest(config: RunConfig, start: Start) -> int:
    from trainer.commands import selftest

    return selftest.run(config, start)


def _continue(config: RunConfig, start: Start) -> int:
    from trainer.commands.runs import continue_run

    return continue_run.run(config, start)


def _directory(config: RunConfig) -> RunDirectory:
    from trainer.commands.runs.named import directory_of

    return directory_of(config.run)


def _status(config: RunConfig) -> int:
    from trainer.commands.runs import status

    status.show(_directory(config), as_json=config.json)
    return exit_codes.OK


def _stop(config: RunConfig) -> int:
    from trainer.commands.runs import stop

    return stop.run(_directory(config), as_json=config.json)


def _save(config: RunConfig) -> int:
    from trainer.commands.runs import save

    return save.run(_directory(config), as_json=config.json)


def _attach(config: RunConfig) -> int:
    from trainer.commands.runs import attach

    return attach.run(_directory(config), config.attach, as_json=config.json)


def _report(config: RunConfig) -> int:
    from trainer.commands.runs import report

    return report.run(_directory(config), config.report)


def _export(config: RunConfig) -> int:
    from trainer.commands.runs import export

    return export.run(_directory(config), config.export)


def _evaluate(config: RunConfig) -> int:
    from trainer.commands.runs import evaluate

    return evaluate.run(config, _directory(config))


def _predict(config: RunConfig) -> int:
    from trainer.commands.runs import predict

    return predict.run(config, _directory(config))


def _log(config: RunConfig) -> int:
    from trainer.commands.runs import log

    return log.run(_directory(config), config.loggers)


def _check(config: RunConfig) -> int:
    from trainer.commands.check import claims

    assert config.run is not None  # it was checked
    return claims.run(Path(config.run))


def _runs(config: RunConfig) -> int:
    from trainer.commands.runs import table

    return table.run(config.runs, as_json=config.json)


def _console(config: RunConfig) -> int:
    from trainer.commands.console import server

    return server.run(config.console, Path(config.runs.folder))


def _plan(config: RunConfig) -> int:
    from trainer.commands import plan

    return plan.run(config)


def _sweep(config: RunConfig) -> int:
    from trainer.commands.sweep import command

    return command.run(config)


def _chaos(config: RunConfig) -> int:
    from trainer.commands.chaos import runner

    return runner.run(config)


def _render(config: RunConfig) -> int:
    from trainer.commands import render

    return render.run(config)


def _doctor(config: RunConfig) -> int:
    from trainer.commands.doctor import probe

    return probe.run(config)


def _init(config: RunConfig) -> int:
    from trainer.commands.init import project

    assert config.project is not None  # it was checked
    return project.run(config.project)


def _clean(config: RunConfig) -> int:
    from trainer.commands import clean

    return clean.run()


def _schema(config: RunConfig) -> int:
    from trainer.commands import schema

    return schema.run()


TRAINING: Mapping[Mode, Callable[[RunConfig, Start], int]] = {  # these take over the nursery that was started early
    Mode.train: _train,
    Mode.selftest: _selftest,
    Mode["continue"]: _continue,
}
COMMANDS: Mapping[Mode, Callable[[RunConfig], int]] = {
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
