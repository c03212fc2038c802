"""Observes who is up, and where time and operations went."""
