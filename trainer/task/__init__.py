"""The life of one process."""
