"""The times at which the phases of a worker's step, or of a host's update, ended. Pure."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

# Unix time, seconds: of the task's own clock; or by task, of the clock of each: "ps:0", of further shards "ps:0/1".
Moment = float | Mapping[str, float]


class Stamps(NamedTuple):
    """The times of one step, from call to return; a phase begins when the previous one ended."""

    began: float  # Unix time, seconds
    ended: float
    ends: Mapping[str, Moment]  # by phase, in their order; of several tasks: it ends with the last of them
    arrived: Mapping[str, float] = MappingProxyType({})  # of an update: when the gradient of each worker arrived
