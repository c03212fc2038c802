"""A problem that a user can fix, with a stable code, and the error that lists several of them."""

import re
from dataclasses import dataclass
from typing import Literal

from trainer.faults.exit_codes import CONFIG, TrainerError

_Names = Literal["unknown-key", "former-key", "unknown-choice", "no-match", "not-found"]
_Values = Literal["wrong-type", "out-of-range", "malformed", "unresolved", "not-set", "not-divisible", "unreadable"]
_Pairs = Literal["conflict", "duplicate", "mismatch", "taken", "no-effect"]
_Limits = Literal["not-supported", "not-available", "over-capacity", "unsafe", "not-allowed", "failed"]
_Warnings = Literal["slow", "depends-on-parts", "doubtful"]
Kind = Literal[_Names, _Values, _Pairs, _Limits, _Warnings]
KINDS: dict[Kind, str] = {
    "unknown-key": "no key, field or flag has this name",
    "former-key": "an earlier version had this key",
    "unknown-choice": "a name that is not among those available",
    "wrong-type": "a value of another type than the key has",
    "out-of-range": "a value outside of the limits of the key",
    "malformed": "text that does not have the form that is needed",
    "unresolved": "a reference `${...}` that cannot be resolved",
    "not-set": "a key or value that is needed and missing",
    "no-effect": "something that is set or present, and that nothing uses",
    "conflict": "two settings that contradict each other",
    "duplicate": "something that is given more than once",
    "not-divisible": "a number that another must divide evenly",
    "mismatch": "two things that should be equal and differ",
    "no-match": "a pattern or a file that matches nothing",
    "not-found": "a file or folder that does not exist",
    "unreadable": "a file or folder that cannot be read or used",
    "taken": "a folder or port that something else uses",
    "not-supported": "a command, launcher, strategy or model that cannot do this",
    "not-available": "something that this machine or installation does not have",
    "over-capacity": "more than there is: of memory, cores, open files, examples",
    "unsafe": "refused because it could run code, reach others' files or be reached by anyone",
    "not-allowed": "cannot be set from the console",
    "failed": "an attempt that failed; the message has its error",
    "slow": "a warning: another setting is probably faster",
    "depends-on-parts": "a warning: the result depends on the number of parts of a batch",
    "doubtful": "a warning: something works, but probably not as intended",
}


@dataclass(frozen=True)
class Problem:
    """One problem of a config: its key and kind, the value, what is allowed, and what to type.

    Its code stays the same when its wording changes.
    """

    key: str  # dotted path of the key, or where a value stands: an override, a file and its line
    kind: Kind
    message: str  # what was given and what is allowed
    remedy: str  # what to type instead
    about: str = ""  # what the code begins with, if not the key: the key of a value, or `override`, `flag`, `file`

    def __str__(self) -> str:
        return f"{self.key}: {self.message}\n    {self.remedy}"

    @property
    def code(self) -> str:
        """Returns the identity of the problem, e.g. train.batch_size/not-divisible; indices of lists are left out."""
        return re.sub(r"\[\d+\]", "", self.about or self.key) + f"/{self.kind}"

    def to_json(self) -> dict[str, str]:
        """Returns the problem for JSON output."""
        return {"code": self.code, "key": self.key, "message": self.message, "remedy": self.remedy}


class ConfigError(TrainerError, ValueError):
    """A config that cannot run, with every problem found in it."""

    exit_code = CONFIG

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
