"""Writes export/README.md, which says what an exported model is, how to use it, and how it was made."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.config import shell, versions
from trainer.config.schema import RunConfig
from trainer.plan.serialize import to_json
from trainer.storage.atomic import write_atomically
from trainer.storage.json_lines import lines
from trainer.workload.data.examples import leaves_of
from trainer.workload.keras_file import needs_of
from trainer.workload.serving import Served

KERAS = "model.keras"
FILES = {
    "saved_model": "for TensorFlow Serving and `tf.saved_model.load`: raw examples in, predictions out",
    "model.onnx": "the same for ONNX Runtime",
    "model.tflite": "the same for LiteRT",
    KERAS: "for `keras.models.load_model`: takes the features that it was trained on",
    "model.weights.h5": "for `load_weights` of the same model",
    "params.npz": "each parameter and frozen weight by its path",
    "tables": "an array for each embedding whose rows lay on the shard hosts",
}


def write(folder: Path, config: RunConfig, facts: Mapping[str, Any], served: Served | None, event_log: Path) -> None:
    """Writes README.md.

    Args:
        folder: of the export.
        facts: "steps", "params_sha256" and scores, as summary.json has them.
        served: what the served formats take and return, if there are any.
        event_log: of the run, which names its commands.
    """
    folder.mkdir(parents=True, exist_ok=True)  # the model's code may have removed it
    text = "\n".join(_page(folder, config, facts, served, event_log)) + "\n"
    write_atomically(folder / "README.md", text)


def remove_files(folder: Path) -> None:
    """Removes an earlier export."""
    for name in FILES:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _page(
    folder: Path, config: RunConfig, facts: Mapping[str, Any], served: Served | None, event_log: Path
) -> Iterator[str]:
    yield f"# {config.name}: {config.model.name}, trained on {config.data.name}"
    yield ""
    files = {name: what for name, what in FILES.items() if (folder / name).exists()}
    if KERAS in files:
        files[KERAS] += needs_of(folder / KERAS).describe()
    yield from _table(("file", "what it is"), [(f"`{name}`", what) for name, what in files.items()])
    if served is not None:
        yield from _of_served(served)
    yield "## Result"
    yield ""
    scores = {name: value for name, value in facts.items() if name.startswith("eval_")}
    yield from _table(
        ("", ""), [("steps", facts["steps"]), *((name, f"{value:.6g}") for name, value in scores.items())]
    )
    yield "## Origin"
    yield ""
    chosen = to_json(config)
    commands = dict.fromkeys(shell.joined(event["command"]) for event in lines(event_log) if "command" in event)
    yield from _table(
        ("", ""),
        [
            *((group, _said(chosen[group])) for group in ("model", "data", "optimizer")),
            ("strategy", f"{facts.get('strategy', '')} on {facts.get('cluster', '')}"),
            ("seed", config.seed),
            ("params_sha256", f"`{facts['params_sha256']}`"),
            ("made with", versions.describe()),
        ],
    )
    if commands:
        yield from ("```bash", *commands, "```")


def _of_served(served: Served) -> Iterator[str]:
    yield "## Inputs and outputs"
    yield ""
    inputs = [(f"`{served.names[name]}`", one.dtype, list(one.shape)) for name, one in leaves_of(served.inputs)]
    yield from _table(("input", "type", "shape of an example"), inputs)
    yield from _table(("output", "what it is"), [(f"`{name}`", what) for name, what in served.outputs.items()])
    if served.classes:
        yield f"Classes: {', '.join(served.classes)}."
        yield ""


def _said(group: Mapping[str, Any]) -> str:
    """Returns a name and its options."""
    options = group.get("options") or {}
    said = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f"{group['name']}{f' ({said})' if said else ''}".replace("|", "\\|")


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(map(str, row))} |"
    yield ""
