"""Finds the calls in a user's file whose results may differ between processes, without executing the file."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

NAMED_AT_MOST = 3

# By a pattern for the end of a call's name: why its result may differ between processes.
WITHOUT_SEED: Mapping[str, str] = {  # only if called without arguments
    r"random\.default_rng|^default_rng": "a generator without a seed, e.g. numpy.random.default_rng(0)",
    r"RandomState|random\.Random|^Random|SeedSequence|PCG64|MT19937|Philox|SFC64": "a generator without a seed",
}
ALWAYS: Mapping[str, str] = {
    r"SystemRandom|os\.urandom|^urandom|secrets\.\w+|uuid[14]|token_\w+": "random bytes from the operating system",
    r"from_non_deterministic_state": "a generator without a seed, e.g. tf.random.Generator.from_seed(0)",
    r"(^|\.)(time|time_ns|perf_counter|monotonic|process_time)|\.(now|today|utcnow)|getm?c?time": "the clock",
    r"os\.getenv|^getenv|environ\.get|getpid|gethostname|gethostbyname|platform\.node|getuser|cpu_count": (
        "differs between processes or machines"
    ),
    r"as_completed|ThreadPool\w*|Thread|ProcessPoolExecutor|imap_unordered|asyncio\.\w+": "threads finish in any order",
}
UNSORTED = r"os\.listdir|^listdir|os\.scandir|^scandir|os\.walk|(^|\.)i?glob|rglob|iterdir"


def suspects(path: str | Path | None) -> list[str]:
    """Lists what in a user's file may give different data in another process: the first few lines, with reasons.

    Returns:
        E.g. "line 12: time.time(...): the clock"; nothing if there is no file, or it cannot be read.
    """
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8-sig")) if path else ast.Module([], [])
    except (OSError, ValueError, SyntaxError):
        return []
    ordered = {id(node) for call in ast.walk(tree) if _name(call) == "sorted" for node in ast.walk(call)}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call | ast.Subscript)]
    lines = {(node.lineno, why) for node in calls for why in _reasons(node, is_sorted=id(node) in ordered)}
    return [f"line {line}: {why}" for line, why in sorted(lines)][:NAMED_AT_MOST]


def _reasons(node: ast.Call | ast.Subscript, *, is_sorted: bool) -> Iterator[str]:
    name = _name(node)
    if isinstance(node, ast.Subscript):
        if re.search(r"(^|\.)environ$", name):
            yield f"{name}[...] differs between processes or machines"
        return
    options = {keyword.arg: keyword.value for keyword in node.keywords}
    named = [why for pattern, why in ALWAYS.items() if re.search(f"({pattern})$", name)]
    if not node.args and not {"seed", "entropy"} & options.keys():
        named += [why for pattern, why in WITHOUT_SEED.items() if re.search(f"({pattern})$", name)]
    if re.search(f"({UNSORTED})$", name) and not is_sorted:
        named.append("lists files in any order: sorted(...)")
    if name.endswith(".shuffle") and "seed" not in options and len(node.args) == 1 and "random" not in name:
        named.append("shuffles without a seed")
    if getattr(options.get("deterministic"), "value", None) is False:
        named.append("deterministic=False lets threads decide the order")
    yield from (f"{name}(...): {why}" for why in named)


def _name(node: ast.AST) -> str:
    """Returns the dotted name that is called or indexed; for a method of an expression, only the last part."""
    target = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else None
    if isinstance(target, ast.Attribute):
        text = ast.unparse(target)
        return text if re.fullmatch(r"[\w.]+", text) else f".{target.attr}"
    return target.id if isinstance(target, ast.Name) else ""
