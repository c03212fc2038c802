"""trainer init: writes the files of a new project into a folder that is empty, or does not exist."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from trainer.config import json_schema, shell
from trainer.faults import exit_codes
from trainer.faults.problems import ConfigError, Problem

TEMPLATES = ("model.py", "experiment.yaml", "test_smoke.py", "README.md", ".gitignore")
NEXT = "next:  cd {}\n       python -m trainer experiment.yaml"


def check(project: str | None) -> list[Problem]:
    """Returns the problems of the folder, which must be empty or not exist."""
    if not project:
        return [Problem("project", "not-set", "trainer init needs a folder's name", "e.g. trainer init my_project")]
    folder = Path(project)
    try:
        held = sorted(os.listdir(folder)) if folder.exists() else []
    except NotADirectoryError:
        return [Problem("project", "taken", f"{folder} is a file", "name a folder that does not exist yet")]
    except OSError as error:
        return [_cannot(folder, error)]
    if held:
        message = f"{folder} is not empty: it holds {', '.join(held[:3])}{', ...' if len(held) > 3 else ''}"
        remedy = f"name a folder that does not exist yet, e.g. trainer init {project}_2"
        return [Problem("project", "taken", message, remedy)]
    return []


def run(project: str) -> int:
    """Writes the files and prints what to type next; returns 0.

    Raises:
        ConfigError: if they cannot be written.
    """
    folder = Path(project)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in _files(folder.resolve().name):
            with open(folder / name, "x", encoding="utf-8") as file:  # never overwrites
                file.write(text)
    except OSError as error:
        raise ConfigError([_cannot(folder, error)]) from error
    print(f"{folder}: {', '.join(sorted(os.listdir(folder)))}")
    print(NEXT.format(shell.joined([str(folder)])))
    return exit_codes.OK


def _cannot(folder: Path, error: OSError) -> Problem:
    message = f"{folder} cannot be used: {error.strerror}"
    remedy = "give a folder that you may write to, e.g. trainer init ~/my_project"
    return Problem("project", "unreadable", message, remedy)


def _files(title: str) -> Iterator[tuple[str, str]]:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("trainer.commands.init", "templates")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    for name in TEMPLATES:
        template = environment.get_template(f"{name.removeprefix('.')}.j2")
        yield name, template.render(title=title, name=_run_name(title))
    yield "schema.json", json_schema.text()


def _run_name(title: str) -> str:
    """Returns a folder's name as the prefix of run directories: a-z, 0-9 and -."""
    return re.sub(r"[^a-z0-9-]+", "-", title.lower()).strip("-")[:63] or "run"
