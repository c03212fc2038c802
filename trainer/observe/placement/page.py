"""Where a run ran, as one HTML page that needs nothing else: no scripts, no fonts, no other files. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from trainer.config.words import count, size
from trainer.observe.placement.differences import differences
from trainer.observe.placement.executed import COMPILED, Operation
from trainer.observe.placement.record import STEP, UPDATE, Record, layers, replicas, vectors
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan

FIRST_HUE, GOLDEN_ANGLE = 250.0, 137.508  # degrees; neighbours in the legend are far apart, for any number of devices
SCOPE_DEPTH = 4  # "replica0/gradient_tape/model/dense_1"
CALLS = ("PartitionedCall", "StatefulPartitionedCall")
STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #626a73; --line: #e2e5e9; --page: #fff; --tint: #f5f6f8;
        --good: #18794e; --bad: #c62a2f; --lightness: 58%; --wash: 93%; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #9aa2ab; --line: #30353b; --page: #14171a; --tint: #1c2024;
          --good: #4cc38a; --bad: #ff7f85; --lightness: 72%; --wash: 30%; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 72rem; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1, h2, h3 { line-height: 1.25; margin: 0; }
h1 { font-size: 1.7rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .7rem; }
h3 { font-size: 1rem; margin: 1.4rem 0 .4rem; }
header p { margin: .3rem 0 1.2rem; color: var(--soft); }
small, .note, .count { color: var(--soft); font-weight: normal; font-size: .87rem; }
code, pre, .chip { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .82rem; }
nav { display: flex; flex-wrap: wrap; gap: 1.1rem; margin-top: 1rem; font-size: .9rem; }
nav a { color: var(--soft); }
.verdict { border-left: .3rem solid; border-radius: .3rem; background: var(--tint); padding: .8rem 1.1rem; }
.verdict h2 { margin: 0; } .verdict p { margin: .2rem 0 0; } .verdict ul { margin: .5rem 0 0; padding-left: 1.2rem; }
.verdict li { overflow-wrap: anywhere; } .good { border-color: var(--good); } .bad { border-color: var(--bad); }
.good h2 { color: var(--good); } .bad h2 { color: var(--bad); }
.told { white-space: nowrap; }
.chip { padding: .1rem .45rem .1rem 1.25rem; border-radius: .3rem; position: relative;
        background: oklch(var(--wash) .04 var(--hue)); }
.chip::before { content: ""; position: absolute; left: .4rem; top: 50%; width: .55rem; height: .55rem;
                margin-top: -.275rem; border-radius: .15rem; background: oklch(var(--lightness) .16 var(--hue)); }
.bar { display: flex; gap: 1px; width: 100%; min-width: 7rem; height: .6rem; border-radius: .2rem; overflow: hidden;
       background: var(--line); }
.bar i { background: oklch(var(--lightness) .16 var(--hue)); min-width: 2px; }
#devices > .bar { height: 1.4rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .5rem 1.4rem; padding: 0; margin: .8rem 0 .3rem; }
.note { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 600; font-size: .82rem; color: var(--soft); }
th, td { padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: baseline; }
td:last-child:has(> .bar) { width: 22%; padding-right: 0; }
td { line-height: 1.7; } td:not(:has(.told)) { white-space: nowrap; }
th.number { width: 8rem; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
details summary { cursor: pointer; }
.device { border: 1px solid var(--line); border-radius: .4rem; margin: .4rem 0; padding: .4rem .8rem; }
.scope { margin: .15rem 0 .15rem 1rem; }
.scope summary { display: grid; grid-template-columns: 1fr 4rem 12rem; align-items: center; gap: .8rem; }
.scope summary code { overflow-wrap: anywhere; } .scope summary code::before { content: "▸ "; color: var(--soft); }
.scope[open] summary code::before { content: "▾ "; }
.scope .count { text-align: right; }
pre { margin: .3rem 0 .6rem; padding: .6rem .8rem; overflow-x: auto; background: var(--tint); border-radius: .3rem; }
@media (max-width: 40rem) { .scope summary { grid-template-columns: 1fr 3rem; } .scope .bar { display: none; } }
"""


