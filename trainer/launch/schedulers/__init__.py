"""Renders a run for a scheduler that starts its tasks: Kubernetes, Docker Swarm."""
