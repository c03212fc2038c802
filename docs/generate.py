"""Writes conf/schema.json, and the parts of README.md and docs/ that come from the code and from bench/results.

    python docs/generate.py           write them
    python docs/generate.py --check   only say which are out of date

A generated part stands between two comments, so that the page reads as it is on GitHub.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from trainer.config import json_schema, schema, typed
from trainer.config.comments import comments_of, sentence
from trainer.config.keys import shown
from trainer.faults import exit_codes
from trainer.faults.problems import KINDS

PART = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
BOUNDS = {"at_least": "at least", "above": "above", "at_most": "at most", "below": "below"}
TYPES = {"int": "integer", "float": "number", "bool": "`true` or `false`", "str": "text", "Any": "anything"}


# The config.
def config() -> str:
    """Every key of the schema: one table for each section, then the meaning of its choices."""
    comments = comments_of(schema, typed)
    top = [field for field in dataclasses.fields(typed.TypedConfig) if not _is_section(field)]
    sections = [field for field in dataclasses.fields(typed.TypedConfig) if _is_section(field)]
    parts = ["## Top level", "", *_section(typed.TypedConfig, top, comments)]
    for field in sections:
        parts += _page_of(field.name, _type(typed.TypedConfig, field), comments)
    return "\n".join(parts)


def bench_config() -> str:
    """Every key of `python -m bench`."""
    from bench import config as bench

    fields = dataclasses.fields(bench.BenchConfig)
    comments = comments_of(bench)
    return "\n".join(_section(bench.BenchConfig, fields, comments))


def _page_of(name: str, kind: Any, comments: dict[str, dict[str, str]]) -> Iterator[str]:
    yield from ("", f"## {name}", "")
    doc = (kind.__doc__ or "").strip()
    if not doc.startswith(f"{kind.__name__}("):  # the docstring that a dataclass gets by itself
        yield from (" ".join(doc.split()), "")
    plain = [field for field in dataclasses.fields(kind) if not _is_section(field)]
    yield from _section(kind, plain, comments)
    for field in dataclasses.fields(kind):
        if _is_section(field):
            yield from _page_of(f"{name}.{field.name}", _type(kind, field), comments)


def _section(kind: Any, fields: Sequence[Any], comments: dict[str, dict[str, str]]) -> Iterator[str]:
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    choices = []
    for field in fields:
        of = _type(kind, field)
        meaning = comments[kind.__name__].get(field.name, "")
        if isinstance(of, type) and issubclass(of, Enum):
            choices.append((field.name, of))
            about = sentence(of.__doc__)
            meaning = meaning or about[0].lower() + about[1:]
        if readers := field.metadata.get("read_by"):
            meaning = f"{meaning} (used by {', '.join(readers)})".strip()
        bounds = [(words, field.metadata[name]) for name, words in BOUNDS.items() if name in field.metadata]
        limits = " and ".join(f"{words} {bound}" for words, bound in bounds)
        words, null, _ = _words(of).partition(" or `null`")
        described = f"{words}, {limits}{',' if null else ''}{null}" if limits else f"{words}{null}"
        yield f"| `{field.name}` | {described} | {_default(field)} | {_cell(meaning)} |"
    for name, of in choices:
        yield from ("", f"Values of `{name}`:", "")
        for member in of:
            meaning = comments.get(of.__name__, {}).get(member.name, "")
            yield f"- `{member.name}`" + (f": {_cell(meaning)}" if meaning else "")


def _type(kind: Any, field: Any) -> Any:
    return typing.get_type_hints(kind)[field.name]


def _is_section(field: Any) -> bool:
    return dataclasses.is_dataclass(field.default_factory)


def _words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is dict:
        return f"mapping to {_words(inner[1])}" if inner[1] is not Any else "mapping"
    if origin is list:
        return f"list of {_words(inner[0])}" if inner[0] is not Any else "list"
    if inner:
        return " or ".join("`null`" if part is type(None) else _words(part) for part in inner)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "choice"
    return TYPES[getattr(kind, "__name__", "Any")]


def _default(field: Any) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    elif field.default == "???":
        return "required"
    else:
        value = field.default
    return f"`{shown(value)}`" if value != "" else "empty"


def _cell(text: str) -> str:
    """Text as a cell of a table; what stands in backquotes needs no escape but that of the cell's end."""
    text = text.replace("|", "\\|")
    return text if "`" in text else text.replace("<", "&lt;").replace("*", "\\*")


