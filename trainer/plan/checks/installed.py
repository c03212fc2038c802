"""Checks that the libraries which tasks and models need are there, without importing them."""

from importlib.util import find_spec

from trainer.faults.problems import ConfigError, Problem

NEEDED = {"tensorflow": "tensorflow-cpu", "keras": "keras"}  # packages, and the distribution that has each


def require_tensorflow() -> None:
    """Raises a ConfigError that says what to install, if TensorFlow or Keras is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return
    from trainer.plan.checks.versions import SUPPORTED  # imports packaging, which the usual start does not wait for

    wheels = " ".join(f'"{NEEDED[name]}{SUPPORTED[name]}"' for name in missing)
    remedy = f"type python -m pip install {wheels}; with GPUs tensorflow[and-cuda] instead of tensorflow-cpu"
    raise ConfigError([Problem(name, "is not installed, and models need it", remedy) for name in missing[:1]])
