"""Finds the available loggers: those of this package, and entry points of installed packages."""

import difflib
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points

from trainer.faults.problems import Problem

GROUP = "trainer.loggers"  # of entry points
SHIPPED = {
    "csv": "trainer.observe.loggers.csv_file:CsvLogger",
    "mlflow": "trainer.observe.loggers.mlflow_store:MlflowLogger",
    "wandb": "trainer.observe.loggers.wandb_run:WandbLogger",
}


def loggers() -> dict[str, str]:
    """Returns MODULE:CLASS of each logger by name."""
    return SHIPPED | {one.name: one.value for one in entry_points(group=GROUP)}


def check_loggers(names: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for each logger that does not exist."""
    known = loggers() if names else {}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or list(known)[:1]
            message = f"unknown logger {name!r}; available: {', '.join(sorted(known))}"
            remedy = f"e.g. loggers=[{near[0]}], or install the package that has it"
            yield Problem("loggers", "unknown-choice", message, remedy)
