"""A declarative trainer for distributed TensorFlow: exact parameter-server training from Hydra configs."""
