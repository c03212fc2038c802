"""trainer schema: prints the JSON schema of the config, for editors that check YAML files."""

from trainer.config import json_schema
from trainer.faults import exit_codes


def run() -> int:
    """Prints the schema; returns 0."""
    print(json_schema.text(), end="")
    return exit_codes.OK
