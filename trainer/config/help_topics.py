"""Prints the help of `trainer help TOPIC`: a command, a section, a key, or a file of a group."""

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from trainer.config import keys, sources
from trainer.config.comments import meaning, meanings_of_values
from trainer.config.output import Output
from trainer.config.typed import Mode
from trainer.faults.problems import ConfigError, Problem

EXAMPLES = "trainer help optimizer, trainer help train.steps, trainer help data=csv, trainer help sweep"


def show(topics: Sequence[str]) -> None:
    """Prints the help of each topic.

    Raises:
        ConfigError: if nothing has such a name.
    """
    pages = [_page(topic) for topic in topics]
    output = Output()
    for page in pages:
        for part in page:
            output.print(part)


def _page(topic: str) -> list[Text | Table]:
    """Returns the parts of a topic's page."""
    kind, (group, _, name) = keys.hint(topic.split(".")), topic.partition("=")
    page: list[Text | Table] = []
    if topic in Mode.__members__:
        page.append(Text(f"trainer {topic}: {meanings_of_values(Mode)[topic]}"))
    if name and (path := sources.conf_dir() / group / f"{name}.yaml").is_file():
        lines = [line for line in path.read_text().splitlines() if "yaml-language-server" not in line]
        page.append(Text(f"{topic}, conf/{group}/{name}.yaml:\n" + "\n".join(f"  {line}".rstrip() for line in lines)))
    elif dataclasses.is_dataclass(kind):
        page += _section(topic, kind)
    elif topic in keys.declared() and topic != "experiment":
        *owner, field_name = topic.split(".")
        page.append(_table([_row(topic, keys.hint(owner), field_name)]))
    if not page:
        known = [*Mode.__members__, *keys.declared(), *(f"{group}={name}" for group, name in _files())]
        near = (*difflib.get_close_matches(topic, known, n=1, cutoff=0.5), keys.nearest(topic, keys.declared()))[0]
        remedy = f"did you mean {near}?" if near else f"e.g. {EXAMPLES}"
        message = "no command, section or key has this name"
        raise ConfigError([Problem(f"help {topic}", "unknown-choice", message, remedy, about="help")])
    return page


def _section(name: str, kind: Any) -> Iterator[Text | Table]:
    if choices := [choice for group, choice in _files() if group == name]:
        yield Text(f"{name}={'|'.join(choices)}")
    if not (kind.__doc__ or "").startswith(f"{kind.__name__}("):  # the docstring that a dataclass gets by itself
        yield Text(" ".join((kind.__doc__ or "").split()))
    hints = {field.name: keys.hint([*name.split("."), field.name]) for field in dataclasses.fields(kind)}
    plain = [field for field, of in hints.items() if not dataclasses.is_dataclass(of)]
    yield _table([_row(f"{name}.{field}", kind, field) for field in plain])
    for field, of in hints.items():
        if dataclasses.is_dataclass(of):
            yield from _section(f"{name}.{field}", of)


def _row(key: str, owner: Any, name: str) -> tuple[str, str]:
    """Returns a key with its default, as it is typed, and its meaning."""
    (field,) = [field for field in dataclasses.fields(owner) if field.name == name]
    of = keys.hint(key.split("."))
    values = [f"- {value}: {text}" if text else f"- {value}" for value, text in meanings_of_values(of).items()]
    readers = field.metadata.get("read_by")
    about = [meaning(owner, field, of), *values, *([f"(used by {', '.join(readers)})"] if readers else [])]
    return f"{key}={keys.default(key)}", "\n".join(filter(None, about)) or keys.describe(of)


def _table(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
    for key, about in rows:
        table.add_row(Text(key), Text(about))
    return table


def _files() -> list[tuple[str, str]]:
    """Returns the group and the name of each shipped file."""
    return [(path.parent.name, path.stem) for path in sorted(sources.conf_dir().glob("*/*.yaml"))]
