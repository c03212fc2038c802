"""A plan as somebody else's input: what a task's container is, and a run as a Docker Compose file. Pure."""
