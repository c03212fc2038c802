"""The first message from the launcher to a host."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NurseryOrder:
    """The settings of a host's nursery."""

    host: str  # its name in the config
    run: str  # directory of the run
    token: str  # text of the file TOKEN there, which every host must see
    ports: int = 0  # how many free ones to hold
    held: tuple[int, ...] = ()  # or these, where the tasks of this launch listen already


TOKEN = Path("hosts/token")  # below the run directory; beside it, who each host's nursery is
