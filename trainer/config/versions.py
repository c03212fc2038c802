"""What `--version` prints, and what two machines must have alike; no library is imported for it."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import trainer

LIBRARIES = {"TensorFlow": ("tensorflow", "tensorflow-cpu"), "Keras": ("keras",), "Hydra": ("hydra-core",)}


def describe() -> str:
    """trainer 0.1.0 (Python 3.11.2, TensorFlow 2.21.0, Keras 3.15.0, Hydra 1.3.8)."""
    libraries = [f"{name} {_installed(distributions)}" for name, distributions in LIBRARIES.items()]
    return f"trainer {trainer.__version__} ({', '.join([f'Python {platform.python_version()}', *libraries])})"


def code_hash() -> str:
    """A digest of the trainer's own modules, wherever they are installed."""
    digest = hashlib.sha256()
    package = Path(trainer.__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _installed(distributions: tuple[str, ...]) -> str:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"