def groups() -> str:
    """The YAML files of conf/, with what the first comment of each says."""
    parts = ["| group | option | what it sets |", "|---|---|---|"]
    for path in sorted((ROOT / "conf").glob("*/*.yaml")):
        comment = []
        for line in path.read_text().splitlines():
            if line.startswith(("# @package", "# yaml-language-server")):
                continue
            if not line.startswith("#"):
                break
            comment.append(line[1:].strip())
        parts.append(f"| `{path.parent.name}` | `{path.stem}` | {_cell(sentence(' '.join(comment)))} |")
    return "\n".join(parts)


# Exit codes.
def codes() -> str:
    """Every exit code, what it means, and whether the launcher restarts the task."""
    from trainer.launch.restarts import can_help

    parts = ["| code | name | meaning | restarted |", "|---|---|---|---|"]
    constants = {name: value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    for name, code in sorted(constants.items(), key=lambda item: item[1]):
        again = [can_help(code, has_stepped=stepped) for stepped in (False, True)]
        words = {(False, False): "no", (False, True): "after the first step", (True, True): "yes"}[again[0], again[1]]
        done = "done" if code == exit_codes.OK else exit_codes.meaning(code)
        words = "no" if code in (exit_codes.OK, exit_codes.INTERRUPTED, exit_codes.TERMINATED) else words
        parts.append(f"| {code} | `{name}` | {done} | {words} |")
    return "\n".join(parts)


# The folders.
ORDER = ["commands", "launch", "task", "engine", "observe", "workload", "storage", "plan", "config", "faults"]


OTHERS = {
    "conf/": "What can be chosen: cluster, model, data, strategy, optimizer, device, experiment",
    "docs/": "The pages below; `make docs` builds them",
    "compose/": "Clusters of containers: the script behind make cluster-up, and the files of the usual sizes",
    "examples/": "Models and data to start from, each with its YAML: text, tables, time series, images",
    "bench/": "Benchmarks: this trainer beside others, slow links, input",
    "requirements/": "Locked with hashes: cpu, gpu, dev, docs",
    "tests/": "The same folders as in trainer/, then real clusters and containers",
}


def tree() -> str:
    """The folders of the checkout."""
    rows = [(f"trainer/{name}/", _doc(ROOT / "trainer" / name)) for name in ORDER]
    return _tree([*list(OTHERS.items())[:3], *rows, *list(OTHERS.items())[3:]], width=20)


def folders() -> str:
    """The packages of trainer/, two levels deep."""
    packages = sorted((ROOT / "trainer").glob("*/__init__.py"), key=lambda path: ORDER.index(path.parent.name))
    rows = []
    for package in packages:
        for path in [package, *sorted(package.parent.glob("*/__init__.py"))]:
            indent = "" if path == package else "  "
            rows.append((f"{indent}{path.parent.relative_to(ROOT)}/", _doc(path.parent)))
    return _tree(rows, width=32)


def _tree(rows: Sequence[tuple[str, str]], *, width: int) -> str:
    return "\n".join(["```text", *(f"{name:<{width}}{text}" for name, text in rows), "```"])


def _doc(package: Path) -> str:
    """The first part of a package's docstring."""
    return sentence(ast.get_docstring(ast.parse((package / "__init__.py").read_text()))).partition(";")[0]


# Measurements.
WORKLOADS = ["noop", "cnn", "mlp40", "resnet20", "resnet50"]
BETTER = ["sync/local", "sync_2w/local"]
ROWS: dict[str, list[str]] = {
    "a run with itself": ["sync/sync"],
    "sync / `SyncReplicasOptimizer`, tuned": ["sync/sync_replicas_tuned"],
    "sync / `SyncReplicasOptimizer`, tuned; both send": ["sync_f32/sync_replicas_tuned"],
    "sync / `SyncReplicasOptimizer`, as written": ["sync/sync_replicas"],
    "sync on 2 workers / `MultiWorkerMirroredStrategy`, tuned": ["sync_2w/multi_worker_tuned"],
    "sync on 2 workers / `MultiWorkerMirroredStrategy`, as written": ["sync_2w/multi_worker"],
    "all_reduce / `MultiWorkerMirroredStrategy`, tuned": ["all_reduce/multi_worker_tuned"],
    "the better sync / local": BETTER,
    "all_reduce / local": ["all_reduce/local"],
    "async / local": ["async/local"],
    "async / `ParameterServerStrategy`, 10 steps a closure": ["async/parameter_server_10"],
    "async / `ParameterServerStrategy`, 1 step a closure": ["async/parameter_server_1"],
    "local / Keras `fit`, as written": ["local/keras_fit"],
    "local / Keras `fit` with XLA": ["local/keras_fit_xla"],
    "local with `train.jit` / Keras `fit` with XLA": ["local_jit/keras_fit_xla"],
    "sent as bfloat16 / sent as float32": ["sync_bf16/sync_f32"],
    "sync, vectors in shared memory / sent as float32": ["sync/sync_f32"],
    "async, vectors in shared memory / sent as float32": ["async/async_f32"],
}
SHORT = [
    "sync / `SyncReplicasOptimizer`, tuned",
    "sync on 2 workers / `MultiWorkerMirroredStrategy`, tuned",
    "the better sync / local",
]


def benchmarks() -> str:
    """Every comparison, as the 95 % interval of its ratio on each workload, with its target."""
    return _ratios(list(ROWS), shows_targets=True)


def speed() -> str:
    """The comparisons that the README shows."""
    return _ratios(SHORT, shows_targets=False)


def _ratios(titles: Sequence[str], *, shows_targets: bool) -> str:
    results = json.loads((ROOT / "bench/results/results.json").read_text())
    measured = {(row["row"], row["workload"]): row for row in results["rows"]}
    parts = ["| | " + " | ".join(f"`{name}`" for name in WORKLOADS) + " |", "|---" * (len(WORKLOADS) + 1) + "|"]
    for title in titles:
        cells = []
        for workload in WORKLOADS:
            row = max((measured[name, workload] for name in ROWS[title]), key=lambda row: float(row["median"]))
            shows_target = shows_targets and (ROWS[title] == BETTER or row["judged"] != "best")
            cells.append(_interval(row, shows_target=shows_target))
        parts.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(parts)


def kinds() -> str:
    """Every kind of problem, with its meaning."""
    return "\n".join(["| kind | meaning |", "|---|---|", *(f"| `{kind}` | {KINDS[kind]} |" for kind in sorted(KINDS))])


def _interval(row: dict[str, Any], *, shows_target: bool) -> str:
    interval = f"{row['low']:.2f} to {row['high']:.2f}"
    if row["target"] is None or not shows_target:
        return interval
    missed = ", missed" if row["low"] < row["target"] else ""
    return f"{interval} ({row['target']:g}{missed})"


def links() -> str:
    """Milliseconds of a step over a slow link, one row for each link and cluster."""
    rows = json.loads((ROOT / "bench/results/links.json").read_text())["rows"]
    variants = ["float32", "float32, 4 buckets", "bfloat16", "bfloat16, 4 buckets"]
    measured = {(row["link"], row["cluster"], row["variant"]): row for row in rows}
    names = {"1gbit": "1 Gbit/s", "100mbit": "100 Mbit/s"}
    parts = ["| link, cluster | " + " | ".join(variants) + " | float32, at least |", "|---" * 6 + "|"]
    for link, cluster in dict.fromkeys((row["link"], row["cluster"]) for row in rows):
        cells = [f"{measured[link, cluster, variant]['step_ms']:.0f}" for variant in variants]
        cells.append(f"{measured[link, cluster, 'float32']['least_ms']:.0f}")
        parts.append(f"| {names[link]}, `{cluster}` | " + " | ".join(cells) + " |")
    return "\n".join(parts)


PARTS = {
    "config": config,
    "bench-config": bench_config,
    "groups": groups,
    "exit-codes": codes,
    "problems": kinds,
    "folders": folders,
    "tree": tree,
    "benchmarks": benchmarks,
    "speed": speed,
    "links": links,
}


FILES = {"conf/schema.json": json_schema.text}


def main(arguments: Sequence[str]) -> int:
    current = {ROOT / name: make() for name, make in FILES.items()}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        current[page] = PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[3]}", page.read_text())
    stale = []
    for path, text in current.items():
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in arguments:
                path.write_text(text)
    if stale and "--check" in arguments:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
