"""A declarative trainer for distributed TensorFlow: exact parameter-server training from Hydra configs."""

from trainer.config.versions import VERSION as __version__

__all__ = ["__version__"]
