"""Checks that the libraries of tasks and models are installed, without importing them."""

from importlib.util import find_spec

from trainer.faults.problems import ConfigError, Problem

NEEDED = {"tensorflow": "tensorflow-cpu", "keras": "keras"}  # package -> the distribution that provides it


def require_tensorflow() -> None:
    """Raises a ConfigError that says what to install, if TensorFlow or Keras is not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if not missing:
        return
    from trainer.plan.checks.versions import SUPPORTED  # here: the usual start need not import packaging

    wheels = " ".join(f'"{NEEDED[name]}{SUPPORTED[name]}"' for name in missing)
    remedy = f"type python -m pip install {wheels}; with GPUs tensorflow[and-cuda] instead of tensorflow-cpu"
    raise ConfigError(
        [Problem(name, "not-available", "is not installed, and models need it", remedy) for name in missing[:1]]
    )
