"""Formats text to be pasted: values in Hydra's grammar, words quoted for a shell, control characters escaped."""

import re
import shlex
from collections.abc import Iterable

# Characters that move the cursor, change colours, end lines or reverse text; lone surrogates are bytes outside UTF-8.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LINES = "\n\t"  # allowed in text of several lines


def override(key: str, value: str) -> str:
    """Returns an override as one argument of a command line; for a shell, use `typed` or `joined`."""
    return f"{key}={quoted(value)}"


def typed(key: str, value: str) -> str:
    """Returns an override as it is typed into a shell."""
    return joined([override(key, value)])


def quoted(value: str) -> str:
    """Returns a text as the value of an override: unchanged if Hydra reads it back as such, otherwise in quotes."""
    if _is_plain(value):
        return value
    # Hydra halves the backslashes before a quote and at the end.
    mark = "'" if '"' in value else '"'  # if possible, the one that a shell need not escape
    escaped = re.sub(
        rf"(\\*)({mark}|$)", lambda match: 2 * match[1] + (f"\\{mark}" if match[2] else ""), literal(value)
    )
    return f"{mark}{escaped}{mark}"


def literal(value: str) -> str:
    """Escapes `${` for OmegaConf, so that it is not a reference; OmegaConf halves the backslashes before one."""
    return re.sub(r"(\\*)\$\{", lambda match: rf"{2 * match[1]}\${{", value)


def _is_plain(value: str) -> bool:
    if "${" in value:
        return False
    from hydra.core.override_parser.overrides_parser import OverridesParser  # here: tasks do not need Hydra
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(f"key={value}").value() == value
    except (HydraException, ValueError):
        return False


def joined(words: Iterable[str]) -> str:
    """Returns a command for a shell, on one line; control characters become escapes in $'...'."""
    return " ".join(map(_word, words))


def _word(word: str) -> str:
    if CONTROL.search(word) is None:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{CONTROL.sub(_escape, escaped)}'"


def printable(text: str) -> str:
    """Escapes all control characters in a text except those in LINES."""
    return CONTROL.sub(lambda match: match[0] if match[0] in LINES else _escape(match), text)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    if "\udc80" <= character <= "\udcff":  # an undecodable byte, as Python represents it
        return f"\\x{ord(character) - 0xDC00:02x}"
    return {"\n": "\\n", "\t": "\\t"}.get(character) or (
        f"\\x{ord(character):02x}" if character < "\x80" else f"\\u{ord(character):04x}"
    )
