"""Checks that a task reads the data that the plan was made for, by its lengths, structure and a few examples."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.plan.serialize import to_json

USUAL = (
    "data must not depend on the process: on random numbers without a seed, the clock, the environment, threads, or "
    "the order of os.listdir and glob; save random values in a file, or use a seed, e.g. numpy.random.default_rng(0)"
)


@dataclass(frozen=True)
class PartFingerprint:
    """Identifies the examples of one part of a data set."""

    examples: int  # 0: unknown, as for a stream
    structure: str  # of an example
    sample: str  # digest of a fixed sample of examples


Fingerprint = Mapping[str, PartFingerprint]  # by part: train, evaluate


class OtherDataError(TrainerError):
    """The same config gives different data in another process."""

    exit_code = exit_codes.BAD_DATA


def digest(fingerprint: Fingerprint) -> str:
    """Returns a short digest; empty for a plan that was made without fingerprints."""
    text = json.dumps(to_json(fingerprint), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if fingerprint else ""


def describe_source(data: str, user: str | None) -> str:
    """Names a data set in a message."""
    return f"data={data}" + (f" of {user}" if user else "")


def check_same(
    expected: Fingerprint, actual: Fingerprint, *, source: str, whose: str, suspects: Sequence[str], remedy: str = ""
) -> None:
    """Compares the data of this process with that of another.

    Args:
        expected: nothing is compared if it has no parts.
        source: the data set, for the message.
        whose: completes the sentence "differs from what ...".
        suspects: possible causes in the user's file.
        remedy: what else to do.

    Raises:
        OtherDataError: if they differ.
    """
    for part in [part for part in expected if part in actual]:
        if difference := _difference(expected[part], actual[part]):
            cause = "the cause may be " + "; ".join(suspects) if suspects else USUAL
            what_to_do = "; ".join(filter(None, [cause, remedy]))
            raise OtherDataError(f"{source}: {part} differs from what {whose}: {difference}; {what_to_do}")


def _difference(expected: PartFingerprint, actual: PartFingerprint) -> str:
    if expected.structure != actual.structure:
        return f"an example is {actual.structure} instead of {expected.structure}"
    if expected.examples != actual.examples:
        return f"{actual.examples} examples instead of {expected.examples}"
    return "" if expected.sample == actual.sample else "the values, or their order, differ"
