"""Profiles a run: where the time of each step went."""
