"""Returns the versions that `--version` prints and that machines must share, without importing the libraries."""

import hashlib
import sys
from pathlib import Path

VERSION = "0.1.0"  # trainer.__version__
# Not from trainer.__file__: a folder `trainer` in the current one, a checkout say, can pass for the package.
PACKAGE = Path(__file__).parents[1]
LIBRARIES = {"TensorFlow": ("tensorflow", "tensorflow-cpu"), "Keras": ("keras",), "Hydra": ("hydra-core",)}


def describe() -> str:
    """Returns e.g. trainer 0.1.0 (Python 3.11.2, TensorFlow 2.21.0, Keras 3.15.0, Hydra 1.3.8)."""
    libraries = [f"{name} {_installed(distributions)}" for name, distributions in LIBRARIES.items()]
    return f"trainer {VERSION} ({', '.join([f'Python {sys.version.split()[0]}', *libraries])})"


def code_hash() -> str:
    """Returns a digest of the trainer's own modules, wherever they are installed."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _installed(distributions: tuple[str, ...]) -> str:
    from importlib import metadata  # here, because every command imports this module, and few need that one

    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"
