"""Starts tasks, follows them and restarts them: as processes, as containers."""
