"""Formats an error of Keras, TensorFlow or a user's code in one paragraph."""

import re

NOISE = re.compile(
    r"\x1b\[\d+m"  # Keras's colours
    r"|\{\{[^}]*\}\} ?"  # names of nodes
    r"| \[Op:\w+\].*"
    r"|Tried to convert '\w+' to a tensor and failed. Error: "
    r"|Exception encountered when calling .*"
    r"|Could not automatically infer the output shape.*"
)
ARGUMENTS = re.compile(r"^\s*Arguments received by .*", re.MULTILINE | re.DOTALL)


def one_paragraph(error: BaseException) -> str:
    """Returns the type and the text of an error, without Keras's context."""
    words = words_of(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def words_of(error: BaseException) -> str:
    """Returns the text of an error without its type, formatted as by `one_paragraph`."""
    return " ".join(NOISE.sub("", ARGUMENTS.sub("", str(error))).split())


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else ''}"
