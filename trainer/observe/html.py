"""Renders templates of pages that need no script, no font and no other file."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

from trainer.config.words import count, size

if TYPE_CHECKING:
    from jinja2 import Environment, Template


def template(path: str, package: str | None = None) -> Template:
    """Returns the template at a path below this folder; style.css.j2 is the style of all pages.

    Args:
        package: another one that has it in its folder `templates`.
    """
    return _environment(package).get_template(path)


@functools.cache
def _environment(package: str | None) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # here: most commands write no page

    here = PackageLoader("trainer.observe", ".")
    environment = Environment(
        loader=here if package is None else ChoiceLoader([PackageLoader(package), here]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": count,
        "size": size,
        "digits": lambda number: f"{number:,}",
        "percent": lambda number, total: f"{number / max(total, 1):.0%}",
        "readable": lambda device: re.sub(r"^/job:([^/]+)/task:(\d+)", r"\1:\2 ", device),  # "ps:0 /cpu:0"
        "task": lambda device: device.rpartition("/")[0],
    }
    return environment
