"""What a launcher and the nursery of a host say to each other first."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Order:
    """What the launcher asks of a host before anything else."""

    host: str  # its name in the config
    run: str  # directory of the run
    token: str  # text of the file TOKEN there, which every host must see
    ports: int = 0  # how many free ones to hold
    held: tuple[int, ...] = ()  # or these, where the tasks of this launch listen already


@dataclass(frozen=True)
class HostFacts:
    """What a host answers."""

    version: str  # of the trainer, Python and the libraries
    code: str  # a digest of the trainer's modules
    cores: int
    gpus: int
    sees_run: bool
    ports: tuple[int, ...]


TOKEN = Path("hosts/token")  # below the run directory; beside it, who each host's nursery is
