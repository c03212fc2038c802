"""Tasks as containers of a Docker engine."""