class Colors:
    """One colour a device, in the order of the plan."""

    def __init__(self, devices: Iterable[str]) -> None:
        self.hues = {device: (FIRST_HUE + i * GOLDEN_ANGLE) % 360 for i, device in enumerate(devices)}

    def style(self, device: str) -> str:
        return f"--hue:{self.hues[device]:.0f}"

    def chip(self, device: str, told: str = "") -> str:
        name = (
            f'<span class="chip" style="{self.style(device)}" title="{escape(device)}">{escape(_spoken(device))}</span>'
        )
        return f'<span class="told">{name}{told}</span>'

    def chips(self, counts: Mapping[str, int]) -> str:
        return " ".join(self.chip(d, f' <span class="count">{count:,}</span>') for d, count in counts.items())

    def bar(self, counts: Mapping[str, float], total: float) -> str:
        """A bar of `total`, filled with each device's share in its colour."""
        parts = (
            f'<i style="{self.style(device)};width:{100 * count / total:.2f}%" title="{escape(_spoken(device))}"></i>'
            for device, count in counts.items()
        )
        return f'<span class="bar">{"".join(parts)}</span>' if total else ""


def page(records: Sequence[Record], plan: Plan) -> str:
    """The page of all records that there are.

    Args:
        records: in the order of the plan's tasks.
    """
    counts = _counts(records)
    colors = Colors(counts)
    sections = [
        ("Devices", _devices(counts, colors)),
        ("Tasks", _tasks(records, plan, colors)),
        ("Parameters", _parameters(records, plan, colors)),
        ("Replicas", _replicas(records, plan, colors)),
        ("Layers", _layers(records, plan, colors)),
        ("Transfers", _transfers(records, colors)),
        ("Operations", "".join(_operations(record, colors) for record in records)),
    ]
    shown = [(title, body) for title, body in sections if body]
    links = "".join(f'<a href="#{title.lower()}">{title}</a>' for title, _ in shown)
    bodies = "".join(f'<section id="{title.lower()}"><h2>{title}</h2>{body}</section>' for title, body in shown)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Where {escape(plan.cluster)} ran</title><style>\n{STYLE.lstrip()}</style></head>\n<body>"
        f"<header><h1>Where it ran</h1><p><b>{escape(plan.cluster)}</b>: {escape(plan.describe())}</p></header>\n"
        f"{_verdict(records, plan)}\n<nav>{links}</nav>\n{bodies}</body></html>\n"
    )


def _verdict(records: Sequence[Record], plan: Plan) -> str:
    found = [(record, told) for record in records for told in differences(record, plan)]
    missing = _missing(records, plan)
    absent = f"<p>Not yet told: {escape(', '.join(missing))}.</p>" if missing else ""
    if not found:
        checked = sum(o.computes for record in records for o in record.operations)
        told = (
            f"{checked:,} computing operations and every shard were looked at, in the graphs that TensorFlow executed."
        )
        title = "As planned" if not missing else "As planned, so far"
        return f'<div class="verdict good"><h2>{title}</h2><p>{told}</p>{absent}</div>'
    items = "".join(f"<li><b>{escape(record.task)}</b> {escape(told)}</li>" for record, told in found)
    title = "1 difference from the plan" if len(found) == 1 else f"{len(found)} differences from the plan"
    return f'<div class="verdict bad"><h2>{title}</h2><ul>{items}</ul>{absent}</div>'


def _missing(records: Sequence[Record], plan: Plan) -> list[str]:
    """Tasks of which a record is still to come."""
    seen = {(record.task, record.run) for record in records}
    due = [(task.name, STEP) for task in plan.workers] + [(host, UPDATE) for host in plan.hosts]
    return [f"{task}, one {run}" for task, run in due if (task, run) not in seen]


def _counts(records: Sequence[Record]) -> dict[str, int]:
    """Operations by device: of the tasks in their order, then of what else there is."""
    counts = Counter(o.device for record in records for o in record.operations)
    for record in records:
        counts.update({device: 0 for t in record.transfers for device in (t.source, t.target)})
    return dict(sorted(counts.items()))


