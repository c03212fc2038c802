"""What is printed to be pasted: values in Hydra's grammar, words as a shell reads them; nothing that terminals obey."""

import re
import shlex
from collections.abc import Iterable

# What moves the cursor, changes colours, ends lines or turns text around; lone surrogates stand for bytes of no UTF-8.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LINES = "\n\t"  # that text of several lines may have


def override(key: str, value: str) -> str:
    """An override as a word of the command line; for a shell see `typed`, and `joined`."""
    return f"{key}={quoted(value)}"


def typed(key: str, value: str) -> str:
    """An override as it is typed into a shell."""
    return joined([override(key, value)])


def quoted(value: str) -> str:
    """A text as the value of an override: as it is where Hydra reads just that, else in quotes."""
    if _is_plain(value):
        return value
    # Hydra halves the backslashes before a quote and at the end.
    mark = "'" if '"' in value else '"'  # the one that a shell does not have to escape, where there is a choice
    escaped = re.sub(
        rf"(\\*)({mark}|$)", lambda match: 2 * match[1] + (f"\\{mark}" if match[2] else ""), literal(value)
    )
    return f"{mark}{escaped}{mark}"


def literal(value: str) -> str:
    """A text whose `${` refers to nothing, as OmegaConf reads it: it halves the backslashes before a reference."""
    return re.sub(r"(\\*)\$\{", lambda match: rf"{2 * match[1]}\${{", value)


def _is_plain(value: str) -> bool:
    if "${" in value:
        return False
    from hydra.core.override_parser.overrides_parser import OverridesParser  # here: a task needs no Hydra
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"key={value}").value() == value
    except (HydraException, ValueError):
        return False


def joined(words: Iterable[str]) -> str:
    """A command as a shell reads it, on one line; control characters become escapes in $'...'."""
    return " ".join(map(_word, words))


def _word(word: str) -> str:
    if CONTROL.search(word) is None:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{CONTROL.sub(_escape, escaped)}'"


def printable(text: str) -> str:
    """A text of lines with all other control characters as escapes."""
    return CONTROL.sub(lambda match: match[0] if match[0] in LINES else _escape(match), text)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if "\udc80" <= character <= "\udcff":  # a byte, as Python holds it
        return f"\\x{ord(character) - 0xDC00:02x}"
    return {"\n": "\\n", "\t": "\\t"}.get(character) or (
        f"\\x{ord(character):02x}" if character < "\x80" else f"\\u{ord(character):04x}"
    )
