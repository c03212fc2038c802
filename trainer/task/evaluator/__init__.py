"""A task that scores every checkpoint."""