def _devices(counts: Mapping[str, int], colors: Colors) -> str:
    total = sum(counts.values())
    keys = "".join(f"<li>{colors.chip(d, f' <b>{n:,}</b> {n / max(total, 1):.0%}')}</li>" for d, n in counts.items())
    note = "Operations that ran in one step of every worker and one update of every shard."
    return f'{colors.bar(counts, total)}<ul class="legend">{keys}</ul><p class="note">{note}</p>'


def _tasks(records: Sequence[Record], plan: Plan, colors: Colors) -> str:
    most = max((len(record.operations) for record in records), default=0)
    rows = []
    for task in plan.tasks:
        own = [record for record in records if record.task == task.name]
        held = [f"shard {shard.index}" for shard in plan.shards if shard.host == task.name]
        what = ", ".join([*(["chief"] if task.is_chief else []), *held])
        for number, record in enumerate(own):
            counts = {device: len(operations) for device, operations in record.devices.items()}
            first = [f"<b>{task.name}</b>", escape(what)] if number == 0 else ["", ""]
            rows.append([*first, f"one {record.run}", colors.chips(counts), colors.bar(counts, most)])
        if not own:
            rows.append([f"<b>{task.name}</b>", escape(what), '<span class="note">no record</span>', "", ""])
    return _table(["task", "role", "record of", "operations by device", ""], rows)


def _parameters(records: Sequence[Record], plan: Plan, colors: Colors) -> str:
    total = sum(4 * piece.size for shard in plan.shards for piece in (*shard.trainable, *shard.state))
    return "".join(_shard(shard, records, plan, colors, total) for shard in plan.shards)


def _shard(shard: Shard, records: Sequence[Record], plan: Plan, colors: Colors, total: int) -> str:
    own = [record for record in records if shard.host in (record.task, "worker")] or records
    where = dict.fromkeys(o.device for record in own for o in vectors(record, plan, shard))
    device, pieces = next(iter(where), None), [*shard.trainable, *shard.state]
    nbytes = sum(4 * piece.size for piece in pieces)
    rows = []
    for piece in pieces:
        kind = " (state)" if piece in shard.state else ""
        part = f" floats {piece.begin:,} to {piece.begin + piece.size - 1:,}" if piece.is_part else ""
        shape = "×".join(map(str, piece.shape)) or "scalar"
        bar = colors.bar({device: 4 * piece.size}, total) if device else ""
        rows.append([f"<code>{escape(piece.path)}</code>{kind}{part}", shape, size(4 * piece.size), bar])
    chips = " ".join(map(colors.chip, where)) or "not seen"
    share = f"{nbytes / max(total, 1):.0%} of the parameters"
    held = count(len(pieces), "parameter")
    return (
        f"<h3>shard {shard.index} {chips} <small>{held}, {size(nbytes)}, {share}</small></h3>"
        f"{_table(['parameter', 'shape', 'bytes', ''], rows, numbers=(1, 2))}"
    )


def _replicas(records: Sequence[Record], plan: Plan, colors: Colors) -> str:
    rows = []
    for record in records:
        for replica in replicas(record, plan):
            count = sum(replica["devices"].values())
            forward, backward = f"{count - replica['backward']:,}", f"{replica['backward']:,}"
            if replica["compiled"]:
                forward, backward = f"{replica['compiled']:,} in one, compiled by XLA", ""
            ran = colors.chips(replica["devices"])
            planned = f"<code>{escape(_spoken(replica['planned'] or 'not planned'))}</code>"
            rows.append([f"<b>replica {replica['index']}</b>", record.task, planned, ran, forward, backward])
    return _table(["", "task", "planned on", "ran on", "forward", "backward"], rows, numbers=(4, 5)) if rows else ""


