"""Submits a run as a job of Slurm, and follows it."""
