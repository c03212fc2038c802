"""Every key of a run, Hydra, and every problem at once."""
