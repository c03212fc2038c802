"""The invariants of a run's journals; every violation is reported as a sentence. Pure.

The entries are those of the journals (trainer/storage/journal.py), each task's in the order in which it wrote them.
Which update a step has in the end follows from the reloads: a later generation that was loaded at a lower step replaces
what an earlier one did after it.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import PurePath

from trainer.config.words import count
from trainer.storage.journal import Adopt, Entry, Join, Load, Push, Reload, Save, TaskExit, TaskStart, Update

Reloads = Mapping[int, int]  # the step that each generation was loaded at
Gradient = tuple[int, int, int]  # generation, step, replica


def reloads_of(chief: Sequence[Entry]) -> dict[int, int]:
    return {entry.generation: entry.step for entry in chief if isinstance(entry, Reload)}


def standing(reloads: Reloads, step: int) -> int | None:
    """Returns the generation whose update of a step was not undone; None if it is older than the journal."""
    return max((generation for generation, loaded in reloads.items() if loaded < step), default=None)


def check_history(steps: Sequence[int], *, begin: int, end: int, every: int, last: int | None) -> list[str]:
    """Checks the lines of history.jsonl: one for every due step from `begin` to `end`, and none twice.

    Lines up to `begin` are of an earlier run. The step `last` has a line, due or not; none: the run was stopped before.
    """
    falls = [f"a line of step {b} follows one of step {a}" for a, b in itertools.pairwise(steps) if b <= a]
    due = {step for step in range(begin + 1, end + 1) if step % every == 0 or step == last}
    found = {step for step in steps if step > begin}
    missing = [f"no line for {ranges(due - found, 'step')}"] if due - found else []
    undue = [f"an unexpected line for {ranges(found - due, 'step')}"] if found - due else []
    return falls + missing + undue


def check_pushes(
    workers: Iterable[Sequence[Entry]], reloads: Reloads, *, replicas: int, begin: int, end: int
) -> list[str]:
    """Checks that every update that was not undone has a gradient of each replica, computed in its generation.

    `workers` are the entries of each. A launch before the last one, which began at `begin`, may have recorded none.
    """
    if not reloads:
        return ["no reload is recorded, so updates that were undone cannot be recognised"]
    own = [entry for entries in workers for entry in entries if isinstance(entry, Join | Push)]
    found = _pushes(own) | _lost_pushes(own, reloads)
    recorded = {generation for generation, *_ in found}
    lacking: dict[tuple[int, int], set[int]] = {}
    for step in range(min(reloads.values()) + 1, end + 1):
        generation = standing(reloads, step)
        assert generation is not None
        is_known = step > begin or generation in recorded
        for replica in range(replicas):
            if is_known and (generation, step - 1, replica) not in found:
                lacking.setdefault((generation, replica), set()).add(step)
    return [
        f"{ranges(steps, 'update')} of generation {generation} had no gradient of replica {replica}"
        for (generation, replica), steps in sorted(lacking.items())
    ]


def _pushes(entries: Iterable[Join | Push]) -> set[Gradient]:
    return {
        (entry.generation, entry.step, replica)
        for entry in entries
        if isinstance(entry, Push)
        for replica in entry.replicas
    }


def _lost_pushes(entries: Sequence[Join | Push], reloads: Reloads) -> set[Gradient]:
    """Returns what workers pushed just before they died and could not record, although the update was made.

    Under sync, nothing else explains that a successor, or another worker that stands in, joins one step later: no step
    completes without the worker.
    """
    due = {(entry.step + isinstance(entry, Push), replica) for entry in entries for replica in entry.replicas}
    joined = {(entry.step, replica) for entry in entries if isinstance(entry, Join) for replica in entry.replicas}
    lost = {(step, replica) for step, replica in due if (step + 1, replica) in joined}
    return {(generation, step, replica) for step, replica in lost if (generation := standing(reloads, step + 1))}


def check_host(name: str, entries: Iterable[Entry], reloads: Reloads) -> list[str]:
    """Checks that a shard's steps are consecutive, and go back only by a load that a reload announced."""
    problems: list[str] = []
    generation, step = 0, None
    for entry in entries:
        if isinstance(entry, Load):
            problems += _check_load(name, entry, reloads, above=generation)
            generation, step = entry.generation, entry.step
        elif isinstance(entry, Update):
            if step is None or entry.generation != generation:
                problems.append(f"{name} made update {entry.step} without loading generation {entry.generation}")
            elif entry.step != step + 1:
                problems.append(f"{name} went from step {step} to step {entry.step} without loading a checkpoint")
            generation, step = entry.generation, entry.step
    return problems