def _layers(records: Sequence[Record], plan: Plan, colors: Colors) -> str:
    told: dict[str, tuple[str, Counter[str]]] = {}
    for record in records:
        for layer in layers(record, plan):
            told.setdefault(layer["path"], (layer["planned"] or "", Counter()))[1].update(layer["devices"])
    most = max((sum(devices.values()) for _, devices in told.values()), default=0)
    rows = [
        [
            f"<code>{escape(path)}</code>",
            f"<code>{escape(pin)}</code>" if pin else '<span class="note">as its replica</span>',
            colors.chips(dict(sorted(devices.items()))) or '<span class="note">no operation of its own</span>',
            colors.bar(dict(sorted(devices.items())), most),
        ]
        for path, (pin, devices) in told.items()
    ]
    return _table(["layer", "pinned to", "ran on", ""], rows) if rows else ""


def _transfers(records: Sequence[Record], colors: Colors) -> str:
    rows = []
    for record in records:
        for source, target, tensors in record.transfers:
            names = _fold(count(len(tensors), "tensor"), f"<pre>{escape(chr(10).join(tensors))}</pre>")
            kind = "between tasks" if _task_of(source) != _task_of(target) else "inside the task"
            rows.append([record.task, record.run, colors.chip(source), "→ " + colors.chip(target), kind, names])
    return _table(["task", "in its", "from", "to", "", "tensors"], rows) if rows else ""


def _operations(record: Record, colors: Colors) -> str:
    blocks = []
    for device, operations in record.devices.items():
        scopes = _by_scope(operations)
        most = max(map(len, scopes.values()))
        lists = "".join(
            _fold(
                f'<code>{escape(scope or "(no scope)")}</code><span class="count">{len(held):,}</span>'
                + colors.bar({device: len(held)}, most),
                f"<pre>{escape(chr(10).join(_lines(held)))}</pre>",
                "scope",
            )
            for scope, held in scopes.items()
        )
        told = f" <b>{len(operations):,}</b> in {count(len(scopes), 'scope')}"
        blocks.append(_fold(colors.chip(device, told), lists, "device"))
    return f"<h3>{escape(record.task)} <small>one {record.run}</small></h3>{''.join(blocks)}"


def _lines(operations: Sequence[Operation]) -> Iterator[str]:
    width = max(len(o.type) for o in operations)
    for o in operations:
        held = f"  ({o.holds} operations in one)" if o.type == COMPILED and o.holds else ""
        yield f"{o.type:<{width}}  {o.name}{held}"


def _by_scope(operations: Sequence[Operation]) -> dict[str, list[Operation]]:
    """Operations by scope; where none of a scope computes, they are listed with those around them."""
    scopes: dict[str, list[Operation]] = {}
    for operation in operations:
        # A call is no scope.
        parts = [part for part in operation.name.split("/")[:-1] if part not in CALLS]
        scopes.setdefault("/".join(parts[:SCOPE_DEPTH]), []).append(operation)
    for scope in sorted(scopes, key=lambda scope: -scope.count("/")):
        if scope and not any(o.computes for o in scopes[scope]):
            scopes.setdefault(scope.rpartition("/")[0], []).extend(scopes.pop(scope))
    return {scope: sorted(held) for scope, held in sorted(scopes.items())}


def _fold(summary: str, body: str, kind: str = "") -> str:
    return f'<details class="{kind}"><summary>{summary}</summary>{body}</details>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """A table of HTML cells; the columns `numbers` are aligned right."""
    names = "".join(f"<th{' class=number' if i in numbers else ''}>{name}</th>" for i, name in enumerate(head))
    lines = "".join(
        "<tr>"
        + "".join(f"<td{' class=number' if i in numbers else ''}>{c}</td>" for i, c in enumerate(row))
        + "</tr>\n"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>\n{lines}</tbody></table></div>'


def _spoken(device: str) -> str:
    """A device beside its task, as everything else names it: "/job:ps/task:0/cpu:0" -> "ps:0 /cpu:0"."""
    return re.sub(r"^/job:([^/]+)/task:(\d+)", r"\1:\2 ", device)


def _task_of(device: str) -> str:
    return device.rpartition("/")[0]
