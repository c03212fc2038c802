"""A declarative trainer for distributed TensorFlow: exact parameter-server training from Hydra configs."""

__version__ = "0.1.0"