def check_host_end(name: str, entries: Sequence[Entry], end: int) -> list[str]:
    """Checks that the last step of a shard is that of the run."""
    last = next((one.step for one in reversed(entries) if isinstance(one, Load | Update)), None)
    return [] if last == end else [f"{name} ended at step {last}, but the run at {end}"]


def _check_load(name: str, load: Load, reloads: Reloads, *, above: int) -> list[str]:
    generation, step = load.generation, load.step
    problems = [] if generation > above else [f"{name} loaded generation {generation} after generation {above}"]
    if generation not in reloads:
        return [
            *problems,
            f"{name} loaded generation {generation} at step {step}, but the chief announced no such reload",
        ]
    if reloads[generation] != step:
        announced = f"the chief announced step {reloads[generation]}"
        return [*problems, f"{name} loaded generation {generation} at step {step}, but {announced}"]
    return problems


def check_chief(entries: Iterable[Entry]) -> list[str]:
    """Checks that generations rise, each from a checkpoint of its step, and that the chief saves the last loaded."""
    problems: list[str] = []
    loaded, saved = 0, 0  # the generation, and the step
    for entry in entries:
        match entry:
            case Reload(generation, step):
                problems += _check_source(entry)
                if generation <= loaded:
                    problems.append(f"generation {generation} was loaded after generation {loaded}")
                loaded, saved = generation, step
            case Adopt(generation) if generation != loaded:
                was_last = f"generation {loaded} was the last one loaded"
                problems.append(f"the chief took over generation {generation}, but {was_last}")
            case Save(generation, step):
                if generation != loaded:
                    saved_by = f"step {step} was saved by generation {generation}"
                    problems.append(f"{saved_by} while generation {loaded} was the last")
                elif step < saved:
                    problems.append(f"step {step} of generation {generation} was saved after step {saved}")
                saved = step
    return problems


def _check_source(reload: Reload) -> list[str]:
    generation, step, source = reload.generation, reload.step, reload.checkpoint
    if source is None:
        return [f"generation {generation} began without a checkpoint, but at step {step}"] if step else []
    name = PurePath(source).name
    if name.isdigit() and int(name) != step:  # the user's own name says nothing
        return [f"generation {generation} began at step {step}, from the checkpoint {source}"]
    return []


def check_lives(launcher: Iterable[Entry], tasks: Collection[str], *, good: Collection[int]) -> list[str]:
    """Checks that no task had two processes at once, that each ended, and the last with a `good` exit code.

    A first attempt begins a new launch, when no process of an earlier one was left.
    """
    problems: list[str] = []
    alive: dict[str, int] = {}  # each task's current attempt
    codes: dict[str, int] = {}
    for entry in launcher:
        match entry:
            case TaskStart(task, attempt):
                if task in alive and attempt > 0:
                    running = f"while attempt {alive[task]} was still running"
                    problems.append(f"{task} was started as attempt {attempt} {running}")
                alive[task] = attempt
            case TaskExit(task, code):
                if task not in alive:
                    problems.append(f"{task} exited with code {code}, but had not been started")
                alive.pop(task, None)
                codes[task] = code
    problems += [f"attempt {attempt} of {task} never ended" for task, attempt in alive.items()]
    problems += [f"{task} was never started" for task in tasks if task not in alive and task not in codes]
    ended = {task: code for task, code in codes.items() if task not in alive}
    return problems + [f"{task} exited with code {code}" for task, code in ended.items() if code not in good]


def ranges(steps: Collection[int], what: str) -> str:
    """Formats steps: `step 7`; `3 steps: 1-2, 9`."""
    ordered = sorted(steps)
    if len(ordered) == 1:
        return f"{what} {ordered[0]}"
    starts = [i for i, step in enumerate(ordered) if i == 0 or step != ordered[i - 1] + 1]
    spans = [(ordered[a], ordered[b - 1]) for a, b in itertools.pairwise([*starts, len(ordered)])]
    return f"{count(len(ordered), what)}: " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
