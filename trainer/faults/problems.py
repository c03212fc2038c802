"""A problem that a user can fix, and the error that lists several of them."""

from dataclasses import dataclass

from trainer.faults.exit_codes import CONFIG, TrainerError


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a config: where, what was given, what is allowed, what to type."""

    key: str  # dotted path of the key, an override or a file
    message: str  # what was given and what is allowed
    remedy: str  # what to type instead

    def __str__(self) -> str:
        return f"{self.key}: {self.message}\n    {self.remedy}"


class ConfigError(TrainerError, ValueError):
    """A config that cannot run, with every problem found in it."""

    exit_code = CONFIG

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems
