"""Runs tasks as containers of a Docker engine."""
