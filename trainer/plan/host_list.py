"""Reads Slurm's lists of nodes, e.g. `rack[0-1]node[01-12,14],login`. Pure."""

import itertools
import re

from trainer.faults.problems import ConfigError, Problem

NODES_AT_MOST = 65536  # in a list, as in Slurm
TEXT, RANGES = r"[^\s,\[\]]+", r"\[[^\[\]]*\]"
ITEM = re.compile(rf"(?:{TEXT}|{RANGES})+")
RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(names: str, key: str) -> list[str]:
    """Lists the nodes one by one: "node[1-2,07],gpu1" -> ["node1", "node2", "node07", "gpu1"].

    Several brackets in a name give every combination, the last varying fastest. Numbers are padded to the width of
    the first in their range.

    Args:
        key: the variable that holds the list.

    Raises:
        ConfigError: if it is malformed.
    """
    nodes: list[str] = []
    end = 0
    while end < len(names):
        item = ITEM.match(names, end)
        if item is None or names[item.end() : item.end() + 1] not in ("", ","):
            raise _malformed(names, key)
        parts = re.findall(f"{TEXT}|{RANGES}", item[0])
        options = [_numbers(part, names, key) if part.startswith("[") else [part] for part in parts]
        nodes += ["".join(chosen) for chosen in itertools.product(*options)]
        end = item.end() + 1
    if names.endswith(",") or len(nodes) > NODES_AT_MOST:
        raise _malformed(names, key)
    return nodes


def _numbers(ranges: str, names: str, key: str) -> list[str]:
    """Expands a range: "[08-10,3]" -> ["08", "09", "10", "3"]."""
    numbers: list[str] = []
    for text in ranges[1:-1].split(","):
        if not (bounds := RANGE.fullmatch(text)):
            raise _malformed(names, key)
        low, high = int(bounds[1]), int(bounds[2] or bounds[1])
        if not low <= high < low + NODES_AT_MOST:
            raise _malformed(names, key)
        numbers += [f"{number:0{len(bounds[1])}d}" for number in range(low, high + 1)]
    return numbers


def _malformed(names: str, key: str) -> ConfigError:
    message = f"{names!r} is not a list of nodes"
    return ConfigError([Problem(key, "malformed", message, "e.g. node[1-3,07],rack[0-1]node[1-2],login")])
