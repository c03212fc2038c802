"""Errors of data, and the part for users of errors that reading it raises."""

import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.workload.error_text import one_paragraph


class DataError(TrainerError, ValueError):
    """The data cannot be used; the message names the file or data set, the record, its contents and a remedy."""

    exit_code = exit_codes.BAD_DATA


class MissingInputError(DataError):
    """A file does not exist."""

    exit_code = exit_codes.INPUT_MISSING


def find_data_error(error: BaseException) -> DataError | None:
    """Returns the DataError inside an error of `Session.run`, if reading or decoding a batch failed.

    Args:
        error: a `tf.errors.OpError`, or the UnicodeDecodeError that TensorFlow's Python layer raises when the bytes of
            a damaged record are part of its message.
    """
    text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    _, is_own, rest = text.partition("DataError: ")  # raised by one of this package's readers: complete
    if is_own:
        return DataError(_first_part(rest))
    if label := re.search(r"Received a label value of (\S+) which is outside the valid range of \[0, (\d+)\)", text):
        return DataError(
            f"a label is {label[1]}, but the model's {label[2]} outputs are for 0..{int(label[2]) - 1}; correct "
            "the label, or the number of outputs"
        )
    _, marker, rest = text.partition("Error in user-defined function passed to MapDataset")
    if not marker:
        return None
    reason = _first_part(rest.partition("::Map: ")[2] or rest.partition(": ")[2])
    return DataError(f"{reason}; type data.options.verify=true to find all such records")


def _first_part(text: str) -> str:
    """Returns the message without graph nodes and traceback."""
    return text.split("\n\t")[0].split("\nTraceback")[0].strip()


@contextmanager
def users_code(source: str, *, alone: bool = True) -> Iterator[None]:
    """Turns errors of a user's code inside the context into a DataError that names its line.

    Args:
        source: the data being read.
        alone: whether only a user's code runs inside; else errors of the trainer are unchanged.
    """
    try:
        yield
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        own = _users(frames)
        if not own and not alone:
            raise
        # A generator that TensorFlow calls raises in another thread: its traceback is in the error's text.
        own = own or _users(re.findall(r'File "(.+)", line (\d+)', str(error)))
        place = "{}, line {}: ".format(*own[-1]) if own else ""
        raise DataError(f"{source}: {place}{_described(error)}") from error


def is_of_storage(error: BaseException) -> bool:
    """Whether writing or reading a file failed outside the user's code."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return isinstance(error, OSError) and not _users(frames)


def _users(frames: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the (file, line) frames outside this package, installed packages and the standard library."""
    others = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), "<")
    return [one for one in frames if "site-packages" not in one[0] and not one[0].startswith(others)]


def _described(error: BaseException) -> str:
    """Describes the type and message of an error; for TensorFlow, without the graph."""
    if not hasattr(error, "node_def"):
        return one_paragraph(error)
    return f"{type(error).__name__}: " + re.sub(r"\{\{.*?\}\}\s*", "", str(error)).partition("\n")[0]
